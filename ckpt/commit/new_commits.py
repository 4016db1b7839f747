"""What a training has committed since the last look: for readers that keep up with a root."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt.commit.lines import of_step, resumable
from ckpt.commit.log import Log, read_format
from ckpt.commit.records import LiveEntry
from ckpt.errors import LogDiverged, NoCheckpoint
from storage.store import Store

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
            self._root = read_format(self.store).root
        except NoCheckpoint:
            if next(iter(self.store.list("")), None) is None:
                return False  # the training is about to begin
            raise
        return True

    def _check_root(self) -> None:
        """Raise LogDiverged unless this is the root of the first look, with the same log."""
        try:
            root = read_format(self.store).root
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
