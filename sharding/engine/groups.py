"""Over which ranks a unit is sharded, and over which it is repeated."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from sharding.engine.collectives import Comm, Group, comm_of, default_group, is_group, new_groups


class Groups(NamedTuple):
    """The shard group, and with hybrid sharding the group of ranks that hold equal shards."""

    shard: Comm
    replicate: Comm | None
    members: tuple[int, ...]
    """Global ranks of all shard groups together, ascending: those that have the unit."""

    @property
    def comms(self) -> tuple[Comm, ...]:
        """The groups that there are."""
        return (self.shard,) if self.replicate is None else (self.shard, self.replicate)

    @property
    def argument(self) -> Any:
        """What to pass as `process_group` to units that are to share these groups."""
        groups = tuple(comm.group for comm in self.comms)
        return groups if len(groups) > 1 else groups[0]


def resolve_groups(
    process_group: Any,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
    *,
    has_policy: bool,
) -> Groups:
    """The groups that the arguments mean. Raises ValueError when they contradict each other.

    Collective only for a hybrid strategy without a mesh: without groups it creates them; with
    groups over a part of the world their ranks exchange which ranks these are.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("pass process_group or device_mesh, not both")
    if strategy not in HYBRID:
        group = process_group
        if device_mesh is not None:
            if device_mesh.ndim != 1:
                raise ValueError(
                    f"{strategy.name} shards over one axis, but the mesh has {device_mesh.ndim}; "
                    "pass one axis of it, or a hybrid strategy"
                )
            group = device_mesh.get_group(0)
        elif group is not None and not is_group(group):
            raise ValueError(f"{strategy.name} needs one process group, got {type(group).__name__}")
        return _sharded_only(comm_of(default_group() if group is None else group))
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
    shard, replicate = comm_of(pair[0]), comm_of(pair[1])
    return Groups(shard, replicate, _members_of(shard, replicate))


def groups_of(mesh: DeviceMesh) -> Groups:
    """The groups of a mesh of one axis (shard), or two (replicate, shard)."""
    shard = comm_of(mesh.get_group(mesh.ndim - 1))
    if mesh.ndim != 2:
        return _sharded_only(shard)
    members = tuple(sorted(int(rank) for rank in mesh.mesh.flatten()))
    return Groups(shard, comm_of(mesh.get_group(0)), members)


def _sharded_only(shard: Comm) -> Groups:
    return Groups(shard, None, tuple(sorted(shard.global_ranks)))


def _members_of(shard: Comm, replicate: Comm) -> tuple[int, ...]:
    """Ranks of the shard groups of all ranks of `replicate`.

    A rank knows its own groups only. Where they cannot but cover the world, or one of them is this
    rank alone, nobody is asked; what only acts as a group has nobody to ask.
    """
    if replicate.size == 1 or not isinstance(replicate.group, Group):
        return tuple(sorted(shard.global_ranks))
    if shard.size == 1:
        return tuple(sorted(replicate.global_ranks))
    if shard.size * replicate.size == dist.get_world_size():
        return tuple(range(dist.get_world_size()))
    everyone = replicate.gather_objects(shard.global_ranks)
    return tuple(sorted({rank for ranks in everyone for rank in ranks}))


def line_through_here(mesh: DeviceMesh, axis: int) -> list[int]:
    """Global ranks along an axis of the mesh, through this rank's place in it."""
    where: list[Any] = (mesh.mesh == dist.get_rank()).nonzero()[0].tolist()
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
    everyone = tuple(range(world_size))
    return Groups(comm_of(new_groups(shard)), comm_of(new_groups(replicate)), everyone)


# Torch's own name of it has an underscore.
HYBRID_ZERO2 = ShardingStrategy["_HYBRID_SHARD_ZERO2"]


HYBRID = (ShardingStrategy.HYBRID_SHARD, HYBRID_ZERO2)
