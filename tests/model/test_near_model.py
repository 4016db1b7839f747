"""Near tiers do what a model of them says, along every schedule within a depth.

Method: `near_model` says in plain data what jobs that start, save, go back and lose their host are
told, and which near state counts afterwards; `near_driving` makes the same calls with the real
code, on a folder and a store in memory. Whatever befalls a job in the middle of a call is in
`tests/near/test_near_schedules.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt.near.records import NearRecord
from ckpt.near.recovery import NearCandidate
from ckpt.near.saving import NearSaves
from ckpt.near.tier import Tier
from ckpt.near.training import NearTraining
from storage import Store
from tests.conftest import Scale
from tests.model.near_driving import explore
from tests.results import Counted

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(autouse=True, params=[True, False], ids=["memory", "disk"])
def is_in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """What the tier counts as."""
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: request.param)
    logging.disable(logging.WARNING)
    yield bool(request.param)
    logging.disable(logging.NOTSET)


def test_all_schedules_of_a_few_actions(tmp_path: Path, scale: Scale, counted: Counted) -> None:
    report = explore(tmp_path, scale.count(3, 6))
    counted(worlds=report.worlds, actions=report.actions)
    assert not report.problems, "\n".join(report.problems)
    assert report.worlds > 10


_candidates = NearTraining.candidates


def _of_two_epochs(
    self: NearTraining, store: Store, root: str, epoch: int
) -> Sequence[NearCandidate]:
    return _candidates(self, store, root, epoch) or _candidates(self, store, root, epoch - 1)


def _not_recorded(self: NearSaves, chosen: Any, record: NearRecord | None, number: int) -> None:
    self._safe = "" if record is None else record.head.attempt


def _nothing(*args: Any, **options: Any) -> None:
    return


# What is exchanged for what, and within how many actions that is found.
BUGS: dict[str, tuple[object, str, object, int]] = {
    "a near state of the epoch before counts": (NearTraining, "candidates", _of_two_epochs, 5),
    "a superseded job goes on saving": (Tier, "refuse_fenced", _nothing, 4),
    "a restored state is not recorded": (NearSaves, "restored", _not_recorded, 3),
    "going back forgets nothing": (Tier, "forget", _nothing, 5),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BUGS)
def test_the_near_search_finds_it(
    name: str, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, attribute, bug, depth = BUGS[name]
    monkeypatch.setattr(where, attribute, bug)
    report = explore(tmp_path, depth)
    counted(bugs=1, seen=int(bool(report.problems)), actions=report.actions)
    print(f"{name}: {report.actions} actions: {report.problems}")
    assert report.problems
