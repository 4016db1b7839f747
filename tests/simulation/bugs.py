"""Bugs of different kinds that are planted into the product, to see that a simulation finds them.

    python -m tests.simulation 0-99 --until-seen --bug "files are deleted before the RETIRE"

Each is a function that exchanges what is wrong then.

Note "a session without its lock". This was planted, too, and is not among them. A slot of the log
takes one record, whoever sends it, and each record is made anew for the state that it follows. So
two threads of one session lose races to each other, and nothing else, as two processes do. What
they share beside the log is the record that got no answer. A second thread may send it again, which
the first one finds to be its own. It may only be given up wrongly if a third writer takes the slot
between the two: a rival's CLAIM fences both, and operators, who do not, are not simulated. This is
an argument and no proof.

Two more were planted, and are not found within about 100 seeds. Two locks in two orders: a commit
has to come between two retirements of one run, and a run that retires more than one checkpoint
beside a save is rare. A near state that was restored and not recorded anew: the job has to die
after its restore and before its first near save. `tests/mutants` has the second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ckpt.commit.appender import Appender
from ckpt.commit.log import LogState
from ckpt.commit.records import Record
from ckpt.commit.session import Session
from ckpt.commit.writer import LogWriter, delete_attempt
from ckpt.errors import OutcomeUnknown
from ckpt.near.memory import TierMemory
from ckpt.near.saving import NearSaves
from ckpt.near.tier import Tier
from ckpt.saving import staging
from ckpt.saving.background import PendingSave
from ckpt.saving.task import SaveReport
from ckpt.service import restore
from ckpt.state.flatten import FlatState
from ckpt.world.base import World
from storage import Store, TransientError

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


@_bug("an unknown outcome is taken for a failure")
def _unknown_is_failure() -> None:
    def failed(self: Appender, record: Record) -> TransientError:
        self._pending = None
        return TransientError(f"{record.kind} of {record.attempt}: it has failed")

    _exchange(Appender, "_unknown", failed)


@_bug("an unknown outcome is taken for a success")
def _unknown_is_success() -> None:
    put = Appender._put

    def put_somehow(self: Appender, record: Record, *, sent_before: bool) -> bool:
        try:
            return put(self, record, sent_before=sent_before)
        except OutcomeUnknown:
            self._pending = None
            return True

    _exchange(Appender, "_put", put_somehow)


@_bug("half-written objects of dead writers are left")
def _leaves_uploads() -> None:
    _exchange(Session, "sweep_unfinished", lambda self: 0)


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
    _exchange(staging, "times_changed", lambda view: 0)


# The service --------------------------------------------------------------------------------------


@_bug("a store that does not answer is taken for damage")
def _silence_is_damage() -> None:
    condition_of = restore.condition_of

    def condition(store: Store, world: World, attempt: str) -> str:
        answer = condition_of(store, world, attempt)
        return "damaged" if answer == "unknown" else answer

    _exchange(restore, "condition_of", condition)


@_bug("a rank alone decides that a save has failed")
def _decides_alone() -> None:
    result = PendingSave.result

    def alone(self: PendingSave, timeout_seconds: float | None = None) -> SaveReport:
        report = result(self, timeout_seconds)
        if report.counters.get("retries", 0) > 0:
            raise OutcomeUnknown(f"step {self.step}: it took more than one try")
        return report

    _exchange(PendingSave, "result", alone)


# Near tiers ---------------------------------------------------------------------------------------


@_bug("the near state before is dropped before the next is recorded")
def _drops_early() -> None:
    make_room = NearSaves._make_room

    def for_nothing(self: NearSaves, mapped: TierMemory) -> None:
        self._safe = ""
        make_room(self, mapped)

    _exchange(NearSaves, "_make_room", for_nothing)


@_bug("a near save is acknowledged without its record")
def _not_recorded() -> None:
    _exchange(Tier, "put", lambda self, record: None)
