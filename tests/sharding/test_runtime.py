"""What happens around forward and backward, and between steps.

Method: small models on 2 or 4 real ranks, observed through what users see (gradients, dtypes,
shapes, errors), and through the gathers that a recording `Comm` counts; torch's engine or the
unsharded replica as reference.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import signal
import warnings
from collections import OrderedDict
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sharding import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from sharding.flat.param import FlatParam
from tests.ranks import RanksFailed, run_ranks
from tests.sharding.models import batches, block, build, engine, full, full_copies, uneven, wrapped

pytestmark = pytest.mark.ranks
Ours = FullyShardedDataParallel
ENGINES = ("torch", "ours")


def stores(model: Any) -> list[FlatParam]:
    return [unit.fsdp_unit.store for unit in Ours.fsdp_modules(model)]


# C1 ----------------------------------------------------------------------------------------------


def lazy_root() -> None:
    for wrap in map(engine, ENGINES):
        model = uneven()
        model[1] = wrap(model[1], use_orig_params=True)
        model = wrap(model)
        with pytest.raises(ValueError, match="use_orig_params"):
            model(torch.ones(2, 6))
        model = uneven()
        model[1] = wrap(model[1])
        model = wrap(model)
        with wrap.summon_full_params(model.module[1]):
            pass
        with pytest.raises(AssertionError):
            model(torch.ones(2, 6))
        model = uneven()
        model[1] = wrap(model[1])
        model = wrap(model)
        assert model.check_is_root() and not model.module[1].check_is_root()
        assert model.fsdp_modules(model, root_only=True) == [model]


def test_the_root_is_found_at_the_first_forward() -> None:
    run_ranks(2, lazy_root)


# C3, C6 ------------------------------------------------------------------------------------------


def counted(**kwargs: Any) -> list[str]:
    """Gathers (g0, g1, ...) and computations (f1, b1) of one step, in order, by unit."""
    model = Ours(
        nn.Sequential(block(6, 5, 4), block(4, 5, 4), block(4, 3, 2)),
        auto_wrap_policy=ModuleWrapPolicy([nn.Sequential]),
        **kwargs,
    )
    log: list[str] = []
    units = Ours.fsdp_modules(model)
    for number, unit in enumerate(units):
        store = unit.fsdp_unit.store
        if store is None:
            continue
        gather = store.comm.all_gather

        def recorded(*args: Any, gather: Any = gather, n: int = number, **kwargs: Any) -> Any:
            log.append(f"g{n}")
            return gather(*args, **kwargs)

        store.comm.all_gather = recorded  # type: ignore[method-assign]
        unit.module.register_forward_pre_hook(lambda m, a, n=number: log.append(f"f{n}"))
        unit.module[0].register_full_backward_hook(lambda m, g, o, n=number: log.append(f"b{n}"))
    x = torch.ones(2, 6, requires_grad=True)
    model(x).sum().backward()
    log.append("|")
    model(x).sum().backward()
    return log


def prefetch_order() -> dict[str, str]:
    orders = {}
    for name, backward in (
        ("pre", BackwardPrefetch.BACKWARD_PRE),
        ("post", BackwardPrefetch.BACKWARD_POST),
        ("none", None),
    ):
        orders[name] = " ".join(counted(backward_prefetch=backward))
    orders["forward"] = " ".join(counted(forward_prefetch=True, backward_prefetch=None))
    orders["kept"] = " ".join(counted(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))
    return orders


def test_gathers_come_when_the_strategy_and_the_prefetch_say() -> None:
    orders = run_ranks(2, prefetch_order)[0]
    step = "g1 f1 g2 f2 g3 f3 "
    assert orders["none"].startswith(step + "g3 b3 g2 b2 g1 b1 | ")
    assert orders["pre"].startswith(step + "g3 g2 b3 g1 b2 b1 | ")
    assert orders["post"].startswith(step + "g3 b3 g2 b2 g1 b1 | ")
    assert orders["kept"].startswith(step + "b3 b2 b1 | ")
    assert orders["forward"].endswith("| g1 g2 f1 g3 f2 f3 g3 b3 g2 b2 g1 b1")


def kept_in_no_sync() -> None:
    """What is not sharded is taken again for nothing: its copy in low precision is not kept."""
    low = MixedPrecision(param_dtype=torch.bfloat16)
    cases = (("FULL_SHARD", False, None), ("SHARD_GRAD_OP", True, None), ("NO_SHARD", False, low))
    for strategy, kept, precision in cases:
        how: Any = {"sharding_strategy": ShardingStrategy[strategy], "mixed_precision": precision}
        model = wrapped("ours", uneven(), **how)
        with model.no_sync():
            model(torch.ones(2, 6)).sum().backward()
            assert all((store.gathered_nbytes > 0) is kept for store in stores(model))
        model(torch.ones(2, 6)).sum().backward()
        assert all(store.gathered_nbytes == 0 for store in stores(model))


def test_parameters_stay_gathered_in_no_sync_where_the_strategy_keeps_them() -> None:
    run_ranks(2, kept_in_no_sync)


# C4, C5 ------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass
class Record:
    a: torch.Tensor
    b: Any


class Outputs(nn.Module):
    """Returns the outputs of two layers in a container of the wanted kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(6, 3), nn.Linear(6, 3), kind

    def forward(self, x: torch.Tensor) -> Any:
        a, b = self.first(x), self.second(x)
        if self.kind == "dict":
            return {"a": a, "b": [b, 3]}
        if self.kind == "ordered":
            return OrderedDict(a=a, b=(b, None))
        if self.kind == "named":
            return Pair(a, b)
        return Record(a, {"b": b})


