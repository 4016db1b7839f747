"""Ways from what a follower has to a publication: by deltas alone, or by an anchor and deltas.

A publication is an entry of the log. A delta is of no line and needs one other entry, the one that
it goes from; an anchor is in a line. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ckpt.commit.records import LiveEntry

Route: TypeAlias = tuple[LiveEntry, ...]  # what to read, in order; all but the first are deltas
SameAs: TypeAlias = Callable[[LiveEntry], str]


def is_delta(entry: LiveEntry) -> bool:
    """Whether an entry looks like a delta; only its manifest is proof."""
    return entry.line is None and len(entry.references) == 1


def routes_to(
    target: LiveEntry, live: Sequence[LiveEntry], present: str, same_as: SameAs
) -> list[Route]:
    """The ways to `target`, the best first: from the attempt that is `present` ("" for none) by
    deltas, if these have fewer bytes than the way from the nearest anchor; from that anchor, and
    from those before it. An empty one is first where `target` is present.

    `same_as` gives the attempt of the delta with the state of an anchor, "" for none.
    """
    entries = {entry.attempt: entry for entry in live}
    routes, route, name = list[Route](), Route(), target.attempt
    short: list[Route] = []
    while name:
        if name == present:
            short = [route]
        # Taken out: entries that refer to each other in a circle end the walk.
        if (current := entries.pop(name, None)) is None:
            break
        if is_delta(current):
            route, name = (current, *route), current.references[0]
        else:
            routes.append((current, *route))
            name = same_as(current)
    is_longer = bool(short and routes) and _nbytes(short[0]) > _nbytes(routes[0])
    return [*routes[:is_longer], *short, *routes[is_longer:]]


def _nbytes(route: Route) -> int:
    return sum(entry.nbytes for entry in route)


def newest_first(entries: Sequence[LiveEntry], live: Sequence[LiveEntry]) -> list[LiveEntry]:
    """`entries`, which a training may resume from, behind the deltas since the first of them."""
    if not entries:
        return []
    own, deltas = {entries[0].attempt}, list[LiveEntry]()
    for entry in live:  # in the order of their commits
        if is_delta(entry) and entry.references[0] in own:
            own.add(entry.attempt)
            deltas.insert(0, entry)
    return [*deltas, *entries]
