"""Checkpoints as a service to a training loop: saves in the background when a policy says so, keeps
what a rule keeps, survives failures and preemption, and resumes from what is whole.

`Checkpointer` is the outside of `inflight` (saves, and when they are due), `tiers`, `publisher`,
`alarm`, `keeping`, `agreement` and `watching`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, SupportsIndex

import torch.distributed as dist

from ckpt import errors
from ckpt.api import Io, check_order, line_of, one_of
from ckpt.commit.appender import BACKGROUND_SECONDS
from ckpt.commit.names import plain_int
from ckpt.commit.records import STEP_MAX
from ckpt.errors import CheckpointError, Failure, NoCheckpoint, RankFailed
from ckpt.layout.memory import gc_paused
from ckpt.saving.replica_check import ReplicasDrifted
from ckpt.saving.staging import Snapshot
from ckpt.saving.task import SaveReport
from ckpt.service.agreement import NOTHING, Pace
from ckpt.service.alarm import Alarm
from ckpt.service.events import Observer, Restored, SaveSkipped, log_restored
from ckpt.service.inflight import Saved
from ckpt.service.parts import ServiceParts, ServiceSettings, meet, rejoining_target
from ckpt.service.policies import (
    AtExit,
    CostMeter,
    EverySeconds,
    OnPreemption,
    OnSignal,
    SavePolicy,
    with_last_saves,
)
from ckpt.service.preemption import Preempted, Signals
from ckpt.service.publisher import publishing
from ckpt.service.restore import RestoreReport, restore_latest
from ckpt.service.retention import KeepAll, KeepRule, RetentionPlan, with_grace
from ckpt.service.target import Pending, Target, UrlTarget
from ckpt.service.tiers import TierValue, checked_tiers
from ckpt.state.resize import Resize
from ckpt.state.walk import refuse_snapshots
from storage import StoreLike
from storage.hidden import hides_secrets

logger = logging.getLogger(__name__)

SAVE_DEFAULT: SavePolicy = EverySeconds(1800.0) | OnSignal() | OnPreemption() | AtExit()

ABANDON_SECONDS = 60.0  # a training that failed waits so long for a save in flight: a guess
LOST_SAVE_SECONDS = 1.0  # for a save in flight to notice a death that was noticed elsewhere


class Checkpointer:
    """Saves a training in the background, keeps what a rule keeps, and resumes it.

        with ckpt.Checkpointer(state, url, save=EverySteps(1000), keep=KeepLatest(3)) as saver:
            for step in saver.steps(100_000):
                train_one_step()

    Every rank creates it and calls `steps`, or `restore` and `step`, and `save_now`, `wait` and
    `close` in the same order with the same steps: these are collective. `step` returns at once
    unless a save that is due has to wait for the one before; the state must be complete when it is
    called. Properties and `retention_plan` are for each rank alone. From its creation to `close`,
    signals that `save` names are caught; see `ckpt.service.preemption`.

    Arguments:

    - `state` is what `ckpt.save` takes, `target` a url, a `storage.Store` or a `Target`, `save`
      when to save, `keep` which checkpoints stay. To `save` are added `OnSignal()`,
      `OnPreemption()` and `AtExit()`, as far as it has none of its own, unless `only=True`. What
      `keep` gives up is retired `retire_after` seconds later, by default at once; until then it
      loads, and `ckpt pin` keeps it for good.
    - While a save is in flight, the next one that is due waits for it, or is skipped with
      `when_busy="skip"`. A save waits for a store that is away until the next one has to wait for
      it (with "skip": none does), for `retry_seconds_max` at most, 10 minutes by default.
    - `near` keeps newer checkpoints on the hosts themselves, in one tier or a list of them;
      `restore` finds them: see `ckpt.Near`. `publish=EverySteps(1)` publishes the state's models
      at such steps; a mapping of `every` and arguments of `ckpt.publish` says how. Only the next
      publication waits for one; a failed one is logged, and the next one makes up for it.
    - A root protects its trainings. Where another one has saved, the first save raises StoreRefused
      unless this process has restored (or loaded) from there; with `begin_anew=True` it begins a
      line of its own, with a warning. Rules retire checkpoints of their own line only. Trainings
      that share a root have names: `line="generator"` saves and restores below
      `<url>/lines/generator`, a root of its own.
    - `observers` are notified of how saves and restores end; see `ckpt.service.events`. With
      `telemetry`, how every save went is kept next to the checkpoint, and what happens to the job
      in its root as it happens, for `ckpt watch`, `ckpt serve` and `ckpt report`.
    - `snapshot`, `host_bytes_max`, `replicas`, `dedup`, `full_every`, `user`, `retry_seconds_max`,
      `io`, `process_group`, `storage_options` and `unsafe_single_writer` are those of
      `ckpt.async_save`. They go with a url; a `Target` saves in its own way.

    The state has optimizers themselves: the state dict of one stays as it was, and is refused.

    Errors: a save that fails is logged and the training continues; `alarm` says when it should not.
    InvalidState, InvalidArgument, Fenced and StoreRefused do not go away, so they are raised by the
    next call of `step` that all ranks agreed on. After a rank was found dead, that is RankFailed.

    A rank that is silent, or makes no step while others do, is logged and reported to the observers
    of all others within 15 s, and that is withdrawn when it is back. It is no error by itself; with
    `silence_seconds_max`, `step` raises RankFailed after a silence of so many seconds.
    """

    @hides_secrets
    def __init__(
        self,
        state: Any,
        target: StoreLike | Target,
        *,
        save: SavePolicy = SAVE_DEFAULT,
        only: bool = False,
        keep: KeepRule | None = None,
        retire_after: float | None = None,
        alarm: Alarm | None = None,
        when_busy: Literal["wait", "skip"] = "wait",
        pace: Pace | None = None,
        near: TierValue | Sequence[TierValue] | None = None,
        publish: SavePolicy | Mapping[str, Any] | None = None,
        observers: Sequence[Observer] = (),
        silence_seconds_max: float | None = None,
        telemetry: bool = True,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        unsafe_single_writer: bool = False,
        line: str = "",
        begin_anew: bool = False,
        snapshot: Snapshot = "step",
        host_bytes_max: SupportsIndex | None = None,
        replicas: Literal["warn", "strict"] = "warn",
        dedup: bool = False,
        full_every: SupportsIndex | timedelta = 10,
        user: Mapping[str, str] | None = None,
        retry_seconds_max: float = BACKGROUND_SECONDS,
        io: Io = "auto",
    ) -> None:
        one_of("when_busy", when_busy, ("wait", "skip"))
        if not isinstance(save, SavePolicy):
            raise TypeError(f"save={save!r}; expected a policy, such as ckpt.EverySteps(1000)")
        if not isinstance(keep, KeepRule | None):
            raise TypeError(f"keep={keep!r}; expected a rule, such as ckpt.KeepLatest(3)")
        rule = with_grace(KeepAll() if keep is None else keep, retire_after)
        save = save if only else with_last_saves(save)
        tiers = checked_tiers(near)
        if isinstance(target, Target) and line:
            raise TypeError(f"line={line!r} goes with a url; this Target names its own root")
        check_order(state, target, "Checkpointer(state, url)", Target)
        refuse_snapshots(state)
        if not isinstance(target, Target):
            saving = {
                "snapshot": snapshot,
                "host_bytes_max": host_bytes_max,
                "replicas": replicas,
                "dedup": dedup,
                "full_every": full_every,
                "telemetry": telemetry,
                "user": user,
                "retry_seconds_max": retry_seconds_max,
                "io": io,
            }
            where = line_of(target, line)
            target = UrlTarget(where, process_group, storage_options, unsafe_single_writer, saving)
        tiers = (*tiers, *publishing(publish, target))
        self._signals = Signals(save)
        self._settings = ServiceSettings(
            save, rule, alarm, pace, tiers, tuple(observers), silence_seconds_max, self._signals
        )
        self._skips = when_busy == "skip"
        self._hold = target.hold(begin_anew=begin_anew)
        try:
            self._use(ServiceParts(target, state, self._settings, None))
        except BaseException:
            self._hold.end()
            raise
        self._is_closed = self._is_apart = False
        self._pid = os.getpid()
        # Last, so that a constructor that fails leaves no handler behind.
        self._signals.install()
        atexit.register(_left_open, weakref.ref(self))

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
        elif not self._is_closed and os.getpid() == self._pid:
            self._abandon(error)

    def _use(self, parts: ServiceParts) -> None:
        """Take these parts from now on."""
        self._parts = parts
        self._training, self._agreement = parts.training, parts.agreement
        self._watcher, self._schedule, self._failed = parts.watcher, parts.schedule, parts.failed
        self._saves, self._near, self._keeper = parts.saves, parts.near, parts.keeper
        self._ahead, self._timer, self._start_overs = parts.ahead, parts.timer, parts.start_overs

    @property
    def last_saved(self) -> Saved | None:
        """The newest checkpoint of this process whose commit this rank knows of."""
        return self._saves.last_saved

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The steps of saves that are under way."""
        return self._saves.steps

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The newest 100 failed saves of this process that this rank knows of, oldest first."""
        return self._failed.all

    @property
    def last_near(self) -> SaveReport | None:
        """The newest near checkpoint of this process whose outcome this rank knows of."""
        return self._near.last_report

    @property
    def near_failures(self) -> tuple[Failure, ...]:
        """The newest 100 near saves and publications that failed, as `failures`."""
        return self._near.failures

    @property
    def is_preempted(self) -> bool:
        """Whether this process was ordered to end: `step` will raise Preempted in a few calls."""
        return self._signals.must_end

    @property
    def costs(self) -> CostMeter:
        """What saves cost this training, as this rank has measured it."""
        return self._training.costs

    def steps(self, last: SupportsIndex) -> Iterator[int]:
        """Restore the newest checkpoint, yield the number of each step that is left, up to `last`,
        and have it saved when it is due, and the last one always.

        Counts from 1, or on from where `restore` or these steps have been. What the loop does with
        a number is that step; one that a loop leaves early is not done. `step` is called here,
        unless the loop has called it, as with a metric, or has restored. Raises what these raise.
        """
        if self._training.progress.is_new:
            self.restore()
        while (number := self._training.progress.step + 1) <= _whole_number(last):
            moves = self._training.progress.moves
            self._training.progress.begun_step = number
            yield number
            if moves == self._training.progress.moves:
                self.step(number)
        self._saves.collect(wait=True)
        self._save_last(("last step",))
        self.wait()

    def restore(
        self,
        step: SupportsIndex | None = None,
        attempt: str = "",
        *,
        from_: StoreLike | None = None,
        from_options: Mapping[str, Any] | None = None,
        stacks: Mapping[str, str] | None = None,
        resize: Resize = None,
        metadata_bytes_max: SupportsIndex | None = None,
    ) -> RestoreReport | None:
        """Fill the state from the newest checkpoint that is whole, or the newest of `step`, or from
        `attempt`.

        Damaged ones are skipped; the report and the log name them. Imports and copies in
        another layout are restored only by their attempt, or where there is nothing else. Going
        back by `step` or `attempt` begins a new line with the next save, and that line is resumed
        the next time (see `ckpt.commit.locate`). None when nothing was saved yet. All ranks restore
        the same one. `stacks`, `resize` and `metadata_bytes_max` are those of `ckpt.load`; a
        checkpoint in the form of the state is taken as it is.

        Until this root has a checkpoint, `from_`, any place that `ckpt.load` takes, is the start,
        loaded with `from_options`, arguments of `ckpt.load`. Steps count on from the one saved
        there, from 0 where none is known. Afterwards `from_` is not looked at.

        Raises NoCheckpoint when there are some and none is whole, Mismatch when the state is
        another one, LoadInterrupted when the store fails: going back further would lose work that
        is still there.
        """
        self._check_open()
        start = {"from_": from_, "from_options": from_options}
        nbytes_max = plain_int(metadata_bytes_max)
        how = {"stacks": stacks, "resize": resize, "metadata_bytes_max": nbytes_max}
        return self._restore(step=plain_int(step), attempt=attempt, **start, **how)

    def _restore(self, **how: Any) -> RestoreReport | None:
        self._saves.collect(wait=True)
        self._near.collect(wait=True)
        training = self._training
        began_seconds = training.now_seconds()
        training.world.begin_call("Checkpointer.restore")
        with self._watcher.phase("restore"), gc_paused():
            report = restore_latest(
                training.state, training.target, training.world, tiers=self._near, **how
            )
        if report is not None:
            training.progress.resume(report.step)
            seconds = training.now_seconds() - began_seconds
            if training.is_coordinator:
                log_restored(report, seconds)
            training.notify(Restored(report, seconds))
        for part in (self._saves, self._schedule, self._failed, self._timer, self._start_overs):
            part.restored()
        return report

    def rejoin(
        self,
        process_group: dist.ProcessGroup | None = None,
        state: Any = None,
        *,
        meet_seconds_max: float = 600.0,
    ) -> RestoreReport | None:
        """Continue in another world, with the newest whole state: after a rank was lost, in
        the processes that are left.

        `process_group` is the new group of those that continue, or None where torch.distributed was
        initialised anew for them; all of them call this. `state` is given where the state consists
        of other objects now, such as a model that was sharded over the new group; by default it is
        the one from before. Near checkpoints count like durable ones, with what is left of the
        hosts; see `restore`.

        Saves of the old world that are under way are given up, and none of them can commit after
        this: the new world has claimed the root. Steps of optimizers are not held back by them.
        Policies, observers and signal handlers stay; `failures` and `costs` keep counting.

        Returns what was restored; None when nothing was saved yet and `state` was given, which is
        as it was then. Raises NoCheckpoint when nothing was saved and the state is that from
        before; RankFailed naming a rank that has not called this within `meet_seconds_max`, or was
        lost meanwhile; else like `restore`. After an error this Checkpointer is in no world: call
        `rejoin` again, with a new group, or make a new Checkpointer.
        """
        self._check_process()
        target = rejoining_target(self._training.target, process_group, meet_seconds_max)
        self._is_apart = True
        self._parts.leave()
        self._signals.again()
        meet(process_group, seconds_max=meet_seconds_max)
        filled = self._training.state if state is None else state
        self._use(ServiceParts(target, filled, self._settings, self._parts))
        report = self._restore()
        if report is None and state is None:
            raise NoCheckpoint(
                f"{target.url} has no checkpoint, and parts of the state are lost with their "
                "ranks: pass rejoin(state=) with a state as at the beginning, or save before the "
                "first step"
            )
        # All sessions of the old world are fenced from here on.
        target.ranked_session()
        self._is_apart = False
        return report

    def step(self, step: SupportsIndex, metric: float | None = None) -> bool:
        """Step `step` is done and the state is as it should be saved. Returns whether a save was
        begun.

        `metric` is how good the state is, for `KeepBest`; the coordinator's counts. Raises
        Preempted (a SystemExit) when the job was ordered to end, after the last save; SavesFailed
        and lasting failures of saves, on all ranks at the same step; RankFailed when a rank was
        found dead.
        """
        self._check_open()
        step = _whole_number(step)
        self._timer.entered(saving=bool(self._saves.steps))
        self._training.progress.advance(step)
        self._start_overs.stepped()
        self._watcher.called(step)
        try:
            begun = self._one_call(metric)
            self._near.stepped()
            self._ahead.stepped(has_saved=begun or self._saves.newest is not None)
            return begun
        finally:
            self._timer.left(saving=bool(self._saves.steps))

    def save_now(self, metric: float | None = None) -> Pending:
        """Begin to save the state as it is now, as the newest step that was done.

        Its `result()` waits for the commit, and raises the save's own error.
        """
        self._check_open()
        self._saves.finish()
        self._start_overs.saved()
        self._saves.begin(metric, ("save_now",))
        if (pending := self._saves.newest) is None:
            assert self._failed.newest_error is not None, "a save that is not begun has failed"
            raise self._failed.newest_error
        return pending

    def wait(self) -> Saved | None:
        """Wait for what is in flight, and for retention; the newest checkpoint of this process.

        Raises the error of the newest save if that failed and was not raised before.
        """
        self._check_open()
        self._saves.collect(wait=True)
        self._near.collect(wait=True)
        self._keeper.wait()
        self._failed.raise_newest()
        return self.last_saved

    def retention_plan(self) -> RetentionPlan | None:
        """What would be kept and retired now, and why; nothing is done.

        None on ranks other than the coordinator, and before the first save of this process.
        """
        return self._keeper.plan()

    def close(self) -> None:
        """Make a last save if the policy wants one, wait for everything, and put signal handlers
        back.

        Waits until all ranks have come here. Raises the error of the newest save if that failed and
        was not raised before. May be repeated.
        """
        if self._is_closed or os.getpid() != self._pid:
            return  # in a forked child there is nothing of its own to end
        if self._is_apart:
            self._leave()
            return
        try:
            decision = self._agreement.close() or NOTHING
            self._saves.collect(wait=True)
            self._near.collect(wait=True)
            self._save_last(self._schedule.reasons_at_exit(decision))
            self._start_overs.ended()
            self._say_unsaved("the training is over")
            self._keeper.wait()
            self._wait_for_all_ranks()
            self._parts.story.ends("closed")
        finally:
            self._leave()
        self._failed.raise_newest()

    # one call of step

    def _one_call(self, metric: float | None) -> bool:
        try:
            decision = self._agreement.turn() or NOTHING
        except RankFailed:
            # A save that the rank died in knows better in which phase that was, and raises it.
            deadline = self._training.now_seconds() + LOST_SAVE_SECONDS
            with contextlib.suppress(TimeoutError):
                self._saves.collect(wait=True, deadline_seconds=deadline)
            raise
        if self._signals.end_the_job(decision.signals):
            self._stop(metric, decision.deadline_seconds)
        if decision.alarm:
            # The alarm is raised by all ranks or none, so all of them collect the same saves first.
            self._saves.finish()
            self._failed.raise_alarm()
        else:
            self._saves.collect(wait=False)
        reasons = self._schedule.reasons(decision)
        if not reasons or (self._skips and self._is_busy()):
            return False
        self._saves.finish()
        self._failed.raise_alarm()
        copies = self._near.stepped(lends=True)
        self._start_overs.saved()
        self._saves.begin(metric, reasons, copies)
        return True

    def _is_busy(self) -> bool:
        """Whether the coordinator has a save in flight: all ranks skip the same saves."""
        is_busy = self._training.decided("busy", bool(self.in_flight))
        if is_busy:
            step = self._training.progress.step
            self._training.notify(SaveSkipped(step))
            if self._training.is_coordinator:
                logger.info("no save of step %d: another one is in flight", step)
        return is_busy

    # the end

    def _save_last(self, reasons: tuple[str, ...]) -> None:
        while reasons and self._saves.unsaved_calls():
            self._start_overs.saved()
            self._saves.begin(None, reasons)
            self._saves.collect(wait=True)
            # The one that finds drifted replicas stores nothing; the next one does.
            if not isinstance(self._failed.newest_error, ReplicasDrifted):
                break

    def _stop(self, metric: float | None, deadline_seconds: float) -> None:
        """Save what time allows, then raise Preempted on all ranks."""
        self._parts.story.ends("preempted")
        self._keeper.end()
        self._agreement.rest()
        self._saves.save_last(metric, deadline_seconds)
        self._say_unsaved("the job is preempted")
        self._wait_for_all_ranks()
        self._leave()
        saved_step = -1 if self.last_saved is None else self.last_saved.step
        raise Preempted(step=self._training.progress.step, saved_step=saved_step)

    def _abandon(self, error: BaseException) -> None:
        """The training has failed, on this rank at least: nothing that needs all ranks."""
        self._parts.story.ends("failed", error)
        self._agreement.leave()
        deadline = self._training.now_seconds() + ABANDON_SECONDS
        try:
            self._saves.collect(wait=True, deadline_seconds=deadline)
            left = deadline - self._training.now_seconds()
            self._near.collect(wait=True, timeout_seconds=max(0.0, left))
        except Exception as failure:
            logger.error("a save in flight was left behind: %s", failure)
            # A near round may wait for minutes yet, for a host that is silent: see `close`.
            rank = self._training.world.rank
            why = f"rank {rank} has left after {type(error).__name__}"
            self._near.leave(RankFailed(why, rank=rank, phase="training"))
        self._say_unsaved(f"the training ends by {type(error).__name__}, and no last save is made")
        self._leave()

    def _say_unsaved(self, why: str) -> None:
        """Log what is in no checkpoint, at the end."""
        if (calls := self._saves.unsaved_calls()) and self._training.is_coordinator:
            newest = "nothing was saved"
            if self.last_saved is not None:
                newest = f"the newest checkpoint is step {self.last_saved.step}"
            url, step = self._training.target.url, self._training.progress.step
            text = "%s: %s after step %d, and %s: what %d calls of step did is lost"
            logger.warning(text, url, why, step, newest, calls)

    def _wait_for_all_ranks(self) -> None:
        """The coordinator may host the store that the ranks talk through, so it leaves last."""
        self._training.world.gather_to_coordinator("goodbye", b"")

    def _leave(self) -> None:
        self._is_closed = True
        self._hold.end()
        self._ahead.stop()
        self._near.close()
        self._agreement.leave()
        self._watcher.close()
        self._keeper.close()
        self._signals.restore()
        self._parts.story.close()
        self._training.world.close()  # last: the others may still use it

    def _check_open(self) -> None:
        self._check_process()
        if self._is_apart:
            raise CheckpointError(
                "this Checkpointer is in no world, because `rejoin` has failed: call it again, "
                "with a new process group"
            )

    def _check_process(self) -> None:
        if self._is_closed:
            raise CheckpointError("this Checkpointer is closed; make a new one")
        if os.getpid() != self._pid:
            raise errors.Forked(
                f"this Checkpointer belongs to process {self._pid}, which this one was forked "
                "from: make one of its own here, for another url"
            )


def _left_open(ref: weakref.ref[Checkpointer]) -> None:
    """Say what is not saved where a program ends without `close`."""
    one = ref()
    if one is not None and not one._is_closed and os.getpid() == one._pid:
        one._say_unsaved("the program ends without close() (use `with`)")


def _whole_number(step: Any) -> int:
    """A step as the log takes it: numpy's and torch's integers are ones."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= STEP_MAX or isinstance(step, bool):
        raise errors.InvalidArgument(f"step={step!r}: expected an int from 0 to {STEP_MAX}")
    return number
