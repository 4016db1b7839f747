"""Errors of the storage layer, grouped by what a handler can do next."""

from __future__ import annotations


class CheckpointError(Exception):
    """Any failure of this library. Nothing was committed and nothing was overwritten unless it says
    so.
    """


class StorageError(CheckpointError):
    """Any failure of a store. The message names the operation, the key and the store's url."""


class KeyNotFoundError(StorageError):
    """The object does not exist."""


class KeyExistsError(StorageError):
    """Another writer created the object first, or an earlier attempt of ours did."""


class ShortReadError(StorageError):
    """The object ends before the requested bytes."""


class CorruptObjectError(StorageError):
    """The stored bytes of an encoded object are not those that were written under this key."""


class TooLargeError(StorageError):
    """The object has more bytes than the caller accepts; none of them were read."""


class AccessDeniedError(StorageError):
    """Read-only, no permission, or wrong credentials: a human has to act."""


class NoSpaceError(StorageError):
    """The disk or the quota is full."""


class InvalidUrlError(StorageError):
    """The url or its options cannot name a store: unknown protocol, no bucket, missing package."""


class InvalidKeyError(StorageError, ValueError):
    """Not a key: absolute, with an empty, `.` or `..` part, too long, or with a reserved name."""


class TransientError(StorageError):
    """Did not happen this time and may succeed when repeated: throttling, a reset connection."""


class SlowDownError(TransientError):
    """The server has more requests than it takes now: fewer of them would be answered sooner."""


class OutcomeUnknownError(StorageError):
    """A write was sent and no answer came: it may have happened, or may still happen."""
