"""A module tree as pieces: one walk that finds every parameter, buffer and extra state by its bare
name.

    module -> units of FSDP1, FSDP2 and foreign engines -> names -> one `Owned` per tensor or flat
    buffer

Wrappers (FSDP1, DDP, DataParallel, torch.compile, activation checkpointing) are seen through: names
are those of the bare module.

A foreign engine takes part by the methods of `ckpt.layout.protocol`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt.errors import InvalidState
from ckpt.layout import torch_fsdp
from ckpt.layout.composites import Composite, composite_at, stand_in
from ckpt.layout.dtensor import describe_dtensor, repeated_over_wider_meshes
from ckpt.layout.piece import Owned, Piece
from ckpt.layout.plain import (
    BY_ALL,
    Held,
    Ranks,
    UnsupportedTensor,
    held_where_shared,
    refuse_unstorable,
    shared_by,
    whole_tensor,
)
from ckpt.layout.state_dict_hooks import CANNOT, load_changes, overrides, save_changes
from ckpt.layout.tensor import PLAIN_CLASSES, is_dtensor
from ckpt.wings import wing


@dataclass(slots=True)
class ModuleLayout:
    """How this rank holds a module. Describing neither communicates nor changes anything.

    Names are absolute in the module and lie in the pieces; a flat parameter is one `Owned` with the
    pieces of all its members. A rank without any element of a tensor has one empty piece for it.
    """

    params: Sequence[Owned] = ()
    buffers: Sequence[Owned] = ()
    """Persistent buffers only."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of tied parameters, buffers and extra states, to the name that is stored."""
    extra_states: dict[str, nn.Module] = field(default_factory=dict)
    """Modules with `get_extra_state`, by the key that torch gives it ("layer._extra_state")."""
    save_hooks: list[str] = field(default_factory=list)
    """What would change a state dict on saving and cannot be honoured, one sentence each."""
    load_hooks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Tensors that cannot take part, one sentence each; they are in no piece."""
    composites: dict[str, Composite] = field(default_factory=dict)
    """Parameters and buffers that consist of other tensors. These are in `params` and `buffers`,
    by names that start with that of the composite."""
    owned_by_param: dict[int, Owned] = field(default_factory=dict)
    """By `id` of every object that an optimizer may know: tied ones, flat parameters, DTensors."""
    units: tuple[tuple[str, nn.Module], ...] = ()
    """The modules at which an engine shards, with their names; "" is the module itself."""

    def reshard(self) -> None:
        """Drop gathered copies of all parameters, so that the next use of the module gathers again.

        Call it before writing into `Owned.local`. Raises InvalidState, and changes nothing, when a
        unit is in use (inside `summon_full_params`).
        """
        busy = [
            f"{name or 'the module'}: is inside summon_full_params(); leave that context first"
            for name, unit in self.units
            if torch_fsdp.is_summoned(unit)
        ]
        if busy:
            raise InvalidState(busy)
        for _, unit in self.units:
            if torch_fsdp.is_fsdp1(unit):
                torch_fsdp.reshard_fsdp1(unit)
            elif torch_fsdp.is_fsdp2(unit):
                torch_fsdp.reshard_fsdp2(unit)
            foreign: Any = unit
            if hasattr(foreign, "__ckpt_reshard__"):
                foreign.__ckpt_reshard__()


def describe_module(module: nn.Module, ranks: Ranks) -> ModuleLayout:
    """How `module` is held by this rank of the world `ranks`, whatever state its engine is in.

    Takes some microseconds per parameter. Refusals are listed in `problems`, never raised.
    """
    visits = list(_visits(module, ranks))
    # The first of tied names is stored. The classes of `transformers` list those that their model
    # without a head does not have, which come last, wherever the head was registered.
    others: set[str] = set()
    for visit in visits:
        others.update(map(visit.fqn_of, vars(visit.module).get("all_tied_weights_keys", ())))
    if others:
        visits.sort(key=lambda v: any(v.fqn_of(name) in others for name in v.module._parameters))
    builder = _LayoutBuilder(ranks=ranks)
    managed = _managed_places(visits)
    for visit in visits:
        # Engines first: what they describe is left out by the walk over plain attributes.
        _add_foreign(builder, visit)
        _add_params(builder, visit, managed.get(id(visit.module), {}))
        _add_buffers(builder, visit)
        if visit.traits.has_extra_state:
            _add_extra_state(builder, visit)
        _add_hooks(builder, visit)
    # After the walk: a member is called by the first of its names, which may come late.
    _add_managed(builder, managed)
    _settle_holders(builder)
    # What an engine refuses to describe is refused as a plain attribute once more.
    builder.problems = list(dict.fromkeys(builder.problems))
    builder.units = tuple((visit.name, visit.module) for visit in visits if visit.is_first_unit)
    return builder


def describe_tensor(fqn: str, tensor: torch.Tensor, ranks: Ranks, held: Held = BY_ALL) -> Owned:
    """How this rank holds one tensor: a DTensor, a plain tensor, or one with `__ckpt_pieces__()`.

    `held` is about plain tensors; for the others it follows from the tensor. Raises
    `UnsupportedTensor`.
    """
    special: Any = tensor
    is_plain = type(tensor) in PLAIN_CLASSES
    if not is_plain and hasattr(special, "__ckpt_pieces__"):
        owned = list(special.__ckpt_pieces__())
        if len(owned) != 1:
            raise UnsupportedTensor(
                f"{fqn}: __ckpt_pieces__() of a tensor gave {len(owned)} answers, not 1"
            )
        return _renamed(owned[0], fqn, ranks)
    if not is_plain and is_dtensor(tensor):
        return describe_dtensor(fqn, tensor, ranks)
    refuse_unstorable(fqn, tensor)
    if not is_plain and hasattr(tensor, "__tensor_flatten__"):
        raise UnsupportedTensor(
            f"{fqn}: is of class {type(tensor).__name__}, which consists of others and is "
            "not registered, or has no place here; call ckpt.register_tensor_type(cls, name) on "
            "every rank, or keep a plain tensor"
        )
    holders = ranks.holders_of(fqn) if held.holders is None else held.holders
    return whole_tensor(fqn, tensor, holders, held)


# --- the walk ------------------------------------------------------------------------------------


class _Traits(NamedTuple):
    """What the class of a module says about it; looked up once per class and walk."""

    wrapped_child: str | None  # of wrappers that are seen through
    is_ddp: bool
    is_unit: bool
    has_extra_state: bool
    save_overrides: tuple[str, ...]
    load_overrides: tuple[str, ...]
    is_engine: bool  # the wrapper of a foreign engine


class _Replicas(NamedTuple):
    """Who holds the plain parameters of a subtree, and whether an engine keeps them equal."""

    held: Held = BY_ALL
    ignored: frozenset[str] = frozenset()  # names that DDP has to leave alone, relative to `base`
    base: str = ""


class _Visit(NamedTuple):
    """One path to one module. A module with several paths is visited once for each."""

    name: str
    module: nn.Module
    traits: _Traits
    replicas: _Replicas
    is_first: bool

    @property
    def is_first_unit(self) -> bool:
        return self.is_first and self.traits.is_unit

    def fqn_of(self, name: str) -> str:
        """The bare name of this module's attribute `name`."""
        return _joined(self.name, name)


