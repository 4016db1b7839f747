"""What a save may refer to: nothing that differs in anything, nothing that keeps too much alive.

Method: chunks of the sample in tests/format, changed in one respect each; and trainings as
simulations of thousands of saves, in which a chunk is a number that changes or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from ckpt.commit.locate import file_key
from ckpt.commit.names import attempt_name
from ckpt.commit.records import LiveEntry
from ckpt.format.checksum import Seal
from ckpt.format.datafile import StoredChunk
from ckpt.format.datafile_index import StoredSums, stored_sums
from ckpt.format.manifest import Manifest
from ckpt.format.object_parts import FileRange
from ckpt.layout.region import Box, Span, whole
from ckpt.saving import dedup
from ckpt.saving.dedup import (
    ATTEMPTS_MAX,
    NBYTES_MULTIPLE_MAX,
    KnownChunk,
    SharedFile,
    divide,
    identity,
    kept_alive,
    known_of_files,
    known_of_part,
    nbytes_held,
    references_allowed,
)
from storage import Store
from storage.memory import MemoryStore
from tests.conftest import Scale
from tests.format.sample import INCREMENTS, increment_dir, make_increments

SHAPE = (4, 6)
BASE = attempt_name(1, bytes(8))
SEAL = Seal(12, bytes(32))
FILE = SharedFile(f"../00000001-{BASE}/rank00000-000.safetensors", BASE, 9000, 4096, SEAL)
SUMS = np.array([1, 2], dtype=np.uint32)


def chunk(**changes: object) -> StoredChunk:
    return StoredChunk("w", "float32", SHAPE, Span(0, 12), 48, 0)._replace(**changes)  # type: ignore[arg-type]


def known(of: StoredChunk, *, byte_start: int = 4096) -> dict[StoredChunk, KnownChunk]:
    return {identity(of): KnownChunk(FILE, byte_start, b"d" * 32, SUMS)}


def is_referenced(
    now: StoredChunk,
    *,
    digest: bytes = b"d" * 32,
    sums: np.ndarray = SUMS,
    allowed: tuple[str, ...] = (BASE,),
) -> bool:
    before = known(chunk())
    division = divide([now], [digest], lambda index: sums, known=before, allowed=allowed)
    assert bool(division.written) != bool(division.referenced)
    return not division.written


def test_the_same_chunk_with_the_same_bytes_is_referenced() -> None:
    assert is_referenced(chunk())


@pytest.mark.parametrize(
    "change",
    [
        {"fqn": "v"},
        {"dtype": "int32"},
        {"global_shape": (6, 4)},
        {"kind": 1},
        {"region": Span(12, 24)},
        {"region": Box((0, 0), (4, 3))},
        {"region": Span(0, 24), "nbytes": 96},
    ],
)
def test_another_tensor_dtype_shape_kind_or_region_is_written(change: dict[str, object]) -> None:
    """With the same digest, as if the bytes were equal."""
    assert not is_referenced(chunk(**change))


def test_other_bytes_are_written_however_they_show() -> None:
    """By digest; by checksums alone, which is how bytes show that changed under the last save."""
    assert not is_referenced(chunk(), digest=b"e" * 32)
    assert not is_referenced(chunk(), sums=np.array([1, 3], dtype=np.uint32))
    assert not is_referenced(chunk(), sums=SUMS[:1])


def test_what_is_not_allowed_is_written() -> None:
    assert not is_referenced(chunk(), allowed=())
    assert not is_referenced(chunk(), allowed=(attempt_name(1, b"12345678"),))


def test_a_box_that_is_one_run_is_the_span_that_it_is() -> None:
    assert identity(chunk()) == identity(chunk(region=Box((0, 0), (2, 6))))
    assert identity(chunk(region=whole(SHAPE))) == identity(chunk(region=Span(0, 24)))
    assert identity(chunk(region=Box((0, 0), (4, 2)))).region == Box((0, 0), (4, 2))


def test_checksums_are_asked_for_only_where_digests_agree() -> None:
    asked: list[int] = []

    def checksums_of(index: int) -> np.ndarray:
        asked.append(index)
        return SUMS

    chunks = [chunk(), chunk(fqn="v"), chunk(dtype="int32")]
    digests = [b"d" * 32, b"d" * 32, b"e" * 32]
    divide(chunks, digests, checksums_of, known=known(chunk()), allowed=[BASE])
    assert asked == [0]


def test_neighbours_are_one_range_and_strangers_are_not() -> None:
    chunks = [chunk(fqn=name) for name in "abcd"]
    before: dict[StoredChunk, KnownChunk] = {}
    for entry, start in zip(chunks, (4192, 4096, 4144, 4296), strict=True):
        before |= known(entry, byte_start=start)
    division = divide(chunks, [b"d" * 32] * 4, lambda index: SUMS, known=before, allowed=[BASE])
    assert division.ranges == (FileRange(FILE.name, 4096, 4240), FileRange(FILE.name, 4296, 4344))
    (columns,) = division.referenced
    assert [entry.fqn for entry in columns.chunks] == ["b", "c", "a", "d"]
    assert columns.offsets.tolist() == [4096, 4144, 4192, 4296]


def test_what_is_too_scattered_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranges are listed, three would make too long a header."""
    chunks = [chunk(fqn=name) for name in "abc"]
    before: dict[StoredChunk, KnownChunk] = {}
    for entry_, start in zip(chunks, (4096, 5000, 6000), strict=True):
        before |= known(entry_, byte_start=start)
    monkeypatch.setattr(dedup, "RANGES_MAX", 2)
    digests = [b"d" * 32] * 3
    division = divide(chunks, digests, lambda index: SUMS, known=before, allowed=[BASE])
    assert division == ((0, 1, 2), (), ())
    division = divide(chunks[:2], digests[:2], lambda index: SUMS, known=before, allowed=[BASE])
    assert division.written == () and len(division.ranges) == 2