def nested_outputs() -> None:
    for kind in ("dict", "ordered", "named", "record"):
        torch.manual_seed(0)
        plain = Outputs(kind)
        for name in ENGINES:
            torch.manual_seed(0)
            wrap = engine(name)
            model = wrap(nn.Sequential(wrap(Outputs(kind))))
            out = model(torch.ones(2, 6))
            first = out["a"] if isinstance(out, dict) else out.a
            first.sum().backward()  # the other output is not used
            if name == "ours":
                assert all(s is None or s.gathered_nbytes == 0 for s in stores(model))
            plain.zero_grad()
            out = plain(torch.ones(2, 6))
            (out["a"] if isinstance(out, dict) else out.a).sum().backward()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            before = full_copies(model)
            optimizer.step()
            after = full_copies(model)
            for key, param in plain.named_parameters():
                wanted = 0.0 if param.grad is None else param.grad
                torch.testing.assert_close(
                    before[f"0.{key}"] - after[f"0.{key}"], wanted + torch.zeros_like(param)
                )


def test_gradients_come_back_through_containers_and_unused_outputs() -> None:
    run_ranks(2, nested_outputs)


def frozen_units() -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        model = wrapped("ours", build("frozen"), sharding_strategy=ShardingStrategy[strategy])
        inner = model.module[1].fsdp_unit.store
        freed: list[int] = []
        model.module[0].register_full_backward_hook(
            lambda m, g, o, freed=freed, inner=inner: freed.append(inner.gathered_nbytes)
        )
        model(torch.ones(2, 6, requires_grad=True)).sum().backward()
        assert freed == [0]  # freed as soon as its inputs have gradients
        assert inner.grad is None and inner.gathered_nbytes == 0


def test_frozen_units_are_freed_without_reducing() -> None:
    run_ranks(2, frozen_units)