def _visits(root: nn.Module, ranks: Ranks) -> Iterator[_Visit]:
    """All paths in the order of `named_modules`, wrappers sharing the name of what they wrap."""
    seen: set[int] = set()
    traits_of: dict[type, _Traits] = {}
    stack = [("", root, _Replicas())]
    while stack:
        name, module, replicas = stack.pop()
        kind = type(module)
        traits = traits_of.get(kind)
        if traits is None:
            traits = traits_of[kind] = _traits(module)
        if traits.is_ddp:
            ddp: Any = module
            group = torch.distributed.get_process_group_ranks(ddp.process_group)
            held = Held(ranks.indices_of(group), True, ranks.known_of(group))
            ignored = frozenset(getattr(ddp, "parameters_to_ignore", ()))
            replicas = _Replicas(held, ignored, name)
        yield _Visit(name, module, traits, replicas, id(module) not in seen)
        seen.add(id(module))
        # A stack turns the order around, and names are to come in that of `named_modules`.
        for child_name, child in reversed(module._modules.items()):
            if child is not None:
                is_seen_through = child_name == traits.wrapped_child
                below = name if is_seen_through else _joined(name, child_name)
                stack.append((below, child, replicas))


_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


def _traits(module: nn.Module) -> _Traits:
    kind = type(module)
    wrapped_child = getattr(kind, "__ckpt_wraps__", None)
    is_ddp = False
    for module_name, class_name, child in _WRAPPERS:
        wrapper = torch_fsdp.loaded_class(module_name, class_name)
        if wrapper is not None and isinstance(module, wrapper):
            wrapped_child = child
            is_ddp = class_name == "DistributedDataParallel"
    is_unit = (
        torch_fsdp.is_fsdp1(module)
        or torch_fsdp.is_fsdp2(module)
        or hasattr(kind, "__ckpt_pieces__")
        or hasattr(kind, "__ckpt_reshard__")
    )
    return _Traits(
        wrapped_child=wrapped_child,
        is_ddp=is_ddp,
        is_unit=is_unit,
        has_extra_state=kind.get_extra_state is not nn.Module.get_extra_state,
        save_overrides=overrides(kind, ("state_dict", "_save_to_state_dict")),
        load_overrides=overrides(kind, ("load_state_dict", "_load_from_state_dict")),
        is_engine=hasattr(kind, "__ckpt_wraps__"),
    )


