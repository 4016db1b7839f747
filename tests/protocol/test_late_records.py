"""Records of a former log that arrive in a row after a backup was restored.

Method: the backup of slots 0 to 3 of a longer log comes back, and records of that log are put where
they were, as a store does that sends a slow request a second time. New readers, readers that knew
the root before, and a job that goes on there are asked what exists; requests are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ckpt.commit.log import Log
from ckpt.commit.names import MANIFEST_NAME, record_key, step_prefix
from ckpt.commit.records import LiveEntry, manifest_digest
from ckpt.commit.session import Session
from ckpt.commit.writer import Commit
from ckpt.errors import Corrupt
from storage.memory import MemoryBucket, MemoryStore
from storage.store import ObjectInfo, Store
from storage.wrap import WrappedStore


def save(session: Session, step: int) -> LiveEntry:
    attempt, manifest = session.new_attempt(), b"manifest %d" % step
    session.store.put_if_absent(step_prefix(step, attempt) + MANIFEST_NAME, manifest)
    return session.commit(Commit(attempt, step, len(manifest), manifest_digest(manifest)))


class Disk(WrappedStore):
    """Counts requests."""

    def __init__(self, bucket: MemoryBucket) -> None:
        super().__init__(MemoryStore(bucket))
        self.requests = 0

    def info(self, key: str) -> ObjectInfo:
        self.requests += 1
        return super().info(key)

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        self.requests += 1
        return self.inner.get_bounded(key, nbytes_max)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.requests += 1
        return super().list(prefix, after=after)


class Remote(Disk):
    """Where requests take long, and a page of a listing stands for many of them."""

    def __init__(self, bucket: MemoryBucket) -> None:
        super().__init__(bucket)
        self.part_nbytes_min = 5 << 20


KINDS = pytest.mark.parametrize("kind", [Disk, Remote])


def restored() -> tuple[MemoryBucket, dict[int, bytes]]:
    """A root of which the backup came back, and the records of its former log."""
    bucket = MemoryBucket()
    store = MemoryStore(bucket)
    session = Session.claim(store)
    for step in range(1, 9):
        save(session, step)
    former = {slot: store.get(record_key(slot)) for slot in range(9)}
    for slot in range(4, 9):
        bucket.remove(record_key(slot))
        prefix = f"steps/{slot:08d}"
        for key in bucket.keys_from(prefix, ""):
            bucket.remove(key)
    return bucket, former


def steps(store: Store) -> list[int]:
    return [entry.step for entry in Log(store).state().live]


@KINDS
@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("first", [5, 6])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_late_records_in_a_row_are_not_taken_for_the_newest(
    kind: Callable[[MemoryBucket], Store], first: int, count: int, is_filled: bool
) -> None:
    """With a hole before them, and where another job's record fills it."""
    bucket, former = restored()
    last = 3
    if is_filled:
        session = Session.claim(MemoryStore(bucket))
        while session.state().slot < first - 1:
            session.pin(session.state().live[0].attempt)
        last = first - 1
    warm = Log(kind(bucket))
    warm.state()
    for slot in range(first, first + count):
        bucket.add(record_key(slot), former[slot])
        assert [entry.step for entry in warm.state().live] == [1, 2, 3]
    assert [record.slot for record in warm.history()] == list(range(last + 1))
    # A new reader looks back less far. Where requests take long it sees holes only.
    if count <= (1 if kind is Remote and is_filled else 3 if kind is Remote else 2):
        assert steps(kind(bucket)) == [1, 2, 3]


def test_a_running_job_does_not_build_on_late_records_in_a_row() -> None:
    """What it has acknowledged would be missing in their live set, and be swept."""
    bucket, former = restored()
    session = Session.claim(MemoryStore(bucket))
    save(session, 10)
    for slot in (6, 7, 8):
        bucket.add(record_key(slot), former[slot])
        assert session.state().void == slot - 5
    save(session, 11)
    assert steps(MemoryStore(bucket)) == [1, 2, 3, 10, 11]
    save(Session.claim(MemoryStore(bucket)), 12)
    assert steps(MemoryStore(bucket)) == [1, 2, 3, 10, 11, 12]
    committed = [r.live[-1].step for r in Log(MemoryStore(bucket)).history() if r.kind == "COMMIT"]
    assert committed == [1, 2, 3, 10, 11, 12]


def test_a_job_begins_where_late_records_lie_behind_a_hole() -> None:
    """Nothing of what they list is here, so nothing is lost when they are passed over."""
    bucket, former = restored()
    for slot in (5, 6):
        bucket.add(record_key(slot), former[slot])
    session = Session.claim(MemoryStore(bucket))
    for step in (10, 11):
        save(session, step)
    assert steps(MemoryStore(bucket)) == [1, 2, 3, 10, 11]
    # The claim fills the hole, and the first save comes behind the late records.
    assert [record.slot for record in Log(MemoryStore(bucket)).history()] == [0, 1, 2, 3, 4, 7, 8]


def test_a_claim_compares_more_links_than_a_reader() -> None:
    """Five records in a row are another log, whose checkpoints are here: nobody appends to it."""
    bucket, _ = restored()
    save(Session.claim(MemoryStore(bucket)), 10)
    for slot in range(6, 10):
        bucket.remove(record_key(slot))
    other = MemoryBucket()
    session = Session.claim(MemoryStore(other))
    for step in range(20, 30):
        save(session, step)
    for key in other.keys_from("", ""):
        bucket.add(key, MemoryStore(other).get(key))
    assert Log(MemoryStore(bucket)).state().slot == 10
    with pytest.raises(Corrupt, match="ckpt mend"):
        Session.claim(MemoryStore(bucket))


@KINDS
def test_a_damaged_record_below_the_newest_hides_nothing(
    kind: Callable[[MemoryBucket], Store],
) -> None:
    bucket = MemoryBucket()
    session = Session.claim(MemoryStore(bucket))
    for step in range(1, 6):
        save(session, step)
    for slot in (1, 2, 3):
        bucket.remove(record_key(slot))
        bucket.add(record_key(slot), b"damaged")
        assert steps(kind(bucket)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("kind", "requests_max"), [(Disk, 11), (Remote, 4)])
def test_looking_back_costs_few_requests(
    kind: Callable[[MemoryBucket], Disk], requests_max: int
) -> None:
    bucket = MemoryBucket()
    session = Session.claim(MemoryStore(bucket))
    for step in range(1, 9):
        save(session, step)
    store = kind(bucket)
    log = Log(store)
    log.state()
    assert store.requests <= requests_max
    store.requests = 0
    log.state()
    assert store.requests == 1
    save(session, 9)
    store.requests = 0
    assert log.state().slot == 9 and store.requests == 4  # two looks, and the newest two records


@pytest.mark.parametrize("hole", [1390, 1399])
def test_a_hole_near_the_end_of_a_long_log_is_seen_behind_a_network(hole: int) -> None:
    bucket = MemoryBucket()
    session = Session.claim(MemoryStore(bucket))
    entry = save(session, 1)
    while session.state().slot < 1401:
        session.pin(entry.attempt)
        session.unpin(entry.attempt)
    bucket.remove(record_key(hole))
    store = Remote(bucket)
    assert Log(store).state().slot == hole - 1
    assert store.requests <= 25
