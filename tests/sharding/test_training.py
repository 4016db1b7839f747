"""Training gives what an unsharded model gives on all ranks' data together.

Method: some steps of small models under every strategy, parameter mode, dtype and kind of model, on
2 and 4 ranks, against what all ranks do, done in one process; and on 2 ranks, where every sum has
two terms, against torch's own engine bit for bit. The product is sampled; `--soak` takes all of it.
"""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks
from tests.sharding.fully_scenarios import loss_of, sgd
from tests.sharding.models import (
    Reentrant,
    batches,
    block,
    build,
    clean,
    engine,
    full_copies,
    uneven,
    wrapped,
)

pytestmark = pytest.mark.ranks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
ENGINES = ("torch", "ours")
STEPS = 4


def train(model: Any, *, steps: int = STEPS, clip: bool = False) -> list[float]:
    optimizer = sgd(model)
    losses = []
    for _, mine in batches(steps):
        loss = loss_of(model, mine)
        loss.backward()
        if clip:
            model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_reference(model: nn.Module, *, steps: int = STEPS) -> dict[str, torch.Tensor]:
    optimizer = sgd(model)
    for whole, _ in batches(steps):
        loss_of(model, whole).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {clean(name): param.detach() for name, param in model.named_parameters()}


class Case(NamedTuple):
    """One training: which model, how it is sharded, and the dtype that it computes in."""

    kind: str
    strategy: str
    orig: bool
    dtype: torch.dtype

    @property
    def makes_sense(self) -> bool:
        # Without original parameters a unit cannot mix; a batch norm wants a policy (see below).
        return (self.orig or self.kind != "partly_frozen") and (
            self.dtype is torch.float32 or self.kind != "batch_norm"
        )


KINDS = (
    "even", "uneven", "tied", "frozen", "partly_frozen", "convolution", "recomputed", "reentrant",
    "nested", "batch_norm",
)  # fmt: skip
SHARDED_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID_STRATEGIES = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
# Checkpointing changes no number; functional calls do not see through it.
PLAIN_KIND = {"recomputed": "uneven", "reentrant": "uneven"}


