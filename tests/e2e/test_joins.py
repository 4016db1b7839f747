"""Joined, split and transposed tensors load into each other, however either lies on ranks.

Method: the same training in two forms over four ranks (threads over one memory store), every tensor
cut by boxes or runs of elements, saved in every layout of one form and loaded in every layout of
the other. What is loaded is compared, bit for bit, with slices of what torch's own cat, stack and
transpose make of the whole tensors; so are the moments and steps of AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.errors import CheckpointError, Mismatch
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.region import Region, whole
from ckpt.loading.load import LoadOptions
from storage import Store, open_store
from tests.e2e.job import Job
from tests.e2e.test_stacks import RANKS, columns, everything, rows, runs, taken
from tests.ranks import run_ranks

Tensors = dict[str, torch.Tensor]

LAYOUTS: dict[str, Callable[[tuple[int, ...], int], Region | None]] = {
    "whole": everything,
    "rows": rows,
    "columns": columns,
    "runs": runs,
}
APART = {
    "attn.q.weight": (8, 6),
    "attn.k.weight": (4, 6),
    "attn.v.weight": (4, 6),
    "attn.q.bias": (8,),
    "attn.k.bias": (4,),
    "attn.v.bias": (4,),
    "mlp.gate": (6, 5),
    "mlp.up": (6, 3),
    "conv.kernel": (6, 5),
    "conv.bias": (5,),
    "rope.wq.weight": (12, 6),
    "rope.wq.bias": (12,),
    "glu.w13": (3, 6, 2),
    "fused.w13.weight": (6, 3),
    **{f"moe.{i}.{name}.weight": (4, 6) for i in range(3) for name in ("w1", "w3")},
    "moe.0.down.weight": (6, 4),
    "moe.1.down.weight": (6, 4),
    "plain": (7,),
}
"""What one model has apart, by name."""
RULES = {
    "attn.qkv": "attn.q:8 + attn.k + attn.v",
    "mlp.gate_up": "mlp.gate:5 + mlp.up @1",
    "conv.weight": "conv.kernel^T",
    "rope.q": "rope.wq^I2",
    "glu.gate_up": "glu.w13^I @1",
    "fused.gate + fused.up": "fused.w13^I",
    "moe.gate_up": "moe.{}.w1.weight + moe.{}.w3.weight @1",
    "moe.down": "moe.{}.down.weight^T",
}
"""From the names of the model that has them in one to those of the other."""


def together(apart: Mapping[str, torch.Tensor]) -> Tensors:
    """The same model in the other form, made by torch."""
    of = apart.__getitem__
    made = {
        f"attn.qkv.{leaf}": torch.cat([of(f"attn.{name}.{leaf}") for name in "qkv"])
        for leaf in ("weight", "bias")
    }
    experts = [torch.stack([of(f"moe.{i}.{w}.weight") for i in range(3)]) for w in ("w1", "w3")]
    return made | {
        "mlp.gate_up": torch.cat([of("mlp.gate"), of("mlp.up")], 1),
        "conv.weight": of("conv.kernel").T.contiguous(),
        "conv.bias": of("conv.bias"),
        **{
            f"rope.q.{leaf}": torch.cat(
                [
                    of(f"rope.wq.{leaf}")[start + first : start + 6 : 2]
                    for start in (0, 6)
                    for first in (0, 1)
                ]
            )
            for leaf in ("weight", "bias")
        },
        "glu.gate_up": torch.cat([of("glu.w13")[:, 0::2], of("glu.w13")[:, 1::2]], 1),
        "fused.gate.weight": of("fused.w13.weight")[0::2].contiguous(),
        "fused.up.weight": of("fused.w13.weight")[1::2].contiguous(),
        "moe.gate_up": torch.cat(experts, 1),
        "moe.down": torch.stack([of(f"moe.{i}.down.weight").T for i in range(2)]).contiguous(),
        "plain": of("plain"),
    }


def tensors_of(is_apart: bool, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    apart = {name: torch.randn(shape, generator=generator) for name, shape in APART.items()}
    return apart if is_apart else together(apart)


class Cut(nn.Module):
    """A rank's share of a model, each of whose tensors is cut in the same way."""

    def __init__(self, layout: str, rank: int, full: Tensors) -> None:
        super().__init__()
        self.cut = nn.ParameterDict()
        self.pieces: dict[str, Piece] = {}
        holders = tuple(range(RANKS)) if layout == "whole" else (rank,)
        for fqn, tensor in full.items():
            region = LAYOUTS[layout](tuple(tensor.shape), rank)
            assert region is not None
            local = taken(tensor, region)
            self.cut[fqn.replace(".", "/")] = nn.Parameter(local)
            shape, own = tuple(tensor.shape), whole(tuple(local.shape))
            self.pieces[fqn] = Piece(fqn, shape, tensor.dtype, region, own, holders)

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        for fqn, piece in self.pieces.items():
            parameter = self.cut[fqn.replace(".", "/")]
            yield Owned(parameter, parameter.detach(), (View((piece,)),), True)