# --- what the walk collects ----------------------------------------------------------------------


@dataclass(slots=True)
class _LayoutBuilder(ModuleLayout):
    """What the walk has found so far."""

    ranks: Ranks = field(kw_only=True)
    params: list[Owned] = field(default_factory=list)
    buffers: list[Owned] = field(default_factory=list)
    # Names by identity: of plain tensors, of members of units, of modules with extra state.
    name_of: dict[int, str] = field(default_factory=dict)
    name_of_member: dict[tuple[int, int], str] = field(default_factory=dict)
    extra_state_of: dict[int, str] = field(default_factory=dict)
    # From foreign engines: names they cover, objects that are no parameters, answers by module.
    covered: set[str] = field(default_factory=set)
    hidden: set[int] = field(default_factory=set)
    foreign: dict[int, tuple[str, list[Owned]]] = field(default_factory=dict)


_MemberOf = tuple[torch_fsdp.Managed, int]  # what shows that member of what a unit manages


def _managed_places(visits: Iterable[_Visit]) -> dict[int, dict[str, _MemberOf]]:
    """What units of torch's FSDP manage, by module and attribute name."""
    places: dict[int, dict[str, _MemberOf]] = {}
    for visit in visits:
        if not visit.is_first_unit:
            continue
        params: Iterable[torch_fsdp.Managed] = ()
        if torch_fsdp.is_fsdp1(visit.module):
            params = torch_fsdp.fsdp1_params(visit.module)
        elif torch_fsdp.is_fsdp2(visit.module):
            params = torch_fsdp.fsdp2_params(visit.module)
        for managed in params:
            for member, places_of_member in enumerate(managed.members):
                for place in places_of_member:
                    by_name = places.setdefault(id(place.module), {})
                    by_name[place.name] = managed, member
    return places


def _add_params(builder: _LayoutBuilder, visit: _Visit, managed: Mapping[str, _MemberOf]) -> None:
    for name, param in visit.module._parameters.items():
        if param is None or name in managed or id(param) in builder.hidden:
            continue
        fqn = visit.fqn_of(name)
        stored = builder.name_of.get(id(param))
        if stored is not None:
            if stored != fqn:
                _add_alias(builder, fqn, stored)
        elif fqn not in builder.covered and not torch_fsdp.is_flat_param(param):
            # By identity: a tied parameter is one object under several names.
            builder.name_of[id(param)] = fqn
            _add_param(builder, visit, fqn, param)
    for name, (unit, member) in managed.items():
        fqn = visit.fqn_of(name)
        stored = builder.name_of_member.setdefault((id(unit), member), fqn)
        if stored != fqn:
            builder.aliases[fqn] = stored


def _add_param(builder: _LayoutBuilder, visit: _Visit, fqn: str, param: torch.Tensor) -> None:
    if torch_fsdp.belongs_to_unit_above(visit.module, param):
        builder.problems.append(
            f"{fqn}: is managed by an FSDP unit further up; pass the whole wrapped model"
        )
        return
    held, ignored, base = visit.replicas
    if ignored and fqn[len(base) :].lstrip(".") in ignored:
        held = BY_ALL  # DDP does nothing about it, so it may be a rank's own: experts
    if (owned := _add_tensor(builder, builder.params, fqn, param, held)) is not None:
        builder.owned_by_param[id(param)] = owned


