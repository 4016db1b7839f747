"""torch's `get_state_dict`, `set_state_dict` and distributed checkpoint over our engines.

The same script runs over torch's class and over ours, on the same ranks: keys, kinds, shapes,
places and bits of what comes out are compared, and a run resumed through `dcp.save` and `dcp.load`
against one that was not interrupted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchClass
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import sharding
from ckpt.state_dict.api import model_state_dict, optimizer_state_dict
from tests.ranks import run_ranks
from tests.sharding.models import WIDTH, Tied, batches
from tests.state.test_dicts_against_torch import differences

pytestmark = [pytest.mark.ranks]

FACES = ("flat", "orig", "flat mesh", "orig mesh", "fully")
Dict = dict[str, Any]


class Counting(nn.Module):
    """Has a buffer that a forward changes, on all ranks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def sharded(face: str, engine: str, seed: int = 0, frozen: bool = False) -> nn.Module:
    """A model of two units with a buffer and uneven sizes; `frozen`: a part is not trained."""
    torch.manual_seed(seed)
    # torch's own loader loses a key on a rank without any row of a ShardedTensor: none is so small.
    inner = nn.Sequential(nn.Linear(7, 5), Counting(), nn.Linear(5, 3))
    model = nn.Sequential(nn.Linear(WIDTH, 7), inner, nn.Linear(3, 2))
    if frozen:
        model[1].requires_grad_(False)
    if face == "fully":
        shard: Any = sharding.fully_shard if engine == "ours" else torch_fully_shard
        shard(model[1])
        shard(model)
        return model
    wrapper: Any = sharding.FullyShardedDataParallel if engine == "ours" else TorchClass
    kwargs: Dict = {"use_orig_params": face.startswith("orig"), "device_id": torch.device("cpu")}
    if face.endswith("mesh"):
        kwargs["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    model[1] = wrapper(model[1], **kwargs)
    made: nn.Module = wrapper(model, **kwargs)
    return made


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step, (_, batch) in enumerate(batches(steps.stop)):
        if step in steps:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def ready(face: str, engine: str, frozen: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(face, engine, frozen=frozen)
    optimizer = adam(model)
    train(model, optimizer, range(2))
    return model, optimizer


# --- the tutorial --------------------------------------------------------------------------------


def _resumed(face: str, folder: str) -> list[str]:
    """Save, build anew with other weights, load, go on; against going on."""
    model, optimizer = ready(face, "ours")
    state = get_state_dict(model, optimizer)
    dcp.save({"model": state[0], "optim": state[1]}, checkpoint_id=folder)
    other = sharded(face, "ours", seed=7)
    other_optimizer = adam(other)
    model_dict, optim_dict = get_state_dict(other, other_optimizer)
    dcp.load({"model": model_dict, "optim": optim_dict}, checkpoint_id=folder)
    result = set_state_dict(
        other, other_optimizer, model_state_dict=model_dict, optim_state_dict=optim_dict
    )
    problems = [] if not any(result) else [f"keys: {result}"]
    if train(other, other_optimizer, range(2, 4)) != train(model, optimizer, range(2, 4)):
        problems.append("losses differ after resuming")
    full = StateDictOptions(full_state_dict=True)
    resumed = get_state_dict(other, other_optimizer, options=full)
    ended = get_state_dict(model, optimizer, options=full)
    return problems + differences(resumed[0], ended[0]) + differences(resumed[1], ended[1])


@pytest.mark.parametrize("face", FACES)
def test_a_run_resumed_through_dcp_goes_on_bit_for_bit(face: str, tmp_path: Path) -> None:
    for rank, problems in enumerate(run_ranks(2, _resumed, face, str(tmp_path / "checkpoint"))):
        assert not problems, (rank, problems)


# --- modules that rename keys --------------------------------------------------------------------


class Renaming(nn.Module):
    """Keys lack the name of the inner module, by hooks; declared as `dsd_fqn_modifiers` wants."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_state_dict_post_hook(self.strip)
        self.register_load_state_dict_pre_hook(self.put_back)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)
        return output

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}

    @staticmethod
    def strip(module: nn.Module, state: Dict, prefix: str, metadata: Dict) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}{name}"] = state.pop(f"{prefix}inner.{name}")

    @staticmethod
    def put_back(module: nn.Module, state: Dict, prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}{name}" in state:
                state[f"{prefix}inner.{name}"] = state.pop(f"{prefix}{name}")


def _renaming() -> list[str]:
    problems = []
    torch.manual_seed(0)
    wrapped = sharding.FullyShardedDataParallel(
        nn.Sequential(Renaming(), nn.Linear(4, 2)), use_orig_params=True
    )
    optimizer = adam(wrapped)
    before = [param.detach().clone() for param in wrapped.parameters()]
    shapes = {"0.weight": (4, 4), "0.bias": (4,), "1.weight": (2, 4), "1.bias": (2,)}
    full = {name: torch.zeros(shape) for name, shape in shapes.items()}
    options = StateDictOptions(full_state_dict=True, strict=False)
    calls: dict[str, Callable[[], Any]] = {
        "get model": lambda: get_model_state_dict(wrapped, options=options),
        "set model": lambda: set_model_state_dict(wrapped, dict(full), options=options),
        "get optimizer": lambda: get_optimizer_state_dict(wrapped, optimizer, options=options),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=r"0: hook Renaming\.(strip|put_back) changes"):
            call()
        after = [param.detach() for param in wrapped.parameters()]
        problems += [] if all(map(torch.equal, before, after)) else [f"{name}: has written"]
    dicts = []
    for engine in (sharding.fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        shard: Any = engine
        module = shard(nn.Sequential(Renaming(), nn.Linear(4, 2)))
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(2)
        doubled = get_model_state_dict(module)
        set_model_state_dict(module, dict(full), options=options)
        dicts.append((doubled, get_model_state_dict(module)))
    assert dicts[0][0].keys() == shapes.keys()
    return problems + [text for one in (0, 1) for text in differences(dicts[0][one], dicts[1][one])]


def test_modules_that_rename_keys_are_refused_or_served_as_torch_does() -> None:
    for rank, problems in enumerate(run_ranks(2, _renaming)):
        assert not problems, (rank, problems)


# --- what comes out ------------------------------------------------------------------------------

GET: dict[str, StateDictOptions] = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full on the first": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "offloaded": StateDictOptions(cpu_offload=True),
    "trained only": StateDictOptions(ignore_frozen_params=True),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full, flattened": StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
    "without prefixes": StateDictOptions(keep_submodule_prefixes=False),
    "contradiction": StateDictOptions(broadcast_from_rank0=True),
}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"raised {type(error).__name__}"


def taken(face: str, engine: str, frozen: bool) -> dict[str, Any]:
    """What torch's functions give for one engine, by option."""
    model, optimizer = ready(face, engine, frozen)
    outcomes: dict[str, Any] = {}
    for name, options in GET.items():
        if engine == "torch" and face != "fully" and name == "full on the first":
            continue  # on the CPU torch's class frees there what it still needs, and dies
        inner = {part for part in (model.get_submodule("1"),) if "prefixes" in name} or None

        def of_model(options: Any = options, inner: Any = inner) -> Any:
            return get_model_state_dict(model, submodules=inner, options=options)

        def of_optimizer(options: Any = options) -> Any:
            return get_optimizer_state_dict(model, optimizer, options=options)

        outcomes[f"{name}: model"] = outcome(of_model)
        outcomes[f"{name}: optimizer"] = outcome(of_optimizer)
    return outcomes


def _unlike_torch(face: str, frozen: bool) -> list[str]:
    warnings.simplefilter("ignore", FutureWarning)
    ours, theirs = taken(face, "ours", frozen), taken(face, "torch", frozen)
    if face.startswith("orig"):
        # torch gives all full states of an original parameter one memory on the CPU: wrong values.
        flat = taken(face.replace("orig", "flat"), "torch", frozen)
        theirs |= {name: flat[name] for name in theirs if "full" in name and "optim" in name}
    first = dist.get_rank() == 0
    theirs.setdefault("full on the first: model", theirs["full: model"] if first else {})
    theirs.setdefault("full on the first: optimizer", theirs["full: optimizer"] if first else {})
    problems = []
    for name in theirs:
        problems += differences({"": ours[name]}, {"": theirs[name]}, name)
    return problems


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("face", FACES)
def test_every_option_gives_what_torch_gives_for_its_own_class(face: str, frozen: bool) -> None:
    for rank, problems in enumerate(run_ranks(2, _unlike_torch, face, frozen)):
        assert not problems, (rank, problems)


# --- what goes in --------------------------------------------------------------------------------

SET: dict[str, StateDictOptions] = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "broadcast": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    "broadcast, offloaded": StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True
    ),
    "offloaded": StateDictOptions(cpu_offload=True),
    "full on the first": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "tolerant": StateDictOptions(strict=False),
}


