"""The kinds of optimizer state. Saving, loading and state dicts all decide by the functions here.

What an optimizer keeps for a parameter, under one name, is of one kind:

    kind     what it is                                      how it is stored
    SHARD    the part of a tensor shaped like the parameter  pieces like the parameter's
             that belongs to the parameter's local tensor
    TENSOR   a tensor with a layout of its own, or a plain   a tensor by itself
             one beside a parameter that is held whole
    SCALAR   a plain tensor without dims, such as a step     one tensor per parameter
    NUMBER   a Python number, or None, of a parameter that   as SCALAR; its name has the type
             other ranks may hold nothing of
    VALUE    any other value, the same on all ranks: beside  a value, which refers to tensors
             a whole parameter, or a DTensor, where each
             tensor in it is a DTensor or a count, or one
             flat shard, where each is a shard like it
    OWN      what each rank has for itself: also all values  a per-rank value, see `own`
             but numbers beside a flat shard
    MISFIT   what cannot be any of these                     not at all: an error
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckpt.layout.composites import is_composite
from ckpt.layout.likeness import Likeness, likeness
from ckpt.layout.piece import Owned
from ckpt.layout.plain import Ranks
from ckpt.state.describe import LogicalTensor
from ckpt.state.names import Names, split_state_name
from ckpt.state.own import OwnEntries, StateDeclaration, keeps_own, own_entries, tensors_of
from ckpt.state.types import TensorEntry
from ckpt.state.values import holds_objects, references, split_tree

# Values have to be the same on all ranks, and some ranks have no state of the parameter: a number
# is stored as a 0-dim tensor by a rank that has it, and its name says what it was.
NUMBERS: dict[type, tuple[str, torch.dtype]] = {
    bool: ("~bool", torch.bool),
    int: ("~int", torch.int64),
    float: ("~float", torch.float64),
    type(None): ("~none", torch.bool),
}
NUMBER_OF_SUFFIX: dict[str, Callable[[Any], Any]] = {
    suffix: (lambda _: None) if kind is type(None) else kind
    for kind, (suffix, _) in NUMBERS.items()
}


def number_suffix(name: str) -> str | None:
    """The suffix of a state's name that says that it was a number; None if it was a tensor."""
    return next((suffix for suffix in NUMBER_OF_SUFFIX if name.endswith(suffix)), None)


class StateKind(enum.Enum):
    """What an entry of an optimizer's state is; see the table of the module."""

    SHARD = enum.auto()
    TENSOR = enum.auto()
    SCALAR = enum.auto()
    NUMBER = enum.auto()
    VALUE = enum.auto()
    OWN = enum.auto()
    MISFIT = enum.auto()


def kind_of(
    content: Any, owned: Owned, ranks: Ranks, declaration: StateDeclaration | None
) -> StateKind:
    """The kind of `content`, live state of the parameter `owned`, as its optimizer has it.

    `declaration` is what `declare_optimizer_state` declared for the name. MISFIT is declared a
    shard and has another shape.
    """
    if isinstance(content, torch.Tensor) and not is_composite(content):
        return _kind_of_tensor(content, owned, declaration)
    if keeps_own(declaration, owned):
        return StateKind.OWN
    # Where not all ranks have state of the parameter, a value of it cannot be common.
    is_everywhere = owned.is_whole_on(ranks.everyone) or owned.template is not None
    if type(content) in NUMBERS and not is_everywhere:
        return StateKind.NUMBER
    value, named = split_tree(content, "", [])
    tensors = [tensor for _, tensor in named]
    is_common = owned.is_whole or (not tensors and owned.template is not None)
    if is_common or _tell_layouts(tensors, owned):
        return StateKind.VALUE
    are_shards = bool(tensors) and all(is_shard_inside(tensor, owned) for tensor in tensors)
    return StateKind.VALUE if are_shards and not holds_objects(value) else StateKind.OWN


def is_shard_inside(tensor: torch.Tensor, owned: Owned) -> bool:
    """Whether a tensor in a container is a shard like that of `owned`, a flat one of one parameter.

    By the rule for tensors outside of containers: it has the shape of the shard.
    """
    is_like = likeness(tensor, owned) is Likeness.LOCAL and tensor.ndim > 0
    return is_like and owned.is_flat_shard and len(owned.fqns) == 1


def _tell_layouts(tensors: Sequence[torch.Tensor], owned: Owned) -> bool:
    """Whether tensors in one container say by themselves how they lie, counts beside them
    excepted.
    """
    likes = [likeness(tensor, owned) for tensor in tensors]
    return any(like.tells_layout for like in likes) and all(
        like.tells_layout or (like.is_plain and tensor.ndim == 0)
        for like, tensor in zip(likes, tensors, strict=True)
    )


