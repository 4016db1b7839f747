"""Data files are safetensors files for everybody, and hostile ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt.errors import Corrupt, InvalidState, UnsupportedFormat
from ckpt.format.checksum import crc32c, no_digests
from ckpt.format.datafile import (
    CHECKSUMS,
    DIGESTS,
    StoredChunk,
    checksum_tensor,
    entry_name,
    file_entries,
    layout_data_file,
    order_key,
    parse_entry_name,
    split_into_files,
)
from ckpt.format.datafile_index import read_data_file_index
from ckpt.format.object_parts import DataFile
from ckpt.layout.dtypes import DTYPES, dtype_name, refusal_reason, torch_dtype
from ckpt.layout.region import Box, Region, Shape, Span, whole
from tests.format.sample import TENSORS, make_sample, region_bytes


def write(chunks: list[StoredChunk], payload: bytes) -> bytes:
    entries = file_entries(chunks, 64)
    header, _ = layout_data_file(entries, {}, {})
    sums = [
        crc32c(payload[start : min(start + 64, end)])
        for end, chunk in zip(entries.ends.tolist(), chunks, strict=True)
        for start in range(end - chunk.nbytes, end, 64)
    ]
    return header + payload + checksum_tensor(header, np.array(sums, dtype=np.uint32), {})


def index_of(data: bytes) -> Any:
    return read_data_file_index(lambda start, stop: data[start:stop], len(data), name="file")


def test_safetensors_reads_our_files(tmp_path: Path) -> None:
    """The sample's files through safe_open and load_file: names, shapes, types and bytes are
    right.
    """
    infos = {info.fqn: info for info in TENSORS}
    for name, data in make_sample().files.items():
        path = tmp_path / name
        path.write_bytes(data)
        index = index_of(data)
        loaded = load_file(path)
        with safe_open(path, "pt") as handle:
            assert set(handle.keys()) == set(loaded)
            assert handle.metadata()["ckpt.format"] == "1"
        for chunk in index.chunks:
            tensor = loaded[entry_name(chunk.fqn, chunk.region, chunk.global_shape)]
            expected = region_bytes(infos[chunk.fqn], chunk.region)
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == expected
            if isinstance(chunk.region, Box) and chunk.region.shape != chunk.global_shape:
                assert tuple(tensor.shape) == chunk.region.shape
                assert tensor.dtype == torch_dtype(chunk.dtype)


def test_every_dtype_is_opened_by_safetensors(tmp_path: Path) -> None:
    """One tensor of each storable type: native ones keep their type, the others are bytes."""
    chunks = []
    known = {name: dtype for name, dtype in DTYPES.items() if hasattr(torch, name)}
    for name, dtype in known.items():
        chunks.append(StoredChunk(name, name, (3,), whole((3,)), 3 * dtype.itemsize, 0))
    chunks.sort(key=order_key)
    payload = bytes(sum(chunk.nbytes for chunk in chunks))
    path = tmp_path / "x.safetensors"
    path.write_bytes(write(chunks, payload))
    loaded = load_file(path)
    for name, dtype in known.items():
        if dtype.is_native:
            assert dtype_name(loaded[name].dtype) == name and loaded[name].shape == (3,)
        else:
            assert loaded[name].dtype == torch.uint8 and loaded[name].shape == (3, dtype.itemsize)
        assert torch_dtype(name).itemsize == dtype.itemsize
    assert {chunk.dtype for chunk in index_of(path.read_bytes()).chunks} == set(known)


def test_large_chunks_are_aligned_to_cache_lines_and_small_ones_are_neighbours() -> None:
    """A step counter between the moments of a parameter does not shift what comes behind it."""
    kinds = {"uint8": (40_000, 1), "float32": (8192, 1), "bfloat16": (20_001, 33), "int64": (3, 1)}
    chunks = []
    for index in range(5):
        for dtype, (rows, columns) in kinds.items():
            shape = (rows, columns)
            nbytes = rows * columns * DTYPES[dtype].itemsize
            chunks.append(StoredChunk(f"{index}.{dtype}", dtype, shape, whole(shape), nbytes, 0))
    chunks.sort(key=order_key)
    entries = file_entries(chunks, 1 << 20)
    file = DataFile("", entries, *layout_data_file(entries, {}, {}), {}, no_digests())
    offsets = file.offsets.tolist()
    small = []
    for place, (chunk, offset) in enumerate(zip(chunks, offsets, strict=True)):
        assert offset % DTYPES[chunk.dtype].itemsize == 0, chunk.fqn
        if chunk.dtype in ("uint8", "float32"):
            assert offset % 64 == 0, chunk.fqn
        if chunk.dtype == "int64":
            small.append(place)
    assert small == list(range(small[0], small[0] + 5))
    assert [chunk.dtype for chunk in chunks[:10]] == ["float32"] * 5 + ["uint8"] * 5


def test_every_torch_dtype_is_storable_or_refused_with_a_reason() -> None:
    """All dtypes this torch has: in the table, or with a text on what to do."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        reason = refusal_reason(dtype)
        assert (reason is None) == (dtype_name(dtype) in DTYPES)
        assert reason is None or "save" in reason


