"""A session belongs to a place: roots that are copied, rolled back or restored under a process.

Method: real roots on disk through the public functions, and sessions over a store that is
exchanged at one operation. What was acknowledged is read back by a job that knows nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.commit.appender import Sources
from ckpt.commit.locate import locate
from ckpt.commit.log import Log
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME, record_key, step_prefix
from ckpt.commit.records import LiveEntry, manifest_digest
from ckpt.commit.session import Session, SessionRegistry, open_session
from ckpt.commit.writer import Commit
from ckpt.errors import CheckpointError, Corrupt, LogDiverged
from ckpt.operate import mend
from storage import open_store
from storage.errors import NoSpaceError
from storage.memory import MemoryBucket, MemoryStore
from storage.store import Store
from storage.wrap import WrappedStore
from tests.thread_ranks import RanksFailed, run_ranks

NO_PAUSE = Sources(pause=lambda seconds: None)


def claim(store: Store) -> Session:
    return Session.claim(store, sources=replace(NO_PAUSE, tries_max=2))


def save(session: Session, step: int) -> LiveEntry:
    attempt, manifest = session.new_attempt(), b"manifest %d" % step
    prefix = step_prefix(step, attempt)
    session.store.put_if_absent(prefix + "rank00000-000.safetensors", b"data")
    session.store.put_if_absent(prefix + MANIFEST_NAME, manifest)
    return session.commit(Commit(attempt, step, len(manifest), manifest_digest(manifest)))


def steps_after_a_new_job(root: Path | str) -> list[int]:
    """What exists once a job that knows nothing has claimed the root and swept it."""
    store = open_store(str(root))
    claim(store).sweep()
    list(Log(store).history())
    for entry in Log(store).state().live:
        store.info(entry.prefix + MANIFEST_NAME)
    return [entry.step for entry in Log(store).state().live]


def files_below(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


def test_a_copy_of_a_root_is_a_place_of_its_own(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    ckpt.save({"x": torch.ones(3)}, str(here), step=1)
    shutil.copytree(here, there)
    for step in (2, 3):
        ckpt.save({"x": torch.ones(3) * step}, str(here), step=step)
    ckpt.save({"x": torch.ones(3) * 10}, str(there), step=10)
    ckpt.save({"x": torch.ones(3) * 4}, str(here), step=4)
    ckpt.save({"x": torch.ones(3) * 11}, str(there), step=11)
    assert steps_after_a_new_job(there) == [1, 10, 11]
    assert steps_after_a_new_job(here) == [1, 2, 3, 4]
    state = {"x": torch.zeros(3)}
    assert ckpt.load(state, str(there), step=10).step == 10
    assert torch.equal(state["x"], torch.ones(3) * 10)


def test_one_place_under_two_names_is_claimed_once(tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(tmp_path / "run")
    for step, name in enumerate(["run", "alias", "run", "alias"]):
        ckpt.save({"x": step}, str(tmp_path / name), step=step)
    assert [event.kind for event in ckpt.history(str(tmp_path / "run"))].count("CLAIM") == 1


@pytest.mark.parametrize("in_background", [False, True])
def test_a_root_that_was_rolled_back_is_refused_until_it_is_forgotten(
    tmp_path: Path, in_background: bool
) -> None:
    root, backup = tmp_path / "run", tmp_path / "backup"

    def save_step(step: int) -> None:
        if in_background:
            ckpt.async_save({"x": torch.ones(3)}, str(root), step=step).result()
        else:
            ckpt.save({"x": torch.ones(3)}, str(root), step=step)

    save_step(1)
    shutil.copytree(root, backup)
    save_step(2)
    save_step(3)
    shutil.rmtree(root)
    shutil.copytree(backup, root)
    before = files_below(root)
    with pytest.raises(LogDiverged, match=r"ckpt\.forget"):
        save_step(4)
    assert files_below(root) == before
    ckpt.forget(str(root))
    save_step(5)
    assert steps_after_a_new_job(root) == [1, 5]


def test_a_notebook_that_removed_its_folder_saves_again_after_one_call(tmp_path: Path) -> None:
    root = tmp_path / "run"
    ckpt.save({"x": 1}, str(root), step=1)
    shutil.rmtree(root)
    with pytest.raises(LogDiverged, match=r"ckpt\.forget"):
        ckpt.save({"x": 2}, str(root), step=2)
    ckpt.forget(str(root))
    ckpt.save({"x": 2}, str(root), step=2)
    assert steps_after_a_new_job(root) == [2]


def test_all_ranks_hear_that_the_log_has_diverged() -> None:
    bucket, registry = MemoryBucket(), SessionRegistry()
    session = registry.session(MemoryStore(bucket))
    save(session, 1)
    bucket.remove(record_key(1))
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, lambda world: open_session(world, MemoryStore(bucket), registry))
    assert {type(error) for error in caught.value.errors.values()} == {LogDiverged}


def _objects(bucket: MemoryBucket) -> dict[str, bytes]:
    return {key: bytes(bucket.find(key)[0]) for key in bucket.keys_from("", "")}  # type: ignore[index]


def _exchange(bucket: MemoryBucket, objects: dict[str, bytes]) -> None:
    for key in bucket.keys_from("", ""):
        bucket.remove(key)
    for key, data in objects.items():
        bucket.add(key, data)


class ExchangedAt(WrappedStore):
    """The objects are exchanged just before the n-th operation on the log."""

    def __init__(self, bucket: MemoryBucket, objects: dict[str, bytes]) -> None:
        super().__init__(MemoryStore(bucket))
        self.bucket, self.objects, self.left = bucket, objects, -1

    def _count(self, key: str) -> None:
        if key.startswith("log/"):
            self.left -= 1
            if self.left == 0:
                _exchange(self.bucket, self.objects)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._count(key)
        super().put_if_absent(key, data)

    def get(self, key: str, byte_range: object = None) -> bytes:
        self._count(key)
        return super().get(key)

    def info(self, key: str) -> object:  # type: ignore[override]
        self._count(key)
        return super().info(key)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_no_moment_of_a_rollback_leads_to_a_lost_commit_that_was_acknowledged(kept: int) -> None:
    """Before each single request of an append: what returns was written after the rollback."""
    refused = 0
    for moment in range(1, 20):
        bucket = MemoryBucket()
        store = ExchangedAt(bucket, {})
        session = claim(store)
        for step in (1, 2):
            save(session, step)
            if step + 1 == kept:
                store.objects = _objects(bucket)
        if kept == 1:
            store.objects = {k: v for k, v in _objects(bucket).items() if "log/" not in k}
            store.objects[record_key(0)] = _objects(bucket)[record_key(0)]
        store.left = moment
        try:
            entry = save(session, 3)
        except CheckpointError as error:
            assert isinstance(error, LogDiverged), error
            refused += 1
            continue
        if store.left > 0:
            assert refused >= (3 if kept < 3 else 0)
            return
        state = Log(MemoryStore(bucket)).state()
        assert state.find(entry.attempt) is not None, moment
        list(Log(MemoryStore(bucket)).history())
    raise AssertionError("an append ends within twenty requests")


def test_a_mark_that_was_sent_into_a_restored_backup_is_not_acknowledged() -> None:
    """The record stands in its slot for a moment, before the root is exchanged."""
    bucket = MemoryBucket()

    class Restoring(WrappedStore):
        is_due = False

        def put_if_absent(self, key: str, data: bytes) -> None:
            super().put_if_absent(key, data)
            if self.is_due:
                _exchange(bucket, backup)

    store = Restoring(MemoryStore(bucket))
    session = claim(store)
    entry = save(session, 1)
    backup = _objects(bucket)
    save(session, 2)
    store.is_due = True
    with pytest.raises(LogDiverged):
        session.pin(entry.attempt)


def test_a_root_without_its_claim_or_its_format_is_not_the_one_that_was_claimed() -> None:
    bucket, older = MemoryBucket(), MemoryBucket()
    job = claim(MemoryStore(older))
    save(job, 1)
    _exchange(bucket, _objects(older))
    for step in range(2, 9):
        save(job, step)
    session = claim(MemoryStore(bucket))
    session.check_root()
    bucket.remove("FORMAT")
    with pytest.raises(Corrupt, match=r"no FORMAT.*ckpt mend"):
        session.check_root()
    _exchange(bucket, _objects(older))  # of the same beginning, longer, and of an older epoch
    with pytest.raises(LogDiverged):
        session.state()


@pytest.mark.parametrize("what", ["sweep", "delete_retired"])
def test_nothing_is_deleted_by_what_another_log_says(what: str) -> None:
    """The restored log does not name what this job has saved since; a sweep would take it."""
    bucket = MemoryBucket()
    save(claim(MemoryStore(bucket)), 1)
    session = claim(MemoryStore(bucket))
    backup = _objects(bucket)
    saved = [save(session, step) for step in (2, 3)]
    session.retire(saved[0].attempt, delete=False)
    _exchange(bucket, {**_objects(bucket), **backup})
    for slot in (3, 4, 5):
        bucket.remove(record_key(slot))
    before = _objects(bucket)
    with pytest.raises(LogDiverged):
        if what == "sweep":
            session.sweep()
        else:
            session.delete_retired(saved[0].attempt, step=2)
    assert _objects(bucket) == before


def test_a_full_disk_is_not_swept_by_what_another_log_says() -> None:
    """The root is exchanged just before the record for which there is no space."""
    bucket = MemoryBucket()
    dead = claim(MemoryStore(bucket))
    save(dead, 1)
    left = step_prefix(7, dead.new_attempt()) + "rank00000-000.safetensors"
    MemoryStore(bucket).put_if_absent(left, b"x")
    backup = _objects(bucket)

    class Full(WrappedStore):
        is_due = False

        def put_if_absent(self, key: str, data: bytes) -> None:
            if not self.is_due:
                return super().put_if_absent(key, data)
            self.is_due = False
            _exchange(bucket, backup)
            claim(MemoryStore(bucket))
            raise NoSpaceError("full")

    store = Full(MemoryStore(bucket))
    session = claim(store)
    entry = save(session, 2)
    save(session, 3)
    store.is_due = True
    with pytest.raises(LogDiverged):
        session.retire(entry.attempt)
    assert left in _objects(bucket)


def test_a_session_of_the_same_epoch_in_a_restored_root_is_not_taken_for_our_own() -> None:
    """Epochs repeat after a rollback, so they do not distinguish the two sessions."""
    bucket = MemoryBucket()
    save(claim(MemoryStore(bucket)), 1)
    backup = _objects(bucket)
    zombie = claim(MemoryStore(bucket))
    save(zombie, 2)
    _exchange(bucket, backup)
    other = claim(MemoryStore(bucket))
    assert other.epoch == zombie.epoch
    kept = [save(other, step) for step in (3, 4, 5)]
    for action in (
        lambda: save(zombie, 6),
        lambda: zombie.retire(kept[0].attempt),
        lambda: zombie.delete_retired(kept[0].attempt, step=3),
        zombie.sweep,
    ):
        with pytest.raises(LogDiverged):
            action()
    assert [entry.step for entry in Log(MemoryStore(bucket)).state().live] == [1, 3, 4, 5]


def _sent_into(backup: dict[str, bytes], bucket: MemoryBucket, *, kill: bool = False) -> Session:
    """A session whose COMMIT of step 3 arrives just after `backup` was restored."""

    class Restoring(WrappedStore):
        is_due = False

        def put_if_absent(self, key: str, data: bytes) -> None:
            if not key.startswith("log/") or not self.is_due:
                return super().put_if_absent(key, data)
            self.is_due = False
            _exchange(bucket, backup)
            super().put_if_absent(key, data)
            if kill:
                raise KeyboardInterrupt

    store = Restoring(MemoryStore(bucket))
    session = claim(store)
    for step in (1, 2):
        save(session, step)
    backup = backup or _objects(bucket)
    store.is_due = True
    with pytest.raises(
        KeyboardInterrupt if kill else LogDiverged, match=None if kill else "forget"
    ):
        save(session, 3)
    return session


def _first_two() -> tuple[MemoryBucket, dict[str, bytes]]:
    """A bucket, and a backup of it with one checkpoint: the log of another job, as long as ours."""
    bucket = MemoryBucket()
    save(claim(MemoryStore(bucket)), 1)
    claim(MemoryStore(bucket))
    backup = _objects(bucket)
    _exchange(bucket, {})
    return bucket, backup


@pytest.mark.parametrize("is_free", [False, True], ids=["on another record", "behind a free slot"])
def test_a_record_sent_into_another_log_is_refused_by_all(is_free: bool) -> None:
    bucket, backup = _first_two()
    if is_free:
        del backup[record_key(2)]
    _sent_into(backup, bucket)  # it acknowledges nothing
    store = MemoryStore(bucket)
    for open_root in (lambda store: Log(store).state(), claim, Maintenance.open):
        with pytest.raises(Corrupt, match="ckpt mend"):
            open_root(store)


def test_a_claim_compares_more_links_than_a_reader() -> None:
    """Several records in a row of another log are a row of their own."""
    bucket = MemoryBucket()
    session = claim(MemoryStore(bucket))
    for step in range(1, 7):
        save(session, step)
    _other_branch(bucket, more=3)
    for kind in (1, 5 << 20):
        store = MemoryStore(bucket)
        store.part_nbytes_min = kind
        assert Log(store).state().slot == 9
        with pytest.raises(Corrupt, match="ckpt mend"):
            claim(store)


def test_mend_takes_out_a_record_of_a_former_log(tmp_path: Path) -> None:
    """A backup came back under a job, and one of its records arrived afterwards."""
    url = _real_root(tmp_path / "run", range(1, 4))
    shutil.copytree(url, backup := tmp_path / "backup")
    _real_root(tmp_path / "run", range(4, 7))
    late = (_slots(url) / f"{5:020d}").read_bytes()
    shutil.rmtree(url)
    shutil.copytree(backup, url)
    (_slots(url) / f"{5:020d}").write_bytes(late)
    with pytest.raises(Corrupt, match="ckpt mend"):
        ckpt.list_steps(url)
    mend(url)
    assert steps_after_a_new_job(url) == [1, 2, 3]
    assert ckpt.load({"x": torch.zeros(3)}, url).step == 3


def test_a_running_job_does_not_append_to_two_logs_in_one() -> None:
    """What the other has saved would be swept."""
    bucket, other = MemoryBucket(), MemoryBucket()
    session = claim(MemoryStore(bucket))
    _exchange(other, _objects(bucket))
    save(session, 1)
    foreign = claim(MemoryStore(other))
    save(foreign, 7)
    for key, data in _objects(other).items():
        bucket.add(key, data)
    with pytest.raises(Corrupt, match="ckpt mend"):
        save(session, 2)


def test_a_job_whose_first_record_is_gone_acknowledges_nothing() -> None:
    """A new process would see none of it, if it looked from the beginning."""
    bucket = MemoryBucket()
    session = claim(MemoryStore(bucket))
    save(session, 1)
    bucket.remove(record_key(0))
    with pytest.raises(Corrupt, match=r"slot 0.*ckpt mend"):
        save(session, 2)


def test_the_memory_of_a_log_never_goes_back() -> None:
    """A thread that comes late with what it has read must not make the process build on that."""
    session = claim(MemoryStore())
    entry, newest = save(session, 1), save(session, 2)
    session.log.saw(session.log.record(entry.slot))
    assert session.log.newest is not None and session.log.newest.slot == newest.slot


def test_a_commit_without_its_manifest_is_taken_back_by_its_own_process() -> None:
    bucket = MemoryBucket()
    _sent_into({}, bucket)
    store = MemoryStore(bucket)
    assert [entry.step for entry in Log(store).state().live] == [1, 2]
    newest = ckpt.history(store)[0]
    assert (newest.kind, newest.is_undone, newest.slot) == ("RETIRE", True, 4)


def test_a_commit_whose_process_was_killed_at_once_is_named_by_loads_and_taken_back_by_the_next_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bucket = MemoryBucket()
    _sent_into({}, bucket, kill=True)
    store = MemoryStore(bucket)
    with pytest.raises(
        Corrupt, match=r"slot 3 .*step 3.*restored right before.*before it is step 2"
    ):
        locate(store)
    session = SessionRegistry().session(store)
    assert "nothing is left of step 3" in caplog.text
    assert [entry.step for entry in Log(store).state().live] == [1, 2]
    assert locate(store).prefix.startswith("steps/00000002")
    save(session, 4)


def test_only_a_commit_of_which_nothing_is_left_is_taken_back() -> None:
    """Data files without a MANIFEST are damage that `ckpt salvage` repairs."""
    bucket = MemoryBucket()
    entry = save(claim(MemoryStore(bucket)), 1)
    bucket.remove(entry.prefix + MANIFEST_NAME)
    SessionRegistry().session(MemoryStore(bucket))
    assert Log(MemoryStore(bucket)).state().live == (entry,)


def _hole(bucket: MemoryBucket) -> None:
    bucket.remove(record_key(4))


def _other_branch(bucket: MemoryBucket, *, more: int = 0) -> None:
    """As when two copies that went different ways are merged: the newest record is the other's."""
    other = MemoryBucket()
    _exchange(other, _objects(bucket))
    for last in (6, 5):
        other.remove(record_key(last))
        for key in other.keys_from(f"steps/{last:08d}", ""):
            other.remove(key)
    session = claim(MemoryStore(other))
    for step in range(99, 100 + more):
        save(session, step)
    bucket.remove(record_key(6))
    for key, data in _objects(other).items():
        bucket.add(key, data)


