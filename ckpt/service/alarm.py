"""Failures of saves: which are raised, when, and that all ranks raise them at the same call.

Ranks learn at different moments that a background save has failed. A rank that raised at once would
leave the others waiting for it, so a failure is noted and logged where it is seen, and raised only
where all ranks have collected the same saves: at a call of `step` that they agreed on, or after all
of them waited for the save anyway.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.commit.names import checked_count
from ckpt.errors import Failure, Fenced, InvalidArgument, InvalidState, SavesFailed, StoreRefused
from ckpt.service.agreement import StepAgreement
from ckpt.service.events import SaveFailed
from ckpt.service.training import Training

logger = logging.getLogger(__name__)

# Failures that every later save would meet again, until a person acts: these are raised.
LASTING = (InvalidState, InvalidArgument, Fenced, StoreRefused)

# Errors hold tracebacks, and those their frames: `failures` must not grow for ever.
FAILURES_KEPT_MAX = 100


@dataclass(frozen=True, slots=True)
class Alarm:
    """What happens after `after` failed saves in a row, and after each further one, when nothing
    was saved for `unsaved_seconds` either.

    `call` is called with the failures in a row, on every rank, and the training continues. Without
    it the same call of `step` raises SavesFailed on all ranks. Single failures are logged.

    `unsaved_seconds` counts from the last save that succeeded, or from the beginning, by the
    coordinator's clock. It keeps an outage of minutes from ending a training that saves often; with
    0, failures alone count.
    """

    after: int = 3
    unsaved_seconds: float = 1800.0
    call: Callable[[tuple[Failure, ...]], object] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "after", checked_count(self.after, f"Alarm(after={self.after!r})"))
        if not 0.0 <= self.unsaved_seconds < math.inf:
            raise ValueError(
                f"Alarm(unsaved_seconds={self.unsaved_seconds!r}): expected a number of at least 0"
            )


class FailedSaves:
    """The failures of one training's saves on this rank, and which of them were not raised yet."""

    def __init__(self, training: Training, alarm: Alarm, agreement: StepAgreement) -> None:
        self._training = training
        self._alarm = alarm
        self._agreement = agreement
        self.all: tuple[Failure, ...] = ()  # the newest, oldest first
        self._in_a_row: list[Failure] = []
        self._lasting: list[Exception] = []
        self._unreported = 0  # failures in a row that were neither raised nor passed to an alarm
        self._last_success_seconds = training.now_seconds()

    @property
    def newest_error(self) -> Exception | None:
        """Why the newest save failed; None where it did not."""
        return self._in_a_row[-1].error if self._in_a_row else None

    def note(self, step: int, error: Exception) -> None:
        """The save of `step` has failed. The coordinator proposes an alarm where one is due."""
        failure = Failure(step, error)
        self.all = (*self.all, failure)[-FAILURES_KEPT_MAX:]
        self._in_a_row.append(failure)
        self._unreported += 1
        self._training.notify(SaveFailed(step, error))
        is_lasting, outcome = isinstance(error, LASTING), "the training continues"
        if is_lasting:
            self._lasting.append(error)
            outcome = "this does not go away, so it is raised"
        if self._training.is_coordinator:
            text = "the save of step %d has failed, %d in a row (%s); %s: %s"
            fields = {"event": "failed", "step": step, "error": str(error)}
            said = step, len(self._in_a_row), type(error).__name__, outcome, error
            logger.error(text, *said, extra={"ckpt": fields})
            # Proposed, not raised: other ranks may not have seen this failure yet.
            if is_lasting or self._is_alarm_due():
                self._agreement.propose(alarm=True)

    def save_succeeded(self) -> None:
        """A checkpoint was committed: the row of failures ends."""
        self._in_a_row.clear()
        self._unreported = 0
        self._last_success_seconds = self._training.now_seconds()

    def restored(self) -> None:
        """The state is that of a checkpoint: the time without a save counts from here."""
        self._last_success_seconds = self._training.now_seconds()

    def raise_alarm(self) -> None:
        """Raise a lasting failure, or the alarm where that is due.

        Collective, and only where all ranks have collected the same saves.
        """
        if self._lasting:
            self._unreported = 0
            raise self._lasting.pop()
        # All ranks have collected the same saves: either all of them return here or none does, so
        # the broadcast below has all its partners.
        if not self._unreported or len(self._in_a_row) < self._alarm.after:
            return
        if not self._training.decided("alarm", self._is_alarm_due()):
            return
        self._unreported = 0
        failures = tuple(self._in_a_row)
        if self._alarm.call is None:
            raise SavesFailed(failures)
        self._alarm.call(failures)

    def raise_newest(self) -> None:
        """Raise the newest failure, unless it was raised before or passed to an alarm."""
        if self._unreported:
            # It is raised here, so no later call may raise it once more.
            self._lasting.clear()
            self._unreported = 0
            raise self._in_a_row[-1].error

    def _is_alarm_due(self) -> bool:
        unsaved_seconds = self._training.now_seconds() - self._last_success_seconds
        is_row = len(self._in_a_row) >= self._alarm.after
        return is_row and unsaved_seconds >= self._alarm.unsaved_seconds
