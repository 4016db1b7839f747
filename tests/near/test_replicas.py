"""Copies of near checkpoints at other hosts: what is sent, and what comes back without a host.

Method: trainings whose ranks are threads and whose hosts are folders, with real servers on the
loopback; a host is lost when its folder is removed. What comes back is compared bit for bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt.near.value import Near
from ckpt.service.events import NearFailed, NearSaved
from ckpt.service.policies import EverySteps
from storage.memory import MemoryStore
from tests.near.test_near_training import data_files, flip_a_byte, folders, origins
from tests.near.training import Life
from tests.thread_ranks import RanksFailed


@pytest.fixture(autouse=True, params=[True, False], ids=["memory", "disk"])
def in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: request.param)


def life(store: MemoryStore, hosts: list[Path], replicas: int = 1, **how: object) -> Life:
    """A job whose near checkpoints have copies."""

    def near(rank: int) -> Near:
        return Near(hosts[rank] / "near", every=EverySteps(2), replicas=replicas)

    return Life(len(hosts), store, hosts, near=near, **how)  # type: ignore[arg-type]


def bounded(hosts: list[Path], bytes_max: int, **kept: int) -> Life:
    """A job whose tiers have room for so many bytes."""

    def near(rank: int) -> Near:
        return Near(hosts[rank], bytes_max=bytes_max, **kept)  # type: ignore[arg-type]

    return Life(len(hosts), MemoryStore(), hosts, near=near)


def refusal(job: Life) -> str:
    """Why a job does not begin, on the first of its ranks."""
    with pytest.raises(RanksFailed) as failed:
        job.run(1)
    return next(str(error) for error in failed.value.errors.values())


def test_a_lost_host_costs_no_near_checkpoint(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0, 1, 1)
    first = life(store, hosts)
    first.run(5)
    for events in first.events.values():
        assert [e.report.step for e in events if isinstance(e, NearSaved)] == [2, 4]
        assert not [e for e in events if isinstance(e, NearFailed)]
    shutil.rmtree(hosts[2])
    again = Life(4, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 4)}
    # The hosts that are left are enough, and so is another world.
    shutil.rmtree(hosts[2])
    fewer = Life(3, store, folders(tmp_path, 0, 0, 0))
    fewer.run(0)
    assert origins(fewer) == {("near", 4)}
    assert {r.nbytes_of_other_hosts for r in fewer.reports.values() if r} == {0}


@pytest.mark.parametrize("lost", [(0, 1), (1, 2), (2, 3), (0, 3)])
def test_two_hosts_are_lost_with_two_replicas(tmp_path: Path, lost: tuple[int, ...]) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2, 3)
    life(store, hosts, 2).run(2)
    for host in lost:
        shutil.rmtree(hosts[host])
    again = Life(4, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}


def test_each_file_lies_on_as_many_hosts_and_old_copies_go(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)
    life(store, hosts, 1).run(9)
    lying = [(path.parent.name[:8], path.name[:9]) for host in hosts for path in data_files(host)]
    assert len(lying) == 2 * 2 * 3 and len(set(lying)) == 2 * 3
    assert {step for step, _ in lying} == {"00000006", "00000008"}
    # A job without copies drops those of the job before, but for what it restored.
    Life(3, store, hosts).run(5)
    lying = [(path.parent.name[:8], path.name[:9]) for host in hosts for path in data_files(host)]
    assert len(lying) == 2 * 3


@pytest.mark.parametrize(
    ("damaged", "step"),
    [
        ([(0, 0)], 4),
        ([(0, 0), (0, 1)], 4),
        ([(0, 0), (1, 1)], 4),
        ([(0, 1), (1, 0)], 4),
        ([(0, 0), (1, 0)], 2),
    ],
)
def test_a_damaged_copy_is_not_used_and_another_is(
    tmp_path: Path, damaged: list[tuple[int, int]], step: int
) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    life(store, hosts).run(4)
    for host, rank in damaged:
        paths = {path.name[:9]: path for path in data_files(hosts[host])}  # of the newest step
        flip_a_byte(paths[f"rank{rank:05d}"])
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("near", step)}
    for report in again.reports.values():
        assert report is not None and [one.step for one in report.skipped] == [4][: step == 2]


def test_too_few_hosts_are_refused_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        life(MemoryStore(), folders(tmp_path, 0, 0, 1), 2).run(1)
    assert len(failed.value.errors) == 3
    for error in failed.value.errors.values():
        assert isinstance(error, ValueError)
        assert "takes 3 hosts, and this job has 2" in str(error)


@pytest.mark.parametrize("origin", ["near", "durable"])
def test_who_goes_on_with_fewer_hosts_makes_as_many_copies_as_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, origin: str
) -> None:
    """Else a job that lost a host would be restored, and refused at its first step."""
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)
    life(store, hosts, 2, save=EverySteps(3)).run(4)
    for host in hosts[1:] if origin == "near" else hosts:
        shutil.rmtree(host)
    again = life(store, folders(tmp_path, 0, 0, 1), 2)
    again.run(4)
    assert origins(again) == {(origin, 4 if origin == "near" else 3)}
    assert "have 1 copies instead of 2" in caplog.text
    for events in again.events.values():
        assert [e for e in events if isinstance(e, NearSaved)]
        assert not [e for e in events if isinstance(e, NearFailed)]
    shutil.rmtree(tmp_path / "host1", ignore_errors=True)
    alone = life(store, folders(tmp_path, 0, 0, 0), 2)
    alone.run(2)
    assert {origin for origin, _ in origins(alone)} == {"near"}
    assert "have 0 copies instead of 2" in caplog.text


def test_the_room_check_counts_copies(tmp_path: Path) -> None:
    hosts = folders(tmp_path, 0, 1)
    need = int(refusal(bounded(hosts, 100)).partition(" take ")[2].partition(" MiB")[0])
    bounded(hosts, need << 20).run(1)
    text = refusal(bounded(hosts, (2 * need - 1) << 20, replicas=1))
    assert f"and of copies of {need // 2} MiB for other hosts, take {2 * need} MiB" in text
    bounded(hosts, 2 * need << 20, replicas=1).run(1)
