"""Publications of a dense training: bytes, CPU and pauses, against patches made by hand and copies.

    python -m benchmarks.publication [--million 11 --steps 8]

One process and one follower, on a disk. A patch by hand has, of each tensor, gaps between new
elements in the fewest bytes that hold the largest, and new values, all compressed with zstd 1. One
copy is that of the trained state, float32, in memory; CPU and bytes are medians over the steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
import zstandard
from torch import nn

import ckpt
from benchmarks.measure import measured, report, row
from storage import open_store
from tests.stores import CountingStore

WIDTH = 1024


class Net(nn.Module):
    """Layers of a million weights each, as large as those of a pretrained model."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        for layer in self.layers:
            nn.init.normal_(layer.get_parameter("weight"), std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(nn.functional.layer_norm(x, (WIDTH,))))
        return x


def by_hand(before: list[torch.Tensor], after: list[torch.Tensor]) -> int:
    """The bytes of a sparse patch."""
    parts = []
    for old, new in zip(before, after, strict=True):
        bits = new.view(torch.int16).numpy().ravel()
        places = np.flatnonzero(bits != old.view(torch.int16).numpy().ravel())
        gaps = np.diff(places, prepend=-1) - 1
        parts += [gaps.astype(np.min_scalar_type(int(gaps.max(initial=0)))).tobytes()]
        parts += [bits[places].tobytes()]
    return len(zstandard.ZstdCompressor(level=1).compress(b"".join(parts)))


def in_bf16(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().to(torch.bfloat16) for tensor in model.parameters()]


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def at_rate(layers: int, steps: int, rate: float, directory: str) -> list[str]:
    """The rows of a training at one learning rate."""
    torch.manual_seed(0)
    model, served = Net(layers), Net(layers).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    url = f"{directory}/{rate}"
    counted = CountingStore(open_store(f"{url}/lines/published"))
    shares, costs, blocked, applied, streamed, changed = [], [], [], [], [], []

    def train() -> None:
        model(torch.randn(256, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with ckpt.follow(served, counted) as follower:
        before = in_bf16(model)
        for step in range(2 * steps + 2):
            after = in_bf16(model)
            copy = measured(lambda: [tensor.clone() for tensor in model.parameters()])
            if step % 2:
                pending = ckpt.publish(model, url, step=step)
                train()
                pending.result()
            else:
                spent = measured(lambda n=step: ckpt.publish(model, url, step=n).result())  # type: ignore[misc]
                train()
            counted.reset()
            update = follower.poll()
            assert update is not None
            pause = seconds(follower.swap)
            if step > 1:
                whole = sum(one.nbytes for one in after)
                shares.append(counted.stats.bytes_read / by_hand(before, after))
                if step % 2:
                    blocked.append(pending.blocked_seconds / copy.wall_seconds)
                else:
                    costs.append(spent.cpu_seconds / copy.cpu_seconds)
                applied.append(memcpy(update.nbytes) / pause)
                streamed.append(memcpy(whole) / pause)
                changed.append(update.nbytes / whole)
            before = after
        assert all(map(torch.equal, served.parameters(), after))
    name = f"lr {rate:g}"
    return [
        row(f"{name}: new elements", f"{median(changed):.1%}", "-"),
        row(f"{name}: bytes of a poll, of a patch by hand", f"{median(shares):.2f}x", "<= 1.15x"),
        row(f"{name}: CPU of a publication, in copies", f"{median(costs):.1f}x", "<= 2x"),
        row(f"{name}: training blocked, in copies", f"{median(blocked):.2f}x", "<= 0.05x"),
        row(f"{name}: swap, speed over memcpy of new bytes", f"{median(applied):.2f}x", ">= 0.3x"),
        row(f"{name}: swap, speed over memcpy of all bytes", f"{median(streamed):.2f}x", "-"),
    ]


def memcpy(nbytes: int) -> float:
    """Seconds of a copy in memory that is there."""
    source, target = torch.ones(2, nbytes, dtype=torch.uint8)
    target.copy_(source)
    return seconds(lambda: target.copy_(source))


def main() -> None:
    parser = argparse.ArgumentParser(description="publications of a dense training")
    parser.add_argument("--million", type=int, default=11, help="parameters")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for rate in (3e-6, 1e-6):
        with tempfile.TemporaryDirectory() as directory:
            lines += at_rate(arguments.million, arguments.steps, rate, directory)
    report(f"{arguments.million} M parameters, {arguments.steps} steps, medians", lines)


if __name__ == "__main__":
    main()
