"""What a Checkpointer tells of its saves and restores as they end, to whoever asked to hear it.

    def alert(event):
        if isinstance(event, SaveFailed):
            page_somebody(event.step, event.error)

    ckpt.Checkpointer(url, state, observers=[alert, SaveMetrics()])

Every rank tells its own observers, in the thread that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckpt.saving import SaveReport
from ckpt.service.restoring import RestoreReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveSucceeded:
    """A checkpoint exists. `seconds` from its begin to its commit; `blocked_seconds` is how long
    training stood still for it on this rank.
    """

    report: SaveReport
    seconds: float
    blocked_seconds: float


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A save came to nothing."""

    step: int
    error: Exception


@dataclass(frozen=True, slots=True)
class SaveSkipped:
    """A save was dropped, or not begun, because another one was in flight."""

    step: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The state was filled from a checkpoint; `seconds` is how long that took."""

    report: RestoreReport
    seconds: float


SaveEvent: TypeAlias = SaveSucceeded | SaveFailed | SaveSkipped | Restored
Observer: TypeAlias = Callable[[SaveEvent], object]


def tell(observers: Sequence[Observer], event: SaveEvent) -> None:
    """Call every observer; what one raises is logged, because a training is not to end by it."""
    for observer in observers:
        try:
            observer(event)
        except Exception:
            logger.exception("an observer of saves has failed on %s", type(event).__name__)
