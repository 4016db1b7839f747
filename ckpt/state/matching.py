"""How much of a state a checkpoint has, and what a forgotten `rename=` looks like.

`strict=False` tolerates names that are missing. Where no name matches, no tensor, or fewer names
than are missing, the state probably uses other names, so the message names the nearest ones of the
checkpoint.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

# The state of a large model may have no name that matches: what is looked at has to be bounded.
SHOWN_MAX = 5  # missing names that a message shows with their nearest
KNOWN_MAX = 50_000  # names of the checkpoint that are looked at for each
SPELLED_MAX = 2_000  # of them, how many are compared letter by letter


class Tally(NamedTuple):
    """Names of a state that match a checkpoint's, and that are missing there.

    Names in `skip` count as neither. `tensors` and `missing_tensors` are how many of both are
    tensors.
    """

    matched: int
    missing: int
    tensors: int = 0
    missing_tensors: int = 0


def with_nearest(missing: Sequence[str], known: Collection[str]) -> str:
    """The first of `missing`, each with the name of `known` that is most like it."""
    shown = []
    for name in missing[:SHOWN_MAX]:
        near = nearest(name, known)
        shown.append(f"{name} (the checkpoint has {near})" if near else name)
    more = len(missing) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def nearest(name: str, known: Collection[str]) -> str:
    """The name of `known` that shares most parts at the end with `name`, two at least; else the one
    spelled most alike; else one that shares the last part, or "".
    """
    # Wrappers and renamed modules change the beginning of names, layers and "weight" stay.
    parts = name.split(".")[::-1]
    best, best_parts = "", 0
    for other in islice(known, KNOWN_MAX):
        pairs = zip(parts, reversed(other.split(".")), strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if same > best_parts:
            best, best_parts = other, same
    if best_parts > 1:
        return best
    close = difflib.get_close_matches(name, list(islice(known, SPELLED_MAX)), n=1, cutoff=0.6)
    return close[0] if close else best
