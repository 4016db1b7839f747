"""The heart of a process: one thread that receives for all its worlds, and notices who is gone.

Neighbours in the tree of a world are connected; worlds share connections. Nothing is sent while
nothing is to be said: a process that dies is noticed because the kernel ends its connections. That
alone proves nothing, so it is confirmed in a second way (`Card.fate`), and a slow or silent
connection is no sign at all.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import math
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from ckpt.world.frames import WORLD_NBYTES, Frame, FrameKind, FrameReader, MiB
from ckpt.world.liveness import Card, ProcessIdentity, this_network

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
HELLO_NBYTES_MAX = 16 * 1024
FLUSH_SECONDS = 5.0
UNREAD_SECONDS = 1.0
NAMELESS_MAX = 256  # connections of strangers, or of ranks that connect just now
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FULL_SECONDS = 0.5
NOBODY = bytes(WORLD_NBYTES)
LEFT = "has left"  # and means to: no failure


class Neighbour(NamedTuple):
    """A process at the other end of a connection: the parent in some tree, or a child in one.

    `rank` is its rank in torch.distributed.
    """

    is_parent: bool
    rank: int


class Receiver(Protocol):
    """One world of this process. All is called by the heart's thread and must not wait."""

    def receive(self, neighbour: Neighbour, frame: Frame) -> None:
        """A message has come."""

    def lost(self, neighbour: Neighbour, how: str) -> None:
        """That process sends nothing more, because it "has died", `LEFT`, or what else `how`
        says.
        """


class _Link:
    """One connection. `send` and `flush` are for all threads, the rest for the heart's.

    Note "Ctrl-C": it may come to the main thread between any two steps of Python's, and other
    worlds send on the same connection. So what the kernel takes is counted in the same step in
    which it is handed over, and everything else follows from that count, as often as it is done.
    """

    def __init__(self, sock: socket.socket, neighbour: Neighbour | None, card: Card | None) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(sock)
        self.sock = sock
        self.neighbour = neighbour
        self.card = card
        self.reader = FrameReader(HELLO_NBYTES_MAX)
        self.has_left = False
        self.has_ended = False  # what is sent: all has gone, and nothing follows
        self._lock = threading.Lock()
        self._outbox: deque[tuple[int, memoryview]] = deque()  # each with the count at its end
        self._count = deque([0], maxlen=1)  # of bytes that the kernel has taken, ever

    def send(self, data: bytes) -> bool:
        """Send as much as is taken at once, and keep the rest. Returns whether nothing is left."""
        with self._lock:
            begin = self._outbox[-1][0] if self._outbox else self._count[0]
            self._outbox.append((begin + len(data), memoryview(data)))
            return self._sent()

    def flush(self) -> bool:
        """Send more of what is left. Returns whether nothing is."""
        with self._lock:
            return self._sent()

    def _sent(self) -> bool:
        while self._outbox:
            end, data = self._outbox[0]
            left = end - self._count[0]
            if left == 0:
                self._outbox.popleft()
                continue
            try:
                # One step; see note "Ctrl-C".
                self._count.extend(
                    map(self._count[0].__add__, map(self.sock.send, (data[data.nbytes - left :],)))
                )
            except BlockingIOError:
                return False
            except OSError:  # its end is noticed by reading, and confirmed
                self._outbox.clear()
                return True
        return True

    def end(self) -> None:
        """Send nothing more. What the other side still sends must be read: a socket that is closed
        with something unread takes back what has not arrived.
        """
        self.has_ended = True
        with contextlib.suppress(OSError):  # it is gone
            self.sock.shutdown(socket.SHUT_WR)


