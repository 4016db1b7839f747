"""How much memory a source may take until its checkpoint is written: one budget for all of it.

What describes tensors (pickles, directories of zip files, names) is charged before it is made, at
what it costs from then on until the import or export has ended. The budget is a fixed number of
bytes, and the bytes of the tensors that are in the source: a file that describes more than it has
is refused, whatever it says.

What is made of a source has a budget, too: a tensor may show one stored element billions of times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from ckpt.errors import UnsupportedFormat

MIB = 1 << 20
MEMORY_NBYTES_MAX = 64 * MIB
STEP_NBYTES = 1 << 16  # is charged at once, where small sums add up
# What an import or export takes whatever is in the source: threads, small buffers, what the
# allocator cannot give back.
FIXED_NBYTES = 3 * MIB
# Of an import or export. Four bits that become a float32 are eight times as many bytes.
OUTPUT_NBYTES_FREE = 64 * MIB
OUTPUT_PER_STORED = 8


def check_output(name: str, nbytes: int, stored_nbytes: int, nbytes_max: int | None) -> None:
    """Raise UnsupportedFormat when `nbytes` of tensors are more than the source `name` should
    become, which has `stored_nbytes`: 64 MiB and 8 times that, or `nbytes_max`.
    """
    usual = OUTPUT_NBYTES_FREE + OUTPUT_PER_STORED * stored_nbytes
    allowed = usual if nbytes_max is None else nbytes_max
    if nbytes > allowed:
        raise UnsupportedFormat(
            f"{name}: its tensors would be {nbytes} bytes, and {stored_nbytes} bytes of them are "
            f"stored; at most {allowed} are written: some show the same elements many times. If "
            "you trust it, pass output_bytes_max= (--output-bytes-max)"
        )


class MemoryBudget:
    """Counts what all parts of one source take together. Used from several threads.

    `nbytes_max` is how much, besides the bytes of the tensors (None: 64 MiB).
    """

    def __init__(self, nbytes_max: int | None = None) -> None:
        self.nbytes_max = MEMORY_NBYTES_MAX if nbytes_max is None else nbytes_max
        self.tensor_nbytes = 0
        self._taken = FIXED_NBYTES
        self._lock = threading.Lock()

    def allow(self, tensor_nbytes: int) -> None:
        """Count bytes of tensors that are there, as the lengths of files and records show them."""
        with self._lock:
            self.tensor_nbytes += tensor_nbytes

    def charge(self, nbytes: int) -> None:
        """Count memory that is about to be taken. Raises UnsupportedFormat beyond the budget."""
        with self._lock:
            taken = self._taken + nbytes
            if taken <= self.nbytes_max + self.tensor_nbytes:
                self._taken = taken
                return
        raise UnsupportedFormat(
            f"to describe its tensors and values would take {taken} bytes of memory and more; at "
            f"most {self.nbytes_max} are allowed, and the {self.tensor_nbytes} bytes of tensors "
            "that are there; if you trust the file, pass memory_bytes_max= (--memory-bytes-max of "
            "ckpt import, ckpt export and ckpt plan)"
        )

    def release(self, nbytes: int) -> None:
        """Count memory that is free again."""
        with self._lock:
            self._taken -= nbytes


class Account:
    """What one pickle, directory or blob takes of a budget. Used from one thread at a time."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.nbytes = 0
        self._left = 0  # of what was charged at once

    def charge(self, nbytes: int) -> None:
        """Count memory that is about to be taken. Raises UnsupportedFormat beyond the budget."""
        self.budget.charge(nbytes)
        self.nbytes += nbytes

    def release(self, nbytes: int) -> None:
        """Count memory that is free again."""
        self.nbytes -= nbytes
        self.budget.release(nbytes)

    def spend(self, nbytes: int) -> None:
        """As `charge`, for many small sums: the budget is asked for `STEP_NBYTES` at once."""
        self._left -= nbytes
        if self._left < 0:
            self.charge(STEP_NBYTES - self._left)
            self._left = STEP_NBYTES

    def settle(self) -> None:
        """Give back what was charged at once and not spent."""
        self.release(self._left)
        self._left = 0

    def close(self) -> None:
        """Nothing of it is kept."""
        self.release(self.nbytes)
        self._left = 0


# Trees that foreign pickles build -----------------------------------------------------------------

# A pickle of a few hundred bytes can build a tree that shares its parts so often that no memory
# could hold all entries, or a tree that contains itself. Code that walks a tree visits a shared
# part once for each of its names. So the tree is measured by the same walk before any other code
# sees it, and the walk stops as soon as a limit is exceeded. It also charges the memory that later
# code will take until the tree is stored.

DEPTH_MAX = 150
ENTRIES_MAX = 50_000  # of a short program; a longer one may have more
ENTRIES_PER_BYTE = 1
TEXT_MAX = 8 << 20  # of all names together, each with those above it
TEXT_PER_BYTE = 16

# Memory from here to the end of an import, in bytes, with what building it has taken: measured over
# many shapes of trees (tests/convert/test_memory.py holds what is charged against what is taken).
FLAG_NBYTES = 32  # of None, True or False in a container
NUMBER_NBYTES = 104
CONTAINER_NBYTES: dict[type, int] = {list: 120, tuple: 120, dict: 220}
OBJECT_NBYTES = 500  # of any other thing with parts, such as a record of DCP
ENCODED_NBYTES = 7  # of each byte of a value's encoding, which lies in several buffers at the end
NAMED_NBYTES = 800  # more, of a value with a name of its own: one next to tensors, or at the top
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
    inside: set[int] = set()  # containers from the root to the current entry
    # Visited ones are not remembered, because that would cost more memory than the tree itself.

    def visit(thing: Any, name_nbytes: int) -> bool:
        """Whether there is a tensor in it."""
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
            account.spend(_cost(thing, name_nbytes))
            text_left -= _length(thing)
        elif id(thing) in inside:
            raise UnsupportedFormat("a state that contains itself")
        elif len(inside) >= DEPTH_MAX:
            raise UnsupportedFormat(f"a state nested more than {DEPTH_MAX} deep")
        else:
            account.spend(
                CONTAINER_NBYTES.get(type(thing), OBJECT_NBYTES + PATH_NBYTES * name_nbytes)
            )
        if text_left < 0:
            raise UnsupportedFormat(f"too long names in a pickle of {program_nbytes} bytes")
        if items is None:
            return not isinstance(thing, _VALUES)
        inside.add(id(thing))
        count, key_nbytes, has_tensors = 0, 0, False
        for key, item in items:
            if type(key) is not int:  # numbers of lists, or counted with what they are the key of
                account.spend(_cost(key, 0) if isinstance(key, (str, bytes)) else OBJECT_NBYTES)
            count += 1
            key_nbytes += _length(key)
            has_tensors |= visit(item, name_nbytes + 1 + _length(key))
        inside.discard(id(thing))
        if has_tensors or not inside:
            # A name for each item; without tensors, the container is stored as one value, and its
            # items have no names.
            account.spend(NAMED_NBYTES * count + PATH_NBYTES * (count * name_nbytes + key_nbytes))
        return has_tensors

    visit(root, 0)
    account.settle()


_VALUES = (type(None), bool, int, float, str, bytes)


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
