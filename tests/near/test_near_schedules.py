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


@pytest.mark.parametrize("has_copies", [False, True], ids=["alone", "copies"])
def test_random_schedules_restore_the_newest_that_is_provable(
    has_copies: bool,
    scale: Scale,
    pytestconfig: pytest.Config,
    caplog: pytest.LogCaptureFixture,
    counted: Counted,
) -> None:
    seed, counts = pytestconfig.getoption("seed") or SEED_DEFAULT, Counter[str]()
    caplog.set_level(logging.CRITICAL)  # every kill is logged, which takes longer than the schedule
    for number in range(scale.count(40, 1000)):
        happened = run_schedule(schedule_of(f"{seed}:{number}", has_copies=has_copies))
        counts += happened
        counted(schedules=1)
        counted.update(happened)
    # That schedules happen as they are meant to: a search that finds nothing says nothing.
    wanted = ("fault rank", "fault host", "fault all", "fault pause", "near saved", "promise due")
    wanted += ("restored near", "restored durable", "lost", "damaged")
    if has_copies:
        wanted += ("promise due although files are lost",)
    assert all(counts[name] for name in wanted), counts
