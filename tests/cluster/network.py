"""Hosts of a cluster as network namespaces, joined by a bridge. Needs root and `ip` (iproute2).

    with Network(3) as network:
        network.hosts[0].popen([...])             # a process of that host
        network.cut(network.hosts[0], network.store)

A host has its own loopback, ports, address and name server; its files are those of the machine.
What is there stays no longer than the process that made it, even if that is killed: see `guard`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests.cluster.guard import Guard

_NOBODY = "02:00:00:00:00:01"  # frames to this address reach no host
_CONFIGURED = Path("/etc/netns")  # what `ip netns exec` puts in place of files in /etc


class Host(NamedTuple):
    """One namespace. `second` is an address beside the first, which can be cut alone."""

    name: str
    address: str
    second: str = ""

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
    try:
        link = ["-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
        tried = subprocess.run(["ip", *link], capture_output=True, text=True)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return f"no veth can be made: {tried.stderr.strip()}" if tried.returncode else ""


class Network:
    """`count` hosts, one host `store` for servers, and this process on the same bridge."""

    def __init__(self, count: int) -> None:
        mark = f"{os.getpid():x}"[-5:]
        self.bridge = f"ck{mark}"
        self._subnet = f"10.{77 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self.address = f"{self._subnet}.1"  # of this process
        names = [f"{self.bridge}h{number}" for number in range(count + 1)]
        hosts = [
            Host(name, f"{self._subnet}.{10 + number}", f"{self._subnet}.{110 + number}")
            for number, name in enumerate(names)
        ]
        self.store, self.hosts = hosts[-1], hosts[:-1]
        self.guard = Guard()
        self._cuts: set[tuple[Host, str]] = set()  # and the address that it does not reach

    def __enter__(self) -> Network:
        try:
            self.guard.owns("link", self.bridge)
            _ip("link", "add", self.bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
            _ip("link", "set", self.bridge, "up")
            for number, host in enumerate((*self.hosts, self.store)):
                self.guard.owns("netns", host.name)
                self.guard.owns("link", self._link(number))  # sockets may outlive the namespace
                self._add(host, self._link(number))
        except BaseException:
            self.guard.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.guard.close()

    def _link(self, number: int) -> str:
        return f"{self.bridge}v{number}"

    def _add(self, host: Host, link: str) -> None:
        configured = _CONFIGURED / host.name
        configured.mkdir(parents=True)
        resolver = f"nameserver {self.store.address}\noptions timeout:1 attempts:1\n"
        (configured / "resolv.conf").write_text(resolver)
        _ip("netns", "add", host.name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _ip("link", "set", link, "master", self.bridge, "up")
        # What is lost on its way goes into the pit, whose counter says how much that was.
        _ip("-n", host.name, "link", "add", "pit", "type", "veth", "peer", "name", "bottom")
        for name in ("pit", "bottom"):  # nothing comes there by itself
            _ip("-n", host.name, "link", "set", name, "addrgenmode", "none")
        for name in ("lo", "eth0", "pit", "bottom"):
            _ip("-n", host.name, "link", "set", name, "up")
        for address in (host.address, host.second):
            _ip("-n", host.name, "addr", "add", f"{address}/24", "dev", "eth0")

    def cut(self, one: Host, other: Host, *, one_way: bool = False) -> None:
        """What `one` sends to `other` is lost, and unless `one_way` the other direction as well."""
        for a, b in ((one, other),) if one_way else ((one, other), (other, one)):
            self._lose(a, b.address)
            self._lose(a, b.second)

    def cut_second(self, one: Host, other: Host) -> None:
        """What they send to each other's second address is lost, and nothing else."""
        self._lose(one, other.second)
        self._lose(other, one.second)

    def _lose(self, host: Host, address: str) -> None:
        if (host, address) in self._cuts:
            return
        self._cuts.add((host, address))
        _ip("-n", host.name, "neigh", "replace", address, "lladdr", _NOBODY, "dev", "pit")
        _ip("-n", host.name, "route", "add", address, "dev", "pit", "src", host.address)

    def mend(self) -> None:
        """Every host reaches every other again."""
        for host, address in self._cuts:
            _ip("-n", host.name, "route", "del", address, "dev", "pit")
        self._cuts.clear()

    def lost(self) -> int:
        """Packets that cuts have swallowed until now, on all hosts."""
        return sum(_sent(host, "pit") for host in (*self.hosts, self.store))

    def slow_down(self, host: Host, bytes_per_second: int) -> None:
        """Bound what comes from a host and what goes to it. Raises where the kernel cannot."""
        shape = ("root", "tbf", "rate", f"{8 * bytes_per_second}bit", "burst", "16kb")
        for device in self._ends(host):
            _tc(*device[0], "qdisc", "replace", "dev", device[1], *shape, "latency", "400ms")

    def speed_up(self, host: Host) -> int:
        """The opposite; how often a packet had to wait, or was dropped."""
        held = 0
        for within, device in self._ends(host):
            shown = json.loads(_tc(*within, "-s", "-j", "qdisc", "show", "dev", device))
            held += sum(one.get("overlimits", 0) for one in shown)
            _tc(*within, "qdisc", "del", "dev", device, "root")
        return held

    def _ends(self, host: Host) -> tuple[tuple[tuple[str, ...], str], ...]:
        number = (*self.hosts, self.store).index(host)
        return (("-n", host.name), "eth0"), ((), self._link(number))


def _sent(host: Host, device: str) -> int:
    shown = json.loads(_ip("-n", host.name, "-s", "-j", "link", "show", "dev", device))
    return int(shown[0]["stats64"]["tx"]["packets"])


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _tc(*arguments: str) -> str:
    return _run("tc", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
