"""Save and load of FSDP2 + AdamW state on 2 ranks against torch's DCP and against raw file calls.

    python -m benchmarks.save_load [--gib 1] [--rounds 5] [--directory DIR]

Everything is interleaved in one run, on the same bytes in the same memory. `raw` writers and
readers move exactly the state's bytes through one file per rank, with fsync. Saves are durable in
all cases.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from benchmarks.measure import clear, interleaved, on_two_ranks, ratio, report, row, speed, wall
from ckpt.format.checksum import crc32c
from ckpt.layout.memory import host_bytes
from storage.file_io import start_writeback
from storage.ranges import address_of, aligned_buffer, copy_bytes

GIB = 1 << 30
WIDTH = 1024


class Trained:
    """A sharded model of `nbytes` with its AdamW state, filled with random numbers."""

    def __init__(self, nbytes: int, device: str = "cpu") -> None:
        layers = max(1, nbytes // (3 * 4 * WIDTH * WIDTH))
        torch.manual_seed(0)
        with torch.device(device):
            linears = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
        self.model = nn.Sequential(*linears)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optim": self.optimizer}

    def local_tensors(self) -> list[torch.Tensor]:
        tensors = [p.to_local() for p in self.model.parameters()]
        for entry in self.optimizer.state.values():
            tensors += [entry[name].to_local() for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach() for tensor in tensors]


def raw_save(tensors: list[torch.Tensor], path: Path) -> None:
    """The same bytes with `pwritev` and one fsync: what a disk allows through the page cache, with
    what is known to be fastest, small calls and an early start of the writeback.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        position = started = 0
        for tensor in tensors:
            data = host_bytes(tensor)
            while len(data):
                written = os.pwritev(descriptor, [data[: 256 << 10]], position)
                position += written
                data = data[written:]
                if position - started >= 8 << 20:
                    start_writeback(descriptor, started, position - started)
                    started = position
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def raw_save_direct(tensors: list[torch.Tensor], path: Path, buffer: memoryview) -> None:
    """The same bytes copied to an aligned buffer and written around the page cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    flags = os.O_CREAT | os.O_WRONLY | os.O_DIRECT
    descriptor = os.open(path, flags, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, -(-nbytes // 4096) * 4096)
        filled = position = 0
        for tensor in tensors:
            data, copied = host_bytes(tensor), 0
            while copied < len(data):
                size = min(len(buffer) - filled, len(data) - copied)
                copy_bytes(address_of(buffer) + filled, address_of(data) + copied, size)
                filled, copied = filled + size, copied + size
                if filled == len(buffer):
                    position += os.pwritev(descriptor, [buffer], position)
                    filled = 0
        if filled:
            os.pwritev(descriptor, [buffer[: -(-filled // 4096) * 4096]], position)
        os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def raw_load(tensors: list[torch.Tensor], path: Path, *, checked: bool) -> None:
    """The same bytes with `preadv` into the same memory; `checked` computes their crc32c too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        position = 0
        for tensor in tensors:
            data = host_bytes(tensor)
            while len(data):
                read = os.preadv(descriptor, [data[: 2 << 20]], position)
                if checked:
                    crc32c(data[:read])
                position += read
                data = data[read:]
    finally:
        os.close(descriptor)


def dcp_save(trained: Trained, directory: Path) -> None:
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    writer = dcp.FileSystemWriter(directory)
    dcp.save({"model": model, "optim": optimizer}, storage_writer=writer)


def dcp_load(trained: Trained, directory: Path) -> None:
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    state = {"model": model, "optim": optimizer}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory))
    set_state_dict(
        trained.model,
        trained.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )


def rank_main(gib: float, rounds: int, directory: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("ckpt").setLevel(logging.ERROR)  # the same weights are saved again on purpose
    trained = Trained(int(gib * GIB))
    tensors = trained.local_tensors()
    rank = dist.get_rank()
    base = Path(directory)
    raw = base / "raw" / str(rank)
    buffer = aligned_buffer(16 << 20)
    step = iter(range(1 << 30))
    saves: dict[str, Callable[[], object]] = {
        "dcp": lambda: dcp_save(trained, base / "dcp"),
        "ours": lambda: ckpt.save(trained.state, str(base / "ours"), step=next(step)),
        "ours buffered": lambda: ckpt.save(
            trained.state, str(base / "buffered"), step=next(step), io="buffered"
        ),
        "ours direct": lambda: ckpt.save(
            trained.state, str(base / "direct"), step=next(step), io="direct"
        ),
        "raw buffered": lambda: raw_save(tensors, raw),
        "raw direct": lambda: raw_save_direct(tensors, raw, buffer),
    }
    places = {
        "dcp": "dcp",
        "ours": "ours/steps",
        "ours buffered": "buffered/steps",
        "ours direct": "direct/steps",
    }
    saved = interleaved(
        saves, rounds=rounds, between=lambda name: clear(base / places.get(name, "raw"))
    )
    # What a newcomer does. Ours keeps the checkpoint of each round, DCP replaces the last one.
    newest: dict[str, Callable[[], object]] = {
        "dcp": lambda: dcp_load(trained, base / "dcp"),
        "ours": lambda: ckpt.load(trained.state, str(base / "ours")),
    }
    at_once = interleaved(
        newest,
        rounds=rounds,
        before=lambda name: saves[name](),
        between=lambda name: dist.barrier(),
    )
    for name in ("ours buffered", "raw buffered"):
        saves[name]()
    loads: dict[str, Callable[[], object]] = {
        "dcp": lambda: dcp_load(trained, base / "dcp"),
        "ours": lambda: ckpt.load(trained.state, str(base / "buffered")),
        "preadv": lambda: raw_load(tensors, raw, checked=False),
        "preadv + crc32c": lambda: raw_load(tensors, raw, checked=True),
    }
    loaded = interleaved(loads, rounds=rounds, between=lambda name: dist.barrier())
    wins = sum(
        a.wall_seconds <= b.wall_seconds
        for a, b in zip(saved["ours buffered"], saved["ours direct"], strict=True)
    )
    faster = "buffered" if 2 * wins >= rounds else "direct"
    rows = []
    for kind in ("buffered", "direct"):
        ours = f"ours {kind}"
        bars = (1.4, 0.6) if kind == "buffered" else (1.0, 0.35)
        rows += [
            row(f"{kind}, speed over DCP", f"{speed(saved, ours, 'dcp'):.2f}x", f">= {bars[0]}x"),
            row(
                f"{kind}, CPU seconds of DCP's",
                f"{ratio(saved, ours, 'dcp', 'cpu_seconds'):.2f}x",
                f"<= {bars[1]}x",
            ),
            row(
                f"{kind}, speed over the raw {kind} writer"
                + (" (the faster path)" if kind == faster else ""),
                f"{speed(saved, ours, f'raw {kind}'):.2f}x",
                ">= 0.9x",
            ),
        ]
    seconds = "; ".join(wall(saved, name) for name in ("dcp", "ours buffered", "ours direct"))
    rows.append(row("DCP's seconds; ours buffered; ours direct", seconds, "none"))
    report(f"save {gib:g} GiB of FSDP2 + AdamW, 2 ranks, durable, median of {rounds} rounds", rows)
    ratios = [speed(loaded, "ours", peer) for peer in ("dcp", "preadv", "preadv + crc32c")]
    report(
        f"load {gib:g} GiB at once after a save, with defaults",
        [
            row("speed over DCP", f"{speed(at_once, 'ours', 'dcp'):.2f}x", ">= 1x"),
            row("DCP's seconds; ours", f"{wall(at_once, 'dcp')}; {wall(at_once, 'ours')}", "none"),
            row("that save, speed over DCP", f"{speed(saved, 'ours', 'dcp'):.2f}x", ">= 1x"),
            row(
                "that save, CPU seconds of the one around the page cache",
                f"{ratio(saved, 'ours', 'ours direct', 'cpu_seconds'):.2f}x",
                "<= 1.1x",
            ),
        ],
    )
    report(
        f"load {gib:g} GiB of the same",
        [
            row("speed over DCP", f"{ratios[0]:.2f}x", ">= 2.5x"),
            row(
                "CPU seconds of DCP's",
                f"{ratio(loaded, 'ours', 'dcp', 'cpu_seconds'):.2f}x",
                "<= 0.4x",
            ),
            row("DCP's seconds; ours", f"{wall(loaded, 'dcp')}; {wall(loaded, 'ours')}", "none"),
            row("speed over preadv", f"{ratios[1]:.2f}x", ">= 0.7x"),
            row("speed over preadv and crc32c", f"{ratios[2]:.2f}x", "none"),
            row(
                "of preadv and crc32c alone: speed over DCP",
                f"{speed(loaded, 'preadv + crc32c', 'dcp'):.2f}x",
                "none",
            ),
            row(
                "of preadv and crc32c alone: CPU seconds of DCP's",
                f"{ratio(loaded, 'preadv + crc32c', 'dcp', 'cpu_seconds'):.2f}x",
                "none",
            ),
            row(
                "of preadv and crc32c alone: speed over preadv",
                f"{speed(loaded, 'preadv + crc32c', 'preadv'):.2f}x",
                "none",
            ),
        ],
    )
    clear(base)


if __name__ == "__main__":
    on_two_ranks(rank_main, __doc__, gib=1.0)
