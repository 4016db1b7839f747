"""Checkpoints as a service to a training loop: saves in the background when a policy says so, keeps
what a rule keeps, survives failures and preemption, and resumes from what is whole.

    with ckpt.Checkpointer(url, state, save=EverySteps(1000), keep=KeepLatest(3)) as checkpointer:
        checkpointer.restore()
        for step in range(state["progress"].step + 1, 100_001):
            train_one_step()
            checkpointer.step(step)

Note "the same turn": ranks learn at different moments that a background save is over. So what a
rank sees by itself it only logs; what changes the path of the training (an alarm, a stop, a save)
happens at a call that all ranks agreed on, or where all of them wait for the save anyway.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from ckpt.commit.records import STEP_MAX
from ckpt.errors import (
    CheckpointError,
    Fenced,
    Forked,
    InvalidState,
    RankFailed,
    SaveDropped,
    StoreRefused,
)
from ckpt.saving.report import SaveReport
from ckpt.service.agreement import Council, Decision, Pace
from ckpt.service.events import (
    Observer,
    Restored,
    SaveFailed,
    SaveSkipped,
    SaveSucceeded,
    log_restored,
    tell,
)
from ckpt.service.policies import (
    AtExit,
    CostMeter,
    EverySeconds,
    Observation,
    OnPreemption,
    OnSignal,
    SavePolicy,
    by_all,
    by_lead,
    preemption_of,
)
from ckpt.service.preemption import LEAVING_SECONDS, Preempted, Signals, StopFacts, plan_stop
from ckpt.service.restore import RestoreReport, restore_latest
from ckpt.service.retention import (
    UNMEASURED,
    KeepAll,
    KeepRule,
    RetentionPlan,
    candidates_of,
    carry_out,
    plan_retention,
)
from ckpt.service.target import Pending, Target, UrlTarget
from ckpt.service.watching import Watcher
from ckpt.state.flatten import nbytes_of
from ckpt.state.walk import walk
from storage import StorageError

logger = logging.getLogger(__name__)

SAVE_DEFAULT: SavePolicy = EverySeconds(1800.0) | OnSignal() | OnPreemption() | AtExit()

# Failures that a later save would meet again: somebody has to act, so they are raised.
LASTING = (InvalidState, Fenced, StoreRefused)


ABANDON_SECONDS = 60.0  # a training that failed waits so long for a save in flight: a guess
LAST_WORDS_SECONDS = 1.0  # for a save in flight to notice a death that was noticed elsewhere
STOP_TRIES_MAX = 3  # last saves, where one fails and time is left


class SavesFailed(CheckpointError):
    """So many saves in a row have failed that the training should not go on unnoticed."""

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        told = "".join(f"\n  - step {one.step}: {one.error}" for one in failures[-5:])
        super().__init__(f"{len(failures)} saves in a row have failed; the newest ones:{told}")
        self.failures = failures


class Saved(NamedTuple):
    """A checkpoint of this training: `seconds` from its begin to its commit."""

    step: int
    attempt: str
    path: str
    nbytes: int
    seconds: float


class Failure(NamedTuple):
    """A save that came to nothing."""

    step: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Alarm:
    """What happens after `after` failed saves in a row, and after each further one, when nothing
    was saved for `unsaved_seconds` either.

    `call` gets the failures in a row, on every rank, and the training goes on; without it
    SavesFailed is raised on all ranks by the same call of `step`. Single failures are logged. The
    time counts from the last save that succeeded, or from the begin; the lead's clock decides. It
    keeps a training that saves often from ending by an outage of minutes; 0 counts failures alone.
    """

    after: int = 3
    unsaved_seconds: float = 1800.0
    call: Callable[[tuple[Failure, ...]], object] | None = None

    def __post_init__(self) -> None:
        if type(self.after) is not int or self.after < 1:
            raise ValueError(f"Alarm(after={self.after!r}): expected an int of at least 1")
        if not 0.0 <= self.unsaved_seconds < math.inf:
            raise ValueError(
                f"Alarm(unsaved_seconds={self.unsaved_seconds!r}): expected a number of at least 0"
            )

    def is_due(self, failures: int, unsaved_seconds: float) -> bool:
        """Whether somebody must hear of so many failures in a row, and so long without a save."""
        return failures >= self.after and unsaved_seconds >= self.unsaved_seconds


class _InFlight(NamedTuple):
    """A save whose result was not collected; `turn` is the call of `step` that began it."""

    step: int
    turn: int
    pending: Pending
    began_seconds: float
    began_unix: float
    blocked_seconds: float


class Checkpointer:
    """See the top of the file. All ranks make it and call its methods in the same order.

    `target` is a url (or a `Target`), `state` what `ckpt.save` takes, `save` when to save, `keep`
    which checkpoints stay. While a save is in flight, the next one that is due waits for it, or is
    skipped with `when_busy="skip"`. A save waits for a store that is away until the next one has to
    wait for it (with "skip": none does), for `retry_seconds_max` at most, 10 minutes by default.
    `saving` are further arguments of `ckpt.async_save`: snapshot, replicas, dedup, user,
    host_bytes_max, retry_seconds_max, io. From here to `close`, signals that `save` names are
    caught; see `ckpt.service.preemption`.

    `observers` are told how saves and restores end; see `ckpt.service.events`. With `telemetry`,
    how every save went is kept beside the checkpoint, for `ckpt report`.

    Single failures of saves are logged and the training goes on; `alarm` says when it should not.
    InvalidState, Fenced and StoreRefused are raised at once, because they do not go away; after a
    rank was found dead, the next call raises RankFailed naming it.

    A rank that is silent, or makes no step while others do, is logged and told to the observers of
    all others within 15 s, and withdrawn when it is heard again. That alone is no error; with
    `silence_seconds_max`, `step` raises RankFailed after a silence of so many seconds.
    """

    def __init__(
        self,
        target: str | Target,
        state: Any,
        *,
        save: SavePolicy = SAVE_DEFAULT,
        keep: KeepRule | None = None,
        alarm: Alarm | None = None,
        when_busy: Literal["wait", "skip"] = "wait",
        pace: Pace | None = None,
        observers: Sequence[Observer] = (),
        silence_seconds_max: float | None = None,
        telemetry: bool = True,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        unsafe_single_writer: bool = False,
        **saving: Any,
    ) -> None:
        if when_busy not in ("wait", "skip"):
            raise ValueError(f"when_busy={when_busy!r}; expected 'wait' or 'skip'")
        saving = {"telemetry": telemetry, **saving}
        if isinstance(target, str):
            target = UrlTarget(target, process_group, storage_options, unsafe_single_writer, saving)
        self._target = target
        self._state = state
        self._policy = save
        self._by_all, self._by_lead = by_all(save), by_lead(save)
        self._preemption = preemption_of(save)
        self._alarm = alarm or Alarm()
        self._observers = tuple(observers)
        self._skips = when_busy == "skip"
        self._clock = time.monotonic
        self._world = target.world()
        self._signals = Signals(save)
        self._council = Council(self._world.duplicate(), self._signals, pace=pace)
        self._keeper = _Keeper(target, keep or KeepAll(), is_lead=self._world.rank == 0)
        self._meter = CostMeter()
        self._watcher = Watcher(
            self._world,
            self._observers,
            self._council.fail,
            silence_seconds_max=silence_seconds_max,
            step_seconds=lambda: self._meter.step_seconds,
        )
        self._in_flight: list[_InFlight] = []
        self._saved: list[Saved] = []
        self._failures: list[Failure] = []
        self._in_a_row: list[Failure] = []
        self._lasting: list[Exception] = []
        self._unheard = 0  # failures in a row that the alarm has not told of
        self._step = self._previous = 0
        self._turns = self._saved_turn = 0
        self._begun = 0
        self._asked_at = -1
        self._heard: frozenset[int] = frozenset()
        self._last_save_seconds = self._left_seconds = self._good_seconds = self._clock()
        self._was_saving = False
        self._is_closed = False
        self._pid = os.getpid()
        self._signals.install()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed and os.getpid() == self._pid:
            self._abandon(error)

    # what a training team wants to know

    @property
    def last_saved(self) -> Saved | None:
        """The newest checkpoint that this process has committed, as far as this rank has heard."""
        return self._saved[-1] if self._saved else None

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The steps of saves that are under way."""
        return tuple(one.step for one in self._in_flight if not one.pending.done())

    @property
    def failures(self) -> tuple[Failure, ...]:
        """All saves of this process that failed, oldest first, as far as this rank has heard."""
        return tuple(self._failures)

    @property
    def is_preempted(self) -> bool:
        """Whether this process was told to end: `step` will raise Preempted within a few calls."""
        return self._signals.must_end

    @property
    def costs(self) -> CostMeter:
        """What saves cost this training, as this rank has measured it."""
        return self._meter

    # the loop

    def restore(self, step: int | None = None, attempt: str = "") -> RestoreReport | None:
        """Fill the state from the newest checkpoint that is whole, or the newest of `step`, or from
        `attempt`.

        Damaged ones are passed over, and told in the report and the log. Imports and copies in
        another layout are restored only by their attempt, or where there is nothing else. Going
        back by `step` or `attempt` begins a new line with the next save, and that one is resumed
        the next time (see `ckpt.commit.lines`). None when nothing was saved yet. All ranks restore
        the same one.

        Raises NoCheckpoint when there are some and none is whole, Mismatch when the state is
        another one, LoadInterrupted when the store fails: going back further would lose work that
        is still there.
        """
        self._check_open()
        self._collect(wait=True)
        began_seconds = self._clock()
        with self._watcher.phase("restore"):
            report = restore_latest(
                self._state, self._target, self._world, step=step, attempt=attempt
            )
        if report is not None:
            self._step = self._previous = report.step
            seconds = self._clock() - began_seconds
            if self._world.rank == 0:
                log_restored(report, seconds)
            tell(self._observers, Restored(report, seconds))
        self._saved_turn = self._turns
        self._last_save_seconds = self._left_seconds = self._good_seconds = self._clock()
        return report

    def step(self, step: int, metric: float | None = None) -> bool:
        """Step `step` is done and the state is as it should be saved; whether a save was begun.

        `metric` is how good the state is, for `KeepBest`; the lead's counts. Raises Preempted (a
        SystemExit) when the job was told to end, after the last save; SavesFailed and lasting
        failures of saves, on all ranks at the same step; RankFailed when a rank was found dead.
        """
        self._check_open()
        step = _whole_number(step)
        now = self._clock()
        self._meter.step(now - self._left_seconds, saving=self._was_saving or bool(self.in_flight))
        self._previous, self._step = self._step, step
        self._turns += 1
        self._watcher.called(step)
        try:
            return self._turn(metric)
        finally:
            self._was_saving = bool(self.in_flight)
            self._left_seconds = self._clock()

    def save_now(self, metric: float | None = None) -> Pending:
        """Begin to save the state as it is now, as the newest step that was done.

        Its `result()` waits for the commit, and raises the save's own error.
        """
        self._check_open()
        self._hurry()
        self._collect(wait=True)
        self._begin(self._step, metric, ("save_now",))
        if not self._in_flight:
            raise self._in_a_row[-1].error
        return self._in_flight[-1].pending

    def wait(self) -> Saved | None:
        """Wait for what is in flight, and for retention; the newest checkpoint of this process.

        Raises the error of the newest save if that failed and nobody was told.
        """
        self._check_open()
        self._collect(wait=True)
        self._keeper.wait()
        self._raise_newest_failure()
        return self.last_saved

    def retention_plan(self) -> RetentionPlan | None:
        """What would be kept and retired now, and why; nothing is done.

        None on other ranks than the lead, and before the first save of this process.
        """
        return self._keeper.plan()

    def close(self) -> None:
        """Make a last save if the policy wants one, wait for everything, and let signals be again.

        Waits until all ranks have come here. Raises the error of the newest save if that failed and
        nobody was told. May be repeated.
        """
        if self._is_closed or os.getpid() != self._pid:
            return  # in a forked child there is nothing of its own to end
        try:
            decision = self._council.close() or Decision(0)
            self._collect(wait=True)
            seen = self._seen(decision, closing=True)
            reasons = (*self._by_all.reasons(seen), *self._valid_reasons(decision))
            if decision.signals:
                reasons = (*reasons, "a signal")
            if reasons and self._unsaved():
                self._begin(self._step, None, reasons)
                self._collect(wait=True)
            self._keeper.wait()
            self._say_goodbye()
        finally:
            self._leave()
        self._raise_newest_failure()

    # one call of step

    def _turn(self, metric: float | None) -> bool:
        decision = self._next_decision()
        if self._preemption and decision.signals & set(self._preemption.signals):
            self._stop(metric, decision)
        if decision.alarm:
            self._hurry()
            self._collect(wait=True)
            self._raise_alarm()
        else:
            self._collect(wait=False)
        seen = self._seen(decision)
        reasons = (*self._by_all.reasons(seen), *self._valid_reasons(decision))
        if self._world.rank == 0:
            reasons = (*reasons, *self._lead_wants(seen))
        if not reasons or (self._skips and self._is_busy()):
            return False
        self._hurry()
        self._collect(wait=True)
        self._raise_alarm()
        self._begin(self._step, metric, reasons)
        return True

    def _is_busy(self) -> bool:
        """Whether a save is in flight, on all ranks as the lead sees it."""
        mine = None
        if self._world.rank == 0:
            mine = b"busy" if self.in_flight else b""
        busy = bool(self._world.broadcast("busy", mine))
        if busy:
            tell(self._observers, SaveSkipped(self._step))
            if self._world.rank == 0:
                logger.info("no save of step %d: another one is in flight", self._step)
        return busy

    def _next_decision(self) -> Decision:
        try:
            return self._council.turn() or Decision(0)
        except RankFailed:
            # A save that the rank died in knows better in which phase that was, and raises it.
            with contextlib.suppress(TimeoutError):
                self._collect(wait=True, deadline_seconds=self._clock() + LAST_WORDS_SECONDS)
            raise

    def _seen(self, decision: Decision, *, closing: bool = False) -> Observation:
        self._heard |= decision.signals
        return Observation(
            step=self._step,
            previous_step=self._step if closing else self._previous,
            now_seconds=self._clock(),
            last_save_seconds=self._last_save_seconds,
            signals=self._heard,
            closing=closing,
            cost_seconds=self._meter.cost_seconds,
            persist_seconds=self._meter.persist_seconds,
        )

    def _lead_wants(self, seen: Observation) -> tuple[str, ...]:
        """What only the lead knows: alone it is done at once, else all ranks hear of it."""
        if self._asked_at == self._begun:
            return ()
        wants = self._by_lead.reasons(seen)
        if wants and self._world.size > 1:
            self._asked_at = self._begun
            self._council.ask(reasons=wants, valid_at=self._begun)
            return ()
        return wants

    def _valid_reasons(self, decision: Decision) -> tuple[str, ...]:
        """The lead's reasons, unless a save was begun since it gave them."""
        return decision.reasons if decision.valid_at == self._begun else ()

    def _begin(self, step: int, metric: float | None, reasons: tuple[str, ...]) -> None:
        """Begin a save. Raises lasting failures; others are noted, the same on all ranks."""
        began_seconds, began_unix = self._clock(), time.time()
        self._begun += 1
        self._heard = frozenset()
        self._last_save_seconds = began_seconds
        if self._world.rank == 0:
            logger.info("saving step %d: %s", step, ", ".join(reasons))
        try:
            with self._watcher.phase(f"save of step {step}"):
                pending = self._target.start(self._state, step=step, metric=_finite(metric))
        except LASTING:
            raise
        except (CheckpointError, StorageError, OSError) as error:
            self._note_failure(step, error)
            self._raise_if_rank_lost()
            self._raise_alarm()
            return
        blocked = self._clock() - began_seconds
        self._in_flight.append(
            _InFlight(step, self._turns, pending, began_seconds, began_unix, blocked)
        )

    def _unsaved(self) -> int:
        """Calls of `step` since the newest save that is committed or under way.

        The same on all ranks where all have collected the same saves.
        """
        return self._turns - max([self._saved_turn, *(one.turn for one in self._in_flight)])

    # what became of saves

    def _collect(self, *, wait: bool, deadline_seconds: float = math.inf) -> None:
        """Note the results of saves that are over, of all of them when `wait`.

        Raises TimeoutError when one is not over at the deadline (of this rank's clock).
        """
        while self._in_flight and (wait or self._in_flight[0].pending.done()):
            one = self._in_flight[0]
            left = deadline_seconds - self._clock()
            outcome = _outcome(one.pending, None if math.isinf(left) else max(0.0, left))
            if isinstance(outcome, SaveReport):
                self._note_success(one, outcome)
            elif isinstance(outcome, SaveDropped):
                logger.info("%s", outcome)
                tell(self._observers, SaveSkipped(one.step))
            else:
                self._note_failure(one.step, outcome)
            self._in_flight.pop(0)
            self._raise_if_rank_lost()

    def _hurry(self) -> None:
        """The training is going to wait for what is in flight."""
        for one in self._in_flight:
            one.pending.hurry()

    def _raise_if_rank_lost(self) -> None:
        """Without all its ranks a training cannot go on, whatever the alarm says."""
        failure = self._target.failure()
        if failure is not None:
            raise failure

    def _note_success(self, one: _InFlight, report: SaveReport) -> None:
        ended_unix = max((s.start_unix + s.seconds for s in report.spans), default=time.time())
        seconds = max(ended_unix - one.began_unix, one.blocked_seconds)
        saved = Saved(report.step, report.attempt, report.path, report.nbytes, seconds)
        self._saved = [*self._saved, saved][-2:]
        self._saved_turn = one.turn
        self._in_a_row.clear()
        self._unheard = 0
        self._good_seconds = self._clock()
        self._meter.saved(blocked_seconds=one.blocked_seconds, persist_seconds=seconds)
        self._keeper.after_commit()
        blocked = one.blocked_seconds + report.counters.get("step_wait_seconds", 0.0)
        tell(self._observers, SaveSucceeded(report, seconds, blocked))

    def _note_failure(self, step: int, error: Exception) -> None:
        failure = Failure(step, error)
        self._failures = [*self._failures, failure][-100:]
        self._in_a_row.append(failure)
        self._unheard += 1
        tell(self._observers, SaveFailed(step, error))
        lasting = isinstance(error, LASTING)
        if lasting:
            self._lasting.append(error)
        if self._world.rank == 0:
            logger.error(
                "the save of step %d has failed, %d in a row (%s); %s: %s",
                step,
                len(self._in_a_row),
                type(error).__name__,
                "this does not go away, so it is raised" if lasting else "the training goes on",
                error,
                extra={"ckpt": {"event": "failed", "step": step, "error": str(error)}},
            )
            if lasting or self._is_alarm_due():
                self._council.ask(alarm=True)

    def _raise_alarm(self) -> None:
        """Called where all ranks have collected the same saves; see note "the same turn"."""
        if self._lasting:
            self._unheard = 0
            raise self._lasting.pop()
        if not self._unheard or len(self._in_a_row) < self._alarm.after:
            return
        mine = b"due" if self._is_alarm_due() else b"not yet"
        if self._world.broadcast("alarm", mine if self._world.rank == 0 else None) != b"due":
            return
        self._unheard = 0
        failures = tuple(self._in_a_row)
        if self._alarm.call is None:
            raise SavesFailed(failures)
        self._alarm.call(failures)

    def _is_alarm_due(self) -> bool:
        return self._alarm.is_due(len(self._in_a_row), self._clock() - self._good_seconds)

    def _raise_newest_failure(self) -> None:
        """Unless it was raised before, or told to an alarm."""
        if self._unheard:
            self._lasting.clear()
            self._unheard = 0
            raise self._in_a_row[-1].error

    # the end

    def _stop(self, metric: float | None, decision: Decision) -> None:
        """Save what time allows, then raise Preempted on all ranks."""
        deadline = decision.deadline_seconds
        self._keeper.end()
        self._council.rest()
        plan = self._agreed_plan(deadline)
        finished = self._all_collected(self._clock() + plan["wait_seconds"])
        if finished and plan["save"] == "model first":
            self._save_model_first(deadline)
        for number in range(STOP_TRIES_MAX):
            again = number > 0 or plan["save"] == "nothing"  # something has failed meanwhile
            if not finished or not self._unsaved() or (again and not self._has_time(deadline)):
                break
            try:
                self._begin(self._step, metric, ("preempted",))
            except CheckpointError as error:
                logger.error("no last save can be made: %s", error)
                break
            finished = self._all_collected(deadline)
        if not finished and self._world.rank == 0:
            logger.error("the save in flight is not over at the end of the grace time")
        self._say_goodbye()
        self._leave()
        saved = self.last_saved
        raise Preempted(step=self._step, saved_step=-1 if saved is None else saved.step)

    def _has_time(self, deadline_seconds: float) -> bool:
        """Whether a save may still be made by then, as the lead sees it."""
        told = None
        if self._world.rank == 0:
            left = deadline_seconds - self._clock() - LEAVING_SECONDS
            told = b"yes" if left > (self._meter.persist_seconds or 0.0) else b"no"
        return self._world.broadcast("again", told) == b"yes"

    def _agreed_plan(self, deadline_seconds: float) -> dict[str, Any]:
        """The lead's plan for the time that is left, on all ranks."""
        told = None
        if self._world.rank == 0:
            oldest = self._in_flight[0].began_seconds if self.in_flight else math.nan
            age = self._clock() - oldest
            facts = StopFacts(
                left_seconds=deadline_seconds - self._clock(),
                persist_seconds=self._meter.persist_seconds,
                in_flight_seconds=None if math.isnan(age) else age,
                state_nbytes=nbytes_of(self._state, self._world),
                model_nbytes=nbytes_of(self._model(), self._world),
                steps_unsaved=self._unsaved(),
            )
            plan = plan_stop(facts)
            logger.warning("preempted after step %d: %s", self._step, plan)
            told = json.dumps(plan._asdict()).encode()
        shared: dict[str, Any] = json.loads(self._world.broadcast("stop", told))
        return shared

    def _all_collected(self, deadline_seconds: float) -> bool:
        """Whether all saves are over on all ranks by then."""
        mine = b"over"
        try:
            self._collect(wait=True, deadline_seconds=deadline_seconds)
        except TimeoutError:
            mine = b"in flight"
        return all(answer == b"over" for answer in self._world.gather("collected", mine))

    def _save_model_first(self, deadline_seconds: float) -> None:
        target = self._target.model_first()
        try:
            pending = target.start(self._model(), step=self._step, metric=None)
            report = pending.result(max(0.0, deadline_seconds - self._clock()))
            if self._world.rank == 0:
                logger.warning("time is short: the model alone is safe in %s", report.path)
        except (CheckpointError, StorageError, OSError, TimeoutError) as error:
            logger.error("the model alone could not be saved: %s", error)

    def _model(self) -> Any:
        """The modules of the state, under the names that they have in it."""
        modules = dict(walk(self._state).modules)
        return modules.get("", modules)

    def _abandon(self, error: BaseException | None) -> None:
        """After a failure of the training, on this rank at least: nothing that needs all ranks."""
        logger.warning("the training ends by %s; no last save is made", type(error).__name__)
        self._council.leave()
        try:
            self._collect(wait=True, deadline_seconds=self._clock() + ABANDON_SECONDS)
        except Exception as failure:
            logger.error("a save in flight was left behind: %s", failure)
        self._leave()

    def _say_goodbye(self) -> None:
        """The lead, which may host the store that the ranks talk through, is the last to go."""
        self._world.gather_to_coordinator("goodbye", b"")

    def _leave(self) -> None:
        self._is_closed = True
        self._council.leave()
        self._watcher.close()
        self._keeper.close()
        self._signals.restore()
        self._world.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError("this Checkpointer is closed; make a new one")
        if os.getpid() != self._pid:
            raise Forked(
                f"this Checkpointer belongs to process {self._pid}, which this one was forked "
                "from: make one of its own here, for another url"
            )


def _outcome(pending: Pending, timeout_seconds: float | None) -> SaveReport | Exception:
    """What became of a save. Raises TimeoutError when it is not over by then."""
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


def _whole_number(step: Any) -> int:
    """A step as the log takes it: numpy's and torch's integers are ones."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= STEP_MAX or isinstance(step, bool):
        raise InvalidState([f"step={step!r}: expected an int from 0 to {STEP_MAX}"])
    return number


def _finite(metric: Any) -> float | None:
    """A metric as the log takes it: a training that diverges is still saved, without one."""
    if metric is None:
        return None
    try:
        number = float(metric.detach() if hasattr(metric, "detach") else metric)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    logger.warning("the metric is %s; it is saved as none", metric)
    return None


class _Keeper:
    """Retires checkpoints in the background, on the lead, after commits only.

    Failures are logged: they cost space, and the next commit tries again.
    """

    def __init__(self, target: Target, rule: KeepRule, *, is_lead: bool) -> None:
        self._target = target
        self._rule = rule
        self._is_lead = is_lead
        self._is_ending = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckpt-keep")
        self._running: list[Future[None]] = []
        self._times: dict[str, float] = {}
        self._warned: set[str] = set()

    def after_commit(self) -> None:
        """Begin to carry the rule out, unless that is under way and will see this commit."""
        self._running = [one for one in self._running if not one.done()]
        if self._is_lead and len(self._running) < 2:
            self._running.append(self._pool.submit(self._run))

    def plan(self) -> RetentionPlan | None:
        """What would be retired now; None before the first save, and on others than the lead."""
        session = self._target.session()
        if session is None:
            return None
        state = session.state()
        found = candidates_of(session.log, state, self._rule, self._times)
        self._times = {entry.attempt: committed for entry, committed in found if committed}
        return plan_retention(found, self._rule, now_unix=time.time())

    def wait(self) -> None:
        """Returns when nothing is under way."""
        for one in self._running:
            one.result()

    def end(self) -> None:
        """Time is short: nothing more is begun, not even what a plan still has."""
        self._is_ending = True

    def close(self) -> None:
        """No more of it; what is under way is finished first."""
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
        try:
            session = self._target.session()
            plan = self.plan()
            if session is None or plan is None or self._is_ending:
                return
            self._warn(plan)
            session.sweep_failed()
            gone, stayed = carry_out(plan, session.retire, stop=lambda: self._is_ending)
            for entry in gone:
                logger.info("retired step %d (%s)", entry.step, entry.attempt)
            for text in stayed:
                logger.info("not retired: %s", text)
        except (CheckpointError, StorageError, OSError) as error:
            logger.warning("retention is put off to the next save: %s", error)

    def _warn(self, plan: RetentionPlan) -> None:
        """Say once why checkpoints pile up."""
        unmeasured = any(reasons == (UNMEASURED,) for _, reasons in plan.keep)
        if plan.refused and "refused" not in self._warned:
            self._warned.add("refused")
            logger.warning("no checkpoint is retired for now: %s", plan.refused)
        elif unmeasured and UNMEASURED not in self._warned:
            self._warned.add(UNMEASURED)
            logger.warning(
                "checkpoints without a metric are kept; give step(metric=) for all of them, or "
                "KeepBest(unmeasured='retire')"
            )
