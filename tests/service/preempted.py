"""One rank of a training that gets a signal to end, as a process that exits by itself.

    python -m tests.service.preempted URL PORT_FILE RANK WORLD_SIZE

It prints "ready" when signals are caught, and at the end the last step and the newest checkpoint.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.service.preemption import Preempted

STEPS_MAX = 20_000
TIMEOUT = timedelta(seconds=60)
GRACE_SECONDS = 30.0  # a loaded machine may take ten for the restore alone
SAVE_EVERY = 25


def train(url: str, meeting_point: str, rank: int, size: int, say: Callable[[str], object]) -> None:
    """Train until a signal ends it. The weight counts the steps, so that a checkpoint shows it."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # what a rank that stays was doing
    if size > 1:
        store = _meet(Path(meeting_point), rank, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    model = nn.Linear(256, 1024, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    policy = ckpt.EverySteps(SAVE_EVERY) | ckpt.OnPreemption(grace_seconds=GRACE_SECONDS)
    try:
        with ckpt.Checkpointer(
            state, url, save=policy, keep=ckpt.KeepLatest(2), only=True
        ) as checkpointer:
            say("ready")
            checkpointer.restore()
            assert torch.all(model.weight == state["step"])
            for step in range(int(state["step"]) + 1, STEPS_MAX):
                model.weight.grad = -torch.ones_like(model.weight)
                if size > 1:
                    dist.all_reduce(model.weight.grad, dist.ReduceOp.MAX)
                optimizer.step()
                time.sleep(0.002)  # the rest of a step
                state["step"] = step
                checkpointer.step(step)
    except Preempted as preempted:
        say(f"{preempted.step} {preempted.saved_step}")
        raise
    finally:
        if size > 1:
            dist.destroy_process_group()


def _meet(port_file: Path, rank: int, size: int) -> dist.Store:
    """As under torchrun: rank 0 hosts the store, and takes it along. The system chooses
    the port.
    """
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, timeout=TIMEOUT, wait_for_workers=False)
        aside = port_file.with_suffix(".aside")
        aside.write_text(str(store.port))
        aside.rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.01)  # no event says that another process has written a file
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), size, False, timeout=TIMEOUT)


if __name__ == "__main__":
    url, meeting_point, rank, size = sys.argv[1:]
    train(url, meeting_point, int(rank), int(size), lambda text: print(text, flush=True))
