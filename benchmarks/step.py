"""Time, CPU seconds and memory of one training step: our engine against torch's, interleaved.

    python -m benchmarks.step [--rounds 5] [--ranks 2] [--engines ours,ours-fully,fsdp1,fsdp2,ddp]

A transformer of 48 million parameters, a small batch so that communication shows, gloo, one thread
for each rank. Every engine lives in its own processes; rounds of the engines take turns, so that
other work on the machine hits all alike. Prints medians over rounds, and medians of the ratios of
each round to torch's engines of the same kind. Ratios count; seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from multiprocessing import get_context
from typing import Any

from benchmarks.measure import row

WIDTH, LAYERS, VOCABULARY, TOKENS = 640, 8, 6400, 32

ENGINES = {
    "ours": ("ours", "FULL_SHARD"),
    "fsdp1": ("torch", "FULL_SHARD"),
    "ours-zero2": ("ours", "SHARD_GRAD_OP"),
    "fsdp1-zero2": ("torch", "SHARD_GRAD_OP"),
    "ours-fully": ("ours-fully", ""),
    "fsdp2": ("fsdp2", ""),
    "ddp": ("ddp", ""),
}
PEERS = {
    "ours": ("fsdp1", "fsdp2"),
    "ours-zero2": ("fsdp1-zero2",),
    "ours-fully": ("fsdp2",),
}


def build_model() -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(LAYERS)
            )
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    return Net()


def wrap(model: Any, kind: str, strategy: str) -> Any:
    import torch

    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind in ("fsdp2", "ours-fully"):
        from torch.distributed.device_mesh import init_device_mesh

        if kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard
        else:
            from sharding import fully_shard
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if kind == "ours":
        from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.TransformerEncoderLayer}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
    )


def memory(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(field):
                return int(line.split()[1]) // 1024
    return 0


def serve(name: str, rank: int, ranks: int, rendezvous: str, pipe: Any, steps: int) -> None:
    """One rank of one engine: runs a round of steps at each message on `pipe`."""
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    model = wrap(build_model(), *ENGINES[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    while pipe.recv():
        dist.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        loss = torch.zeros(())
        for _ in range(steps):
            tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
            loss = model(tokens).float().logsumexp(-1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds = (time.perf_counter() - started) / steps
        cpu = (time.process_time() - cpu) / steps
        pipe.send((seconds, cpu, memory("VmRSS"), memory("VmHWM"), float(loss.detach())))
    dist.destroy_process_group()


def main() -> None:
    """Run the engines in turns and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", default=",".join(ENGINES))
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    context = get_context("spawn")
    names = args.engines.split(",")
    pipes: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            pipes[name] = []
            for rank in range(args.ranks):
                ours, theirs = context.Pipe()
                job = (name, rank, args.ranks, f"file://{scratch}/{name}", theirs, args.steps)
                context.Process(target=serve, args=job, daemon=True).start()
                pipes[name].append(ours)
        rounds: dict[str, list[Any]] = {name: [] for name in names}
        for round_index in range(args.rounds + 1):  # the first one warms up
            for name in names:
                for pipe in pipes[name]:
                    pipe.send(True)
                answers = [pipe.recv() for pipe in pipes[name]]
                if round_index:
                    rounds[name].append(answers)
        for name in names:
            for pipe in pipes[name]:
                pipe.send(False)
    report(rounds)


def report(rounds: dict[str, list[Any]]) -> None:
    def median(name: str, field: int) -> float:
        return statistics.median(max(rank[field] for rank in answers) for answers in rounds[name])

    print(f"{'engine':12} {'s/step':>8} {'CPU s':>8} {'RSS MiB':>8} {'peak MiB':>8} loss")
    for name, answers in rounds.items():
        print(
            f"{name:12} {median(name, 0):8.3f} {median(name, 1):8.3f} {median(name, 2):8.0f} "
            f"{median(name, 3):8.0f} {answers[-1][0][4]:.6f}"
        )
    for name, peers in PEERS.items():
        for peer in peers:
            if name in rounds and peer in rounds:
                print(f"\n{name} against {peer}")
                for what, field in (("time", 0), ("CPU seconds", 1), ("peak memory", 3)):
                    bar = "<= 1.0" if what == "peak memory" else "<= 0.9"
                    print("  " + row(what, f"{ratio(rounds[name], rounds[peer], field):.2f}", bar))


def ratio(ours: list[Any], theirs: list[Any], field: int) -> float:
    """The median over rounds of the slowest rank's value against the slowest of the peer's."""
    return statistics.median(
        max(rank[field] for rank in a) / max(rank[field] for rank in b)
        for a, b in zip(ours, theirs, strict=True)
    )


if __name__ == "__main__":
    main()
