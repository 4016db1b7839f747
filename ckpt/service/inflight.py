"""The saves of one training: when one is due, the same on all ranks; their beginnings and outcomes,
in order; and a job's last save.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckpt.commit.names import is_finite, plain_float
from ckpt.errors import CheckpointError, SaveDropped
from ckpt.saving.staging import MIB, LentCopy
from ckpt.saving.task import SaveReport
from ckpt.service.agreement import Decision, StepAgreement
from ckpt.service.alarm import LASTING, FailedSaves
from ckpt.service.events import SaveSkipped, SaveSucceeded
from ckpt.service.keeping import Keeper
from ckpt.service.policies import Observation, SavePolicy, by_all, by_coordinator
from ckpt.service.preemption import LEAVING_SECONDS, plan_stop
from ckpt.service.target import Pending
from ckpt.service.training import Training, saved_seconds
from ckpt.service.watching import Watcher
from ckpt.state.flatten import nbytes_of

logger = logging.getLogger(__name__)

STOP_TRIES_MAX = 3  # last saves, where one fails and time is left


class SaveSchedule:
    """Decides at each call of `step` whether a save is due, and why.

    Ranks do not wait for each other: what follows from the step each rank decides by itself, what
    needs a clock the coordinator proposes, and all ranks do it at a later call that they agree on.
    """

    def __init__(self, policy: SavePolicy, training: Training, agreement: StepAgreement) -> None:
        self._by_all, self._by_coordinator = by_all(policy), by_coordinator(policy)
        self._training = training
        self._agreement = agreement
        self._decides = training.is_coordinator and bool(self._by_coordinator.policies)
        # Saves that were begun so far. All ranks begin the same ones, so equal numbers on two ranks
        # mean the same moment: a proposal that was made before another save began is out of date.
        self._saves_begun = 0
        self._proposed_at = -1
        self._signals: frozenset[int] = frozenset()
        self._last_save_seconds = training.now_seconds()

    def reasons(self, decision: Decision) -> tuple[str, ...]:
        """Why a save is due at this call of `step`; empty when none is."""
        observation = self._observe(decision)
        reasons = self._reasons(decision, observation)
        return (*reasons, *self._coordinators_reasons(observation)) if self._decides else reasons

    def reasons_at_exit(self, decision: Decision) -> tuple[str, ...]:
        """Why the end of the training needs a save. `decision` is what is left to do."""
        reasons = self._reasons(decision, self._observe(decision, closing=True))
        return (*reasons, "a signal") if decision.signals else reasons

    def _reasons(self, decision: Decision, observation: Observation) -> tuple[str, ...]:
        """Those of all ranks: the coordinator's, too, unless a save was begun since it proposed
        them.
        """
        agreed = decision.reasons if decision.valid_at == self._saves_begun else ()
        return (*self._by_all.reasons(observation), *agreed)

    def save_begun(self, now_seconds: float) -> None:
        """A save begins: what was requested until now is done by it."""
        self._saves_begun += 1
        self._signals = frozenset()
        self._last_save_seconds = now_seconds

    def restored(self) -> None:
        """The state is that of a checkpoint: intervals count from here."""
        self._last_save_seconds = self._training.now_seconds()

    def _observe(self, decision: Decision, *, closing: bool = False) -> Observation:
        # Signals add up until a save begins: `OnSignal() & EverySteps(100)` waits for both.
        if decision.signals:
            self._signals |= decision.signals
        progress, costs = self._training.progress, self._training.costs
        # At the end no step was done since the last call, and none is due a second time.
        steps = progress.step, progress.step if closing else progress.previous_step
        if not self._decides:  # what all ranks decide needs no clock
            return Observation(*steps, signals=self._signals, closing=closing)
        return Observation(
            *steps,
            now_seconds=self._training.now_seconds(),
            last_save_seconds=self._last_save_seconds,
            signals=self._signals,
            closing=closing,
            cost_seconds=costs.cost_seconds,
            persist_seconds=costs.persist_seconds,
        )

    def _coordinators_reasons(self, observation: Observation) -> tuple[str, ...]:
        """Reasons that need a clock. Other ranks do not have them yet, so where there are any the
        save is proposed, once, and made at a later call.
        """
        # Proposed already: the reasons hold until a save begins, and would be sent at each step.
        if self._proposed_at == self._saves_begun:
            return ()
        reasons = self._by_coordinator.reasons(observation)
        if reasons and self._training.world.size > 1:
            self._proposed_at = self._saves_begun
            self._agreement.propose(reasons=reasons, valid_at=self._saves_begun)
            return ()
        return reasons


class Saved(NamedTuple):
    """A checkpoint of this training: `seconds` from its beginning to its commit."""

    step: int
    attempt: str
    path: str
    nbytes: int
    seconds: float


class BegunSave(NamedTuple):
    """A save whose outcome was not collected; `call` is the call of `step` that began it."""

    step: int
    call: int
    pending: Pending
    began_seconds: float
    began_unix: float
    blocked_seconds: float


class SavesInFlight:
    """The saves of one training on this rank, from their beginning to their outcome."""

    def __init__(
        self,
        training: Training,
        schedule: SaveSchedule,
        failed: FailedSaves,
        keeper: Keeper,
        watcher: Watcher,
    ) -> None:
        self._training = training
        self._schedule = schedule
        self._failed = failed
        self._keeper = keeper
        self._watcher = watcher
        self._begun: list[BegunSave] = []
        self.last_saved: Saved | None = None  # the newest whose commit this rank has collected
        self._saved_call = 0

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of saves that are not over."""
        if not self._begun:
            return ()
        return tuple(save.step for save in self._begun if not save.pending.done())

    def slow(self, seconds: float) -> list[str]:
        """How far each unfinished save is that has taken longer than this. For any thread."""
        texts, now = [], time.time()
        # A copy: the thread that trains adds and removes saves meanwhile.
        for save in tuple(self._begun):
            took = now - save.began_unix
            if took > seconds and not save.pending.done():
                recorder = getattr(save.pending, "recorder", None)
                phase, nbytes = recorder.newest if recorder else ("", 0)
                what = f", in phase {phase!r}" + f" of {nbytes / MIB:.0f} MiB" * bool(nbytes)
                texts.append(f"save of step {save.step}: {took:.0f} s so far{what * bool(phase)}")
        return texts

    def failing(self) -> list[tuple[int, BaseException]]:
        """The saves that have failed and were not collected yet, and why. For any thread."""
        over = [(save.step, save.pending.failure()) for save in tuple(self._begun)]
        return [(step, error) for step, error in over if error is not None]

    @property
    def newest(self) -> Pending | None:
        """The newest save whose outcome was not collected."""
        return self._begun[-1].pending if self._begun else None

    def begin(
        self, metric: float | None, reasons: tuple[str, ...], copies: Sequence[LentCopy] = ()
    ) -> None:
        """Begin to save the state as the newest step. Collective. `copies` has the one that a near
        save makes of it, if any: it is used, or ended.

        Raises lasting failures, RankFailed, and the alarm where this failure makes it due; other
        failures are noted, the same on all ranks.
        """
        step = self._training.progress.step
        began_seconds, began_unix = self._training.now_seconds(), time.time()
        # Before it can fail: an interval counts from the try, or a store that is away would be
        # tried again at every step.
        self._schedule.save_begun(began_seconds)
        if self._training.is_coordinator:
            logger.info("saving step %d: %s", step, ", ".join(reasons))
        target, state = self._training.target, self._training.state
        for copy in copies:
            target = target.using(copy)
        is_used = False
        try:
            with self._watcher.phase(f"save of step {step}"):
                pending = target.start(state, step=step, metric=_finite(metric))
            # `using` gives a target of the caller's own back as it is: that one makes its own copy.
            is_used = target is not self._training.target
        except LASTING:
            # No alarm waits for more of them: every later save would meet the same.
            raise
        except (CheckpointError, OSError) as error:
            self._failed.note(step, error)
            self._raise_if_rank_lost()
            self._failed.raise_alarm()
            return
        finally:
            # Nobody else ends a copy that no save has taken over.
            for copy in () if is_used else copies:
                copy.end()
        blocked = self._training.now_seconds() - began_seconds
        call = self._training.progress.calls
        self._begun.append(BegunSave(step, call, pending, began_seconds, began_unix, blocked))

    def unsaved_calls(self) -> int:
        """Calls of `step` since the newest save that is committed or under way.

        The same on all ranks where all have collected the same saves.
        """
        newest = max([self._saved_call, *(save.call for save in self._begun)])
        return self._training.progress.calls - newest

    def restored(self) -> None:
        """The state is that of a checkpoint: nothing of it is unsaved."""
        self._saved_call = self._training.progress.calls

    def collect(self, *, wait: bool, deadline_seconds: float = math.inf) -> None:
        """Pass on the outcomes of saves that are over, of all of them when `wait`.

        Raises TimeoutError when one is not over at the deadline (of this rank's clock), RankFailed
        when a rank is gone.
        """
        while self._begun and (wait or self._begun[0].pending.done()):
            save = self._begun[0]
            left = deadline_seconds - self._training.now_seconds()
            outcome = _outcome(save.pending, None if math.isinf(left) else max(0.0, left))
            if isinstance(outcome, SaveReport):
                self._note_success(save, outcome)
            elif isinstance(outcome, SaveDropped):
                logger.info("%s", outcome)
                self._training.notify(SaveSkipped(save.step))
            else:
                self._failed.note(save.step, outcome)
            # Only now: until its outcome is noted, the save counts as under way.
            self._begun.pop(0)
            self._raise_if_rank_lost()

    def finish(self) -> None:
        """Wait for all saves. A store that is away is waited for some seconds at most, because the
        training stands still for it.
        """
        for save in self._begun:
            save.pending.hurry()  # gives up what has failed for some seconds
        self.collect(wait=True)

    def all_collected(self, deadline_seconds: float) -> bool:
        """Whether all saves are over on all ranks by then. Collective."""
        mine = b"over"
        try:
            self.collect(wait=True, deadline_seconds=deadline_seconds)
        except TimeoutError:
            # Answered, not raised: the other ranks wait in the round below.
            mine = b"in flight"
        answers = self._training.world.gather("collected", mine)
        return all(answer == b"over" for answer in answers)

    def save_last(self, metric: float | None, deadline_seconds: float) -> None:
        """Wait for the save in flight and make the last one, as far as the time before
        `deadline_seconds` allows, on the clock of this rank.

        Collective: every decision is the coordinator's, because clocks and measurements differ
        between ranks and a rank that saved alone would wait for the others until it is killed.
        Failures are logged: the job ends in any case, and the checkpoints before are untouched.
        """
        training = self._training
        plan = self._agreed_stop_plan(deadline_seconds)
        finished = self.all_collected(training.now_seconds() + plan["wait_seconds"])
        if finished and plan["save"] == "model first":
            self._save_model_first(deadline_seconds)
        # Where steps are unsaved although there was nothing to save, the save in flight failed.
        is_first = plan["save"] != "nothing"
        for _ in range(STOP_TRIES_MAX):
            if not finished or not self.unsaved_calls():
                break
            if not is_first:
                left = deadline_seconds - training.now_seconds() - LEAVING_SECONDS
                has_time = left > (training.costs.persist_seconds or 0.0)
                if not training.decided("again", has_time):  # all ranks try again, or none
                    break
            is_first = False
            try:
                self.begin(metric, ("preempted",))
            except CheckpointError as error:
                logger.error("no last save can be made: %s", error)
                break
            finished = self.all_collected(deadline_seconds)
        if not finished and training.is_coordinator:
            logger.error("the save in flight is not over at the end of the grace time")

    def _agreed_stop_plan(self, deadline_seconds: float) -> dict[str, Any]:
        """The coordinator's plan for the time that is left, on all ranks."""
        training, encoded = self._training, None
        if training.is_coordinator:
            now = training.now_seconds()
            plan = plan_stop(
                left_seconds=deadline_seconds - now,
                persist_seconds=training.costs.persist_seconds,
                in_flight_seconds=now - self._begun[0].began_seconds if self.steps else None,
                state_nbytes=nbytes_of(training.state, training.world),
                model_nbytes=nbytes_of(training.model(), training.world),
                steps_unsaved=self.unsaved_calls(),
            )
            logger.warning("preempted after step %d: %s", training.progress.step, plan)
            encoded = json.dumps(plan._asdict()).encode()
        agreed: dict[str, Any] = json.loads(training.world.broadcast("stop", encoded))
        return agreed

    def _save_model_first(self, deadline_seconds: float) -> None:
        training = self._training
        try:
            target = training.target.model_first()
            pending = target.start(training.model(), step=training.progress.step, metric=None)
            report = pending.result(max(0.0, deadline_seconds - training.now_seconds()))
            if training.is_coordinator:
                logger.warning("time is short: the model alone is safe in %s", report.path)
        except (CheckpointError, OSError, TimeoutError) as error:
            logger.error("the model alone could not be saved: %s", error)

    def _raise_if_rank_lost(self) -> None:
        """A training that has lost a rank cannot continue, whatever the alarm says."""
        if (failure := self._training.target.failure()) is not None:
            raise failure

    def _note_success(self, save: BegunSave, report: SaveReport) -> None:
        seconds = saved_seconds(report, save.began_unix, save.blocked_seconds)
        self.last_saved = Saved(report.step, report.attempt, report.path, report.nbytes, seconds)
        self._saved_call = save.call
        self._failed.save_succeeded()
        self._training.costs.saved(blocked_seconds=save.blocked_seconds, persist_seconds=seconds)
        self._keeper.after_commit()
        # Steps are held back after the call, so what they waited is no part of its time.
        blocked = save.blocked_seconds + report.counters.get("step_wait_seconds", 0.0)
        self._training.notify(SaveSucceeded(report, seconds, blocked))


def _outcome(pending: Pending, timeout_seconds: float | None) -> SaveReport | Exception:
    """The report or the error of a save. Raises TimeoutError when it is not over by then."""
    try:
        return pending.result(timeout_seconds)
    except TimeoutError:
        if not pending.done():
            raise
    except Exception as error:
        return error
    # It was over just after the time was up, or has failed by a TimeoutError of its own.
    try:
        return pending.result()
    except Exception as error:
        return error


def _finite(metric: Any) -> float | None:
    """A metric as the log takes it: a training that diverges is still saved, without one."""
    if metric is None:
        return None
    number = plain_float(metric)
    if is_finite(number):
        return float(number)
    logger.warning("the metric is %s; it is saved as none", metric)
    return None
