"""Under several ranks imports and exports divide the work, and the result is that of one.

Method: four real ranks import and export a checkpoint with tensors larger than a share; files and
tensors are compared with those that one process makes. Reads are counted per rank.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt
import ckpt.convert.export
import ckpt.convert.import_
import ckpt.convert.targets.delivery
from ckpt.convert.import_ import share_of
from ckpt.convert.sources.source import SourceTensor
from ckpt.errors import CheckpointError
from storage import Store, open_store
from tests.convert.jobs import assert_same
from tests.ranks import run_ranks
from tests.stores import CountingStore

MIB = 1 << 20


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        "large": torch.randn(3000, 1500),  # 17 MiB
        "empty": torch.empty(0, 2),
        **{f"small{i}": torch.randn(100 + i) for i in range(9)},
        **{f"middle{i}": torch.randn(700, 700) for i in range(6)},
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("many") / "dcp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state()}, checkpoint_id=folder)
    return folder


def convert(source: str, folder: str) -> tuple[int, list[Any]]:
    """Import, and all kinds of exports; the bytes that this rank has read, and the reports."""
    opened: list[CountingStore] = []

    def counted(url: str, **options: Any) -> Store:
        store = open_store(url, **options)
        if url != source:
            return store
        opened.append(CountingStore(store))
        return opened[-1]

    ckpt.convert.import_.open_store = counted  # type: ignore[attr-defined]
    # So that the files of a test are worth being written together.
    ckpt.convert.export.PART_NBYTES = MIB
    ckpt.convert.targets.delivery.JOINT_NBYTES_MIN = MIB
    reports: list[Any] = [ckpt.import_checkpoint(source, f"{folder}/run")]
    nbytes = sum(store.stats.bytes_read for store in opened)
    reports += [
        ckpt.export(source, f"{folder}/hf/model.safetensors", shard_bytes_max=4 * MIB),
        ckpt.export(source, f"{folder}/one.safetensors", verify=True),
        ckpt.export(f"{folder}/run", f"{folder}/one.pt", verify=True),
        ckpt.export(f"{folder}/run", f"{folder}/dcp", format="dcp", verify=True),
    ]
    return nbytes, reports


@pytest.mark.ranks
def test_four_ranks_make_what_one_makes(source: str, tmp_path: Path) -> None:
    results = run_ranks(4, convert, source, str(tmp_path), timeout_seconds=120)
    expected = state()
    total = sum(tensor.nbytes for tensor in expected.values())
    # Each rank reads what it writes; the large tensor is divided.
    assert all(nbytes < 0.25 * total + 5 * MIB for nbytes, _ in results)
    assert sum(nbytes for nbytes, _ in results) < 1.1 * total + MIB
    assert all(reports[1:] == results[0][1][1:] for _, reports in results)
    with ckpt.open(str(tmp_path / "run")) as opened:
        assert opened.world_size == 4
        assert_same({name: opened[f"model.{name}"] for name in expected}, expected)
    assert ckpt.verify(str(tmp_path / "run")).ok
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(shards) > 4
    assert_same({k: v for shard in shards for k, v in load_file(shard).items()}, expected)
    assert_same(load_file(tmp_path / "one.safetensors"), expected)
    assert_same(torch.load(tmp_path / "one.pt", weights_only=True), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        dcp.load(wanted, checkpoint_id=tmp_path / "dcp")
    assert_same(wanted, expected)


def refused(folder: str) -> str:
    """What every rank hears when nothing can be read."""
    try:
        ckpt.import_checkpoint(f"{folder}/nothing", f"{folder}/run")
    except CheckpointError as error:
        assert not os.path.exists(f"{folder}/run")
        return str(error)
    return ""


@pytest.mark.ranks
def test_all_ranks_hear_of_a_failure(tmp_path: Path) -> None:
    texts = run_ranks(2, refused, str(tmp_path))
    assert texts[0] == texts[1] and "no checkpoint of a known format" in texts[0]


def test_shares_are_even_and_cover_everything(rng: Any) -> None:
    for _ in range(200):
        tensors = {
            f"t{i}": SourceTensor(
                f"t{i}",
                rng.choice(["float32", "bfloat16", "complex128", "bool"]),
                tuple(rng.choice([0, 1, 3, 200, 5000]) for _ in range(rng.randrange(3))),
            )
            for i in range(rng.randrange(1, 12))
        }
        size = rng.randrange(1, 9)
        shares = [share_of(tensors, rank, size) for rank in range(size)]
        total = sum(info.nbytes for info in tensors.values())
        for share in shares:
            assert sum(chunk.nbytes for chunk in share) <= total // size + 5 * MIB
        for fqn, info in tensors.items():
            regions = sorted(c.region for share in shares for c in share if c.fqn == fqn)
            ends = [0, *(region.stop for region in regions)]  # type: ignore[union-attr]
            assert [region.start for region in regions] == ends[:-1]  # type: ignore[union-attr]
            assert ends[-1] == torch.Size(info.shape).numel() if regions else 0 in info.shape
