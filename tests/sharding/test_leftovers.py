"""What an iteration that raised, a dropped model or an odd call leaves behind: nothing.

Method: under both engines, raise in the middle of a forward, a backward or its end, skip units, run
inner modules by themselves; then compare gradients with the unsharded model, and look for what is
still alive or registered.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sharding
from sharding.engine.precision import cast_floating
from sharding.sharded_group import sharded_groups
from tests.sharding.fully_scenarios import claims, ones
from tests.sharding.models import WIDTH

Flat = sharding.FullyShardedDataParallel
ENGINES = ("fully", "flat")


class Planned(Exception):
    """What the tests raise."""


class Fails(torch.autograd.Function):
    """Raises in its backward while switched on."""

    is_on = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fails.is_on:
            raise Planned
        return grad


class Chain(nn.Module):
    """Three layers, the last of which can be left out; no parameters of its own."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.skips_third = False
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Fails.apply(self.first(x))
        if self.raises:
            raise Planned
        x = self.second(x)
        return x if self.skips_third else self.third(x)


NAMES = ("first", "second", "third")


def built(engine: str, width: int = WIDTH, **kwargs: Any) -> tuple[Any, Chain]:
    """The model with each layer as a unit; the bare one inside of the root's wrapper."""
    chain = Chain(width)
    if engine == "fully":
        for name in NAMES:
            sharding.fully_shard(getattr(chain, name), **kwargs)
        return sharding.fully_shard(chain), chain
    for name in NAMES:
        setattr(chain, name, Flat(getattr(chain, name), use_orig_params=True, **kwargs))
    return Flat(chain, use_orig_params=True), chain


def assert_gradients(model: Any, bare: nn.Module, what: str) -> None:
    """Equal to those of `bare`, which saw all ranks' data; a missing one to none."""
    if isinstance(model, Flat):
        with Flat.summon_full_params(model, with_grads=True):
            got = [param.grad for param in model.parameters()]
            wanted = [param.grad for param in bare.parameters()]
            torch.testing.assert_close(got, wanted, msg=lambda text: f"{what}: {text}")
        return
    for (name, param), other in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert param.grad is not None, f"{what} {name}"
        torch.testing.assert_close(
            param.grad.full_tensor(), other.grad, msg=lambda text, n=name: f"{what} {n}: {text}"
        )


def loss_of(model: Any, times: float) -> torch.Tensor:
    loss: torch.Tensor = model(ones() * times).square().mean()
    return loss


def average_loss(bare: Chain) -> torch.Tensor:
    size = dist.get_world_size()
    return sum((loss_of(bare, rank + 1) for rank in range(size)), torch.zeros(())) / size


def mine(model: Any) -> torch.Tensor:
    return loss_of(model, dist.get_rank() + 1)


def raise_planned(_: torch.Tensor) -> None:
    raise Planned


# Iterations that raised --------------------------------------------------------------------------


def a_backward_that_raised_is_left_by_the_next_forward() -> None:
    for engine in ENGINES:
        model, _ = built(engine)
        bare = Chain()
        average_loss(bare).backward()
        for _ in range(2):
            Fails.is_on = True
            with pytest.raises(Planned):
                mine(model).backward()
            Fails.is_on = False
            model.zero_grad()
            mine(model).backward()
            assert_gradients(model, bare, engine)
            model.zero_grad()


def hooks_that_raise_at_the_end_of_a_backward_leave_nothing() -> None:
    for engine in ENGINES:
        model, _ = built(engine)
        bare = Chain()
        average_loss(bare).backward()
        hooks = [
            param.register_post_accumulate_grad_hook(raise_planned) for param in model.parameters()
        ]
        with pytest.raises(Planned):
            mine(model).backward()
        for hook in hooks:
            hook.remove()
        model.zero_grad()
        mine(model).backward()
        assert_gradients(model, bare, engine)


def full_parameters_can_be_had_after_a_backward_that_raised() -> None:
    model, _ = built("flat")
    Fails.is_on = True
    with pytest.raises(Planned):
        mine(model).backward()
    Fails.is_on = False
    with Flat.summon_full_params(model):
        assert all(param.dim() > 0 and param.numel() >= WIDTH for param in model.parameters())
    with model.no_sync():
        mine(model).backward()


def early_gathers_of_a_forward_that_raised_are_not_used_after_a_step() -> None:
    model, chain = built("flat", forward_prefetch=True)
    for _ in range(2):  # the first one shows the order
        mine(model).backward()
    chain.raises = True
    with pytest.raises(Planned):
        mine(model)
    chain.raises = False
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    got = model(ones())
    bare = Chain()
    with Flat.summon_full_params(model):
        for param, value in zip(bare.parameters(), model.parameters(), strict=True):
            param.data.copy_(value)
    torch.testing.assert_close(got, bare(ones()))


def modules_of_one_unit_start_anew_after_a_forward_that_raised() -> None:
    torch.manual_seed(0)
    pair: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    sharding.fully_shard([pair[0], pair[1]])
    is_on = False

    def raises(module: nn.Module, args: Any) -> None:
        if is_on:
            raise Planned

    pair[1].register_forward_pre_hook(raises)
    wanted = pair(ones()).detach() * 0
    for loads in (True, False):
        is_on = True
        with pytest.raises(Planned):
            pair(ones())
        is_on = False
        if loads:
            pair.state_dict()  # shows what is sharded
        for param in pair.parameters():
            param.data.zero_()
        assert torch.equal(pair(ones()), wanted)


