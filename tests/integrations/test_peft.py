"""Adapters in the files that peft itself loads.

Peers: peft's own `save_pretrained` says which tensors are in a file, and `from_pretrained`
loads ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.convert.naming import preset_names
from ckpt.errors import CheckpointError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(10, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(tokens)).relu())  # type: ignore[no-any-return]


def adapted(library: Any, seed: int) -> Any:
    config = library.LoraConfig(
        target_modules=["embed", "layer"], modules_to_save=["head"], use_dora=True, r=2
    )
    model = library.get_peft_model(Net(), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                param.add_(torch.randn_like(param))
    return model


@pytest.mark.filterwarnings("ignore")  # peft's own, about embeddings and model cards
def test_an_exported_adapter_is_loaded_by_peft(tmp_path: Path) -> None:
    """It took two renames by hand, and the base model went along."""
    library: Any = pytest.importorskip("peft", reason="peft loads the adapters")
    model = adapted(library, 2)
    ckpt.save({"model": model, "step": 3}, str(tmp_path / "run"), step=1)
    folder = tmp_path / "adapter"
    target = str(folder / "adapter_model.safetensors")
    assert main(["export", str(tmp_path / "run"), target, "--preset", "peft", "--verify"]) == 0
    model.peft_config["default"].save_pretrained(str(folder))
    model.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    ours = load_file(target)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    loaded = library.PeftModel.from_pretrained(Net(), str(folder)).eval()
    tokens = torch.arange(10).view(2, 5)
    assert torch.equal(loaded(tokens), model.eval()(tokens))
    assert not torch.equal(loaded(tokens), adapted(library, 3).eval()(tokens))
    # One of two adapters, by its name.
    model.add_adapter("second", library.LoraConfig(target_modules=["layer"], r=3))
    ckpt.save({"model": model}, str(tmp_path / "run"), step=2)
    other = str(tmp_path / "second" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapters default, second.*preset='peft:default'"):
        ckpt.export(str(tmp_path / "run"), other, preset="peft")
    ckpt.export(str(tmp_path / "run"), other, preset="peft:second")
    assert sorted(load_file(other)) == [
        f"base_model.model.layer.lora_{half}.weight" for half in "AB"
    ]


def test_presets_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    inside = ["layer.lora_A.default.weight", "layer.base_layer.weight", "lora_A"]
    assert preset_names("peft", inside) == {inside[0]: "base_model.model.layer.lora_A.weight"}
    ckpt.save({"model": Net()}, str(tmp_path / "run"), step=1)

    def refused(preset: str, name: str, match: str, **more: Any) -> None:
        selection = dict(preset=preset, **more)
        with pytest.raises(CheckpointError, match=match):
            ckpt.export(str(tmp_path / "run"), str(tmp_path / "out" / name), **selection)
        assert not (tmp_path / "out").exists()

    right = "adapter_model.safetensors"
    refused("peft", right, "belongs to a peft adapter")
    refused("diffusers", right, "there is only 'peft'")
    refused("peft", "model.safetensors", r"name the target \.\.\./adapter_model.safetensors")
    refused("peft", "adapter_model.bin", "preset= is for models", optimizer=True)
