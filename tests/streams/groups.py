"""Collectives of a process group that sends nothing: each group is an agent of its own.

As NCCL does: the group's stream waits for the current one, works, and `Work.wait` lets the stream
that is current then wait for it. Until then the work holds on to its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.streams.clocks import Agent
from tests.streams.device import using
from tests.streams.watching import Watching, tensors_in

__all__ = ["agent_of_name", "simulated_groups", "world"]


class Work(distributed_c10d.Work):
    """A collective under way."""

    def __init__(self, agent: Agent, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._moment = agent.moment()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits for the collective."""
        using().current().agent.learn(self._moment)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        """Whether the host knows that it is over."""
        return all(using().host.has_seen(agent, time) for agent, time in self._moment.items())

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()


def agent_of_name(name: str) -> Agent:
    """The agent of the group with that name."""
    return using().groups.setdefault(name, Agent(f"group {name}"))


# By name of the method: which of its arguments are read, and which are written.
_METHODS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "allreduce": ((0,), (0,)),
    "allreduce_coalesced": ((0,), (0,)),
    "allgather": ((1,), (0,)),
    "_allgather_base": ((1,), (0,)),
    "all_gather_single": ((1,), (0,)),
    "allgather_into_tensor_coalesced": ((1,), (0,)),
    "reduce_scatter": ((1,), (0,)),
    "_reduce_scatter_base": ((1,), (0,)),
    "reduce_scatter_single": ((1,), (0,)),
    "reduce_scatter_tensor_coalesced": ((1,), (0,)),
    "broadcast": ((0,), (0,)),
    "barrier": ((), ()),
    "alltoall_base": ((1,), (0,)),
    "alltoall": ((1,), (0,)),
    "send": ((0,), ()),
    "recv": ((), (0,)),
}


def _method(watching: Watching, name: str) -> Any:
    reads, writes = _METHODS[name]

    def collective(group: Any, *args: Any, **kwargs: Any) -> Work:
        agent = agent_of_name(group.group_name)
        values = [*args, *kwargs.values()]
        read = [one for position in reads for one in tensors_in(values[position])]
        written = [one for position in writes for one in tensors_in(values[position])]
        watching.collective(agent, name, read, written)
        return Work(agent, [*read, *written])

    return collective


def _all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
    values[:] = [value] * len(values)  # all ranks say the same


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


@contextmanager
def simulated_groups(watching: Watching) -> Iterator[None]:
    """Collectives inside are work of agents."""
    group: Any = dist.ProcessGroup
    module: Any = distributed_c10d
    names = [name for name in _METHODS if hasattr(group, name)]
    kept = {name: getattr(group, name) for name in names}
    functions = {
        "all_gather_object": _all_gather_object,
        "broadcast_object_list": _nothing,
    }
    kept_functions = {name: getattr(module, name) for name in functions}
    for name in names:
        setattr(group, name, _method(watching, name))
    for name, function in functions.items():
        setattr(module, name, function)
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(group, name, method)
        for name, function in kept_functions.items():
            setattr(module, name, function)
            setattr(dist, name, function)


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[None]:
    """This process is that rank of so many; the others are not there."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
