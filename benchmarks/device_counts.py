"""Kernels, host waits and bytes of one training step on an accelerator, counted without one.

    python -m benchmarks.device_counts [--ranks 8 64 1024] [--low]

Four units of nine members (512 MiB each in float32), one token, rank 0 of ranks that are not there,
on the simulated device of `tests/streams`: torch's classes and ours. What is counted is exact and
the same on every machine; times are not measured. The third step of three is counted.

copies: kernels that only move bytes. live: the peak of a step over what lies there before it (the
shards). reserved: what the allocator has taken from the device when the host never waits for it by
itself, from the second step on. --low: parameters in bfloat16, reductions in float32.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.measure import row
from tests.streams.device import NAME, Device, register
from tests.streams.groups import world
from tests.streams.simulation import simulated
from tests.streams.training import Run

UNITS, WIDTH = 4, 4096
MIB = 1 << 20
ENGINES = (("torch", "fully"), ("ours", "fully"), ("torch", "flat"), ("ours", "flat"))
COUNTED = ("kernels", "copies", "collectives", "host waits")


class Layer(nn.Module):
    """Nine members: six matrices, three vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)
        self.before = nn.Parameter(torch.ones(width))
        self.after = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.before
        for part in self.parts:
            x = part(x)
        return self.down(self.up(x)) * self.after


class Layers(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Counts(NamedTuple):
    """Of one step; bytes in MiB. `clipping`: of clipping by the norm of all gradients, alone."""

    counted: dict[str, int]
    live_mib: float
    reserved_mib: float
    clipping: dict[str, int]


def counts_of(who: str, surface: str, ranks: int, *, low: bool) -> Counts:
    register()
    with warnings.catch_warnings(), world(ranks), simulated() as device:
        warnings.simplefilter("ignore")
        run = Run(who, surface)
        dtypes = (torch.bfloat16, torch.float32, None) if low else None
        model = run.wrap(run.net(Layers), mesh=(ranks,), low=dtypes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        allocator = device.allocator
        step(model, optimizer)
        # What torch sets up at a first backward may keep its gradients until garbage is collected.
        gc.collect()
        allocator.empty_cache()
        step(model, optimizer)
        allocator.reset_peak()
        shards = allocator.live_bytes
        with counting(device) as counted:
            step(model, optimizer)
        live, reserved = allocator.live_peak_bytes - shards, allocator.reserved_bytes
        # The first time torch finds out how the operations on DTensors are sharded.
        for _ in range(2):
            backward(model)
            with counting(device) as clipping:
                clip(model, surface)
        check(device)
        return Counts(counted, live / MIB, reserved / MIB, clipping)


@contextmanager
def counting(device: Device) -> Iterator[dict[str, int]]:
    """What is launched inside, by name, once it is over."""
    before = device.counts.copy()
    counted: dict[str, int] = {}
    yield counted
    counted.update((name, device.counts[name] - before[name]) for name in COUNTED)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


def backward(model: Any) -> None:
    model(torch.ones(1, WIDTH, device=NAME)).sum().backward()


def clip(model: Any, surface: str) -> None:
    if surface == "fully":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        model.clip_grad_norm_(1.0)


def check(device: Device) -> None:
    assert not device.findings, "\n".join(map(str, device.findings))


def show(what: str, measured: float, bar: float) -> None:
    print(f"  {row(what, f'{measured:.0f}', f'<= {bar:.0f}')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--low", action="store_true")
    asked = parser.parse_args()
    print(f"{UNITS} units of 9 members, 512 MiB each; one step; MiB live over shards and reserved")
    for ranks in asked.ranks:
        torchs: dict[str, Counts] = {}
        for who, surface in ENGINES:
            counts = counts_of(who, surface, ranks, low=asked.low)
            name = f"{who}, {'fully_shard' if surface == 'fully' else 'the wrapper'}, {ranks} ranks"
            texts = [f"{counts.counted[what]} {what}" for what in COUNTED]
            texts += [f"live {counts.live_mib:.0f}", f"reserved {counts.reserved_mib:.0f}"]
            texts += [f"clipping {counts.clipping['kernels']}"]
            print(f"{name}: {', '.join(texts)}", flush=True)
            if who == "torch":
                torchs[surface] = counts
                continue
            peer = torchs[surface]
            for what in ("copies", "host waits"):
                show(f"{name}: {what}", counts.counted[what], peer.counted[what])
            show(f"{name}: clipping", counts.clipping["kernels"], peer.clipping["kernels"])
            show(f"{name}: live MiB", counts.live_mib, peer.live_mib)
            show(f"{name}: reserved MiB", counts.reserved_mib, peer.reserved_mib)


if __name__ == "__main__":
    main()