@pytest.mark.parametrize(
    "fqn",
    [
        "w",
        "",
        "@",
        "@@",
        "a@0:4",
        "a@",
        "__metadata__",
        "__ckpt_checksums__",
        "@__",
        "ü\n\0\U0001f600",
    ],
)
@pytest.mark.parametrize(
    "shape, region",
    [((4, 8), Box((0, 2), (4, 6))), ((4, 8), Span(1, 3)), ((4, 8), whole((4, 8))), ((), whole(()))],
)
def test_any_name_and_region_come_back(fqn: str, shape: Shape, region: Region) -> None:
    """Entry names with '@', reserved words and odd characters: parsed back, and never reserved."""
    name = entry_name(fqn, region, shape)
    assert not name.startswith(("__metadata__", "__ckpt_"))
    parsed = parse_entry_name(name)
    assert parsed == (fqn, None if region.numel == int(np.prod(shape)) else region)
    itemsize = 4
    chunk = StoredChunk(fqn, "float32", shape, region, region.numel * itemsize, 3)
    assert index_of(write([chunk], bytes(chunk.nbytes))).chunks == (chunk,)


def test_the_name_of_a_span_is_that_of_the_tensor_only_where_it_is_all_of_it() -> None:
    spans = [Span(0, 6), Span(1, 6), Span(0, 5)]
    assert [entry_name("w", span, (2, 3)) for span in spans] == ["w", "w@span:1:6", "w@span:0:5"]


def test_a_reserved_tensor_may_have_no_bytes() -> None:
    """A rank that writes no chunk has no digests, and says so."""
    header, _ = layout_data_file(file_entries([], 64), {}, {DIGESTS: b""})
    none = np.zeros(0, dtype=np.uint32)
    index = index_of(header + checksum_tensor(header, none, {DIGESTS: b""}))
    assert index.extras == {DIGESTS: (len(header), 0)}


def test_header_is_the_documented_bytes() -> None:
    """A file of one chunk against the literal header."""
    chunk = StoredChunk("w", "float32", (4, 2), Box((0, 1), (4, 1)), 16, 1)
    data = write([chunk], bytes(16))
    text = (
        '{"__metadata__":{"ckpt.format":"1","ckpt.block_bytes":"64","ckpt.kinds":"1",'
        '"ckpt.shapes":"4,2"},"w@0:4,1:2":{"dtype":"F32","shape":[4,1],"data_offsets":[0,16]},'
        '"__ckpt_checksums__":{"dtype":"U8","shape":[16],"data_offsets":[16,32]}}'
    )
    assert data[8:4096] == text.encode().ljust(4088)
    assert data[:8] == (4088).to_bytes(8, "little")
    assert data[4112:4116] == b"CKS1" and len(data) == 4096 + 32


