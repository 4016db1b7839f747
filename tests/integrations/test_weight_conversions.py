"""Models of transformers whose files have other tensors than the live model load by `stacks=`.

Method: what `save_pretrained` writes, by transformers' own conversions, loads into a live model of
other weights, and back; judged by the live model's bits, and by `from_pretrained` of our export.
Every converter of its maps, as a rule, does with random tensors what its operations do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.errors import CheckpointError

transformers = pytest.importorskip("transformers", reason="its models and their conversions")

from ckpt.integrations.huggingface import conversions_of, stacks_of  # noqa: E402

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

    ckpt.load({"model": other}, file, **conversions_of(other))
    assert all(torch.equal(tensor, live[fqn]) for fqn, tensor in other.state_dict().items())

    rename = renamed(family.renames)
    other = with_weights(family, 3)
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


HEADS, PARTS = 2, 3  # of rotary embeddings, and of lists of modules
SIZES = {"q_proj": 8, "k_proj": 4, "v_proj": 4}  # of `Split`, which asks the model


def form(pattern: str) -> str:
    """A name as our rules have it, from one of theirs."""
    return pattern.replace("\\.", ".").strip(".").replace("*", "{}")


def file_of(converter: Any) -> dict[str, torch.Tensor]:
    """Random tensors that a file for this converter has, by name."""
    names = [form(pattern) for pattern in converter.source_patterns]
    count = 4 if "text_moe" in str(converter.target_patterns) else PARTS
    per_name = [[n.format(i) for i in range(count)] if "{}" in n else [n] for n in names]
    # Rows that make three parts, of two heads each; matrices of experts where these are stacked.
    is_stack = any(getattr(one, "dim", 0) == 1 for one in converter.operations) or any(
        max(getattr(one, "dim0", 0), getattr(one, "dim1", 0)) == 2 for one in converter.operations
    )
    shape = (PARTS, 24, 6) if is_stack and "{}" not in str(names) else (24, 6)
    if "Split" in str([type(one).__name__ for one in converter.operations]):
        shape = (16, 6)
    return {f"layers.0.{name}": torch.randn(shape) for some in per_name for name in some}


def model_of() -> Any:
    """What operations ask a model for: numbers of its configuration, and shapes."""
    config = SimpleNamespace(num_attention_heads=HEADS)
    config.get_text_config = lambda: SimpleNamespace(**dict.fromkeys(ATTRIBUTES, PARTS))
    sizes = {f"layers.0.self_attn.{name}": torch.empty(size, 6) for name, size in SIZES.items()}
    # Of another shape than in a file, so that they are turned.
    turned = dict.fromkeys(("gate_up_proj", "down_proj"), torch.empty(PARTS, 6, 24))
    sizes |= {f"layers.0.mlp.experts.{name}": one for name, one in turned.items()}
    return SimpleNamespace(
        config=config,
        get_parameter=sizes.__getitem__,
        named_parameters=sizes.items,
    )


def by_theirs(converter: Any, file: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers makes of a file."""
    model, sources, targets = model_of(), converter.source_patterns, converter.target_patterns
    tensors: dict[str, Any] = {}
    for pattern in sources:
        pieces = form(pattern).split("{}")
        some = [t for n, t in file.items() if all(piece in n for piece in pieces)]
        tensors[pattern] = some if "*" in pattern else some[0]
    for one in converter.operations:
        name = f"layers.0.{targets[0]}"
        tensors = one.convert(
            tensors, source_patterns=sources, target_patterns=targets, config=model.config,
            model=model, full_layer_name=name,
        )  # fmt: skip
    return {f"layers.0.{form(name)}": tensor for name, tensor in tensors.items()}


ATTRIBUTES: set[str] = set()


def converters() -> dict[str, Any]:
    """Those of all families, each kind of tensors and names once."""
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

    known = {}
    for transforms in _build_checkpoint_conversion_mapping().values():
        for one in transforms:
            if operations := getattr(one, "operations", ()):
                does = [(type(op).__name__, *sorted(vars(op).items())) for op in operations]
                known[f"{does} {one.source_patterns} {one.target_patterns}"] = one
                ATTRIBUTES.update(
                    filter(None, (getattr(op, "num_shards_attribute", None) for op in operations))
                )
    return known


def test_a_rule_does_what_each_converter_of_transformers_does(tmp_path: Path) -> None:
    known = converters()
    assert len(known) > 60
    kinds = set()
    for number, (name, converter) in enumerate(sorted(known.items())):
        torch.manual_seed(number)
        kinds.update(type(one).__name__ for one in converter.operations)
        file = file_of(converter)
        live = by_theirs(converter, dict(file))
        rules, folder = stacks_of(converter, model_of()), tmp_path / str(number)
        folder.mkdir()
        save_file(file, folder / "model.safetensors")
        state = {fqn: torch.zeros_like(tensor) for fqn, tensor in live.items()}
        ckpt.load({"model": state}, folder / "model.safetensors", stacks=rules)
        assert all(torch.equal(state[fqn], tensor) for fqn, tensor in live.items()), name
        ckpt.save({"model": state}, folder / "run", step=1)
        back = dict(reversed(rules.items()))
        ckpt.export(
            folder / "run", folder / "back.safetensors", entry="model", stacks=back, verify=True
        )
        again = load_file(folder / "back.safetensors")
        assert again.keys() == file.keys(), name
        assert all(torch.equal(again[fqn], tensor) for fqn, tensor in file.items()), name
    assert {"PermuteForRope", "Interleave", "ErnieFuseAndSplitTextVisionExperts"} <= kinds


def test_a_tensor_that_transformers_leaves_as_it_is_stays(tmp_path: Path) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    weight = torch.randn(PARTS, 6, 6)
    model = torch.nn.Module()
    model.experts = torch.nn.Parameter(torch.zeros(PARTS, 6, 6))
    converter = WeightConverter("experts", "experts", [Transpose(1, 2, check_dims=True)])
    theirs = converter.operations[0].convert(
        {"experts": [weight]}, ["experts"], ["experts"], model=model, full_layer_name="experts"
    )
    save_file({"experts": weight}, tmp_path / "model.safetensors")
    rules = stacks_of(converter, model)
    ckpt.load({"model": model}, tmp_path / "model.safetensors", stacks=rules)
    assert torch.equal(model.experts, theirs["experts"])


def test_a_parameter_that_a_rule_asks_for_is_missed() -> None:
    from transformers.core_model_loading import Split, WeightConverter

    converter = WeightConverter("qkv", ["q", "k"], [Split(dim=0)])
    with pytest.raises(CheckpointError, match=r"no parameter q, .* before the model is wrapped"):
        stacks_of(converter, torch.nn.Linear(2, 2))


def test_an_operation_that_no_rule_has_is_refused() -> None:
    class Roll:
        """None of transformers'."""

    converter = SimpleNamespace(operations=[Roll()], source_patterns=["a"], target_patterns=["b"])
    with pytest.raises(CheckpointError, match="no rule of stacks= does Roll"):
        stacks_of(converter, model_of())