class Heart:
    """The connections of one process. `hosts` are the addresses by which others may reach it."""

    def __init__(self, rank: int, hosts: Sequence[str]) -> None:
        self._listener = _listening()
        port = int(self._listener.getsockname()[1])
        who = ProcessIdentity.this()
        self.card = Card(rank, secrets.token_hex(16), tuple(hosts), port, this_network(), who)
        self.sent = 0  # messages
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._lock = threading.RLock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._links: dict[Neighbour, _Link] = {}
        self._nameless: dict[_Link, None] = {}  # accepted, and have not said who they are
        self._unsent: dict[Neighbour, list[bytes]] = {}  # for children that have not connected yet
        self._lost: dict[Neighbour, str] = {}
        self._worlds: dict[bytes, Receiver] = {}
        self._users: dict[bytes, weakref.ref[object]] = {}
        self._early: dict[bytes, list[tuple[Neighbour, Frame]]] = {}
        self._over: set[bytes] = set()
        self._is_stopped = self._is_retired = False
        self._ends = math.inf  # when the thread gives up its last connections
        for sock in (self._listener, self._woken, self._wake):
            sock.setblocking(False)
        for sock, act in ((self._listener, self._accept), (self._woken, self._do_tasks)):
            self._selector.register(sock, selectors.EVENT_READ, act)
        # A daemon: a process that ends without closing its worlds must not wait for it.
        self._thread = threading.Thread(target=self._serve, name="ckpt-heart", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        _all_hearts.add(self)

    # for worlds

    def is_connected_to(self, parent: int) -> bool:
        """Whether there is, or was, a connection to that parent."""
        with self._lock:
            neighbour = Neighbour(True, parent)
            return neighbour in self._links or neighbour in self._lost

    def connect(self, card: Card, seconds: float) -> None:
        """Connect to a parent. Raises OSError when it cannot be reached."""
        neighbour = Neighbour(True, card.rank)
        link = _Link(card.connect(seconds), neighbour, card)
        link.reader.trust()
        hello = Frame(FrameKind.HELLO, NOBODY, name=card.token, body=self.card.encode()).encode()
        with self._lock:  # nothing of another thread goes before the hello
            self._links[neighbour] = link
            self.send(neighbour, hello)
        self._later(lambda: self._watch(link))

    def give_up(self, neighbour: Neighbour, how: str) -> None:
        """Note that there will be no connection to that process."""
        with self._lock:
            self._lost[neighbour] = how

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is sent or received any more."""
        return self._is_stopped

    def register(self, world: bytes, receiver: Receiver, user: object) -> None:
        """Deliver what comes for that world, and what has come already. `user` is the object that
        this process has of it.
        """
        with self._lock:
            # It may end in the middle of anything, with locks held: the thread does the rest.
            self._users[world] = weakref.ref(user, lambda _: self._later(self._stop_unused))
            self._worlds[world] = receiver
            for neighbour, frame in self._early.pop(world, []):
                receiver.receive(neighbour, frame)
            for neighbour, how in self._lost.items():
                receiver.lost(neighbour, how)

    def forget(self, world: bytes) -> None:
        """Deliver nothing more for that world."""
        with self._lock:
            self._worlds.pop(world, None)
            self._over.add(world)
            self._users.pop(world, None)
        self._stop_unused()

    def retire(self) -> None:
        """Stop when this process has no world of it any more, which may be now."""
        self._is_retired = True
        self._stop_unused()

    def _stop_unused(self) -> None:
        with self._lock:
            is_used = any(user() is not None for user in self._users.values())
        if self._is_retired and not is_used:
            self.begin(self.stop)

    def send(self, neighbour: Neighbour, data: bytes) -> None:
        """Send an encoded frame. Never waits; who is gone gets nothing."""
        with self._lock:
            link = self._links.get(neighbour)
            if link is None:
                if not neighbour.is_parent and neighbour not in self._lost:
                    self._unsent.setdefault(neighbour, []).append(data)
                return
            self.sent += 1
            is_sent = False
            try:
                is_sent = link.send(data)
            finally:
                if not is_sent:
                    self._later(lambda: self._flush(link))

    def aside(self, run: Callable[[], _T], seconds: float) -> _T | None:
        """`run()` in a thread of its own; None when it raised or takes longer.

        For requests to a store that may never answer, because its host is stopped.
        """
        results: list[_T] = []

        def attempt() -> None:
            try:
                results.append(run())
            except Exception as error:
                logger.debug("a request beside a failure has failed itself: %s", error)

        thread = threading.Thread(target=attempt, name="ckpt-aside", daemon=True)
        thread.start()
        thread.join(seconds)
        return results[0] if results else None

    def begin(self, run: Callable[[], object]) -> None:
        """`run()` in a thread of its own, which nobody waits for; it raises nothing."""
        threading.Thread(target=run, name="ckpt-aside", daemon=True).start()

    def stop(self) -> None:
        """Take leave of all, after what is still to be sent. May be repeated."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            bye = Frame(FrameKind.BYE, NOBODY).encode()
            for neighbour in list(self._links):
                self.send(neighbour, bye)
        atexit.unregister(self.stop)
        self._later(self._end_all)
        self._thread.join(timeout=2 * FLUSH_SECONDS)
        self.drop()

    def drop(self) -> None:
        """Close what is open here and say nothing, as a forked child does."""
        self._is_stopped = True
        for link in (*self._links.values(), *self._nameless):
            link.sock.close()
        self._links.clear()
        for sock in (self._listener, self._woken, self._wake):
            sock.close()
        self._selector.close()

    # the thread

    def _serve(self) -> None:
        while True:
            left = self._ends - time.monotonic()
            if left <= 0 or (math.isfinite(left) and not self._links):
                return
            for key, events in self._selector.select(None if left == math.inf else left):
                try:
                    if isinstance(key.data, _Link):
                        self._move(key.data, events)
                    else:
                        key.data()
                except Exception as error:
                    logger.exception("the ranks of this process may hear nothing more")
                    how = f"cannot be heard any more ({type(error).__name__}: {error})"
                    if isinstance(key.data, _Link):
                        self._drop_link(key.data, how)

    def _end_all(self) -> None:
        """Begin the end: each connection ends when all is sent, and the other side has ended, too.

        It does so at once when it is told, unless its process is stopped.
        """
        self._ends = time.monotonic() + FLUSH_SECONDS
        for link in list(self._links.values()):
            self._flush(link)

    def _later(self, task: Callable[[], None]) -> None:
        """Have the heart's thread do something."""
        self._tasks.append(task)
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._wake.send(b"x")

    def _do_tasks(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._tasks:
            self._tasks.popleft()()

    def _flush(self, link: _Link) -> None:
        if link.sock.fileno() < 0 or link.has_ended:
            return
        if not link.flush():
            self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
            return
        self._watch(link)
        if math.isfinite(self._ends):
            link.end()
            if all(one.has_ended for one in self._links.values()):
                self._ends = min(self._ends, time.monotonic() + UNREAD_SECONDS)

    def _watch(self, link: _Link, events: int = selectors.EVENT_READ) -> None:
        if link.sock.fileno() < 0:
            return
        if link.sock in self._selector.get_map():
            self._selector.modify(link.sock, events, link)
        else:
            self._selector.register(link.sock, events | selectors.EVENT_READ, link)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in FULL:
                logger.warning("no rank can connect to this process now: %s", error)
                # The kernel keeps who connects; to ask at once again would take a whole core.
                self._selector.unregister(self._listener)
                self.begin(self._listen_later)
            return  # or it has gone again
        if len(self._nameless) >= NAMELESS_MAX:
            self._end(next(iter(self._nameless)))
        link = _Link(sock, None, None)
        self._nameless[link] = None
        self._watch(link)

    def _listen_later(self) -> None:
        time.sleep(FULL_SECONDS)
        self._later(self._listen)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _move(self, link: _Link, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(link)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = link.sock.recv(MiB)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(link)
            return
        try:
            for frame in link.reader.feed(data):
                self._take(link, frame)
        except ValueError as error:
            logger.warning("a connection that is none of ours was ended: %s", error)
            self._end(link)

    def _take(self, link: _Link, frame: Frame) -> None:
        if link.neighbour is None:
            self._greet(link, frame)
        elif frame.kind is FrameKind.BYE:
            link.has_left = True
        else:
            with self._lock:
                receiver = self._worlds.get(frame.world)
                if receiver is None and frame.world not in self._over:
                    self._early.setdefault(frame.world, []).append((link.neighbour, frame))
            if receiver is not None:
                receiver.receive(link.neighbour, frame)

    def _greet(self, link: _Link, frame: Frame) -> None:
        """The first frame of a connection: only who can read the store knows the token."""
        if frame.kind is not FrameKind.HELLO or not secrets.compare_digest(
            frame.name.encode(), self.card.token.encode()
        ):
            raise ValueError("its first message is not that of a rank of this job")
        link.reader.trust()
        link.card = Card.decode(frame.body)
        link.neighbour = Neighbour(False, link.card.rank)
        self._nameless.pop(link, None)
        with self._lock:
            self._links[link.neighbour] = link
            for data in self._unsent.pop(link.neighbour, []):
                self.send(link.neighbour, data)

    def _end(self, link: _Link) -> None:
        """A connection has ended: find out whether its process has."""
        self._nameless.pop(link, None)
        if link.sock.fileno() >= 0:
            self._selector.unregister(link.sock)
            link.sock.close()
        if link.neighbour is None or link.card is None:
            return
        if link.has_left or self._is_stopped:
            self._drop_link(link, LEFT)
            return
        card = link.card
        self.begin(lambda: self._drop_link(link, _fate(card)))

    def _drop_link(self, link: _Link, how: str) -> None:
        neighbour = link.neighbour
        if neighbour is None:
            return
        with self._lock:
            self._links.pop(neighbour, None)
            self._lost[neighbour] = how
            receivers = list(self._worlds.values())
        for receiver in receivers:
            receiver.lost(neighbour, how)


def _fate(card: Card) -> str:
    """What became of a process; worlds must hear of its end even when nobody can look for it."""
    try:
        return card.fate()
    except Exception as error:
        return f"has lost its connection and cannot be looked for ({type(error).__name__}: {error})"


def _listening() -> socket.socket:
    """On all addresses, at a port that the system chooses."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # no IPv6 in this container
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
            )
    return socket.create_server(("", 0), backlog=128)


def _keep_alive(sock: socket.socket) -> None:
    """Keep firewalls from forgetting an idle connection; two hours without an answer end it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 60), ("TCP_KEEPCNT", 120)):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


_all_hearts: weakref.WeakSet[Heart] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: as long as it kept the connections open, nobody would see its parent
    die.
    """
    for heart in list(_all_hearts):
        atexit.unregister(heart.stop)
        heart.drop()
    _all_hearts.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
