"""Leases: a reader asks retention to leave a checkpoint, for a time that ends by itself.

    leases/<attempt>-<seconds>-<16 hex digits>

An object next to the log, that names an attempt and says for how many seconds from its creation on,
by the clock of the store. Readers do not need it: without one, or with one that has ended, what
they read may be retired, and they move to another checkpoint. So a lease is no record of the log:
it fences nobody, a reader that dies leaves nothing behind that anybody has to undo, and a reader
that may not write does without. FORMAT.md, "Leases", is the specification.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ckpt.commit.names import LEASES_PREFIX
from storage.errors import StorageError
from storage.store import Store

logger = logging.getLogger(__name__)

LEASE_SECONDS_MAX = 86_400  # a longer one counts as this long
_BODY = b"a reader of this checkpoint; see FORMAT.md, Leases\n"
_KEY = re.compile(r"leases/(e[0-9]{6,18}-[0-9a-f]{16})-([0-9]{1,9})-[0-9a-f]{16}", re.ASCII)


def lease_key(attempt: str, seconds: int, unique: bytes) -> str:
    """The key of a new lease, from 8 random bytes."""
    return f"{LEASES_PREFIX}{attempt}-{seconds}-{unique.hex()}"


@contextmanager
def leased(store: Store, attempt: str, seconds: int) -> Iterator[bool]:
    """A lease for as long as the block lasts, at most `seconds`; whether there is one.

    Never raises for a store that takes no lease, such as one that may only be read.
    """
    key = lease_key(attempt, seconds, secrets.token_bytes(8))
    is_held = False
    if seconds > 0:
        try:
            store.put_if_absent(key, _BODY)
            is_held = True
        except StorageError as error:
            logger.info("%s: reading %s without a lease: %s", store.url, attempt, error)
    try:
        yield is_held
    finally:
        if is_held:
            try:
                store.delete(key)
            except StorageError as error:
                # It ends by itself, and retention removes it.
                logger.info("%s: the lease %s stays: %s", store.url, key, error)


def leases_of(store: Store, *, now_unix: float) -> Mapping[str, float]:
    """The attempts that readers have leased, and until when; for retention.

    One listing. Leases that have ended are removed. Raises the store's errors.
    """
    until: dict[str, float] = {}
    # Listed as a whole first: keys are deleted on the way.
    for info in list(store.list(LEASES_PREFIX)):
        if (match := _KEY.fullmatch(info.key)) is None:
            continue  # nobody's that we know, and not ours to remove
        seconds = min(int(match[2]), LEASE_SECONDS_MAX)
        # A creation in the future is a clock that is wrong: it must not keep anything for years.
        end = min(info.modified_unix, now_unix) + seconds
        if end <= now_unix:
            store.delete(info.key)
        else:
            until[match[1]] = max(end, until.get(match[1], end))
    return until