class Branches(nn.Module):
    """Three units: the loss needs the first, only passes through the second, and not the third."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.used, self.passed, self.unused = (wrap(Passing()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.used(x)[0]
        return self.passed(x)[1], self.unused(x)[0]


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x * 2


def not_reached() -> None:
    for strategy, orig in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP"), (False, True)):

        def wrap(module: nn.Module, strategy: str = strategy, orig: bool = orig) -> Any:
            return Ours(module, use_orig_params=orig, sharding_strategy=ShardingStrategy[strategy])

        model = wrap(Branches(wrap))
        model(torch.ones(2, 6))[0].sum().backward()
        used, *others = [store for store in stores(model) if store is not None]
        assert used.grad is not None and all(store.grad is None for store in others)
        assert all(store.gathered_nbytes == 0 for store in (used, *others))


def test_units_that_the_loss_does_not_need_are_freed() -> None:
    run_ranks(2, not_reached)


def frozen_between_steps() -> None:
    for strategy, name in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), ENGINES):
        model = wrapped(
            name,
            build("uneven"),
            use_orig_params=True,
            sharding_strategy=ShardingStrategy[strategy],
        )
        plain = build("uneven")
        models = (model, plain)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        for step, (whole, mine) in enumerate(batches(4)):
            for each in models:
                list(each.parameters())[2].requires_grad_(step not in (1, 2))
            model(mine).square().mean().backward()
            plain(whole).square().mean().backward()
            assert (list(model.parameters())[2].grad is None) or step not in (1, 2)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        values = full_copies(model)
        for key, param in plain.named_parameters():
            torch.testing.assert_close(values[key], param.detach(), msg=f"{name} {strategy} {key}")


def test_original_parameters_can_be_frozen_and_thawed_between_steps() -> None:
    run_ranks(2, frozen_between_steps)


# C9 to C13 ---------------------------------------------------------------------------------------


def precisions() -> None:
    low, full_precision = torch.bfloat16, torch.float32
    for param, reduce in ((low, None), (None, low), (low, full_precision), (full_precision, low)):
        results = []
        for name in ENGINES:
            model = wrapped(
                name,
                build("uneven"),
                mixed_precision=MixedPrecision(param_dtype=param, reduce_dtype=reduce),
                use_orig_params=True,
            )
            _, mine = next(batches(1))
            out = model(mine)
            assert out.dtype == (param or full_precision)
            out.float().square().sum().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(g.dtype == full_precision for g in grads)
            results.append([out, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (param, reduce)


def test_dtypes_of_outputs_and_gradients_equal_torch() -> None:
    run_ranks(2, precisions)


class Inputs(nn.Module):
    """Remembers the dtypes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        self.seen = [x.dtype, *(t.dtype for t in (extra or ()))]
        return self.layer(x.to(self.layer.weight.dtype))


def input_casts() -> None:
    low = torch.bfloat16
    for root_casts in (True, False):
        for inner_casts in (True, False):
            inner, outer = Inputs(), Inputs()

            class Both(nn.Module):
                def __init__(self, outer: Any, inner: Any) -> None:
                    super().__init__()
                    self.outer, self.inner = outer, inner

                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    extra = [torch.ones(2), torch.ones(2, dtype=torch.long)]
                    return self.inner(self.outer(x, extra).float(), extra)

            wrapped_inner = Ours(
                inner,
                mixed_precision=MixedPrecision(param_dtype=low, cast_forward_inputs=inner_casts),
            )
            model = Ours(
                Both(outer, wrapped_inner),
                mixed_precision=MixedPrecision(
                    param_dtype=low, cast_root_forward_inputs=root_casts
                ),
            )
            model(torch.ones(2, 6)).sum().backward()
            assert outer.seen == [low if root_casts else torch.float32, torch.float32, torch.long]
            wanted = low if inner_casts else torch.float32
            assert inner.seen == [wanted, wanted, torch.long]


def test_inputs_are_cast_by_the_root_and_by_units_as_configured() -> None:
    run_ranks(2, input_casts)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def buffer_casts() -> None:
    for name in ENGINES:
        wrap = engine(name)
        inner = wrap(Buffered(), mixed_precision=MixedPrecision(buffer_dtype=torch.float16))
        left_alone = Buffered()
        model: Any = nn.Sequential(Buffered(), inner, left_alone)
        model = wrap(
            model,
            mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
            ignored_modules=[left_alone],
        )
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
            assert model.module[0].scale.dtype == torch.bfloat16
            assert inner.module.scale.dtype == torch.float16
            assert left_alone.scale.dtype == torch.float32
            assert model.module[0].count.dtype == torch.long


def test_buffers_are_cast_once_as_their_own_unit_says() -> None:
    run_ranks(2, buffer_casts)


def low_gradients() -> None:
    low = torch.bfloat16
    precision = MixedPrecision(param_dtype=low, reduce_dtype=low, keep_low_precision_grads=True)
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        for orig in (False, True):
            model = wrapped(
                "ours",
                uneven(),
                mixed_precision=precision,
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
            )
            for _ in range(2):  # a second time: added up in full precision first
                model(torch.ones(2, 6)).float().sum().backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                assert grads and all(grad.dtype == low for grad in grads)


def test_low_precision_gradients_are_kept_in_the_dtype_of_reductions() -> None:
    run_ranks(2, low_gradients)


