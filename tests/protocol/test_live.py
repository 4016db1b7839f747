"""The live set of a long training: small records, few requests, and no entry lost or brought back.

Method: sessions over a memory store with small limits, held against a plain dict; a log of up to a
million checkpoints whose slots are computed, and requests that are counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import operate
from ckpt.cli import json_of, looking
from ckpt.commit import appender
from ckpt.commit import live as live_module
from ckpt.commit.appender import Sources
from ckpt.commit.live import (
    RECORD_NBYTES,
    LiveSet,
    Segments,
    segment_of,
    with_live,
)
from ckpt.commit.locate import live_entries, locate
from ckpt.commit.log import MENDED, Log, encode_format
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME, SEGMENTS_PREFIX, record_key, record_slot, segment_key
from ckpt.commit.records import (
    Kind,
    LiveEntry,
    Record,
    SegmentRef,
    decode_record,
    decode_segment,
    encode_record,
    encode_segment,
    manifest_digest,
    record_digest,
)
from ckpt.commit.session import Session, SessionRegistry, open_session
from ckpt.commit.writer import Commit, NotRetired
from ckpt.errors import CheckpointError, Corrupt, UnsupportedFormat
from ckpt.operate import copy, mend
from ckpt.screens.terminal import date, show_table, size
from ckpt.world.base import SoloWorld
from storage import open_store
from storage.errors import KeyNotFoundError, NoSpaceError
from storage.memory import MemoryBucket, MemoryStore
from storage.store import ByteRange, ObjectInfo
from storage.wrap import WrappedStore
from tests.conftest import Scale
from tests.counting import python_calls
from tests.protocol.test_log import fields_of, sealed

CHUNK = 8000  # checkpoints that are folded at a time, where nobody looks at the time between
NO_PAUSE = Sources(pause=lambda seconds: None)


MARKS: tuple[tuple[Callable[[Session, str], object], dict[str, Any]], ...] = (
    (Session.verified, {"verified": True}),
    (Session.pin, {"pinned": True}),
    (Session.unpin, {"pinned": False}),
)


def entry(slot: int, **changes: Any) -> LiveEntry:
    name, digest = f"e000001-{slot:016x}", slot.to_bytes(32, "big")
    base = LiveEntry(name, 10 * slot, slot, 5000 + slot, digest, False, False, None, ())
    base = replace(base, committed_unix=1e9 + slot / 4, nbytes=10**9 + slot)
    return replace(base, **changes) if changes else base


def claim(store: Any) -> Session:
    return Session.claim(store, sources=replace(NO_PAUSE, tries_max=2))


def save(session: Session, step: int, **options: Any) -> LiveEntry:
    attempt, manifest = session.new_attempt(), b"manifest %d" % step
    prefix = f"steps/{step:08d}-{attempt}/"
    session.store.put_if_absent(prefix + MANIFEST_NAME, manifest)
    digest = manifest_digest(manifest)
    return session.commit(Commit(attempt, step, len(manifest), digest, **options))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a few checkpoints reach."""
    limits = {"RECORD_NBYTES": 900, "LISTED_MIN": 2, "MERGE_RATIO": 2}
    limits |= {"SEGMENT_COUNT_MAX": 12, "CHANGED_MAX": 2, "GONE_MAX": 3}
    for name, value in limits.items():
        monkeypatch.setattr(live_module, name, value)


# --- as a plain dict ------------------------------------------------------------------------------


def _as_ever(session: Session, model: dict[str, LiveEntry]) -> None:
    expected = tuple(sorted(model.values(), key=lambda one: one.slot))
    for state in (session.state(), Log(session.store).state()):
        assert state.live == expected
        assert len(state.entries) == len(expected)
        assert list(state.newest_first()) == list(reversed(expected))
        assert state.latest == expected[-1]
        assert state.find(expected[0].attempt) == expected[0]
        assert state.find("e000001-" + "f" * 16) is None