def _add_tensor(
    builder: _LayoutBuilder, tensors: list[Owned], fqn: str, tensor: torch.Tensor, held: Held
) -> Owned | None:
    """Add a tensor, or its components, to `tensors`; returns what optimizers know of it."""
    try:
        if (composite := composite_at(fqn, tensor)) is not None:
            components = _add_composite(builder, tensors, composite, held)
            return stand_in(composite, components) if tensors is builder.params else None
        owned = describe_tensor(fqn, tensor, builder.ranks, held)
    except UnsupportedTensor as refused:
        builder.problems.append(refused.problem)
        return None
    tensors.append(owned)
    return owned


def _add_composite(
    builder: _LayoutBuilder, tensors: list[Owned], composite: Composite, held: Held
) -> list[Owned]:
    """Add the components of a composite to `tensors`."""
    components = [
        describe_tensor(name, component, builder.ranks, held)
        for name, component in composite.components.items()
    ]
    tensors.extend(components)
    builder.composites[composite.fqn] = composite
    return components


def _add_alias(builder: _LayoutBuilder, fqn: str, stored: str) -> None:
    """Another name of what is stored: of a composite, other names of its components."""
    composite = builder.composites.get(stored)
    if composite is None:
        builder.aliases[fqn] = stored
        return
    for name in composite.components:
        builder.aliases[fqn + name.removeprefix(stored)] = name


def _add_managed(builder: _LayoutBuilder, places: Mapping[int, Mapping[str, _MemberOf]]) -> None:
    """Describe what the units manage, now that every member has its first name."""
    units = {id(m): m for by_name in places.values() for m, _ in by_name.values()}
    for unit_id, managed in units.items():
        fqns = [
            builder.name_of_member.get((unit_id, index)) for index in range(len(managed.members))
        ]
        missing = [managed.members[index][0].name for index, fqn in enumerate(fqns) if fqn is None]
        if missing:
            builder.problems.append(
                f"{', '.join(missing)}: managed by an FSDP unit, but no longer in the module tree; "
                "a module was replaced after wrapping"
            )
            continue
        try:
            _add_unit(builder, [fqn for fqn in fqns if fqn is not None], managed)
        except UnsupportedTensor as refused:
            builder.problems.append(refused.problem)


def _add_unit(builder: _LayoutBuilder, fqns: list[str], managed: torch_fsdp.Managed) -> None:
    if managed.sharded is not None:
        tensor = managed.sharded()
        composite = composite_at(fqns[0], tensor)
        if composite is not None:
            # Its components say by themselves who holds them.
            components = _add_composite(builder, builder.params, composite, BY_ALL)
            builder.owned_by_param[id(tensor)] = stand_in(composite, components)
            for fqn in [other for other, stored in builder.aliases.items() if stored == fqns[0]]:
                del builder.aliases[fqn]
                _add_alias(builder, fqn, fqns[0])
            return
    for owned in managed.describe(fqns, builder.ranks):
        builder.params.append(owned)
        builder.owned_by_param[id(owned.param)] = owned
    for shown, stored in managed.tied:
        builder.owned_by_param[id(shown)] = builder.owned_by_param[id(stored)]


def _settle_holders(builder: _LayoutBuilder) -> None:
    """Who holds a tensor too, as only all tensors of the module together show."""
    if len(builder.ranks.global_ranks) == 1:
        return
    before = builder.params
    shared = shared_by(before, builder.ranks)
    builder.params = held_where_shared(
        repeated_over_wider_meshes(before, builder.ranks), shared, builder.ranks
    )
    builder.buffers = held_where_shared(builder.buffers, shared, builder.ranks)
    changed = {
        id(old): new for old, new in zip(before, builder.params, strict=True) if old is not new
    }
    # Optimizers are looked up there, and must find what the module's own description says.
    if changed:
        for key, owned in builder.owned_by_param.items():
            builder.owned_by_param[key] = changed.get(id(owned), owned)


