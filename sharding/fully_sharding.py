"""`fully_shard`: sharding in place, each parameter by itself; torch's FSDP2 model.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

Arguments, methods and defaults are those of torch's function of that name. This file
only calls the parts: how parameters are kept (`dtensor/param`, `dtensor/store`), what the module
becomes (`fsdp_module`), what happens when (`engine/unit`, `engine/runtime`, which the flat engine
shares).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from ckpt.layout.memory import accelerator
from sharding.dtensor.meshes import DataParallelMeshDims, MeshPart, data_mesh, parts_by_mesh
from sharding.dtensor.param import DataAxes, DataMesh, Keeping
from sharding.dtensor.seam import concatenated, flattened, sharded_before_as
from sharding.dtensor.store import DTensorStore, SmallerMesh
from sharding.engine.blocks import Placing
from sharding.engine.collectives import all_global_ranks, comm_of
from sharding.engine.precision import Casts
from sharding.engine.reduction import Reduction
from sharding.engine.store import ModuleParam
from sharding.engine.torch_seam import is_marked_replicate
from sharding.engine.unit import Schedule, Unit
from sharding.fsdp_module import FSDPModule, become_sharded
from sharding.sharded_group import ShardedGroup, managed_below
from sharding.torch_face import check_known, follows_grad_dtype
from sharding.wrapping.init import Ignored, find_params, move_states

M = TypeVar("M", bound=nn.Module | list[Any])

_SAME_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Placing | None = None,
    mp_policy: MixedPrecisionPolicy = _SAME_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Shard the parameters of a module, or of several together, and return the same object(s).

    Call it on inner modules first: what they hold is not the outer one's. Parameters become
    DTensors, sharded along dim 0 or along what `shard_placement_fn` returns for them: a `Shard`,
    None, or a `ShardPlacementResult`, which also has a mesh (those of one mesh are gathered
    and reduced together). They are gathered for the time that the module computes. Create the
    optimizer afterwards. The module's class becomes a subclass that is an `FSDPModule` too.

    `shard_placement_fn` may return `Blocks` or `Whole` too, where the equal chunks of dim 0 cut no
    block; the wrapper cuts where you say.

    `mesh`: one axis (shard) or two (replicate, shard); all ranks by default.
    `reshard_after_forward`: whether to free between forward and backward; None frees all but the
    root; a number of ranks keeps shards over so many, a true divisor of the shard axis.
    `dp_mesh_dims`: `mesh` is one for everything, on which all parameters are DTensors already;
    these are the names of its axes to shard over (several count as one) and to repeat over.
    Without axes to shard over, parameters stay whole and gradients are averaged over the others.

    Raises ValueError for arguments that contradict each other or the module, NotImplementedError
    for options of a newer torch that are not implemented here, and, with their names, what
    `sharding.dtensor.param` raises for parameters that cannot be sharded.
    """
    check_known(mp_policy, offload_policy, dp_mesh_dims)
    modules = _outermost("fully_shard", module if isinstance(module, list) else [module])
    within = None
    if dp_mesh_dims is not None:
        mesh, within = _data_part(mesh, dp_mesh_dims, reshard_after_forward)
    data = data_mesh(_checked_mesh(mesh), within)
    keeping = _keeping(data.mesh, mp_policy, offload_policy)
    params = _module_params(modules, frozenset(ignored_params or ()), keeping.device)
    parts = parts_by_mesh(params, data, shard_placement_fn)
    groups = [_group(modules, part, keeping, reshard_after_forward) for part in parts]
    # Last: until here an argument that does not fit has left the modules as they were.
    become_sharded(groups, "fully_shard")
    return module


