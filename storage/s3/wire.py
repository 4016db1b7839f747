"""Requests that botocore has prepared, carried over sockets by the thread that calls.

The body is sent from the caller's memory and the answer read into it: nothing is copied on the
way. Another thread can end a request at any moment, so these can be raced (`storage.hedging`).
Addresses, TLS and proxies are those of botocore's own session: a setting means the same here.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import urllib3.exceptions

from storage.errors import InvalidUrlError, OutcomeUnknownError, StorageError, TransientError
from storage.forks import ForkSafeLock
from storage.http import close_all

_SLICE_NBYTES = 1 << 20  # of a body between two looks at the clock: one timeout each
_IDLE_MAX = 64
# What a server or a lost connection may do to http.client.
BROKEN = (OSError, http.client.HTTPException)
_answered: set[str] = set()  # places that have answered this process, to whichever store


@dataclass(frozen=True)
class Route:
    """How to reach a host: `connect` opens a connection, whose socket carries requests whose first
    line has what `target` makes of a url. `proxy` is for messages, "" without one.
    """

    connect: Callable[[], http.client.HTTPConnection]
    target: Callable[[str], str]
    headers: tuple[tuple[str, str], ...]
    proxy: str
    read_timeout_seconds: float


class Wire:
    """Connections that are kept open between requests. Any thread may use it.

    `route` finds the way to a url. Each request is sent once. Methods raise the errors of
    `storage.errors`, TransientError where no whole answer came.
    """

    def __init__(self, route: Callable[[str], Route]) -> None:
        self._route = route
        self._routes: dict[str, Route] = {}
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        self._lock = ForkSafeLock()
        self._was_answered = False
        # A store that nobody closes leaves no open connection either.
        weakref.finalize(self, _close_all, self._idle)

    @contextlib.contextmanager
    def exchange(
        self,
        request: WireRequest,
        where: str,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: Sequence[memoryview | bytes] = (),
        *,
        may_be_repeated: bool = True,
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, whatever its status; its body is read in the block.

        Without `may_be_repeated`, OutcomeUnknownError says that the server may have the request.
        """
        scheme, host = urlsplit(url)[:2]
        place = f"{scheme}://{host}"
        # Proxies and certificates are found once per host: the environment is read for them.
        route = self._routes.get(place) or self._routes.setdefault(place, self._route(url))
        head = _head(method, route.target(url), host, (*headers, *route.headers))
        connection = self._connection(where, place, route)
        with contextlib.ExitStack() as closing:
            closing.callback(connection.close)
            try:
                request.begin(connection.sock)
                response = closing.enter_context(_exchanged(connection.sock, method, head, body))
                self._was_answered = True
                _answered.add(place)
                yield response
            except BROKEN as error:
                text = f"{where}: no whole answer ({type(error).__name__})"
                kind = TransientError if may_be_repeated else OutcomeUnknownError
                raise kind(text) from None
            finally:
                request.end()
            # After `end`: a connection that another request uses must not be dropped with this one.
            if self._is_kept(place, connection, response):
                closing.pop_all()

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            _close_all(self._idle)

    def _connection(self, where: str, place: str, route: Route) -> http.client.HTTPConnection:
        """An open connection that the server has not closed, as far as can be seen."""
        while True:
            with self._lock:
                idle = self._idle.get(place)
                # The one that was used last: its server has had the least time to close it.
                connection = idle.pop() if idle else None
            if connection is None:
                break
            if not _is_readable(connection.sock):
                return connection
            connection.close()  # the server closed it, or sent what nobody requested
        try:
            connection = route.connect()
        except (*BROKEN, urllib3.exceptions.HTTPError) as error:
            raise self._unreachable(where, place, route, error) from None
        connection.sock.settimeout(route.read_timeout_seconds)
        return connection

    def _unreachable(
        self, where: str, place: str, route: Route, error: BaseException
    ) -> StorageError:
        """A server that was never reached is more likely a wrong setting than an outage."""
        causes = [*_causes(error)]
        names = ", ".join(dict.fromkeys(type(cause).__name__ for cause in causes))
        settled = ""
        for cause in causes:
            if isinstance(cause, ssl.SSLCertVerificationError):
                settled = (
                    f"its certificate is not trusted ({cause.verify_message}); set AWS_CA_BUNDLE "
                    "or client_kwargs={'verify': PATH} to the authority that signed it"
                )
            elif isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
                settled = (
                    "the name does not resolve; is endpoint_url right (AWS_ENDPOINT_URL), or the "
                    "region (AWS_REGION, client_kwargs={'region_name': ...})?"
                )
            elif isinstance(cause, ConnectionRefusedError):
                settled = "the port is closed; is endpoint_url right (AWS_ENDPOINT_URL)?"
            elif "Tunnel connection failed: 4" in str(cause):
                settled = f"the proxy refused ({cause})"
        if route.proxy:
            settled += f"{'; ' * bool(settled)}is the proxy {route.proxy} right (HTTPS_PROXY)?"
        # Certificates, names and proxies may differ from store to store; a server's port does not.
        is_port = not route.proxy and any(isinstance(one, ConnectionRefusedError) for one in causes)
        if settled and not self._was_answered and not (is_port and place in _answered):
            return InvalidUrlError(f"{where}: no connection to {place}: {settled}")
        settled = settled or "is endpoint_url right?"
        return TransientError(f"{where}: no connection to {place} ({names}); {settled}")

    def _is_kept(
        self,
        place: str,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
    ) -> bool:
        """Keep a connection for later requests where it can serve them."""
        # With an unread body in it, the next answer on this connection would begin in its middle.
        if not response.isclosed() or response.will_close:
            return False
        with self._lock:
            idle = self._idle.setdefault(place, [])
            if len(idle) >= _IDLE_MAX:
                return False
            idle.append(connection)
        return True


class WireRequest:
    """One request under way, which any thread may end."""

    def __init__(self) -> None:
        self.is_dropped = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def begin(self, used: socket.socket) -> None:
        """The request goes over this socket from now on. Raises OSError after `drop`."""
        with self._lock:
            if self.is_dropped:
                raise ConnectionAbortedError
            self._socket = used

    def end(self) -> None:
        """The request is over; its socket may serve another one."""
        with self._lock:
            self._socket = None

    def drop(self) -> None:
        """End the request: its thread gets an OSError at once, wherever it waits."""
        with self._lock:
            self.is_dropped = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Not the method of an SSLSocket, which would continue without encryption.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def _head(method: str, target: str, host: str, headers: Sequence[tuple[str, str]]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers]
    text = "\r\n".join([*lines, "", ""])
    # A line break in a value would begin a header of its own, or another request.
    if text.count("\n") != len(lines) + 1 or text.count("\r") != len(lines) + 1:
        raise InvalidUrlError("a storage option that becomes a header holds a line break")
    return text.encode()


def _exchanged(
    used: Any, method: str, head: bytes, body: Sequence[memoryview | bytes]
) -> http.client.HTTPResponse:
    try:
        # A small body goes out with the head: one system call, and one packet less.
        if len(body) == 1 and len(body[0]) <= _SLICE_NBYTES // 16:
            used.sendall(head + body[0])
        else:
            used.sendall(head)
            for piece in body:
                view = memoryview(piece)
                for start in range(0, view.nbytes, _SLICE_NBYTES):
                    used.sendall(view[start : start + _SLICE_NBYTES])
    except ConnectionError:  # and not a timeout, after which nothing more is waited for
        # A server may refuse a request before it has read all of it, and close.
        with contextlib.suppress(*BROKEN):
            return _response(used, method)
        raise
    return _response(used, method)


def _response(used: Any, method: str) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(used, method=method)
    try:
        response.begin()
    except BaseException:
        # It has a file object of the socket, which stays open as long as that does.
        response.close()
        raise
    return response


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        # urllib3 keeps what it wraps in attributes of its own.
        nested = getattr(seen, "original_error", None) or getattr(seen, "reason", None)
        seen = nested if isinstance(nested, BaseException) else seen.__cause__ or seen.__context__


def _close_all(idle: dict[str, list[http.client.HTTPConnection]]) -> None:
    for connections in idle.values():
        close_all(connections)


def _is_readable(used: Any) -> bool:
    polled = select.poll()
    polled.register(used, select.POLLIN)
    return bool(polled.poll(0))
