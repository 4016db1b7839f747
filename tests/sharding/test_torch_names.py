"""Every public name and argument of torch's modules is here; the lists are torch's own."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dicts
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable import replicate

import ckpt.state_dict.like_torch as our_state_dicts
import sharding
from sharding.torch_face import _refusing, check_known
from tests.ranks import run_ranks
from tests.versions import TORCH


def test_every_public_name_of_torchs_package_is_offered() -> None:
    assert not set(torch_fsdp.__all__) - set(sharding.__all__)
    assert not set(torch_state_dicts.__all__) - set(our_state_dicts.__all__)


def arguments(call: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults, in order. Objects as defaults count by their class."""
    return [
        (one.name, one.kind, one.default if one.default is None else repr(one.default))
        for one in inspect.signature(call).parameters.values()
    ]


def calls() -> Iterator[tuple[str, Any, Any]]:
    for name in torch_fsdp.__all__:
        theirs, ours = getattr(torch_fsdp, name), getattr(sharding, name)
        if theirs is ours:
            continue
        if not inspect.isclass(theirs):
            yield name, ours, theirs
            continue
        for method, call in vars(theirs).items():
            is_public = not method.startswith("_") or method == "__init__"
            if is_public and inspect.isroutine(getattr(theirs, method)):
                yield f"{name}.{method}", getattr(ours, method), getattr(theirs, method)
            elif is_public:
                assert hasattr(ours, method), call
    for name in torch_state_dicts.__all__:
        if inspect.isfunction(getattr(torch_state_dicts, name)):
            yield name, getattr(our_state_dicts, name), getattr(torch_state_dicts, name)


# Any arguments are handed on to the wrapped module, nn.Module, or the class that was sharded.
HANDED_ON = {"FlatParameter.__init__", "UnshardHandle.__init__"}
# Behind torch's arguments: what torch's class has no counterpart of.
OURS_ALONE = {"FullyShardedDataParallel.__init__": ["shard_placement_fn"]}


# Arguments that torch has had for some versions only.
NEWER = (
    {
        ("fully_shard", "shard_placement_fn"),
        ("fully_shard", "ignored_params"),
        ("fully_shard", "dp_mesh_dims"),
    }
    if TORCH < (2, 12)
    else set()
)


def test_every_argument_of_torchs_functions_is_taken() -> None:
    seen = {name: (arguments(ours), arguments(theirs)) for name, ours, theirs in calls()}
    assert {"fully_shard", "FSDPModule.unshard", "set_state_dict"} <= seen.keys()
    for name, own in OURS_ALONE.items():
        ours, theirs = seen[name]
        assert [one[0] for one in ours[len(theirs) :]] == own
        seen[name] = (ours[: len(theirs)], theirs)
    for name, (ours, theirs) in seen.items():
        known = {one[0] for one in theirs}
        taken = [one for one in ours if one[0] in known or (name, one[0]) not in NEWER]
        if name == "fully_shard" and TORCH < (2, 8):  # True meant what None means now
            taken, theirs = ([one[:2] for one in those] for those in (taken, theirs))
        assert taken == theirs or name in HANDED_ON, name


def test_every_option_has_torchs_default() -> None:
    def fields(options: Any) -> dict[str, Any]:
        return {one.name: one.default for one in dataclasses.fields(options)}

    ours, theirs = map(
        fields, (our_state_dicts.StateDictOptions, torch_state_dicts.StateDictOptions)
    )
    if TORCH < (2, 12):
        theirs.setdefault("dsd_fqn_modifiers", ours["dsd_fqn_modifiers"])
    assert ours == theirs


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "FSDPModule", "UnshardHandle"])
def test_nothing_is_inherited_from_torchs_classes(name: str) -> None:
    theirs, ours = getattr(torch_fsdp, name), getattr(sharding, name)
    before = ours.__mro__[: ours.__mro__.index(theirs)]
    inherited = [
        name
        for name, value in vars(theirs).items()
        if inspect.isroutine(value) or isinstance(value, property)
        if not hasattr(object, name) and not any(name in vars(kind) for kind in before)
    ]
    assert not inherited


