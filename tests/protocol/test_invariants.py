"""The predicates that other tests rest on: each finds its violation, and nothing in a good history.

Method: logs of hand-made records in memory, histories written down by hand.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt.commit.log import Log, LogState
from ckpt.commit.names import MANIFEST_NAME, RESERVE_KEY, record_key
from ckpt.commit.records import (
    Kind,
    LiveEntry,
    Record,
    encode_record,
    manifest_digest,
    record_digest,
)
from ckpt.commit.session import Session
from ckpt.commit.writer import Commit
from storage.memory import MemoryStore
from storage.store import Store
from tests.protocol.invariants import (
    History,
    Load,
    RecordingStore,
    StoreChange,
    check_all,
    check_always_one,
    check_deletions,
    check_epochs,
    check_fresh_session,
    check_latest,
    check_live_complete,
    check_loads,
    check_ok_is_for_ever,
    check_written_once,
)

A, B, C = (f"e000001-{number:016x}" for number in (10, 11, 12))


def entry(attempt: str, slot: int, line: int | None = 0, *references: str) -> LiveEntry:
    return LiveEntry(
        attempt, slot, slot, 3, manifest_digest(b"abc"), False, False, None, references, line
    )


def record(slot: int, kind: Kind, attempt: str | None, *live: LiveEntry, epoch: int = 1) -> Record:
    previous = b"p" * 32 if slot else None
    return Record(kind, slot, epoch, b"w" * 16, 0.0, attempt, live, previous)


def log_of(*records: Record) -> MemoryStore:
    store = MemoryStore()
    previous = None
    for one in records:
        data = encode_record(replace(one, previous=previous))
        store.put_if_absent(record_key(one.slot), data)
        previous = record_digest(data)
    return store


CLAIM = record(0, "CLAIM", None)
A1, B2 = entry(A, 1), entry(B, 2)
COMMIT_A = record(1, "COMMIT", A, A1)
COMMIT_B = record(2, "COMMIT", B, A1, B2)


def test_a_good_history_violates_nothing() -> None:
    history = History()
    store = RecordingStore(MemoryStore(), history)
    session = Session.claim(store)
    for step in (1, 2, 3):
        attempt = session.new_attempt()
        prefix = f"steps/{step:08d}-{attempt}/"
        with store.create(prefix + "rank00000-000.safetensors", 4, part_nbytes=4) as writer:
            writer.write_part(0, [memoryview(b"data")])
        store.put_if_absent(prefix + MANIFEST_NAME, b"abc")
        session.commit(Commit(attempt, step, 3, manifest_digest(b"abc")))
        history.acknowledged.append(attempt)
        history.loads.append(Load(attempt, frozenset({attempt})))
    session.retire(history.acknowledged[0])
    assert check_all(store, history) == []
    assert [change.op for change in history.changes].count("delete") == 2
    assert check_fresh_session(store) == []


def test_nothing_is_found_in_an_empty_root() -> None:
    assert check_all(MemoryStore(), History()) == []


# --- what a live checkpoint needs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [(b"abc", None), (None, "is gone"), (b"abx", "is not the manifest"), (b"", "is not the manif")],
)
def test_i1_a_manifest_is_there_as_committed(manifest: bytes | None, expected: str | None) -> None:
    store = log_of(CLAIM, COMMIT_A)
    if manifest is not None:
        store.put_if_absent(A1.prefix + MANIFEST_NAME, manifest)
    violations = check_live_complete(store)
    assert [text for text in violations if expected and expected in text] == violations
    assert len(violations) == (expected is not None)


@pytest.mark.parametrize(("stored", "count"), [(b"data", 0), (b"dat", 1), (None, 1)])
def test_i1_files_have_their_lengths(stored: bytes | None, count: int) -> None:
    store = log_of(CLAIM, COMMIT_A)
    store.put_if_absent(A1.prefix + MANIFEST_NAME, b"abc")
    if stored is not None:
        store.put_if_absent("file", stored)
    assert len(check_live_complete(store, files_of=lambda entry, data: [("file", 4)])) == count


def test_i2_what_was_acknowledged_is_in_the_log() -> None:
    store = log_of(CLAIM, COMMIT_A, record(2, "PIN", A, replace(A1, pinned=True)))
    good = History(acknowledged=[A])
    assert check_ok_is_for_ever(store, good) == []
    assert len(check_ok_is_for_ever(store, History(acknowledged=[B]))) == 1
    retired = log_of(CLAIM, COMMIT_A, COMMIT_B, record(3, "RETIRE", A, B2))
    assert check_ok_is_for_ever(retired, History(acknowledged=[A])) == []


# --- the log --------------------------------------------------------------------------------------


def test_i3_the_live_set_follows_from_the_log() -> None:
    assert check_latest(log_of(CLAIM, COMMIT_A, COMMIT_B, record(3, "RETIRE", A, B2))) == []
    lost = log_of(CLAIM, COMMIT_A, record(2, "COMMIT", B, B2))
    assert [text.split(":")[0] for text in check_latest(lost)] == ["I3"]
    moved = record(2, "PIN", A, replace(A1, line=1))
    assert "to another line" in check_latest(log_of(CLAIM, COMMIT_A, moved))[0]


def test_i3_the_latest_is_the_newest_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = record(3, "COMMIT", C, A1, B2, entry(C, 3, None))
    store = log_of(CLAIM, COMMIT_A, COMMIT_B, imported)
    assert check_latest(store) == []
    for wrong in (0, 2):

        def latest(state: LogState, index: int = wrong) -> LiveEntry:
            return state.live[index]

        monkeypatch.setattr(LogState, "latest", property(latest))
        assert "I3: latest is" in check_latest(store)[0]


@pytest.mark.parametrize(
    "wrong",
    [
        record(2, "COMMIT", B, A1, B2, epoch=2),
        record(2, "CLAIM", None, A1, epoch=1),
        record(2, "CLAIM", None, A1, epoch=3),
    ],
)
def test_i4_epochs_are_those_of_claims(wrong: Record) -> None:
    assert check_epochs(log_of(CLAIM, COMMIT_A, COMMIT_B)) == []
    assert len(check_epochs(log_of(CLAIM, COMMIT_A, wrong))) == 1


def test_i4_an_older_epoch_is_found_wherever_it_comes_back() -> None:
    newer = record(2, "CLAIM", None, A1, epoch=2)
    late = record(3, "PIN", A, replace(A1, pinned=True), epoch=1)
    again = record(4, "UNPIN", A, A1, epoch=1)
    assert len(check_epochs(log_of(CLAIM, COMMIT_A, newer, late, again))) == 2


def test_i11_there_is_always_one_to_load() -> None:
    assert check_always_one(log_of(CLAIM, COMMIT_A)) == []
    emptied = record(2, "RETIRE", A)
    assert len(check_always_one(log_of(CLAIM, COMMIT_A, emptied))) == 1


# --- changes of the store -------------------------------------------------------------------------


def changes_of(store: Store) -> list[StoreChange]:
    return [StoreChange("create", info.key, store.get(info.key)) for info in store.list("log/")]


def test_i5_keys_are_written_once_and_the_log_stays() -> None:
    store = log_of(CLAIM, COMMIT_A)
    log = changes_of(store)
    file = A1.prefix + "rank00000-000.safetensors"

    def violations(*more: StoreChange) -> int:
        return len(check_written_once(store, History(changes=[*log, *more])))

    created, deleted = StoreChange("create", file, None), StoreChange("delete", file, None)
    assert violations(created, deleted) == 0
    assert violations(created, created) == 1
    assert violations(created, deleted, created) == 1
    assert (
        violations(*[StoreChange(op, RESERVE_KEY, None) for op in ("create", "delete", "create")])
        == 0
    )
    assert violations(StoreChange("delete", "notes.txt", None)) == 1
    assert violations(StoreChange("create", record_key(2), b"gone")) == 1
    changed = [log[0], log[1]._replace(data=b"other")]
    assert len(check_written_once(store, History(changes=changed))) == 1


def test_i5_a_hole_or_a_foreign_object_in_the_log_is_found() -> None:
    hole = log_of(CLAIM)
    hole.put_if_absent(record_key(2), b"x")
    foreign = log_of(CLAIM)
    foreign.put_if_absent("log/notes", b"x")
    for store in (hole, foreign):
        assert len(check_written_once(store, History())) == 1


def test_i6_nothing_that_is_needed_is_deleted_and_the_manifest_goes_first() -> None:
    def change(one: LiveEntry, name: str = "rank00000-000.safetensors") -> StoreChange:
        return StoreChange("delete", one.prefix + name, None)

    def violations(*changes: StoreChange) -> list[str]:
        return check_deletions(History(changes=list(changes)))

    def appended(one: Record) -> StoreChange:
        return StoreChange("create", record_key(one.slot), encode_record(one))

    manifest, data = change(A1, MANIFEST_NAME), change(A1)
    both = (appended(COMMIT_A), appended(COMMIT_B))
    assert violations(*both, appended(record(3, "RETIRE", A, B2)), manifest, data) == []
    assert "while a live checkpoint needed it" in violations(*both, data)[0]
    user = record(2, "COMMIT", B, A1, entry(B, 2, 0, A))
    gone = record(3, "RETIRE", A, entry(B, 2))
    assert violations(appended(user), appended(gone), data) == []
    assert len(violations(appended(user), data)) == 1
    assert "after other files" in violations(data, manifest)[0]
    assert violations(manifest, change(entry(B, 2), MANIFEST_NAME)) == []
    assert "committed after files of it" in violations(data, appended(COMMIT_A))[0]
    assert violations(change(entry(B, 2)), appended(COMMIT_A)) == []


def test_a_recording_store_writes_down_what_took_effect() -> None:
    history = History()
    store = RecordingStore(MemoryStore(), history)
    store.put_if_absent("log/x", b"1")
    store.put_if_absent("steps/x", b"2")
    with store.create("steps/y", 1, part_nbytes=1) as writer:
        writer.write_part(0, [memoryview(b"3")])
    with pytest.raises(RuntimeError), store.create("steps/z", 1, part_nbytes=1):
        raise RuntimeError
    store.delete("steps/x")
    store.delete("steps/x")
    assert history.changes == [
        StoreChange("create", "log/x", b"1"),
        StoreChange("create", "steps/x", None),
        StoreChange("create", "steps/y", None),
        StoreChange("delete", "steps/x", None),
    ]


# --- what loads report ----------------------------------------------------------------------------


def test_i7_a_load_returns_bytes_of_its_attempt_alone() -> None:
    loads = [Load(A, frozenset({A})), Load(A, frozenset({B})), Load(A, frozenset({A, B}))]
    assert [len(check_loads(History(loads=[load]))) for load in loads] == [0, 1, 1]


def test_i9_a_fresh_session_saves_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = log_of(CLAIM, COMMIT_A)
    assert "no FORMAT object" in check_fresh_session(store)[0]
    store = MemoryStore()
    Session.claim(store)
    assert check_fresh_session(store, load=lambda state: [f"of slot {state.slot}"]) == ["of slot 0"]
    with monkeypatch.context() as patched:
        patched.setattr(LogState, "latest", None)
        assert check_fresh_session(store) == ["I9: its save is not latest"]
    saved = [one.attempt for one in Log(store).state().live]
    claim = Session.claim

    def losing(store: Store) -> Session:
        session = claim(store)
        session.retire(saved[0])
        return session

    monkeypatch.setattr(Session, "claim", losing)
    assert check_fresh_session(store) == [f"I9: {saved[0]} was lost by claiming"]
