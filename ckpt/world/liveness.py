"""Who is alive: the identity of a process, and proof that one is gone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

CONNECT_SECONDS = 10.0
ENDED_UNCALLED = "has ended without a call of this library"
# What torchrun sets for every process that it starts; the same in all of a job on one machine.
JOB_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


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
    space = _namespace("pid")
    return f"{socket.gethostname()}/{space}" if space else ""


def _namespace(kind: str) -> str:
    """This boot of the kernel, and the namespace of this process in it; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink(f'/proc/self/ns/{kind}')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """The start time of a process in the kernel's ticks; None when there is none, or only its
    zombie.
    """
    # The second field is the name in brackets, which may hold brackets and spaces itself; the
    # start time is the 22nd. See proc(5).
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in (b"Z", b"X") else after_name[19].decode()


def has_ended(rank: int) -> bool:
    """Whether a rank that has left no card is known to have ended: it is one of this machine, by
    the variables that torchrun sets, and no process was started as it. False where that is
    unknown.
    """
    try:
        own = _variables(os.getpid())
        job = {name: own[name] for name in JOB_VARIABLES}
        # torchrun numbers the ranks of a machine one after the other.
        if rank // int(job["LOCAL_WORLD_SIZE"]) != int(job["GROUP_RANK"]):
            return False
        for pid in filter(str.isdigit, os.listdir("/proc")):
            # Those that may not be read are no ranks: this one, of the same kind, can be.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if os.stat(f"/proc/{pid}").st_uid != os.getuid():
                    continue
                theirs = _variables(int(pid))
                if theirs.get("RANK") == str(rank) and job.items() <= theirs.items():
                    return False
        return True
    except (KeyError, ValueError, OSError):
        return False


def _variables(pid: int) -> dict[str, str]:
    """The environment that a process was started with. Raises OSError where it may not be read."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (one.partition(b"=") for one in file.read().split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def this_network() -> str:
    """Processes with the same answer reach each other by the loopback address; "" if unknown."""
    return _namespace("net")


class Card(NamedTuple):
    """What the others need to know of a process: who it is and where it listens.

    `token` is known to those only who can read the rendezvous store, `certificate` is a digest of
    the one with which it encrypts. A card of port 0 is left by a process that does not join the
    job; its token says why.
    """

    rank: int
    token: str
    hosts: tuple[str, ...]
    port: int
    network: str
    process: ProcessIdentity
    certificate: str = ""

    @staticmethod
    def of_absent(rank: int, why: str) -> Card:
        """The card of this process when it does not join the job."""
        return Card(rank, why, (), 0, "", ProcessIdentity.this())

    def encode(self) -> bytes:
        who = self.process
        identity = [who.machine, who.pid, who.started]
        return json.dumps([*self[:5], identity, self.certificate]).encode()

    @staticmethod
    def decode(data: bytes) -> Card:
        """The inverse of `encode`. Raises ValueError for anything else."""
        try:
            (rank, token, hosts, port, network, identity, certificate) = json.loads(data)
            machine, pid, started = identity
            texts = [token, *hosts, network, machine, started, certificate]
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no card of a process: {error!s:.100}") from error
        if {*map(type, texts)} != {str} or {*map(type, (rank, port, pid))} != {int}:
            raise ValueError(f"no card of a process: {data!r:.100}")
        identity = ProcessIdentity(machine, pid, started)
        return Card(rank, token, tuple(hosts), port, network, identity, certificate)

    def connect(self, seconds: float) -> socket.socket:
        """A connection to that process, by its first address that answers. Raises OSError."""
        hosts = list(self.hosts)
        if self.network and self.network == this_network():
            hosts = ["127.0.0.1", "::1"]  # a host may have one of them alone
        until = time.monotonic() + seconds
        error: OSError = OSError("it has no address")
        for index, host in enumerate(hosts):
            left = (until - time.monotonic()) / (len(hosts) - index)
            try:
                return socket.create_connection((host, self.port), timeout=max(0.1, left))
            except OSError as failed:
                # A closed port says more than an address that is not there.
                error = error if isinstance(error, ConnectionRefusedError) else failed
            except UnicodeError as failed:  # Python refuses to look up some names, as of 64 letters
                error = OSError(f"host {host!r}: {failed}")
        raise error

    def death(self, refusal: OSError | None = None) -> str:
        """What proves that this process is gone, "" if nothing does: a second way to ask, once its
        connection has ended or it is missing.

        `refusal` is why it could not be connected to. Only where its pid cannot be looked up does a
        closed port count; one that is closed although the process runs may be open again.
        """
        if not self.port:
            return self.token
        runs = self.process.runs()
        if runs is None and isinstance(refusal, ConnectionRefusedError):
            return "has died (its port is closed)"
        return "has died" if runs is False else ""


def address_of(store: Any) -> tuple[str, int]:
    """Host and port of a rendezvous store. Raises AttributeError where it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.host, store.port


def hosts_of(store: Any) -> tuple[str, ...]:
    """By which addresses other machines may reach this one: that of the way to the rendezvous
    store first, then by name.
    """
    hosts = []
    with contextlib.suppress(AttributeError, OSError):  # a FileStore has no host
        host, port = address_of(store)
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing; the system chooses the way
            hosts.append(str(probe.getsockname()[0]))
        if _is_loopback(hosts[0]):  # the store is here: others reach this machine as they do it
            hosts.append(host)
    hosts.append(socket.gethostname())
    return tuple(host for host in hosts if not _is_loopback(host))


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
