"""The manifest keeps everything, stays small, and refuses whatever is not whole and consistent."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from ckpt.errors import Corrupt, InvalidState, UnsupportedFormat
from ckpt.format import chunk_rules
from ckpt.format.checksum import Seal, no_digests
from ckpt.format.chunk_columns import CHUNK_NBYTES
from ckpt.format.chunk_rules import Of, cover_problem
from ckpt.format.codec import decode_values
from ckpt.format.columns import pack_ints, pack_map, unpack_map
from ckpt.format.datafile import StoredChunk, file_entries, layout_data_file
from ckpt.format.joint_codec import decode_part, encode_part
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import MAGIC, decode_manifest
from ckpt.format.object_parts import DataFile
from ckpt.format.part import (
    Part,
    PartTexts,
    ReplicaColumns,
    TensorRecord,
    part_of_files,
)
from ckpt.layout.region import Box, Region, Shape, Span
from tests.format.encoding import encode_manifest
from tests.format.many_parts import differences_of
from tests.format.sample import (
    ALIASES,
    HEADER,
    PER_RANK,
    TENSORS,
    VALUES,
    make_sample,
    region_bytes,
)

SAMPLE = make_sample()
ENCODED = encode_manifest(SAMPLE.manifest)


def body_of(data: bytes) -> dict[str, bytes]:
    return {name: bytes(view) for name, view in unpack_map(data[24:-32]).items()}


def envelope(body: bytes, version: int = 1, reserved: int = 0) -> bytes:
    head = MAGIC + version.to_bytes(4, "little") + reserved.to_bytes(4, "little")
    head += len(body).to_bytes(8, "little")
    return head + body + hashlib.sha256(head + body).digest()


def with_fields(**fields: bytes | None) -> bytes:
    """The sample's manifest with fields replaced (or removed), under a right digest."""
    body = {**body_of(ENCODED), **fields}
    return envelope(pack_map({k: v for k, v in body.items() if v is not None}))