@pytest.mark.usefixtures("small")
def test_any_commits_marks_and_retirements_leave_what_they_say(seed: int, scale: Scale) -> None:
    for number in range(scale.count(3, 60)):
        rng = random.Random(seed + number)
        store = MemoryStore()
        session, model = claim(store), dict[str, LiveEntry]()
        for step in range(120):
            what = rng.random()
            victims = [one for one in list(model.values())[:-1] if not one.pinned]
            if what < 0.5 or len(model) < 2:
                references = tuple(rng.sample(sorted(model), min(len(model), rng.randrange(2))))
                new = save(session, step, metric=rng.choice([None, 0.5]), references=references)
                model[new.attempt] = new
            elif what < 0.75 and victims:
                victim = rng.choice(victims)
                if any(victim.attempt in one.references for one in model.values()):
                    with pytest.raises(NotRetired, match="is needed by"):
                        session.retire(victim.attempt)
                else:
                    session.retire(victim.attempt)
                    del model[victim.attempt]
            else:
                one = rng.choice(list(model.values()))
                mark, change = rng.choice(MARKS)
                mark(session, one.attempt)
                model[one.attempt] = replace(one, **change)
            if step % 20 == 19:
                _as_ever(session, model)
        assert [info for info in store.list(SEGMENTS_PREFIX)]
        Log(store).check_end()
        _as_ever(claim(store), model)


@pytest.mark.usefixtures("small")
def test_what_others_did_meanwhile_is_seen_through_segments() -> None:
    store = MemoryStore()
    session = claim(store)
    saved = [save(session, step) for step in range(30)]
    keeper = Maintenance.open(store, sources=NO_PAUSE)
    for one in saved[:25]:
        keeper.retire(one.attempt)
    keeper.pin(saved[26].attempt)
    save(session, 30)
    steps = [(one.step, one.pinned) for one in session.state().live]
    assert steps == [(25, False), (26, True), (27, False), (28, False), (29, False), (30, False)]
    assert keeper.state().live == session.state().live


@pytest.mark.usefixtures("small")
def test_a_retirement_is_shown_with_its_step_from_a_segment() -> None:
    store = MemoryStore()
    session = claim(store)
    saved = [save(session, step) for step in range(30)]
    session.retire(saved[3].attempt)
    (event,) = ckpt.history(store, count=1)
    assert (event.kind, event.step, event.live) == ("RETIRE", 3, 29)


@pytest.mark.usefixtures("small")
def test_a_root_with_segments_is_copied_whole_and_mended(tmp_path: Path) -> None:
    url, target = str(tmp_path / "run"), str(tmp_path / "copy")
    for step in range(1, 13):
        ckpt.save({"x": torch.ones(3) * step}, url, step=step)
    known = _times_and_sizes(url)
    copy(url, target, root=True)
    assert _times_and_sizes(target) == known and all(all(one) for one in known.values())
    state = {"x": torch.zeros(3)}
    assert ckpt.load(state, target, step=3).step == 3 and torch.equal(state["x"], torch.ones(3) * 3)
    assert ckpt.load(state, target).step == 12
    assert list((tmp_path / "copy" / "log" / "live").iterdir())
    for slot in (4, 5):
        (tmp_path / "run" / "log" / f"{slot:020d}").unlink()
    report = mend(url)
    assert (report.filled, report.lost) == ((4, 5), ())
    assert _times_and_sizes(url) == known
    ckpt.forget(url)
    ckpt.save({"x": torch.ones(3)}, url, step=13)
    assert [one.step for one in live_entries(open_store(url))] == list(range(1, 14))


def _times_and_sizes(url: str) -> dict[str, tuple[float | None, int | None]]:
    live = live_entries(open_store(url))
    return {entry.attempt: (entry.committed_unix, entry.nbytes) for entry in live}


# --- size and requests ----------------------------------------------------------------------------


