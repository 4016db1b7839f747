"""One parameter of a unit that stays itself: a DTensor while sharded, whole while gathered.

    local      this rank's part of the parameter along `dim`, as `torch.chunk` cuts; what the
               optimizer steps, and the local tensor of the DTensor that modules show
    buffer     the memory of `local`, with zeros behind it up to the largest rank's part: 1-D
    whole      the gathered parameter: 1-D memory of the unit, in the compute dtype

How parts become whole is in `sharding.dtensor.gathering`. Of a tensor parallel parameter its own
local tensor is cut; "whole" is that local tensor then.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ckpt.layout.region import row_major_strides
from ckpt.layout.tensor import memory_of
from sharding.dtensor.seam import (
    KNOWN_PLACEMENTS,
    DTensorLike,
    ShownParam,
    concatenated,
    dtensor_over,
    joined_mesh,
    make_dtensor,
    mark_sharded,
    replace_local,
    spec_of,
    strided_shard,
)
from sharding.engine.blocks import Blocks, Cutting, Whole
from sharding.engine.collectives import Comm, RankParts
from sharding.engine.store import ModuleParam, OutgoingForm
from sharding.engine.streams import Streams
from sharding.engine.torch_seam import grad_dtype_of, put_all, set_grad_dtype

Shape = tuple[int, ...]


class DataAxes(NamedTuple):
    """Which axes of a mesh for everything are those of data parallelism."""

    mesh: DeviceMesh
    shard: tuple[int, ...]
    """Empty where parameters are only repeated."""
    replicate: tuple[int, ...]

    @classmethod
    def named(cls, mesh: DeviceMesh, dims: Any) -> DataAxes:
        """Those with the names that a `DataParallelMeshDims` has."""
        names = mesh.mesh_dim_names or ()
        axes = (tuple(map(names.index, some)) for some in (dims.shard_names, dims.replicate_names))
        return cls(mesh, *axes)


@dataclass(frozen=True)
class DataMesh:
    """Over which ranks a unit is sharded, and over which it is repeated."""

    mesh: DeviceMesh
    """One axis (shard, or replicate where nothing is sharded), or two (replicate, shard)."""
    shard: Comm
    replicate: Comm | None
    within: DataAxes | None = None
    """Set where parameters are DTensors on a larger mesh, of which `mesh` is a part."""

    @property
    def is_repeated_only(self) -> bool:
        """Whether every rank holds whole parameters, so that only gradients are exchanged."""
        return self.replicate is not None and self.mesh.ndim == 1

    @property
    def size(self) -> int:
        """Ranks that see different data."""
        return self.shard.size * (1 if self.replicate is None else self.replicate.size)


@dataclass(frozen=True)
class Keeping:
    """How parameters of a unit are kept."""

    device: torch.device
    """Where they are gathered and computed with."""
    policy: MixedPrecisionPolicy
    follows_grad_dtype: bool = False
    """Whether a parameter's `grad_dtype` says how its gradients are summed, as from torch 2.15 on.
    """
    offload: bool = False
    """Whether shards live in the host's memory."""
    pin: bool = False
    """Whether that memory is pinned."""