def test_everything_comes_back() -> None:
    """Tensors, regions, places, checksums, aliases, values, per-rank values of a decoded
    manifest.
    """
    manifest = decode_manifest(ENCODED)
    assert encode_manifest(manifest) == ENCODED
    assert manifest.header == HEADER and manifest.aliases == ALIASES
    assert decode_values(manifest.values) == VALUES
    assert [decode_values(data) for data in manifest.per_rank] == PER_RANK
    infos = zip(manifest.fqns, manifest.dtypes, manifest.shapes, manifest.kinds, strict=True)
    assert [TensorRecord(f, d, s, int(k)) for f, d, s, k in infos] == list(TENSORS)
    for t, info in enumerate(TENSORS):
        assert manifest.index(info.fqn) == t
        for i in range(int(manifest.chunks.first[t]), int(manifest.chunks.first[t + 1])):
            data = SAMPLE.files[manifest.files[int(manifest.chunks.file[i])]]
            start = int(manifest.chunks.byte_start[i])
            stored = data[start : start + manifest.chunk_nbytes(i)]
            assert manifest.tensor_of(i) == t
            assert stored == region_bytes(info, manifest.region(i))
            blocks = np.diff(manifest.chunks.first_block)[i]
            assert blocks == -(-len(stored) // HEADER.block_bytes)
    with pytest.raises(KeyError):
        manifest.index("nothing")


def test_contiguous_boxes_become_spans_and_others_stay_boxes() -> None:
    chunks = SAMPLE.manifest.chunks
    regions = [chunks.region(i) for i in range(len(chunks))]
    assert Span(0, 24) in regions and Span(24, 48) in regions
    assert Box((0, 3), (4, 3)) in regions


def test_body_is_plain_msgpack() -> None:
    """Any msgpack library reads the body: a map of str to bin."""
    assert msgpack.unpackb(ENCODED[24:-32]) == body_of(ENCODED)


def test_every_flipped_bit_raises() -> None:
    """All bits of a small manifest: none decodes."""
    for offset in range(len(ENCODED)):
        for bit in range(8):
            flipped = bytearray(ENCODED)
            flipped[offset] ^= 1 << bit
            with pytest.raises((Corrupt, UnsupportedFormat)):
                decode_manifest(bytes(flipped))


def test_every_truncation_raises() -> None:
    for length in range(len(ENCODED)):
        with pytest.raises(Corrupt):
            decode_manifest(ENCODED[:length])
    with pytest.raises(Corrupt):
        decode_manifest(ENCODED + b"\0")


def test_forged_bits_raise_or_decode_to_a_consistent_manifest() -> None:
    """A forger who fixes the digest: what decodes is a manifest that encodes again, and covers its
    tensors.
    """
    body = ENCODED[24:-32]
    for offset in range(len(body)):
        for bit in {offset % 8, (offset + 3) % 8}:
            flipped = bytearray(body)
            flipped[offset] ^= 1 << bit
            try:
                manifest = decode_manifest(envelope(bytes(flipped)))
            except (Corrupt, UnsupportedFormat):
                continue
            assert decode_manifest(encode_manifest(manifest)).fqns == manifest.fqns


def test_newer_version_says_which_is_needed() -> None:
    with pytest.raises(UnsupportedFormat, match="version 2"):
        decode_manifest(envelope(b"whatever", version=2))


@pytest.mark.parametrize("change", [{"version": 0}, {"reserved": 1}, {"reserved": 1 << 24}])
def test_an_envelope_that_no_writer_makes_is_refused(change: dict[str, int]) -> None:
    body = ENCODED[24:-32]
    assert envelope(body) == ENCODED
    with pytest.raises(Corrupt, match="manifest envelope"):
        decode_manifest(envelope(body, **change))


def test_a_map_has_at_most_256_fields() -> None:
    fields = {f"field {number}": bytes([number % 256]) for number in range(257)}
    most = dict(list(fields.items())[:256])
    assert {name: bytes(view) for name, view in unpack_map(pack_map(most)).items()} == most
    with pytest.raises(Corrupt, match="at most 256"):
        unpack_map(pack_map(fields))


def test_unknown_required_feature_is_refused_and_unknown_fields_are_ignored() -> None:
    needing = HEADER.model_copy(update={"required": ("foreign_files",)})
    with pytest.raises(UnsupportedFormat, match="foreign_files"):
        decode_manifest(with_fields(header=needing.model_dump_json().encode()))
    later = HEADER.model_dump_json().replace("{", '{"colour":3,', 1).encode()
    manifest = decode_manifest(with_fields(header=later, chunk_digests=b"xyz"))
    assert manifest.header == HEADER


def column(*values: int) -> bytes:
    return pack_ints(np.array(values, dtype=np.uint64), constant=False)


def header(**fields: Any) -> bytes:
    return HEADER.model_copy(update=fields).model_dump_json().encode()


def counts(**fields: int) -> bytes:
    names = ("files", "tensors", "shapes", "chunks", "boxes", "blocks", "aliases", "ranks")
    values = np.frombuffer(body_of(ENCODED)["counts"], dtype="<u8").tolist()
    return np.array([fields.get(n, v) for n, v in zip(names, values, strict=True)], "<u8").tobytes()


MAX = (1 << 64) - 1
NAME = b"rank00001-000.safetensors"
HOSTILE: dict[str, dict[str, bytes | None]] = {
    "header is not JSON": {"header": b"{"},
    "header has a wrong root": {"header": header(root="../../etc")},
    "header has a wrong attempt": {"header": header(attempt="../x")},
    "header has a negative step": {"header": header(step=-1)},
    "header has a step as text": {"header": header().replace(b'"step":3', b'"step":"3"')},
    "header has no world": {"header": header(world_size=0)},
    "header has another version": {"header": header(version=0)},
    "header has odd blocks": {"header": header(block_bytes=24)},
    "header has zero blocks": {"header": header(block_bytes=0)},
    "header has larger blocks": {"header": header(block_bytes=128)},
    "counts are short": {"counts": b"123"},
    **{f"huge count of {name}": {"counts": counts(**{name: MAX})} for name in (
        "files", "tensors", "shapes", "chunks", "boxes", "blocks", "aliases", "ranks")},
    "one chunk less": {"counts": counts(chunks=7)},
    "one tensor less": {"counts": counts(tensors=5)},
    "no per-rank values but bytes": {"counts": counts(ranks=0)},
    "file name with a slash": {"file_names": b"a/../bcde-000.safetensors" + NAME},
    "file name with dots": {"file_names": b"..nk00000-000.safetensors" + NAME},
    "file name twice": {"file_names": NAME + NAME},
    "file name MANIFEST": {"file_names": b"MANIFEST" + NAME, "file_name_sizes": column(8, 25)},
    "file name with NUL": {"file_names": NAME.replace(b"-", b"\0") + NAME},
    "file name empty": {"file_names": NAME, "file_name_sizes": column(0, 25)},
    "file name not UTF-8": {"file_names": NAME.replace(b"-", b"\xff") + NAME},
    "file sizes wrap": {"file_name_sizes": column(MAX, 2)},
    "file too short": {"file_nbytes": column(4100, 4100)},
    "file of 2^63 bytes": {"file_nbytes": column(1 << 63, 1 << 63)},
    "data starts behind the file": {"file_data_starts": column(1 << 40, 1 << 40)},
    "data starts a little late": {"file_data_starts": column(8192, 8192)},
    "names not sorted": {"fqns": b"bacdef", "fqn_sizes": column(1, 1, 1, 1, 1, 1)},
    "name twice": {"fqns": b"aacdef", "fqn_sizes": column(1, 1, 1, 1, 1, 1)},
    "name sizes wrap": {"fqn_sizes": column(MAX, 2, 1, 1, 1, 1)},
    "unknown dtype": {"dtype_names": b"object,float16,float32,int64,x"},
    "dtype index outside": {"dtype_ids": column(0, 0, 0, 0, 0, 9)},
    "dtype of another size": {"dtype_ids": column(2, 1, 4, 1, 0, 3)},
    "shape of 255 dims": {"shape_ndims": column(255, 0, 0, 0)},
    "shape beyond 2^63": {"shape_dims": column(1 << 62, 1 << 62, 4, 6, 6, 8)},
    "shape of another size": {"shape_dims": column(0, 3, 4, 6, 6, 9)},
    "shape dims constant": {"shape_dims": bytes([0x10, 6])},
    "shape index outside": {"shape_ids": column(0, 0, 0, 0, 0, 4)},
    "kind outside": {"kinds": column(0, 0, 0, 0, 0, 16)},
    "alias of a stored name": {"alias_names": b"weight", "alias_name_sizes": column(6)},
    "alias target outside": {"alias_targets": column(6)},
    "per-rank sizes wrap": {"per_rank_sizes": column(MAX, 30)},
    "chunk counts wrap": {"chunk_counts": column(MAX, 1, 1, 2, 2, 4)},
    "chunks moved between tensors": {"chunk_counts": column(1, 0, 1, 2, 2, 2)},
    "chunk file outside": {"chunk_files": column(0, 1, 0, 1, 0, 1, 0, 2)},
    "chunk in another file": {"chunk_files": column(0, 1, 1, 1, 0, 1, 0, 1)},
    "chunk empty": {"chunk_numels": column(1, 1, 24, 24, 12, 12, 0, 48)},
    "chunk sizes wrap": {"chunk_numels": column(1, 1, 24, 24, 12, 12, MAX, 49)},
    "chunk shorter": {"chunk_numels": column(1, 1, 24, 24, 12, 12, 20, 27)},
    "box said to be larger": {"chunk_numels": column(1, 1, 24, 24, 13, 12, 20, 28)},
    "skip": {"chunk_skips": column(0, 0, 0, 1, 0, 0, 0, 0)},
    "first element missing": {
        "chunk_skips": column(0, 0, 0, 0, 0, 0, 1, 0),
        "chunk_numels": column(1, 1, 24, 24, 12, 12, 20, 27),
    },
    "skip wraps": {"chunk_skips": column(0, 0, 0, MAX, 0, 0, 0, 0)},
    "skip of a box": {"chunk_skips": column(0, 0, 0, 0, 0, 1, 0, 0)},
    "gap behind the file": {"chunk_gaps": column(1 << 40, 0, 0, 0, 0, 0, 0, 0)},
    "gap before the data": {"chunk_gaps": column(MAX - 15, 0, 0, 0, 0, 0, 0, 0)},
    "gap makes chunks overlap": {"chunk_gaps": column(0, 0, MAX - 3, 0, 0, 0, 0, 0)},
    "box index outside": {"chunk_boxes": column(0, 0, 0, 0, 1, 3, 0, 0)},
    "box twice": {"chunk_boxes": column(0, 0, 0, 0, 1, 1, 0, 0)},
    "box in a tensor of other dims": {"box_ndims": column(3, 1)},
    "box of 255 dims": {"box_ndims": column(255, 255)},
    "box outside": {"box_offsets": column(0, 0, 0, 4)},
    "box overlaps": {"box_offsets": column(0, 0, 0, 2)},
    "box beyond 2^58": {"box_sizes": column(4, 3, 4, MAX)},
    "column code unknown": {"kinds": b"\x47" + bytes(6)},
    "column empty": {"kinds": b""},
}  # fmt: skip
MISSING: dict[str, dict[str, bytes | None]] = {
    f"{name} missing": {name: None} for name in body_of(ENCODED)
}


@pytest.mark.parametrize("name", [*HOSTILE, *MISSING])
def test_hostile_field_raises(name: str) -> None:
    """One field out of its range, under a right digest."""
    with pytest.raises(Corrupt):
        decode_manifest(with_fields(**{**HOSTILE, **MISSING}[name]))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x90" * 1000,
        b"\x81\xa1a\x90",
        b"\xdf\xff\xff\xff\xff",
        b"\xde\xff\xff",
        b"\x82\xa1a\xc4\x00\xa1a\xc4\x00",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
        b"\x81\xa1a\xc4\x00\x00",
        b"\x81\x01\xc4\x00",
        b"\x81\xa1\xff\xc4\x00",
        b"\x81\xa1a\x81\xa1a\xc4\x00",
    ],
)
def test_other_msgpack_raises(body: bytes) -> None:
    """Arrays, nested maps, duplicate keys, sizes beyond the file, superfluous bytes."""
    with pytest.raises(Corrupt):
        decode_manifest(envelope(body))


