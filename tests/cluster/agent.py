"""What runs on a host: an agent that forks the ranks of a job, and a rank's training.

The agent imports torch once and reads one JSON object per line from standard input: a `Start` or a
`Look`. It forks a process for it, and answers with its pid. Such a process writes what its caller
is told, one JSON object per line, to a file of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.service.events import NearFailed, NearSaved, SaveEvent, SaveFailed, SaveSucceeded
from tests.e2e.job import Sharded

TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]
ROWS, COLUMNS = 257, 64
KEEP = 3
STEPS_AFTER = 5  # a job that is ended trains on so far: there is a save among them
LOOK_SECONDS = 0.4  # between two looks of an onlooker
IMPORTED_FROM = 1_000_000  # steps from here on are of imports: they have no values

Note = Callable[..., None]


@dataclass(frozen=True)
class NearStart:
    """The near tier of a rank's host, which serves it to others at `address`."""

    path: str
    address: str = ""
    every: int = 2
    replicas: int = 0


@dataclass(frozen=True)
class Start:
    """One rank of life number `life` of a job. `history` is the file to write to. It trains `steps`
    steps, or until the file `stop` is there, and then a few more.
    """

    url: str
    options: dict[str, Any]
    rank: int
    size: int
    address: str
    port: int
    steps: int
    step_seconds: float
    patience_seconds: float
    life: int
    history: str
    stop: str
    save_every: int = 2
    near: NearStart | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """Somebody who looks at a root again and again, and loads what is listed."""

    url: str
    options: dict[str, Any]
    history: str


def weights_of(step: int) -> torch.Tensor:
    """The weights of a step, shape (ROWS, COLUMNS): any checkpoint can be judged by its step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-(2**20), 2**20, (ROWS, COLUMNS), generator=generator).float()


def state_of(step: int, rank: int, size: int) -> dict[str, Any]:
    """What a rank of `size` has at a step."""
    full = weights_of(step)
    state = {"rows": Sharded(full, rank, size), "replica": full[:3].clone()}
    return state if step >= IMPORTED_FROM else {**state, "step": step}


def is_step(state: dict[str, Any], step: int, rank: int, size: int) -> bool:
    """Whether every bit of a rank's state is that of the step."""
    expected = state_of(step, rank, size)
    same = torch.equal(state["rows"].local, expected["rows"].local)
    same = same and torch.equal(state["replica"], expected["replica"])
    return same and state.get("step") == expected.get("step")


def advance(state: dict[str, Any], step: int, rank: int, size: int) -> None:
    """Train one step."""
    newer = state_of(step, rank, size)
    state["rows"].local.data.copy_(newer["rows"].local.data)
    state["replica"].copy_(newer["replica"])
    state["step"] = step


def noting(path: str, **always: Any) -> Note:
    """What appends a line to a history, with the time of the machine, which all hosts share."""
    history = Path(path).open("a", buffering=1)  # noqa: SIM115 - until the process ends

    def note(**event: Any) -> None:
        history.write(json.dumps({**always, "time": time.monotonic(), **event}) + "\n")

    return note


def observing(note: Note) -> Callable[[SaveEvent], None]:
    """An observer that notes how saves end."""

    def observe(event: SaveEvent) -> None:
        if isinstance(event, SaveSucceeded):
            note(event="saved", step=event.report.step, attempt=event.report.attempt)
        if isinstance(event, SaveFailed):
            note(event="failed", step=event.step, error=type(event.error).__name__)
        if isinstance(event, NearSaved):
            note(event="near saved", step=event.report.step, attempt=event.report.attempt)
        if isinstance(event, NearFailed):
            note(event="near failed", step=event.step, error=type(event.error).__name__)

    return observe


def train(start: Start) -> None:
    """One rank's life. It ends after `steps` steps, or as its errors say."""
    os.environ.update(start.environment)
    note = noting(start.history, life=start.life, rank=start.rank)
    note(event="began", clock=time.time())
    try:
        _train(start, note)
        note(event="ended", error="")
    except Exception as error:  # whatever it is, the checker looks at it
        note(event="ended", error=type(error).__name__, text=str(error)[:400])


def _train(start: Start, note: Note) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    seconds = timedelta(seconds=start.patience_seconds)
    store = TCP_STORE(start.address, start.port, None, start.rank == 0, timeout=seconds)
    dist.init_process_group(
        "gloo", store=store, rank=start.rank, world_size=start.size, timeout=seconds
    )
    live(start, note)


def live(start: Start, note: Note) -> None:
    """Restore and train, once the ranks have met."""
    state = state_of(0, start.rank, start.size)
    with ckpt.Checkpointer(
        state,
        start.url,
        save=ckpt.EverySteps(start.save_every) | ckpt.AtExit(),
        keep=ckpt.KeepLatest(KEEP),
        near=near_of(start.near),
        observers=[observing(note)],
        storage_options=start.options,
        retry_seconds_max=start.patience_seconds,
        only=True,
    ) as saver:
        first = restore(saver, state, start.rank, start.size, note)
        last, step = first + start.steps, first
        while step < last:
            step += 1
            time.sleep(start.step_seconds)
            # Ranks of a training wait for each other in each step.
            stops = torch.tensor(float(os.path.exists(start.stop)))
            dist.all_reduce(stops)
            last = min(last, step + STEPS_AFTER) if stops.item() else last
            advance(state, step, start.rank, start.size)
            began = time.monotonic()
            saver.step(step)
            note(event="stepped", step=step, seconds=time.monotonic() - began)
        began = time.monotonic()
    note(event="closed", seconds=time.monotonic() - began)


def near_of(near: NearStart | None) -> ckpt.Near | None:
    """The value for a Checkpointer."""
    if near is None:
        return None
    every = ckpt.EverySteps(near.every)
    return ckpt.Near(near.path, every=every, replicas=near.replicas, address=near.address)


def restore(
    saver: ckpt.Checkpointer, state: dict[str, Any], rank: int, size: int, note: Note
) -> int:
    """Restore, and note what came; the step."""
    began = time.monotonic()
    report = saver.restore()
    seconds = time.monotonic() - began
    if report is None:
        note(event="restored", step=0, right=True, attempt="", origin="", seconds=seconds)
        return 0
    right = is_step(state, report.step, rank, size)
    facts = {"step": report.step, "attempt": report.attempt, "origin": report.origin}
    note(event="restored", right=right, seconds=seconds, **facts)
    return report.step


def look(start: Look) -> None:
    """An onlooker's life, which has no end of its own."""
    torch.set_num_threads(1)
    note = noting(start.history, life=-1, rank=-1)
    while True:
        time.sleep(LOOK_SECONDS)
        try:
            listed = ckpt.list_steps(start.url, start.options)
            for one in listed[-2:]:
                state = state_of(0, 0, 1) if one.step < IMPORTED_FROM else state_of(one.step, 0, 1)
                facts = {"step": one.step, "attempt": one.attempt, "latest": one is listed[-1]}
                try:
                    ckpt.load(state, start.url, attempt=one.attempt, storage_options=start.options)
                except ckpt.NoCheckpoint as error:  # it was retired since: the checker knows
                    note(event="gone", text=str(error)[:300], **facts)
                    continue
                note(event="seen", right=is_step(state, one.step, 0, 1), **facts)
        except Exception as error:  # whatever it is, the checker looks at it
            note(event="not seen", error=type(error).__name__, text=str(error)[:300])


def main() -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        order = decoded(line)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                sys.stdin.close()
                os.setsid()
                if isinstance(order, Start):
                    train(order)
                else:
                    look(order)
                code = 0
            finally:
                os._exit(code)
        print(pid, flush=True)
        # Ranks that have ended are not waited for by anybody else.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def encoded(order: Start | Look) -> str:
    """A line for an agent."""
    return json.dumps(asdict(order)) + "\n"


def decoded(line: str) -> Start | Look:
    """The inverse of `encoded`."""
    fields = json.loads(line)
    if "rank" not in fields:
        return Look(**fields)
    near = fields.pop("near")
    return Start(**fields, near=NearStart(**near) if near else None)