def state_of(is_apart: bool, layout: str, rank: int, seed: int) -> dict[str, Any]:
    """What a rank holds after a step of AdamW."""
    model = Cut(layout, rank, tensors_of(is_apart, seed))
    gradients = Cut(layout, rank, tensors_of(is_apart, seed + 100))
    for name, parameter in model.cut.items():
        parameter.grad = gradients.cut[name].detach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.step()
    return {"model": model, "optim": optimizer}


def expect(state: dict[str, Any], good: dict[str, Any]) -> None:
    assert state["model"].cut.keys() == good["model"].cut.keys()
    for name, parameter in state["model"].cut.items():
        expected = good["model"].cut[name]
        assert torch.equal(parameter, expected), name
        if parameter.numel():
            for key, value in good["optim"].state[expected].items():
                assert torch.equal(state["optim"].state[parameter][key], value), (name, key)


def rules_to(is_apart: bool) -> dict[str, str]:
    """From names of a state in that form to those of a checkpoint in the other."""
    return {old: new for new, old in RULES.items()} if is_apart else RULES


@cache
def saved(is_apart: bool, layout: str) -> Store:
    store = open_store(f"memory://joins-{is_apart}-{layout}")
    states = [state_of(is_apart, layout, rank, seed=3) for rank in range(RANKS)]
    Job(RANKS, lambda rank: store).save(states.__getitem__, step=3)
    return store


@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_each_layout_of_one_form_loads_into_each_of_the_other(
    source: str, target: str, is_apart: bool
) -> None:
    states = [state_of(is_apart, target, rank, seed=5) for rank in range(RANKS)]
    store = saved(not is_apart, source)
    job = Job(RANKS, lambda rank: store)
    job.load(states.__getitem__, options=LoadOptions(stacks=rules_to(is_apart)))
    for rank, state in enumerate(states):
        expect(state, state_of(is_apart, target, rank, seed=3))


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_checkpoint_in_the_form_of_the_state_needs_no_rule(is_apart: bool) -> None:
    # A transpose under one name cannot be told from what it is made of; this one has two.
    states = [state_of(is_apart, "runs", rank, seed=5) for rank in range(RANKS)]
    store = saved(is_apart, "rows")
    job = Job(RANKS, lambda rank: store)
    job.load(states.__getitem__, options=LoadOptions(stacks=rules_to(is_apart)))
    for rank, state in enumerate(states):
        expect(state, state_of(is_apart, "runs", rank, seed=3))


def plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {"model": dict(tensors)}


