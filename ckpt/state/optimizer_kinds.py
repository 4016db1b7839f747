"""The kinds of optimizer state. Saving, loading and state dicts all decide by the functions here.

What an optimizer keeps for a parameter, under one name, is of one kind:

    kind     what it is                                      how it is stored
    SHARD    the part of a tensor shaped like the parameter  pieces like the parameter's
             that belongs to the parameter's local tensor
    TENSOR   a tensor with a layout of its own, or a plain   a tensor by itself
             one next to a parameter that is held whole
    SCALAR   a plain tensor without dims, such as a step     one tensor per parameter
    NUMBER   a Python number, or None, of a parameter that   as SCALAR; its name has the type
             other ranks may hold nothing of
    VALUE    any other value, the same on all ranks: a value, which refers to tensors
             a whole parameter, or a DTensor, where each
             tensor in it is a DTensor or a count, or one
             flat shard, where each is a shard like it
    OWN      what each rank has for itself: also all values  a per-rank value, see below
             but numbers next to a flat shard
    MISFIT   what cannot be any of these                     not at all: an error
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ckpt.errors import Mismatch
from ckpt.layout.composites import is_composite
from ckpt.layout.kind import Kind
from ckpt.layout.likeness import Likeness, likeness
from ckpt.layout.named_classes import name_in
from ckpt.layout.piece import Holding, Owned, Piece
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Region, Span, whole
from ckpt.state.describe import LogicalTensor
from ckpt.state.names import Names, split_state_name
from ckpt.state.types import OnReshard, PerRank, TensorEntry
from ckpt.state.values import holds_objects, join_tree, references, renamed_tree, split_tree

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


NUMBERED = "~index"
"""Ends the name of state that an optimizer keeps under a whole number."""


def state_name(key: object) -> str | None:
    """The name of state under `key`; None for what is neither a name nor a whole number."""
    if type(key) is str:
        return None if key.endswith(NUMBERED) else key
    return f"{key}{NUMBERED}" if type(key) is int else None


def state_key(name: str) -> str | int:
    """The key of state called `name`."""
    return int(name.removesuffix(NUMBERED)) if name.endswith(NUMBERED) else name


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
    """Whether tensors in one container say by themselves how they lie, counts next to them
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
    # Optimizers of engines that flatten know only the local shard, so what has its shape is
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

    def each(content: Mapping[str, Any]) -> Iterator[tuple[SavedState, str, str]]:
        for fqn in content:
            if not fqn.startswith(prefix) or fqn in inside:
                continue
            if (parts := split_state_name(fqn[len(prefix) :], params)) is not None:
                yield states.setdefault(parts[0], SavedState({}, {}, {})), parts[1], fqn

    own = own_entries(catalog.per_rank, prefix)
    # Tensors inside values and own state are no state by themselves.
    inside = tensors_of(entry for entries in own.values() for entry in entries.values())
    for fqn, value in catalog.values.items():
        if fqn.startswith(prefix):
            inside.update(references(value))
    # State may share its memory with other state, or with a parameter.
    for state, name, fqn in each({**catalog.tensors, **catalog.aliases}):
        stored = catalog.aliases.get(fqn, fqn)
        state.tensors[name] = (stored, catalog.tensors[stored])
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


# --- each rank's own -----------------------------------------------------------------------------
# Plain tensors of a parameter that is sharded. Nothing shows which part of the parameter such a
# tensor belongs to, or whether it belongs to one at all, so it is kept as it is, with the layout
# that the parameter had. It comes back plain, on the same layout; on another one only a function of
# the user's knows what to make of it. As per-rank values: `{"rank", "world_size", "layout",
# "value"}` under the name of the state. In "value" stand references to tensors, whose names end in
# the rank that has them: "<name>~rank<n>".

OPTION = "param_groups."
"""Begins what is declared of an option of groups."""

OwnEntries = dict[int, Mapping[str, Any]]
StateDeclaration = Literal["shard"] | PerRank