def test_a_rank_remembers_of_its_part_what_the_files_would_tell_it() -> None:
    """Own chunks and referenced ones, spans and boxes, of all three increments and both ranks."""
    store = MemoryStore()
    for header, sample in zip(INCREMENTS, make_increments(), strict=True):
        prefix = increment_dir(header) + "/"
        for name, data in sample.files.items():
            store.put_if_absent(prefix + name, data)
        sums_of = partial(_sums_of, store, prefix, sample.manifest)
        together: dict[StoredChunk, KnownChunk] = {}
        for part in sample.parts:
            together |= known_of_part(part, header)
        wanted = list(together)
        known_here = known_of_files(sample.manifest, wanted, sums_of)
        assert known_here.keys() == together.keys() and len(known_here) == len(
            sample.manifest.chunks
        )
        for key, there in together.items():
            assert known_here[key][:3] == there[:3]
            assert np.array_equal(known_here[key].checksums, there.checksums)
            attempt = header.attempt if key.fqn in ("phase", "weight.columns") else None
            assert there.file.attempt == (attempt or INCREMENTS[0].attempt)
        absent = [one._replace(fqn="no such") for one in wanted]
        absent += [one._replace(kind=9) for one in wanted]
        absent += [one._replace(region=Span(1, 2)) for one in wanted]
        assert known_of_files(sample.manifest, absent, sums_of) == {}
        assert sum(nbytes_held(sample.manifest).values()) == 456


def _sums_of(store: Store, prefix: str, manifest: Manifest, file: int) -> StoredSums | None:
    return stored_sums(store, file_key(prefix, manifest.files[file]), manifest, file)


# Growth -------------------------------------------------------------------------------------------


def entry(attempt: str, slot: int, references: tuple[str, ...] = ()) -> LiveEntry:
    return LiveEntry(attempt, slot, slot, 1, b"x", False, False, None, tuple(sorted(references)))


def _allowed(
    held: dict[str, int], live: list[LiveEntry], nbytes_of: Callable[[LiveEntry], int]
) -> frozenset[str]:
    return references_allowed(held, live, nbytes_of, nbytes_uncounted=0)


