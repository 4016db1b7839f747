"""DTensors: from mesh and placements to the pieces that this rank holds.

A placement on a mesh axis cuts one tensor dim, or repeats the tensor. Cuts are applied in the order
of the mesh axes, each to what the cuts before it have left; what is left of a dim is a list of
runs. The pieces are the products of the runs of all dims. The arithmetic is pure: it needs no
process.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import accumulate, product
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.plain import Ranks, UnsupportedTensor, refuse_unstorable
from ckpt.layout.region import Box, Shape, Span, chunk_run
from ckpt.layout.tensor import is_dtensor, local_tensor, memory_of


class Cut(NamedTuple):
    """Dim `dim` is cut into `parts` parts, of which `part` is kept.

    The parts are those of `torch.chunk`: of equal size, rounded up, the last ones smaller or empty.
    With `split_factor` above one, the dim is first cut into that many parts, and that part of each
    of them is kept (torch's strided shards, which stand for cuts that were made in the other
    order).
    """

    dim: int
    parts: int
    part: int
    split_factor: int = 1


def runs_kept(size: int, cuts: Sequence[Cut]) -> list[Span]:
    """What `cuts`, applied in order, leave of a dim of `size`, in the dim's coordinates.

    Runs are in the order in which they lie in local memory, none is empty, neighbours are joined.
    No cuts leave everything.
    """
    runs = [Span(0, size)]
    for cut in cuts:
        length = sum(run.numel for run in runs)
        kept: list[Span] = []
        for index in range(cut.split_factor):
            outer = chunk_run(length, cut.split_factor, index)
            inner = chunk_run(outer.numel, cut.parts, cut.part)
            kept += _positions(runs, outer.start + inner.start, outer.start + inner.stop)
        runs = kept
    return _joined(runs)


def _positions(runs: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Positions `start` to `stop` of the concatenation of `runs`, as runs of the dim."""
    positions = []
    before = 0
    for run in runs:
        first, last = max(start - before, 0), min(stop - before, run.numel)
        if first < last:
            positions.append(Span(run.start + first, run.start + last))
        before += run.numel
    return positions