def test_bombs_take_no_memory() -> None:
    """16 MiB of msgpack arrays, and constant columns that claim 2^40 chunks: refused within 1
    MB.
    """
    bomb = envelope(b"\x90" * (16 << 20))
    claims = with_fields(counts=counts(chunks=1 << 40, blocks=1 << 40), kinds=bytes([0x10, 0]))
    for data in (bomb, claims):
        tracemalloc.start()
        with pytest.raises(Corrupt):
            decode_manifest(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


def edited(rank: int, **changes: Any) -> list[Part]:
    """The sample's parts, one rank's structure with other fields."""
    return [
        part._replace(structure=replace(part.structure, **changes)) if number == rank else part
        for number, part in enumerate(SAMPLE.parts)
    ]


def rule_changed(fqn: str, line: Of, value: int) -> list[Part]:
    rules = SAMPLE.parts[1].structure.rules.copy()
    number = [tensor.fqn for tensor in TENSORS].index(fqn)
    rules[line, rules[Of.TENSOR] == number] = value
    return edited(1, rules=rules)


def saying(rank: int, **texts: Any) -> Part:
    """The sample's part of a rank with other texts."""
    said = PartTexts(ALIASES)._replace(**texts)
    files = SAMPLE.parts[rank].files
    return part_of_files(files, rank=rank, tensors=TENSORS, texts=said)


def test_parts_survive_the_journey() -> None:
    journey = [decode_part(encode_part(part)) for part in SAMPLE.parts]
    assert encode_manifest(build_manifest(HEADER, journey)) == ENCODED


def test_gaps_and_overlaps_are_errors_that_name_tensor_and_ranks() -> None:
    """Rank 1 writes too little, too much, or from elsewhere."""
    cases: list[tuple[list[Part], str]] = [
        (rule_changed("weight.momentum", Of.START, 21), r"momentum: elements 20 to 21 are missing"),
        (rule_changed("weight.momentum", Of.START, 19), r"momentum: elements 19 to 20 overlap"),
        (rule_changed("weight.momentum", Of.NUMEL, 27), r"momentum: elements 47 to 48 are missing"),
        (rule_changed("weight.columns", Of.NUMEL, 11), r"columns: .* said to have 11"),
        (edited(1, boxes=(Box((0, 2), (4, 3)),)), r"columns: .*(overlap|gap)"),
    ]
    for parts, expected in cases:
        with pytest.raises(InvalidState, match=expected) as caught:
            build_manifest(HEADER, parts)
        assert "ranks [0, 1]" in str(caught.value)


def test_boxes_are_numbered_in_the_order_of_the_table() -> None:
    """Whatever rank a box came from: the ranks' columns are swapped, the numbering is the same."""
    swapped = []
    for part, other in zip(SAMPLE.parts, SAMPLE.parts[::-1], strict=True):
        rules, theirs = part.structure.rules.copy(), other.structure.rules
        rules[Of.START, rules[Of.BOX] >= 0] = theirs[Of.START, theirs[Of.BOX] >= 0]
        structure = replace(part.structure, boxes=other.structure.boxes, rules=rules)
        swapped.append(part._replace(structure=structure))
    manifest = decode_manifest(encode_manifest(build_manifest(HEADER, swapped)))
    boxes = manifest.chunks.boxes
    assert [boxes[0], boxes[1]] == [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))]


