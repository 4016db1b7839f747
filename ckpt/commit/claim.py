"""The first contact with a root: create FORMAT, and probe whether the store can commit safely."""

from __future__ import annotations

from ckpt.commit.appender import Limits, Sources
from ckpt.commit.lines import Beginning, check_new_root
from ckpt.commit.log import DCP_KEY, FORMAT_KEY, encode_format, read_format
from ckpt.errors import NoCheckpoint, StoreRefused
from storage.errors import KeyExistsError, OutcomeUnknownError, StorageError, TransientError
from storage.store import ExclusiveCreate, Store


def root_id(
    store: Store, *, sources: Sources, limits: Limits, beginning: Beginning = "quiet"
) -> str:
    """The root id, after creating FORMAT if this is the first session of the root."""
    try:
        return read_format(store).root
    except NoCheckpoint:
        if store.exists(DCP_KEY):
            raise StoreRefused(
                f"{store.url} is a checkpoint of torch.distributed.checkpoint (it has {DCP_KEY}); "
                "save to another url; `ckpt import` writes it there as one of ours"
            ) from None
        check_new_root(store, beginning)
    # Read back: of two sessions that come first, one has created it.
    _create_format(store, encode_format(sources.random_bytes(16).hex()), sources, limits)
    return read_format(store).root


def _create_format(store: Store, data: bytes, sources: Sources, limits: Limits) -> bool:
    """FORMAT exists on return; whether this call has created it, and not another one before."""
    cause: StorageError | None = None
    for _ in limits.tries(store, sources):
        try:
            store.put_if_absent(FORMAT_KEY, data)
            return True
        except KeyExistsError:
            return False
        except (OutcomeUnknownError, TransientError) as error:
            cause = error
    assert cause is not None
    raise cause


def must_look_first(store: Store, root: str, unsafe_single_writer: bool, limits: Limits) -> bool:
    """Whether appends must look before they write; raises StoreRefused when that is not allowed.

    A server may accept the conditional header and overwrite all the same (rclone does). Creating
    FORMAT again must be refused; if it is not, it was overwritten with the same bytes: no harm.
    """
    if store.exclusive_create is ExclusiveCreate.ATOMIC:
        return False
    problem = "it can only check and then write, so two writers could both win"
    if store.exclusive_create is ExclusiveCreate.CONDITIONAL:
        if not _create_format(store, encode_format(root), Sources(), limits):
            return False
        problem = "it overwrote an object that it was asked to create only if absent"
    if not unsafe_single_writer:
        raise unsafe_store(store, problem)
    return True


def unsafe_store(store: Store, problem: str) -> StoreRefused:
    """The error for a store that cannot create an object exclusively."""
    return StoreRefused(
        f"{store.url} cannot commit safely: {problem}. Use a store with conditional writes, or "
        "pass unsafe_single_writer=True when you make sure that only one job ever writes there"
    )
