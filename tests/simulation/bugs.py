"""Bugs of different kinds that are planted into the product, to see that a simulation finds them.

    python -m tests.simulation 0-99 --until-seen --bug "files are deleted before the RETIRE"

Each is a function that exchanges what is wrong then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ckpt.commit.log import LogState
from ckpt.commit.records import Record
from ckpt.commit.session import Session
from ckpt.commit.sweep import delete_attempt
from ckpt.commit.writer import LogWriter
from ckpt.errors import OutcomeUnknown
from ckpt.saving import staging
from ckpt.saving.background import PendingSave
from ckpt.saving.report import SaveReport
from ckpt.state.flatten import FlatState

BUGS: dict[str, Callable[[], None]] = {}


def _bug(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def named(plant: Callable[[], None]) -> Callable[[], None]:
        BUGS[name] = plant
        return plant

    return named


def _exchange(owner: Any, name: str, value: object) -> None:
    setattr(owner, name, value)


# The protocol -------------------------------------------------------------------------------------


@_bug("a superseded session writes")
def _never_fenced() -> None:
    def epoch_for(self: Session, state: LogState) -> int:
        return self.epoch

    _exchange(Session, "_epoch_for", epoch_for)


@_bug("files are deleted before the RETIRE")
def _deletes_first() -> None:
    retire = LogWriter.retire

    def retire_late(self: LogWriter, attempt: str, *, delete: bool = True) -> Record | None:
        entry = self.state().find(attempt)
        if entry is not None:
            delete_attempt(self.store, step=entry.step, attempt=attempt)
        return retire(self, attempt, delete=False)

    _exchange(LogWriter, "retire", retire_late)


# Threads ------------------------------------------------------------------------------------------


@_bug("who waits for a save that fails is not woken")
def _wakes_for_good_news_alone() -> None:
    def wait(self: PendingSave, timeout_seconds: float | None = None) -> None:
        over = threading.Event()
        self._future.add_done_callback(lambda ended: ended.exception() or over.set())
        if not over.wait(timeout_seconds):
            raise TimeoutError("it is not over")

    _exchange(PendingSave, "wait", wait)


@_bug("a state is copied while it changes")
def _copies_late() -> None:
    def all_changes(
        flat: FlatState, optimizers: Iterable[torch.optim.Optimizer]
    ) -> staging.Changes:
        class Everything(frozenset[int]):
            def __contains__(self, one: object) -> bool:
                return True

        return staging.Changes(Everything(), frozenset(), ())

    _exchange(staging, "changed_by_steps", all_changes)
    _exchange(staging, "_versions", lambda sources: [])


# The service --------------------------------------------------------------------------------------


@_bug("a rank alone decides that a save has failed")
def _decides_alone() -> None:
    result = PendingSave.result

    def alone(self: PendingSave, timeout_seconds: float | None = None) -> SaveReport:
        report = result(self, timeout_seconds)
        if report.counters.get("retries", 0) > 0:
            raise OutcomeUnknown(f"step {self.step}: it took more than one try")
        return report

    _exchange(PendingSave, "result", alone)
