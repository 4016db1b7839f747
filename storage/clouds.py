"""Objects in Google Cloud Storage (gs://) and Azure Blob Storage (az://), through obstore.

Both create exclusively by themselves: GCS by `x-goog-if-generation-match: 0`, Azure by
`If-None-Match: *`. Azure is tested against Azurite; GCS is not tested against any server, because
none for its XML API is available.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import obstore
from fsspec.asyn import get_loop
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore

from storage.errors import InvalidUrlError, KeyExistsError, KeyNotFoundError, OutcomeUnknownError
from storage.http import HttpStore
from storage.obstore_objects import Objects, Upload, bounds
from storage.ranges import LedgerWriter, PartLedger, flat_views, part_count
from storage.retry import RetryPolicy, run_publishing
from storage.store import ExclusiveCreate, ObjectInfo, Store, check_key, check_prefix

MiB = 1024 * 1024
_WRITE_ID = "writeid"  # Azure takes identifiers only
_KNOWN = {
    "gs": (
        *("service_account", "service_account_key", "application_credentials", "base_url"),
        *("skip_signature", "bearer_token"),
    ),
    "az": (
        *("account_name", "account_key", "sas_key", "client_id", "client_secret", "tenant_id"),
        *("authority_host", "federated_token_file", "msi_endpoint", "use_azure_cli", "endpoint"),
        *("skip_signature", "use_emulator"),
    ),
}
# The names that gcsfs and adlfs use.
_ALIASES = {
    "gs": {"token": "service_account", "endpoint_url": "base_url", "anon": "skip_signature"},
    "az": {"sas_token": "sas_key", "anon": "skip_signature", "endpoint_url": "endpoint"},
}


def unknown_options(protocol: str, options: Mapping[str, Any]) -> list[str]:
    """The options that obstore has not, sorted; gcsfs or adlfs may have them."""
    known = {*_KNOWN[protocol], *_ALIASES[protocol]}
    unknown = {name for name in options if name not in known}
    # Of gcsfs, it may be a mapping, an object, or a word such as "google_default".
    if protocol == "gs" and not os.path.isfile(str(options.get("token", __file__))):
        unknown.add("token")
    return sorted(unknown)


def open_cloud(protocol: str, place: str, options: dict[str, Any], retry: RetryPolicy) -> Store:
    """The store at `place`, "BUCKET" or "CONTAINER/PREFIX". Raises InvalidUrlError."""
    bucket, _, prefix = place.partition("/")
    container, _, host = bucket.partition("@")
    if protocol == "az" and host.endswith(".core.windows.net"):  # as Azure itself writes it
        bucket, options = container, {"account_name": host.partition(".")[0], **options}
    if not bucket or any(letter in bucket for letter in "@:?"):
        raise InvalidUrlError(
            f"write {protocol}://BUCKET/PREFIX; credentials are storage options or environment "
            "variables"
        )
    prefix = prefix.strip("/")
    if prefix:
        check_key(prefix)
    config = {_ALIASES[protocol].get(name, name): value for name, value in options.items()}
    if unknown := unknown_options(protocol, options):
        raise InvalidUrlError(
            f"{protocol}://{place}: unknown storage options {', '.join(unknown)}; known are "
            f"{', '.join((*_KNOWN[protocol], *_ALIASES[protocol]))}; for the options of "
            f"{'gcsfs' if protocol == 'gs' else 'adlfs'} install it"
        )
    return CloudStore(protocol, bucket, prefix, config=config, retry=retry)


class CloudStore(HttpStore):
    """Objects below `prefix` of a bucket or container. `config` is obstore's own, as keywords.

    An object of several parts is completed without a condition: the key is looked at just before.
    """

    exclusive_create = ExclusiveCreate.CONDITIONAL
    part_nbytes_min = 5 * MiB

    def __init__(
        self, protocol: str, bucket: str, prefix: str, *, config: dict[str, Any], retry: RetryPolicy
    ) -> None:
        self.url = f"{protocol}://{bucket}/{prefix}".rstrip("/")
        self.retry = retry
        self._prefix = prefix + "/" if prefix else ""
        self.objects = _open(self.url, protocol, bucket, config, retry)

    def _fetch_all(self, key: str, nbytes_max: int | None) -> bytes:
        return self.objects.get(self.full_key(key), key, nbytes_max)

    def _fetch_range(self, key: str, start: int, views: Sequence[memoryview]) -> int:
        return self.objects.fill(self.full_key(key), key, start, views)

    def create(self, key: str, nbytes: int, *, part_nbytes: int, **hints: bool) -> CloudWriter:
        ledger = PartLedger(key, nbytes, part_nbytes)
        if part_count(nbytes, part_nbytes) > 1 and part_nbytes < self.part_nbytes_min:
            raise ValueError(
                f"{key}: parts of {part_nbytes} bytes; {self.part_nbytes_min} at least"
            )
        return CloudWriter(self, ledger)

    def put_if_absent(self, key: str, data: bytes) -> None:
        # Sent once: repeated after a lost answer, it would be refused because of its own object.
        self.objects.put_new(self.full_key(key), key, bytes(data), {}, may_be_repeated=False)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        wanted = self._prefix + check_prefix(prefix)
        with self.objects.translating("list", prefix):
            # obstore's prefixes are whole directories.
            pages = obstore.list(
                self.objects.once,
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
        with self.objects.translating("info", key):
            head = obstore.head(self.objects.once, full_key)
        return ObjectInfo(key, head["size"], head["last_modified"].timestamp())

    def delete(self, key: str) -> None:
        full_key = self.full_key(key)
        gone = contextlib.suppress(FileNotFoundError)
        with self.objects.translating("delete", key), gone:
            obstore.delete(self.objects.once, full_key)

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
        with self.objects.translating("info", key):
            head = obstore.get(self.objects.once, self.full_key(key), options={"head": True})
        return dict(head.attributes)

    def full_key(self, key: str) -> str:
        """The key in the bucket."""
        return self._prefix + check_key(key)


class CloudWriter(LedgerWriter):
    """One conditional PUT at the end, or an upload in parts that obstore runs."""

    def __init__(self, store: CloudStore, ledger: PartLedger) -> None:
        super().__init__(ledger)
        self._store = store
        self._full_key = store.full_key(ledger.key)
        self._metadata = {_WRITE_ID: uuid.uuid4().hex}
        self._small = b""
        self._uploads: list[Upload] = []  # one, for an object of several parts

    def __enter__(self) -> CloudWriter:
        if part_count(self._ledger.nbytes, self.part_nbytes) > 1:
            upload = self._store.objects.upload(
                self._full_key, self._ledger.key, self.part_nbytes, self._metadata
            )
            self._uploads.append(upload)
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
        self._store.objects.put_new(
            self._full_key, self._ledger.key, self._small, self._metadata, may_be_repeated=True
        )

    def _is_ours(self) -> bool:
        try:
            metadata = self._store.metadata(self._ledger.key)
        except KeyNotFoundError:
            return False
        return metadata.get(_WRITE_ID) == self._metadata[_WRITE_ID]


def _open(
    url: str, protocol: str, bucket: str, config: dict[str, Any], retry: RetryPolicy
) -> Objects:
    place = config.get("endpoint") or config.get("base_url") or ""
    client: Any = {
        "allow_http": place.startswith("http://") or bool(config.get("use_emulator")),
        "connect_timeout": timedelta(seconds=10),
        "read_timeout": timedelta(seconds=60),
        "timeout": timedelta(minutes=10),
    }

    def store(attempts_max: int | None) -> Any:
        kind: Any = GCSStore if protocol == "gs" else AzureStore
        return kind(
            bucket,
            client_options=client,
            retry_config=bounds(attempts_max, retry),
            **config,
        )

    try:
        return Objects(url, store(1), store(retry.attempts_max), retry, get_loop())
    except (BaseError, OSError, ValueError, TypeError) as error:
        # Its own words may repeat the options.
        raise InvalidUrlError(
            f"{url}: the storage options or environment variables do not fit "
            f"({type(error).__name__}); check the account and the credentials"
        ) from None
