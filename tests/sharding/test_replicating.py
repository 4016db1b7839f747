"""`sharding.replicate`, and `fully_shard` around what torch's two `replicate` took.

Method: the same calls on both engines over gloo; values, gradients and dicts compared bit for bit.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as by_ddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt
import sharding
from sharding import DataParallelMeshDims
from sharding.engine.torch_seam import torch_replicate as by_torch
from tests.sharding.fully_scenarios import assert_equal, claims, loss_of, train, values
from tests.sharding.models import batches, build

if by_torch is None:
    pytest.skip("this torch has no replicate_with_fsdp", allow_module_level=True)

REPLICATE: dict[str, Any] = {"torch": by_torch, "ours": sharding.replicate}
SHARD: dict[str, Any] = {"torch": fully_shard, "ours": sharding.fully_shard}


def replicated(name: str, kind: str = "uneven", **options: Any) -> Any:
    model = build(kind)
    REPLICATE[name](model[1], **options)
    return REPLICATE[name](model, **options)


def trains_as_torchs_does() -> None:
    policies = (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for kind in ("uneven", "tied", "batch_norm"):
        for policy in policies[: 1 if kind == "batch_norm" else 2]:
            torchs, ours = (replicated(name, kind, mp_policy=policy) for name in REPLICATE)
            # Groups of parameters: clipping and optimizers see DTensors of one mesh.
            assert train(torchs, clip=0.1) == train(ours, clip=0.1), kind
            assert_equal(values(ours), values(torchs), kind)
            for one, other in zip(ours.parameters(), torchs.parameters(), strict=True):
                assert isinstance(one, DTensor) and isinstance(other, DTensor)
                assert one.placements == other.placements == (Replicate(),)
                assert one.device_mesh == other.device_mesh
            assert list(ours.state_dict()) == list(torchs.state_dict())


def gradients_add_up_without_reductions() -> None:
    sums = []
    for name in REPLICATE:
        model = replicated(name)
        for step, (_, batch) in enumerate(batches(3)):
            model.set_requires_gradient_sync(step == 2)
            loss_of(model, batch).backward()
        sums.append([param.grad.to_local() for param in model.parameters()])
    assert all(map(torch.equal, *sums))


def fully_shard_leaves_what_replicate_took() -> None:
    for replicate in (by_ddp, by_torch, None):
        after = {}
        for name in SHARD:
            model = build("uneven")
            (replicate or REPLICATE[name])(model[1])
            SHARD[name](model)
            losses = train(model)
            kinds = [type(param).__name__ for param in model[1].parameters()]
            after[name] = (losses, kinds, values(model))
        assert after["ours"][:2] == after["torch"][:2], replicate
        assert_equal(after["ours"][2], after["torch"][2], str(replicate))


def what_was_taken_is_refused_by_name() -> None:
    for first in (by_ddp, by_torch, sharding.replicate, sharding.fully_shard):
        model = build("uneven")
        first(model[1])
        by = "fully_shard" if first is sharding.fully_shard else "replicate"
        for second in (sharding.fully_shard, sharding.replicate):
            with pytest.raises(ValueError, match=f"{by} was called on it before"):
                second(model[1])
    with pytest.raises(RuntimeError, match="fully_shard"):
        by_torch(sharding.fully_shard(nn.Linear(2, 2)))
    with pytest.raises(AssertionError):
        fully_shard(sharding.replicate(nn.Linear(2, 2)))  # as it does for its own
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="one axis, got 2"):
        sharding.replicate(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(ValueError, match="fully_shard"):
        sharding.replicate(
            nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp")
        )


def checkpoints_load_into_sharded_models() -> None:
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    model = replicated("ours")
    train(model)
    ckpt.save({"model": model}, folders[0], step=1)
    for other in (sharding.fully_shard(build("uneven", seed=1)), replicated("ours")):
        ckpt.load({"model": other}, folders[0])
        assert_equal(values(other), values(model), folders[0])


def wrappers_leave_what_replicate_took() -> None:
    model: Any = nn.Sequential(sharding.replicate(nn.Linear(6, 6)), nn.Linear(6, 6))
    root = sharding.FullyShardedDataParallel(model)
    root(torch.ones(2, 6)).sum().backward()
    assert model[0].weight.placements == (Replicate(),) and model[0].weight.grad is not None


def tensor_parallel_members_are_replicated() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    after = []
    for replicate in REPLICATE.values():
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        replicate(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
        train(model)
        after.append(model)
    assert_equal(values(after[1]), values(after[0]), "tensor parallel")
    for one, other in zip(*(model.parameters() for model in after), strict=True):
        assert one.placements == other.placements


test_on_two_ranks = claims(
    2,
    [
        trains_as_torchs_does,
        gradients_add_up_without_reductions,
        fully_shard_leaves_what_replicate_took,
        what_was_taken_is_refused_by_name,
        checkpoints_load_into_sharded_models,
        wrappers_leave_what_replicate_took,
    ],
)
test_on_four_ranks = claims(4, [tensor_parallel_members_are_replicated])
