"""Which ranks are silent, or make no progress: noticed while the training waits for them.

Every rank has its status posted, by one request of its process to the rendezvous store in 5 seconds
(`ckpt.world.board`). The rank that keeps the sheet reads all posts in one request, every 2.5
seconds, and sends the sheet to all through the tree of their world, so nobody has to look for it.
Rank 0 keeps the sheet. A rank that hears no news of it may be cut off by a rank that is silent, and
reads the store's copy as long as that lasts. When there is nothing new there either for
`UNCHANGED_SECONDS`, the keeper is silent: every rank sees that by itself, and the next rank that is
awake takes over.

Note "own absence": a rank that was stopped must not take its own pause for the silence of all
others, so the first check after a long pause only begins to count anew.
"""

from __future__ import annotations

import atexit
import json
import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.25  # between looks at what is known, which send nothing
POST_PERIODS = 4
KEEP_PERIODS = 2
SILENT_SECONDS = 7.0  # without a new post: two are missing, and the keeper has looked
UNHEARD_SECONDS = 6.0  # without news of the sheet: one is missing
UNCHANGED_SECONDS = 9.0  # with two periods until all ranks see it, less than 15 s in all
ABSENT_SECONDS = 4.5
BEHIND_SECONDS = 15.0  # without a call of `step`, while others made one
BEHIND_STEPS = 5.0  # the same, in steps of the others
TAKEOVER_SECONDS = 0.25  # between ranks that would take over the sheet

Kind = Literal["silent", "behind"]


class Status(NamedTuple):
    """The state of one rank: `step` and `phase` are for people, `calls` counts its calls of `step`.

    `idle_seconds` passed since the last of them; `step_seconds` is how long one usually takes.
    """

    host: str
    step: int
    phase: str
    calls: int
    idle_seconds: float
    step_seconds: float


class Concern(NamedTuple):
    """One rank that is silent, or behind, for `seconds`; `step` and `phase` as it last
    reported.
    """

    rank: int
    kind: Kind
    host: str
    step: int
    phase: str
    seconds: float

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.host}"
        last = f"its last step is {self.step}, its phase {self.phase!r}"
        if self.kind == "silent":
            return f"{where} is silent for {self.seconds:.0f} s; {last}"
        return f"{where} made no step for {self.seconds:.0f} s and the others did; {last}"


class Board(Protocol):
    """The statuses of all ranks, and a sheet. Calls may take long, or never return.

    What is not posted `at_once` may wait for the next request of this process, some seconds.
    """

    def post(self, status: bytes | None, *, at_once: bool) -> None:
        """Post this rank's status; None, with which it leaves, is posted at once."""

    def statuses(self) -> list[bytes | None]:
        """The statuses, in rank order; None of a rank that has not come yet, or has left."""

    def post_sheet(self, sheet: bytes, *, at_once: bool) -> None:
        """Leave the sheet for those whom news do not reach."""

    def sheet(self) -> bytes:
        """The sheet that was left last; empty before."""

    def spread(self, news: bytes) -> None:
        """Send something to all ranks that can be reached. Never waits."""

    def heard(self) -> bytes:
        """The newest that was spread by this rank or came here; empty before. Never waits."""


class _Sheet(NamedTuple):
    keeper: int
    number: int
    status: Status
    concerns: tuple[Concern, ...]

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> _Sheet:
        keeper, number, status, concerns = json.loads(data)
        return _Sheet(keeper, number, Status(*status), tuple(Concern(*one) for one in concerns))


def behind(statuses: dict[int, Status]) -> list[int]:
    """Ranks without a call of `step` for far longer than the others, who have made more of them.

    Ranks that wait for each other are at most one call ahead, so the number of calls shows little:
    what counts is the time, compared with what a step takes the others.
    """
    if len(statuses) < 2:
        return []
    calls = statistics.median_high(one.calls for one in statuses.values())
    usual = statistics.median(one.step_seconds for one in statuses.values())
    bound = max(BEHIND_SECONDS, BEHIND_STEPS * usual)
    return [r for r, one in statuses.items() if one.calls < calls and one.idle_seconds > bound]