def _put(face: str) -> list[str]:
    """Take from one model and put into another by torch's functions; is it the same then?"""
    warnings.simplefilter("ignore", FutureWarning)
    model, optimizer = ready(face, "ours")
    return [d for name in SET for d in _put_one(face, name, model, optimizer)]


def _put_one(face: str, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    options = SET[name]
    get = StateDictOptions(
        full_state_dict=options.full_state_dict,
        flatten_optimizer_state_dict=options.flatten_optimizer_state_dict,
    )
    model_dict, optim_dict = get_state_dict(model, optimizer, options=get)
    if options.broadcast_from_rank0 and dist.get_rank():
        model_dict, optim_dict = {}, {}
    other = sharded(face, "ours", seed=7)
    other_optimizer = adam(other)
    set_model_state_dict(other, model_dict, options=options)
    set_optimizer_state_dict(other, other_optimizer, optim_dict, options=options)
    problems = differences(model_state_dict(other), model_state_dict(model), name)
    return problems + differences(
        optimizer_state_dict(other, other_optimizer), optimizer_state_dict(model, optimizer), name
    )


@pytest.mark.parametrize("face", FACES)
def test_every_option_puts_back_what_was_taken(face: str) -> None:
    for rank, problems in enumerate(run_ranks(2, _put, face)):
        assert not problems, (rank, problems)


PARTIAL = {
    "full": StateDictOptions(full_state_dict=True),
    "broadcast": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    "sharded": StateDictOptions(),
}


def _partial(face: str) -> dict[str, Any]:
    """A dict without one weight: refused, or with strict=False all but that is loaded."""
    warnings.simplefilter("ignore", FutureWarning)
    lacking = "1.0.weight"
    model, _ = ready(face, "ours")
    checks: dict[str, Any] = {}
    for name, options in PARTIAL.items():
        get = StateDictOptions(full_state_dict=options.full_state_dict)
        for strict in (True, False):
            other = sharded(face, "ours", seed=7)
            before = model_state_dict(other)
            given = get_model_state_dict(model, options=get)
            del given[lacking]
            chosen = replace(options, strict=strict)
            if options.broadcast_from_rank0 and dist.get_rank():
                given = {}
            raised = outcome(partial(set_model_state_dict, other, given, options=chosen))
            after, expected = model_state_dict(other), {**model_state_dict(model)}
            expected[lacking] = before[lacking]
            if strict:
                checks[f"{name}, strict"] = isinstance(raised, str)
                checks[f"{name}, untouched"] = not differences(after, before)
            else:
                checks[f"{name}, tolerant"] = not isinstance(raised, str)
                checks[f"{name}, loaded"] = not differences(after, expected)
    return checks


@pytest.mark.parametrize("face", ["flat", "orig mesh"])
def test_a_dict_that_lacks_a_name_is_refused_or_loaded_but_for_that(face: str) -> None:
    for checks in run_ranks(2, _partial, face):
        assert all(checks.values()), checks


# --- other wrappings -----------------------------------------------------------------------------


def wrapped_as(kind: str, seed: int) -> nn.Module:
    """A model with tied weights: hybrid, not sharded at all, or below a root that is no unit."""
    torch.manual_seed(seed)
    wrapper: Any = sharding.FullyShardedDataParallel
    kwargs: Dict = {}
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        kwargs = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    if kind == "not sharded":
        kwargs = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    inner = wrapper(nn.Sequential(nn.Linear(6, 6), Tied()), **kwargs)
    model = nn.Sequential(nn.Linear(WIDTH, 6), inner, nn.Linear(6, 4))
    if kind == "plain root":
        model[0], model[2] = wrapper(model[0]), wrapper(model[2])
        return model
    made: nn.Module = wrapper(model, **kwargs)
    return made


def _resumed_as(kind: str, folder: str) -> list[str]:
    warnings.simplefilter("ignore")  # NO_SHARD is deprecated, and its sharded dicts are whole
    model = wrapped_as(kind, 0)
    optimizer = adam(model)
    train(model, optimizer, range(2))
    taken = get_state_dict(model, optimizer)
    dcp.save({"model": taken[0], "optim": taken[1]}, checkpoint_id=folder)
    other = wrapped_as(kind, 7)
    other_optimizer = adam(other)
    given = get_state_dict(other, other_optimizer)
    dcp.load({"model": given[0], "optim": given[1]}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=given[0], optim_state_dict=given[1])
    train(other, other_optimizer, range(2, 4))
    train(model, optimizer, range(2, 4))
    return differences(model_state_dict(other), model_state_dict(model))


@pytest.mark.parametrize("kind", ["hybrid", "not sharded", "plain root"])
def test_other_wrappings_resume_bit_for_bit(kind: str, tmp_path: Path) -> None:
    ranks = 4 if kind == "hybrid" else 2
    for rank, problems in enumerate(run_ranks(ranks, _resumed_as, kind, str(tmp_path / "saved"))):
        assert not problems, (rank, problems)
