"""The states of the random number generators of one process, as a `PerRank` part of a state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ckpt.layout.memory import accelerator
from ckpt.state.types import OnReshard, PerRank


def rng_state(on_reshard: OnReshard | None = None) -> PerRank:
    """Put this into a state to save each rank's random states, and to set them again on load.

    Covers Python's `random`, numpy's global generator, torch on the CPU and on all devices of the
    accelerator (CUDA, XPU, NPU, MPS, any that `torch.accelerator` knows). On another number of
    ranks a load fails unless `on_reshard(all_states, rank, world_size)` returns what this rank
    shall use: one of `all_states`, say.
    """
    return PerRank(RandomStates(), on_reshard)


class RandomStates:
    """Reads and sets the process's generators by `state_dict()` and `load_state_dict()`."""

    def state_dict(self) -> dict[str, Any]:
        """The present states as values; reading them draws nothing."""
        version, words, gauss = random.getstate()
        generator = np.random.get_state(legacy=False)
        assert isinstance(generator, dict)  # a tuple with `legacy=True`, as numpy's types have it
        return {
            "python": (version, words, gauss),
            "numpy": {
                "bit_generator": str(generator["bit_generator"]),
                # Bytes in one order: arrays are no values, and the next machine may be another.
                "key": generator["state"]["key"].astype("<u4").tobytes(),
                "pos": int(generator["state"]["pos"]),
                "has_gauss": int(generator["has_gauss"]),
                "gauss": float(generator["gauss"]),
            },
            "torch": _bytes_of(torch.get_rng_state()),
            **_accelerator_states(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators; of devices, those that both processes have, of the same kind."""
        random.setstate(state["python"])
        saved = state["numpy"]
        key = np.frombuffer(saved["key"], dtype="<u4").astype(np.uint32)
        np.random.set_state({**saved, "state": {"key": key, "pos": saved["pos"]}})
        torch.set_rng_state(_tensor_of(state["torch"]))
        kind, module = _accelerator()
        # A list for CUDA is there on every machine, and says nothing where it is empty. One by one:
        # the job that saved may have had another number of devices.
        for device, saved in zip(range(module.device_count()), state.get(kind, []), strict=False):
            module.set_rng_state(_tensor_of(saved), torch.device(kind, device))


def _accelerator() -> tuple[str, Any]:
    """The type of this machine's accelerator and torch's module for it; CUDA's without any."""
    device = accelerator()
    kind = "cuda" if device is None else device.type
    return kind, torch.get_device_module(kind)


def _accelerator_states() -> dict[str, list[bytes]]:
    """Of each device of this machine's accelerator, by the accelerator's type."""
    kind, module = _accelerator()
    # A process that never touched the device has nothing to save, and must not be made to start it.
    # MPS has no such question.
    is_started = getattr(module, "is_initialized", lambda: True)
    devices = [torch.device(kind, index) for index in range(module.device_count() * is_started())]
    # Checkpoints have always had a list for CUDA, empty or not.
    return {"cuda": [], kind: [_bytes_of(module.get_rng_state(device)) for device in devices]}


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor_of(state: bytes) -> torch.Tensor:
    # A copy: torch warns of tensors over memory that may not be written to.
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
