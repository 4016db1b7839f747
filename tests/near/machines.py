"""Processes on simulated hosts: folders, in which any operation may be the last one of a process.

A host is a folder. Each process reaches it by a link of its own, so that the path of an operation
says whose it is: `<top>/life3-rank1/host5/near/...` is an operation of rank 1 of the third start of
a job, on host 5. Tiers and their mapped files use `HostStore` and `HostOs`, which count operations.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from storage import NoSpaceError, StorageError, Store
from storage.errors import OutcomeUnknownError
from storage.local import LocalStore
from storage.peers.server import PeerServer
from storage.testing import FaultPlan, FaultyStore, Killed

T = TypeVar("T")
Kind = Literal["none", "rank", "host", "all", "pause", "full", "error"]

KILLS = ("rank", "host", "all")
FULL_COUNT = 12  # operations for which a host stays full
PAUSED_SECONDS_MAX = 120.0
_WRITING = ("put_if_absent", "create", "write_part", "publish", "open", "link", "pwrite")
_PUBLISHING = ("put_if_absent", "publish")
_PATH = re.compile(r"/life(\d+)-rank(\d+)/host(\d+)/")


class Fault(NamedTuple):
    """What happens at the `nth` operation of `rank`, before it or `after` it has happened.

    "rank", "host" and "all" are who dies; "pause" stops all processes of the job, as SIGSTOP does,
    until others have done something; "full" is a host without space for some operations.
    """

    kind: Kind = "none"
    rank: int = 0
    nth: int = 0
    after: bool = False


class Processes:
    """The processes of one start of a job: which are alive, and what they do with files.

    `hosts[rank]` is the number of a rank's host. `meanwhile` is what happens during a pause.
    """

    def __init__(self, hosts: Sequence[int], fault: Fault, meanwhile: Callable[[], None]) -> None:
        self.hosts = tuple(hosts)
        self.fault = fault
        self.dead: set[int] = set()
        self.struck = False
        self.operations: list[tuple[int, str, str]] = []
        self.has_died: Callable[[int], None] = lambda rank: None
        self._meanwhile = meanwhile
        self._counts = [0] * len(self.hosts)
        self._is_stopped = False
        self._under_way = 0
        self._changed = threading.Condition()

    def perform(
        self,
        rank: int,
        operation: str,
        key: str,
        apply: Callable[[], T],
        errors: tuple[Exception, Exception] | None = None,
    ) -> T:
        """One operation of `rank`; `errors` are raised by a full host, and by a failing disk."""
        strikes = self._enter(rank, operation, key)
        try:
            if not strikes:
                return apply()
            kind, _, _, after = self.fault
            if kind in KILLS:
                if after:
                    apply()
                self.die()
                raise Killed(f"rank {rank} at {operation} {key}")
            if kind == "pause":
                self._pause()
            elif errors is not None and kind == "full" and operation in _WRITING:
                raise errors[0]
            elif errors is not None and kind == "error":
                if after:
                    apply()
                raise errors[1]
            return apply()
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def die(self, *, everyone: bool = False) -> None:
        """Those whom the fault kills make no operation any more."""
        kind, rank = self.fault.kind, self.fault.rank
        dying = {rank}
        if kind == "host":
            dying |= {o for o, host in enumerate(self.hosts) if host == self.hosts[rank]}
        if everyone or kind == "all":
            dying = set(range(len(self.hosts)))
        with self._changed:
            self.struck = True
            new = dying - self.dead
            self.dead |= dying
        for one in sorted(new):
            self.has_died(one)

    def _enter(self, rank: int, operation: str, key: str) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_stopped, PAUSED_SECONDS_MAX)
            if rank in self.dead:
                raise Killed(f"{operation} {key}: rank {rank} is dead")
            self._counts[rank] += 1
            self.operations.append((rank, operation, key))
            self._under_way += 1
            kind, whose, nth, _ = self.fault
            last = nth + (FULL_COUNT if kind == "full" else 1)
            strikes = kind != "none" and rank == whose and nth <= self._counts[rank] < last
            self.struck |= strikes
            return strikes

    def _pause(self) -> None:
        with self._changed:
            self._is_stopped = True
            # Those that are in the middle of an operation finish it, as a kernel would.
            assert self._changed.wait_for(lambda: self._under_way == 1, PAUSED_SECONDS_MAX)
        try:
            self._meanwhile()
        finally:
            with self._changed:
                self._is_stopped = False
                self._changed.notify_all()


class Machines:
    """The hosts below `top`, and all processes that were ever started there."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self._started: list[Processes] = []

    def folder(self, host: int) -> Path:
        """What a host has; it is there as long as the host is."""
        folder = self.top / f"host{host}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def start(self, processes: Processes) -> list[Path]:
        """Their own ways to the directory of their tiers, by rank."""
        number = len(self._started)
        self._started.append(processes)
        paths = []
        for rank, host in enumerate(processes.hosts):
            own = self.top / f"life{number}-rank{rank}"
            own.mkdir()
            (own / f"host{host}").symlink_to(self.folder(host))
            paths.append(own / f"host{host}" / "near")
        return paths

    def owner(self, path: str) -> tuple[Processes, int]:
        """Whose operation one at `path` is."""
        match = _PATH.search(path)
        assert match is not None, path
        return self._started[int(match[1])], int(match[2])

    def store(self, root: str) -> Store:
        """What tiers have instead of a LocalStore."""
        return HostStore(LocalStore(root), *self.owner(root))


