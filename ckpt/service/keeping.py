"""Retention during a training: after each commit, what the rule no longer keeps is retired."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor

from ckpt.commit.leases import leases_of
from ckpt.errors import CheckpointError
from ckpt.service.retention import UNMEASURED, KeepRule, RetentionPlan, carry_out, plan_retention
from ckpt.service.target import Target

logger = logging.getLogger(__name__)

RUNS_MAX = 2  # one at work, and one that will see every commit made meanwhile


class Keeper:
    """Retires checkpoints in the background, on the coordinator, after commits only.

    Failures are logged: they cost space, and the next commit tries again.
    """

    def __init__(self, target: Target, rule: KeepRule, *, is_coordinator: bool) -> None:
        self._target = target
        self._rule = rule
        self._is_coordinator = is_coordinator
        self._is_ending = False
        # One thread: two runs at once would retire by two views of the same log.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckpt-keep")
        self._running: list[Future[None]] = []
        self._warned: set[str] = set()

    def after_commit(self) -> None:
        """Begin to carry the rule out, unless a run that has not begun will see this commit."""
        self._running = [run for run in self._running if not run.done()]
        if self._is_coordinator and len(self._running) < RUNS_MAX:
            self._running.append(self._pool.submit(self._run))

    def plan(self) -> RetentionPlan | None:
        """What would be retired now, of the training's own line. None before the first save, and on
        ranks other than the coordinator.
        """
        session = self._target.session()
        if session is None:
            return None
        state = session.state()
        if (line := session.line(state)) is None:
            return None
        return plan_retention(state.live, self._rule, now_unix=time.time(), line=line)

    def wait(self) -> None:
        """Returns when nothing is under way."""
        for run in self._running:
            run.result()

    def end(self) -> None:
        """Time is short: begin nothing more, not even what a plan still has."""
        self._is_ending = True

    def close(self, *, waits: bool = True) -> None:
        """Take no more, and finish what is under way; without `waits`, what has begun alone."""
        self._pool.shutdown(wait=waits, cancel_futures=not waits)

    def _run(self) -> None:
        try:
            session = self._target.session()
            plan = self.plan()
            if session is None or plan is None or self._is_ending:
                return
            self._warn(plan)
            # Leftovers of failed attempts first: no plan has them, because they were never
            # committed.
            session.sweep_failed()
            retired, stayed = carry_out(
                plan,
                session.retire,
                stop=lambda: self._is_ending,
                leases=lambda: leases_of(session.store, now_unix=time.time()),
            )
            for entry in retired:
                logger.info("retired step %d (%s)", entry.step, entry.attempt)
            for text in stayed:
                logger.info("not retired: %s", text)
        # Not raised: files that stay cost space, and an error here would end the training.
        except (CheckpointError, OSError) as error:
            logger.warning("retention is put off to the next save: %s", error)

    def _warn(self, plan: RetentionPlan) -> None:
        """Log once why checkpoints pile up."""
        for jump in plan.jumps:
            if jump not in self._warned:
                self._warned.add(jump)
                logger.warning("ages of checkpoints are counted without a jump: %s", jump)
        # For this reason alone: one that another rule keeps as well would stay with a metric, too.
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
