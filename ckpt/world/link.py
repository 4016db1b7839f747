"""One link to another process: messages in order, once each, over one connection after another.

Each side counts the whole messages that have come and now and then reports the count; what is sent
is kept until it is reported. A connection that breaks is replaced: both sides tell their counts,
and each sends again what the other has not received. What was received in part is thrown away.
"""

from __future__ import annotations

import contextlib
import operator
import socket
import ssl
import struct
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

from ckpt.world.base import MiB
from ckpt.world.liveness import Card

# kind, world, number, bytes of the name, bytes of the body
_HEAD = struct.Struct("<B16sIIQ")
WORLD_NBYTES = 16
NOBODY = bytes(WORLD_NBYTES)
HELLO_NBYTES_MAX = 16 * 1024
REPORT_NBYTES = 256 * 1024  # as much is kept after it has come
STOOD_SECONDS = 1.0  # a connection that held so long is of use, though nothing was sent
KEPT_NBYTES_MIN = 256  # what it takes to keep the smallest message
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 60, "TCP_KEEPCNT": 120}  # seconds, and times
LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_COUNT = struct.Struct("<Q")


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


class Neighbour(NamedTuple):
    """A process at the other end of a connection: the parent in some tree, or a child in one.

    `rank` is its rank in torch.distributed.
    """

    is_parent: bool
    rank: int