class PerShard(PerRank):
    """Declares state that an optimizer computes from its rank's part of a parameter, like a norm.

    Each rank keeps its own where parameters are flat shards; elsewhere it is common.
    """


_ATTRIBUTE = "__ckpt_state__"
_LAYOUT_CHARS_MAX = 200  # a layout is stored with each state, and shown in errors


class PerRankState(NamedTuple):
    """State of a parameter that is this rank's own: its description, and its tensors by name."""

    param: str
    name: str
    entry: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def holdings(self, ranks: Ranks) -> Iterator[Holding]:
        """The tensors as memory that this rank alone holds."""
        for fqn, tensor in self.tensors.items():
            region = whole(tuple(tensor.shape))
            shape = region.shape
            piece = Piece(fqn, shape, tensor.dtype, region, region, (ranks.rank,))
            yield Holding(tensor.detach(), (piece,), Kind.OPTIMIZER, False)

    def content(self, *, to_cpu: bool) -> Any:
        """A copy of the state as the optimizer has it."""

        return join_tree(self.entry["value"], lambda fqn: copy_of(self.tensors[fqn], to_cpu=to_cpu))


def copy_of(tensor: torch.Tensor, *, to_cpu: bool) -> torch.Tensor:
    """The values of `tensor` in memory of their own."""
    copy = tensor.detach().clone()
    # A shard of a component stays on the device of its mesh.
    return copy.cpu() if to_cpu and not hasattr(copy, "global_shape") else copy


def declare_optimizer_state(
    optimizer: torch.optim.Optimizer, what: Mapping[Any, StateDeclaration]
) -> None:
    """Say what plain tensors in the state of sharded parameters are, by the key of the state.

    "shard": each is the part of one tensor shaped like the parameter that belongs to the
    parameter's local tensor; it is then saved as that and fits every layout. `PerRank(None,
    on_reshard)`: each rank has its own, also where shapes say otherwise; on another layout, or
    number of ranks, `on_reshard(all_values, rank, world_size)` makes each rank's. An option of
    groups, which Prodigy estimates on each rank, is "param_groups.d". Say it before saving and
    before loading. Classes of optimizers may say it themselves, in an attribute
    `__ckpt_state__`. Raises ValueError for anything else.
    """
    for name, one in what.items():
        is_option = isinstance(name, str) and name.startswith(OPTION)
        if (one != "shard" or is_option) and not isinstance(one, PerRank):
            ways = "" if is_option else '"shard" or '
            raise ValueError(
                f"state {name!r} cannot be {one!r}: say {ways}PerRank(None, on_reshard)"
            )
    setattr(optimizer, _ATTRIBUTE, {**declared(optimizer), **what})


def declared(optimizer: object) -> Mapping[Any, StateDeclaration]:
    """What is declared of the state of `optimizer`, by the keys of the state."""
    said: Mapping[Any, StateDeclaration] = getattr(optimizer, _ATTRIBUTE, {})
    if isinstance(optimizer, torch.optim.LBFGS):
        return {**_OF_LBFGS, **said}
    known = name_in(_MODULES, type(optimizer))
    return said if known is None else {**_OF_LIBRARIES[known], **said}


def keeps_own(declaration: StateDeclaration | None, owned: Owned) -> bool:
    """Whether each rank has its own of the state that is declared for the parameter `owned`."""
    if isinstance(declaration, PerShard):
        return not owned.is_whole and owned.template is None
    return isinstance(declaration, PerRank)


def _first(values: Sequence[Any], rank: int, world_size: int) -> Any:
    return values[0]


# Each rank keeps the loss of its own batch there. The next step writes it before it reads it, so
# that on another number of ranks any will do.
_OF_LBFGS: Mapping[str, StateDeclaration] = {"prev_loss": PerRank(None, _first)}

