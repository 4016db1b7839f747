"""No training has a race: both surfaces of the engine, and torch's own classes as controls.

Method: every scenario runs on a simulated device, as rank 0 of ranks that are not there, and must
leave the detector silent. One process runs all of them. The default run takes each scenario on one
of its surfaces, --soak on all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from tests.conftest import Scale
from tests.ranks import run_ranks
from tests.streams.groups import world
from tests.streams.running import Report, run_one, wanted
from tests.streams.scenarios import SCENARIOS
from tests.streams.simulation import simulated
from tests.streams.training import Run

Key = tuple[str, str, str]


def run_several(keys: Sequence[Key]) -> list[Report]:
    return [run_one(*key) for key in keys]


def keys(who: str, *, soak: bool) -> list[Key]:
    """Which runs: of all scenarios, on all surfaces or on one each, taken in turn."""
    chosen = []
    for number, name in enumerate(SCENARIOS):
        runs = wanted(who, (), (name,))
        chosen += runs if soak else runs[number % max(len(runs), 1) :][:1]
    return chosen


@functools.cache
def reports(who: str, soak: bool) -> dict[Key, Report]:
    runs = keys(who, soak=soak)
    (reports_of_runs,) = run_ranks(1, run_several, runs, group=False, timeout_seconds=1500)
    return dict(zip(runs, reports_of_runs, strict=True))


def check(who: str, name: str, soak: bool) -> None:
    mine = [report for key, report in reports(who, soak).items() if key[2] == name]
    for report in mine:
        assert not report.error, f"{report}: {report.error}"
        assert not report.findings, "\n".join([str(report), *report.findings])
    assert mine or not wanted(who, (), (name,))


@pytest.mark.ranks
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_engine_has_no_race(name: str, scale: Scale) -> None:
    check("ours", name, scale.soak)


IN_SAMPLE = {
    "plain",
    "accumulation",
    "low_precision_parameters",
    "repeated_over_an_axis",
    "shards_in_the_hosts_memory",
    "smaller_shards_after_forward",
    "unshard_early",
}


def controls(soak: bool) -> list[Key]:
    return [key for key in wanted("torch", (), ()) if soak or key[2] in IN_SAMPLE]


@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_torchs_own_classes_are_clean_controls(scale: Scale) -> None:
    runs = controls(scale.soak)
    (reports_of_runs,) = run_ranks(1, run_several, runs, group=False, timeout_seconds=1500)
    assert len(reports_of_runs) >= 7
    for report in reports_of_runs:
        assert not report.error, f"{report}: {report.error}"
        assert not report.findings, "\n".join([str(report), *report.findings])


@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_with_offload_no_copy_makes_the_host_wait_for_memory_that_is_not_pinned() -> None:
    name = "shards_in_the_hosts_memory"
    runs = [("ours", surface, name) for surface in SCENARIOS[name].surfaces]
    (reports_of_runs,) = run_ranks(1, run_several, runs, group=False, timeout_seconds=600)
    for report in reports_of_runs:
        assert report.counts["kernels"] > 0 and not report.error
        assert "copies of memory that is not pinned" not in report.counts, str(report)


def work_of_the_stream_of_gathers() -> list[int]:
    """How much it does in a step when gathers are on that of compute, and when they are not."""
    with world(8), simulated():
        run = Run("ours", "fully")
        model = run.wrap(run.net())
        run.train(model, steps=1)
        stream = model.fsdp_group.unit.runtime.streams._gather.agent
        done = []
        for on_compute in (True, False):
            model._set_unshard_async_op(on_compute)
            before = stream.time
            run.train(model, steps=1)
            done.append(stream.time - before)
        return done


@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_gathers_may_take_all_their_memory_on_the_stream_of_compute() -> None:
    (done,) = run_ranks(1, work_of_the_stream_of_gathers, group=False, timeout_seconds=600)
    assert done[0] == 0 < done[1]