def test_layout_refuses_what_it_cannot_store() -> None:
    """Wrong sizes, regions outside, duplicates, unknown dtypes, lone surrogates: InvalidState by
    fqn.
    """
    good = StoredChunk("w", "float32", (4,), Span(0, 2), 8, 0)
    for bad in (
        good._replace(nbytes=9),
        good._replace(region=Span(3, 5), fqn="w"),
        good._replace(region=Span(2, 2), nbytes=0),
        good._replace(dtype="quint8"),
        good._replace(fqn="w\ud800"),
    ):
        with pytest.raises(InvalidState, match="w"):
            file_entries([bad], 64)
    with pytest.raises(InvalidState, match="twice"):
        file_entries([good, good], 64)


def test_files_are_split_before_their_limits() -> None:
    """By data bytes and by header bytes; order is kept, and nothing is lost."""
    chunks = [StoredChunk(f"w{i}", "int8", (10,), whole((10,)), 10, 0) for i in range(10)]
    by_data = split_into_files(chunks, 30)
    assert [len(file) for file in by_data] == [3, 3, 3, 1]
    by_header = split_into_files(chunks, 1 << 30, 700)
    assert all(len(file) <= 2 for file in by_header)
    assert [c for file in by_header for c in file] == chunks
    assert split_into_files([], 30) == [[]]


def test_files_are_split_by_what_their_names_take_in_the_header() -> None:
    """No file has a larger header than allowed, and a name of 1,000 characters fills one."""
    shape = (1,) * 8
    names = ["n" * 1000, "ü" * 500, "\0" * 200, *(f"w{i}" for i in range(10))]
    chunks = [StoredChunk(name, "int8", shape, whole(shape), 1, 0) for name in names]
    files = split_into_files(chunks, 1 << 30, 7500)
    assert [c for file in files for c in file] == chunks
    assert [len(file) for file in files][:3] == [1, 1, 6]
    for file in files:
        header, _ = layout_data_file(file_entries(file, 64), {}, {})
        assert len(header.rstrip()) <= 7500


def test_truncation_at_every_byte_raises() -> None:
    """Every shorter version of a file is refused."""
    data = next(iter(make_sample().files.values()))
    for length in [*range(0, 64), *range(4000, len(data))]:
        with pytest.raises(Corrupt):
            index_of(data[:length])


def test_every_flipped_bit_of_header_or_checksums_raises() -> None:
    """All bits of the JSON text, of a sample of the padding, and of the checksum tensor."""
    data = list(make_sample().files.values())[1]
    index = index_of(data)
    text_end = len(data[:4096].rstrip()) if len(index.header) == 4096 else len(index.header)
    places = [*range(text_end + 8), *range(text_end + 8, len(index.header), 97)]
    places += range(index.checksum_offset, len(data))
    for offset in places:
        for bit in range(8):
            flipped = bytearray(data)
            flipped[offset] ^= 1 << bit
            with pytest.raises((Corrupt, UnsupportedFormat)):
                index_of(bytes(flipped))


def hostile(change: Any) -> bytes:
    """The header of a good file after `change`, with all checksums made to fit."""
    chunk = StoredChunk("w", "float32", (4, 2), Box((0, 1), (4, 1)), 16, 1)
    data = write([chunk], bytes(16))
    header = json.loads(data[8:4096])
    header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text = (len(text.ljust(4088))).to_bytes(8, "little") + text.ljust(4088)
    tail = data[4112:4116] + crc32c(text).to_bytes(4, "little") + data[4120:4124]
    return text + data[4096:4112] + tail + crc32c(tail).to_bytes(4, "little")


def entry(**fields: Any) -> Any:
    return lambda header: header["w@0:4,1:2"].update(fields)


def meta(**fields: Any) -> Any:
    return lambda header: header["__metadata__"].update(
        {key.replace("_", ".", 1): value for key, value in fields.items()}
    )


