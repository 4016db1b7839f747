"""verify finds every changed byte, reports all damage at once, and names file, tensor and block."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

import ckpt
from tests.conftest import Scale
from tests.tools.conftest import data_files


@pytest.fixture
def root(sliced_root: str, tmp_path: Path) -> str:
    shutil.copytree(sliced_root, tmp_path / "run")
    return str(tmp_path / "run")


def _flip(path: Path, offset: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def test_whole_checkpoint_is_ok_and_all_bytes_are_counted(root: str) -> None:
    seen: list[tuple[int, int]] = []
    report = ckpt.verify(root, progress=lambda done, total: seen.append((done, total)))
    assert report.ok and report.step == 1 and report.files == 3
    assert report.nbytes == sum(path.stat().st_size for path in data_files(root))
    assert seen[-1] == (report.nbytes, report.nbytes) and seen == sorted(seen)


def test_any_flipped_bit_of_a_data_file_is_found(
    root: str, rng: random.Random, scale: Scale
) -> None:
    """Headers, padding, tensor bytes, values and checksum tensors alike."""
    for _ in range(scale.count(40, 2000)):
        path = rng.choice(data_files(root))
        offset, mask = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        _flip(path, offset, mask)
        report = ckpt.verify(root)
        assert not report.ok, f"{path.name}: byte {offset}"
        assert all(damage.file.endswith(path.name) for damage in report.damage)
        _flip(path, offset, mask)
    assert ckpt.verify(root).ok


def test_all_damage_is_reported_together(root: str) -> None:
    with ckpt.open(root) as ck:
        spoiled = {}
        for name in ("model.0.weight", "model.1.weight", "model.2.bias"):
            part = ck.info(name).parts[-1]
            spoiled[name] = part.file
            _flip(Path(root) / ck.prefix / part.file, part.byte_start)
    report = ckpt.verify(root)
    assert {damage.fqn: Path(damage.file).name for damage in report.damage} == spoiled
    assert all("block 0" in damage.text for damage in report.damage)
    places = [(damage.file, damage.start) for damage in report.damage]
    assert places == sorted(places)


def test_values_and_the_last_bytes_of_a_chunk_are_checked(tmp_path: Path) -> None:
    """The encoded values are in no chunk; the last block of this tensor is 4 bytes long."""
    root = str(tmp_path / "run")
    ckpt.save({"x": torch.zeros((1 << 20) // 4 + 1), "note": "remember"}, root, step=0)
    (path,) = data_files(root)
    with ckpt.open(root) as ck:
        part = ck.info("x").parts[0]
    for offset, what in (
        (path.read_bytes().index(b"remember"), "__ckpt_values__"),
        (part.byte_start + part.nbytes - 1, "block 1 of 'x'"),
    ):
        _flip(path, offset)
        (damage,) = ckpt.verify(root).damage
        assert what in damage.text
        _flip(path, offset)


def test_missing_and_cut_files_are_reported_beside_others(root: str) -> None:
    first, second, third = data_files(root)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1000])
    _flip(third, third.stat().st_size // 2)
    report = ckpt.verify(root)
    texts = "\n".join(damage.text for damage in report.damage)
    assert f"{first.name}: the file is missing" in texts
    assert f"{second.name}: {second.stat().st_size} bytes long, written were" in texts
    assert f"{third.name}: block" in texts
    # Which tensors the cut costs is told block by block.
    cut_off = [damage for damage in report.damage if damage.text.endswith(" is cut off")]
    assert cut_off and all(damage.file.endswith(second.name) for damage in cut_off)
    assert {damage.fqn for damage in cut_off} <= set(ckpt.open(root))
    assert max(damage.stop for damage in cut_off) > second.stat().st_size


def test_step_directory_is_verified_by_itself(root: str) -> None:
    assert ckpt.verify(ckpt.list_steps(root)[0].url).ok
