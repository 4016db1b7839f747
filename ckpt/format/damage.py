"""Damage that a store has found itself, in an object of an encoded root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import Corrupt
from storage.errors import CorruptObjectError


@contextmanager
def raising_corrupt() -> Iterator[None]:
    """A damaged object of an encoded root is raised as Corrupt, which other ranks get as it is."""
    try:
        yield
    except CorruptObjectError as error:
        raise Corrupt(str(error)) from error
