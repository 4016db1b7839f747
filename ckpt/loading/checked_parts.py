"""Parts of blocks for other ranks: a block is checked here, and only what they want is sent."""

from __future__ import annotations

import threading

import numpy as np

from ckpt.commit.locate import file_keys
from ckpt.format.damage import once_more
from ckpt.format.stored_index import read_into
from ckpt.loading.block_sums import BlockSums
from ckpt.loading.byte_line import Ints, NeededBlocks, file_starts, length, pieces_of
from ckpt.loading.plan import blocks_in


class CheckedParts:
    """Bytes of the data files of a checkpoint that are in the store of `sums`. By any threads."""

    def __init__(self, sums: BlockSums) -> None:
        self._sums = sums
        self._starts = file_starts(sums.manifest.file_nbytes)
        self._keys = file_keys(sums.directory, sums.manifest)
        self._blocks: dict[int, NeededBlocks] = {}
        self._lock = threading.Lock()

    def read(self, file: int, runs: Ints) -> list[memoryview]:
        """The bytes of `runs` of the byte line, which lie in blocks of this file, in order.

        Raises Corrupt when a block that has some of them does not match its checksum, and the
        store's errors.
        """
        blocks = self._blocks_of(file)
        pieces, row = pieces_of(runs, blocks.start, blocks.stop)
        assert length(pieces) == length(runs), "a rank asks for bytes of blocks"
        gap = np.flatnonzero(
            (row[1:] != row[:-1]) & (blocks.start[row[1:]] != blocks.stop[row[:-1]])
        )
        parts: list[memoryview] = []
        for some, rows in zip(np.split(pieces, gap + 1), np.split(row, gap + 1), strict=True):
            start = int(blocks.start[rows[0]])
            data = self._checked(file, blocks, slice(int(rows[0]), int(rows[-1]) + 1))
            parts += [data[low:high] for low, high in (some - start).tolist()]
        return parts

    def _checked(self, file: int, blocks: NeededBlocks, rows: slice) -> memoryview:
        """Blocks that follow each other."""
        start, stop = blocks.start[rows], blocks.stop[rows]
        data = memoryview(bytearray(int(stop[-1] - start[0])))
        first = int(start[0] - self._starts[file])

        def read() -> memoryview:
            read_into(self._sums.store, self._keys[file], first, [data])
            self._sums.check(data, stop - start, blocks.chunk[rows], blocks.number[rows])
            return data

        return once_more(read)

    def _blocks_of(self, file: int) -> NeededBlocks:
        with self._lock:
            if file not in self._blocks:
                self._blocks[file] = blocks_in(self._sums.manifest, file)
            return self._blocks[file]