def test_contradictions_between_ranks_are_named() -> None:
    other = tuple(info._replace(dtype="int64") if info.fqn == "phase" else info for info in TENSORS)
    with pytest.raises(InvalidState, match=r"phase: .*rank 1.*rank 0"):
        build_manifest(HEADER, edited(1, tensors=other))
    with pytest.raises(InvalidState, match=r"tied: tied to weight.columns on rank 1"):
        build_manifest(HEADER, edited(1, aliases={("tied", "weight.columns"): 1}))
    with pytest.raises(InvalidState, match="one name"):
        build_manifest(HEADER, edited(1, files=SAMPLE.parts[0].structure.files))
    with pytest.raises(InvalidState, match=r"weight: elements 24 to 48 are missing"):
        build_manifest(HEADER, SAMPLE.parts[:1])
    alone = part_of_files([], rank=0, tensors=TENSORS[:1], texts=PartTexts({}))
    with pytest.raises(ValueError, match="1 ranks from 0 on"):
        build_manifest(HEADER, [alone])


def replicas_of(*items: tuple[str, int, int, int]) -> ReplicaColumns:
    """Of items: the name of a tensor, a first element, whether ranks must agree, a digest."""
    index = {tensor.fqn: number for number, tensor in enumerate(sorted(TENSORS))}
    columns = zip(*((index[fqn], *rest) for fqn, *rest in items), strict=True)
    *ints, digests = [np.array(column) for column in columns]
    return ReplicaColumns(*ints, digests.astype(np.uint32))


