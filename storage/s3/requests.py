"""How requests to a bucket are sent; `storage.s3.store` says what for.

Small ones go through botocore, which reads their answers. Those that move objects are carried by
the thread that calls, from and into the caller's memory.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import os
import re
import struct
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import crc32c

from storage.errors import StorageError
from storage.forks import ForkSafeLock
from storage.hedging import Hedger, RequestKind
from storage.http import HttpStore
from storage.ranges import copy_to
from storage.retry import RetryPolicy
from storage.s3.answers import OVER_CODES, answered, is_elsewhere, translated
from storage.s3.client import S3Client, Transfer, with_defaults
from storage.s3.wire import WireRequest
from storage.store import check_bound, check_key

T = TypeVar("T")
Retry = Callable[[], Awaitable[T]]
"""A request that is sent a second time, on the event loop of the client."""

_REFUSAL_NBYTES_MAX = 64 << 10
_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,60})</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,300})</Message>")


class S3Requests(HttpStore):
    """The requests of one bucket, of which objects below `prefix` are ours."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        options: Mapping[str, Any],
        retry: RetryPolicy,
        transfer: Transfer | None = None,
        keys_per_page: int = 1000,
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self.retry = retry
        self.hedger = Hedger(retry.patience)
        self._transfer = transfer or Transfer()
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self._options = with_defaults(options)
        self.metadata: Mapping[str, str] = (self._options.get("s3_additional_kwargs") or {}).get(
            "Metadata", {}
        )  # of every object
        # Also where botocore's own option asks for them.
        given = self._options["config_kwargs"]["request_checksum_calculation"]
        self.checksums = self._transfer.checksums or given == "when_supported"
        self._keys_per_page = keys_per_page
        self._lock = ForkSafeLock()
        self._opened: tuple[int, S3Client] | None = None

    def client(self) -> S3Client:
        """The client of this process, made at first use."""
        # fsspec's event loop runs in a thread, which a forked child does not have.
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                client = S3Client(
                    self._bucket, self.url, self._options, self._transfer.unsigned_payload
                )
                self._opened = (os.getpid(), client)
            return self._opened[1]

    def rest(self) -> None:
        # Requests under way have the client; without them nobody has.
        with self._lock:
            self._opened = None

    def full_key(self, key: str) -> str:
        """The key in the bucket."""
        return self._prefix + check_key(key)

    def checksum_of(self, *views: bytes | memoryview) -> dict[str, str]:
        """The request arguments that send the checksum of a body: 15 GB/s, where Content-MD5 takes
        0.6.
        """
        if not self.checksums:
            return {}
        checksum = 0
        for view in views:
            checksum = crc32c.crc32c(view, checksum)
        return {"ChecksumCRC32C": base64.b64encode(struct.pack(">I", checksum)).decode("ascii")}

    # Small requests

    def call(
        self,
        operation: str,
        key: str,
        method: str,
        *,
        kind: RequestKind | None = None,
        **arguments: Any,
    ) -> Any:
        """One request; sent once where `kind` is None."""
        send = partial(self.send, operation, key, method, **arguments)
        if kind is None:
            return self._run(operation, key, send())
        return self.raced(kind, operation, key, send, send)

    def raced(
        self, kind: RequestKind, operation: str, key: str, send: Retry[T], again: Retry[T]
    ) -> T:
        """The first answer to a request, which is sent again when it takes very long."""
        what = f"{kind.name} {key} in {self.url}"
        return self._run(operation, key, self.hedger.run(kind, what, send, again))

    async def send(self, operation: str, key: str, method: str, **arguments: Any) -> Any:
        """One request, sent once."""
        try:
            return await self.client().call(method, **arguments)
        except StorageError:
            raise
        except Exception as error:
            raise translated(error, self.url, operation, key, may_be_repeated=True) from error

    def _run(self, operation: str, key: str, coroutine: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(coroutine, self.client().loop)
        try:
            return running.result()
        except StorageError:
            raise
        except Exception as error:
            raise translated(error, self.url, operation, key, may_be_repeated=True) from error
        except BaseException:
            running.cancel()
            raise

    # Requests that move objects

    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        def read(response: http.client.HTTPResponse) -> bytes:
            # Before the body is read: a hostile object may be of any size.
            expected = response.length
            if expected is not None:
                check_bound(self.url, key, expected, nbytes_max)
            # One byte more: it gives away a body that is too long and does not say so.
            data = response.read(None if nbytes_max is None else nbytes_max + 1)
            if expected is not None and len(data) < expected:
                raise ConnectionError("the answer was cut")
            check_bound(self.url, key, len(data), nbytes_max)
            return data

        send = partial(self._carried, "read", key, "get_object", {"Key": self.full_key(key)}, read)
        kind = RequestKind("get", nbytes_max or 0)
        return self._carry(kind, f"get {key}", send, self._elsewhere(send))

    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        """Fill `views` from `start` on; how many bytes came."""
        nbytes = sum(view.nbytes for view in views)
        byte_range = f"bytes={start}-{start + nbytes - 1}"
        arguments = {"Key": self.full_key(key), "Range": byte_range}

        def fill(views: Sequence[memoryview], response: http.client.HTTPResponse) -> int:
            expected = response.length
            # Some servers answer a range by 200, so that the length is what tells.
            if expected is None or expected > nbytes:
                raise StorageError(f"read {key} in {self.url}: the server ignored the range")
            got = 0
            for view in views:
                got += response.readinto(view[: expected - got])
            if got < expected:
                raise ConnectionError("the answer was cut")
            return got

        def send(request: WireRequest) -> int | memoryview:
            return self._carried(
                "read", key, "get_object", arguments, partial(fill, views), request
            )

        def send_again(request: WireRequest) -> int | memoryview:
            target = memoryview(bytearray(nbytes))  # two requests never fill the same memory
            read = partial(fill, [target])
            return target[: self._carried("read", key, "get_object", arguments, read, request)]

        kind = RequestKind("read", nbytes)
        got = self._carry(kind, f"read {key}", send, self._elsewhere(send_again))
        return got if isinstance(got, int) else copy_to(views, got, got.nbytes)

    def put_arguments(self, key: str, body: bytes, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Those of `put_object` for an object that must be new, but for its body."""
        return {
            "Key": self.full_key(key),
            "Metadata": dict(metadata),
            "IfNoneMatch": "*",
            **self.checksum_of(body),
        }

    def put_new(
        self,
        key: str,
        arguments: Mapping[str, Any],
        body: bytes,
        again: Retry[object],
        *,
        may_be_repeated: bool,
    ) -> None:
        """A PUT with those arguments, and `again` when it takes very long.

        Without `may_be_repeated`, OutcomeUnknownError says that the first one may have happened.
        """
        put = partial(self._carried, "create", key, "put_object", arguments, _tag)
        send = partial(put, body=[body] if body else [], may_be_repeated=may_be_repeated)
        self._carry(RequestKind("put", len(body)), f"put {key}", send, again)

    def put_part(
        self, key: str, upload_id: str, index: int, views: Sequence[memoryview]
    ) -> dict[str, Any]:
        """Send a part of an upload: what `complete_multipart_upload` needs of it."""
        part: dict[str, Any] = {"PartNumber": index + 1, **self.checksum_of(*views)}
        arguments = {"Key": self.full_key(key), "UploadId": upload_id, **part}

        def send(request: WireRequest) -> dict[str, Any]:
            return sent(request, views)

        def send_again(request: WireRequest) -> dict[str, Any]:
            # A copy: when the first request is answered, the memory changes.
            return sent(request, [b"".join(views)])

        def sent(request: WireRequest, body: Sequence[memoryview | bytes]) -> dict[str, Any]:
            tag = self._carried("create", key, "upload_part", arguments, _tag, request, body=body)
            return {**part, "ETag": tag}

        kind = RequestKind("part", sum(view.nbytes for view in views))
        what = f"write part {index + 1} of {key}"
        return self._carry(kind, what, send, self._elsewhere(send_again))

    def _carry(
        self, kind: RequestKind, what: str, send: Callable[[WireRequest], T], again: Retry[T]
    ) -> T:
        """Send a request from this thread; the first answer to it or to `again` counts."""
        request, loop = WireRequest(), self.client().loop
        what = f"{what} in {self.url}"
        return self.hedger.carry(kind, what, partial(send, request), again, request.drop, loop)

    def _elsewhere(self, send: Callable[[WireRequest], T]) -> Retry[T]:
        """`send` on another thread, ended when nobody waits for it any more."""

        async def again() -> T:
            request = WireRequest()
            return await self.client().in_thread(request, partial(send, request))

        return again

    def _carried(
        self,
        operation: str,
        key: str,
        method: str,
        arguments: Mapping[str, Any],
        read: Callable[[http.client.HTTPResponse], T],
        request: WireRequest,
        *,
        body: Sequence[memoryview | bytes] = (),
        may_be_repeated: bool = True,
    ) -> T:
        """What `read` makes of the good answer to a request as botocore prepares it.

        One that is refused because the bucket is in another region, or because a session is over,
        is prepared anew and sent once more.
        """
        where = f"{operation} {key} in {self.url}"
        client, sent = self.client(), 0
        while True:
            model = client.known(method, arguments)
            if model is None:
                model = self._run(operation, key, client.prepare(method, arguments))
            try:
                url, headers = model.request(arguments, body)
            except Exception as error:
                raise translated(error, self.url, operation, key, may_be_repeated=True) from error
            with client.wire.exchange(
                request, where, model.method, url, headers, body, may_be_repeated=may_be_repeated
            ) as response:
                if response.status < 300:
                    return read(response)
                status, said = response.status, response.read(_REFUSAL_NBYTES_MAX)
            code, message = (_first(pattern, said) for pattern in (_CODE, _MESSAGE))
            sent += 1
            if sent == 1 and (is_elsewhere(status, code) or code in OVER_CODES):
                self._run(operation, key, client.renew(ask_region=code not in OVER_CODES))
                continue
            # Not all of the answer: a server may repeat the whole request, session token included.
            text = f"{where}: {status}{' ' * bool(code)}{code}{': ' * bool(message)}{message}"
            raise answered(status, code, text=text, where=where, may_be_repeated=may_be_repeated)


def _tag(response: http.client.HTTPResponse) -> str:
    response.read(_REFUSAL_NBYTES_MAX)
    return response.getheader("ETag", "")


def _first(pattern: re.Pattern[bytes], said: bytes) -> str:
    match = pattern.search(said)
    return match[1].decode("utf-8", "replace") if match else ""
