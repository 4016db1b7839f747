"""Limits on the trees that foreign pickles build: depth, entries, names, and memory.

A pickle of a few hundred bytes can build a tree that shares its parts so often that no memory could
hold all entries, or a tree that contains itself. Code that walks a tree visits a shared part once
for each of its names. So the tree is measured by the same walk before any other code sees it, and
the walk stops as soon as a limit is exceeded. It also charges the memory that later code will take
until the tree is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckpt.convert.sources.budget import Account
from ckpt.errors import UnsupportedFormat

DEPTH_MAX = 150
ENTRIES_MAX = 50_000  # of a short program; a longer one may have more
ENTRIES_PER_BYTE = 1
TEXT_MAX = 8 << 20  # of all names together, each with those above it
TEXT_PER_BYTE = 16

# Memory from here to the end of an import, in bytes, with what building it has taken: measured over
# many shapes of trees (tests/convert/test_memory.py holds what is charged against what is taken).
STEP_NBYTES = 1 << 16  # is charged at once
FLAG_NBYTES = 32  # of None, True or False in a container
NUMBER_NBYTES = 104
CONTAINER_NBYTES: dict[type, int] = {list: 120, tuple: 120, dict: 220}
OBJECT_NBYTES = 500  # of any other thing with parts, such as a record of DCP
ENCODED_NBYTES = 7  # of each byte of a value's encoding, which lies in several buffers at the end
NAMED_NBYTES = 800  # more, of a value with a name of its own: one beside tensors, or at the top
TENSOR_NBYTES = 4000  # from the view of a storage to a chunk of a manifest
PATH_NBYTES = 5  # of each byte of a tensor's name

Parts = Callable[[Any], "Iterator[tuple[Any, Any]] | None"]


def check_extent(root: Any, parts: Parts, program_nbytes: int, account: Account) -> None:
    """Raise UnsupportedFormat when `root` is more than a program of so many bytes should build, or
    than the budget of `account` has left.

    `parts(thing)` gives the keys and values of a container, None for anything else.
    """
    entries_left = ENTRIES_MAX + ENTRIES_PER_BYTE * program_nbytes
    text_left = TEXT_MAX + TEXT_PER_BYTE * program_nbytes
    granted = 0
    # From the root to the current entry: containers with items that were not visited yet. Visited
    # ones are not remembered, because that would cost more memory than the tree itself.
    levels: list[_Level] = []
    inside: set[int] = set()

    def charge(nbytes: int) -> None:
        nonlocal granted
        granted -= nbytes
        if granted < 0:
            account.charge(STEP_NBYTES - granted)
            granted = STEP_NBYTES

    def enter(thing: Any, name_nbytes: int) -> None:
        nonlocal entries_left, text_left
        entries_left -= 1
        text_left -= name_nbytes
        if entries_left < 0:
            raise UnsupportedFormat(
                f"a state of too many entries in a pickle of {program_nbytes} bytes: its parts are "
                "shared over and over"
            )
        items = parts(thing)
        if items is None:
            charge(_cost(thing, name_nbytes))
            text_left -= _length(thing)
            if levels:
                levels[-1].has_tensors |= not isinstance(thing, _VALUES)
        elif id(thing) in inside:
            raise UnsupportedFormat("a state that contains itself")
        elif len(levels) >= DEPTH_MAX:
            raise UnsupportedFormat(f"a state nested more than {DEPTH_MAX} deep")
        else:
            charge(CONTAINER_NBYTES.get(type(thing), OBJECT_NBYTES + PATH_NBYTES * name_nbytes))
            inside.add(id(thing))
            levels.append(_Level(id(thing), items, name_nbytes))
        if text_left < 0:
            raise UnsupportedFormat(f"too long names in a pickle of {program_nbytes} bytes")

    enter(root, 0)
    while levels:
        level = levels[-1]
        for key, item in level.items:
            if type(key) is not int:  # numbers of lists, or counted with what they are the key of
                charge(_cost(key, 0) if isinstance(key, (str, bytes)) else OBJECT_NBYTES)
            level.count += 1
            level.key_nbytes += _length(key)
            enter(item, level.name_nbytes + 1 + _length(key))
            if levels[-1] is not level:
                break
        else:
            levels.pop()
            inside.discard(level.identity)
            if level.has_tensors or not levels:
                charge(level.names_cost())
            if levels:
                levels[-1].has_tensors |= level.has_tensors
    account.release(granted)


_VALUES = (type(None), bool, int, float, str, bytes)


class _Level:
    """A container that is being walked: its remaining items, and what was found in it so far."""

    __slots__ = ("count", "has_tensors", "identity", "items", "key_nbytes", "name_nbytes")

    def __init__(self, identity: int, items: Iterator[tuple[Any, Any]], name_nbytes: int) -> None:
        self.identity = identity
        self.items = items
        self.name_nbytes = name_nbytes
        self.count = 0
        self.key_nbytes = 0
        self.has_tensors = False

    def names_cost(self) -> int:
        """Bytes of memory that a name for each of its items costs; without tensors, the container
        is stored as one value, and its items have no names.
        """
        names_nbytes = self.count * self.name_nbytes + self.key_nbytes
        return NAMED_NBYTES * self.count + PATH_NBYTES * names_nbytes


def _length(thing: Any) -> int:
    return len(thing) if isinstance(thing, (str, bytes)) else 8


def _cost(thing: object, name_nbytes: int) -> int:
    """Bytes of memory that a key costs, or an entry that is not a container, with its name."""
    if thing is None or thing is True or thing is False:
        return FLAG_NBYTES
    if isinstance(thing, float):
        return NUMBER_NBYTES
    if isinstance(thing, int):  # which may have a thousand bytes
        return NUMBER_NBYTES + thing.bit_length()
    if isinstance(thing, str):
        wide = 0 if thing.isascii() else 3 * ENCODED_NBYTES
        return NUMBER_NBYTES + len(thing) * (ENCODED_NBYTES + 1 + wide)
    if isinstance(thing, bytes):
        return NUMBER_NBYTES + len(thing) * ENCODED_NBYTES
    return TENSOR_NBYTES + PATH_NBYTES * name_nbytes