# --- what a newer torch adds ---------------------------------------------------------------------


def newer(kind: Any, **added: Any) -> Any:
    """torch's class of options with one field more."""
    fields = [(name, Any, dataclasses.field(default=value)) for name, value in added.items()]
    frozen = kind.__dataclass_params__.frozen
    made = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=frozen)
    made.__module__ = "torch.distributed.fsdp"
    return made


def test_a_new_option_at_its_default_is_taken() -> None:
    for kind in (sharding.MixedPrecisionPolicy, sharding.MixedPrecision, sharding.CPUOffload):
        check_known(newer(kind, rounds=False)())
    check_known(None, sharding.CPUOffloadPolicy(), sharding.ShardingStrategy.NO_SHARD, object())


def added_options_are_refused() -> None:
    model = nn.Linear(4, 4)
    for call in (
        lambda: sharding.fully_shard(
            model, mp_policy=newer(sharding.MixedPrecisionPolicy, rounds=False)(rounds=True)
        ),
        lambda: sharding.fully_shard(
            model, offload_policy=newer(sharding.CPUOffloadPolicy, rounds=1)(rounds=2)
        ),
        lambda: sharding.FullyShardedDataParallel(
            model, mixed_precision=newer(sharding.MixedPrecision, rounds=False)(rounds=True)
        ),
        lambda: sharding.FullyShardedDataParallel(
            model, cpu_offload=newer(sharding.CPUOffload, rounds=False)(rounds=True)
        ),
        lambda: our_state_dicts.get_model_state_dict(
            model,
            options=newer(torch_state_dicts.StateDictOptions, rounds=False)(rounds=True),
        ),
    ):
        with pytest.raises(NotImplementedError, match=r"\.rounds of torch .* leave it"):
            call()
        assert type(model) is nn.Linear


@pytest.mark.ranks
def test_options_of_a_newer_torch_are_refused_by_name() -> None:
    run_ranks(1, added_options_are_refused)


def test_new_members_and_classes_are_refused_by_name() -> None:
    enums: Any = enum.Enum
    strategy = enums("ShardingStrategy", ["FULL_SHARD", "CYCLIC"], module="torch.x")
    check_known(strategy.FULL_SHARD)
    with pytest.raises(NotImplementedError, match=r"ShardingStrategy\.CYCLIC of torch"):
        check_known(strategy.CYCLIC)
    disk: Any = type("DiskOffloadPolicy", (torch_fsdp.OffloadPolicy,), {"__module__": "torch.x"})
    with pytest.raises(NotImplementedError, match="DiskOffloadPolicy of torch"):
        check_known(disk())


def added_methods_are_refused() -> None:
    wrapper: Any = sharding.FullyShardedDataParallel(nn.Linear(4, 4))
    with pytest.raises(NotImplementedError, match=r"FullyShardedDataParallel\._reset_lazy_init"):
        wrapper._reset_lazy_init()


def test_methods_of_modules_of_a_newer_torch_are_refused_by_name() -> None:
    names = ("get_pending_gradients", "set_all_gather_layout", "synchronize_gradients")
    newest = type("FSDPModule", (torch_fsdp.FSDPModule,), dict.fromkeys(names, lambda self: 0))
    module = object.__new__(_refusing(newest))
    for name in names:
        with pytest.raises(NotImplementedError, match=rf"FSDPModule\.{name}\(\) of torch"):
            getattr(module, name)()


@pytest.mark.ranks
def test_methods_of_a_newer_torch_are_refused_by_name() -> None:
    run_ranks(1, added_methods_are_refused)


# --- what tools ask of modules ------------------------------------------------------------------

READ = (
    "sharding_strategy",
    "rank",
    "world_size",
    "mixed_precision",
    "compute_device",
    "cpu_offload",
    "training_state",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
)