# Units that are skipped, or run by themselves ----------------------------------------------------


def gradients_kept_without_reducing_are_reduced_by_a_backward_that_skips_their_unit() -> None:
    for engine in ENGINES:
        model, chain = built(engine)
        bare = Chain()
        average_loss(bare).backward()
        bare.skips_third = True
        average_loss(bare).backward()
        if engine == "fully":
            model.set_requires_gradient_sync(False)
            mine(model).backward()
            model.set_requires_gradient_sync(True)
        else:
            with model.no_sync():
                mine(model).backward()
        chain.skips_third = True
        mine(model).backward()
        assert_gradients(model, bare, engine)


def inner_modules_by_themselves_see_what_was_stepped() -> None:
    model, chain = built("fully", reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    mine(model).backward()
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            before = chain.first(ones()).detach()
            optimizer.step()
            assert not torch.equal(before, chain.first(ones()))


# What is still there -----------------------------------------------------------------------------


def dropped_models_free_their_memory() -> None:
    for engine in ENGINES:
        model, chain = built(engine)
        mine(model).backward()
        group: Any = chain.first
        store = group.fsdp_group.store if engine == "fully" else group.fsdp_unit.store
        alive = [weakref.ref(one) for one in (model, store, store.memory, store.pages)]
        del model, chain, group, store
        gc.collect()
        assert [one() for one in alive] == [None] * 4, engine


def parameters_that_were_sharded_are_freed_with_their_last_user() -> None:
    layer: Any = nn.Linear(WIDTH, WIDTH)
    original = weakref.ref(layer.weight)
    sharding.fully_shard(layer)
    gc.collect()
    assert original() is None


def hooks_do_not_pile_up_on_inputs_that_stay() -> None:
    for engine in ENGINES:
        model, _ = built(engine)
        model.requires_grad_(False)
        prompt = nn.Parameter(ones())
        for _ in range(3):
            model(prompt).sum().backward()
        assert not prompt._backward_hooks, engine


# Ties --------------------------------------------------------------------------------------------


def ties_that_would_be_lost_are_refused() -> None:
    for inner_first in (True, False):
        chain = Chain()
        chain.third.weight = chain.first.weight
        sharding.fully_shard(chain.first)
        with pytest.raises(ValueError, match=r"weight: is tied to weight .* fully_shard\(\["):
            sharding.fully_shard(chain if inner_first else chain.third)
    chain = Chain()
    chain.third.weight = chain.first.weight
    sharding.fully_shard([chain.first, chain.third])
    model = sharding.fully_shard(chain)
    assert len(sharded_groups(model)) == 2


test_on_two_ranks = claims(
    2,
    [
        a_backward_that_raised_is_left_by_the_next_forward,
        hooks_that_raise_at_the_end_of_a_backward_leave_nothing,
        full_parameters_can_be_had_after_a_backward_that_raised,
        early_gathers_of_a_forward_that_raised_are_not_used_after_a_step,
        modules_of_one_unit_start_anew_after_a_forward_that_raised,
        gradients_kept_without_reducing_are_reduced_by_a_backward_that_skips_their_unit,
        inner_modules_by_themselves_see_what_was_stepped,
        dropped_models_free_their_memory,
        parameters_that_were_sharded_are_freed_with_their_last_user,
        hooks_do_not_pile_up_on_inputs_that_stay,
        ties_that_would_be_lost_are_refused,
    ],
)


# Replicas ----------------------------------------------------------------------------------------


def sums_that_wait_for_replicas_are_not_lost_with_members_that_are_skipped() -> None:
    for apart in (False, True):
        chain, bare = Chain(), Chain()
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        for name in NAMES if apart else ():
            sharding.fully_shard(getattr(chain, name), mesh=mesh)
        model = sharding.fully_shard(chain, mesh=mesh)
        model.set_requires_all_reduce(False)
        mine(model).backward()
        model.set_requires_all_reduce(True)
        chain.skips_third = True
        mine(model).backward()
        average_loss(bare).backward()
        bare.skips_third = True
        average_loss(bare).backward()
        assert_gradients(model, bare, f"apart={apart}")


test_on_four_ranks = claims(
    4, [sums_that_wait_for_replicas_are_not_lost_with_members_that_are_skipped]
)


# Containers --------------------------------------------------------------------------------------


class Named(OrderedDict[str, torch.Tensor]):
    """A user's own kind of dict."""


@dataclasses.dataclass
class Both:
    """Fields that are items too, as outputs of some libraries have them."""

    value: torch.Tensor

    def __post_init__(self) -> None:
        self.items = {"value": self.value}


def test_casts_keep_kinds_of_containers_and_leave_the_callers_alone() -> None:
    one, low = torch.ones(2), torch.bfloat16
    both = cast_floating(low, Both(one))
    assert both.value.dtype == both.items["value"].dtype == low
    for given in (Named(a=one), defaultdict(list, a=one), {"a": one}):
        before = copy.copy(given)
        cast = cast_floating(low, given)
        assert type(cast) is type(given) and cast["a"].dtype == low
        assert given["a"] is before["a"] is one
