"""Plain optimizer state of sharded parameters is each rank's own: it comes back plain, on the same
layout, and on no other one unless the user says what it is.

Real ranks. The parameter is square and its shard is 2 x 4, and there is state of just these shapes
that is neither the parameter's nor the shard's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ckpt
from ckpt.errors import InvalidState
from ckpt.layout.tensor import is_dtensor, local_tensor
from ckpt.state_dict import (
    FullOptimStateDictConfig,
    StateDictType,
    declare_optimizer_state,
    load_optimizer_state_dict,
    optimizer_state_dict,
)
from sharding import FullyShardedDataParallel, fully_shard
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")


def plainly_sharded(module: nn.Module, shard: Callable[..., Any]) -> nn.Module:
    shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def in_parallel(module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(module, mesh, {"0": ColwiseParallel()})


ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "fully": lambda module: plainly_sharded(module, fully_shard),
    "their_fully": lambda module: plainly_sharded(module, their_fully_shard),
    "parallel": in_parallel,
    "flat": lambda module: FullyShardedDataParallel(module, device_id=CPU),
    "orig": lambda module: FullyShardedDataParallel(module, device_id=CPU, use_orig_params=True),
    "their_flat": lambda module: Theirs(module, device_id=CPU),
    "their_orig": lambda module: Theirs(module, device_id=CPU, use_orig_params=True),
}


class Odd(torch.optim.SGD):
    """Works on local tensors, and has state of its own kind beside what it makes of them."""

    def step(self, closure: Any = None) -> None:
        for index, param in enumerate(self.param_groups[0]["params"]):
            local = local_tensor(param)
            if local.numel():
                tag = 100.0 * (dist.get_rank() if dist.is_initialized() else 0) + 10 * index
                state = self.state[param]
                state["moment"] = torch.zeros_like(local.detach()) + tag + 1
                state["like_shard"] = torch.full((2, 4), tag + 2)
                state["like_param"] = torch.full((4, 4), tag + 3)
                state["factors"] = [torch.full((3,), tag + 4), None, 7]
                if is_dtensor(param):
                    state["whole"] = torch.zeros_like(param) + tag


def made(engine: str) -> tuple[nn.Module, Odd]:
    torch.manual_seed(0)
    model = ENGINES[engine](nn.Sequential(nn.Linear(4, 4, bias=False)))
    return model, Odd(model.parameters(), lr=0.1)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict | list):
        keys = a if isinstance(a, dict) else range(len(a))
        return type(a) is type(b) and len(a) == len(b) and all(same(a[k], b[k]) for k in keys)
    if isinstance(a, torch.Tensor):
        local = local_tensor(a), local_tensor(b)
        return is_dtensor(a) == is_dtensor(b) and torch.equal(*local) and a.dtype is b.dtype
    return bool(a == b)


def state_of(optimizer: Odd) -> dict[str, Any]:
    return {
        str(index): optimizer.state[p]
        for index, p in enumerate(optimizer.param_groups[0]["params"])
    }


# --- the same layout -----------------------------------------------------------------------------

MOVES = [
    ("fully", "their_fully"),
    ("their_fully", "fully"),
    ("parallel", "parallel"),
    ("flat", "their_flat"),
    ("orig", "their_orig"),
    ("their_flat", "flat"),
]


def back(root: str) -> None:
    for source, target in MOVES:
        model, optimizer = made(source)
        optimizer.step()
        url = f"{root}/{source}"
        ckpt.save({"model": model, "optim": optimizer}, url, step=1)
        for stepped in (False, True):
            other, its = made(target)
            if stepped:
                its.step()
                [live] = state_of(its).values()
                for content in (live["like_shard"], live["factors"][0]):
                    content.zero_()
            ckpt.load({"model": other, "optim": its}, url)
            assert same(state_of(its), state_of(optimizer)), (source, target, stepped)


def test_a_checkpoint_gives_it_back_plain(tmp_path: Path) -> None:
    run_ranks(2, back, str(tmp_path))


def by_dicts() -> None:
    for source, target in MOVES:
        model, optimizer = made(source)
        optimizer.step()
        for form in (StateDictType.FULL, StateDictType.SHARDED):
            taken = optimizer_state_dict(model, optimizer, form)
            [(name, own)] = taken["per_rank"].items()
            assert {"like_shard", "like_param", "factors"} <= set(own)
            assert ("moment" in own) is (source in ("fully", "their_fully", "parallel"))
            wanted = state_of(optimizer)["0"]["factors"]
            assert same(taken["state"][name]["factors"], wanted)
            assert taken["state"][name]["factors"][0] is not wanted[0]
            other, its = made(target)
            load_optimizer_state_dict(other, its, taken)
            assert same(state_of(its), state_of(optimizer)), (source, target, form)
            its.load_state_dict(ckpt.state_dict.optimizer_state_dict_to_load(other, its, taken))
            assert same(state_of(its), state_of(optimizer)), (source, target, form)


def test_state_dicts_give_it_back_plain() -> None:
    run_ranks(2, by_dicts)


# --- another layout ------------------------------------------------------------------------------


def save_odd(root: str, engine: str) -> None:
    model, optimizer = made(engine)
    optimizer.step()
    ckpt.save({"model": model, "optim": optimizer}, root, step=1)


def refused(root: str, engine: str, said: str) -> None:
    other, its = made(engine)
    with pytest.raises(ckpt.Mismatch) as caught:
        ckpt.load({"model": other, "optim": its}, root, strict=False)
    assert all(said in problem for problem in caught.value.problems), caught.value.problems
    assert any("optim.state.0.weight.like_shard: " in text for text in caught.value.problems)
    assert not its.state
    names = [f"optim.state.0.weight.{name}" for name in ("moment", "like_shard", "like_param")]
    ckpt.load({"model": other, "optim": its}, root, skip=[*names, "optim.state.0.weight.factors"])


@pytest.mark.parametrize(
    ("source", "target", "ranks", "said"),
    [
        ("fully", "fully", 3, "by 2 ranks, and 3 load it"),
        ("fully", "bare", 1, "by 2 ranks, and 1 load it"),
        ("fully", "orig", 2, "here it lies as (8) of (4, 4) elements"),
        ("flat", "fully", 2, "here it lies as (2, 4) of (4, 4) from"),
    ],
)
def test_another_layout_is_refused_by_name(
    tmp_path: Path, source: str, target: str, ranks: int, said: str
) -> None:
    run_ranks(2, save_odd, str(tmp_path), source)
    run_ranks(ranks, refused, str(tmp_path), target, said)


def of_the_first() -> None:
    """A full dict that only rank 0 has holds nothing of the other ranks' own."""
    model, optimizer = made("fully")
    optimizer.step()
    config = FullOptimStateDictConfig(True, True)
    on_coordinator = optimizer_state_dict(model, optimizer, StateDictType.FULL, config)
    other, its = made("fully")
    with pytest.raises(ckpt.Mismatch, match=r"like_shard: .* only that of ranks \[0\] is given"):
        load_optimizer_state_dict(other, its, on_coordinator, rank0_only=True)
    copies = [on_coordinator]
    dist.broadcast_object_list(copies)
    with pytest.raises(ckpt.Mismatch, match=r"like_shard: .* only that of ranks \[0\] is given"):
        load_optimizer_state_dict(other, its, copies[0])
    unmarked = {"state": {"0.weight": {"own": torch.full((3,), float(dist.get_rank()))}}}
    with pytest.raises(ckpt.Mismatch, match=r"0.weight.own: is a plain tensor of another shape"):
        load_optimizer_state_dict(other, its, unmarked, strict=False)