# Norms, which these compute of the flat shards that they see instead of parameters. Those of the
# first two are written in each step and never read; the others are averages over steps, which mean
# nothing for other shards.
_OF_LIBRARIES: Mapping[str, Mapping[str, StateDeclaration]] = {
    "pytorch_optimizer.CAME": {"RMS": PerShard(None, _first)},
    "pytorch_optimizer.Lamb": {
        name: PerShard(None, _first) for name in ("weight_norm", "adam_norm", "trust_ratio")
    },
    "pytorch_optimizer.AdaGC": {"gamma": PerShard(None)},
    "pytorch_optimizer.RACS": {"theta": PerShard(None)},
    "pytorch_optimizer.StableSPAM": {
        name: PerShard(None) for name in ("m_norm_t", "v_norm_t", "m_max_t")
    },
}
_MODULES = dict.fromkeys(_OF_LIBRARIES, "pytorch_optimizer")


def own_state(
    param: str, name: str, split: tuple[Any, list[tuple[str, torch.Tensor]]], ranks: Ranks
) -> PerRankState:
    """State `name` of `param`, split into a value and tensors; without a layout."""
    value, tensors = split
    # Ranks have state of one name each; the tensors need names of their own in the checkpoint.
    suffix = f"~rank{ranks.rank}"
    renamed = renamed_tree(value, lambda inside: inside + suffix)
    entry = {"rank": ranks.rank, "world_size": len(ranks.global_ranks), "value": renamed}
    return PerRankState(param, name, entry, {inside + suffix: tensor for inside, tensor in tensors})


_OWN_KEYS = {"rank", "world_size", "layout", "value"}


def tensors_of(entries: Iterable[Mapping[str, Any]]) -> set[str]:
    """The names of the tensors that belong to own state."""
    return {fqn for entry in entries for fqn in references(entry["value"])}


def own_entries(per_rank: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, OwnEntries]:
    """The state that ranks had for themselves, by name and then by rank."""
    own: dict[str, OwnEntries] = {}
    for values in per_rank:
        for fqn, entry in values.items():
            # Values that are marked `PerRank` are stored separately.
            if fqn.startswith(prefix) and isinstance(entry, dict) and entry.keys() == _OWN_KEYS:
                own.setdefault(fqn, {})[entry["rank"]] = entry
    return own


def why_not(entries: OwnEntries, mine: Mapping[str, Any] | None, size: int, layout: str) -> str:
    """Why a rank cannot have its own state back, and what to do."""
    saved_size = next(iter(entries.values()))["world_size"]
    if saved_size != size:
        what = f"by {saved_size} ranks, and {size} load it"
    elif mine is None:
        what = f"and only that of ranks {sorted(entries)} is given"
    else:
        what = f"of a parameter that lay as {mine['layout']}; here it lies as {layout}"
    return (
        f"was saved as each rank's own state, {what}. Load it on the layout that saved it; "
        'what is declared "shard" before it is saved fits every layout; or say what becomes of it '
        "with declare_optimizer_state(optimizer, {name: PerRank(None, on_reshard)})"
    )


def resharded(fqn: str, hook: OnReshard, values: list[Any], rank: int, size: int) -> Any:
    """What the user's `hook` makes of the state of all ranks. Raises Mismatch when it raises."""
    try:
        return hook(values, rank, size)
    except Exception as error:
        raise Mismatch([f"{fqn}: on_reshard raised {error!r}"]) from error


def layout_of(owned: Owned) -> str:
    """What this rank holds of a parameter, as text; two alike are one layout on this rank."""
    # Text: layouts are compared and shown, and nothing is computed from a stored one.
    parts = [
        f"{_numbers(piece.global_shape)} {_region(piece.region)}"
        + ("" if view.window is None else f" strides {_numbers(view.window.stride)}")
        for view in owned.views
        for piece in view.pieces
    ]
    text = f"{_numbers(tuple(owned.local.shape))} of {'; '.join(parts)}"
    if len(text) <= _LAYOUT_CHARS_MAX:
        return text
    return f"{len(parts)} parts, sha256 {hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _region(region: Region) -> str:
    if isinstance(region, Span):
        return f"elements {region.start} to {region.stop}"
    return f"from {_numbers(region.offset)} size {_numbers(region.shape)}"


def _numbers(numbers: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, numbers))})"
