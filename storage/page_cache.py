"""How much the page cache may take, and which of this process's files are in it."""

from __future__ import annotations

import contextlib
import os

# The names of a cgroup's limit, of what it uses, and before the fields of `memory.stat`.
_V2 = ("memory.max", "memory.current", "")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
# Smaller files are not looked after: they come and go by themselves.
CACHED_NBYTES_MIN = 4 * 1024 * 1024


def memory_left(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Bytes of memory that are free, or hold files that the kernel can read again: of this host,
    within the limits of this process's cgroups. 0 where the system does not tell. See proc(5).
    """
    fields = _fields(f"{proc}/meminfo")
    left = fields.get("MemAvailable:", 0) * 1024
    for line in _text(f"{proc}/self/cgroup").splitlines():
        # Lines of version 1 name their controllers, the one of version 2 ("0::/group") does not.
        controllers, _, group = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top, (limit, used, prefix) = (f"{cgroups}/memory", _V1) if controllers else (cgroups, _V2)
        # A container may see its own group at the top, and be named as its host knows it.
        while True:
            place = top + group.rstrip("/")
            with contextlib.suppress(ValueError):
                files = _fields(f"{place}/memory.stat")
                kept = [files.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive")]
                # ValueError: "max", or a group without files here. The group above may have some.
                room = int(_text(f"{place}/{limit}")) - int(_text(f"{place}/{used}"))
                left = min(left, room + sum(kept))
            if not group.strip("/"):
                break
            group = os.path.dirname(group.rstrip("/"))
    return max(left, 0)


def make_room(latest: dict[str, int], path: str, nbytes: int) -> None:
    """Take files of `latest`, with their sizes, the oldest first, out of the page cache as `path`
    enters it. Files of one directory's name stay.

    A training that saves for weeks takes the space of one checkpoint, and memory that is used again
    is cheap: fresh pages cost a virtual machine three times the CPU seconds of the write.
    """
    folder = os.path.basename(os.path.dirname(path))
    room = 0
    for one in list(latest):
        if room < nbytes and os.path.basename(os.path.dirname(one)) != folder:
            room += latest.pop(one, 0)
            with contextlib.suppress(OSError):  # deleted, which made room too
                _drop(one)
    latest[path] = nbytes


def _drop(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _fields(path: str) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
