"""torchrun's elastic agents go on from the near state, unattended, when one is lost and one comes.

Method: real agents, each with one process of `examples/train_elastic.py`, that share the near
folder of one host; the rendezvous store is this process, at a port that the system chooses. What
the processes print says from where they went on.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = [pytest.mark.ranks, pytest.mark.soak, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 240.0
BEGAN = re.compile(r"process (\d+), rank (\d) of (\d): from (\w+)(?: step (\d+))?")
STEP = re.compile(r"step (\d+) of (\d)")


class Agent:
    """A torchrun agent. Its output, and that of its processes, goes to a file."""

    def __init__(self, folder: Path, name: str, port: int) -> None:
        self.log = folder / f"{name}.log"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--max-restarts=20", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"),
            "--rdzv-conf=is_host=0,last_call_timeout=1,keep_alive_interval=1",
            str(ROOT / "examples/train_elastic.py"),
            *(str(folder / "host"), str(folder / "run"), "100000", "0.05"),
        ]
        environment = {
            **os.environ,
            **{"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            # Without it, torch 2.13's agents wait for ever for the one that came before them: it
            # tells the address of its store in its first round only.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def lives(self) -> list[tuple[int, int, str, int]]:
        """The lives of its process so far: pid, size of the world, origin, step."""
        matches = BEGAN.finditer(self.log.read_text(errors="replace"))
        return [(int(m[1]), int(m[3]), m[4], int(m[5] or 0)) for m in matches]

    def steps(self, size: int) -> list[int]:
        """The steps that it has made in worlds of this size."""
        matches = STEP.finditer(self.log.read_text(errors="replace"))
        return [int(m[1]) for m in matches if int(m[2]) == size]

    def kill(self) -> None:
        """The agent and its newest process, as when their part of the machine is lost."""
        self.process.kill()
        self.process.wait()
        for pid, *_ in self.lives()[-1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Agents that are ended with the test."""
    begun: list[Agent] = []
    yield begun
    for agent in begun:
        agent.kill()


def until(condition: Callable[[], Any], agents: list[Agent]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "\n".join(a.log.read_text()[-2000:] for a in agents)
        time.sleep(0.1)


def test_agents_go_on_from_the_near_state_in_another_world(
    tmp_path: Path, agents: list[Agent]
) -> None:
    store_class: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch hides it from checkers
    store = store_class("localhost", 0, is_master=True, wait_for_workers=False)
    agents += [Agent(tmp_path, name, store.port) for name in ("first", "second")]
    until(lambda: all(len(a.steps(2)) > 10 for a in agents), agents)
    left, lost = agents
    lost.kill()
    made = max(lost.steps(2))
    # Without a word from anybody, the one that is left goes on alone.
    until(lambda: len(left.steps(1)) > 10, agents)
    _, size, origin, step = left.lives()[-1]
    # The one that is left may have printed more; of the newest near saves one may be cut off.
    assert (size, origin) == (1, "near") and made - 4 <= step <= max(left.steps(2)) + 1
    assert left.steps(1)[0] == step + 1
    # A new one comes: both go on from the state of the one that was alone.
    agents.append(Agent(tmp_path, "third", store.port))
    until(lambda: len(agents[2].steps(2)) > 10, agents)
    ((size, origin, again),) = {life[1:] for life in (left.lives()[-1], agents[2].lives()[-1])}
    assert (size, origin) == (2, "near") and again >= max(left.steps(1)) - 4
    assert not list((tmp_path / "run").glob("steps/*")), "no durable checkpoint was there to read"
