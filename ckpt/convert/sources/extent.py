"""How deep and how large a tree is that a foreign program built, before anything walks it.

A few hundred bytes can build a tree whose parts are shared so often that it has more entries than
any memory, or that contains itself. Whoever walks it pays for what it names, not for what it is; so
it is measured by visiting every object once, without recursion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ckpt.errors import UnsupportedFormat

DEPTH_MAX = 150
ENTRIES_MAX = 50_000  # of a short program; a longer one may have more
ENTRIES_PER_BYTE = 4
TEXT_MAX = 8 << 20  # of all names together, each with those above it
TEXT_PER_BYTE = 64

Parts = Callable[[Any], "Iterator[tuple[Any, Any]] | None"]


class Extent(NamedTuple):
    """A tree as it is walked: its depth, its entries, and the characters of their paths."""

    depth: int
    entries: int
    text: int


def check_extent(root: Any, parts: Parts, program_nbytes: int) -> None:
    """Raise UnsupportedFormat when `root` is more than a program of so many bytes should build.

    `parts(thing)` gives the keys and values of a container, None for anything else.
    """
    extent = _extent(root, parts)
    if extent is None:
        raise UnsupportedFormat("a state that contains itself")
    if extent.depth > DEPTH_MAX:
        raise UnsupportedFormat(f"a state nested {extent.depth} deep; at most {DEPTH_MAX}")
    if extent.entries > ENTRIES_MAX + ENTRIES_PER_BYTE * program_nbytes:
        raise UnsupportedFormat(
            f"a state of {min(extent.entries, 10**18)} entries in a pickle of {program_nbytes} "
            "bytes: its parts are shared over and over"
        )
    if extent.text > TEXT_MAX + TEXT_PER_BYTE * program_nbytes:
        raise UnsupportedFormat(
            f"names of {min(extent.text, 10**18)} characters in a pickle of {program_nbytes} bytes"
        )


def _extent(root: Any, parts: Parts) -> Extent | None:
    """None for a tree that contains itself."""
    found: dict[int, Extent] = {}
    open_ids: set[int] = set()
    pending: list[Any] = [root]
    while pending:
        thing = pending[-1]
        own = id(thing)
        if own in found:
            pending.pop()
            continue
        items = parts(thing)
        if items is None:
            found[own] = Extent(0, 1, _text(thing))
            pending.pop()
        elif own in open_ids:  # all below it is measured
            depth, entries, text = 0, 1, 0
            for key, item in items:
                below = found[id(item)]
                depth = max(depth, below.depth)
                entries += below.entries
                text += below.entries * (1 + _text(key)) + below.text
            # Numbers without end would cost memory by themselves.
            found[own] = Extent(depth + 1, min(entries, 1 << 80), min(text, 1 << 80))
            open_ids.discard(own)
            pending.pop()
        else:
            open_ids.add(own)
            for _, item in items:
                if id(item) in open_ids:
                    return None
                if id(item) not in found:
                    pending.append(item)
    return found[id(root)]


def _text(thing: Any) -> int:
    return len(thing) if isinstance(thing, (str, bytes)) else 8
