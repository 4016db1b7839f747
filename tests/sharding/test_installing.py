"""`sharding.install()`: trainers that import torch's classes get ours, and give them back.

Method: a module with an import of torch's names at its head, and a function that imports when it is
called, as Accelerate and Lightning have them; on one rank, models are sharded by both.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import sharding
from sharding.engine.torch_seam import torch_replicate
from tests.ranks import run_ranks

TRAINER = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard

def late():
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
    from torch.distributed._composable.fsdp import fully_shard
    return FullyShardedDataParallel, fully_shard

def latest():
    from torch.distributed._composable.replicate_with_fsdp import replicate
    return replicate
"""


def trainer() -> Any:
    made: Any = types.ModuleType("a_trainer")
    exec(TRAINER, vars(made))
    sys.modules["a_trainer"] = made
    return made


OURS = (sharding.FullyShardedDataParallel, sharding.fully_shard)


def test_trainers_get_our_classes_and_give_them_back() -> None:
    theirs = (torch_fsdp.FullyShardedDataParallel, torch_fsdp.fully_shard)
    made = trainer()
    try:
        with sharding.install(), sharding.install():
            assert (made.FSDP, made.fully_shard) == made.late() == OURS
            assert torch_replicate is None or made.latest() is sharding.replicate
            assert (torch_fsdp.FullyShardedDataParallel, torch_fsdp.fully_shard) == OURS
        assert (made.FSDP, made.fully_shard) == made.late() == theirs
        assert (torch_fsdp.FullyShardedDataParallel, torch_fsdp.fully_shard) == theirs
        assert type(torch_fsdp) is types.ModuleType
        assert torch_replicate is None or made.latest() is torch_replicate
    finally:
        del sys.modules["a_trainer"]


def both_at_once() -> None:
    wraps = torch_fsdp.FullyShardedDataParallel
    before = wraps(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with sharding.install():
        model: Any = torch_fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4)))
        wrapped: Any = torch_fsdp.FullyShardedDataParallel(nn.Linear(4, 4))
        fully: Any = torch_fsdp.fully_shard
        assert fully.state(model)._comm_ctx is model.fsdp_group.streams
        assert isinstance(model, torch_fsdp.FSDPModule) and isinstance(model, sharding.FSDPModule)
        # torch's own still finds its units.
        assert wraps.fsdp_modules(before) == [before]
        with wraps.state_dict_type(before, torch_fsdp.StateDictType.SHARDED_STATE_DICT):
            assert len(before.state_dict()) == 2
        for one in (model, wrapped, before):
            one(torch.ones(2, 4)).sum().backward()
            assert all(param.grad is not None for param in one.parameters())
    assert isinstance(wrapped, sharding.FullyShardedDataParallel) and type(before) is wraps


@pytest.mark.ranks
def test_models_of_both_engines_train_while_ours_is_installed() -> None:
    run_ranks(1, both_at_once)
