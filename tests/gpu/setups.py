"""Process groups of ranks on one device or on several; the CPU's own collectives beside them.

Each is for a group in which every rank has both: results of the device are compared with those that
the same ranks get on the CPU.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import sharding.engine.collectives
import sharding.fsdp
from tests.ranks import RanksFailed, run_ranks

__all__ = ["SETUPS", "Setup", "device_count", "nothing_is_left_out", "run", "why_not"]


class Setup(NamedTuple):
    """`ranks` on `device`: each on one of its own, or all on the first."""

    name: str
    device: str
    ranks: int
    shared: bool

    @property
    def backend(self) -> str:
        """What the collectives of both the CPU's and the device's tensors go over."""
        if self.device == "cpu":
            return "gloo"
        # The kit finds out where the device's own backend does not work.
        default = os.environ.get("SHARDPOINT_TEST_BACKEND")
        default = default or dist.get_default_backend_for_device(self.device)
        own = "gloo" if self.shared else default
        return f"cpu:gloo,{self.device}:{own}"


SETUPS = {
    "one": lambda device: Setup("one", device, 1, False),
    "sharing": lambda device: Setup("sharing", device, 4, True),
    "several": lambda device: Setup("several", device, _several(device_count(device)), False),
}
"""One rank; four that share one device over gloo; as many as there are devices, 2 or 4 of them."""


def _several(devices: int) -> int:
    return 4 if devices >= 4 else 2


def device_count(device: str) -> int:
    """How many devices of the kind there are; the CPU is one."""
    return 1 if device == "cpu" else int(torch.get_device_module(device).device_count())


def why_not(setup: Setup) -> str:
    """Why ranks cannot be set up like this here; empty where they can."""
    if setup.name == "several" and device_count(setup.device) < setup.ranks:
        return f"needs {setup.ranks} devices; there is {device_count(setup.device)}"
    if setup.shared and setup.device != "cpu":
        return _problem_of_gloo(setup)
    return ""


@functools.cache
def _problem_of_gloo(setup: Setup) -> str:
    try:
        run(setup, _collectives, setup.device)
    except RanksFailed as failed:
        why = next((str(error) for error in failed.errors.values()), str(failed))
        return f"gloo of this torch does not serve {setup.device} tensors: {why.splitlines()[0]}"
    return ""


def _collectives(device: str) -> None:
    """What the engine uses of a backend."""
    size = dist.get_world_size()
    own, everything = torch.ones(3, device=device), torch.empty(3 * size, device=device)
    dist.all_gather_into_tensor(everything, own)
    dist.reduce_scatter_tensor(own, everything)
    dist.all_reduce(own)
    dist.broadcast(own, src=0)
    assert own.tolist() == [float(size * size)] * 3


def run(
    setup: Setup,
    fn: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 240,
    forced: bool = True,
) -> Any:
    """Run `fn(*args)` on the ranks of the setup; returns all results. `forced`: one rank by itself
    gathers and reduces all the same.
    """
    # Groups that are made later meet there, too: it stays until all ranks have ended.
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        return run_ranks(
            setup.ranks,
            _in_setup,
            setup,
            fn,
            args,
            f"{folder}/both",
            timeout_seconds,
            forced,
            timeout_seconds=timeout_seconds,
        )


def _in_setup(
    setup: Setup,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    meet: str,
    seconds: float,
    forced: bool,
) -> Any:
    torch.manual_seed(0)
    if setup.backend != "gloo":
        _over_both_backends(setup, meet, seconds)
    if forced:
        nothing_is_left_out()
    return fn(*args)


def _over_both_backends(setup: Setup, meet: str, seconds: float) -> None:
    rank = dist.get_rank()
    module = torch.get_device_module(setup.device)
    module.set_device(0 if setup.shared else rank % device_count(setup.device))
    dist.destroy_process_group()
    dist.init_process_group(
        setup.backend,
        store=dist.FileStore(meet, setup.ranks),
        rank=rank,
        world_size=setup.ranks,
        timeout=timedelta(seconds=seconds),
    )
    dist.barrier()


def nothing_is_left_out() -> None:
    """One rank by itself gathers and reduces as many do, so that all streams and events run."""
    wrapper: Any = sharding.fsdp
    assert callable(wrapper.clamped)  # a new name there would force nothing
    wrapper.clamped = lambda strategy, groups: strategy
    collectives: Any = sharding.engine.collectives
    alone = collectives._Alone

    def of_one(group: Any) -> Any:
        is_real = isinstance(group, dist.ProcessGroup)
        return collectives._Native(group) if is_real else alone(group)

    collectives._Alone = of_one