@dataclass
class Training:
    """Saves of `sizes` bytes in chunks; `keep` checkpoints are kept, and what they refer to."""

    sizes: list[int]
    keep: int
    live: list[LiveEntry] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)
    holders: list[str] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def save(self, is_changed: Callable[[int], bool]) -> None:
        attempt = attempt_name(1, len(self.written).to_bytes(8, "big"))
        held: dict[str, int] = {}
        for size, holder in zip(self.sizes, self.holders, strict=False):
            held[holder] = held.get(holder, 0) + size
        allowed = _allowed(held, self.live, lambda e: self.nbytes[e.attempt])
        before = self.holders or [""] * len(self.sizes)
        self.holders = [
            holder if holder in allowed and not is_changed(index) else attempt
            for index, holder in enumerate(before)
        ]
        own = sum(s for s, h in zip(self.sizes, self.holders, strict=True) if h == attempt)
        references = tuple(set(self.holders) - {attempt})
        assert set(references) <= {e.attempt for e in self.live}
        self.nbytes[attempt] = own
        self.written.append(own)
        self.live.append(entry(attempt, len(self.written), references))
        kept = kept_alive([e.attempt for e in self.live[-self.keep :]], self.live)
        self.live = [e for e in self.live if e.attempt in kept]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def on_disk(self) -> int:
        return sum(self.nbytes[e.attempt] for e in self.live)


def test_frozen_weights_stay_in_the_first_checkpoint_for_ever() -> None:
    """95 % frozen, 1,000 saves: no save but the first writes more than the rest."""
    training = Training([1] * 100, keep=3)
    for _ in range(1000):
        training.save(lambda index: index >= 95)
    assert training.written[0] == 100 and set(training.written[1:]) == {5}
    assert len(training.live) == 4 and training.on_disk == 100 + 3 * 5


def test_a_few_adapters_that_rest_now_and_then_cost_no_full_save(rng: random.Random) -> None:
    """Of the 5 % that train, each rests in a third of the steps: chains of references are cut
    without touching the frozen rest."""
    training = Training([1] * 1000, keep=3)
    for _ in range(500):
        training.save(lambda index: index >= 950 and rng.random() < 2 / 3)
    assert max(training.written[1:]) <= 50
    assert len(training.live) <= 3 + ATTEMPTS_MAX + 1


@pytest.mark.parametrize("part", [0.02, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_disk_use_is_bounded_whatever_changes(
    part: float, rng: random.Random, scale: Scale
) -> None:
    """Every chunk changes with the same probability at every save, the worst for references."""
    training = Training([rng.randrange(1, 9) for _ in range(200)], keep=2)
    for _ in range(scale.count(150, 5000)):
        training.save(lambda index: rng.random() < part)
        others = kept_alive([training.live[-1].attempt], training.live)
        others.remove(training.live[-1].attempt)
        assert len(others) <= ATTEMPTS_MAX
        held = sum(training.nbytes[name] for name in others)
        assert held <= NBYTES_MULTIPLE_MAX * training.total
        # Two checkpoints are kept; the older one's references may be others than the newer one's.
        assert training.on_disk <= 2 * (1 + NBYTES_MULTIPLE_MAX) * training.total
    mean = sum(training.written[1:]) / (len(training.written) - 1)
    assert mean <= training.total


def test_a_checkpoint_that_was_retired_is_not_referred_to() -> None:
    live = [entry("b", 2)]
    assert _allowed({"a": 5, "b": 5}, live, lambda e: 5) == {"b"}
    assert _allowed({"a": 5}, [], lambda e: 5) == frozenset()


def test_what_holds_nothing_any_more_is_not_kept_alive() -> None:
    live = [entry("a", 1), entry("b", 2)]
    assert _allowed({"a": 0, "b": 5}, live, lambda e: 5) == {"b"}


def test_the_least_is_given_up_first() -> None:
    """Three attempts of 100 bytes each may hold 2 x 100 together: the smallest holder goes."""
    live = [entry("a", 1), entry("b", 2), entry("c", 3)]
    assert _allowed({"a": 50, "b": 20, "c": 30}, live, lambda e: 100) == {"a", "c"}


def test_what_a_reference_refers_to_counts_too() -> None:
    """`c` holds most, but it keeps `a` and `b` alive, which hold nothing any more."""
    live = [entry("a", 1), entry("b", 2, ("a",)), entry("c", 3, ("b",))]
    assert _allowed({"c": 100}, live, lambda e: 90) == frozenset()
    assert _allowed({"c": 100}, live, lambda e: 60) == {"c"}


def test_small_checkpoints_are_not_counted() -> None:
    """Headers alone would be more than twice the bytes of a state of a few KiB."""
    live = [entry("a", 1), entry("b", 2)]
    assert references_allowed({"a": 50, "b": 20}, live, lambda e: 9000) == {"a", "b"}