@cache
def _objects(count: int) -> tuple[dict[str, bytes], Record, int]:
    """A root with so many checkpoints: what is read of it, its newest record, bytes of segments."""
    objects = {"FORMAT": encode_format("0" * 32)}
    nbytes = 0

    def write(ref: SegmentRef, data: bytes) -> None:
        nonlocal nbytes
        nbytes += len(data)
        objects[segment_key(ref.digest)] = data

    live = LiveSet(segments=Segments(MemoryStore))
    for start in range(1, count + 1, CHUNK):
        new = [entry(slot) for slot in range(start, min(start + CHUNK, count + 1))]
        live = replace(live, listed=(*live.listed, *new))
        live = live.folded(write) if len(live.listed) >= CHUNK else live
    kinds: tuple[Kind, Kind] = ("CLAIM", "CLAIM")
    previous = b"p" * 32
    for slot, kind in enumerate(kinds, count + 1):
        write_id = MENDED + b"w" * 8  # nobody looks at the records before it
        bare = Record(kind, slot, slot, write_id, 0.0, None, (), previous)
        record, live = with_live(bare, live, write)
        objects[record_key(slot)] = encode_record(record)
        previous = record_digest(objects[record_key(slot)])
    newest = next(live.newest_first())
    objects[newest.prefix + MANIFEST_NAME] = b"m" * newest.manifest_nbytes
    return objects, record, nbytes


class Long(WrappedStore):
    """A root with `count` checkpoints: all slots are taken, the last two can be read."""

    def __init__(self, count: int) -> None:
        objects, self.record, self.written = _objects(count)
        bucket = MemoryBucket()
        for key, data in objects.items():
            bucket.add(key, data)
        super().__init__(MemoryStore(bucket))
        self.requests: list[str] = []
        self.nbytes_read = 0
        self.count = count

    def info(self, key: str) -> ObjectInfo:
        self.requests.append(key)
        slot = record_slot(key)
        if slot is not None and slot <= self.count:
            return ObjectInfo(key, 100, 0.0)
        return self.inner.info(key)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return self._read(key, self.inner.get(key, byte_range))

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        return self._read(key, self.inner.get_bounded(key, nbytes_max))

    def _read(self, key: str, data: bytes) -> bytes:
        self.requests.append(key)
        self.nbytes_read += len(data)
        return data

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.requests.append(prefix)
        if prefix != "log/":
            yield from self.inner.list(prefix, after=after)
            return
        slot = record_slot(after)
        first = 0 if slot is None else slot + 1
        yield from (ObjectInfo(record_key(s), 1, 0.0) for s in range(first, self.count + 1))
        yield from self.inner.list(prefix, after=max(after, record_key(self.count)))

    def asked(self) -> tuple[int, int]:
        """Requests since the last call: all, and those for segments."""
        all_of_them, self.requests = self.requests, []
        return len(all_of_them), sum(key.startswith(SEGMENTS_PREFIX) for key in all_of_them)


@pytest.mark.parametrize("count", [10, 1000, 100_000, 1_000_000])
def test_records_stay_small_and_the_state_takes_few_requests(count: int, scale: Scale) -> None:
    if count > scale.count(100_000, 1_000_000):
        pytest.skip("takes a minute: make soak")
    store = Long(count)
    assert len(encode_record(store.record)) <= RECORD_NBYTES
    log = Log(store)
    state = log.state()
    latest = state.latest
    assert latest is not None and latest.slot == count and len(state.entries) == count
    # To find the end by doubling and bisecting, and the newest two records.
    assert store.asked() <= (56, 0)
    assert state.entries.segments is log.segments
    assert [one.slot for one in state.live] == list(range(1, count + 1))
    segments = store.asked()
    assert segments[0] == segments[1] == len(store.record.segments) <= 12
    assert state.find(entry(1).attempt) == entry(1) and store.asked() == (0, 0)
    print(f"{count}: record {len(encode_record(store.record))}, segments {segments}")
    # Each entry takes about 80 bytes and is written again a few times only.
    assert store.written <= 800 * count


def test_a_save_among_many_reads_no_segment_and_writes_one_small_record() -> None:
    store = Long(100_000)
    session = claim(store)
    store.asked()
    for step in range(3):
        save(session, step)
    requests, of_segments = store.asked()
    assert requests <= 3 * 10 and of_segments == 0
    newest = store.inner.get(record_key(session.state().slot))
    assert len(newest) <= RECORD_NBYTES


