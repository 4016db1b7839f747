"""One object of a store, cut into parts that several threads write: whole or not at all.

    fill (in any order) -> finish (in order) -> send (in order) -> written (in any order)

Everything that is too large to be written in one go comes here: data files of saves, copies and
imports, and files of other libraries. What the bytes mean is not known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from ckpt.layout.buffers import aligned_buffer
from storage import ObjectWriter, Store
from storage.store import JointWriter

MIB = 1 << 20
PARTS_MAX = 10_000  # S3's limit for one object
PART_NBYTES = 16 * MIB  # of what is read from storage and written: one request each

Filled = TypeVar("Filled")


def part_nbytes_for(nbytes: int, wanted: int) -> int:
    """The size of the parts of an object of `nbytes`: more than `wanted` where there would be too
    many.
    """
    needed = -(-nbytes // PARTS_MAX)
    return wanted if needed <= wanted else -(-needed // MIB) * MIB


@contextmanager
def sending(
    store: Store,
    key: str,
    nbytes: int,
    *,
    part_nbytes: int,
    threads: int = 0,
    durable: bool = False,
    direct: bool = False,
    add: Callable[[int], None] | None = None,
) -> Iterator[PartSender]:
    """A new object of `nbytes`, published when the block ends without an error and all is written.

    After an error nothing is visible, and no thread writes any more. Parts are of `part_nbytes`, or
    larger where there would be too many. `add(nbytes)` counts what was written. Other arguments are
    those of `Store.create` and `PartSender`.
    """
    part_nbytes = part_nbytes_for(nbytes, part_nbytes)
    with (
        store.create(
            key, nbytes, part_nbytes=part_nbytes, durable=durable, direct=direct
        ) as writer,
        PartSender(writer, nbytes, part_nbytes, threads=threads, add=add) as sender,
    ):
        yield sender


class PartSender:
    """Writes parts in order of `send`, up to `threads` at once; without threads, `send` writes.

    Used by one thread. A failed write is raised by a later method, or at the end of the block.
    """

    def __init__(
        self,
        writer: ObjectWriter | JointWriter,
        nbytes: int,
        part_nbytes: int,
        *,
        threads: int,
        add: Callable[[int], None] | None = None,
        first: int = 0,
    ) -> None:
        self.nbytes, self.part_nbytes, self.threads = nbytes, part_nbytes, threads
        self.index = first  # of the part that is sent next
        self._writer = writer
        self._add = add
        self._pool = ThreadPoolExecutor(threads, "ckpt-write") if threads else None
        self._in_flight: dict[Future[None], Callable[[], None]] = {}

    def __enter__(self) -> PartSender:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.wait_for_all()
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def is_busy(self) -> bool:
        """Whether one more part would wait for a thread."""
        return 0 < self.threads <= len(self._in_flight)

    def send(self, buffers: Sequence[memoryview], after: Callable[[], None] = lambda: None) -> None:
        """Write `buffers` together as the next part.

        They must not change before it is written; `after` is called then, by a method of this
        object.
        """
        index, nbytes = self.index, sum(len(buffer) for buffer in buffers)
        self.index += 1
        done = partial(self._written, nbytes, after)
        if self._pool is None:
            self._writer.write_part(index, buffers)
            done()
        else:
            self._in_flight[self._pool.submit(self._writer.write_part, index, buffers)] = done

    def wait_for_one(self) -> None:
        """Returns when any part in flight is written: one that stalls does not hold the others."""
        assert self._in_flight, "nothing is in flight"
        self._finish(wait(self._in_flight, return_when=FIRST_COMPLETED).done)

    def wait_for_all(self) -> None:
        """Returns when every part that was sent is written."""
        while self._in_flight:
            self.wait_for_one()

    def collect(self) -> None:
        """Call `after` of the parts that are written already, without waiting."""
        self._finish([future for future in self._in_flight if future.done()])

    def _finish(self, futures: Iterable[Future[None]]) -> None:
        """Call `after` of parts that are written; raises what failed."""
        for future in futures:
            done = self._in_flight.pop(future)
            future.result()
            done()

    def _written(self, nbytes: int, after: Callable[[], None]) -> None:
        after()
        if self._add is not None:
            self._add(nbytes)


def fill_and_send(
    sender: PartSender,
    *,
    fill: Callable[[int, memoryview], Filled],
    finish: Callable[[int, memoryview, Filled], None],
    stop: int | None = None,
) -> None:
    """Fill and send parts up to part `stop`, by default all; they are written when this returns.

    `fill` runs in threads, as many as write. `finish` gets what it returned, in order and in this
    thread, and may still change the part. Both get the part's first byte in the object and its
    memory. Memory is a buffer per thread. The first error of any is raised when all threads are
    done.
    """
    nbytes, part_nbytes = sender.nbytes, sender.part_nbytes
    following = sender.index
    count = -(-nbytes // part_nbytes) if stop is None else stop
    threads = max(1, min(sender.threads, count - following))
    # Buffers are used again for every part: fresh memory costs more than the copy. They are given
    # out here, in the order of the parts, so that no part waits for a later one.
    free = [aligned_buffer(min(part_nbytes, nbytes)) for _ in range(threads)]
    filling: deque[tuple[int, memoryview, memoryview, Future[Filled]]] = deque()
    with ThreadPoolExecutor(threads, "ckpt-fill") as fillers:
        while following < count or filling:
            sender.collect()
            while not free and not filling:
                sender.wait_for_one()
            while free and following < count:
                buffer, start = free.pop(), following * part_nbytes
                part = buffer[: min(part_nbytes, nbytes - start)]
                filling.append((start, buffer, part, fillers.submit(fill, start, part)))
                following += 1
            if filling:
                start, buffer, part, filled = filling.popleft()
                finish(start, part, filled.result())
                sender.send([part], partial(free.append, buffer))
        sender.wait_for_all()
