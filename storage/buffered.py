"""A writer that collects an object in memory, for stores that take it whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from storage.keys import check_key
from storage.ranges import PartLedger, flat_views
from storage.store import ObjectWriter


class BufferedWriter(ObjectWriter):
    """Calls `publish(key, data)` at the end of its `with` block, if that ends without an exception.

    What `Store.create` returns where the medium takes an object in one piece. Keeps the promises of
    ObjectWriter: it refuses parts of a wrong size or twice, and objects with a part missing
    (ValueError). Needs the memory of the whole object, in bytes `nbytes`.
    """

    def __init__(
        self,
        key: str,
        nbytes: int,
        *,
        part_nbytes: int,
        publish: Callable[[str, bytearray], object],
    ) -> None:
        self.part_nbytes = part_nbytes
        self._ledger = PartLedger(check_key(key), nbytes, part_nbytes)
        self._publish = publish
        self._data = bytearray(nbytes)

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        position = self._ledger.claim(index, buffers).start
        target = memoryview(self._data)
        for view in flat_views(buffers):
            target[position : position + view.nbytes] = view
            position += view.nbytes

    def shorten(self, nbytes: int) -> None:
        self._ledger.shorten(nbytes)
        del self._data[nbytes:]

    def __enter__(self) -> BufferedWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._ledger.check_complete()
            self._publish(self._ledger.key, self._data)
