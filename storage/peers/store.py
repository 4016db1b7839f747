"""The store at the far end of a `PeerServer`: the objects of a directory on another host.

What it and the server agree on: names, limits, errors as answers.

    GET, DELETE /o/KEY                an object; GET takes one range, and with the header Checked
                                      its crc32c follows
    PUT  /o/KEY                       put if absent: the bytes, then their crc32c
    POST /begin?key&nbytes&part       an object of several parts: gives the name of the upload
    PUT  /part?upload&index           one part: the bytes, then their crc32c
    POST /shorten?upload&nbytes       the object of an upload has fewer bytes
    POST /end?upload, DELETE /part    publish an upload, or give it up
    GET  /info?key, /list?prefix      what is there, as JSON; a list has up to LIST_MAX objects
    POST /abort?prefix                as the method of a store

And for those who serve a root to followers, which may only be read (`storage.peers.relay`):

    GET  /news?root&since&wait        names that are new since a state, within `wait` milliseconds
    GET  /files?root&prefix&start&stop   a block of an object, or all of a directory

Their answers are the length of a head (4 bytes), the head in JSON, whose `parts` lists key, start
and end of blocks, and these; each with its crc32c.

What is published is durable. Every request has the token in its Authorization, and nowhere else.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import crc32c as _crc32c

from storage import errors
from storage.errors import (
    ShortReadError,
    StorageError,
    TransientError,
)
from storage.hidden import HiddenText
from storage.http import HttpStore, close_all
from storage.ranges import LedgerWriter, PartLedger, drop_front, flat_views, take_front
from storage.retry import RetryPolicy, run_publishing
from storage.store import (
    ExclusiveCreate,
    ObjectInfo,
    Patience,
    check_bound,
    check_key,
    check_prefix,
)

MIB = 1 << 20
OBJECTS = "/o/"
BODY_NBYTES_MAX = 16 * MIB  # of a part, and of an object that is put at once
LIST_MAX = 1000
CHECKED = "Checked"  # a header: bytes with their checksum, please
CHECKSUM = struct.Struct("<I")
RATE_MIN = MIB  # bytes per second that a body or an answer has to move
T = TypeVar("T")


class ObjectBlock(NamedTuple):
    """Bytes of an object, from `start` on."""

    key: str
    start: int
    data: bytes


# Of each class the closest status; the name in the answer is what counts.
_STATUS: dict[type[StorageError], HTTPStatus] = {
    errors.KeyNotFoundError: HTTPStatus.NOT_FOUND,
    errors.KeyExistsError: HTTPStatus.CONFLICT,
    errors.ShortReadError: HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    errors.InvalidKeyError: HTTPStatus.BAD_REQUEST,
    errors.TooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.AccessDeniedError: HTTPStatus.FORBIDDEN,
    errors.NoSpaceError: HTTPStatus.INSUFFICIENT_STORAGE,
    errors.SlowDownError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.TransientError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.OutcomeUnknownError: HTTPStatus.INTERNAL_SERVER_ERROR,
}
_CLASSES = {kind.__name__: kind for kind in _STATUS}


def status_of(error: StorageError) -> HTTPStatus:
    """The status that an answer with this error has."""
    return _STATUS.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def checksum_of(buffers: Iterable[memoryview]) -> bytes:
    """What follows the bytes of a body: the crc32c of all of them."""
    value = 0
    for buffer in buffers:
        value = _crc32c.crc32c(buffer, value)
    return CHECKSUM.pack(value)


REQUEST_SECONDS = 10.0  # for each answer to begin, and for each piece of it
ANSWER_NBYTES_MAX = 16 << 20  # of anything that is no object
PIECE_NBYTES = 16 << 20  # that memory is taken for before they have come
IDLE_MAX = 16  # connections that are kept open


class PeerStore(HttpStore):
    """Objects of the directory that a server at `host` and `port` serves to those with `token`.

    What fails is repeated as `policy` says. `seconds` bounds every wait for the network. Where
    `tls` is given, the server has to prove itself to it.
    """

    exclusive_create = ExclusiveCreate.ATOMIC

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        *,
        tls: ssl.SSLContext | None = None,
        seconds: float = REQUEST_SECONDS,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.url = f"peer://[{host}]:{port}" if ":" in host else f"peer://{host}:{port}"
        self._address = (host, port)
        self._authorization = HiddenText(f"Bearer {token}")
        self._tls = tls
        self._seconds = seconds
        self.policy = policy or RetryPolicy(deadline_seconds=2 * seconds)
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        # A store that nobody closes leaves no open connection either.
        weakref.finalize(self, close_all, self._idle)

    @property
    def retries(self) -> int:
        return self.policy.patience.repeated

    @property
    def patience(self) -> Patience:
        return self.policy.patience

    # objects

    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        def take(answer: http.client.HTTPResponse) -> bytes:
            check_bound(self.url, key, _length_of(answer), nbytes_max)
            return _all_of(answer)

        data: bytes = self.policy.run(lambda: self._request("GET", _object(key), take=take))
        return data

    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        nbytes = sum(view.nbytes for view in views)
        headers = {"Range": f"bytes={start}-{start + nbytes - 1}"}

        def take(answer: http.client.HTTPResponse) -> int:
            _length_of(answer)
            count = sum(_filled(answer, view) for view in views)
            if count < (answer.length or 0) or (answer.length and count < nbytes):
                raise TransientError(f"read {key} in {self.url}: the answer ended early")
            return count

        def once() -> int:
            count: int = self._request("GET", _object(key), headers=headers, take=take)
            return count

        try:
            return self.policy.run(once)
        # The range begins behind the end of the object: nothing was read.
        except ShortReadError:
            return 0

    def get_checked_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        """As `get_into`, at most BODY_NBYTES_MAX, compared with the crc32c of what the host has."""
        views = flat_views(buffers)
        nbytes = sum(view.nbytes for view in views)
        headers = {"Range": f"bytes={start}-{start + nbytes - 1}", CHECKED: "1"}

        def take(answer: http.client.HTTPResponse) -> None:
            came = sum(_filled(answer, view) for view in views)
            if came != nbytes or answer.read(CHECKSUM.size) != checksum_of(views):
                raise ValueError("the bytes that came are not those that were sent")

        target = _object(check_key(key))
        self.policy.run(lambda: self._request("GET", target, headers=headers, take=take))

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_key(key)
        if len(data) > BODY_NBYTES_MAX:
            # A server bounds the body of a request, not the size of an object.
            with self.create(key, len(data), part_nbytes=BODY_NBYTES_MAX) as writer:
                view = memoryview(data)
                for index, start in enumerate(range(0, len(data), BODY_NBYTES_MAX)):
                    writer.write_part(index, [view[start : start + BODY_NBYTES_MAX]])
            return
        run_publishing(
            self.policy,
            lambda: self._request("PUT", _object(key), body=[memoryview(data)]),
            # Where no answer came, the object may exist: it is ours if it has our bytes.
            lambda: self.get(key) == data,
        )

    def create(
        self, key: str, nbytes: int, *, part_nbytes: int, durable: bool = True, direct: bool = False
    ) -> _PeerWriter:
        return _PeerWriter(self, PartLedger(key, nbytes, part_nbytes))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        while True:
            read = partial(_page, prefix, after)
            page = self._call("GET", "/list", read, prefix=prefix, after=after)
            yield from page
            if len(page) < LIST_MAX:
                return
            after = page[-1].key

    def info(self, key: str) -> ObjectInfo:
        info: ObjectInfo = self._call("GET", "/info", info_of, key=check_key(key))
        return info

    def delete(self, key: str) -> None:
        self.policy.run(lambda: self._request("DELETE", _object(check_key(key))))

    def sync(self, keys: Iterable[str]) -> None:
        """Nothing: the other end makes every object durable when it publishes it."""

    def abort_unfinished(self, prefix: str) -> int:
        check_prefix(prefix)
        return int(self._call("POST", "/abort", _whole, prefix=prefix))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connection in self._busy:  # its thread sees an answer that ends
                with suppress(OSError):
                    if connection.sock is not None:
                        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
            close_all(self._idle)

    # requests

    def _call(self, method: str, path: str, read: Callable[[Any], Any], **fields: str) -> Any:
        """The answer to a request without a body, as `read` takes it; repeated as the policy says.
        A peer may answer anything: `read` raises ValueError for what it does not expect.
        """
        target = f"{path}?{urlencode(fields)}"
        return self.policy.run(
            lambda: self._request(method, target, take=lambda answer: read(_value(answer)))
        )

    def parts(
        self,
        path: str,
        read: Callable[[Any], T],
        nbytes_max: int,
        fields: Mapping[str, str],
        seconds: float = 0.0,
    ) -> tuple[T, Sequence[ObjectBlock]]:
        """What `read` makes of the head of an answer of at most `nbytes_max`, and its blocks; one
        that may take `seconds` to begin.
        """

        def take(answer: http.client.HTTPResponse) -> tuple[T, Sequence[ObjectBlock]]:
            if (nbytes := _length_of(answer)) > nbytes_max:
                raise ValueError(f"an answer of {nbytes} bytes")
            # Each read has a timeout; this one is for a peer that always sends a little.
            until = time.monotonic() + self._seconds + nbytes / RATE_MIN
            (length,) = CHECKSUM.unpack(_exactly(answer, CHECKSUM.size, until))
            head, parts = json.loads(_checked(answer, length, until)), []
            try:
                spans = [(str(key), int(start), int(stop)) for key, start, stop in head["parts"]]
                result = read(head)
            except (KeyError, TypeError, OverflowError) as error:
                raise ValueError(f"no head of an answer: {head!r:.100}") from error
            for key, start, stop in spans:
                if not 0 <= start < stop:
                    raise ValueError(f"{key}: a block without bytes")
                parts.append(ObjectBlock(key, start, _checked(answer, stop - start, until)))
            if answer.read():  # at its end, which lets the connection be used again
                raise ValueError("an answer with more than its head says")
            return result, parts

        target = f"{path}?{urlencode(fields)}"
        result: tuple[T, Sequence[ObjectBlock]] = self.policy.run(
            lambda: self._request("GET", target, take=take, seconds=seconds)
        )
        return result

    def request(
        self, method: str, path: str, body: Sequence[memoryview] = (), **fields: str
    ) -> Any:
        """The value of one answer to one request. Raises TransientError when none came."""
        return self._request(method, f"{path}?{urlencode(fields)}", body=body)

    def _request(
        self,
        method: str,
        target: str,
        *,
        body: Sequence[memoryview] = (),
        headers: dict[str, str] | None = None,
        take: Callable[[http.client.HTTPResponse], Any] | None = None,
        seconds: float = 0.0,
    ) -> Any:
        sent = {"Authorization": self._authorization, **(headers or {})}
        # A body ends with its checksum; what has none is no PUT.
        parts = [*body, memoryview(checksum_of(body))] if method == "PUT" else []
        sent["Content-Length"] = f"{sum(part.nbytes for part in parts)}"
        connection, answers = self._taken(), list[http.client.HTTPResponse]()
        try:
            # A connection that was kept has the timeout of its last request.
            connection.timeout = self._seconds + seconds
            if connection.sock is not None:
                connection.sock.settimeout(connection.timeout)
            connection.request(method, target, body=parts, headers=sent)
            answers.append(answer := connection.getresponse())
            failure = self._failure(answer) if answer.status >= 300 else None
            result = None if failure else (take or _value)(answer)
        except BaseException as error:
            with self._lock:
                self._busy.discard(connection)
            # Half an answer may be left in it: this connection is not used again.
            for one in answers:
                one.close()
            connection.close()
            if not isinstance(
                error, OSError | http.client.HTTPException | ValueError | RecursionError
            ):
                raise
            what = f"{method} {target.partition('?')[0]} in {self.url}"
            raise TransientError(f"{what}: {_said(error)}") from error
        self._give_back(connection, answer)
        if failure is not None:
            raise failure
        return result

    def _failure(self, answer: http.client.HTTPResponse) -> StorageError:
        said = _value(answer)
        if not isinstance(said, list) or [type(each) for each in said] != [str, str]:
            raise ValueError(f"an error that is none: {said!r:.100}")
        name, text = said
        return _CLASSES.get(name, StorageError)(f"{text} (peer {self.url})")

    def _taken(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._is_closed:
                raise StorageError(f"{self.url} is closed")
            # The one used last, because the server closes those that are idle for long.
            connection = self._idle.pop() if self._idle else self._new()
            self._busy.add(connection)
        return connection

    def _new(self) -> http.client.HTTPConnection:
        host, port = self._address
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=self._seconds)
        return http.client.HTTPSConnection(host, port, timeout=self._seconds, context=self._tls)

    def _give_back(
        self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
    ) -> None:
        with self._lock:
            is_kept = len(self._idle) < IDLE_MAX and not self._is_closed
            self._busy.discard(connection)
            # What is left of an answer would be taken for the beginning of the next one.
            if is_kept and answer.isclosed() and not answer.will_close:
                self._idle.append(connection)
                return
        connection.close()


class _PeerWriter(LedgerWriter):
    """An object on its way to a peer, which checks each part before it takes it.

    A part that is longer than a request may be is sent in `pieces` of equal length.
    """

    def __init__(self, store: PeerStore, ledger: PartLedger) -> None:
        super().__init__(ledger)
        self._store = store
        self._upload = ""
        pieces = -(-self.part_nbytes // BODY_NBYTES_MAX)
        # Of equal length, so that the number of a piece follows from that of its part.
        while self.part_nbytes % pieces:
            pieces += 1
        self._pieces = pieces
        self._piece_nbytes = self.part_nbytes // pieces

    def __enter__(self) -> _PeerWriter:
        ledger = self._ledger
        self._upload = self._store._call(
            "POST",
            "/begin",
            _name,
            key=ledger.key,
            nbytes=f"{ledger.nbytes}",
            part=f"{self._piece_nbytes}",
        )
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._ledger.claim(index, buffers)
        views = flat_views(buffers)
        try:
            number = index * self._pieces
            while views:
                piece = take_front(views, self._piece_nbytes)
                views = drop_front(views, self._piece_nbytes)
                self._send("PUT", "/part", piece, upload=self._upload, index=f"{number}")
                number += 1
        except BaseException:
            self._ledger.release(index)
            raise

    def shorten(self, nbytes: int) -> None:
        super().shorten(nbytes)
        self._send("POST", "/shorten", upload=self._upload, nbytes=f"{nbytes}")

    def _publish(self) -> None:
        store, ledger, sent = self._store, self._ledger, 0

        def send() -> None:
            nonlocal sent
            sent += 1
            store.request("POST", "/end", upload=self._upload)

        def is_ours() -> bool:
            # An upload that is over when its end is repeated has been published, or given up.
            return sent > 1 and store.info(ledger.key).nbytes == ledger.nbytes

        run_publishing(store.policy, send, is_ours)

    def _discard(self) -> None:
        # One attempt: a peer that does not answer gives uploads up by itself.
        with suppress(StorageError):
            self._store.request("DELETE", "/part", upload=self._upload)

    def _send(self, method: str, path: str, body: Sequence[memoryview] = (), **fields: str) -> Any:
        store = self._store
        return store.policy.run(lambda: store.request(method, path, body=body, **fields))


def _object(key: str) -> str:
    return OBJECTS + quote(key)


def _length_of(answer: http.client.HTTPResponse) -> int:
    """An answer's length. Raises ValueError without one: it might never end."""
    if answer.length is None:
        raise ValueError("an answer without a length")
    return answer.length


