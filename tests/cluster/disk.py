"""Disks of a cluster: small ones of their own, that are full, read-only, slow, or fail.

Errors and delays come from a library that the processes of a host preload (`disk_shim.c`); it needs
a C compiler. It also counts the errors that these processes meet anyway.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.guard import Guard

REMOUNT_SECONDS_MAX = 120.0
_READ_ONLY, _REMOUNT = 1, 32  # flags of mount(2)
READS, WRITES, SYNCS, NAMES = 1, 2, 4, 8  # kinds of calls, as in disk_shim.c
_FIELDS = ("failing", "percent", "delay_usec", "failed", "delayed", "no space", "read only", "EIO")


class FailingDisk:
    """What befalls files below `folder` in processes with this `environment`."""

    def __init__(self, library: Path | None, control: Path, folder: Path) -> None:
        self.is_possible = library is not None
        control.write_bytes(bytes(8 * len(_FIELDS)))
        with control.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 0)
        self.environment: Mapping[str, str] = {}
        if library is not None:
            self.environment = {
                "LD_PRELOAD": str(library),
                "CLUSTER_DISK_CONTROL": str(control),
                "CLUSTER_DISK_BELOW": str(folder),
            }

    def fail(self, kinds: int, percent: int) -> None:
        """From now on so many calls of these kinds end with EIO."""
        self._set(0, kinds)
        self._set(1, percent)

    def slow_down(self, seconds: float) -> None:
        """From now on every call takes this time more."""
        self._set(2, int(seconds * 1e6))

    def recover(self) -> None:
        """It works again."""
        for number in range(3):
            self._set(number, 0)

    def counts(self) -> Counter[str]:
        """Calls that have failed or waited until now."""
        values = struct.unpack_from(f"<{len(_FIELDS)}Q", self._mapped)
        return Counter(dict(zip(_FIELDS[3:], values[3:], strict=True)))

    def _set(self, number: int, value: int) -> None:
        struct.pack_into("<Q", self._mapped, 8 * number, value)


def shim(folder: Path) -> Path | None:
    """The library, compiled into `folder`; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "disk_shim.so"
    source = Path(__file__).with_name("disk_shim.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(source)]
    subprocess.run([*command, "-ldl"], check=True)
    return library


@contextmanager
def small_disk(folder: Path, nbytes: int, guard: Guard) -> Iterator[Path]:
    """A disk of its own at `folder`, seen by all hosts, that can be full and read-only."""
    folder.mkdir(parents=True)
    guard.owns("mount", str(folder))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def no_loop_disk(folder: Path) -> str:
    """Why there can be no `loop_disk`, "" where there can."""
    if shutil.which("mkfs.ext4") is None:
        return "a disk of its own needs mkfs.ext4"
    image = folder / "try.image"
    with image.open("wb") as file:
        file.truncate(1 << 20)
    tried = subprocess.run(["losetup", "-f", "--show", image], capture_output=True, text=True)
    image.unlink()
    if tried.returncode:
        return f"a disk of its own needs a loop device: {tried.stderr.strip()}"
    subprocess.run(["losetup", "-d", tried.stdout.strip()], check=True)
    return ""


@contextmanager
def loop_disk(folder: Path, nbytes: int, guard: Guard) -> Iterator[Path]:
    """The same as a file system on a disk, in a file beside it: it is no memory, and is synced."""
    folder.mkdir(parents=True)
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(nbytes)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    guard.owns("mount", str(folder))
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        (folder / "lost+found").rmdir()
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, seconds: float) -> None:
    """For so long, somebody else's file takes all space that is left, or becomes free meanwhile."""
    filler, deadline = folder / "filler", time.monotonic() + seconds
    fd = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        while time.monotonic() < deadline:
            try:
                os.write(fd, bytes(4096))
            except OSError:  # there is none left
                time.sleep(0.002)
    finally:
        os.close(fd)
        filler.unlink()


@contextmanager
def read_only(mount: Path) -> Iterator[None]:
    """The disk is remounted read-only, as a kernel does after errors."""
    # Refused while a file is open for writing. A program of its own would be too slow to find a
    # moment without one, on a disk that is written to all the time.
    deadline = time.monotonic() + REMOUNT_SECONDS_MAX
    while not _remounted(mount, _READ_ONLY):
        assert time.monotonic() < deadline, f"{mount}: a file stays open for writing"
        time.sleep(0.0005)
    try:
        yield
    finally:
        assert _remounted(mount, 0)


def _remounted(mount: Path, flags: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return not libc.mount(b"none", os.fsencode(mount), None, _REMOUNT | flags, None)