def test_one_ranks_own_is_not_taken_for_anothers() -> None:
    run_ranks(2, of_the_first)


# --- the user says what it is --------------------------------------------------------------------


def summed(values: list[Any], rank: int, size: int) -> Any:
    return torch.stack(values).sum(0) + 1000 * rank


def declared(optimizer: Odd) -> Odd:
    own = ckpt.PerRank(None, summed)
    lists = ckpt.PerRank(None, lambda values, rank, size: [len(values), rank, size])
    declare_optimizer_state(
        optimizer,
        {"moment": "shard", "like_shard": own, "like_param": own, "factors": lists},
    )
    return optimizer


def save_declared(root: str) -> None:
    model, optimizer = made("fully")
    declared(optimizer).step()
    ckpt.save({"model": model, "optim": optimizer}, root, step=1)
    back = made("fully")
    ckpt.load({"model": back[0], "optim": declared(back[1])}, root)
    assert same(state_of(back[1]), state_of(optimizer))
    full = optimizer_state_dict(model, optimizer)
    assert full["state"]["0.weight"]["moment"].shape == (4, 4)
    load_optimizer_state_dict(back[0], declared(back[1]), full)
    assert same(state_of(back[1]), state_of(optimizer))
    wrong = Odd(model.parameters(), lr=0.1)
    wrong.step()
    declare_optimizer_state(wrong, {"like_param": "shard"})
    with pytest.raises(InvalidState, match=r"like_param: is declared a shard and has shape"):
        optimizer_state_dict(model, wrong)


def load_declared(root: str) -> None:
    other, its = made("orig")
    ckpt.load({"model": other, "optim": declared(its)}, root)
    rank = dist.get_rank()
    [state] = state_of(its).values()
    assert torch.equal(state["like_shard"], torch.full((2, 4), 104.0 + 1000 * rank))
    assert torch.equal(state["like_param"], torch.full((4, 4), 106.0 + 1000 * rank))
    assert state["factors"] == [2, rank, dist.get_world_size()]
    rows = torch.tensor([1.0, 1.0, 101.0, 101.0])[:, None].expand(4, 4)
    start = rank * 8
    local = rows.flatten()[start : start + 8]
    assert type(state["moment"]) is torch.Tensor and torch.equal(state["moment"], local)


def test_what_is_declared_moves_between_layouts(tmp_path: Path) -> None:
    run_ranks(2, save_declared, str(tmp_path))
    run_ranks(2, load_declared, str(tmp_path))


def test_declarations_are_checked() -> None:
    optimizer = Odd([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"state 'a' cannot be 'whole'"):
        declare_optimizer_state(optimizer, {"a": "whole"})  # type: ignore[dict-item]