def one(part: Part) -> Part:
    """A part after its journey."""
    return decode_part(encode_part(part))


def test_differences_of_replicas_and_values_name_ranks() -> None:
    parts = [SAMPLE.parts[0], saying(1, value_digests={"seed": 1})]
    _, texts = differences_of([one(part) for part in parts])
    # What a rank lacks is another's; what both have must be the same.
    assert len(texts) == 1 and texts[0].startswith("seed: the value differs between ranks")
    assert differences_of([one(part) for part in SAMPLE.parts]) == (([], []), [])

    own = replicas_of(("weight.columns", 0, 0, 7), ("phase", 0, 1, 1), ("weight.columns", 4, 0, 8))
    other = replicas_of(
        ("phase", 0, 1, 2), ("weight.columns", 4, 0, 9), ("weight.columns", 8, 0, 7)
    )
    parts = [saying(0, replicas=own), saying(1, replicas=other)]
    ([failure], [warning]), _ = differences_of([one(part) for part in parts])
    assert failure.startswith("phase: ") and "00000001 on 0; crc32c 00000002 on 1" in failure
    assert warning.startswith("weight.columns from element 4 on: ")


def test_digests_that_do_not_belong_to_the_replicas_are_refused() -> None:
    replicas = replicas_of(("phase", 0, 1, 1))
    fewer = saying(0, replicas=replicas._replace(digests=np.zeros(0, np.uint32)))
    with pytest.raises(Corrupt, match="digests of ranks are not one per replica"):
        one(fewer)
    beyond = saying(0, replicas=replicas._replace(tensor=np.array([len(TENSORS)])))
    with pytest.raises(Corrupt, match="field 'replica_tensor'"):
        one(beyond)


def test_chunks_take_at_most_16_bytes() -> None:
    """The benchmark's layouts at 64 ranks."""
    layouts: list[Callable[[], Manifest]] = [
        lambda: grid_manifest(200, 64),
        lambda: grid_manifest(200, 64, by_columns=True),
        lambda: grid_manifest(200, 64, uneven=True),
    ]
    for make in layouts:
        manifest = make()
        data = encode_manifest(manifest)
        assert len(data) <= 8 * len(manifest.chunks)
        assert encode_manifest(decode_manifest(data)) == data


