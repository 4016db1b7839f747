"""Writing an encoded object: blocks are encoded by the threads that write, and packed as they come.

The length is known at the end alone. So the object is begun with the most that it can have, and
shortened to what it has before its last part is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from storage.encoding.layout import MAGIC, BlockPlace, ObjectEncoder
from storage.forks import ForkSafeLock
from storage.keys import check_key
from storage.ranges import PartLedger, drop_front, flat_views
from storage.store import ObjectWriter

Part = tuple[int, list[memoryview]]


class EncodedWriter(ObjectWriter):
    """Encodes what is written and passes it on in parts of the store beneath.

    Its memory is, for each thread that writes, one part encoded and one that is being sent.
    """

    def __init__(
        self,
        key: str,
        encoder: ObjectEncoder,
        begin: Callable[[], AbstractContextManager[ObjectWriter]],
        stored_part_nbytes: int,
    ) -> None:
        grid = encoder.grid
        self.part_nbytes = grid.part_nbytes
        self._ledger = PartLedger(check_key(key), grid.nbytes, grid.part_nbytes)
        self._encoder = encoder
        self._begin = begin
        self._stored_part_nbytes = stored_part_nbytes
        self._announced_nbytes = encoder.nbytes_max
        self._entries: list[BlockPlace | None] = [None] * grid.blocks_count
        self._waiting = [memoryview(MAGIC)]  # less than one part of the store
        self._nbytes = len(MAGIC)  # of all so far, those that were sent included
        self._index = 0  # of the part that is sent next
        self._lock = ForkSafeLock()

    def __enter__(self) -> EncodedWriter:
        self._context = self._begin()
        self._writer = self._context.__enter__()
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        # Never given back: a number is tagged once, whatever becomes of the bytes.
        where = self._ledger.claim(index, buffers)
        views = flat_views(buffers)
        encoded: list[tuple[int, int, bytes]] = []
        for number in self._encoder.grid.blocks_of_part(index):
            block = self._encoder.grid.block(number)
            data = _joined(views, block.start - where.start, block.nbytes)
            encoded.append((number, *self._encoder.block(number, data)))
        with self._lock:
            for number, coding, tagged in encoded:
                self._entries[number] = BlockPlace(self._nbytes, len(tagged), coding)
                self._append(tagged)
            parts = list(self._whole_parts(keep=0))
        for part in parts:
            self._writer.write_part(*part)

    def shorten(self, nbytes: int) -> None:
        self._ledger.shorten(nbytes)
        self._encoder.grid = self._encoder.grid._replace(nbytes=nbytes)
        del self._entries[self._encoder.grid.blocks_count :]

    def __exit__(self, *raised: Any) -> bool | None:
        if raised[0] is None:
            try:
                self._finish()
            except BaseException as error:
                self._context.__exit__(type(error), error, error.__traceback__)
                raise
        return self._context.__exit__(*raised)

    def _finish(self) -> None:
        self._ledger.check_complete()
        self._append(self._encoder.end([entry for entry in self._entries if entry is not None]))
        if self._nbytes < self._announced_nbytes:
            self._writer.shorten(self._nbytes)
        for part in self._whole_parts(keep=1):
            self._writer.write_part(*part)
        self._writer.write_part(self._index, self._waiting)

    def _append(self, data: bytes) -> None:
        self._waiting.append(memoryview(data))
        self._nbytes += len(data)

    def _whole_parts(self, *, keep: int) -> Iterator[Part]:
        """Parts of the store that are full, taken from what waits; `keep` bytes stay at least."""
        size = self._stored_part_nbytes
        waiting = self._nbytes - self._index * size
        while waiting >= size + keep:
            yield self._index, _front(self._waiting, size)
            self._waiting = drop_front(self._waiting, size)
            self._index += 1
            waiting -= size


def _joined(views: list[memoryview], start: int, nbytes: int) -> memoryview:
    """Bytes `start` to `start + nbytes` of all views together: copied only where that is needed."""
    pieces = _front(drop_front(views, start), nbytes)
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _front(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` bytes of `views`."""
    pieces = []
    for view in views:
        if not nbytes:
            break
        pieces.append(view[:nbytes])
        nbytes -= pieces[-1].nbytes
    return pieces
