"""A job writes to its root what happens to it, as it happens, and who looks there sees it.

Method: trainings on disks that refuse what they are asked to refuse, some killed or preempted, are
looked at by the command in a process of its own. The requests of a story are counted.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.commit.log import FORMAT_KEY
from ckpt.screens.rows import goodput_text
from ckpt.service import story
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.events import SaveFailed
from ckpt.service.preemption import Preempted
from ckpt.service.story import AHEAD_MAX
from ckpt.telemetry.record import JobRecord
from ckpt.tools.polling import RunPoller
from ckpt.tools.report import Goodput, Measurements, run_of
from storage import StorageError, Store, open_store
from storage.store import ObjectInfo, ObjectWriter
from storage.wrap import WrappedStore

GUARD_SECONDS = 60.0  # against hanging
PROMPT_SECONDS = 5.0
SAVE_READS = 12  # of FORMAT at most, by a save, a restore and the test itself
SHOWN_SECONDS = 30.0  # until a loaded machine has run the command


class Refusing(WrappedStore):
    """A disk that refuses objects whose keys begin as `refused` says; the others are counted."""

    def __init__(self, inner: Store, refused: tuple[str, ...] = ()) -> None:
        super().__init__(inner)
        self.refused = refused
        self.requests: list[tuple[str, str]] = []

    @contextmanager
    def create(self, key: str, nbytes: int, **how: Any) -> Iterator[ObjectWriter]:
        self.requests.append(("create", key))
        if key.startswith(self.refused):
            raise StorageError(f"no space for {key[:20]}")
        with self.inner.create(key, nbytes, **how) as writer:
            yield writer

    def delete(self, key: str) -> None:
        self.requests.append(("delete", key))
        self.inner.delete(key)

    def get(self, key: str, byte_range: Any = None) -> bytes:
        self.requests.append(("get", key))
        return self.inner.get(key, byte_range)


def state() -> dict[str, Any]:
    return {"x": torch.ones(4)}


def shown(root: Path, *command: str) -> dict[str, Any]:
    """What a command says of a root, as any machine would run it."""
    return dict(json.loads(lines(root, *(command or ("watch", "--once", "--json")))))


def lines(root: Path, *command: str) -> str:
    run = [sys.executable, "-m", "ckpt", command[0], str(root), *command[1:]]
    out = subprocess.run(run, capture_output=True, check=True, timeout=GUARD_SECONDS, text=True)
    return out.stdout


def until(is_so: Callable[[], bool], seconds: float = SHOWN_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it does not become so"
        time.sleep(0.05)  # no event says that a thread has written


def run_at(root: Path | Store) -> Any:
    poller = RunPoller(root)
    try:
        return poller.poll().run
    finally:
        poller.close()


def trained(root: Path | Store, steps: range, **how: Any) -> Checkpointer:
    with Checkpointer(state(), root, save=ckpt.EverySteps(1), **how) as checkpointer:
        checkpointer.restore()
        for step in steps:
            checkpointer.step(step)
        return checkpointer


# Failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits", "is_new", "looks"),
    [(True, True, False), (True, False, False), (False, True, True), (False, False, False)],
    ids=["blocking-new", "blocking-saved", "background-new", "background-saved"],
)
def test_failed_saves_are_seen_as_they_fail(
    tmp_path: Path, waits: bool, is_new: bool, looks: bool
) -> None:
    if not is_new:
        trained(tmp_path, range(1, 3))
    disk = Refusing(open_store(tmp_path), ("steps/",))
    how: Any = {"save": ckpt.EverySteps(1), "only": True, "alarm": ckpt.Alarm(call=len)}
    with suppress(StorageError), Checkpointer(state(), disk, **how) as checkpointer:
        checkpointer.restore()
        for number in range(1, 6):
            checkpointer.step(100 + number)
            if waits:
                with suppress(StorageError):
                    checkpointer.wait()
            failed = time.monotonic()
            while len(run_at(tmp_path).failures) < number:
                assert time.monotonic() - failed < PROMPT_SECONDS
            if looks:
                began = time.monotonic()
                shown(tmp_path)  # what a command takes to begin, which is no delay of the story
                begins = time.monotonic() - began
                assert len(shown(tmp_path)["failures"]) == number
                assert time.monotonic() - failed - 2 * begins < PROMPT_SECONDS
        said = shown(tmp_path)
        assert [one["step"] for one in said["failures"]] == [101, 102, 103, 104, 105]
        assert all("no space for steps/" in one["error"] for one in said["failures"])
        job = said["jobs"][-1]
        assert said["failed_saves"] == job["failed"] == 5 and job["state"] == "running"
    if looks:
        text, report = lines(tmp_path, "watch", "--once"), shown(tmp_path, "report", "--json")
        assert "the save of step 105 has failed" in text and "no space for steps/" in text
        assert report["failed_saves"] == len(report["jobs"][-1]["failures"]) == 5
    saves = [one.key for one in open_store(tmp_path).list("steps/")]
    assert len(saves) == (0 if is_new else 6), "a record of a failure is no part of a save"


def test_what_a_full_disk_refuses_comes_with_the_next_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Refusing(open_store(tmp_path))
    how: Any = {"save": ckpt.EverySteps(1), "alarm": ckpt.Alarm(call=len)}
    with Checkpointer(state(), disk, **how) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        disk.refused = ("",)
        for step in (2, 3):
            checkpointer.step(step)
            with suppress(StorageError):
                checkpointer.wait()
        until(lambda: "is not noted there for now" in caplog.text)
        assert "the save of step 3 has failed" in caplog.text
        disk.refused = ()
        until(lambda: [one.step for one in run_at(tmp_path).failures] == [2, 3])
        checkpointer.step(4)
    assert run_at(tmp_path).jobs[-1].ending == "closed"


def test_a_store_that_hangs_holds_up_neither_steps_nor_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "STORE_SECONDS", 0.1)
    goes_on = threading.Event()

    class Hanging(Refusing):
        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            assert prefix != "jobs/" or goes_on.wait(GUARD_SECONDS)
            return super().list(prefix, after=after)

    disk = Hanging(open_store(tmp_path))
    try:
        checkpointer = trained(disk, range(1, 30))
        assert checkpointer.last_saved is not None and checkpointer.last_saved.step == 29
        assert run_at(tmp_path).jobs == () and not checkpointer.failures
    finally:
        goes_on.set()


# How jobs end -------------------------------------------------------------------------------------


def test_ways_to_end_are_distinguished(tmp_path: Path) -> None:
    trained(tmp_path, range(1, 4))
    with pytest.raises(ZeroDivisionError), Checkpointer(state(), tmp_path) as checkpointer:
        checkpointer.step(5)
        raise ZeroDivisionError("planted")
    with pytest.raises(Preempted), Checkpointer(state(), tmp_path) as checkpointer:
        checkpointer.restore()
        checkpointer.step(4)
        os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.step(5)
    killed = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(killed, timeout=GUARD_SECONDS).returncode == -signal.SIGKILL
    jobs = shown(tmp_path)["jobs"]
    assert [job["ending"] for job in jobs] == ["closed", "failed", "preempted", ""]
    assert jobs[1]["cause"] == "ZeroDivisionError: planted" and jobs[2]["step"] == 5
    assert jobs[3]["step"] == 9 and jobs[3]["host"] == socket.gethostname()
    last = run_at(tmp_path).jobs[-1]
    states = [last.state(last.noted_unix + seconds) for seconds in (1.0, 1000.0)]
    assert states == ["running", "silent"]
    trained(tmp_path, range(7, 8))
    jobs = shown(tmp_path)["jobs"]
    assert [job["ending"] for job in jobs[3:]] == ["died", "closed"]
    # The job that was killed had restored step 5, and went on to 9.
    assert jobs[4]["restored_step"] == 5 and jobs[4]["steps_lost"] == 4
    assert 0.0 < jobs[4]["seconds_lost"] < GUARD_SECONDS and jobs[3]["steps_lost"] == 0
    assert "step 5, 4 steps, " in lines(tmp_path, "watch", "--once")


KILLED = """
import os, signal, sys, time, torch, ckpt
jobs = os.path.join(sys.argv[1], "jobs")
before = {*os.listdir(jobs)}
checkpointer = ckpt.Checkpointer({"x": torch.ones(4)}, sys.argv[1], save=ckpt.EverySteps(100))
checkpointer.restore()
for step in range(6, 10):
    checkpointer.step(step)
