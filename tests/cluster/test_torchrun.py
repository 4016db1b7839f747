"""An elastic job under torchrun on hosts of its own: a host is lost, another comes, a rank dies.

Method: torchrun's agents with `--nnodes=1:3` and a c10d rendezvous, each in a network namespace
with an empty folder for near states; the rendezvous store is this process. Nobody tells the job
what has happened. The history that its ranks write is checked as in `test_cluster`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from storage import open_store
from tests.cluster.agent import KEEP
from tests.cluster.gateway import gateway
from tests.cluster.history import (
    CHECKS,
    Event,
    broken_promises,
    counts,
    left_behind,
    read_history,
    root_of,
    wrong_bits,
)
from tests.cluster.near_history import NEAR_CHECKS
from tests.cluster.network import Host, Network, unavailable
from tests.results import Counted
from tests.servers import moto_server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

SECONDS_MAX = 300.0  # of one turn, on a machine with much else to do
STEPS = 8  # of each turn, at least


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := unavailable():
        pytest.skip(reason)
    with Network(4) as made:
        yield made


class Elastic:
    """The agents of one job, and what its ranks have noted."""

    def __init__(self, network: Network, folder: Path, order: dict[str, Any], port: int) -> None:
        self.network = network
        self.folder = folder
        self._order = order
        self._endpoint = f"{network.address}:{port}"
        self._agents: dict[Host, subprocess.Popen[str]] = {}

    def start(self, host: Host) -> None:
        """Start an agent on a host."""
        near = {"path": str(self.tier(host)), "every": 2, "replicas": 0}
        order = {**self._order, "near": near, "host": host.name, "folder": str(self.folder)}
        words = [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
            *("--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=50"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=box"),
            "--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=1",
            *("--local-addr", host.address, "-m", "tests.cluster.elastic", json.dumps(order)),
        ]
        environment = {
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
            # Without it, agents of torch 2.13 wait for one that has gone: see test_near_torchrun.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with (self.folder / f"{host.name}.log").open("w") as log:
            pipes: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
            self._agents[host] = host.popen(words, env=environment, **pipes)

    def tier(self, host: Host) -> Path:
        return self.folder / "hosts" / host.name

    def kill(self, host: Host, *, only_ranks: bool = False) -> int:
        """SIGKILL what runs on a host; how many processes that were."""
        shown = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True)
        agent, killed = self._agents[host].pid, 0
        for pid in map(int, shown.stdout.split()):
            is_rank = b"tests.cluster.elastic" in _command(pid) and pid != agent
            if not only_ranks or (is_rank and b"torch.distributed.run" not in _command(pid)):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        if not only_ranks:
            self._agents.pop(host).wait()
        return killed

    def note_lost(self, host: Host) -> None:
        shutil.rmtree(self.tier(host))
        line = {"life": -1, "rank": -1, "event": "lost host", "host": host.name}
        with (self.folder / "driver.history").open("a") as history:
            history.write(json.dumps({**line, "time": time.monotonic()}) + "\n")

    def until(self, done: Callable[[list[Event]], bool]) -> list[Event]:
        """Wait until the history fulfils something."""
        deadline = time.monotonic() + SECONDS_MAX
        while not done(events := read_history(self.folder)):
            logs = [path.read_text()[-1500:] for path in self.folder.glob("*.log")]
            assert time.monotonic() < deadline, "\n".join(logs)
            time.sleep(0.3)
        return events

    def trains(self, size: int, after: float) -> Callable[[list[Event]], bool]:
        """Whether a life of `size` ranks that began later has made steps, and a near save."""

        def done(events: list[Event]) -> bool:
            lives = {
                event.life
                for event in events
                if event.kind == "started" and event.time > after and event.facts["ranks"] == size
            }
            own = [event.kind for event in events if event.life in lives]
            return own.count("stepped") >= STEPS * size and "near saved" in own

        return done

    def close(self) -> None:
        for host in list(self._agents):
            self.kill(host)


def test_an_elastic_job_outlives_hosts_and_ranks(
    network: Network, tmp_path: Path, counted: Counted
) -> None:
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    with ExitStack() as stack:
        server = stack.enter_context(moto_server(network.store.address, network.store.within))
        between = stack.enter_context(gateway(network, server.endpoint_url))
        url = f"s3://{server.make_bucket()}/run"
        rendezvous = tcp_store("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        order = {
            "url": url,
            "options": {**server.options, "endpoint_url": between.url},
            "steps": 100_000,
            "step_seconds": 0.1,
            "patience_seconds": 12.0,
            "stop": str(tmp_path / "stop"),
            "save_every": 6,
        }
        job = Elastic(network, tmp_path, order, rendezvous.port)
        stack.callback(job.close)
        killed, lost_packets = _course(job)
        store = stack.enter_context(closing(open_store(url, **server.options)))
        events = read_history(tmp_path)
        checks = (*CHECKS, *NEAR_CHECKS)
        broken = broken_promises(events, root_of(store, KEEP), checks)
        broken += [*wrong_bits(store), *left_behind(store)]
    print(f"{dict(counts(events))}, {killed} killed, {lost_packets} packets lost")
    counted(**counts(events), killed=killed, packets_lost=lost_packets)
    assert not broken, "\n".join(broken)
    assert killed and lost_packets
    origins = [event.facts["origin"] for event in events if event.kind == "restored"]
    assert "near" in origins, "a rank that dies leaves its near state behind"
    assert "durable" in origins, "a host that is lost takes it along"


def _course(job: Elastic) -> tuple[int, int]:
    """What happens to the job; how many processes were killed, how many packets were lost."""
    hosts, network = job.network.hosts, job.network
    for host in hosts[:3]:
        job.start(host)
    saved = job.trains(3, 0.0)
    job.until(lambda e: saved(e) and any(one.kind == "saved" for one in e))
    # A rank dies: the same hosts go on, from what lies there.
    time_killed = time.monotonic()
    killed = job.kill(hosts[0], only_ranks=True)
    job.until(job.trains(3, time_killed))
    # A host loses power, and its folder with it: two go on.
    lost = hosts[2]
    for other in (*hosts[:2], network.store):
        network.cut(lost, other)
    time.sleep(0.5)
    time_lost = time.monotonic()
    killed += job.kill(lost)
    job.note_lost(lost)
    job.until(job.trains(2, time_lost))
    lost_packets = network.lost()
    network.mend()
    # An empty host comes: three go on.
    time_came = time.monotonic()
    job.start(hosts[3])
    job.until(job.trains(3, time_came))
    Path(job.folder / "stop").touch()
    job.until(lambda events: _has_ended(events, 3))
    return killed, lost_packets


def _has_ended(events: list[Event], size: int) -> bool:
    """Whether all ranks of the newest life have ended by themselves."""
    newest = max(event.life for event in events)
    own = [event for event in events if event.life == newest and event.kind == "ended"]
    return len(own) == size and all(not event.facts["error"] for event in own)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