# C13 ---------------------------------------------------------------------------------------------


def full_precision_in_eval() -> None:
    low = torch.bfloat16
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    for name, orig in itertools.product(ENGINES, (False, True)):
        model = wrapped(
            name,
            nn.Sequential(nn.Linear(6, 6), nn.Sequential(Buffered())),
            use_orig_params=orig,
            mixed_precision=MixedPrecision(param_dtype=low, buffer_dtype=low),
        )
        seen = []
        for training in (True, False, False, True):
            out = model.train(training)(torch.ones(2, 6))
            seen.append((out.dtype, model.module[1].module[0].scale.dtype))
            if training:
                out.sum().backward()
            if training and name == "ours":  # torch leaves them in low precision there
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                assert grads and all(grad.dtype == torch.float32 for grad in grads)
        full_too = (torch.float32, torch.float32)
        assert seen == [(low, low), full_too, full_too, (low, low)], name
    mixed = uneven()
    mixed[1] = Ours(mixed[1])
    del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    with pytest.raises(ValueError, match="evaluates_in_full_precision"):
        Ours(mixed)(torch.ones(2, 6))


def test_evaluation_can_be_in_full_precision() -> None:
    run_ranks(2, full_precision_in_eval)


# C14 ---------------------------------------------------------------------------------------------


def no_sync_rules() -> None:
    for name in ENGINES:
        model = wrapped(name, uneven())
        model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(RuntimeError), model.module[1].no_sync():
            pass
        with pytest.raises(KeyError), model.no_sync():
            raise KeyError
        if name == "ours":
            assert all(unit.fsdp_unit.syncs_gradients for unit in Ours.fsdp_modules(model))
        caught: list[Exception | None] = []
        model.module[0].register_forward_hook(
            lambda m, a, o, model=model, caught=caught: caught.append(attempt(model))
        )
        model(torch.ones(2, 6))
        assert isinstance(caught[0], ValueError)


def attempt(model: Any) -> Exception | None:
    try:
        with model.no_sync():
            return None
    except ValueError as error:
        return error


def test_no_sync_is_for_the_idle_root() -> None:
    run_ranks(2, no_sync_rules)


# C18, C19 ----------------------------------------------------------------------------------------


def hooks() -> None:
    calls: list[Any] = []

    def sharded(state: Any, full_grad: torch.Tensor, out: torch.Tensor) -> None:
        calls.append((state, full_grad.numel(), out.numel()))
        dist.all_reduce(full_grad)
        out.copy_(full_grad.chunk(2)[dist.get_rank()] / 2)

    model = wrapped("ours", uneven())
    reference = wrapped("ours", uneven_like(model))
    model.register_comm_hook("state", sharded)
    for each in (model, reference):
        each(torch.ones(2, 6) * (dist.get_rank() + 1)).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    padded = [store.layout.padded_numel for store in stores(model)]
    assert [call[0] for call in calls] == ["state", "state"]
    assert sorted((full, out) for _, full, out in calls) == sorted((n, n // 2) for n in padded)
    with pytest.raises(AssertionError, match="already"):
        model.register_comm_hook(None, sharded)
    with pytest.raises(AssertionError, match="root"):
        model.module[1].register_comm_hook(None, sharded)
    with pytest.raises(ValueError, match="callable"):
        reference.register_comm_hook(None, 3)


def uneven_like(model: Any) -> Any:
    copy = uneven()
    values = full_copies(model)
    for name, param in copy.named_parameters():
        param.data.copy_(values[name])
    model_root = Ours.fsdp_modules(model)
    for unit in model_root:
        unit.fsdp_unit.runtime = None
    return copy


def hooks_and_hybrid() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    model = uneven()
    model[1] = Ours(model[1], device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    model = Ours(model)
    with pytest.raises(AssertionError, match="hybrid"):
        model.register_comm_hook(None, lambda state, grad: None)
    assert all(unit.fsdp_unit.reduction.hook is None for unit in Ours.fsdp_modules(model))


def test_a_communication_hook_replaces_the_reduction() -> None:
    run_ranks(2, hooks)


def test_hooks_are_registered_everywhere_or_nowhere() -> None:
    run_ranks(4, hooks_and_hybrid)


# C21, C22 ----------------------------------------------------------------------------------------


def clipped() -> None:
    for wrap, kind, orig in itertools.product(
        map(engine, ENGINES), (1.0, 2.0, math.inf), (False, True)
    ):
        plain, model = build("uneven"), build("uneven")
        left_alone = model[0]
        inner = ShardingStrategy.NO_SHARD if kind == 1.0 else ShardingStrategy.FULL_SHARD
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model[1] = wrap(model[1], use_orig_params=orig, sharding_strategy=inner)
        model = wrap(model, use_orig_params=orig, ignored_modules=[left_alone])
        whole, _ = next(batches(1))
        for each in (plain, model):  # the same data everywhere: ignored ones are not reduced
            each(whole).square().mean().backward()
        norm = model.clip_grad_norm_(0.05, kind)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, kind)
        torch.testing.assert_close(norm, wanted)
        before = full_copies(model)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        after = full_copies(model)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(before[name] - after[name], param.grad)


def test_clipping_equals_the_unsharded_model() -> None:
    run_ranks(2, clipped)


def clip_details() -> None:
    model = Ours(nn.Linear(6, 1, bias=False), use_orig_params=True)
    inner = wrapped("ours", uneven())
    inner.check_is_root()
    with pytest.raises(RuntimeError, match="outermost"):
        inner.module[1].clip_grad_norm_(1.0)
    for _ in range(2):
        with pytest.warns(UserWarning, match="no gradients"):
            assert model.clip_grad_norm_(1.0, math.inf) == 0.0
        if dist.get_rank() == 0:
            for param in model.parameters():
                param.grad = torch.full_like(param, 4.0)
            assert model.clip_grad_norm_(1.0, math.inf) == 4.0
            model.zero_grad()
        else:
            with pytest.warns(UserWarning, match="no gradients"):
                assert model.clip_grad_norm_(1.0, math.inf) == 4.0


def test_clipping_without_gradients_and_again() -> None:
    run_ranks(2, clip_details)


def mixed_clipping() -> None:
    low = torch.bfloat16
    keeps = MixedPrecision(param_dtype=low, reduce_dtype=low, keep_low_precision_grads=True)
    _, mine = next(batches(1))
    for orig in (False, True):
        # Sharded gradients in bfloat16 beside unmanaged ones in float32: the promoted dtype.
        bare = build("uneven")
        left_alone = bare[2]
        model = wrapped(
            "ours",
            bare,
            use_orig_params=orig,
            mixed_precision=keeps,
            ignored_modules=[left_alone],
        )
        left_alone.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        model(mine).square().mean().backward()
        assert model.clip_grad_norm_(1.0).dtype == torch.float32
        # All of one low dtype.
        model = wrapped("ours", build("uneven"), use_orig_params=orig, mixed_precision=keeps)
        model(mine).float().square().mean().backward()
        assert model.clip_grad_norm_(1.0).dtype == low
        # Several among the sharded ones.
        bare = build("uneven")
        casts = dataclasses.replace(keeps, cast_forward_inputs=True)
        bare[1] = Ours(bare[1], use_orig_params=orig, mixed_precision=casts)
        bare[1].register_forward_hook(lambda module, args, out: out.float())
        model = Ours(bare, use_orig_params=orig)
        model(mine).float().square().mean().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert {grad.dtype for grad in grads} == {torch.float32, low}
        square = sum((grad.float() ** 2).sum() for grad in grads)
        assert isinstance(square, torch.Tensor)
        dist.all_reduce(square)
        norm = model.clip_grad_norm_(1e-3)
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, square.sqrt())


def double_clipping() -> None:
    bare = build("uneven").double()
    _, mine = next(batches(1))
    for orig in (False, True):
        model = wrapped("ours", copy.deepcopy(bare), use_orig_params=orig)
        plain = copy.deepcopy(bare)
        for one in (model, plain):  # the same on all ranks, so that the mean is every rank's own
            one(torch.ones_like(mine).double()).square().mean().backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        norm = model.clip_grad_norm_(1e-3)
        assert norm.dtype == torch.float64
        torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0.0)


def test_clipping_takes_gradients_in_float64() -> None:
    run_ranks(2, double_clipping)


def test_clipping_promotes_dtypes_and_takes_a_mixture() -> None:
    run_ranks(2, mixed_clipping)


# C23 to C29 --------------------------------------------------------------------------------------