while not {*os.listdir(jobs)} - before:
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


def job(begun: float, noted: float, **fields: Any) -> JobRecord:
    """A job of 8 ranks between these times."""
    who = {"host": "node-1", "ranks": 8, "software": "shardpoint 1"}
    return JobRecord.model_validate({"begun_unix": begun, "noted_unix": noted, **who, **fields})


def test_goodput_is_the_share_of_training_that_counts() -> None:
    first = job(100, 200, training_seconds=70, blocked_seconds=10, step=70)
    # 10 s later another one: it restores step 50, and so loses 20 of the 70 seconds.
    second = job(210, 300, training_seconds=80, restore_seconds=5, restored_step=50)
    run = run_of("", [], [], Measurements(), [first, second])
    assert run.jobs[1].steps_lost == 20
    jobs = [first, second.model_copy(update={"seconds_lost": 20.0})]
    goodput = Goodput.of(jobs)
    assert goodput == Goodput(130.0, 20.0, 10.0, 5.0, 25.0, 10.0) and sum(goodput) == 200.0
    assert goodput_text(goodput) == (
        "goodput 65 %: 10 % redone, 5 % saving, 2 % restoring, 12 % other, 5 % down"
    )
    assert goodput_text(Goodput.of(jobs[:1])) == "goodput 70 %: 10 % saving, 20 % other"
    lost = second.model_copy(update={"seconds_lost": 1000.0})  # more than was trained
    assert Goodput.of([first, lost]).redone == 70.0
    assert goodput_text(None) == goodput_text(Goodput.of([job(1, 1)])) == ""