def _kind_of_tensor(
    tensor: torch.Tensor, owned: Owned, declaration: StateDeclaration | None
) -> StateKind:
    like = likeness(tensor, owned)
    if like.tells_layout:  # whatever is declared: a DTensor cannot be mistaken
        return StateKind.SHARD if like is Likeness.SAME else StateKind.TENSOR
    if keeps_own(declaration, owned):
        return StateKind.OWN
    if tensor.ndim == 0:
        return StateKind.SCALAR
    if declaration == "shard" and tensor.shape != owned.local.shape:
        return StateKind.MISFIT
    # Optimizers of engines that flatten know nothing but the local shard, so what has its shape is
    # a shard. The optimizer of a DTensor could have made a DTensor; its plain state is a shard only
    # when it is declared one.
    if like is Likeness.LOCAL and (declaration == "shard" or owned.template is None):
        return StateKind.SHARD
    if like.is_plain and not owned.is_whole:
        return StateKind.OWN
    return StateKind.TENSOR


# --- as a checkpoint has it ----------------------------------------------------------------------


class SavedState(NamedTuple):
    """The state that the checkpoint has of one parameter, by state name, each with its full name.

    `own` has what each rank that saved had for itself.
    """

    tensors: dict[str, tuple[str, TensorEntry]]
    values: dict[str, tuple[str, Any]]
    own: dict[str, tuple[str, OwnEntries]]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the state, whatever kind it is of."""
        return (*self.tensors, *self.values, *self.own)

    @property
    def fqns(self) -> set[str]:
        """All full names in the checkpoint, those of tensors inside values included."""
        used = {fqn for table in self for fqn, _ in table.values()}
        for _, value in self.values.values():
            used.update(references(value))
        for _, entries in self.own.values():
            used |= tensors_of(entries.values())
        return used


class MemberState(NamedTuple):
    """The tensor that a checkpoint has for one member of a parameter, and its full name there."""

    member: LogicalTensor
    fqn: str
    entry: TensorEntry

    @property
    def fits(self) -> bool:
        """Whether the state is shaped like the parameter."""
        return self.entry.shape == self.member.global_shape


def saved_states(names: Names, prefix: str, params: set[str]) -> dict[str, SavedState]:
    """What the checkpoint has below `prefix`, by parameter."""
    catalog = names.catalog
    states: dict[str, SavedState] = {}

    def each(content: Mapping[str, Any]) -> Sequence[tuple[SavedState, str, str]]:
        cut = [
            (fqn, split_state_name(fqn[len(prefix) :], params))
            for fqn in content
            if fqn.startswith(prefix) and fqn not in inside
        ]
        return [
            (states.setdefault(parts[0], SavedState({}, {}, {})), parts[1], fqn)
            for fqn, parts in cut
            if parts is not None
        ]

    own = own_entries(catalog.per_rank, prefix)
    # Tensors inside values and own state are no state by themselves.
    inside = tensors_of(entry for entries in own.values() for entry in entries.values())
    for fqn, value in catalog.values.items():
        if fqn.startswith(prefix):
            inside.update(references(value))
    for state, name, fqn in each(catalog.tensors):
        state.tensors[name] = (fqn, catalog.tensors[fqn])
    for state, name, fqn in each(catalog.values):
        state.values[name] = (fqn, catalog.values[fqn])
    for state, name, fqn in each(own):
        state.own[name] = (fqn, own[fqn])
    return states


def kind_of_saved(
    name: str, states: Sequence[SavedState | None], members: Sequence[MemberState], owned: Owned
) -> StateKind:
    """The kind of the state `name` in a checkpoint, to be loaded for the parameter `owned`.

    `states` are those of the parameter's members, `members` their tensors of this name. MISFIT is
    of another shape than its parameter, which flat shards cannot hold.
    """
    # By what was saved, whatever is declared now: the checkpoint has it in this form only.
    if any(state and name in state.own for state in states):
        return StateKind.OWN
    if any(state and name in state.values for state in states):
        return StateKind.VALUE
    if all(member.entry.shape == () for member in members):
        return StateKind.SCALAR if number_suffix(name) is None else StateKind.NUMBER
    if all(member.fits for member in members):
        return StateKind.SHARD
    if len(owned.fqns) == 1 and (owned.is_whole or owned.template is not None):
        return StateKind.TENSOR
    return StateKind.MISFIT
