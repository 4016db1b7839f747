"""Our state dicts are torch's own, bit for bit, wherever torch's are right; and torch takes ours.

Real ranks. A model is trained under every engine and strategy, then its dicts are taken by us and
by torch and compared: names, dtypes, shapes, bits, and for sharded ones each rank's chunk and its
place. torch refuses channels-last weights in sharded dicts, so there are none here. torch's full
optimizer dict under `use_orig_params=True` is wrong on the CPU (two states in one memory), so there
an unsharded model that saw the same data decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt.state_dict.api import (
    load_model_state_dict,
    load_optimizer_state_dict,
    model_state_dict,
    optimizer_state_dict,
)
from ckpt.state_dict.config import FullStateDictConfig as OurFullConfig
from ckpt.state_dict.config import StateDictType
from tests.layout.models import awkward
from tests.ranks import run_ranks
from tests.state.checkpoints import same_bits
from tests.state.engines import ENGINES, train

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Dict = dict[str, Any]
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "mesh", "hybrid mesh")


def fsdp1(strategy: str, use_orig_params: bool) -> nn.Module:
    """The awkward model in three units of torch's FSDP1."""
    mesh, group = None, None
    size = dist.get_world_size()
    chosen = ShardingStrategy.FULL_SHARD
    if strategy == "mesh":
        mesh = init_device_mesh("cpu", (size,))
    elif strategy == "hybrid mesh":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        chosen = ShardingStrategy.HYBRID_SHARD
    else:
        chosen = ShardingStrategy[strategy]
        if chosen is ShardingStrategy.HYBRID_SHARD:
            shards = [dist.new_group([rank, rank + 1]) for rank in range(0, size, 2)]
            replicas = [dist.new_group(list(range(rank, size, 2))) for rank in (0, 1)]
            group = (shards[dist.get_rank() // 2], replicas[dist.get_rank() % 2])

    def unit(part: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            part,
            process_group=group,
            device_mesh=mesh,
            sharding_strategy=chosen,
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )

    module = awkward(0, channels_last=False)
    module.add_module("conv", unit(module.conv))
    module.add_module("body", unit(module.body))
    return unit(module)


def model(engine: str, seed: int = 0) -> nn.Module:
    return ENGINES[engine](awkward(seed, channels_last=False))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two dicts differ; params of groups may be in any order."""
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or ours.keys() != theirs.keys():
            got = sorted(map(str, ours)) if isinstance(ours, dict) else ours
            return [f"{path}: keys {got}, expected {sorted(map(str, theirs))}"]
        return [d for key in theirs for d in differences(ours[key], theirs[key], f"{path}.{key}")]
    if hasattr(theirs, "local_shards"):
        if not hasattr(ours, "local_shards"):
            return [f"{path}: a {type(ours).__name__}, expected a ShardedTensor"]
        return shard_differences(ours, theirs, path)
    if hasattr(theirs, "placements"):
        if not hasattr(ours, "placements"):
            return [f"{path}: a {type(ours).__name__}, expected a DTensor"]
        if (ours.shape, ours.placements) != (theirs.shape, theirs.placements):
            return [f"{path}: {ours.placements} of {ours.shape}, not {theirs.placements}"]
        if ours.device_mesh != theirs.device_mesh:
            return [f"{path}: another mesh"]
        return differences(ours.to_local(), theirs.to_local(), path)
    if isinstance(theirs, torch.Tensor):
        if type(ours) is not torch.Tensor or not same_bits(ours, theirs.detach()):
            return [f"{path}: other bits ({type(ours).__name__})"]
        return []
    if path.endswith(".params"):
        ours, theirs = sorted(ours), sorted(theirs)
    if isinstance(theirs, list) and theirs and isinstance(theirs[0], dict):
        return differences(dict(enumerate(ours)), dict(enumerate(theirs)), path)
    if isinstance(ours, list) and isinstance(theirs, tuple):
        ours = tuple(ours)  # torch's set_optimizer_state_dict makes lists of tuples
    return [] if ours == theirs else [f"{path}: {ours!r}, expected {theirs!r}"]


def shard_differences(ours: Any, theirs: Any, path: str) -> list[str]:
    def places(value: Any) -> list[Any]:
        return [
            (tuple(s.shard_offsets), tuple(s.shard_sizes), str(s.placement))
            for s in value.metadata().shards_metadata
        ]

    if ours.metadata().size != theirs.metadata().size or places(ours) != places(theirs):
        return [f"{path}: shards {places(ours)}, expected {places(theirs)}"]
    a = {tuple(s.metadata.shard_offsets): s.tensor for s in ours.local_shards()}
    b = {tuple(s.metadata.shard_offsets): s.tensor for s in theirs.local_shards()}
    return differences(a, b, path)


def torch_fsdp1(module: nn.Module, optimizer: Any, sharded: bool) -> tuple[Dict, Dict]:
    """torch's dicts of an FSDP1 model."""
    options: Any
    if sharded:
        options = (
            TorchType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
    else:
        options = (
            TorchType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False),
            FullOptimStateDictConfig(offload_to_cpu=False),
        )
    with FullyShardedDataParallel.state_dict_type(module, *options):
        return module.state_dict(), FullyShardedDataParallel.optim_state_dict(module, optimizer)


def unsharded_dicts() -> tuple[Dict, Dict]:
    """The dicts of an unsharded model that saw the same data."""
    module = awkward(0, channels_last=False)
    optimizer = adamw(module)
    train(module, optimizer, range(3))
    return module.state_dict(), get_optimizer_state_dict(module, optimizer)


def _fsdp1_differences(strategy: str, use_orig_params: bool) -> list[str]:
    warnings.simplefilter("ignore")
    module = fsdp1(strategy, use_orig_params)
    optimizer = adamw(module)
    train(module, optimizer, range(3))
    problems = []
    sharded, full = StateDictType.SHARDED, StateDictType.FULL
    their_model, their_optim = torch_fsdp1(module, optimizer, sharded=False)
    unsharded_model, unsharded_optim = unsharded_dicts()
    problems += differences(model_state_dict(module, full), their_model, "full model")
    problems += differences(model_state_dict(module, full), unsharded_model, "unsharded model")
    ours = optimizer_state_dict(module, optimizer, full)
    problems += differences(ours, unsharded_optim, "unsharded optim")
    if not use_orig_params:
        problems += differences(ours, their_optim, "full optim")
    their_model, their_optim = torch_fsdp1(module, optimizer, sharded=True)
    problems += differences(model_state_dict(module, sharded), their_model, "sharded model")
    # torch cuts the state of unsharded flat parameters, though not these themselves.
    if strategy != "NO_SHARD":
        ours = optimizer_state_dict(module, optimizer, sharded)
        problems += differences(ours, their_optim, "sharded optim")
    return problems


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fsdp1_dicts_are_those_of_torch(strategy: str, use_orig_params: bool) -> None:
    for rank, problems in enumerate(run_ranks(4, _fsdp1_differences, strategy, use_orig_params)):
        assert not problems, (rank, problems)


def _torch_takes(
    model_dict: Dict, optim_dict: Any, options: Any, module: nn.Module, optimizer: Any
) -> None:
    set_model_state_dict(module, dict(model_dict), options=options)
    set_optimizer_state_dict(module, optimizer, optim_dict, options=options)


def _we_take(model_dict: Dict, optim_dict: Any, module: nn.Module, optimizer: Any) -> None:
    load_model_state_dict(module, model_dict)
    load_optimizer_state_dict(module, optimizer, optim_dict)


def _dcp_differences(engine: str) -> list[str]:
    """Ours against torch's get_*, and each set by the other."""
    warnings.simplefilter("ignore")
    module = model(engine)
    optimizer = adamw(module)
    train(module, optimizer, range(3))
    problems = []
    for form in (StateDictType.FULL, StateDictType.SHARDED):
        options = StateDictOptions(full_state_dict=form is StateDictType.FULL)
        their_model = get_model_state_dict(module, options=options)
        their_optim = get_optimizer_state_dict(module, optimizer, options=options)
        our_model = model_state_dict(module, form)
        our_optim = optimizer_state_dict(module, optimizer, form)
        problems += differences(our_model, their_model, f"{form} model")
        if engine != "fsdp1_orig":
            problems += differences(our_optim, their_optim, f"{form} optim")
        flat = get_optimizer_state_dict(
            module,
            optimizer,
            options=StateDictOptions(
                full_state_dict=form is StateDictType.FULL, flatten_optimizer_state_dict=True
            ),
        )
        takers: dict[str, Callable[[nn.Module, Any], None]] = {
            "torch takes ours": partial(_torch_takes, our_model, our_optim, options),
            "we take theirs": partial(_we_take, their_model, their_optim),
            "we take theirs, flattened": partial(_we_take, their_model, flat),
        }
        if engine == "fsdp1_orig" and form is StateDictType.FULL:
            # torch gives all states of such a parameter the same memory on CPU: wrong values.
            del takers["we take theirs"], takers["we take theirs, flattened"]
        for name, take in takers.items():
            other = model(engine, seed=7)
            other_optimizer = adamw(other)
            take(other, other_optimizer)
            problems += differences(
                model_state_dict(other), model_state_dict(module), f"{form} {name}: model"
            )
            problems += differences(
                optimizer_state_dict(other, other_optimizer),
                optimizer_state_dict(module, optimizer),
                f"{form} {name}: optim",
            )
    return problems


@pytest.mark.parametrize("engine", [name for name in ENGINES if not name.startswith("bare")])
def test_dicts_change_hands_with_torch(engine: str) -> None:
    for rank, problems in enumerate(run_ranks(4, _dcp_differences, engine)):
        assert not problems, (rank, problems)


# --- meshes and groups ---------------------------------------------------------------------------


def tensor_parallel(seed: int) -> nn.Module:
    """Four ranks: sharded over two, tensor parallel over two; uneven sizes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3), nn.LayerNorm(3))
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module, mesh["tp"], plan)
    fully_shard(module, mesh=mesh["dp"])
    return module


def _tensor_parallel_differences() -> list[str]:
    warnings.simplefilter("ignore")
    module = tensor_parallel(0)
    optimizer = adamw(module)
    for step in range(2):
        optimizer.zero_grad()
        loss: Any = module(torch.full((4, 5), step + 1.0)).square().mean()
        loss.backward()
        optimizer.step()
    problems = []
    for form in (StateDictType.FULL, StateDictType.SHARDED):
        options = StateDictOptions(full_state_dict=form is StateDictType.FULL)
        our_model = model_state_dict(module, form)
        our_optim = optimizer_state_dict(module, optimizer, form)
        theirs = get_optimizer_state_dict(module, optimizer, options=options)
        problems += differences(our_model, get_model_state_dict(module, options=options), "model")
        problems += differences(our_optim, theirs, "optim")
        other = tensor_parallel(1)
        other_optimizer = adamw(other)
        load_model_state_dict(other, our_model)
        load_optimizer_state_dict(other, other_optimizer, our_optim)
        problems += differences(model_state_dict(other, form), our_model, "loaded model")
        again = optimizer_state_dict(other, other_optimizer, form)
        problems += differences(again, our_optim, "loaded optim")
    return problems


def test_tensor_parallel_dicts_are_those_of_torch() -> None:
    for rank, problems in enumerate(run_ranks(4, _tensor_parallel_differences)):
        assert not problems, (rank, problems)


def _groups() -> tuple[list[str], list[str], list[str]]:
    """Which names each rank gets: hybrid sharding as a whole and by shard group, two models."""
    coordinator_only = OurFullConfig(rank0_only=True)
    module = fsdp1("HYBRID_SHARD", False)
    whole = model_state_dict(module, StateDictType.FULL, coordinator_only)
    group: Any = module.process_group
    by_group = model_state_dict(module, StateDictType.FULL, coordinator_only, process_group=group)
    half = group.size() * (dist.get_rank() // group.size())
    torch.manual_seed(half)
    apart = FullyShardedDataParallel(
        nn.Linear(3, 5), process_group=group, device_id=torch.device("cpu")
    )
    torch.manual_seed(half)
    expected = nn.Linear(3, 5).state_dict()
    own = model_state_dict(apart, process_group=group)
    problems = differences(own, expected)
    with torch.no_grad():
        next(apart.parameters()).zero_()
    load_model_state_dict(apart, own, process_group=group)
    problems += differences(model_state_dict(apart, process_group=group), expected)
    return sorted(whole), sorted(by_group), problems


def test_the_first_rank_of_the_group_gets_the_dict() -> None:
    results = run_ranks(4, _groups)
    assert [bool(whole) for whole, _, _ in results] == [True, False, False, False]
    assert [bool(by_group) for _, by_group, _ in results] == [True, False, True, False]
    assert results[0][0] == results[0][1] == results[2][1]
    assert not any(problems for _, _, problems in results)
