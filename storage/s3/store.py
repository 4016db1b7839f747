"""Objects in an S3 bucket, through s3fs: the only file that sends requests by it.

`storage.s3.fast` moves them by obstore where that is installed, and leaves the rest to this file.

Of s3fs we use the session, the credentials and the single request. Not its files: `with fs.open()`
publishes a truncated object when the block raises. Not its listing cache: others write too. Not its
retries: it would repeat a conditional write whose first reply was lost.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import botocore.exceptions as boto
import crc32c
import s3fs
from botocore import UNSIGNED
from botocore.credentials import RefreshableCredentials
from fsspec.asyn import sync

from storage.errors import (
    KeyNotFoundError,
    StorageError,
)
from storage.forks import ForkSafeLock
from storage.http import HttpStore
from storage.keys import check_key, check_prefix
from storage.ranges import PartLedger, flat_views, part_count
from storage.retry import RetryPolicy, run_publishing
from storage.s3.answers import translated
from storage.s3.options import unusual_option, with_defaults
from storage.store import ExclusiveCreate, JointWriter, ObjectInfo, ObjectWriter, check_bound

MiB = 1024 * 1024
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_PART_NBYTES_MIN = 5 * MiB
_PARTS_MAX = 10_000

_READ_CHUNK_BYTES = MiB
_WRITE_ID = "write-id"


class S3Store(HttpStore):
    """Objects below `prefix` of `bucket`. `options` are those of s3fs.S3FileSystem.

    Exclusive creation is requested with `If-None-Match: *`. AWS honours it for every object; Ceph
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
        checksums: bool = True,
        keys_per_page: int = 1000,
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self.retry = retry
        self.checksums = checksums
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self._given = options
        self._options = with_defaults(options)
        self._keys_per_page = keys_per_page
        self._lock = ForkSafeLock()
        self._client: tuple[int, s3fs.S3FileSystem] | None = None

    @property
    def place(self) -> str:
        # Two servers may have buckets of one name.
        clients = self._given.get("client_kwargs") or {}
        endpoint = self._given.get("endpoint_url") or clients.get("endpoint_url") or ""
        return f"{str(endpoint).rstrip('/')} {self.url}"

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
        return self._writer(ledger)

    def begin_joint(self, key: str, nbytes: int, *, part_nbytes: int) -> str:
        writer = S3Writer(self, PartLedger(check_key(key), nbytes, part_nbytes))
        if not writer.in_parts:
            return ""
        writer.__enter__()
        return writer.token

    def joint(self, key: str, nbytes: int, *, part_nbytes: int, token: str) -> S3JointWriter:
        return S3JointWriter(S3Writer(self, PartLedger(key, nbytes, part_nbytes), token))

    def end_joint(
        self, key: str, nbytes: int, *, part_nbytes: int, token: str, receipts: Mapping[int, str]
    ) -> None:
        writer = S3Writer(self, PartLedger(key, nbytes, part_nbytes), token)
        if missing := part_count(nbytes, part_nbytes) - len(receipts):
            raise ValueError(f"{key}: {missing} parts were never written; not published")
        writer.publish_parts({index: json.loads(receipt) for index, receipt in receipts.items()})

    def abort_joint(self, key: str, token: str) -> None:
        self.abort_upload(self._full(key), json.loads(token)["upload"])

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._put_new(key, bytes(data), {}, may_be_repeated=False)

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
            for listed in page.get("Contents", ()):
                key = listed["Key"][len(self._prefix) :]
                # Consoles make "directories": empty objects whose name ends with a slash.
                if key > after and not key.endswith("/"):
                    yield ObjectInfo(key, listed["Size"], listed["LastModified"].timestamp())
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

    # What the fast client overrides:

    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        data: bytes = self._run("read", key, self._read_all, key, nbytes_max)
        return data

    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        """Fill `views` from `start` on; how many bytes came, 0 when there are none at `start`."""
        got: int = self._run("read", key, self._read_range, self._full(key), start, views)
        return got

    def _put_new(
        self, key: str, body: bytes, metadata: dict[str, str], *, may_be_repeated: bool
    ) -> None:
        """One conditional PUT."""
        self._call(
            "create",
            key,
            "put_object",
            may_be_repeated=may_be_repeated,
            Key=self._full(key),
            Body=body,
            Metadata=metadata,
            IfNoneMatch="*",
            **self.checksum_of(body),
        )

    def _writer(self, ledger: PartLedger) -> S3Writer:
        return S3Writer(self, ledger)

    def checksum_of(self, body: bytes) -> dict[str, str]:
        """The request arguments that send the checksum of `body`: 15 GB/s, where Content-MD5 takes
        0.6.
        """
        if not self.checksums:
            return {}
        packed = struct.pack(">I", crc32c.crc32c(body))
        return {"ChecksumCRC32C": base64.b64encode(packed).decode("ascii")}

    # What the fast client needs:

    def unusual_option(self) -> str:
        """The first storage option that only s3fs can honour; "" when there is none."""
        return unusual_option(self._given)

    def client_facts(self) -> ClientFacts:
        """Where the s3fs client sends its requests and how it signs them. Sends nothing."""
        try:
            filesystem = self._filesystem()
            facts: ClientFacts = sync(filesystem.loop, _ask_client, filesystem, self._bucket)
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
        self, operation: str, key: str, method: str, *, may_be_repeated: bool = True, **kwargs: Any
    ) -> Any:
        """One request, sent once."""
        try:
            filesystem = self._filesystem()
            return sync(filesystem.loop, filesystem._call_s3, method, Bucket=self._bucket, **kwargs)
        except StorageError:
            raise
        except Exception as error:
            raise translated(error, self.url, operation, key, may_be_repeated) from error

    def _run(self, operation: str, key: str, coroutine: Any, *args: Any) -> Any:
        try:
            filesystem = self._filesystem()
            return sync(filesystem.loop, coroutine, filesystem, *args)
        except StorageError:
            raise
        except Exception as error:
            raise translated(error, self.url, operation, key, True) from error

    async def _read_all(
        self, filesystem: s3fs.S3FileSystem, key: str, nbytes_max: int | None
    ) -> bytes:
        response = await filesystem._call_s3("get_object", Bucket=self._bucket, Key=self._full(key))
        async with response["Body"] as body:
            # Before the body is read: a hostile object may be of any size.
            check_bound(self.url, key, response["ContentLength"], nbytes_max)
            return bytes(await body.read())

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


@dataclass(frozen=True)
class ClientFacts:
    """How an s3fs client reaches its bucket, for another client of the same. Never shown in
    messages: it gives access to credentials. `problem` names what only s3fs can do; the rest is
    undefined then.
    """

    bucket: str
    endpoint_url: str
    bucket_in_host: bool
    region: str
    anonymous: bool
    connect_timeout_seconds: float
    read_timeout_seconds: float
    problem: str
    filesystem: Any = field(repr=False)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where s3fs runs its requests; never wait for it from itself."""
        loop: asyncio.AbstractEventLoop = self.filesystem.loop
        return loop

    def credentials(self) -> tuple[str, str, str | None, bool]:
        """Access key, secret, session token, and whether they may change."""
        answer: tuple[str, str, str | None, bool] = sync(self.loop, _credentials, self.filesystem)
        return answer


async def _ask_client(filesystem: s3fs.S3FileSystem, bucket: str) -> ClientFacts:
    """The client's own answer: the address of a request that it would sign."""
    client = await filesystem.set_session()
    config = client.meta.config
    signed = await client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "k"})
    address = urlsplit(signed)
    in_host = address.path == "/k"
    problem = "" if in_host or address.path == f"/{bucket}/k" else "this endpoint's path"
    if config.signature_version not in ("s3v4", UNSIGNED):
        problem = f"signature_version {config.signature_version}"
    if address.scheme == "https" and filesystem.session.get_config_variable("ca_bundle"):
        problem = "ca_bundle"
    if config.proxies:
        problem = "proxies"
    return ClientFacts(
        bucket,
        f"{address.scheme}://{address.netloc}",
        in_host,
        client.meta.region_name if client.meta.region_name != "aws-global" else "us-east-1",
        config.signature_version is UNSIGNED,
        config.connect_timeout,
        config.read_timeout,
        problem,
        filesystem,
    )


