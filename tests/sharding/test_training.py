"""Training gives what an unsharded model gives on all ranks' data together.

Method: some steps of small models under every strategy, parameter mode and kind of model, on 2
and 4 ranks, against the unsharded replica on the concatenated batch; and on 2 ranks, where every
sum has two terms, against torch's own engine bit for bit.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy

from tests.ranks import run_ranks
from tests.sharding.models import (
    Reentrant,
    batches,
    build,
    clean,
    full_copies,
    uneven,
    wrapped,
)

pytestmark = pytest.mark.ranks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
STEPS = 4


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    # Not Adam, whose steps are the same when all gradients are off by one factor.
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=0.2, momentum=0.9)


def train(model: Any, *, steps: int = STEPS, clip: bool = False) -> list[float]:
    optimizer = optimizer_of(model)
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
    optimizer = optimizer_of(model)
    for whole, _ in batches(steps):
        loss_of(model, whole).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {clean(name): param.detach() for name, param in model.named_parameters()}


def compare_with_reference(kinds: list[str], strategies: list[str], modes: list[bool]) -> None:
    for kind, strategy, orig in itertools.product(kinds, strategies, modes):
        if kind == "partly_frozen" and not orig:
            continue
        model = wrapped(
            "ours",
            build(kind),
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
        )
        train(model)
        reference = train_reference(build(kind))
        got = full_copies(model)
        assert list(got) == list(reference)
        for name, value in got.items():
            case = f"{kind} {strategy} {orig} {name}"
            torch.testing.assert_close(value, reference[name], msg=case)


@pytest.mark.parametrize("size", [2, 4])
def test_training_equals_the_unsharded_model(size: int) -> None:
    kinds = ["even", "uneven", "tied", "frozen", "partly_frozen", "convolution", "recomputed"]
    run_ranks(size, compare_with_reference, kinds, list(STRATEGIES), [False, True])


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
    run_ranks(2, compare_with_torch, ["even", "uneven", "tied", "frozen", "recomputed"])


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
    for strategy, orig in itertools.product(STRATEGIES, (False, True)):
        model = wrapped(
            "ours",
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
        for name, value in full_copies(model).items():
            wanted = reference.get_parameter(name)
            torch.testing.assert_close(value, wanted, msg=f"{strategy} {orig}")


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


def prefetch() -> None:
    for backward in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        for forward in (False, True):
            model = wrapped(
                "ours", build("uneven"), backward_prefetch=backward, forward_prefetch=forward
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
