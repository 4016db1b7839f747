"""The part of a table that a load lists: chunks of the files that it needs, as in the whole."""

from __future__ import annotations

import tracemalloc
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import pytest
import torch

import benchmarks.scale
from benchmarks.scale import LAYOUTS
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.format.columns import (
    Progressions,
    pack_ints,
    pack_map,
    pack_progressions,
    pack_regular,
    unpack_map,
)
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import (
    CHUNKS_MAX,
    ChunkTable,
    Manifest,
    MetadataBudget,
    RuledChunks,
    Wanted,
)
from ckpt.format.manifest_codec import decode_manifest
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Span
from ckpt.loading import plan
from tests.format.many_parts import header_of, parts_of
from tests.format.test_joint_parts import laid_out

Ints = npt.NDArray[np.int64]


def column_of(rng: np.random.Generator) -> Progressions:
    count = int(rng.integers(1, 20))
    lengths, firsts = rng.integers(1, 12, count), rng.integers(50, 60, count)
    return Progressions.of(lengths, firsts, rng.integers(-3, 4, count))


@pytest.mark.parametrize("seed", range(50))
def test_items_sums_and_places_of_progressions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    column = column_of(rng)
    items = column.items().astype(np.int64)
    numbers = rng.permutation(len(items))
    assert column.take(numbers).tolist() == items[numbers].tolist()
    sums = np.append(0, np.cumsum(items))
    assert column.sums(np.arange(len(items) + 1)).tolist() == sums.tolist()
    some = rng.choice(np.arange(40, 80), 5, replace=False)
    expected = np.flatnonzero(np.isin(items, some)).tolist()
    places = column.places(some.tolist(), len(expected))
    assert places is not None and places.tolist() == expected
    assert not expected or column.places(some.tolist(), len(expected) - 1) is None


def chunks_of(data: bytes) -> RuledChunks:
    chunks = decode_manifest(data, ruled=1).chunks
    assert isinstance(chunks, RuledChunks)
    return chunks


def drawn(rng: np.random.Generator, manifest: Manifest) -> Wanted:
    rows = []
    for tensor in rng.choice(len(manifest.fqns), int(rng.integers(1, 5))).tolist():
        numel = int(np.prod(manifest.shapes[tensor], dtype=np.int64))
        low, high = sorted(rng.choice(numel + 1, 2, replace=False).tolist())
        rows.append((tensor, low, high))
    return Wanted(*np.array(rows, dtype=np.int64).T)


