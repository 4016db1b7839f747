"""Connections that break while both processes live: nothing is lost, repeated or out of order.

Method: two hearts in one process, and between them a proxy that breaks the connection after a given
number of bytes, at every byte of a small exchange and of what a new connection begins with.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import selectors
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import pytest
import torch.distributed as dist

from ckpt.errors import RankFailed
from ckpt.world.base import MiB
from ckpt.world.heart import Heart
from ckpt.world.link import Frame, FrameKind, Link, Neighbour, greeting
from ckpt.world.liveness import Card
from ckpt.world.torch_world import TorchWorld
from tests.protocol.test_world_counts import ranks_of
from tests.ranks import run_ranks

WORLD = b"w" * 16
PARENT, CHILD = Neighbour(True, 0), Neighbour(False, 1)
GUARD_SECONDS = 60.0

Way = Literal["up", "down"]
How = Literal["reset", "end", "child only", "parent only"]


class Cut(NamedTuple):
    """After `nbytes` more bytes that way the connection breaks, for both sides or for one."""

    way: Way
    nbytes: int
    how: How = "reset"


class Proxy:
    """Stands before the port of a parent, and breaks connections as told: one cut after another."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._cuts: deque[Cut] = deque()
        self.connections = 0
        self._pairs: dict[socket.socket, tuple[socket.socket, Way]] = {}
        self._spared: list[socket.socket] = []  # half of a connection that broke for one side only
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._closing, self._close = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._listener, self._closing):
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def cut(self, *cuts: Cut) -> None:
        with self._lock:
            self._cuts = deque(cuts)

    def cuts_left(self) -> int:
        with self._lock:
            return len(self._cuts)

    def close(self) -> None:
        """Break all, and take no new connections. May be repeated."""
        if self._thread.is_alive():
            self._close.send(b"x")
            self._thread.join()
            for sock in (*self._pairs, *self._spared, self._listener, self._closing, self._close):
                sock.close()
            self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._closing:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pairs:
                    self._pass_on(key.fileobj)

    def _accept(self) -> None:
        child, _ = self._listener.accept()
        try:
            parent = socket.create_connection(("127.0.0.1", self._port))
        except OSError:  # the heart has stopped
            child.close()
            return
        self.connections += 1
        self._pairs[child], self._pairs[parent] = (parent, "up"), (child, "down")
        for sock in (child, parent):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(sock, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        target, way = self._pairs[source]
        try:
            data = source.recv(65536)
        except OSError:
            data = b""
        now, cut = self._allowed(way, data)
        with contextlib.suppress(OSError):
            target.sendall(now)
        if cut is not None or not data:
            ends = (source, target) if way == "up" else (target, source)
            self._break(*ends, "end" if cut is None else cut.how)

    def _allowed(self, way: Way, data: bytes) -> tuple[bytes, Cut | None]:
        """What of `data` still goes through, and the cut that follows it."""
        with self._lock:
            if not self._cuts or self._cuts[0].way != way or not data:
                return data, None
            cut = self._cuts[0]
            if len(data) < cut.nbytes:
                self._cuts[0] = cut._replace(nbytes=cut.nbytes - len(data))
                return data, None
            return data[: cut.nbytes], self._cuts.popleft()

    def _break(self, child: socket.socket, parent: socket.socket, how: How) -> None:
        for sock, spared in ((child, "parent only"), (parent, "child only")):
            self._selector.unregister(sock)
            del self._pairs[sock]
            if how == spared:
                self._spared.append(sock)
                continue
            if how != "end":  # a reset, which takes with it what was not read
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()


class Inbox:
    """What comes for one world."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.losses: list[str] = []
        self._changed = threading.Condition()

    def receive(self, neighbour: Neighbour, frame: Frame) -> None:
        with self._changed:
            self.bodies.append(frame.body)
            self._changed.notify_all()

    def lost(self, neighbour: Neighbour, how: str) -> None:
        with self._changed:
            self.losses.append(how)
            self._changed.notify_all()

    def wait(self, done: Callable[[Inbox], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: done(self), GUARD_SECONDS), self.bodies[-3:]


class Pair:
    """The hearts of a parent and a child, connected through a proxy."""

    def __init__(self) -> None:
        self.hearts = [Heart(0, ()), Heart(1, ())]
        self.inboxes = [Inbox(), Inbox()]
        for heart, inbox in zip(self.hearts, self.inboxes, strict=True):
            heart.register(WORLD, inbox, self)
        self.proxy = Proxy(self.hearts[0].card.port)
        self.card = self.hearts[0].card._replace(port=self.proxy.port)
        self._sent = 0

    def connect(self) -> None:
        self.hearts[1].connect(self.card, GUARD_SECONDS)

    def talk(self, count: int = 3, nbytes: int = 0) -> None:
        """Some messages both ways, and wait until they have come, in order and once each."""
        bodies = [b"%d" % (self._sent + index) + bytes(nbytes) for index in range(count)]
        self._sent += count
        for body in bodies:
            data = Frame(FrameKind.NEWS, WORLD, body=body).encode()
            self.hearts[1].send(PARENT, data)
            self.hearts[0].send(CHILD, data)
        for inbox in self.inboxes:
            inbox.wait(lambda inbox: len(inbox.bodies) >= count or inbox.losses)
            assert (inbox.losses, inbox.bodies) == ([], bodies)
            inbox.bodies = []

    def links(self) -> list[Link]:
        hearts: list[Any] = self.hearts
        return [hearts[0]._links[CHILD], hearts[1]._links[PARENT]]

    def close(self) -> None:
        for heart in self.hearts:
            heart.stop()
        self.proxy.close()


def settle(done: Callable[[], object]) -> None:
    """Wait for what comes after the last message."""
    until = time.monotonic() + GUARD_SECONDS
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextlib.contextmanager
def pair_of_hearts() -> Iterator[Pair]:
    pair = Pair()
    try:
        yield pair
    finally:
        pair.close()


def test_a_connection_may_break_at_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset or ended, for both sides or for one that does not tell the other."""
    monkeypatch.setattr("ckpt.world.link.REPORT_NBYTES", 300)
    monkeypatch.setattr("ckpt.world.link.KEPT_NBYTES_MIN", 1)
    ways: tuple[Way, ...] = ("up", "down")
    steps: tuple[tuple[How, int], ...] = (
        ("end", 1),
        ("reset", 5),
        ("child only", 9),
        ("parent only", 9),
    )
    with pair_of_hearts() as pair:
        pair.connect()
        pair.talk()
        exchange = 3 * len(Frame(FrameKind.NEWS, WORLD, body=b"100").encode())
        for way, (how, step) in itertools.product(ways, steps):
            for nbytes in range(0, exchange, step):
                pair.proxy.cut(Cut(way, nbytes, how))
                pair.talk()
        assert pair.proxy.connections > 2 * exchange
        pair.proxy.cut()
        pair.talk(20)
        settle(lambda: all(len(link._outbox) < 20 for link in pair.links()))


def test_the_first_messages_of_a_connection_may_break_off_everywhere() -> None:
    """A connection made anew breaks once more while both sides still say where they are."""
    with pair_of_hearts() as pair:
        pair.connect()
        pair.talk()
        heart = pair.hearts[1]
        greeting = len(heart.card.encode())
        for nbytes in (*range(0, 80, 9), *range(80, greeting + 80, 40)):
            pair.proxy.cut(Cut("up", 50, "end"), Cut("up", nbytes, "end"))
            pair.talk()
        for nbytes in range(0, 45, 3):
            pair.proxy.cut(Cut("down", 50, "end"), Cut("down", nbytes, "end"))
            pair.talk()
        assert pair.proxy.cuts_left() == 0
    for nbytes in (0, 40, 200, 2000):
        with pair_of_hearts() as pair:
            pair.proxy.cut(Cut("up", nbytes, "reset"))
            pair.connect()
            pair.talk()


def test_a_large_message_that_breaks_off_is_sent_again_and_not_kept() -> None:
    with pair_of_hearts() as pair:
        pair.connect()
        ways: tuple[Way, ...] = ("up", "down")
        for way in ways:
            pair.proxy.cut(Cut(way, 3 * MiB, "end"))
            pair.talk(2, nbytes=2 * MiB)
        settle(lambda: all(_kept(link) < MiB for link in pair.links()))


def _kept(link: Link) -> int:
    return sum(data.nbytes for _, data in list(link._outbox))


def test_who_cannot_connect_anew_is_lost_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.world.heart.MEND_SECONDS", 0.5)
    with pair_of_hearts() as pair:
        pair.connect()
        pair.talk()
        pair.proxy.close()
        pair.proxy.cut(Cut("up", 0))
        pair.hearts[1].send(PARENT, Frame(FrameKind.NEWS, WORLD).encode())
        for inbox in pair.inboxes:
            inbox.wait(lambda inbox: inbox.losses)
            assert "has lost its connection, and no new one was made in 0.5 s" in inbox.losses[0]
        assert "Connection refused" in pair.inboxes[1].losses[0]


def test_what_breaks_every_connection_is_not_mended_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the first message, each time: a connection can be made, and is of no use."""
    monkeypatch.setattr("ckpt.world.heart.MEND_SECONDS", 0.5)
    with pair_of_hearts() as pair:
        pair.connect()
        pair.talk()
        welcome = 41
        cuts = [Cut("down", welcome, "end")] * 10_000
        pair.proxy.cut(Cut("down", 0), *cuts)
        pair.hearts[0].send(CHILD, Frame(FrameKind.NEWS, WORLD).encode())
        for inbox in pair.inboxes:
            inbox.wait(lambda inbox: inbox.losses)


def test_a_process_that_dies_is_not_connected_to_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends, and its pid is gone: nobody waits for the end of a deadline."""
    monkeypatch.setattr("ckpt.world.heart.MEND_SECONDS", 1e9)
    with pair_of_hearts() as pair:
        pair.connect()
        pair.talk()
        monkeypatch.setattr(Card, "death", lambda card, refusal=None: "has died")
        pair.proxy.cut(Cut("up", 0))
        pair.hearts[1].send(PARENT, Frame(FrameKind.NEWS, WORLD).encode())
        for inbox in pair.inboxes:
            inbox.wait(lambda inbox: inbox.losses)
            assert inbox.losses == ["has died"]


def test_a_late_request_breaks_no_newer_connection() -> None:
    """Whoever asks for a connection that is made already, and whoever comes with an old one."""
    with pair_of_hearts() as pair:
        pair.connect()
        pair.talk()
        parent, child = pair.hearts
        pair.proxy.cut(Cut("up", 10))
        pair.talk()
        (theirs, ours), card = pair.links(), child.card
        number, before = ours.number, pair.proxy.connections
        assert number >= 1 and theirs.number == number
        for greeting, port in (
            (Frame(FrameKind.KNOCK, bytes(16), 0, card.token, parent.card.encode()), card.port),
            (Frame(FrameKind.HELLO, bytes(16), 0, pair.card.token, card.encode()), pair.card.port),
            (
                Frame(FrameKind.AGAIN, bytes(16), 1, pair.card.token, bytes(8) + card.encode()),
                parent.card.port,
            ),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=GUARD_SECONDS) as late:
                late.sendall(greeting.encode())
                with contextlib.suppress(ConnectionResetError):
                    assert late.recv(1) == b""
        pair.talk()
        assert pair.links() == [theirs, ours] and ours.number == number
        assert pair.proxy.connections == before + 1  # that of the HELLO


def test_rounds_go_on_over_new_connections() -> None:
    with ranks_of(3) as ranks:
        for rank, neighbour in ((2, PARENT), (0, CHILD), (1, PARENT)):
            heart: Any = ranks.processes[rank].heart
            heart._links[neighbour].sock.shutdown(socket.SHUT_RDWR)
            assert ranks.all(lambda r: ranks.worlds[r].gather("parts", b"x")) == [[b"x"] * 3] * 3


# --- real processes -------------------------------------------------------------------------------


def _break_and_die() -> tuple[list[list[bytes]], str]:
    world = TorchWorld()
    heart: Any = world._process.heart
    rounds = []
    for number in range(12):
        if number % 4 == world.rank:
            for link in list(heart._links.values()):
                with contextlib.suppress(OSError):  # it broke from the other side just now
                    link.sock.shutdown(socket.SHUT_RDWR)
        rounds.append(world.gather("parts", b"%d" % number))
    dist.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailed) as caught:
        world.gather("last", b"")
    return rounds, str(caught.value)