def _attributes(flat: bool) -> list[str]:
    """What differs between the attributes of torch's wrapper and of ours, made alike."""
    warnings.simplefilter("ignore", FutureWarning)
    problems = []
    kinds: tuple[Any, Any] = (
        sharding.FullyShardedDataParallel,
        torch_fsdp.FullyShardedDataParallel,
    )
    ours, theirs = (
        kind(
            nn.Sequential(
                nn.Linear(4, 4),
                kind(nn.Linear(4, 2), device_id=torch.device("cpu"), use_orig_params=not flat),
            ),
            sharding_strategy=torch_fsdp.ShardingStrategy.SHARD_GRAD_OP,
            mixed_precision=torch_fsdp.MixedPrecision(reduce_dtype=torch.float64),
            device_id=device,
            forward_prefetch=True,
            use_orig_params=not flat,
        )
        for kind, device in zip(kinds, ("cpu", torch.device("cpu")), strict=True)
    )
    for name in READ:
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b or type(a) is not type(b):
            problems.append(f"{name}: {a!r}, torch {b!r}")
    if dist.get_process_group_ranks(ours.process_group) != [0, 1]:
        problems.append("process_group")
    if [p.shape for p in ours.params] != [p.shape for p in theirs.params]:
        problems.append(f"params: {ours.params}")
    with kinds[0].summon_full_params(ours), kinds[1].summon_full_params(theirs):
        if ours.training_state != theirs.training_state:
            problems.append(f"training_state: {ours.training_state} inside")
    checks = {
        "isinstance": isinstance(ours, kinds[1]),
        "fsdp_modules": kinds[1].fsdp_modules(ours) == [ours, ours[1]],
        "roots": kinds[1].fsdp_modules(ours, root_only=True) == [ours],
        "torch's own": kinds[1].fsdp_modules(theirs) == [theirs, theirs[1]],
    }
    return problems + [name for name, holds in checks.items() if not holds]


@pytest.mark.ranks
@pytest.mark.parametrize("flat", [True, False])
def test_a_wrapper_shows_what_torchs_wrapper_shows(flat: bool) -> None:
    for problems in run_ranks(2, _attributes, flat):
        assert not problems, problems


def _modules() -> list[str]:
    """`fully_shard`ed modules as torch's pipelines and `replicate` see them."""
    model = sharding.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    unsharded = copy.deepcopy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    with torch.no_grad():
        for own, param in zip(unsharded.parameters(), model.parameters(), strict=True):
            own.copy_(param.full_tensor())
    stage: Any = model
    stage.set_is_last_backward(False)
    stage.set_reshard_after_backward(False)
    stage.set_requires_gradient_sync(False)
    for step in range(2):
        torch.manual_seed(step)
        batch = torch.randn(3, 4)
        model(batch).sum().backward()
        unsharded(batch).sum().backward()
    stage.set_is_last_backward(True)
    stage.set_reshard_after_backward(True)
    stage.set_requires_gradient_sync(True)
    entry_point: Any = torch_fsdp.fully_shard
    entry_point.state(model)._root_post_backward_final_callback()
    problems = [
        name
        for (name, own), param in zip(unsharded.named_parameters(), model.parameters(), strict=True)
        if not torch.allclose(own.grad, param.grad.full_tensor())
    ]
    with pytest.raises(RuntimeError, match="fully_shard"):
        replicate(model)
    checks = {
        "module": isinstance(model, torch_fsdp.FSDPModule),
        "handle": isinstance(stage.unshard(async_op=True), torch_fsdp.UnshardHandle),
        "slices are plain": type(model[:1]) is nn.Sequential,
        "casts": next(model.to(torch.float64).parameters()).dtype is torch.float64,
    }
    return problems + [name for name, holds in checks.items() if not holds]


@pytest.mark.ranks
def test_a_sharded_module_is_what_torch_knows_as_one() -> None:
    for problems in run_ranks(2, _modules):
        assert not problems, problems


def test_no_module_of_the_package_has_the_name_of_what_it_offers() -> None:
    # The import system would put the module in the function's place, whoever imports it first.
    modules = {one.name for one in pkgutil.iter_modules(sharding.__path__)}
    assert not modules & set(sharding.__all__)
