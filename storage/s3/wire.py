"""Requests that move many bytes, from and into the caller's memory, in the caller's own thread.

A request here can be ended by another thread at any moment, which neither s3fs nor obstore offers
for what it sends from borrowed memory: so these can be raced (`storage.hedging`). Nothing is copied
on the way. Everything else goes by the other clients.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import re
import select
import socket
import ssl
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from botocore.auth import UNSIGNED_PAYLOAD, S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.httpsession import get_cert_path

from storage.errors import OutcomeUnknownError, StorageError, TransientError
from storage.forks import ForkSafeLock
from storage.s3.answers import answered, translated
from storage.s3.facts import ClientFacts
from storage.store import check_bound

_SLICE_NBYTES = 1 << 20  # of a body between two looks at the clock: one timeout each
_REFUSAL_NBYTES_MAX = 64 << 10
_IDLE_MAX = 64
_CODE = re.compile(rb"<Code>([A-Za-z]{1,60})</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,300})</Message>")
# What a server or a lost connection may do to http.client.
_BROKEN = (OSError, http.client.HTTPException)


class Wire:
    """Connections to one bucket, kept open between requests. Any thread may use it.

    `unsigned` leaves bodies out of signatures. Each request is sent once. Methods raise the errors
    of `storage.errors`, TransientError where no whole answer came.
    """

    def __init__(self, url: str, facts: ClientFacts, *, unsigned: bool) -> None:
        self._url = url
        self._facts = facts
        self.unsigned = unsigned
        address = urlsplit(facts.endpoint_url)
        self._host, self._port = str(address.hostname), address.port
        self._tls = _tls() if address.scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = ForkSafeLock()
        self._credentials: Credentials | None = None
        # A store that nobody closes leaves no open connection either.
        weakref.finalize(self, _close_all, self._idle)

    def get(self, request: WireRequest, full_key: str, key: str, nbytes_max: int | None) -> bytes:
        """The whole object, by one request."""
        with self._sent(request, "read", key, "GET", full_key) as response:
            if response.length is not None:
                check_bound(self._url, key, response.length, nbytes_max)
            expected = response.length
            data: bytes = response.read(None if nbytes_max is None else nbytes_max + 1)
            if expected is not None and len(data) < expected:
                raise ConnectionError("the answer was cut")
            check_bound(self._url, key, len(data), nbytes_max)
            return data

    def fill(
        self, request: WireRequest, full_key: str, key: str, start: int, views: Sequence[memoryview]
    ) -> int:
        """Fill `views` from byte `start` on; how many bytes came."""
        wanted = sum(view.nbytes for view in views)
        headers = {"Range": f"bytes={start}-{start + wanted - 1}"}
        with self._sent(request, "read", key, "GET", full_key, headers=headers) as response:
            expected = response.length
            # Some servers answer a range by 200, so that the length is what tells.
            if expected is None or expected > wanted:
                raise StorageError(f"read {key} in {self._url}: the server ignored the range")
            got = 0
            for view in views:
                got += response.readinto(view[: expected - got])
            if got < expected:
                raise ConnectionError("the answer was cut")
            return got

    def put(
        self,
        request: WireRequest,
        full_key: str,
        key: str,
        views: Sequence[memoryview],
        *,
        headers: Mapping[str, str],
        query: str = "",
        may_be_repeated: bool = True,
    ) -> str:
        """Send a body; the ETag of the answer. Without `may_be_repeated`, OutcomeUnknownError says
        that the server may have it.
        """
        with self._sent(
            request,
            "create",
            key,
            "PUT",
            full_key,
            headers=headers,
            query=query,
            body=views,
            may_be_repeated=may_be_repeated,
        ) as response:
            response.read(_REFUSAL_NBYTES_MAX)
            tag: str = response.getheader("ETag", "")
            return tag

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            _close_all(self._idle)

    @contextlib.contextmanager
    def _sent(
        self,
        request: WireRequest,
        operation: str,
        key: str,
        method: str,
        full_key: str,
        *,
        headers: Mapping[str, str] | None = None,
        query: str = "",
        body: Sequence[memoryview] | None = None,
        may_be_repeated: bool = True,
    ) -> Any:
        """The answer to one request, when it is a good one; its body is read in the block."""
        where = f"{operation} {key} in {self._url}"
        given = dict(headers or {})
        if body is not None:
            given["Content-Length"] = str(sum(view.nbytes for view in body))
        target, signed = self._signed(method, full_key, query, given, body or (), where)
        connection = self._connection(where)
        with contextlib.ExitStack() as closing:
            closing.callback(connection.close)
            try:
                request.begin(connection.sock)
                # It owns the socket where the server closes the connection.
                response = closing.enter_context(
                    _exchanged(connection, method, target, signed, body or ())
                )
                if response.status >= 300:
                    raise self._refusal(response, where, may_be_repeated)
                yield response
            except _BROKEN as error:
                text = f"{where}: no whole answer ({type(error).__name__})"
                kind = TransientError if may_be_repeated else OutcomeUnknownError
                raise kind(text) from None
            finally:
                request.end()
            # After `end`: a connection that another request uses must not be dropped with this one.
            if self._is_kept(connection, response):
                closing.pop_all()

    def _signed(
        self,
        method: str,
        full_key: str,
        query: str,
        headers: dict[str, str],
        body: Sequence[memoryview],
        where: str,
    ) -> tuple[str, dict[str, str]]:
        """What stands in the first line of the request, and its headers."""
        facts = self._facts
        path = quote(full_key, safe="/~")
        target = f"/{path}" if facts.bucket_in_host else f"/{facts.bucket}/{path}"
        target += f"?{query}" if query else ""
        if facts.anonymous:
            return target, headers
        unsigned = AWSRequest(method=method, url=facts.endpoint_url + target, headers=headers)
        digest = UNSIGNED_PAYLOAD if self.unsigned and body else _sha256(body)
        _Signer(self._current_credentials(where), facts.region, digest).add_auth(unsigned)
        return target, dict(unsigned.headers.items())

    def _current_credentials(self, where: str) -> Credentials:
        if self._credentials is not None:
            return self._credentials
        try:
            key, secret, token, may_expire = self._facts.credentials()
        except Exception as error:
            raise translated(error, self._url, where.partition(" ")[0], "", True) from error
        credentials = Credentials(key, secret, token)
        if not may_expire:
            self._credentials = credentials
        return credentials

    def _connection(self, where: str) -> http.client.HTTPConnection:
        """An open connection that the server has not closed, as far as can be seen."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                break
            if not _is_readable(connection.sock):
                return connection
            connection.close()  # the server closed it, or sent what nobody requested
        seconds = self._facts.connect_timeout_seconds
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        else:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=seconds, context=self._tls
            )
        try:
            connection.connect()
        except _BROKEN as error:
            connection.close()
            raise TransientError(
                f"{where}: no connection to the server ({type(error).__name__}); "
                "is endpoint_url right?"
            ) from None
        connection.sock.settimeout(self._facts.read_timeout_seconds)
        return connection

    def _is_kept(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> bool:
        """Keep a connection for later requests where it can serve them."""
        if not response.isclosed() or response.will_close:
            return False
        with self._lock:
            if len(self._idle) >= _IDLE_MAX:
                return False
            self._idle.append(connection)
        return True

    def _refusal(
        self, response: http.client.HTTPResponse, where: str, may_be_repeated: bool
    ) -> StorageError:
        """Only the code and message of the answer are kept: a server may repeat the whole request
        in it, session token included.
        """
        said = response.read(_REFUSAL_NBYTES_MAX)
        if response.status in (301, 307):
            return StorageError(
                f"{where}: the bucket is in another region; pass "
                "client_kwargs={'region_name': ...}"
            )
        code, message = (
            match[1].decode("utf-8", "replace") if (match := pattern.search(said)) else ""
            for pattern in (_CODE, _MESSAGE)
        )
        text = f"{where}: {response.status}{' ' * bool(code)}{code}{': ' * bool(message)}{message}"
        return answered(
            response.status, code, text=text, where=where, may_be_repeated=may_be_repeated
        )


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
                    # Not the method of an SSLSocket, which would go on without encryption.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Signature version 4 with the digest of a body that is in several buffers."""

    def __init__(self, credentials: Credentials, region: str, digest: str) -> None:
        super().__init__(credentials, "s3", region)
        self._digest = digest

    def payload(self, request: Any) -> str:
        return self._digest


def _exchanged(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: Sequence[memoryview],
) -> http.client.HTTPResponse:
    connection.putrequest(method, target, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    try:
        for view in body:
            for start in range(0, view.nbytes, _SLICE_NBYTES):
                connection.send(view[start : start + _SLICE_NBYTES])
    except ConnectionError:  # and not a timeout, after which nothing more is waited for
        # A server may refuse a request before it has read all of it, and close.
        with contextlib.suppress(*_BROKEN):
            return connection.getresponse()
        raise
    return connection.getresponse()


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _sha256(body: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for view in body:
        digest.update(view)
    return digest.hexdigest()


def _is_readable(used: socket.socket) -> bool:
    polled = select.poll()
    polled.register(used, select.POLLIN)
    return bool(polled.poll(0))


def _tls() -> ssl.SSLContext:
    """What the system trusts and what botocore brings along, as the other clients do."""
    context = ssl.create_default_context()
    context.load_verify_locations(get_cert_path(True))
    return context
