"""Do all ranks run their units in the same order? Looked at where the user asks for details.

With `TORCH_DISTRIBUTED_DEBUG=DETAIL`, in training: ranks compare the unit of every forward, and
raise when they differ; their collectives would wait for each other. An iteration in which all ranks
differ from the first one is warned about, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from sharding.engine.collectives import Comm

__all__ = ["OrderCheck"]

_BACKWARD = -1
"""Stands for the backward among the numbers of units."""


class OrderCheck:
    """The order of one model's forwards. `names` are those of units by number, `comms` are the
    groups that all ranks of the model are joined by: shard, and replicate if there is one.
    """

    def __init__(self, comms: Sequence[Comm], names: Sequence[str]) -> None:
        self._comms = tuple(comms)
        self._rank = comms[0].global_ranks[comms[0].rank]
        self._names = names
        self._first: list[int] = []
        self._position = 0
        self._is_first = True
        self._has_warned = False

    def record(self, unit: int) -> None:
        """A forward of the unit starts. Collective.

        Raises RuntimeError, on all ranks, when ranks start different units.
        """
        self._compare(unit, self._names[unit])
        if self._is_first:
            self._first.append(unit)
            self._position += 1
            return
        expected = self._first[self._position] if self._position < len(self._first) else None
        self._position += 1
        if expected != unit and not self._has_warned:
            self._has_warned = True
            wanted = "no further unit" if expected is None else self._names[expected]
            warnings.warn(
                "Forward order differs from that of the first iteration on rank "
                f"{self._rank}: {self._names[unit]} instead of {wanted}; prefetching goes by the "
                "first iteration",
                stacklevel=2,
            )

    def begin_backward(self) -> None:
        """The backward starts. Collective: a rank with fewer forwards than others comes here while
        these start another unit, and would leave them waiting.

        Raises RuntimeError as `record` does.
        """
        if self._position:
            self._compare(_BACKWARD, "the backward")

    def _compare(self, what: int, name: str) -> None:
        # First inside the shard group, then across replicas: all ranks end with the reports of all,
        # so that all of them raise.
        everyone = [(self._rank, what, name)]
        for comm in self._comms:
            everyone = [one for part in comm.gather_objects(everyone) for one in part]
        if any(number != what for _, number, _ in everyone):
            reports = "; ".join(f"rank {rank}: {theirs}" for rank, _, theirs in sorted(everyone))
            position, iteration = self._position, "the first" if self._is_first else "a later"
            self._position, self._first = 0, [] if self._is_first else self._first
            raise RuntimeError(
                f"Forward order differs across ranks: at forward {position} of {iteration} "
                f"iteration they run different units ({reports}); all ranks must run them in one "
                "order"
            )

    def end_iteration(self) -> None:
        """A backward has ended."""
        self._is_first = self._is_first and not self._first
        self._position = 0
