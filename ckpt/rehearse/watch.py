"""For trainings that save by hand or by a trainer: what a rehearsal has to know of them."""

from __future__ import annotations

from typing import Any


def place_of(url: str) -> str:
    """Where a training keeps its checkpoints: `url`, in a rehearsal another folder."""
    return url


class ResumeWatch:
    """A training that saves without a Checkpointer, as `ckpt rehearse` sees it; see
    `ckpt.watch_resume`. In any other process these calls do nothing.
    """

    def __init__(self, state: Any, directory: str) -> None:
        self.state, self.directory = state, place_of(directory)

    def restored(self, step: int) -> None:
        """What was saved as `step` has been loaded."""

    def step(self, step: int) -> bool:
        """Step `step` is done. Returns whether a rehearsal wants it saved now."""
        return False


def watch_resume(state: Any, directory: str) -> ResumeWatch:
    """Let `ckpt rehearse` follow a training that saves by hand, or by the trainer of a library.

    `state` has what is saved, as `ckpt.save` takes it: what it lacks is named as forgotten. The
    training saves to `directory` of what is returned, which a rehearsal replaces by one of its own,
    and calls there `restored(step)` after a load and `step(step)` after each step.

        watch = ckpt.watch_resume(state, "out")
        for step in range(load(watch.directory) + 1, 1001):
            train_one_step()
            if watch.step(step) or step % 100 == 0:
                save(watch.directory, step)
    """
    return ResumeWatch(state, directory)
