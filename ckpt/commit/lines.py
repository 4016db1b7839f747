"""Lines: which commits of a root are states of one training, one after the other.

A root can hold more than what one training has saved: imports, copies in another layout, and what
was saved before a training went back to an older step. Every commit of a training belongs to a
line; all other commits belong to none. A session continues the line of the checkpoint that it
restored. A session that restored an older checkpoint on purpose, or none, begins a new line with
its next commit.

A session that has restored nothing begins a line only where it may (`check_beginning`): a job that
forgot to restore must not go unnoticed. Trainings that share a root for good have names: each is a
root of its own below it (`ckpt.commit.names.line_prefix`).

The latest checkpoint is the newest commit of any line (`ckpt.commit.log.latest_of`). It is always
in the line that was written last, and never an import.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt.commit.log import Log, LogState, latest_of, read_format
from ckpt.commit.names import line_names
from ckpt.commit.records import FIRST_LINE, LiveEntry
from ckpt.errors import LogDiverged, NoCheckpoint, StoreRefused
from storage.store import Store

logger = logging.getLogger(__name__)

Beginning = Literal["refuse", "warn", "anew", "quiet"]
"""What to do where a process that has restored nothing saves to a root of another training: refuse
it (a `Checkpointer`), warn (a bare save), or begin a line of its own as it was asked to."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a process has restored from a root. `on_purpose`: it requested this one, by its step or
    attempt, rather than the newest one that is whole. `attempt` is "" for what no commit has, such
    as a near checkpoint before the first: a new line begins.
    """

    attempt: str
    on_purpose: bool


@dataclass(frozen=True, slots=True)
class OwnLine:
    """The line of one session: that of the checkpoint `restored` since its last commit, else its
    own `line`, which is None before its first commit.
    """

    restored: ResumePoint | None = None
    line: int | None = None

    def of_next(self, state: LogState) -> int:
        """The line of a commit that follows `state`."""
        if self.restored is None:
            return _new_line(state) if self.line is None else self.line
        entry = state.find(self.restored.attempt)
        if entry is None or entry.line is None:
            return _new_line(state)
        newest = next(e for e in state.newest_first() if e.line == entry.line)
        # The newest one that is whole may be older than damaged ones of the same line.
        continues = newest is entry or not self.restored.on_purpose
        return entry.line if continues else _new_line(state)


def check_beginning(store: Store, state: LogState, beginning: Beginning) -> None:
    """Refuse or warn, as `beginning` says, where a training has saved before. Raises
    StoreRefused.
    """
    newest = next((entry for entry in state.newest_first() if entry.line is not None), None)
    if newest is not None:
        others = f"{line_text(newest.line)}, whose newest checkpoint is step {newest.step}"
        _begin(store, beginning, others)


def check_new_root(store: Store, beginning: Beginning) -> None:
    """As `check_beginning`, before a root is made above those of named lines."""
    if beginning != "quiet" and (names := line_names(store)):
        _begin(store, beginning, f"the named lines {', '.join(names)}")


def _begin(store: Store, beginning: Beginning, others: str) -> None:
    others = f"{store.url} holds {others}, which this process has neither restored nor loaded"
    ways = (
        "To continue that training, call restore() (or ckpt.load) before the first save; to begin "
        "another one here, pass begin_anew=True or line=NAME to Checkpointer; or save to another "
        "url"
    )
    if beginning == "refuse":
        raise StoreRefused(f"{others}. Nothing was saved. {ways}")
    if beginning == "warn":
        logger.warning("%s: this save begins a line of its own. %s", others, ways)
    if beginning == "anew":
        logger.warning("%s: a line of its own begins here, as begin_anew=True asks", others)


def _new_line(state: LogState) -> int:
    """The name of a line that begins with the next commit: its slot, which no line had before."""
    has_lines = any(entry.line is not None for entry in state.newest_first())
    return state.slot + 1 if has_lines else FIRST_LINE


def resumable(live: Sequence[LiveEntry]) -> list[LiveEntry]:
    """What a training may resume from, in the order in which to try.

    The line of the latest checkpoint, newest commit first; then checkpoints of other lines with
    lower steps than any of that line, because it may have begun there. Later steps of other lines
    are what the training went back from. Without any line, everything, newest first.
    """
    latest = latest_of(live)
    if latest is None or latest.line is None:
        return list(reversed(live))
    own = [entry for entry in reversed(live) if entry.line == latest.line]
    first_step = min(entry.step for entry in own)
    others = [
        entry
        for entry in reversed(live)
        if entry.line not in (None, latest.line) and entry.step < first_step
    ]
    return [*own, *others]


def of_step(live: Sequence[LiveEntry], step: int | None) -> list[LiveEntry]:
    """The checkpoints of one step, or of all: of lines, newest first, then those of none."""
    entries = [entry for entry in reversed(live) if step in (None, entry.step)]
    # The sort is stable: within both groups the order stays.
    return sorted(entries, key=lambda entry: entry.line is None)


def latest_last(live: Sequence[LiveEntry]) -> list[LiveEntry]:
    """All checkpoints in the order of their commits, but those of no line first, so that the last
    one is always the latest.
    """
    return sorted(live, key=lambda entry: (entry.line is not None, entry.slot))


def line_text(line: int | None) -> str:
    """A line in words: `line 0`, or `no line`."""
    return "no line" if line is None else f"line {line}"


AGAIN_MAX = 32  # looks between two tries of a checkpoint that could not be taken


class NewCommits:
    """Looks at the log of one root: two small requests while nothing is new. Writes nothing.

    Commits count as seen once `seen` was called. What a training commits after it went back to an
    older step is new, and so is the latest again, whatever the steps. What could not be taken comes
    again, after 1, 2, 4 and more looks: files of a mirror may arrive late, and damage is mended.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._log = Log(store)
        self._root = ""
        self._seen_slot = -1
        self._again: frozenset[str] = frozenset()
        self._idle, self._wait = 0, 1

    def look(self) -> list[LiveEntry]:
        """The unseen checkpoints, in the order in which to try them: see `resumable`.

        Empty where nothing was saved yet. Raises LogDiverged when the root is another one or its
        log was rolled back, NoCheckpoint when something else is at its url, Corrupt for a damaged
        log, and the store's errors.
        """
        if not self._root and not self._is_there():
            return []
        # First of all: what another log says is no news of this root.
        if (newest := self._log.newest) is not None and not self._log.holds(newest):
            self._check_root()
        state = self._log.state()
        if state.slot <= self._seen_slot:
            self._idle += 1
            if not self._again or self._idle < self._wait:
                return []
            self._idle, self._wait = 0, min(2 * self._wait, AGAIN_MAX)
        return [
            entry
            for entry in resumable(state.live)
            if entry.slot > self._seen_slot or entry.attempt in self._again
        ]

    def seen(self, but: Iterable[str] = ()) -> None:
        """Everything that `look` or `of_step` knew of is seen, but for these attempts."""
        newest = self._log.newest
        if newest is not None:
            self._seen_slot = max(self._seen_slot, newest.slot)
        if (again := frozenset(but)) != self._again:
            self._again, self._idle, self._wait = again, 0, 1

    def look_again(self) -> None:
        """Nothing is seen any more: the next look gives the newest there is."""
        self._seen_slot = -1

    def of_step(self, step: int, attempt: str) -> Sequence[LiveEntry]:
        """The checkpoints of one step, or the one that is called `attempt`, as `look` orders them.

        Raises as `look`, and NoCheckpoint where there is none.
        """
        if not self._root and not self._is_there():
            raise NoCheckpoint(f"{self.store.url} has no checkpoint yet: it is empty")
        live = self._log.state().live
        self._check_root()
        entries = [one for one in of_step(live, step) if attempt in ("", one.attempt)]
        if not entries:
            steps = ", ".join(str(one.step) for one in live[-10:])
            raise NoCheckpoint(
                f"{self.store.url} has no step {step}{attempt and ' '}{attempt}; the newest are "
                f"{steps or 'none'}"
            )
        return entries

    def _is_there(self) -> bool:
        """Whether there is a root. Raises NoCheckpoint when something else is there."""
        try:
            self._root = read_format(self.store)
        except NoCheckpoint:
            if next(iter(self.store.list("")), None) is None:
                return False  # the training is about to begin
            raise
        return True

    def _check_root(self) -> None:
        """Raise LogDiverged unless this is the root of the first look, with the same log."""
        try:
            root = read_format(self.store)
        except NoCheckpoint as error:
            raise self._diverged(f"it is gone: {error}") from error
        if root != self._root:
            raise self._diverged("another training has begun a root there")
        newest = self._log.newest
        if newest is not None and not self._log.holds(newest):
            raise self._diverged(f"slot {newest.slot} of its log is not what it was")

    def _diverged(self, why: str) -> LogDiverged:
        return LogDiverged(
            f"{self.store.url} is not the root that was followed: {why}. What was loaded stays as "
            "it is; follow the place where the training saves now"
        )
