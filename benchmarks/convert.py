"""From torch's sharded checkpoints to single files: ours against each tool that torch's users have.

    python -m benchmarks.convert [--gib 3] [--rounds 3] [--directory DIR]

An FSDP2 model, saved by two ranks with torch's DCP. Ours and the peer write the same kind of file
from the same directory, in turn, each in a process of its own that has imported its libraries
before anything is measured: wall seconds, CPU seconds (user and system), and peak memory over that
idle process. Ours waits until the file is on the disk, the peers do not; "synced" lets them wait
too. `dcp_to_torch_save` and `accelerate merge-weights` read DCP directories; DCP's consolidation
reads the safetensors shards that its Hugging Face writer makes, and so does ours there. An import
makes a root of ours of the same source, and is held against the same peer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.measure import report, row
from tests.ranks import run_ranks

GIB = 1 << 30
MIB = 1 << 20
WIDTH = 4096

HEAD = """
import os, resource, sys, time, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed.checkpoint
def now(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
source, target = sys.argv[1:]
"""
TAIL = """
idle, began, spent = now("VmRSS"), time.perf_counter(), cpu()
run()
wall, used, peak = time.perf_counter() - began, cpu() - spent, now("VmHWM") - idle
for folder, _, names in os.walk(os.path.dirname(target)):
    for name in names:
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(file)
        os.close(file)
print(wall, used, peak, time.perf_counter() - began)
"""
OURS = """
import ckpt
ckpt.export
def run(): ckpt.export(source, target)
"""
IMPORT = """
import ckpt
ckpt.import_checkpoint
def run(): ckpt.import_checkpoint(source, os.path.dirname(target), step=0)
"""
TORCH_SAVE = """
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
def run(): dcp_to_torch_save(source, target)
"""
ACCELERATE = """
from accelerate.utils import merge_fsdp_weights
def run(): merge_fsdp_weights(source, os.path.dirname(target))
"""
ZERO = """
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
def run(): convert(source, os.path.dirname(target), safe_serialization=True)
"""
CONSOLIDATE = """
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from safetensors import safe_open
def run():
    names = set()
    for file in os.listdir(source):
        with safe_open(os.path.join(source, file), "pt") as opened:
            names.update(opened.keys())
    consolidate_safetensors_files(source, os.path.dirname(target), dict.fromkeys(names, 1))
"""


class Pair(NamedTuple):
    """A peer, and what both read and write."""

    peer: str
    source: str
    suffix: str
    script: str


class Run(NamedTuple):
    """Seconds, CPU seconds, peak bytes over idle, and seconds until all is on the disk."""

    wall: float
    cpu: float
    peak: float
    synced: float


PAIRS = (
    Pair("dcp_to_torch_save", "dcp", ".pt", TORCH_SAVE),
    Pair("accelerate merge-weights", "dcp", ".safetensors", ACCELERATE),
    Pair("DCP's consolidation", "shards", ".safetensors", CONSOLIDATE),
    Pair("deepspeed zero_to_fp32", "zero", ".safetensors", ZERO),
)
# Packages of peers that are measured where they are installed.
OPTIONAL = {"accelerate": "accelerate", "zero": "deepspeed"}


def _save(folder: str, nbytes: int) -> None:
    layers = max(1, nbytes // (4 * WIDTH * WIDTH))
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.detach().to_local().normal_()
    # merge-weights wants the state dict under this name, ours takes any.
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    writer = HuggingFaceStorageWriter(f"{folder}/shards", save_distributed=True)
    dcp.save(model.state_dict(), storage_writer=writer)


def _save_zero(folder: str, nbytes: int) -> None:
    """A checkpoint of DeepSpeed's stage 2, before its first step: without moments, which
    `zero_to_fp32` would leave out.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    layers = max(1, nbytes // (4 * WIDTH * WIDTH))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.save_checkpoint(f"{folder}/zero")


def _run(script: str, source: str, target: Path) -> Run:
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir()
    command = [sys.executable, "-c", HEAD + script + TAIL, source, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Run(*map(float, done.stdout.split()[-4:]))


def _in_page_cache(folder: str) -> None:
    for path in (one for one in Path(folder).rglob("*") if one.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.read(8 * MIB):
                pass


def _measure(gib: float, rounds: int, directory: str | None, only: str) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        run_ranks(2, _save, folder, int(gib * GIB), timeout_seconds=900)
        if find_spec("deepspeed"):
            run_ranks(2, _save_zero, folder, int(gib * GIB), timeout_seconds=900)
        for pair in (pair for pair in PAIRS if only in pair.peer):
            if lacking := [n for w, n in OPTIONAL.items() if w in pair.peer and not find_spec(n)]:
                print(f"  ({pair.peer}: {lacking[0]} is not installed)")
                continue
            target = Path(folder) / "out" / f"model{pair.suffix}"
            source = f"{folder}/{pair.source}"
            runs: dict[str, list[Run]] = {script: [] for script in (OURS, IMPORT, pair.script)}
            for _ in range(rounds):
                for script, results in runs.items():
                    _in_page_cache(source)
                    results.append(_run(script, source, target))
            _report(pair, "export", gib, runs[OURS], runs[pair.script])
            _report(pair, "import", gib, runs[IMPORT], runs[pair.script])
        os.sync()


def _report(pair: Pair, what: str, gib: float, ours: list[Run], theirs: list[Run]) -> None:
    def times(field: str) -> float:
        pairs = zip(ours, theirs, strict=True)
        ratios = [float(getattr(b, field) / getattr(a, field)) for a, b in pairs]
        return statistics.median(ratios)

    def spread(field: str) -> str:
        """Ours over theirs: the median and the range of the rounds."""
        pairs = zip(ours, theirs, strict=True)
        ratios = [float(getattr(a, field) / getattr(b, field)) for a, b in pairs]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    wall, cpu = (statistics.median(getattr(run, f) for run in ours) for f in ("wall", "cpu"))
    own = max(run.peak for run in ours) / MIB
    peer = max(run.peak for run in theirs) / MIB
    report(
        f"{what} {gib:g} GiB like {pair.peer}: ours {wall:.2f} s, {cpu:.2f} CPU s",
        [
            row(f"{pair.peer}: times as fast", f"{times('wall'):.2f}x", ">= 2x"),
            row("times as fast, both synced", f"{times('synced'):.2f}x", "none"),
            row("CPU seconds saved", f"{times('cpu'):.2f}x", ">= 2x"),
            row("peak memory over idle", f"{own:.0f} MiB (peer {peer:.0f})", "<= 128 MiB"),
            row("CPU, of the peer's", spread("cpu"), "<= 0.2"),
            row("peak memory, of the peer's", spread("peak"), "<= 0.15"),
        ],
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--only", default="", help="a part of the peers' names")
    arguments = parser.parse_args()
    _measure(arguments.gib, arguments.rounds, arguments.directory, arguments.only)


if __name__ == "__main__":
    main()
