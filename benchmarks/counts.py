"""What saves, loads and steps ask of Python, the disk and the store: counts, the same on every
machine under every load.

    python -m benchmarks.counts [--record]

Counted on one rank, after a save and a load that are not. `benchmarks/history/counts.json` has the
counts of each day on which somebody recorded them; `make test` fails where one of the newest has
grown by 5 %, and `--record` is for a growth that has a reason. What an engine asks of a device is
counted by `benchmarks.device_counts`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

import ckpt
from storage.memory import MemoryStore

HISTORY = Path(__file__).parent / "history" / "counts.json"
GROWTH_MAX = 1.05
PYTHON = "Python calls"
STATES: dict[str, tuple[int, int]] = {
    "1,000 tensors of 1 KiB": (1000, 256),
    "256 MiB": (4, 1 << 24),
}
"""How many tensors of how many elements of four bytes."""
CALLED = {
    "syncs": ("fsync", "fdatasync"),
    "opens": ("open",),
    "renames and links": ("rename", "replace", "link"),
    "reads": ("pread", "preadv", "read", "readv"),
    "writes": ("pwrite", "pwritev", "write", "writev"),
}
REQUESTS = (
    *("get", "get_bounded", "get_into", "get_direct_into", "create", "put_if_absent"),
    *("list", "info", "delete"),
)
STEPS = 100


@patch("os.sched_getaffinity", lambda pid: {0})  # a load has a thread for each core
def counted() -> dict[str, int]:
    """All counts by what is counted. Takes some seconds, and half a GiB of disk and memory."""
    counts: dict[str, int] = {}
    for name, (tensors, numel) in STATES.items():
        state = {f"t{number}": torch.ones(numel) for number in range(tensors)}
        with tempfile.TemporaryDirectory() as root:
            ckpt.save(state, root, step=0)
            ckpt.load(state, root)
            calls = {
                "save": partial(ckpt.save, state, root, io="buffered"),
                "load": partial(ckpt.load, state, root, io="buffered"),
            }
            for verb, call in calls.items():
                with _counting(os, CALLED) as asked:
                    call(step=1)
                asked[PYTHON] = python_calls(partial(call, step=1 if verb == "load" else 2))
                counts |= {f"{verb} {name}: {kind}": asked[kind] for kind in sorted(asked)}
    state, store = {"x": torch.ones(4)}, MemoryStore()
    ckpt.save(state, store, step=0)
    with _counting(MemoryStore, {name: (name,) for name in REQUESTS}) as asked:
        ckpt.save(state, store, step=1)
    counts |= {f"save into a store: {kind}": asked[kind] for kind in sorted(asked)}
    with _counting(MemoryStore, {name: (name,) for name in REQUESTS}) as asked:
        ckpt.load(state, store)
    counts |= {f"load from a store: {kind}": asked[kind] for kind in sorted(asked)}
    with ckpt.Checkpointer(state, MemoryStore(), save=ckpt.EverySteps(10_000)) as checkpointer:
        checkpointer.step(0)
        steps = range(1, STEPS + 1)
        calls = python_calls(lambda: [checkpointer.step(step) for step in steps])
    counts[f"{STEPS} steps with nothing due: {PYTHON}"] = calls
    return counts


@contextmanager
def _counting(owner: Any, called: dict[str, tuple[str, ...]]) -> Iterator[Counter[str]]:
    """How often functions of `owner` are called, and the bytes that those of `os` move, by kind."""
    asked: Counter[str] = Counter()
    lock = threading.Lock()

    def counting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            answer = function(*arguments, **options)
            with lock:
                asked[kind] += 1
                if kind in ("reads", "writes"):
                    asked[f"bytes of {kind}"] += answer if isinstance(answer, int) else len(answer)
            return answer

        return call

    kinds = {name: kind for kind, names in called.items() for name in names}
    counting_ones = {name: counting(kind, getattr(owner, name)) for name, kind in kinds.items()}
    with patch.multiple(owner, **counting_ones):
        yield asked


def python_calls(run: Callable[[], object]) -> int:
    """Functions of Python that `run` calls, in this thread and those that it starts."""
    calls: Counter[int] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[threading.get_ident()] += 1

    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # a thread of something else may enable what was disabled
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        gc.set_threshold(*thresholds)
    return calls.total()


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__.partition("+")[0]}


def recorded() -> list[dict[str, Any]]:
    """All entries of the history, oldest first."""
    entries: list[dict[str, Any]] = json.loads(HISTORY.read_text()) if HISTORY.exists() else []
    return entries


def grown(counts: dict[str, int], entry: dict[str, Any]) -> list[str]:
    """What has grown too much since `entry`, and what only one of them has. Calls of Python are
    compared on its versions only.
    """
    is_alike = all(entry[name] == version for name, version in versions().items())
    before: dict[str, int] = entry["counts"]
    return [
        f"{what}: {before.get(what)} on {entry['date']}, now {counts.get(what)}"
        for what in sorted({*counts, *before})
        if (is_alike or not what.endswith(PYTHON))
        and not counts.get(what, sys.maxsize) <= before.get(what, -1) * GROWTH_MAX
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    counts, entries = counted(), recorded()
    before = entries[-1]["counts"] if entries else {}
    for what, number in counts.items():
        print(f"  {what}: {number} ({before.get(what, 'not counted')} before)")
    if asked.record:
        today = {"date": datetime.date.today().isoformat(), **versions(), "counts": counts}
        HISTORY.parent.mkdir(exist_ok=True)
        HISTORY.write_text(json.dumps([*entries, today], indent=1) + "\n")


if __name__ == "__main__":
    main()
