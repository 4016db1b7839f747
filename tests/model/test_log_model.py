"""The real sessions do what a model of the log says, along every schedule within bounds.

Method: `log_model` says in plain data what each call of a job or command has to report and what is
in the root afterwards; `driving` makes the same calls with the real code on a memory store and
compares what they report, what a new reader sees, which files are there, and what each session
believes; `exploring` makes all schedules, and random ones.
"""

from __future__ import annotations

import random

import pytest

from ckpt.commit import live as live_module
from tests.conftest import Scale
from tests.model.exploring import WALKS, Scope, explore, played, walk
from tests.results import Counted

pytestmark = pytest.mark.timeout(3600)

# How often each kind of action may happen, and how many actions a schedule has: everyday, in full.
# With 12 there are no others: the bounds end the search before that.
SCOPES = {
    "two jobs and lost answers": (Scope(commands=0, clean_ups=2, unknown=2), 4, 12),
    "a command beside two jobs": (Scope(commands=2, unknown=0), 4, 7),
    "processes that are killed": (Scope(unknown=0, kills=2), 3, 6),
    "a save that stalls": (Scope(stalls=1, unknown=0, commands=1), 4, 12),
    "backups": (Scope(commands=0, clean_ups=1, unknown=0, exchanges=2), 4, 12),
    "late records in a backup": (
        Scope(commands=0, clean_ups=0, unknown=0, twice=2, exchanges=1),
        3,
        6,
    ),
    "everything once": (Scope(3, 3, 1, 1, 1, 1, 1, 1, 1), 3, 5),
}


@pytest.mark.parametrize("name", SCOPES)
def test_all_schedules_of_a_few_actions(name: str, scale: Scale, counted: Counted) -> None:
    scope, sample, full = SCOPES[name]
    report = explore(scope, scale.count(sample, full))
    counted(worlds=report.worlds, actions=report.steps)
    print(f"{name}: all schedules of up to {report.depth} actions: {report}")
    assert not report.problems, "\n".join(report.problems)
    assert report.worlds > 20


def test_random_schedules(rng: random.Random, scale: Scale, counted: Counted) -> None:
    for seed in (rng.getrandbits(32) for _ in range(scale.count(15, 2_000))):
        report = walk(WALKS, 40, random.Random(seed))
        counted(schedules=1, actions=report.steps)
        assert not report.problems, f"seed {seed}:\n" + "\n".join(report.problems)


def test_random_schedules_with_a_folded_live_set(
    rng: random.Random, scale: Scale, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every record is folded into segments. No backups: these take segments away, too."""
    for name, value in {"RECORD_NBYTES": 500, "LISTED_MIN": 1, "MERGE_RATIO": 2}.items():
        monkeypatch.setattr(live_module, name, value)
    for seed in (rng.getrandbits(32) for _ in range(scale.count(5, 1_000))):
        report = walk(WALKS._replace(exchanges=0), 40, random.Random(seed))
        counted(schedules=1, actions=report.steps)
        assert not report.problems, f"seed {seed}:\n" + "\n".join(report.problems)


def test_a_late_copy_of_a_commit_is_nothing_to_build_on() -> None:
    """The job's own last record is there as it was, in a restored root, on nothing: what it saves
    next would count for nobody.
    """
    schedule = [
        "claim A",
        "back_up",
        "save A",
        "save A twice",
        "restore",
        "arrive 0",
        "save A",
        "save A",
    ]
    assert not played(*schedule)
    # Another job has filled the hole.
    assert not played(*schedule[:5], "claim B", *schedule[5:], "save B")
