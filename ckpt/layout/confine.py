"""Plain tensors of a module that an engine shares: held by the ranks that share it, not by all."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.layout.piece import Owned
from ckpt.layout.plain import Ranks

__all__ = ["held_where_shared", "shared_by"]


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
    if holders == ranks.everyone:
        return list(owned)
    return [_held_by(one, holders) if _is_with(one, ranks.everyone) else one for one in owned]


def _is_with(owned: Owned, everyone: tuple[int, ...]) -> bool:
    return owned.owners == () and all(
        piece.holders == everyone for view in owned.views for piece in view.pieces
    )


def _held_by(owned: Owned, holders: tuple[int, ...]) -> Owned:
    views = tuple(
        view._replace(pieces=tuple(piece._replace(holders=holders) for piece in view.pieces))
        for view in owned.views
    )
    return owned._replace(views=views)
