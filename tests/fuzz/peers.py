"""Targets: what a peer may send. Requests of any bytes to a server, and answers to a client.

No network is needed: connections are objects that give the input and keep what is written. A read
takes memory for what it asks for, as from a socket, not for what comes.
"""

from __future__ import annotations

import atexit
import http.client
import io
import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from storage.errors import StorageError
from storage.local import LocalStore
from storage.peers.relay import RECORDS, RelayStore
from storage.peers.server import PeerServer
from storage.peers.store import PeerStore, checksum_of
from storage.retry import NO_RETRY
from storage.store import ByteRange, ObjectInfo, check_key
from tests.fuzz.target import Target
from tests.fuzz.tiers import IN_MEMORY

TOKEN = "0123456789abcdef"
SECRET, HELD = b"forty-two is not for you", b"what the directory holds"
BOUND = 1000
_LENGTH = re.compile(rb"\r\nContent-Length: ([0-9]{1,5})\r\n")


class _Incoming(io.RawIOBase):
    """What a socket gives, piece by piece."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count


class _Outgoing(io.RawIOBase):
    """What a socket takes."""

    def __init__(self, sent: bytearray) -> None:
        self._sent = sent

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._sent += data
        return len(data)


class _Connection:
    """One connection, for a server as for a client."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.sent = bytearray()

    def makefile(self, mode: str, buffering: int = -1) -> Any:
        if "w" in mode:
            return io.BufferedWriter(_Outgoing(self.sent))
        return io.BufferedReader(_Incoming(self._data))

    def sendall(self, data: Any) -> None:
        self.sent += data

    def sendfile(self, file: Any, start: int, count: int) -> int:
        data = os.pread(file.fileno(), count, start)
        self.sent += data
        return len(data)

    def settimeout(self, seconds: float) -> None: ...

    def setsockopt(self, *_: Any) -> None: ...

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None: ...


# Requests -----------------------------------------------------------------------------------------


class _Server(PeerServer):
    """Uploads have names that the next request of an input can know."""

    def begin(self, context: Any) -> str:
        name = super().begin(context)
        with self._lock:
            number = str(len(self._uploads) - 1)
            self._uploads[number] = self._uploads.pop(name)
        return number

    def clear(self) -> None:
        """As before the first request."""
        with self._lock:
            uploads, self._uploads = list(self._uploads.values()), {}
        for upload in uploads:
            with suppress(StorageError):
                upload.give_up()


@cache
def _server() -> tuple[_Server, Path]:
    folder = Path(tempfile.mkdtemp(prefix="fuzzed-peer-", dir=IN_MEMORY))
    server = _Server(LocalStore(str(folder / "tier")), TOKEN, "127.0.0.1")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return server, folder


def _request(line: str, *headers: str, body: bytes = b"", token: str = TOKEN) -> bytes:
    head = [line + " HTTP/1.1", f"Authorization: Bearer {token}", *headers]
    head += [f"Content-Length: {len(body)}"] * bool(body)
    return "\r\n".join([*head, "", ""]).encode() + body


def _requests() -> list[bytes]:
    part, rest = b"abc", bytes(4)  # each body ends with its checksum, which `_sealed` makes
    upload = [
        _request("POST /begin?key=steps/a&nbytes=6&part=3"),
        _request("PUT /part?upload=0&index=1", body=part + rest),
        _request("PUT /part?upload=0&index=0", body=part + rest),
        _request("POST /end?upload=0"),
        _request("GET /o/steps/a"),
    ]
    shorter = [
        _request("POST /begin?key=b&nbytes=9&part=3"),
        _request("POST /shorten?upload=0&nbytes=3"),
        _request("PUT /part?upload=0&index=0", body=part + rest),
        _request("DELETE /part?upload=0"),
    ]
    looks = [
        _request("GET /o/held", "Range: bytes=3-9"),
        _request("GET /info?key=held"),
        _request("GET /list?prefix=&after=a"),
        _request("POST /abort?prefix=steps/"),
        _request("DELETE /o/held"),
    ]
    foreign = [
        _request("GET /o/../outside"),
        _request("GET /o/%2e%2e/outside"),
        _request("PUT /o/..%2foutside", body=b"x" + rest),
        _request("GET /info?key=../outside"),
        _request("GET /list?prefix=../"),
        _request("POST /begin?key=../x&nbytes=1&part=1"),
        _request("GET /o/held", token="another"),
    ]
    return [b"".join(each) for each in (upload, shorter, looks, foreign)]


def _sealed_bodies(data: bytes) -> bytes:
    """With the checksums of all bodies, as far as requests can be told apart."""
    sealed, start = bytearray(data), 0
    while (end := data.find(b"\r\n\r\n", start)) >= 0:
        match = _LENGTH.search(data, start, end + 2)
        start = end + 4
        length = int(match[1]) if match else 0
        if 4 <= length <= len(data) - start:
            body = memoryview(sealed)[start : start + length - 4]
            checksum = checksum_of([body])
            body.release()
            sealed[start + length - 4 : start + length] = checksum
        start += length
    return bytes(sealed)


def _answer_requests(data: bytes) -> None:
    server, folder = _server()
    shutil.rmtree(folder / "tier", ignore_errors=True)
    (folder / "tier").mkdir()
    (folder / "tier" / "held").write_bytes(HELD)
    (folder / "outside").write_bytes(SECRET)
    server.store = LocalStore(str(folder / "tier"))
    connection: Any = _Connection(data)
    try:
        # What else it raises ends in `handle_error`, which writes a traceback.
        with suppress(OSError, ValueError):
            server.finish_request(connection, ("127.0.0.1", 1))
    finally:
        server.clear()
        server.store.close()
    assert SECRET not in connection.sent and (folder / "outside").read_bytes() == SECRET
    assert sorted(path.name for path in folder.iterdir()) == ["outside", "tier"]
    unfinished = [path for path in folder.rglob(".tmp-*")]
    assert not unfinished, unfinished
    if TOKEN.encode() not in data:
        assert HELD not in connection.sent and b" 200 OK" not in connection.sent
        assert [path.name for path in (folder / "tier").iterdir()] == ["held"]


