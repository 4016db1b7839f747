"""The box itself: what is cut loses packets, what is slow is slow, and nothing stays on a machine.

Method: two hosts with a server on one of them; a process that makes a network and is killed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import state_of
from tests.cluster.network import Host, Network, unavailable

pytestmark = pytest.mark.cluster

SERVER = """
import socket
listener = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
while True:
    with listener.accept()[0] as connection:
        connection.sendall(b"x" * 200_000)
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=1.5) as connection:
    nbytes = 0
    while data := connection.recv(1 << 16):
        nbytes += len(data)
print(nbytes)
"""
MAKER = """
import subprocess, sys, time
from pathlib import Path
from tests.cluster.disk import small_disk
from tests.cluster.network import Network
network = Network(1).__enter__()
disk = small_disk(Path(sys.argv[1]), 1 << 20, network.guard)
disk.__enter__()
sleeper = network.hosts[0].popen(["sleep", "1000"])
print(network.bridge, sleeper.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := unavailable():
        pytest.skip(reason)
    with Network(2) as made:
        yield made


@pytest.fixture(scope="module")
def server(network: Network) -> Iterator[Host]:
    """A host that answers everybody."""
    host = network.hosts[1]
    with host.popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield host
        process.kill()


def reaches(client: Host, server: Host) -> bool:
    words = [*client.within, sys.executable, "-c", CLIENT, server.address]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode or done.stdout == "200000\n"
    return not done.returncode


@pytest.mark.parametrize("cut", ["both ways", "requests", "answers"])
def test_a_cut_loses_packets_and_mends(network: Network, server: Host, cut: str) -> None:
    client = network.hosts[0]
    assert reaches(client, server)
    before = network.lost()
    one, other = (server, client) if cut == "answers" else (client, server)
    network.cut(one, other, one_way=cut != "both ways")
    assert not reaches(client, server)
    assert network.lost() > before
    network.mend()
    after = network.lost()
    assert reaches(client, server)
    assert network.lost() == after


def test_a_slow_link_holds_packets_up(network: Network, server: Host) -> None:
    network.slow_down(server, 500_000)
    assert reaches(network.hosts[0], server)
    assert network.speed_up(server) > 0


def test_a_killed_maker_leaves_nothing(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    folder = str(tmp_path / "disk")
    words = [sys.executable, "-c", MAKER, folder]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        bridge, pid = maker.stdout.readline().split()
        assert bridge in _shown("link") and f"{bridge}h0" in _shown("netns")
        assert folder in Path("/proc/mounts").read_text()
        (guard,) = _children(maker.pid, b"guard.py")
        handle = os.pidfd_open(guard)
        maker.send_signal(signal.SIGKILL)
    with os.fdopen(handle) as ended:  # the guard is no child of this process
        select.select([ended], [], [], 60)
    assert bridge not in _shown("link") and bridge not in _shown("netns")
    assert folder not in Path("/proc/mounts").read_text()
    assert state_of(int(pid)) in "ZX"
    assert not Path(f"/etc/netns/{bridge}h0").exists()


def _shown(what: str) -> str:
    return subprocess.run(["ip", what], capture_output=True, text=True, check=True).stdout


def _children(pid: int, word: bytes) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [one for one in map(int, text.split()) if word in _command(one)]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