def train_emulated(kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What all ranks together do, in one process: each rank's gradients computed in `dtype` from
    its own batch and with its own buffers, their mean in float32.
    """
    model = build(PLAIN_KIND.get(kind, kind))
    world = dist.get_world_size()
    buffers = [{k: v.clone() for k, v in model.named_buffers()} for _ in range(world)]
    optimizer = sgd(model)
    for whole, _ in batches(STEPS):
        for rank, part in enumerate(whole.chunk(world)):
            params = {name: param.to(dtype) for name, param in model.named_parameters()}
            out = torch.func.functional_call(model, (params, buffers[rank]), (part.to(dtype),))
            (out.float().square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {clean(name): param.detach() for name, param in model.named_parameters()}


def compare_with_reference(cases: list[Case]) -> None:
    world = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, world // 2)) if world > 2 else None
    references: dict[Any, dict[str, torch.Tensor]] = {}
    for case in cases:
        options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[case.strategy]}
        if case.strategy in HYBRID_STRATEGIES:
            options["device_mesh"] = mesh
        if case.dtype is not torch.float32:
            options["mixed_precision"] = MixedPrecision(
                param_dtype=case.dtype, reduce_dtype=torch.float32
            )
        model = wrapped("ours", build(case.kind), use_orig_params=case.orig, **options)
        train(model)
        key = (case.kind, case.dtype)
        if key not in references:
            references[key] = train_emulated(*key)
        got = full_copies(model)
        assert list(got) == list(references[key]), case
        for name, value in got.items():
            torch.testing.assert_close(
                value, references[key][name], msg=lambda text, c=case, n=name: f"{c} {n}: {text}"
            )


@pytest.mark.parametrize("size", [2, 4])
def test_training_equals_the_unsharded_model(size: int, rng: random.Random, scale: Any) -> None:
    strategies = SHARDED_STRATEGIES if size == 2 else SHARDED_STRATEGIES + HYBRID_STRATEGIES
    dtypes = (torch.float32, torch.bfloat16)
    every = [Case(*case) for case in itertools.product(KINDS, strategies, (False, True), dtypes)]
    cases = [case for case in every if case.makes_sense]
    # Every kind and every strategy is in the sample.
    chosen = [rng.choice([c for c in cases if c.kind == kind]) for kind in KINDS]
    chosen += [rng.choice([c for c in cases if c.strategy == one]) for one in strategies]
    chosen += rng.sample(cases, scale.count(16, len(cases)))
    run_ranks(size, compare_with_reference, chosen, timeout_seconds=scale.count(60, 300))


def batch_norms() -> None:
    """With a policy, in low precision: units of their own, bit for bit as torch's engine."""
    for low in (False, True):
        precision = MixedPrecision(param_dtype=torch.bfloat16 if low else None)
        results = []
        for name in ("torch", "ours"):
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = engine(name)(
                    build("batch_norm"),
                    auto_wrap_policy=ModuleWrapPolicy([nn.Linear]),
                    mixed_precision=precision,
                )
            train(model)
            results.append([*full_copies(model).values(), *model.buffers()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_batch_norm_models_equal_torch_bit_for_bit() -> None:
    run_ranks(2, batch_norms)


def compare_with_torch(kinds: list[str]) -> None:
    for kind, strategy, orig in itertools.product(kinds, STRATEGIES, (False, True)):
        results = []
        for name in ("torch", "ours"):
            model = wrapped(
                name,
                build(kind),
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
            )
            losses = train(model)
            results.append((losses, full_copies(model)))
        (theirs, their_values), (ours, our_values) = results
        assert ours == theirs, f"{kind} {strategy} {orig}"
        for name, value in our_values.items():
            assert torch.equal(value, their_values[name]), f"{kind} {strategy} {orig} {name}"


def test_two_ranks_equal_torch_bit_for_bit() -> None:
    run_ranks(
        2,
        compare_with_torch,
        ["even", "uneven", "tied", "frozen", "recomputed", "nested", "batch_norm"],
    )


def compare_low_precision() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for strategy, orig in itertools.product(STRATEGIES, (False, True)):
        results = []
        for name in ("torch", "ours"):
            model = wrapped(
                name,
                build("uneven"),
                use_orig_params=orig,
                mixed_precision=precision,
                sharding_strategy=ShardingStrategy[strategy],
            )
            losses = train(model)
            assert all(p.dtype == torch.float32 for p in model.parameters() if p.numel())
            results.append((losses, full_copies(model)))
        assert results[0][0] == results[1][0], f"{strategy} {orig}"
        for key, value in results[1][1].items():
            assert torch.equal(value, results[0][1][key]), f"{strategy} {orig} {key}"


def test_bfloat16_compute_equals_torch_bit_for_bit() -> None:
    run_ranks(2, compare_low_precision)


def train_hybrid() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    reference = train_reference(build("uneven"))
    for strategy, orig in itertools.product(("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"), (False, True)):
        by_group: dict[str, Any] = {"process_group": (mesh.get_group("s"), mesh.get_group("r"))}
        for how in (by_group, {"device_mesh": mesh}):
            model = wrapped(
                "ours",
                build("uneven"),
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
                **how,
            )
            train(model)
            for name, value in full_copies(model).items():
                torch.testing.assert_close(value, reference[name])


def test_hybrid_sharding_equals_the_unsharded_model() -> None:
    run_ranks(4, train_hybrid)


def train_hybrid_without_shards() -> list[torch.Tensor]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))
    with pytest.warns(UserWarning, match="shards nothing"):
        model = wrapped(
            "ours",
            build("uneven"),
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )
    train(model)
    values = full_copies(model)
    for name, value in train_reference(build("uneven")).items():
        torch.testing.assert_close(values[name], value)
    return list(values.values())


def test_hybrid_with_shard_groups_of_one_rank_keeps_replicas_equal() -> None:
    first, second = run_ranks(2, train_hybrid_without_shards)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def accumulate() -> None:
    """sync / no / no / sync / sync, with the optimizer stepping after each synced backward."""
    for name, strategy, orig in itertools.product(ENGINES, STRATEGIES, (False, True)):
        model = wrapped(
            name,
            build("uneven"),
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
        )
        reference = build("uneven")
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        for step, (whole, mine) in enumerate(batches(5)):
            if step in (1, 2):
                with model.no_sync():
                    loss_of(model, mine).backward()
            else:
                loss_of(model, mine).backward()
            loss_of(reference, whole).backward()
            if step in (3, 4):
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for fqn, value in full_copies(model).items():
            wanted = reference.get_parameter(fqn)
            torch.testing.assert_close(value, wanted, msg=f"{name} {strategy} {orig}")


def test_gradients_accumulate_with_and_without_no_sync() -> None:
    run_ranks(2, accumulate)


def two_forwards() -> None:
    for strategy, orig in itertools.product(STRATEGIES, (False, True)):
        model = wrapped(
            "ours",
            build("uneven"),
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
        )
        reference = build("uneven")
        (whole, mine), (whole_2, mine_2) = list(batches(2))
        loss = loss_of(model, mine) + loss_of(model, mine_2)
        loss.backward(retain_graph=True)
        wanted = loss_of(reference, whole) + loss_of(reference, whole_2)
        wanted.backward(retain_graph=True)
        # Again over the same graph, which torch's engine cannot do.
        loss.backward()
        wanted.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        torch.optim.SGD(reference.parameters(), lr=1.0).step()
        for name, value in full_copies(model).items():
            torch.testing.assert_close(value, reference.get_parameter(name))


def test_two_forwards_one_backward_and_a_second_backward() -> None:
    run_ranks(2, two_forwards)


def reentrant() -> None:
    from sharding import FullyShardedDataParallel

    for orig, outside in itertools.product((False, True), (False, True)):
        torch.manual_seed(0)
        model: Any = uneven()
        if outside:
            model[1] = Reentrant(FullyShardedDataParallel(model[1], use_orig_params=orig))
        else:
            model[1] = FullyShardedDataParallel(Reentrant(model[1]), use_orig_params=orig)
        model = FullyShardedDataParallel(model, use_orig_params=orig)
        train(model)
        torch.manual_seed(0)
        for name, value in train_reference(uneven()).items():
            torch.testing.assert_close(full_copies(model)[name], value)


def test_reentrant_checkpointing_inside_and_outside_of_a_unit() -> None:
    run_ranks(2, reentrant)


class Regions(nn.Module):
    """Three layers: two under reentrant checkpoints of their own, the last under none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block(7, 5, 4), block(4, 6, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for region in (self.first, self.second):
            x = checkpoint(region, x, use_reentrant=True)
        return self.last(x)


def several_regions() -> None:
    for strategy, orig in itertools.product(SHARDED_STRATEGIES, (False, True)):
        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(6, 7), Regions(), nn.Linear(3, 1))
        reference = train_reference(copy.deepcopy(bare))
        model = wrapped(
            "ours", bare, use_orig_params=orig, sharding_strategy=ShardingStrategy[strategy]
        )
        train(model)
        for name, value in full_copies(model).items():
            torch.testing.assert_close(value, reference[name], msg=f"{strategy} {orig} {name}")
        for unit in model.fsdp_modules(model):
            assert unit.fsdp_unit.store.gathered_nbytes == 0


def test_several_reentrant_checkpoints_inside_one_unit() -> None:
    run_ranks(2, several_regions)


def prefetch() -> None:
    for engine_name, backward in itertools.product(
        ENGINES, (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None)
    ):
        for forward in (False, True):
            model = wrapped(
                engine_name, build("uneven"), backward_prefetch=backward, forward_prefetch=forward
            )
            train(model)
            values = full_copies(model)
            for name, value in train_reference(build("uneven")).items():
                torch.testing.assert_close(values[name], value)


def test_prefetching_does_not_change_the_numbers() -> None:
    run_ranks(2, prefetch)


def offload() -> None:
    from sharding import CPUOffload

    for orig in (False, True):
        model = wrapped("ours", build("uneven"), use_orig_params=orig, cpu_offload=CPUOffload(True))
        train(model)
        values = full_copies(model)
        for name, value in train_reference(build("uneven")).items():
            torch.testing.assert_close(values[name], value)


def test_cpu_offload_trains() -> None:
    run_ranks(2, offload)
