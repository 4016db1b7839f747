"""Retirement, pins and marks from any process, under the current epoch, without a claim."""

from __future__ import annotations

from ckpt.commit.appender import REAL, Appender, Build, RecordDraft, Sources
from ckpt.commit.locate import OwnLine, ResumePoint
from ckpt.commit.log import LogState, read_format
from ckpt.commit.names import attempt_epoch
from ckpt.commit.records import LiveEntry
from ckpt.commit.writer import Commit, LogWriter, must_look_first
from ckpt.errors import CheckpointError, NoCheckpoint
from storage.store import Store


class Maintenance(LogWriter):
    """Retires, pins and marks checkpoints from any process, without disturbing a running
    training.
    """

    @classmethod
    def open(
        cls, store: Store, *, unsafe_single_writer: bool = False, sources: Sources = REAL
    ) -> Maintenance:
        """Raises NoCheckpoint when there is no root or nothing ever claimed it, StoreRefused like
        `Session.claim`.
        """
        root = read_format(store)
        check_first = must_look_first(store, root, unsafe_single_writer, sources)
        appender = Appender(store, check_first=check_first, sources=sources)
        appender.log.check_end()
        if appender.log.state().epoch == 0:
            raise NoCheckpoint(f"{store.url} has no checkpoint yet: its log is empty")
        return cls(appender, root=root)

    def commit_copy(self, commit: Commit, *, of: str) -> LiveEntry:
        """Commit a copy of a live checkpoint in another layout.

        It is of no line, so a training resumes from it only by its attempt. `of` is the attempt
        that was copied; the copy's own attempt is of the root's present epoch. Raises
        CheckpointError when `of` was retired or a session has claimed the root since the copy was
        named: that session's sweep may have deleted the copy's files.
        """

        def build(state: LogState) -> RecordDraft | None:
            if state.find(commit.attempt) is not None:
                return None
            original = state.find(of)
            if original is None:
                raise CheckpointError(
                    f"{self.store.url}: {of} was retired while it was copied, so its copy was not "
                    "committed; begin again with another one, or copy to another place"
                )
            if attempt_epoch(commit.attempt) != state.epoch:
                raise CheckpointError(
                    f"{self.store.url} was claimed by a new session while {of} was copied; begin "
                    "again"
                )
            # A copy has all bytes in files of its own, so it keeps no other checkpoint alive.
            copied = commit._replace(metric=original.metric, references=())
            return RecordDraft("COMMIT", state.epoch, copied.entry(line=None))

        return self._committed(build, commit.attempt)

    def commit_rescued(
        self, commit: Commit, *, continues: ResumePoint | None, epoch: int
    ) -> LiveEntry:
        """Commit what a dead session of `epoch` has saved, as the newest state of its training.

        `continues` is what that session had restored or committed. Raises CheckpointError when a
        session has claimed the root since: its training continues from another state.
        """

        def build(state: LogState) -> RecordDraft | None:
            if state.find(commit.attempt) is not None:
                return None
            if state.epoch != epoch:
                raise CheckpointError(
                    f"{self.store.url} was claimed by a new session (epoch {state.epoch}) while "
                    f"{commit.attempt} of epoch {epoch} was rescued; it was not committed"
                )
            line = OwnLine(continues).of_next(state)
            return RecordDraft("COMMIT", epoch, commit.entry(line=line))

        return self._committed(build, commit.attempt)

    def _committed(self, build: Build, attempt: str) -> LiveEntry:
        with self._lock:
            # Nothing is appended where an earlier try stands already, whose answer was lost.
            record = self._append(build)
            entry = self._appender.log.state().find(attempt) if record is None else record.live[-1]
        if entry is None:
            raise CheckpointError(f"{self.store.url}: {attempt} was retired at once")
        return entry

    def _epoch_for(self, state: LogState) -> int:
        # Without a claim: the session of this epoch saves on.
        return state.epoch
