"""A training of which 95 % are frozen: saves with dedup against saves of everything, and DCP.

    python -m benchmarks.dedup [--mib 512 --rounds 5]

One process. `first` is the save that every later one refers to: it writes everything, and hashes it
besides, which is what dedup costs a training in which nothing is frozen.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import ckpt
from benchmarks.measure import clear, interleaved, ratio, report, row, speed

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="saves of a training with 95 % frozen")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    state = _state(arguments.mib)
    steps = iter(range(1 << 30))
    written: list[float] = []
    total = sum(tensor.nbytes for part in state.values() for tensor in part.values())
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        root, first, full, theirs = (Path(name) / n for n in ("dedup", "first", "full", "dcp"))
        for _ in range(4):  # the fourth writes everything, as the first
            ckpt.save(state, str(root), step=next(steps), dedup=True)

        def dedup() -> None:
            saved = ckpt.save(state, str(root), step=next(steps), dedup=True)
            written.append(saved.nbytes / total)

        def between(which: str) -> None:
            for tensor in state["adapters"].values():
                tensor += 1
            if which != "dedup":
                clear(theirs if which == "dcp" else Path(name) / which / "steps")

        saves = interleaved(
            {
                "dedup": dedup,
                "full": lambda: ckpt.save(state, str(full), step=next(steps)),
                "first": lambda: ckpt.save(state, str(first), step=next(steps), dedup=True),
                "dcp": lambda: dcp.save(
                    state, storage_writer=dcp.FileSystemWriter(theirs), no_dist=True
                ),
            },
            rounds=arguments.rounds,
            between=between,
        )
    assert max(written) <= 0.06, written
    cpu = ratio(saves, "dedup", "full", "cpu_seconds")
    report(
        f"{arguments.mib} MiB of which 95 % are frozen, one process, durable, median of "
        f"{arguments.rounds} rounds",
        [
            row("bytes written per save, of the state", f"{max(written):.1%}", "<= 6 %"),
            row(
                "save, speed over a save of everything",
                f"{speed(saves, 'dedup', 'full'):.1f}x",
                "-",
            ),
            row("save, CPU seconds of a save of everything", f"{cpu:.2f}x", "-"),
            row("save, speed over DCP", f"{speed(saves, 'dedup', 'dcp'):.1f}x", "-"),
            row(
                "first save, time of one without dedup",
                f"{ratio(saves, 'first', 'full'):.2f}x",
                "-",
            ),
        ],
    )


def _state(mib: int) -> dict[str, dict[str, torch.Tensor]]:
    """Frozen layers of 8 MiB, and 5 % in adapters of 64 KiB."""
    layers = max(1, mib * 95 // 100 // 8)
    adapters = max(1, mib * MIB * 5 // 100 // (64 << 10))
    return {
        "frozen": {f"layer{layer:03d}.weight": torch.randn(2048, 1024) for layer in range(layers)},
        "adapters": {f"layer{layer:03d}.lora": torch.randn(16, 1024) for layer in range(adapters)},
    }


if __name__ == "__main__":
    main()
