"""Objects in an S3 bucket, from a url on: what a store does, by `storage.s3.requests`."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import s3fs

from storage.errors import (
    InvalidUrlError,
    KeyExistsError,
    KeyNotFoundError,
    OutcomeUnknownError,
    StorageError,
    TransientError,
)
from storage.hedging import COMPLETE, NoAnswerError, RequestKind
from storage.ranges import LedgerWriter, PartLedger, flat_views, part_count, part_range
from storage.retry import RetryPolicy, run_publishing
from storage.s3.client import PREFIX_NBYTES_MAX, Transfer
from storage.s3.requests import S3Requests
from storage.store import (
    ExclusiveCreate,
    JointWriter,
    ObjectInfo,
    check_key,
    check_prefix,
)

_BUCKET = re.compile(r"(?P<bucket>[A-Za-z0-9][A-Za-z0-9._\-]{1,254})(/(?P<prefix>[^?]*))?$")
_ARN = re.compile(
    r"(?P<bucket>arn:aws[a-z-]*:s3[a-z-]*:[a-z0-9-]*:[0-9]{12}:"
    r"(outpost[/:][A-Za-z0-9-]+[/:])?(accesspoint|bucket)[/:][A-Za-z0-9.\-]+)(/(?P<prefix>[^?]*))?$"
)


def open_s3(url: str, place: str, options: dict[str, Any], retry: RetryPolicy) -> S3Store:
    """The store at `place`, "BUCKET" or "BUCKET/PREFIX". Raises InvalidUrlError."""
    known = _ARN if place.startswith("arn:") else _BUCKET
    match = known.match(place)
    if match is None and ("@" in place.partition("/")[0] or ":" in place or "?" in place):
        raise InvalidUrlError(  # and a secret may hold a slash
            "an s3 url holds a bucket and a prefix only; pass credentials and endpoint_url as "
            "storage options, in the environment, or in ~/.aws"
        )
    if match is None:
        bucket = place.partition("/")[0]
        raise InvalidUrlError(f"{url!r}: {bucket!r} is not a bucket name; write s3://BUCKET/PREFIX")
    bucket, prefix = match["bucket"], match["prefix"] or ""
    prefix = prefix.strip("/")
    if prefix:
        check_key(prefix)
        if len(prefix.encode()) > PREFIX_NBYTES_MAX:
            raise InvalidUrlError(f"{url!r}: the prefix has more than {PREFIX_NBYTES_MAX} bytes")
    transfer, options = _split_options(place, options)
    return S3Store(bucket, prefix, options=options, retry=retry, transfer=transfer)


def _split_options(place: str, options: dict[str, Any]) -> tuple[Transfer, dict[str, Any]]:
    """Ours and those of s3fs. Raises InvalidUrlError for any other."""
    ours = {name: options[name] for name in Transfer.__dataclass_fields__ if name in options}
    rest = {name: value for name, value in options.items() if name not in ours}
    known = {*inspect.signature(s3fs.S3FileSystem.__init__).parameters, "profile"}
    unknown = sorted(set(rest) - known)
    if unknown:
        raise InvalidUrlError(
            f"s3://{place}: unknown storage options {', '.join(unknown)}; known are those of "
            "s3fs.S3FileSystem, such as endpoint_url, key, secret, anon, and "
            f"{', '.join(Transfer.__dataclass_fields__)}"
        )
    for endpoint in (rest.get("endpoint_url"), rest.get("client_kwargs", {}).get("endpoint_url")):
        if "@" in str(endpoint):
            raise InvalidUrlError(
                f"s3://{place}: endpoint_url holds a user name or password, which would show in "
                "messages; pass key= and secret= instead"
            )
    return Transfer(**ours), rest


MiB = 1024 * 1024
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_PART_NBYTES_MIN = 5 * MiB
_PARTS_MAX = 10_000

_EXPRESS = "--x-s3"  # ends the names of buckets of S3 Express One Zone

_WRITE_ID = "write-id"


class S3Store(S3Requests):
    """Objects below `prefix` of `bucket`. `options` are those of s3fs.S3FileSystem.

    Exclusive creation is requested with `If-None-Match: *`. AWS honours it for every object; Ceph
    does only for those of one part; some servers ignore it altogether: probe before committing.
    `retry` is for publishing an object of `create`, which only this class knows how to repeat.
    Reads, listings and writes of data files are hedged (`hedger`), and so is the write that
    commits: a unique id in the object tells whose it is.
    """

    exclusive_create = ExclusiveCreate.CONDITIONAL
    part_nbytes_min = _PART_NBYTES_MIN

    @property
    def place(self) -> str:
        # Two servers may have buckets of one name.
        clients = self._options.get("client_kwargs") or {}
        endpoint = self._options.get("endpoint_url") or clients.get("endpoint_url") or ""
        return f"{str(endpoint).rstrip('/')} {self.url}"

    def create(
        self, key: str, nbytes: int, *, part_nbytes: int, durable: bool = True, direct: bool = False
    ) -> S3Writer:
        ledger = PartLedger(key, nbytes, part_nbytes)
        parts = part_count(nbytes, part_nbytes)
        if parts > 1 and (part_nbytes < _PART_NBYTES_MIN or parts > _PARTS_MAX):
            raise ValueError(
                f"{key}: {parts} parts of {part_nbytes} bytes; S3 takes at most {_PARTS_MAX} parts "
                f"of at least {_PART_NBYTES_MIN}: use larger parts or smaller objects"
            )
        return S3Writer(self, ledger)

    def begin_joint(self, key: str, nbytes: int, *, part_nbytes: int) -> str:
        writer = S3Writer(self, PartLedger(key, nbytes, part_nbytes))
        if not writer.in_parts:
            return ""
        writer.__enter__()
        return writer.token

    def joint(self, key: str, nbytes: int, *, part_nbytes: int, token: str) -> S3Writer:
        return S3Writer(self, PartLedger(key, nbytes, part_nbytes), token)

    def end_joint(
        self, key: str, nbytes: int, *, part_nbytes: int, token: str, receipts: Mapping[int, str]
    ) -> None:
        writer = S3Writer(self, PartLedger(key, nbytes, part_nbytes), token)
        if missing := part_count(nbytes, part_nbytes) - len(receipts):
            raise ValueError(f"{key}: {missing} parts were never written; not published")
        writer._parts = {index: json.loads(receipt) for index, receipt in receipts.items()}
        writer._publish()

    def abort_joint(self, key: str, token: str) -> None:
        self.abort_upload(self.full_key(key), json.loads(token)["upload"])

    def put_if_absent(self, key: str, data: bytes) -> None:
        # One part, whatever its size: an object that commits is one PUT.
        writer = S3Writer(self, PartLedger(key, len(data), max(len(data), 1)))
        writer.put_once(bytes(data))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        if not self._bucket.endswith(_EXPRESS):
            yield from self._listed(prefix, after)
            return
        # These list directories only, in an order of their own, and from the beginning.
        directory = prefix[: prefix.rfind("/") + 1]
        objects = [one for one in self._listed(directory, "") if one.key > after]
        yield from sorted(one for one in objects if one.key.startswith(prefix))

    def _listed(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        ask = partial(
            self.call,
            "list",
            prefix,
            "list_objects_v2",
            kind=RequestKind("list"),
            Prefix=self._prefix + check_prefix(prefix),
            MaxKeys=self._keys_per_page,
        )
        # Of the first page only: a token says by itself where the next one begins.
        first = {"StartAfter": self._prefix + after} if after else {}
        for page in _pages(ask, "ContinuationToken", **first):
            for listed in page.get("Contents", ()):
                key = listed["Key"][len(self._prefix) :]
                # Consoles make "directories": empty objects whose name ends with a slash.
                if key > after and not key.endswith("/"):
                    yield ObjectInfo(key, listed["Size"], listed["LastModified"].timestamp())

    def info(self, key: str) -> ObjectInfo:
        head = self.call(
            "info", key, "head_object", kind=RequestKind("head"), Key=self.full_key(key)
        )
        return ObjectInfo(key, head["ContentLength"], head["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        with contextlib.suppress(KeyNotFoundError):
            self.call("delete", key, "delete_object", Key=self.full_key(key))

    def sync(self, keys: Iterable[str]) -> None:
        """S3 answers a write when it is durable; there is nothing to wait for."""

    def abort_unfinished(self, prefix: str) -> int:
        wanted = self._prefix + check_prefix(prefix)
        asked = wanted[: wanted.rfind("/") + 1] if self._bucket.endswith(_EXPRESS) else wanted
        aborted = 0
        ask = partial(self.call, "abort", prefix, "list_multipart_uploads", Prefix=asked)
        for page in _pages(ask, "KeyMarker", "UploadIdMarker"):
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(wanted):
                    self.abort_upload(upload["Key"], upload["UploadId"])
                    aborted += 1
        return aborted

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened[1].close()
            self._opened = None

    def abort_upload(self, full_key: str, upload_id: str) -> None:
        with contextlib.suppress(KeyNotFoundError):  # another one was faster
            self.call("abort", full_key, "abort_multipart_upload", Key=full_key, UploadId=upload_id)


def _pages(ask: Callable[..., Any], *markers: str, **first: str) -> Iterator[Any]:
    """The pages of a listing, of which `markers` are the arguments that ask for the next one."""
    while True:
        page = ask(**first)
        yield page
        if not page.get("IsTruncated"):
            return
        first = {marker: page[f"Next{marker}"] for marker in markers}


class S3Writer(LedgerWriter, JointWriter):
    """An object of one part is one PUT at the end; a larger one is a multi-part upload.

    A process that dies leaves an upload that no listing shows and `abort_unfinished` removes.
    """

    def __init__(self, store: S3Store, ledger: PartLedger, token: str = "") -> None:
        super().__init__(ledger)
        self._store = store
        self._full_key = store.full_key(ledger.key)
        begun = json.loads(token) if token else {"upload": "", "write": uuid.uuid4().hex}
        # Read back to find out whether it was our own request that made the object.
        self._metadata = {**store.metadata, _WRITE_ID: begun["write"]}
        self._small = b""
        # As it begins: an object that is shortened to one part stays an upload.
        self.in_parts = part_count(ledger.nbytes, ledger.part_nbytes) > 1
        self._upload_id: str = begun["upload"]
        self._parts: dict[int, dict[str, Any]] = {}
        self.receipts = {}
        self._is_sent_again = False  # whether a second request to publish is under way or was
        self._refusal: KeyExistsError | None = None  # of a second one: there is another's object

    @property
    def token(self) -> str:
        """What another process needs to write parts of this upload."""
        return json.dumps({"upload": self._upload_id, "write": self._metadata[_WRITE_ID]})

    def put_once(self, data: bytes) -> None:
        """Publish an object of one part as `Store.put_if_absent` does."""
        self._small = data
        try:
            self._put_small(may_be_repeated=False)
        except KeyExistsError as error:
            is_certain = error is self._refusal or not self._is_sent_again
            if is_certain or not self._was_ours():
                raise
        except KeyNotFoundError:
            if not self._was_ours():  # a proxy may answer 404 to what was carried out
                raise
        except TransientError as error:
            # That one request was refused says nothing of the other.
            if self._is_sent_again or isinstance(error, NoAnswerError):
                raise OutcomeUnknownError(f"{error}; the object may exist") from error
            raise

    def _was_ours(self) -> bool:
        """Whose the object is that is there, after two requests; that must be known for sure."""
        try:
            return self._is_ours()
        except StorageError as error:
            raise OutcomeUnknownError(f"{error}; the object may exist") from error

    def __enter__(self) -> S3Writer:
        if self.in_parts:
            algorithm = {"ChecksumAlgorithm": "CRC32C"} if self._store.checksums else {}
            # A second one that comes late leaves an upload without parts, which costs nothing and
            # which `abort_unfinished` removes.
            answer = self._call(
                "create_multipart_upload",
                kind=RequestKind("begin"),
                Metadata=self._metadata,
                **algorithm,
            )
            self._upload_id = answer["UploadId"]
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._ledger.claim(index, buffers)
        views = flat_views(buffers)
        if not self.in_parts:
            self._small = b"".join(views)
            return
        try:
            part = self._store.put_part(self._ledger.key, self._upload_id, index, views)
        except BaseException:
            # A caller may repeat the part after a TransientError.
            self._ledger.release(index)
            raise
        self._parts[index], self.receipts[index] = part, json.dumps(part)

    def close(self) -> None:
        """Parts are durable once they are answered."""

    def _discard(self) -> None:
        if self._upload_id:
            with contextlib.suppress(StorageError):  # abort_unfinished finds the rest
                self._store.abort_upload(self._full_key, self._upload_id)

    def _publish(self) -> None:
        run_publishing(self._store.retry, self._send, self._is_ours)

    def _send(self) -> None:
        if not self.in_parts:
            self._put_small(may_be_repeated=True)
            return
        try:
            self._complete()
        except StorageError as error:
            # A wrong tag is answered by InvalidPart, for which there is no class of its own.
            if type(error) is not StorageError or not self._renew_tags():
                raise
            self._complete()

    def _put_small(self, *, may_be_repeated: bool) -> None:
        store, key = self._store, self._ledger.key
        arguments = store.put_arguments(key, self._small, self._metadata)
        again = partial(self._send_again, "put_object", {**arguments, "Body": self._small})
        store.put_new(key, arguments, self._small, again, may_be_repeated=may_be_repeated)
        self._raise_refusal()

    def _complete(self) -> None:
        store, key = self._store, self._ledger.key
        arguments: dict[str, Any] = {
            "Key": self._full_key,
            "UploadId": self._upload_id,
            "MultipartUpload": {"Parts": [self._parts[index] for index in sorted(self._parts)]},
            "IfNoneMatch": "*",
        }
        method = "complete_multipart_upload"
        first = partial(store.send, "create", key, method, **arguments)
        again = partial(self._send_again, method, arguments)
        # S3 may take minutes for a large object, and sends white space meanwhile.
        store.raced(RequestKind(COMPLETE, self._ledger.nbytes), "create", key, first, again)
        self._raise_refusal()

    async def _send_again(self, method: str, arguments: dict[str, Any]) -> None:
        """The request that publishes, once more: it is refused when the first was carried out.

        That there is an object of another is an answer, too: then no request of ours will be.
        """
        self._is_sent_again = True
        send = partial(self._store.send, "create", self._ledger.key)
        try:
            await send(method, **arguments)
        except (KeyExistsError, KeyNotFoundError) as error:
            if self._is_mine(await send("head_object", Key=self._full_key)):
                return
            if not isinstance(error, KeyExistsError):
                raise
            self._refusal = error

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _renew_tags(self) -> bool:
        """Ask for the tags of the parts; whether any is not the one that we were given.

        Of a part that was sent twice the server has the bytes that came last, which are the same.
        Where it encrypts, their tag is another one all the same. A part of another size or checksum
        keeps the tag that we know, so that it is refused.
        """
        renewed = False
        kind = RequestKind("list")
        ask = partial(self._call, "list_parts", kind=kind, UploadId=self._upload_id)
        for page in _pages(ask, "PartNumberMarker"):
            for stored in page.get("Parts", ()):
                part = self._parts.get(stored["PartNumber"] - 1)
                if part is not None and part["ETag"] != stored["ETag"] and self._is_same(stored):
                    part["ETag"], renewed = stored["ETag"], True
        return renewed

    def _is_same(self, stored: Mapping[str, Any]) -> bool:
        """Whether a part that the server has may be the one that was sent, by all that it says."""
        index, checksum = stored["PartNumber"] - 1, stored.get("ChecksumCRC32C")
        nbytes = part_range(self._ledger.nbytes, self.part_nbytes, index).nbytes
        known = self._parts[index].get("ChecksumCRC32C", checksum)
        return stored["Size"] == nbytes and checksum in (None, known)

    def _is_ours(self) -> bool:
        try:
            return self._is_mine(self._call("head_object", kind=RequestKind("head")))
        except KeyNotFoundError:
            return False

    def _is_mine(self, head: Mapping[str, Any]) -> bool:
        return bool(head.get("Metadata", {}).get(_WRITE_ID) == self._metadata[_WRITE_ID])

    def _call(self, method: str, **kwargs: Any) -> Any:
        return self._store.call("create", self._ledger.key, method, Key=self._full_key, **kwargs)
