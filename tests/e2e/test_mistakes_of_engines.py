"""Mistakes of pipelines and of experts, under torch's engines: one error on all ranks that says
what to do, before anything is written.

Method: real gloo ranks make each mistake; a failed save must leave no object of its step, and a
failed load the state as it was.
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import CheckpointError
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Layers(nn.Module):
    """Some layers, under the names of the whole model."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in numbers})


class Experts(nn.Module):
    """A router, and experts that are numbered on each rank from 0 on, which is the mistake."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        for param in self.experts.parameters():
            nn.init.constant_(param, float(dist.get_rank()))


def failed(run: Callable[[], Any], root: str) -> str:
    """The error of `run`, which must not have written anything; "nothing" where there was none."""
    before = written(root)
    try:
        run()
    except CheckpointError as error:
        return str(error) if written(root) == before else f"after a write: {error}"
    return "nothing"


def written(root: str) -> list[str]:
    return sorted(str(path) for path in Path(root).glob("*/steps/*"))


def saves(root: str) -> dict[str, str]:
    """What saves of such states raise, by the mistake."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage_of = rank // 2
    outcomes = {}

    def save(name: str, state: dict[str, Any]) -> None:
        outcomes[name] = failed(lambda: ckpt.save(state, f"{root}/{name}", step=1), root)
        dist.barrier()

    # Each stage counts its layers from 0 on.
    torch.manual_seed(stage_of)
    own_names = Layers(range(2))
    fully_shard(own_names, mesh=mesh["dp"])
    save("names", {"model": own_names})
    device, group = torch.device("cpu"), mesh["pp"].get_group()
    stage = PipelineStage(Layers(range(stage_of, stage_of + 1)), stage_of, 2, device, group=group)
    save("stage", {"model": stage, "list": [ScheduleGPipe(stage, 2)]})
    # Both ranks of the second stage leave it out.
    optimizer = torch.optim.SGD(stage.submod.parameters(), 0.1)
    save("missing", {"model": ckpt.Stages(stage), "o": optimizer} if rank < 2 else {"n": 1})
    # Values are compared last, when the rest is written.
    rate = {"model": ckpt.Stages(stage), "rate": 0.1 * stage_of}
    outcomes["group"] = failed(lambda: ckpt.save(rate, f"{root}/group", step=1), f"{root}/none")
    dist.barrier()
    wide = nn.Sequential(nn.Linear(4, 4 + stage_of))
    fully_shard(wide, mesh=mesh["dp"])
    save("shapes", {"model": wide})
    adam = torch.optim.AdamW(own_names.parameters())
    for param in own_names.parameters():
        param.grad = torch.ones_like(param) * (1 + stage_of)
    adam.step()
    save("numbered", {"adam": adam.state_dict()})
    moments = {0: {"exp_avg": torch.full((3,), float(rank))}}
    plain = {"state": moments, "param_groups": [{"lr": 0.1, "params": [0]}]}
    save("numbered, plain", {"adam": plain, "own": {str(rank): torch.zeros(1)}})
    model: Any = Experts(2)
    ignored = [name for name, _ in model.named_parameters() if name.startswith("experts.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = DistributedDataParallel(model)
    save("experts", {"model": wrapped, "o": torch.optim.SGD(wrapped.parameters(), 0.1)})
    return outcomes


SAVES = {
    "names": (
        "model.layers.0.weight: ranks 0, 1 and ranks 2, 3 have different values of it",
        "stages of a pipeline the names of the whole model",
    ),
    "stage": (
        "model: a torch.distributed.pipelining.stage.PipelineStage cannot be stored; put "
        "ckpt.Stages(*stages) there",
        "list.0: a torch.distributed.pipelining.schedules.ScheduleGPipe cannot be stored; put "
        "ckpt.Stages(*stages) there",
    ),
    "missing": ("model: of 2 stages 1 is on no rank (0 on ranks 0, 1)",),
    "group": (
        "rate: the value differs between ranks",
        "or in PerGroup(value, group) where it is equal in each group",
    ),
    "shapes": (
        "model.0.weight: the ranks hold different tensors of this name",
        "float32[4, 4]",
        "float32[5, 4]",
        "on ranks 2, 3; keep the names of the whole model in every stage",
    ),
    "numbered": (
        "adam.state.0.exp_avg: ranks 0, 1 and ranks 2, 3 have different values of it",
        "put the optimizer itself into the state",
    ),
    "numbered, plain": (
        "adam.state.0.exp_avg: the ranks have different values of it",
        "put the optimizer itself into the state",
    ),
    "experts": (
        "model.experts.0.weight: the ranks have different values of it",
        "on 0; crc32c",
        "give each rank's own a name of its own, as experts and stages have",
    ),
}


def test_saves_of_mistaken_states(tmp_path: Path) -> None:
    first, *others = run_ranks(4, saves, str(tmp_path), timeout_seconds=180.0)
    assert first.keys() == SAVES.keys()
    for name, texts in SAVES.items():
        assert {one[name] for one in others} == {first[name]}
        assert not first[name].startswith("after a write"), first[name]
        for text in texts:
            assert text in first[name], (name, first[name])
    assert "declare_optimizer_state" not in first["numbered, plain"]


class Versioned(torch.Tensor):
    """A subclass whose components are called otherwise in its second version."""

    names = ("data_", "scale")

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Versioned:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
        return made

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        for name, component in zip(self.names, (data, scale), strict=True):
            setattr(self, name, component)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.names), None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> Versioned:
        return cls(*(inner[name] for name in cls.names))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(func))


