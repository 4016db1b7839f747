"""How much of a state a load has found in a checkpoint, and what a forgotten `rename=` looks like.

`strict=False` tolerates names that are missing. Where nothing at all is found, or less than is
missing, the names are probably other ones, so the nearest names of the checkpoint are told.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

SHOWN_MAX = 5  # missing names that are told with their nearest
KNOWN_MAX = 50_000  # names of the checkpoint that are looked at for each
SPELLED_MAX = 2_000  # of them, how many are compared letter by letter


class Tally(NamedTuple):
    """Names of a state that a load has found, and has not found; `skip`ped ones are neither."""

    found: int
    missing: int

    @property
    def is_nothing(self) -> bool:
        """Whether there was something to load and none of it was found."""
        return self.found == 0 and self.missing > 0

    @property
    def is_small_share(self) -> bool:
        """Whether more is missing than was found."""
        return 0 < self.found < self.missing


def total(tallies: Sequence[Tally]) -> Tally:
    """That of several ranks together."""
    return Tally(sum(t.found for t in tallies), sum(t.missing for t in tallies))


def with_nearest(missing: Sequence[str], known: Collection[str]) -> str:
    """The first of `missing`, each with the name of `known` that is most like it."""
    told = []
    for name in missing[:SHOWN_MAX]:
        near = nearest(name, known)
        told.append(f"{name} (the checkpoint has {near})" if near else name)
    more = len(missing) - len(told)
    return ", ".join(told) + (f" and {more} more" if more > 0 else "")


def nearest(name: str, known: Collection[str]) -> str:
    """The one of `known` with the most parts at the end in common, else the one that is spelled
    most alike; "" where none is like it. One part in common counts where the rest is alike, too.
    """
    parts = name.split(".")[::-1]
    best, best_parts = "", 0
    for other in islice(known, KNOWN_MAX):
        same = _same_start(parts, other.split(".")[::-1])
        if same > best_parts:
            best, best_parts = other, same
    if best_parts > 1:
        return best
    close = difflib.get_close_matches(name, list(islice(known, SPELLED_MAX)), n=1, cutoff=0.6)
    return close[0] if close else best


def _same_start(a: Sequence[str], b: Sequence[str]) -> int:
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return min(len(a), len(b))
