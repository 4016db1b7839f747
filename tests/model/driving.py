"""The real sessions, driven along the actions of the model, and compared with it after each.

A `Driven` world is a memory store and the sessions on it; it is copied to go two ways from one
moment. Calls run to their ends, with one exception: a save that stalls before the put of its COMMIT
is cut off there. When it is resumed, the call is made once more with the answers that it had got by
then, and goes on with the store as it is now. So no thread is parked and no schedule is repeated.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from ckpt.commit.appender import Appender, Sources
from ckpt.commit.leases import lease_key, leases_of
from ckpt.commit.live import Segments
from ckpt.commit.log import Log, LogState
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import LOG_PREFIX, MANIFEST_NAME, parse_step_key, record_key, step_prefix
from ckpt.commit.records import Record, decode_record, manifest_digest
from ckpt.commit.session import Session
from ckpt.commit.writer import Commit
from ckpt.errors import CheckpointError, Corrupt
from ckpt.service.retention import KeepLatest, carry_out, plan_retention
from storage.errors import KeyExistsError, OutcomeUnknownError, StorageError
from storage.memory import MemoryBucket, MemoryStore
from storage.store import ByteRange, ObjectInfo
from tests.model.log_model import NONE, Action, Attempt, Entry, Model, Rec, record_of

DATA = "rank00000-000.safetensors"
LOST = (OutcomeUnknownError, "no answer")

_numbers = itertools.count(1)
SOURCES = Sources(
    tries_max=1,
    random_bytes=lambda nbytes: next(_numbers).to_bytes(nbytes, "big"),
    clock=lambda: 0.0,
    pause=lambda seconds: None,
)


class Killed(BaseException):
    """The process ends here."""


class Stalled(BaseException):
    """The call is cut off here, to be resumed."""


class World(MemoryStore):
    """The store of one world: the first put of a record ends as `fault` says, and what a stalled
    call was answered is kept.
    """

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = MemoryBucket()
        for key, data in objects.items():
            self.objects.add(key, data)
        super().__init__(self.objects)
        self.fault = ""
        self.sent: list[tuple[str, bytes]] = []  # and still on its way
        self.tape: list[Any] | None = None
        self.answers: Iterator[Any] = iter(())

    def contents(self) -> dict[str, bytes]:
        return {key: super(World, self).get(key) for key in self.objects.keys_from("", "")}

    def put_if_absent(self, key: str, data: bytes) -> None:
        if not key.startswith(f"{LOG_PREFIX}0"):
            return super().put_if_absent(key, data)
        if self.tape is not None:
            raise Stalled
        fault = self.fault if not self.fault.startswith("deleted") else ""
        self.fault = self.fault[: -len(fault)] if fault else self.fault
        if fault == "killed before":
            raise Killed
        if fault in ("twice", "late"):
            self.sent.append((key, data))
        if fault in ("", "twice"):
            return super().put_if_absent(key, data)
        if fault in ("applied", "killed after"):
            with contextlib.suppress(KeyExistsError):
                super().put_if_absent(key, data)
        if fault == "killed after":
            raise Killed
        raise OutcomeUnknownError(f"create {key}: no answer ({fault})")

    def delete(self, key: str) -> None:
        if self.fault == "deleted 0" and key.startswith("steps/"):
            raise Killed
        if self.fault.startswith("deleted"):
            self.fault = f"deleted {int(self.fault.split()[1]) - 1}"
        super().delete(key)

    # --- what a stalled call asked ----------------------------------------------------------------

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return bytes(self._answered(lambda: super(World, self).get(key, byte_range)))

    def info(self, key: str) -> ObjectInfo:
        answer = self._answered(lambda: super(World, self).info(key))
        assert isinstance(answer, ObjectInfo)
        return answer

    def _answered(self, ask: Callable[[], Any]) -> Any:
        answer = next(self.answers, None)
        if answer is None:
            try:
                answer = ask()
            except StorageError as error:
                answer = error
        if self.tape is not None:
            self.tape.append(answer)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        yield from self._answered(lambda: list(super(World, self).list(prefix, after=after)))


def copied(session: Session, store: World) -> Session:
    """A session with the same memory over another store, at another way from here."""
    other = Session.__new__(Session)
    other.__dict__.update(session.__dict__)
    other._given_up, other._leftovers = set(session._given_up), dict(session._leftovers)
    other._retired, other._lock = set(session._retired), threading.RLock()
    appender = other._appender = Appender.__new__(Appender)
    appender.__dict__.update(session._appender.__dict__)
    log = appender.log = Log.__new__(Log)
    log.__dict__.update(session.log.__dict__)
    log.store, log.segments = store, Segments(lambda: log.store)
    log.segments._known = dict(session.log.segments._known)
    return other


class Driven:
    """One world of the product. `copy` it to go two ways from it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.late: tuple[tuple[str, bytes], ...] = ()
        self.backup: dict[str, bytes] = {}
        self.sessions: dict[str, Session] = {}
        self.stalled: dict[str, tuple[Commit, tuple[Any, ...]]] = {}
        self.names: dict[Attempt, str] = {}
        self.store = World({})

    def copy(self) -> Driven:
        other = Driven.__new__(Driven)
        other.__dict__.update(self.__dict__)
        other.sessions, other.stalled = dict(self.sessions), dict(self.stalled)
        other.names = dict(self.names)
        return other

    def apply(self, action: Action, model: Model) -> str:
        """What the call reports. `model` is the world before it, for the names of things."""
        self.store = World(self.objects)
        self.store.fault = action.fault
        if action.job in self.sessions:
            self.sessions[action.job] = copied(self.sessions[action.job], self.store)
        try:
            outcome = str(getattr(self, f"_{action.name}")(action.job, model))
        except (CheckpointError, StorageError, Stalled) as error:
            outcome = type(error).__name__
            outcome = {"Stalled": "stalled", "OutcomeUnknownError": "OutcomeUnknown"}.get(
                outcome, outcome
            )
        except Killed:
            self.sessions.pop(action.job, None)
            outcome = "killed"
        self.objects = self.store.contents()
        self.late = (*self.late, *self.store.sent)
        return outcome

    # --- jobs -------------------------------------------------------------------------------------

    def _claim(self, name: str, model: Model) -> str:
        self.sessions.pop(name, None)
        self.sessions[name] = Session.claim(self.store, sources=SOURCES)
        return "done"

    def _save(self, name: str, model: Model) -> str:
        return self._commit(name, self._written(name, model, ()))

    def _dedup(self, name: str, model: Model) -> str:
        live = Log(self.store).state().live
        return self._commit(name, self._written(name, model, (live[-1].attempt,) if live else ()))

    def _stall(self, name: str, model: Model) -> str:
        commit = self._written(name, model, ())
        before = copied(self.sessions[name], self.store)
        self.store.tape = []
        try:
            return self._commit(name, commit)
        except Stalled:
            self.stalled[name] = commit, tuple(self.store.tape)
            self.sessions[name] = before
            raise

    def _resume(self, name: str, model: Model) -> str:
        commit, tape = self.stalled.pop(name)
        self.store.answers = iter(tape)
        return self._commit(name, commit)

    def _written(self, name: str, model: Model, references: tuple[str, ...]) -> Commit:
        session, step = self.sessions[name], model.steps + 1
        attempt, manifest = session.new_attempt(), b"manifest %d" % step
        self.names[(session.epoch, step)] = attempt
        prefix = step_prefix(step, attempt)
        self.store.put_if_absent(prefix + DATA, b"data %d" % step)
        if self.store.fault == "killed at manifest":
            raise Killed
        self.store.put_if_absent(prefix + MANIFEST_NAME, manifest)
        digest = manifest_digest(manifest)
        return Commit(attempt, step, len(manifest), digest, references=references)

    def _commit(self, name: str, commit: Commit) -> str:
        try:
            self.sessions[name].commit(commit)
        except CheckpointError as error:
            if type(error).__name__ != "OutcomeUnknown":
                self.sessions[name].give_up(commit.attempt, step=commit.step)
            raise
        return "done"

    def _settle(self, name: str, model: Model) -> str:
        settled = self.sessions[name].settle()
        return "nothing" if settled is None else "landed" if settled.landed else "lost"

    def _sweep(self, name: str, model: Model) -> str:
        self.sessions[name].sweep()
        return "done"

    def _sweep_failed(self, name: str, model: Model) -> str:
        self.sessions[name].sweep_failed()
        return "done"

    def _take_back(self, name: str, model: Model) -> str:
        return "nothing" if self.sessions[name].take_back_lost() is None else "done"

    def _retire(self, name: str, model: Model) -> str:
        attempt = Log(self.store).state().live[0].attempt
        return "nothing" if self._writer(name).retire(attempt) is None else "done"

    def _prune(self, name: str, model: Model) -> str:
        writer = self._writer(name)
        candidates = writer.state().live
        plan = plan_retention(candidates, KeepLatest(1), now_unix=0.0)
        leases = lambda: leases_of(self.store, now_unix=time.time())  # noqa: E731
        carry_out(plan, writer.retire, leases=leases)
        return "done"

    def _pin(self, name: str, model: Model) -> str:
        attempt = Log(self.store).state().live[0].attempt
        return "nothing" if self._writer(name).pin(attempt) is None else "done"

    def _unpin(self, name: str, model: Model) -> str:
        attempt = Log(self.store).state().live[0].attempt
        return "nothing" if self._writer(name).unpin(attempt) is None else "done"

    def _writer(self, name: str) -> Session | Maintenance:
        if name == "command":
            return Maintenance.open(self.store, sources=SOURCES)
        return self.sessions[name]

    # --- what happens to the root -----------------------------------------------------------------

    def _arrive(self, which: str, model: Model) -> str:
        """The late records of the model are sorted, those here are in the order of sending."""
        wanted = record_of(model.late[int(which)])
        for index, (key, data) in enumerate(self.late):
            if self._is_same(_decoded(key, data), wanted):
                self.late = self.late[:index] + self.late[index + 1 :]
                with contextlib.suppress(KeyExistsError):
                    self.store.put_if_absent(key, data)
                return "done"
        raise AssertionError(f"{wanted} was not sent")

    def _lease(self, name: str, model: Model) -> str:
        attempt = Log(self.store).state().live[0].attempt
        self.store.put_if_absent(lease_key(attempt, 10_000, b"reader 1"), b"")
        return "done"

    def _back_up(self, name: str, model: Model) -> str:
        self.backup = self.store.contents()
        return "done"

    def _restore(self, name: str, model: Model) -> str:
        self.store = World(self.backup)
        return "done"

    def _go_on_elsewhere(self, name: str, model: Model) -> str:
        store = World(self.backup)
        session = Session.claim(store, sources=SOURCES)
        self.sessions, there = dict(self.sessions), self.store
        self.sessions["elsewhere"], self.store = session, store
        self._save("elsewhere", model)
        self.backup, self.store = store.contents(), there
        del self.sessions["elsewhere"]
        return "done"

    def _copy_over(self, name: str, model: Model) -> str:
        self.store = World({**self.store.contents(), **self.backup})
        return "done"

    # --- the comparison ---------------------------------------------------------------------------

    def differences(self, model: Model) -> list[str]:
        """How this world is not the one of the model."""
        problems = []

        def same(what: str, here: object, there: object) -> None:
            if here != there:
                problems.append(f"{what}: {here}, the model says {there}")

        try:
            state = Log(self.store).state()
            same("refused", False, model.is_refused())
        except Corrupt as error:
            same(f"refused ({error})", True, model.is_refused())
        if not problems and not model.is_refused():
            view = model.view()
            same("last slot", state.slot, view.end)
            same("epoch", state.epoch, view.epoch)
            same("live", self._entries(state), [self._entry(entry) for entry in view.live])
            latest = view.live[-1].attempt if view.live else None
            same("latest", state.latest and state.latest.attempt, latest and self.names[latest])
        slots = [key for key in self.objects if key.startswith(f"{LOG_PREFIX}0")]
        same("slots", sorted(slots), [record_key(slot) for slot in sorted(model.slots)])
        if not problems:
            for slot, uid in model.slots.items():
                key = record_key(slot)
                if not self._is_same(_decoded(key, self.objects[key]), record_of(uid)):
                    same(f"slot {slot}", _decoded(key, self.objects[key]), record_of(uid))
        files = {(p[1], p[2]) for key in self.objects if (p := parse_step_key(key))}
        wanted = {(self.names[one], MANIFEST_NAME) for one in model.manifests}
        same("files", files, wanted | {(self.names[one], DATA) for one in model.data})
        same("late", len(self.late), len(model.late))
        same("jobs", sorted(self.sessions), sorted(set(model.jobs) - {"command"}))
        for name in self.sessions if not problems else ():
            problems += self._differences_of(name, model)
        return problems

    def _differences_of(self, name: str, model: Model) -> list[str]:
        session, job = self.sessions[name], model.jobs[name]
        if job.stalled is not None:
            return []  # cut off in the middle of a call
        is_fenced, pending = session._fenced_by is not None, session._appender.pending
        here = (session.epoch, is_fenced, pending is not None)
        there = (job.epoch, job.fenced, job.pending != NONE)
        problems = [] if here == there else [f"{name}: {here}, the model says {there}"]
        if pending is not None and not self._is_same(pending, record_of(job.pending)):
            problems.append(f"{name} waits for {pending}, the model for {record_of(job.pending)}")
        left = {self.names[attempt] for attempt in job.leftovers}
        if set(session._leftovers) != left:
            problems.append(f"{name}: left {session._leftovers}, the model says {left}")
        return problems

    def _is_same(self, record: Record, wanted: Rec) -> bool:
        live = [(e.attempt, e.slot, e.pinned, e.references) for e in _live(self.store, record)]
        attempt = None if wanted.attempt is None else self.names.get(wanted.attempt, "?")
        return (
            record.kind,
            record.slot,
            record.epoch,
            record.attempt,
            live,
        ) == (
            wanted.kind,
            wanted.slot,
            wanted.epoch,
            attempt,
            [self._entry(entry) for entry in wanted.live],
        )

    def _entries(self, state: LogState) -> list[tuple[Any, ...]]:
        return [(e.attempt, e.slot, e.pinned, e.references) for e in state.live]

    def _entry(self, entry: Entry) -> tuple[Any, ...]:
        references = tuple(sorted(self.names.get(one, "?") for one in entry.references))
        return self.names.get(entry.attempt, "?"), entry.slot, entry.pinned, references


@lru_cache(maxsize=4096)
def _decoded(key: str, data: bytes) -> Record:
    return decode_record(data, slot=int(key.rpartition("/")[2]), where=key)


def _live(store: World, record: Record) -> Any:
    return Log(store).live_of(record).all
