"""What a training has committed since the last look: for readers that keep up with a root."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.commit.lines import of_step, resumable
from ckpt.commit.log import Log, read_format
from ckpt.commit.records import LiveEntry
from ckpt.errors import LogDiverged, NoCheckpoint
from storage.store import Store

# Looks that find nothing, of which one also looks whether the root is still the one it was.
IDLE_LOOKS = 32


class NewCommits:
    """Looks at the log of one root: one small request while nothing is new. Writes nothing.

    Commits count as seen once `seen` was called. What a training commits after it went back to an
    older step is new, and so is the latest again, whatever the steps.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._log = Log(store)
        self._root = ""
        self._seen_slot = self._last_slot = -1
        self._all_seen = False
        self._idle = 0

    def look(self) -> list[LiveEntry]:
        """The unseen checkpoints, in the order in which to try them: see `resumable`.

        Empty where nothing was saved yet. Raises LogDiverged when the root is another one or its
        log was rolled back, NoCheckpoint when something else is at its url, Corrupt for a damaged
        log, and the store's errors.
        """
        if not self._root and not self._is_there():
            return []
        before, state = self._last_slot, self._log.state()
        self._last_slot = state.slot
        if self._all_seen and state.slot == before:
            self._idle += 1
            # A root that was moved away, or that a job began anew, has no next slot either.
            if self._idle < IDLE_LOOKS:
                return []
        self._all_seen = False
        self._check_root()
        self._idle = 0
        return [entry for entry in resumable(state.live) if entry.slot > self._seen_slot]

    def seen(self) -> None:
        """Everything that `look` or `of_step` knew of is seen."""
        newest = self._log.newest
        if newest is not None:
            self._seen_slot = max(self._seen_slot, newest.slot)
            self._all_seen = True

    def look_again(self) -> None:
        """Nothing is seen any more: the next look gives the newest there is."""
        self._seen_slot, self._all_seen = -1, False

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
