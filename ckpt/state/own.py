"""Optimizer state that each rank has for itself: plain tensors beside a parameter that is sharded.

Nothing shows which part of the parameter such a tensor belongs to, or whether it belongs to one at
all, so it is kept as it is, with the layout that the parameter had. It comes back plain, on the
same layout; on another one only a function of the user's knows what to make of it.

As per-rank values: `{"rank", "world_size", "layout", "value"}` under the name of the state. In
"value" stand references to tensors, whose names end in the rank that has them: "<name>~rank<n>".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import torch

from ckpt.errors import Mismatch
from ckpt.layout.kind import Kind
from ckpt.layout.named_classes import name_in
from ckpt.layout.piece import Holding, Owned, Piece
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Region, Span, whole
from ckpt.state.types import OnReshard, PerRank
from ckpt.state.values import join_tree, references, renamed_tree

OwnEntries = dict[int, Mapping[str, Any]]
StateDeclaration = Literal["shard"] | PerRank


class PerShard(PerRank):
    """Declares state that an optimizer computes of what each rank has of a parameter: a norm.

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
    optimizer: torch.optim.Optimizer, what: Mapping[str, StateDeclaration]
) -> None:
    """Say what plain tensors in the state of sharded parameters are, by the name of the state.

    "shard": each is the part of one tensor shaped like the parameter that belongs to the
    parameter's local tensor; it is then saved as that and fits every layout. `PerRank(None,
    on_reshard)`: each rank has its own, also where shapes say otherwise; on another layout, or
    number of ranks, `on_reshard(all_values, rank, world_size)` makes each rank's. Say it before
    saving and before loading. Classes of optimizers may say it themselves, in an attribute
    `__ckpt_state__`. Raises ValueError for anything else.
    """
    for name, one in what.items():
        if one != "shard" and not isinstance(one, PerRank):
            raise ValueError(
                f'state {name!r} cannot be {one!r}: say "shard" or PerRank(None, on_reshard)'
            )
    setattr(optimizer, _ATTRIBUTE, {**declared(optimizer), **what})


def declared(optimizer: object) -> Mapping[str, StateDeclaration]:
    """What is declared of the state of `optimizer`, by the names of the state."""
    said: Mapping[str, StateDeclaration] = getattr(optimizer, _ATTRIBUTE, {})
    if isinstance(optimizer, torch.optim.LBFGS):
        return {**_OF_LBFGS, **said}
    known = name_in(_MODULES, type(optimizer))
    return said if known is None else {**_OF_LIBRARIES[known], **said}


def keeps_own(declaration: StateDeclaration | None, owned: Owned) -> bool:
    """Whether each rank has its own of state that is so declared, beside the parameter `owned`."""
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


def is_own_state(entry: object) -> TypeGuard[dict[str, Any]]:
    """Whether a per-rank value is an optimizer's own state; values marked `PerRank` lie beside."""
    return isinstance(entry, dict) and entry.keys() == {"rank", "world_size", "layout", "value"}


def tensors_of(entries: Iterable[Mapping[str, Any]]) -> set[str]:
    """The names of the tensors that belong to own state."""
    return {fqn for entry in entries for fqn in references(entry["value"])}


def own_entries(per_rank: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, OwnEntries]:
    """The state that ranks had for themselves, by name and then by rank."""
    own: dict[str, OwnEntries] = {}
    for values in per_rank:
        for fqn, entry in values.items():
            if fqn.startswith(prefix) and is_own_state(entry):
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