class ShardedParam:
    """See the head of this file."""

    def __init__(
        self, module_param: ModuleParam, data: DataMesh, keeping: Keeping, placement: object
    ) -> None:
        self.data = data
        self.keeping = keeping
        param = module_param.param
        self.tensor_parallel: DTensorLike | None = None
        values = param.detach()
        if isinstance(param, DTensor):
            self.tensor_parallel = _like(param)
            values = memory_of(values)
        self.dim = _checked_dim(module_param.fqn, placement, param, values, data.shard.size)
        self.shape: Shape = tuple(values.shape)
        """Of the whole parameter, as modules compute with it."""
        within = data.within
        self.axis: int | None
        """Of the mesh in `like`, along which the parameter is cut; None where it is not."""
        if within is None:
            self.like = _sharded_like(module_param.fqn, param, self.dim, data)
            self.axis = None if data.is_repeated_only else data.mesh.ndim - 1
        else:
            self.like, self.axis = _like_within(module_param.fqn, param, self.dim, data, within)
        self._spec = spec_of(self.like, values.dtype)
        self.buffer = values.new_empty(0)
        # With few rows the last ranks have none: their part starts at the end, and is empty.
        first = min(data.shard.rank * self.chunk, self.shape[self.dim])
        local = self._padded(values.narrow(self.dim, first, self.own_shape[self.dim]))
        self.param = nn.Parameter(self.to_dtensor(local), requires_grad=param.requires_grad)
        set_grad_dtype(self.param, grad_dtype_of(param))
        # Not the original: its memory is to be freed with its last user.
        self.module_param = module_param._replace(param=self.param)
        self._adopted = memory_of(self.param)
        for name, value in vars(param).items():
            if not name.startswith("_"):  # a user's own marks, not torch's
                setattr(self.param, name, value)
        mark_sharded(param, module_param.fqn)
        put_all([module_param.places], [self.param])

    # --- geometry -------------------------------------------------------------------------------

    @property
    def fqn(self) -> str:
        """Its first name."""
        return self.module_param.fqn

    @functools.cached_property
    def chunk(self) -> int:
        """Rows (indices of `dim`) of the first rank's part, the largest."""
        return -(-self.shape[self.dim] // self.data.shard.size)

    @functools.cached_property
    def row_numel(self) -> int:
        """Elements of one index of `dim`."""
        return math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @functools.cached_property
    def part_numel(self) -> int:
        """Elements of the first rank's part, the largest."""
        return self.chunk * self.row_numel

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether all ranks' parts are equally long."""
        return self.part_numel * self.data.shard.size == self.numel

    @functools.cached_property
    def own_shape(self) -> Shape:
        """Of this rank's part."""
        first = min(self.data.shard.rank * self.chunk, self.shape[self.dim])
        rows = min(self.chunk, self.shape[self.dim] - first)
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        """Of the shard."""
        return self.param.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the gathered parameter."""
        wanted = self.keeping.policy.param_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.dtype

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Of the shard's gradient; None for as it comes from the reduction."""
        wanted = grad_dtype_of(self.param)
        return self.dtype if wanted is None else wanted.dtype

    @property
    def summed_dtype(self) -> torch.dtype | None:
        """Of gradients before they are reduced; None for as they come."""
        return self.keeping.policy.reduce_dtype or self.grad_dtype

    @property
    def view_grad_dtype(self) -> torch.dtype | None:
        """What autograd brings gradients into. A wider dtype is left to the reduction, which casts
        where it packs; but one that is summed over other axes of a mesh is summed in it.
        """
        summed = self.summed_dtype
        if summed is None or self.tensor_parallel is not None:
            return summed
        computed = self.compute_dtype
        both_float = summed.is_floating_point and computed.is_floating_point
        return None if both_float and summed.itemsize > computed.itemsize else summed

    # --- the shard ------------------------------------------------------------------------------

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, as the optimizer sees it: the very object that the DTensor holds."""
        return memory_of(self.param)

    def to_dtensor(self, local: torch.Tensor) -> DTensor:
        """A tensor like this rank's part as a DTensor like the parameter."""
        # The spec is kept: each step makes a DTensor for every new gradient.
        if local.dtype != self._spec.dtype:
            self._spec = spec_of(self.like, local.dtype)
        return dtensor_over(local, self._spec)

    @property
    def known(self) -> ShownParam:
        """As the first place shows it."""
        module, name = self.module_param.places[0]
        return ShownParam(module, name, self.param, self._adopted)

    def adopt(self) -> bool:
        """Follow what was put in place of the sharded parameter, or of its memory; whether anything
        was.

        `load_state_dict(assign=True)` puts another object there, `_apply` other memory. Raises
        RuntimeError, naming the parameter, for what does not fit.
        """
        current = self.module_param.places[0].current()
        if current is not self.param:
            if not isinstance(current, DTensor) or not isinstance(current, nn.Parameter):
                raise RuntimeError(
                    f"{self.fqn}: was replaced by a {type(current).__name__}, expected a DTensor "
                    "parameter sharded like it; load a sharded state dict, or copy values into it"
                )
            if grad_dtype_of(current) is None:  # a load or a cast makes parameters without one
                set_grad_dtype(current, grad_dtype_of(self.param))
            self.param = current
            put_all([self.module_param.places], [current])
        local = memory_of(self.param)
        if local is self._adopted:
            return False
        if tuple(local.shape) != self.own_shape:
            raise RuntimeError(
                f"{self.fqn}: this rank's part has shape {tuple(local.shape)}, expected "
                f"{self.own_shape} of {self.shape}; load values that are sharded alike"
            )
        # Older state dicts keep the old buffer and what lies in it.
        self._adopted = self._padded(local.detach())
        replace_local(self.param, self._adopted)
        return True

    def _padded(self, local: torch.Tensor) -> torch.Tensor:
        """Copy this rank's part into a new buffer with padding; returns it as it lies there."""
        options: dict[str, object] = {}
        if self.keeping.offload and not local.is_meta:
            options = {"device": torch.device("cpu"), "pin_memory": self.keeping.pin}
        padded = local.new_zeros(self.padded_shape, **options)  # type: ignore[call-overload]
        kept: torch.Tensor = padded.narrow(self.dim, 0, local.shape[self.dim])
        kept.copy_(local)
        self.buffer = padded.view(-1)
        return kept

    @functools.cached_property
    def padded_shape(self) -> Shape:
        """Of the largest rank's part."""
        return (*self.shape[: self.dim], self.chunk, *self.shape[self.dim + 1 :])

    def by_rank(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole parameter in the index space (rank, before `dim`, the rest); even parts only."""
        before = math.prod(self.shape[: self.dim])
        return whole.view(before, self.data.shard.size, -1).transpose(0, 1)

    # --- gradients ------------------------------------------------------------------------------

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of what `view` made, as a plain tensor; a tensor parallel one is brought to
        the parameter's placements first.
        """
        grad = grad.detach()
        wanted = self.tensor_parallel
        if wanted is None:
            return grad
        if not isinstance(grad, DTensor):
            raise AssertionError(f"{self.fqn}: expected its gradient to be a DTensor like it")
        placements = list(wanted.placements)
        within = self.data.within
        for axis in () if within is None else (*within.shard, *within.replicate):
            placements[axis] = grad.placements[axis]  # summed over these by the unit's reduction
        if list(grad.placements) != placements:
            grad = grad.redistribute(placements=placements)
        return memory_of(grad)

    def gradient_parts(
        self, grad: torch.Tensor, form: OutgoingForm
    ) -> tuple[RankParts, torch.Tensor | None]:
        """The gradient in that form, cut into the ranks' parts, and the buffer of the
        pool that holds it; None where it lies in `grad` itself.
        """
        dtype, scale, pool = form.dtype, form.scale, form.pool
        part_numel = self.part_numel
        # Sent from where autograd has put it: the common case copies nothing.
        if self.dim == 0 and grad.dtype == dtype and scale == 1.0 and grad.is_contiguous():
            return RankParts(grad.view(-1), part_numel), None
        if pool is None:
            buffer = torch.empty(self.numel, dtype=dtype, device=grad.device)
        else:
            buffer = pool.take(self.numel, dtype, grad.device)
        if self.dim == 0:
            target, source = buffer.view(self.shape), grad
        else:
            source = self.by_rank(grad.contiguous())
            target = buffer.view(source.shape)
        if scale != 1.0 and grad.dtype == dtype:
            torch.mul(source, scale, out=target)
        else:
            # Cast first: scaled in their own dtype, narrow gradients would be rounded.
            target.copy_(source)
            if scale != 1.0:
                target.mul_(scale)
        return RankParts(buffer, part_numel), buffer

    def add_gradient(self, new: torch.Tensor, streams: Streams) -> None:
        """Add a reduced gradient, of the shard's dtype and as many elements as this rank's part,
        or padding behind them too, to the one it has.

        With offloading the host may look at it once the streams have finished.
        """
        new = new[: math.prod(self.own_shape)].view(self.own_shape)
        before = None if self.param.grad is None else memory_of(self.param.grad)
        if self.keeping.offload:
            # Added on the device: the host would have to wait for the reduction first.
            if before is not None:
                new = streams.to_device(before, new.device).add_(new)
            new = streams.to_host(new, pin=self.keeping.pin, into=before)
        elif before is not None:
            before.add_(new)
        if before is None:
            self.param.grad = self.to_dtensor(new)

    # --- a smaller shard after the forward ------------------------------------------------------

    def smaller_parts(self, whole: torch.Tensor, comm: Comm) -> RankParts:
        """The gathered parameter as the equal parts, along dim 0, of a group of fewer ranks: their
        number divides that of the shard group, so that padding for these is enough.
        """
        part_numel = -(-self.shape[0] // comm.size) * math.prod(self.shape[1:])
        return RankParts(whole[: part_numel * comm.size], part_numel)

    def smaller_dtensor(self, part: torch.Tensor, comm: Comm, mesh: DeviceMesh) -> nn.Parameter:
        """What modules show between forward and backward: this rank's of those parts, without
        padding, on that mesh.
        """
        chunk = -(-self.shape[0] // comm.size)
        rows = max(min(chunk, self.shape[0] - comm.rank * chunk), 0)
        shape = (rows, *self.shape[1:])
        local = part[: math.prod(shape)]
        like = DTensorLike(
            mesh,
            (Replicate(), Shard(0)),
            torch.Size(self.shape),
            row_major_strides(self.shape),
        )
        made = make_dtensor(local.view(shape), like)
        shown = nn.Parameter(made, requires_grad=self.param.requires_grad)
        set_grad_dtype(shown, grad_dtype_of(self.param))
        return shown


def _like(tensor: DTensor) -> DTensorLike:
    return DTensorLike(
        tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride())
    )


def _checked_dim(
    fqn: str, placement: object, param: nn.Parameter, values: torch.Tensor, ranks: int
) -> int:
    """The dim to cut. Raises, naming the parameter, where it cannot be cut."""
    if param.dim() == 0:
        raise ValueError(
            f"{fqn}: scalar parameters cannot be sharded; make it a 1-D tensor with one element"
        )
    for one in param.placements if isinstance(param, DTensor) else ():
        if type(one) not in KNOWN_PLACEMENTS:
            raise NotImplementedError(
                f"{fqn}: has the placement {one!r}, which is not implemented by this version of "
                "sharding; redistribute() it with Shard(dim) or Replicate()"
            )
    if not values.is_contiguous():
        raise NotImplementedError(
            f"{fqn}: is not contiguous (strides {tuple(values.stride())} of shape "
            f"{tuple(values.shape)}); call contiguous() on it before fully_shard"
        )
    if isinstance(placement, Blocks | Whole):
        _check_chunks(fqn, placement, param, ranks)
        placement = None
    placement = Shard(0) if placement is None else placement
    if type(placement) is not Shard:  # what derives from it cuts in another way
        raise ValueError(
            f"{fqn}: shard_placement_fn returned {placement!r}, expected Shard(dim) or None"
        )
    dim = placement.dim + param.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.dim():
        raise AssertionError(
            f"{fqn}: shard_placement_fn returned {placement!r} for a tensor of {param.dim()} dims"
        )
    if dim > 0 and values.shape[dim] % ranks != 0:
        raise NotImplementedError(
            f"{fqn}: dim {dim} of shape {tuple(values.shape)} does not divide by {ranks} ranks; "
            "only dim 0 may be cut unevenly"
        )
    return dim


def _check_chunks(fqn: str, cutting: Cutting, param: nn.Parameter, ranks: int) -> None:
    """Raise ValueError, naming the parameter, where DTensor's equal chunks of dim 0 cut blocks."""
    shape = tuple(param.shape)
    rows = -(-shape[0] // ranks)
    run = rows * math.prod(shape[1:])
    grain = cutting.granularity(fqn, shape)
    if isinstance(param, DTensor) or (rows < shape[0] and run % grain != 0):
        raise ValueError(
            f"{fqn}: {cutting} cannot be kept by fully_shard, which cuts {shape} into chunks of "
            f"{rows} of dim 0, as DTensors are; wrap with FullyShardedDataParallel("
            "use_orig_params=True), which cuts where you say"
        )


def _sharded_like(fqn: str, param: nn.Parameter, dim: int, data: DataMesh) -> DTensorLike:
    """Mesh, placements and geometry of the sharded DTensor."""
    shape, stride = param.shape, row_major_strides(param.shape)
    repeated: tuple[Placement, ...] = () if data.replicate is None else (Replicate(),)
    if not isinstance(param, DTensor):
        cut = () if data.is_repeated_only else (Shard(dim),)
        return DTensorLike(data.mesh, (*repeated, *cut), shape, stride)
    inner = _like(param)
    mesh = joined_mesh(data.mesh, inner.mesh)
    if mesh is None:
        raise AssertionError(
            f"{fqn}: lies on {inner.mesh}, which must have named axes over the ranks of "
            f"{data.mesh}, other than those of fully_shard: pass init_device_mesh(..., "
            "mesh_dim_names=...)['dp'] and parallelize over [...]['tp']"
        )
    own = () if data.is_repeated_only else (_cut_before(inner, dim),)
    return DTensorLike(mesh, (*repeated, *own, *inner.placements), shape, tuple(inner.stride))


def _cut_before(inner: DTensorLike, dim: int, first: int = 0) -> Placement:
    """The cut along an axis of data parallelism of what the axes of `inner`, from `first` on, have
    cut already.
    """
    # DTensor cuts by mesh axes from left to right; here the axes to the right cut first. A strided
    # shard says so, and without it a full tensor would be put together in the wrong order.
    placements = inner.placements[first:]
    ahead = [
        inner.mesh.size(axis)
        for axis, placement in enumerate(placements, first)
        if not placement.is_replicate() and getattr(placement, "dim", None) == dim
    ]
    parts = math.prod(ahead)
    return strided_shard(dim, parts) if parts > 1 else Shard(dim)


def _like_within(
    fqn: str, param: nn.Parameter, dim: int, data: DataMesh, within: DataAxes
) -> tuple[DTensorLike, int | None]:
    """The sharded DTensor of one that lies whole along the data axes of a mesh for everything, and
    the axis of its mesh that it is cut along; None without an axis to shard over.

    Several axes to shard over become one. Raises ValueError, naming the parameter.
    """
    if not isinstance(param, DTensor) or param.device_mesh != within.mesh:
        raise ValueError(
            f"{fqn}: with dp_mesh_dims all parameters are DTensors on the mesh that is passed; "
            "call distribute_module on the model first"
        )
    names = within.mesh.mesh_dim_names or ()
    inner = _like(param)
    for axis in (*within.shard, *within.replicate):
        if not isinstance(inner.placements[axis], Replicate):
            raise ValueError(
                f"{fqn}: is {inner.placements[axis]} along {names[axis]!r}, expected Replicate(): "
                "fully_shard cuts along the axes of dp_mesh_dims itself"
            )
    if not within.shard:
        return inner, None
    first = min(within.shard)
    own = _cut_before(inner, dim, first + 1)
    if len(within.shard) == 1:
        placements = (*inner.placements[:first], own, *inner.placements[first + 1 :])
        return DTensorLike(within.mesh, placements, param.shape, inner.stride), first
    # Several axes to shard over are one flattened axis: it stands where the first of them stood.
    parts: list[DeviceMesh] = []
    cut: list[Placement] = []
    axis_of_cut = 0
    for axis, name in enumerate(names):
        if axis == first:
            parts.append(data.mesh)
            cut += [] if data.replicate is None else [Replicate()]
            axis_of_cut = len(cut)
            cut.append(own)
        elif axis not in within.shard and axis not in within.replicate:
            parts.append(within.mesh[name])
            cut.append(inner.placements[axis])
    return DTensorLike(concatenated(parts), tuple(cut), param.shape, inner.stride), axis_of_cut