async def _credentials(filesystem: s3fs.S3FileSystem) -> tuple[str, str, str | None, bool]:
    if filesystem.key and filesystem.secret:
        return filesystem.key, filesystem.secret, filesystem.token, False
    credentials = await filesystem.session.get_credentials()
    if credentials is None:
        raise boto.NoCredentialsError
    frozen = await credentials.get_frozen_credentials()
    may_expire = isinstance(credentials, RefreshableCredentials)
    return frozen.access_key, frozen.secret_key, frozen.token, may_expire


class S3Writer(ObjectWriter):
    """An object of one part is one PUT at the end; a larger one is a multi-part upload.

    A process that dies leaves an upload that no listing shows and `abort_unfinished` removes.
    """

    def __init__(self, store: S3Store, ledger: PartLedger, token: str = "") -> None:
        self.part_nbytes = ledger.part_nbytes
        self._store = store
        self._ledger = ledger
        self._full_key = store._full(ledger.key)
        begun = json.loads(token) if token else {"upload": "", "write": uuid.uuid4().hex}
        # Read back to find out whether it was our own request that made the object.
        self._metadata = {_WRITE_ID: begun["write"]}
        self._small = b""
        self._upload_id: str = begun["upload"]
        self._parts: dict[int, dict[str, Any]] = {}

    @property
    def token(self) -> str:
        """What another process needs to write parts of this upload."""
        return json.dumps({"upload": self._upload_id, "write": self._metadata[_WRITE_ID]})

    def receipt(self, index: int) -> str:
        """What publishing needs of a part that was written."""
        return json.dumps(self._parts[index])

    def publish_parts(self, parts: dict[int, dict[str, Any]]) -> None:
        """Publish the object of parts that were written by many."""
        self._parts = parts
        self._publish()

    @property
    def in_parts(self) -> bool:
        return part_count(self._ledger.nbytes, self.part_nbytes) > 1

    def __enter__(self) -> S3Writer:
        if self.in_parts:
            algorithm = {"ChecksumAlgorithm": "CRC32C"} if self._store.checksums else {}
            answer = self._call("create_multipart_upload", Metadata=self._metadata, **algorithm)
            self._upload_id = answer["UploadId"]
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._ledger.claim(index, buffers)
        if not self.in_parts:
            self._small = b"".join(flat_views(buffers))
            return
        try:
            self._send_part(index, flat_views(buffers))
        except BaseException:
            self._ledger.release(index)
            raise

    def _send_part(self, index: int, views: Sequence[memoryview]) -> None:
        body = b"".join(views)  # s3fs takes no memoryview; the one copy there is
        part: dict[str, Any] = {"PartNumber": index + 1, **self._store.checksum_of(body)}
        answer = self._call("upload_part", UploadId=self._upload_id, Body=body, **part)
        self._parts[index] = {**part, "ETag": answer["ETag"]}

    def __exit__(self, kind: object, *_: object) -> None:
        published = False
        try:
            if kind is None:
                self._ledger.check_complete()
                self._publish()
                published = True
        finally:
            if not published:
                # A failure here must not hide the first one; abort_unfinished finds the rest.
                with contextlib.suppress(StorageError):
                    self._discard()

    def _discard(self) -> None:
        if self._upload_id:
            self._store.abort_upload(self._full_key, self._upload_id)

    def _publish(self) -> None:
        run_publishing(self._store.retry, self._send, self._is_ours)

    def _send(self) -> None:
        if not self.in_parts:
            self._store._put_new(
                self._ledger.key, self._small, self._metadata, may_be_repeated=True
            )
            return
        self._complete()

    def _complete(self) -> None:
        self._call(
            "complete_multipart_upload",
            UploadId=self._upload_id,
            MultipartUpload={"Parts": [self._parts[index] for index in sorted(self._parts)]},
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


class S3JointWriter(JointWriter):
    """Sends parts of an upload that another process may have begun."""

    def __init__(self, writer: S3Writer) -> None:
        self.receipts = {}
        self._writer = writer

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._writer.write_part(index, buffers)
        self.receipts[index] = self._writer.receipt(index)

    def close(self) -> None:
        """Parts are durable once they are answered."""


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
