"""Reports ranks that are silent or make no progress while the training's own thread waits for them.

Nothing here ends a training by itself: a rank may hold the interpreter's lock for long, and is then
as silent as a process that was stopped. `silence_seconds_max` makes it an error.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ckpt.errors import RankFailed
from ckpt.service.events import Observer, RankHeard, RankMissed, notify
from ckpt.world.attendance import Attendance, Concern, Ledger, Status
from ckpt.world.base import World

logger = logging.getLogger(__name__)

TRAINING = "training"


class Watcher:
    """One rank's part in watching, from here to `close`. `fail` is called after a silence
    that is too long.

    In a world without a board there is nothing to watch.
    """

    def __init__(
        self,
        world: World,
        observers: Sequence[Observer],
        fail: Callable[[RankFailed], None],
        *,
        silence_seconds_max: float | None = None,
        step_seconds: Callable[[], float | None] = lambda: None,
    ) -> None:
        if silence_seconds_max is not None and not silence_seconds_max > 0.0:
            raise ValueError(f"silence_seconds_max={silence_seconds_max!r}: expected seconds, None")
        self._world = world
        self._observers = tuple(observers)
        self._fail = fail
        self._step_seconds = step_seconds
        # Reports of other ranks name it, so that the machine can be found.
        self._host = socket.gethostname()
        # The thread that attends reads step, calls and time, which have to be of the same call.
        self._lock = threading.Lock()
        self._step = self._calls = 0
        self._called = time.monotonic()
        self._phase = TRAINING
        board = world.board()
        self._attendance: Attendance | None = None
        if board is not None:
            self._attendance = Attendance(
                Ledger(board, world.rank, world.size, self._status),
                self._report,
                silence_seconds_max=silence_seconds_max,
                lost=self._lost,
            )

    def called(self, step: int) -> None:
        """The training has made a step."""
        with self._lock:
            self._step, self._calls, self._called = step, self._calls + 1, time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What this rank does meanwhile, for the reports of other ranks."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def close(self) -> None:
        """Stop watching, and let no other rank report this one."""
        if self._attendance is not None:
            self._attendance.stop()

    def _status(self) -> Status:
        with self._lock:
            idle = time.monotonic() - self._called
            # Others judge by it: a step may take a second or an hour.
            usual = self._step_seconds() or 0.0
            return Status(self._host, self._step, self._phase, self._calls, idle, usual)

    def _report(self, appeared: Sequence[Concern], gone: Sequence[Concern]) -> None:
        for one in appeared:
            what = {"rank": one.rank, "host": one.host, "step": one.step, "phase": one.phase}
            extra = {"ckpt": {"event": f"rank {one.kind}", **what, "seconds": one.seconds}}
            logger.warning("%s; nothing is done about it", one, extra=extra)
            notify(self._observers, RankMissed(one))
        for one in gone:
            state = "back" if one.kind == "silent" else "not behind any more"
            extra = {"ckpt": {"event": "rank heard", "rank": one.rank, "host": one.host}}
            logger.warning("rank %d on %s is %s", one.rank, one.host, state, extra=extra)
            notify(self._observers, RankHeard(one))
        # A silent rank whose process is gone will not come back; ranks of its machine see that.
        try:
            for one in appeared:
                # A slow rank answers, so its process is there.
                if one.kind == "silent":
                    self._world.check_neighbour(self._phase)
        except RankFailed as failure:
            self._fail(failure)

    def _lost(self, one: Concern) -> None:
        text = f"{one}; that is more than silence_seconds_max allows"
        logger.error("%s", text)
        self._fail(RankFailed(text, rank=one.rank, phase=one.phase))
