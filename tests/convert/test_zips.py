"""Zip files as torch.save makes them, larger than 32 bits can say, and the crc32 of joined data."""

from __future__ import annotations

import os
import random
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from ckpt.convert.sources.opening import open_source
from ckpt.convert.sources.source import SourceTensor
from ckpt.convert.sources.torch_pickle import TensorOut
from ckpt.convert.targets.files import Data, Fixed, Late, Output, torch_file
from ckpt.errors import UnsupportedFormat
from ckpt.format.checksum import joined_crc32
from ckpt.layout.dtypes import DTYPES

GIB = 1 << 30


def test_crc32_of_joined_data(rng: random.Random) -> None:
    for _ in range(50):
        first, second = (rng.randbytes(rng.randrange(3000)) for _ in range(2))
        joined = joined_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
        assert joined == zlib.crc32(first + second)


def test_files_beyond_4_gib_are_read_by_torch_and_by_us(tmp_path: Path) -> None:
    """A sparse file of 5 GiB of zeros, and a tensor after that: both in 64-bit places."""
    large, small = (5 * GIB // 4,), (3,)
    outputs = [
        Output(name, SourceTensor(name, "float32", shape), DTYPES["float32"], 4 * shape[0])
        for name, shape in (("large", large), ("small", small))
    ]
    tree = {o.name: TensorOut(str(n), "float32", o.tensor.shape) for n, o in enumerate(outputs)}
    file = torch_file("m.pt", tree, outputs)
    last = torch.tensor([1.0, 2.0, 3.0])
    path = tmp_path / "m.pt"
    with path.open("wb") as out:
        os.ftruncate(out.fileno(), file.nbytes)
        for piece in file.pieces:
            if isinstance(piece, Data) and piece.output.name == "small":
                os.pwrite(out.fileno(), last.numpy().tobytes(), piece.start)
            elif isinstance(piece, Fixed):
                os.pwrite(out.fileno(), piece.data, piece.start)
            elif isinstance(piece, Late):
                sums = [0, zlib.crc32(last.numpy().tobytes())]
                os.pwrite(out.fileno(), piece.make(sums), piece.start)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["large"].shape == large and torch.equal(loaded["small"], last)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/1") == last.numpy().tobytes()
    source = open_source(str(path))
    assert source.contents.tensors["large"].shape == large
    assert torch.equal(source.read("small"), last)


def test_what_torch_maps_is_aligned(tmp_path: Path) -> None:
    outputs = [
        Output(str(n), SourceTensor(str(n), "uint8", (n,)), DTYPES["uint8"], n) for n in range(9)
    ]
    file = torch_file("m.pt", {}, outputs)
    assert all(piece.start % 64 == 0 for piece in file.pieces if isinstance(piece, Data))
    ends = [piece.start + piece.nbytes for piece in file.pieces]
    assert [piece.start for piece in file.pieces] == [0, *ends[:-1]] and ends[-1] == file.nbytes


def test_compressed_files_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02}." * 100)
    with pytest.raises(UnsupportedFormat, match="compressed"):
        open_source(str(tmp_path / "m.pt"))
