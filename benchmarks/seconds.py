"""A page of absolute seconds: sizes and ranks, on a disk, in memory and on S3, with peer and limit.

    python -m benchmarks.seconds [--gib 1 4] [--ranks 1 2 4 16] [--rounds 5] [--directory DIR]
                                 [--memory /dev/shm] [--endpoint URL] [--no-s3] [--page]

Every size is measured on 2 ranks, the first on every number of ranks too. All candidates of a row
run in turn on the same bytes, in another order each round, after a round that does not count:

- save: durable, with defaults; against DCP, and the faster of bare `pwritev` + fsync and O_DIRECT;
- load at once: right after that save, with defaults; against DCP after its own;
- load from memory: files that are in the page cache; against DCP and bare `preadv`;
- cold load: files that are not; against DCP, and the faster of bare `preadv` and O_DIRECT;
- near recovery: a `restore` from a tier in memory; against DCP's cold load, and `preadv` there;
- save to and load from S3: one process; against DCP over s3fs and bare obstore.

--page puts the rows into docs/performance.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import logging
import os
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

import ckpt
from benchmarks.__main__ import machine
from benchmarks.cold_load import (
    IN_FLIGHT,
    REQUEST_NBYTES,
    drop_from_cache,
    raw_load_direct,
)
from benchmarks.measure import Sample, clear, interleaved, row, speed
from benchmarks.s3 import Samples, measured_clients, server
from benchmarks.save_load import (
    GIB,
    Trained,
    dcp_load,
    dcp_save,
    raw_load,
    raw_save,
    raw_save_direct,
)
from storage.ranges import aligned_buffer
from tests.ranks import run_ranks

S3_GIB = 0.25
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- written by make bench -->", "<!-- end -->"
HEAD = "|what|GiB, ranks|ours|DCP|speed|bare|speed|\n" + "|---" * 7 + "|"


class Line(NamedTuple):
    """One row: seconds of each round of ours, of DCP and of each bare way."""

    what: str
    gib: float
    ranks: int
    samples: Samples
    bare: tuple[str, ...]

    @property
    def best(self) -> str:
        """The bare way that is faster than the others."""
        return min(self.bare, key=lambda name: statistics.median(_walls(self.samples[name])))

    @property
    def cells(self) -> list[str]:
        """The texts of the row in the page."""
        ratios = [f"{speed(self.samples, 'ours', peer):.2g}x" for peer in ("dcp", self.best)]
        ours, theirs, bare = (_seconds(self.samples[name]) for name in ("ours", "dcp", self.best))
        size = f"{self.gib:g}, {self.ranks}"
        return [self.what, size, ours, theirs, ratios[0], f"{bare} {self.best}", ratios[1]]


def _walls(samples: list[Sample]) -> list[float]:
    return [sample.wall_seconds for sample in samples]


def _seconds(samples: list[Sample]) -> str:
    """The median and the range, each to two digits."""
    times = _walls(samples)
    return f"{statistics.median(times):.2g} ({min(times):.2g}-{max(times):.2g})"


def on_disk(gib: float, rounds: int, directory: str, memory: str) -> list[Line]:
    """On every rank; each returns the same lines."""
    warnings.filterwarnings("ignore")
    logging.getLogger("ckpt").setLevel(logging.ERROR)  # the same weights are saved again on purpose
    trained, base, ranks = Trained(int(gib * GIB)), Path(directory), dist.get_world_size()
    tensors, raw = trained.local_tensors(), base / "raw" / str(dist.get_rank())
    kept, buffer = base / "kept", aligned_buffer(16 << 20)
    buffers = [aligned_buffer(REQUEST_NBYTES) for _ in range(IN_FLIGHT)]
    steps = itertools.count()
    saves: dict[str, Callable[[], object]] = {
        "ours": lambda: ckpt.save(trained.state, str(base / "ours"), step=next(steps)),
        "dcp": lambda: dcp_save(trained, base / "dcp"),
        "pwritev": lambda: raw_save(tensors, raw),
        "O_DIRECT": lambda: raw_save_direct(tensors, raw, buffer),
    }
    places = {"ours": "ours/steps", "dcp": "dcp"}
    saved = interleaved(
        saves, rounds=rounds, between=lambda name: clear(base / places.get(name, "raw"))
    )
    lines = [Line("save", gib, ranks, saved, ("pwritev", "O_DIRECT"))]

    loads: dict[str, Callable[[], object]] = {
        "ours": lambda: ckpt.load(trained.state, str(base / "ours")),
        "dcp": lambda: dcp_load(trained, base / "dcp"),
        "preadv": lambda: raw_load(tensors, raw, checked=False),
    }
    saves["preadv"] = saves["pwritev"]
    at_once = interleaved(
        loads,
        rounds=rounds,
        before=lambda name: saves[name](),
        between=lambda name: clear(base / places.get(name, "raw")),
    )
    lines.append(Line("load at once", gib, ranks, at_once, ("preadv",)))

    ckpt.save(trained.state, str(kept), step=1, io="buffered")
    saves["dcp"]()
    saves["pwritev"]()
    loads["ours"] = lambda: ckpt.load(trained.state, str(kept))
    warm = interleaved(loads, rounds=rounds, between=lambda name: dist.barrier())
    lines.append(Line("load from memory", gib, ranks, warm, ("preadv",)))

    if dist.get_rank() == 0:
        os.sync()  # what is not on the disk yet cannot be dropped
    drop_from_cache(base)
    loads["O_DIRECT"] = lambda: raw_load_direct(raw, buffers)
    cold = interleaved(loads, rounds=rounds, between=lambda name: drop_from_cache(base))
    lines.append(Line("cold load", gib, ranks, cold, ("preadv", "O_DIRECT")))

    if memory:
        samples = _recovery(trained, rounds, base, Path(memory))
        lines.append(Line("near recovery", gib, ranks, samples, ("preadv",)))
    clear(base)
    return lines


def _recovery(trained: Trained, rounds: int, base: Path, memory: Path) -> Samples:
    """The tier lies in `memory`; DCP has only its files on the disk."""
    raw, tensors = memory / f"raw{dist.get_rank()}", trained.local_tensors()
    near, root = ckpt.Near(memory / "tier", every=ckpt.EverySteps(1)), str(base / "near")
    with ckpt.Checkpointer(trained.state, root, save=ckpt.Never(), near=near) as saver:
        saver.step(1)
        saver.wait()
    raw_save(tensors, raw)
    opened: list[ckpt.Checkpointer] = []

    def restore() -> None:
        opened.append(ckpt.Checkpointer(trained.state, root, save=ckpt.Never(), near=near))
        restored = opened[-1].restore()
        assert restored is not None and restored.origin == "near", restored

    def between(name: str) -> None:
        while opened:  # a training would go on with it; what its end takes is not measured
            opened.pop().close()
        drop_from_cache(base)

    recoveries: dict[str, Callable[[], object]] = {
        "ours": restore,
        "dcp": lambda: dcp_load(trained, base / "dcp"),
        "preadv": lambda: raw_load(tensors, raw, checked=False),
    }
    samples = interleaved(recoveries, rounds=rounds, between=between)
    clear(memory)
    return samples


def on_s3(rounds: int, endpoint: str | None) -> list[Line]:
    """In this process, at the gateway of `endpoint`, or the best server that is here."""
    with tempfile.TemporaryDirectory() as scratch, server(endpoint, Path(scratch)) as (name, there):
        saved, loaded = measured_clients(there, mib=int(S3_GIB * 1024), rounds=rounds)
    bare = tuple(peer for peer in loaded if peer.startswith("raw"))
    return [
        Line(f"save to S3 ({name})", S3_GIB, 1, saved, ("raw",)),
        Line(f"load from S3 ({name})", S3_GIB, 1, loaded, bare),
    ]


def write_page(lines: list[Line], rounds: int) -> None:
    """Put the rows between the two marks of the page, in place of those of the same case."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    before, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no {BEGIN} with a later {END}")
    # Without spaces, a row has few words: pages have a budget of them.
    rows = {tuple(row.split("|")[1:3]): row for row in re.findall(r"^\|\w.*\|$", before, re.M)}
    rows.pop(("what", "GiB, ranks"), None)
    rows |= {(line.what, line.cells[1]): f"|{'|'.join(line.cells)}|" for line in lines}
    table = "\n".join([HEAD, *(rows[case] for case in sorted(rows, key=_order))])
    when = f"{machine()}, {datetime.date.today()}, {rounds} rounds."
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n\n{when}\n{END}{tail}", encoding="utf-8")


