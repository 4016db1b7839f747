"""The heart of a process: one thread that receives for all its worlds, and notices who is gone.

Neighbours in the tree of a world are connected; worlds share connections. There are no heartbeats
on idle links: a process that dies is noticed because the kernel ends its connections. That alone
proves nothing, so it is confirmed in a second way (`Card.death`), and a slow or silent connection
is no sign at all.

Note "mending": where the process lives, the connection broke on its way. The child connects anew,
and the parent asks it to, in case it has not noticed; `ckpt.world.link` sends again what was lost.
Connections have numbers, so that neither an old one nor a late request breaks a newer one. When
none is made anew in `MEND_SECONDS`, the process counts as lost. That time begins again once the
new connection is of use: what breaks every connection at its first message must end.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
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
from typing import Protocol, TypeVar

from ckpt.world.link import (
    NOBODY,
    Frame,
    FrameKind,
    Link,
    Neighbour,
    card_of,
    greeting,
    read_welcome,
    welcome,
)
from ckpt.world.liveness import CONNECT_SECONDS, Card, ProcessIdentity, this_network
from ckpt.world.place import Place, Tls, listening, secured
from storage.strangers import to_end

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
FLUSH_SECONDS = 5.0
UNREAD_SECONDS = 1.0
NAMELESS_MAX = 256  # connections of strangers, or of ranks that connect just now
NAMELESS_PER_ADDRESS = 64
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FULL_SECONDS = 0.5
MEND_SECONDS = 30.0
MEND_PAUSES = (0.01, 1.0)  # between attempts: the first, and the longest
LOOK_SECONDS = 5.0  # for whether this process has left its job
LEFT = "has left"  # and means to: no failure


class Receiver(Protocol):
    """One world of this process. All is called by the heart's thread and must not wait."""

    def receive(self, neighbour: Neighbour, frame: Frame) -> None:
        """A message has come."""

    def lost(self, neighbour: Neighbour, how: str) -> None:
        """That process sends nothing more: it "has died", `LEFT`, or what else `how` says."""


