"""Tensors that are held whole: plain ones, and those that DDP keeps equal on the ranks of its
group.

Also the few things that all adapters share: who the ranks of the world are, who else holds a tensor
as nothing in it says, what cannot be stored, and the pieces of a tensor that lies whole in local
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ckpt.layout.dtypes import refusal_reason
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.region import Shape, whole
from ckpt.layout.tensor import PLAIN_CLASSES

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Ranks(NamedTuple):
    """The world of a checkpoint: this rank's index in it, and torch's global rank of each member.

    Everything else in this package speaks of indices into `global_ranks`.

    `held` has, by name, who holds the plain tensors that some ranks hold and others do not. Nothing
    in a tensor says so; the ranks have exchanged it. `copies` has, by full name, the groups of
    ranks of which each has all of a tensor that engines lay out; see `with_copies`.
    """

    rank: int
    global_ranks: tuple[int, ...]
    held: Mapping[str, tuple[int, ...]] = _NOTHING
    copies: Mapping[str, tuple[tuple[int, ...], ...]] = _NOTHING

    @classmethod
    def alone(cls) -> Ranks:
        """A world of one process, without a process group."""
        return cls(0, (0,))

    @property
    def everyone(self) -> tuple[int, ...]:
        """All indices of the world."""
        return tuple(range(len(self.global_ranks)))

    def holders_of(self, fqn: str) -> tuple[int, ...]:
        """Who holds a plain tensor of that name, if no engine says otherwise."""
        return self.held.get(fqn) or self.everyone

    def below(self, path: str) -> Ranks:
        """The same ranks for names that are relative to `path`."""
        if not self.held or not path:
            return self
        start = len(path) + 1
        inside = f"{path}."
        held = {n[start:]: ranks for n, ranks in self.held.items() if n.startswith(inside)}
        return self._replace(held=held)

    def indices_of(self, global_ranks: Sequence[int]) -> tuple[int, ...]:
        """Indices of those `global_ranks` that are in the world, ascending, this rank always among
        them.

        The world's own global ranks give `everyone`.
        """
        return tuple(sorted({*self.known_of(global_ranks), self.rank}))

    def known_of(self, global_ranks: Iterable[int]) -> tuple[int, ...]:
        """Indices of those `global_ranks` that are in the world, ascending."""
        index_of = _index_of(self.global_ranks)
        return tuple(sorted({index_of[rank] for rank in global_ranks if rank in index_of}))


# Asked for by every sharded tensor, of one and the same world.
@lru_cache(maxsize=8)
def _index_of(global_ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: index for index, rank in enumerate(global_ranks)}


def times_changed(tensor: torch.Tensor) -> int | None:
    """How often `tensor` was changed in place so far, as autograd counts; None if it does not.

    Writes through `.data` are not counted.
    """
    # An inference tensor has no count, and raises when it is asked for one.
    return None if tensor.is_inference() else tensor._version


class UnsupportedTensor(Exception):
    """A tensor that cannot take part as it is; `problem` names it and says what to do."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class Held(NamedTuple):
    """Who holds a plain tensor, whether somebody keeps it equal there, and who shares it, as in
    `Owned`. Without `holders`: all ranks, if no engine says otherwise.
    """

    holders: tuple[int, ...] | None = None
    synchronized: bool = False
    owners: tuple[int, ...] = ()

    @classmethod
    def beside(cls, owned: Owned) -> Held:
        """As a tensor that an engine owns."""
        return cls(owned.views[0].pieces[0].holders, owned.synchronized, owned.owners or ())


BY_ALL = Held()
"""What no engine says anything about."""


def refuse_unstorable(fqn: str, tensor: torch.Tensor) -> None:
    """Raise `UnsupportedTensor` for tensors without bytes of their own that could be stored.

    These are uninitialized, meta, sparse, nested and quantized tensors, and subclasses without
    memory.
    """
    reason = _refusal(tensor)
    if reason is not None:
        raise UnsupportedTensor(f"{fqn}: {reason}")


def _refusal(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialized yet (a lazy module): run one forward pass first"
    if tensor.is_meta:
        return "is on the meta device: materialize it first with module.to_empty(device=...)"
    if tensor.is_nested:
        return "is a nested tensor: save tensor.values() and tensor.offsets() instead"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}: save its dense form or its indices and values instead"
    # Of tensors that say what they consist of others than this decide.
    if type(tensor) not in PLAIN_CLASSES and not hasattr(tensor, "__tensor_flatten__"):
        try:
            tensor.untyped_storage().data_ptr()
        except RuntimeError:  # torch has no other way to ask a wrapper
            return (
                f"is of class {type(tensor).__name__}, which has no memory of its own, and nothing "
                "says what it consists of; keep a plain tensor, or let the class offer "
                "__ckpt_pieces__()"
            )
    return refusal_reason(tensor.dtype)


def whole_tensor(
    fqn: str, tensor: torch.Tensor, holders: tuple[int, ...], held: Held = BY_ALL
) -> Owned:
    """A tensor of which each of `holders` has all elements in its own memory."""
    local = tensor.detach()
    shape: Shape = tuple(tensor.shape)
    region = whole(shape)
    piece = Piece(fqn, shape, tensor.dtype, region, region, holders)
    return Owned(tensor, local, (View((piece,)),), held.synchronized, held.owners)


def with_copies(owned: Owned, name_of: Callable[[str], str], ranks: Ranks) -> Owned:
    """`owned` with the holders of all groups that have a copy of it; `name_of` gives full names.

    Tensors of one name may lie on several meshes, or in several groups, which share no rank, such
    as the embedding of a first and of a last stage; the ranks have reported it to each other. The
    n-th rank of each group holds what the n-th of every other holds, which a save compares.
    """
    if not ranks.copies or not any(name_of(fqn) in ranks.copies for fqn in owned.fqns):
        return owned

    def with_holders(piece: Piece) -> Piece:
        groups = ranks.copies.get(name_of(piece.fqn), ())
        mine = next((group for group in groups if ranks.rank in group), None)
        if mine is None:
            return piece
        places = [mine.index(holder) for holder in piece.holders]
        holders = sorted(group[place] for group in groups for place in places)
        return piece._replace(holders=tuple(holders))

    return owned.with_pieces(with_holders)._replace(synchronized=False)


def shared_by(owned: Sequence[Owned], ranks: Ranks) -> tuple[int, ...]:
    """The ranks that share the module whose parameters are `owned`, ascending; all ranks of the
    world where they are not known exactly.
    """
    groups = [one.owners for one in owned]
    if None in groups:
        return ranks.everyone
    everyone = {rank for group in groups for rank in group or ()}
    # One tensor over all of them: else the groups overlap, and may reach further than seen here.
    if ranks.rank in everyone and any(everyone == set(group or ()) for group in groups):
        return tuple(sorted(everyone))
    return ranks.everyone


def held_where_shared(
    owned: Sequence[Owned], holders: tuple[int, ...], ranks: Ranks
) -> list[Owned]:
    """`owned` with `holders` for the plain tensors that were thought to be with everyone."""
    everyone = ranks.everyone
    return [
        one.with_pieces(lambda piece: piece._replace(holders=holders))
        if holders != everyone
        and one.owners == ()
        and all(piece.holders == everyone for view in one.views for piece in view.pieces)
        else one
        for one in owned
    ]
