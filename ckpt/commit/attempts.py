"""The attempts that a listing of `steps/` shows, whatever the log says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckpt.commit.names import MANIFEST_NAME, STEPS_PREFIX, parse_step_key, step_prefix
from storage.store import Store

LISTED_MAX = 1000  # a page of S3


class StepDirectory(NamedTuple):
    """One attempt as a listing shows it: whether it has a MANIFEST, so that all of it was written,
    and when its first object was.
    """

    step: int
    attempt: str
    is_written: bool
    modified_unix: float


def attempts_on(store: Store, *, after: str = "") -> Iterator[StepDirectory]:
    """Every attempt that has an object of ours behind the key `after`, by its first one (MANIFEST
    comes before data files): one listing, and one more for each directory with more than a page of
    them.
    """
    listing = store.list(STEPS_PREFIX, after=after)
    directory, count = "", 0
    while (info := next(listing, None)) is not None:
        if directory and info.key.startswith(directory):
            count += 1
            if count == LISTED_MAX:
                # "0" is the character after "/": this key is greater than all keys in it.
                listing = store.list(STEPS_PREFIX, after=directory[:-1] + "0")
        elif (parsed := parse_step_key(info.key)) is not None:
            step, attempt, name = parsed
            directory, count = step_prefix(step, attempt), 0
            yield StepDirectory(step, attempt, name == MANIFEST_NAME, info.modified_unix)
