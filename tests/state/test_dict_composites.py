"""Tensors that consist of others in state dicts of models: taken, and loaded, as torch's own do.

Method: dicts of each form are compared with the module's own `state_dict()`, part by part, and
loaded into modules with other contents. Sharded ones are cut by their own slices over two ranks.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.errors import InvalidState, Mismatch
from ckpt.state_dict import FullStateDictConfig, ShardedStateDictConfig, StateDictType
from tests.ranks import run_ranks
from tests.state.test_kinds import QUIET, Holder, assert_alike, composites, parts_of

TwoTensor: Any = importlib.import_module("torch.testing._internal.two_tensor").TwoTensor
FORMS = (StateDictType.FULL, StateDictType.SHARDED, StateDictType.LOCAL)


def pair(seed: int, rows: int = 6) -> Any:
    torch.manual_seed(seed)
    return TwoTensor(torch.randn(rows, 4), torch.randn(rows, 4))


@pytest.mark.filterwarnings(*[mark.args[0] for mark in QUIET])
def test_each_kind_is_taken_and_loaded_as_it_is() -> None:
    """They were refused in all forms."""
    expected = {name: parts_of(tensor) for name, tensor in composites(1).items()}
    taken = {}
    for form in FORMS:
        model = Holder(composites(1))
        taken[form] = ckpt.state_dict.model_state_dict(model, form)
        assert list(taken[form]) == list(model.state_dict())
        assert_alike(taken[form], expected)
    is_live = {
        form: taken["doubled"]._values().data_ptr() == model.doubled._values().data_ptr()
        for form, taken in taken.items()
    }
    assert is_live == {form: form is StateDictType.LOCAL for form in FORMS}
    for form in FORMS:
        other = Holder(composites(2))
        ckpt.state_dict.load_model_state_dict(other, taken[form])
        assert_alike(dict(other.named_buffers()), expected)
    # torch's own dict, too.
    other = Holder(composites(3))
    ckpt.state_dict.load_model_state_dict(other, Holder(composites(1)).state_dict())
    assert_alike(dict(other.named_buffers()), expected)


class Tied(nn.Module):
    """Two names of one composite parameter, and a plain one that is trained beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        self.first.w = self.second.w = nn.Parameter(pair(seed), requires_grad=False)
        self.plain = nn.Linear(2, 2)


def test_tied_names_and_the_optimizer_beside() -> None:
    model, other = Tied(1), Tied(2)
    taken = ckpt.state_dict.model_state_dict(model)
    assert list(taken) == ["first.w", "plain.weight", "plain.bias", "second.w"]
    assert taken["first.w"] is taken["second.w"]
    assert torch.equal(taken["first.w"].a, model.first.w.a)
    ckpt.state_dict.load_model_state_dict(other, taken)
    assert torch.equal(other.first.w.b, model.first.w.b)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model.plain(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = ckpt.state_dict.optimizer_state_dict(model, optimizer)["state"]
    assert set(state) == {"plain.weight", "plain.bias"}
    for bad, said in (
        ({**taken, "first.w": torch.zeros(6, 4)}, r"first\.w"),
        ({**taken, "first.w": pair(1, 5)}, r"first\.w: dict has a .* \(5, 4\)"),
        ({name: part for name, part in taken.items() if name != "first.w"}, r"first\.w"),
    ):
        with pytest.raises(Mismatch, match=said):
            ckpt.state_dict.load_model_state_dict(other, bad)


def sharded(seed: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = -(-6 // dist.get_world_size())  # on four ranks, the last has none
    whole, start = pair(seed), rows * dist.get_rank()
    local = torch.ops.aten.slice.Tensor(whole, 0, start, start + rows)
    made = nn.Module()
    wrapped = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    made.w = nn.Parameter(wrapped, requires_grad=False)
    made.register_buffer("whole", pair(seed + 10))
    return made


def is_pair(tensor: Any, wanted: Any) -> bool:
    return torch.equal(tensor.a, wanted.a) and torch.equal(tensor.b, wanted.b)


def on_ranks() -> None:
    model = sharded(1)
    full = ckpt.state_dict.model_state_dict(model)
    assert is_pair(full["w"], pair(1)) and is_pair(full["whole"], pair(11))
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    first = ckpt.state_dict.model_state_dict(model, StateDictType.FULL, config)
    assert bool(first) is (dist.get_rank() == 0)
    parts = ckpt.state_dict.model_state_dict(model, StateDictType.SHARDED)
    assert isinstance(parts["w"], DTensor) and parts["w"].placements == model.w.placements
    local = parts["w"].to_local()
    assert is_pair(local, model.w.to_local()) and local.a is not model.w.to_local().a
    on_host = ShardedStateDictConfig(offload_to_cpu=True)
    parts = ckpt.state_dict.model_state_dict(model, StateDictType.SHARDED, on_host)
    for given, first_only in ((full, False), (first, True), (parts, False)):
        other = sharded(2)
        ckpt.state_dict.load_model_state_dict(other, given, rank0_only=first_only)
        assert is_pair(other.w.to_local(), model.w.to_local())
        assert is_pair(other.whole, model.whole)
    with pytest.raises(InvalidState, match=r"w: is a DTensor, which has no LOCAL form"):
        ckpt.state_dict.model_state_dict(model, StateDictType.LOCAL)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_are_gathered_and_cut_again(ranks: int) -> None:
    run_ranks(ranks, on_ranks)
