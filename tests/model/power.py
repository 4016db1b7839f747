"""What a disk may hold after a power failure, by POSIX: the bytes and names that were synced, and
any of the others, in any order.

A `Recorder` stands between a store and `os`, and writes down what changes files and directories. A
`Disk` is played along that record and knows, at each moment, what is durable and what is not yet.
`Disk.after_failure` draws one of the states in which the power may leave it: each write that was
not synced is there, lost, torn, or zeros; each name that was made or removed is there or not.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from storage.store import finished_name

SECTOR = 512


class Event(NamedTuple):
    """One change: of the file `number`, or of the directory `path`."""

    kind: str  # create, write, truncate, sync, mkdir, link, remove, sync directory, note
    path: str = ""
    number: int = 0
    start: int = 0
    data: bytes = b""


class Recorder:
    """`os` for the modules of a store, and what was done below `top` through it."""

    def __init__(self, top: str) -> None:
        self.top = top.rstrip("/") + "/"
        self.events: list[Event] = []
        self._files: dict[int, int] = {}  # descriptor: number of the file
        self._directories: dict[int, str] = {}
        self._names: dict[str, int] = {}
        self._count = 0
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with mock.patch("storage.local.os", self), mock.patch("storage.file_io.os", self):
            yield

    def note(self, what: str) -> None:
        """A moment in the record, such as the return of a save."""
        self.events.append(Event("note", what))

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            fd = os.open(path, flags, mode)
            if not f"{path}/".startswith(self.top):
                return fd
            if flags & os.O_DIRECTORY:
                self._directories[fd] = f"{path}/".removeprefix(self.top).rstrip("/")
            elif flags & os.O_CREAT and path not in self._names:
                self._count += 1
                self._names[path] = self._count
                self._add("create", path, self._count)
            if path in self._names:
                self._files[fd] = self._names[path]
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._files.pop(fd, None)
            self._directories.pop(fd, None)
            os.close(fd)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        with self._lock:
            count = os.pwritev(fd, buffers, offset)
            if fd in self._files:
                data = b"".join(bytes(memoryview(one).cast("B")) for one in buffers)[:count]
                self._add("write", "", self._files[fd], offset, data)
            return count

    def ftruncate(self, fd: int, nbytes: int) -> None:
        with self._lock:
            os.ftruncate(fd, nbytes)
            if fd in self._files:
                self._add("truncate", "", self._files[fd], nbytes)

    def fsync(self, fd: int) -> None:
        with self._lock:
            if fd in self._directories:
                self.events.append(Event("sync directory", self._directories[fd]))
            elif fd in self._files:
                self._add("sync", "", self._files[fd])

    def link(self, source: str, target: str) -> None:
        with self._lock:
            os.link(source, target)
            self._names[target] = self._names[source]
            self._add("link", target, self._names[target])

    def unlink(self, path: str) -> None:
        self._remove(os.unlink, path)

    def rmdir(self, path: str) -> None:
        self._remove(os.rmdir, path)

    def mkdir(self, path: str) -> None:
        with self._lock:
            os.mkdir(path)
            self._add("mkdir", path)

    def _remove(self, remove: Callable[[str], None], path: str) -> None:
        with self._lock:
            remove(path)
            self._names.pop(path, None)
            self._add("remove", path)

    def _add(
        self, kind: str, path: str, number: int = 0, start: int = 0, data: bytes = b""
    ) -> None:
        if not path or path.startswith(self.top):
            self.events.append(Event(kind, path.removeprefix(self.top), number, start, data))


@dataclass
class _File:
    durable: bytes = b""
    pending: list[Event] = field(default_factory=list)


@dataclass
class _Directory:
    """Names, with the number of a file, or 0 for a directory."""

    durable: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[str, int | None]] = field(default_factory=list)  # None: removed


class Disk:
    """What is durable and what is not, at one moment of a record."""

    def __init__(self) -> None:
        self.files: dict[int, _File] = {}
        self.directories: dict[str, _Directory] = {"": _Directory()}

    def play(self, event: Event) -> None:
        parent, _, name = event.path.rpartition("/")
        match event.kind:
            case "create":
                self.files[event.number] = _File()
                self.directories[parent].pending.append((name, event.number))
            case "write" | "truncate":
                self.files[event.number].pending.append(event)
            case "sync":
                file = self.files[event.number]
                file.durable = _applied(file.durable, file.pending)
                file.pending = []
            case "mkdir":
                self.directories[event.path] = _Directory()
                self.directories[parent].pending.append((name, 0))
            case "link":
                self.directories[parent].pending.append((name, event.number))
            case "remove":
                self.directories[parent].pending.append((name, None))
            case "sync directory":
                directory = self.directories[event.path]
                directory.durable = _named(directory.durable, directory.pending)
                directory.pending = []

    def after_failure(self, rng: random.Random, root: str) -> dict[str, bytes]:
        """The objects below `root` in one of the states that the power may leave.

        `rng` also draws how likely a change is there, so that extremes come up: all, and none.
        """
        likely = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        objects: dict[str, bytes] = {}
        contents: dict[int, bytes] = {}
        waiting = [""]
        while waiting:
            path = waiting.pop()
            directory = self.directories[path]
            kept = [change for change in directory.pending if rng.random() < likely]
            for name, number in _named(directory.durable, kept).items():
                full = f"{path}/{name}" if path else name
                if not number:
                    waiting.append(full)
                elif finished_name(name) is None and full.startswith(root + "/"):
                    if number not in contents:
                        contents[number] = self._content(number, rng, likely)
                    objects[full.removeprefix(root + "/")] = contents[number]
        return objects

    def _content(self, number: int, rng: random.Random, likely: float) -> bytes:
        file = self.files[number]
        return _applied(file.durable, [_damaged(event, rng, likely) for event in file.pending])


def _damaged(event: Event, rng: random.Random, likely: float) -> Event:
    """What is there of a change that was not synced."""
    if rng.random() < likely:
        return event
    if event.kind == "truncate" or not event.data:
        return event._replace(kind="lost")
    how = rng.choice(("lost", "torn", "zeros"))
    if how == "lost":
        return event._replace(kind="lost")
    if how == "zeros":  # the length is there, the bytes are not
        return event._replace(data=bytes(len(event.data)))
    whole = rng.randrange(0, len(event.data) + 1, min(SECTOR, len(event.data)))
    return event._replace(data=event.data[:whole])


def _applied(data: bytes, events: list[Event]) -> bytes:
    if not events:
        return data
    content = bytearray(data)
    for event in events:
        if event.kind == "truncate":
            content = content[: event.start] + bytes(max(0, event.start - len(content)))
        elif event.kind == "write":
            content += bytes(max(0, event.start - len(content)))
            content[event.start : event.start + len(event.data)] = event.data
    return bytes(content)


def _named(names: dict[str, int], changes: list[tuple[str, int | None]]) -> dict[str, int]:
    result = dict(names)
    for name, number in changes:
        if number is None:
            result.pop(name, None)
        else:
            result[name] = number
    return result