# Answers ------------------------------------------------------------------------------------------


class _Liar(PeerStore):
    """A store whose peer gives one answer to all requests."""

    def __init__(self, answer: bytes) -> None:
        super().__init__("127.0.0.1", 1, TOKEN, policy=NO_RETRY)
        self._said = answer

    def _taken(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", 1)
        connection.sock = _Connection(self._said)  # type: ignore[assignment]
        return connection


def _answer(status: str, body: bytes, *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def _answers() -> list[bytes]:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [
        _answer("200 OK", b"null"),
        _answer("206 Partial Content", b"0123456789"),
        _answer("200 OK", b'["held", 24, 1750000000.5]'),
        _answer("200 OK", b'[["a", 1, 1.5], ["b", 2, 2.5]]'),
        _answer("200 OK", b"[" + b",".join([b'["a",1,1]'] * 1000) + b"]"),
        _answer("200 OK", b'"0"', "Connection: close"),
        _answer("200 OK", b"3"),
        _answer("404 Not Found", b'["KeyNotFoundError", "no such object"]'),
        _answer("409 Conflict", b'["KeyExistsError", "is there"]'),
        _answer("416 Range", b'["ShortReadError", "too short"]'),
        _answer("200 OK", b"x" * (BOUND + 1)),
        chunked + b"5\r\nhello\r\n0\r\n\r\n",
        chunked + b"7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 67108864\r\n\r\n[",
    ]


def _read_answers(data: bytes) -> None:
    """Every method of the store: each returns what it promises, or raises StorageError."""
    store = _Liar(data)
    with suppress(StorageError):
        assert type(store.get("held")) is bytes
    with suppress(StorageError):
        assert len(store.get_bounded("held", BOUND)) <= BOUND
    with suppress(StorageError):
        assert len(store.get("held", ByteRange(3, 13))) == 10
    with suppress(StorageError):
        store.get("held", ByteRange(5, 5))
    with suppress(StorageError):
        _check_info(store.info("held"))
    with suppress(StorageError):
        keys = []
        for info in islice(store.list("", after="0"), 3000):
            _check_info(info)
            keys.append(info.key)
        assert keys == sorted(set(keys)) and all(key > "0" for key in keys)
    with suppress(StorageError):
        store.put_if_absent("new", b"bytes")
    with suppress(StorageError), store.create("new", 6, part_nbytes=3) as writer:
        writer.write_part(0, [memoryview(b"abc")])
        writer.shorten(3)
    with suppress(StorageError):
        store.delete("held")
    with suppress(StorageError):
        assert type(store.abort_unfinished("")) is int
    with suppress(StorageError):
        assert type(store.exists("held")) is bool
    store.close()


def _news() -> list[bytes]:
    """Answers of hosts that serve a root: names and small objects, and a block."""
    added = [["FORMAT", 5, 1.5], [f"{RECORDS}{0:020d}", 3, 1.5], ["steps/a", 9, 2.0]]
    news = {"state": "s.1", "all": True, "added": added, "removed": ["x"]}
    blocks = [("FORMAT", b"hello"), (f"{RECORDS}{0:020d}", b"one")]
    return [_blocks(news, blocks), _blocks({}, [("steps/a", b"123456789")]), _blocks(news, [])]


def _blocks(head: dict[str, Any], blocks: list[tuple[str, bytes]]) -> bytes:
    parts = [(key, 0, len(data)) for key, data in blocks]
    text = json.dumps({**head, "parts": parts}).encode()
    every = [text, *(data for _, data in blocks)]
    body = b"".join(data + checksum_of([memoryview(data)]) for data in every)
    return _answer("200 OK", len(text).to_bytes(4, "little") + body)


def _sealed_news(data: bytes) -> bytes:
    """With the checksum of the head, so that what it says is looked at."""
    start = data.find(b"\r\n\r\n") + 8
    end = start + int.from_bytes(data[start - 4 : start], "little")
    if start < 8 or end + 4 > len(data):
        return data
    return data[:end] + checksum_of([memoryview(data)[start:end]]) + data[end + 4 :]


def _read_news(data: bytes) -> None:
    """A relay whose parent gives one answer to all: what it takes has valid names and lengths."""
    relay = RelayStore([_Liar(data)], "", cache_nbytes_max=BOUND)
    try:
        with suppress(StorageError):
            relay.refresh()
        with suppress(StorageError):
            for info in islice(relay.list(""), 100):
                check_key(info.key)
                _check_info(info)
                with suppress(StorageError):
                    assert len(relay.get_bounded(info.key, BOUND)) == info.nbytes
        assert relay._cached_nbytes == sum(map(len, relay._blocks.values())) <= BOUND
    finally:
        relay.close()


def _check_info(info: ObjectInfo) -> None:
    assert [type(value) for value in info] == [str, int, float] and info.nbytes >= 0


TARGETS = (
    Target("peers.request", _answer_requests, _requests, _sealed_bodies, refusals=()),
    Target("peers.answer", _read_answers, _answers, refusals=(StorageError,)),
    Target("peers.news", _read_news, _news, _sealed_news, refusals=(StorageError,)),
)
