"""A data file in the making: its chunks' bytes pass once, in file order, and the rest follows.

Writers differ in where the bytes of chunks come from (live memory, a staged copy, another
checkpoint, a file of another library) and in how they go to the store. Here is what they share:
checksums of blocks, the bytes around the chunks, and the description for the manifest.
"""

from __future__ import annotations

from functools import cached_property

from ckpt.format.checksum import BlockChecksums
from ckpt.format.checksum_tables import seal_of
from ckpt.format.datafile import checksum_tensor
from ckpt.format.part import PartFile
from ckpt.format.rank_files import DataFile


class DataFileBuilder:
    """Takes the bytes of one file's chunks, in file order, and makes all its other bytes.

    They come either as runs of any length, between `header` and `tail`, or as parts of the file in
    memory, to be completed there.
    """

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._checksums = BlockChecksums(file.entries.block_ends)

    @property
    def header(self) -> memoryview:
        """The bytes before the chunks."""
        return memoryview(self._file.layout.header)

    def add(self, data: memoryview) -> None:
        """The next bytes of the chunks."""
        self._checksums.add(data)

    @cached_property
    def tail(self) -> memoryview:
        """The bytes after the chunks, which must all have passed: reserved tensors, checksums."""
        return memoryview(b"".join([*self._file.extras.values(), self._table]))

    @cached_property
    def _table(self) -> bytes:
        return checksum_tensor(self._file.layout, self._checksums.result(), self._file.extras)

    def complete(self, start: int, part: memoryview) -> None:
        """Fill in what a part lacks that holds the bytes of chunks and begins at byte `start`.

        Parts come in file order.
        """
        stop = start + len(part)
        first = len(self.header)
        last = first + self._file.entries.nbytes
        if start < first:
            here = self.header[start:stop]
            part[: len(here)] = here
        low, high = max(start, first), min(stop, last)
        if low < high:
            self.add(part[low - start : high - start])
        if stop > last:
            here = self.tail[max(start - last, 0) : stop - last]
            part[len(part) - len(here) :] = here

    def result(self) -> PartFile:
        """The file as its rank's part lists it, once all chunks have passed."""
        file = self._file
        checksums = self._checksums.result()
        chunks, seal = file.entries.chunks, seal_of(self._table)
        return PartFile(file.name, file.layout, chunks, checksums, seal, file.digests)