def test_one_name_may_be_its_own_transpose(tmp_path: Path) -> None:
    kernel, bias = torch.randn(6, 5), torch.randn(5)
    ckpt.save({"conv": {"weight": kernel, "bias": bias}}, tmp_path, step=1)
    state = {"conv": {"weight": torch.zeros(5, 6), "bias": torch.zeros(5)}}
    ckpt.load(state, tmp_path, stacks={"conv": "conv^T"})
    assert torch.equal(state["conv"]["weight"], kernel.T)
    assert torch.equal(state["conv"]["bias"], bias)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"a": "b"}, "expected {} once"),
        ({"a + b": "c + d"}, "expected {} once"),
        ({"a + b": "c @1"}, "expected @dim and sizes where parts are joined"),
        ({"a:3": "c.{}"}, "expected @dim and sizes where parts are joined"),
        ({"a + a": "c"}, "parts of different names"),
        ({"a": "a + b"}, "another name for the whole"),
        ({"a + b": "b"}, "another name for the whole"),
        ({"a + ": "c"}, "something between their dots"),
        ({"q.{} + k": "c"}, "in none of the parts"),
        ({"x + y": "odd"}, "make the parts of"),
        ({"x:4 + y:4": "mlp.gate"}, "make the parts of"),
        ({"x:1 + y:4": "mlp.gate"}, "make the parts of"),
        ({"x + y @2": "mlp.gate"}, "and no dim 2 to cut"),
        ({"a": "c @1"}, "expected {} once"),
        ({"a": "c^I0"}, "expected {} once"),
        ({"a": "mlp.gate^I @2"}, "and no dim 2"),
        ({"a": "odd^I"}, "odd has shape (7, 2), and not an even number of rows"),
        ({"a^I4": "mlp.gate"}, "for each of 4 heads in dim 0"),
        ({"all": "attn.q + attn.k @1"}, "its slices differ: model.attn.q.weight is"),
        ({"all": "attn.q:7 + attn.k"}, "attn.q.weight: has shape (8, 6), unlike the rule"),
        ({"all": "attn.q + attn.none"}, "the checkpoint has 1 of its 2"),
        ({"all": "none + attn.none"}, "none + attn.none: the checkpoint has it not, and no all"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(
    rule: dict[str, str], text: str, tmp_path: Path
) -> None:
    full = tensors_of(True, 1) | {"odd": torch.randn(7, 2)}
    ckpt.save(plain(full), tmp_path, step=1)
    state = plain({name: torch.zeros_like(tensor) for name, tensor in full.items()})
    with pytest.raises((CheckpointError, Mismatch), match="stacks=") as failed:
        ckpt.load(state, tmp_path, stacks=rule)
    assert text in str(failed.value)
    assert not any(tensor.any() for tensor in state["model"].values())


def test_parts_whose_steps_differ_are_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 2) for name in "ab"})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    optimizer.state[model["b"].weight]["step"] += 1
    ckpt.save({"model": model, "optim": optimizer}, tmp_path, step=1)
    joined = nn.ModuleDict({"ab": nn.Linear(3, 4)})
    state = {"model": joined, "optim": torch.optim.AdamW(joined.parameters())}
    with pytest.raises(CheckpointError, match=r"a.weight.step 1.0 and .*b.weight.step 2.0"):
        ckpt.load(state, tmp_path, stacks={"ab": "a + b"})


@pytest.mark.parametrize("is_apart", [True, False])
def test_imports_exports_and_diffs_change_the_form(is_apart: bool, tmp_path: Path) -> None:
    mine, other = tensors_of(is_apart, 2), tensors_of(not is_apart, 2)
    save_file(
        {name: tensor.contiguous() for name, tensor in mine.items()}, tmp_path / "in.safetensors"
    )
    forth = {old: new for new, old in rules_to(not is_apart).items()}
    root = str(tmp_path / "root")
    ckpt.import_checkpoint(str(tmp_path / "in.safetensors"), root, stacks=forth, verify=True)
    with ckpt.open(root) as made:
        assert set(made.keys()) == set(other)
        assert all(torch.equal(made[name], tensor) for name, tensor in other.items())
    same = ckpt.diff(str(tmp_path / "in.safetensors"), root, stacks=forth)
    assert not same.changed and not same.only_a and not same.only_b
    back = str(tmp_path / "out.safetensors")
    ckpt.export(root, back, entry="", stacks={new: old for old, new in forth.items()}, verify=True)
    again = load_file(back)
    assert again.keys() == mine.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in mine.items())


def in_one(url: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.ModuleDict({"qkv": nn.Linear(6, 16)})
    fully_shard(model["qkv"], mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt.load({"model": model, "optim": optimizer}, url, stacks={"qkv": "q:8 + k:4 + v:4"})
    with ckpt.open(url) as saved:
        for leaf in ("weight", "bias"):
            parts = [saved[f"model.{name}.{leaf}"] for name in "qkv"]
            parameter = model["qkv"].get_parameter(leaf)
            assert torch.equal(parameter.full_tensor(), torch.cat(parts))
            moments = [saved[f"optim.state.{name}.{leaf}.exp_avg"] for name in "qkv"]
            mine = optimizer.state[parameter]["exp_avg"]
            assert torch.equal(mine.full_tensor(), torch.cat(moments))


@pytest.mark.ranks
def test_three_projections_load_into_one_of_fsdp2(tmp_path: Path) -> None:
    model = nn.ModuleDict({"q": nn.Linear(6, 8), "k": nn.Linear(6, 4), "v": nn.Linear(6, 4)})
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    ckpt.save({"model": model, "optim": optimizer}, tmp_path, step=1)
    run_ranks(3, in_one, str(tmp_path))
