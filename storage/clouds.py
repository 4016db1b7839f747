"""Objects in Google Cloud Storage (gs://) and Azure Blob Storage (az://), through obstore.

Both create exclusively by themselves: GCS by `x-goog-if-generation-match: 0`, Azure by
`If-None-Match: *`. Azure is tested against Azurite; GCS is not tested against any server, because
none for its XML API is available.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fsspec.asyn import get_loop
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore

from storage.errors import InvalidUrlError
from storage.obstore_objects import CloudStore, bounds
from storage.retry import RetryPolicy
from storage.store import Store, check_key

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
    url = f"{protocol}://{bucket}/{prefix}".rstrip("/")
    once, patient = _open(url, protocol, bucket, config, retry)
    return CloudStore(url, prefix, once=once, patient=patient, retry=retry, loop=get_loop())


def _open(
    url: str, protocol: str, bucket: str, config: dict[str, Any], retry: RetryPolicy
) -> tuple[Any, Any]:
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
        return store(1), store(retry.attempts_max)
    except (BaseError, OSError, ValueError, TypeError) as error:
        # Its own words may repeat the options.
        raise InvalidUrlError(
            f"{url}: the storage options or environment variables do not fit "
            f"({type(error).__name__}); check the account and the credentials"
        ) from None
