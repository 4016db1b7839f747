"""Tensors of one name that lie on several meshes, or in several groups, which share no rank.

Nothing in the tensors says that they are one, such as the embedding of a first and of a last stage;
the ranks have reported it to each other. The n-th rank of each group holds what the n-th of every
other holds, which a save compares.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt.layout.piece import Owned
from ckpt.layout.plain import Ranks


def with_copies(owned: Owned, name_of: Callable[[str], str], ranks: Ranks) -> Owned:
    """`owned` with the holders of all groups that have a copy of it; `name_of` gives full names."""
    if not ranks.copies or not any(name_of(fqn) in ranks.copies for fqn in owned.fqns):
        return owned
    views = tuple(
        view._replace(
            pieces=tuple(
                piece._replace(holders=_holders(piece.holders, name_of(piece.fqn), ranks))
                for piece in view.pieces
            )
        )
        for view in owned.views
    )
    return owned._replace(views=views, synchronized=False)


def _holders(holders: tuple[int, ...], fqn: str, ranks: Ranks) -> tuple[int, ...]:
    groups = ranks.copies.get(fqn, ())
    mine = next((group for group in groups if ranks.rank in group), None)
    if mine is None:
        return holders
    places = [mine.index(holder) for holder in holders]
    return tuple(sorted(group[place] for group in groups for place in places))
