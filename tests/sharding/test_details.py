"""The smaller parts: order of forwards, early gathers, the limiter, explanations.

Method: each part by itself where it needs no ranks, through the class where it does.
"""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

import sharding
from sharding import (
    CPUOffload,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from sharding.engine.streams import Streams
from sharding.engine.unit import Phase
from tests.ranks import run_ranks
from tests.sharding.models import Either, batches, build, full_copies, uneven, wrapped

Ours = FullyShardedDataParallel


# C20 ---------------------------------------------------------------------------------------------


def different_orders() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    for turned_later in (False, True):
        bare = Either()
        model = Ours(bare, auto_wrap_policy=ModuleWrapPolicy([nn.Linear]))
        if not turned_later:
            bare.turned = dist.get_rank() == 1
            with pytest.raises(RuntimeError, match=r"^Forward order differs.*rank 0.*rank 1"):
                model(torch.ones(2, 6))
            continue
        model(torch.ones(2, 6)).sum().backward()
        model(torch.ones(2, 6)).sum().backward()
        bare.turned = True
        changed = (
            "^Forward order differs from that of the first iteration on rank "
            f"{dist.get_rank()}: Linear with second.weight, second.bias instead of Linear with "
            "first.weight, first.bias"
        )
        with pytest.warns(UserWarning, match=changed) as caught:
            model(torch.ones(2, 6)).sum().backward()
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.ones(2, 6)).sum().backward()


def orders_that_differ_later() -> None:
    """Gathers of different units would wait for each other until the group's deadline."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    bare = Either()
    model = Ours(bare, auto_wrap_policy=ModuleWrapPolicy([nn.Linear]))
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    bare.turned = dist.get_rank() == 1
    names = "rank 0: Linear with first.weight, first.bias; rank 1: Linear with second.weight"
    for _ in range(2):  # the model is usable in between
        with pytest.raises(RuntimeError, match=f"^Forward order differs across ranks.*{names}"):
            model(torch.ones(2, 6)).sum().backward()
        bare.turned = False
        model(torch.ones(2, 6)).sum().backward()
        bare.turned = dist.get_rank() == 1


@pytest.mark.ranks
def test_orders_that_differ_later_name_both_units() -> None:
    run_ranks(2, orders_that_differ_later)


@pytest.mark.ranks
def test_different_orders_are_refused_at_first_and_warned_about_later() -> None:
    run_ranks(2, different_orders)


def different_orders_across_replicas() -> None:
    """Shard groups are (0, 1) and (2, 3): inside each of them ranks agree."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    bare = Either()
    bare.turned = dist.get_rank() >= 2
    model = Ours(
        bare,
        auto_wrap_policy=ModuleWrapPolicy([nn.Linear]),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    )
    with pytest.raises(RuntimeError, match="different units") as caught:
        model(torch.ones(2, 6))
    assert all(f"rank {rank}: " in str(caught.value) for rank in range(4)), caught.value


@pytest.mark.ranks
def test_different_orders_are_refused_where_only_replicas_differ() -> None:
    run_ranks(4, different_orders_across_replicas)


# C30 ---------------------------------------------------------------------------------------------


def early() -> None:
    model = wrapped("ours", build("uneven"))
    model.check_is_root()
    inner = model.module[1]
    store = inner.fsdp_unit.store
    gathers: list[int] = []
    gather = store.comm.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        gathers.append(1)
        return gather(*args, **kwargs)

    store.comm.all_gather = counted
    handle = inner._unshard(async_op=True)
    handle.wait()
    handle.wait()
    with torch.no_grad():
        model(torch.ones(2, 6))
    assert len(gathers) == 1
    assert inner._unshard() is None and len(gathers) == 2


@pytest.mark.ranks
def test_an_early_gather_saves_the_forwards_own() -> None:
    run_ranks(2, early)


# C7 ----------------------------------------------------------------------------------------------