def renamed(name: str) -> Any:
    def change(header: Any) -> Any:
        return {name if key == "w@0:4,1:2" else key: value for key, value in header.items()}

    return change


def test_the_hostile_helper_itself_makes_good_files() -> None:
    assert len(index_of(hostile(lambda header: None)).chunks) == 1


@pytest.mark.parametrize(
    "change",
    [
        entry(dtype="F33"),
        entry(dtype=["F32"]),
        entry(shape=[4, 2]),
        entry(shape=[4, -1]),
        entry(shape=[1 << 62, 1 << 62, 4]),
        entry(shape=[4, True]),
        entry(shape=[1] * 80),
        entry(data_offsets=[0, 12]),
        entry(data_offsets=[16, 0]),
        entry(data_offsets=[0, 16, 16]),
        entry(data_offsets=[1, 17]),
        entry(data_offsets=[0, 1 << 70]),
        entry(extra=1),
        meta(ckpt_format="0"),
        meta(ckpt_format="one"),
        meta(ckpt_block_bytes="0"),
        meta(ckpt_block_bytes="17"),
        meta(ckpt_block_bytes="99999999999999"),
        meta(ckpt_kinds="12"),
        meta(ckpt_kinds="g"),
        meta(ckpt_kinds=1),
        meta(ckpt_shapes="4,1"),
        meta(ckpt_shapes="4,2;4,2"),
        meta(ckpt_shapes="4,-2"),
        meta(ckpt_shapes="9" * 18 + "," + "9" * 18),
        meta(ckpt_shapes=",".join(["1"] * 100)),
        meta(ckpt_dtypes="complex128"),
        meta(ckpt_dtypes="float32"),
        meta(ckpt_dtypes="object"),
        renamed("w@0:4,1:3"),
        renamed("w@0:4"),
        renamed("w@span:0:4x"),
        renamed("@__w@0:4,1:2"),  # of "__w", which needs no "@" in front
        renamed("w@"),
        renamed("w@0:4,1:2@0:4,1:2"),
        renamed("__ckpt_other__"),
        lambda header: header.pop("__metadata__") and None,
        lambda header: header.pop(CHECKSUMS) and None,
        lambda header: header[CHECKSUMS].update(dtype="I8"),
        lambda header: b"[" * 4000,
        lambda header: b'{"a":' * 600,
        lambda header: b"[]",
        lambda header: b"\xff\xfe",
        lambda header: json.dumps(header).encode()[:-1] + b',"w@0:4,1:2":{}}',
    ],
)
def test_hostile_headers_raise(change: Any) -> None:
    """Each field out of its range, with valid checksums: Corrupt that names the file."""
    with pytest.raises(Corrupt, match="file"):
        index_of(hostile(change))


@pytest.mark.parametrize(
    "name", ["w@", "w@x", "w@span:0:4x", "w@0:4,", "w@span:0:0", "w@" + 9999 * "0:4," + "0:4"]
)
def test_a_name_with_another_region_is_refused(name: str) -> None:
    for _ in range(2):  # the answer is remembered
        with pytest.raises(Corrupt, match="'@'"):
            parse_entry_name(name)


def test_newer_version_is_named() -> None:
    with pytest.raises(UnsupportedFormat, match="version 2"):
        index_of(hostile(meta(ckpt_format="2")))


def test_header_bomb_is_refused_before_it_is_parsed() -> None:
    """4 MB of empty lists would be 100 MB in memory."""
    text = b'{"a":[' + b"[]," * 1_400_000 + b"[]]}"
    data = len(text).to_bytes(8, "little") + text
    with pytest.raises(Corrupt, match="brackets"):
        index_of(data)


def test_header_length_beyond_the_file_is_refused_without_reading() -> None:
    reads: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> bytes:
        reads.append((start, stop))
        return (1 << 40).to_bytes(8, "little")

    with pytest.raises(Corrupt, match="header"):
        read_data_file_index(read, 1 << 41)
    assert reads == [(0, 8)]
