"""What ranks do in these tests: train a small model under each of torch's engines, save it by DCP.

Every engine trains the same model on the same batch, so each run's full state dicts, taken by
torch's own functions, are what its checkpoint must hold.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import ckpt

Built = tuple[nn.Module, torch.optim.Optimizer]


class Net(nn.Module):
    """Uneven sizes, a parameter without a bias, two groups, buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.second = nn.Linear(12, 7, bias=False)
        self.last = nn.Linear(7, 3)
        self.register_buffer("steps_seen", torch.tensor(4))
        self.register_buffer("scale", torch.linspace(0, 1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).relu()) * self.scale)


def fresh() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "weight_decay": 0.25}]
    return torch.optim.AdamW(groups, lr=0.125)


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 20).view(4, 5)


def plain() -> Built:
    model = fresh()
    return model, optimizer_of(model)


def fsdp1(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, mesh: Any = None) -> Built:
    device = torch.device("cpu")
    inner = fresh()
    for name in ("first", "last"):
        wrapped = FullyShardedDataParallel(
            getattr(inner, name),
            device_id=device,
            use_orig_params=True,
            sharding_strategy=strategy,
            device_mesh=mesh,
        )
        setattr(inner, name, wrapped)
    model = FullyShardedDataParallel(
        inner,
        device_id=device,
        use_orig_params=True,
        sharding_strategy=strategy,
        device_mesh=mesh,
    )
    return model, optimizer_of(model)


def fsdp2(mesh: Any = None) -> Built:
    model = fresh()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer_of(model)


def hsdp() -> Built:
    names = ("replicate", "shard")
    return fsdp2(init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names))


def hsdp1() -> Built:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
    return fsdp1(ShardingStrategy.HYBRID_SHARD, mesh)


def tensor_parallel(mesh: Any = None, model: nn.Module | None = None) -> Built:
    model = model or fresh()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return model, optimizer_of(model)


def fsdp_and_tp() -> Built:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = fresh()
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, optimizer_of(model)


def ddp() -> Built:
    model = DistributedDataParallel(fresh())
    return model, optimizer_of(model)


ENGINES: dict[str, Callable[[], Built]] = {
    "plain": plain,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "ddp": ddp,
    "tp": tensor_parallel,
    "hsdp": hsdp,
    "hsdp1": hsdp1,
    "fsdp_tp": fsdp_and_tp,
}
EVEN = ("hsdp", "hsdp1", "fsdp_tp")  # need an even number of ranks, at least 4


def engines_of(size: int) -> list[str]:
    """The engines that run on `size` ranks."""
    if size == 1:
        return ["plain"]
    return [name for name in ENGINES if name != "plain" and (name not in EVEN or size == 4)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(batch()).square().sum().backward()
        optimizer.step()


def full_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Whole tensors by torch's own functions, as a plain dict of clones."""
    # With cpu_offload, FSDP1 of torch 2.13 reads freed memory on CPU and may die of it.
    options = StateDictOptions(full_state_dict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_dict, optim = get_state_dict(model, optimizer, options=options)
    cloned: dict[str, Any] = tree_map_only(
        torch.Tensor, torch.clone, {"model": model_dict, "optim": optim}
    )
    return cloned


def save_all(folder: str) -> dict[str, dict[str, Any]]:
    """Each engine's checkpoint in `folder`/<engine>; returns the full states."""
    full = {}
    for name in engines_of(dist.get_world_size() if dist.is_initialized() else 1):
        model, optimizer = ENGINES[name]()
        train(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name == "fsdp1":
                # As most scripts do: FSDP's own sharded dicts (ShardedTensors).
                with FullyShardedDataParallel.state_dict_type(
                    model, StateDictType.SHARDED_STATE_DICT
                ):
                    model_dict = model.state_dict()
                    optim = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            else:
                model_dict, optim = get_state_dict(model, optimizer)
            state = {
                "model": model_dict,
                "optim": optim,
                "step": 2,
                "note": {"a": [1, 2.5], "b": None},
            }
            dcp.save(state, checkpoint_id=f"{folder}/{name}")
        full[name] = full_of(model, optimizer)
    return full


def load_all(roots: dict[str, str], engines: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Every root loaded on every engine: full states by (root's name, engine)."""
    loaded = {}
    for saved, root in roots.items():
        for name in engines:
            model, optimizer = ENGINES[name]()
            state = {"model": model, "optim": optimizer, "step": 0, "note": {}}
            ckpt.load(state, root)
            assert state["step"] == 2 and state["note"] == {"a": [1, 2.5], "b": None}
            loaded[saved, name] = full_of(model, optimizer)
    return loaded


def dcp_load_all(folders: list[str], engines: list[str]) -> list[dict[str, Any]]:
    """Every DCP directory loaded by torch on every engine."""
    loaded = []
    for folder in folders:
        for name in engines:
            model, optimizer = ENGINES[name]()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model_dict, optim_dict = get_state_dict(model, optimizer)
                state = {"model": model_dict, "optim": optim_dict, "step": 0}
                dcp.load(state, checkpoint_id=folder)
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optim"],
                )
            assert state["step"] == 2
            loaded.append(full_of(model, optimizer))
    return loaded


def assert_same(got: Any, expected: Any, path: str = "") -> None:
    """Bit-equal trees: keys, types of leaves, dtypes, bytes. Order of dicts does not count."""
    if isinstance(expected, dict):
        assert isinstance(got, dict) and set(got) == set(expected), path
        for key in expected:
            assert_same(got[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), path
        for index, item in enumerate(expected):
            assert_same(got[index], item, f"{path}.{index}")
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.shape == expected.shape, path
        same = got.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, expected.contiguous().view(-1).view(torch.uint8)), path
    else:
        assert type(got) is type(expected) and got == expected, (path, got, expected)


def saved_here(folder: Path) -> dict[str, dict[str, Any]]:
    """`save_all` in this process alone."""
    return save_all(str(folder))
