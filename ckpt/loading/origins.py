"""Where the files of a checkpoint are: in the store of every rank, or with ranks of other hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from ckpt.loading.block_sums import BlockSums
from ckpt.loading.byte_line import Ints


class Origins(ABC):
    """Which files the store of this rank has, and how the bytes of the others come.

    `ranks` are those that have the same files as this one, in rank order: they pass on to each
    other what several of them need. `is_away[i]` is whether data file number i is elsewhere.
    """

    ranks: tuple[int, ...]
    is_away: npt.NDArray[np.bool_]

    @abstractmethod
    def reading(self, sums: BlockSums, files: Sequence[int]) -> AbstractContextManager[None]:
        """What surrounds the reads of a rank, which has to `fetch` of some `files`. Collective."""

    @abstractmethod
    def fetch(self, file: int, runs: Ints) -> memoryview:
        """The bytes of a file that is away in `runs` of the byte line, one run after the other, of
        blocks that were checked where they lie. By any thread, during `reading`.

        Raises Corrupt and StorageError as whoever has the file does.
        """


class OneStore(Origins):
    """All ranks read from one store."""

    def __init__(self, size: int, file_count: int) -> None:
        self.ranks = tuple(range(size))
        self.is_away = np.zeros(file_count, dtype=np.bool_)

    def reading(self, sums: BlockSums, files: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def fetch(self, file: int, runs: Ints) -> memoryview:
        raise AssertionError("no file is away")
