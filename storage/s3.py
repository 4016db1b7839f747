"""Objects in an S3 bucket, through s3fs: the only file that uses it.

Of s3fs we use the session, the credentials and the single request. Not its files: `with fs.open()`
publishes a truncated object when the block raises. Not its listing cache: others write too. Not its
retries: it would repeat a conditional write whose first reply was lost.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import aiohttp
import botocore.exceptions as boto
import s3fs
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError

from storage.errors import (
    AccessDeniedError,
    InvalidUrlError,
    KeyExistsError,
    KeyNotFoundError,
    NoSpaceError,
    OutcomeUnknownError,
    ShortReadError,
    StorageError,
    TransientError,
)
from storage.keys import check_key, check_prefix
from storage.ranges import PartLedger, flat_views, part_count
from storage.retry import RetryPolicy
from storage.store import ByteRange, ExclusiveCreate, ObjectInfo, ObjectWriter, Store

MiB = 1024 * 1024
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_PART_NBYTES_MIN = 5 * MiB
_PARTS_MAX = 10_000
_PREFIX_BYTES_MAX = 255

_READ_CHUNK_BYTES = MiB
_WRITE_ID = "write-id"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{1,254}")

_DENIED_CODES = {
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
}
# The server says that it has not even begun, so that even a conditional write may be repeated.
_THROTTLED_CODES = {
    "RequestLimitExceeded",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_NO_SPACE_CODES = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
)
# No connection, hence no request.
_NEVER_SENT = (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)
_LOST_ON_THE_WAY = (
    boto.HTTPClientError,
    boto.IncompleteReadError,
    aiohttp.ClientError,
    FSTimeoutError,
    TimeoutError,
    ConnectionError,
)


def open_s3(url: str, place: str, options: dict[str, Any], retry: RetryPolicy) -> S3Store:
    """The store at `place`, "BUCKET" or "BUCKET/PREFIX". Raises InvalidUrlError."""
    bucket, _, prefix = place.partition("/")
    if "@" in bucket or "?" in place:
        raise InvalidUrlError(
            "an s3 url holds a bucket and a prefix only; pass credentials and endpoint_url as "
            "storage options, in the environment, or in ~/.aws"
        )
    if not _BUCKET.fullmatch(bucket):
        raise InvalidUrlError(f"{url!r}: {bucket!r} is no bucket name; write s3://BUCKET/PREFIX")
    prefix = prefix.strip("/")
    if prefix:
        check_key(prefix)
        if len(prefix.encode()) > _PREFIX_BYTES_MAX:
            raise InvalidUrlError(f"{url!r}: the prefix has more than {_PREFIX_BYTES_MAX} bytes")
    known = {*inspect.signature(s3fs.S3FileSystem.__init__).parameters, "profile"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise InvalidUrlError(
            f"s3://{place}: unknown storage options {', '.join(unknown)}; "
            "known are those of s3fs.S3FileSystem, such as endpoint_url, key, secret, anon"
        )
    return S3Store(bucket, prefix, options=options, retry=retry)


class S3Store(Store):
    """Objects below `prefix` of `bucket`. `options` are those of s3fs.S3FileSystem.

    Exclusive creation is asked for with `If-None-Match: *`. AWS honours it for every object; Ceph
    does only for those of one part; some servers ignore it altogether: probe before committing.
    `retry` is for publishing an object of `create`, which only this class knows how to repeat.
    """

    exclusive_create = ExclusiveCreate.CONDITIONAL
    part_nbytes_min = _PART_NBYTES_MIN

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        options: dict[str, Any],
        retry: RetryPolicy,
        keys_per_page: int = 1000,
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self.retry = retry
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self._options = _with_defaults(options)
        self._keys_per_page = keys_per_page
        self._lock = threading.Lock()
        self._client: tuple[int, s3fs.S3FileSystem] | None = None

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if byte_range is None:
            chunks: list[bytes] = []
            self._run("read", key, self._read_all, self._full(key), chunks)
            return b"".join(chunks)
        target = bytearray(byte_range.nbytes)
        self.get_into(key, byte_range.start, [memoryview(target)])
        return bytes(target)

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        full_key = self._full(key)
        views = flat_views(buffers)
        nbytes = sum(view.nbytes for view in views)
        if nbytes:
            got = self._run("read", key, self._read_range, full_key, start, views)
        else:
            got = 0
            nbytes = max(0, start - self.info(key).nbytes)  # HTTP has no empty range
        if got != nbytes:
            raise ShortReadError(
                f"read {key} in {self.url}: bytes {start} to {start + nbytes} were asked for, "
                f"{got} of these {nbytes} came"
            )

    def create(
        self,
        key: str,
        nbytes: int,
        *,
        part_nbytes: int,
        durable: bool = True,
        direct: bool = False,
    ) -> S3Writer:
        ledger = PartLedger(check_key(key), nbytes, part_nbytes)
        parts = part_count(nbytes, part_nbytes)
        if parts > 1 and (part_nbytes < _PART_NBYTES_MIN or parts > _PARTS_MAX):
            raise ValueError(
                f"{key}: {parts} parts of {part_nbytes} bytes; S3 takes at most {_PARTS_MAX} parts "
                f"of at least {_PART_NBYTES_MIN}: use larger parts or smaller objects"
            )
        return S3Writer(self, ledger)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._call(
            "create",
            key,
            "put_object",
            may_be_repeated=False,
            Key=self._full(key),
            Body=bytes(data),
            IfNoneMatch="*",
        )

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        more: dict[str, Any] = {}
        if after:
            more["StartAfter"] = self._prefix + after
        while True:
            page = self._call(
                "list",
                prefix,
                "list_objects_v2",
                Prefix=self._prefix + check_prefix(prefix),
                MaxKeys=self._keys_per_page,
                **more,
            )
            for found in page.get("Contents", ()):
                key = found["Key"][len(self._prefix) :]
                # Consoles make "directories": empty objects whose name ends with a slash.
                if key > after and not key.endswith("/"):
                    yield ObjectInfo(key, found["Size"], found["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def info(self, key: str) -> ObjectInfo:
        head = self._call("info", key, "head_object", Key=self._full(key))
        return ObjectInfo(key, head["ContentLength"], head["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        with contextlib.suppress(KeyNotFoundError):
            self._call("delete", key, "delete_object", Key=self._full(key))

    def sync(self, keys: Iterable[str]) -> None:
        """S3 answers a write when it is durable; there is nothing to wait for."""

    def abort_unfinished(self, prefix: str) -> int:
        wanted = self._prefix + check_prefix(prefix)
        aborted = 0
        more: dict[str, Any] = {}
        while True:
            page = self._call("abort", prefix, "list_multipart_uploads", Prefix=wanted, **more)
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(wanted):
                    self.abort_upload(upload["Key"], upload["UploadId"])
                    aborted += 1
            if not page.get("IsTruncated"):
                return aborted
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def close(self) -> None:
        with self._lock:
            self._client = None

    def abort_upload(self, full_key: str, upload_id: str) -> None:
        with contextlib.suppress(KeyNotFoundError):  # another one was faster
            self._call(
                "abort", full_key, "abort_multipart_upload", Key=full_key, UploadId=upload_id
            )

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _filesystem(self) -> s3fs.S3FileSystem:
        # fsspec's event loop runs in a thread, which a forked child does not have.
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                filesystem = s3fs.S3FileSystem(**self._options)
                filesystem.retries = 1
                self._client = (os.getpid(), filesystem)
            return self._client[1]

    def _call(
        self, operation: str, key: str, method: str, *, may_be_repeated: bool = True, **kwargs: Any
    ) -> Any:
        """One request, sent once."""
        try:
            filesystem = self._filesystem()
            return sync(filesystem.loop, filesystem._call_s3, method, Bucket=self._bucket, **kwargs)
        except Exception as error:
            raise self._translated(error, operation, key, may_be_repeated) from error

    def _run(self, operation: str, key: str, coroutine: Any, *args: Any) -> Any:
        try:
            filesystem = self._filesystem()
            return sync(filesystem.loop, coroutine, filesystem, *args)
        except Exception as error:
            raise self._translated(error, operation, key, True) from error

    async def _read_all(
        self, filesystem: s3fs.S3FileSystem, full_key: str, chunks: Sequence[bytes]
    ) -> None:
        response = await filesystem._call_s3("get_object", Bucket=self._bucket, Key=full_key)
        async with response["Body"] as body:
            chunks.append(await body.read())  # type: ignore[attr-defined]

    async def _read_range(
        self,
        filesystem: s3fs.S3FileSystem,
        full_key: str,
        start: int,
        views: Sequence[memoryview],
    ) -> int:
        """How many bytes came; 0 when there are none at `start`."""
        wanted = sum(view.nbytes for view in views)
        response = await filesystem._call_s3(
            "get_object",
            Bucket=self._bucket,
            Key=full_key,
            Range=f"bytes={start}-{start + wanted - 1}",
        )
        async with response["Body"] as body:
            if response["ContentLength"] > wanted:
                raise StorageError(f"read {full_key} in {self.url}: the server ignored the range")
            return await _fill(body, views)

    def _translated(
        self, error: Exception, operation: str, key: str, may_be_repeated: bool
    ) -> StorageError:
        if isinstance(error, StorageError):
            return error
        cause = error.__cause__ if isinstance(error.__cause__, boto.ClientError) else error
        where = f"{operation} {key} in {self.url}"
        if isinstance(cause, boto.ClientError):
            return self._answered(cause, where, may_be_repeated)
        if isinstance(cause, _NO_CREDENTIALS):
            return AccessDeniedError(
                f"{where}: {cause}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, "
                "or pass anon=True"
            )
        if isinstance(cause, _NEVER_SENT):
            return TransientError(f"{where}: {cause}; is endpoint_url right?")
        if isinstance(cause, _LOST_ON_THE_WAY):
            text = f"{where}: {type(cause).__name__}: {cause}"
            return TransientError(text) if may_be_repeated else OutcomeUnknownError(text)
        if isinstance(cause, (boto.ParamValidationError, boto.InvalidRegionError)):
            return InvalidUrlError(f"{where}: {cause}")
        return StorageError(f"{where}: {type(cause).__name__}: {cause}")

    def _answered(self, error: boto.ClientError, where: str, may_be_repeated: bool) -> StorageError:
        """What an answer of the server means."""
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        text = f"{where}: {error}"
        if code == "NoSuchBucket":
            return InvalidUrlError(f"{where}: there is no bucket {self._bucket!r}; create it first")
        if code in _NO_SPACE_CODES or status == 507:
            return NoSpaceError(text)
        if code in _THROTTLED_CODES or status in (409, 429):
            return TransientError(text)
        if status == 412 or code == "PreconditionFailed":
            return KeyExistsError(f"{where}: exists already")
        if status == 416 or code == "InvalidRange":
            return ShortReadError(f"{where}: the object ends before the bytes asked for")
        if status == 404 or code in ("NoSuchKey", "NoSuchUpload"):
            return KeyNotFoundError(f"{where}: no such object")
        if status in (401, 403) or code in _DENIED_CODES:
            return AccessDeniedError(f"{text}; check the credentials and the bucket's policy")
        if status >= 500 or code == "RequestTimeout":
            return TransientError(text) if may_be_repeated else OutcomeUnknownError(text)
        return StorageError(text)


class S3Writer(ObjectWriter):
    """An object of one part is one PUT at the end; a larger one is a multi-part upload.

    A process that dies leaves an upload that no listing shows and `abort_unfinished` removes.
    """

    def __init__(self, store: S3Store, ledger: PartLedger) -> None:
        self.part_nbytes = ledger.part_nbytes
        self._store = store
        self._ledger = ledger
        self._full_key = store._full(ledger.key)
        # Read back to find out whether it was our own request that made the object.
        self._metadata = {_WRITE_ID: uuid.uuid4().hex}
        self._small = b""
        self._upload_id = ""
        self._etags: dict[int, str] = {}

    def __enter__(self) -> S3Writer:
        if part_count(self._ledger.nbytes, self.part_nbytes) > 1:
            self._upload_id = self._call("create_multipart_upload", Metadata=self._metadata)[
                "UploadId"
            ]
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._ledger.claim(index, buffers)
        body = b"".join(flat_views(buffers))  # s3fs takes no memoryview; the one copy there is
        if not self._upload_id:
            self._small = body
            return
        try:
            answer = self._call(
                "upload_part", UploadId=self._upload_id, PartNumber=index + 1, Body=body
            )
        except BaseException:
            self._ledger.release(index)
            raise
        self._etags[index] = answer["ETag"]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        published = False
        try:
            if kind is None:
                self._ledger.check_complete()
                self._publish()
                published = True
        finally:
            if self._upload_id and not published:
                # A failure here must not hide the first one; abort_unfinished finds the rest.
                with contextlib.suppress(StorageError):
                    self._store.abort_upload(self._full_key, self._upload_id)

    def _publish(self) -> None:
        requests_sent = 0

        def attempt() -> None:
            nonlocal requests_sent
            requests_sent += 1
            try:
                self._send()
            except (KeyExistsError, KeyNotFoundError):
                # Of a request whose answer was lost we learn by its repetition: the object is
                # there, or the upload is gone.
                if requests_sent == 1 or not self._is_ours():
                    raise

        try:
            self._store.retry.run(attempt)
        except TransientError as error:
            raise OutcomeUnknownError(f"{error}; the object may exist") from error

    def _send(self) -> None:
        if not self._upload_id:
            self._call("put_object", Body=self._small, Metadata=self._metadata, IfNoneMatch="*")
            return
        parts = [
            {"PartNumber": index + 1, "ETag": self._etags[index]} for index in sorted(self._etags)
        ]
        self._call(
            "complete_multipart_upload",
            UploadId=self._upload_id,
            MultipartUpload={"Parts": parts},
            IfNoneMatch="*",
        )

    def _is_ours(self) -> bool:
        try:
            head = self._call("head_object")
        except KeyNotFoundError:
            return False
        return bool(head.get("Metadata", {}).get(_WRITE_ID) == self._metadata[_WRITE_ID])

    def _call(self, method: str, **kwargs: Any) -> Any:
        return self._store._call("create", self._ledger.key, method, Key=self._full_key, **kwargs)


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


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    config = {
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
        "retries": {"total_max_attempts": 1},  # storage/retry.py repeats, nobody else
        # Our own checksums cover the data, and many servers do not know these headers.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **options.get("config_kwargs", {}),
    }
    # Instances of one's own: what others set or cached on a shared one must not reach us.
    return {
        **options,
        "config_kwargs": config,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }
