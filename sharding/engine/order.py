"""Do all ranks run their units in the same order? Looked at where the user asks for details.

With `TORCH_DISTRIBUTED_DEBUG=DETAIL`, in training: during the first iteration ranks compare the
unit of every forward, and raise when they differ. Later iterations are compared with the first one
on each rank alone; the first that differs is warned about, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from sharding.engine.collectives import Comm

__all__ = ["OrderCheck"]


class OrderCheck:
    """The order of one model's forwards. `name_of` describes a unit by its number."""

    def __init__(self, comm: Comm, name_of: Callable[[int], str]) -> None:
        self._comm = comm
        self._name_of = name_of
        self._first: list[int] = []
        self._at = 0
        self._is_first = True
        self._has_warned = False

    def record(self, unit: int) -> None:
        """A forward of the unit starts. Collective in the first iteration.

        Raises RuntimeError, on all ranks, when ranks start different units.
        """
        if self._is_first:
            everyone = self._comm.gather_objects((unit, self._name_of(unit)))
            if any(number != unit for number, _ in everyone):
                told = "; ".join(
                    f"rank {rank}: {name}"
                    for rank, (_, name) in zip(self._comm.global_ranks, everyone, strict=True)
                )
                raise RuntimeError(
                    f"ranks run different units at forward {len(self._first)} of the first "
                    f"iteration ({told}); all ranks must run them in one order"
                )
            self._first.append(unit)
            return
        expected = self._first[self._at] if self._at < len(self._first) else None
        self._at += 1
        if expected != unit and not self._has_warned:
            self._has_warned = True
            wanted = "no further unit" if expected is None else self._name_of(expected)
            warnings.warn(
                f"the order of forwards has changed: {self._name_of(unit)} instead of {wanted}; "
                "prefetching goes by the first iteration, and all ranks must change alike",
                stacklevel=2,
            )

    def end_iteration(self) -> None:
        """A backward has ended."""
        self._is_first = self._is_first and not self._first
        self._at = 0
