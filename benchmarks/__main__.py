"""All benchmarks, one after the other, and a table of bars against what was measured: `make bench`.

    python -m benchmarks [--record] [--check]
                         [seconds save_load cold_load small_tensors async_save state_dicts
                          engine_save fsdp1 memory dedup publication export convert manifest
                          coordinator encoding s3 overhead near step device_counts scale
                          host_time]

Takes some minutes, on a disk with 20 GB free (the current directory's). Each benchmark can be run
by itself with more rounds and other sizes. A bar is judged by the reader: times on a busy machine
say little, so only counts are asserted, by `benchmarks.counts`.

--record adds what was measured to `benchmarks/history/measured.json`. --check compares with what
this machine has there (of each row the newest), and fails where a row is 5 % worse: its bar says
whether more is better, or less.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BENCHMARKS: dict[str, tuple[str, ...]] = {
    "seconds": ("--gib", "1", "4", "--page"),
    "save_load": ("--gib", "1", "--rounds", "3"),
    "cold_load": ("--gib", "1", "--rounds", "3"),
    "small_tensors": ("--rounds", "5"),
    "state_dicts": ("--params", "50e6"),
    "async_save": ("--gib", "1", "--rounds", "3"),
    "engine_save": ("--gib", "0.5", "--rounds", "3"),
    "fsdp1": ("--gib", "0.5", "--rounds", "2"),
    "memory": ("--gib", "1"),
    "dedup": ("--mib", "512", "--rounds", "5"),
    "publication": ("--steps", "4"),
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
HISTORY = Path(__file__).parent / "history" / "measured.json"
WORSE_MAX = 1.05


class Result(NamedTuple):
    """One row of the table."""

    title: str
    what: str
    measured: str
    bar: str

    @property
    def name(self) -> str:
        return f"{self.title} | {self.what}"


def main() -> None:
    """Run those named on the command line, or all. Exits with 1 when one fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    failed = []
    results: list[Result] = []
    for name in asked.names or BENCHMARKS:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *BENCHMARKS[name], *_place(name)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            results += _results(running.stdout)
        if running.returncode:
            failed.append(name)
    _print_table(results)
    history = json.loads(HISTORY.read_text()) if HISTORY.exists() else []
    if asked.check and not before(history, machine()):
        failed.append(f"nothing is recorded of {machine()} to compare with: pass --record")
    if asked.check:
        failed += worse(results, before(history, machine()))
    if asked.record:
        rows = {result.name: result.measured for result in results}
        today = datetime.date.today().isoformat()
        entry = {"date": today, "machine": machine(), "measured": rows}
        HISTORY.write_text(json.dumps([*history, entry], indent=1) + "\n")
    if failed:
        sys.exit("failed: " + "\n  ".join(failed))


def machine() -> str:
    """What times are compared on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {models[0] if models else platform.machine()}"


def before(history: list[dict[str, Any]], machine: str) -> dict[str, str]:
    """The newest measurement of each row on `machine`."""
    rows: dict[str, str] = {}
    for entry in history:
        rows |= entry["measured"] if entry["machine"] == machine else {}
    return rows


def worse(results: list[Result], before: dict[str, str]) -> list[str]:
    """The rows that are worse than `before` by more than 5 %; new ones, and those whose bar is no
    number, are not judged.
    """
    problems = []
    for result in results:
        then, now = _number(before.get(result.name, "")), _number(result.measured)
        if then is None or now is None:
            continue
        is_worse = {">=": now * WORSE_MAX < then, "<=": now > then * WORSE_MAX}
        if is_worse.get(result.bar[:2], False):
            problems.append(f"{result.name}: {result.measured}, was {before[result.name]}")
    return problems


def _number(measured: str) -> float | None:
    match = re.search(r"-?\d+(\.\d+)?(e-?\d+)?", measured.replace(",", ""))
    return float(match[0]) if match else None


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
        elif not line.startswith((" ", "\n")):
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