class SecondVersion(Versioned):
    names = ("payload", "scale")


class Holder:
    """An object with a tensor in its state dict, as an optimizer has."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"inside": [self.tensor]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.tensor,) = state["inside"]


def versioned(kind: type[Versioned], value: float) -> Versioned:
    return kind(torch.full((2, 3), value), torch.full((2,), value))


def loads(root: str) -> dict[str, str]:
    """What loads raise that do not fit, by the mistake; the tensors beside stay as they are."""
    from ckpt.layout import composites

    rank = dist.get_rank()
    outcomes = {}
    ckpt.register_tensor_type(Versioned, "mine.Versioned")
    held = {"w": versioned(Versioned, 1.0), "o": Holder(versioned(Versioned, 2.0))}
    ckpt.save({**held, "x": torch.ones(3)}, f"{root}/types", step=1)
    ckpt.save({"model": [Layers(range(rank, rank + 1))]}, f"{root}/lists", step=1)
    each = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in range(rank, 4, 2)})
    ckpt.save({"model": {"experts": each}}, f"{root}/experts", step=1)

    def load(name: str, kept: str, state: dict[str, Any]) -> None:
        x = torch.zeros(3)
        given = {**state, "x": x} if kept == "types" else state
        outcomes[name] = failed(lambda: ckpt.load(given, f"{root}/{kept}"), root)
        if x.any():
            outcomes[name] = f"the state has changed: {outcomes[name]}"
        dist.barrier()

    def register(kind: type[Versioned] | None) -> None:
        composites._of_class.clear()
        composites._of_name.clear()
        if kind is not None:
            ckpt.register_tensor_type(kind, "mine.Versioned")

    # Rank 1 has another version of the library, or has none.
    kind = SecondVersion if rank else Versioned
    register(kind)
    load("other version", "types", {**held, "w": versioned(kind, 0.0)})
    load("other version inside", "types", {**held, "o": Holder(versioned(kind, 0.0))})
    register(None if rank else Versioned)
    load("no library", "types", {**held, "w": versioned(Versioned, 0.0)})
    load("no library inside", "types", {"w": held["w"], "o": Holder(torch.zeros(1))})
    load("lists", "lists", {"model": Layers(range(2))})
    stacked = nn.ParameterDict({"weight": torch.zeros(4, 4, 4), "bias": torch.zeros(4, 4)})
    load("experts", "experts", {"model": {"experts": stacked}})
    return outcomes


LOADS = {
    "other version": (
        "rank 1: w: consists of ['data_', 'scale'] in the checkpoint and of ['payload', 'scale'] "
        "in the state: the class of mine.Versioned has changed; load with the version that saved",
    ),
    "other version inside": (
        "rank 1: o.inside.0: a mine.Versioned cannot be put together of ['data_', 'scale']",
        "load with the version that saved it",
    ),
    "no library": ("rank 1: w: is a tensor of type 'mine.Versioned', which is not known here",),
    "no library inside": (
        "rank 1: o: is a tensor of type 'mine.Versioned', which is not known here: install mine",
    ),
    "lists": (
        "model.layers.0.weight: is not in the checkpoint, which has 'model.0.layers.0.weight'",
        "pass rename=",
    ),
    "experts": (
        "model.experts.weight: is not in the checkpoint, which has 'model.experts.0.weight' "
        "(stacks= has rules for",
    ),
}


def test_loads_of_what_does_not_fit(tmp_path: Path) -> None:
    first, *others = run_ranks(2, loads, str(tmp_path), timeout_seconds=180.0)
    assert first.keys() == LOADS.keys()
    for name, texts in LOADS.items():
        assert {one[name] for one in others} == {first[name]}
        for text in texts:
            assert text in first[name], (name, first[name])
        assert not first[name].startswith("the state has changed"), first[name]
