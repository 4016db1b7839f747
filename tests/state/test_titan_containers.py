"""torchtitan's containers of models and optimizers are entries of a state as they are.

Method: classes with the attributes and the state dicts of torchtitan 0.3, whose own are used where
it is installed. A checkpoint of theirs loads into a plain model and optimizer and back, on the
same and on other layouts, and fused parameters load where a model has them fused or apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from ckpt.errors import InvalidState, Mismatch
from tests.ranks import run_ranks


class ModelWrapper:
    """As torchtitan's: all parts as one flat dict, whose tensors stay where they are."""

    def __init__(self, model: nn.Module | list[nn.Module]) -> None:
        self.model = [model] if isinstance(model, nn.Module) else model
        self.cached_state_dict = self._get_state_dict()

    def _get_state_dict(self) -> dict[str, Any]:
        return {key: value for part in self.model for key, value in part.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        for key, value in self._get_state_dict().items():
            if self.cached_state_dict[key].data_ptr() != value.data_ptr():
                self.cached_state_dict[key].copy_(value)
        return self.cached_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.model:
            part.load_state_dict(state_dict, strict=False)
        self.cached_state_dict = self._get_state_dict()


class OptimizersContainer(torch.optim.Optimizer):
    """As torchtitan's: an optimizer per part and kind, in one that has no state."""

    def __init__(self, model_parts: list[nn.Module], split: bool) -> None:
        self.model_parts, self.optimizers = model_parts, []
        for part in model_parts:
            weights = [each for each in part.parameters() if each.ndim > 1 or not split]
            self.optimizers.append(torch.optim.AdamW(weights, lr=0.1))
            if split:
                biases = [each for each in part.parameters() if each.ndim == 1]
                self.optimizers.append(torch.optim.SGD(biases, lr=0.2, momentum=0.5))
        super().__init__([each for part in model_parts for each in part.parameters()], {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"state.flat": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("its parts are loaded, each in its place")


for kind in (ModelWrapper, OptimizersContainer):
    kind.state_dict.__module__ = "torchtitan.components"


class Fused(nn.Module):
    """Two projections in one parameter, which the state dict has apart."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Linear(4, 8)
        self.register_state_dict_post_hook(split)
        self.register_load_state_dict_pre_hook(merge)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.w13(x).chunk(2, -1)
        return torch.sigmoid(one) * other


class Second(nn.Module):
    """The second part, with the names of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("1", nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("1")(x)


def split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    whole = state.pop(f"{prefix}w13.weight")
    state |= {
        f"{prefix}w{n}.weight": part.clone() for n, part in zip((1, 3), whole.chunk(2), strict=True)
    }


def merge(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    parts = [state.pop(f"{prefix}w{n}.weight") for n in (1, 3)]
    state[f"{prefix}w13.weight"] = torch.cat(parts)


def parts_of(seed: int, *, fused: bool = False) -> list[nn.Module]:
    """The two parts of one model, on this rank both, with the names of the whole."""
    torch.manual_seed(seed)
    first = nn.Sequential(Fused() if fused else nn.Linear(4, 4))
    return [first, Second()]


def step(parts: list[nn.Module], optimizer: Any) -> None:
    parts[1](parts[0](torch.ones(3, 4))).square().mean().backward()
    optimizer.step()
    for part in parts:
        part.zero_grad()


def titan(seed: int, *, fused: bool = False, split: bool = True) -> tuple[Any, dict[str, Any]]:
    parts = parts_of(seed, fused=fused)
    optimizer = OptimizersContainer(parts, split)
    return parts, {"model": ModelWrapper(parts), "optimizer": optimizer}


def plain(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def values(modules: list[nn.Module], optimizers: list[Any]) -> dict[str, torch.Tensor]:
    """Every parameter and its state, by the names of the whole model, gathered."""
    named = {name: param for one in modules for name, param in one.named_parameters()}
    known = {name: param.detach() for name, param in named.items()}
    for optimizer in optimizers:
        of = {id(param): name for name, param in named.items()}
        for param, state in optimizer.state.items():
            known |= {f"{of[id(param)]}.{key}": value for key, value in state.items()}
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in known.items()}
    return {name: value.clone() for name, value in whole.items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and len(one) > 8, (sorted(one), sorted(other))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def of_titan(parts: list[nn.Module], state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return values(parts, state["optimizer"].optimizers)


def test_containers_load_into_a_plain_model_and_back(tmp_path: Path) -> None:
    parts, state = titan(1, split=False)
    step(parts, state["optimizer"])
    ckpt.save(state, str(tmp_path / "a"), step=1)
    other = plain(2)
    ckpt.load(other, str(tmp_path / "a"))
    assert_equal(values([other["model"]], [other["optimizer"]]), of_titan(parts, state))
    ckpt.save(other, str(tmp_path / "b"), step=1)
    back, into = titan(3, split=False)
    ckpt.load(into, str(tmp_path / "b"))
    assert_equal(of_titan(back, into), of_titan(parts, state))


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_of_two_kinds_in_one_container_load(tmp_path: Path, fused: bool) -> None:
    parts, state = titan(1, fused=fused)
    for _ in range(2):
        step(parts, state["optimizer"])
    ckpt.save(state, str(tmp_path), step=1)
    step(parts, state["optimizer"])
    ckpt.async_save(state, str(tmp_path), step=2).result()
    expected = of_titan(parts, state)
    back, into = titan(3, fused=fused)
    ckpt.load(into, str(tmp_path))
    assert_equal(of_titan(back, into), expected)
    shown = into["model"].state_dict()
    assert ("0.w1.weight" in shown) is fused
    assert all(torch.equal(shown[name], each) for name, each in state["model"].state_dict().items())


def test_fused_weights_load_where_they_lie_apart(tmp_path: Path) -> None:
    parts, state = titan(1, fused=True)
    ckpt.save({"model": state["model"]}, str(tmp_path), step=1)
    apart = {f"0.w{n}.weight": torch.zeros(4, 4) for n in (1, 3)}
    ckpt.load({"model": apart}, str(tmp_path), strict=False)
    weight = parts[0][0].w13.weight
    assert torch.equal(torch.cat([*apart.values()]), weight)
    # Their moments are of the fused one, by torchtitan too: refused by name, nothing changed.
    ckpt.save(state, str(tmp_path / "both"), step=1)
    other = plain(2)
    before = values([other["model"]], [])
    with pytest.raises(Mismatch, match=r"0\.weight"):
        ckpt.load(other, str(tmp_path / "both"))
    assert all(torch.equal(each, before[k]) for k, each in values([other["model"]], []).items())


def test_a_container_of_another_class_is_refused(tmp_path: Path) -> None:
    """What its class adds to the state dict would be lost."""

    class Own(OptimizersContainer):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "own": 1}

    parts = parts_of(1)
    own = Own(parts, False)
    with pytest.raises(InvalidState, match=r"Own\.state_dict\(\) has another form"):
        ckpt.save({"model": ModelWrapper(parts), "optimizer": own}, str(tmp_path), step=1)


def on_ranks(root: str) -> None:
    parts, state = titan(1)
    for part in parts:
        fully_shard(part)
    state = {"model": ModelWrapper(parts), "optimizer": OptimizersContainer(parts, True)}
    step(parts, state["optimizer"])
    ckpt.save(state, f"{root}/sharded", step=1)
    expected = of_titan(parts, state)
    whole, into = titan(2)
    ckpt.load(into, f"{root}/sharded")
    assert_equal(of_titan(whole, into), expected)
    ckpt.save(into, f"{root}/whole", step=1)
    for each in (param for part in parts for param in part.parameters()):
        each.detach().zero_()
    ckpt.load(state, f"{root}/whole")
    assert_equal(of_titan(parts, state), expected)
    # Each rank a part, as in a pipeline: loaded by all of them as one.
    mine, optimizer = whole[dist.get_rank()], into["optimizer"].optimizers
    one = OptimizersContainer([mine], True)
    for each, known in zip(one.optimizers, optimizer[2 * dist.get_rank() :], strict=False):
        each.load_state_dict(known.state_dict())
    ckpt.save({"model": ModelWrapper(mine), "optimizer": one}, f"{root}/stages", step=1)
    ckpt.load(state, f"{root}/stages")
    assert_equal(of_titan(parts, state), expected)


@pytest.mark.ranks
def test_containers_load_on_other_layouts_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(2, on_ranks, str(tmp_path), timeout_seconds=120)