def _all_of(answer: http.client.HTTPResponse) -> bytes:
    """The bytes of an answer. Memory is taken as they come: its length may be a lie."""
    if _length_of(answer) <= PIECE_NBYTES:
        return answer.read()
    pieces = []
    while piece := answer.read(PIECE_NBYTES):
        pieces.append(piece)
    if answer.length:
        raise ValueError(f"an answer that ended {answer.length} bytes early")
    return b"".join(pieces)


def _filled(answer: http.client.HTTPResponse, view: memoryview) -> int:
    """How many bytes of `view` were filled: fewer than all where the answer ends."""
    done = 0
    while done < view.nbytes and (got := answer.readinto(view[done:])):
        done += got
    return done


def _exactly(answer: http.client.HTTPResponse, nbytes: int, until: float) -> bytes:
    """The next bytes of an answer. Raises ValueError where it ends before, or is too slow."""
    pieces, left = [], nbytes
    while left:
        # What has come, and no more: a peer that sends byte by byte must not outlast `until`.
        piece = answer.read1(min(left, MIB))
        if not piece or time.monotonic() > until:
            raise ValueError(f"an answer that {'is too slow' if piece else 'ended early'}")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _checked(answer: http.client.HTTPResponse, nbytes: int, until: float) -> bytes:
    data = _exactly(answer, nbytes, until)
    if _exactly(answer, CHECKSUM.size, until) != checksum_of([memoryview(data)]):
        raise ValueError("the bytes that came are not those that were sent")
    return data


