"""The public functions for state dicts of models and optimizers, however they are sharded.

Dicts are keyed by the names of the bare module and come in three forms, see `StateDictType`. All
functions but the last two are collective over `process_group`, by default the ranks that the
model's engines lay it out over, whatever other ranks of the world do: those of the groups of its
units, of its meshes, of DDP. A model that no engine shares is each rank's own: what is taken of it
comes from this rank alone, and a load is collective over all ranks, because it may share a dict.
Errors are the same on all ranks that take part, with every problem named.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ckpt.layout.memory import gc_paused
from ckpt.layout.plain import Ranks
from ckpt.state.binding import filling
from ckpt.state.types import STATE_DICT, Loaded, LoadRequest, Unshared
from ckpt.state_dict.config import OptimStateDictConfig, StateDictConfig, StateDictType, config_of
from ckpt.state_dict.forms import DictForm
from ckpt.state_dict.into import OptimizerTarget, put_model, put_optimizer
from ckpt.state_dict.keys import ListedParams
from ckpt.state_dict.model import ranks_of, world_to_load, world_to_take
from ckpt.state_dict.out import take_model, take_optimizer
from ckpt.world.base import SoloWorld, World, collectively

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
    return take(model, None, TakeRequest(type, config), process_group)


class TakeRequest(NamedTuple):
    """Which state dict is requested, of a model or of its optimizers: see the functions for each.

    With `copied`, identities of parameters, all other tensors of the model are in the dict as they
    are: live memory, each rank's own. `state_dict` and `beside` are for optimizers.
    """

    type: StateDictType
    config: StateDictConfig | OptimStateDictConfig | None
    state_dict: Mapping[str, Any] | None = None
    beside: Unshared = Unshared.COMPARED
    copied: Container[int] | None = None


def take(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    request: TakeRequest,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state dict of `model`, or of optimizers of it, for a caller with requests of its own."""
    config: Any = config_of(request.type, request.config, is_model=optimizer is None)
    world, is_first = world_to_take(model, process_group)
    # With `rank0_only` the others take part and allocate nothing.
    is_wanted = is_first or not getattr(config, "rank0_only", False)
    form = request.type, config.offload_to_cpu, is_wanted, getattr(config, "use_dtensor", None)
    output = DictForm(*form, process_group, request.beside, request.copied)
    with gc_paused():
        if optimizer is None:
            return take_model(model, output, world)
        return take_optimizer(model, several(optimizer), output, world, request.state_dict)


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
    world = world_to_load(model, process_group)
    with gc_paused():
        fill = put_model(model, state_dict, world, request)
        # What fails before here has changed nothing, and leaves no mark.
        with filling(model, "a state dict"):
            return fill()


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
    return take(model, optimizer, TakeRequest(type, config, state_dict), process_group)


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
    world = world_to_load(model, process_group)
    optimizers = several(optimizer)
    target = OptimizerTarget(model, optimizers, world, ranks_of(world), fresh=False)
    with gc_paused():
        loading = put_optimizer(target, state_dict, LoadRequest(strict, rank0_only))
        # What fails before here has changed nothing, and leaves no mark.
        with filling(optimizers, "a state dict"):
            loading.fill()
            return collectively(world, "finish", loading.install)  # all fail together


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
    request = LoadRequest(strict, rank0_only)
    return optimizer_to_load(model, optimizer, state_dict, request, process_group)


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
    request = LoadRequest(call=STATE_DICT._replace(strict=False, rank0_only=False))
    return optimizer_to_load(model, optimizer, state_dict, request, process_group, alone=True)


def optimizer_to_load(
    model: nn.Module,
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    request: LoadRequest,
    process_group: dist.ProcessGroup | None = None,
    *,
    alone: bool = False,
) -> dict[str, Any]:
    """`optimizer_state_dict_to_load` for a caller with requests of its own; with `alone`,
    `shard_optimizer_state_dict`.
    """
    world: World
    if not alone:
        world = world_to_load(model, process_group)
        ranks = ranks_of(world)
    else:
        ranks = Ranks.alone()
        if dist.is_available() and dist.is_initialized():
            members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            ranks = Ranks(dist.get_rank(process_group), tuple(members))
        # The world is this rank alone, so that nothing is sent; the ranks are those of the layout.
        world = SoloWorld(ranks.global_ranks[ranks.rank])
    target = OptimizerTarget(model, [optimizer], world, ranks, fresh=True)
    with gc_paused():
        loading = put_optimizer(target, state_dict, request)
        loading.fill()
        return loading.to_load()


def several(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """One or several optimizers as a list; ListedParams stand in the place of one, see there."""
    return [optimizer] if isinstance(optimizer, Optimizer | ListedParams) else list(optimizer)