def summoned_without_gradients() -> None:
    # Rank 0 has 18 of the 28 elements of the frozen weight, and nothing of the bias.
    model = nn.Linear(4, 7)
    model.weight.requires_grad_(False)
    model = Ours(model, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 4)).square().mean().backward()
        with Ours.summon_full_params(model, with_grads=True):
            assert model.bias.grad is not None
        optimizer.zero_grad()
        with Ours.summon_full_params(model, with_grads=True):
            assert model.bias.grad is None
        assert all(param.grad is None for param in model.parameters())


def test_summoning_shows_no_gradients_where_a_rank_has_only_frozen_members() -> None:
    run_ranks(2, summoned_without_gradients)


def summoned_on_the_first_rank() -> None:
    for name in ENGINES:
        strategy = ShardingStrategy.NO_SHARD
        model = wrapped(name, uneven(), use_orig_params=False, sharding_strategy=strategy)
        with engine(name).summon_full_params(model, writeback=False, rank0_only=True):
            names = [bare for bare, _ in model.named_parameters()]
        is_flat = [bare.endswith("_flat_param") for bare in names]
        assert is_flat and all(flat == bool(dist.get_rank()) for flat in is_flat), (name, names)
        assert all(bare.endswith("_flat_param") for bare, _ in model.named_parameters())


def test_summoning_on_the_first_rank_leaves_flat_parameters_of_others_also_unsharded() -> None:
    run_ranks(2, summoned_on_the_first_rank)


def summoned() -> None:
    for name in ENGINES:
        wrap = engine(name)
        summon = wrap.summon_full_params
        for orig in (False, True):
            model = wrapped(name, uneven(), use_orig_params=orig)
            with summon(model):
                for param in model.parameters():
                    param.data.fill_(3.0)
            with summon(model, writeback=False):
                assert all(bool((p == 3.0).all()) for p in model.parameters())
                assert next(tuple(p.shape) for p in model.parameters()) == (7, 6)
                for param in model.parameters():
                    param.data.fill_(5.0)
            with summon(nn.ModuleList([model]), recurse=True):
                assert all(bool((p == 3.0).all()) for p in model.parameters())
            with summon(model, recurse=False):
                shapes = [tuple(p.shape) for p in model.parameters()]
                assert (7, 6) in shapes and (5, 7) not in shapes
            with summon(nn.ModuleList([model]), recurse=False):
                assert (7, 6) not in [tuple(p.shape) for p in model.parameters()]


def test_full_parameters_are_written_back_or_discarded() -> None:
    run_ranks(2, summoned)


def summon_errors() -> None:
    model = wrapped("ours", uneven())
    whole = wrapped("ours", uneven(), sharding_strategy=ShardingStrategy.NO_SHARD)
    summon = Ours.summon_full_params
    for module, bad in (
        (model, {"with_grads": True}),
        (model, {"with_grads": True, "offload_to_cpu": True}),
        (whole, {"offload_to_cpu": True}),
        (model, {"rank0_only": True}),
    ):
        with pytest.raises(NotImplementedError), summon(module, **bad):
            pass
    with pytest.raises(AssertionError), summon(model), summon(model):
        pass
    caught: list[Exception] = []

    def inside(module: nn.Module, args: Any) -> None:
        try:
            with summon(model):
                pass
        except AssertionError as error:
            caught.append(error)

    model.module[0].register_forward_pre_hook(inside)
    model(torch.ones(2, 6))
    assert len(caught) == 1
    with pytest.raises(RuntimeError, match="summon"), summon(model):
        model(torch.ones(2, 6))
    with summon(model, writeback=False, rank0_only=True):
        shapes = [tuple(p.shape) for p in model.parameters()]
        assert ((7, 6) in shapes) is (dist.get_rank() == 0)
    with (
        pytest.warns(UserWarning, match="rank0_only"),
        summon(model, writeback=False, offload_to_cpu=True),
    ):
        assert (7, 6) in [tuple(p.shape) for p in model.parameters()]


def test_summoning_refuses_what_cannot_be() -> None:
    run_ranks(2, summon_errors)


