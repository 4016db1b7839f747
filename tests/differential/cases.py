"""Rows of the table of differences that draws seldom reach: calls that each engine makes.

A case gives something, or raises; what our side does stands beside it, and torch's does otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms._comm_hooks.default_hooks as default_hooks
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.fully_sharded_data_parallel
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import sharding
from tests.sharding.models import Either, build, engine

__all__ = ["CASES"]


class Renaming(nn.Module):
    """Keys lack the name of the inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_state_dict_post_hook(self.strip)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}

    @staticmethod
    def strip(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}{name}"] = state.pop(f"{prefix}inner.{name}")


def retained(name: str) -> None:
    loss = engine(name)(build("uneven"))(torch.ones(2, 6)).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)


def divided(name: str) -> None:
    fully_shard: Any = {"torch": torch_fsdp, "ours": sharding}[name].fully_shard
    model = fully_shard(build("uneven"))
    model.set_gradient_divide_factor(3.0)
    model(torch.ones(2, 6)).sum().backward()


def called_twice(name: str) -> int:
    """How many reductions there are in a backward after one that did not reduce."""
    fully_shard: Any = {"torch": torch_fsdp, "ours": sharding}[name].fully_shard
    layer = nn.Linear(6, 6)
    model = fully_shard(nn.Sequential(fully_shard(layer), nn.Tanh(), layer, nn.Linear(6, 1)))
    for syncs in (False, True):
        model.set_requires_gradient_sync(syncs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            model(torch.ones(2, 6)).sum().backward()
    return [event.name for event in profiled.events()].count("c10d::_reduce_scatter_base_")


def dict_before(name: str) -> None:
    model = build("uneven")
    model[1] = engine(name)(model[1])
    model[1].state_dict()
    engine(name)(model)(torch.ones(2, 6))


def in_other_orders(name: str) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        bare = Either()
        model = engine(name)(bare, auto_wrap_policy=ModuleWrapPolicy([nn.Linear]))
        for step in range(3):
            bare.turned = step == 2 and dist.get_rank() == 1
            model(torch.ones(2, 6)).sum().backward()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def of_two_types(name: str) -> list[str]:
    model = build("uneven")
    model[1] = engine(name)(model[1])
    model = engine(name)(model)
    type(model).set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    type(model).set_state_dict_type(model.module[1], StateDictType.SHARDED_STATE_DICT)
    return sorted({type(value).__name__ for value in model.state_dict().values()})


def gradients_put(name: str) -> list[float]:
    options = {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD}
    model = engine(name)(build("uneven"), **options)
    model(torch.ones(2, 6)).sum().backward()
    with type(model).summon_full_params(model, with_grads=True):
        for param in model.parameters():
            param.grad = torch.full_like(param, 7.0)
    return sorted({float(value) for param in model.parameters() for value in param.grad.flatten()})


def renamed(name: str) -> None:
    model = engine(name)(nn.Sequential(Renaming()), use_orig_params=True)
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def of_one_parameter(name: str) -> None:
    """An optimizer that has one of a unit's parameters."""
    model = engine(name)(build("uneven"), use_orig_params=True)
    optimizer = torch.optim.SGD(list(model.parameters())[-1:], lr=0.1, momentum=0.9)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    type(model).optim_state_dict(model, optimizer)


def norm_in_low_precision(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).bfloat16()
    policy = ModuleWrapPolicy([nn.Linear])
    low = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    wrapped = engine(name)(model, mixed_precision=low, auto_wrap_policy=policy)
    wrapped(torch.ones(2, 6).bfloat16())


def kept_in_low_precision(name: str) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = engine(name)(build("uneven"), mixed_precision=precision, use_orig_params=True)
    with model.no_sync():
        model(torch.ones(2, 6)).sum().backward()
    model.eval()
    model(torch.ones(2, 6))
    model.train()
    model(torch.ones(2, 6)).sum().backward()


def of_one_element(name: str, dtype: torch.dtype = torch.float32) -> Any:
    scale = nn.Module()
    scale.register_parameter("scale", nn.Parameter(torch.ones(1, dtype=dtype)))
    scale.forward = lambda x: x * scale.scale
    return engine(name)(scale, use_orig_params=dtype is not torch.float32)


def one_element_twice(name: str) -> list[float]:
    """A gradient of one element after one backward, and after another one, of the first."""
    model = of_one_element(name)
    seen = []
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        seen += [float(param.grad) for param in model.parameters() if param.grad is not None]
    return [value / 12.0 for value in seen if value] or [1.0, 2.0]  # the other rank has no part


def ids_without_state(name: str) -> list[str]:
    model, bare = engine(name)(build("uneven")), build("uneven")
    state = type(model).full_optim_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if not state:
        return ["int"]  # a rank that gets no dict
    plain = torch.optim.SGD(bare.parameters(), lr=0.1)
    kind = torch_fsdp.fully_sharded_data_parallel.OptimStateKeyType.PARAM_ID
    groups = type(model).rekey_optim_state_dict(state, kind, bare, optim=plain)["param_groups"]
    return sorted({type(key).__name__ for key in groups[0]["params"]})


def converted(name: str) -> None:
    model = engine(name)(build("uneven"), mixed_precision=MixedPrecision(reduce_dtype=torch.half))
    model(torch.ones(2, 6)).sum().backward()
    model.double()
    with type(model).summon_full_params(model):
        pass
    model.eval()
    model(torch.ones(2, 6).double())


def buffers_before(name: str) -> str:
    model = build("batch_norm")
    model = engine(name)(model, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model.state_dict()
    return str(next(model.buffers()).dtype)


def hooked(name: str) -> None:
    model = engine(name)(build("uneven"), use_orig_params=True)
    state = default_hooks.LowPrecisionState(dist.group.WORLD)
    model.register_comm_hook(state, default_hooks.bf16_compress_hook)
    model(torch.ones(2, 6)).sum().backward()


def kept_gradients(name: str) -> list[str]:
    """Their dtypes under two strategies."""
    seen = []
    low = MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=True)
    for kind in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = engine(name)(build("uneven"), mixed_precision=low, sharding_strategy=kind)
        model(torch.ones(2, 6)).sum().backward()
        seen.append(str(next(model.parameters()).grad.dtype))
    return seen


def summoned_gradients(name: str) -> None:
    """The second rank has padding alone."""
    model = of_one_element(name, torch.bfloat16)
    model(torch.ones(2, 6).bfloat16()).sum().backward()
    with type(model).summon_full_params(model, with_grads=True):
        pass


def clipped_doubles(name: str) -> None:
    model = engine(name)(build("uneven").double())
    model(torch.ones(2, 6).double()).sum().backward()
    model.clip_grad_norm_(1.0)


def over_half_of_the_ranks(name: str) -> list[int]:
    """Where the sharded dict of a group says that its own rows are: shard, rank."""
    half = dist.get_world_size() // 2
    groups = [dist.new_group(list(range(first, first + half))) for first in (0, half)]
    model = engine(name)(build("even"), process_group=groups[dist.get_rank() // half])
    type(model).set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    (shard,) = model.state_dict()["0.weight"].local_shards()
    where = shard.metadata
    return [
        where.shard_offsets[0] // 4 - dist.get_rank() % half,
        where.placement.rank() - dist.get_rank(),
    ]


CASES: dict[str, tuple[Callable[[str], Any], Any]] = {
    "two backwards over one retained graph": (retained, None),
    "`set_gradient_divide_factor` on gloo": (divided, None),
    "a unit that is called twice in a forward": (called_twice, 2),
    "`state_dict()` of an inner unit before": (dict_before, None),
    "ranks that run units in different orders": (in_other_orders, "RuntimeError"),
    "units with different state dict types": (of_two_types, ["Tensor"]),
    "gradients of `NO_SHARD` units replaced": (gradients_put, [7.0]),
    "torch's state dict functions, where a module renames keys": (renamed, "RuntimeError"),
    "`summon_full_params(with_grads=True)` where": (summoned_gradients, None),
    "`clip_grad_norm_` of gradients in float64": (clipped_doubles, None),
    "sharded dicts of units over part of the ranks": (over_half_of_the_ranks, [0, 0]),
    "on CPU: offload": (hooked, None),
    "`keep_low_precision_grads`": (kept_gradients, ["torch.float32"] * 2),
    "an optimizer over a part": (of_one_parameter, None),
    "a norm left out of mixed precision": (norm_in_low_precision, None),
    "`no_sync` with mixed precision": (kept_in_low_precision, None),
    "gradients of a unit of one element": (one_element_twice, [1.0, 2.0]),
    "`rekey_optim_state_dict(PARAM_ID)`": (ids_without_state, ["int"]),
    "a wrapped model that is converted": (converted, None),
    "buffers under `buffer_dtype`": (buffers_before, "torch.float32"),
}
"""By the beginning of a row: calls that an engine makes, and what our side gives or raises."""
