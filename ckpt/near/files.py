"""The files of one near checkpoint, wherever they lie: on this host, or at ranks of others.

A rank reads what its host has. The rest it requests from a rank that has it, piece by piece, so
that a load plans, checks and places bytes as it does with any store.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from ckpt.world.base import Message, Transfers, World
from storage import StorageError, Store
from storage.ranges import flat_views
from storage.store import ByteRange
from storage.wrap import WrappedStore

_REQUEST = struct.Struct("<QQQ")  # number of the file, first byte, bytes; no bytes end it
_FINE, _FAILED = b"\x01", b"\x00"


class NearFiles(WrappedStore):
    """The files of the hosts as one store. `inner` is the tier of this host, `owners` has a rank
    for each key that is not in it.

    Files of others can be read while `reading` lasts.
    """

    def __init__(self, inner: Store, world: World, keys: Sequence[str], owners: Mapping[str, int]):
        super().__init__(inner)
        self._world = world
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._keys = keys
        self._owners = owners
        self._requesters: dict[int, _Requester] = {}
        self.nbytes_of_others = 0

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if key not in self._owners:
            return self.inner.get(key, byte_range)
        assert byte_range is not None, "a load knows what it reads"
        data = bytearray(byte_range.nbytes)
        self.get_into(key, byte_range.start, [memoryview(data)])
        return bytes(data)

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        owner = self._owners.get(key)
        if owner is None:
            self.inner.get_into(key, start, buffers)
            return
        for view in flat_views(buffers):
            self._requesters[owner].get_into(self._numbers[key], start, view)
            start += view.nbytes
            self.nbytes_of_others += view.nbytes

    def get_direct_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        if key in self._owners:
            self.get_into(key, start, buffers)
        else:
            self.inner.get_direct_into(key, start, buffers)

    def is_cold(self, key: str, byte_range: ByteRange) -> bool:
        return key not in self._owners and self.inner.is_cold(key, byte_range)

    @contextmanager
    def reading(self, keys: frozenset[str]) -> Iterator[None]:
        """Serve the other ranks in this block, and be served; this rank reads `keys`. Collective.

        Raises RankFailed when a rank is gone.
        """
        mine = sorted({self._owners[key] for key in keys if key in self._owners})
        asked = [json.loads(one) for one in self._world.gather("near readers", _json(mine))]
        if not any(asked):
            yield  # every host has what its ranks read
            return
        users = [rank for rank, owners in enumerate(asked) if self._world.rank in owners]
        # A world of its own: this block lasts while the load has rounds and exchanges.
        world = self._world.duplicate()
        try:
            with world.transfers("near files") as wires:
                yield from self._served(wires, users, mine)
        finally:
            world.close()

    def _served(
        self, wires: Transfers, users: Sequence[int], owners: Sequence[int]
    ) -> Iterator[None]:
        self._requesters = {owner: _Requester(wires, owner) for owner in owners}
        pool = ThreadPoolExecutor(max(len(users), 1), thread_name_prefix="ckpt-near")
        serving: list[Future[None]] = []
        try:
            serving += [pool.submit(self._serve, wires, user) for user in users]
            yield
            for requester in self._requesters.values():
                requester.end()
            for future in serving:
                future.result()
        except BaseException:
            wires.abort()  # else the threads would wait for requests that never come
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            self._requesters = {}

    def _serve(self, wires: Transfers, user: int) -> None:
        """Answer the requests of one rank until it has no more."""
        count = 0
        while True:
            request = memoryview(bytearray(_REQUEST.size))
            wires.move([], [Message(user, 3 * count, request)])
            number, start, nbytes = _REQUEST.unpack(request)
            if not nbytes:
                return
            data = memoryview(bytearray(nbytes))
            word = _FINE
            try:
                self.inner.get_into(self._keys[number], start, [data])
            except StorageError:
                word = _FAILED
            answer = [Message(user, 3 * count + 1, memoryview(word))]
            wires.move(answer + [Message(user, 3 * count + 2, data)] * (word == _FINE), [])
            count += 1


class _Requester:
    """Requests to one rank, one at a time. By any threads."""

    def __init__(self, wires: Transfers, owner: int) -> None:
        self._wires = wires
        self._owner = owner
        self._count = 0
        self._lock = threading.Lock()

    def get_into(self, number: int, start: int, view: memoryview) -> None:
        """Fill `view` with bytes of a file. Raises StorageError when the owner cannot read them."""
        with self._lock:
            tag = 3 * self._count
            self._count += 1
            request = memoryview(_REQUEST.pack(number, start, view.nbytes))
            word = memoryview(bytearray(1))
            answer = Message(self._owner, tag + 1, word)
            self._wires.move([Message(self._owner, tag, request)], [answer])
            if word.tobytes() == _FAILED:
                raise StorageError(f"rank {self._owner} cannot read a file of its near tier")
            self._wires.move([], [Message(self._owner, tag + 2, view)])

    def end(self) -> None:
        """There are no more requests."""
        with self._lock:
            request = memoryview(_REQUEST.pack(0, 0, 0))
            self._wires.move([Message(self._owner, 3 * self._count, request)], [])


def _json(value: Sequence[int]) -> bytes:
    return json.dumps(value).encode()