def replicate(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = _SAME_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Keep the parameters of a module whole on every rank and average their gradients.

    As torch's function of that name (`torch.distributed._composable.replicate_with_fsdp`): what
    `fully_shard` makes of a module, with nothing to shard over. Parameters become DTensors that are
    `Replicate()` over `mesh`, of one axis, by default all ranks. What it returns, the arguments and
    the errors are those of `fully_shard`.
    """
    check_known(mp_policy, offload_policy, dp_mesh_dims)
    modules = _outermost("replicate", module if isinstance(module, list) else [module])
    within = None
    if dp_mesh_dims is not None:
        if dp_mesh_dims.shard_names:
            raise ValueError(
                f"replicate: dp_mesh_dims names axes to shard over, {dp_mesh_dims.shard_names}; "
                "call fully_shard, or name axes to replicate over alone"
            )
        mesh, within = _data_part(mesh, dp_mesh_dims, False)
    elif mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"replicate needs a mesh of one axis, got {mesh.ndim}; pass part of it: mesh['dp']"
        )
    data = data_mesh(_checked_mesh(mesh, ("replicate",)), within, repeats=True)
    keeping = _keeping(data.mesh, mp_policy, offload_policy)
    module_params = _module_params(modules, frozenset(ignored_params or ()), keeping.device)
    (part,) = parts_by_mesh(module_params, data)
    become_sharded([_group(modules, part, keeping, False)], "replicate")
    return module


def _group(
    modules: Sequence[nn.Module],
    part: MeshPart,
    keeping: Keeping,
    reshard_after_forward: bool | int | None,
) -> ShardedGroup:
    store = DTensorStore(part, keeping)
    store.set_smaller_mesh(_smaller_mesh(part.data, reshard_after_forward))
    data, frees, policy = part.data, reshard_after_forward, keeping.policy
    casts = policy.cast_forward_inputs
    # A number of ranks; over one rank each keeps all, which is not to free.
    if frees is not None and not isinstance(frees, bool):
        frees = frees > 1
    unit = Unit(
        store if store.params else None,
        Reduction(
            data.shard,
            data.replicate,
            policy.reduce_dtype or (None if keeping.follows_grad_dtype else policy.param_dtype),
            factors=(1.0, float(data.size)),
        ),
        device=store.device,
        schedule=Schedule(frees_after_forward=frees, keeps_without_grad=True),
        casts=Casts(policy.param_dtype, casts, casts, policy.output_dtype),
        offload=keeping.offload,
    )
    return ShardedGroup(modules, unit, store)


def _keeping(
    mesh: DeviceMesh, precision: MixedPrecisionPolicy, offloading: OffloadPolicy
) -> Keeping:
    device = torch.device("cpu")
    if mesh.device_type != "cpu":
        module: Any = torch.get_device_module(mesh.device_type)
        device = torch.device(mesh.device_type, module.current_device())
    offload = isinstance(offloading, CPUOffloadPolicy)
    return Keeping(
        device=device,
        policy=precision,
        follows_grad_dtype=follows_grad_dtype(),
        offload=offload,
        pin=isinstance(offloading, CPUOffloadPolicy)
        and offloading.pin_memory
        and device.type != "cpu",
    )


def _outermost(function: str, given: Sequence[Any]) -> list[nn.Module]:
    """The modules, without those that are inside others. Raises ValueError for what cannot be."""
    if not given:
        raise ValueError(f"{function} needs at least one module, got an empty list")
    for one in given:
        if not isinstance(one, nn.Module):
            raise ValueError(f"{function} takes modules, got {type(one).__name__}")
        if is_marked_replicate(one) or isinstance(one, FSDPModule):
            before = "replicate" if is_marked_replicate(one) else "fully_shard"
            raise ValueError(
                f"{type(one).__name__}: {before} was called on it before; call one of them once "
                "for each module, inner ones first"
            )
        if isinstance(one, nn.ModuleList | nn.ModuleDict) and len(given) == 1:
            raise ValueError(
                f"{type(one).__name__} has no forward of its own: call {function} on what is "
                "inside it, or on a list of that"
            )
    inside = {id(child) for one in given for child in one.modules() if child is not one}
    outermost = [one for one in given if id(one) not in inside]
    # By identity, and in order: modules may define equality, and a list may name one twice.
    return list({id(one): one for one in outermost}.values())


def _checked_mesh(mesh: DeviceMesh | None, names: tuple[str] | None = None) -> DeviceMesh:
    if mesh is None:
        device = accelerator()
        kind = "cpu" if device is None else device.type
        return init_device_mesh(kind, (len(all_global_ranks()),), mesh_dim_names=names)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard needs a mesh of one axis (shard) or two (replicate, shard), got "
            f"{mesh.ndim}; pass part of it: mesh['dp']"
        )
    # An AssertionError, as torch's own function raises here: trainers catch what they know.
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            "a mesh of two axes needs their names: init_device_mesh(..., "
            "mesh_dim_names=('replicate', 'shard'))"
        )
    return mesh


def _data_part(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims, reshard_after_forward: bool | int | None
) -> tuple[DeviceMesh, DataAxes]:
    """The part of the mesh for data parallelism: one axis (shard, or replicate where there is
    nothing to shard over) or two (replicate, shard).
    """
    names = () if mesh is None else mesh.mesh_dim_names or ()
    unknown = [name for name in (*dims.shard_names, *dims.replicate_names) if name not in names]
    if mesh is None or unknown:
        raise ValueError(
            f"dp_mesh_dims names axes {unknown} that the mesh does not have, it has "
            f"{list(names)}; pass the mesh that the parameters are on, with mesh_dim_names"
        )
    if not dims.shard_names and not dims.replicate_names:
        raise ValueError(
            f"dp_mesh_dims names no axis of {list(names)}; set shard, replicate or both"
        )
    is_count = reshard_after_forward is not None and not isinstance(reshard_after_forward, bool)
    if is_count and dims.shard_names:
        raise NotImplementedError(
            "reshard_after_forward as a number of ranks cannot be combined with dp_mesh_dims; pass "
            "True or False"
        )
    axes = DataAxes.named(mesh, dims)
    if not dims.shard_names:
        return flattened(mesh, dims.replicate_names), axes
    shard = flattened(mesh, dims.shard_names)
    if not dims.replicate_names:
        return shard, axes
    return concatenated([flattened(mesh, dims.replicate_names), shard]), axes


def _module_params(
    modules: Sequence[nn.Module], ignored: frozenset[nn.Parameter], device: torch.device
) -> list[ModuleParam]:
    """What the modules own together, on the device to compute on."""
    # One walk over all of them finds what is tied between two, and counts it once.
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    left_alone = Ignored(frozenset(), ignored, frozenset(), _is_unit)
    move_states(root, left_alone, device)
    module_params = find_params(root, left_alone, managed=managed_below(root))
    for item in module_params:
        other = sharded_before_as(item.param)
        if other is not None:
            raise ValueError(
                f"{item.fqn}: is tied to {other} of a module that fully_shard was called on "
                "before, and the tie would be lost; call fully_shard([first, second]) on both "
                "modules together"
            )
        if item.param.device.type not in (device.type, "meta"):
            raise AssertionError(
                f"{item.fqn}: is on {item.param.device}, expected {device}; move the module to the "
                "device of the mesh first"
            )
    return module_params


def _smaller_mesh(data: DataMesh, wanted: bool | int | None) -> SmallerMesh | None:
    """Where shards are between forward and backward, if that is not all or nothing."""
    size = data.shard.size
    if data.is_repeated_only or wanted is None or isinstance(wanted, bool) or wanted in (1, size):
        return None
    if wanted < 1 or size % wanted != 0:
        raise ValueError(
            f"reshard_after_forward={wanted} must divide the {size} ranks of the shard axis"
        )
    mesh = data.mesh
    names: tuple[str, ...] = ("post_forward_replicate", "post_forward_shard")
    if mesh.ndim == 2:
        names = ("post_forward_outer", *names)
    # Consecutive ranks of the shard axis: those of one host, as launchers number them.
    blocks = mesh.mesh.view(*mesh.mesh.shape[:-1], -1, wanted)
    smaller = DeviceMesh(mesh.device_type, blocks, mesh_dim_names=names)
    return SmallerMesh(smaller[names[-2:]], comm_of(smaller.get_group(names[-1])))


def _is_unit(module: nn.Module) -> bool:
    # torch's `replicate` reduces the gradients of what it took itself.
    return isinstance(module, FSDPModule) or is_marked_replicate(module)
