"""Targets of a command that can die: the same command, repeated, continues them.

    begin -> objects that are missing -> end (sync, then the last objects in order)

Every run of a command makes the same objects, so what an earlier run has finished is kept. Nothing
is ever overwritten. The last object makes the target exist; it is created once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice

from ckpt.commit.log import FORMAT_KEY
from ckpt.commit.names import MANIFEST_NAME
from ckpt.errors import CheckpointError
from storage import ByteRange, KeyExistsError, KeyNotFoundError, Store

LOOKED_AT_MAX = 100_000  # keys at the target that are looked at before anything is written


def begin(
    target: Store, *, others: Collection[str], last: str, is_ours: Callable[[bytes], bool]
) -> bytes | None:
    """The object `last` if an earlier run has ended; otherwise None, and the target may be written.

    `others` are the keys of all other objects; what dead writers left unfinished is removed.
    `is_ours` says whether `last` is what this run would end with. Raises CheckpointError when there
    is anything else.
    """
    ended = stored(target, last)
    if ended is not None:
        if not is_ours(ended):
            raise _is_of_another(target, last)
        return ended
    refuse_others(target, {last, *others})
    target.abort_unfinished("")
    return None


def end(target: Store, written: Collection[str], rest: Iterable[tuple[str, bytes]]) -> None:
    """Make the objects `written` durable, then create those of `rest`, keys with contents, the last
    of which makes the target exist. Raises CheckpointError when another one is there.
    """
    # Durable before the last object says so.
    target.sync(written)
    for key, data in rest:
        put_once(target, key, data)


def stored(target: Store, key: str) -> bytes | None:
    """An object, or None when it is not there."""
    try:
        return target.get(key)
    except KeyNotFoundError:
        return None


def put_once(target: Store, key: str, data: bytes) -> None:
    """`key` is there with these bytes on return, by this run or by an earlier one."""
    try:
        target.put_if_absent(key, data)
    except KeyExistsError as error:
        # An earlier run may have died right after this object.
        if stored(target, key) != data:
            raise _is_of_another(target, key) from error


def is_written(target: Store, key: str, nbytes: int, head: bytes) -> bool:
    """Whether an earlier run has finished the object `key`. `head` are its first bytes, as many as
    are known before it is written, or none. Raises CheckpointError when another object is there.
    """
    try:
        found_nbytes = target.info(key).nbytes
    except KeyNotFoundError:
        return False
    if found_nbytes != nbytes or (head and target.get(key, ByteRange(0, len(head))) != head):
        raise is_another_file(target, key)
    return True


def is_another_file(target: Store, key: str) -> CheckpointError:
    """The error for an object in the place of one that is to be written."""
    return CheckpointError(
        f"{target.url}/{key} exists already and is not the file to be written; nothing is ever "
        "overwritten: remove it, or choose another target"
    )


def refuse_others(target: Store, known: Collection[str]) -> None:
    """Raises CheckpointError when `target` holds what no unfinished run of this command left."""
    for info in islice(target.list(""), LOOKED_AT_MAX):
        if info.key == FORMAT_KEY and FORMAT_KEY not in known:
            raise CheckpointError(
                f"{target.url} is the root of a run, and a copy needs a directory of its own; give "
                "another target, such as a new directory next to it"
            )
        if info.key not in known:
            what = "another checkpoint" if info.key == MANIFEST_NAME else "other things"
            raise CheckpointError(
                f"{target.url} holds {what} (such as {info.key!r}); nothing is ever overwritten: "
                "give an empty or new directory"
            )


def _is_of_another(target: Store, key: str) -> CheckpointError:
    return CheckpointError(
        f"{target.url}/{key} exists already and is of another checkpoint; nothing is ever "
        "overwritten: remove it, or give another target"
    )
