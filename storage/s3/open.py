"""From an s3:// url and its options to a store."""

from __future__ import annotations

import inspect
import re
from typing import Any

import s3fs

from storage.errors import InvalidUrlError
from storage.keys import check_key
from storage.retry import RetryPolicy
from storage.s3.options import PREFIX_NBYTES_MAX, Transfer
from storage.s3.store import S3Store

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
