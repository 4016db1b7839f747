"""4,000 tensors of 1 KiB in one process: save and load against torch's DCP.

python -m benchmarks.small_tensors [--rounds 7]
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import ckpt
from benchmarks.measure import clear, interleaved, report, row, speed, wall


def main() -> None:
    parser = argparse.ArgumentParser(description="4,000 small tensors against DCP")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    state = {f"layer{layer:04d}.weight": torch.randn(256) for layer in range(4000)}
    steps = iter(range(1 << 30))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        ours, theirs = Path(name) / "ours", Path(name) / "dcp"
        saved = interleaved(
            {
                "ours": lambda: ckpt.save(state, str(ours), step=next(steps)),
                "dcp": lambda: dcp.save(
                    state, storage_writer=dcp.FileSystemWriter(theirs), no_dist=True
                ),
            },
            rounds=arguments.rounds,
            between=lambda which: clear(theirs if which == "dcp" else ours / "steps"),
        )
        ckpt.save(state, str(ours), step=next(steps))
        dcp.save(state, storage_writer=dcp.FileSystemWriter(theirs), no_dist=True)
        loaded = interleaved(
            {
                "ours": lambda: ckpt.load(state, str(ours)),
                "dcp": lambda: dcp.load(
                    state, storage_reader=dcp.FileSystemReader(theirs), no_dist=True
                ),
            },
            rounds=arguments.rounds,
            between=lambda which: None,
        )
    report(
        f"4,000 tensors of 1 KiB, one process, durable, median of {arguments.rounds} rounds",
        [
            row("save, speed over DCP", f"{speed(saved, 'ours', 'dcp'):.1f}x", ">= 30x"),
            row("load, speed over DCP", f"{speed(loaded, 'ours', 'dcp'):.1f}x", ">= 30x"),
            row("save, DCP's then ours", f"{wall(saved, 'dcp')}; {wall(saved, 'ours')}", "none"),
            row("load, DCP's then ours", f"{wall(loaded, 'dcp')}; {wall(loaded, 'ours')}", "none"),
        ],
    )


if __name__ == "__main__":
    main()
