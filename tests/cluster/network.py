"""Hosts of a cluster as network namespaces, joined by a bridge. Needs root and `ip` (iproute2).

    with Network(3) as network:
        network.hosts[0].popen([...])             # a process of that host
        network.cut(network.hosts[0], network.store)

A host has its own loopback, ports and address; its files are those of the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

_NOBODY = "02:00:00:00:00:01"  # frames to this address reach no host


class Host(NamedTuple):
    """One namespace."""

    name: str
    address: str

    @property
    def within(self) -> list[str]:
        """What runs the command after it on this host."""
        return ["ip", "netns", "exec", self.name]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process of this host; `options` are those of `subprocess.Popen`."""
        return subprocess.Popen([*self.within, *command], text=True, **options)


def unavailable() -> str:
    """Why no network can be made here, "" where one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip`, of iproute2"
    name = f"ckpt-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces are not allowed: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Network:
    """`count` hosts, one host `store` for a server, and this process on the same bridge."""

    def __init__(self, count: int) -> None:
        mark = f"{os.getpid():x}"[-5:]
        self._bridge = f"ck{mark}"
        self._subnet = f"10.{77 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        names = [f"{self._bridge}h{number}" for number in range(count + 1)]
        hosts = [Host(name, f"{self._subnet}.{10 + n}") for n, name in enumerate(names)]
        self.store, self.hosts = hosts[-1], hosts[:-1]
        self._cuts: set[tuple[Host, Host]] = set()

    def __enter__(self) -> Network:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self._subnet}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number, host in enumerate((*self.hosts, self.store)):
                self._add(host, f"{self._bridge}v{number}")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def _add(self, host: Host, link: str) -> None:
        _ip("netns", "add", host.name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _ip("link", "set", link, "master", self._bridge, "up")
        _ip("-n", host.name, "link", "set", "lo", "up")
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.name, "link", "set", "eth0", "up")

    def _remove(self) -> None:
        for host in (*self.hosts, self.store):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", host.name)  # its links go with it
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)

    def cut(self, one: Host, other: Host, *, one_way: bool = False) -> None:
        """What `one` sends to `other` is lost, and unless `one_way` the other direction as well."""
        for a, b in ((one, other),) if one_way else ((one, other), (other, one)):
            self._cuts.add((a, b))
            neighbour = ("neigh", "replace", b.address, "lladdr", _NOBODY, "dev", "eth0")
            _ip("-n", a.name, *neighbour, "nud", "permanent")

    def mend(self) -> None:
        """Every host reaches every other again."""
        for a, b in self._cuts:
            _ip("-n", a.name, "neigh", "del", b.address, "dev", "eth0")
        self._cuts.clear()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
