"""What torch's DTensor and DeviceMesh have no public name for, each behind one function of ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as spec_types
from torch.distributed.tensor.placement_types import _StridedShard

from sharding.engine.torch_seam import root_mesh

KNOWN_PLACEMENTS = (Replicate, Shard, Partial, _StridedShard)
"""By class: what derives from one of them lies in another way."""


class DTensorLike(NamedTuple):
    """All of a DTensor but its values: mesh, placements, and the logical tensor's geometry."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


class ShownParam(NamedTuple):
    """A sharded parameter that a module shows, as it is known."""

    module: nn.Module
    name: str
    param: nn.Parameter
    local: torch.Tensor
    """Its memory on this rank."""


class DTensorSpec(NamedTuple):
    """What torch keeps at a DTensor of one dtype. Many DTensors may have one."""

    dtype: torch.dtype
    torchs: Any


def spec_of(like: DTensorLike, dtype: torch.dtype) -> DTensorSpec:
    """For DTensors like that, of that dtype."""
    meta = spec_types.TensorMeta(like.shape, like.stride, dtype)
    torchs = spec_types.DTensorSpec(like.mesh, like.placements, tensor_meta=meta)
    return DTensorSpec(dtype, torchs)


def dtensor_over(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over `local` itself, on whatever device that is, without autograd."""
    # `from_local` is differentiable: it would make a node of the graph, and a new spec, each time.
    constructor: Any = DTensor
    made: DTensor = constructor(local, spec.torchs, requires_grad=False)
    return made


def make_dtensor(local: torch.Tensor, like: DTensorLike) -> DTensor:
    """The same without a spec at hand."""
    return dtensor_over(local, spec_of(like, local.dtype))


def replace_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Let the DTensor lie in `local` from now on; shape and values must be what it had."""
    dtensor: Any = tensor
    dtensor._local_tensor = local


def as_parameter(tensor: torch.Tensor) -> None:
    """Let `isinstance(tensor, nn.Parameter)` hold, although it is no leaf of the graph."""
    marked: Any = tensor
    marked._is_param = True


def mark_sharded(original: torch.Tensor, fqn: str) -> None:
    """Remember at a parameter that a unit holds it, or a sharded one in its place, as `fqn`."""
    marked: Any = original
    marked._sharded_as = fqn


def sharded_before_as(param: torch.Tensor) -> str | None:
    """The name that `mark_sharded` has set; None for a parameter that no unit holds."""
    name: str | None = getattr(param, "_sharded_as", None)
    return name


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A dim that another axis of the mesh has cut into `split_factor` parts before."""
    made: Placement = _StridedShard(dim, split_factor=split_factor)
    return made


def joined_mesh(data: DeviceMesh, tensor: DeviceMesh) -> DeviceMesh | None:
    """The mesh with the axes of both, which must be named axes over the same ranks; None when they
    are not.
    """
    data_names, tensor_names = data.mesh_dim_names, tensor.mesh_dim_names
    if not data_names or not tensor_names:
        return None
    concatenate: Any = getattr(DeviceMesh, "_concatenate", None)
    if concatenate is not None:
        try:
            # They need not have one root: axes of ranks that are arranged in two ways fit too.
            joined: DeviceMesh = concatenate([data, tensor])
        except RuntimeError:  # other ranks, or axes that overlap
            return None
        return joined
    root = root_mesh(data)
    if not set(tensor_names) <= set(root.mesh_dim_names or ()):
        return None
    # By value: torch may give a tensor an equal mesh that was made before.
    return root[(*data_names, *tensor_names)] if root[tensor_names] == tensor else None


def concatenated(parts: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several parts of a mesh. Needs torch 2.10 or newer."""
    joiner: Any = DeviceMesh
    made: DeviceMesh = parts[0] if len(parts) == 1 else joiner._concatenate(parts)
    return made


def flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Axes of the mesh as one."""
    part: Any = mesh[names]
    made: DeviceMesh = part if len(names) == 1 else part._flatten("_".join(names))
    return made


def versions_of(known: Iterable[ShownParam]) -> list[int]:
    """How often each was written in place, as autograd counts: operations on a DTensor count at the
    DTensor, those on its memory at the memory.
    """
    versions: list[int] = []
    for _, _, param, local in known:
        versions += (param._version, local._version)
    return versions


def replaced(known: Iterable[ShownParam]) -> list[int]:
    """Which of them, by number, are others now: another object, other memory, or memory that was
    given attributes.
    """
    numbers = []
    for number, (module, name, param, local) in enumerate(known):
        shown = module._parameters.get(name)
        dtensor: Any = param
        is_other = shown is not param or dtensor._local_tensor is not local
        if is_other or (type(local) is torch.Tensor and vars(local)):
            numbers.append(number)
    return numbers
