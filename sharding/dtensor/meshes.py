"""Which parameters of a module are sharded over which mesh.

`shard_placement_fn` may name a mesh for a parameter: experts, which only some ranks share, are
sharded over fewer ranks than what all have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from sharding.dtensor.param import DataAxes, DataMesh
from sharding.engine.blocks import Placing
from sharding.engine.collectives import alone, comm_of
from sharding.engine.groups import groups_of
from sharding.engine.store import ModuleParam

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims
elif hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):  # from torch 2.12 on
    DataParallelMeshDims = torch.distributed.fsdp.DataParallelMeshDims
else:

    @dataclass(frozen=True)
    class DataParallelMeshDims:
        """Names of the mesh axes of data parallelism: to shard over, to replicate over."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        @property
        def shard_names(self) -> tuple[str, ...]:
            return _names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            return _names(self.replicate)


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


@dataclass(frozen=True)
class ShardPlacementResult:
    """How one parameter is to be sharded: what `shard_placement_fn` may return.

    Torch's private class of that name is accepted as well, with its mesh infos.
    """

    placement: Shard | None
    """None for dim 0."""
    mesh_info: Any
    """The mesh: a `DeviceMesh` of one axis (shard) or of two (replicate, shard)."""


class MeshPart(NamedTuple):
    """The parameters that are sharded over one mesh."""

    data: DataMesh
    module_params: tuple[ModuleParam, ...]
    placements: tuple[object, ...]
    """Of each, a `Shard` or None."""


def data_mesh(
    mesh: DeviceMesh, within: DataAxes | None = None, *, repeats: bool = False
) -> DataMesh:
    """The groups of a mesh of one axis (shard, or replicate where `repeats`, or where `within` has
    no other) or two.
    """
    if repeats or (within is not None and not within.shard):
        return DataMesh(mesh, alone(), comm_of(mesh.get_group(0)), within)
    groups = groups_of(mesh)
    return DataMesh(mesh, groups.shard, groups.replicate, within)


def parts_by_mesh(
    module_params: Sequence[ModuleParam],
    default: DataMesh,
    placing: Placing | None = None,
) -> list[MeshPart]:
    """The parameters by the mesh that `placing` names for them, in the order in which the first of
    each comes. At least one part: of the default mesh, if there are no parameters.

    Raises ValueError, naming the parameter, for what is no mesh to shard over.
    """
    meshes: dict[object, DataMesh] = {_identity(default): default}
    members: dict[object, list[tuple[ModuleParam, object]]] = {}
    for item in module_params:
        placement: Any = None if placing is None else placing(item.param)
        data = default
        if hasattr(placement, "mesh_info"):
            data = _mesh_named(item.fqn, placement.mesh_info, default)
            placement = placement.placement
        key = _identity(data)
        meshes.setdefault(key, data)
        members.setdefault(key, []).append((item, placement))
    if not members:
        # Without parameters there still is a unit: the root's forward begins an iteration.
        return [MeshPart(default, (), ())]
    return [
        MeshPart(
            meshes[key], tuple(item for item, _ in placed), tuple(where for _, where in placed)
        )
        for key, placed in members.items()
    ]


def _identity(data: DataMesh) -> object:
    """What is equal for meshes over the same groups."""
    # By group, not by mesh: two meshes may be over the same groups.
    comms = (data.shard, data.replicate)
    return tuple(None if one is None else (id(one.group), one.global_ranks) for one in comms)


def _mesh_named(fqn: str, info: Any, default: DataMesh) -> DataMesh:
    """The mesh that a result names, as itself or with torch's numbers of its axes."""
    mesh: Any = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None)
    shard, replicate = getattr(info, "shard_mesh_dim", -1), getattr(info, "replicate_mesh_dim", -1)
    is_known = isinstance(mesh, DeviceMesh) and mesh.ndim in (1, 2)
    if is_known and mesh is not info:
        is_known = shard == mesh.ndim - 1 and replicate == (None if mesh.ndim == 1 else 0)
    if not is_known or default.is_repeated_only:
        raise ValueError(
            f"{fqn}: shard_placement_fn names {info!r} as its mesh, expected one of one axis "
            "(shard) or two (replicate, shard), of a module that is sharded itself"
        )
    if mesh == default.mesh:
        return default
    if mesh.device_type != default.mesh.device_type:
        raise ValueError(
            f"{fqn}: shard_placement_fn names a mesh on {mesh.device_type}, but that of the module "
            f"is on {default.mesh.device_type}"
        )
    dims = getattr(info, "dp_mesh_dims", None)
    return data_mesh(mesh, None if dims is None else DataAxes.named(info.spmd_mesh, dims))