def manifest_of(chunks: list[StoredChunk], tensors: list[TensorRecord]) -> Manifest:
    """The manifest of one file of one rank, which came over the wire. The file has no bytes."""
    entries = file_entries(chunks, 1 << 20)
    sums = np.arange(len(entries.block_ends), dtype=np.uint32)
    seal = Seal(4 * (3 + len(sums)), bytes(32))
    layout = layout_data_file(entries, {}, {})
    planned = DataFile("rank00000-000.safetensors", entries, *layout, {}, no_digests())
    file = planned.columns(sums, seal)
    part = part_of_files([file], rank=0, tensors=tensors, texts=PartTexts.of({}, {}, {}, sends={}))
    alone = HEADER.model_copy(update={"world_size": 1, "block_bytes": 1 << 20})
    return build_manifest(alone, [one(part)])


@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, 2**32 + 3])
def test_tensors_and_files_may_be_larger_than_32_bits_count(numel: int) -> None:
    """Two runs of a huge tensor, and a small one behind them in the file."""
    runs = [Span(0, numel - 5), Span(numel - 5, numel)]
    chunks = [StoredChunk("big", "int8", (numel,), span, span.numel, 0) for span in runs]
    chunks.append(StoredChunk("small", "int8", (2,), Span(0, 2), 2, 0))
    tensors = [TensorRecord("big", "int8", (numel,), 0), TensorRecord("small", "int8", (2,), 0)]
    manifest = decode_manifest(encode_manifest(manifest_of(chunks, tensors)))
    assert [manifest.region(chunk) for chunk in range(3)] == [*runs, Span(0, 2)]
    starts = (manifest.chunks.byte_start - int(manifest.file_data_start[0])).tolist()
    assert starts == [0, numel - 5, numel]
    blocks = -(-(numel - 5) // (1 << 20))
    assert manifest.chunks.first_block.tolist() == [0, blocks, blocks + 1, blocks + 2]


@pytest.mark.parametrize(("ndim", "is_taken"), [(64, True), (65, False)])
def test_a_tensor_has_at_most_64_dims(ndim: int, is_taken: bool) -> None:
    """As torch's own have."""
    shape = (0, *(1,) * (ndim - 1))
    records = [TensorRecord("w", "int8", shape, 0)]
    if is_taken:
        assert decode_manifest(encode_manifest(manifest_of([], records))).shapes == (shape,)
        return
    with pytest.raises(Corrupt, match="65 dims, at most 64"):
        manifest_of([], records)
    fitting = manifest_of([], [TensorRecord("w", "int8", shape[:-1], 0)])
    with pytest.raises(Corrupt, match="65 dims, at most 64"):
        decode_manifest(encode_manifest(replace(fitting, shapes=(shape,))))


def test_tensors_of_one_shape_that_are_cut_alike_are_checked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model has thousands of them, and each check takes a millisecond."""
    checked = []

    def counting(regions: list[Region], shape: Shape) -> str | None:
        checked.append(shape)
        return cover_problem(regions, shape)

    monkeypatch.setattr(chunk_rules, "cover_problem", counting)
    chunks, tensors = [], []
    for number, cut in enumerate((3, 3, 2, 3)):
        halves = [Box((0, 0), (4, cut)), Box((0, cut), (4, 6 - cut))]
        tensors.append(TensorRecord(f"w{number}", "int8", (4, 6), 0))
        chunks += [StoredChunk(f"w{number}", "int8", (4, 6), h, h.numel, 0) for h in halves]
    manifest_of(chunks, tensors)
    assert checked == [(4, 6), (4, 6)] * 2, "as rules by the writer, as a table by the reader"


def grid_manifest(tensors: int, ranks: int, **options: bool) -> Manifest:
    from benchmarks.manifest import sharded

    return sharded(tensors, ranks, **options)


def test_decoding_takes_at_most_40_bytes_per_chunk() -> None:
    """200,000 chunks: traced memory at its peak, the input included."""
    data = encode_manifest(grid_manifest(200, 1000))
    decode_manifest(data)
    tracemalloc.start()
    manifest = decode_manifest(data)
    peak = tracemalloc.get_traced_memory()[1] + len(data)
    tracemalloc.stop()
    assert len(manifest.chunks) == 200_000
    assert peak <= CHUNK_NBYTES * 200_000
