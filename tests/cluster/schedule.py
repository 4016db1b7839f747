"""Lives of a job on a cluster, and what happens to them: drawn from a seed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster.agent import Start, encoded
from tests.cluster.history import read_history
from tests.cluster.network import Host, Network

HOSTS, PER_HOST = 3, 2
CLOCKS = (0, 3, -2)  # hours by which the clocks of hosts are wrong
DISK_NBYTES = 32 << 20  # of a root on a disk
PATIENCE_SECONDS = 12.0  # of a rank for others and for the store
END_SECONDS = 120.0  # by then a rank has ended, whatever happened to it


class Running:
    """One life: the pids of its ranks, by rank."""

    def __init__(self, number: int, pids: Sequence[int], hosts: Sequence[Host]) -> None:
        self.number = number
        self.pids = list(pids)
        self.hosts = list(hosts)  # of each rank
        self.killed: set[int] = set()  # ranks

    def signal(self, number: signal.Signals, ranks: Sequence[int] = ()) -> None:
        """Send a signal to some ranks, by default to all."""
        for rank in ranks or range(len(self.pids)):
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)
            if number == signal.SIGKILL:
                self.killed.add(rank)

    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, pid in enumerate(self.pids) if _is_alive(pid)]


class Cluster:
    """Hosts with their agents. Every process of it is gone at the end of the `with` block."""

    def __init__(
        self, network: Network, folder: Path, url: str, options: dict[str, Any] | None = None
    ) -> None:
        self.network = network
        self.folder = folder  # of histories
        self.url = url
        self.options = options or {}
        self.lives: list[Running] = []
        self.met: Counter[str] = Counter()  # faults that met a living job
        self._agents: dict[Host, subprocess.Popen[str]] = {}
        self._open = ExitStack()

    def __enter__(self) -> Cluster:
        command = [sys.executable, "-W", "ignore", "-m", "tests.cluster.with_clock"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        log = self._open.enter_context((self.folder / "agents.log").open("a"))
        for host, hours in zip(self.network.hosts, CLOCKS, strict=True):
            agent = host.popen([*command, str(hours)], stderr=log, **pipes)
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
        self._open.close()

    def start(self, hosts: Sequence[Host], per_host: int, steps: int) -> Running:
        """Start a job on some hosts; it trains `steps` steps from where it restores."""
        number = len(self.lives)
        of_ranks = [host for host in hosts for _ in range(per_host)]
        pids = []
        for rank, host in enumerate(of_ranks):
            start = Start(
                url=self.url,
                options=self.options,
                rank=rank,
                size=len(of_ranks),
                address=hosts[0].address,
                port=29500 + number,
                steps=steps,
                step_seconds=0.1,
                patience_seconds=PATIENCE_SECONDS,
                history=str(self.folder / f"life{number}-rank{rank}"),
            )
            agent = self._agents[host]
            assert agent.stdin is not None and agent.stdout is not None
            agent.stdin.write(encoded(start))
            agent.stdin.flush()
            pids.append(int(agent.stdout.readline()))
        life = Running(number, pids, of_ranks)
        self.lives.append(life)
        return life

    def finish(self, life: Running) -> list[int]:
        """Wait until a life has ended; which ranks have not by their deadline. They are killed."""
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and life.alive():
            time.sleep(0.1)
        late = life.alive()
        if late:
            life.signal(signal.SIGKILL, late)
        return late


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A small disk of its own, seen by all hosts, that can be full and read-only."""
    folder.mkdir()
    size = f"size={DISK_NBYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# What happens ------------------------------------------------------------------------------------

Fault = Callable[[Cluster, Running, random.Random], None]