def _order(case: tuple[str, ...]) -> tuple[str, float, int]:
    what, size = case
    gib, ranks = size.split(", ")
    return what, float(gib), int(ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    parser.add_argument("--memory", default="/dev/shm", help="a tmpfs for near tiers")
    parser.add_argument("--endpoint", default=None, help="of an S3 server")
    parser.add_argument("--no-s3", action="store_true", help="only the disk, and memory")
    parser.add_argument("--page", action="store_true", help="write docs/performance.md")
    asked = parser.parse_args()
    cases = [(asked.gib[0], ranks) for ranks in asked.ranks]
    cases += [(gib, 2) for gib in asked.gib[1:]]
    lines: list[Line] = []
    for gib, ranks in cases:
        with (
            tempfile.TemporaryDirectory(dir=asked.directory) as disk,
            tempfile.TemporaryDirectory(dir=asked.memory) as memory,
        ):
            tier = memory if ranks == 2 and gib == asked.gib[0] else ""
            how = (gib, asked.rounds, disk, tier)
            lines += run_ranks(ranks, on_disk, *how, timeout_seconds=3600)[0]
        _print(lines[-5 if tier else -4 :])
    if not asked.no_s3:
        lines += on_s3(asked.rounds, asked.endpoint)
        _print(lines[-2:])
    if asked.page:
        write_page(lines, asked.rounds)


def _print(lines: list[Line]) -> None:
    for line in lines:
        what, size, ours, theirs, by_dcp, bare, by_bare = line.cells
        print(f"\n{what}, {size}: ours {ours} s, DCP {theirs} s, bare {bare} s")
        print("  " + row(f"{what} ({size}), speed over DCP", by_dcp, ">= 1x"))
        print(
            "  " + row(f"{what} ({size}), speed over the best bare way", by_bare, "none"),
            flush=True,
        )


if __name__ == "__main__":
    main()
