"""State dicts of models: names of the bare module, tensors in the requested form."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpt.errors import InvalidState, Mismatch
from ckpt.format.codec import decode_values, encode_values
from ckpt.layout.kind import Kind
from ckpt.layout.plain import Ranks
from ckpt.layout.sharded_tensor import UnitSharding, sharding_of
from ckpt.state.describe import Described, DescribedTensor, describe_modules
from ckpt.state.requested import CallArguments
from ckpt.state.values import join, split_tree
from ckpt.state.walk import Leaves
from ckpt.state_dict.config import StateDictType
from ckpt.state_dict.forms import DictForm, LiveTensors, take_out
from ckpt.state_dict.model_composites import ModelComposites, composites_of, tied_composites
from ckpt.world.base import World, collectively


def take_model(model: nn.Module, output: DictForm, world: World, ranks: Ranks) -> dict[str, Any]:
    """The state dict of `model`; collective over `world`. Only what is requested is gathered.

    Raises InvalidState, the same on all ranks, for what has no such form.
    """
    described, live, composites = collectively(
        world, "describe", lambda: describe_live(model, ranks, output)
    )
    tensors = take_out(live, output, world, ranks)
    if not output.is_wanted:
        return {}
    tensors.update(live.as_is)
    tensors.update(composites.joined(tensors, to_cpu=output.offload_to_cpu))
    # In the order of the module; the exchange has one of its own.
    names = composites.names(names_of(described))
    state_dict = {name: tensors[name] for name in names if name in tensors}
    for fqn, module in described.extra_states:
        state_dict[fqn] = module.get_extra_state()
    for tied, stored in (described.aliases | tied_composites(described)).items():
        if stored in state_dict:
            state_dict[tied] = state_dict[stored]
    return state_dict


def describe_live(
    model: nn.Module, ranks: Ranks, output: DictForm
) -> tuple[Described, LiveTensors, ModelComposites]:
    """What this rank holds of `model`. Raises InvalidState with all that cannot take part."""
    described = describe_model(model, ranks, loading=False)
    composites = composites_of(described, output.form)
    left = composites.not_exchanged
    tensors = [each for each in described.tensors() if left.isdisjoint(each[0].fqns)]
    buffers = {fqn for source in described.buffers for fqn in source.fqns}
    # LOCAL dicts are live memory, in whatever dtype it has.
    keeps_low = output.form is StateDictType.LOCAL
    dtypes = {} if keeps_low else buffer_dtypes(described, buffers)
    as_is = {
        fqn: given.cpu() if output.offload_to_cpu else given
        for fqn, given in _not_copied(tensors, output.copied)
        if fqn not in dtypes
    }
    tensors = [each for each in tensors if as_is.keys().isdisjoint(each[0].fqns)]
    holdings = [holding for source, kind in tensors for holding in source.holdings(kind)]
    models = {
        fqn: template
        for source, _ in tensors
        if (template := source.owned.template) is not None
        for fqn in source.fqns
    }
    sharding = shardings(described, names_of(described)).get
    return described, LiveTensors(holdings, models, sharding, dtypes, as_is), composites


def _not_copied(
    tensors: Sequence[tuple[DescribedTensor, Kind]], copied: Container[int] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for source, _ in tensors:
        owned = source.owned
        if copied is not None and owned.is_whole and id(owned.param) not in copied:
            yield source.fqns[0], owned.param.detach()


def describe_model(model: nn.Module, ranks: Ranks, *, loading: bool) -> Described:
    """The tensors of one module by their bare names. Raises InvalidState with all problems."""
    described = describe_modules(Leaves(modules=[("", model)]), ranks, loading=loading)
    if described.problems:
        raise InvalidState(described.problems)
    return described


def names_of(described: Described) -> list[str]:
    """The names that tensors are stored by: parameters, then buffers."""
    return [fqn for source, _ in described.tensors() for fqn in source.fqns]


def shardings(described: Described, names: Iterable[str]) -> dict[str, UnitSharding]:
    """The sharding that the innermost unit above a tensor reports, for each tensor below one."""
    by_path = _unit_shardings(described)
    if not by_path:
        return {}
    sharding_of = {}
    for name in names:
        path = name
        while path:  # from the module that has the tensor upwards
            path = path.rpartition(".")[0]
            if path in by_path:
                sharding_of[name] = by_path[path]
                break
    return sharding_of


def buffer_dtypes(described: Described, buffers: Iterable[str]) -> dict[str, torch.dtype]:
    """The dtype of each of `buffers` in state dicts, where its unit lets it live in another."""
    by_path = _unit_shardings(described)
    named = {
        join(path, name): dtype
        for path, sharding in by_path.items()
        for name, dtype in sharding.buffer_dtypes.items()
    }
    return {name: named[name] for name in buffers if name in named}


def _unit_shardings(described: Described) -> dict[str, UnitSharding]:
    return {
        name: sharding
        for layout in described.layouts
        for name, unit in layout.units
        if (sharding := sharding_of(unit)) is not None
    }


# --- what loads of models and of optimizers share ------------------------------------------------


def check_names(world: World, names: list[str], has_any: bool, call: CallArguments) -> list[int]:
    """The ranks that have a dict. Raises Mismatch on all ranks when theirs have different names."""
    # Nothing at all from a rank without a dict: the names of a dict may be an empty list.
    lists_sent = world.gather("names", encode_values(names) if has_any else b"")
    givers = [rank for rank, part in enumerate(lists_sent) if part]
    # As bytes: encoding is the same for the same names, and only a refusal decodes them.
    if len({lists_sent[rank] for rank in givers}) <= 1:
        return givers
    lists = {rank: set(decode_values(lists_sent[rank])) for rank in givers}
    rank0_only = ", or rank0_only=True" if call.rank0_only else ""
    raise Mismatch(
        [
            f"{name}: is in the dicts of ranks {sorted(r for r in lists if name in lists[r])}, "
            f"not of ranks {sorted(r for r in lists if name not in lists[r])}; pass the same "
            f"dict on all ranks{rank0_only}"
            for name in sorted(set().union(*lists.values()))
            if not all(name in theirs for theirs in lists.values())
        ]
    )


def share_values(world: World, tree: Mapping[str, Any], givers: Sequence[int]) -> Any:
    """`tree`; on ranks that have no dict, that of the first one that does. Collective.

    Raises Mismatch on all ranks when it has something that cannot be sent.
    """
    if not givers or len(givers) == world.size:
        return tree
    is_first = world.rank == givers[0]

    def encoded() -> bytes:
        problems: list[str] = []
        value, tensors = split_tree(dict(tree), "", problems)
        problems += [
            f"{fqn}: a tensor that belongs to no parameter; pass the dict on every rank"
            for fqn, _ in tensors
        ]
        if problems:
            raise Mismatch(problems)
        return encode_values(value)

    # What fails on the first rank has to reach the others, which wait for its values.
    data = collectively(world, "values", encoded if is_first else lambda: b"")
    shared = world.gather("values", data)[givers[0]]
    return tree if world.rank in givers else decode_values(shared)
