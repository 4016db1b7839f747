"""Writers of a root: the first contact with it; what sessions and maintenance share.

A root is created by FORMAT, and its store is probed, whether it can commit safely. Nothing may be
deleted before its RETIRE stands in the log, and a record needs space itself. So a root on a file
system holds one object without content, its reserve, which is given up for that record alone and
made again once the checkpoint's files are gone.

Of an attempt, the files that its manifest lists or that have our names are deleted, MANIFEST first,
and nothing that a live checkpoint needs.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt.commit.appender import REAL, Appender, Build, RecordDraft, Settled, Sources
from ckpt.commit.locate import Beginning, check_new_root
from ckpt.commit.log import DCP_KEY, FORMAT_KEY, MENDED, Log, LogState, encode_format, read_format
from ckpt.commit.names import (
    MANIFEST_NAME,
    RESERVE_KEY,
    StepDirectory,
    attempt_epoch,
    attempts_on,
    is_our_name,
    parse_step_key,
    step_prefix,
)
from ckpt.commit.records import Kind, LiveEntry, Record, manifest_digest
from ckpt.errors import CheckpointError, Corrupt, NoCheckpoint, StoreRefused, UnsupportedFormat
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import decode_manifest
from storage.errors import (
    AccessDeniedError,
    KeyExistsError,
    KeyNotFoundError,
    NoSpaceError,
    OutcomeUnknownError,
    StorageError,
    TransientError,
)
from storage.store import ExclusiveCreate, Store
from storage.threads import as_done

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
    # All are tried before the first error is raised: each one deleted is space that is free.
    errors: list[Exception] = []

    def delete(key: str) -> None:
        try:
            store.delete(key)
        except Exception as error:
            errors.append(error)

    # Threads pay off only where several requests can overlap.
    for _ in as_done(delete, rest, threads=DELETERS if len(rest) > 3 else 0, name="ckpt-delete"):
        pass
    if errors:
        raise errors[0]
    # Uploads that never ended are in no listing, but take space and are paid for.
    store.abort_unfinished(prefix)
    return len(keys)


def _ours(store: Store, prefix: str) -> list[str]:
    """The keys of a step directory that belong to its attempt."""
    keys = [info.key for info in store.list(prefix) if parse_step_key(info.key) is not None]
    ours = [key for key in keys if is_our_name(key.removeprefix(prefix))]
    # Another writer may name its data files otherwise; only then the manifest is worth a request.
    if len(ours) < len(keys) and (manifest := prefix + MANIFEST_NAME) in keys:
        try:
            listed = {prefix + n for n in decode_manifest(store.get(manifest), ruled=True).files}
            ours = [key for key in keys if key in ours or key in listed]
        except (Corrupt, UnsupportedFormat, KeyNotFoundError) as error:
            text = "%s/%s: its MANIFEST does not say which files are its own (%s); files that this "
            text += "library has not named stay there"
            logger.warning(text, store.url, prefix, error)
    return ours


def delete_orphans(log: Log, state: LogState, *, before_epoch: int) -> list[str]:
    """Delete what attempts of epochs before that one left behind and no live checkpoint needs.

    They can never become live: a commit of theirs would have to come before the CLAIM of a later
    epoch, which stands. Step directories that are links stay, with a warning, and so do attempts
    with a MANIFEST whose records were lost (`Log.lost_of`), or may have been. Returns the attempts
    of which something was deleted.
    """
    store = log.store
    older = [one for one in attempts_on(store) if attempt_epoch(one.attempt) < before_epoch]
    if not older:
        return []
    needed = {e.attempt for e in state.live}
    needed |= {name for e in state.live for name in e.references}
    orphans = [one for one in older if one.attempt not in needed]
    written = [one for one in orphans if one.is_written]
    if lost := log.lost_of(written, state.slot):
        text = "%s: %d checkpoints that the log does not know stay, such as step %d (%s): its "
        text += "records were lost. `ckpt mend %s` brings them back"
        logger.warning(text, store.url, len(lost), *lost[-1][:2], store.url)
    doubtful = _in_doubt(log, state, [one for one in written if one not in lost])
    for one in doubtful:
        text = "%s: step %d (%s) stays, which was written whole and has no COMMIT: its job died "
        text += "before that, or the newest record of the log was lost. `ckpt mend %s` brings it "
        text += "back; else it is deleted once a later job has saved here"
        logger.warning(text, store.url, *one[:2], store.url)
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


class Commit(NamedTuple):
    """What a save wants to commit. Its data and manifest must be durable already.

    With `in_line` it is a state of the training that this session saves; imports are not. `nbytes`
    are those of its own data files and its MANIFEST.
    """

    attempt: str
    step: int
    manifest_nbytes: int
    manifest_digest: bytes
    metric: float | None = None
    references: tuple[str, ...] = ()
    in_line: bool = True
    nbytes: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Commit:
        """That of a checkpoint with this MANIFEST, which refers to no other."""
        header, data = manifest.header, manifest.data
        nbytes = manifest.own_nbytes + len(data)
        return cls(header.attempt, header.step, len(data), manifest_digest(data), nbytes=nbytes)

    def entry(self, *, line: int | None) -> LiveEntry:
        """Its entry in the log, without the slot and the time, which only the record has."""
        return LiveEntry(
            attempt=self.attempt,
            step=self.step,
            slot=0,
            manifest_nbytes=self.manifest_nbytes,
            manifest_digest=self.manifest_digest,
            metric=None if self.metric is None else float(self.metric),
            references=tuple(sorted(set(self.references))),
            line=line,
            nbytes=self.nbytes,
        )


class LogWriter:
    """What sessions and maintenance have in common. Every method may be called from any thread."""

    def __init__(self, appender: Appender, *, root: str) -> None:
        self.root = root
        self._appender = appender
        # Reentrant: methods that hold it call each other.
        self._lock = threading.RLock()
        self._retired: set[str] = set()
        self._gave_up_reserve = False

    @property
    def store(self) -> Store:
        return self._appender.store

    @property
    def log(self) -> Log:
        """The log of the root, to read from."""
        return self._appender.log

    def settle(self) -> Settled | None:
        """Find out the outcome of the unsettled record. Raises OutcomeUnknown while it is not
        known.
        """
        with self._lock:
            settled = self._appender.settle()
            if settled is not None and settled.landed:
                self._remember(settled.record)
            return settled

    def state(self) -> LogState:
        """What exists now."""
        with self._lock:
            state = self._appender.log.state()
            self._epoch_for(state)
            return state

    def retire(self, attempt: str, *, delete: bool = True) -> Record | None:
        """Take a checkpoint out of the live set, then delete its files, MANIFEST first.

        None when it was not live (any more); nothing is deleted then. Raises NotRetired when it is
        pinned, needed by another live checkpoint, the last one, or behind a symbolic link. With
        `delete=False` the files stay until `delete_retired`. On a full disk the space for the
        record is what dead jobs left, or the root's reserve.
        """
        with self._lock:
            victim = self._appender.log.state().find(attempt)
            # Before the RETIRE: files that nobody may delete would be left without a record of
            # them.
            if victim is not None and (problem := self.store.why_not_delete(victim.prefix)):
                raise NotRetired(f"{attempt} (step {victim.step}) stays: {problem}")
            # First the record, then the files: a crash in between leaves files that the next sweep
            # removes.
            record = self._append_retire(attempt)
        if record is not None and victim is not None and delete:
            self.delete_retired(attempt, step=victim.step)
        return record

    def pin(self, attempt: str) -> Record | None:
        """Protect a checkpoint from retirement. None when it is pinned already."""
        return self._mark("PIN", attempt, lambda entry: replace(entry, pinned=True))

    def unpin(self, attempt: str) -> Record | None:
        """Lift the protection. None when it is not pinned."""
        return self._mark("UNPIN", attempt, lambda entry: replace(entry, pinned=False))

    def verified(self, attempt: str) -> Record | None:
        """Note that all bytes of a checkpoint were read and are right. None when noted
        already.
        """
        return self._mark("VERIFIED", attempt, lambda entry: replace(entry, verified=True))

    def delete_retired(self, attempt: str, *, step: int) -> int:
        """Delete the files of an attempt that this writer knows to be retired; returns how many.

        May be repeated after a failure. Raises NotRetired when the attempt is live, needed, or may
        be a save under way: not live, of the current epoch, and not retired by this writer.
        """
        with self._lock:
            self.settle()
            state = self.state()
            self._appender.prove()
            refuse_needed(state, attempt)
            if attempt not in self._retired and attempt_epoch(attempt) >= state.epoch:
                raise NotRetired(f"{attempt} may be a save under way; nothing was deleted")
        # Not under the lock, where a commit would wait for it: what was retired never comes back.
        deleted = delete_attempt(self.store, step=step, attempt=attempt)
        # Only now is there space for it again.
        if self._gave_up_reserve:
            keep_reserve(self.store)
            self._gave_up_reserve = False
        return deleted

    def _mark(
        self, kind: Kind, attempt: str, change: Callable[[LiveEntry], LiveEntry]
    ) -> Record | None:
        def build(state: LogState) -> RecordDraft | None:
            if (entry := state.find(attempt)) is None:
                raise NoCheckpoint(
                    f"{self.store.url} has no live checkpoint {attempt}; it has "
                    f"{', '.join(e.attempt for e in state.live[-5:]) or 'none'}"
                )
            changed = change(entry)
            # Records are never removed, so none is spent on what is so already.
            if changed == entry:
                return None
            return RecordDraft(kind, self._epoch_for(state), changed)

        with self._lock:
            return self._append(build)

    def _append_retire(self, attempt: str) -> Record | None:
        """Append the RETIRE, in space that is made for it when the disk is full."""

        def build(state: LogState) -> RecordDraft | None:
            if (entry := state.find(attempt)) is None:
                return None
            if problem := why_not_retire(state, entry):
                raise NotRetired(f"{attempt} (step {entry.step}) {problem}")
            return RecordDraft("RETIRE", self._epoch_for(state), entry)

        # What dead jobs left is no loss, so it goes first; the reserve is for disks where there is
        # none.
        for make_space in (self._sweep_dead, self._use_reserve):
            try:
                return self._append(build)
            except NoSpaceError as error:
                logger.warning("%s: no space to retire %s: %s", self.store.url, attempt, error)
                make_space()
        try:
            return self._append(build)
        except NoSpaceError as error:
            keep_reserve(self.store)
            raise NoSpaceError(
                f"{error}. {attempt} stays: its end needs a record in the log, some kilobytes, and "
                "nothing is deleted before that; remove any file next to this root, then try again"
            ) from error

    def _sweep_dead(self) -> None:
        state = self._checked_state()
        delete_orphans(self.log, state, before_epoch=state.epoch)

    def _checked_state(self) -> LogState:
        """What exists now, before deleting what it does not list. Raises Corrupt where the log is
        not whole, and LogDiverged where it is not the one that this writer appends to.
        """
        state = self.state()
        # After the look: an exchanged log does not name what the checkpoints of ours need.
        self._appender.prove()
        self.log.check_end()
        return state

    def _use_reserve(self) -> None:
        if self.store.is_disk and self.store.exists(RESERVE_KEY):
            self.store.delete(RESERVE_KEY)
            self._gave_up_reserve = True

    def _append(self, build: Build) -> Record | None:
        self.settle()
        if (record := self._appender.append(build)) is not None:
            self._remember(record)
        return record

    def _remember(self, record: Record) -> None:
        if record.kind == "RETIRE" and record.attempt is not None:
            self._retired.add(record.attempt)

    def _epoch_for(self, state: LogState) -> int:
        """The epoch to write under after `state`. Raises when this writer may write no more."""
        raise NotImplementedError


RESERVE_NBYTES = 256 << 10  # a record with about a thousand live checkpoints


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
        text = "%s: no space is kept back for pruning when the disk is full: %s"
        logger.warning(text, store.url, error)


def root_id(store: Store, *, sources: Sources, beginning: Beginning = "quiet") -> str:
    """The root id, after creating FORMAT if this is the first session of the root."""
    try:
        return read_format(store)
    except NoCheckpoint:
        if store.exists(DCP_KEY):
            raise StoreRefused(
                f"{store.url} is a checkpoint of torch.distributed.checkpoint (it has {DCP_KEY}); "
                "save to another url; `ckpt import` writes it there as one of ours"
            ) from None
        check_new_root(store, beginning)
    # Read back: of two sessions that come first, one has created it.
    _create_format(store, encode_format(sources.random_bytes(16).hex()), sources)
    return read_format(store)


def _create_format(store: Store, data: bytes, sources: Sources) -> bool:
    """FORMAT exists on return; whether this call has created it, and not another one before."""
    cause: StorageError | None = None
    for _ in sources.tries(store):
        try:
            store.put_if_absent(FORMAT_KEY, data)
            return True
        except KeyExistsError:
            return False
        except (OutcomeUnknownError, TransientError) as error:
            # Repeated: the second try is refused if the first has landed, and either is fine.
            cause = error
    assert cause is not None
    raise cause


def must_look_first(
    store: Store, root: str, unsafe_single_writer: bool, sources: Sources = REAL
) -> bool:
    """Whether appends must look before they write; raises StoreRefused when that is not allowed.

    A server may accept the conditional header and overwrite all the same (rclone does). Creating
    FORMAT again must be refused; if it is not, it was overwritten with the same bytes: no harm.
    """
    if store.exclusive_create is ExclusiveCreate.ATOMIC:
        return False
    problem = "it can only check and then write, so two writers could both win"
    if store.exclusive_create is ExclusiveCreate.CONDITIONAL:
        if not _create_format(store, encode_format(root), sources):
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
