"""Power failures at every moment of a job on a local disk lose nothing that was acknowledged.

Method: a job saves, with and without dedup, in the background, prunes, and dies; the next one goes
on. `make soak` draws 49 other courses of such jobs. What the store does to files and directories is
recorded, and states in which a power failure may leave the disk are drawn from that (`power.py`).
In each one, what was acknowledged by then is there bit for bit, what is listed is whole, and a new
job can begin. Planted bugs leave out a sync.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ckpt
from ckpt.commit.locate import file_keys, read_manifest
from ckpt.commit.log import Log, read_format
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import attempt_name, step_prefix
from ckpt.commit.records import Record
from ckpt.commit.session import Session
from ckpt.commit.writer import LogWriter, delete_attempt, why_not_retire
from ckpt.errors import CheckpointError
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import decode_manifest
from storage import local
from storage.errors import StorageError
from storage.file_io import BufferedFile
from storage.local import LocalStore
from storage.memory import MemoryBucket, MemoryStore
from tests.conftest import Scale
from tests.model.driving import SOURCES
from tests.model.power import Disk, Event, Recorder
from tests.results import Counted

pytestmark = pytest.mark.timeout(7200)

ROOT = "disk/run"
COURSES = 50
FULL, CLUSTER, SAMPLE = 5_000_000 // COURSES, 50_000, 300  # states of each course


class Life(NamedTuple):
    """What was recorded, and the bytes that every object had once it was written."""

    recorder: Recorder
    objects: dict[str, bytes]


# What a job does, one after the other; a number is the step of a checkpoint that is retired.
Course = tuple[str | int, ...]
COURSE: Course = (
    *("save", "dedup", "dedup", "background", "left", "begin", "other", "other"),
    *(4, 3, 2, "save"),
)


def course_of(rng: random.Random) -> Course:
    """Another course; what it retires is drawn when it is lived."""
    kinds = ("save", "save", "dedup", "dedup", "background", "other", "left", "begin", "retire")
    return ("save", *(rng.choice((*kinds, "retire")) for _ in range(rng.randint(5, 12))), "save")


class _Job:
    """The saves of one job after the other on one root."""

    def __init__(self, url: Path, recorder: Recorder, rng: random.Random) -> None:
        self._url, self._recorder, self._rng = url, recorder, rng
        self._state: dict[str, Any] = {"a": torch.arange(600.0), "b": torch.ones(3), "phase": 1}
        self._step = 0
        self.objects: dict[str, bytes] = {}

    def do(self, what: str | int) -> None:
        """One part of a course."""
        match what:
            case "left":
                self._leave_files()
            case "begin":
                ckpt.forget(self._url)
            case "retire":
                self._retire(None)
            case int():
                self._retire(what)
            case _:
                self._save(str(what))

    def _save(self, how: str) -> None:
        self._step += 1
        step, state = self._step, {"a": torch.arange(7.0) * self._step}
        if how != "other":
            self._state["b"] = torch.ones(3) * step
            state = self._state
        if how == "background":
            ckpt.async_save(state, self._url, step=step).result()
        else:
            ckpt.save(state, self._url, step=step, dedup=how == "dedup")
        self._recorder.note(f"saved {step}")
        for path in self._url.rglob("*"):
            if path.is_file():
                self.objects[str(path.relative_to(self._url))] = path.read_bytes()

    def _leave_files(self) -> None:
        """What a process wrote of a save that it did not live to commit."""
        store = LocalStore(str(self._url))
        dead = attempt_name(Log(store).state().epoch, self._rng.randbytes(8))
        key = step_prefix(self._step + 100, dead) + "rank00000-000.safetensors"
        with store.create(key, 4, part_nbytes=4, durable=False) as writer:
            writer.write_part(0, [memoryview(b"left")])

    def _retire(self, step: int | None) -> None:
        keeper = Maintenance.open(LocalStore(str(self._url)))
        state = keeper.state()
        free = [entry for entry in state.live if not why_not_retire(state, entry)]
        chosen = [entry for entry in free if step in (None, entry.step)]
        if not chosen:
            assert step is None, f"step {step} of {[entry.step for entry in free]}"
            return
        entry = self._rng.choice(chosen)
        self._recorder.note(f"retiring {entry.step}")
        keeper.retire(entry.attempt)
        self._recorder.note(f"retired {entry.step}")


def lived(folder: Path, course: Course = COURSE, rng: random.Random | None = None) -> Life:
    """Jobs on a disk, one after the other, recorded."""
    recorder = Recorder(str(folder))
    url = folder / ROOT
    job = _Job(url, recorder, rng or random.Random(0))
    with recorder.recording():
        for what in course:
            job.do(what)
    ckpt.forget(url)
    return Life(recorder, job.objects)


class Promised(NamedTuple):
    """What has to be there, and what must not be there any more."""

    steps: frozenset[int]
    retired: frozenset[int]


def problems_after(objects: dict[str, bytes], promised: Promised, life: Life) -> list[str]:
    """What is wrong with a disk that holds these objects."""
    bucket = MemoryBucket()
    for key, data in objects.items():
        bucket.add(key, data)
    store = MemoryStore(bucket)
    try:
        listed = {entry.step for entry in Log(store).state().live}
        problems = [f"step {step} is lost" for step in sorted(promised.steps - listed)]
        problems += [f"step {step} is back" for step in sorted(promised.retired & listed)]
        problems += _half_made(store, objects, life)
        if promised.steps:
            read_format(store)
        session = Session.claim(store, sources=SOURCES)
        session.take_back_lost()
        session.sweep()
        problems += _half_made(
            store, {key: store.get(key) for key in bucket.keys_from("", "")}, life
        )
        if {entry.step for entry in Log(store).state().live} != listed:
            problems.append("a new job lists other checkpoints")
    except (CheckpointError, StorageError) as error:
        return [f"{type(error).__name__}: {error}"]
    return problems


def _half_made(store: MemoryStore, objects: dict[str, bytes], life: Life) -> list[str]:
    problems = []
    for entry in Log(store).state().live:
        manifest = _manifest_of(read_manifest(store, entry))
        for key in file_keys(entry.prefix, manifest):
            if objects.get(key) != life.objects[key]:
                problems.append(f"{key} of step {entry.step} is not what was written")
    return problems


@lru_cache(maxsize=64)
def _manifest_of(data: bytes) -> Manifest:
    return decode_manifest(data)


def failures(life: Life, rng: random.Random, count: int) -> tuple[int, int, list[str]]:
    """Power failures at random moments: how many, how many different ones, the first problem."""
    events = life.recorder.events
    moments = sorted(rng.choices(range(len(events) + 1), k=count))
    disk, done, promised = Disk(), 0, Promised(frozenset(), frozenset())
    seen: set[int] = set()
    for number, moment in enumerate(moments):
        for event in events[done:moment]:
            promised = _promised(promised, event)
            disk.play(event)
        done = moment
        objects = disk.after_failure(rng, ROOT)
        key = hash((promised, frozenset(objects.items())))
        if key in seen:
            continue
        seen.add(key)
        problems = problems_after(objects, promised, life)
        if problems:
            return number + 1, len(seen), [*problems, f"after event {moment}"]
    return count, len(seen), []


def _promised(promised: Promised, event: Event) -> Promised:
    steps, retired = promised
    if event.kind != "note":
        return promised
    what, step = event.path.split()
    if what == "saved":
        return Promised(steps | {int(step)}, retired)
    if what == "retiring":  # from now on both are right
        return Promised(steps - {int(step)}, retired)
    return Promised(steps, retired | {int(step)})


@pytest.fixture
def states(pytestconfig: pytest.Config, scale: Scale) -> int:
    """How many states of the disk to look at."""
    return scale.count(CLUSTER if pytestconfig.getoption("cluster") else SAMPLE, FULL)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(COURSES))
def test_power_failures_lose_nothing(
    tmp_path: Path, rng: random.Random, states: int, counted: Counted, number: int
) -> None:
    course = course_of(rng) if number else COURSE
    life = lived(tmp_path, course, rng)
    count, different, problems = failures(life, rng, states)
    counted(power_failures=count, different_disks=different, changes=len(life.recorder.events))
    assert not problems, "\n".join([*problems, f"course {course}"])
    assert different > min(states // 20, 500)


# --- planted bugs ---------------------------------------------------------------------------------

_finish, _sync_path = BufferedFile.finish, local._sync_path


def _never_synced(self: BufferedFile, nbytes: int, *, durable: bool) -> None:
    _finish(self, nbytes, durable=False)


def _no_directory(self: LocalStore, directories: Any) -> None:
    return


def _own_directory_only(self: LocalStore, directories: Any) -> None:
    for directory in directories:
        _sync_path(directory, 0)


def _no_sync(self: LocalStore, keys: Any) -> None:
    return


def _names_without_files(self: LocalStore, keys: Any) -> None:
    self._sync_directories({str(Path(self._path(key)).parent) for key in keys})


def _deletes_first(self: LogWriter, attempt: str, *, delete: bool = True) -> Record | None:
    entry = self.state().find(attempt)
    assert entry is not None
    delete_attempt(self.store, step=entry.step, attempt=attempt)
    return self._append_retire(attempt)


# That names of data files are synced cannot be seen here: the MANIFEST beside them is synced later,
# and its directory with it.
BUGS: dict[str, tuple[object, str, object]] = {
    "no record, MANIFEST or part is synced": (BufferedFile, "finish", _never_synced),
    "no directory is synced": (LocalStore, "_sync_directories", _no_directory),
    "directories above are not synced": (LocalStore, "_sync_directories", _own_directory_only),
    "data files are not synced": (LocalStore, "sync", _no_sync),
    "bytes of data files are not synced": (LocalStore, "sync", _names_without_files),
    "files are deleted before the RETIRE": (LogWriter, "retire", _deletes_first),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BUGS)
def test_a_missing_sync_is_seen(
    name: str, tmp_path: Path, rng: random.Random, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, attribute, bug = BUGS[name]
    monkeypatch.setattr(where, attribute, bug)
    count, _, problems = failures(lived(tmp_path), rng, 3_000)
    counted(bugs=1, seen=int(bool(problems)))
    print(f"{name}: {count} states: {problems}")
    assert problems
