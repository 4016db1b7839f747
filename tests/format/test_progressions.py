"""Regular columns as their rules: bytes as FORMAT.md has them, any column, hostile ones, growth."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import Corrupt
from ckpt.format.columns import pack_ints, pack_regular, unpack_map, unpack_regular
from ckpt.format.manifest import ChunkTable
from ckpt.tools.salvage import salvage
from storage import open_store
from tests.format.encoding import encode_manifest
from tests.format.test_manifest import grid_manifest

COLUMNS = tuple(name for name in ChunkTable.__slots__ if name != "boxes")


def test_the_bytes_of_progressions_are_those_of_the_format() -> None:
    """Three rows of a count up to 40, which ends at 39 in the last one; then 5, 5, 5, and 900."""
    values = np.array([*range(40), *range(40), *range(39), 5, 5, 5, 900])
    expected = "20 0500000000000000 00 28 28 27 03 01 01 0000 0000 0000 0500 8403 00 02 02 02 00 00"
    packed = pack_regular(values)
    assert packed.hex() == expected.replace(" ", "")
    assert unpack_regular(memoryview(packed), len(values), "x").tolist() == values.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_any_column_comes_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs = [
        int(rng.integers((100, 1 << 62)[int(rng.integers(2))]))
        + 100
        + int(rng.integers(-3, 4)) * np.arange(rng.integers(1, 30))
        for _ in range(int(rng.integers(1, 30)))
    ]
    values = np.concatenate(runs).astype(np.uint64)
    values[rng.random(len(values)) < 0.02] = (1 << 64) - 3  # a gap backwards
    packed = pack_regular(values)
    assert len(packed) <= len(pack_ints(values))
    assert unpack_regular(memoryview(packed), len(values), "x").tolist() == values.tolist()


def test_one_row_for_every_tensor_takes_fifteen_bytes() -> None:
    """Lengths, first items and steps are all equal then."""
    values = np.tile(np.arange(4), 1000)
    packed = pack_regular(values)
    assert packed.hex() == "20" + "e803000000000000" + "1004" + "1000" + "1002"
    assert unpack_regular(memoryview(packed), 4000, "x").tolist() == values.tolist()
    assert len(pack_regular(values[:16])) == 15 and len(pack_regular(values[:12])) == 13


def test_irregular_short_and_equal_items_are_plain_columns() -> None:
    rng = np.random.default_rng(1)
    for values in (rng.integers(0, 1 << 20, size=1000), [], [1, 2], [7] * 50):
        column = np.asarray(values, dtype=np.int64)
        assert pack_regular(column) == pack_ints(column)


def packed_by_hand(number: int, *columns: list[int]) -> memoryview:
    data = bytes([0x20]) + number.to_bytes(8, "little")
    arrays = [np.array(column, dtype=np.uint64) for column in columns]
    return memoryview(data + b"".join([pack_ints(column) for column in arrays]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (packed_by_hand(2, [50, 51], [0, 1], [2, 4]), "have 101 items, expected 100"),
        (packed_by_hand(2, [100, 0], [0, 1], [2, 4]), "wrong lengths"),
        (packed_by_hand(2, [(1 << 64) - 1, 101], [0, 1], [2, 4]), "wrong lengths"),
        (packed_by_hand(101, [1] * 101, [0, 1] * 51, [2, 4]), "101 progressions for 100"),
        (packed_by_hand(0, [], [], []), "0 progressions"),
        (packed_by_hand(1 << 60, [1, 2], [0, 1], [2, 4]), "progressions for 100"),
        (packed_by_hand(2, [50, 50], [0, 1], [2, 4, 6]), "wrong lengths"),
        (packed_by_hand(2, [50, 50], [0, 1]), "unknown column code"),
        (memoryview(b"\x20\x01"), "progressions for 100"),
    ],
)
def test_progressions_that_lie_are_corrupt(data: memoryview, message: str) -> None:
    with pytest.raises(Corrupt, match=f"field 'x': .*{message}"):
        unpack_regular(data, 100, "x")


def test_regular_layouts_take_the_same_bytes_for_any_number_of_ranks() -> None:
    """Per rank a manifest grows by its files' names and sizes and the checksums of blocks."""

    def nbytes(ranks: int) -> int:
        manifest = grid_manifest(50, ranks, mixed=True)
        fields = unpack_map(encode_manifest(manifest)[24:-32])
        return sum(len(data) for name, data in fields.items() if name.startswith("chunk_"))

    few, many = nbytes(64), nbytes(2048)
    assert many <= few + 4 * 50 and many < 40 * 50


def test_saves_are_salvaged_as_they_were(tmp_path: Path) -> None:
    """Save twice, load, lose the manifest, salvage it."""
    state = {f"t{number:03d}": torch.full((7,), float(number)) for number in range(50)}
    for step in (1, 2):
        report = ckpt.save(state, str(tmp_path), step=step)
    loaded = {name: torch.zeros(7) for name in state}
    ckpt.load(loaded, str(tmp_path))
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    path = Path(report.path.removeprefix("file://")) / "MANIFEST"
    before = path.read_bytes()
    path.unlink()
    with closing(open_store(str(tmp_path))) as store:
        salvaged = salvage(store, f"steps/{path.parent.name}").manifest
    assert salvaged is not None and encode_manifest(salvaged) == before
