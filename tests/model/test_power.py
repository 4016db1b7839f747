"""Power failures at every moment of a job on a local disk lose nothing that was acknowledged.

Method: a job saves, with and without dedup, in the background, prunes, and dies; the next one goes
on. What the store does to files and directories is recorded, and states in which a power failure
may leave the disk are drawn from that (`power.py`). In each one, what was acknowledged by then is
there bit for bit, what is listed is whole, and a new job can begin. Planted bugs leave out a sync.
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
from ckpt.commit.sweep import delete_attempt
from ckpt.commit.writer import LogWriter
from ckpt.errors import CheckpointError
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import decode_manifest
from storage import local
from storage.errors import StorageError
from storage.file_io import BufferedFile
from storage.local import LocalStore
from storage.memory import MemoryBucket, MemoryStore
from tests.conftest import Scale
from tests.model.driving import LIMITS, SOURCES
from tests.model.power import Disk, Event, Recorder
from tests.results import Counted

pytestmark = pytest.mark.timeout(7200)

ROOT = "disk/run"
FULL, CLUSTER, SAMPLE = 1_000_000, 50_000, 300


class Life(NamedTuple):
    """What was recorded, and the bytes that every object had once it was written."""

    recorder: Recorder
    objects: dict[str, bytes]


def lived(folder: Path) -> Life:
    """A job and its successor on a disk, recorded."""
    recorder = Recorder(str(folder))
    url = folder / ROOT
    objects: dict[str, bytes] = {}

    def done(what: str) -> None:
        recorder.note(what)
        for path in url.rglob("*"):
            if path.is_file():
                objects[str(path.relative_to(url))] = path.read_bytes()

    state = {"a": torch.arange(600.0), "b": torch.ones(3), "phase": 1}
    with recorder.recording():
        for step in (1, 2, 3):
            state["b"] = torch.ones(3) * step
            ckpt.save(state, url, step=step, dedup=step > 1)
            done(f"saved {step}")
        ckpt.async_save(state, url, step=4).result()
        done("saved 4")
        # What a process wrote of a save that it did not live to commit.
        store = LocalStore(str(url))
        dead = attempt_name(Log(store).state().epoch, b"not here")
        key = step_prefix(9, dead) + "rank00000-000.safetensors"
        with store.create(key, 4, part_nbytes=4, durable=False) as writer:
            writer.write_part(0, [memoryview(b"left")])
        ckpt.forget(url)
        for step in (5, 6):
            ckpt.save({"a": torch.arange(7.0) * step}, url, step=step)
            done(f"saved {step}")
        for step in (4, 3, 2):
            recorder.note(f"retiring {step}")
            keeper = Maintenance.open(store)
            attempt = next(entry.attempt for entry in keeper.state().live if entry.step == step)
            keeper.retire(attempt)
            recorder.note(f"retired {step}")
        ckpt.save({"a": torch.ones(2)}, url, step=7)
        done("saved 7")
    ckpt.forget(url)
    return Life(recorder, objects)


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
        session = Session.claim(store, sources=SOURCES, limits=LIMITS)
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


def test_power_failures_lose_nothing(
    tmp_path: Path, rng: random.Random, states: int, counted: Counted
) -> None:
    life = lived(tmp_path)
    count, different, problems = failures(life, rng, states)
    counted(power_failures=count, different_disks=different, changes=len(life.recorder.events))
    assert not problems, "\n".join(problems)
    assert different > states // 20


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
