"""What answers of S3, and the lack of one, mean: the errors of this package.

Kept apart from the requests, because a wrong line here loses checkpoints: an error that says that
nothing happened is repeated, and so would be the one write that commits.
"""

from __future__ import annotations

import socket

import aiohttp
import botocore.exceptions as boto
from fsspec.exceptions import FSTimeoutError

from storage.errors import (
    AccessDeniedError,
    InvalidUrlError,
    KeyExistsError,
    KeyNotFoundError,
    NoSpaceError,
    OutcomeUnknownError,
    ShortReadError,
    SlowDownError,
    StorageError,
    TransientError,
)

_DENIED_CODES = {
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
}
# The server has not begun to process the request, so even a conditional write may be repeated.
_THROTTLED_CODES = {
    "RequestLimitExceeded",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_NO_SPACE_CODES = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
)
# No connection, hence no request.
_NEVER_SENT = (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)
_LOST_ON_THE_WAY = (
    boto.HTTPClientError,
    boto.IncompleteReadError,
    aiohttp.ClientError,
    FSTimeoutError,
    TimeoutError,
    ConnectionError,
)


def translated(
    error: Exception, url: str, operation: str, key: str, may_be_repeated: bool
) -> StorageError:
    """What an exception of s3fs, botocore or aiohttp means, in our own terms.

    `may_be_repeated` is False for a write that must not be sent twice: where nobody knows whether
    the server has seen it, that is OutcomeUnknownError.
    """
    cause = error.__cause__ if isinstance(error.__cause__, boto.ClientError) else error
    where = f"{operation} {key} in {url}" if key else f"{operation} {url}"
    if isinstance(cause, boto.ClientError):
        return answered(
            int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)),
            str(cause.response.get("Error", {}).get("Code", "")),
            text=f"{where}: {cause}",
            where=where,
            may_be_repeated=may_be_repeated,
        )
    if isinstance(cause, _NO_CREDENTIALS):
        return AccessDeniedError(
            f"{where}: {cause}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, "
            "or pass anon=True"
        )
    if isinstance(cause, _NEVER_SENT) and not _broke_later(cause):
        return TransientError(f"{where}: {cause}; is endpoint_url right?")
    if isinstance(cause, (*_LOST_ON_THE_WAY, boto.EndpointConnectionError)):
        text = f"{where}: {type(cause).__name__}: {cause}"
        return TransientError(text) if may_be_repeated else OutcomeUnknownError(text)
    if isinstance(cause, (boto.ParamValidationError, boto.InvalidRegionError)):
        return InvalidUrlError(f"{where}: {cause}")
    return StorageError(f"{where}: {type(cause).__name__}: {cause}")


def _broke_later(error: Exception) -> bool:
    """Whether a "could not connect" hides a connection that was made, used and lost: aiobotocore
    has one name for both, so only the underlying error shows which it was.
    """
    beneath = getattr(error, "kwargs", {}).get("error")
    never = (aiohttp.ClientConnectorError, socket.gaierror)
    return beneath is not None and not isinstance(beneath, never)


def answered(
    status: int, code: str, *, text: str, where: str, may_be_repeated: bool
) -> StorageError:
    """What an answer of the server means: its HTTP status, its error code, and both as `text`."""
    if code == "NoSuchBucket":
        return InvalidUrlError(f"{where}: there is no such bucket; create it first")
    if code in _NO_SPACE_CODES or status == 507:
        return NoSpaceError(text)
    # 409 is S3's answer while another conditional write to the key is under way: nobody has won
    # yet.
    if code in _THROTTLED_CODES or status == 429:
        return SlowDownError(text)
    if status == 409:
        return TransientError(text)
    if status == 412 or code == "PreconditionFailed":
        return KeyExistsError(f"{where}: exists already")
    if status == 416 or code == "InvalidRange":
        return ShortReadError(f"{where}: the object ends before the requested bytes")
    if status == 404 or code in ("NoSuchKey", "NoSuchUpload"):
        return KeyNotFoundError(f"{where}: no such object")
    if status in (401, 403) or code in _DENIED_CODES:
        return AccessDeniedError(f"{text}; check the credentials and the bucket's policy")
    if status >= 500 or code == "RequestTimeout":
        if not may_be_repeated:
            return OutcomeUnknownError(text)
        return SlowDownError(text) if status == 503 else TransientError(text)
    return StorageError(text)
