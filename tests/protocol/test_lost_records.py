"""A root that has lost objects ends in an error with a command, which brings all of it back.

Method: a root of twelve records (two sessions, retired, pinned and shared checkpoints, a live set
in segments) is saved once. For each loss, a copy of it in memory without those objects is opened as
restore, load, ls and a claim open it: the result is that of the whole root, or an error or a
warning that names `ckpt mend`. Then that command runs, and every checkpoint is loaded.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.commit import live as live_module
from ckpt.commit.appender import Sources
from ckpt.commit.log import FORMAT_KEY, Log
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import LOG_PREFIX, MANIFEST_NAME, record_key
from ckpt.commit.session import Session
from ckpt.errors import CheckpointError
from ckpt.operate import mend
from ckpt.service.restore import _newest_first
from storage.errors import StorageError
from storage.memory import MemoryBucket, MemoryStore
from storage.store import Store

RECORDS = 12
LIVE = (2, 4, 5, 6, 7)  # steps, in the order of their commits

Objects = dict[str, bytes]


def state_of_step(step: int) -> dict[str, torch.Tensor]:
    return {"same": torch.ones(5000), "own": torch.arange(3) + step}


def blank() -> dict[str, torch.Tensor]:
    return {"same": torch.zeros(5000), "own": torch.zeros(3, dtype=torch.int64)}


@pytest.fixture(scope="module")
def whole() -> Objects:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RECORD_NBYTES": 600, "LISTED_MIN": 2, "MERGE_RATIO": 1}.items():
            patch.setattr(live_module, name, value)
        store = MemoryStore(bucket := MemoryBucket(), name="whole")
        maintenance = None
        for step in range(1, 8):
            if step == 5:
                ckpt.forget(store)
            ckpt.save(state_of_step(step), store, step=step, dedup=step in (6, 7))
            maintenance = maintenance or Maintenance.open(store)
            attempts = {entry.step: entry.attempt for entry in maintenance.state().live}
            if step == 3:
                maintenance.retire(attempts[1])
            if step == 4:
                maintenance.pin(attempts[2])
            if step == 5:
                maintenance.retire(attempts[3])
        ckpt.forget(store)
    objects = {key: store.get(key) for key in bucket.keys_from("", "")}
    assert sum(key.startswith(f"{LOG_PREFIX}0") for key in objects) == RECORDS
    return objects


def without(objects: Objects, *lost: str) -> Store:
    bucket = MemoryBucket()
    for key, data in objects.items():
        if not key.startswith(lost) or not lost:
            bucket.add(key, data)
    return MemoryStore(bucket, name="root")


def losable(objects: Objects) -> list[str]:
    """FORMAT, all records and segments, and the MANIFESTs."""
    ends = (FORMAT_KEY, MANIFEST_NAME)
    return [key for key in objects if key.startswith(LOG_PREFIX) or key.endswith(ends)]


def claimed(store: Store) -> list[int]:
    """What a job finds that saves there; what it deletes, it deletes."""
    no_pause = Sources(pause=lambda seconds: None)
    session = Session.claim(store, sources=replace(no_pause, tries_max=2))
    session.sweep()
    return [entry.step for entry in session.state().live]


OPENS: dict[str, Callable[[Store], object]] = {
    "restore": lambda store: [row[0] for row in _newest_first(store, None, "").entries][:1],
    "load": lambda store: ckpt.load(blank(), store).step,
    "ls": lambda store: [entry.step for entry in ckpt.list_steps(store)],
}


@pytest.fixture(autouse=True)
def _later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers come an hour after the last save, so that none may be under way."""
    monkeypatch.setattr("ckpt.commit.locate.UNDER_WAY_SECONDS", -3600)


def assert_reported(objects: Objects, lost: tuple[str, ...], log: pytest.LogCaptureFixture) -> None:
    expected = {"restore": [7], "load": 7, "ls": list(LIVE)}
    for name, opened in OPENS.items():
        log.clear()
        store = without(objects, *lost)
        try:
            seen = opened(store)
        except CheckpointError as error:
            assert "ckpt mend" in str(error), (name, lost, error)
            continue
        if name == "ls" and Log(store).state().uncommitted:
            continue  # the command prints it
        assert seen == expected[name] or "ckpt mend" in log.text, (name, lost, seen)