def _real_root(root: Path, steps: range) -> str:
    for step in steps:
        ckpt.save({"x": torch.ones(3) * step}, str(root), step=step)
    return str(root)


def _slots(root: str) -> Path:
    return Path(root) / "log"


def test_mend_makes_a_log_with_a_hole_one_row_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = _real_root(tmp_path / "run", range(1, 6))
    for slot in (3, 4):
        (_slots(url) / f"{slot:020d}").unlink()
    before = {path.name: path.read_bytes() for path in _slots(url).iterdir()}
    with pytest.raises(Corrupt, match="slot 3"):
        claim(open_store(url))
    assert main(["log", url]) == 1
    assert "slot 3" in (printed := capsys.readouterr().err) or "00003" in printed
    assert main(["mend", url]) == 0
    assert {p.name: p.read_bytes() for p in _slots(url).iterdir() if p.name in before} == before
    assert main(["log", url]) == 0
    assert "(!)" in capsys.readouterr().out
    assert steps_after_a_new_job(url) == [1, 2, 3, 4, 5]
    count = len(list(_slots(url).iterdir()))
    assert main(["mend", url]) == 0
    assert len(list(_slots(url).iterdir())) == count, "there is nothing to do a second time"
    with pytest.raises(ckpt.errors.Fenced):
        ckpt.save({"x": 1}, url, step=6)
    ckpt.forget(url)
    ckpt.save({"x": 1}, url, step=6)
    assert steps_after_a_new_job(url) == [1, 2, 3, 4, 5, 6]