class HostStore(FaultyStore):
    """A folder of a host, as one process sees it."""

    def __init__(self, inner: Store, processes: Processes, rank: int) -> None:
        super().__init__(inner, FaultPlan(0))
        self._processes = processes
        self._rank = rank

    @property
    def place(self) -> str:
        return self.inner.url  # with the link that says whose operations these are

    def perform(
        self,
        operation: str,
        key: str,
        apply: Callable[[], T],
        discard: Callable[[], object] = lambda: None,
    ) -> T:
        unknown = operation in _PUBLISHING and self._processes.fault.after
        failed = OutcomeUnknownError("injected") if unknown else StorageError("injected")
        errors = (NoSpaceError(f"{operation} {key}: full"), failed)
        try:
            return self._processes.perform(self._rank, operation, key, apply, errors)
        except StorageError:
            if operation == "publish":
                discard()
            raise
        except Killed:
            self.dead = True
            raise


class HostServer(PeerServer):
    """The server of a folder, in a process that may be dead: then it answers nothing more."""

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        except Killed:
            self.shutdown_request(request)


class DurableStore(FaultyStore):
    """The durable store, as one process sees it: it does not fail, but the process may die."""

    def __init__(self, inner: Store, processes: Processes, rank: int) -> None:
        super().__init__(inner, FaultPlan(0))
        self._processes = processes
        self._rank = rank

    def perform(
        self,
        operation: str,
        key: str,
        apply: Callable[[], T],
        discard: Callable[[], object] = lambda: None,
    ) -> T:
        return self._processes.perform(self._rank, f"durable {operation}", key, apply)


class HostOs:
    """The module `os` for mapped files of tiers: what changes a folder is an operation."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        return self._perform("open", path, lambda: os.open(path, flags, mode))

    def rename(self, old: str, new: str) -> None:
        self._perform("rename", old, lambda: os.rename(old, new))

    def unlink(self, path: str) -> None:
        self._perform("unlink", path, lambda: os.unlink(path))

    def link(self, old: str, new: str) -> None:
        self._perform("link", old, lambda: os.link(old, new))

    def truncate(self, path: str, nbytes: int) -> None:
        self._perform("truncate", path, lambda: os.truncate(path, nbytes))

    def _perform(self, operation: str, path: str, apply: Callable[[], T]) -> T:
        processes, rank = self._machines.owner(path)
        errors = (OSError(errno.ENOSPC, "injected"), OSError(errno.EIO, "injected"))
        return processes.perform(rank, operation, os.path.basename(path), apply, errors)
