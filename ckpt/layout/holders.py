"""Who else holds a tensor, as nothing in the tensor itself says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt.layout.piece import Owned, Piece
from ckpt.layout.plain import Ranks

__all__ = ["held_where_shared", "shared_by", "with_copies"]


def with_copies(owned: Owned, name_of: Callable[[str], str], ranks: Ranks) -> Owned:
    """`owned` with the holders of all groups that have a copy of it; `name_of` gives full names.

    Tensors of one name may lie on several meshes, or in several groups, which share no rank, such
    as the embedding of a first and of a last stage; the ranks have reported it to each other. The
    n-th rank of each group holds what the n-th of every other holds, which a save compares.
    """
    if not ranks.copies or not any(name_of(fqn) in ranks.copies for fqn in owned.fqns):
        return owned

    def holders_of(piece: Piece) -> tuple[int, ...]:
        groups = ranks.copies.get(name_of(piece.fqn), ())
        mine = next((group for group in groups if ranks.rank in group), None)
        if mine is None:
            return piece.holders
        places = [mine.index(holder) for holder in piece.holders]
        return tuple(sorted(group[place] for group in groups for place in places))

    return _held_by(owned, holders_of)._replace(synchronized=False)


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
        _held_by(one, lambda _: holders)
        if holders != everyone
        and one.owners == ()
        and all(piece.holders == everyone for view in one.views for piece in view.pieces)
        else one
        for one in owned
    ]


def _held_by(owned: Owned, holders_of: Callable[[Piece], tuple[int, ...]]) -> Owned:
    views = tuple(
        view._replace(
            pieces=tuple(piece._replace(holders=holders_of(piece)) for piece in view.pieces)
        )
        for view in owned.views
    )
    return owned._replace(views=views)