class Counting(Streams):
    """A seam that counts what the limiter would do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def release_all(self) -> None:
        self.calls.append("limit")

    def give_back(self, memory: Any, *, limited: bool) -> None:
        super().give_back(memory, limited=limited)
        self.calls.append("kept back" if limited else "freed")


def limited() -> None:
    for limit in (True, False):
        model = wrapped("ours", build("uneven"), limit_all_gathers=limit)
        model.check_is_root()
        seam = Counting()
        for unit in Ours.fsdp_modules(model):
            unit.fsdp_unit.store.streams = seam
        model(torch.ones(2, 6)).sum().backward()
        # Two gathers in the forward, one again in the backward, early; each is freed.
        assert seam.calls.count("limit") == (1 if limit else 0)
        assert seam.calls.count("kept back") == (3 if limit else 0)
        assert seam.calls.count("freed") == (0 if limit else 3)


@pytest.mark.ranks
def test_the_limiter_counts_gathers_and_frees_or_is_off() -> None:
    run_ranks(2, limited)


# C16 ---------------------------------------------------------------------------------------------


def accumulated_with_offload() -> None:
    model = wrapped("ours", build("uneven"), cpu_offload=CPUOffload(True))
    plain = build("uneven")
    before = full_copies(model)
    for whole, mine in batches(2):
        model(mine).square().mean().backward()
        plain(whole).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = full_copies(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(before[name] - after[name], param.grad)


@pytest.mark.ranks
def test_gradients_add_up_with_offload_where_torchs_are_overwritten() -> None:
    run_ranks(2, accumulated_with_offload)


# C19 ---------------------------------------------------------------------------------------------


def compressed() -> None:
    for hook in (sharding.bf16_compress_hook, sharding.fp16_compress_hook):
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            model = wrapped(
                "ours",
                build("uneven"),
                use_orig_params=True,
                sharding_strategy=sharding.ShardingStrategy[strategy],
            )
            model.register_comm_hook(sharding.LowPrecisionState(), hook)
            plain = build("uneven")
            whole, mine = next(batches(1))
            model(mine).square().mean().backward()
            plain(whole).square().mean().backward()
            with Ours.summon_full_params(model, with_grads=True):
                for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                    assert param.grad.dtype == torch.float32
                    torch.testing.assert_close(param.grad, wanted.grad, rtol=0.02, atol=0.01)
                    assert not torch.equal(param.grad, wanted.grad)


@pytest.mark.ranks
def test_compressing_hooks_give_full_precision_gradients() -> None:
    run_ranks(2, compressed)


def torchs_own_hooks() -> None:
    whole, mine = next(batches(1))
    plain = build("uneven")
    plain(whole).square().mean().backward()
    for name, strategy in itertools.product(("torch", "ours"), ("FULL_SHARD", "NO_SHARD")):
        for kind in ("plain", "bf16", "fp16"):
            if name == "torch" and kind != "plain":
                continue  # they call a stream API there, which CPU tensors have not
            options = {"sharding_strategy": sharding.ShardingStrategy[strategy]}
            model = wrapped(name, build("uneven"), use_orig_params=True, **options)
            if kind == "plain":
                state: Any = default_hooks.DefaultState(dist.group.WORLD)
                hook = (
                    default_hooks.allreduce_hook
                    if strategy == "NO_SHARD"
                    else default_hooks.reduce_scatter_hook
                )
            else:
                state = default_hooks.LowPrecisionState(dist.group.WORLD)
                hook = getattr(default_hooks, f"{kind}_compress_hook")
            model.register_comm_hook(state, hook)
            model(mine).square().mean().backward()
            with type(model).summon_full_params(model, with_grads=True):
                for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                    assert param.grad.dtype == torch.float32
                    close = {} if kind == "plain" else {"rtol": 0.02, "atol": 0.01}
                    torch.testing.assert_close(param.grad, wanted.grad, **close)


@pytest.mark.ranks
def test_torchs_own_hooks_work_also_where_torchs_class_cannot_run_them() -> None:
    run_ranks(2, torchs_own_hooks)


# Scaling -----------------------------------------------------------------------------------------


def scaled() -> None:
    for orig in (False, True):
        model = wrapped("ours", build("uneven"), use_orig_params=orig)
        plain = build("uneven")
        scaler = sharding.ShardedGradScaler(device="cpu", init_scale=4.0)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for step, (whole, mine) in enumerate(batches(3)):
            scaler.scale(model(mine).square().mean()).backward()
            plain(whole).square().mean().backward()
            if step == 1 and dist.get_rank() == 0:  # on one rank only: all must skip
                next(p for p in model.parameters() if p.numel()).grad.fill_(torch.inf)
            scaler.step(optimizers[0])
            scaler.update()
            if step != 1:
                optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        values = full_copies(model)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(values[name], param.detach())


@pytest.mark.ranks
def test_the_scaler_skips_a_step_on_all_ranks_when_one_overflows() -> None:
    run_ranks(2, scaled)


# Pictures ----------------------------------------------------------------------------------------


def explained() -> tuple[str, str]:
    model = wrapped("ours", uneven(), use_orig_params=True)
    explanation = sharding.explain(model)
    root, inner = explanation.units
    assert root.gathered_nbytes == model.fsdp_unit.store.layout.padded_numel * 4
    assert [event.what for event in explanation.step if event.unit == 1] == [
        "gather", "forward", "free", "gather", "backward", "free", "reduce",
    ]  # fmt: skip
    assert explanation.step[-1].gathered_nbytes == 0
    assert inner.name == "1" and len(inner.members) == 4
    return str(explanation), explanation.html()


@pytest.mark.ranks
def test_a_model_can_be_explained() -> None:
    text, page = run_ranks(2, explained)[0]
    assert "0.weight (7, 6) at 0, " in text
    assert page.count("<tr>") == 3 and "<th>1</th>" in page
    assert_legend(page)


def recorded() -> tuple[list[str], str]:
    model = wrapped("ours", uneven(), use_orig_params=True, backward_prefetch=None)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        with torch.no_grad():  # no step
            model(torch.ones(2, 6))
    explanation = sharding.explain(model)
    inner = [noted.what for noted in explanation.recorded if noted.unit == 1]
    times = [noted.at_seconds for noted in explanation.recorded]
    assert times == sorted(times) and times[0] >= 0
    assert explanation.recorded[-1].what == "end"
    assert not sharding.explain(model.module[1]).recorded  # a part of what was recorded
    return inner, explanation.html()


@pytest.mark.ranks
def test_the_page_shows_the_step_that_was_made() -> None:
    inner, page = run_ranks(2, recorded)[0]
    assert inner == [
        "gather", "gathered", "forward", "forward end", "free",
        "gather", "gathered", "backward", "backward end", "free", "reduce",
    ]  # fmt: skip
    for what, count in {"gather": 3, "held": 3, "forward": 2, "backward": 2, "reduce": 2}.items():
        assert page.count(f'<i class="{what}"') == count
    assert "The last step of this rank" in page
    assert_legend(page)


def assert_legend(page: str) -> None:
    """Every color and letter on the page is explained, and none that is not there."""
    letters = dict(re.findall(r'<li><b class="(\w+)">([^<]?)</b>', page))
    drawn = re.findall(r'<td class="(\w+)" title="[^"]*">(.)</td>', page)
    assert all(letters[what] == letter for what, letter in drawn)
    assert len({letter for _, letter in drawn}) == len({what for what, _ in drawn})
    explained_ones = set(letters)
    assert explained_ones == set(re.findall(r'<(?:i|td) class="(\w+)"', page))
    for what in explained_ones:
        assert f".{what} {{" in page


# C30 ---------------------------------------------------------------------------------------------


def by_hand() -> None:
    model = wrapped("ours", build("uneven"))
    model.check_is_root()
    inner = model.module[1]
    with pytest.raises(KeyError), inner._use_training_state(Phase.FORWARD):
        with pytest.raises(AssertionError), Ours.summon_full_params(model):
            pass
        raise KeyError
    assert inner.fsdp_unit.phase is Phase.IDLE
    inner._unshard(async_op=True)
    model._wait_unshard_streams_on_current_stream()
    model(torch.ones(2, 6)).sum().backward()


@pytest.mark.ranks
def test_schedules_by_hand_have_their_helpers() -> None:
    run_ranks(2, by_hand)