class Ledger:
    """What one rank knows of the others. One thread calls `update` and another `concerns`, so that
    a board that does not answer is noticed.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        size: int,
        status: Callable[[], Status],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._rank = rank
        self._size = size
        self._status = status
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._spread = -POST_PERIODS  # at which count
        self._posted_idle_seconds = 0.0
        self._raw = self._heard = b""
        self._sheet: _Sheet | None = None
        self._changed = self._updated = self._judged = clock()
        # The newest of each rank, since when, and what it says.
        self._posts: dict[int, tuple[bytes, float, Status]] = {}

    # with the board

    def update(self) -> None:
        """Post the status of this rank, look at the sheet, and write it if this rank keeps it.

        To be called once in `PERIOD_SECONDS`; most calls make no request.
        """
        self._count += 1
        mine = self._status()
        now = self._clock()
        with self._lock:
            was_absent = now - self._updated > ABSENT_SECONDS
            if was_absent:
                self._posts.clear()  # see note "own absence"
                self._changed = now
            self._updated = now
        # Urgent when this rank begins to be late, or is named: it must not be named for longer than
        # it is late.
        begins = self._posted_idle_seconds <= BEHIND_SECONDS < mine.idle_seconds
        named = () if self._sheet is None else [one.rank for one in self._sheet.concerns]
        urgent = was_absent or begins or self._rank in named
        self._posted_idle_seconds = mine.idle_seconds
        self._board.post(json.dumps([self._count, *mine]).encode(), at_once=urgent)
        heard = self._board.heard()
        if heard != self._heard:
            self._heard = heard
            self._note(heard)
        elif self._clock() - self._changed > UNHEARD_SECONDS and not self._is_keeper():
            self._note(self._board.sheet())
        with self._lock:
            keeps = self._keeps(self._clock())
        if keeps and (not self._is_keeper() or self._count % KEEP_PERIODS == 0):
            self._keep(mine)

    def _note(self, raw: bytes) -> None:
        """A sheet that was heard or read."""
        with self._lock:
            if not raw or raw == self._raw:
                return
            sheet, known = _Sheet.decode(raw), self._sheet
            # The copy in the store may be older: it goes with the next request of the keeper.
            if known is not None and known.keeper == sheet.keeper and known.number > sheet.number:
                return
            self._raw, self._changed, self._sheet = raw, self._clock(), sheet

    def _is_keeper(self) -> bool:
        return self._sheet is not None and self._sheet.keeper == self._rank

    def leave(self) -> None:
        """Ask the others to watch this rank no more."""
        self._board.post(None, at_once=True)

    def _keeps(self, now: float) -> bool:
        if self._rank == 0:
            return True
        keeper = 0 if self._sheet is None else self._sheet.keeper
        if keeper >= self._rank:
            return True  # a rank before this one took it back, or will
        quiet = now - self._changed
        # Staggered, so that not all ranks take over together; bounded, or rank 1,000 would wait 4
        # minutes.
        return quiet > UNCHANGED_SECONDS + min(4.0, TAKEOVER_SECONDS * self._rank)

    def _keep(self, mine: Status) -> None:
        posts = dict(enumerate(self._board.statuses()))
        posts.pop(self._rank)
        now = self._clock()
        before = self._sheet
        if before is not None and before.keeper != self._rank:
            self._take_over(before, posts, now)
        awake, silent = {self._rank: mine}, []
        for rank, raw in posts.items():
            if raw is None:
                self._posts.pop(rank, None)
                continue
            # By the bytes: only what is new is decoded, that of every second rank or so.
            if rank not in self._posts or self._posts[rank][0] != raw:
                self._posts[rank] = (raw, now, Status(*json.loads(raw)[1:]))
            _, since, status = self._posts[rank]
            quiet = now - since
            if quiet > SILENT_SECONDS:
                silent.append(_concern(rank, "silent", status, quiet))
            else:
                awake[rank] = status
        late = [_concern(r, "behind", awake[r], awake[r].idle_seconds) for r in behind(awake)]
        sheet = _Sheet(self._rank, self._count, mine, (*silent, *late))
        is_new = _names(sheet) != _names(before)
        if is_new or self._count - self._spread >= POST_PERIODS:
            self._spread = self._count
            raw = sheet.encode()
            self._board.post_sheet(raw, at_once=is_new)  # first: who hears no news looks there
            self._board.spread(raw)
            self._note(raw)
        with self._lock:
            self._sheet, self._changed = sheet, self._clock()

    def _take_over(self, before: _Sheet, posts: dict[int, bytes | None], now: float) -> None:
        """Start from what the previous keeper knew: who is silent has been so for a while."""
        since = {one.rank: now - one.seconds for one in before.concerns if one.kind == "silent"}
        if before.keeper < self._rank:  # it is silent: that is why this rank keeps the sheet
            since[before.keeper] = self._changed
        for rank, began in since.items():
            raw = posts.get(rank)
            if raw is not None:
                self._posts[rank] = (raw, began, Status(*json.loads(raw)[1:]))

    # without the board

    def concerns(self) -> list[Concern]:
        """Which ranks are silent or behind now, as far as this rank knows. Never waits for the
        board.
        """
        with self._lock:
            now = self._clock()
            if now - self._judged > ABSENT_SECONDS:
                self._changed = now  # see note "own absence"
            self._judged = now
            if self._sheet is None:
                return []
            concerns = {c.rank: c for c in self._sheet.concerns if c.rank != self._rank}
            # A request of `update` that never returns leaves the sheet as old as a silent keeper
            # does, who may host the store: then no other rank could report it.
            quiet = now - self._changed
            keeper = self._sheet.keeper
            if keeper != self._rank and quiet > UNCHANGED_SECONDS:
                concerns[keeper] = _concern(keeper, "silent", self._sheet.status, quiet)
            return list(concerns.values())


def _names(sheet: _Sheet | None) -> tuple[int, set[tuple[int, Kind]]] | None:
    """Whom a sheet names, and who keeps it."""
    if sheet is None:
        return None
    return sheet.keeper, {(one.rank, one.kind) for one in sheet.concerns}


def _concern(rank: int, kind: Kind, status: Status, seconds: float) -> Concern:
    return Concern(rank, kind, status.host, status.step, status.phase, round(seconds, 1))


class Attendance:
    """A ledger kept up to date by two threads; `report(appeared, gone)` is called at every change.

    `lost` is called once with a rank that was silent for more than `silence_seconds_max`.
    """

    def __init__(
        self,
        ledger: Ledger,
        report: Callable[[Sequence[Concern], Sequence[Concern]], None],
        *,
        silence_seconds_max: float | None = None,
        lost: Callable[[Concern], None] | None = None,
    ) -> None:
        self._ledger = ledger
        self._report = report
        self._silence_seconds_max = silence_seconds_max
        self._lost = lost
        self._stopped = threading.Event()
        self._concerns: dict[tuple[int, Kind], tuple[Concern, float]] = {}
        # Daemons: a request to a store whose host is stopped may never return.
        self._threads = [
            threading.Thread(target=self._repeat, args=(act, name), name=name, daemon=True)
            for act, name in ((ledger.update, "ckpt-attend"), (self.check, "ckpt-attend-check"))
        ]
        for thread in self._threads:
            thread.start()
        # A daemon that returns from the store while the interpreter is taken down would abort the
        # process.
        atexit.register(self._end)

    def check(self) -> None:
        """Report what has changed since the last check."""
        now = time.monotonic()
        current = {(one.rank, one.kind): one for one in self._ledger.concerns()}
        new = [one for key, one in current.items() if key not in self._concerns]
        gone = [one for key, (one, _) in self._concerns.items() if key not in current]
        self._concerns = {
            key: self._concerns.get(key, (one, now - one.seconds)) for key, one in current.items()
        }
        if new or gone:
            self._report(new, gone)
        if self._silence_seconds_max is None or self._lost is None:
            return
        for one, since in self._concerns.values():
            if one.kind == "silent" and now - since > self._silence_seconds_max:
                # Once: what is called ends the job, and the rank stays silent meanwhile.
                lost, self._lost = self._lost, None
                lost(one._replace(seconds=round(now - since, 1)))
                return

    def stop(self) -> None:
        """Stop both threads; this rank leaves, and is not missed."""
        if not self._stopped.is_set():
            self._end()
            atexit.unregister(self._end)
            if not self._threads[0].is_alive():  # the board answers
                try:
                    self._ledger.leave()
                except (RuntimeError, OSError) as error:
                    logger.debug("the rendezvous store does not answer any more: %s", error)

    def _end(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _repeat(self, act: Callable[[], None], name: str) -> None:
        failed = False
        while not self._stopped.wait(PERIOD_SECONDS):
            try:
                act()
                failed = False
            except Exception as error:
                # Logged once in a row: the store may be away for hours.
                if not failed and not self._stopped.is_set():
                    logger.warning("silent ranks may go unnoticed: %s: %s", name, error)
                failed = True
