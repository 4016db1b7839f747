"""How deep and how large a tree is that a foreign program built, before anything walks it.

A few hundred bytes can build a tree whose parts are shared so often that it has more entries than
any memory, or that contains itself. Code that walks it pays for every time that a part is named, so
it is measured by the same walk, which stops as soon as a limit is exceeded. What all such code will
take of memory until the tree is stored is charged as the walk goes.
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
    # The way from the root: containers that are not walked to their end. Nothing is remembered of
    # what was walked: that would cost more memory than the tree itself.
    way: list[_Level] = []
    inside: set[int] = set()

    def take(nbytes: int) -> None:
        nonlocal granted
        granted -= nbytes
        if granted < 0:
            account.charge(STEP_NBYTES - granted)
            granted = STEP_NBYTES

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
            take(_cost(thing, path))
            text_left -= _length(thing)
            if way:
                way[-1].has_tensors |= not isinstance(thing, _VALUES)
        elif id(thing) in inside:
            raise UnsupportedFormat("a state that contains itself")
        elif len(way) >= DEPTH_MAX:
            raise UnsupportedFormat(f"a state nested more than {DEPTH_MAX} deep")
        else:
            take(CONTAINER_NBYTES.get(type(thing), OBJECT_NBYTES + PATH_NBYTES * path))
            inside.add(id(thing))
            way.append(_Level(id(thing), items, path))
        if text_left < 0:
            raise UnsupportedFormat(f"too long names in a pickle of {program_nbytes} bytes")

    enter(root, 0)
    while way:
        level = way[-1]
        for key, item in level.items:
            if type(key) is not int:  # numbers of lists, or counted with what they are the key of
                take(_cost(key, 0) if isinstance(key, (str, bytes)) else OBJECT_NBYTES)
            level.count += 1
            level.key_nbytes += _length(key)
            enter(item, level.path + 1 + _length(key))
            if way[-1] is not level:
                break
        else:
            way.pop()
            inside.discard(level.identity)
            if level.has_tensors or not way:
                take(level.names_cost())
            if way:
                way[-1].has_tensors |= level.has_tensors
    account.release(granted)


_VALUES = (type(None), bool, int, float, str, bytes)


class _Level:
    """A container on the way: what is left of it, and what was met in it."""

    __slots__ = ("count", "has_tensors", "identity", "items", "key_nbytes", "path")

    def __init__(self, identity: int, items: Iterator[tuple[Any, Any]], path: int) -> None:
        self.identity = identity
        self.items = items
        self.path = path  # bytes of its name
        self.count = 0
        self.key_nbytes = 0
        self.has_tensors = False

    def names_cost(self) -> int:
        """What names of their own for all that is in it cost, in bytes of memory."""
        names_nbytes = self.count * self.path + self.key_nbytes
        return NAMED_NBYTES * self.count + PATH_NBYTES * names_nbytes


def _length(thing: Any) -> int:
    return len(thing) if isinstance(thing, (str, bytes)) else 8


def _cost(thing: object, path: int) -> int:
    """What comes of a key, or of an entry that is no container and whose name has `path` bytes, in
    bytes of memory.
    """
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
    return TENSOR_NBYTES + PATH_NBYTES * path