class Heart:
    """The connections of one process. `hosts` are the addresses by which others may reach it.

    Once `has_left()`, it retires.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        place: Place | None = None,
        has_left: Callable[[], bool] = lambda: False,
    ) -> None:
        place = place or Place()
        self._tls = Tls(place.certificate) if place.certificate else None
        self._has_left = has_left
        self._listener = listening(place)
        port = int(self._listener.getsockname()[1])
        who = ProcessIdentity.this()
        # One that listens on an interface of its own is not reached by the loopback address.
        network = "" if place.address else this_network()
        digest = "" if self._tls is None else self._tls.digest
        self.card = Card(rank, secrets.token_hex(16), tuple(hosts), port, network, who, digest)
        self.sent = 0  # messages
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._lock = threading.RLock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._links: dict[Neighbour, Link] = {}
        # Accepted, and have not said who they are: from which address.
        self._nameless: dict[Link, str] = {}
        self._strangers = 0  # that have connected
        self._unsent: dict[Neighbour, list[bytes]] = {}  # for children that have not connected yet
        self._lost: dict[Neighbour, str] = {}
        self._worlds: dict[bytes, Receiver] = {}
        self._users: dict[bytes, weakref.ref[object]] = {}
        self._early: dict[bytes, list[tuple[Neighbour, Frame]]] = {}
        self._over: set[bytes] = set()
        self.is_stopped = False  # nothing is sent or received any more
        self._is_retired = False
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

    def connect(
        self, card: Card, seconds: float, way: Callable[[], socket.socket] | None = None
    ) -> None:
        """Connect to a parent, at its port or by what `way` gives, now and later. Raises OSError
        when it cannot be reached.
        """
        neighbour = Neighbour(True, card.rank)
        way = way or functools.partial(card.connect, seconds)
        sock = secured(self._tls, way, card, self.card)
        sock.sendall(greeting(FrameKind.HELLO, self.card, card))
        self.sent += 1
        link = Link(sock, neighbour, card, way)
        link.reader.trust()
        with self._lock:
            self._links[neighbour] = link
        self._later(lambda: self._watch(link))

    def adopt(self, sock: socket.socket) -> None:
        """A child has connected in another way than to the port."""
        self._later(lambda: self._adopt(sock, "the rendezvous store"))

    def by_store(self) -> set[Neighbour]:
        """Those with whom messages go through the rendezvous store."""
        return {one for one, link in list(self._links.items()) if link.is_by_store}

    def has_met(self, neighbour: Neighbour) -> bool:
        """Whether that process has ever connected, or is known never to."""
        with self._lock:
            return neighbour in self._links or neighbour in self._lost

    def give_up(self, neighbour: Neighbour, how: str) -> None:
        """Count a process that has not connected as lost."""
        with self._lock:
            if neighbour in self._links:
                return
            self._lost[neighbour] = how
            self._unsent.pop(neighbour, None)
            receivers = list(self._worlds.values())
        for receiver in receivers:
            receiver.lost(neighbour, how)

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
        """Stop when this process has no world of it any more. If it has none now, the port is free
        afterwards.
        """
        gc.collect()  # a world may be in a cycle that nobody has
        self._is_retired = True
        self.stop(if_unused=True)

    def _stop_unused(self) -> None:
        if self._is_retired:
            self.begin(lambda: self.stop(if_unused=True))

    def send(self, neighbour: Neighbour, data: bytes) -> None:
        """Send an encoded frame. Never waits; who is gone gets nothing."""
        with self._lock:
            link = self._links.get(neighbour)
            if link is None:
                if not neighbour.is_parent and neighbour not in self._lost:
                    self._unsent.setdefault(neighbour, []).append(data)
                return
            self.sent += 1
            # After a Ctrl-C in the middle, too: what was not sent is left to the heart's thread.
            is_sent = False
            try:
                is_sent = link.send(data)
            finally:
                if not is_sent:
                    self._later(lambda: self._flush(link))

    @staticmethod
    def aside(run: Callable[[], _T], seconds: float) -> _T | None:
        """`run()` in a thread of its own; None when it raised, takes longer, or there is no thread.

        For requests to a store that may never answer, because its host is stopped.
        """
        results: list[_T] = []

        def attempt() -> None:
            try:
                results.append(run())
            except Exception as error:
                logger.debug("a request made during a failure has failed itself: %s", error)

        try:
            thread = Heart.begin(attempt)
        except RuntimeError:  # Python 3.12.0 to 3.12.2 start none once the main one has ended
            return None
        thread.join(seconds)
        return results[0] if results else None

    @staticmethod
    def begin(run: Callable[[], object]) -> threading.Thread:
        """`run()` in a thread of its own, for which only an exit waits; it raises nothing."""
        thread = threading.Thread(target=run, name="ckpt-aside", daemon=True)
        thread.start()
        _asides.add(thread)
        return thread

    def stop(self, if_unused: bool = False) -> None:
        """Take leave of all, after what is still to be sent. Repeated, it waits for the end.

        With `if_unused`, only when it has retired and no world of it is left.
        """
        with self._lock:
            is_used = any(user() is not None for user in self._users.values())
            if if_unused and (is_used or not self._is_retired):
                return
            is_first, self.is_stopped = not self.is_stopped, True
            bye = Frame(FrameKind.BYE, NOBODY).encode()
            for neighbour in list(self._links) if is_first else ():
                self.send(neighbour, bye)
        if is_first:
            self._later(self._end_all)
        self._thread.join(timeout=2 * FLUSH_SECONDS)
        atexit.unregister(self.stop)  # not before: an exit meanwhile waits here, too
        self.drop()

    def drop(self) -> None:
        """Close what is open here and say nothing, as a forked child does."""
        self.is_stopped = True
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
            if not self._is_retired and self._has_left():
                # Not `retire`: what it frees of torch's must not end in a thread, as Python ends.
                self._is_retired = True
                self._stop_unused()
            for key, events in self._selector.select(min(left, LOOK_SECONDS)):
                try:
                    if isinstance(key.data, Link):
                        self._move(key.data, events)
                    else:
                        key.data()
                except Exception as error:
                    # All worlds depend on this thread: one neighbour must not end it.
                    logger.exception("the ranks of this process may hear nothing more")
                    how = f"cannot be heard any more ({type(error).__name__}: {error})"
                    if isinstance(key.data, Link):
                        self._close(key.data)
                        self._drop_link(key.data, how)

    def _end_all(self) -> None:
        """Begin the end: each connection ends when all is sent, and the other side has ended, too.

        It does so at once when it learns of it, unless its process is stopped.
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

    def _flush(self, link: Link) -> None:
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

    def _watch(self, link: Link, events: int = selectors.EVENT_READ) -> None:
        if link.sock.fileno() < 0:
            return
        if link.sock in self._selector.get_map():
            self._selector.modify(link.sock, events, link)
        else:
            self._selector.register(link.sock, events | selectors.EVENT_READ, link)

    def _accept(self) -> None:
        try:
            sock, (address, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in FULL:
                logger.warning("no rank can connect to this process now: %s", error)
                # The kernel keeps who connects; to ask at once again would take a whole core.
                self._selector.unregister(self._listener)
                self.begin(self._listen_later)
            return  # or it has gone again
        self._adopt(sock, address)

    def _adopt(self, sock: socket.socket, address: str) -> None:
        late = to_end(self._nameless, address, NAMELESS_MAX, NAMELESS_PER_ADDRESS)
        if late is not None:
            self._end(late)
        sock.setblocking(False)
        if self._tls is not None:
            # The first reading begins the handshake: this thread waits for nobody.
            sock = self._tls.server.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False
            )
        link = Link(sock, None, None)
        self._nameless[link] = address
        self._watch(link)

    def _listen_later(self) -> None:
        def listen() -> None:
            if self._listener.fileno() >= 0:
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

        time.sleep(FULL_SECONDS)
        self._later(listen)

    def _move(self, link: Link, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(link)
        if not events & selectors.EVENT_READ:
            return
        data = link.receive()
        if data is None:
            return
        if not data:
            self._end(link)
            return
        try:
            for frame in link.reader.feed(data):
                self._take(link, frame)
        except ValueError as error:
            if link.neighbour is not None:
                raise
            # A port scan must not fill the log: the first is logged, the second, the fourth, ...
            self._strangers += 1
            if self._strangers & (self._strangers - 1) == 0:
                text = "a connection that is none of ours was ended (%d so far): %s"
                logger.warning(text, self._strangers, error)
            self._end(link)

    def _take(self, link: Link, frame: Frame) -> None:
        if link.neighbour is None:
            self._greet(link, frame)
            return
        report = link.took(frame)
        if report and not link.send(report):
            self._later(lambda: self._flush(link))
        if frame.kind is FrameKind.BYE:
            link.has_left = True
        elif frame.kind is FrameKind.COUNT:
            link.reported(frame.body)
        else:
            with self._lock:
                receiver = self._worlds.get(frame.world)
                # A world that is not there is one that this rank has not made yet, and will hear
                # then, or one that it has left.
                if receiver is None and frame.kind is FrameKind.ROLL:
                    self.send(
                        link.neighbour, frame._replace(kind=FrameKind.UNCALLED, body=b"").encode()
                    )
                elif receiver is None and frame.world not in self._over:
                    self._early.setdefault(frame.world, []).append((link.neighbour, frame))
            if receiver is not None:
                receiver.receive(link.neighbour, frame)

    def _greet(self, link: Link, frame: Frame) -> None:
        """The first frame of a connection: only who can read the store knows the token."""
        greetings = {
            FrameKind.HELLO: self._begin_link,
            FrameKind.AGAIN: self._resume_link,
            FrameKind.KNOCK: self._open_up,
        }
        greet = greetings.get(frame.kind)
        # In constant time, and before the body is parsed: anybody who reaches the port may try.
        if greet is None or not secrets.compare_digest(
            frame.name.encode(), self.card.token.encode()
        ):
            raise ValueError("its first message is not that of a rank of this job")
        received, card = card_of(frame)
        greet(link, card, frame.number, received)

    def _begin_link(self, link: Link, card: Card, number: int, received: int) -> None:
        """The first connection of a child, or the first that has come through."""
        neighbour = Neighbour(False, card.rank)
        known = self._links.get(neighbour)
        if known is not None and known.card is not None:
            if known.card.token == card.token:
                raise ValueError(f"connection {number} of rank {card.rank} is older than another")
            self._close(known)  # of a heart before this one
        link.reader.trust()
        link.card, link.neighbour, link.number = card, neighbour, number
        self._nameless.pop(link, None)
        with self._lock:
            self._links[neighbour] = link
            for data in self._unsent.pop(neighbour, []):
                self.send(neighbour, data)

    def _resume_link(self, link: Link, card: Card, number: int, received: int) -> None:
        """A child has made its connection anew: what is missing here and there follows."""
        neighbour = Neighbour(False, card.rank)
        with self._lock:
            known = self._links.get(neighbour)
            if known is None and neighbour not in self._lost and not received:
                link.sock.send(welcome(0))
                self._begin_link(link, card, number, received)
                return
            if known is None or known.card is None or known.card.token != card.token:
                raise ValueError(f"rank {card.rank} of that connection counts as lost")
            if number <= known.number:
                raise ValueError(f"connection {number} of rank {card.rank} is older than another")
            self._nameless.pop(link, None)
            self._selector.unregister(link.sock)
            self._close(known)
            with contextlib.suppress(OSError):  # ended again, which is noticed by reading
                link.sock.send(welcome(known.received))
            known.resume(link.sock, number, received)
        self._flush(known)

    def _open_up(self, link: Link, card: Card, number: int, received: int) -> None:
        """A parent reports that a connection has ended, in case this end of it has not."""
        self._end(link)
        known = self._links.get(Neighbour(True, card.rank))
        if known is not None and known.is_open and known.number <= number:
            self._end(known)

    def _end(self, link: Link) -> None:
        """A connection has ended: it is made anew, unless the process at its other end is gone."""
        self._nameless.pop(link, None)
        self._close(link)
        if link.neighbour is None:
            return
        if link.has_left or self.is_stopped:
            self._drop_link(link, LEFT)
            return
        # In a thread of its own: connecting may take seconds, and this one serves all others.
        with self._lock:
            if not link.is_mending:
                link.is_mending = True
                self.begin(functools.partial(self._mend, link, link.mend_until(MEND_SECONDS)))

    def _close(self, link: Link) -> None:
        if link.sock.fileno() >= 0:
            if link.sock in self._selector.get_map():
                self._selector.unregister(link.sock)
            link.close()

    def _drop_link(self, link: Link, how: str) -> None:
        """Count its process as lost, unless a connection to it was made anew meanwhile."""
        neighbour = link.neighbour
        if neighbour is None:
            return
        with self._lock:
            if link.is_open or self._links.get(neighbour) is not link:
                return
            self._links.pop(neighbour)
            self._lost[neighbour] = how
            receivers = list(self._worlds.values())
        for receiver in receivers:
            receiver.lost(neighbour, how)

    # a thread for each connection that broke

    def _mend(self, link: Link, until: float) -> None:
        """Make a connection anew, or find out that its process is gone; see note "mending"."""
        pause, longest = MEND_PAUSES
        opened = link.opened
        while True:
            with self._lock:
                if link.is_open or link not in self._links.values():
                    link.is_mending = False
                    return
                number = link.number
            if link.opened != opened:  # it broke once more, while this thread slept
                opened, pause = link.opened, MEND_PAUSES[0]
            is_over, how = self._attempt(link, number)
            if is_over or time.monotonic() > min(until, self._ends):
                self._drop_link(link, how)
            elif not link.is_open:
                time.sleep(pause)
                pause = min(longest, 2 * pause)

    def _attempt(self, link: Link, number: int) -> tuple[bool, str]:
        """Whether there is no more hope, and what to say of that process if it stays as it is."""
        assert link.card is not None and link.neighbour is not None
        why = "it makes none"
        try:
            death = link.card.death()
            if death:
                return True, death
            if link.way is not None:
                self._reconnect(link, link.card, number + 1, link.way)
            elif not link.is_by_store:
                way = functools.partial(link.card.connect, CONNECT_SECONDS)
                with secured(self._tls, way, link.card, self.card) as sock:
                    sock.sendall(greeting(FrameKind.KNOCK, self.card, link.card, number))
        except OSError as error:
            why = str(error)
            death = link.card.death(error)
        except Exception as error:
            # Worlds must hear of this end even when nobody can look into it.
            return True, f"has lost its connection ({type(error).__name__}: {error})"
        text = f"has lost its connection, and no new one was made in {MEND_SECONDS:g} s ({why}),"
        return bool(death), death or text

    def _reconnect(
        self, link: Link, card: Card, number: int, way: Callable[[], socket.socket]
    ) -> None:
        link.number = number  # also when it fails: the parent may see this one after the next
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(secured(self._tls, way, card, self.card))
            sock.settimeout(CONNECT_SECONDS)
            sock.sendall(greeting(FrameKind.AGAIN, self.card, card, number, link.received))
            link.resume(sock, number, read_welcome(sock))
            stack.pop_all()
        self._later(lambda: self._flush(link))


_all_hearts: weakref.WeakSet[Heart] = weakref.WeakSet()
_asides: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _wait_for_asides() -> None:
    """A thread that returns from torch's store while the interpreter is taken down aborts it."""
    ends = time.monotonic() + FLUSH_SECONDS
    for thread in list(_asides):
        thread.join(max(0.0, ends - time.monotonic()))


atexit.register(_wait_for_asides)


def _forked() -> None:
    """In a forked child: while it kept the connections open, nobody would see its parent die."""
    for heart in list(_all_hearts):
        atexit.unregister(heart.stop)
        heart.drop()
    _all_hearts.clear()


os.register_at_fork(after_in_child=_forked)
