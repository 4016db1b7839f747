"""Save of a model under our engine against the same model under torch's FSDP2, both by `ckpt.save`.

    python -m benchmarks.engine_save [--gib 0.5] [--rounds 5] [--directory DIR]

2 ranks, gloo, AdamW state included, durable, interleaved in one run. Asserts counts: saving our
model runs no collective on tensor data, and on the buffered path makes a write for each 256 KiB of
each unit and state tensor.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from benchmarks.measure import clear, interleaved, on_two_ranks, ratio, report, row, speed
from sharding import FullyShardedDataParallel, ModuleWrapPolicy

GIB = 1 << 30
WIDTH = 1024
ENGINES = ("ours, flat", "ours, original parameters", "FSDP2")
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single",
    "broadcast", "gather", "isend", "irecv", "reduce_scatter_tensor", "scatter", "send", "recv",
)  # fmt: skip
# Rounds of control are small; tensor data is not.
CONTROL_BYTES_MAX = 64 * 1024
WRITE_NBYTES = 256 * 1024  # at once, through the page cache


def trained(engine: str, nbytes: int) -> dict[str, Any]:
    """A model and AdamW state of `nbytes` together, on all ranks."""
    layers = max(1, nbytes // (3 * 4 * (WIDTH * WIDTH + WIDTH)))
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    if engine == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        policy = ModuleWrapPolicy([nn.Linear])
        orig = engine != "ours, flat"
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=orig)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=False)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optim": optimizer}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Collectives on more than control bytes, and vectored writes, while the context is open."""
    counts = {"collectives": 0, "writes": 0}
    pwritev = os.pwritev

    def write(*args: Any) -> int:
        counts["writes"] += 1
        return pwritev(*args)

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            counts["collectives"] += sum(t.nbytes > CONTROL_BYTES_MAX for t in tensors)
            return function(*args, **kwargs)

        return watched

    with mock.patch("os.pwritev", write):
        patches = [mock.patch.object(dist, n, watch(getattr(dist, n))) for n in COLLECTIVES]
        for patch in patches:
            patch.start()
        try:
            yield counts
        finally:
            for patch in patches:
                patch.stop()


def check_counts(state: dict[str, Any], url: str) -> str:
    """Raises AssertionError when a save of our model talks tensors or writes in small pieces."""
    with counted() as counts:
        ckpt.save(state, url, step=0, io="buffered")
    units = len(FullyShardedDataParallel.fsdp_modules(state["model"]))
    assert counts["collectives"] == 0, counts
    # The weights and two states of each unit, a header and a tail for each file; large ones in
    # calls of 256 KiB.
    nbytes = 3 * sum(param.nbytes for param in state["model"].parameters())
    assert counts["writes"] <= 3 * units + 8 + nbytes // WRITE_NBYTES, (counts, units, nbytes)
    return f"{counts['writes']} of {units} units and their 2 states"


def rank_main(gib: float, rounds: int, directory: str) -> None:
    """One rank of the benchmark."""
    warnings.filterwarnings("ignore")
    base = Path(directory)
    states = {engine: trained(engine, int(gib * GIB)) for engine in ENGINES}
    writes = check_counts(states["ours, flat"], str(base / "counted"))
    clear(base / "counted")
    step = iter(range(1 << 30))
    saves: dict[str, Callable[[], object]] = {
        f"{engine}, {io}": lambda engine=engine, io=io: ckpt.save(
            changed(states[engine]), str(base / f"{engine} {io}"), step=next(step), io=io
        )
        for io in ("buffered", "direct")
        for engine in ENGINES
    }
    samples = interleaved(
        saves, rounds=rounds, between=lambda name: clear(base / name_of(name) / "steps")
    )
    rows = [row("collectives on tensor data", "0", "0"), row("vectored writes", writes, "1 each")]
    for io in ("buffered", "direct"):
        for engine in ENGINES[:2]:
            ours, peer = f"{engine}, {io}", f"FSDP2, {io}"
            cpu = ratio(samples, ours, peer, "cpu_seconds")
            rows += [
                row(f"{ours}: speed over FSDP2's", f"{speed(samples, ours, peer):.2f}x", ">= 1.0x"),
                row(f"{ours}: CPU seconds of FSDP2's", f"{cpu:.2f}x", "<= 1.0x"),
            ]
    report(f"save {gib:g} GiB under our engine, 2 ranks, median of {rounds} rounds", rows)


def changed(state: dict[str, Any]) -> dict[str, Any]:
    """The state after what stands for a step: a save of what was saved before is warned about."""
    with torch.no_grad():
        for param in state["model"].parameters():
            local = param.to_local() if hasattr(param, "to_local") else param
            local.view(-1)[:1].add_(1.0)
    return state


def name_of(candidate: str) -> str:
    """The folder that a candidate saves to."""
    engine, _, io = candidate.rpartition(", ")
    return f"{engine} {io}"


if __name__ == "__main__":
    on_two_ranks(rank_main, __doc__, gib=0.5)
