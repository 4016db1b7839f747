"""How deep and how large a tree is that a foreign program built, before anything walks it.

A few hundred bytes can build a tree whose parts are shared so often that it has more entries than
any memory, or that contains itself. Code that walks it pays for every time that a part is named, so
it is measured by the same walk, which stops as soon as a limit is exceeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckpt.errors import UnsupportedFormat

DEPTH_MAX = 150
ENTRIES_MAX = 50_000  # of a short program; a longer one may have more
ENTRIES_PER_BYTE = 1
TEXT_MAX = 8 << 20  # of all names together, each with those above it
TEXT_PER_BYTE = 16

Parts = Callable[[Any], "Iterator[tuple[Any, Any]] | None"]


def check_extent(root: Any, parts: Parts, program_nbytes: int) -> None:
    """Raise UnsupportedFormat when `root` is more than a program of so many bytes should build.

    `parts(thing)` gives the keys and values of a container, None for anything else.
    """
    entries_left = ENTRIES_MAX + ENTRIES_PER_BYTE * program_nbytes
    text_left = TEXT_MAX + TEXT_PER_BYTE * program_nbytes
    # The way from the root: containers that are not walked to their end, and their paths' lengths.
    # Nothing is remembered of what was walked: that would cost more memory than the tree itself.
    way: list[tuple[int, Iterator[tuple[Any, Any]], int]] = []
    inside: set[int] = set()

    def enter(thing: Any, path: int) -> None:
        nonlocal entries_left, text_left
        entries_left -= 1
        text_left -= path
        if entries_left < 0:
            raise UnsupportedFormat(
                f"a state of too many entries in a pickle of {program_nbytes} bytes: its parts are "
                "shared over and over"
            )
        items = parts(thing)
        if items is None:
            text_left -= _length(thing)
        elif id(thing) in inside:
            raise UnsupportedFormat("a state that contains itself")
        elif len(way) >= DEPTH_MAX:
            raise UnsupportedFormat(f"a state nested more than {DEPTH_MAX} deep")
        else:
            inside.add(id(thing))
            way.append((id(thing), items, path))
        if text_left < 0:
            raise UnsupportedFormat(f"too long names in a pickle of {program_nbytes} bytes")

    enter(root, 0)
    while way:
        own, items, path = way[-1]
        for key, item in items:
            enter(item, path + 1 + _length(key))
            if way[-1][0] != own:
                break
        else:
            way.pop()
            inside.discard(own)


def _length(thing: Any) -> int:
    return len(thing) if isinstance(thing, (str, bytes)) else 8
