"""Members on their way into a flat parameter: which can share one, and how each lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt.layout.region import row_major_strides
from sharding.engine.blocks import Cutting
from sharding.engine.store import ModuleParam
from sharding.flat.layout import LocalPart, Member, memory_strides

if TYPE_CHECKING:
    from sharding.engine.extensions import Extension


class FlatParameter(nn.Parameter):
    """The 1-D parameter that a unit shows instead of its members."""

    # torch recognizes its own flat parameters by this. `ckpt` needs it too: a single 1-D member
    # may have the shape of the whole, and is still not this parameter.
    _is_flat_param = True

    def name_members(self, names: tuple[str, ...]) -> None:
        """Say what the members are called below the wrapper, where torch's functions read it."""
        self._fqns = names


def flattened_members(
    module_params: Sequence[ModuleParam], extension: Extension | None
) -> tuple[list[ModuleParam], tuple[Any, ...]]:
    """The members as the extension would have them flattened, as Parameters of their own in the
    place of the originals, and its tokens.
    """
    members: list[ModuleParam] = []
    tokens: list[Any] = []
    for item in module_params:
        tensor, token = item.param.detach(), None
        if extension is not None and not isinstance(item.param, FlatParameter):
            tensor, token = extension.before_flatten(item.fqn, item.param)
        if token is not None:
            param = nn.Parameter(tensor.detach(), requires_grad=item.param.requires_grad)
            for place in item.places:
                place.put(param)
            item = item._replace(param=param)
        members.append(item)
        tokens.append(token)
    return members, tuple(tokens)


def check_flattenable(module_params: Sequence[ModuleParam], *, use_orig_params: bool) -> None:
    """Raise ValueError, naming the parameters, when they cannot share a flat parameter."""
    if not module_params:
        raise ValueError("a flat parameter needs at least one parameter")
    for item in module_params:
        if isinstance(item.param, FlatParameter):
            raise ValueError(f"{item.fqn}: is a flat parameter already; do not wrap it again")
        if hasattr(item.param, "placements"):
            raise ValueError(
                f"{item.fqn}: is a DTensor; pass device_mesh, a part of the larger mesh that the "
                "model was parallelized over, or list it in ignored_states"
            )
        if not item.param.dtype.is_floating_point:
            raise ValueError(
                f"{item.fqn}: only floating point parameters can be sharded, got "
                f"{item.param.dtype}; list it in ignored_states"
            )
        if item.param.dim() == 0:
            raise ValueError(
                f"{item.fqn}: scalar parameters cannot be sharded; make it a 1-D tensor with one "
                "element"
            )
    first = module_params[0]
    for item in module_params[1:]:
        for what in ("dtype", "device"):
            ours, theirs = getattr(first.param, what), getattr(item.param, what)
            if ours != theirs:
                raise ValueError(
                    f"parameters of one unit need one {what}: {first.fqn} has {ours}, {item.fqn} "
                    f"has {theirs}; wrap them apart or convert one"
                )
        if not use_orig_params and item.param.requires_grad != first.param.requires_grad:
            raise ValueError(
                f"one is trainable and the other frozen: {first.fqn}, {item.fqn}; wrap them apart "
                "or pass use_orig_params=True"
            )


def in_memory_order(tensor: torch.Tensor, member: Member) -> torch.Tensor:
    """The tensor's elements as the flat parameter stores them, 1-D; a view where possible."""
    # Not `reshape`: of channels-last memory that would be a copy in another order.
    if tensor.stride() == member.stride:
        return tensor.as_strided((member.numel,), (1,), tensor.storage_offset())
    copy = torch.empty_strided(
        member.shape, member.stride, dtype=tensor.dtype, device=tensor.device
    )
    copy.copy_(tensor)
    return copy.as_strided((member.numel,), (1,))


def member_view(flat: torch.Tensor, member: Member) -> torch.Tensor:
    """A member in an unsharded flat tensor, in its own shape and strides."""
    return flat.as_strided(member.shape, member.stride, flat.storage_offset() + member.start)


def part_view(shard: torch.Tensor, member: Member, part: LocalPart | None) -> torch.Tensor:
    """A rank's part of a member in its shard, as optimizers see it; see `Member.part_shape`."""
    if part is None:
        return shard[:0].view(member.part_shape(0))
    run = shard[part.in_shard : part.in_shard + part.numel]
    if member.is_row_major:
        return run.view(member.part_shape(part.numel))
    # In another order only whole members have rows.
    return (
        run
        if member.part_shape(part.numel) == (part.numel,)
        else run.as_strided(member.shape, member.stride)
    )


def member_of(item: ModuleParam, cutting: Cutting | None = None) -> Member:
    """The parameter, which may be cut by `cutting` only, for the layout to put somewhere.

    Raises ValueError, naming it, where its blocks are no runs of its memory.
    """
    shape = tuple(item.param.shape)
    stride = memory_strides(shape, item.param.stride())
    granularity = 0 if cutting is None else cutting.granularity(item.fqn, shape)
    member = Member(item.fqn, shape, stride, granularity)
    if granularity and not member.is_whole and stride != row_major_strides(shape):
        raise ValueError(
            f"{item.fqn}: has strides {stride}, so that {cutting} are no runs of its memory; make "
            "it contiguous() before wrapping, or return Whole()"
        )
    return member