def assert_all_is_back(store: Store, lost: tuple[str, ...]) -> None:
    before = {key: store.get(key) for key in _keys(store)}
    mend(store)
    assert {key: store.get(key) for key in before} == before, "nothing is changed or deleted"
    assert_loads(store, lost)
    count = len(_keys(store))
    report = mend(store)
    assert len(_keys(store)) == count, f"{lost}: there is nothing to do a second time"
    assert not report.brought_back and not report.lost, (lost, report)
    assert claimed(store) == list(LIVE), lost


def assert_loads(store: Store, lost: tuple[str, ...]) -> None:
    assert [entry.step for entry in ckpt.list_steps(store)] == list(LIVE), lost
    keys = _keys(store)
    assert sum(key.endswith(MANIFEST_NAME) for key in keys) == len(LIVE)
    # Nothing else is lost; of pairs, one load is enough.
    for step in (None, *LIVE) if len(lost) == 1 else (LIVE[len(keys) % 5],):
        state = blank()
        assert ckpt.load(state, store, step=step).step == (step or 7), lost
        assert torch.equal(state["own"], state_of_step(step or 7)["own"])
    assert _newest_first(store, None, "").entries[0][0] == 7


def _keys(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


def losses(objects: Objects, count: int) -> Iterator[tuple[str, ...]]:
    yield from combinations(losable(objects), count)


@pytest.mark.parametrize("count", [1, 2])
def test_every_loss_is_reported_and_mended(
    whole: Objects, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for lost in losses(whole, count):
        assert_reported(whole, lost, caplog)
        assert_all_is_back(without(whole, *lost), lost)


@pytest.mark.parametrize(
    "lost",
    [
        (LOG_PREFIX,),
        (LOG_PREFIX, FORMAT_KEY),
        tuple(record_key(slot) for slot in range(6)),
        tuple(record_key(slot) for slot in range(6, 12)),
        tuple(record_key(slot) for slot in range(1, 12)),
        (f"{LOG_PREFIX}live/", record_key(11)),
    ],
    ids=["log", "log and FORMAT", "the first half", "the second half", "all but one", "segments"],
)
def test_larger_losses_are_reported_and_mended(
    whole: Objects, lost: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert_reported(whole, lost, caplog)
    assert_all_is_back(without(whole, *lost), lost)


@pytest.mark.parametrize("count", [1, 2])
def test_no_job_deletes_a_checkpoint_after_a_loss(whole: Objects, count: int) -> None:
    """It is refused, or what may have lost its COMMIT stays until a later job has saved."""
    manifests = {key for key in whole if key.endswith(MANIFEST_NAME)}
    for lost in [*losses(whole, count), (LOG_PREFIX,)]:
        store = without(whole, *lost)
        for _ in range(2):
            try:
                claimed(store)
            except CheckpointError as error:
                assert "ckpt mend" in str(error), lost
        gone = {key for key in manifests if not key.startswith(lost)} - set(_keys(store))
        assert not gone, (lost, gone)


def test_a_lost_newest_commit_comes_back_after_a_claim(
    whole: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    store = without(whole, record_key(RECORDS - 1))
    caplog.set_level(logging.WARNING)
    assert claimed(store) == list(LIVE[:-1])
    assert "step 7" in caplog.text and "ckpt mend" in caplog.text
    assert [entry.step for entry in mend(store).brought_back] == [7]
    assert_loads(store, ())


def test_a_dead_save_goes_once_a_later_job_has_saved(whole: Objects) -> None:
    store = without(whole, record_key(RECORDS - 1))
    (remain,) = [key for key in whole if key.startswith("steps/00000007") and "MANIFEST" in key]
    ckpt.save(state_of_step(8), store, step=8)
    assert remain in _keys(store), "its own job's claim leaves it"
    ckpt.forget(store)
    assert claimed(store) == [*LIVE[:-1], 8]
    assert remain not in _keys(store)


def test_a_retired_checkpoint_is_no_lost_one(whole: Objects) -> None:
    """A job that was killed between a RETIRE and the deletion leaves nothing to the next one."""
    store = without(whole)
    maintenance = Maintenance.open(store)
    maintenance.retire(maintenance.state().live[-1].attempt, delete=False)
    claimed(store)
    assert not [key for key in _keys(store) if key.startswith("steps/00000007")]


def test_a_hole_far_back_loses_nothing() -> None:
    """Newer records have all that older ones say; listings show the newest behind any hole."""
    store = MemoryStore(bucket := MemoryBucket(), name="far")
    ckpt.save(state_of_step(1), store, step=1)
    maintenance = Maintenance.open(store)
    attempt = maintenance.state().live[0].attempt
    for _ in range(1300):
        maintenance.pin(attempt)
        maintenance.unpin(attempt)
    ckpt.save(state_of_step(2), store, step=2)
    ckpt.forget(store)
    objects = {key: store.get(key) for key in bucket.keys_from("", "")}
    for slots in ((0,), (1,), range(2, 1500), (999, 1000, 1001), range(1600)):
        for part_nbytes in (1, 5 << 20):  # as a disk is read, and as a remote store is
            damaged = without(objects, *map(record_key, slots))
            damaged.part_nbytes_min = part_nbytes
            try:
                assert ckpt.load(blank(), damaged).step == 2, slots
                assert [entry.step for entry in ckpt.list_steps(damaged)] == [1, 2], slots
            except CheckpointError as error:
                assert "ckpt mend" in str(error), slots
            mend(damaged)
            assert [entry.step for entry in ckpt.list_steps(damaged)] == [1, 2]


@pytest.mark.parametrize(
    ("lost", "kept"), [((LOG_PREFIX,), "2"), (tuple(map(record_key, range(7, 12))), "5")]
)
def test_one_checkpoint_tells_of_a_lost_log(
    whole: Objects, lost: tuple[str, ...], kept: str
) -> None:
    """All of it, or all that the session has written which saved this checkpoint."""
    gone = (*lost, *(f"steps/0000000{step}" for step in LIVE if f"{step}" != kept))
    with pytest.raises(CheckpointError, match="ckpt mend"):
        ckpt.list_steps(without(whole, *gone))


def test_what_mend_could_not_bring_back_is_refused_no_longer(whole: Objects) -> None:
    """Two MANIFESTs whose COMMIT and data are lost: nobody has to do more than to mend."""
    lost: tuple[str, ...] = (record_key(10), record_key(11))
    data = tuple(key for key in whole if key.startswith(("steps/00000006", "steps/00000007")))
    lost += tuple(key for key in data if not key.endswith(MANIFEST_NAME))
    store = without(whole, *lost)
    with pytest.raises(CheckpointError, match="ckpt mend"):
        ckpt.list_steps(store)
    mend(store)
    assert [entry.step for entry in ckpt.list_steps(store)] == [2, 4, 5]
    assert claimed(store) == [2, 4, 5]
    assert not any(key in _keys(store) for key in data), "the next job deletes what is left"


@pytest.mark.parametrize("options", [{"compression": "zstd"}, {"encryption_key": bytes(range(32))}])
def test_an_encoded_root_gets_its_own_format_back(options: dict[str, Any], tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    how: Any = {"storage_options": options}
    for step in (1, 2):
        ckpt.save(state_of_step(step), url, step=step, **how)
    ckpt.forget(url)
    before = (tmp_path / "run" / FORMAT_KEY).read_bytes()
    shutil.rmtree(tmp_path / "run" / "log")
    (tmp_path / "run" / FORMAT_KEY).unlink()
    with pytest.raises((CheckpointError, StorageError)):
        mend(url)  # without the key or the option: nothing is written
    assert not (tmp_path / "run" / FORMAT_KEY).exists()
    mend(url, **how)
    assert (tmp_path / "run" / FORMAT_KEY).read_bytes() == before
    assert ckpt.load(blank(), url, **how).step == 2


def test_a_dry_run_writes_nothing(whole: Objects, capsys: pytest.CaptureFixture[str]) -> None:
    store = without(whole, LOG_PREFIX, FORMAT_KEY)
    before = _keys(store)
    report = mend(store, dry_run=True)
    assert [entry.step for entry in report.brought_back] == list(LIVE) and report.format_written
    assert _keys(store) == before


def test_trainings_stay_apart_when_a_lost_log_is_mended(tmp_path: Path) -> None:
    """A second job that began anew at step 1 keeps a line of its own; one that went on does not."""
    url = str(tmp_path / "run")
    for begins_anew, steps in ((False, (2, 4)), (True, (1, 3)), (False, (5,))):
        state = {"step": torch.tensor(0)}
        with ckpt.Checkpointer(state, url, save=ckpt.EverySteps(1), begin_anew=begins_anew) as job:
            if not begins_anew:
                job.restore()
            for step in steps:
                state["step"] = torch.tensor(step)
                job.step(step)
                job.wait()
        ckpt.forget(url)
    shutil.rmtree(tmp_path / "run" / "log")
    mend(url)
    lines = [(info.step, info.line) for info in ckpt.list_steps(url)]
    assert lines == [(2, 0), (4, 0), (1, 1), (3, 1), (5, 1)]
