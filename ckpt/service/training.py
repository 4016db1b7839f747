"""What the parts of a Checkpointer share: the training that they serve, and how far it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.saving.task import SaveReport
from ckpt.service.events import Observer, SaveEvent, notify
from ckpt.service.policies import CostMeter
from ckpt.service.target import Target
from ckpt.state.walk import walk
from ckpt.world.base import World

logger = logging.getLogger(__name__)

STILL_CALLS = 100  # of `step` with one number, before that is noticed
COUNTERS = ("step", "global_step", "iteration")


@dataclass
class Progress:
    """Calls of `step`: the steps of the newest call, of the first and of the one before the newest,
    and how many.
    """

    step: int = 0
    first_step: int | None = None
    previous_step: int = 0
    calls: int = 0
    resumed_step: int = -1  # -1 where nothing was restored
    moves: int = 0  # how often a step was done, or another one's state restored
    begun_step: int = 0  # the newest number that `steps` has given
    has_advanced: bool = False  # whether two calls named two steps

    @property
    def is_new(self) -> bool:
        """Whether nothing was done or restored yet."""
        return not self.calls and self.resumed_step < 0

    def advance(self, step: int) -> None:
        """The training has done `step`."""
        self.has_advanced = self.has_advanced or (self.calls > 0 and step != self.step)
        self.first_step = step if self.first_step is None else self.first_step
        self.previous_step, self.step = self.step, step
        self.calls += 1
        self.moves += 1

    def resume(self, step: int) -> None:
        """The state is that of `step`, which was done by an earlier process."""
        self.previous_step = self.step = self.resumed_step = self.begun_step = step
        self.moves += 1


@dataclass(frozen=True)
class Training:
    """One training on one rank: its state, where it is saved, and the observers of its saves."""

    target: Target
    state: Any
    world: World
    observers: tuple[Observer, ...] = ()
    progress: Progress = field(default_factory=Progress)
    costs: CostMeter = field(default_factory=CostMeter)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides what needs a clock, and logs for all ranks."""
        return self.world.rank == 0

    def now_seconds(self) -> float:
        """The clock by which saves are due and deadlines pass."""
        return self.target.now_seconds()

    def decided(self, name: str, answer: bool) -> bool:
        """The coordinator's answer: clocks and measurements differ between ranks. Collective."""
        mine = (b"yes" if answer else b"no") if self.is_coordinator else None
        return self.world.broadcast(name, mine) == b"yes"

    def notify(self, event: SaveEvent) -> None:
        """Call every observer of this rank."""
        notify(self.observers, event)

    def model(self) -> Any:
        """The modules of the state, under the names that they have in it."""
        # By walking the state, because a model may lie anywhere in it.
        modules = dict(walk(self.state).modules)
        # A state that is a module itself has it at the path "", and is saved without a name, too.
        return modules.get("", modules)


def saved_seconds(report: SaveReport, began_unix: float, blocked_seconds: float) -> float:
    """From the beginning of a save to its end. Not to the call that collects it: a save that ended
    long before took less.
    """
    ended_unix = max((s.start_unix + s.seconds for s in report.spans), default=time.time())
    return max(ended_unix - began_unix, blocked_seconds)


class StartOvers:
    """Notices a training that starts over without meaning to, as one warning for each way."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._said: set[str] = set()
        self._counters = _counters(training.state)

    def stepped(self) -> None:
        """A call of `step`."""
        progress = self._training.progress
        if progress.step < progress.resumed_step:
            self._say(
                "restored",
                f"restore() returned step {progress.resumed_step}, and the loop is at step "
                f"{progress.step}: it starts over with the restored state. Begin at "
                "restore().step + 1",
            )
        if progress.calls >= STILL_CALLS:
            self.ended()

    def ended(self) -> None:
        """The training is over, or has made many calls of `step`."""
        progress = self._training.progress
        if progress.calls > 1 and not progress.has_advanced:
            self._say(
                "still",
                f"step({progress.step}) was called {progress.calls} times, and never with another "
                "step: policies count steps, so pass the number of the step that was done",
            )

    def saved(self) -> None:
        """A save begins."""
        step, begun = self._training.progress.step, self._training.progress.begun_step
        if step < begun:
            self._say(
                "left",
                f"the loop left step {begun} without calling step({begun}): what it has changed is "
                f"saved as step {step}, and a resume makes it again",
            )
        for name, value in _counters(self._training.state).items():
            # One that moves may count something else; one that stands still will start over.
            if value == self._counters.get(name) and value != step:
                self._say(
                    "stale",
                    f"the state that is saved as step {step} has {name} = {value}, as it had at "
                    "the beginning: who continues from it starts over. Set it before step(), or "
                    "begin at restore().step + 1",
                )

    def restored(self) -> None:
        """The state is that of a checkpoint."""
        self._counters = _counters(self._training.state)

    def _say(self, what: str, text: str) -> None:
        if what not in self._said and self._training.is_coordinator:
            logger.warning("%s: %s", self._training.target.url, text)
        self._said.add(what)


def _counters(state: Any, path: str = "") -> dict[str, int]:
    """The plain numbers of steps in nested dicts, by their paths."""
    counters: dict[str, int] = {}
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Mapping):
            counters |= _counters(value, f"{path}[{name!r}]")
        # By its type: a bool is an int, too, and counts nothing.
        elif type(value) is int and name in COUNTERS:
            counters[f"{path}[{name!r}]"] = value
    return counters


class StepTimer:
    """Measures the time between two calls of `step`, which is that of one training step."""

    def __init__(self, training: Training) -> None:
        self._costs, self._now = training.costs, training.target.now_seconds
        self._entered_seconds = self._left_seconds = self._now()
        self._was_saving = False

    def entered(self, *, saving: bool) -> None:
        """`step` was called. `saving` when a save is under way."""
        self._entered_seconds = self._now()
        seconds = self._entered_seconds - self._left_seconds
        self._costs.step(seconds, saving=self._was_saving or saving)

    def left(self, *, saving: bool) -> None:
        """`step` returns or raises: the next training step begins."""
        self._was_saving = saving
        self._left_seconds = self._now()
        self._costs.blocked_seconds += self._left_seconds - self._entered_seconds

    def restored(self) -> None:
        """A restore is over, which is no training step."""
        self._left_seconds = self._now()
