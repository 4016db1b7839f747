"""Messages between ranks as bytes on a connection."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

MiB = 1024 * 1024
# kind, world, number, bytes of the name, bytes of the body
_HEAD = struct.Struct("<B16sIIQ")
WORLD_NBYTES = 16


class FrameKind(IntEnum):
    """What a message is for."""

    HELLO = 1  # the first on a connection: who connects, as a card
    BYE = 2  # the last on a connection: the process ends as it should
    LEFT = 3  # its rank has closed this world
    UP = 4  # payloads of a rank and those below it, for round `number`
    DOWN = 5  # the answer of round `number`, from rank 0 to all
    FAILURE = 6  # why this world is at its end, to all
    GONE = 7  # a rank that died after it contributed to round `number`, to all
    FLAG = 8  # a flag was raised, to all
    NEWS = 9  # the newest sheet of attendance, to all
    ASK = 10  # to ranks below: who has not come to round `number`? To the parent: are you there?
    ABSENT = 11  # the answer of one who has not come: its rank
    HERE = 12  # the answer of a parent
    AGAIN = 13  # the first on a connection that replaces a broken one: who, and how much had come
    WELCOME = 14  # the answer: how much had come there
    KNOCK = 15  # the only one on a connection, to a child: the one between us has ended here
    COUNT = 16  # how many messages have come so far
    ROLL = 17  # to ranks below, or to rank 0: who has not made as many calls as the body says?
    UNCALLED = 18  # the answer of one who has not: its rank, or the sender's where there is no body


class Frame(NamedTuple):
    """One message. `number` is that of a round, `world` tells which world it belongs to."""

    kind: FrameKind
    world: bytes
    number: int = 0
    name: str = ""
    body: bytes = b""

    def encode(self) -> bytes:
        name = self.name.encode()
        head = _HEAD.pack(self.kind, self.world, self.number, len(name), len(self.body))
        return b"".join([head, name, self.body])

    @property
    def nbytes(self) -> int:
        """As encoded."""
        return _HEAD.size + len(self.name.encode()) + len(self.body)


class FrameReader:
    """Cuts what a connection delivers into frames. Raises ValueError when that is nothing of ours.

    Nothing larger than `nbytes_max` is taken until `trust` was called.
    """

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max: int | None = nbytes_max
        self._buffer = bytearray()

    def trust(self) -> None:
        """Take frames of any size from now on."""
        self._nbytes_max = None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            kind, world, number, name_nbytes, nbytes = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + name_nbytes + nbytes
            if self._nbytes_max is not None and end > self._nbytes_max:
                raise ValueError(f"a first message of {end} bytes")
            if len(self._buffer) < end:
                return
            start = _HEAD.size + name_nbytes
            name = self._buffer[_HEAD.size : start].decode()
            frame = Frame(FrameKind(kind), world, number, name, bytes(self._buffer[start:end]))
            del self._buffer[:end]
            yield frame


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
