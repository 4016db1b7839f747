"""What answers of S3, and the lack of one, mean: the errors of this package.

Kept apart from the requests, because a wrong line here loses checkpoints: an error that says that
nothing happened is repeated, and so would be the one write that commits.
"""

from __future__ import annotations

import botocore.exceptions as boto

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
_INVALID = (
    boto.ParamValidationError,
    boto.InvalidRegionError,
    boto.NoRegionError,
    boto.EndpointResolutionError,
    boto.UnsupportedS3ConfigurationError,
    boto.InvalidProxiesConfigError,
    boto.MissingDependencyException,
    ValueError,
)
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
# The session of an Express bucket, or a token, that ends before it was renewed.
OVER_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_ELSEWHERE_CODES = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}


def translated(
    error: Exception, url: str, operation: str, key: str, *, may_be_repeated: bool
) -> StorageError:
    """What an exception of s3fs or botocore means, in our own terms.

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
    # botocore sends nothing of ours: what it could not reach are servers of credentials.
    if isinstance(cause, (boto.HTTPClientError, boto.ConnectionError)):
        return TransientError(f"{where}: {type(cause).__name__}: {cause}")
    if isinstance(cause, _INVALID):
        return InvalidUrlError(f"{where}: {cause}")
    return StorageError(f"{where}: {type(cause).__name__}: {cause}")


def is_elsewhere(status: int, code: str) -> bool:
    """Whether an answer says that the bucket is in another region."""
    return status in (301, 302, 307, 308) or code in _ELSEWHERE_CODES


def answered(
    status: int, code: str, *, text: str, where: str, may_be_repeated: bool
) -> StorageError:
    """What an answer of the server means: its HTTP status, its error code, and both as `text`."""
    if code == "NoSuchBucket":
        return InvalidUrlError(f"{where}: there is no such bucket; create it first")
    if is_elsewhere(status, code):
        return StorageError(
            f"{text}: the bucket is in another region, and which one did not become clear; set "
            "AWS_REGION or client_kwargs={'region_name': ...}"
        )
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
