"""The server of `ckpt serve`: a page, its style and script, and events that keep it as things are.

It trusts nobody. It answers requests that name a host it is known by, so that no page of another
site can read it by a name that leads here (DNS rebinding). It reads only what is
shown, changes nothing, and its policy lets the page load and run only its own two files.
"""

from __future__ import annotations

import hashlib
import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from ckpt.errors import CheckpointError
from ckpt.screens.following import Ending, Following, versions_of
from ckpt.screens.pages import PageChoice, PageMatter, pieces_of, sections_of, serve_page
from ckpt.service.retention import KeepRule
from ckpt.tools.cost import Prices
from storage.strangers import to_end

LOOPBACK = ("localhost", "127.0.0.1", "::1")
STREAMS_MAX = 32  # pages that are kept up to date at the same time; each has a thread
TICK_SECONDS = 10.0  # between signs of life on a stream where nothing happens
RETRY_MILLISECONDS = 2000  # after which a browser connects again
HALF_MAX = 64  # requests that are not whole yet; each has a thread
HALF_PER_ADDRESS = 32
REQUEST_SECONDS = 30.0  # for a client to send its request, and to take what it is sent
FIELDS_MAX = 8
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer(socketserver.ThreadingTCPServer):
    """Listens from its making on; answers in `serve_forever`, which raises what `Following.check`
    and `ending.check` do.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False  # streams end by themselves when the following does
    request_queue_size = 64

    def __init__(
        self,
        following: Following,
        address: tuple[str, int],
        *,
        rule: KeepRule | None = None,
        names: Sequence[str] = (),
        ending: Ending | None = None,
        clock: Callable[[], float] = time.time,
        prices: Prices | None = None,
    ) -> None:
        """`names` are hosts by which it may be called, besides the loopback's and its own. Raises
        CheckpointError when it cannot listen at `address`.
        """
        self.following = following
        self.rule, self.prices = rule, prices or Prices()
        self._ending = ending or Ending()
        self.clock = clock
        self.names = {name.lower() for name in (*LOOPBACK, address[0], *names)}
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)
        self._lock = threading.Lock()
        # Connections whose request is not whole: their addresses, and until when it may be so.
        self._half: dict[socket.socket, str] = {}
        self._due: dict[socket.socket, float] = {}
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise CheckpointError(
                f"cannot listen on {address[0]}, port {address[1]}: {error.strerror or error}; "
                "--port 0 takes a free one"
            ) from error

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        host = host.decode() if isinstance(host, bytes | bytearray) else host
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def service_actions(self) -> None:
        """Called by `serve_forever` twice a second."""
        self._ending.check()
        self.following.check()
        now = time.monotonic()
        with self._lock:
            for connection in [one for one, due in self._due.items() if now > due]:
                self._give_up(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin with a connection. Of too many half requests, one makes room for it."""
        address = client_address[0]
        # Clients that send a byte now and then would otherwise take all threads, for ever.
        with self._lock:
            late = to_end(self._half, address, HALF_MAX, HALF_PER_ADDRESS)
            if late is not None:
                self._give_up(late)
            self._half[request] = address
            self._due[request] = time.monotonic() + REQUEST_SECONDS
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        self.head_came(request)
        super().shutdown_request(request)

    def head_came(self, connection: socket.socket) -> None:
        """Count `connection` as half a request no more."""
        with self._lock:
            self._half.pop(connection, None)
            self._due.pop(connection, None)

    def _give_up(self, connection: socket.socket) -> None:
        del self._half[connection], self._due[connection]
        # Not closed: its thread still has it, and the number could be that of another by then.
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves, or stops sending, is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def look(self, choice: PageChoice) -> PageMatter:
        """Everything that a page shows now."""
        pollers = self.following.pollers
        return PageMatter(
            states=self.following.states,
            choice=choice,
            telemetry=lambda run, attempt: pollers[run].telemetry(attempt),
            rule=self.rule,
            now_unix=self.clock(),
            prices=self.prices,
        )

    @contextmanager
    def stream(self) -> Iterator[bool]:
        """Whether one more may begin; it has ended after the block."""
        # Refused and not queued: a browser that waits in silence looks as if nothing happened.
        is_free = self._streams.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._streams.release()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    # In place of the versions of Python and of its server, which are nobody's concern.
    server_version = "ckpt"
    sys_version = ""
    timeout = REQUEST_SECONDS

    def parse_request(self) -> bool:
        """What the head of a request says; the request is not half any more."""
        is_valid = super().parse_request()
        self.server.head_came(self.connection)
        return is_valid

    def do_GET(self) -> None:
        """Everything that there is."""
        if problem := self._foreign_host():
            self._send(HTTPStatus.FORBIDDEN, problem)
            return
        url = urlsplit(self.path)
        if url.path == "/":
            look = self.server.look(self._choice(url))
            sections = sections_of(look)
            self._send(HTTPStatus.OK, serve_page(look, sections, digest_of(sections)), "text/html")
        elif url.path == "/page.css":
            self._send(HTTPStatus.OK, "".join(pieces_of("page.css")), "text/css")
        elif url.path == "/page.js":
            script = resources.files("ckpt.screens") / "serve.js"
            self._send(HTTPStatus.OK, script.read_text(encoding="utf-8"), "text/javascript")
        elif url.path == "/events" and self.command == "GET":
            self._events(url)
        else:
            self._send(HTTPStatus.NOT_FOUND, "there is no such page; try /")

    do_HEAD = do_GET

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing: what is asked for may have names in it, and is nobody's concern."""

    def end_headers(self) -> None:
        """With those that every answer has, errors too."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def _foreign_host(self) -> str:
        """Why a request is refused by the host that it names; "" when it is not."""
        # Exactly one: proxies and servers differ in which of several they believe.
        given = self.headers.get_all("Host") or []
        try:
            name = urlsplit(f"//{given[0]}").hostname if len(given) == 1 else None
        except ValueError:
            name = None
        # Not the port: a tunnel may have another one at its other end.
        if name is not None and name in self.server.names:
            return ""
        return (
            "this server does not go by the name of the host in your request; open it as "
            "localhost, or allow the name with --allow-host"
        )

    def _choice(self, url: SplitResult) -> PageChoice:
        """What an address chooses; nonsense chooses nothing."""
        count = len(self.server.following.pollers)
        known = {f"{index}": index for index in range(count)}
        fields = _field(url, "save"), _field(url, "axis")
        return PageChoice(known.get(_field(url, "run"), 0), *fields)

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", f"{len(data)}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _events(self, url: SplitResult) -> None:
        """Server-sent events: sections that have changed, named by the digest of all of them.

        A client that comes back with the newest digest gets nothing again; any other gets all.
        """
        with self.server.stream() as is_free:
            if not is_free:
                text = f"{STREAMS_MAX} pages are open already; close some"
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, text)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.end_headers()
            self._write(f"retry: {RETRY_MILLISECONDS}\n\n")
            seen = self.headers.get("Last-Event-ID") or _field(url, "seen")
            self._keep_up(self._choice(url), seen)

    def _keep_up(self, choice: PageChoice, seen: str) -> None:
        following, shown = self.server.following, dict[str, str]()
        while not following.is_closing:
            versions = versions_of(following.states)
            sections = sections_of(self.server.look(choice))
            digest = digest_of(sections)
            if digest != seen:
                # A page may be of hundreds of kilobytes, of which a new step changes a few lines.
                new = {name: html for name, html in sections.items() if shown.get(name) != html}
                # One line: a line break would end the data.
                self._write(f"id: {digest}\nevent: sections\ndata: {json.dumps(new)}\n\n")
            else:
                # A comment, which browsers drop: a client that has gone is noticed by writing.
                self._write(": nothing new\n\n")
            seen, shown = digest, sections
            following.wait(versions, TICK_SECONDS)

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()


def _field(url: SplitResult, name: str) -> str:
    """A field of the query; "" where it is not given, or too many are."""
    try:
        return parse_qs(url.query, max_num_fields=FIELDS_MAX).get(name, [""])[0]
    except ValueError:
        return ""


def digest_of(sections: Mapping[str, str]) -> str:
    """What names these sections."""
    data = json.dumps(sections, sort_keys=True).encode()
    return hashlib.blake2b(data, digest_size=12).hexdigest()
