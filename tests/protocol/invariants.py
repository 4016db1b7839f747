"""The promises I1 to I7, I9 and I11 of the commit protocol as predicates, for tests of this library
and of stores. The others (ranks, dead ranks, changed bytes) leave nothing in a store to look at.

Each `check_...` returns violations in words; none means that the promise holds. What a store does
not show afterwards (which save was acknowledged, what was deleted when) is in a `History`, which
tests record, mostly through `RecordingStore`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ckpt.commit.live import LiveSet, Segments
from ckpt.commit.locate import file_keys
from ckpt.commit.log import UNDONE, Log, LogState
from ckpt.commit.names import (
    LOG_PREFIX,
    MANIFEST_NAME,
    RESERVE_KEY,
    SEGMENTS_PREFIX,
    parse_step_key,
    record_slot,
    segment_key,
)
from ckpt.commit.records import LiveEntry, Record, decode_record, manifest_digest
from ckpt.commit.session import Session
from ckpt.commit.writer import Commit
from ckpt.errors import CheckpointError
from ckpt.format.manifest_codec import decode_manifest
from storage.errors import KeyNotFoundError
from storage.memory import MemoryBucket, MemoryStore
from storage.store import ObjectWriter, Store
from storage.wrap import WrappedStore


class StoreChange(NamedTuple):
    """One change of a store, in the order in which the changes took effect."""

    op: Literal["create", "delete"]
    key: str
    data: bytes | None  # of log records only


class Load(NamedTuple):
    """A load that returned: the attempt that it reported, and those whose bytes it returned."""

    attempt: str
    attempts_read: frozenset[str]


@dataclass
class History:
    """What happened, as tests saw it."""

    changes: list[StoreChange] = field(default_factory=list)
    acknowledged: list[str] = field(
        default_factory=list
    )  # attempts whose save returned on any rank
    loads: list[Load] = field(default_factory=list)


class RecordingStore(WrappedStore):
    """Writes down what changes in `inner`. Several may share one history; put it nearest to the
    bytes, below stores that inject faults, so that it records what took effect.
    """

    def __init__(self, inner: Store, history: History) -> None:
        super().__init__(inner)
        self.history = history
        self._lock = threading.Lock()

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self._lock:
            self.inner.put_if_absent(key, data)
            self._note("create", key, data)

    def create(self, key: str, nbytes: int, **options: Any) -> AbstractContextManager[ObjectWriter]:
        @contextmanager
        def noted() -> Any:
            with self.inner.create(key, nbytes, **options) as writer:
                yield writer
            with self._lock:
                self._note("create", key, None)

        return noted()

    def delete(self, key: str) -> None:
        with self._lock:
            try:
                self.inner.info(key)
            except KeyNotFoundError:
                return  # another one was first: nothing changes
            self.inner.delete(key)
            self._note("delete", key, None)

    def _note(self, op: Literal["create", "delete"], key: str, data: bytes | None) -> None:
        # Only records are read back by the checks; data files would fill the memory.
        kept = bytes(data) if data is not None and key.startswith(LOG_PREFIX) else None
        self.history.changes.append(StoreChange(op, key, kept))


FilesOf = Callable[[LiveEntry, bytes], Iterable[tuple[str, int]]]


def check_all(store: Store, history: History, *, files_of: FilesOf | None = None) -> list[str]:
    """Every promise that can be checked without changing the store (I9 changes it)."""
    return [
        *check_live_complete(store, files_of=files_of),
        *check_ok_is_for_ever(store, history),
        *check_latest(store),
        *check_epochs(store),
        *check_written_once(store, history),
        *check_deletions(history),
        *check_loads(history),
        *check_always_one(store),
    ]


def check_live_complete(store: Store, *, files_of: FilesOf | None = None) -> list[str]:
    """I1: every live checkpoint is complete and matches its digests.

    `files_of(entry, manifest)` gives key and length of the files a manifest names.
    """
    violations = []
    for entry in Log(store).state().live:
        key = entry.prefix + MANIFEST_NAME
        try:
            manifest = store.get(key)
        except KeyNotFoundError:
            violations.append(f"I1: {key} of a live checkpoint is gone")
            continue
        if (len(manifest), manifest_digest(manifest)) != (
            entry.manifest_nbytes,
            entry.manifest_digest,
        ):
            violations.append(f"I1: {key} is not the manifest that was committed")
        for name, nbytes in files_of(entry, manifest) if files_of else ():
            try:
                stored = store.info(name).nbytes
            except KeyNotFoundError:
                stored = -1
            if stored != nbytes:
                violations.append(f"I1: {name} has {stored} bytes, expected {nbytes}")
    return violations


def files_needed(entry: LiveEntry, manifest: bytes) -> list[tuple[str, int]]:
    """Key and length of every data file that a checkpoint needs, for `check_live_complete`."""
    decoded = decode_manifest(manifest)
    keys = file_keys(entry.prefix, decoded)
    return list(zip(keys, decoded.file_nbytes.tolist(), strict=True))


def check_references(store: Store) -> list[str]:
    """I6, of real checkpoints: the log knows of each what its manifest refers to, and no more."""
    violations = []
    for entry in Log(store).state().live:
        manifest = decode_manifest(store.get(entry.prefix + MANIFEST_NAME))
        if manifest.references != entry.references:
            violations.append(
                f"I6: the log says that {entry.attempt} refers to {entry.references}, its manifest "
                f"refers to {manifest.references}"
            )
    return violations


def check_ok_is_for_ever(store: Store, history: History) -> list[str]:
    """I2: a save that returned OK on any rank is in the log."""
    committed = {r.attempt for r in Log(store).history() if r.kind == "COMMIT"}
    return [
        f"I2: {name} returned OK and is not in the log"
        for name in history.acknowledged
        if name not in committed
    ]


def check_latest(store: Store) -> list[str]:
    """I3: latest is the live COMMIT of highest position, by replaying the log's kinds alone.

    Commits of a line come before those of none; a checkpoint stays in its line.
    """
    live: dict[str, int] = {}
    lines: dict[str, int | None] = {}
    violations = []
    log = Log(store)
    for record in log.history():
        entries = log.live_of(record).all
        if record.kind == "COMMIT" and record.attempt is not None:
            live[record.attempt] = record.slot
            lines[record.attempt] = record.live[-1].line
        if record.kind == "RETIRE" and record.attempt is not None:
            live.pop(record.attempt, None)
        if {e.attempt: e.slot for e in entries} != live:
            violations.append(
                f"I3: the live set of slot {record.slot} does not follow from the log"
            )
        if any(lines.get(e.attempt) != e.line for e in entries):
            violations.append(f"I3: slot {record.slot} moves a checkpoint to another line")
    latest = Log(store).state().latest
    expected = max(live, key=lambda name: (lines[name] is not None, live[name]), default=None)
    if (latest.attempt if latest else None) != expected:
        violations.append(f"I3: latest is {latest}, expected {expected}")
    return violations


def check_epochs(store: Store) -> list[str]:
    """I4: after CLAIM(e) no entry of a lower epoch; every claim has the next epoch."""
    violations, epoch = [], 0
    for record in Log(store).history():
        expected = epoch + 1 if record.kind == "CLAIM" else epoch
        if record.epoch != expected:
            violations.append(
                f"I4: slot {record.slot} is a {record.kind} of epoch {record.epoch}, "
                f"expected {expected}"
            )
        epoch = max(epoch, record.epoch)
    return violations


def check_written_once(store: Store, history: History) -> list[str]:
    """I5: no key is written twice, no log entry removed or changed."""
    violations, seen = [], set()
    for change in history.changes:
        if change.key == RESERVE_KEY:
            continue  # has no content; it is there to be deleted
        if change.op == "create" and change.key in seen:
            violations.append(f"I5: {change.key} was written twice")
        if change.op == "delete" and parse_step_key(change.key) is None:
            violations.append(f"I5: {change.key} was deleted, only our files below steps/ may be")
        seen.add(change.key)
        if change.op == "create" and change.data is not None:
            try:
                same = store.get(change.key) == change.data
            except KeyNotFoundError:
                same = False
            if not same:
                violations.append(f"I5: {change.key} was removed or changed")
    keys = [info.key for info in store.list(LOG_PREFIX)]
    slots = [record_slot(key) for key in keys if not key.startswith(SEGMENTS_PREFIX)]
    if slots != list(range(len(slots))):
        violations.append("I5: the log has a hole, or a foreign object")
    return violations


def check_deletions(history: History) -> list[str]:
    """I6: nothing is deleted that a live or possibly committed attempt needs; MANIFEST goes
    first.
    """
    violations: list[str] = []
    live: tuple[LiveEntry, ...] = ()
    deleted: dict[str, int] = {}
    created: dict[str, int] = {}
    stored: dict[str, bytes] = {}
    for position, change in enumerate(history.changes):
        if change.data is not None and change.key.startswith(SEGMENTS_PREFIX):
            stored[change.key] = change.data
        elif change.data is not None:
            record = _decoded(change)
            live = _live_in(stored, record)
            if record.kind == "COMMIT" and record.attempt in deleted:
                violations.append(
                    f"I6: {record.attempt} was committed after files of it were deleted"
                )
        parsed = parse_step_key(change.key)
        if change.op == "create":
            created[change.key] = position
        if change.op != "delete" or parsed is None:
            continue
        attempt, name = parsed[1], parsed[2]
        needed = any(attempt in (e.attempt, *e.references) for e in live)
        if needed:
            violations.append(f"I6: {change.key} was deleted while a live checkpoint needed it")
        # A writer that stalled may create it after the rest was swept: then nothing was torn.
        since = created.get(change.key, -1)
        if name == MANIFEST_NAME and since < deleted.get(attempt, -1):
            violations.append(f"I6: {change.key} was deleted after other files of its attempt")
        deleted.setdefault(attempt, position)
    return violations


def check_loads(history: History) -> list[str]:
    """I7: a load returns bytes of exactly one attempt."""
    return [
        f"I7: a load of {load.attempt} gave bytes of {sorted(load.attempts_read)}"
        for load in history.loads
        if load.attempts_read != {load.attempt}
    ]


def check_fresh_session(
    store: Store, *, load: Callable[[LogState], Sequence[str]] | None = None
) -> list[str]:
    """I9: a fresh session can open, save and load without a human. Changes the store: run it last.

    `load(state)` returns violations of its own.
    """
    try:
        before = Log(store).state()
        session = Session.claim(store)
        attempt, manifest = session.new_attempt(), b"manifest of a fresh session"
        step = max((e.step for e in before.live), default=0) + 1
        key = f"steps/{step:08d}-{attempt}/{MANIFEST_NAME}"
        store.put_if_absent(key, manifest)
        commit = Commit(attempt, step, len(manifest), manifest_digest(manifest))
        session.commit(commit)
        after = Log(store).state()
    except CheckpointError as error:
        return [f"I9: a fresh session failed: {type(error).__name__}: {error}"]
    violations = (
        [] if after.latest and after.latest.attempt == attempt else ["I9: its save is not latest"]
    )
    lost = {e.attempt for e in before.live} - {e.attempt for e in after.live}
    violations += [f"I9: {name} was lost by claiming" for name in sorted(lost)]
    return [*violations, *(load(before) if load is not None else ())]


def check_always_one(store: Store) -> list[str]:
    """I11: once a save succeeded there is always one to load."""
    records = list(Log(store).history())
    undone = {record.attempt for record in records if record.write_id.startswith(UNDONE)}
    saved, violations = False, []
    for record in records:
        saved = saved or (record.kind == "COMMIT" and record.attempt not in undone)
        if saved and not record.count:
            violations.append(f"I11: after slot {record.slot} there is nothing left to load")
    return violations


def _live_in(stored: dict[str, bytes], record: Record) -> tuple[LiveEntry, ...]:
    """The live set of a record whose segments are among the objects `stored`."""
    bucket = MemoryBucket()
    for ref in record.segments:
        key = segment_key(ref.digest)
        bucket.add(key, stored[key])
    segments = Segments(lambda: MemoryStore(bucket))
    return LiveSet(record.live, record.segments, record.gone, segments).all


def _decoded(change: StoreChange) -> Record:
    assert change.data is not None
    return decode_record(change.data, slot=int(change.key.rpartition("/")[2]), where=change.key)