def summoned_on_the_host() -> None:
    wanted = dict(build("uneven").named_parameters())
    for orig, rank0_only in itertools.product((False, True), (False, True)):
        model = wrapped("ours", build("uneven"), use_orig_params=orig)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Ours.summon_full_params(
                model, writeback=False, rank0_only=rank0_only, offload_to_cpu=True
            ):
                shown = dict(model.named_parameters())
                if dist.get_rank() == 0 or not rank0_only:
                    assert all(torch.equal(shown[name], value) for name, value in wanted.items())
                    for param in shown.values():
                        param.data.fill_(7.0)  # discarded
            if not rank0_only:
                with Ours.summon_full_params(model, offload_to_cpu=True):
                    dict(model.named_parameters())["1.0.bias"].data.fill_(3.0)
        values = full_copies(model)
        changed = dict(wanted)
        if not rank0_only:
            changed["1.0.bias"] = torch.full((5,), 3.0)
        assert all(torch.equal(values[name], value) for name, value in changed.items())
        model(torch.ones(2, 6)).sum().backward()


def test_full_parameters_on_the_host_have_the_values_and_leave_shards_intact() -> None:
    run_ranks(2, summoned_on_the_host)


def summoned_gradients() -> None:
    for name in ENGINES:
        summon = engine(name).summon_full_params
        model = wrapped(name, build("uneven"), use_orig_params=True)
        plain = build("uneven")
        whole, mine = next(batches(1))
        with summon(model, with_grads=True):
            assert all(p.grad is None for p in model.parameters())
        model(mine).square().mean().backward()
        plain(whole).square().mean().backward()
        with summon(model, with_grads=True):
            for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(param.grad, wanted.grad)
                param.grad.fill_(2.0)
        held = [p.grad for p in model.parameters() if p.numel()]
        assert all(bool((grad == 2.0).all()) for grad in held)


def test_gradients_can_be_summoned_and_edited() -> None:
    run_ranks(2, summoned_gradients)


def applied() -> None:
    for name in ENGINES:
        for orig in (False, True):
            model = wrapped(name, uneven(), use_orig_params=orig)

            @torch.no_grad()
            def fill(module: nn.Module) -> None:
                if isinstance(module, nn.Linear):
                    assert module.weight.dim() == 2
                    module.weight.fill_(2.0)

            model.module[1].apply(fill)
            model.apply(fill)
            params = full_copies(model)
            assert all(bool((v == 2.0).all()) for n, v in params.items() if "weight" in n)
            model(torch.ones(2, 6)).sum().backward()


def test_apply_sees_full_parameters_and_makes_no_root() -> None:
    run_ranks(2, applied)


def names() -> None:
    for name in ENGINES:
        model = wrapped(name, build("recomputed"))
        assert "_fsdp_wrapped_module._flat_param" in dict(model.named_parameters())
        with engine(name).summon_full_params(model):
            inside = [key for key, _ in model.named_parameters()]
        wanted = [key for key, _ in uneven().named_parameters()]
        assert [key.replace("_checkpoint_wrapped_module.", "") for key in inside] == wanted
        assert isinstance(model.module, nn.Sequential)
        assert isinstance(model[0], nn.Linear)
        inner = model.module[1]
        assert isinstance(inner.module, nn.Sequential)
        assert isinstance(inner[2], nn.Linear)


def test_names_and_lookups_see_through_wrappers() -> None:
    run_ranks(2, names)


# C31 ---------------------------------------------------------------------------------------------


def twice_differentiated() -> None:
    for name in ENGINES:
        model = wrapped(name, uneven())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError):
                model(torch.ones(2, 6)).square().sum().backward(create_graph=True)
    # A new step starts from there.
    model = wrapped("ours", build("uneven"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 6)).square().sum().backward(create_graph=True)
    model.zero_grad()
    model(torch.ones(2, 6)).square().sum().backward()
    assert all(store.gathered_nbytes == 0 for store in stores(model))


def test_gradients_of_gradients_are_refused() -> None:
    run_ranks(2, twice_differentiated)


def stepped_after_a_forward() -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for orig in (False, True):
            model = wrapped(
                "ours",
                build("uneven"),
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
            )
            model(torch.ones(2, 6))  # with gradients, and no backward: parameters may stay gathered
            for store in stores(model):
                store.reshard() if orig else None
                with torch.no_grad():
                    for param in store.shown_params:
                        param.fill_(0.5)
            with torch.no_grad():
                out = model(torch.ones(2, 6))
            plain = build("uneven")
            for param in plain.parameters():
                param.data.fill_(0.5)
            torch.testing.assert_close(out, plain(torch.ones(2, 6)).detach())


