"""Requests to S3 by s3fs, one method each for what stores do with it: the only file that sends by
it.

Of s3fs we use the session, the credentials and the single request. Not its files: `with fs.open()`
publishes a truncated object when the block raises. Not its listing cache: others write too. Not its
retries: it would repeat a conditional write whose first reply was lost.
"""

from __future__ import annotations

import base64
import contextlib
import os
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import crc32c
import s3fs
from fsspec.asyn import sync

from storage.errors import StorageError
from storage.forks import ForkSafeLock
from storage.hedging import Hedger, Like
from storage.http import HttpStore
from storage.keys import check_key
from storage.retry import RetryPolicy
from storage.s3.answers import translated
from storage.s3.facts import ClientFacts, ask_client
from storage.s3.options import unusual_option, with_defaults
from storage.store import check_bound

MiB = 1024 * 1024

T = TypeVar("T")
Again = Callable[[s3fs.S3FileSystem], Awaitable[T]]
"""A request that is sent a second time, on the event loop of the client."""

_READ_CHUNK_BYTES = MiB


class S3Requests(HttpStore):
    """How requests to a bucket are sent; `storage.s3.store` says what for."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        options: dict[str, Any],
        retry: RetryPolicy,
        checksums: bool = True,
        keys_per_page: int = 1000,
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self.retry = retry
        self.hedger = Hedger(retry.patience)
        self.checksums = checksums
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self._given = options
        self._options = with_defaults(options)
        self._keys_per_page = keys_per_page
        self._lock = ForkSafeLock()
        self._client: tuple[int, s3fs.S3FileSystem] | None = None

    # What the fast client overrides:

    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        read = partial(self._read_all, key=key, nbytes_max=nbytes_max)
        return self.raced(Like("get", nbytes_max or 0), f"read {key}", read, read)

    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        """Fill `views` from `start` on; how many bytes came, 0 when there are none at `start`."""
        nbytes = sum(view.nbytes for view in views)
        read: Again[int | memoryview] = partial(self._read_range, key=key, start=start, views=views)
        again = partial(self._read_copy, key=key, start=start, nbytes=nbytes)
        return filled(self.raced(Like("read", nbytes), f"read {key}", read, again), views)

    def put_new(
        self,
        key: str,
        body: bytes,
        metadata: dict[str, str],
        again: Again[object],
        *,
        may_be_repeated: bool,
    ) -> None:
        """A conditional PUT, and `again` when it takes very long.

        Without `may_be_repeated`, OutcomeUnknownError says that the first one may have happened.
        """
        arguments = self.put_arguments(key, body, metadata)
        first = partial(
            self.send, "create", key, "put_object", may_be_repeated=may_be_repeated, **arguments
        )
        self.raced(Like("put", len(body)), f"create {key}", first, again)

    def put_part(
        self, key: str, upload_id: str, index: int, views: Sequence[memoryview]
    ) -> dict[str, Any]:
        """Send a part of an upload: what `complete_multipart_upload` needs of it."""
        put = partial(self._put_part_copy, key, upload_id, index, views)
        nbytes = sum(view.nbytes for view in views)
        return self.raced(Like("part", nbytes), f"write part {index + 1} of {key}", put, put)

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

    def put_arguments(self, key: str, body: bytes, metadata: dict[str, str]) -> dict[str, Any]:
        """Those of `put_object` for an object that must be new."""
        return {
            "Key": self._full(key),
            "Body": body,
            "Metadata": metadata,
            "IfNoneMatch": "*",
            **self.checksum_of(body),
        }

    # What the fast client needs:

    def unusual_option(self) -> str:
        """The first storage option that only s3fs can honour; "" when there is none."""
        return unusual_option(self._given)

    def client_facts(self) -> ClientFacts:
        """Where the s3fs client sends its requests and how it signs them. Sends nothing."""
        try:
            filesystem = self._filesystem()
            facts: ClientFacts = sync(filesystem.loop, ask_client, filesystem, self._bucket)
            return facts
        except StorageError:
            raise
        except Exception as error:
            raise translated(error, self.url, "open", "", True) from error

    def full_key(self, key: str) -> str:
        """The key in the bucket."""
        return self._full(key)

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _filesystem(self) -> s3fs.S3FileSystem:
        # fsspec's event loop runs in a thread, which a forked child does not have.
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                filesystem = s3fs.S3FileSystem(**self._options)
                filesystem.retries = 1
                sync(filesystem.loop, _send_once, filesystem)
                self._client = (os.getpid(), filesystem)
            return self._client[1]

    def _call(
        self,
        operation: str,
        key: str,
        method: str,
        *,
        like: Like | None = None,
        **kwargs: Any,
    ) -> Any:
        """One request; sent once where `like` is None."""
        send = partial(self.send, operation, key, method, **kwargs)
        if like is not None:
            return self.raced(like, f"{operation} {key}", send, send)
        return self._run(operation, key, kwargs.get("may_be_repeated", True), send)

    def raced(self, like: Like, what: str, send: Again[T], again: Again[T]) -> T:
        """The first answer to a request, which is sent again when it takes very long."""

        async def race(filesystem: s3fs.S3FileSystem) -> T:
            return await self.hedger.run(
                like, f"{what} in {self.url}", partial(send, filesystem), partial(again, filesystem)
            )

        operation, _, key = what.partition(" ")
        return self._run(operation, key, True, race)

    def _run(self, operation: str, key: str, may_be_repeated: bool, coroutine: Again[T]) -> T:
        try:
            filesystem = self._filesystem()
            result: T = sync(filesystem.loop, coroutine, filesystem)
            return result
        except StorageError:
            raise
        except Exception as error:
            raise translated(error, self.url, operation, key, may_be_repeated) from error

    async def send(
        self,
        operation: str,
        key: str,
        method: str,
        filesystem: s3fs.S3FileSystem,
        *,
        may_be_repeated: bool = True,
        **kwargs: Any,
    ) -> Any:
        """One request, sent once."""
        with self._translating(operation, key, may_be_repeated):
            return await filesystem._call_s3(method, Bucket=self._bucket, **kwargs)

    @contextlib.contextmanager
    def _translating(
        self, operation: str, key: str, may_be_repeated: bool = True
    ) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise translated(error, self.url, operation, key, may_be_repeated) from error

    async def _read_all(
        self, filesystem: s3fs.S3FileSystem, *, key: str, nbytes_max: int | None
    ) -> bytes:
        response = await self.send("read", key, "get_object", filesystem, Key=self._full(key))
        with self._translating("read", key):
            async with response["Body"] as body:
                # Before the body is read: a hostile object may be of any size.
                check_bound(self.url, key, response["ContentLength"], nbytes_max)
                return bytes(await body.read())

    async def _read_range(
        self, filesystem: s3fs.S3FileSystem, *, key: str, start: int, views: Sequence[memoryview]
    ) -> int:
        """How many bytes came; 0 when there are none at `start`."""
        wanted = sum(view.nbytes for view in views)
        byte_range = f"bytes={start}-{start + wanted - 1}"
        response = await self.send(
            "read", key, "get_object", filesystem, Key=self._full(key), Range=byte_range
        )
        with self._translating("read", key):
            async with response["Body"] as body:
                if response["ContentLength"] > wanted:
                    raise StorageError(f"read {key} in {self.url}: the server ignored the range")
                return await _fill(body, views)

    async def _read_copy(
        self, filesystem: s3fs.S3FileSystem, *, key: str, start: int, nbytes: int
    ) -> memoryview:
        """A range in memory of its own: two requests never fill the same."""
        target = memoryview(bytearray(nbytes))
        got = await self._read_range(filesystem, key=key, start=start, views=[target])
        return target[:got]

    async def _put_part_copy(
        self,
        key: str,
        upload_id: str,
        index: int,
        views: Sequence[memoryview],
        filesystem: s3fs.S3FileSystem,
    ) -> dict[str, Any]:
        body = b"".join(views)  # s3fs takes no memoryview; the one copy there is
        part: dict[str, Any] = {"PartNumber": index + 1, **self.checksum_of(body)}
        answer = await self.send(
            "create",
            key,
            "upload_part",
            filesystem,
            Key=self._full(key),
            UploadId=upload_id,
            Body=body,
            **part,
        )
        return {**part, "ETag": answer["ETag"]}


def filled(got: int | memoryview, views: Sequence[memoryview]) -> int:
    """How many bytes came to `views`: those that did already, or the ones in `got`, copied now."""
    if isinstance(got, int):
        return got
    left = got
    for view in views:
        size = min(view.nbytes, left.nbytes)
        view[:size] = left[:size]
        left = left[size:]
    return got.nbytes


async def _send_once(filesystem: s3fs.S3FileSystem) -> None:
    """Keep aiohttp from repeating a PUT whose kept-open connection broke: the first may have
    happened. Its switch is a private one, which may be gone some day: then it repeats once.
    """
    client = await filesystem.set_session()
    with contextlib.suppress(AttributeError):
        session = await client._endpoint.http_session._get_session(None)
        session._retry_connection = False


async def _fill(body: Any, views: Sequence[memoryview]) -> int:
    """Copy what comes into `views` in turn; returns the bytes that came, never more than fit."""
    got = 0
    for view in views:
        position = 0
        while position < view.nbytes:
            chunk = await body.read(min(_READ_CHUNK_BYTES, view.nbytes - position))
            if not chunk:
                return got
            view[position : position + len(chunk)] = chunk
            position += len(chunk)
            got += len(chunk)
    return got
