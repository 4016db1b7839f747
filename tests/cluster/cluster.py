"""Hosts with their agents, and the lives of jobs on them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from tests.cluster.agent import Look, NearStart, Start, encoded
from tests.cluster.disk import FailingDisk
from tests.cluster.gateway import Gateway
from tests.cluster.history import Event, read_history
from tests.cluster.network import Host, Network

HOSTS, RANKS_MAX = 4, 4
CLOCKS = (0, 3, -2, 30)  # hours by which the clocks of hosts are wrong
PATIENCE_SECONDS = 12.0  # of a rank for others and for the store
END_SECONDS = 150.0  # by then a rank has ended, whatever happened to it
SAME_HOSTS = 0.6  # so many of the jobs with near tiers begin on the hosts of the one before
GIVEN_UP_SECONDS = 30.0  # for ranks that wait for one that has not joined
STEPS_MAX = 4000  # of a life that the driver ends

Ends = Literal["harmless", "fenced", "any"]


class Place(NamedTuple):
    """Where the jobs of a cluster save: their durable root, and what its faults act on.

    `folder` is the mount of a root on a disk. `tiers` are the folders of hosts for near states, by
    the name of the host. `disk` acts on the processes of all hosts, below `folder` or in tiers.
    """

    url: str
    options: dict[str, Any]
    gateway: Gateway | None = None
    folder: Path | None = None
    tiers: Mapping[str, Path] | None = None
    disk: FailingDisk | None = None
    save_every: int = 2
    replicas: int = 0


@dataclass
class Running:
    """One life: the pids of its ranks, by rank, and their hosts."""

    number: int
    pids: list[int]
    hosts: list[Host]
    stop: Path
    stopped_since: float = 0.0
    killed: set[int] = field(default_factory=set)

    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, pid in enumerate(self.pids) if state_of(pid) not in "ZX"]

    def signal(self, number: signal.Signals, ranks: Sequence[int] = ()) -> int:
        """Send a signal to some ranks, by default to all; how many of them it has met alive."""
        meant = [rank for rank in ranks or range(len(self.pids)) if rank in self.alive()]
        for rank in meant:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)
            if number == signal.SIGKILL:
                self.killed.add(rank)
        return len(meant)

    def stopped(self) -> int:
        """How many ranks a SIGSTOP holds."""
        return sum(state_of(pid) == "T" for pid in self.pids)

    def ranks_on(self, host: Host) -> list[int]:
        """The ranks of a host."""
        return [rank for rank, own in enumerate(self.hosts) if own == host]

    def end(self) -> None:
        """Have it train a few steps more, and end by itself."""
        self.stop.touch()


class Cluster:
    """Hosts with their agents. Every process of it is gone at the end of the `with` block."""

    def __init__(self, network: Network, folder: Path, place: Place) -> None:
        self.network = network
        self.folder = folder  # of histories
        self.place = place
        self.lives: list[Running] = []
        self.met: Counter[str] = Counter()  # faults that met a living job
        self.effects: dict[str, Counter[str]] = {}  # of each fault, what shows that it struck
        self.problems: list[str] = []
        self._agents: dict[Host, subprocess.Popen[str]] = {}
        self._history = (folder / "driver.history").open("a", buffering=1)
        self._open = ExitStack()

    def __enter__(self) -> Cluster:
        words = [sys.executable, "-W", "ignore", "-m", "tests.cluster.with_clock"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        log = self._open.enter_context((self.folder / "agents.log").open("a"))
        disk = self.place.disk
        pipes["env"] = {**os.environ, **(disk.environment if disk else {})}
        for host, hours in zip(self.network.hosts, CLOCKS, strict=True):
            agent = host.popen([*words, str(hours)], stderr=log, **pipes)
            self._agents[host] = self._open.enter_context(agent)
        for agent in self._agents.values():
            assert agent.stdout is not None and agent.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for life in self.lives:
            life.signal(signal.SIGKILL)
        for agent in self._agents.values():
            agent.kill()
        self._history.close()
        self._open.close()

    def note(self, life: int, event: str, **facts: Any) -> None:
        """Add to the history what the driver has done."""
        line = {"life": life, "rank": -1, "event": event, "time": time.monotonic(), **facts}
        self._history.write(json.dumps(line) + "\n")

    def start(
        self, hosts: Sequence[Host], per_host: int, *, steps: int, ends: Ends, **more: Any
    ) -> Running:
        """Start a job on some hosts. It trains `steps` steps from where it restores, or until it is
        ended. `more` are further fields of the `Start` of each rank.
        """
        number = len(self.lives)
        of_ranks = [host for host in hosts for _ in range(per_host)]
        stop = self.folder / f"life{number}.stop"
        has_near = self.place.tiers is not None
        facts = {"hosts": [host.name for host in hosts], "ends": ends, "ranks": len(of_ranks)}
        near = self.place.replicas if has_near else None
        self.note(number, "started", near=near, **facts)
        pids = []
        for rank, host in enumerate(of_ranks):
            fields: dict[str, Any] = {
                "options": self.place.options,
                "near": self._near(host),
                "save_every": self.place.save_every,
                **more,
            }
            start = Start(
                url=self.place.url,
                rank=rank,
                size=len(of_ranks),
                address=hosts[0].address,
                port=20000 + number,
                steps=steps,
                step_seconds=0.1,
                patience_seconds=PATIENCE_SECONDS,
                life=number,
                history=str(self.folder / f"life{number}-rank{rank}.history"),
                stop=str(stop),
                **fields,
            )
            pids.append(self._order(host, encoded(start)))
        life = Running(number, pids, of_ranks, stop)
        self.lives.append(life)
        return life

    def look(self, host: Host) -> None:
        """Start an onlooker, who stays."""
        path = str(self.folder / f"look-{host.name}.history")
        self._order(host, encoded(Look(self.place.url, self.place.options, path)))

    def _order(self, host: Host, line: str) -> int:
        agent = self._agents[host]
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(line)
        agent.stdin.flush()
        return int(agent.stdout.readline())

    def _near(self, host: Host) -> NearStart | None:
        if self.place.tiers is None:
            return None
        path = str(self.place.tiers[host.name] / "near")
        return NearStart(path, address=host.second, replicas=self.place.replicas)

    def events(self, life: Running) -> list[Event]:
        """What its ranks have been told until now."""
        return read_history(self.folder, f"life{life.number}-*")

    def wait_for(self, life: Running, done: Callable[[list[Event]], bool], seconds: float) -> bool:
        """Wait until its events fulfil something, or it has ended; whether they do."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            is_over = not life.alive()
            if done(self.events(life)):
                return True
            if is_over:
                return False
            time.sleep(0.1)
        return False

    def finish(self, life: Running) -> None:
        """Wait until a life has ended. Ranks that have not by their deadline are killed."""
        has_joined = {e.rank for e in self.events(life) if e.kind == "restored"}
        # Who dies before he has joined leaves no trace, and the others wait for ten minutes, as
        # docs/limits.md says: too long for this.
        in_time = life.killed <= has_joined
        deadline = time.monotonic() + (END_SECONDS if in_time else GIVEN_UP_SECONDS)
        while time.monotonic() < deadline and life.alive():
            time.sleep(0.05)
        late = life.alive()
        if late:
            self.note(life.number, "late" if in_time else "given up", ranks=late)
            life.signal(signal.SIGKILL, late)

    def lose_host(self, host: Host) -> int:
        """What a host had is gone with it; how many files that were."""
        if self.place.tiers is None:
            return 0
        folder = self.place.tiers[host.name]
        lost = sum(path.is_file() for path in folder.rglob("*"))
        for path in folder.iterdir():
            shutil.rmtree(path)
        self.note(-1, "lost host", host=host.name)
        return lost


def some_hosts(cluster: Cluster, rng: random.Random) -> tuple[list[Host], int]:
    """Two hosts or more for a job, and how many ranks each of them has. Where hosts keep something,
    mostly those of the job before.
    """
    if cluster.place.tiers is not None and cluster.lives and rng.random() < SAME_HOSTS:
        hosts = list(dict.fromkeys(cluster.lives[-1].hosts))
        return hosts, rng.randrange(1, RANKS_MAX // len(hosts) + 1)
    hosts = rng.sample(cluster.network.hosts, rng.randrange(2, HOSTS + 1))
    return hosts, rng.randrange(1, RANKS_MAX // len(hosts) + 1)


def state_of(pid: int) -> str:
    """A letter as in /proc/PID/stat, X where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