@pytest.mark.parametrize("count", [1000, pytest.param(10**6, marks=pytest.mark.soak)])
def test_a_job_begins_and_saves_among_many_in_few_requests_and_bytes(count: int) -> None:
    """Segments are made by the code that folds a live set, `CHUNK` checkpoints at a time; the slots
    of their commits are computed. Building 10^6 took 20 CPU seconds, and 1.1 GB of memory.
    """
    store = Long(count)
    latest = Log(store).state().latest
    assert latest is not None and latest.slot == count
    assert store.asked() <= (60, 0) and store.nbytes_read <= 3 * RECORD_NBYTES
    session = claim(store)
    assert session.take_back_lost() is None
    assert store.asked() <= (60, 0)
    before = session.state().entries.refs
    for step in range(10):
        store.nbytes_read = 0
        one = save(session, 10**9 + step)
        # None of them is folded here; one in a few hundred is, and may read one segment.
        assert store.asked() <= (10, 0) and store.nbytes_read <= 6 * RECORD_NBYTES
    session.retire(one.attempt, delete=False)
    assert store.asked()[1] == 0
    state = session.state()
    assert len(state.entries) == count + 9
    assert len(state.entries.refs) <= len(before) + 1 <= 13
    names = {info.key for info in store.inner.list(SEGMENTS_PREFIX)}
    # Those of before, too: nothing is deleted. 8,000 at a time, so 125 folds of 10^6.
    assert len(names) <= count // CHUNK + 12


def test_the_latest_of_many_is_located_without_a_segment() -> None:
    store = Long(100_000)
    with pytest.raises(Corrupt, match="digest"):  # the bytes are made up, and were asked for
        locate(store)
    assert store.asked()[1] == 0


