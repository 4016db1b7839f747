"""A model and its optimizer move between all engines by state dict, and train on unchanged.

Real ranks, one start per source. The source trains, its dicts are taken in each form, and loaded
into a fresh model of every engine, which then trains on: the losses are those of the source itself
going on. FULL and LOCAL dicts also move to another number of ranks, as bytes.
"""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt.layout.region import Box
from ckpt.layout.sharded_tensor import make_sharded_tensor
from ckpt.state_dict.api import (
    load_model_state_dict,
    load_optimizer_state_dict,
    model_state_dict,
    optimizer_state_dict,
    optimizer_state_dict_to_load,
    shard_optimizer_state_dict,
)
from ckpt.state_dict.config import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from tests.layout.models import awkward
from tests.ranks import run_ranks
from tests.state.engines import ENGINES, OPTIMIZERS, train
from tests.state.test_dicts_against_torch import differences

pytestmark = pytest.mark.ranks

FULL, SHARDED, LOCAL = StateDictType.FULL, StateDictType.SHARDED, StateDictType.LOCAL
NAMES = ("bare", "ddp", "fsdp1_flat", "fsdp1_orig", "fsdp2")
BEFORE, AFTER = range(3), range(3, 8)


def made(engine: str, seed: int, optimizer: str = "amsgrad") -> tuple[nn.Module, Any]:
    module = ENGINES[engine](awkward(seed, channels_last=False))
    return module, OPTIMIZERS[optimizer](module.parameters())


def forms_of(engine: str) -> list[StateDictType]:
    return [FULL, SHARDED] if engine in ("fsdp2", "hsdp") else [FULL, SHARDED, LOCAL]


def copied(value: Any) -> Any:
    """A dict whose tensors are no live memory."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value.clone() if type(value) is torch.Tensor else value


def _moves(source: str, optimizer: str) -> list[str]:
    module, opt = made(source, 0, optimizer)
    train(module, opt, BEFORE)
    loaded: dict[str, tuple[nn.Module, Any]] = {}
    for form in forms_of(source):
        model_dict = model_state_dict(module, form)
        optim_dict = optimizer_state_dict(module, opt, form)
        for target in NAMES:
            to, to_opt = made(target, 9, optimizer)
            load_model_state_dict(to, model_dict)
            load_optimizer_state_dict(to, to_opt, optim_dict)
            loaded[f"{form.name} to {target}"] = (to, to_opt)
            if target != "bare":
                other, other_opt = made(target, 8, optimizer)
                load_model_state_dict(other, model_dict)
                other_opt.load_state_dict(
                    optimizer_state_dict_to_load(other, other_opt, optim_dict)
                )
                loaded[f"{form.name} to {target} by torch's own loading"] = (other, other_opt)
    expected = train(module, opt, AFTER)
    problems = []
    for name, (to, to_opt) in loaded.items():
        losses = train(to, to_opt, AFTER)
        if not torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=0):
            problems.append(f"{name}: losses {losses}, expected {expected}")
    return problems


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", NAMES)
def test_training_goes_on_after_every_move(source: str) -> None:
    for problems in run_ranks(2, _moves, source, "amsgrad", timeout_seconds=120):
        assert not problems


# --- between numbers of ranks --------------------------------------------------------------------


def as_bytes(value: Any) -> bytes:
    """A dict of plain tensors and of the local shards of ShardedTensors, with their places."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(part) for key, part in item.items()}
        if hasattr(item, "local_shards"):
            shards = [(s.tensor.clone(), s.metadata.shard_offsets) for s in item.local_shards()]
            return {"$shards": shards, "size": tuple(item.metadata().size)}
        return item

    buffer = io.BytesIO()
    torch.save(plain(value), buffer)
    return buffer.getvalue()


def _take(engine: str, form: StateDictType) -> tuple[bytes, list[float]]:
    module, opt = made(engine, 0, "adamw")
    train(module, opt, BEFORE)
    taken = {"m": model_state_dict(module, form), "o": optimizer_state_dict(module, opt, form)}
    data = as_bytes(taken)
    return data, train(module, opt, AFTER)


def _load_elsewhere(target: str, saved: list[bytes], coordinator_only: bool) -> list[float]:
    rank = dist.get_rank()
    module, opt = made(target, 9, "adamw")
    mine: dict[str, Any] = {"m": {}, "o": {}}
    if rank < len(saved) and (not coordinator_only or rank == 0):
        mine = torch.load(io.BytesIO(saved[rank]), weights_only=False)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    mine = {key: sharded_again(mine[key], [part[key] for part in everyone]) for key in mine}
    load_model_state_dict(module, mine["m"], rank0_only=coordinator_only)
    load_optimizer_state_dict(module, opt, mine["o"], rank0_only=coordinator_only)
    return train(module, opt, AFTER)


