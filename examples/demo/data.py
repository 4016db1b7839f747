"""Text that every machine with Python has: the sources of the standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

NBYTES_MAX = 4_000_000


def read_corpus() -> torch.Tensor:
    """The first megabytes of the standard library's top-level modules, as one tensor of bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:NBYTES_MAX]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch_of(corpus: torch.Tensor, step: int, *, sequences: int, length: int) -> torch.Tensor:
    """The batch of a step, [sequences, length]: the same on every rank and in every run."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(corpus) - length, (sequences,), generator=random)
    return torch.stack([corpus[start : start + length] for start in starts.tolist()]).long()