def nothing(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """The life ends by itself."""


def kill_a_rank(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """SIGKILL one rank."""
    life.signal(signal.SIGKILL, [rng.randrange(len(life.pids))])


def kill_a_host(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """SIGKILL all ranks of a host."""
    host = rng.choice(life.hosts)
    life.signal(signal.SIGKILL, [rank for rank, own in enumerate(life.hosts) if own == host])


def kill_all(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """SIGKILL the whole job."""
    life.signal(signal.SIGKILL)


def stop_a_rank(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """SIGSTOP one rank for some seconds."""
    ranks = [rng.randrange(len(life.pids))]
    life.signal(signal.SIGSTOP, ranks)
    time.sleep(rng.uniform(0.5, 3))
    life.signal(signal.SIGCONT, ranks)


def lose_the_store(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """The store is away for some seconds, for all hosts or for one, or only its answers are."""
    hosts = rng.choice((cluster.network.hosts, [rng.choice(cluster.network.hosts)]))
    for host in hosts:
        if rng.random() < 0.5:
            cluster.network.cut(host, cluster.network.store)
        else:
            cluster.network.cut(cluster.network.store, host, one_way=True)
    time.sleep(rng.uniform(0.5, 3))
    cluster.network.mend()


def fill_the_disk(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """Somebody else's file takes all space that is left, for some seconds."""
    filler = Path(cluster.url).parent / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        for _ in range(DISK_NBYTES // 4096):
            file.write(bytes(4096))
    time.sleep(rng.uniform(0.5, 3))
    filler.unlink()


def make_read_only(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """The disk is remounted read-only for some seconds, as a kernel does after errors."""
    mount = str(Path(cluster.url).parent)
    while subprocess.run(["mount", "-o", "remount,ro", mount], capture_output=True).returncode:
        time.sleep(0.01)  # a file is open for writing
    time.sleep(rng.uniform(0.5, 3))
    subprocess.run(["mount", "-o", "remount,rw", mount], check=True)


def isolate_a_host(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """One host reaches no other, but perhaps the store, for less or for more than the patience."""
    host = rng.choice(life.hosts)
    others = [other for other in cluster.network.hosts if other != host]
    for other in [*others, *([cluster.network.store] * rng.randrange(2))]:
        cluster.network.cut(host, other)
    time.sleep(rng.choice((1.0, 3.0, PATIENCE_SECONDS + 3)))
    cluster.network.mend()


def split_in_one_direction(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """What one host sends to another is lost, for less or for more than the patience."""
    one, other = rng.sample(cluster.network.hosts, 2)
    cluster.network.cut(one, other, one_way=True)
    time.sleep(rng.choice((1.0, 3.0, PATIENCE_SECONDS + 3)))
    cluster.network.mend()


def rival(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """A second job begins on the same root while the first goes on, which is fenced."""
    hosts = rng.sample(cluster.network.hosts, rng.choice((1, 2)))
    cluster.finish(cluster.start(hosts, 1, rng.randrange(4, 12)))


def zombie(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """The job stands still until another one has lived on its root, and goes on then."""
    life.signal(signal.SIGSTOP)
    rival(cluster, life, rng)
    life.signal(signal.SIGCONT)


def operator(cluster: Cluster, life: Running, rng: random.Random) -> None:
    """Somebody looks and cleans up meanwhile."""
    options = [
        f"-o{key}={value}" for key, value in cluster.options.items() if key != "client_kwargs"
    ]
    copy = f"{cluster.url}-copy-{life.number}"
    commands = (
        ["ls"],
        ["verify"],
        ["prune", "--keep-last", "2", "--yes"],
        ["cp", copy],
        ["log"],
    )
    for command in rng.sample(commands, 2):
        name, *rest = command
        words = [name, cluster.url, *rest, *options]
        host = rng.choice(cluster.network.hosts)
        done = host.popen(
            [sys.executable, "-W", "ignore", "-m", "ckpt", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "AWS_DEFAULT_REGION": "us-east-1"},
        )
        _, errors = done.communicate(timeout=END_SECONDS)
        assert "Traceback" not in errors, f"ckpt {' '.join(words)}: {errors}"


# By the root that they need, "" for any. After those of the first list all ranks are to end by
# themselves, without an error.
HARMLESS: dict[str, tuple[Fault, ...]] = {
    "": (nothing, stop_a_rank, operator),
    "s3": (lose_the_store,),
    "disk": (fill_the_disk, make_read_only),
}
DEADLY: tuple[Fault, ...] = (
    kill_a_rank,
    kill_a_host,
    kill_all,
    isolate_a_host,
    split_in_one_direction,
    rival,
    zombie,
)


def live_once(cluster: Cluster, fault: Fault, rng: random.Random) -> list[str]:
    """One life with one fault at a random moment; what was wrong with how it ended."""
    hosts = rng.sample(cluster.network.hosts, rng.randrange(2, HOSTS + 1))
    # What is to end well outlives its fault: a last save that fails is an error of the job.
    is_deadly = fault in DEADLY
    steps = rng.randrange(20, 50) if is_deadly else 60
    life = cluster.start(hosts, rng.randrange(1, PER_HOST + 1), steps)
    time.sleep(rng.uniform(0.2, 4.0 if is_deadly else 1.5))
    cluster.met[fault.__name__] += bool(life.alive())
    fault(cluster, life, rng)
    late = cluster.finish(life)
    text = f"life {life.number} of {len(life.pids)} ranks, {fault.__name__}"
    problems = [f"{text}: ranks {late} have not ended"] if late else []
    events = [event for event in read_history(cluster.folder) if event.life == life.number]
    ends = {event.rank: event.facts["error"] for event in events if event.kind == "ended"}
    if not is_deadly and ends != dict.fromkeys(range(len(life.pids)), ""):
        problems.append(f"{text}: ended as {ends}")
    if fault in (rival, zombie) and not set(ends.values()) <= {"", "Fenced"}:
        problems.append(f"{text}: ended as {ends}, and not because it was fenced")
    return problems
