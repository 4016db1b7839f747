"""DTensors whose shards are composites: saved, and loaded on other numbers of ranks.

Method: each tensor is made whole on one rank, cut by the library's own slices or made by its own
optimizer, saved by two ranks, and loaded by one, two and three. What is loaded whole has to be the
concatenation of the shards' components.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.errors import InvalidState
from tests.conftest import Scale
from tests.ranks import run_ranks

TwoTensor: Any = importlib.import_module("torch.testing._internal.two_tensor").TwoTensor
OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def weights(seed: int, *, libraries: bool = True) -> dict[str, Any]:
    """Whole composites of types that torch has itself, and of those of torchao, if it is there."""
    torch.manual_seed(seed)
    made: dict[str, Any] = {
        "pair": TwoTensor(torch.randn(12, 4), torch.randn(12, 4)),
    }
    if has_torchao() and libraries:
        quantization: Any = importlib.import_module("torchao.quantization")
        linear: Any = nn.Sequential(nn.Linear(8, 12, bias=False)).to(torch.bfloat16)
        quantization.quantize_(linear, quantization.Float8WeightOnlyConfig())
        made["float8"] = linear[0].weight.detach()
    return made


def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def base(seed: int) -> dict[str, Any]:
    """A frozen layer of 4 bits, as QLoRA has it."""
    nf4: Any = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    torch.manual_seed(seed)
    model = nn.Module()
    model.w = nn.Parameter(nf4.to_nf4(torch.randn(96, 64), 64, 4), requires_grad=False)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"model": model}


def shards(seed: int, *, libraries: bool = True) -> dict[str, Any]:
    """The same as DTensors, each rank's shard by the library's own slice."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, size = dist.get_rank(), dist.get_world_size()
    made = {}
    for name, tensor in weights(seed, libraries=libraries).items():
        rows = tensor.shape[0] // size
        part = torch.ops.aten.slice.Tensor(tensor, 0, rank * rows, (rank + 1) * rows)
        made[name] = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return made


def parts_of(tensor: Any) -> dict[str, torch.Tensor]:
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    names, _ = local.__tensor_flatten__()
    parts = {name: getattr(local, name).detach().clone() for name in names}
    return {name: part.view(-1).view(torch.uint8) for name, part in parts.items()}


def same(ours: Any, theirs: Any) -> bool:
    a, b = parts_of(ours), parts_of(theirs)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def training(name: str, seed: int, rows: int = 96) -> dict[str, Any]:
    optim: Any = importlib.import_module("torchao.optim")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(512, rows, bias=False))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"model": model, "optim": getattr(optim, name)(model.parameters(), lr=0.1)}


def step(state: dict[str, Any], seed: int) -> None:
    """State as its step makes it, which compiles: other values on every rank."""
    torch.manual_seed(seed)
    optim = state["optim"]
    for param in optim.param_groups[0]["params"]:
        made = optim.state[param]
        made["step"] = torch.tensor(3.0)
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            made[key] = optim._new_buffer(param, signed)
            local = made[key]._local_tensor if isinstance(made[key], DTensor) else made[key]
            local.copy_(torch.rand(local.shape))


def states_of(state: dict[str, Any]) -> list[Any]:
    (own,) = state["optim"].state.values()
    return [own["exp_avg"], own["exp_avg_sq"]]


