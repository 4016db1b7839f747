"""The objects of one bucket through obstore, in GCS and Azure: a store, requests, uploads."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from storage.errors import (
    AccessDeniedError,
    KeyExistsError,
    KeyNotFoundError,
    OutcomeUnknownError,
    ShortReadError,
    StorageError,
    TransientError,
)
from storage.http import HttpStore
from storage.ranges import (
    LedgerWriter,
    PartLedger,
    copy_to,
    drop_front,
    flat_views,
    part_count,
    take_front,
)
from storage.retry import RetryPolicy, Trial, run_publishing
from storage.s3.answers import answered
from storage.store import ExclusiveCreate, ObjectInfo, check_bound, check_key, check_prefix

_WRITE_ID = "writeid"  # Azure takes identifiers only
# A chunk per crossing of the language border: small enough for a CPU's cache, large enough that the
# interpreter's lock is not taken all the time. 256 KiB was within 5 % of the best of 0 to 8 MiB.
_READ_CHUNK_NBYTES = 256 << 10
REQUEST_SECONDS_MAX = 600  # of one request with its body; a stalled one ends by the read timeout
# The workers bound what is in flight, since each waits for its part; obstore's own bound must not
# be lower.
_PARTS_IN_FLIGHT_MAX = 64
_TRIES_UNBOUNDED = 1 << 30
_QUIET_SECONDS = 2.0  # an upload without an answer for so long checks whether the server responds

_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_KIND = re.compile(r"kind: ([A-Z][a-z]+)")


class CloudStore(HttpStore):
    """Objects below `prefix` of a bucket or container.

    `once` repeats nothing; `patient` repeats requests of uploads as the store's policy says, since
    nobody else can: an upload is one call. An object of several parts is completed without a
    condition: the key is looked at just before.
    """

    exclusive_create = ExclusiveCreate.CONDITIONAL
    part_nbytes_min = 5 << 20

    def __init__(
        self,
        url: str,
        prefix: str,
        *,
        once: Any,
        patient: Any,
        retry: RetryPolicy,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.url = url
        self.once = once
        self.patient = patient
        self.retry = retry
        self.loop = loop
        self._prefix = prefix + "/" if prefix else ""

    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        full_key = self.full_key(key)
        with self.translating("read", key):
            response = obstore.get(self.once, full_key)
            # Only the head has come so far; the body follows with `bytes()`.
            check_bound(self.url, key, response.meta["size"], nbytes_max)
            return bytes(response.bytes())

    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        wanted = sum(view.nbytes for view in views)
        left, got = list(views), 0
        options: Any = {"range": (start, start + wanted)}
        full_key = self.full_key(key)
        with self.translating("read", key):
            response = obstore.get(self.once, full_key, options=options)
            for chunk in response.stream(min_chunk_size=_READ_CHUNK_NBYTES):
                nbytes = len(chunk)
                got += nbytes
                if got > wanted:
                    raise ValueError("more bytes came than were requested")
                copy_to(take_front(left, nbytes), memoryview(chunk), nbytes)
                left = drop_front(left, nbytes)
        return got

    def create(
        self, key: str, nbytes: int, *, part_nbytes: int, durable: bool = True, direct: bool = False
    ) -> CloudWriter:
        ledger = PartLedger(key, nbytes, part_nbytes)
        if part_count(nbytes, part_nbytes) > 1 and part_nbytes < self.part_nbytes_min:
            raise ValueError(
                f"{key}: parts of {part_nbytes} bytes; {self.part_nbytes_min} at least"
            )
        return CloudWriter(self, ledger)

    def put_if_absent(self, key: str, data: bytes) -> None:
        # Sent once: repeated after a lost answer, it would be refused because of its own object.
        self.put_new(key, bytes(data), {}, may_be_repeated=False)

    def put_new(
        self, key: str, body: bytes, metadata: dict[str, str], *, may_be_repeated: bool
    ) -> None:
        """One PUT that the server refuses when the key is there."""
        full_key = self.full_key(key)
        with self.translating("create", key, may_be_repeated=may_be_repeated):
            obstore.put(
                self.once,
                full_key,
                memoryview(body),
                mode="create",
                attributes=metadata,
                use_multipart=False,
            )

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        wanted = self._prefix + check_prefix(prefix)
        with self.translating("list", prefix):
            # obstore's prefixes are whole directories.
            pages = obstore.list(
                self.once,
                wanted.rpartition("/")[0] or None,
                offset=self._prefix + after if after else None,
            )
            for page in pages:
                for listed in page:
                    key = listed["path"][len(self._prefix) :]
                    if listed["path"].startswith(wanted) and key > after:
                        yield ObjectInfo(key, listed["size"], listed["last_modified"].timestamp())

    def info(self, key: str) -> ObjectInfo:
        full_key = self.full_key(key)
        with self.translating("info", key):
            head = obstore.head(self.once, full_key)
        return ObjectInfo(key, head["size"], head["last_modified"].timestamp())

    def delete(self, key: str) -> None:
        full_key = self.full_key(key)
        gone = contextlib.suppress(FileNotFoundError)
        with self.translating("delete", key), gone:
            obstore.delete(self.once, full_key)

    def sync(self, keys: Iterable[str]) -> None:
        """A write is answered when it is durable; there is nothing to wait for."""

    def abort_unfinished(self, prefix: str) -> int:
        """Always 0: Azure drops blocks that were never committed after a week, and GCS does what
        the bucket's lifecycle rule for incomplete uploads says.
        """
        check_prefix(prefix)
        return 0

    def close(self) -> None:
        """obstore closes its connections when the last reference goes."""

    def metadata(self, key: str) -> dict[str, str]:
        """What a writer of ours noted with an object. Raises KeyNotFoundError."""
        # `obstore.head` leaves the attributes out.
        with self.translating("info", key):
            head = obstore.get(self.once, self.full_key(key), options={"head": True})
        return dict(head.attributes)

    def full_key(self, key: str) -> str:
        """The key in the bucket."""
        return self._prefix + check_key(key)

    async def probe(self, key: str) -> TransientError | None:
        """Why the server cannot be reached; None when it answers, whatever it says."""
        try:
            with self.translating("create", key):
                await obstore.head_async(self.once, self.full_key(key))
        except StorageError as failed:
            return failed if isinstance(failed, TransientError) else None
        return None

    @contextlib.contextmanager
    def translating(
        self, operation: str, key: str, *, may_be_repeated: bool = True
    ) -> Iterator[None]:
        """What the block raises, as an error of this package that names the operation."""
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            raise self._translated(error, operation, key, may_be_repeated) from None

    def _translated(
        self, error: Exception, operation: str, key: str, may_be_repeated: bool
    ) -> StorageError:
        """What to do next. Only the error code and message of an answer are kept: a server may
        repeat the whole request in it, session token included.
        """
        where = f"{operation} {key} in {self.url}"
        first, _, details = str(error).partition("\n\nDebug source")
        if isinstance(error, (AlreadyExistsError, PreconditionError)):
            return KeyExistsError(f"{where}: exists already")
        if "Wanted range" in first:
            return ShortReadError(f"{where}: the object ends before the requested bytes")
        if "Range header" in first or "NotPartial" in details:
            return StorageError(f"{where}: the server ignored the range")
        status, code, message = (find.search(first) for find in (_STATUS, _CODE, _MESSAGE))
        if status is not None or isinstance(error, FileNotFoundError):
            text = f"{where}: {status[1] if status else 404}"
            text += f" {code[1]}" if code else ""
            text += f": {message[1]}" if message else ""
            return answered(
                int(status[1]) if status else 404,
                code[1] if code else "",
                text=text,
                where=where,
                may_be_repeated=may_be_repeated,
            )
        return self._without_answer(first, details, where, may_be_repeated)

    def _without_answer(
        self, first: str, details: str, where: str, may_be_repeated: bool
    ) -> StorageError:
        if "redentials" in first or "redentials" in details:
            return AccessDeniedError(
                f"{where}: no usable credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
                "or a profile, or pass anon=True"
            )
        if "redirect without LOCATION" in first:
            return StorageError(
                f"{where}: the bucket is in another region; pass "
                "client_kwargs={'region_name': ...}"
            )
        kind = _KIND.search(details)
        if kind is not None and kind[1] == "Connect":
            return TransientError(f"{where}: no connection to the server; is endpoint_url right?")
        if kind is not None or "HTTP error" in first or "error decoding" in first:
            text = f"{where}: no whole answer ({kind[1].lower() if kind else 'connection lost'})"
            return TransientError(text) if may_be_repeated else OutcomeUnknownError(text)
        if not may_be_repeated:
            return OutcomeUnknownError(
                f"{where}: failed, and whether it was carried out is unknown"
            )
        return StorageError(f"{where}: {first.partition(' - ')[0][:300]}")


class _Abandoned(Exception):
    """The writer gave up; obstore removes the upload when it meets this."""


_END = memoryview(b"end")
_GIVE_UP = memoryview(b"give up")


class Upload:
    """One multi-part upload that obstore runs on fsspec's event loop while parts are fed to it.

    obstore cuts the bytes that it gets into parts in their order, and reads them where they are.
    It has read a piece of memory when the view that it was given is garbage-collected. A part that
    comes before its turn is copied, and so is a shorter last part, which obstore keeps until the
    end.
    """

    def __init__(
        self, store: CloudStore, key: str, part_nbytes: int, metadata: dict[str, str]
    ) -> None:
        self._store = store
        self._key = key
        self._part_nbytes = part_nbytes
        self._feed = _Feed()
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._early: dict[int, memoryview] = {}
        self._next_index = 0
        self._part_failed = False
        self._lent = 0  # pieces of memory that obstore reads
        self._moved = time.monotonic()  # when one was lent or given back
        self._metadata = metadata
        self._result: Future[None] = asyncio.run_coroutine_threadsafe(self._run(), store.loop)

    def write(self, index: int, views: Sequence[memoryview]) -> None:
        """Returns when the memory of `views` may change. Raises when the upload has failed."""
        released: SimpleQueue[object] = SimpleQueue()
        watched: list[weakref.ref[memoryview]] = []
        nbytes = sum(view.nbytes for view in views)
        with self._lock:
            if index != self._next_index or nbytes < self._part_nbytes:
                self._early[index] = memoryview(b"".join(views))
            else:
                for view in views:
                    lent = view[:]
                    watched.append(weakref.ref(lent, released.put))
                    self._count(1)
                    self._send(lent)
                    del lent
                self._next_index += 1
            while self._next_index in self._early:
                self._send(self._early.pop(self._next_index))
                self._next_index += 1
        # Also after a failure: a request that is being cancelled may still read the memory.
        for _ in watched:
            released.get()
            self._count(-1)
        if self._result.done():
            self._outcome()

    def finish(self) -> None:
        """Complete the upload. Raises OutcomeUnknownError when that request got no answer, and
        KeyNotFoundError when the upload is gone, as it is when an earlier one did succeed.
        """
        self._send(_END)
        self._outcome()

    def abort(self) -> None:
        """Remove the upload. Never raises, whatever its outcome."""
        self._send(_GIVE_UP)
        with contextlib.suppress(StorageError, _Abandoned):
            self._outcome()

    def _count(self, more: int) -> None:
        with self._counting:
            self._lent += more
            self._moved = time.monotonic()

    def _send(self, view: memoryview) -> None:
        self._store.loop.call_soon_threadsafe(self._feed.push, view)

    def _outcome(self) -> None:
        try:
            self._result.result()
        except TransientError as error:
            # All parts were taken, so the request without an answer is the one that completes the
            # object.
            if self._feed.was_ended and not self._part_failed:
                raise OutcomeUnknownError(f"{error}; the object may exist") from error
            raise

    async def _run(self) -> None:
        """A beginning whose answer was cut short is tried again; obstore does not repeat that."""

        async def attempt() -> None:
            try:
                await self._watched(asyncio.ensure_future(self._put()))
            except (BaseError, OSError, ValueError) as error:
                # obstore has one error for all requests of an upload, and only its text tells them
                # apart: parts are sent by PUT, the end by POST.
                self._part_failed = "Error performing PUT" in str(error)
                failed = self._store._translated(error, "create", self._key, True)
                if self._feed.was_begun and isinstance(failed, TransientError):
                    raise _Spent(failed) from None
                raise failed from None

        try:
            await self._store.retry.run_async(attempt)
        except _Spent as spent:
            raise spent.failed from None
        finally:
            self._feed.close()

    async def _put(self) -> None:
        await obstore.put_async(
            self._store.patient,
            self._store.full_key(self._key),
            self._feed.chunks(),
            attributes=self._metadata,
            use_multipart=True,
            chunk_size=self._part_nbytes,
            max_concurrency=_PARTS_IN_FLIGHT_MAX,
        )

    async def _watched(self, sending: asyncio.Task[None]) -> None:
        """`sending`, given up where the server cannot be reached for longer than the policy has it.

        obstore repeats the requests of an upload by itself, in silence and with a bound that is
        fixed before. So when nothing has been answered for a while, a small request checks whether
        the server responds.
        """
        retry, trial = self._store.retry, None
        with contextlib.ExitStack() as waiting:
            while True:
                await asyncio.wait([sending], timeout=_QUIET_SECONDS)
                if sending.done():
                    if trial is not None:
                        trial.answered(None)
                    return sending.result()
                quiet = self._quiet_seconds() >= _QUIET_SECONDS
                failed = await self._store.probe(self._key) if quiet else None
                if failed is None:
                    if trial is not None:
                        trial.answered(None)
                    waiting.close()
                    trial = None
                    continue
                trial = trial or waiting.enter_context(Trial(retry))
                try:
                    trial.pause_after(failed)
                except TransientError as given_up:
                    sending.cancel()
                    # Until it has ended it may read memory that the caller is about to use again.
                    await asyncio.wait([sending])
                    self._part_failed = not self._feed.was_ended
                    raise _Spent(given_up) from None

    def _quiet_seconds(self) -> float:
        """How long obstore has finished nothing of what it was given; 0 when it waits for us."""
        if self._lent == 0 and not self._feed.is_last_said:
            return 0.0
        return time.monotonic() - self._moved


class _Spent(Exception):
    """Memory was given back that a repetition would need."""

    def __init__(self, failed: TransientError) -> None:
        self.failed = failed


class _Feed:
    """Views on their way to obstore; all methods run on the event loop."""

    def __init__(self) -> None:
        self._views: asyncio.Queue[memoryview] = asyncio.Queue()
        self._closed = False
        self.was_begun = False
        self.was_ended = False
        self.is_last_said = False  # obstore has all it gets, and is to finish or to give up

    def push(self, view: memoryview) -> None:
        if not self._closed:
            self._views.put_nowait(view)

    async def chunks(self) -> AsyncIterator[memoryview]:
        while True:
            view = await self._views.get()
            self.was_begun = True
            self.is_last_said = view is _END or view is _GIVE_UP
            if view is _END:
                self.was_ended = True
                return
            if view is _GIVE_UP:
                raise _Abandoned
            yield view
            del view  # the writer waits for this view to be garbage-collected

    def close(self) -> None:
        self._closed = True
        # Writers wait until the views that nobody will send are garbage-collected.
        while not self._views.empty():
            self._views.get_nowait()


def bounds(attempts_max: int | None, retry: RetryPolicy) -> Any:
    """How often and how long obstore repeats a request of an upload by itself, at most.

    The policy's bound may change while an upload is under way, and these cannot: `Upload` watches
    the policy's where the server is away. Answers such as 503 are repeated up to this one.
    """
    tries = _TRIES_UNBOUNDED if attempts_max is None else attempts_max
    seconds = max(retry.deadline_seconds, REQUEST_SECONDS_MAX)
    return {"max_retries": tries - 1, "retry_timeout": timedelta(seconds=seconds)}


class CloudWriter(LedgerWriter):
    """One conditional PUT at the end, or an upload in parts that obstore runs."""

    def __init__(self, store: CloudStore, ledger: PartLedger) -> None:
        super().__init__(ledger)
        self._store = store
        self._metadata = {_WRITE_ID: uuid.uuid4().hex}
        self._small = b""
        self._uploads: list[Upload] = []  # one, for an object of several parts

    def __enter__(self) -> CloudWriter:
        if part_count(self._ledger.nbytes, self.part_nbytes) > 1:
            key = self._ledger.key
            self._uploads.append(Upload(self._store, key, self.part_nbytes, self._metadata))
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._ledger.claim(index, buffers)
        views = flat_views(buffers)
        if not self._uploads:
            self._small = b"".join(views)
        for upload in self._uploads:
            upload.write(index, views)

    def _discard(self) -> None:
        for upload in self._uploads:
            upload.abort()

    def _publish(self) -> None:
        retry, key = self._store.retry, self._ledger.key
        if not self._uploads:
            run_publishing(retry, self._put, self._is_ours)
            return
        # The completion of an upload takes no condition here: this is as close as it gets.
        with contextlib.suppress(KeyNotFoundError):
            retry.run(lambda: self._store.info(key))
            raise KeyExistsError(f"create {key} in {self._store.url}: exists already")
        try:
            self._uploads[0].finish()
        except (KeyNotFoundError, OutcomeUnknownError):
            # An upload is also gone when it was completed and the answer was lost.
            if not retry.run(self._is_ours):
                raise

    def _put(self) -> None:
        key, body = self._ledger.key, self._small
        self._store.put_new(key, body, self._metadata, may_be_repeated=True)

    def _is_ours(self) -> bool:
        try:
            metadata = self._store.metadata(self._ledger.key)
        except KeyNotFoundError:
            return False
        return metadata.get(_WRITE_ID) == self._metadata[_WRITE_ID]
