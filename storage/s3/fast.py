"""S3 with its bytes moved by `storage.s3.wire`.

Endpoint, region, credentials and addressing style come from the s3fs client, which stays in charge
of listings, deletions, unfinished uploads and whatever is sent a second time. So every option and
environment variable means the same with both. Where our client cannot honour an option, s3fs does
everything, and that is logged at debug level.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from storage.forks import ForkSafeLock
from storage.hedging import Like
from storage.retry import RetryPolicy
from storage.s3.facts import ClientFacts
from storage.s3.options import Transfer
from storage.s3.requests import Again, filled
from storage.s3.store import S3Store
from storage.s3.wire import Wire, WireRequest

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Connections that are open belong to the process that opened them.
_IMPORTED_BY = os.getpid()


class FastS3Store(S3Store):
    """S3Store with reads and data files straight from and into the caller's memory
    (`storage.s3.wire`). Bodies carry a checksum for the server.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        options: dict[str, Any],
        retry: RetryPolicy,
        transfer: Transfer,
        keys_per_page: int = 1000,
    ) -> None:
        super().__init__(
            bucket,
            prefix,
            options=options,
            retry=retry,
            checksums=transfer.checksums,
            keys_per_page=keys_per_page,
        )
        self._transfer = transfer
        self._opening = ForkSafeLock()
        self._opened: list[Wire | None] = []

    def wire(self) -> Wire | None:
        """The fast client, created at first use; None where s3fs does everything."""
        if os.getpid() != _IMPORTED_BY:
            return None
        with self._opening:
            if not self._opened:
                self._opened.append(self._open())
            return self._opened[0]

    def _open(self) -> Wire | None:
        problem = self.unusual_option()
        if not problem:
            facts = self.client_facts()
            problem = facts.problem
        if problem:
            _log.debug("%s: %s is for s3fs alone; it sends everything", self.url, problem)
            return None
        return Wire(self.url, facts, unsigned=_is_unsigned(facts, self._transfer))

    def close(self) -> None:
        with self._opening:
            for wire in self._opened:
                if wire is not None:
                    wire.close()
            self._opened.clear()
        super().close()

    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        wire = self.wire()
        if wire is None:
            return super()._fetch_all(key, nbytes_max)
        return self._raced_by_wire(
            Like("get", nbytes_max or 0),
            f"read {key}",
            lambda request: wire.get(request, self.full_key(key), key, nbytes_max),
            partial(self._read_all, key=key, nbytes_max=nbytes_max),
        )

    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        wire = self.wire()
        if wire is None:
            return super()._fetch_range(key, start, views)
        nbytes = sum(view.nbytes for view in views)

        def fill(request: WireRequest) -> int | memoryview:
            return wire.fill(request, self.full_key(key), key, start, views)

        again = partial(self._read_copy, key=key, start=start, nbytes=nbytes)
        return filled(self._raced_by_wire(Like("read", nbytes), f"read {key}", fill, again), views)

    def put_new(
        self,
        key: str,
        body: bytes,
        metadata: dict[str, str],
        again: Again[object],
        *,
        may_be_repeated: bool,
    ) -> None:
        wire = self.wire()
        if wire is None:
            super().put_new(key, body, metadata, again, may_be_repeated=may_be_repeated)
            return
        headers = {"If-None-Match": "*", **_checksum_header(self.checksum_of(body))}
        headers |= {f"x-amz-meta-{name}": value for name, value in metadata.items()}
        put = partial(
            wire.put,
            full_key=self.full_key(key),
            key=key,
            views=[memoryview(body)] if body else [],
            headers=headers,
            may_be_repeated=may_be_repeated,
        )
        self._raced_by_wire(Like("put", len(body)), f"create {key}", put, again)

    def put_part(
        self, key: str, upload_id: str, index: int, views: Sequence[memoryview]
    ) -> dict[str, Any]:
        wire = self.wire()
        if wire is None:
            return super().put_part(key, upload_id, index, views)
        part: dict[str, Any] = {"PartNumber": index + 1, **self.checksum_of(*views)}
        query = f"partNumber={index + 1}&uploadId={quote(upload_id, safe='')}"

        def put(request: WireRequest) -> dict[str, Any]:
            tag = wire.put(
                request,
                self.full_key(key),
                key,
                views,
                headers=_checksum_header(part),
                query=query,
            )
            return {**part, "ETag": tag}

        return self._raced_by_wire(
            Like("part", sum(view.nbytes for view in views)),
            f"write part {index + 1} of {key}",
            put,
            partial(self._put_part_copy, key, upload_id, index, views),
        )

    def _raced_by_wire(
        self, like: Like, what: str, send: Callable[[WireRequest], T], again: Again[T]
    ) -> T:
        """`raced` where the first request is sent by this thread, and may be ended by the race.

        Nobody else touches the caller's memory: a second request has a copy.
        """
        filesystem = self._filesystem()
        request, first = WireRequest(), Future[T]()
        race = asyncio.run_coroutine_threadsafe(
            self.hedger.race(
                like, f"{what} in {self.url}", first, partial(again, filesystem), request.drop
            ),
            filesystem.loop,
        )
        try:
            answer = send(request)
        except Exception as error:
            if request.is_dropped:
                first.cancel()
            else:
                first.set_exception(error)
        except BaseException:
            race.cancel()
            raise
        else:
            first.set_result(answer)
        return race.result()


def _checksum_header(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The header for what `checksum_of` returns."""
    value = arguments.get("ChecksumCRC32C")
    return {} if value is None else {"x-amz-checksum-crc32c": value}


def _is_unsigned(facts: ClientFacts, transfer: Transfer) -> bool:
    if transfer.unsigned_payload is not None:
        return transfer.unsigned_payload
    return urlsplit(facts.endpoint_url).scheme == "https"
