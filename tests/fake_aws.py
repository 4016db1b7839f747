"""Amazon's part of S3, on the loopback: hosts and regions, certificates, proxies, Express, rules.

Names are resolved inside the process that `resolving` covers; no other host is asked. Where AWS's
documents say how a request is answered, this answers it that way, and counts.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import select
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit


class Threads(socketserver.ThreadingTCPServer):
    """A server of daemon threads; a client that goes away is nothing to speak of."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing."""


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    """`server` answers in this block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# Proxies -----------------------------------------------------------------------------------------


class HttpProxy(Threads):
    """Forwards plain requests, and tunnels by CONNECT, to the addresses in `hosts` alone."""

    def __init__(self, hosts: Mapping[str, str], authorization: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.hosts = hosts  # "name:port" or "*" to an endpoint
        self.authorization = authorization
        self.requests: list[str] = []  # first lines
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def upstream(self, place: str) -> str:
        """Host and port for "name:port"."""
        return urlsplit(self.hosts.get(place) or self.hosts["*"]).netloc


@contextmanager
def http_proxy(hosts: Mapping[str, str], authorization: str = "") -> Iterator[HttpProxy]:
    """A running proxy; with `authorization`, that header is asked for."""
    proxy = HttpProxy(hosts, authorization)
    with serving(proxy):
        yield proxy


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HttpProxy

    def _forward(self) -> None:
        self.server.requests.append(self.requestline)
        if self._is_refused():
            return
        address = urlsplit(self.path)
        place = address.netloc if address.port else f"{address.netloc}:80"
        upstream = http.client.HTTPConnection(self.server.upstream(place), timeout=60)
        nbytes = int(self.headers.get("Content-Length", 0))
        target = address.path + (f"?{address.query}" if address.query else "")
        upstream.putrequest(self.command, target, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "host":
                upstream.putheader(name, value)
        upstream.endheaders(self.rfile.read(nbytes) if nbytes else None)
        response = upstream.getresponse()
        answer = response.read()
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            dropped = ["transfer-encoding", "connection"]
            dropped += [] if self.command == "HEAD" else ["content-length"]
            if name.lower() not in dropped:
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        upstream.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    def do_CONNECT(self) -> None:
        self.server.requests.append(self.requestline)
        if self._is_refused():
            return
        host, _, port = self.server.upstream(self.path).partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as upstream:
            self.send_response_only(200)
            self.end_headers()
            pairs = {self.connection: upstream, upstream: self.connection}
            with contextlib.suppress(OSError):
                while True:
                    for ready in select.select([*pairs], [], [], 60)[0]:
                        data = ready.recv(1 << 16)
                        if not data:
                            return
                        pairs[ready].sendall(data)
        self.close_connection = True

    def _is_refused(self) -> bool:
        wanted = self.server.authorization
        if not wanted or self.headers.get("Proxy-Authorization") == wanted:
            return False
        self.send_response_only(407)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.close_connection = True
        return True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""
