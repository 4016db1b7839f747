"""What the parts of a Checkpointer share: the training that they serve, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpt.service.events import Observer, SaveEvent, notify
from ckpt.service.policies import CostMeter
from ckpt.service.target import Target
from ckpt.state.walk import walk
from ckpt.world.base import World


@dataclass
class Progress:
    """Calls of `step`: the step of the newest call, that of the call before it, and how many."""

    step: int = 0
    previous_step: int = 0
    calls: int = 0

    def advance(self, step: int) -> None:
        """The training has done `step`."""
        self.previous_step, self.step = self.step, step
        self.calls += 1

    def resume(self, step: int) -> None:
        """The state is that of `step`, which was done by an earlier process."""
        self.previous_step = self.step = step


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

    def notify(self, event: SaveEvent) -> None:
        """Call every observer of this rank."""
        notify(self.observers, event)

    def model(self) -> Any:
        """The modules of the state, under the names that they have in it."""
        modules = dict(walk(self.state).modules)
        # A state that is a module itself has it at the path "", and is saved without a name, too.
        return modules.get("", modules)


class StepTimer:
    """Measures the time between two calls of `step`, which is that of one training step."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._left_seconds = training.now_seconds()
        self._was_saving = False

    def entered(self, *, saving: bool) -> None:
        """`step` was called. `saving` when a save is under way."""
        seconds = self._training.now_seconds() - self._left_seconds
        self._training.costs.step(seconds, saving=self._was_saving or saving)

    def left(self, *, saving: bool) -> None:
        """`step` returns or raises: the next training step begins."""
        self._was_saving = saving
        self._left_seconds = self._training.now_seconds()

    def restored(self) -> None:
        """A restore is over, which is no training step."""
        self._left_seconds = self._training.now_seconds()
