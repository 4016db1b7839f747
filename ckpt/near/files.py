"""The files of one near checkpoint, wherever they lie: on this host, or at ranks of others.

A rank reads what its host has. Of the rest it requests exactly the bytes that it wants, from a rank
that has the file: that one reads and checks the blocks that they are of, and sends the bytes.
"""

from __future__ import annotations

import json
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from ckpt.errors import Corrupt
from ckpt.loading.block_sums import BlockSums
from ckpt.loading.byte_line import Ints, length
from ckpt.loading.checked_parts import CheckedParts
from ckpt.loading.origins import Origins
from ckpt.world.base import Message, Transfers, World
from storage import StorageError

_REQUEST = struct.Struct("<QQ")  # number of the file, bytes of its runs; no bytes end it
_ANSWER = struct.Struct("<cQ")  # what follows, and its bytes
_DATA, _CORRUPT, _FAILED = b"d", b"c", b"f"
_TAGS = 4  # messages of one request: two there, two back


class NearFiles(Origins):
    """The files of the hosts for one rank. `ranks` share its host, `owners` has a rank for each
    file, by its number, that this host lacks.
    """

    def __init__(
        self, world: World, ranks: Sequence[int], owners: Mapping[int, int], file_count: int
    ) -> None:
        self.ranks = tuple(ranks)
        self.is_away = np.zeros(file_count, dtype=np.bool_)
        self.is_away[list(owners)] = True
        self._world = world
        self._owners = owners
        self._requesters: dict[int, _Requester] = {}

    def fetch(self, file: int, runs: Ints) -> memoryview:
        data = memoryview(bytearray(length(runs)))
        self._requesters[self._owners[file]].get_into(file, runs, data)
        return data

    @contextmanager
    def reading(self, sums: BlockSums, files: Sequence[int]) -> Iterator[None]:
        """Serve the other ranks in this block, and be served; this rank reads `files`. Collective.

        Raises RankFailed when a rank is gone.
        """
        mine = sorted({self._owners[file] for file in files if file in self._owners})
        asked = [json.loads(one) for one in self._world.gather("near readers", _json(mine))]
        if not any(asked):
            yield  # every host has what its ranks read
            return
        users = [rank for rank, owners in enumerate(asked) if self._world.rank in owners]
        # A world of its own: this block lasts while the load has rounds and exchanges.
        world = self._world.duplicate()
        try:
            with world.transfers("near files") as wires:
                yield from self._served(wires, CheckedParts(sums), users, mine)
        finally:
            world.close()

    def _served(
        self, wires: Transfers, parts: CheckedParts, users: Sequence[int], owners: Sequence[int]
    ) -> Iterator[None]:
        self._requesters = {owner: _Requester(wires, owner) for owner in owners}
        pool = ThreadPoolExecutor(max(len(users), 1), thread_name_prefix="ckpt-near")
        serving: list[Future[None]] = []
        try:
            serving += [pool.submit(_serve, wires, parts, user) for user in users]
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


def _serve(wires: Transfers, parts: CheckedParts, user: int) -> None:
    """Answer the requests of one rank until it has no more."""
    tag = 0
    while True:
        request = memoryview(bytearray(_REQUEST.size))
        wires.move([], [Message(user, tag, request)])
        file, nbytes = _REQUEST.unpack(request)
        if not nbytes:
            return
        encoded = memoryview(bytearray(nbytes))
        wires.move([], [Message(user, tag + 1, encoded)])
        try:
            sent = parts.read(file, _decoded(encoded))
            word, data = _DATA, sent[0] if len(sent) == 1 else memoryview(bytearray().join(sent))
        except Corrupt as error:
            word, data = _CORRUPT, memoryview(str(error).encode())
        except StorageError as error:
            word, data = _FAILED, memoryview(str(error).encode())
        head = memoryview(_ANSWER.pack(word, data.nbytes))
        wires.move([Message(user, tag + 2, head), Message(user, tag + 3, data)], [])
        tag += _TAGS


class _Requester:
    """Requests to one rank, one at a time. By any threads."""

    def __init__(self, wires: Transfers, owner: int) -> None:
        self._wires = wires
        self._owner = owner
        self._tag = 0
        self._lock = threading.Lock()

    def get_into(self, file: int, runs: Ints, view: memoryview) -> None:
        """Fill `view` with bytes of a file. Raises Corrupt when they are not as they were written,
        StorageError when the owner cannot read them.
        """
        with self._lock:
            tag = self._tag
            self._tag += _TAGS
            encoded = memoryview(_encoded(runs))
            request = memoryview(_REQUEST.pack(file, encoded.nbytes))
            head = memoryview(bytearray(_ANSWER.size))
            self._wires.move(
                [Message(self._owner, tag, request), Message(self._owner, tag + 1, encoded)],
                [Message(self._owner, tag + 2, head)],
            )
            word, nbytes = _ANSWER.unpack(head)
            if word == _DATA:
                self._wires.move([], [Message(self._owner, tag + 3, view)])
                return
            text = memoryview(bytearray(nbytes))
            self._wires.move([], [Message(self._owner, tag + 3, text)])
        problem = text.tobytes().decode()
        if word == _CORRUPT:
            raise Corrupt(problem)
        raise StorageError(f"rank {self._owner} cannot read a file of its near tier: {problem}")

    def end(self) -> None:
        """There are no more requests."""
        with self._lock:
            request = memoryview(_REQUEST.pack(0, 0))
            self._wires.move([Message(self._owner, self._tag, request)], [])


def _encoded(runs: Ints) -> bytes:
    """Runs as bytes, few where they are regular."""
    return zlib.compress(np.diff(runs.reshape(-1), prepend=0).astype("<i8").tobytes(), 1)


def _decoded(data: memoryview) -> Ints:
    edges = np.frombuffer(zlib.decompress(data), dtype="<i8")
    return np.cumsum(edges, dtype=np.int64).reshape(-1, 2)


def _json(value: Sequence[int]) -> bytes:
    return json.dumps(value).encode()