@pytest.mark.ranks
def test_processes_whose_connections_break_go_on_and_still_notice_a_death() -> None:
    results = run_ranks(3, _break_and_die, allow_dead=[1])
    expected = [[b"%d" % number] * 3 for number in range(12)]
    for rank in (0, 2):
        assert results[rank] == (expected, "rank 1 has died in phase 'last'")


def test_connections_do_without_an_option_that_a_system_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")  # as on macOS
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sock,
    ):
        Link(sock, None, None)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 120


def test_a_stranger_is_no_rank(caplog: pytest.LogCaptureFixture) -> None:
    """Who greets without the token is sent away, however often; the log keeps a few lines of it."""
    heart: Any = Heart(0, ())
    stranger = Heart(1, ())
    try:
        guessed = heart.card._replace(token="0" * 32)
        for kind in (FrameKind.HELLO, FrameKind.AGAIN):
            for _ in range(20):
                with heart.card.connect(GUARD_SECONDS) as sock:
                    sock.settimeout(GUARD_SECONDS)
                    sock.sendall(greeting(kind, stranger.card, guessed, 1))
                    with contextlib.suppress(ConnectionError):
                        assert sock.recv(100) == b""
        assert not heart._links
        lines = [record for record in caplog.records if "none of ours" in record.getMessage()]
        assert 1 <= len(lines) <= 7
    finally:
        heart.stop()
        stranger.stop()


