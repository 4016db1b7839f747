"""The public functions for state dicts of models and optimizers, however they are sharded.

Dicts are keyed by the names of the bare module and come in three forms, see `StateDictType`. All
functions but the last two are collective over `process_group`, by default the ranks that the
model's engines lay it out over, whatever other ranks of the world do: those of the groups of its
units, of its meshes, of DDP. A model that no engine shares is each rank's own: what is taken of it
comes from this rank alone, and a load is collective over all ranks, because it may share a dict.
Errors are the same on all ranks that take part, with every problem named.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ckpt.layout.memory import gc_paused
from ckpt.layout.plain import Ranks
from ckpt.process import world_of, world_of_members
from ckpt.state.half_loaded import filling
from ckpt.state.requested import STATE_DICT, LoadRequest, Unshared
from ckpt.state.types import Loaded
from ckpt.state_dict.config import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
    model_config,
    optim_config,
)
from ckpt.state_dict.forms import DictForm
from ckpt.state_dict.listed import ListedParams
from ckpt.state_dict.model import take_model
from ckpt.state_dict.model_load import put_model
from ckpt.state_dict.optimizer_load import OptimizerTarget, prepare_load
from ckpt.state_dict.optimizers import take_optimizer
from ckpt.state_dict.rekey import rekey_optimizer_state_dict
from ckpt.state_dict.sharing import ranks_that_share
from ckpt.world.base import SoloWorld, World

__all__ = [
    "load_model_state_dict",
    "load_optimizer_state_dict",
    "model_state_dict",
    "optimizer_state_dict",
    "optimizer_state_dict_to_load",
    "rekey_optimizer_state_dict",
    "shard_optimizer_state_dict",
]

Optimizer = torch.optim.Optimizer


def model_state_dict(
    model: nn.Module,
    type: StateDictType = StateDictType.FULL,
    config: StateDictConfig | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The parameters, persistent buffers and extra states of `model` by bare name.

    FULL: whole tensors of their own memory; with `rank0_only` all but the first of the ranks get {}
    and need no memory for it. SHARDED: one chunk of dim 0 per rank, as DTensor where the parameter
    is one or its unit has a mesh, else as torch's ShardedTensor; what every rank holds whole stays
    a plain tensor. LOCAL: what this rank holds, without padding, as 1-D ShardedTensors of live
    memory.
    Tied tensors appear under all their names. Raises InvalidState for what has no such form.
    """
    return take_model_dict(model, type, config, process_group)


def take_model_dict(
    model: nn.Module,
    type: StateDictType,
    config: StateDictConfig | None,
    process_group: dist.ProcessGroup | None = None,
    copied: Container[int] | None = None,
) -> dict[str, Any]:
    """`model_state_dict`; with `copied`, identities of parameters, all other tensors of the model
    are in the dict as they are: live memory, each rank's own.
    """
    config = model_config(type, config)
    place = _taking_place(model, process_group)
    output = place.output(type, config)._replace(copied=copied)
    with gc_paused():
        return take_model(model, output, place.world, _ranks(place.world))


def load_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    rank0_only: bool = False,
    cast: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a dict of any form, of any number of ranks, into `model`, in place and bit for bit.

    Names of wrappers in keys are seen through. Tensors may be plain, DTensors or ShardedTensors. A
    rank whose dict is empty gets its bytes from the others; with `rank0_only` only the first rank's
    dict counts. `strict=False` tolerates missing and unexpected names. `cast=True` takes other
    dtypes too, converted as `copy_` does. Raises Mismatch with the model as it was, LoadInterrupted
    when it is half-loaded.
    """
    return load_model(model, state_dict, LoadRequest(strict, rank0_only, cast), process_group)


def load_model(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    request: LoadRequest,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """`load_model_state_dict` for a caller with other arguments, which its errors advise."""
    world = _loading_world(model, process_group)
    with gc_paused():
        loading = put_model(model, state_dict, world, _ranks(world), request)
        with filling(model, "a state dict"):
            return loading.fill()


def optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    type: StateDictType = StateDictType.FULL,
    config: OptimStateDictConfig | None = None,
    *,
    state_dict: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """`{"state": {fqn: ...}, "param_groups": [...]}` of one or several optimizers of `model`.

    State shaped like its parameter comes in the form that the parameter has in
    `model_state_dict`; scalars, numbers and other values as they are. Parameters without state are
    left out. `state_dict`, as `optimizer.state_dict()` gives it, takes the place of the live state.
    Raises InvalidState for state that belongs to no parameter, and for steps and small plain state
    that differ between ranks, except in LOCAL form, where each rank has its own.
    """
    request = TakeRequest(type, config, state_dict)
    return take_optimizer_dict(model, optimizer, request, process_group)


class TakeRequest(NamedTuple):
    """Which state dict of an optimizer is requested, see `optimizer_state_dict`."""

    type: StateDictType
    config: OptimStateDictConfig | None
    state_dict: Mapping[str, Any] | None = None
    beside: Unshared = Unshared.COMPARED


def take_optimizer_dict(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    request: TakeRequest,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """`optimizer_state_dict` for a caller under whom ranks may have parameters of their own."""
    config = optim_config(request.type, request.config)
    place = _taking_place(model, process_group)
    world, output = place.world, place.output(request.type, config)
    output = output._replace(beside=request.beside)
    with gc_paused():
        return take_optimizer(
            model, _several(optimizer), output, world, _ranks(world), state_dict=request.state_dict
        )


def load_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    rank0_only: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a dict of any form into one or several optimizers of `model`.

    Keys are names, or ids where each parameter has one name. State that the dict lacks is removed;
    members of a flat parameter that have none get zeros. State under keys that are no parameters
    goes into the (first) optimizer as it is. The rest is as for `load_model_state_dict`.
    """
    world = _loading_world(model, process_group)
    optimizers = _several(optimizer)
    target = OptimizerTarget(model, optimizers, world, _ranks(world), fresh=False)
    with gc_paused():
        loading = prepare_load(target, state_dict, LoadRequest(strict, rank0_only))
        # What fails before here has changed nothing, and leaves no mark.
        with filling(optimizers, "a state dict"):
            loading.fill()
            return loading.install()


