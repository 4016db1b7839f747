"""What a unit costs the host in one training step, without communication: ours against torch's.

    python -m benchmarks.host_time [--units 100] [--ranks 8] [--rounds 9] [--profile ours-flat]

Rank 0 of ranks that are not there (torch's fake process group, which sends nothing), on the CPU in
one process and one thread. Units are so small that computing takes next to nothing: what is left is
Python, dispatch and autograd. Each round takes a step of every engine in turn, and CPU time of the
thread is counted, so that other work on the machine hardly shows. Medians over rounds of the time
per unit beyond that of the model without any engine, and of its ratio to torch's in the same round.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import sharding
from benchmarks.measure import row

WIDTH = 8
STEPS = 3
"""Steps of one round of one engine."""
PAIRS = {"ours-flat": "torch-flat", "ours-fully": "torch-fully"}
ENGINES: dict[str, Any] = {"torch": torch_fsdp, "ours": sharding}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Training:
    """One model under one engine; "bare" has none."""

    def __init__(self, engine: str, units: int) -> None:
        net = nn.Sequential(*(Block() for _ in range(units)))
        who, _, surface = engine.partition("-")
        if surface == "flat":
            net = ENGINES[who].FullyShardedDataParallel(
                net,
                auto_wrap_policy=ModuleWrapPolicy([Block]),
                use_orig_params=True,
                device_id=torch.device("cpu"),
            )
        elif surface == "fully":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in (*net, net):
                ENGINES[who].fully_shard(module, mesh=mesh)
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
        self.batch = torch.ones(1, WIDTH)

    def step(self) -> float:
        """CPU seconds of one forward and backward; the optimizer steps besides."""
        start = time.thread_time()
        self.net(self.batch).sum().backward()
        spent = time.thread_time() - start
        self.optimizer.step()
        self.optimizer.zero_grad()
        return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", default="", choices=("", *PAIRS, *PAIRS.values()))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=asked.ranks)
    try:
        if asked.profile:
            profile(Training(asked.profile, asked.units))
        else:
            compare(asked.units, asked.rounds)
    finally:
        dist.destroy_process_group()


def compare(units: int, rounds: int) -> None:
    names = ("bare", *PAIRS, *PAIRS.values())
    trainings = {name: Training(name, units) for name in names}
    spent: dict[str, list[float]] = {name: [] for name in names}
    for training in trainings.values():
        training.step()
        training.step()
    gc.collect()
    for _ in range(rounds):
        for name, training in trainings.items():
            spent[name].append(statistics.median(training.step() for _ in range(STEPS)))
    print(f"{units} units, {dist.get_world_size()} ranks that are not there; CPU time per unit")
    beyond = {
        name: [taken - bare for taken, bare in zip(spent[name], spent["bare"], strict=True)]
        for name in names[1:]
    }
    for name, taken in beyond.items():
        print(f"  {name}: {statistics.median(taken) / units * 1e6:.0f} microseconds", flush=True)
    for ours, torchs in PAIRS.items():
        ratios = [a / b for a, b in zip(beyond[ours], beyond[torchs], strict=True)]
        measured = f"{statistics.median(ratios):.2f} of torch's time"
        print(f"  {row(ours, measured, '<= 1')}", flush=True)


def profile(training: Training) -> None:
    """Where one engine's time goes, by function."""
    training.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(2 * STEPS):
        training.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
