"""`ckpt.state_dict.like_torch` against torch's functions of those names, over torch's engines."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as theirs
from torch import nn

import ckpt.state_dict.like_torch as ours
from ckpt.errors import CheckpointError
from ckpt.state_dict.api import model_state_dict, optimizer_state_dict
from tests.ranks import run_ranks
from tests.state.engines import train
from tests.state.test_dicts_against_torch import adamw, differences, model

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

GET: dict[str, dict[str, bool]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "offloaded": {"cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "trained only": {"ignore_frozen_params": True},
    "below": {"keep_submodule_prefixes": False},
    "contradiction": {"broadcast_from_rank0": True},
}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (ValueError, RuntimeError, CheckpointError) as error:
        return f"raised {type(error).__name__}"


def _taken(engine: str) -> list[str]:
    warnings.simplefilter("ignore", FutureWarning)
    module = model(engine)
    if engine == "fsdp2":
        next(module.parameters()).requires_grad_(False)
    optimizer = adamw(module)
    train(module, optimizer, range(2))
    problems = []
    for name, options in GET.items():
        both: list[Any] = []
        for side in (ours, theirs):
            chosen: Any = side.StateDictOptions(**options)
            below = {m for n, m in module.named_modules() if n.endswith("body")}
            inner = below if name == "below" else None
            both.append(
                {
                    "model": outcome(
                        partial(side.get_model_state_dict, module, submodules=inner, options=chosen)
                    ),
                    "optimizer": outcome(
                        partial(side.get_optimizer_state_dict, module, optimizer, options=chosen)
                    ),
                }
            )
        problems += differences(*both, name)
    return problems


@pytest.mark.parametrize("engine", ["ddp", "fsdp1_flat", "fsdp2"])
def test_every_option_gives_what_torchs_function_gives(engine: str) -> None:
    for rank, problems in enumerate(run_ranks(2, _taken, engine)):
        assert not problems, (rank, problems)


SET: dict[str, dict[str, bool]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
    "full on the first": {"full_state_dict": True, "cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
}


def _put(engine: str) -> list[str]:
    warnings.simplefilter("ignore", FutureWarning)
    module = model(engine)
    optimizer = adamw(module)
    train(module, optimizer, range(2))
    problems = []
    for name, chosen in SET.items():
        options = ours.StateDictOptions(**chosen)
        taken = ours.get_state_dict(
            module,
            optimizer,
            options=ours.StateDictOptions(**(chosen | {"broadcast_from_rank0": False})),
        )
        if options.broadcast_from_rank0 and dist.get_rank():
            taken = ({}, {})
        other = model(engine, seed=7)
        other_optimizer = adamw(other)
        template = ours.get_optimizer_state_dict(other, other_optimizer)
        if other_optimizer.state or not template["state"]:
            problems.append(f"{name}: a look at a fresh optimizer left state, or saw none")
        keys = ours.set_state_dict(
            other,
            other_optimizer,
            model_state_dict=taken[0],
            optim_state_dict=taken[1],
            options=options,
        )
        problems += [f"{name}: {keys}"] if any(keys) else []
        problems += differences(model_state_dict(other), model_state_dict(module), name)
        problems += differences(
            optimizer_state_dict(other, other_optimizer),
            optimizer_state_dict(module, optimizer),
            name,
        )
    return problems


@pytest.mark.parametrize("engine", ["ddp", "fsdp1_orig", "fsdp2"])
def test_every_option_puts_back_what_was_taken(engine: str) -> None:
    for rank, problems in enumerate(run_ranks(2, _put, engine)):
        assert not problems, (rank, problems)


def test_modules_as_keys_and_modules_that_rename() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    by_module = {other[index]: module[index].state_dict() for index in (0, 1)}
    ours.set_model_state_dict(other, by_module)
    assert not differences(other.state_dict(), module.state_dict())
    renaming: Any = other[0]
    renaming._fqn_modifiers = lambda: {"weight": "inner"}
    with pytest.raises(CheckpointError, match="0: renames keys by _fqn_modifiers"):
        ours.get_model_state_dict(other)
    optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.5), momentum=0.9)
    assert len(ours.get_optimizer_state_dict(module, optimizer)["state"]) == 4
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(param.grad is None for param in module.parameters())
    with pytest.raises(RuntimeError, match="needs an optimizer"):
        ours.get_optimizer_state_dict(module, [])


def _all_of_it() -> list[list[str]]:
    warnings.simplefilter("ignore", FutureWarning)
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model = nn.parallel.DistributedDataParallel(net)
    return [
        list(ours.get_model_state_dict(model, submodules={inner}))
        for inner in (model, net, net[1], net[1][0])
    ]


def test_what_wraps_the_model_is_all_of_it() -> None:
    """torch gives nothing there."""
    everything = ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert run_ranks(1, _all_of_it) == [[everything, everything, everything[2:], everything[2:]]]