def _value(answer: http.client.HTTPResponse) -> Any:
    """What an answer that is no object says."""
    if _length_of(answer) > ANSWER_NBYTES_MAX:
        raise ValueError(f"an answer of {answer.length} bytes")
    return json.loads(answer.read())


# Checks of what peers say; each raises ValueError for anything else.


def info_of(row: Any) -> ObjectInfo:
    """An object as a peer describes it. Raises ValueError."""
    if isinstance(row, list) and [type(each) for each in row[:2]] == [str, int] and len(row) == 3:
        key, nbytes, modified_unix = check_key(row[0]), *row[1:]
        if nbytes >= 0 and type(modified_unix) in (int, float) and abs(modified_unix) < 1e12:
            return ObjectInfo(key, nbytes, float(modified_unix))
    raise ValueError(f"no object is described by {row!r:.100}")


def _page(prefix: str, after: str, rows: Any) -> list[ObjectInfo]:
    """A page of a listing. In order, or a peer that repeats itself would be read for ever."""
    if not isinstance(rows, list) or len(rows) > LIST_MAX:
        raise ValueError(f"no list of objects: {rows!r:.100}")
    infos = [info_of(row) for row in rows]
    keys = [after, *(info.key for info in infos)]
    if any(a >= b or not b.startswith(prefix) for a, b in pairwise(keys)):
        raise ValueError(f"a listing of {prefix!r} after {after!r} that is out of order")
    return infos


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"no number: {value!r:.100}")
    return value


def _name(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"no name: {value!r:.100}")
    return value


def _said(error: BaseException) -> str:
    """What is wrong with a connection; no header of a request is in it."""
    return f"{type(error).__name__}: {error!s:.200}"
