"""Bytes by key: local disk, S3, memory, any filesystem of fsspec. No torch, no checkpoints."""

from __future__ import annotations

from storage.errors import (
    AccessDeniedError,
    CorruptObjectError,
    InvalidKeyError,
    InvalidUrlError,
    KeyExistsError,
    KeyNotFoundError,
    NoSpaceError,
    OutcomeUnknownError,
    ShortReadError,
    StorageError,
    TooLargeError,
    TransientError,
)
from storage.generic import FsspecStore
from storage.location import OnFilesystem, PrefixStore, StoreLike
from storage.memory import BufferedWriter
from storage.retry import RetryPolicy
from storage.schemes import StoreFactory, register_store
from storage.store import (
    ByteRange,
    ExclusiveCreate,
    ObjectInfo,
    ObjectWriter,
    Store,
    check_key,
    check_prefix,
)
from storage.url import open_store, options_of_other

__all__ = [
    "AccessDeniedError",
    "BufferedWriter",
    "ByteRange",
    "CorruptObjectError",
    "ExclusiveCreate",
    "FsspecStore",
    "InvalidKeyError",
    "InvalidUrlError",
    "KeyExistsError",
    "KeyNotFoundError",
    "NoSpaceError",
    "ObjectInfo",
    "ObjectWriter",
    "OnFilesystem",
    "OutcomeUnknownError",
    "PrefixStore",
    "RetryPolicy",
    "ShortReadError",
    "StorageError",
    "Store",
    "StoreFactory",
    "StoreLike",
    "TooLargeError",
    "TransientError",
    "check_key",
    "check_prefix",
    "open_store",
    "options_of_other",
    "register_store",
]