class Link:
    """Messages to and from one process. `send` and `flush` are for all threads; the rest is for
    the heart's, or, while no connection is open, for the one thread that makes it anew.

    Note "Ctrl-C": it may come to the main thread between any two steps of Python's, and other
    worlds send on the same connection. So what the kernel takes is counted in the same step in
    which it is handed over, and everything else follows from that count, as often as it is done.
    """

    def __init__(
        self,
        sock: socket.socket,
        neighbour: Neighbour | None,
        card: Card | None,
        way: Callable[[], socket.socket] | None = None,
    ) -> None:
        self.neighbour = neighbour
        self.card = card
        self.way = way  # to a parent
        self.number = 0  # of the connection
        self.received = 0  # messages
        self.has_left = False
        self.has_ended = False  # what is sent: all has gone, and nothing follows
        self.is_by_store = sock.family == socket.AF_UNIX  # see `ckpt.world.by_store`
        self.is_mending = False
        self._mend_until = 0.0
        self._moved = -1  # messages, when it broke the last time
        self._unreported = 0  # bytes
        self._lock = threading.Lock()
        # What is not reported as received: each message with the count of bytes at its end.
        self._outbox: list[tuple[int, memoryview]] = []
        self._reported = 0  # messages, so the number of the first in the outbox
        self._count = deque([0], maxlen=1)  # of bytes that the kernel has taken, of all messages
        self._use(sock)

    def _use(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            # Messages of a round are small, and Nagle's algorithm would hold back the second one
            # until the first is acknowledged: 40 ms where the other side delays that.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Keep firewalls from forgetting an idle one; two hours without an answer end it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEP_ALIVE.items():
                if hasattr(socket, option):  # macOS lacks the first
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.sock = sock
        self.reader = FrameReader(HELLO_NBYTES_MAX)
        self.is_open = True
        self.opened = time.monotonic()

    def mend_until(self, seconds: float) -> float:
        """Until when to make its connection anew: so long, from the first break after which it was
        of no use.
        """
        now, moved = time.monotonic(), self.received + self._reported
        if moved != self._moved or now - self.opened > STOOD_SECONDS:
            self._mend_until = now + seconds
        self._moved = moved
        return self._mend_until

    def send(self, data: bytes) -> bool:
        """Send as much as is taken at once, and keep the rest. Returns whether nothing is left, or
        waits for a new connection.
        """
        with self._lock:
            begin = self._outbox[-1][0] if self._outbox else self._count[0]
            self._outbox.append((begin + len(data), memoryview(data)))
            return self._sent()

    def flush(self) -> bool:
        """Send more of what is left. Returns what `send` does."""
        with self._lock:
            return self._sent()

    def _sent(self) -> bool:
        while self.is_open:
            index = bisect_right(self._outbox, self._count[0], key=operator.itemgetter(0))
            if index == len(self._outbox):
                return True
            end, data = self._outbox[index]
            left = end - self._count[0]
            try:
                # One step; see note "Ctrl-C".
                self._count.extend(
                    map(self._count[0].__add__, map(self.sock.send, (data[data.nbytes - left :],)))
                )
            except LATER:
                return False
            except OSError:  # its end is noticed by reading
                return True
            except BaseException:
                if isinstance(self.sock, ssl.SSLSocket):  # many steps: what it took is not known
                    with contextlib.suppress(OSError):  # it has ended already
                        socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # all is sent anew
                raise
        return True

    def receive(self) -> bytes | None:
        """Bytes that have come; None for none yet, b"" at the end."""
        with self._lock:  # one TLS connection is for one thread at a time
            try:
                return self.sock.recv(MiB)
            except LATER:
                return None
            except OSError:
                return b""

    def took(self, frame: Frame) -> bytes:
        """Count a message that has come. Returns what to send when it is time to report."""
        self.received += 1
        # Small ones count for more: each takes an object at the sender, besides its bytes.
        nbytes = _HEAD.size + len(frame.name.encode()) + len(frame.body)
        self._unreported += max(KEPT_NBYTES_MIN, nbytes)
        if self._unreported < REPORT_NBYTES or self.has_ended:
            return b""
        self._unreported = 0
        return Frame(FrameKind.COUNT, NOBODY, body=_COUNT.pack(self.received)).encode()

    def reported(self, body: bytes) -> None:
        """Keep nothing of what the other side has received. Raises ValueError when that cannot
        be.
        """
        received = _count(body)
        with self._lock:
            if received > self._reported:  # else it was sent before the connection was made anew
                self._drop(received)

    def _drop(self, received: int) -> None:
        number = received - self._reported
        if not 0 <= number <= len(self._outbox):
            last = self._reported + len(self._outbox)
            raise ValueError(f"{received} messages were received of {self._reported} to {last}")
        del self._outbox[:number]
        self._reported = received

    def resume(self, sock: socket.socket, number: int, received: int) -> None:
        """Continue over connection `number`. The other side has received so many messages."""
        with self._lock:
            self._drop(received)
            # Back to the beginning of the first message that has not come whole: what was received
            # of it in part is thrown away there.
            if self._outbox:
                end, data = self._outbox[0]
                self._count.append(end - data.nbytes)
            self.number = number
            self._use(sock)
            self.reader.trust()

    def close(self) -> None:
        """Close the connection; what is sent from now on waits for another."""
        with self._lock:
            self.is_open = False
            self.sock.close()

    def end(self) -> None:
        """Send nothing more. What the other side still sends must be read: a socket that is closed
        with something unread takes back what has not arrived.
        """
        self.has_ended = True
        with contextlib.suppress(OSError):  # it is gone
            # That of ssl ends what is received, too.
            socket.socket.shutdown(self.sock, socket.SHUT_WR)


# --- the first messages of a connection, which do not count ---------------------------------------


def greeting(
    kind: FrameKind, ours: Card, theirs: Card, number: int = 0, received: int = 0
) -> bytes:
    """What connection `number` of a link begins with: HELLO the first one, AGAIN others, to which
    `welcome` is the answer. Or KNOCK, what a parent sends over a connection of its own: connection
    `number` has ended here.
    """
    count = _COUNT.pack(received) if kind is FrameKind.AGAIN else b""
    return Frame(kind, NOBODY, number, theirs.token, count + ours.encode()).encode()


def card_of(frame: Frame) -> tuple[int, Card]:
    """How many messages the sender of a first message has received, and its card."""
    nbytes = _COUNT.size if frame.kind is FrameKind.AGAIN else 0
    received = _count(frame.body[:nbytes]) if nbytes else 0
    return received, Card.decode(frame.body[nbytes:])


def welcome(received: int) -> bytes:
    """The answer to `again`, before any message of the link."""
    return Frame(FrameKind.WELCOME, NOBODY, body=_COUNT.pack(received)).encode()


def read_welcome(sock: socket.socket) -> int:
    """How many messages the other side has received. Raises OSError when it does not say."""
    data = b""
    # Not a byte more: what follows is for the link, which counts it.
    while left := len(welcome(0)) - len(data):
        more = sock.recv(left)
        if not more:
            raise ConnectionResetError("the other side has ended it")
        data += more
    for frame in FrameReader(HELLO_NBYTES_MAX).feed(data):
        if frame.kind is FrameKind.WELCOME:
            return _count(frame.body)
    raise ConnectionAbortedError("the other side answers something else")


def _count(data: bytes) -> int:
    try:
        return int(_COUNT.unpack(data)[0])
    except struct.error as error:
        raise ValueError(f"a count of messages of {len(data)} bytes") from error
