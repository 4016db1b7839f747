"""Save under torch's FSDP1, flat and with original parameters, against get_state_dict + DCP.

    python -m benchmarks.fsdp1 [--gib 0.5] [--rounds 3] [--directory DIR]

torch has to gather what FSDP1 has flattened; we write every rank's own shard. One extra save of
each kind runs under a mode that counts collectives, and one more with the peak of its memory read.
Asserted: our save calls no collective at all (control messages go through the rendezvous store).
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt
from benchmarks.measure import clear, extra_memory, interleaved, most_of, ratio, report, row, speed
from tests.ranks import run_ranks

GIB = 1 << 30
MIB = 1 << 20
WIDTH = 1024


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def collectives_of(run: Callable[[], object]) -> int:
    """How many collectives `run` calls on this rank."""
    with CollectiveCounter() as counter:
        run()
    return counter.count


def trained(nbytes: int, *, use_orig_params: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An FSDP1 model with AdamW state, `nbytes` in all, after one step."""
    torch.manual_seed(0)
    layers = max(1, nbytes // (3 * 4 * WIDTH * WIDTH))
    model = FullyShardedDataParallel(
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def rank_main(gib: float, rounds: int, directory: str, use_orig_params: bool) -> None:
    """Measure and print, as one rank of several."""
    warnings.filterwarnings("ignore")
    model, optimizer = trained(int(gib * GIB), use_orig_params=use_orig_params)
    base = Path(directory)
    steps = iter(range(1 << 30))

    def theirs() -> None:
        states = get_state_dict(model, optimizer)
        state = dict(zip(("model", "optim"), states, strict=True))
        dcp.save(state, storage_writer=dcp.FileSystemWriter(base / "dcp"))

    def ours() -> None:
        ckpt.save({"model": model, "optim": optimizer}, str(base / "ours"), step=next(steps))

    places = {"dcp": "dcp", "ours": "ours/steps"}
    saves: dict[str, Callable[[], object]] = {"dcp": theirs, "ours": ours}
    samples = interleaved(saves, rounds=rounds, between=lambda name: clear(base / places[name]))
    collectives = {name: collectives_of(run) for name, run in saves.items()}
    extra = {name: most_of(extra_memory(run)) / MIB for name, run in saves.items()}
    kind = "original parameters" if use_orig_params else "flat parameters"
    report(
        f"save, {gib:g} GiB of FSDP1 ({kind}) + AdamW, {dist.get_world_size()} ranks, durable, "
        f"median of {rounds} rounds",
        [
            row(
                "CPU seconds of DCP's",
                f"1/{1 / ratio(samples, 'ours', 'dcp', 'cpu_seconds'):.1f}",
                "<= 1/6",
            ),
            row("speed over DCP", f"{speed(samples, 'ours', 'dcp'):.1f}x", "none"),
            row(f"collectives (DCP: {collectives['dcp']})", f"{collectives['ours']}", "0"),
            row(
                f"peak memory over the state (DCP: {extra['dcp']:.0f} MiB)",
                f"{extra['ours']:.0f} MiB",
                "<= 64 MiB",
            ),
        ],
    )
    assert collectives["ours"] == 0, "a save under FSDP1 must not gather"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    for use_orig_params in (False, True):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            run_ranks(
                2,
                rank_main,
                arguments.gib,
                arguments.rounds,
                directory,
                use_orig_params,
                timeout_seconds=1800,
            )


if __name__ == "__main__":
    main()
