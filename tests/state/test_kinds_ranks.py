"""Composites and DTensors in containers on several ranks, loaded on another number of ranks.

Method: two gloo processes train and save all cases into one folder each; one process, and the two
again in another layout, load them and compare with what the two had, gathered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.errors import InvalidState
from tests.ranks import run_ranks


class Factors(NamedTuple):
    """What Shampoo keeps for a matrix."""

    left: Any
    right: Any


class Preconditioned(torch.optim.Optimizer):
    """State in the shapes that Shampoo, SOAP, Muon, schedule-free and GaLore have, on DTensors.

    The arithmetic means nothing; it makes all state depend on the gradients.
    """

    def __init__(self, params: Any, rank: int = 2) -> None:
        super().__init__(params, {"rank": rank})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    self.init(param, state)
                self.update(param, state, group["rank"])

    def init(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        rows, columns = param.shape
        state["factors"] = Factors(beside(param, rows, rows), beside(param, columns, columns))
        state["GG"] = [beside(param, rows, rows), None, (torch.zeros_like(param),)]
        state["soap"] = {"Q": [beside(param, 3, 5)], "step": torch.tensor(0.0), "is_first": True}
        state["momentum"] = torch.zeros_like(param)
        state["z"] = torch.zeros_like(param)
        state["projector"] = {"ortho": cut(param, 4, 2), "steps": 0}

    def update(self, param: torch.Tensor, state: dict[str, Any], rank: int) -> None:
        grad = param.grad
        assert grad is not None
        state["momentum"].mul_(0.5).add_(grad)
        state["z"].sub_(grad)
        state["GG"][2][0].add_(grad * grad)
        state["GG"][0].add_(1.5)
        state["factors"].left.add_(2)
        state["factors"].right.add_(3)
        state["soap"]["Q"][0].sub_(0.25)
        state["soap"]["step"] += 1
        state["soap"]["is_first"] = False
        state["projector"]["ortho"].add_(0.125)
        state["projector"]["steps"] += 1
        param.sub_(0.1 * state["momentum"] + 0.01 * state["GG"][2][0])


def beside(param: torch.Tensor, *shape: int) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return torch.ones(shape)
    return distribute_tensor(torch.ones(shape), param.device_mesh, [Replicate()])


def cut(param: torch.Tensor, *shape: int) -> torch.Tensor:
    numbers = torch.arange(8.0).view(shape)
    if not isinstance(param, DTensor):
        return numbers
    return distribute_tensor(numbers, param.device_mesh, [Shard(1)])


def training(*, sharded: bool, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return {"model": model, "optim": Preconditioned(model.parameters())}


def step(state: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    state["model"](torch.randn(4, 6)).sum().backward()
    state["optim"].step()
    state["optim"].zero_grad()


def plain(tree: Any) -> Any:
    """A tree with whole tensors, and tuples for named tuples."""
    if isinstance(tree, torch.Tensor):
        # A replicated one's whole tensor is its own memory.
        return (tree.full_tensor() if isinstance(tree, DTensor) else tree).detach().clone()
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(plain, tree))
    return list(map(plain, tree)) if isinstance(tree, list) else tree


def content(state: dict[str, Any]) -> dict[str, Any]:
    names = {id(param): name for name, param in state["model"].named_parameters()}
    return {
        "params": {name: plain(param) for name, param in state["model"].named_parameters()},
        "state": {names[id(p)]: plain(dict(s)) for p, s in state["optim"].state.items()},
    }


def assert_equal(got: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected), path
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), path
        for key in expected:
            assert_equal(got[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected) and len(got) == len(expected), path
        for index, item in enumerate(expected):
            assert_equal(got[index], item, f"{path}.{index}")
    else:
        assert got == expected, path


def _containers(folder: str) -> dict[str, Any]:
    state = training(sharded=True, seed=1)
    step(state, 2)
    ckpt.save({**state, "mask": torch.eye(3).to_sparse()}, f"{folder}/two", step=1)
    before = content(state)
    # Into the state of an optimizer that has stepped, and into one that has none yet.
    for steps in (1, 0):
        again = training(sharded=True, seed=5)
        for _ in range(steps):
            step(again, 9)
        ckpt.load(again, f"{folder}/two")
        loaded = content(again)
        assert_equal(loaded, before)
        first = next(iter(again["optim"].state.values()))
        assert isinstance(first["factors"], Factors) is bool(steps)
        ortho = first["projector"]["ortho"]
        assert isinstance(ortho, DTensor)
        assert ortho.placements == ((Shard(1),) if steps else (Replicate(),))
    step(state, 3)
    step(again, 3)
    assert_equal(content(again), content(state))
    # A plain tensor among DTensors may be anybody's.
    odd = training(sharded=True, seed=1)
    step(odd, 2)
    next(iter(odd["optim"].state.values()))["GG"][1] = torch.ones(2)
    with pytest.raises(InvalidState, match=r"optim\.state\.0\.weight\.GG\.0: .*plain"):
        ckpt.save(odd, f"{folder}/two", step=2)
    return before


@pytest.mark.ranks
def test_dtensors_anywhere_in_optimizer_state(tmp_path: Path) -> None:
    """In lists, tuples, dicts and named tuples they were refused; each has its own layout now."""
    before, other = run_ranks(2, _containers, str(tmp_path))
    assert_equal(other, before)
    alone = training(sharded=False, seed=7)
    step(alone, 8)
    mask = torch.zeros(3, 3).to_sparse()
    ckpt.load({**alone, "mask": mask}, str(tmp_path / "two"))
    assert_equal(content(alone), before)
    assert torch.equal(mask.to_dense(), torch.eye(3))
    step(alone, 3)
    ckpt.save(alone, str(tmp_path / "one"), step=3)
    again = training(sharded=False, seed=6)
    ckpt.load(again, str(tmp_path / "one"))
    assert_equal(content(again), content(alone))
    factors = next(iter(again["optim"].state.values()))["factors"]
    assert factors.left is factors[0] and factors._fields == ("left", "right")