def _joined(runs: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for run in filter(attrgetter("numel"), runs):
        if joined and joined[-1].stop == run.start:
            joined[-1] = Span(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined


def boxes_kept(shape: Shape, cuts: Sequence[Cut]) -> tuple[Shape, list[tuple[Box, Box]]]:
    """What `cuts` leave of a tensor of `shape`: the local shape, and boxes that cover it.

    Each box is given in the tensor's coordinates and in those of the local tensor. When nothing is
    left there is one pair of boxes without elements.
    """
    # Runs of each dim with their start in local memory.
    per_dim: list[list[tuple[Span, int]]] = []
    local_shape = []
    for dim, size in enumerate(shape):
        runs = runs_kept(size, [cut for cut in cuts if cut.dim == dim])
        starts = list(accumulate((run.numel for run in runs), initial=0))
        per_dim.append(list(zip(runs, starts, strict=False)) or [(Span(0, 0), 0)])
        local_shape.append(starts[-1])
    boxes = []
    for combination in product(*per_dim):
        sizes = tuple(run.numel for run, _ in combination)
        offset = tuple(run.start for run, _ in combination)
        local_offset = tuple(start for _, start in combination)
        boxes.append((Box(offset, sizes), Box(local_offset, sizes)))
    return tuple(local_shape), boxes


def outermost_last(cuts: Sequence[Cut]) -> list[Cut]:
    """The order in which FSDP2 cuts: the axes that were there first (tensor parallel), then its
    own.

    Its own are those that torch writes down as strided. In even cases the result is the same as
    that of `cuts` themselves.
    """
    first = [cut for cut in cuts if cut.split_factor == 1]
    return first + [cut._replace(split_factor=1) for cut in cuts if cut.split_factor != 1]


class FsdpCut(NamedTuple):
    """FSDP2's own cut of a parameter: the mesh axis it is written down for, and the part kept here.

    The part is the rank in the axis' process group. It differs from the coordinate in the mesh when
    the mesh does not list ranks in ascending order, since process groups sort their ranks.
    """

    axis: int
    part: int


def describe_dtensor(
    fqn: str, tensor: torch.Tensor, ranks: Ranks, *, fsdp_cut: FsdpCut | None = None
) -> Owned:
    """The pieces of a DTensor, or of a parameter that is one.

    With `fsdp_cut`, strided placements stand for FSDP2's own order of cuts, which differs from
    their definition when sizes are uneven. For other DTensors the definition counts, unless the
    local tensor can only be explained by that order. Raises `UnsupportedTensor` for pending sums
    (`Partial`), unknown placements, and local tensors that are not what the placements say.
    """
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements: tuple[Any, ...] = tuple(tensor.placements)  # type: ignore[attr-defined]
    local = local_tensor(tensor)
    refuse_unstorable(fqn, local)
    refuse_composite_shards(fqn, local)
    shape: Shape = tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    boxes: Sequence[tuple[Box, Box]]
    holders: tuple[int, ...] = (ranks.rank,)
    if coordinate is None:
        # A rank outside of the mesh has an empty piece, so that all ranks know the same names.
        empty = Box((0,) * len(shape), (0,) * len(shape))
        boxes = [(empty, _within(Box((0,), (0,)), local.dim()))]
    else:
        parts = list(coordinate)
        if fsdp_cut is not None:
            parts[fsdp_cut.axis] = fsdp_cut.part
        sizes = tuple(mesh.shape), tuple(parts), shape, tuple(local.shape)
        try:
            boxes = _boxes_of(_Layout(placements, *sizes, fsdp_cut is not None))
        except UnsupportedTensor as refused:
            raise UnsupportedTensor(f"{fqn}: {refused.problem}") from None
        repeats = [placement.is_replicate() for placement in placements]
        if any(repeats):  # as a rule none; the mesh takes long to list its ranks
            holders = ranks.indices_of(_ranks_along(mesh, repeats))
    pieces = tuple([Piece(fqn, shape, tensor.dtype, *regions, holders) for regions in boxes])
    return Owned(tensor, local, (View(pieces),), True, _owners(mesh, ranks.global_ranks))


def _ranks_along(mesh: Any, repeats: Sequence[bool]) -> list[int]:
    """The global ranks whose coordinates in the mesh are this one's, but along axes that repeat."""
    coordinate = mesh.get_coordinate()
    pairs = zip(repeats, coordinate, strict=True)
    along = tuple(slice(None) if is_repeated else index for is_repeated, index in pairs)
    ranks: list[int] = mesh.mesh[along].flatten().tolist()
    return ranks


class ShardPlace(NamedTuple):
    """Where this rank's shard of a DTensor lies, whatever its local tensor is.

    `boxes` are in the tensor's coordinates and in those of the shard. `owners` are global ranks.
    """

    boxes: tuple[tuple[Box, Box], ...]
    local_shape: Shape
    cut_dims: tuple[int, ...]
    owners: tuple[int, ...]
    mesh: Any
    placements: tuple[Any, ...]
    device: torch.device

    def holders(self, dims: Container[int]) -> tuple[int, ...]:
        """The global ranks with the same of something that is cut with `dims` of the tensor."""
        repeats = [getattr(placement, "dim", None) not in dims for placement in self.placements]
        return tuple(sorted(_ranks_along(self.mesh, repeats)))


def placed(tensor: torch.Tensor) -> ShardPlace:
    """Where the shard lies. Raises `UnsupportedTensor`, without a name, as `describe_dtensor`."""
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements: tuple[Any, ...] = tuple(tensor.placements)  # type: ignore[attr-defined]
    local = memory_of(tensor)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedTensor("this rank is outside of its mesh")
    shape, local_shape = tuple(tensor.shape), tuple(local.shape)
    layout = _Layout(placements, tuple(mesh.shape), tuple(coordinate), shape, local_shape, False)
    boxes = _boxes_of(layout)
    cut = {
        placement.dim
        for placement, size in zip(placements, mesh.shape, strict=True)
        if not placement.is_replicate() and size > 1
    }
    owners = tuple(sorted(mesh.mesh.flatten().tolist()))
    return ShardPlace(
        boxes, local_shape, tuple(sorted(cut)), owners, mesh, placements, local.device
    )


def refuse_composite_shards(fqn: str, local: torch.Tensor) -> None:
    """Raise `UnsupportedTensor` for shards that consist of other tensors: nothing says how these
    are cut where the tensor is.
    """
    if hasattr(local, "__tensor_flatten__"):
        raise UnsupportedTensor(
            f"{fqn}: its shards are of class {type(local).__name__}, and nothing says how what "
            "they consist of is cut; keep plain shards, or let the class offer __ckpt_pieces__()"
        )


class _Layout(NamedTuple):
    """All that the boxes of a DTensor depend on; thousands of tensors share a few of these."""

    placements: tuple[Any, ...]
    mesh_shape: Shape
    parts: Shape
    shape: Shape
    local_shape: Shape
    is_fsdp: bool


@lru_cache(maxsize=1024)
def _boxes_of(layout: _Layout) -> tuple[tuple[Box, Box], ...]:
    """What `boxes_kept` gives for the order of cuts that explains the local tensor.

    Raises UnsupportedTensor without a name.
    """
    placements, mesh_shape, parts, shape, wanted_shape, is_fsdp = layout
    cuts = cuts_of(placements, mesh_shape, parts)
    orders = [cuts]
    if any(cut.split_factor != 1 for cut in cuts):
        orders = [outermost_last(cuts)] if is_fsdp else [cuts, outermost_last(cuts)]
    for order in orders:
        local_shape, boxes = boxes_kept(shape, order)
        # torch gives shards without elements shapes of its own, such as one dim of size 0.
        if local_shape == wanted_shape or (0 in wanted_shape and 0 in local_shape):
            ndim = len(wanted_shape)
            return tuple((region, _within(local_region, ndim)) for region, local_region in boxes)
    raise UnsupportedTensor(
        f"its local tensor has shape {wanted_shape}, but placements {placements} of shape {shape} "
        f"on a mesh of shape {mesh_shape} give {local_shape} at {parts}; redistribute it, or build "
        "it with the right shape"
    )


def cuts_of(placements: Sequence[Any], mesh_shape: Shape, coordinate: Sequence[int]) -> list[Cut]:
    """The cuts that `placements` stand for at `coordinate` of the mesh, in order of its axes.

    Raises UnsupportedTensor without a name.
    """
    cuts = []
    for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise UnsupportedTensor(
                f"its placement {placement} is a sum that is still pending; "
                "call redistribute() with Replicate() or Shard(dim) first"
            )
        dim = getattr(placement, "dim", None)
        if not isinstance(dim, int):
            raise UnsupportedTensor(
                f"unknown placement {placement}; redistribute() with Replicate() or Shard(dim)"
            )
        cuts.append(Cut(dim, count, index, int(getattr(placement, "split_factor", 1))))
    return cuts


@lru_cache(maxsize=64)
def _owners(mesh: Any, global_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of the mesh, which takes long to list them; equal meshes are equal keys."""
    return Ranks(0, global_ranks).known_of(mesh.mesh.flatten().tolist())


def repeated_over_wider_meshes(owned: Sequence[Owned], ranks: Ranks) -> list[Owned]:
    """The DTensors among `owned`, all of one module, with the replicas that their own mesh hides.

    Under FSDP2 over tensor parallel, a parameter that is not tensor parallel lies on the mesh of
    FSDP alone, one such mesh per tensor parallel rank: the tensor is repeated over the axes that
    the module's other tensors lie on. Nobody promises that these replicas stay equal. A module
    whose tensors all lie on one mesh comes back as it is.
    """
    meshes: dict[tuple[str, ...], Any] = {}
    for entry in owned:
        if is_dtensor(entry.param):
            mesh: Any = entry.param.device_mesh  # type: ignore[attr-defined]
            meshes.setdefault(tuple(mesh.mesh_dim_names or ()), mesh)
    wider_of: dict[tuple[str, ...], Any] = {}
    for names in meshes:
        # A mesh without names does not say which axes it lacks.
        wider = [other for other in meshes if names and set(names) < set(other)]
        wider_of[names] = meshes[max(wider, key=len)] if wider else None
    if not any(wider is not None for wider in wider_of.values()):
        return list(owned)
    return [_repeated(entry, wider_of, ranks) for entry in owned]


def _repeated(owned: Owned, wider_of: dict[tuple[str, ...], Any], ranks: Ranks) -> Owned:
    if not is_dtensor(owned.param):
        return owned
    param: Any = owned.param
    names = tuple(param.device_mesh.mesh_dim_names or ())
    wider = wider_of[names]
    if wider is None or wider.get_coordinate() is None:
        return owned
    cut_names = {
        name
        for name, placement in zip(names, param.placements, strict=True)
        if not placement.is_replicate()
    }
    repeats = [name not in cut_names for name in wider.mesh_dim_names]
    holders = ranks.indices_of(_ranks_along(wider, repeats))
    held = owned.with_pieces(lambda piece: piece._replace(holders=holders))
    return held._replace(synchronized=False)


def _within(local_region: Box, ndim: int) -> Box:
    """A box without elements takes the number of dims of its tensor, which torch may have made
    1-D.
    """
    if len(local_region.shape) == ndim:
        return local_region
    return Box((0,) * ndim, (0,) * ndim)
