"""Full state dicts of a sharded model and its AdamW, against torch's own functions, on two ranks.

    python -m benchmarks.state_dicts [--params 100e6] [--rounds 3] [--engines fsdp1_flat ...]

Every rank gets the whole of model and optimizer; ours and torch's take turns. Then the dict of rank
0 alone: what the other rank's memory grows by. Asserted: each rank receives exactly the bytes that
it does not hold itself, and with rank 0 alone the other receives nothing.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig as TorchOptimConfig
from torch.distributed.fsdp import FullStateDictConfig as TorchConfig
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.measure import extra_memory, interleaved, most_of, ratio, report, row
from ckpt.process import world_of
from ckpt.state_dict.api import model_state_dict, optimizer_state_dict
from ckpt.state_dict.config import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from tests.ranks import run_ranks

MIB = 1 << 20
WIDTH = 1024
ENGINES = ("fsdp1_flat", "fsdp1_orig", "fsdp2")


def trained(engine: str, params: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A stack of linear layers, one unit each, after one step of AdamW."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *[nn.Linear(WIDTH, WIDTH) for _ in range(max(1, params // (WIDTH * WIDTH)))]
    )
    if engine == "fsdp2":
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=torch.device("cpu"),
            use_orig_params=engine == "fsdp1_orig",
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def torch_full(engine: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """torch's own way to whole tensors on every rank."""
    if engine == "fsdp2":
        options = StateDictOptions(full_state_dict=True)
        return (
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        )
    with FullyShardedDataParallel.state_dict_type(
        model,
        TorchType.FULL_STATE_DICT,
        TorchConfig(offload_to_cpu=False),
        TorchOptimConfig(offload_to_cpu=False),
    ):
        return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def ours_full(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Ours, on every rank."""
    return model_state_dict(model), optimizer_state_dict(model, optimizer)


def ours_on_the_coordinator(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Ours, on rank 0 alone."""
    return (
        model_state_dict(model, StateDictType.FULL, FullStateDictConfig(rank0_only=True)),
        optimizer_state_dict(
            model, optimizer, StateDictType.FULL, FullOptimStateDictConfig(rank0_only=True)
        ),
    )


def received(run: Callable[[], object]) -> int:
    """Bytes that this rank receives in the exchanges of `run`."""
    world: Any = world_of()
    count = 0
    exchange = world.all_to_all

    def counting(name: str, send: Any, recv: Any) -> None:
        nonlocal count
        count += sum(view.nbytes for parts in recv for view in parts)
        exchange(name, send, recv)

    world.all_to_all = counting
    try:
        run()
    finally:
        del world.all_to_all
    return count


def rank_main(engine: str, params: int, rounds: int) -> None:
    """Measure and print, as one rank of several."""
    warnings.filterwarnings("ignore")
    model, optimizer = trained(engine, params)
    model_dict, optim_dict = ours_full(model, optimizer)
    whole = sum(t.nbytes for t in model_dict.values())
    whole += sum(t.nbytes for s in optim_dict["state"].values() for t in s.values() if t.ndim)
    del model_dict, optim_dict
    samples = interleaved(
        {
            "ours": lambda: ours_full(model, optimizer),
            "torch": lambda: torch_full(engine, model, optimizer),
        },
        rounds=rounds,
        between=lambda name: (gc.collect(), None)[1],
    )
    got = received(lambda: ours_full(model, optimizer))
    got_alone = received(lambda: ours_on_the_coordinator(model, optimizer))
    growth = extra_memory(lambda: ours_on_the_coordinator(model, optimizer))
    size, rank = dist.get_world_size(), dist.get_rank()
    padding = 16 * 4 * size * len(list(model.parameters()))
    assert abs(got - whole * (size - 1) / size) <= padding, (got, whole)
    assert rank == 0 or got_alone == 0, got_alone
    others = most_of(0 if rank == 0 else growth)
    seconds = sorted(s.wall_seconds for s in samples["ours"])[rounds // 2]
    report(
        f"{engine}: full dicts of {params / 1e6:.0f}M parameters and AdamW, {size} ranks",
        [
            row("wall, ours / torch", f"{ratio(samples, 'ours', 'torch'):.2f}", "at most 1"),
            row(
                "CPU seconds, ours / torch",
                f"{ratio(samples, 'ours', 'torch', 'cpu_seconds'):.2f}",
                "at most 1",
            ),
            row(
                "bytes received / bytes not held here",
                f"{got / (whole * (size - 1) / size):.4f}",
                "1",
            ),
            row(
                "rank 0 alone: memory of the others",
                f"{others / MIB:.0f} MiB",
                f"one unit, {2 * 32} MiB of buffers",
            ),
            f"ours takes {seconds:.2f} s for {whole / MIB:.0f} MiB",
        ],
    )


def main() -> None:
    """Run on two ranks, engine after engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--directory", help="unused; every benchmark takes it")
    chosen = parser.parse_args()
    for engine in chosen.engines:
        run_ranks(2, rank_main, engine, int(chosen.params), chosen.rounds, timeout_seconds=900)


if __name__ == "__main__":
    main()
