"""The states of the random number generators of one process, as a `PerRank` part of a state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ckpt.state.types import OnReshard, PerRank


def rng_state(on_reshard: OnReshard | None = None) -> PerRank:
    """Put this into a state to save each rank's random states, and to set them again on load.

    Covers Python's `random`, numpy's global generator, torch on CPU and on all CUDA devices. On
    another number of ranks a load fails unless `on_reshard(all_states, rank, world_size)` returns
    what this rank shall use: one of `all_states`, say.
    """
    return PerRank(RandomStates(), on_reshard)


class RandomStates:
    """Reads and sets the process's generators by `state_dict()` and `load_state_dict()`."""

    def state_dict(self) -> dict[str, Any]:
        """The present states as values; reading them draws nothing."""
        version, words, gauss = random.getstate()
        generator = np.random.get_state(legacy=False)
        assert isinstance(generator, dict)
        return {
            "python": (version, words, gauss),
            "numpy": {
                "bit_generator": str(generator["bit_generator"]),
                "key": generator["state"]["key"].astype("<u4").tobytes(),
                "pos": int(generator["state"]["pos"]),
                "has_gauss": int(generator["has_gauss"]),
                "gauss": float(generator["gauss"]),
            },
            "torch": _bytes_of(torch.get_rng_state()),
            "cuda": [_bytes_of(state) for state in _cuda_states()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators. CUDA states are set on the devices that both processes have."""
        random.setstate(state["python"])
        numpy_state = dict(state["numpy"])
        np.random.set_state(
            {
                "bit_generator": numpy_state["bit_generator"],
                "state": {
                    "key": np.frombuffer(numpy_state["key"], dtype="<u4").astype(np.uint32),
                    "pos": numpy_state["pos"],
                },
                "has_gauss": numpy_state["has_gauss"],
                "gauss": numpy_state["gauss"],
            }
        )
        torch.set_rng_state(_tensor_of(state["torch"]))
        if torch.cuda.is_available():
            for device, saved in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
                torch.cuda.set_rng_state(_tensor_of(saved), device)


def _cuda_states() -> list[torch.Tensor]:
    # A process that never touched CUDA has nothing to save, and must not be made to start it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return list(torch.cuda.get_rng_state_all())
    return []


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor_of(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
