"""The server of one directory: others read and write its objects by HTTP, as those of any store.

It answers only clients with the token. An upload is visible once every part has the length and the
checksum that its sender stated, and is on the disk. Malformed, idle and slow clients get an error
or a closed connection: requests, bodies, uploads, connections that have not shown the token, and
the time of each are bounded.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import socket
import socketserver
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import chain, islice
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

from storage.errors import (
    KeyNotFoundError,
    ShortReadError,
    SlowDownError,
    StorageError,
    TooLargeError,
    TransientError,
)
from storage.hidden import HiddenText
from storage.peers.relay import BLOCK_NBYTES, DIRECTORY_NBYTES_MAX, RelayStore, spans_of
from storage.peers.store import (
    BODY_NBYTES_MAX,
    CHECKED,
    CHECKSUM,
    LIST_MAX,
    OBJECTS,
    RATE_MIN,
    checksum_of,
    status_of,
)
from storage.store import ByteRange, ObjectWriter, Store, check_key, is_key
from storage.strangers import to_end

STRANGERS_MAX = 128  # connections that have not shown the token
STRANGERS_PER_ADDRESS = 64
KNOWN_MAX = 1024  # connections that have shown it; each has a thread
KNOWN_PER_ADDRESS = 256
UPLOADS_MAX = 256
BODIES_MAX = 16  # in memory at the same time
HEAD_SECONDS = 10.0  # for a client to shake hands, and to send the head of a request
IDLE_SECONDS = 120.0  # between two requests on one connection
UPLOAD_SECONDS = 120.0  # between two parts of an upload
LOOK_SECONDS = 0.1  # between two looks at what is late
NEWS_SECONDS_MAX = 30.0  # for which a request waits for news
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_NUMBER = re.compile(r"[0-9]{1,18}")


class _PeerUpload:
    """An object of several parts on its way; `lock` is held while it is written or ended."""

    def __init__(self, context: AbstractContextManager[ObjectWriter]) -> None:
        self.stack = ExitStack()
        self.writer = self.stack.enter_context(context)
        self.lock = threading.Lock()
        self.checksums: dict[int, bytes] = {}
        self.is_over = False
        self.touched = time.monotonic()

    def write(self, index: int, part: memoryview, checksum: bytes) -> None:
        """Write a part; repeating the same one is no error."""
        with self.lock:
            self._refuse_over()
            self.touched = time.monotonic()
            # A sender repeats a part when the answer was lost.
            if self.checksums.get(index) != checksum:
                self.writer.write_part(index, [part])
                self.checksums[index] = checksum

    def shorten(self, nbytes: int) -> None:
        """It will have fewer bytes than were announced."""
        with self.lock:
            self._refuse_over()
            self.writer.shorten(nbytes)

    def publish(self) -> None:
        """Make it visible, if it is complete."""
        with self.lock:
            self._refuse_over()
            self.is_over = True
            self.stack.close()

    def give_up(self) -> None:
        """Remove what was written."""
        with self.lock:
            if not self.is_over:
                self.is_over = True
                self.stack.__exit__(TransientError, TransientError("given up"), None)

    def _refuse_over(self) -> None:
        if self.is_over:
            raise KeyNotFoundError("this upload has ended")


class PeerServer(socketserver.ThreadingTCPServer):
    """Serves `store`, which is a directory, to those who have `token`, from its making until
    `close`; or the root of a `RelayStore`, which can only be read. `host` is an address of this
    machine: nothing is answered on others. The port is the first free one of `ports` (0: the
    system chooses).

    Raises StorageError when it cannot listen there.
    """

    allow_reuse_address = True  # connections that a process has closed keep its port for a minute
    daemon_threads = True
    # Closing must not wait for threads whose clients are slow.
    block_on_close = False
    # socketserver's 5 are too few for a job whose ranks all connect at once.
    request_queue_size = 128

    def __init__(
        self,
        store: Store,
        token: str,
        host: str,
        ports: range = range(1),
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.store = store
        self._token = HiddenText(token)
        self._tls = tls
        self._lock = threading.Lock()
        self.bodies = threading.BoundedSemaphore(BODIES_MAX)
        self._due: dict[socket.socket, float] = {}  # when a connection is given up
        self._strangers: dict[socket.socket, str] = {}  # and their addresses
        self._known: dict[socket.socket, str] = {}  # likewise, once they have shown the token
        self._uploads: dict[str, _PeerUpload] = {}
        if ":" in host:
            self.address_family = socket.AF_INET6
        for port in ports:
            try:
                super().__init__((host, port), _PeerHandler)
                break
            except OSError as error:
                problem = error.strerror or str(error)
        else:
            where = f"{host}, ports {ports[0]} to {ports[-1]}" if ports[-1] else host
            raise StorageError(f"cannot listen on {where}: {problem}")
        self.port = int(self.server_address[1])
        # A daemon: a process that ends without closing it must not wait for it.
        self._thread = threading.Thread(
            target=self.serve_forever, args=(LOOK_SECONDS,), name="peers", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End all connections and uploads, and listen no more."""
        _shut(self.socket)  # wakes `serve_forever`, which else looks in a tenth of a second
        self.shutdown()
        self.server_close()
        with self._lock:
            # Taken out under the lock, ended outside of it: their threads take it when they end.
            connections, self._due = list(self._due), {}
            uploads, self._uploads = list(self._uploads.values()), {}
        _end(connections, uploads)

    def is_known(self, authorization: str) -> bool:
        """Whether a request has the token."""
        # As bytes: compare_digest takes no text beyond ASCII. Its time shows nothing of the token.
        given = authorization.removeprefix("Bearer ").encode("utf-8", "replace")
        return hmac.compare_digest(given, self._token.encode())

    # connections

    def get_request(self) -> tuple[Any, Any]:
        """A connection. Where there is TLS, its own thread shakes hands: nobody waits for it."""
        request, address = super().get_request()
        if self._tls is not None:
            request = self._tls.wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
        return request, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin with a connection; it is a stranger's until it shows the token."""
        with self._lock:
            _add(self._strangers, request, client_address[0], STRANGERS_MAX, STRANGERS_PER_ADDRESS)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        with self._lock:
            self._strangers.pop(request, None)
            self._known.pop(request, None)
        super().shutdown_request(request)

    def trust(self, connection: socket.socket) -> None:
        """Count `connection` as a stranger's no more, from its first request with the token on."""
        with self._lock:
            address = self._strangers.pop(connection, None)
            if address is not None:
                _add(self._known, connection, address, KNOWN_MAX, KNOWN_PER_ADDRESS)

    def allow(self, connection: socket.socket, seconds: float) -> None:
        """`connection` may take so long for what comes next."""
        with self._lock:
            self._due[connection] = time.monotonic() + seconds

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands first, where there is TLS."""
        self.allow(request, HEAD_SECONDS)
        try:
            if self._tls is not None:
                request.do_handshake()
            _PeerHandler(request, client_address, self)
        finally:
            with self._lock:
                self._due.pop(request, None)

    def service_actions(self) -> None:
        """End late connections and uploads: `serve_forever` calls this again and again."""
        now = time.monotonic()
        with self._lock:
            late = [connection for connection, due in self._due.items() if now > due]
            old = [n for n, u in self._uploads.items() if now > u.touched + UPLOAD_SECONDS]
            uploads = [self._uploads.pop(name) for name in old]
        # Not under the lock, which every request takes.
        _end(late, uploads)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves, or stops sending, is no error."""
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handle_error(request, client_address)

    # uploads

    def begin(self, context: AbstractContextManager[ObjectWriter]) -> str:
        """The name of a new upload. Raises SlowDownError when there are too many."""
        with self._lock:
            if len(self._uploads) >= UPLOADS_MAX:
                raise SlowDownError(f"{UPLOADS_MAX} uploads are under way here")
        # Not under the lock, since making a file may take long. A few uploads too many do no harm.
        upload, name = _PeerUpload(context), secrets.token_hex(16)
        with self._lock:
            self._uploads[name] = upload
        return name

    def upload(self, name: str) -> _PeerUpload:
        """An upload that was begun. Raises KeyNotFoundError."""
        with self._lock:
            upload = self._uploads.get(name)
        if upload is None:
            raise KeyNotFoundError("there is no such upload, or it was given up")
        return upload

    def forget(self, name: str) -> None:
        """An upload has ended."""
        with self._lock:
            self._uploads.pop(name, None)