def test_strangers_of_one_address_end_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has sent half of its greeting is let in, though strangers came after it."""
    monkeypatch.setattr("ckpt.world.heart.NAMELESS_MAX", 8)
    monkeypatch.setattr("ckpt.world.heart.NAMELESS_PER_ADDRESS", 6, raising=False)
    heart: Any = Heart(0, ())
    rank = Heart(1, ())
    try:
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(heart.card.connect(GUARD_SECONDS))
            hello = greeting(FrameKind.HELLO, rank.card, heart.card)
            sock.sendall(hello[:20])
            for address in ["127.0.0.2"] * 20 + ["127.0.0.3"] * 20:
                stranger = stack.enter_context(
                    socket.create_connection(
                        ("127.0.0.1", heart.card.port), GUARD_SECONDS, source_address=(address, 0)
                    )
                )
            stranger.sendall(bytes(100))
            assert stranger.recv(1) == b""  # so all before it were accepted
            sock.sendall(hello[20:])
            until = time.monotonic() + 5.0
            while not heart._links and time.monotonic() < until:
                time.sleep(0.01)
            assert list(heart._links) == [Neighbour(False, 1)]
            assert len(heart._nameless) <= 8
    finally:
        heart.stop()
        rank.stop()


def test_a_rank_without_127_0_0_1_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    heart: Any = Heart(0, ())
    connect = socket.create_connection

    def without(address: tuple[str, int], *args: Any, **kwargs: Any) -> socket.socket:
        if address[0] == "127.0.0.1":
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return connect(address, *args, **kwargs)

    monkeypatch.setattr(socket, "create_connection", without)
    try:
        if not socket.has_dualstack_ipv6():
            pytest.skip("no IPv6 here")
        heart.card.connect(GUARD_SECONDS).close()
    finally:
        heart.stop()
