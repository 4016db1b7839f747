"""Do all ranks run their units in the same order? Looked at where the user asks for details.

With `TORCH_DISTRIBUTED_DEBUG=DETAIL`, in training: during the first iteration ranks compare the
unit of every forward, and raise when they differ. Later iterations are compared with the first one
on each rank alone; the first that differs is warned about, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from sharding.engine.collectives import Comm

__all__ = ["OrderCheck"]

_BACKWARD = -1
"""Stands for the backward among the numbers of units."""


class OrderCheck:
    """The order of one model's forwards. `name_of` describes a unit by its number, `comms` are the
    groups that all ranks of the model are joined by: shard, and replicate if there is one.
    """

    def __init__(self, comms: Sequence[Comm], name_of: Callable[[int], str]) -> None:
        self._comms = tuple(comms)
        self._name_of = name_of
        self._first: list[int] = []
        self._position = 0
        self._is_first = True
        self._has_warned = False

    def record(self, unit: int) -> None:
        """A forward of the unit starts. Collective in the first iteration.

        Raises RuntimeError, on all ranks, when ranks start different units.
        """
        if self._is_first:
            self._compare(unit, self._name_of(unit))
            self._first.append(unit)
            return
        expected = self._first[self._position] if self._position < len(self._first) else None
        self._position += 1
        if expected != unit and not self._has_warned:
            self._has_warned = True
            wanted = "no further unit" if expected is None else self._name_of(expected)
            warnings.warn(
                f"the order of forwards has changed: {self._name_of(unit)} instead of {wanted}; "
                "prefetching goes by the first iteration, and all ranks must change alike",
                stacklevel=2,
            )

    def begin_backward(self) -> None:
        """The backward starts. Collective in the first iteration: a rank with fewer forwards than
        others comes here while these start another unit, and would leave them waiting.

        Raises RuntimeError as `record` does.
        """
        if self._is_first and self._first:
            self._compare(_BACKWARD, "the backward")

    def _compare(self, what: int, name: str) -> None:
        # First inside the shard group, then across replicas: all ranks end with the reports of all,
        # so that all of them raise.
        everyone = [(self._comms[0].global_ranks[self._comms[0].rank], what, name)]
        for comm in self._comms:
            everyone = [one for part in comm.gather_objects(everyone) for one in part]
        if any(number != what for _, number, _ in everyone):
            reports = "; ".join(f"rank {rank}: {theirs}" for rank, _, theirs in sorted(everyone))
            raise RuntimeError(
                f"ranks run different units at forward {len(self._first)} of the first iteration "
                f"({reports}); all ranks must run them in one order"
            )

    def end_iteration(self) -> None:
        """A backward has ended."""
        self._is_first = self._is_first and not self._first
        self._position = 0