class _Refused(Exception):
    """An answer that is no error of the store."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class _PeerHandler(BaseHTTPRequestHandler):
    server: PeerServer
    protocol_version = "HTTP/1.1"
    server_version = "ckpt"
    sys_version = ""
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def handle_one_request(self) -> None:
        """One request; after it the connection may be idle for a while."""
        super().handle_one_request()
        self.server.allow(self.connection, IDLE_SECONDS)

    def parse_request(self) -> bool:
        """Everything is done here: any method, and one way to fail."""
        # The base class calls `do_GET` and the like after a True: this method returns False always.
        if not super().parse_request():
            return False
        try:
            self._refuse_unknown()
            self._answer()
        except _Refused as refused:
            self._fail(refused.status, "StorageError", str(refused))
        except StorageError as error:
            self._fail(status_of(error), type(error).__name__, str(error))
        except (ValueError, KeyError) as error:
            self._fail(HTTPStatus.BAD_REQUEST, "StorageError", f"no such request: {error!s:.100}")
        self.wfile.flush()
        return False

    def finish(self) -> None:
        """Close both files, also where what is left of an answer can no more be sent."""
        for file in (self.wfile, self.rfile):
            with suppress(OSError):
                file.close()

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing: the other end has the error."""

    def _refuse_unknown(self) -> None:
        given = self.headers.get_all("Authorization") or []
        if len(given) != 1 or not self.server.is_known(given[0]):
            self.close_connection = True  # its body is not read
            raise _Refused(HTTPStatus.UNAUTHORIZED, "this server has another token")
        self.server.trust(self.connection)

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path, is_relay = url.path, isinstance(self.server.store, RelayStore)
        fields = {n: v[0] for n, v in parse_qs(url.query, max_num_fields=8).items()}
        if path.startswith(OBJECTS) and not is_relay:
            fields["key"] = check_key(unquote(path[len(OBJECTS) :], errors="strict"))
            path = OBJECTS
        answer = (_OF_RELAYS if is_relay else _OF_DIRECTORIES).get(f"{self.command} {path}")
        if answer is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such request")
        if self.command in ("POST", "DELETE"):
            self._body(0)
        # Each body is in memory as a whole, so only so many are read at once.
        with self.server.bodies if self.command == "PUT" else nullcontext():
            answer(self, fields)

    # objects

    def _get(self, fields: dict[str, str]) -> None:
        store, key = self.server.store, fields["key"]
        try:
            # Without waiting: a pipe that lies there would not open before somebody writes to it.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(os.path.join(store.place, key), flags)
        except (FileNotFoundError, NotADirectoryError):
            raise KeyNotFoundError(f"{key} in {store.url}: no such object") from None
        except OSError as error:
            raise StorageError(f"read {key} in {store.url}: {error.strerror}") from error
        with open(fd, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KeyNotFoundError(f"{key} in {store.url}: no such object")
            start, stop = self._range(key, status.st_size)
            self.server.allow(self.connection, HEAD_SECONDS + (stop - start) / RATE_MIN)
            if CHECKED in self.headers and stop - start <= BODY_NBYTES_MAX:
                part = os.pread(file.fileno(), stop - start, start)
                self._send(HTTPStatus.PARTIAL_CONTENT, part + checksum_of([memoryview(part)]))
                return
            is_part = "Range" in self.headers
            self.send_response(HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK)
            self.send_header("Content-Length", f"{stop - start}")
            self.end_headers()
            if start == stop:
                return
            self.wfile.flush()
            # By the system from the page cache to the network: this process touches no byte.
            if self.connection.sendfile(file, start, stop - start) != stop - start:
                self.close_connection = True  # the file was cut meanwhile

    def _range(self, key: str, nbytes: int) -> tuple[int, int]:
        given = self.headers.get("Range")
        if given is None:
            return 0, nbytes
        match = _RANGE.fullmatch(given)
        start, last = (int(match[1]), int(match[2])) if match else (0, -1)
        if last < start:
            raise _Refused(HTTPStatus.BAD_REQUEST, "expected one range, bytes=FIRST-LAST")
        if start >= nbytes:
            raise ShortReadError(f"read {key}: it has {nbytes} bytes")
        return start, min(last + 1, nbytes)

    def _put(self, fields: dict[str, str]) -> None:
        data, _ = self._body(BODY_NBYTES_MAX)
        self.server.store.put_if_absent(fields["key"], bytes(data))
        self._reply()

    def _delete(self, fields: dict[str, str]) -> None:
        self.server.store.delete(fields["key"])
        self._reply()

    # uploads

    def _begin(self, fields: dict[str, str]) -> None:
        key, nbytes, part = fields["key"], _number(fields["nbytes"]), _number(fields["part"])
        if not 0 < part <= BODY_NBYTES_MAX:
            raise TooLargeError(f"{key}: parts of {part} bytes, at most {BODY_NBYTES_MAX}")
        self._reply(self.server.begin(self.server.store.create(key, nbytes, part_nbytes=part)))

    def _part(self, fields: dict[str, str]) -> None:
        data, checksum = self._body(BODY_NBYTES_MAX)
        upload = self.server.upload(fields["upload"])
        upload.write(_number(fields["index"]), data, checksum)
        self._reply()

    def _shorten(self, fields: dict[str, str]) -> None:
        self.server.upload(fields["upload"]).shorten(_number(fields["nbytes"]))
        self._reply()

    def _end(self, fields: dict[str, str]) -> None:
        upload = self.server.upload(fields["upload"])
        self.server.allow(self.connection, IDLE_SECONDS)
        try:
            # Which syncs to the disk, and may take long.
            upload.publish()
        finally:
            self.server.forget(fields["upload"])
        self._reply()

    def _give_up(self, fields: dict[str, str]) -> None:
        upload = self.server.upload(fields["upload"])
        self.server.forget(fields["upload"])
        upload.give_up()
        self._reply()

    # roots

    def _news(self, fields: dict[str, str]) -> None:
        relay = cast(RelayStore, self.server.store)
        name, since = fields.get("root", ""), fields.get("since", "")
        if name != relay.root:
            raise StorageError(f"the root {name!r} is not served here, but {relay.root!r}")
        self.server.allow(self.connection, NEWS_SECONDS_MAX + IDLE_SECONDS)
        seconds, number = _number(fields["wait"]) / 1000, relay.number_of(since)
        # A client without a state of this relay gets all of it at once.
        relay.refresh(min(seconds, NEWS_SECONDS_MAX) if number >= 0 else 0.0, number)
        news = relay.news(since)
        small = list(relay.small_of(news))
        head = {"state": news.state, "all": news.is_all, "removed": news.removed}
        head["added"] = [list(one) for one in news.added]
        spans = [(key, 0, len(data)) for key, _, data in small]
        self._stream(head, spans, (data for _, _, data in small))

    def _files(self, fields: dict[str, str]) -> None:
        store = self.server.store
        self.server.allow(self.connection, IDLE_SECONDS)
        prefix, start, stop = fields["prefix"], _number(fields["start"]), _number(fields["stop"])
        is_directory = prefix.endswith("/")
        if not start < stop <= start + (DIRECTORY_NBYTES_MAX if is_directory else BLOCK_NBYTES):
            raise _Refused(HTTPStatus.BAD_REQUEST, "expected a block, or a small directory")
        spans = spans_of(store.list(prefix)) if is_directory else [(prefix, start, stop)]
        if sum(high - low for _, low, high in spans) > stop - start:
            raise TooLargeError(f"{prefix} has more than {stop} bytes")
        self._stream({}, spans, (store.get(key, ByteRange(low, high)) for key, low, high in spans))

    def _stream(
        self, head: dict[str, Any], spans: list[tuple[str, int, int]], blocks: Iterable[bytes]
    ) -> None:
        data = json.dumps({**head, "parts": spans}).encode()
        nbytes = sum(stop - start + CHECKSUM.size for _, start, stop in spans)
        blocks = iter(blocks)
        first = [next(blocks)] if spans else []  # what fails here can still be said
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", f"{2 * CHECKSUM.size + len(data) + nbytes}")
        self.end_headers()
        self.wfile.write(CHECKSUM.pack(len(data)) + data + checksum_of([memoryview(data)]))
        try:
            for block in chain(first, blocks):
                self.server.allow(self.connection, IDLE_SECONDS)
                self.wfile.write(block)
                self.wfile.write(checksum_of([memoryview(block)]))
        except StorageError:
            self.close_connection = True  # the client sees an answer that ends early

    # the rest

    def _info(self, fields: dict[str, str]) -> None:
        self._reply(list(self.server.store.info(fields["key"])))

    def _list(self, fields: dict[str, str]) -> None:
        entries = self.server.store.list(fields.get("prefix", ""), after=fields.get("after", ""))
        entries = (entry for entry in entries if is_key(entry.key))
        self._reply([list(entry) for entry in islice(entries, LIST_MAX)])

    def _abort(self, fields: dict[str, str]) -> None:
        self._reply(self.server.store.abort_unfinished(fields.get("prefix", "")))

    # bytes

    def _body(self, nbytes_max: int) -> tuple[memoryview, bytes]:
        """The bytes that were sent, and their checksum, which is that of the sender, too."""
        given = self.headers.get_all("Content-Length") or ["0"]
        # Two lengths, or a chunked body, would be read in two ways by two programs.
        nbytes = _number(given[0]) if len(given) == 1 else -1
        if nbytes < 0 or "Transfer-Encoding" in self.headers or (nbytes and not nbytes_max):
            self.close_connection = True
            raise _Refused(HTTPStatus.BAD_REQUEST, "a body of this kind is not expected")
        if not nbytes_max:
            return memoryview(b""), b""
        if not CHECKSUM.size <= nbytes <= nbytes_max + CHECKSUM.size:
            self.close_connection = True  # what comes now is not read
            raise TooLargeError(f"a body of {nbytes} bytes, at most {nbytes_max} and a checksum")
        self.server.allow(self.connection, HEAD_SECONDS + nbytes / RATE_MIN)
        body = memoryview(bytearray(nbytes))
        done = 0
        while done < nbytes:
            count = self.rfile.readinto(body[done:])
            if not count:
                self.close_connection = True
                raise TransientError(f"the connection ended after {done} of {nbytes} bytes")
            done += count
        data, checksum = body[: -CHECKSUM.size], bytes(body[-CHECKSUM.size :])
        if checksum_of([data]) != checksum:
            raise TransientError("the bytes that came are not those that were sent")
        return data, checksum

    def _reply(self, value: object = None) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode())

    def _fail(self, status: HTTPStatus, name: str, text: str) -> None:
        if self.command in ("PUT", "POST"):
            self.close_connection = True  # its body may be there still
        self._send(status, json.dumps([name, text]).encode())

    def _send(self, status: HTTPStatus, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", f"{len(data)}")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)


_Answer = Callable[[_PeerHandler, dict[str, str]], None]
_OF_DIRECTORIES: dict[str, _Answer] = {
    f"GET {OBJECTS}": _PeerHandler._get,
    f"PUT {OBJECTS}": _PeerHandler._put,
    f"DELETE {OBJECTS}": _PeerHandler._delete,
    "POST /begin": _PeerHandler._begin,
    "PUT /part": _PeerHandler._part,
    "DELETE /part": _PeerHandler._give_up,
    "POST /shorten": _PeerHandler._shorten,
    "POST /end": _PeerHandler._end,
    "GET /info": _PeerHandler._info,
    "GET /list": _PeerHandler._list,
    "POST /abort": _PeerHandler._abort,
}
_OF_RELAYS: dict[str, _Answer] = {
    "GET /news": _PeerHandler._news,
    "GET /files": _PeerHandler._files,
}


def _number(text: str) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise ValueError("expected a number")
    return int(text)


def _add(
    connections: dict[socket.socket, str], one: socket.socket, address: str, most: int, each: int
) -> None:
    """One more connection, from `address`; where there are too many, another ends."""
    late = to_end(connections, address, most, each)
    if late is not None:
        del connections[late]
        _shut(late)
    connections[one] = address


def _end(connections: Iterable[socket.socket], uploads: Iterable[_PeerUpload]) -> None:
    for connection in connections:
        _shut(connection)
    for upload in uploads:
        with suppress(StorageError):
            upload.give_up()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        # Not as TLS does it, which takes away what the connection's thread uses just now.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
