"""Export of a sharded checkpoint to one file: memory over an idle interpreter, speed against cp.

    python -m benchmarks.export [--gib 1 3] [--rounds 3] [--directory DIR]

The checkpoint is an FSDP2 model saved by 2 ranks. Each export runs in a process of its own, which
has imported torch before its memory is measured. `cp` copies the exported file in the same folder;
`cp, durable` also waits until the copy is on the disk, as the export does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from benchmarks.measure import report, row
from tests.ranks import run_ranks

GIB = 1 << 30
MIB = 1 << 20
WIDTH = 4096

CHILD = """
import resource, sys, time
import torch
def now(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
idle = now("VmRSS")
from ckpt import export
started, cpu = time.perf_counter(), time.process_time()
export(sys.argv[1], sys.argv[2])
print(time.perf_counter() - started, time.process_time() - cpu, now("VmHWM") - idle)
"""


def _save(root: str, nbytes: int) -> None:
    layers = max(1, nbytes // (4 * WIDTH * WIDTH))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.detach().to_local().normal_()
    ckpt.save({"model": model}, root, step=0)


def _export(root: str, target: Path) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds, and peak bytes over the idle interpreter."""
    target.unlink(missing_ok=True)
    command = [sys.executable, "-c", CHILD, root, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, cpu, peak = done.stdout.split()
    return float(wall), float(cpu), int(peak)


def _cp(source: Path, target: Path, *, durable: bool) -> float:
    target.unlink(missing_ok=True)
    with source.open("rb", buffering=0) as file:
        while file.read(8 * MIB):
            pass  # from now on the source is in the page cache, as the checkpoint is for the export
    started = time.perf_counter()
    subprocess.run(["cp", str(source), str(target)], check=True)
    if durable:
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - started


def _measure(gib: float, rounds: int, directory: str) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        root, out, copy = f"{folder}/run", Path(folder) / "m.safetensors", Path(folder) / "copy"
        run_ranks(2, _save, root, int(gib * GIB), timeout_seconds=600)
        _export(root, out)
        walls, plain, durable, peaks = [], [], [], []
        for _ in range(rounds):
            wall, cpu, peak = _export(root, out)
            walls.append(wall)
            peaks.append(peak)
            plain.append(_cp(out, copy, durable=False))
            durable.append(_cp(out, copy, durable=True))
        ratio = statistics.median(b / a for a, b in zip(walls, plain, strict=True))
        ratio_durable = statistics.median(b / a for a, b in zip(walls, durable, strict=True))
        report(
            f"export {gib:g} GiB to one file: {statistics.median(walls):.2f} s, {cpu:.2f} CPU s",
            [
                row("peak memory over idle", f"{max(peaks) / MIB:.0f} MiB", "<= 128 MiB"),
                row("speed over cp", f"{ratio:.2f}x", ">= 0.7x"),
                row("speed over cp and fsync", f"{ratio_durable:.2f}x", "none"),
            ],
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=None)
    arguments = parser.parse_args()
    for gib in arguments.gib:
        _measure(gib, arguments.rounds, arguments.directory)


if __name__ == "__main__":
    main()
