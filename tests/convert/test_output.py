"""What an import or export writes is bounded by the bytes that are stored, in every format.

Method: files whose tensors show the same stored bytes over and over, from a KiB on; nothing is
written of them, and an error of ours says so, whatever their numbers are.
"""

from __future__ import annotations

import itertools
import json
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

import ckpt
from ckpt.cli import main
from ckpt.errors import CheckpointError
from tests.convert import test_deepspeed as deepspeed
from tests.versions import ALONE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
MIB = 1 << 20


def expanded(*shape: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        torch.save({"w": torch.zeros(1).expand(*shape)}, folder / "m.pt")
        return folder / "m.pt"

    return make


def views(folder: Path) -> Path:
    base = torch.zeros(MIB)
    torch.save({f"v{n}": base[n:] for n in range(40)}, folder / "m.pt")
    return folder / "m.pt"


def one_blob_of_many(folder: Path) -> Path:
    """A DCP directory in which 200 tensors lie in one blob."""
    dcp.save({"w": torch.zeros(MIB // 4)}, checkpoint_id=folder / "dcp", **ALONE)
    path = folder / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    ((index, place),) = metadata.storage_data.items()
    for n in range(200):
        metadata.state_dict_metadata[f"w{n}"] = metadata.state_dict_metadata["w"]
        metadata.storage_data[MetadataIndex(f"w{n}", index.offset, index.index)] = place
        metadata.planner_data[f"w{n}"] = (f"w{n}",)
    path.write_bytes(pickle.dumps(metadata))
    return folder / "dcp"


def one_blob_of_other_shapes(folder: Path) -> Path:
    """A DCP directory in which 200 tensors of different shapes lie in one blob."""
    path = one_blob_of_many(folder) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for n in range(200):
        size = torch.Size([*[1] * (n % 20), 1 << n // 20, MIB // 4 >> n // 20])
        offset = torch.Size([0] * len(size))
        one = metadata.state_dict_metadata[f"w{n}"]
        chunk = replace(one.chunks[0], offsets=offset, sizes=size)
        metadata.state_dict_metadata[f"w{n}"] = replace(one, size=size, chunks=[chunk])
        metadata.storage_data[MetadataIndex(f"w{n}", offset, 0)] = metadata.storage_data.pop(
            MetadataIndex(f"w{n}", torch.Size([0]), 0)
        )
    path.write_bytes(pickle.dumps(metadata))
    return folder / "dcp"


def one_range_of_many(folder: Path) -> Path:
    """A safetensors file in which 200 names have the same bytes."""
    save_file({"w": torch.zeros(MIB // 4)}, folder / "m.safetensors")
    data = (folder / "m.safetensors").read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:length])["w"]
    header = json.dumps({f"w{n}": entry for n in range(200)}).encode()
    whole = len(header).to_bytes(8, "little") + header + data[length:]
    (folder / "m.safetensors").write_bytes(whole)
    return folder / "m.safetensors"


CRAFTED: dict[str, Callable[[Path], Path]] = {
    "400 MB": expanded(100_000_000),
    "2^45": expanded(1 << 45),
    "2^57": expanded(1 << 57),
    "2^57 in dims": expanded(*[1 << 19] * 3),
    "views": views,
    "dcp": one_blob_of_other_shapes,
    "safetensors": one_range_of_many,
}


WAYS = [
    *((what, "import") for what in CRAFTED),
    *itertools.product(("2^57", "views"), ("safetensors", "torch", "dcp", "hf")),
]


@pytest.mark.parametrize(("what", "way"), WAYS)
def test_what_shows_stored_bytes_often_is_refused(what: str, way: str, tmp_path: Path) -> None:
    source, target = CRAFTED[what](tmp_path), tmp_path / "out"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            if way == "import":
                ckpt.import_checkpoint(str(source), str(target))
            else:
                form = {"safetensors": ".safetensors", "torch": ".pt"}.get(way, "")
                ckpt.export(str(source), f"{target}{form}", format=way)  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB, f"{peak >> 20} MiB"
    assert not list(tmp_path.glob("out*"))


def test_one_blob_of_many_names_is_written_once(tmp_path: Path) -> None:
    """They have the same bits, so they are imported as ties."""
    report = ckpt.import_checkpoint(str(one_blob_of_many(tmp_path)), str(tmp_path / "out"))
    assert report.tensors == ("w",) and report.nbytes < 2 * MIB


def test_more_is_written_where_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(expanded(20 * MIB)(tmp_path))
    for command in ("import", "export"):
        target = str(tmp_path / command) + (".safetensors" if command == "export" else "")
        assert main([command, source, target]) == 1
        assert "--output-bytes-max" in capsys.readouterr().err
        assert main([command, source, target, "--output-bytes-max", "100MB"]) == 0


def test_deepspeed_counts_its_files(tmp_path: Path) -> None:
    deepspeed.make(tmp_path, stage=2, size=2)
    with pytest.raises(CheckpointError, match="output_bytes_max"):
        ckpt.import_checkpoint(str(tmp_path), str(tmp_path / "run"), output_bytes_max=1)
    ckpt.import_checkpoint(str(tmp_path), str(tmp_path / "run"))
