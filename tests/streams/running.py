"""Runs scenarios, in a process of their own: a device cannot be taken back once torch has it.

python -m tests.streams.running ours fully plain      prints what was found and counted
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
import warnings
from typing import NamedTuple

from tests.streams.device import register
from tests.streams.groups import world
from tests.streams.scenarios import SCENARIOS
from tests.streams.simulation import simulated
from tests.streams.training import Run

__all__ = ["Report", "run_one", "wanted"]


class Report(NamedTuple):
    """What came of one scenario."""

    who: str
    surface: str
    scenario: str
    findings: tuple[str, ...]
    counts: dict[str, int]
    host_waits: dict[str, int]
    error: str = ""

    def __str__(self) -> str:
        return f"{self.who} {self.surface} {self.scenario}"


def run_one(who: str, surface: str, name: str) -> Report:
    """Run one scenario on one engine."""
    register()
    scenario = SCENARIOS[name]
    error = ""
    with warnings.catch_warnings(), world(scenario.world):
        warnings.simplefilter("ignore")
        with simulated() as device:
            run = Run(who, surface)
            try:
                scenario.body(run)
            except Exception:
                error = traceback.format_exc()
            device.end()
            counts = dict(device.counts)
            counts["live peak"] = device.allocator.live_peak_bytes
            counts["reserved"] = device.allocator.reserved_bytes
            counts["live at the end"] = device.allocator.live_bytes
            findings = tuple(str(one) for one in device.findings)
            waits = dict(device.host_waits_by)
            run.models.clear()
        gc.collect()
    return Report(who, surface, name, findings, counts, waits, error)


def wanted(
    who: str, surfaces: tuple[str, ...], names: tuple[str, ...]
) -> list[tuple[str, str, str]]:
    """Which runs there are of these scenarios (all) on these surfaces (all)."""
    return [
        (who, surface, one.name)
        for one in SCENARIOS.values()
        if not names or one.name in names
        for surface in (one.surfaces if who == "ours" else one.torchs)
        if not surfaces or surface in surfaces
    ]


def main() -> None:
    """See the head of this file."""
    who, surface, *names = sys.argv[1:]
    surfaces = () if surface == "all" else (surface,)
    bad = 0
    for run in wanted(who, surfaces, tuple(names)):
        before = time.process_time()
        report = run_one(*run)
        seconds = time.process_time() - before
        print(
            f"{report}: {len(report.findings)} findings, {seconds:.2f} s"
            + (" ERROR" if report.error else ""),
            flush=True,
        )
        if names:
            print(report.counts, report.host_waits)
        if report.error:
            print("   ", report.error if names else report.error.strip().splitlines()[-1][:300])
        for line in report.findings[: 20 if names else 4]:
            print("   ", line)
        bad += bool(report.findings or report.error)
    print(f"{bad} with findings")


if __name__ == "__main__":
    main()
