"""Deletion of attempts: what their manifest or our names list, MANIFEST first, nothing needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ckpt.commit.log import MENDED, Log, LogState
from ckpt.commit.names import (
    MANIFEST_NAME,
    StepDirectory,
    attempt_epoch,
    attempts_on,
    is_our_name,
    parse_step_key,
    step_prefix,
)
from ckpt.commit.records import LiveEntry
from ckpt.errors import CheckpointError, Corrupt, UnsupportedFormat
from storage.errors import AccessDeniedError, KeyNotFoundError
from storage.store import Store

logger = logging.getLogger(__name__)

DELETERS = 8


class NotRetired(CheckpointError):
    """This checkpoint may not be retired: pinned, needed by another, the last one, or not there."""


def why_not_retire(state: LogState, entry: LiveEntry) -> str:
    """Why a live checkpoint has to stay, and what to do first; "" when it may go."""
    # References lead to older commits. Looking at every checkpoint would make a prune of a large
    # root take the square of their number.
    users = state.entries.users_of(entry.attempt, after=entry.slot)
    if entry.pinned:
        return "is pinned; unpin it first"
    if users:
        return (
            f"is needed by {users[0].attempt} (step {users[0].step}), whose files are partly its "
            "own; retire that first"
        )
    if len(state.entries) == 1:
        return "is the only checkpoint; save another first"
    others = (e for e in state.newest_first() if e.line is not None and e.slot != entry.slot)
    if entry.line is not None and next(others, None) is None:
        return (
            "is the only checkpoint that a training has saved here; without it an import would be "
            "resumed: save another first"
        )
    return ""


def refuse_needed(state: LogState, attempt: str) -> None:
    """Raise NotRetired when files of the attempt belong to a live checkpoint."""
    if state.find(attempt) is not None or state.entries.users_of(attempt):
        raise NotRetired(f"{attempt} is live or needed by a live checkpoint; nothing was deleted")


def delete_attempt(store: Store, *, step: int, attempt: str) -> int:
    """Delete what we wrote below a step directory and nothing else; returns how many objects.

    That is what its MANIFEST lists, and what has a name that this library gives. MANIFEST goes
    first: a crash in between leaves unreferenced files, never a torn checkpoint. Raises
    AccessDeniedError, deleting nothing, where the directory is a symbolic link.
    """
    prefix = step_prefix(step, attempt)
    if problem := store.why_not_delete(prefix):
        raise AccessDeniedError(f"delete {prefix} in {store.url}: {problem}")
    keys = _ours(store, prefix)
    manifest = prefix + MANIFEST_NAME
    if manifest in keys:
        store.delete(manifest)
    rest = [key for key in keys if key != manifest]
    # Threads pay off only where several requests can overlap.
    if len(rest) < 4:
        for key in rest:
            store.delete(key)
    else:
        with ThreadPoolExecutor(DELETERS, thread_name_prefix="ckpt-delete") as pool:
            _all_results(pool.submit(store.delete, key).result for key in rest)
    # Uploads that never ended are in no listing, but take space and are paid for.
    store.abort_unfinished(prefix)
    return len(keys)


def _ours(store: Store, prefix: str) -> list[str]:
    """The keys of a step directory that belong to its attempt."""
    keys = [info.key for info in store.list(prefix)]
    keys = [key for key in keys if parse_step_key(key) is not None]
    ours = [key for key in keys if is_our_name(key.removeprefix(prefix))]
    # Another writer may name its data files otherwise; only then the manifest is worth a request.
    if len(ours) < len(keys) and prefix + MANIFEST_NAME in keys:
        listed = _files_listed(store, prefix)
        ours = [key for key in keys if key in ours or key.removeprefix(prefix) in listed]
    return ours


def _files_listed(store: Store, prefix: str) -> frozenset[str]:
    """What the MANIFEST of a step directory lists; nothing when it cannot be read."""
    from ckpt.format.manifest_codec import decode_manifest

    try:
        return frozenset(decode_manifest(store.get(prefix + MANIFEST_NAME), ruled=True).files)
    except (Corrupt, UnsupportedFormat, KeyNotFoundError) as error:
        logger.warning(
            "%s/%s: its MANIFEST does not say which files are its own (%s); files that this "
            "library has not named stay there",
            store.url,
            prefix,
            error,
        )
        return frozenset()


def delete_orphans(log: Log, state: LogState, *, before_epoch: int) -> list[str]:
    """Delete what attempts of epochs before that one left behind and no live checkpoint needs.

    They can never become live: a commit of theirs would have to come before the CLAIM of a later
    epoch, which stands. Step directories that are links stay, with a warning, and so do attempts
    with a MANIFEST whose records were lost (`Log.lost_of`), or may have been. Returns the attempts
    of which something was deleted.
    """
    store = log.store
    needed = {e.attempt for e in state.live}
    needed |= {name for e in state.live for name in e.references}
    orphans = [
        one
        for one in attempts_on(store)
        if attempt_epoch(one.attempt) < before_epoch and one.attempt not in needed
    ]
    written = [one for one in orphans if one.is_written]
    lost = log.lost_of(written, state.slot)
    if lost:
        logger.warning(
            "%s: %d checkpoints that the log does not know stay, such as step %d (%s): its records "
            "were lost. `ckpt mend %s` brings them back",
            store.url,
            len(lost),
            *lost[-1][:2],
            store.url,
        )
    doubtful = _in_doubt(log, state, [one for one in written if one not in lost])
    for one in doubtful:
        logger.warning(
            "%s: step %d (%s) stays, which was written whole and has no COMMIT: its job died "
            "before that, or the newest record of the log was lost. `ckpt mend %s` brings it back; "
            "else it is deleted once a later job has saved here",
            store.url,
            *one[:2],
            store.url,
        )
    swept = []
    for step, attempt, *_ in (one for one in orphans if one not in lost and one not in doubtful):
        if problem := store.why_not_delete(step_prefix(step, attempt)):
            logger.warning("%s: what is left of %s stays: %s", store.url, attempt, problem)
        elif delete_attempt(store, step=step, attempt=attempt):
            swept.append(attempt)
    return swept


def _in_doubt(
    log: Log, state: LogState, written: Sequence[StepDirectory]
) -> tuple[StepDirectory, ...]:
    """Those of `written`, which have a MANIFEST and are not live, whose COMMIT may have been the
    newest record, and lost: no job after theirs has committed, and none of the last records tells
    of them. A job that died while it deleted had retired just before.
    """
    newest = next(state.newest_first(), None)
    since = 0 if newest is None else attempt_epoch(newest.attempt)
    left = {one.attempt: one for one in written if attempt_epoch(one.attempt) >= since}
    for record in log.last_records() if left else ():
        left.pop(record.attempt or "", None)
        if record.write_id.startswith(MENDED):  # what was whole then is live since
            left = {a: one for a, one in left.items() if attempt_epoch(a) >= record.epoch}
    return tuple(left.values())


def _all_results(results: Iterable[Callable[[], None]]) -> None:
    """Wait for every one, then raise the first failure."""
    errors: list[Exception] = []
    for result in list(results):
        try:
            result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
