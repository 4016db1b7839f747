"""Models of transformers whose files have other tensors than the live model load by `stacks=`.

Method: what `save_pretrained` writes, by transformers' own conversions, loads into a live model of
other weights, and back; judged by the live model's bits, and by `from_pretrained` of our export.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import ckpt

transformers = pytest.importorskip("transformers", reason="its models and their conversions")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


class Family(NamedTuple):
    """A tiny model, rules from its names to those of files, and names that differ otherwise."""

    make: Callable[[], Any]
    stacks: dict[str, str]
    renames: dict[str, str]


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(**SMALL, num_experts=3, moe_intermediate_size=12)
    return transformers.Qwen3MoeForCausalLM(config)


def dinov2() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Dinov2Config(**sizes, image_size=28, patch_size=14, use_swiglu_ffn=True)
    return transformers.Dinov2Model(config)


EXPERTS = "block_sparse_moe.experts.{}"
FAMILIES = {
    "mixtral": Family(
        mixtral,
        {
            "mlp.experts.gate_up_proj": f"{EXPERTS}.w1.weight + {EXPERTS}.w3.weight @1",
            "mlp.experts.down_proj": f"{EXPERTS}.w2.weight",
        },
        {".mlp.gate": ".block_sparse_moe.gate"},
    ),
    "qwen3_moe": Family(
        qwen3_moe,
        {
            "experts.gate_up_proj": "experts.{}.gate_proj.weight + experts.{}.up_proj.weight @1",
            "experts.down_proj": "experts.{}.down_proj.weight",
        },
        {},
    ),
    "dinov2": Family(
        dinov2,
        {"gate_proj + up_proj": "weights_in"},
        {
            ".mlp.down_proj": ".mlp.weights_out",
            ".attention.o_proj": ".attention.output.dense",
            ".attention.q_proj": ".attention.attention.query",
            ".attention.k_proj": ".attention.attention.key",
            ".attention.v_proj": ".attention.attention.value",
        },
    ),
}


def renamed(names: dict[str, str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return rename


def with_weights(family: Family, seed: int) -> Any:
    torch.manual_seed(seed)
    model = family.make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_of_a_family_load_into_its_live_model_and_back(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model, other = with_weights(family, 1), with_weights(family, 2)
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    its = load_file(file)
    live = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    assert {(k, v.shape) for k, v in its.items()} != {(k, v.shape) for k, v in live.items()}

    rename = renamed(family.renames)
    # Without names to change, where they lie in the state is found.
    from_state = (lambda name: rename(name.removeprefix("model."))) if family.renames else None
    ckpt.load({"model": other}, file, stacks=family.stacks, rename=from_state)
    assert all(torch.equal(tensor, live[fqn]) for fqn, tensor in other.state_dict().items())

    ckpt.save({"model": model}, tmp_path / "ours", step=1)
    folder = tmp_path / "back"
    folder.mkdir()
    stacks = {live: saved for live, saved in family.stacks.items()}
    ckpt.export(
        tmp_path / "ours", folder / "model.safetensors", stacks=stacks, rename=rename, verify=True
    )
    again = load_file(folder / "model.safetensors")
    assert again.keys() == its.keys()
    assert all(torch.equal(again[fqn], tensor) for fqn, tensor in its.items())
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    opened = type(model).from_pretrained(folder)
    assert all(torch.equal(tensor, live[fqn]) for fqn, tensor in opened.state_dict().items())
