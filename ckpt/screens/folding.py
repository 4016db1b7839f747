"""Names that repeat in each block of a model, as one line: `h.*.attn.weight (12)`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\Z)")
STATE_OF = re.compile(r"\A(.*\.state)\..+(?=\.)")  # what an optimizer keeps of one parameter


def name_of_all(name: str, *, states: bool = False) -> str:
    """`name` with a star for each number, and with `states` for the parameter of an optimizer's
    state.
    """
    return NUMBER.sub("*", STATE_OF.sub(r"\1.*", name) if states else name)


def counted_name(first: str, common: str, count: int) -> str:
    """The name of a line: that of its only member, or the common one and how many have it."""
    return first if count == 1 else f"{common} ({count})"


def folded(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Rows of names and their descriptions; those whose names differ in numbers alone become one,
    in the place of the first.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    firsts: dict[tuple[str, ...], str] = {}
    for name, *rest in rows:
        # With the rest: a layer of another shape or dtype is what one looks for.
        key = (NUMBER.sub("*", name), *rest)
        counts[key] += 1
        firsts.setdefault(key, name)
    return [(counted_name(name, key[0], counts[key]), *key[1:]) for key, name in firsts.items()]