def test_what_is_lost_twice_counts_once() -> None:
    first = job(0, 100, training_seconds=100, step=100)
    dies = job(110, 150, training_seconds=40, restored_step=60, seconds_lost=40.0, step=100)
    # It restores what the one before had restored, and so loses all of that one.
    third = job(160, 200, training_seconds=40, restored_step=60, seconds_lost=90.0, step=100)
    assert Goodput.of([first, dies, third]).redone == 80.0
    assert Goodput.of([first, dies, third]).steps == 100.0


def test_a_restart_without_restore_redoes_what_was_done() -> None:
    jobs = [
        job(0, 100, training_seconds=100, first_step=1, step=100),
        job(110, 200, training_seconds=90, first_step=101, step=190),  # it was loaded by hand
        job(210, 310, training_seconds=100, first_step=1, step=100),  # it starts over
    ]
    run = run_of("", [], [], Measurements(), jobs)
    assert [one.steps_lost for one in run.jobs] == [None, 0, 190]
    assert run.goodput == Goodput(100.0, 190.0, 0.0, 0.0, 0.0, 20.0)
    unknown = [one.model_copy(update={"first_step": None}) for one in jobs]
    run = run_of("", [], [], Measurements(), unknown)
    assert [one.steps_lost for one in run.jobs] == [None, None, None]


def test_a_restart_by_hand_loses_what_came_after_the_save(tmp_path: Path) -> None:
    for steps in (range(1, 7), range(4, 6)):
        with Checkpointer(state(), tmp_path, save=ckpt.EverySteps(3)) as checkpointer:
            for step in steps:
                time.sleep(0.1)
                checkpointer.step(step)
    first, second = run_at(tmp_path).jobs
    assert (first.first_step, second.first_step, second.steps_lost) == (1, 4, 3)
    assert 0.25 <= run_at(tmp_path).goodput.redone < first.training_seconds


