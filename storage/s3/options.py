"""Options of S3: those that are ours, those that any client honours, and what s3fs gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BUCKET_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{1,254}")
PREFIX_NBYTES_MAX = 255

# Options that other clients of S3 can honour too, some of them because they do not touch us.
_COMMON_OPTIONS = {
    *("anon", "endpoint_url", "key", "secret", "token", "username", "password", "profile"),
    *("use_ssl", "default_block_size", "default_fill_cache", "default_cache_type"),
    *("max_concurrency", "fixed_upload_size", "asynchronous", "local_expiry_check"),
}
_COMMON_CLIENT_OPTIONS = {"region_name", "endpoint_url", "use_ssl"}
_COMMON_CONFIG_OPTIONS = {
    *("connect_timeout", "read_timeout", "max_pool_connections", "retries", "s3"),
    *("signature_version", "region_name", "request_checksum_calculation"),
    *("response_checksum_validation", "user_agent", "user_agent_extra"),
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """How bytes go to S3: the options that are ours and not s3fs's.

    `fast`: by a client of our own (None, True), or all by s3fs (False).
    `unsigned_payload`: leave the body out of the signature; None means over https only, where TLS
    protects it. `checksums`: send one with every object, for the server to check.
    """

    fast: bool | None = None
    unsigned_payload: bool | None = None
    checksums: bool = True


def unusual_option(options: Mapping[str, Any]) -> str:
    """The first storage option that only s3fs can honour; "" when there is none."""
    given = {name: value for name, value in options.items() if value}
    client, config = given.pop("client_kwargs", {}), given.pop("config_kwargs", {})
    for mine, known in (
        (given, _COMMON_OPTIONS),
        (client, _COMMON_CLIENT_OPTIONS),
        (config, _COMMON_CONFIG_OPTIONS),
    ):
        for name in sorted(set(mine) - known):
            return f"the option {name}"
    return ""


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `s3fs.S3FileSystem` for a caller's; what the caller set stays."""
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
