"""Peak memory of a blocking save and of a load on CPU, per rank, over the state itself.

    python -m benchmarks.memory [--gib 1] [--directory DIR]

Every measurement has fresh processes. Before it a tiny state is saved and loaded, so that what is
counted is memory for tensors and plans and not that of imported modules. DCP, measured in the same
way, is printed beside.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import ckpt
from benchmarks.measure import extra_memory, most_of, report, row
from benchmarks.save_load import GIB, Trained, dcp_load, dcp_save
from tests.ranks import run_ranks

MIB = 1 << 20
KINDS = ("save buffered", "save direct", "load", "DCP save", "DCP load")


def rank_main(kind: str, gib: float, directory: str) -> float:
    """The largest of all ranks' extra memory, in MiB. Leaves checkpoints for loads to read."""
    warnings.filterwarnings("ignore")
    base = Path(directory)
    _warm_up(base, kind)
    trained = Trained(int(gib * GIB))
    runs: dict[str, Callable[[], object]] = {
        "save buffered": lambda: ckpt.save(
            trained.state, str(base / "ours"), step=0, io="buffered"
        ),
        "save direct": lambda: ckpt.save(trained.state, str(base / "ours"), step=1, io="direct"),
        "load": lambda: ckpt.load(trained.state, str(base / "ours")),
        "DCP save": lambda: dcp_save(trained, base / "dcp"),
        "DCP load": lambda: dcp_load(trained, base / "dcp"),
    }
    return most_of(extra_memory(runs[kind])) / MIB


def _warm_up(base: Path, kind: str) -> None:
    small = Trained(1)
    root = base / f"warm-{kind.replace(' ', '-')}"
    ckpt.save(small.state, str(root / "ours"), step=0)
    ckpt.load(small.state, str(root / "ours"))
    dcp_save(small, root / "dcp")
    dcp_load(small, root / "dcp")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        peaks = {
            kind: run_ranks(2, rank_main, kind, arguments.gib, directory, timeout_seconds=900)[0]
            for kind in KINDS
        }
    report(
        f"peak memory over {arguments.gib:g} GiB of FSDP2 + AdamW state, the worst of 2 ranks",
        [
            row(kind, f"{peak:.0f} MiB", "none" if kind.startswith("DCP") else "<= 64 MiB")
            for kind, peak in peaks.items()
        ],
    )


if __name__ == "__main__":
    main()
