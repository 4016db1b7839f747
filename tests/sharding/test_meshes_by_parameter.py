"""A mesh for each parameter: experts are sharded over fewer ranks than what all have.

Method: `shard_placement_fn` names a mesh for the experts of a model; torch's `fully_shard` and ours
train it on the same ranks, and must end with the same placements and values. Torch has no public
class for what the function returns: its private one is what its users take.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
import sharding
from tests.ranks import run_ranks
from tests.sharding.fully_scenarios import ENGINES, claims

pytestmark = pytest.mark.ranks


class Layer(nn.Module):
    """Weights that all ranks have, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.randn(5, 6))
        self.experts = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts: Any = self.experts
        local = experts.to_local() if isinstance(experts, DTensor) else experts
        y = x @ self.dense @ local.sum(0)
        return torch.tanh(y)[:, :5]


def build(ep: DeviceMesh | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), Layer())
    for layer in model if ep is not None else ():
        shared = distribute_tensor(layer.experts.detach(), ep, [Shard(0)])  # type: ignore[union-attr, arg-type]
        layer.experts = nn.Parameter(shared)  # type: ignore[union-attr, assignment]
    return model


def expert_meshes() -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """All ranks as one axis, experts' data axis, and the axis that divides the experts."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    return both._flatten("dp"), both["edp"], both["ep"]


def placing(result: Any, info: Any, dim: int | None) -> Callable[[nn.Parameter], Any]:
    wanted = None if dim is None else Shard(dim)
    return lambda param: result(wanted, info) if param.dim() == 3 else None


def sharded(engine: str, model: nn.Sequential, dp: DeviceMesh, fn: Any, **kwargs: Any) -> Any:
    """The last layer belongs to the root, so that the root has two meshes too."""
    for module in (model[0], model[1], model):
        ENGINES[engine].fully_shard(module, mesh=dp, shard_placement_fn=fn, **kwargs)
    return model


def trained(model: Any, divides: bool = False) -> tuple[list[float], dict[str, Any]]:
    if divides:
        for module in (model[0], model):
            module.set_gradient_divide_factor(4.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(3, 5, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(model(torch.ones(2, 5)).float().sum()))
    return losses, dict(model.state_dict())


def assert_same(ours: Any, theirs: Any, what: str) -> None:
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]))
    assert ours[1].keys() == theirs[1].keys()
    for name, tensor in ours[1].items():
        wanted = theirs[1][name]
        forms = [
            (one.device_mesh.mesh_dim_names, one.device_mesh.mesh.tolist(), one.placements)
            for one in (tensor, wanted)
        ]
        assert forms[0] == forms[1], f"{what} {name}"
        torch.testing.assert_close(tensor.to_local(), wanted.to_local(), msg=f"{what} {name}")


def experts_are_sharded_as_by_torchs() -> None:
    dp, edp, ep = expert_meshes()
    info = torch_common.FSDPMeshInfo(edp, shard_mesh_dim=0)
    theirs = torch_common.ShardPlacementResult
    for number, (tensor_parallel, dim, options) in enumerate(
        (
            (False, None, {}),
            (True, 1, {"reshard_after_forward": False}),
            (True, 0, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
            (False, 0, {"reshard_after_forward": 2}),
        )
    ):
        what = f"{tensor_parallel} {dim} {options}"
        fn = placing(theirs, info, dim)
        wanted = trained(
            sharded("torch", build(ep if tensor_parallel else None), dp, fn, **options),
            divides=number == 1,
        )
        for given in (fn, placing(sharding.ShardPlacementResult, edp, dim)):
            model = sharded("ours", build(ep if tensor_parallel else None), dp, given, **options)
            assert_same(trained(model, divides=number == 1), wanted, what)


def experts_may_be_repeated_too() -> None:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "edp"))
    dp = both._flatten("dp")
    info = torch_common.HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0)
    fn = placing(torch_common.ShardPlacementResult, info, None)
    wanted = trained(sharded("torch", build(None), dp, fn))
    assert_same(trained(sharded("ours", build(None), dp, fn)), wanted, "repeated")


def parameters_of_one_mesh_travel_together() -> None:
    dp, edp, _ = expert_meshes()
    model = sharded("ours", build(None), dp, placing(sharding.ShardPlacementResult, edp, None))
    for module in (model[0], model[1], model):
        assert [len(group.store.params) for group in module.fsdp_groups] == [1, 1]
    # Named or not, it is the mesh of the module.
    model = sharded("ours", build(None), dp, placing(sharding.ShardPlacementResult, dp, None))
    assert len(model.fsdp_groups) == 1 and len(model.fsdp_group.store.params) == 2


def gathers_by_hand_and_without_gradients_serve_all_meshes() -> None:
    dp, edp, _ = expert_meshes()
    model = sharded("ours", build(None), dp, placing(sharding.ShardPlacementResult, edp, None))
    wanted = model(torch.ones(2, 5)).detach()
    handle = model[0].unshard(async_op=True)
    handle.wait()
    assert not isinstance(model[0].dense, DTensor) and not isinstance(model[0].experts, DTensor)
    starts = []
    for group in model[0].fsdp_groups:
        start = group.store.start_gather
        group.store.start_gather = lambda start=start: starts.append(1) or start()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 5)), wanted)
    assert not starts  # what was gathered by hand is not gathered again
    assert isinstance(model[0].dense, DTensor) and isinstance(model[0].experts, DTensor)
    model[0].unshard()
    model[0].reshard()
    assert isinstance(model[0].dense, DTensor) and isinstance(model[0].experts, DTensor)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 5)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 5)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def what_would_serve_one_mesh_is_refused() -> None:
    dp, edp, _ = expert_meshes()
    for engine, result, info in (
        (
            "torch",
            torch_common.ShardPlacementResult,
            torch_common.FSDPMeshInfo(edp, shard_mesh_dim=0),
        ),
        ("ours", sharding.ShardPlacementResult, edp),
    ):
        model = sharded(engine, build(None), dp, placing(result, info, None))
        for call in (
            model.set_custom_all_gather,
            model.set_custom_reduce_scatter,
            model.set_all_reduce_hook,
        ):
            with pytest.raises(ValueError, match="set_"):
                call(print)
    for wrong in ("dp", torch_common.DDPMeshInfo(dp, replicate_mesh_dim=0)):
        fn = placing(sharding.ShardPlacementResult, wrong, None)
        with pytest.raises(ValueError, match="experts: shard_placement_fn names"):
            sharding.fully_shard(Layer(), mesh=dp, shard_placement_fn=fn)


test_on_four_ranks = claims(
    4,
    [
        experts_are_sharded_as_by_torchs,
        experts_may_be_repeated_too,
        parameters_of_one_mesh_travel_together,
        gathers_by_hand_and_without_gradients_serve_all_meshes,
        what_would_serve_one_mesh_is_refused,
    ],
)


# Checkpoints -------------------------------------------------------------------------------------


def doubled(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


def problems_of(model: nn.Module) -> list[str]:
    """Which parameters are not twice what they were built with."""
    wanted = dict(build(None).named_parameters())
    return [
        name
        for name, param in model.named_parameters()
        if not torch.equal(
            param.full_tensor() if isinstance(param, DTensor) else param, 2 * wanted[name]
        )
    ]


def _experts(root: str) -> list[str]:
    dp, edp, ep = expert_meshes()
    fn = placing(sharding.ShardPlacementResult, edp, 1)
    model = sharded("ours", build(ep), dp, fn)
    doubled(model)
    ckpt.save({"model": model}, f"{root}/experts", step=1)
    plain = sharding.fully_shard(build(None), mesh=dp)
    ckpt.load({"model": plain}, f"{root}/experts")
    model = sharded("ours", build(ep), dp, fn)
    ckpt.load({"model": model}, f"{root}/alone")
    assert all(
        isinstance(p, DTensor) and Replicate() not in p.placements for p in model.parameters()
    )
    return problems_of(plain) + problems_of(model)


def _alone(root: str, loads: bool) -> list[str]:
    model = build(None)
    if loads:
        ckpt.load({"model": model}, f"{root}/experts")
        return problems_of(model)
    doubled(model)
    ckpt.save({"model": model}, f"{root}/alone", step=1)
    return []


def test_checkpoints_of_experts_move_to_other_layouts_and_back(tmp_path: Path) -> None:
    root = tmp_path.as_uri()
    run_ranks(1, _alone, root, False)
    for problems in run_ranks(4, _experts, root, timeout_seconds=240.0):
        assert not problems, problems
    (problems,) = run_ranks(1, _alone, root, True)
    assert not problems, problems
