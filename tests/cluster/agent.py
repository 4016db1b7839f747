"""What runs on a host: an agent that forks the ranks of a job, and a rank's training.

The agent imports torch once and reads one JSON object per line from standard input: a `Start`. It
forks a process for it, and answers with its pid. A rank writes what its caller is told, one JSON
object per line, to a file of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.service.events import SaveEvent, SaveFailed, SaveSucceeded
from tests.e2e.job import Sharded

TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]
ROWS, COLUMNS = 257, 64
KEEP = 3


@dataclass(frozen=True)
class Start:
    """One rank of one job. `history` is the file to write to."""

    url: str
    options: dict[str, Any]
    rank: int
    size: int
    address: str
    port: int
    steps: int
    step_seconds: float
    patience_seconds: float
    history: str


def weights_of(step: int) -> torch.Tensor:
    """The weights of a step, shape (ROWS, COLUMNS): any checkpoint can be judged by its step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-(2**20), 2**20, (ROWS, COLUMNS), generator=generator).float()


def state_of(step: int, rank: int, size: int) -> dict[str, Any]:
    """What a rank of `size` has at a step."""
    full = weights_of(step)
    return {"rows": Sharded(full, rank, size), "replica": full[:3].clone(), "step": step}


def is_step(state: dict[str, Any], step: int, rank: int, size: int) -> bool:
    """Whether every bit of a rank's state is that of the step."""
    expected = state_of(step, rank, size)
    same = torch.equal(state["rows"].local, expected["rows"].local)
    return same and torch.equal(state["replica"], expected["replica"]) and state["step"] == step


def train(start: Start) -> None:
    """One rank's life. It ends after `steps` steps, or as its errors say."""
    history = Path(start.history).open("a", buffering=1)  # noqa: SIM115 - until the process ends

    def note(**event: Any) -> None:
        history.write(json.dumps({"rank": start.rank, "time": time.monotonic(), **event}) + "\n")

    note(event="began")
    try:
        _train(start, note)
        note(event="ended", error="")
    except Exception as error:  # whatever it is, the checker looks at it
        note(event="ended", error=type(error).__name__, text=str(error)[:400])


def _train(start: Start, note: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    seconds = timedelta(seconds=start.patience_seconds)
    store = TCP_STORE(start.address, start.port, None, start.rank == 0, timeout=seconds)
    dist.init_process_group(
        "gloo", store=store, rank=start.rank, world_size=start.size, timeout=seconds
    )

    def observe(event: SaveEvent) -> None:
        if isinstance(event, SaveSucceeded):
            note(event="saved", step=event.report.step, attempt=event.report.attempt)
        if isinstance(event, SaveFailed):
            note(event="failed", step=event.step, error=type(event.error).__name__)

    state = state_of(0, start.rank, start.size)
    with ckpt.Checkpointer(
        start.url,
        state,
        save=ckpt.EverySteps(2) | ckpt.AtExit(),
        keep=ckpt.KeepLatest(KEEP),
        observers=[observe],
        storage_options=start.options,
        retry_seconds_max=start.patience_seconds,
    ) as saver:
        report = saver.restore()
        first = 0 if report is None else report.step
        right = is_step(state, first, start.rank, start.size)
        attempt = "" if report is None else report.attempt
        note(event="restored", step=first, right=right, attempt=attempt)
        for step in range(first + 1, first + 1 + start.steps):
            time.sleep(start.step_seconds)
            dist.all_reduce(torch.ones(1))  # ranks of a training wait for each other
            newer = state_of(step, start.rank, start.size)
            state["rows"].local.data.copy_(newer["rows"].local.data)
            state["replica"].copy_(newer["replica"])
            state["step"] = step
            saver.step(step)


def main() -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        start = Start(**json.loads(line))
        pid = os.fork()
        if not pid:
            code = 1
            try:
                sys.stdin.close()
                os.setsid()
                train(start)
                code = 0
            finally:
                os._exit(code)
        print(pid, flush=True)
        # Ranks that have ended are not waited for by anybody else.
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def encoded(start: Start) -> str:
    """A line for an agent."""
    return json.dumps(asdict(start)) + "\n"
