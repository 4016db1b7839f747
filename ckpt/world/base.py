"""Ranks that talk to each other: the interface, the world of one rank, collective calls."""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

from ckpt.errors import RankFailed
from ckpt.world.attendance import Board

MiB = 1024 * 1024
JSON_NBYTES_MAX = 256  # that are sent as they are


def pack(part: bytes) -> bytes:
    """One payload of an UP or DOWN frame; packed ones are joined by writing them one after
    another.
    """
    return struct.pack("<Q", len(part)) + part


def unpack(data: bytes) -> list[bytes]:
    """The payloads that were packed and joined."""
    parts, offset = [], 0
    while offset < len(data):
        (nbytes,) = struct.unpack_from("<Q", data, offset)
        parts.append(data[offset + 8 : offset + 8 + nbytes])
        offset += 8 + nbytes
    return parts


def joined(first: bytes, second: bytes) -> bytes:
    """Two messages as one; see `split`."""
    return len(first).to_bytes(8, "little") + first + second


def split(data: bytes) -> tuple[bytes, bytes]:
    """The two messages that were joined."""
    size = int.from_bytes(data[:8], "little")
    return data[8 : 8 + size], data[8 + size :]


_Result = TypeVar("_Result")
_LENGTH = struct.Struct("<Q")


class Message(NamedTuple):
    """Bytes for or from `rank`: a flat memoryview of format "B", whose length both sides know.

    Between two ranks, in one direction and one block of `World.transfers`, each `tag` is used once.
    """

    rank: int
    tag: int
    data: memoryview


class Transfers(ABC):
    """Messages between pairs of ranks, while a `with` block of `World.transfers` lasts."""

    @abstractmethod
    def move(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """Send and receive; returns when all of it is done. By any threads, in any order.

        Sends of one rank and receives of another meet by their tag. Raises RankFailed when a
        rank is gone or does not answer; the world has then come to its end. Buffers must not change
        meanwhile; after an error those of `receive` are undefined.
        """

    def swap(self, tag: int, send: Mapping[int, bytes], sources: Sequence[int]) -> list[bytes]:
        """Send bytes of any length to some ranks, and receive from each of `sources`. Takes two
        tags, from `tag` on.
        """
        # Two moves: a receiver needs memory of the right length before any byte comes.
        lengths = [memoryview(bytearray(_LENGTH.size)) for _ in sources]
        self.move(
            [Message(to, tag, memoryview(_LENGTH.pack(len(data)))) for to, data in send.items()],
            [Message(source, tag, room) for source, room in zip(sources, lengths, strict=True)],
        )
        rooms = [memoryview(bytearray(*_LENGTH.unpack(length))) for length in lengths]
        self.move(
            [Message(to, tag + 1, memoryview(data)) for to, data in send.items()],
            [Message(source, tag + 1, room) for source, room in zip(sources, rooms, strict=True)],
        )
        return [bytes(room) for room in rooms]

    @abstractmethod
    def abort(self) -> None:
        """Make every `move` of this rank raise, those that wait now too. By any thread."""


class World(ABC):
    """The ranks that save or load together. Rank 0 is the coordinator.

    `global_ranks` are torch.distributed's own numbers of the ranks, in rank order.
    """

    rank: int
    size: int
    global_ranks: tuple[int, ...]

    @property
    def failure(self) -> RankFailed | None:
        """Why this world is at its end: a rank died, left or did not answer. None while it is
        usable; errors that ranks agreed on leave it so.
        """
        return None

    @property
    def addresses(self) -> tuple[str, ...]:
        """By which other machines may reach this process, the best first; none where that is not
        known, or all ranks are in one process.
        """
        return ()

    def begin_call(self, name: str) -> None:
        """A public call begins on this rank, such as `ckpt.save`, that all ranks make: rounds that
        wait for long name those that have not made it. Not a round. By default they do not.
        """
        return

    @abstractmethod
    def gather(self, name: str, payload: bytes) -> list[bytes]:
        """Every rank's payload on every rank, in rank order. For small payloads."""

    @abstractmethod
    def gather_to_coordinator(self, name: str, payload: bytes) -> list[bytes] | None:
        """Every rank's payload on the coordinator, in rank order; None elsewhere, at once."""

    @abstractmethod
    def merge_to_coordinator(
        self, name: str, merge: Callable[[list[bytes]], bytes]
    ) -> list[bytes] | None:
        """Payloads that are merged on their way: `merge(below)` gets those of the ranks right below
        in the tree of the world, in rank order, and gives this rank's for the one above.

        Returns `below` on the coordinator, which does not merge, and None elsewhere. Each rank
        waits for those below it. An error that leaves `merge` ends the world.
        """

    @abstractmethod
    def broadcast(self, name: str, payload: bytes | None) -> bytes:
        """The coordinator's payload on every rank; the others pass None."""

    @abstractmethod
    def agree(self, phase: str, error: BaseException | None) -> None:
        """Return when no rank has an error; otherwise raise the same error on every rank.

        When the failing ranks have one class of `ckpt.errors` in common, that is raised, with every
        problem and its ranks; otherwise RankFailed with rank, phase, class and message of the
        first. A world of one raises the error itself.
        """

    def all_to_all(
        self, name: str, send: Sequence[Sequence[memoryview]], recv: Sequence[Sequence[memoryview]]
    ) -> None:
        """All-to-all of bytes: fill the buffers `recv[r]` with those of rank r's `send[this rank]`.

        Both sides know how many there are and their lengths; all ranks raise RankFailed where the
        sums of these differ. There are none for a rank itself. Buffers are as those of a Message.
        """
        if len(send) != self.size or len(recv) != self.size or send[self.rank] or recv[self.rank]:
            raise ValueError(
                f"all-to-all {name!r}: buffers for {len(send)} and from {len(recv)} ranks, "
                f"expected {self.size} and none for this rank itself"
            )
        lengths = [[sum(part.nbytes for part in parts) for parts in side] for side in (send, recv)]
        # Not every rank to the same one at once.
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        messages = [
            [Message(peer, *one) for peer in peers for one in enumerate(side[peer])]
            for side in (send, recv)
        ]
        with self.transfers(name, *lengths) as wires:
            wires.move(*messages)

    @abstractmethod
    def transfers(
        self, name: str, sends: Sequence[int] = (), expects: Sequence[int] = ()
    ) -> AbstractContextManager[Transfers]:
        """Messages between pairs of ranks: one round in which all ranks come here, then a block in
        which each talks to those it has something for, and nobody waits for the others.

        `sends` and `expects` are the bytes for and from each rank, if all ranks know them: where
        two differ, all raise RankFailed. The block must not contain rounds. An error that leaves it
        ends the world.
        """

    @abstractmethod
    def raise_flag(self, name: str) -> None:
        """Set one bit for all ranks: `flag_is_up(name)` is soon true on each of them, and stays so.

        Not a round: any rank may do it at any time, more than once.
        """

    @abstractmethod
    def flag_is_up(self, name: str) -> bool:
        """Whether any rank raised that flag, as far as is known here. Sends nothing."""

    @abstractmethod
    def check_neighbour(self, phase: str) -> None:
        """Raise RankFailed when a rank is known to be gone. Not a round, and without waiting.

        It sends nothing: each rank notices the deaths of a few others and reports them to all.
        """

    @abstractmethod
    def duplicate(self) -> World:
        """Another world of the same ranks, for another thread. Collective, in the same order on all
        ranks when there are several.
        """

    def board(self) -> Board | None:
        """Where ranks post their status; None in a world without one. Not a round."""
        return None

    def report_storage_wait(self, waits: bool) -> None:
        """Report whether this rank waits for its storage: rounds have a longer deadline meanwhile.

        Not a round; by any thread, never raises. By default deadlines stay as they are.
        """
        return

    def end(self, failure: RankFailed) -> None:
        """Make rounds of this world raise `failure`, on all ranks. Not a round; by any thread.

        By default it ends only rounds that this process waits in.
        """
        self.abandon()

    def release(self) -> None:
        """Need no connection any more: this process has left its job."""
        return

    def abandon(self) -> None:
        """End a round that another thread of this process waits in, soon and with an error.

        By default the round ends at its deadline.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Leave. Not collective; other ranks that still wait for this one get an error that names
        it. What this rank has contributed to a round still counts: it may wait, as long as a round
        does, for ranks whose payloads go through this one.
        """


def collectively(world: World, phase: str, run: Callable[[], _Result]) -> _Result:
    """`run()` on every rank, then agreement: it returns on all ranks or raises the same on all."""
    try:
        result = run()
    except Exception as error:
        # Not raised here: the other ranks are on their way to this round, and need the answer.
        world.agree(phase, error)
        raise AssertionError("agree raises when a rank has an error") from error
    world.agree(phase, None)
    return result


def from_coordinator(
    world: World, phase: str, make: Callable[[], bytes], error: Exception | None = None
) -> bytes:
    """What `make()` returns on the coordinator, on all ranks; its error is raised on all. Where it
    returns nothing, `error` is, which is why on some rank.
    """
    message: bytes | None = None
    if world.rank == 0:
        try:
            message = make()
        except Exception as caught:
            # Broadcast nothing instead of raising here: the other ranks wait in the broadcast, and
            # would wait until their deadline. All ranks then agree on this error.
            message, error = b"", caught
    received = world.broadcast(phase, message)
    if not received:
        world.agree(phase, error)
    return received


def decided(
    world: World,
    ask: str,
    tell: str,
    make: Callable[[], bytes],
    decide: Callable[[list[bytes]], bytes],
) -> bytes:
    """What the coordinator decides from what `make()` returns on all ranks, by rank: in the rounds
    `ask` and `tell`. Neither is ever empty; their errors are raised on all.
    """
    mine, error = b"", None
    try:
        mine = make()
    except Exception as caught:
        error = caught  # not raised here either
    received = world.gather_to_coordinator(ask, mine) or []
    return from_coordinator(world, tell, lambda: decide(received) if all(received) else b"", error)


def shared(world: World, name: str, make: Callable[[], Any]) -> list[Any]:
    """What `make()` returns on all ranks, by rank, as JSON. Collective; raises like `decided`."""

    def every(each: list[bytes]) -> bytes:
        return b"[%s]" % b",".join(each)

    return list(json.loads(decided(world, name, name, lambda: json.dumps(make()).encode(), every)))


def decided_json(
    world: World, ask: str, tell: str, mine: object, decide: Callable[[list[Any]], object]
) -> Any:
    """`decided` of values that JSON has, compressed where they are long."""

    def packed(value: object) -> bytes:
        data = json.dumps(value).encode()
        return data if len(data) < JSON_NBYTES_MAX else zlib.compress(data, level=1)

    def unpacked(data: bytes) -> Any:
        # 0x78 begins every stream of zlib with its usual window, and no JSON.
        return json.loads(zlib.decompress(data) if data[:1] == b"x" else data)

    def answer(every: list[bytes]) -> bytes:
        return packed(decide(list(map(unpacked, every))))

    return unpacked(decided(world, ask, tell, lambda: packed(mine), answer))


class SoloWorld(World):
    """A world of one rank: nothing is sent, errors are raised as they are."""

    rank = 0
    size = 1

    def __init__(self, global_rank: int = 0) -> None:
        self.global_ranks = (global_rank,)
        self._flags: set[str] = set()

    def gather(self, name: str, payload: bytes) -> list[bytes]:
        return [payload]

    def gather_to_coordinator(self, name: str, payload: bytes) -> list[bytes] | None:
        return [payload]

    def merge_to_coordinator(
        self, name: str, merge: Callable[[list[bytes]], bytes]
    ) -> list[bytes] | None:
        return []

    def broadcast(self, name: str, payload: bytes | None) -> bytes:
        assert payload is not None, f"round {name!r}: the coordinator must pass a payload"
        return payload

    def agree(self, phase: str, error: BaseException | None) -> None:
        if error is not None:
            raise error

    def transfers(
        self, name: str, sends: Sequence[int] = (), expects: Sequence[int] = ()
    ) -> AbstractContextManager[Transfers]:
        return nullcontext(_NoTransfers())

    def raise_flag(self, name: str) -> None:
        self._flags.add(name)

    def flag_is_up(self, name: str) -> bool:
        return name in self._flags

    def check_neighbour(self, phase: str) -> None:
        pass

    def duplicate(self) -> World:
        return SoloWorld(self.global_ranks[0])

    def close(self) -> None:
        pass


class _NoTransfers(Transfers):
    """Those of one rank, which has nobody to talk to."""

    def move(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        assert not send and not receive, "a world of one rank has no other"

    def abort(self) -> None:
        pass


def lengths_problem(
    name: str, tables: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> RankFailed | None:
    """The first pair of ranks of which one sends other bytes than the other expects; `tables` has
    what each rank `sends` and `expects`.
    """
    # Every rank has the same tables, so every rank finds the same pair.
    for sender, receiver in itertools.product(range(len(tables)), repeat=2):
        sent, expected = tables[sender][0][receiver], tables[receiver][1][sender]
        if sent != expected:
            return RankFailed(
                f"all-to-all {name!r}: rank {sender} sends {sent} bytes to rank {receiver}, which "
                f"expects {expected}",
                rank=sender,
                phase=name,
            )
    return None