def test_the_commit_of_the_script_is_shown(tmp_path: Path) -> None:
    script, root = tmp_path / "code" / "train.py", tmp_path / "run"
    script.parent.mkdir()
    script.write_text(SAVING)
    who = ["-c", "user.name=one", "-c", "user.email=one@example.com"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "First", "--no-gpg-sign"]):
        subprocess.run(["git", "-C", str(script.parent), *words], check=True)
    for text in (SAVING, SAVING + "# changed"):
        script.write_text(text)
        command = [sys.executable, str(script), str(root)]
        subprocess.run(command, check=True, timeout=GUARD_SECONDS, cwd=tmp_path)
    head = ["git", "-C", str(script.parent), "rev-parse", "HEAD"]
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    jobs = shown(root)["jobs"]
    assert [one["commit"] for one in jobs] == [commit, f"{commit}-dirty"]
    assert f"{commit[:10]}dirty" not in lines(root, "watch", "--once")
    assert f"{commit[:10]}-dirty" in lines(root, "watch", "--once")


SAVING = """
import sys, torch, ckpt
with ckpt.Checkpointer({"x": torch.ones(4)}, sys.argv[1], save=ckpt.EverySteps(1)) as one:
    one.restore()
    one.step(1)
"""


def test_a_job_says_how_long_it_trained_and_saved(tmp_path: Path) -> None:
    class Slow(Refusing):
        def create(self, key: str, nbytes: int, **how: Any) -> Any:
            time.sleep(0.2 * key.startswith("steps/"))
            return super().create(key, nbytes, **how)

    store = Slow(open_store(str(tmp_path)))
    with Checkpointer(state(), store, save=ckpt.EverySteps(1)) as checkpointer:
        for step in range(1, 5):
            time.sleep(0.1)
            checkpointer.step(step)  # waits for the save before, of a data file and a manifest
    (job,) = run_at(tmp_path).jobs
    assert 0.4 <= job.training_seconds < 0.4 + GUARD_SECONDS
    assert 0.6 <= job.blocked_seconds < GUARD_SECONDS
    assert job.training_seconds + job.blocked_seconds <= job.noted_unix - job.begun_unix + 0.1
    goodput = shown(tmp_path)["goodput"]
    assert goodput["steps"] == job.training_seconds and goodput["down"] == 0.0
    assert "goodput " in lines(tmp_path, "watch", "--once")


def test_a_dropped_training_is_let_go(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer({"model": model}, tmp_path, save=ckpt.EverySteps(1))
    checkpointer.step(1)
    checkpointer.wait()
    threads = [one for one in threading.enumerate() if one.name.startswith("ckpt-story")]
    gone = weakref.ref(model)
    checkpointer._signals.restore()
    del model, checkpointer
    until(lambda: gc.collect() >= 0 and gone() is None)
    assert gone() is None and threads


def test_a_reader_that_restores_alone_is_no_job(tmp_path: Path) -> None:
    trained(tmp_path, range(1, 2))
    with Checkpointer(state(), tmp_path, save=ckpt.Never(), only=True) as reader:
        reader.restore()
    assert len(run_at(tmp_path).jobs) == 1


# What it costs ------------------------------------------------------------------------------------


def test_requests_and_objects_of_a_story_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(story, "NEWS_SECONDS", 0.0)
    monkeypatch.setattr(story, "BEAT_SECONDS", 0.0)
    disk = Refusing(open_store(tmp_path))
    with Checkpointer(state(), disk, save=ckpt.EverySteps(1000)) as checkpointer:
        checkpointer.step(1000)
        checkpointer.wait()
        error = OSError("x" * 10_000 + chr(0xD800))
        for step in range(200):
            checkpointer._parts.story.heard(SaveFailed(step, OSError(f"{error}{step}")))
        until(lambda: checkpointer._parts.story._allowed < 1.0)
        time.sleep(0.5)  # for the other thread: more than it is allowed to write
    own = [key for kind, key in disk.requests if key.startswith("jobs/") and kind == "create"]
    deleted = [key for kind, key in disk.requests if key.startswith("jobs/") and kind == "delete"]
    # AHEAD_MAX tries, some before there was a root, one more since then, and the last one.
    assert 3 <= len(own) <= AHEAD_MAX + 2 and own[:-2] == deleted
    assert sum(key == FORMAT_KEY for _, key in disk.requests) <= AHEAD_MAX + 2 + SAVE_READS
    kept = list(open_store(tmp_path).list("jobs/"))
    assert [one.key for one in kept] == own[-2:]
    assert all(one.nbytes < 64 * 1024 for one in kept)
    (job,) = run_at(tmp_path).jobs
    assert job.failed == 200 and [one.step for one in job.failures] == [*range(150, 200)]
    assert run_at(tmp_path).failed_saves == 200


def test_a_new_job_leaves_few_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "JOBS_MAX", 3)
    for number in range(6):
        trained(tmp_path, range(number + 1, number + 2))
    jobs = {one.key[:36] for one in open_store(tmp_path).list("jobs/")}
    assert len(jobs) <= 4 and [job.ending for job in run_at(tmp_path).jobs] == ["closed"] * len(
        jobs
    )
    assert ckpt.verify(tmp_path).ok and ckpt.disk_usage(tmp_path).other_objects == 0


