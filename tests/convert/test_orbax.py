"""Folders of Orbax that are damaged, crafted or elsewhere are refused, and say why.

Method: copies of those of the corpus (tests/corpus/orbax, orbax_zarr) are changed.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.convert.sources.opening import open_source
from ckpt.convert.sources.source import ReadRequest
from ckpt.errors import Corrupt, UnsupportedFormat
from ckpt.layout.region import Span

CORPUS = Path(__file__).parents[1] / "corpus"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    pytest.importorskip("tensorstore")
    return Path(shutil.copytree(CORPUS / "orbax_zarr/checkpoint", tmp_path / "plain"))


@pytest.fixture
def one_store(tmp_path: Path) -> Path:
    pytest.importorskip("tensorstore")
    return Path(shutil.copytree(CORPUS / "orbax/checkpoint", tmp_path / "store"))


def test_without_tensorstore_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(UnsupportedFormat, match=r"pip install 'shardpoint\[orbax\]'"):
        ckpt.open(str(CORPUS / "orbax/checkpoint"))


def test_a_lost_chunk_is_no_zeros(plain: Path) -> None:
    (plain / "params.first.kernel/0.0").unlink()
    with ckpt.open(str(plain)) as checkpoint:
        assert checkpoint["params.first.bias"].numel() == 7
        with pytest.raises(Corrupt, match=r"params\.first\.kernel"):
            checkpoint["params.first.kernel"]


def test_a_lost_array_is_named(plain: Path) -> None:
    shutil.rmtree(plain / "params.first.kernel")
    with pytest.raises(Corrupt, match=r"params\.first\.kernel"):
        ckpt.open(str(plain))


def test_a_chunk_larger_than_its_array_is_refused(plain: Path) -> None:
    place = plain / "params.first.kernel/.zarray"
    place.write_text(json.dumps({**json.loads(place.read_text()), "chunks": [1 << 20, 1 << 10]}))
    with pytest.raises(Corrupt, match=r"chunks of shape \(1048576, 1024\)"):
        ckpt.open(str(plain))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tree_metadata": {"a": 1}}', "[" * 10_000])
def test_metadata_that_is_none_is_corrupt(plain: Path, text: str) -> None:
    (plain / "_METADATA").write_text(text)
    with pytest.raises(Corrupt, match="_METADATA"):
        ckpt.open(str(plain))


def test_a_damaged_store_is_refused(one_store: Path) -> None:
    for file in one_store.glob("**/d/*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(Corrupt), ckpt.open(str(one_store)) as checkpoint:
        for name in checkpoint:
            checkpoint[name]


def test_several_items_stand_below_their_names(plain: Path, tmp_path: Path) -> None:
    step = tmp_path / "5"
    shutil.copytree(plain, step / "state")
    with ckpt.open(str(step)) as checkpoint:
        assert "params.first.bias" in checkpoint
    shutil.copytree(plain, step / "ema")
    wanted = load_file(CORPUS / "orbax_zarr/expected.safetensors")
    with ckpt.open(str(step)) as checkpoint:
        for item in ("state", "ema"):
            for name, tensor in wanted.items():
                assert torch.equal(checkpoint[f"{item}.{name}"], tensor)


def test_kernels_load_transposed_into_a_torch_model(plain: Path) -> None:
    model = torch.nn.Linear(5, 7)
    ckpt.load(
        model,
        str(plain),
        stacks={"params.first.weight": "params.first.kernel^T"},
        rename=lambda name: f"params.first.{name}",
        strict="state",
    )
    wanted = load_file(CORPUS / "orbax_zarr/expected.safetensors")
    assert torch.equal(model.weight, wanted["params.first.kernel"].T)
    assert torch.equal(model.bias, wanted["params.first.bias"])


@pytest.mark.parametrize("start", range(0, 35, 4))
def test_any_run_of_elements_is_read(plain: Path, start: int) -> None:
    wanted = load_file(CORPUS / "orbax_zarr/expected.safetensors")["half.first.kernel"].view(-1)
    with closing(open_source(str(plain))) as source:
        for stop in range(start + 1, 36):
            part = torch.empty(stop - start, dtype=torch.bfloat16)
            source.fill([ReadRequest("half.first.kernel", Span(start, stop), part)])
            assert torch.equal(part, wanted[start:stop])