def optimizer_state_dict_to_load(
    model: nn.Module,
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    rank0_only: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes: keyed by ids, sharded as this optimizer holds it.

    The optimizer is left as it is. Without "param_groups" in `state_dict` the result has none.
    """
    return optimizer_to_load(
        model, optimizer, state_dict, LoadRequest(strict, rank0_only), process_group
    )


def optimizer_to_load(
    model: nn.Module,
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    request: LoadRequest,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """`optimizer_state_dict_to_load` for a caller with arguments of its own."""
    world = _loading_world(model, process_group)
    return _to_load(model, optimizer, state_dict, request, world, _ranks(world))


def shard_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """`optimizer_state_dict_to_load` without any communication: each rank has the full dict.

    Errors are then each rank's own.
    """
    call = STATE_DICT._replace(strict=False, rank0_only=False)
    return shard_optimizer(model, optimizer, state_dict, LoadRequest(call=call), process_group)


def shard_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    request: LoadRequest,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """`shard_optimizer_state_dict` for a caller with arguments of its own."""
    ranks = Ranks.alone()
    if dist.is_available() and dist.is_initialized():
        members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        ranks = Ranks(dist.get_rank(process_group), tuple(members))
    # The world is this rank alone, so that nothing is sent; the ranks are those of the layout.
    world = SoloWorld(ranks.global_ranks[ranks.rank])
    return _to_load(model, optimizer, state_dict, request, world, ranks)


def _to_load(
    model: nn.Module,
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    request: LoadRequest,
    world: World,
    ranks: Ranks,
) -> dict[str, Any]:
    target = OptimizerTarget(model, [optimizer], world, ranks, fresh=True)
    with gc_paused():
        loading = prepare_load(target, state_dict, request)
        loading.fill()
        return loading.to_load()


class _Place(NamedTuple):
    """The ranks among which a state dict is taken; `group` is theirs if the caller gave one."""

    world: World
    is_first: bool
    group: dist.ProcessGroup | None

    def output(
        self, form: StateDictType, config: StateDictConfig | OptimStateDictConfig
    ) -> DictForm:
        """What `config` asks of this rank."""
        rank0_only, use_dtensor = False, None
        if isinstance(config, FullStateDictConfig | FullOptimStateDictConfig):
            rank0_only = config.rank0_only
        elif isinstance(config, ShardedStateDictConfig | ShardedOptimStateDictConfig):
            use_dtensor = config.use_dtensor
        is_wanted = self.is_first or not rank0_only
        return DictForm(form, config.offload_to_cpu, is_wanted, use_dtensor, self.group)


def _taking_place(model: nn.Module, group: dist.ProcessGroup | None) -> _Place:
    members = _members(model, group, "describe")
    if members == ():
        # No engine shares it, so each rank takes its own alone; with `rank0_only` it is still the
        # first of all ranks that gets a dict.
        me = dist.get_rank()
        return _Place(world_of_members((me,)), me == 0, group)
    world = world_of(group) if members is None else world_of_members(members)
    world.begin_call("a call for state dicts")
    return _Place(world, world.rank == 0, group)


def _loading_world(model: nn.Module, group: dist.ProcessGroup | None) -> World:
    members = _members(model, group, "read")
    # A model that no engine shares may be loaded from the dict of another rank: all take part.
    world = world_of_members(members) if members else world_of(group)
    world.begin_call("a load of state dicts")
    return world


def _members(
    model: nn.Module, group: dist.ProcessGroup | None, phase: str
) -> tuple[int, ...] | None:
    """The ranks that share `model`, () if no engine shares it. None where `group` says them, and
    where there are no other ranks.

    `phase` is the first phase of the call that these ranks agree on.
    """
    if group is not None or not (dist.is_available() and dist.is_initialized()):
        return None
    return ranks_that_share(model, phase)


def _several(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    # ListedParams stand in the place of one optimizer, see there.
    return [optimizer] if isinstance(optimizer, Optimizer | ListedParams) else list(optimizer)


def _ranks(world: World) -> Ranks:
    return Ranks(world.rank, world.global_ranks)