def sharded_again(value: Any, everyone: list[Any]) -> Any:
    """ShardedTensors of this world for the shards that its ranks were given."""
    if not isinstance(value, dict):
        return value
    if "$shards" not in value:
        return {
            key: sharded_again(item, [part.get(key) for part in everyone if part])
            for key, item in value.items()
        }
    boxes = [
        (rank, Box(tuple(offsets), tuple(tensor.shape)))
        for rank, part in enumerate(everyone)
        for tensor, offsets in part["$shards"]
    ]
    local = [tensor for tensor, _ in value["$shards"]]
    dtypes = [tensor for part in everyone for tensor, _ in part["$shards"]]
    return make_sharded_tensor(local, boxes, value["size"], dtypes[0][:0], None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("source", "form", "target", "coordinator_only"),
    [
        ("fsdp1_flat", LOCAL, "fsdp1_flat", False),
        ("fsdp1_orig", LOCAL, "fsdp2", False),
        ("fsdp1_orig", SHARDED, "fsdp1_flat", False),
        ("fsdp2", FULL, "fsdp1_orig", True),
        ("fsdp1_flat", FULL, "hsdp", True),
    ],
)
def test_dicts_of_two_ranks_are_loaded_by_four(
    source: str, form: StateDictType, target: str, coordinator_only: bool
) -> None:
    saved = run_ranks(2, _take, source, form)
    loaded = run_ranks(4, _load_elsewhere, target, [data for data, _ in saved], coordinator_only)
    for losses in loaded:
        torch.testing.assert_close(losses, saved[0][1], rtol=1e-5, atol=1e-6)


# --- rank 0 alone --------------------------------------------------------------------------------


def _coordinator_alone(engine: str) -> list[str]:
    module, opt = made(engine, 0)
    train(module, opt, BEFORE)
    rank = dist.get_rank()
    full, full_opt = model_state_dict(module), optimizer_state_dict(module, opt)
    lean = model_state_dict(module, FULL, FullStateDictConfig(True, rank0_only=True))
    lean_opt = optimizer_state_dict(module, opt, FULL, FullOptimStateDictConfig(rank0_only=True))
    problems = differences(lean, full if rank == 0 else {}, "model")
    problems += differences(lean_opt, full_opt if rank == 0 else {}, "optim")
    junk: Any = {"junk": torch.ones(3)} if rank else lean
    junk_opt: Any = {"state": {"junk": 1}} if rank else lean_opt
    to, to_opt = made(engine, 9)
    load_model_state_dict(to, junk, rank0_only=True)
    load_optimizer_state_dict(to, to_opt, junk_opt, rank0_only=True)
    problems += differences(model_state_dict(to), full, "loaded model")
    problems += differences(optimizer_state_dict(to, to_opt), full_opt, "loaded optim")
    scattered = optimizer_state_dict_to_load(to, to_opt, junk_opt, rank0_only=True)
    problems += differences(
        shard_optimizer_state_dict(to, to_opt, full_opt), scattered, "without communication"
    )
    given = optimizer_state_dict(to, to_opt, state_dict=scattered)
    problems += differences(given, full_opt, "from a dict")
    return problems


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", [name for name in ENGINES if not name.startswith("bare")])
def test_the_coordinator_alone_can_take_and_give(engine: str) -> None:
    for problems in run_ranks(4, _coordinator_alone, engine):
        assert not problems


def test_local_dicts_alias_live_memory_without_padding() -> None:
    for numel, offsets in run_ranks(4, _local_shards):
        assert offsets == [(0, 9), (9, 9), (18, 9), (27, 8)] and numel == 35


def _local_shards() -> tuple[int, list[tuple[int, int]]]:
    """5 * 7 elements of the only parameter of a unit: three ranks have 9, the last has 8."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(
        nn.Linear(7, 5, bias=False), device_id=torch.device("cpu"), use_orig_params=False
    )
    value = model_state_dict(module, LOCAL)["weight"]
    (shard,) = value.local_shards()
    flat = next(module.parameters())
    assert shard.tensor.data_ptr() == flat.data_ptr()
    places = [
        (one.shard_offsets[0], one.shard_sizes[0]) for one in value.metadata().shards_metadata
    ]
    return math.prod(value.metadata().size), places
