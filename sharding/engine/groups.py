"""Over which ranks a unit is sharded, and over which it is repeated."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from sharding.engine.collectives import Comm, Group, comm_of, default_group, is_group, new_groups

__all__ = ["Groups", "blocks_of", "groups_of", "line_through_here", "resolve_groups"]


class Groups(NamedTuple):
    """The shard group, and with hybrid sharding the group of ranks that hold equal shards."""

    shard: Comm
    replicate: Comm | None

    @property
    def argument(self) -> Any:
        """What to pass as `process_group` to units that are to share these groups."""
        return (
            self.shard.group
            if self.replicate is None
            else (
                self.shard.group,
                self.replicate.group,
            )
        )


def resolve_groups(
    process_group: Any,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
    *,
    has_policy: bool,
) -> Groups:
    """The groups that the arguments mean. Raises ValueError when they contradict each other.

    Creates groups, a collective, only for a hybrid strategy without group and mesh.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("pass process_group or device_mesh, not both")
    if strategy not in HYBRID:
        return Groups(comm_of(_single_group(process_group, device_mesh, strategy)), None)
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(
                f"{strategy.name} needs a mesh of two axes (replicate, shard), got "
                f"{device_mesh.ndim}"
            )
        return groups_of(device_mesh)
    if process_group is None:
        if not has_policy:
            raise ValueError(
                f"{strategy.name} without auto_wrap_policy needs process_group=(shard, replicate) "
                "or device_mesh, so that units wrapped one by one share their groups"
            )
        return _groups_by_node(max(1, torch.accelerator.device_count()))
    pair = process_group
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(is_group(one) for one in pair)):
        raise ValueError(
            f"{strategy.name} needs process_group=(shard group, replicate group), got "
            f"{type(process_group).__name__}"
        )
    return Groups(comm_of(pair[0]), comm_of(pair[1]))


def groups_of(mesh: DeviceMesh) -> Groups:
    """The groups of a mesh of one axis (shard), or two (replicate, shard)."""
    replicate = comm_of(mesh.get_group(0)) if mesh.ndim == 2 else None
    return Groups(comm_of(mesh.get_group(mesh.ndim - 1)), replicate)


def _single_group(
    process_group: Any, device_mesh: DeviceMesh | None, strategy: ShardingStrategy
) -> Group:
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"{strategy.name} shards over one axis, but the mesh has {device_mesh.ndim}; pass "
                "one axis of it, or a hybrid strategy"
            )
        return device_mesh.get_group(0)
    if process_group is None:
        return default_group()
    if not is_group(process_group):
        raise ValueError(
            f"{strategy.name} needs one process group, got {type(process_group).__name__}"
        )
    group: Group = process_group
    return group


def line_through_here(mesh: DeviceMesh, axis: int) -> list[int]:
    """Global ranks along an axis of the mesh, through this rank's place in it."""
    here = (mesh.mesh == dist.get_rank()).nonzero()[0].tolist()
    where: list[Any] = list(here)
    where[axis] = slice(None)
    return [int(rank) for rank in mesh.mesh[tuple(where)]]


def blocks_of(world_size: int, per_node: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ranks of the shard groups (inside nodes) and of the replicate groups (across them)."""
    shard = [list(range(first, first + per_node)) for first in range(0, world_size, per_node)]
    replicate = [list(range(first, world_size, per_node)) for first in range(per_node)]
    return shard, replicate


def _groups_by_node(per_node: int) -> Groups:
    world_size = dist.get_world_size()
    if world_size % per_node != 0:
        raise ValueError(
            f"{world_size} ranks do not divide into nodes of {per_node} devices; pass "
            "process_group=(shard, replicate) or device_mesh"
        )
    shard, replicate = blocks_of(world_size, per_node)
    return Groups(comm_of(new_groups(shard)), comm_of(new_groups(replicate)))


# Torch's own name of it has an underscore.
HYBRID_ZERO2 = ShardingStrategy["_HYBRID_SHARD_ZERO2"]


HYBRID = (ShardingStrategy.HYBRID_SHARD, HYBRID_ZERO2)