def _add_buffers(builder: _LayoutBuilder, visit: _Visit) -> None:
    skipped = visit.module._non_persistent_buffers_set
    # With those of a library's module that are no buffers of it.
    extra: dict[str, torch.Tensor] = wing("composites.foreign_types").buffers_of(visit.module)
    for name, buffer in (*visit.module._buffers.items(), *extra.items()):
        if buffer is None or name in skipped or id(buffer) in builder.hidden:
            continue
        fqn = visit.fqn_of(name)
        stored = builder.name_of.setdefault(id(buffer), fqn)
        if stored != fqn:
            _add_alias(builder, fqn, stored)
        elif fqn not in builder.covered:
            # DDP broadcasts buffers before a forward, which then changes them on each rank by
            # itself.
            held = visit.replicas.held._replace(synchronized=False)
            _add_tensor(builder, builder.buffers, fqn, buffer, held)


def _add_extra_state(builder: _LayoutBuilder, visit: _Visit) -> None:
    fqn = visit.fqn_of("_extra_state")
    stored = builder.extra_state_of.setdefault(id(visit.module), fqn)
    if stored != fqn:
        builder.aliases[fqn] = stored
    else:
        builder.extra_states[fqn] = visit.module


# --- foreign engines -----------------------------------------------------------------------------


def _add_foreign(builder: _LayoutBuilder, visit: _Visit) -> None:
    module: Any = visit.module
    if not visit.traits.is_unit or not hasattr(module, "__ckpt_pieces__"):
        return
    if id(module) in builder.foreign:
        first, known = builder.foreign[id(module)]
        for owned in known:
            for fqn in owned.fqns:
                again = _joined(visit.name, fqn[len(first) :].lstrip("."))
                builder.covered.add(again)
                builder.aliases[again] = fqn
        return
    try:
        all_owned = _pieces_of(module, visit.name, builder.ranks)
    except UnsupportedTensor as refused:
        builder.problems.append(refused.problem)
        return
    builder.foreign[id(module)] = (visit.name, all_owned)
    if hasattr(module, "__ckpt_aliases__"):
        for other, fqn in module.__ckpt_aliases__().items():
            builder.aliases[_joined(visit.name, other)] = _joined(visit.name, fqn)
            builder.covered.add(_joined(visit.name, other))
    for owned in all_owned:
        builder.params.append(owned)
        builder.owned_by_param[id(owned.param)] = owned
        names = owned.fqns
        builder.covered.update(names)
        shape = owned.views[0].pieces[0].global_shape
        is_member = len(names) == 1 and not torch_fsdp.is_flat_param(owned.param)
        if is_member and shape == tuple(owned.param.shape):
            builder.name_of.setdefault(id(owned.param), names[0])
        else:  # a buffer of the engine's own making: whatever it is called, it is no parameter
            builder.hidden.add(id(owned.param))


def _pieces_of(module: Any, name: str, ranks: Ranks) -> list[Owned]:
    """What the engine's module `name` answers. Raises UnsupportedTensor with absolute names."""
    try:
        owned = list(module.__ckpt_pieces__())
    except UnsupportedTensor as refused:
        raise UnsupportedTensor(_joined(name, refused.problem)) from refused
    renamed = [_renamed(one, name, ranks) for one in owned]
    for one in renamed:
        if type(one.local) not in PLAIN_CLASSES:
            refuse_unstorable(", ".join(one.fqns), one.local)
    return renamed


def _renamed(owned: Owned, prefix: str, ranks: Ranks) -> Owned:
    """An engine's answer with absolute names and the world's own numbers of ranks."""

    def absolute(piece: Piece) -> Piece:
        return piece._replace(
            fqn=_joined(prefix, piece.fqn), holders=ranks.indices_of(piece.holders)
        )

    owners = None if owned.owners is None else ranks.known_of(owned.owners)
    return owned.with_pieces(absolute)._replace(owners=owners)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _add_hooks(builder: _LayoutBuilder, visit: _Visit) -> None:
    if not visit.is_first or visit.traits.is_engine:
        return  # what an engine's wrapper does for state dicts, its pieces show too
    where = visit.name or "the module"
    for name in (*save_changes(visit.module), *visit.traits.save_overrides):
        builder.save_hooks.append(f"{where}: {name} {CANNOT}")
    for name in (*load_changes(visit.module), *visit.traits.load_overrides):
        builder.load_hooks.append(f"{where}: {name} {CANNOT}")
