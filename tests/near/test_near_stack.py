"""Several near tiers of one training: each with a period of its own, the newest of all restored.

Method: as in `test_near_training`, with two folders for each host, one of which can be lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.near.tier import tiers_in
from ckpt.near.value import Near
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.events import NearFailed, NearSaved
from ckpt.service.policies import EverySteps, SavePolicy
from ckpt.tools.near_tiers import tier_views, work_at_risk
from ckpt.world.base import World
from storage import Store
from storage.local import LocalStore
from storage.memory import MemoryStore
from tests.near.test_near_training import flip_a_byte
from tests.near.training import NEVER, Life


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders called "fast" count as memory, the others lie on a disk."""
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: "/fast/" in path)


def stacked(store: Store, hosts: Sequence[Path], save: SavePolicy = NEVER) -> Life:
    """A job with a fast tier every 2 steps and a slow one every 3."""

    def near(rank: int) -> Any:
        fast, slow = hosts[rank] / "fast", hosts[rank] / "slow"
        return [Near(fast, every=EverySteps(2)), Near(slow, every=EverySteps(3))]

    return Life(len(hosts), store, hosts, near=near, save=save)


def restored(life: Life) -> tuple[str, int]:
    """What all ranks have restored."""
    life.run(0)
    (one,) = {(report.origin, report.step) for report in life.reports.values() if report}
    return one


def steps_in(folder: Path) -> list[int]:
    (tier,) = tiers_in(folder)
    steps = sorted(record.head.step for record in tier.records())
    tier.close()
    return steps


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    return [tmp_path / "host0", tmp_path / "host1"]


def lose(hosts: Sequence[Path], name: str) -> None:
    for host in hosts:
        shutil.rmtree(host / name)


def test_each_tier_saves_at_its_period_and_the_newest_is_restored(hosts: list[Path]) -> None:
    store = MemoryStore()
    life = stacked(store, hosts)
    life.run(10)
    for events in life.events.values():
        assert not [event for event in events if isinstance(event, NearFailed)]
        saved = [event.report.step for event in events if isinstance(event, NearSaved)]
        assert sorted(saved) == [2, 3, 4, 6, 6, 8, 9, 10]
    for host in hosts:
        assert (steps_in(host / "fast"), steps_in(host / "slow")) == ([8, 10], [6, 9])
    assert restored(stacked(store, hosts)) == ("near", 10)


def test_of_one_step_the_first_tier_is_read(hosts: list[Path]) -> None:
    store = MemoryStore()
    stacked(store, hosts).run(6)
    # The slow tier's record has the higher number, and its file is damaged: nobody looks there.
    for host in hosts:
        flip_a_byte(sorted(host.glob("slow/*/steps/00000006*/*.safetensors"))[0])
    life = stacked(store, hosts)
    assert restored(life) == ("near", 6)
    assert all(report is not None and not report.skipped for report in life.reports.values())


def test_a_lost_tier_leaves_the_other_one(hosts: list[Path]) -> None:
    store = MemoryStore()
    stacked(store, hosts).run(10)
    lose(hosts, "fast")
    life = stacked(store, hosts)
    assert restored(life) == ("near", 9)


def test_a_tier_keeps_an_older_state_when_another_one_was_restored(hosts: list[Path]) -> None:
    store = MemoryStore()
    stacked(store, hosts).run(10)
    for _ in range(2):  # a job that has restored and saved nothing has both under its own epoch
        assert restored(stacked(store, hosts)) == ("near", 10)
    lose(hosts, "fast")
    assert restored(stacked(store, hosts)) == ("near", 9)


def test_an_older_state_keeps_its_place_among_durable_ones(hosts: list[Path]) -> None:
    store = MemoryStore()
    stacked(store, hosts, save=EverySteps(5)).run(6)  # durable 5, fast 6 and 4, slow 6 and 3
    for host in hosts:
        for path in host.glob("slow/*/steps/00000006*/*.safetensors"):
            path.unlink()
    assert restored(stacked(store, hosts)) == ("near", 6)
    assert [set(steps_in(host / "slow")) for host in hosts] == [{3}, {3}]
    lose(hosts, "fast")
    assert restored(stacked(store, hosts)) == ("durable", 5)


def test_what_is_newer_than_the_restored_state_counts_in_no_tier(hosts: list[Path]) -> None:
    store = MemoryStore()

    def back(service: Checkpointer, state: Any, world: World) -> int:
        service.wait()
        world.gather("saved", b"")
        if world.rank == 0:  # the slow tier's step 9 is damaged, and the fast one's step 10
            for name, step in (("fast", 10), ("slow", 9)):
                flip_a_byte(sorted(hosts[0].glob(f"{name}/*/steps/{step:08d}*/*.safetensors"))[0])
        world.gather("damaged", b"")
        report = service.restore()
        assert report is not None
        return report.step

    assert stacked(store, hosts).run(10, then=back) == [8, 8]
    for host in hosts:
        assert 9 not in steps_in(host / "slow") and 6 in steps_in(host / "slow")
    lose(hosts, "fast")
    assert restored(stacked(store, hosts)) == ("near", 6)


def test_rescue_takes_the_newest_of_all_tiers(tmp_path: Path, hosts: list[Path]) -> None:
    root = str(tmp_path / "root")
    stacked(LocalStore(root), hosts, save=EverySteps(5)).run(9)  # fast 8, slow 9
    folders = [str(host / name) for host in hosts for name in ("fast", "slow")]
    assert main(["rescue", *folders, root]) == 0
    assert ckpt.list_steps(root)[-1].step == 9


def test_work_at_risk_is_since_the_newest_of_all_tiers(hosts: list[Path]) -> None:
    stacked(MemoryStore(), hosts).run(10)
    views = tier_views([str(host / name) for host in hosts for name in ("slow", "fast")])
    risk = work_at_risk(views)
    assert risk is not None and risk.steps == 0


def test_tiers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    state = {"x": torch.ones(2)}
    near: Any
    for near, error, text in (
        ([Near(tmp_path), Near(f"{tmp_path}/a/..")], ValueError, "one directory"),
        ([Near(tmp_path), "/nvme"], TypeError, "a list of such"),
        ("/dev/shm", TypeError, "a list of such"),
        ([Near(tmp_path / str(number)) for number in range(9)], ValueError, "9 tiers"),
    ):
        with pytest.raises(error, match=text):
            Checkpointer(state, MemoryStore(), near=near)
