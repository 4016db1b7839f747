"""The log's bytes and how it is read: identity of roots, strict records, few requests.

Method: memory stores, a store that computes a million records instead of keeping them, and records
with every single byte changed.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from ckpt.commit.log import FORMAT_KEY, Log, at_once, decode_format, encode_format, read_format
from ckpt.commit.names import (
    MANIFEST_NAME,
    attempt_epoch,
    parse_step_key,
    record_key,
    step_prefix,
)
from ckpt.commit.records import (
    RECORD_MAGIC,
    LiveEntry,
    Record,
    decode_record,
    encode_record,
    record_digest,
    record_problem,
)
from ckpt.commit.session import Session
from ckpt.commit.writer import Commit
from ckpt.errors import CheckpointError, Corrupt, NoCheckpoint, UnsupportedFormat
from ckpt.format.checksum import crc32c
from ckpt.service.restore import _newest_first
from storage.errors import KeyNotFoundError, StorageError
from storage.memory import MemoryStore
from storage.store import ByteRange, ObjectInfo
from storage.wrap import WrappedStore

A, B = "e000001-00000000000000aa", "e000002-00000000000000bb"


def entry(attempt: str, step: int, slot: int, **changes: Any) -> LiveEntry:
    base = LiveEntry(attempt, step, slot, 100, b"d" * 32, False, False, None, ())
    return replace(base, **changes)


def commit_record() -> Record:
    live = (entry(A, 10, 1, pinned=True, metric=0.5), entry(B, 20, 7, references=(A,)))
    return Record("COMMIT", 7, 2, b"w" * 16, 1.5e9, B, live, b"p" * 32)


def sealed(body: Any) -> bytes:
    data = RECORD_MAGIC + msgpack.packb(body)
    return bytes(data + struct.pack("<I", crc32c(data)))


def fields_of(data: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(data[len(RECORD_MAGIC) : -4])
    return fields


def test_record_comes_back_equal() -> None:
    record = commit_record()
    assert decode_record(encode_record(record), slot=7, where="log/7") == record


def test_record_without_the_digest_of_the_one_before_is_refused() -> None:
    old = replace(commit_record(), previous=None)
    with pytest.raises(Corrupt, match="digest of the record before"):
        decode_record(encode_record(old), slot=7, where="log/7")


def test_each_record_has_the_digest_of_the_one_before() -> None:
    store = MemoryStore()
    for _ in range(3):
        Session.claim(store)
    raw = [store.get(record_key(slot)) for slot in range(3)]
    digests = [record.previous for record in Log(store).history()]
    assert digests == [None, record_digest(raw[0]), record_digest(raw[1])]


def test_every_changed_byte_of_a_record_is_detected() -> None:
    data = encode_record(commit_record())
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(Corrupt, match=r"log/7 .*ckpt mend"):
            decode_record(bytes(damaged), slot=7, where="log/7")
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            decode_record(data[:length], slot=7, where="log/7")


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 8},
        {"slot": -1},
        {"slot": True},
        {"epoch": 0},
        {"epoch": 1},
        {"write_id": b"short"},
        {"write_id": "w" * 16},
        {"time_unix": 1},
        {"time_unix": float("nan")},
        {"attempt": None},
        {"attempt": A},
        {"attempt": "../../etc"},
        {"kind": "RETIRE"},
        {"live": None},
        {"live": [[]] * 3},
        {"live": []},
        {"previous": None},
        {"previous": b"short"},
        {"previous": "p" * 32},
    ],
)
def test_record_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    body = fields_of(encode_record(commit_record()))
    with pytest.raises(Corrupt):
        decode_record(sealed({**body, **change}), slot=7, where="log/7")


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2**63},
        {"slot": 9},
        {"manifest_digest": b""},
        {"pinned": 1},
        {"metric": float("inf")},
        {"references": [B]},
        {"references": ["e000001-00000000000000cc"]},
        {"attempt": "e000003-00000000000000aa"},
        {"attempt": "e0000002-00000000000000aa"},
    ],
)
def test_live_entry_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    body = fields_of(encode_record(commit_record()))
    body["live"][1] = {**body["live"][1], **change}
    if "attempt" in change:
        body["attempt"] = change["attempt"]
    with pytest.raises(Corrupt):
        decode_record(sealed(body), slot=7, where="log/7")


def test_a_record_knows_of_no_commit_after_it() -> None:
    live = (entry(A, 10, 1), entry(B, 20, 9))
    for slot, is_refused in ((8, True), (10, False)):
        pin = Record("PIN", slot, 2, b"w" * 16, 1.5e9, B, live, b"p" * 32)
        problem = "live set is not ascending and unique" if is_refused else None
        assert record_problem(pin, slot=slot) == problem


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (Record("CLAIM", 6, 2, b"w" * 16, 1.5e9, None, (), b"p" * 32), "says slot 6, expected 7"),
        (
            Record("RETIRE", 7, 2, b"w" * 16, 1.5e9, A, (entry(A, 10, 1),), b"p" * 32),
            "the retired attempt is still in its live set",
        ),
        (
            Record("RETIRE", 7, 2, b"w" * 16, 1.5e9, A, (entry(B, 20, 7),), b"p" * 32),
            "a RETIRE cannot bring a checkpoint to life",
        ),
    ],
    ids=["slot", "retired", "brought to life"],
)
def test_a_record_does_what_its_kind_says(record: Record, problem: str) -> None:
    assert record_problem(record, slot=7) == problem
    with pytest.raises(Corrupt, match=problem):
        decode_record(encode_record(record), slot=7, where="log/7")


def test_bytes_that_are_not_canonical_are_refused() -> None:
    body = fields_of(encode_record(commit_record()))
    shuffled = dict(sorted(body.items()))
    doubled = RECORD_MAGIC + b"\x89" + msgpack.packb(body)[1:] + msgpack.packb("slot") + b"\x07"
    doubled += struct.pack("<I", crc32c(doubled))
    for data in (
        sealed(shuffled),
        doubled,
        sealed([1]),
        sealed(7),
        sealed({b"\xff": 1}),
        sealed({**body, 7: 1}),
    ):
        with pytest.raises(Corrupt):
            decode_record(data, slot=7, where="log/7")


def test_unknown_kind_or_field_asks_for_a_newer_version() -> None:
    body = fields_of(encode_record(commit_record()))
    of_later: dict[str, Any] = {"attempt": [A, B]}  # its kinds and fields may bring other types
    for change in (
        {"kind": "MERGE"},
        {"color": 1},
        {"kind": "MERGE"} | of_later,
        of_later | {"c": 1},
    ):
        with pytest.raises(UnsupportedFormat, match="upgrade"):
            decode_record(sealed({**body, **change}), slot=7, where="log/7")


def test_random_bytes_never_pass_and_never_raise_anything_else(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        body = RECORD_MAGIC + rng.randbytes(rng.randrange(60))
        with pytest.raises((Corrupt, UnsupportedFormat)):
            decode_record(body + struct.pack("<I", crc32c(body)), slot=0, where="log/0")


def test_format_line_is_readable_and_checked() -> None:
    data = encode_format("0123456789abcdef" * 2)
    assert data.startswith(b"shardpoint 1 0123456789abcdef0123456789abcdef ")
    assert decode_format(data, where="FORMAT") == "0123456789abcdef" * 2
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises((Corrupt, UnsupportedFormat)):
            decode_format(bytes(damaged), where="FORMAT")


def test_newer_format_is_refused_with_the_next_move() -> None:
    with pytest.raises(UnsupportedFormat, match=r"version 2.*upgrade"):
        decode_format(b"shardpoint 2 whatever comes later\n", where="FORMAT")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], "empty or does not exist"),
        (["run1/FORMAT", "run1/log/x"], "did you mean memory://unnamed/run1"),
        (
            ["step-13/FORMAT", "step-14/FORMAT"],
            "several that have, such as memory://unnamed/step-13",
        ),
        (["MANIFEST", "r0.safetensors"], "directory of one checkpoint"),
        (["photo.jpg"], r"other things \(such as 'photo.jpg'\)"),
    ],
)
def test_url_without_a_root_says_what_is_there(keys: list[str], expected: str) -> None:
    store = MemoryStore()
    for key in keys:
        store.put_if_absent(key, b"x")
    with pytest.raises(NoCheckpoint, match=expected):
        read_format(store)


@pytest.mark.parametrize("key", [record_key(0), record_key(5), f"steps/00000001-{A}/MANIFEST"])
def test_a_root_without_its_format_says_how_to_mend_it(key: str) -> None:
    store = MemoryStore()
    store.put_if_absent(key, b"x")
    with pytest.raises(Corrupt, match=r"no FORMAT object.*ckpt mend"):
        read_format(store)


def test_foreign_file_named_format_is_no_root() -> None:
    store = MemoryStore()
    store.put_if_absent("FORMAT", b"x" * 10_000)
    with pytest.raises(Corrupt, match="choose another url"):
        read_format(store)


class LongLog(WrappedStore):
    """A log of `count` records, made when they are read; counts requests. It is behind a network,
    or on a disk, where a listing reads all names. Its listings are a few records `behind`.
    """

    def __init__(self, count: int, *, is_remote: bool = True, behind: int = 0) -> None:
        super().__init__(MemoryStore())
        self.part_nbytes_min = 5 << 20 if is_remote else 1
        self.count, self.behind = count, behind
        self.lost: set[int] = set()
        self.linked_from = count - 10
        self.requests = 0

    def _record(self, key: str) -> bytes:
        self.requests += 1
        slot = int(key.removeprefix("log/"))
        if slot >= self.count or slot in self.lost:
            raise KeyNotFoundError(key)
        return self._made(slot)

    def _made(self, slot: int) -> bytes:
        """Only the last few build on the ones before: that is what a look compares."""
        previous = None if slot == 0 else b"p" * 32
        if slot > max(self.linked_from, 0):
            previous = record_digest(self._made(slot - 1))
        return encode_record(Record("CLAIM", slot, slot + 1, b"w" * 16, 0.0, None, (), previous))

    def info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self._record(key)), 0.0)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return self._record(key)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.requests += 1
        first = int(after.removeprefix("log/")) + 1 if after.startswith("log/") else 0
        if prefix == "log/":
            for slot in range(first, max(0, self.count - self.behind)):
                if slot not in self.lost:
                    yield ObjectInfo(record_key(slot), 1, 0.0)


COUNTS = [0, 1, 2, 30, 999, 1000, 1001, 4000, 999_999, 1_000_000, 1_000_001]


@pytest.mark.parametrize("count", COUNTS)
def test_last_slot_of_a_long_log_is_found_in_few_requests(count: int) -> None:
    """Listings of the log, the newest two records, and a listing of steps/."""
    for behind in (0, 3):
        store = LongLog(count, behind=behind)
        assert Log(store).state().slot == count - 1
        # The newest listed record is read ahead, in vain where the listing is behind.
        assert store.requests <= (25 if count >= 1000 else 7) + 8 * bool(behind)
        store = LongLog(count, is_remote=False)
        assert Log(store).state().slot == count - 1
        assert store.requests <= (50 if count > 1000 else 25)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_hole_is_seen_in_few_requests(is_remote: bool) -> None:
    """In a small log, at the beginning and among the last of a large one: wherever it can hide."""
    places = [(30, slot) for slot in range(29)]
    count = 1_000_000 if is_remote else 50_000  # a disk lists all from a hole on
    places += [(count, count - back) for back in (count, count - 1, 500, 3, 2)]
    for count, slot in places:
        store = LongLog(count, is_remote=is_remote)
        store.lost.add(slot)
        with pytest.raises(Corrupt, match=f"slot {slot}:.*ckpt mend"):
            Log(store).state()
        assert store.requests <= 50


def test_no_hole_of_a_long_log_hides_the_newest_record(seed: int) -> None:
    rng = random.Random(seed)
    for slot in rng.sample(range(1000, 999_000), 30):
        store = LongLog(1_000_000)
        store.lost.update(range(slot, slot + rng.choice([1, 2, 3000])))
        try:
            assert Log(store).state().slot == 999_999
        except Corrupt as error:
            assert "it is missing" in str(error)
        assert store.requests <= 30


def test_warm_log_needs_one_request_when_nothing_is_new() -> None:
    store = LongLog(1_000_000)
    log = Log(store)
    log.state()
    store.requests = 0
    assert log.state().slot == 999_999 and store.requests == 1
    store.count += 1
    assert log.state().slot == 1_000_000 and store.requests <= 7


def test_damaged_newest_record_is_named() -> None:
    store = MemoryStore()
    Session.claim(store)
    store.put_if_absent(record_key(1), b"garbage")
    with pytest.raises(Corrupt, match=f"memory://unnamed/{record_key(1)} .*ckpt mend"):
        Log(store).state()


def test_removed_record_is_noticed_by_history() -> None:
    store = MemoryStore()
    session = Session.claim(store)
    for step in range(8):
        attempt = session.new_attempt()
        store.put_if_absent(step_prefix(step, attempt) + MANIFEST_NAME, b"m")
        session.commit(Commit(attempt, step, 1, b"d"))
    warm = Log(store)
    warm.state()
    store.delete(record_key(4))
    # A log that has looked before asks for no more than the newest slots, and meets the hole.
    for log in (Log(store), warm):
        with pytest.raises(Corrupt, match=r"slot 4.*ckpt mend"):
            list(log.history())


def test_live_set_that_is_too_large_says_to_retire() -> None:
    live = tuple(entry(f"e000001-{n:016x}", n, n) for n in range(40_000))
    with pytest.raises(CheckpointError, match="retire old checkpoints"):
        encode_record(Record("CLAIM", 50_000, 2, b"w" * 16, 0.0, None, live))


@pytest.mark.parametrize(
    "key",
    [
        "FORMAT",
        f"steps/00000001-{A}/../x",
        f"steps/00000001-{A}/notes.txt",
        f"steps/00000001-{A}/sub/r0.safetensors",
        f"steps/1-{A}/MANIFEST",
        f"steps/000000001-{A}/MANIFEST",
        "steps/00000001-e000000-00000000000000aa/MANIFEST",
        f"steps/00000001-{A.upper()}/MANIFEST",
        f"other/00000001-{A}/MANIFEST",
    ],
)
def test_foreign_keys_are_not_ours(key: str) -> None:
    assert parse_step_key(key) is None


def test_own_keys_are_parsed() -> None:
    assert parse_step_key(f"steps/00000012-{A}/MANIFEST") == (12, A, "MANIFEST")
    assert parse_step_key(f"steps/00000012-{A}/TELEMETRY") == (12, A, "TELEMETRY")
    assert parse_step_key(f"steps/1234567890-{B}/r00003-1.safetensors") == (
        1234567890,
        B,
        "r00003-1.safetensors",
    )
    assert attempt_epoch(B) == 2


@pytest.mark.parametrize("before", ["list", "second list"])
def test_a_root_that_is_made_between_two_looks_is_seen(before: str) -> None:
    class Late(WrappedStore):
        """Another job makes the root just before what is here is listed."""

        lists = 0

        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            self.lists += 1
            if self.lists == (1 if before == "list" else 2):
                Session.claim(self.inner)
            return self.inner.list(prefix, after=after)

    store = Late(MemoryStore())
    assert _newest_first(store, None, "").entries == []
    assert store.exists(FORMAT_KEY)
    assert read_format(store) == read_format(store.inner)


def test_of_two_requests_at_once_the_own_error_comes_first() -> None:
    ended = threading.Event()

    def refused(text: str) -> None:
        if text == "asked":
            time.sleep(0.05)
            ended.set()
        raise StorageError(text)

    with pytest.raises(StorageError, match="mine"):
        at_once(lambda: refused("asked"), lambda: refused("mine"))
    assert ended.is_set(), "nothing is under way any more"
    with pytest.raises(StorageError, match="asked"):
        at_once(lambda: refused("asked"), lambda: None)
    assert at_once(lambda: 1, lambda: 2) == (1, 2)