def test_a_forward_sees_what_was_stepped_since_the_last_one() -> None:
    run_ranks(2, stepped_after_a_forward)


def fails_in_forward() -> None:
    model = wrapped("ours", build("uneven"))
    handle = model.module[1].module[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(torch.ones(2, 6))
    handle.remove()
    model(torch.ones(2, 6)).sum().backward()
    assert all(store.gathered_nbytes == 0 for store in stores(model))


def fail(module: nn.Module, args: Any) -> None:
    raise KeyError("planted")


def test_a_forward_that_raised_can_be_repeated() -> None:
    run_ranks(2, fails_in_forward)


def dies() -> None:
    model = wrapped("ours", build("uneven"))
    if dist.get_rank() == 1:
        os._exit(3)
    model(torch.ones(2, 6))


def test_a_dead_rank_surfaces_on_the_others() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, dies, timeout_seconds=20)
    assert 0 in caught.value.errors


def killed(moment: str) -> None:
    """Rank 1 is killed; the others notice in a collective of ours, long before their deadline."""
    model = wrapped("ours", build("uneven"))
    if moment == "between steps":
        model(torch.ones(2, 6)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 1:
        if moment == "in the forward":
            model.module[0].register_forward_hook(lambda m, a, o: kill())
        elif moment == "in the backward":
            model.module[1].module[0].register_full_backward_hook(lambda m, g, o: kill())
        else:
            kill()
    with pytest.raises(RuntimeError):
        for _ in range(3):
            model(torch.ones(2, 6, requires_grad=True)).sum().backward()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["between steps", "in the forward", "in the backward"])
def test_a_killed_rank_surfaces_on_all_others(moment: str) -> None:
    run_ranks(3, killed, moment, timeout_seconds=30, allow_dead=[1])


def hangs(folder: str) -> None:
    """Rank 1 lives, and does not take part: the group's timeout ends the others' waiting."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/again",
        rank=int(os.environ["RANK"]),
        world_size=2,
        timeout=timedelta(seconds=2),
    )
    model = wrapped("ours", build("uneven"))
    if dist.get_rank() == 1:
        with suppress(Exception):  # the other one leaves: that is what it waits for
            dist.recv(torch.empty(1), src=0)
        return
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 6))


def test_a_rank_that_does_not_take_part_ends_in_the_groups_timeout(tmp_path: Path) -> None:
    run_ranks(2, hangs, str(tmp_path), timeout_seconds=30, allow_dead=[0])


def stepped_inside() -> None:
    """Optimizers that step inside the backward, by hooks on original parameters."""

    def step(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.data.add_(param.grad, alpha=-0.1)
        param.grad = None

    model = wrapped("ours", build("uneven"), use_orig_params=True)
    plain = build("uneven")
    for each in (model, plain):
        for param in each.parameters():
            param.register_post_accumulate_grad_hook(step)
    for whole, mine in batches(3):
        model(mine).square().mean().backward()
        plain(whole).square().mean().backward()
    with full(model) as params:
        for name, param in plain.named_parameters():
            torch.testing.assert_close(params[name], param)


def stepped_by_torch() -> None:
    """The same by torch's own function for it, called before or after wrapping."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its package warns about itself
        from torch.distributed.optim import _apply_optimizer_in_backward as attach
    for name, first in (("torch", True), ("ours", True), ("ours", False)):
        bare, plain = build("uneven"), build("uneven")
        if first:
            attach(torch.optim.SGD, bare.parameters(), {"lr": 0.1})
        model = wrapped(name, bare, use_orig_params=True)
        if not first:
            attach(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for whole, mine in batches(3):
            model(mine).square().mean().backward()
            assert all(param.grad is None for param in model.parameters())
            plain(whole).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        values = full_copies(model)
        for key, param in plain.named_parameters():
            torch.testing.assert_close(values[key], param.detach(), msg=f"{name} {first} {key}")


def test_optimizers_that_torch_attaches_step_inside_the_backward() -> None:
    run_ranks(2, stepped_by_torch)


def test_optimizers_can_step_inside_the_backward() -> None:
    run_ranks(2, stepped_inside)
