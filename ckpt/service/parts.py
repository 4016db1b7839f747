"""The parts of a Checkpointer in one world: made together, and left together for another world.

What a caller has chosen (`ServiceSettings`) lasts as long as the Checkpointer; everything that
talks to other ranks belongs to one world, and is made anew for the next one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ckpt.errors import CheckpointError, RankFailed
from ckpt.service.agreement import Pace, StepAgreement
from ckpt.service.alarm import Alarm, FailedSaves
from ckpt.service.events import Observer
from ckpt.service.inflight import SaveSchedule, SavesInFlight
from ckpt.service.keeping import Keeper
from ckpt.service.policies import SavePolicy, is_regular
from ckpt.service.preemption import Signals
from ckpt.service.retention import KeepRule
from ckpt.service.story import Story
from ckpt.service.target import Target, UrlTarget
from ckpt.service.tiers import Tiers, TierValue
from ckpt.service.training import StartOvers, StepTimer, Training
from ckpt.service.watching import Watcher
from ckpt.world.rounds import Deadlines
from ckpt.world.torch_world import current_world

logger = logging.getLogger(__name__)

LEFT_SECONDS_MAX = 10.0  # for the outcome of a save that was given up, and whose world has ended


@dataclass(frozen=True)
class ServiceSettings:
    """What the caller of a Checkpointer has chosen, in the words of its arguments."""

    save: SavePolicy
    keep: KeepRule
    alarm: Alarm | None
    pace: Pace | None
    near: tuple[TierValue, ...]
    observers: Sequence[Observer]
    silence_seconds_max: float | None
    signals: Signals


class Ahead:
    """After the first step a state has all that a save copies, so its size is known then.

    Copies into fresh memory take ten times as long, and the training would stand still for it.
    Nothing is made where saves are rare (`is_regular` False): there may never be one.
    """

    def __init__(self, training: Training, *, is_regular: bool) -> None:
        self._training = training
        self._is_wanted = is_regular
        self._stop: Callable[[], object] = lambda: None

    def stepped(self, *, has_saved: bool) -> None:
        """A step is done; `has_saved` when a save was begun, in it or before it."""
        if not self._is_wanted:
            return
        self._is_wanted = False
        if has_saved:
            return
        try:
            # Not collective, so what fails on one rank holds up none of the others.
            self._stop = self._training.target.make_ready(self._training.state)
        except Exception as error:
            # The save will fail in the same way, and reports it.
            logger.info("no memory was made ahead of the first save: %s", error)

    def stop(self) -> None:
        """Make no more of it, and give it back unless a save has used it."""
        self._stop()


class ServiceParts:
    """All that a Checkpointer has in the world of `target`. Making it is collective. What
    was measured, and what has failed, in those `before` is carried over.
    """

    def __init__(
        self, target: Target, state: Any, settings: ServiceSettings, before: ServiceParts | None
    ) -> None:
        training = Training(target, state, target.world(), tuple(settings.observers))
        # What saves cost before is the best guess, until they are measured in the new world.
        if before is not None:
            old = before.training
            training = replace(training, progress=old.progress, costs=old.costs)
        self.story = Story(training)
        training = replace(training, observers=(*training.observers, self.story.heard))
        self.training: Training = training
        # Taken now, because it ends what belongs to the world of this moment.
        self._end_world = target.leaving()  # what the target has there
        # Of its own, because its rounds run in the background, at any time.
        own_world = training.world.duplicate()
        self.agreement = StepAgreement(own_world, settings.signals, pace=settings.pace)
        self.keeper = Keeper(target, settings.keep, is_coordinator=training.is_coordinator)
        self.watcher = Watcher(
            training.world,
            training.observers,
            self.agreement.fail,
            silence_seconds_max=settings.silence_seconds_max,
            step_seconds=lambda: training.costs.step_seconds,
        )
        self.schedule = SaveSchedule(settings.save, training, self.agreement)
        self.failed = FailedSaves(training, settings.alarm or Alarm(), self.agreement)
        self.saves = SavesInFlight(training, self.schedule, self.failed, self.keeper, self.watcher)
        if before is not None:
            self.failed.all = before.failed.all
            self.saves.last_saved = before.saves.last_saved
        # A target of the caller's own knows no arguments of `ckpt.async_save`.
        saving = target.saving if isinstance(target, UrlTarget) else {}
        earlier = None if before is None else before.near
        self.near: Tiers = Tiers(settings.near, settings.save, training, saving, earlier)
        # Where durable saves use the copies of near ones, they take no memory of their own.
        copies = is_regular(settings.save) and not self.near.shares_stage
        self.ahead = Ahead(training, is_regular=copies)
        self.timer = StepTimer(training)
        self.start_overs = StartOvers(training)
        self.story.begin(training, self.saves)

    def leave(self) -> None:
        """Leave this world without its other ranks: saves under way are given up, and nothing of
        this process waits for a rank of it any more. May be repeated.
        """
        training = self.training
        failure = _why(training)
        self.ahead.stop()
        self.agreement.fail(failure)
        self.keeper.end()
        # The durable saves first: they may read the copies of near ones.
        self._end_world(failure)
        deadline = training.now_seconds() + LEFT_SECONDS_MAX
        while self.saves.newest is not None:
            try:
                self.saves.collect(wait=True, deadline_seconds=deadline)
            except RankFailed:
                continue  # raised after each outcome that was noted
            except TimeoutError as error:
                logger.warning("a save of the world before is left behind: %s", error)
                break
        self.near.leave(failure)
        self.agreement.leave()
        self.watcher.close()
        self.keeper.close(waits=False)  # once the session may be fenced
        self.story.ends("rejoined")
        self.story.close(waits=False)
        training.world.end(failure)
        training.world.close()


def _why(training: Training) -> RankFailed:
    """Why this world is left: the rank that it has lost, or this one where none is known."""
    known = training.target.failure() or training.world.failure
    if known is not None:
        return known
    try:
        training.world.check_neighbour("training")
    except RankFailed as failure:
        return failure
    rank = training.world.rank
    text = f"rank {rank} has left this world to join another one"
    return RankFailed(text, rank=rank, phase="rejoin")


def rejoining_target(
    target: Target, process_group: dist.ProcessGroup | None, meet_seconds_max: float
) -> Target:
    """`target` over another group. Raises before anything is left: ValueError, and CheckpointError
    where this process is not in that group or the target is bound to its ranks.
    """
    if not 0.0 < meet_seconds_max < math.inf:
        raise ValueError(f"meet_seconds_max={meet_seconds_max!r}: expected seconds above 0")
    is_joined = dist.is_available() and dist.is_initialized()
    if process_group is not None and not is_joined:
        raise CheckpointError(
            "a process group was given, and torch.distributed is not initialised: make the group "
            "of the processes that are left first"
        )
    # torch gives rank -1 to a process that is not in the group, and raises nothing.
    if is_joined and dist.get_rank(process_group) < 0:
        raise CheckpointError(
            "this process is not in the process group that was given: only those that continue "
            "call rejoin"
        )
    return target.over(process_group)


def meet(process_group: dist.ProcessGroup | None, *, seconds_max: float) -> None:
    """Return when all ranks of `process_group`, or all ranks, have called this.

    Raises RankFailed on all that have, naming one that has not within `seconds_max`.
    """
    # A world of its own, whose rounds may take as long as a new process needs to come up.
    world = current_world(process_group, deadlines=Deadlines(round_seconds_max=seconds_max))
    try:
        world.agree("rejoin", None)
    finally:
        world.close()
