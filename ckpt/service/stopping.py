"""The last save of a job that must end: what the time that is left allows, agreed by all ranks."""

from __future__ import annotations

import json
import logging
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.service.inflight import SavesInFlight
from ckpt.service.preemption import LEAVING_SECONDS, StopFacts, plan_stop
from ckpt.service.training import Training
from ckpt.state.flatten import nbytes_of

logger = logging.getLogger(__name__)

STOP_TRIES_MAX = 3  # last saves, where one fails and time is left


class LastSave:
    """Saves what time allows before `deadline_seconds`, on the clock of this rank.

    Collective: every decision is the coordinator's, because clocks and measurements differ between
    ranks and a rank that saved alone would wait for the others until it is killed.
    """

    def __init__(self, training: Training, saves: SavesInFlight, deadline_seconds: float) -> None:
        self._training = training
        self._saves = saves
        self._deadline_seconds = deadline_seconds

    def make(self, metric: float | None) -> None:
        """Wait for the save in flight and make the last one, as far as the time allows.

        Failures are logged: the job ends in any case, and the checkpoints before are untouched.
        """
        plan = self._agreed_plan()
        finished = self._saves.all_collected(self._training.now_seconds() + plan["wait_seconds"])
        if finished and plan["save"] == "model first":
            self._save_model_first()
        for number in range(STOP_TRIES_MAX):
            # Steps are unsaved although the plan had nothing to save: the save in flight failed.
            again = number > 0 or plan["save"] == "nothing"
            if not finished or not self._saves.unsaved_calls() or (again and not self._has_time()):
                break
            try:
                self._saves.begin(metric, ("preempted",))
            except CheckpointError as error:
                logger.error("no last save can be made: %s", error)
                break
            finished = self._saves.all_collected(self._deadline_seconds)
        if not finished and self._training.is_coordinator:
            logger.error("the save in flight is not over at the end of the grace time")

    def _agreed_plan(self) -> dict[str, Any]:
        """The coordinator's plan for the time that is left, on all ranks."""
        encoded = None
        if self._training.is_coordinator:
            training, saves, now = self._training, self._saves, self._training.now_seconds()
            began = saves.oldest_began_seconds
            facts = StopFacts(
                left_seconds=self._deadline_seconds - now,
                persist_seconds=training.costs.persist_seconds,
                in_flight_seconds=None if began is None else now - began,
                state_nbytes=nbytes_of(training.state, training.world),
                model_nbytes=nbytes_of(training.model(), training.world),
                steps_unsaved=saves.unsaved_calls(),
            )
            plan = plan_stop(facts)
            logger.warning("preempted after step %d: %s", training.progress.step, plan)
            encoded = json.dumps(plan._asdict()).encode()
        agreed: dict[str, Any] = json.loads(self._training.world.broadcast("stop", encoded))
        return agreed

    def _has_time(self) -> bool:
        """Whether a save may still be made, by the coordinator's clock and measurements."""
        answer = None
        if self._training.is_coordinator:
            left = self._deadline_seconds - self._training.now_seconds() - LEAVING_SECONDS
            needed = self._training.costs.persist_seconds or 0.0
            answer = b"yes" if left > needed else b"no"
        return self._training.world.broadcast("again", answer) == b"yes"

    def _save_model_first(self) -> None:
        training = self._training
        try:
            target = training.target.model_first()
            pending = target.start(training.model(), step=training.progress.step, metric=None)
            report = pending.result(max(0.0, self._deadline_seconds - training.now_seconds()))
            if training.is_coordinator:
                logger.warning("time is short: the model alone is safe in %s", report.path)
        except (CheckpointError, OSError, TimeoutError) as error:
            logger.error("the model alone could not be saved: %s", error)
