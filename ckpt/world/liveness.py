"""Who is alive: the identity of a process, its heartbeat, and the watch over other ranks."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.errors import RankFailed

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Enough to see whether a process of this machine still runs, even when its pid was reused."""

    machine: str
    pid: int
    started: str

    @staticmethod
    def this() -> ProcessIdentity:
        pid = os.getpid()
        return ProcessIdentity(_machine(), pid, _start_of(pid) or "")

    def runs(self) -> bool | None:
        """None when it is on another machine, or this one cannot tell."""
        if self.machine != _machine() or not self.started:
            return None
        return _start_of(self.pid) == self.started


def _machine() -> str:
    """Machine and process namespace: pids of another container mean nothing here."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """The start time of a process in the kernel's ticks; None when there is none, or only its
    zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in (b"Z", b"X") else after_name[19].decode()


class Heartbeat:
    """Shows the others that this process lives, from a daemon thread. A failure to do so is kept
    and raised by the next round.
    """

    def __init__(self, store: Store, rank: int, seconds: float) -> None:
        process = ProcessIdentity.this()
        self._key = f"beat/{rank}"
        self._store = store
        self._seconds = seconds
        self._error: Exception | None = None
        self._stopped = threading.Event()
        store.set(f"process/{rank}", json.dumps([process.machine, process.pid, process.started]))
        store.set(self._key, "0")
        # A daemon: a process that ends without closing its world must not wait for it.
        self._thread = threading.Thread(target=self._beat, name="ckpt-heartbeat", daemon=True)
        self._thread.start()
        # A daemon thread that comes back from the store while the interpreter is taken down aborts
        # the whole process (std::terminate in C++), so it is ended before that.
        atexit.register(self._end)

    def check(self) -> None:
        """Raise RankFailed when the store has stopped answering."""
        error = self._error
        if error is not None:
            raise RankFailed(
                "the rendezvous store of torch.distributed does not answer "
                f"({type(error).__name__}: {error}): its host, usually rank 0, is gone",
                rank=0,
                phase="heartbeat",
            ) from error

    def stop(self) -> None:
        """Note that this rank leaves, so that no other waits for it."""
        if not self._stopped.is_set():
            self._end()
            atexit.unregister(self._end)
            with contextlib.suppress(Exception):  # the store's host may have left before us
                self._store.set(self._key, "left")

    def _end(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def _beat(self) -> None:
        count = 0
        while not self._stopped.wait(self._seconds):
            count += 1
            try:
                self._store.set(self._key, str(count))
                self._error = None
            except Exception as error:
                self._error = error


class Watch:
    """What one rank knows about the life of the others."""

    def __init__(self, store: Store, silence_seconds_max: float) -> None:
        self._store = store
        self._silence_seconds_max = silence_seconds_max
        self._processes: dict[int, ProcessIdentity] = {}
        self._last_beats: dict[int, tuple[bytes, float]] = {}
        self._checked = 0.0

    def gone(self, rank: int) -> str:
        """Why `rank` will never answer ("has died"), or "" when it may."""
        if not self._store.check([f"beat/{rank}"]):
            return ""  # has not arrived yet: the round's deadline counts
        beat = self._store.get(f"beat/{rank}")
        if beat == b"left":
            return "has left"
        runs = self._process(rank).runs()
        if runs is not None:
            return "" if runs else "has died"
        return self._silent(rank, beat)

    def _silent(self, rank: int, beat: bytes) -> str:
        now = time.monotonic()
        if now - self._checked > self._silence_seconds_max / 2:
            self._last_beats.clear()  # this rank was stopped, or did not check: count anew
        self._checked = now
        known = self._last_beats.get(rank)
        if known is None or known[0] != beat:
            self._last_beats[rank] = (beat, now)
            return ""
        silence = now - known[1]
        if silence <= self._silence_seconds_max:
            return ""
        return f"has died (no heartbeat for {silence:.1f} s)"

    def _process(self, rank: int) -> ProcessIdentity:
        if rank not in self._processes:
            machine, pid, started = json.loads(self._store.get(f"process/{rank}"))
            self._processes[rank] = ProcessIdentity(machine, pid, started)
        return self._processes[rank]
