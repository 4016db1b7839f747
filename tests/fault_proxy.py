"""An HTTP proxy in front of an S3 server that makes requests fail in every way that clouds do.

It can also be far away: answers come late, over a link that all share.

with moto_server() as server, fault_proxy(server.endpoint_url, rate=0.2, seed=7) as proxy:
    options = S3Server(proxy.endpoint_url).options
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.counting import AtOnce

# Not forwarded, so that nothing happened:
#   error500, slow_down (503), too_many (429): the answer of that name
#   expired (400, by a rule only): the answer to credentials that are valid no longer
#   held: nothing is read but the head and nothing answered, for as long as the proxy holds on
#   reset: the connection is reset
# Forwarded, so that it happened:
#   lost_reply: the connection is reset instead of the answer
#   cut_body: of the answer's body the first half, then a reset; without a body a lost_reply
#   gone_reply, refused_reply (by a rule only): 404 or 412 instead of the answer
#   held_reply (by a rule only): nothing is answered for as long as the proxy holds on
KINDS = ("error500", "slow_down", "too_many", "held", "reset", "lost_reply", "cut_body")
_ANSWERS = {
    "error500": (500, "InternalError"),
    "slow_down": (503, "SlowDown"),
    "too_many": (429, "TooManyRequests"),
    "expired": (400, "ExpiredToken"),
}
_WRONG_REPLIES = {
    "gone_reply": (404, "NoSuchUpload"),
    "refused_reply": (412, "PreconditionFailed"),
}
_BODY = "<?xml version='1.0'?><Error><Code>{0}</Code><Message>injected</Message></Error>"


class Request(NamedTuple):
    """What a rule knows: method, path with query, and headers by name in lower case."""

    method: str
    path: str
    headers: Mapping[str, str] = MappingProxyType({})


Rule = Callable[[Request], str]  # the kind of failure, "" for none


def at_random(rate: float, seed: int, kinds: Sequence[str] = KINDS) -> Rule:
    """Each request fails with probability `rate`, in one of `kinds`."""
    rng = random.Random(seed)
    lock = threading.Lock()

    def choose(request: Request) -> str:
        with lock:
            return rng.choice(kinds) if rng.random() < rate else ""

    return choose


class FaultProxy:
    """Where the proxy listens, what it did, and what it does next (`rule`, `pause`)."""

    def __init__(
        self, upstream_url: str, rule: Rule, held_seconds: float, place: tuple[str, int]
    ) -> None:
        self.upstream = urlsplit(upstream_url).netloc
        self.rule = rule
        self.held_seconds = held_seconds
        self.closing = threading.Event()
        self.requests: list[Request] = []
        self.counts: Counter[str] = Counter()
        self.paused = False
        self.delay_seconds = 0.0  # of every answer
        self.bandwidth = 0.0  # bytes per second of all bodies together, 0 for no bound
        self.in_flight = AtOnce()
        self.waited = 0  # answers that delay or bandwidth have held up
        self._busy_until = 0.0
        self._lock = threading.Lock()
        self._server = _Server(place, _Handler)
        self._server.proxy = self
        self.endpoint_url = f"http://{place[0]}:{self._server.server_address[1]}"

    def pause(self) -> None:
        """Let everything through from now on."""
        self.paused = True

    def fault_for(self, request: Request) -> str:
        with self._lock:
            self.requests.append(request)
        kind = "" if self.paused else self.rule(request)
        with self._lock:
            self.counts[kind] += 1
        return kind

    def carry(self, nbytes: int) -> None:
        """Returns when a body of `nbytes` and its answer have come over the link."""
        moved = 0.0
        if self.bandwidth:
            with self._lock:
                now = time.monotonic()
                self._busy_until = max(self._busy_until, now) + nbytes / self.bandwidth
                moved = self._busy_until - now
        if seconds := moved + self.delay_seconds:
            with self._lock:
                self.waited += 1
            self.closing.wait(seconds)

    def run(self) -> None:
        self._server.serve_forever(poll_interval=0.05)

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def fault_proxy(
    endpoint_url: str,
    *,
    rate: float = 0.0,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
    rule: Rule | None = None,
    held_seconds: float = 5.0,
    place: tuple[str, int] = ("127.0.0.1", 0),
) -> Iterator[FaultProxy]:
    """A running proxy. `rule` decides instead of chance where it is given; `place` is the address
    and port where it listens.
    """
    proxy = FaultProxy(endpoint_url, rule or at_random(rate, seed, kinds), held_seconds, place)
    thread = threading.Thread(target=proxy.run)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # a proxy before it had this place, and its connections just ended
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # of two small writes, the second waited 40 ms
    server: _Server

    def handle(self) -> None:
        self.upstream = http.client.HTTPConnection(self.server.proxy.upstream, timeout=60)
        try:
            with contextlib.suppress(OSError, http.client.HTTPException):
                super().handle()
        finally:
            self.upstream.close()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""

    def _serve(self) -> None:
        with self.server.proxy.in_flight.entered():
            self._answered()

    def _answered(self) -> None:
        kind = self.server.proxy.fault_for(
            Request(self.command, self.path, {n.lower(): v for n, v in self.headers.items()})
        )
        body = b"" if kind == "held" else self._body()
        if body is None:  # as a server does: what was not sent whole did not happen
            self._reset()
        elif kind in _ANSWERS:
            self._answer_error(*_ANSWERS[kind])
        elif kind == "held":
            self.server.proxy.closing.wait(self.server.proxy.held_seconds)
            self._reset()
        elif kind == "reset":
            self._reset()
        else:
            self._forward(body, kind)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _body(self) -> bytes | None:
        """None when the client went away before its end."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            nbytes = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(nbytes)
            return body if len(body) == nbytes else None
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _forward(self, body: bytes, kind: str) -> None:
        dropped = ("transfer-encoding", "content-length", "connection", "expect")
        self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in dropped:
                self.upstream.putheader(name, value)
        self.upstream.putheader("Content-Length", str(len(body)))
        self.upstream.endheaders(body)
        response = self.upstream.getresponse()
        answer = response.read()
        self.server.proxy.carry(len(body) + len(answer))
        headers = [(n, v) for n, v in response.getheaders() if n.lower() not in dropped]
        if self.command == "HEAD":
            headers.append(("Content-Length", response.headers.get("Content-Length", "0")))
        if kind == "cut_body" and len(answer) > 1:
            self._answer(response.status, headers, answer, sent=len(answer) // 2)
            self._reset()
        elif kind in ("lost_reply", "cut_body", "held_reply"):
            if kind == "held_reply":
                self.server.proxy.closing.wait(self.server.proxy.held_seconds)
            self._reset()
        elif kind in _WRONG_REPLIES:
            self._answer_error(*_WRONG_REPLIES[kind])
        else:
            self._answer(response.status, headers, answer)

    def _answer_error(self, status: int, code: str) -> None:
        self._answer(status, [("Content-Type", "application/xml")], _BODY.format(code).encode())

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, sent: int | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
            self.wfile.flush()

    def _reset(self) -> None:
        """Close so that the other side sees a reset, not an orderly end."""
        self.close_connection = True
        linger_none = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_none)
        self.connection.close()
