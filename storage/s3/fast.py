"""S3 with its bytes moved by `storage.s3.wire`, and what commits by obstore (`storage.s3.objects`).

Endpoint, region, credentials and addressing style come from the s3fs client, which stays in charge
of listings, deletions, unfinished uploads and whatever is sent a second time. So every option and
environment variable means the same with both. Where these clients cannot honour an option, the
store works as if obstore were not installed, and logs that at debug level.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from obstore.store import S3Store as ObstoreS3

from storage.forks import ForkSafeLock
from storage.hedging import Like
from storage.retry import RetryPolicy
from storage.s3.facts import ClientFacts
from storage.s3.objects import REQUEST_SECONDS_MAX, Objects, bounds
from storage.s3.options import Transfer
from storage.s3.requests import Again, filled
from storage.s3.store import S3Store
from storage.s3.wire import Wire, WireRequest

T = TypeVar("T")

_log = logging.getLogger(__name__)

# obstore's threads do not survive a fork, and a call in the child would panic.
_IMPORTED_BY = os.getpid()


class _Clients(NamedTuple):
    objects: Objects
    wire: Wire


class FastS3Store(S3Store):
    """S3Store with reads and data files straight from and into the caller's memory
    (`storage.s3.wire`), and what commits by obstore. Bodies carry a checksum for the server.
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
        self._opened: list[_Clients | None] = []

    def objects(self) -> Objects | None:
        """The fast client, created at first use; None where s3fs does everything."""
        clients = self._clients()
        return None if clients is None else clients.objects

    def _clients(self) -> _Clients | None:
        if os.getpid() != _IMPORTED_BY:
            return None
        with self._opening:
            if not self._opened:
                self._opened.append(self._open())
            return self._opened[0]

    def _open(self) -> _Clients | None:
        problem = self.unusual_option()
        if not problem:
            facts = self.client_facts()
            problem = facts.problem
        if problem:
            _log.debug("%s: %s is for s3fs alone; obstore is not used", self.url, problem)
            return None
        objects = open_s3_objects(self.url, facts, self._transfer, self.retry)
        wire = Wire(self.url, facts, unsigned=_is_unsigned(facts, self._transfer))
        return _Clients(objects, wire)

    def close(self) -> None:
        with self._opening:
            for clients in self._opened:
                if clients is not None:
                    clients.wire.close()
            self._opened.clear()
        super().close()

    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        clients = self._clients()
        if clients is None:
            return super()._fetch_all(key, nbytes_max)
        return self._raced_by_wire(
            Like("get", nbytes_max or 0),
            f"read {key}",
            lambda request: clients.wire.get(request, self.full_key(key), key, nbytes_max),
            partial(self._read_all, key=key, nbytes_max=nbytes_max),
        )

    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        clients = self._clients()
        if clients is None:
            return super()._fetch_range(key, start, views)
        nbytes = sum(view.nbytes for view in views)

        def fill(request: WireRequest) -> int | memoryview:
            return clients.wire.fill(request, self.full_key(key), key, start, views)

        again = partial(self._read_copy, key=key, start=start, nbytes=nbytes)
        return filled(self._raced_by_wire(Like("read", nbytes), f"read {key}", fill, again), views)

    def put_new(
        self, key: str, body: bytes, metadata: dict[str, str], again: Again[object] | None = None
    ) -> None:
        clients = self._clients()
        if clients is None:
            super().put_new(key, body, metadata, again)
            return
        full_key = self.full_key(key)
        if again is None:
            clients.objects.put_new(full_key, key, body, metadata, may_be_repeated=False)
            return
        headers = {"If-None-Match": "*", **_checksum_header(self.checksum_of(body))}
        headers |= {f"x-amz-meta-{name}": value for name, value in metadata.items()}
        views = [memoryview(body)] if body else []
        self._raced_by_wire(
            Like("put", len(body)),
            f"create {key}",
            lambda request: clients.wire.put(request, full_key, key, views, headers=headers),
            again,
        )

    def put_part(
        self, key: str, upload_id: str, index: int, views: Sequence[memoryview]
    ) -> dict[str, Any]:
        clients = self._clients()
        if clients is None:
            return super().put_part(key, upload_id, index, views)
        part: dict[str, Any] = {"PartNumber": index + 1, **self.checksum_of(*views)}
        query = f"partNumber={index + 1}&uploadId={quote(upload_id, safe='')}"

        def put(request: WireRequest) -> dict[str, Any]:
            tag = clients.wire.put(
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


def open_s3_objects(
    url: str, facts: ClientFacts, transfer: Transfer, retry: RetryPolicy
) -> Objects:
    """The bucket of `facts`, with unsigned payloads and checksums as `transfer` has them."""
    is_tls = urlsplit(facts.endpoint_url).scheme == "https"
    config: dict[str, Any] = {
        "endpoint": facts.endpoint_url,
        "region": facts.region,
        "virtual_hosted_style_request": facts.bucket_in_host,
        "unsigned_payload": _is_unsigned(facts, transfer),
        "skip_signature": facts.anonymous,
        "conditional_put": "etag",
    }
    if transfer.checksums:
        config["checksum_algorithm"] = "CRC64NVME"
    if not facts.anonymous:
        config["credential_provider"] = _credentials_by(facts)
    client: Any = {
        "allow_http": not is_tls,
        "connect_timeout": timedelta(seconds=facts.connect_timeout_seconds),
        "read_timeout": timedelta(seconds=facts.read_timeout_seconds),
        "timeout": timedelta(seconds=REQUEST_SECONDS_MAX),
    }

    def store(attempts_max: int | None) -> Any:
        retry_config = bounds(attempts_max, retry)
        retry_config["backoff"] = {
            "init_backoff": timedelta(seconds=retry.pause_first_seconds),
            "max_backoff": timedelta(seconds=retry.pause_max_seconds),
            "base": 2,
        }
        return ObstoreS3(facts.bucket, client_options=client, retry_config=retry_config, **config)

    return Objects(url, store(1), store(retry.attempts_max), retry, facts.loop)


def _is_unsigned(facts: ClientFacts, transfer: Transfer) -> bool:
    if transfer.unsigned_payload is not None:
        return transfer.unsigned_payload
    return urlsplit(facts.endpoint_url).scheme == "https"


def _credentials_by(facts: ClientFacts) -> Any:
    """What obstore calls when it needs credentials: the s3fs client's own, refreshed by it."""

    def credentials() -> dict[str, Any]:
        key, secret, token, may_expire = facts.credentials()
        # obstore calls again some minutes before that; botocore renews its own well before they
        # expire.
        expires_at = datetime.now(timezone.utc) + timedelta(minutes=10) if may_expire else None
        return {
            "access_key_id": key,
            "secret_access_key": secret,
            "token": token,
            "expires_at": expires_at,
        }

    return credentials