def test_a_damaged_record_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, range(1, 2))
    (tmp_path / "jobs" / f"{1:014d}-{0:016x}-{1:08d}").write_bytes(b'{"format": "other"}')
    (tmp_path / "jobs" / "of-somebody-else").write_bytes(b"")
    assert [job.ending for job in run_at(tmp_path).jobs] == ["closed"]
    assert "cannot be read" in caplog.text


def test_without_telemetry_and_without_a_root_nothing_is_written(tmp_path: Path) -> None:
    trained(tmp_path / "off", range(1, 2), telemetry=False)
    with Checkpointer(state(), tmp_path / "none", save=ckpt.Never(), only=True) as checkpointer:
        for step in range(1, 4):
            checkpointer.step(step)
    assert not list(tmp_path.rglob("jobs")) and not list((tmp_path / "none").rglob("*"))


def test_a_save_that_takes_long_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(story, "SLOW_SECONDS", 0.2)
    goes_on = threading.Event()

    class Slow(Refusing):
        @contextmanager
        def create(self, key: str, nbytes: int, **how: Any) -> Iterator[ObjectWriter]:
            with super().create(key, nbytes, **how) as writer:
                if key.endswith(".safetensors"):
                    goes_on.wait(GUARD_SECONDS)
                yield writer

    store = Slow(open_store(tmp_path / "run"))
    begun = ckpt.EverySteps(1)
    with (
        caplog.at_level("INFO", logger=story.logger.name),
        Checkpointer({"x": torch.ones(1 << 20)}, store, save=begun) as checkpointer,
    ):
        checkpointer.restore()
        checkpointer.step(3)
        until(lambda: "in phase 'write' of 4 MiB" in caplog.text)
        goes_on.set()
    assert "save of step 3: " in caplog.text and " s so far, in phase " in caplog.text


def test_what_happens_while_the_commit_is_looked_up_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, goes_on = threading.Event(), threading.Event()

    def slow() -> str:
        looking.set()
        assert goes_on.wait(GUARD_SECONDS)
        return "abc"

    monkeypatch.setattr(story, "commit_of_script", slow)
    with Checkpointer(state(), tmp_path, save=ckpt.EverySteps(1)) as checkpointer:
        checkpointer.step(1)
        assert looking.wait(GUARD_SECONDS)
        checkpointer._parts.story.heard(SaveFailed(5, OSError("no")))
        goes_on.set()
    (job,) = run_at(tmp_path).jobs
    assert (job.failed, job.commit, job.ending) == (1, "abc", "closed")
