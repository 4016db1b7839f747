"""Space kept back on a disk, so that a checkpoint can be retired when the disk is full.

Nothing may be deleted before its RETIRE stands in the log, and a record needs space itself. So a
root on a file system holds one object without content, which is given up for that record alone and
made again once the checkpoint's files are gone.
"""

from __future__ import annotations

import logging
import secrets

from ckpt.commit.names import RESERVE_KEY
from storage.errors import KeyExistsError, StorageError
from storage.store import Store

RESERVE_NBYTES = 256 << 10  # a record with about a thousand live checkpoints

logger = logging.getLogger(__name__)


def keep_reserve(store: Store) -> None:
    """Make the reserve of a root on a disk where it is missing. Elsewhere nothing is done.

    Never raises for the store's errors: only a later prune on a full disk is at stake.
    """
    if not store.is_disk:
        return
    try:
        if store.exists(RESERVE_KEY):
            return
        # No zeros: file systems that compress would keep nothing back.
        store.put_if_absent(RESERVE_KEY, secrets.token_bytes(RESERVE_NBYTES))
    except KeyExistsError:
        return  # another process has made it
    except StorageError as error:
        logger.warning(
            "%s: no space is kept back for pruning when the disk is full: %s", store.url, error
        )


def give_up_reserve(store: Store) -> bool:
    """Delete the reserve; whether there was one."""
    if not store.is_disk or not store.exists(RESERVE_KEY):
        return False
    store.delete(RESERVE_KEY)
    return True
