"""A job that was stopped in a near save while another one took over: nothing of it counts.

Method: threads as ranks on hosts that are folders. In the middle of a near save the successor is
started, restores and perhaps trains; then the first job goes on.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import Fenced
from ckpt.near.records import NearRecord
from ckpt.near.saving import NearSaves
from ckpt.near.tier import Tier
from ckpt.service.events import NearSaved
from storage.memory import MemoryStore
from tests.near.test_near_training import folders, origins
from tests.near.training import Life
from tests.thread_ranks import RanksFailed

WAIT_SECONDS = 60.0


def superseded(old: Life) -> None:
    """The first job trains to step 8, is fenced on all ranks, and has two near saves of its own."""
    with pytest.raises(RanksFailed) as failed:
        old.run(8)
    assert {type(error) for error in failed.value.errors.values()} == {Fenced}
    for events in old.events.values():
        assert [e.report.step for e in events if isinstance(e, NearSaved)] == [2, 4]


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_job_that_was_stopped_counts_no_state_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    """All files of step 6 are written by then, and no rank looks at the tiers again."""
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: is_in_memory)
    store, hosts, is_over = MemoryStore(), folders(tmp_path, 0, 1), threading.Event()
    successor, commit = Life(2, store, hosts), NearSaves._commit

    def late(saves: NearSaves, task: Any, header: Any, part: Any) -> Any:
        if header.step == 6 and saves.session.epoch == 1:
            if saves.session.world.rank == 0:
                successor.run(2)
                is_over.set()
            assert is_over.wait(WAIT_SECONDS)
        return commit(saves, task, header, part)

    monkeypatch.setattr(NearSaves, "_commit", late)
    superseded(Life(2, store, hosts))
    assert origins(successor) == {("near", 4)}
    third = Life(2, store, hosts)
    third.run(0)
    assert origins(third) == {("near", 6)}
    attempts = {record.head.attempt for record in Tier(hosts[0] / "near", _root(hosts)).records()}
    assert {attempt[:7] for attempt in attempts} == {"e000002"}


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_state_that_another_job_goes_on_from_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    """The record of step 6 is on one host when the other job starts, which dies after it."""
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: is_in_memory)
    store, hosts, is_over = MemoryStore(), folders(tmp_path, 0, 1), threading.Event()
    successor, put = Life(2, store, hosts), Tier.put

    def late(tier: Tier, record: NearRecord) -> None:
        if (record.head.step, record.head.epoch) == (6, 1):
            if tier.path.startswith(str(hosts[0])):
                put(tier, record)
                successor.run(0)
                is_over.set()
            assert is_over.wait(WAIT_SECONDS)
        put(tier, record)

    monkeypatch.setattr(Tier, "put", late)
    superseded(Life(2, store, hosts))
    assert origins(successor) == {("near", 6)}
    third = Life(2, store, hosts)
    third.run(0)
    assert origins(third) == {("near", 6)}


def _root(hosts: list[Path]) -> str:
    (folder,) = (hosts[0] / "near").iterdir()
    return folder.name
