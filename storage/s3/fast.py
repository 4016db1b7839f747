"""S3 with its bytes moved by obstore (`storage.s3.objects`).

Endpoint, region, credentials and addressing style come from the s3fs client, which stays in charge
of listings, deletions and unfinished uploads. So every option and environment variable means the
same with both. Where obstore cannot honour an option, the store works as if obstore were not
installed, and logs that at debug level.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlsplit

from obstore.store import S3Store as ObstoreS3

from storage.errors import (
    KeyExistsError,
    KeyNotFoundError,
    OutcomeUnknownError,
)
from storage.forks import ForkSafeLock
from storage.ranges import PartLedger
from storage.retry import RetryPolicy
from storage.s3.objects import REQUEST_SECONDS_MAX, Objects, RangesRefused, bounds
from storage.s3.options import Transfer
from storage.s3.store import ClientFacts, S3Store, S3Writer

_log = logging.getLogger(__name__)

# obstore's threads do not survive a fork, and a call in the child would panic.
_IMPORTED_BY = os.getpid()


class FastS3Store(S3Store):
    """S3Store with obstore for what is large: reads, parts of objects, conditional PUTs.

    Uploads come straight from the caller's memory and carry a CRC-64/NVME for the server to check.
    Completing a multi-part upload is not conditional here: the key is looked at just before.
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
        self._opened: list[Objects | None] = []

    def objects(self) -> Objects | None:
        """The fast client, created at first use; None where s3fs does everything."""
        if os.getpid() != _IMPORTED_BY:
            return None
        with self._opening:
            if not self._opened:
                self._opened.append(self._open())
            return self._opened[0]

    def _open(self) -> Objects | None:
        problem = self.unusual_option()
        if not problem:
            facts = self.client_facts()
            problem = facts.problem
        if problem:
            _log.debug("%s: %s is for s3fs alone; obstore is not used", self.url, problem)
            return None
        return open_s3_objects(self.url, facts, self._transfer, self.retry)

    def close(self) -> None:
        with self._opening:
            self._opened.clear()
        super().close()

    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        objects = self.objects()
        if objects is None:
            return super()._fetch_all(key, nbytes_max)
        return objects.get(self.full_key(key), key, nbytes_max)

    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        objects = self.objects()
        if objects is not None:
            with contextlib.suppress(RangesRefused):
                return objects.fill(self.full_key(key), key, start, views)
            _log.debug("%s: a ranged read was answered by 200, not 206: reading by s3fs", self.url)
            # For good: a server that ignores a range does so each time.
            self._opened[:] = [None]
        return super()._fetch_range(key, start, views)

    def _put_new(
        self, key: str, body: bytes, metadata: dict[str, str], *, may_be_repeated: bool
    ) -> None:
        objects = self.objects()
        if objects is None:
            super()._put_new(key, body, metadata, may_be_repeated=may_be_repeated)
            return
        objects.put_new(self.full_key(key), key, body, metadata, may_be_repeated=may_be_repeated)

    def _writer(self, ledger: PartLedger) -> S3Writer:
        objects = self.objects()
        return super()._writer(ledger) if objects is None else FastS3Writer(self, objects, ledger)


class FastS3Writer(S3Writer):
    """Several parts are one upload that obstore runs and repeats the requests of."""

    def __init__(self, store: FastS3Store, objects: Objects, ledger: PartLedger) -> None:
        super().__init__(store, ledger)
        self._objects = objects

    def __enter__(self) -> FastS3Writer:
        if self.in_parts:
            self._upload = self._objects.upload(
                self._full_key, self._ledger.key, self.part_nbytes, self._metadata
            )
        return self

    def _send_part(self, index: int, views: Sequence[memoryview]) -> None:
        self._upload.write(index, views)

    def _publish(self) -> None:
        if not self.in_parts:
            super()._publish()
            return
        store, key = self._store, self._ledger.key
        with contextlib.suppress(KeyNotFoundError):
            # obstore has no conditional completion. The window between this look and the end is
            # harmless for data files, whose names are unique, and the record that commits is one
            # PUT.
            store.retry.run(lambda: store.info(key))
            raise KeyExistsError(f"create {key} in {store.url}: exists already")
        try:
            self._upload.finish()
        except (KeyNotFoundError, OutcomeUnknownError):
            # Of a request whose answer was lost we learn by its repetition: the upload is gone.
            if not store.retry.run(self._is_ours):
                raise

    def _discard(self) -> None:
        if self.in_parts:
            self._upload.abort()


def open_s3_objects(
    url: str, facts: ClientFacts, transfer: Transfer, retry: RetryPolicy
) -> Objects:
    """The bucket of `facts`, with unsigned payloads and checksums as `transfer` has them."""
    is_tls = urlsplit(facts.endpoint_url).scheme == "https"
    unsigned = transfer.unsigned_payload
    config: dict[str, Any] = {
        "endpoint": facts.endpoint_url,
        "region": facts.region,
        "virtual_hosted_style_request": facts.bucket_in_host,
        "unsigned_payload": is_tls if unsigned is None else unsigned,
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
