"""A file's bytes around its chunks, however the chunks' bytes pass.

Method: files of random chunks, block sizes and cuts, compared with the bytes that the specification
gives when all chunks are there at once.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from ckpt.format.checksum import block_checksums
from ckpt.format.datafile import StoredChunk, checksum_tensor, file_entries
from ckpt.format.object_parts import DataFile, DataFileBuilder, rank_files
from ckpt.format.part import PartTexts
from ckpt.layout.region import Span
from tests.format.sample import HEADER

SEEDS = range(12)


def drawn(seed: int) -> tuple[DataFile, bytes, bytes]:
    """A file of a few chunks with values, the bytes of its chunks, and the whole file."""
    draw = random.Random(seed)
    block_nbytes = draw.choice([16, 64, 4096])
    sizes = [
        draw.choice([1, block_nbytes - 1, block_nbytes, 3 * block_nbytes, draw.randint(1, 9000)])
        for _ in range(draw.randint(0, 7))
    ]
    chunks = [
        StoredChunk(f"t{number}", "uint8", (size,), Span(0, size), size, 0)
        for number, size in enumerate(sizes)
    ]
    texts = PartTexts({}, values=draw.randbytes(draw.randint(0, 5000)), per_rank=b"own")
    (file,) = rank_files([file_entries(chunks, block_nbytes)], HEADER, 0, texts)
    file = file.with_data_start(len(file.header) + 4096 * draw.randint(0, 1))
    stored = [draw.randbytes(size) for size in sizes]
    sums = [block_checksums(data, block_nbytes) for data in stored]
    none = np.zeros(0, dtype=np.uint32)
    end = checksum_tensor(file.header, np.concatenate([none, *sums]), file.extras)
    data = b"".join(stored)
    return file, data, b"".join([file.header, data, *file.extras.values(), end])


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_that_pass_in_runs_give_the_file(seed: int) -> None:
    file, data, whole = drawn(seed)
    draw = random.Random(seed)
    builder = DataFileBuilder(file)
    position = 0
    while position < len(data):
        stop = min(len(data), position + draw.choice([1, 15, 16, 17, 4096, 10_000]))
        builder.add(memoryview(data)[position:stop])
        position = stop
    assert b"".join([builder.header, data, builder.tail]) == whole
    described = builder.result()
    assert (described.name, described.nbytes) == ("rank00000-000.safetensors", len(whole))
    assert described.offsets.tolist() == file.offsets.tolist()
    assert described.checksums.tobytes() in whole


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("part_nbytes", [100, 4096, 5000, 1 << 20])
def test_parts_with_the_chunks_in_them_are_completed_to_the_file(
    seed: int, part_nbytes: int
) -> None:
    file, data, whole = drawn(seed)
    start = len(file.header)
    made = bytearray(b"\xff" * len(whole))
    made[start : start + len(data)] = data
    builder = DataFileBuilder(file)
    for begin in range(0, len(made), part_nbytes):
        builder.complete(begin, memoryview(made)[begin : begin + part_nbytes])
    assert made == whole
    assert builder.result().checksums.tobytes() in whole


def test_no_file_ends_before_all_its_bytes_have_passed_or_after_more_have() -> None:
    file, data, _ = next(one for one in map(drawn, SEEDS) if len(one[1]) > 1000)
    for passed in (data[:-1], data + b"x"):
        builder = DataFileBuilder(file)
        builder.add(memoryview(passed))
        with pytest.raises(ValueError, match=f"expected {len(data)}"):
            builder.tail  # noqa: B018
        with pytest.raises(ValueError, match=f"{len(passed)} bytes of chunks have passed"):
            builder.result()
