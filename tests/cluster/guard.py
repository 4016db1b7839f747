"""Removes what a cluster leaves on a machine, even if the process that made it is killed.

A guard is a process of its own that reads from a pipe what there is: namespaces, links, mounts. At
the end of the pipe, however that came, it kills the processes of the namespaces and removes all.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

KINDS = ("netns", "link", "mount")


class Guard:
    """What has to be gone when this process has ended. `close` waits until it is."""

    def __init__(self) -> None:
        # In a session of its own: Ctrl-C is for the process that it outlives.
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__],
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def owns(self, kind: str, name: str) -> None:
        """Before something is made: a namespace, a link, or a mount by its path."""
        assert kind in KINDS and self._process.stdin is not None
        self._process.stdin.write(f"{kind} {name}\n")

    def close(self) -> None:
        """Remove all, and wait for that. May be repeated."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait()


def _remove_netns(name: str) -> None:
    for _ in range(100):
        pids = _output("ip", "netns", "pids", name).split()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.05)  # what is killed is gone a little later
    _output("ip", "netns", "del", name)  # its links go with it
    shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
    with suppress(OSError):
        Path("/etc/netns").rmdir()  # if nobody else needs it


def _remove_link(name: str) -> None:
    _output("ip", "link", "del", name)


def _remove_mount(path: str) -> None:
    while path in _mounted():
        if subprocess.run(["umount", "-l", path], capture_output=True).returncode:
            return


def _mounted() -> set[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return {line.split()[1].replace("\\040", " ") for line in lines}


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


_REMOVE: dict[str, Callable[[str], None]] = {
    "netns": _remove_netns,
    "link": _remove_link,
    "mount": _remove_mount,
}


def main(lines: Sequence[str]) -> None:
    """Remove what the lines name: first where processes are, then what they use."""
    named = [line.rstrip("\n").split(" ", 1) for line in lines]
    for kind in KINDS:
        for what, name in reversed(named):
            if what == kind:
                _REMOVE[kind](name)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(list(sys.stdin))
