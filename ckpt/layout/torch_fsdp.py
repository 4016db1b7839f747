"""torch's own FSDP1 and FSDP2: where the sharded memory of their parameters is, read from metadata.

Nothing is gathered. What a module shows at the moment (whole parameters after an eval forward, low
precision copies, views) is never looked at.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt.layout.dtensor import FsdpCut, describe_dtensor
from ckpt.layout.flat import FlatMember, flat_views, member_as_param, memory_order
from ckpt.layout.piece import Owned
from ckpt.layout.plain import Ranks, UnsupportedTensor, refuse_unstorable


class AttributeRef(NamedTuple):
    """Where a module tree shows a parameter: an attribute of a module."""

    module: nn.Module
    name: str


class Managed(NamedTuple):
    """What a unit manages as one: a parameter, or a flat parameter with its members.

    `members` has the attributes that show each member, tied ones included. `describe` takes the
    members' names and raises `UnsupportedTensor`. `tied` lists further objects by which optimizers
    may know a member. `sharded` gives the DTensor that is stored, where there is one.
    """

    members: tuple[tuple[AttributeRef, ...], ...]
    describe: Callable[[Sequence[str], Ranks], list[Owned]]
    tied: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    sharded: Callable[[], torch.Tensor] | None = None


# --- FSDP2 ---------------------------------------------------------------------------------------


def is_fsdp2(module: nn.Module) -> bool:
    """Whether `fully_shard` (or torch's `replicate`, its relative) was called on `module`."""
    return _is_of(module, "FSDPModule")


def fsdp2_params(module: nn.Module) -> Iterator[Managed]:
    """The parameters of the unit that `fully_shard(module)` made."""
    for group in _fsdp2_groups(module):
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            places = (
                AttributeRef(info.module, info.param_name),
                *(AttributeRef(*place) for place in shared),
            )
            sharded = partial(_fsdp2_sharded, fsdp_param, places[0])
            describe = partial(_describe_fsdp2, fsdp_param, sharded)
            yield Managed((places,), describe, sharded=sharded)


def _describe_fsdp2(
    fsdp_param: Any, sharded_of: Callable[[], torch.Tensor], fqns: Sequence[str], ranks: Ranks
) -> list[Owned]:
    (fqn,) = fqns
    sharded = sharded_of()
    return [describe_dtensor(fqn, sharded, ranks, fsdp_cut=_fsdp_cut(fsdp_param, sharded))]


def _fsdp2_sharded(fsdp_param: Any, place: AttributeRef) -> torch.Tensor:
    """The sharded parameter of an FSDP2 unit, whatever the module shows.

    Its local tensor is a view of the padded buffer that the unit gathers from, so that a value
    written in place is what the next forward uses.
    """
    sharded: torch.Tensor = fsdp_param.sharded_param
    shown = place.module._parameters.get(place.name)
    # Before the first forward the user may still have replaced the parameter; torch adopts it then.
    if shown is not None and fsdp_param.sharded_state.name == "SHARDED":
        sharded = shown
    return sharded


def _fsdp_cut(fsdp_param: Any, sharded: Any) -> FsdpCut | None:
    info = fsdp_param.mesh_info
    axis = getattr(info, "shard_mesh_dim", None)
    if axis is None:  # replicated only, nothing is cut
        return None
    if getattr(info, "is_spmd_mesh", False):
        # One mesh for everything: the axis has the position that its name has.
        names = sharded.device_mesh.mesh_dim_names
        axis = names.index(info.mesh.mesh_dim_names[axis])
    return FsdpCut(axis, info.shard_mesh_rank)


def reshard_fsdp2(module: nn.Module) -> None:
    """Free gathered copies of the unit of `module`, so that its next use gathers again."""
    for group in _fsdp2_groups(module):
        # A gather that is under way would otherwise be copied out later, over what was loaded.
        group.wait_for_unshard()
        group._to_sharded()


def _fsdp2_groups(module: nn.Module) -> list[Any]:
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group  # before torch 2.12
    return [] if group is None else [group]


def belongs_to_unit_above(module: nn.Module, param: torch.Tensor) -> bool:
    """Whether an FSDP2 unit manages parameters of `module`, by the hook it leaves there, or FSDP1
    has flattened `param` into another one.
    """
    return bool(getattr(param, "_fsdp_flattened", False)) or any(
        getattr(hook, "__module__", "") == "torch.distributed.fsdp._fully_shard._fsdp_param"
        for hook in module._load_state_dict_post_hooks.values()
    )


# --- FSDP1 ---------------------------------------------------------------------------------------


def is_fsdp1(module: nn.Module) -> bool:
    """Whether `module` is a `FullyShardedDataParallel` wrapper."""
    return _is_of(module, "FullyShardedDataParallel")


def is_flat_param(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the flat parameter of an FSDP1 unit."""
    return bool(getattr(tensor, "_is_flat_param", False))


def fsdp1_params(wrapper: nn.Module) -> Iterator[Managed]:
    """The flat parameter of the unit that `wrapper` made; none when it manages nothing."""
    handle: Any = wrapper._handle
    if handle is None:
        return
    flat = handle.flat_param
    members = [[AttributeRef(info.module, info.param_name)] for info in flat._param_infos]
    index_of = {(id(refs[0].module), refs[0].name): index for index, refs in enumerate(members)}
    tied = []
    for number, shared in enumerate(flat._shared_param_infos):
        index = index_of[id(shared.prim_module), shared.prim_param_name]
        members[index].append(AttributeRef(shared.module, shared.param_name))
        # With `use_orig_params`, optimizers may know a tied member by either object.
        if flat._params is not None:
            tied.append((flat._shared_params[number], flat._params[index]))
    places = tuple(tuple(refs) for refs in members)
    yield Managed(places, partial(_describe_fsdp1, wrapper, handle), tuple(tied))


def _describe_fsdp1(wrapper: Any, handle: Any, fqns: Sequence[str], ranks: Ranks) -> list[Owned]:
    """The members of a flat parameter, as this rank holds them.

    One `Owned` for the flat parameter; or one for each original parameter where the unit shows
    those to optimizers (`use_orig_params=True`).
    """
    flat = handle.flat_param
    local = _local_shard(flat).detach()
    holders = _fsdp1_holders(wrapper, handle, ranks)
    owners = _fsdp1_owners(wrapper, handle, ranks)
    refuse_unstorable(fqns[0], local)
    members = [_member(flat, index, fqn, holders) for index, fqn in enumerate(fqns)]
    if flat._params is None:
        return [Owned(flat, local, flat_views(members, local.dtype, base=0), True, owners)]
    return [
        member_as_param(
            flat._params[index], local, member, owners, whole_here=not handle.uses_sharded_strategy
        )
        for index, member in enumerate(members)
    ]


def _member(flat: Any, index: int, fqn: str, holders: tuple[int, ...]) -> FlatMember:
    if flat._param_extensions[index] is not None:
        raise UnsupportedTensor(
            f"{fqn}: FSDP1 around tensor parallel parameters is not supported; "
            "use torch's fully_shard, or save the unwrapped model"
        )
    shape = tuple(flat._shapes[index])
    order = memory_order(fqn, shape, tuple(flat._strides[index]))
    info = flat._shard_param_infos[index]
    here = (0, 0, 0)
    if info.in_shard and math.prod(shape):
        here = (info.intra_param_start_idx, info.numel_in_shard, info.offset_in_shard)
    return FlatMember(fqn, shape, order, *here, holders)


def _local_shard(flat: Any) -> torch.Tensor:
    # Set at the first forward; until then the flat parameter itself is the shard.
    shard: torch.Tensor = getattr(flat, "_local_shard", flat)
    return shard


def _fsdp1_holders(wrapper: Any, handle: Any, ranks: Ranks) -> tuple[int, ...]:
    is_sharded = handle.uses_sharded_strategy
    replicas = getattr(wrapper, "_inter_node_pg", None) if is_sharded else handle.process_group
    if replicas is None:
        return (ranks.rank,)
    return ranks.indices_of(torch.distributed.get_process_group_ranks(replicas))


def _fsdp1_owners(wrapper: Any, handle: Any, ranks: Ranks) -> tuple[int, ...] | None:
    """The ranks that the unit is sharded and repeated over; None when they are not all known.

    Without a mesh a rank knows its own two groups only, but not those of the ranks in them.
    """
    group = torch.distributed.get_process_group_ranks(handle.process_group)
    replicas = getattr(wrapper, "_inter_node_pg", None)
    if replicas is None:
        return ranks.known_of(group)
    mesh = getattr(wrapper, "_device_mesh", None)
    if mesh is not None:
        return ranks.known_of(mesh.mesh.flatten().tolist())
    repeated = torch.distributed.get_process_group_ranks(replicas)
    # The two groups are a row and a column of a grid of ranks; one of them alone may be all of it.
    if len(group) == 1 or len(repeated) == 1:
        return ranks.known_of({*group, *repeated})
    world_size = torch.distributed.get_world_size()
    # A grid with as many cells as there are ranks is the world.
    return ranks.known_of(range(world_size)) if len(group) * len(repeated) == world_size else None


def fsdp1_sharding(
    wrapper: Any,
) -> tuple[torch.distributed.ProcessGroup, Any, dict[str, torch.dtype]]:
    """The group that the wrapper's unit is sharded over, its mesh if it was given one, and the
    original dtypes of its buffers by their names below the wrapper.
    """
    dtypes: dict[str, torch.dtype] = {}
    if getattr(wrapper.mixed_precision, "buffer_dtype", None) is not None:
        dtypes = getattr(wrapper, "_buffer_name_to_orig_dtype", {})
    return wrapper.process_group, getattr(wrapper, "_device_mesh", None), dict(dtypes)


def reshard_fsdp1(wrapper: nn.Module) -> None:
    """Free gathered copies of the wrapper's unit, so that its next use gathers again.

    FSDP1 keeps the root's parameters gathered after a forward; without this the next forward would
    not see what was loaded.
    """
    handle: Any = wrapper._handle
    if handle is None or not hasattr(handle.flat_param, "_local_shard"):
        return  # nothing was gathered before the first forward
    from torch.distributed.fsdp._runtime_utils import _reshard

    _reshard(wrapper, handle, handle.uses_sharded_strategy)


def fsdp1_memory(wrapper: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each object that optimizers know of the unit of `wrapper`, with the unit's own memory."""
    handle: Any = wrapper._handle
    if handle is not None:
        for param in handle.flat_param._params or (handle.flat_param,):
            yield param, _local_shard(handle.flat_param)


# --- both ----------------------------------------------------------------------------------------


def is_summoned(module: nn.Module) -> bool:
    """Whether the unit of `module` cannot be resharded now: it shows full parameters."""
    state: Any = module.training_state if is_fsdp1(module) else None
    return state is not None and state.name == "SUMMON_FULL_PARAMS"


def _is_of(module: nn.Module, class_name: str) -> bool:
    """Whether a module is of a class of torch's FSDP, and does not describe its pieces itself."""
    kind = loaded_class("torch.distributed.fsdp", class_name)
    is_of = kind is not None and isinstance(module, kind)
    return is_of and not hasattr(type(module), "__ckpt_pieces__")


def loaded_class(module_name: str, class_name: str) -> type | None:
    """A class of torch, if anybody has imported its module; if nobody has, it has no instances."""
    module = sys.modules.get(module_name)
    candidate = getattr(module, class_name, None)
    return candidate if isinstance(candidate, type) else None