def test_mend_brings_back_what_the_other_branch_of_a_merge_has_hidden(tmp_path: Path) -> None:
    """Two jobs go on from one root in two copies; then the copies are copied into one."""
    url = _real_root(tmp_path / "run", range(1, 3))
    shutil.copytree(url, other := tmp_path / "other")
    _real_root(tmp_path / "run", range(3, 5))
    _real_root(other, range(10, 14))
    shutil.copytree(other / "steps", tmp_path / "run" / "steps", dirs_exist_ok=True)
    for path in sorted((other / "log").iterdir()):
        if not (_slots(url) / path.name).exists():
            shutil.copy(path, _slots(url))
    with pytest.raises(Corrupt, match="ckpt mend"):
        claim(open_store(url))
    report = mend(url, dry_run=True)
    assert sorted(entry.step for entry in report.brought_back) == [3, 4]
    assert report == mend(url, dry_run=True)
    mend(url)
    assert sorted(steps_after_a_new_job(url)) == [1, 2, 3, 4, 10, 11, 12, 13]
    state = {"x": torch.zeros(3)}
    assert ckpt.load(state, url).step == 13, "the newest by time is the latest"


def test_mend_brings_back_what_clocks_have_put_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step needs files of those that a host with a clock an hour ahead has committed."""
    for step, ahead in ((1, 0), (2, 0), (3, 3600), (4, 3600), (5, 0)):
        clock = partial(lambda shift: time.time() + shift, ahead)
        opened = partial(open_session, sources=Sources(clock=clock))
        monkeypatch.setattr("ckpt.process.open_session", opened)
        if step in (3, 5):
            ckpt.forget(tmp_path / "run")
        state = {"same": torch.ones(3), "new": torch.ones(step), "x": torch.ones(2) * (step > 2)}
        ckpt.save(state, tmp_path / "run", step=step, dedup=True)
        if step == 2:
            shutil.copytree(tmp_path / "run", tmp_path / "other")
    _real_root(tmp_path / "other", range(10, 16))
    shutil.copytree(tmp_path / "other" / "steps", tmp_path / "run" / "steps", dirs_exist_ok=True)
    for path in (tmp_path / "other" / "log").iterdir():
        if not (tmp_path / "run" / "log" / path.name).exists():
            shutil.copy(path, tmp_path / "run" / "log")
    report = mend(tmp_path / "run")
    assert [entry.step for entry in report.brought_back] == [5, 3, 4], "by the time of the clocks"
    ckpt.forget(tmp_path / "run")
    assert sorted(steps_after_a_new_job(tmp_path / "run")) == [1, 2, 3, 4, 5, *range(10, 16)]
    assert all(ckpt.verify(tmp_path / "run", step).ok for step in (3, 4, 5))


def test_mend_says_what_is_not_there_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = _real_root(tmp_path / "run", range(1, 4))
    (_slots(url) / f"{2:020d}").unlink()
    newest = sorted((tmp_path / "run" / "steps").iterdir())[-1]
    shutil.rmtree(newest)
    assert main(["mend", url]) == 1
    assert "step 3" in capsys.readouterr().out
    assert ckpt.load({"x": torch.zeros(3)}, url).step == 2


def test_mend_leaves_a_whole_log_alone(tmp_path: Path) -> None:
    url = _real_root(tmp_path / "run", range(1, 4))
    before = files_below(tmp_path)
    report = mend(url)
    assert (report.breaks, report.filled, report.brought_back, report.lost) == ({}, (), (), ())
    assert files_below(tmp_path) == before
    ckpt.save({"x": 1}, url, step=4)


@pytest.mark.parametrize("damage", [_hole, _other_branch])
def test_nobody_writes_to_a_log_that_is_no_row(damage: Callable[[MemoryBucket], None]) -> None:
    """A job that claimed before the hole would sweep the files of what is committed behind it."""
    bucket = MemoryBucket()
    session = claim(MemoryStore(bucket))
    for step in range(1, 7):
        save(session, step)
    damage(bucket)
    before = _objects(bucket)
    for write in (claim, Maintenance.open):
        with pytest.raises(Corrupt, match="ckpt mend"):
            write(MemoryStore(bucket))
    assert _objects(bucket) == before