class Shared(torch.Tensor):
    """A matrix and one scale of all of it: slices have that scale as well."""

    def __new__(cls, matrix: torch.Tensor, scale: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, matrix.shape, dtype=torch.float32)
        made.matrix, made.scale = matrix, scale  # type: ignore[attr-defined]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["matrix", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, shape: Any, strides: Any) -> Any:
        return cls(parts["matrix"], parts["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        known = (aten.view.default, aten.detach.default)
        if func not in (*known, aten.slice.Tensor):
            raise NotImplementedError(f"{func}")
        return cls(func(args[0].matrix, *args[1:]), args[0].scale)


def _odd(folder: str) -> None:
    """What is refused, on all ranks, before anything is written."""
    ckpt.register_tensor_type(Shared, "mine.Shared", cut={0: {"matrix": 0}})
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    rows = torch.arange(8.0).view(2, 4) + 8 * rank

    def shard(local: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        return made

    good = {"w": shard(Shared(rows, torch.tensor(2.0)))}
    ckpt.save(good, folder, step=1)
    again = {"w": shard(Shared(torch.zeros(2, 4), torch.tensor(0.0)))}
    ckpt.load(again, folder)
    assert same(good["w"], again["w"])
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight]["exp_avg"] = good["w"]
    whole = ckpt.state_dict.optimizer_state_dict(model, optimizer)["state"]["weight"]["exp_avg"]
    assert torch.equal(whole.matrix, torch.cat([rows - 8 * rank, rows - 8 * rank + 8]))
    with pytest.raises(InvalidState, match=r"exp_avg: .* of a mine.Shared .* no LOCAL form"):
        ckpt.state_dict.optimizer_state_dict(model, optimizer, ckpt.state_dict.StateDictType.LOCAL)
    _by_dicts(model, optimizer)
    # Each rank quantized its own shard: there is no one scale.
    with pytest.raises(ckpt.CheckpointError, match=r"w\.scale: .*rank"):
        ckpt.save({"w": shard(Shared(rows, torch.tensor(float(rank))))}, folder, step=2)
    # One rank's shard was too small to be quantized.
    mixed = Shared(rows, torch.tensor(2.0)) if rank else rows
    with pytest.raises(ckpt.CheckpointError, match="w"):
        ckpt.save({"w": shard(mixed)}, folder, step=2)
    ckpt.register_tensor_type(Shared, "mine.Shared")
    with pytest.raises(InvalidState, match=r"w: the mine.Shared cannot .* no cut along dim 0"):
        ckpt.save(good, folder, step=2)


def _by_dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """State dicts with such state go back into the optimizer, and into one that has none."""
    [param] = model.parameters()
    wanted = optimizer.state[param]["exp_avg"]
    for form in (ckpt.state_dict.StateDictType.FULL, ckpt.state_dict.StateDictType.SHARDED):
        taken = ckpt.state_dict.optimizer_state_dict(model, optimizer, form)
        got = taken["state"]["weight"]["exp_avg"]
        assert isinstance(got, DTensor) is (form is ckpt.state_dict.StateDictType.SHARDED)
        fresh = torch.optim.AdamW(model.parameters())
        for target in (optimizer, fresh):
            if target is optimizer:
                optimizer.state[param]["exp_avg"] = torch.zeros_like(param)
            ckpt.state_dict.load_optimizer_state_dict(model, target, taken)
            assert same(target.state[param]["exp_avg"], wanted)


@pytest.mark.ranks
def test_shards_of_which_nothing_is_declared_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _odd, str(tmp_path))


def _two(folder: str) -> Any:
    saved = shards(1)
    ckpt.save(saved, f"{folder}/weights", step=1)
    loaded = shards(2)
    ckpt.load(loaded, f"{folder}/weights")
    for name in saved:
        assert same(saved[name], loaded[name]), name
    model = nn.Module()
    for name, tensor in shards(1).items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    ckpt.save({"model": model}, f"{folder}/model", step=1)
    parts = {name: parts_of(tensor) for name, tensor in saved.items()}
    states = {}
    if has_torchao():
        saved, again = base(1), base(2)
        ckpt.save(saved, f"{folder}/base", step=1)
        ckpt.load(again, f"{folder}/base")
        assert same(saved["model"].w, again["model"].w)
        parts["base"] = parts_of(saved["model"].w)
        for name in OPTIMIZERS:
            state = training(name, 1)
            step(state, 10 + dist.get_rank())
            ckpt.save(state, f"{folder}/{name}", step=1)
            states[name] = [parts_of(one) for one in states_of(state)]
            for is_fresh in (True, False):
                again = training(name, 2)
                if not is_fresh:
                    step(again, 5)
                ckpt.load(again, f"{folder}/{name}")
                for ours, theirs in zip(states_of(state), states_of(again), strict=True):
                    assert type(theirs) is DTensor and theirs.placements == (Shard(0),)
                    assert same(ours, theirs), (name, is_fresh)
    return parts, states


def _three(folder: str, is_soak: bool) -> Any:
    # Importing torchao takes each rank seconds.
    loaded = shards(3, libraries=is_soak)
    ckpt.load(loaded, f"{folder}/weights", skip=["float8"] if has_torchao() and not is_soak else [])
    states, parts = {}, {name: parts_of(tensor) for name, tensor in loaded.items()}
    if has_torchao() and is_soak:
        again = base(3)
        ckpt.load(again, f"{folder}/base")
        parts["base"] = parts_of(again["model"].w)
        for name in OPTIMIZERS:
            state = training(name, 3)
            ckpt.load(state, f"{folder}/{name}")
            states[name] = [parts_of(one) for one in states_of(state)]
            ckpt.save(state, f"{folder}/{name}-of-three", step=1)
    return parts, states


def joined(ranks: list[dict[str, torch.Tensor]], whole: dict[str, torch.Tensor]) -> None:
    """The parts of ranks, one after the other, are the whole's, or each rank has all of it."""
    for name, expected in whole.items():
        got = torch.cat([rank[name] for rank in ranks])
        if got.numel() != expected.numel():
            assert all(torch.equal(rank[name], expected) for rank in ranks), name
            continue
        assert torch.equal(got, expected), name


@pytest.mark.ranks
def test_shards_that_consist_of_others_move_between_ranks(tmp_path: Path, scale: Scale) -> None:
    """They were refused: nothing said how what they consist of is cut."""
    two = run_ranks(2, _two, str(tmp_path))
    three = run_ranks(3, _three, str(tmp_path), scale.soak)
    alone = weights(4)
    ckpt.load(alone, str(tmp_path / "weights"))
    for name, tensor in weights(1).items():
        assert same(alone[name], tensor), name
        joined([parts[name] for parts, _ in two], parts_of(tensor))
        if name in three[0][0]:
            joined([parts[name] for parts, _ in three], parts_of(tensor))
    if not has_torchao():
        return
    whole, expected = base(4), base(1)
    ckpt.load(whole, str(tmp_path / "base"))
    assert same(whole["model"].w, expected["model"].w)
    if scale.soak:
        joined([parts["base"] for parts, _ in three], parts_of(whole["model"].w))
    for name in OPTIMIZERS:
        for folder in (name, f"{name}-of-three") if scale.soak else (name,):
            state = training(name, 4)
            ckpt.load(state, str(tmp_path / folder))
            for index, one in enumerate(states_of(state)):
                joined([states[name][index] for _, states in two], parts_of(one))
                if scale.soak:
                    joined([states[name][index] for _, states in three], parts_of(one))
