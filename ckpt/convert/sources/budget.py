"""How much memory a source may take until its checkpoint is written: one budget for all of it.

What describes tensors (pickles, directories of zip files, names) is charged before it is made, at
what it costs from then on until the import or export has ended. The budget is a fixed number of
bytes, and the bytes of the tensors that are in the source: a file that describes more than it has
is refused, whatever it says.

What is made of a source has a budget, too: a tensor may show one stored element billions of times.
"""

from __future__ import annotations

import threading

from ckpt.errors import UnsupportedFormat

MIB = 1 << 20
MEMORY_NBYTES_MAX = 64 * MIB
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

    `nbytes_max` is how much, beside the bytes of tensors that are there (None: 64 MiB).
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

    def charge(self, nbytes: int) -> None:
        """Count memory that is about to be taken. Raises UnsupportedFormat beyond the budget."""
        self.budget.charge(nbytes)
        self.nbytes += nbytes

    def release(self, nbytes: int) -> None:
        """Count memory that is free again."""
        self.nbytes -= nbytes
        self.budget.release(nbytes)

    def close(self) -> None:
        """Nothing of it is kept."""
        self.release(self.nbytes)
