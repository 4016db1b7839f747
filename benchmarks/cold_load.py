"""Loads of files that are not in the page cache, on 2 ranks, against torch's DCP and bare readers.

    python -m benchmarks.cold_load [--gib 1] [--rounds 5] [--directory DIR]

What a restart meets on a machine that has just started, and what follows a save around the cache.
Everything is interleaved in one run, on the same bytes; all files are dropped from the cache after
each. The bare readers read one file per rank: with `preadv` into the state's memory, and with
O_DIRECT into aligned memory, four requests of 2 MiB at once.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

import ckpt
from benchmarks.measure import clear, interleaved, on_two_ranks, ratio, report, row, speed
from benchmarks.save_load import GIB, Trained, dcp_load, dcp_save, raw_load, raw_save
from storage.ranges import aligned_buffer

REQUEST_NBYTES = 2 << 20
IN_FLIGHT = 4


def raw_load_direct(path: Path, buffers: list[memoryview]) -> None:
    """The same bytes around the page cache, into memory that is not the state's."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    free = list(buffers)

    def read(start: int) -> None:
        buffer = free.pop()
        os.preadv(descriptor, [buffer], start)
        free.append(buffer)

    try:
        with ThreadPoolExecutor(len(buffers)) as pool:
            list(pool.map(read, range(0, path.stat().st_size, REQUEST_NBYTES)))
    finally:
        os.close(descriptor)


def drop_from_cache(directory: Path) -> None:
    """Take every file below `directory` out of the page cache, on rank 0 alone."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in directory.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    dist.barrier()


def rank_main(gib: float, rounds: int, directory: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    trained, base = Trained(int(gib * GIB)), Path(directory)
    tensors, raw = trained.local_tensors(), base / "raw" / str(dist.get_rank())
    buffers = [aligned_buffer(REQUEST_NBYTES) for _ in range(IN_FLIGHT)]
    ours = str(base / "ours")
    ckpt.save(trained.state, ours, step=1)
    dcp_save(trained, base / "dcp")
    raw_save(tensors, raw)
    if dist.get_rank() == 0:
        os.sync()  # what is not on the disk yet cannot be dropped
    drop_from_cache(base)
    loads: dict[str, Callable[[], object]] = {
        "dcp": lambda: dcp_load(trained, base / "dcp"),
        "ours": lambda: ckpt.load(trained.state, ours),
        "ours buffered": lambda: ckpt.load(trained.state, ours, io="buffered"),
        "preadv": lambda: raw_load(tensors, raw, checked=False),
        "O_DIRECT": lambda: raw_load_direct(raw, buffers),
    }
    loaded = interleaved(loads, rounds=rounds, between=lambda name: drop_from_cache(base))
    better = max(speed(loaded, name, "dcp") for name in ("preadv", "O_DIRECT"))
    cpu = [ratio(loaded, name, "dcp", "cpu_seconds") for name in loads if name != "dcp"]
    report(
        f"cold load of {gib:g} GiB of FSDP2 + AdamW, 2 ranks, median of {rounds} rounds",
        [
            row("CPU seconds of DCP's", f"{cpu[0]:.2f}x", "<= 0.2x"),
            row("the same through the page cache", f"{cpu[1]:.2f}x", "none"),
            row("of preadv alone", f"{cpu[2]:.2f}x", "none"),
            row("of O_DIRECT alone", f"{cpu[3]:.2f}x", "none"),
            row("speed over DCP", f"{speed(loaded, 'ours', 'dcp'):.2f}x", ">= 1x"),
            row("of the better bare reader", f"{better:.2f}x", "none"),
            row("speed over it", f"{speed(loaded, 'ours', 'dcp') / better:.2f}x", ">= 0.95x"),
        ],
    )
    clear(base)


if __name__ == "__main__":
    on_two_ranks(rank_main, __doc__, gib=1.0)
