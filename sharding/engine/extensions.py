"""Members that are not plain tensors: what of them is flattened, and how modules get them back.

A unit has at most one extension. Set `fsdp_extension` in a subclass of the wrapper to have one of
your own; without one, units whose `device_mesh` is a part of a larger mesh have `TensorParallel`,
which flattens what this rank holds of a DTensor, and shows a DTensor again while the unit is
gathered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ckpt.layout.dtensor import describe_dtensor
from ckpt.layout.flat import Inside
from ckpt.layout.plain import Ranks, UnsupportedTensor
from ckpt.layout.region import Box
from ckpt.layout.tensor import is_dtensor
from sharding.engine.groups import Groups, line_through_here
from sharding.engine.torch_seam import larger_mesh


class Extension(ABC):
    """How members are turned into tensors that can be flattened, and back."""

    @abstractmethod
    def before_flatten(self, fqn: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What to flatten in the place of `tensor`, and a token for `after_unflatten`.

        A token of None: nothing is to be done for this member. Called once for each member when its
        unit is built, and for what users put in place of it inside `summon_full_params`. Raises
        ValueError, naming `fqn`, for what cannot be flattened.
        """

    @abstractmethod
    def after_unflatten(self, tensor: torch.Tensor, token: Any) -> torch.Tensor:
        """What modules show in the place of `tensor`, a gathered member. Tracked by autograd.

        The result shares the memory of `tensor`: it is kept while that comes and goes, and made
        again only when the unit shows other tensors than before.
        """

    def inside(self, token: Any) -> Inside | None:
        """Which part of a tensor that several ranks share was flattened; None for all of it.

        Needed for checkpoints and state dicts.
        """
        return None


class ShardSpec(NamedTuple):
    """What a DTensor was besides its local tensor."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    inside: Inside


class TensorParallel(Extension):
    """DTensors over other axes of the mesh than those that the unit is sharded and repeated over.

    Placements are `Shard` and `Replicate`. Gradients come back in the placements of the parameter.
    """

    def __init__(self, groups: Groups) -> None:
        self._own = set(groups.shard.global_ranks) - {dist.get_rank()}
        if groups.replicate is not None:
            self._own |= set(groups.replicate.global_ranks) - {dist.get_rank()}

    def before_flatten(self, fqn: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The local tensor of a DTensor, and its spec."""
        if not is_dtensor(tensor):
            return tensor, None
        assert isinstance(tensor, DTensor)
        mesh = tensor.device_mesh
        shared = sorted(self._own & {int(rank) for rank in mesh.mesh.flatten()})
        if shared:
            raise ValueError(
                f"{fqn}: is a DTensor over ranks {shared}, over which the unit is sharded too; "
                "parallelize over another axis of the mesh"
            )
        world = Ranks(dist.get_rank(), tuple(range(dist.get_world_size())))
        # By the code of checkpoints: both must agree on where this rank's part lies.
        try:
            views = describe_dtensor(fqn, tensor.detach(), world).views
        except UnsupportedTensor as refused:
            raise ValueError(refused.problem) from None
        regions = [piece.region for view in views for piece in view.pieces]
        if len(regions) != 1 or not isinstance(regions[0], Box):
            raise ValueError(
                f"{fqn}: placements {tensor.placements} leave several regions on one rank; a flat "
                "parameter needs one"
            )
        cut = tuple(
            tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
            for axis, placement in enumerate(tensor.placements)
            if not placement.is_replicate()
        )
        inside = Inside(tuple(tensor.shape), regions[0].offset, cut)
        spec = ShardSpec(mesh, tensor.placements, tensor.shape, tensor.stride(), inside)
        return tensor.to_local(), spec

    def after_unflatten(self, tensor: torch.Tensor, token: Any) -> torch.Tensor:
        """The DTensor again."""
        return DTensor.from_local(
            tensor,
            token.mesh,
            token.placements,
            run_check=False,
            shape=token.shape,
            stride=token.stride,
        )

    def inside(self, token: Any) -> Inside | None:
        """Where the local tensor lies in the whole one."""
        inside: Inside = token.inside
        return inside


Lines = set[tuple[int, ...]]


def cut_lines_of(extension: Extension | None, tokens: Iterable[Any]) -> Lines:
    """The groups of global ranks over which members of a unit were cut before it was built."""
    if extension is None:
        return set()
    all_inside = (extension.inside(token) for token in tokens if token is not None)
    return {_line(line) for inside in all_inside if inside for line in inside.cut_over}


def holders_of(
    groups: Groups,
    root: DeviceMesh | None,
    inside: Inside | None,
    cut_lines: Lines,
    *,
    is_sharded: bool,
) -> tuple[int, ...]:
    """Global ranks that hold the same of a member as this one, ascending.

    `root` is the mesh of which the unit's is a part. Along an axis of it over which members of the
    model were cut (`cut_lines`), ranks hold the same of those that were not. What else is along its
    axes is another model, or another part of it.
    """
    own, everyone = _line(groups.shard.global_ranks), {_line(c.global_ranks) for c in groups.comms}
    # Without a larger mesh the unit's own groups are all that is known of who holds the same.
    if root is None:
        if groups.replicate is not None or not is_sharded:
            return _line((groups.replicate or groups.shard).global_ranks)
        return (groups.shard.global_ranks[groups.shard.rank],)
    cutting = set() if inside is None else set(map(_line, inside.cut_over))
    if is_sharded:
        cutting.add(own)
    return _along(root, (cut_lines | everyone) - cutting)


def owners_of(
    groups: Groups, mesh: DeviceMesh | None, inside: Inside | None
) -> tuple[int, ...] | None:
    """Global ranks that a member is sharded, repeated and cut over, ascending; None when this rank
    cannot know them all.

    `mesh` is the unit's own mesh.
    """
    cut_over = () if inside is None else inside.cut_over
    if not cut_over:
        return groups.members
    root = None if mesh is None else larger_mesh(mesh)
    if root is None:
        return None
    lines = {_line(comm.global_ranks) for comm in groups.comms}
    return _along(root, lines | set(map(_line, cut_over)))


def _line(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _along(root: DeviceMesh, lines: Lines) -> tuple[int, ...]:
    """Global ranks that are reached from this one along those axes of the mesh that are `lines`."""
    where: list[Any] = (root.mesh == dist.get_rank()).nonzero()[0].tolist()
    for axis in range(root.mesh.ndim):
        if _line(line_through_here(root, axis)) in lines:
            where[axis] = slice(None)
    return _line(int(rank) for rank in root.mesh[tuple(where)].flatten())