def rows_of(table: ChunkTable, files: set[int]) -> list[tuple[int, ...]]:
    """The chunks of these files: tensor, elements, file, place and number of blocks."""
    tensors = np.searchsorted(table.first, np.arange(len(table)), side="right") - 1
    columns = (tensors, table.span_start, table.numel, table.box, table.file, table.byte_start)
    columns = (*columns, np.diff(table.first_block))
    rows = zip(*[column.tolist() for column in columns], strict=True)
    return [row for row in rows if row[4] in files]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_has_the_chunks_of_the_needed_files(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rows in (("ROWS", 192), ("UNEVEN_ROWS", 19), ("SMALL_ROWS", 24), ("REPLICAS", 4)):
        monkeypatch.setattr(benchmarks.scale, name, rows)
    parts = 0
    for ranks in (24, 48):
        data = build_manifest(header_of(ranks), parts_of(laid_out(layout, ranks))).data
        manifest = decode_manifest(data)
        whole, ruled = manifest.chunks, chunks_of(data)
        assert isinstance(whole, ChunkTable)
        for seed in range(40):
            wanted = drawn(np.random.default_rng(seed), manifest)
            some = ruled.some(wanted)
            if some is None:
                continue
            parts += 1
            needed = set()
            for tensor, low, high in zip(*[column.tolist() for column in wanted], strict=True):
                for chunk in whole.of_tensor(tensor):
                    start = int(whole.span_start[chunk])
                    if start < high and start + int(whole.numel[chunk]) > low:
                        needed.add(int(whole.file[chunk]))
            assert rows_of(some, set(some.file.tolist())) == rows_of(whole, needed)
            assert len(some) < len(whole)
    # Members of flat parameters have irregular lengths here; columns of several ranks are boxes.
    assert (parts > 10) == layout.startswith(("FSDP2", "HSDP")), parts


def test_who_reads_for_others_keeps_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks of other hosts will ask for is not known when the plan is made."""
    monkeypatch.setattr(plan, "LISTED_MIN", 1)
    data = build_manifest(header_of(24), parts_of(laid_out("FSDP2 even", 24))).data
    manifest = decode_manifest(data, ruled=1)
    span, numel = Span(0, 9), int(np.prod(manifest.shapes[0]))
    piece = Piece(manifest.fqns[0], (numel,), torch.float32, span, span, (0,))
    holdings = [Holding(torch.empty(9), (piece,), Kind.PARAMETER, True)]
    part = plan.needed_part(manifest, holdings, (), alone=True)
    assert 0 < len(part.chunks) < len(manifest.chunks)
    assert plan.needed_part(manifest, holdings, (), alone=False) is manifest


def changed(data: bytes, **fields: bytes) -> bytes:
    """A manifest with other fields and a digest that fits."""
    body = {**unpack_map(memoryview(data)[24:-32]), **fields}
    packed = pack_map({name: bytes(value) for name, value in body.items()})
    head = data[:16] + len(packed).to_bytes(8, "little")
    return head + packed + sha256(head + packed).digest()


def test_a_part_of_a_damaged_table_is_refused_or_left_to_the_whole() -> None:
    """Elements twice, missing, beyond 2^58, or at places outside of the file."""
    data = build_manifest(header_of(24), parts_of(laid_out("FSDP2 even", 24))).data
    manifest = decode_manifest(data)
    wanted = Wanted(*np.array([[0, 0, 9]], dtype=np.int64).T)
    numels, count = manifest.chunks.numel.astype(np.int64), len(manifest.chunks)
    refused = 0
    for name, column in {
        "chunk_numels": numels + (np.arange(count) == 1),
        "chunk_gaps": np.full(count, 1 << 40),
        "chunk_skips": np.arange(count),
        "chunk_files": np.full(count, 24),
    }.items():
        damaged = changed(data, **{name: pack_regular(column)})
        with pytest.raises(Corrupt):
            decode_manifest(damaged)
        try:
            refused += chunks_of(damaged).some(wanted) is None
        except Corrupt:
            refused += 1
    assert refused == 4
    zero = np.where(np.arange(count) == 0, 0, numels)
    assert chunks_of(changed(data, chunk_numels=pack_regular(zero))).some(wanted) is None


@pytest.mark.parametrize("tensors", [range(4), range(5, 6)], ids=["wanted", "in one file"])
def test_a_part_takes_no_memory_beyond_the_budget(tensors: range) -> None:
    """A manifest of 1 KB with as many chunks as can be: 4 of 9 tensors in a file, 5 in another."""
    data = build_manifest(header_of(2), parts_of(laid_out("FSDP2 even", 2))).data
    each = CHUNKS_MAX // 9
    counts = np.frombuffer(unpack_map(memoryview(data)[24:-32])["counts"], "<u8").copy()
    counts[[3, 5]] = 9 * each  # chunks and blocks
    files = Progressions.of(np.array([4, 5]) * each, np.arange(2), np.zeros(2))
    one, none = pack_ints([1, 1]), pack_ints([0, 0])
    hostile = changed(
        data,
        counts=counts.tobytes(),
        shape_dims=pack_ints([each, 1], constant=False),
        chunk_counts=pack_ints([each] * 9),
        chunk_files=pack_progressions(files),
        chunk_numels=one,
        **dict.fromkeys(("chunk_gaps", "chunk_skips", "chunk_boxes"), none),
        table_nbytes=pack_ints([1 << 30] * 2),
        file_nbytes=pack_ints([1 << 31] * 2),
    )
    chunks = decode_manifest(hostile, MetadataBudget(8 << 20), ruled=1).chunks
    assert isinstance(chunks, RuledChunks) and len(hostile) < 1024
    wanted = Wanted(*np.array([(tensor, 0, each) for tensor in tensors]).T)
    tracemalloc.start()
    try:
        assert chunks.some(wanted) is None
        with pytest.raises(UnsupportedFormat, match="at most 8388608 are allowed"):
            len(chunks.file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
