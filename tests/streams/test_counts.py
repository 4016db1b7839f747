"""What a step launches, waits for and keeps on an accelerator: no more than torch's, at any size.

Method: `benchmarks.device_counts` on the simulated device, where counts are exact. torch's class of
the same surface is counted beside ours in the same run, so nothing is written down here that a
version of torch may change.
"""

from __future__ import annotations

import functools

import pytest

from benchmarks.device_counts import UNITS, Counts, counts_of
from tests.conftest import Scale
from tests.ranks import run_ranks

FEW, MANY = 8, 1024
ALONE = ("fully", True, 1)
# Surface, low precision, ranks.
Case = tuple[str, bool, int]
CASES: tuple[Case, ...] = (("fully", False, FEW), ("flat", False, FEW), ("fully", False, MANY))
MORE: tuple[Case, ...] = (
    ("flat", False, MANY), ("fully", True, FEW), ("flat", True, FEW), ("fully", True, 64),
)  # fmt: skip


def count(cases: tuple[Case, ...]) -> list[tuple[Counts, Counts]]:
    def of(who: str, case: Case) -> Counts:
        surface, low, ranks = case
        return counts_of(who, surface, ranks, low=low)

    return [(of("ours", case), of("torch", case)) for case in cases]


@functools.cache
def counted(soak: bool) -> dict[Case, tuple[Counts, Counts]]:
    cases = (*CASES, ALONE, *(MORE * soak))
    (pairs,) = run_ranks(1, count, cases, group=False, timeout_seconds=600)
    return dict(zip(cases, pairs, strict=True))


def of_several(scale: Scale) -> list[tuple[Case, tuple[Counts, Counts]]]:
    return [(case, counts) for case, counts in counted(scale.soak).items() if case != ALONE]


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_one_rank_takes_no_more_than_torchs(scale: Scale) -> None:
    ours, torchs = counted(scale.soak)[ALONE]
    assert 0 < ours.counted["kernels"] <= torchs.counted["kernels"], (ours, torchs)
    assert ours.counted["copies"] <= torchs.counted["copies"], (ours, torchs)
    assert ours.live_mib <= torchs.live_mib, (ours, torchs)
    assert ours.reserved_mib <= torchs.reserved_mib, (ours, torchs)


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_step_takes_no_more_than_torchs(scale: Scale) -> None:
    for case, (ours, torchs) in of_several(scale):
        # torch lets the backend average; ours divide apart, so that every backend gives one result.
        divisions = UNITS if case[0] == "fully" else 0
        assert torchs.counted["kernels"] > 0, case
        assert 0 < ours.counted["kernels"] <= torchs.counted["kernels"] + divisions, (case, ours)
        assert 0 < ours.counted["collectives"] <= torchs.counted["collectives"], case
        assert ours.counted["copies"] <= torchs.counted["copies"], (case, ours, torchs)
        assert ours.live_mib <= torchs.live_mib, (case, ours, torchs)
        assert ours.reserved_mib <= torchs.reserved_mib, (case, ours, torchs)


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_clipping_by_the_norm_takes_no_more_than_torchs(scale: Scale) -> None:
    for case, (ours, torchs) in of_several(scale):
        assert 0 < ours.clipping["kernels"] <= torchs.clipping["kernels"], (case, ours, torchs)
        assert ours.clipping["copies"] <= torchs.clipping["copies"], (case, ours, torchs)
        assert ours.clipping["collectives"] == torchs.clipping["collectives"] == 1, case


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_the_host_never_waits(scale: Scale) -> None:
    for case, (ours, _) in counted(scale.soak).items():
        assert ours.counted["host waits"] == ours.clipping["host waits"] == 0, case


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_what_a_step_launches_does_not_grow_with_the_ranks(scale: Scale) -> None:
    counts = counted(scale.soak)
    few, many = (counts["fully", False, ranks][0] for ranks in (FEW, MANY))
    assert few.counted == many.counted
