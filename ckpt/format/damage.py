"""When bytes that do not match their checksum count as damage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ckpt.errors import Corrupt
from storage.errors import CorruptObjectError, KeyNotFoundError, StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def raising_corrupt() -> Iterator[None]:
    """A damaged object of an encoded root is raised as Corrupt, which other ranks get as it is."""
    try:
        yield
    except CorruptObjectError as error:
        raise Corrupt(str(error)) from error


def is_outage(error: Exception) -> bool:
    """Whether a store has failed, rather than what lies in it."""
    is_damage = isinstance(error, (KeyNotFoundError, CorruptObjectError))
    return isinstance(error, StorageError) and not is_damage


def once_more(read: Callable[[], T]) -> T:
    """`read()`, which reads and checks. What it raises as Corrupt is damage if it does so twice.

    Bytes can change on their way from a store, where only this check sees it.
    """
    try:
        return read()
    except Corrupt as error:
        result = read()
        logger.warning("requested once more, the bytes are right: %s", error)
        return result
