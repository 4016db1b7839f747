"""Whatever dies, is lost or damaged: the newest state comes back that the hosts left can prove.

Method: 1,000 random schedules (a seeded sample of them in `make test`) of up to two jobs over eight
simulated hosts: processes, hosts and whole jobs are killed or stopped at any operation in a tier or
in the durable store, hosts are full, lost, damaged, or come back with old files, and other numbers
of ranks start on other hosts. An independent model judges the folders that are left: what comes
back is the newest that they prove, its bytes are those of its step, what was acknowledged is there.
"""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from tests.conftest import SEED_DEFAULT, Scale
from tests.near.schedules import run_schedule, schedule_of
from tests.results import Counted

pytestmark = pytest.mark.timeout(7200)


@pytest.mark.parametrize("kind", ["alone", "copies", "parity"])
def test_random_schedules_restore_the_newest_that_is_provable(
    kind: str,
    scale: Scale,
    pytestconfig: pytest.Config,
    caplog: pytest.LogCaptureFixture,
    counted: Counted,
) -> None:
    seed, counts = pytestconfig.getoption("seed") or SEED_DEFAULT, Counter[str]()
    caplog.set_level(logging.CRITICAL)  # every kill is logged, which takes longer than the schedule
    for number in range(scale.count(40, 1000)):
        has = {"has_copies": kind == "copies", "has_parity": kind == "parity"}
        happened = run_schedule(schedule_of(f"{seed}:{number}", **has))
        counts += happened
        counted(schedules=1)
        counted.update(happened)
    # That schedules happen as they are meant to: a search that finds nothing says nothing.
    wanted = ("fault rank", "fault host", "fault all", "fault pause", "near saved", "promise due")
    wanted += ("restored near", "restored durable", "lost", "damaged")
    if kind != "alone":
        wanted += ("promise due although files are lost",)
    if kind == "parity":
        wanted += ("only parity has all of it",)
    assert all(counts[name] for name in wanted), counts
