"""All benchmarks, one after the other, and a table of bars against what was measured: `make bench`.

    python -m benchmarks [save_load cold_load small_tensors async_save state_dicts engine_save fsdp1
                          memory dedup export convert manifest coordinator encoding s3 overhead
                          near step device_counts scale host_time]

Takes some minutes, on a disk with 10 GB free (the current directory's). Each benchmark can be run
by itself with more rounds and other sizes. A bar is judged by the reader: times on a busy machine
say little, so only counts are asserted.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

BENCHMARKS: dict[str, tuple[str, ...]] = {
    "save_load": ("--gib", "1", "--rounds", "3"),
    "cold_load": ("--gib", "1", "--rounds", "3"),
    "small_tensors": ("--rounds", "5"),
    "state_dicts": ("--params", "50e6"),
    "async_save": ("--gib", "1", "--rounds", "3"),
    "engine_save": ("--gib", "0.5", "--rounds", "3"),
    "fsdp1": ("--gib", "0.5", "--rounds", "2"),
    "memory": ("--gib", "1"),
    "dedup": ("--mib", "512", "--rounds", "5"),
    "export": ("--gib", "1", "3", "--rounds", "1"),
    "convert": ("--gib", "1", "--rounds", "1"),
    "manifest": (),
    "coordinator": (),
    "encoding": ("--rounds", "5"),
    "s3": ("--mib", "512", "--rounds", "3"),
    "overhead": ("--blocks", "12"),
    "near": ("--gib", "1", "--rounds", "5"),
    "step": ("--rounds", "7", "--engines", "ours,ours-fully,fsdp1,fsdp2"),
    "device_counts": (),
    "scale": ("--ranks", "16", "64", "--tensors", "24"),
    "host_time": (),
}
WITHOUT_FILES = (
    "manifest",
    "coordinator",
    "encoding",
    "s3",
    "step",
    "device_counts",
    "scale",
    "host_time",
)
"""Those that write nothing, and take no directory."""
ROW = re.compile(r"  (.*): (.*) \(bar (.*)\)")


class Result(NamedTuple):
    """One row of the table."""

    title: str
    what: str
    measured: str
    bar: str


def main() -> None:
    """Run those named on the command line, or all. Exits with 1 when one fails."""
    chosen = sys.argv[1:] or list(BENCHMARKS)
    if unknown := [name for name in chosen if name not in BENCHMARKS]:
        sys.exit(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    failed = []
    results: list[Result] = []
    for name in chosen:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *BENCHMARKS[name], *_place(name)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            results += _results(running.stdout)
        if running.returncode:
            failed.append(name)
    _print_table(results)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _place(name: str) -> tuple[str, ...]:
    # Temporary files may lie in memory; the disk that matters is the one we were started on.
    return () if name in WITHOUT_FILES else ("--directory", ".")


def _results(lines: Iterator[str]) -> Iterator[Result]:
    """Echo what a benchmark prints, and pick out its rows."""
    title = ""
    for line in lines:
        print(line, end="", flush=True)
        if match := ROW.fullmatch(line.rstrip("\n")):
            yield Result(title, *match.groups())
        elif line.strip():
            title = line.strip()


def _print_table(results: list[Result]) -> None:
    width = max((len(result.what) for result in results), default=0)
    print("\n== measured against bars")
    title = ""
    for result in results:
        if result.title != title:
            title = result.title
            print(f"\n{title}")
        print(f"  {result.what:{width}}  {result.measured:>10}  {result.bar}")


if __name__ == "__main__":
    main()
