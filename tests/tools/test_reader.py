"""The lazy reader returns what was saved, whole and in parts, and reads no more than it needs."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.layout.kind import Kind
from ckpt.layout.region import Box, Span
from ckpt.loading.checkpoint import Checkpoint
from ckpt.loading.contents import find_checkpoint
from storage import open_store
from tests.stores import CountingStore
from tests.tools.conftest import BIG, data_files, sliced_net, stepped


def test_tensors_come_back_under_all_their_names(plain_root: str) -> None:
    expected = stepped(10).state_dict()
    with ckpt.open(plain_root) as ck:
        assert ck.step == 10
        assert set(ck.keys()) == set(ck) and len(ck) == len(ck.keys())
        for name, tensor in expected.items():
            assert f"model.{name}" in ck
            value = ck[f"model.{name}"]
            assert value.dtype == tensor.dtype and torch.equal(value, tensor)
        assert ck.values["epoch"] == 10


def test_step_chooses_the_checkpoint(plain_root: str) -> None:
    assert [info.step for info in ckpt.list_steps(plain_root)] == [5, 10]
    with ckpt.open(plain_root, step=5) as ck:
        assert torch.equal(ck["model.big"], stepped(5).big)


def test_nothing_saved_yet_is_an_empty_list_but_other_files_are_no_root(tmp_path: Path) -> None:
    assert ckpt.list_steps(str(tmp_path / "new")) == ()
    assert ckpt.list_steps(str(tmp_path)) == ()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ckpt.NoCheckpoint):
        ckpt.list_steps(str(tmp_path))


def test_unknown_step_says_which_there_are(plain_root: str) -> None:
    with pytest.raises(ckpt.errors.NoCheckpoint, match=r"no step 7.*5, 10"):
        ckpt.open(plain_root, step=7)


def test_step_directory_opens_wherever_it_was_copied(plain_root: str, tmp_path: Path) -> None:
    latest = ckpt.list_steps(plain_root)[-1]
    shutil.copytree(latest.url, tmp_path / "elsewhere")
    with ckpt.open(str(tmp_path / "elsewhere")) as ck:
        assert ck.step == 10 and torch.equal(ck["model.big"], stepped(10).big)
    with pytest.raises(ckpt.errors.NoCheckpoint, match="is of step 10"):
        ckpt.open(str(tmp_path / "elsewhere"), step=5)


def test_regions_and_indices_are_those_of_the_tensor(sliced_root: str, rng: random.Random) -> None:
    """Random boxes, spans and slices of tensors stored in slices, against the tensor itself."""
    expected = sliced_net().state_dict()
    with ckpt.open(sliced_root) as ck:
        for name, tensor in expected.items():
            assert torch.equal(ck[f"model.{name}"], tensor)
            for _ in range(10):
                low = [rng.randrange(size) for size in tensor.shape]
                high = [
                    rng.randint(start, size) for start, size in zip(low, tensor.shape, strict=True)
                ]
                index = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
                size = tuple(b - a for a, b in zip(low, high, strict=True))
                assert torch.equal(ck.read(f"model.{name}", index), tensor[index])
                assert torch.equal(ck.read(f"model.{name}", Box(tuple(low), size)), tensor[index])
                a, b = sorted(rng.randint(0, tensor.numel()) for _ in range(2))
                assert torch.equal(ck.read(f"model.{name}", Span(a, b)), tensor.flatten()[a:b])


@pytest.mark.parametrize(
    "index",
    [
        3,
        -1,
        (2, 5),
        (slice(None), -2),
        (..., slice(1, 30, 4)),
        (slice(2, 5), ..., -1),
        (7, ...),
        slice(4, 4),
        (slice(30, None, 7),),
    ],
    ids=str,
)
def test_index_means_what_torch_means(sliced_root: str, index: object) -> None:
    with ckpt.open(sliced_root) as ck:
        value = ck.read("model.0.weight", index)  # type: ignore[arg-type]
        assert torch.equal(value, sliced_net()[0].weight[index])


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (Box((0, 0), (51, 1)), "outside of its shape"),
        (Span(0, 2001), "outside of its shape"),
        (50, "outside of shape"),
        ((0, 0, 0), "3 indices"),
        (slice(None, None, -1), "flip"),
    ],
    ids=str,
)
def test_region_outside_is_refused(sliced_root: str, region: object, message: str) -> None:
    with ckpt.open(sliced_root) as ck, pytest.raises(IndexError, match=message):
        ck.read("model.0.weight", region)  # type: ignore[arg-type]


def test_unknown_name_suggests_one(plain_root: str) -> None:
    with ckpt.open(plain_root) as ck, pytest.raises(KeyError, match=r"did you mean '\w+\.big'"):
        ck["big"]


def test_info_tells_where_everything_is(sliced_root: str) -> None:
    with ckpt.open(sliced_root) as ck:
        info = ck.info("model.1.weight")
        assert (info.shape, info.dtype, info.nbytes) == ((33, 48), torch.float32, 33 * 48 * 4)
        assert len({part.file for part in info.parts}) == 3
        assert sum(part.nbytes for part in info.parts) == info.nbytes
        assert all(isinstance(part.region, Box) for part in info.parts)


def test_tied_name_is_an_alias(plain_root: str) -> None:
    with ckpt.open(plain_root) as ck:
        names = {"model.embed.weight", "model.head.weight"}
        infos = [ck.info(name) for name in names]
        assert {info.alias_of for info in infos} & names
        assert torch.equal(*(ck[name] for name in names))


def test_opening_reads_no_tensor_and_a_region_reads_its_blocks(plain_root: str) -> None:
    """Counts of bytes: a region in the middle of a big tensor costs the blocks it touches."""
    store = CountingStore(open_store(plain_root))
    ck = Checkpoint(store, find_checkpoint(store))
    before = store.stats.bytes_read
    assert before < 100_000
    ck.read("model.big", Span(BIG // 2, BIG // 2 + 10))
    block = ck.manifest.header.block_bytes
    assert 0 < store.stats.bytes_read - before <= 2 * block


def test_changed_byte_is_named_and_other_tensors_still_read(
    plain_root: str, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(plain_root, root)
    with ckpt.open(str(root)) as ck:
        part = ck.info("model.big").parts[0]
        path = root / ck.prefix / part.file
        data = bytearray(path.read_bytes())
        data[part.byte_start + 2_000_000] ^= 4
        path.write_bytes(data)
        with pytest.raises(ckpt.errors.Corrupt, match=rf"{part.file}: block 1 of 'model\.big'"):
            ck["model.big"]
        assert torch.equal(ck["model.low"], stepped(10).low)
        assert torch.equal(ck.read("model.big", Span(0, 100)), stepped(10).big.flatten()[:100])


def test_damaged_manifest_is_named(plain_root: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(plain_root, root)
    path = data_files(str(root))[-1].parent / "MANIFEST"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ckpt.errors.Corrupt, match="MANIFEST"):
        ckpt.open(str(root))
    with pytest.raises(ckpt.errors.Corrupt, match="MANIFEST"):
        ckpt.open(str(path.parent))


def test_a_kind_of_a_later_version_is_loaded_and_shown_as_any_other_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FORMAT.md, section 4: kinds 4 to 15 are for later versions."""
    ckpt.save({"x": torch.arange(5.0)}, str(tmp_path), step=1)

    def of_a_later_version(data: bytes, *more: Any, **options: Any) -> Manifest:
        manifest = decode_manifest(data, *more, **options)
        return replace(manifest, kinds=np.full_like(manifest.kinds, 9))

    monkeypatch.setattr("ckpt.commit.locate.decode_manifest", of_a_later_version)
    state = {"x": torch.zeros(5)}
    ckpt.load(state, str(tmp_path))
    assert torch.equal(state["x"], torch.arange(5.0))
    with ckpt.open(str(tmp_path)) as checkpoint:
        assert checkpoint.info("x").kind is Kind.OTHER
