"""The ranks that a launcher such as torchrun started for one command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def ranks_of_launcher() -> Iterator[int]:
    """This process's rank; with several, a gloo process group exists within the block.

    Launchers set RANK and WORLD_SIZE in the environment, as `torchrun` does.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if not world_size.isdigit() or int(world_size) < 2 or "RANK" not in os.environ:
        yield 0
        return
    # Ranks of a command exchange bytes of host memory, and may have no accelerator.
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