@pytest.mark.parametrize("count", [10, 1000, 100_000])
def test_ls_takes_few_requests_however_many_checkpoints_there_are(
    count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(looking, "show_table", lambda titles, rows, right: shown.extend(rows))
    store = Long(count)
    shown.extend(json_of("ls", operate.ls(store))["checkpoints"])
    # FORMAT, the end of the log by doubling and bisecting, two records, the segments.
    requests, of_segments = store.asked()
    assert requests <= 50 and of_segments <= 5
    known = ("slot", "committed_unix", "nbytes")
    expected = [tuple(getattr(entry(slot), name) for name in known[1:]) for slot in (1, count)]
    assert [tuple(row[name] for name in known[1:]) for row in (shown[0], shown[-1])] == expected
    assert len(shown) == count
    if count > 1000:
        return  # the table makes the same requests
    shown.clear()
    looking.show_ls(operate.ls(store))
    assert store.asked() == (requests, of_segments) and len(shown) == count
    assert shown[-1][1:3] == (date(1e9 + count / 4), size(10**9 + count))
    assert f"{count} checkpoints" in capsys.readouterr().out


def test_a_table_of_many_rows_is_made_without_a_call_per_letter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """rich makes hundreds of calls for a row, which is a minute for a large root."""
    rows = [(f"{number}", "a", "b\x1b") for number in range(2000)]
    calls = python_calls(lambda: show_table(("step", "x", "y"), rows, right=("step",)))
    assert calls < 100 * len(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "x", "y"] and lines[5] == "   4  a  b\\x1b"


@pytest.mark.usefixtures("small")
def test_a_checkpoint_keeps_the_time_of_its_commit_whatever_is_done_to_it() -> None:
    clock = iter(range(1000, 10**6, 10))
    sources = Sources(pause=lambda seconds: None, clock=lambda: float(next(clock)))
    store = MemoryStore()
    session = Session.claim(store, sources=sources)
    saved = [save(session, step, nbytes=500 + step) for step in range(30)]
    log = Log(store)
    times = {one.attempt: log.record(one.slot).time_unix for one in saved}
    keeper = Maintenance.open(store, sources=sources)
    keeper.pin(saved[3].attempt)
    keeper.verified(saved[29].attempt)
    keeper.retire(saved[4].attempt)
    state = Log(store).state()
    assert state.entries.refs and len(state.live) == 29
    for one in state.live:
        assert one.committed_unix == times[one.attempt] and one.nbytes == 500 + one.step


def test_times_and_sizes_of_no_calendar_and_no_disk_are_refused() -> None:
    known = entry(1)
    record = Record("COMMIT", 1, 1, b"w" * 16, 0.0, known.attempt, (known,), b"p" * 32)
    assert decode_record(encode_record(record), slot=1, where="log") == record
    whole = fields_of(encode_record(record))
    changes: list[dict[str, Any]] = [{"committed_unix": -1.0}, {"committed_unix": 2e11}]
    changes += [{"committed_unix": float("nan")}, {"committed_unix": 5}, {"committed_unix": None}]
    changes += [{"nbytes": -1}, {"nbytes": 1.5}, {"nbytes": None}, {"nbytes": 2**63}]
    for change in changes:
        live = [{**whole["live"][0], **change}]
        with pytest.raises(Corrupt):
            decode_record(sealed({**whole, "live": live}), slot=1, where="log")
    for name in ("line", "committed_unix", "nbytes"):
        lacking = {key: value for key, value in whole["live"][0].items() if key != name}
        with pytest.raises(Corrupt, match=f"field '{name}' is missing"):
            decode_record(sealed({**whole, "live": [lacking]}), slot=1, where="log")


def test_a_retirement_among_many_takes_no_longer_than_among_few() -> None:
    """Calls and not seconds: a prune of a large root took the square of its checkpoints."""
    calls = []
    for count in (1000, 30_000):
        store = Long(count)
        session = claim(store)
        saved = save(session, 10**6, references=(entry(3).attempt,))
        session.retire(entry(1).attempt, delete=False)  # reads the segments
        store.asked()
        with pytest.raises(NotRetired, match=f"needed by {saved.attempt}"):
            session.retire(entry(3).attempt)
        calls.append(python_calls(lambda: session.retire(entry(2).attempt, delete=False)))  # noqa: B023
        assert store.asked()[1] == 0
        assert session.state().find(entry(2).attempt) is None
    # The live set in the record itself differs in size.
    assert calls[1] <= 3 * calls[0]


# --- segments that are damaged, or are not there --------------------------------------------------


def test_a_segment_comes_back_equal() -> None:
    entries = (
        entry(2, committed_unix=7.5),
        entry(3, metric=0.25, pinned=True, nbytes=2**40),
        entry(9, references=(entry(3).attempt,), line=None),
        entry(
            10**12,
            verified=True,
            line=4,
            manifest_digest=b"short",
            step=10**17,
            nbytes=0,
            committed_unix=0.0,
        ),
    )
    assert decode_segment(encode_segment(entries), where="s") == entries
    ref, data = segment_of(entries)
    assert (ref.count, ref.last_slot, ref.nbytes) == (4, 10**12, len(data))


def test_a_changed_or_short_segment_is_damaged(seed: int) -> None:
    data = encode_segment([entry(slot) for slot in range(1, 20)])
    rng = random.Random(seed)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << rng.randrange(8)
        try:
            decode_segment(bytes(changed), where="s")
        except (Corrupt, UnsupportedFormat):
            continue
    for length in range(len(data)):
        with pytest.raises(Corrupt, match="part of the log"):
            decode_segment(data[:length], where="s")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("damage", ["gone", "other bytes", "another digest"])
def test_a_segment_that_is_not_what_the_record_says_is_named(damage: str) -> None:
    bucket = MemoryBucket()
    session = claim(MemoryStore(bucket))
    for step in range(20):
        save(session, step)
    claim(MemoryStore(bucket))  # the record before names the same segments
    key = next(k for k in bucket.keys_from(SEGMENTS_PREFIX, "") if _is_named(bucket, k))
    data = bytes(MemoryStore(bucket).get(key))
    bucket.remove(key)
    if damage == "other bytes":
        bucket.add(key, b"other bytes")
    if damage == "another digest":
        digest = decode_segment(data, where="s")[0].manifest_digest
        bucket.add(key, data.replace(digest, bytes(32)))
    state = Log(MemoryStore(bucket)).state()
    assert state.latest is not None and state.latest.step == 19
    with pytest.raises(Corrupt, match=f"{key}, a part of the log, is damaged"):
        _ = state.live


def _is_named(bucket: MemoryBucket, key: str) -> bool:
    record = Log(MemoryStore(bucket)).record(Log(MemoryStore(bucket)).state().slot)
    return any(segment_key(ref.digest) == key for ref in record.segments)


def test_a_record_with_segments_asks_an_older_reader_for_a_newer_version() -> None:
    """A reader that does not know the field says so before it looks at anything else."""
    store = Long(1000)
    body = fields_of(encode_record(store.record))
    older = set(fields_of(encode_record(replace(store.record, segments=(), gone=()))))
    assert set(body) - older == {"segments", "gone"} and not older - set(body)
    with pytest.raises(UnsupportedFormat, match="upgrade"):
        decode_record(sealed({**body, "rings": []}), slot=store.record.slot, where="log")


@pytest.mark.parametrize(
    "change",
    [
        {"segments": []},
        {"segments": None},
        {"gone": [3, 3]},
        {"gone": [True]},
        {"gone": list(range(2000))},
    ],
)
def test_segments_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    store = Long(1000)
    body = {**fields_of(encode_record(store.record)), "gone": [5, 7]}
    decode_record(sealed(body), slot=store.record.slot, where="log")
    with pytest.raises(Corrupt):
        decode_record(sealed({**body, **change}), slot=store.record.slot, where="log")


@pytest.mark.parametrize(
    "change", [{"digest": b"short"}, {"nbytes": 2**40}, {"count": 0}, {"last_slot": 1002}, {"x": 1}]
)
def test_a_reference_to_a_segment_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    store = Long(1000)
    body = fields_of(encode_record(store.record))
    body["segments"][0] |= change
    with pytest.raises((Corrupt, UnsupportedFormat)):
        decode_record(sealed(body), slot=store.record.slot, where="log")


# --- stores that fail, and roots that are exchanged -----------------------------------------------


@pytest.mark.usefixtures("small")
def test_a_segment_that_cannot_be_written_fails_no_save(caplog: pytest.LogCaptureFixture) -> None:
    class Full(WrappedStore):
        is_full = True

        def put_if_absent(self, key: str, data: bytes) -> None:
            if self.is_full and key.startswith(SEGMENTS_PREFIX):
                raise NoSpaceError("no space left")
            super().put_if_absent(key, data)

    store = Full(MemoryStore())
    session = claim(store)
    for step in range(20):
        save(session, step)
    assert "folded later" in caplog.text
    assert not list(store.list(SEGMENTS_PREFIX))
    store.is_full = False
    save(session, 20)
    assert [one.step for one in Log(store).state().live] == list(range(21))
    assert list(store.list(SEGMENTS_PREFIX))


@pytest.mark.usefixtures("small")
def test_a_record_whose_segment_a_backup_took_is_refused() -> None:
    """Restored between the segment and the record that names it."""

    class Restoring(WrappedStore):
        backup: dict[str, bytes] | None = None

        def put_if_absent(self, key: str, data: bytes) -> None:
            if self.backup is not None and key.startswith("steps/"):
                self.backup = {key: self.get(key) for key in bucket.keys_from("", "")}
            super().put_if_absent(key, data)
            if self.backup is not None and key.startswith(SEGMENTS_PREFIX):
                for key in set(bucket.keys_from("", "")) - set(self.backup):
                    bucket.remove(key)

    bucket = MemoryBucket()
    store = Restoring(MemoryStore(bucket))
    session = claim(store)
    step = 0
    while not list(store.list(SEGMENTS_PREFIX)):
        save(session, step := step + 1)
    store.backup = {}
    with pytest.raises(CheckpointError, match="rolled back"):
        for _ in range(50):
            save(session, step := step + 1)
    store.backup = None
    with pytest.raises(Corrupt, match="ckpt mend"):
        Log(store).state().live  # noqa: B018


def test_a_log_without_room_refuses_a_save_before_its_data_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    registry = SessionRegistry()
    ranked = open_session(SoloWorld(), store, registry)
    assert ranked.session is not None
    save(ranked.session, 1)
    ranked.settle()
    monkeypatch.setattr(appender, "ROOM_NBYTES", 300)
    before = [info.key for info in store.list("")]
    with pytest.raises(CheckpointError, match="Nothing was written"):
        ranked.settle()
    assert [info.key for info in store.list("")] == before


def test_a_missing_key_of_a_segment_is_no_key_of_a_record() -> None:
    assert record_slot(segment_key(b"d" * 32)) is None
    with pytest.raises(KeyNotFoundError):
        MemoryStore().get(segment_key(b"d" * 32))
