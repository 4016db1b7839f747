"""Options of S3: those that are ours, and what s3fs gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import s3fs
from fsspec.config import apply_config

from storage.errors import InvalidUrlError

PREFIX_NBYTES_MAX = 255

# Of one object each: no constant fits.
_OF_ONE_OBJECT = {
    *("Bucket", "Key", "Body", "IfMatch", "IfNoneMatch", "Range", "PartNumber", "UploadId"),
    *("ContentLength", "ContentMD5", "ChecksumAlgorithm", "ChecksumCRC32", "ChecksumCRC32C"),
    *("ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256"),
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """How bytes go to S3: the options that are ours and not s3fs's.

    `unsigned_payload`: leave the body out of the signature; None means over https only, where TLS
    protects it. `checksums`: send one with every object, for the server to check.
    """

    unsigned_payload: bool | None = None
    checksums: bool = True

    def sends_checksums(self, options: Mapping[str, Any]) -> bool:
        """Whether they are asked for here or in botocore's own way."""
        given = options["config_kwargs"]["request_checksum_calculation"]
        return self.checksums or given == "when_supported"


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `s3fs.S3FileSystem` for a caller's; what the caller set stays, and what
    fsspec's configuration (files, `FSSPEC_S3`, `fsspec.config.conf`) sets. Raises InvalidUrlError.
    """
    options = apply_config(s3fs.S3FileSystem, dict(options))
    refused = _OF_ONE_OBJECT & set(options.get("s3_additional_kwargs") or {})
    if refused:
        raise InvalidUrlError(
            f"s3_additional_kwargs: {', '.join(sorted(refused))} of an object cannot be the same "
            "for all; leave it out"
        )
    config = {
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
        "retries": {"total_max_attempts": 1},  # storage/retry.py repeats, nobody else
        # Our own checksums cover the data, and many servers do not know these headers.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **(options.get("config_kwargs") or {}),
    }
    # Instances of one's own: what others set or cached on a shared one must not reach us.
    return {
        **options,
        "config_kwargs": config,
        "asynchronous": False,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }
