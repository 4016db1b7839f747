"""A folder of a model: weights, their index and what describes them, as readers look for them.

Method: the reader here follows the rule of vLLM and SGLang as they document it: every safetensors
file of the folder, or those that the index names, one tensor after the other. The files are those
of a checkpoint of a small model with tied weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.errors import CheckpointError, NoCheckpoint

CONFIG = {"model_type": "tiny", "architectures": ["TinyForCausalLM"], "vocab_size": 30}


class Tiny(nn.Module):
    """The head, whose name comes first in the alphabet, shares the embedding, which is first."""

    def __init__(self, rows: int = 30) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(rows, 16)
        self.model.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.lm_head = nn.Linear(16, rows, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight


def saved(tmp_path: Path, model: nn.Module | None = None) -> str:
    root = str(tmp_path / "run")
    torch.manual_seed(3)
    ckpt.save({"model": model or Tiny()}, root, step=4)
    return root


def described(tmp_path: Path, files: Mapping[str, Any] | None = None) -> str:
    folder = tmp_path / "base"
    folder.mkdir()
    for name, content in {"config.json": CONFIG, **(files or {})}.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(data)
    return str(folder)


def read_by_index(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, each once, by the rule of engines that serve models."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    weight_map: dict[str, str] | None = None
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert set(files) == set(weight_map.values()), "files that no index names"
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            for key in file.keys():  # noqa: SIM118 (it is no dict)
                assert key not in tensors and (weight_map is None or weight_map[key] == name)
                tensors[key] = file.get_tensor(key)
    assert weight_map is None or weight_map.keys() == tensors.keys()
    return tensors


def test_a_folder_has_shards_an_index_and_what_describes_them(tmp_path: Path) -> None:
    model = Tiny()
    source = {
        "tokenizer.json": {"version": "1.0"},
        "merges.txt": b"a b\n",
        "tokenizer.model": b"\n\x05bytes",
        "modeling_tiny.py": b"import os",
        "model.safetensors.index.json": {"weight_map": {}},
    }
    target = tmp_path / "served"
    report = ckpt.export(
        saved(tmp_path, model),
        target,
        format="hf",
        config=described(tmp_path, source),
        shard_bytes_max=2500,
        verify=True,
    )
    copied = {"config.json", "tokenizer.json", "merges.txt", "tokenizer.model"}
    shards = {path.name for path in target.glob("*.safetensors")}
    assert len(shards) > 1 and f"model-00001-of-{len(shards):05d}.safetensors" in shards
    index = "model.safetensors.index.json"
    assert {path.name for path in target.iterdir()} == {*shards, *copied, index}
    assert {Path(file).name for file in report.files} == {*shards, *copied, index}
    tensors = read_by_index(target)
    expected = model.state_dict()
    del expected["lm_head.weight"]  # as the library leaves it out, although its name is the first
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert json.loads((target / index).read_text())["metadata"]["total_size"] == total
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    for name in copied:
        assert (target / name).read_bytes() == (tmp_path / "base" / name).read_bytes()


def test_one_file_needs_no_index_and_a_config_alone_is_enough(tmp_path: Path) -> None:
    described(tmp_path, {"tiny.json": CONFIG, "tokenizer.json": {}})
    target = tmp_path / "served"
    root = saved(tmp_path)
    config = str(tmp_path / "base" / "tiny.json")
    arguments = ["export", root, str(target), "--format", "hf", "--config", config]
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    assert {path.name for path in target.iterdir()} == {"model.safetensors", "config.json"}
    assert read_by_index(target)["model.layers.0.weight"].dtype == torch.bfloat16
    # Readers convert to the dtype of the config.
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_every_tied_name_is_there_where_readers_do_not_tie(tmp_path: Path) -> None:
    config = described(tmp_path, {"config.json": {**CONFIG, "tie_word_embeddings": False}})
    target = tmp_path / "served"
    ckpt.export(saved(tmp_path), target, format="hf", config=config)
    assert "lm_head.weight" in read_by_index(target)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer.json": b"\x80\x04\x95."}, "pickle"),
        ({"tokenizer.model": b"PK\x03\x04data.pkl"}, "pickle or a zip"),
        ({"tokenizer.json": b"{"}, "no json file"),
        ({"vocab.txt": b"\xff\xfe"}, "no txt file"),
        ({"config.json": [1]}, "list where a map"),
        ({"config.json": {"lr": 1}}, "neither model_type nor architectures"),
        (
            {"config.json": {**CONFIG, "vocab_size": 31}},
            "the config's vocab_size is 31",
        ),
    ],
)
def test_what_no_reader_should_trust_is_refused(
    tmp_path: Path, files: dict[str, Any], said: str
) -> None:
    target = tmp_path / "served"
    with pytest.raises(CheckpointError, match=said):
        ckpt.export(saved(tmp_path), target, format="hf", config=described(tmp_path, files))
    assert not target.exists() or not list(target.iterdir())


def in_front(beginning: str) -> nn.Module:
    model: nn.Module = Tiny()
    for part in reversed(beginning.split(".")):
        outer = nn.Module()
        outer.add_module(part, model)
        model = outer
    return model


@pytest.mark.parametrize(
    ("beginning", "named"),
    [("model", "'model.model.'"), ("module", "wrapper"), ("mine.net", "mine.net")],
)
def test_names_of_a_wrapper_are_named(tmp_path: Path, beginning: str, named: str) -> None:
    weights = {name: "model-1.safetensors" for name in Tiny().state_dict()}
    config = described(tmp_path, {"model.safetensors.index.json": {"weight_map": weights}})
    root, target = saved(tmp_path, in_front(beginning)), tmp_path / "served"
    with pytest.raises(CheckpointError, match=named) as refused:
        ckpt.export(root, target, format="hf", config=config)
    assert f"rename=['{beginning}=']" in str(refused.value)
    rename = dict(rename=[f"{beginning}="])
    ckpt.export(root, target, format="hf", config=config, **rename)
    assert read_by_index(target).keys() | {"lm_head.weight"} == weights.keys()


def test_a_missing_beginning_is_named(tmp_path: Path) -> None:
    target = tmp_path / "base" / "model.safetensors"
    config = described(tmp_path)
    ckpt.export(saved(tmp_path, in_front("text")), str(target))
    inner, served = str(tmp_path / "inner"), tmp_path / "served"
    ckpt.save({"model": Tiny()}, inner, step=0)
    with pytest.raises(CheckpointError, match=r"rename=\['=text'\]"):
        ckpt.export(inner, served, format="hf", config=config)


def test_wrong_calls(tmp_path: Path) -> None:
    root, config = saved(tmp_path), described(tmp_path)
    served = tmp_path / "served"
    with pytest.raises(CheckpointError, match='pass format="hf"'):
        ckpt.export(root, str(served / "model.safetensors"), config=config)
    with pytest.raises(CheckpointError, match="is a directory"):
        ckpt.export(root, str(served / "model.safetensors"), format="hf", config=config)
    with pytest.raises(NoCheckpoint, match=r"has no config\.json"):
        ckpt.export(root, served, format="hf", config=str(tmp_path))
    with pytest.raises(CheckpointError, match="whole model"):
        ckpt.export(root, served, format="hf", optimizer=True)
    served.mkdir()
    (served / "model-00001-of-00002.safetensors").write_bytes(b"older")
    with pytest.raises(CheckpointError, match="export into an empty one"):
        ckpt.export(root, served, format="hf", config=config)
    assert [path.name for path in served.iterdir()] == ["model-00001-of-00002.safetensors"]
