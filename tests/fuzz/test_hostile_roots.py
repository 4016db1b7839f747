"""Roots that somebody has damaged or written to do harm, under everything that opens a root.

Method: a root with steps that share files, a pinned one and a metric; one to three random changes
to its objects; then every call that reads or writes a root. Each call returns, or refuses with an
error of this library or of the store. What a load of a damaged root returns are the weights of that
very step: a change by somebody who made all checksums right may have others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.commit.log import LOG_PREFIX
from ckpt.commit.names import STEPS_PREFIX
from ckpt.commit.records import (
    LiveEntry,
    Record,
    SegmentRef,
    decode_record,
    encode_record,
    manifest_digest,
)
from ckpt.errors import CheckpointError
from ckpt.operate import mend
from ckpt.tools.report import report_of
from ckpt.tools.salvage import salvage
from storage.errors import StorageError
from storage.memory import MemoryBucket, MemoryStore
from tests.conftest import Scale
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import all_targets
from tests.results import Counted

pytestmark = pytest.mark.long

Objects = dict[str, bytes]
STEPS = range(1, 5)
HUGE = (0, 1, 7, 1 << 31, 1 << 53, 10**18 - 1, 10**18, (1 << 62) - 1)


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """The state of a step is a function of the step, and partly that of the one before it."""
    return {
        "changes": torch.arange(300, dtype=torch.float32) * step,
        "stays": torch.arange(50, dtype=torch.int64),
    }


def step_of(state: Mapping[str, Any]) -> int | None:
    """The step whose weights these are; None for no step's."""
    step = int(state["changes"][1])
    same = all(torch.equal(state[name], tensor) for name, tensor in weights_of(step).items())
    return step if same else None


@cache
def honest() -> Mapping[str, bytes]:
    bucket = MemoryBucket()
    for step in STEPS:
        ckpt.save({"w": weights_of(step), "step": step}, MemoryStore(bucket), step=step, dedup=True)
    return objects_in(bucket)


def objects_in(bucket: MemoryBucket) -> Objects:
    store = MemoryStore(bucket)
    return {info.key: store.get(info.key) for info in store.list("")}


# Changes ------------------------------------------------------------------------------------------


def _damage(objects: Objects, rng: random.Random) -> None:
    """What disks, copies and operators do."""
    keys = sorted(objects)
    if not keys:
        return
    key, other = rng.choice(keys), rng.choice(keys)
    match rng.randrange(7):
        case 0:
            del objects[key]
        case 1:
            objects[key] = objects[key][: rng.randrange(len(objects[key]) + 1)]
        case 2:
            objects[key], objects[other] = objects[other], objects[key]
        case 3:
            objects[key] = mutated(objects[key], [objects[other]], rng)
        case 4:
            folder, slash, _ = key.rpartition("/")
            objects[folder + slash + rng.choice(("x", "MANIFEST", "0" * 20))] = b"?"
        case 5:
            objects[rng.choice(("log/x", "steps/00000009-e000001-x/MANIFEST", "log"))] = b"\0"
        case _:
            folder = key.rpartition("/")[0]
            moved = {name: data for name, data in objects.items() if name.startswith(folder)}
            for name, data in moved.items():
                objects[name.replace("0000000", "0000001", 1)] = data


def _craft(objects: Objects, rng: random.Random) -> None:
    """What somebody does who knows the format and makes its checksums right."""
    records = sorted(key for key in objects if key.startswith(LOG_PREFIX))
    manifests = sorted(key for key in objects if key.endswith("/MANIFEST"))
    if not records:
        return
    key = rng.choice(records)
    if rng.randrange(2) and manifests:
        _craft_manifest(objects, rng.choice(manifests), rng)
        return
    try:
        record = decode_record(objects[key], slot=int(key[len(LOG_PREFIX) :]), where=key)
        objects[key] = encode_record(_changed(record, rng))
    except (CheckpointError, ValueError):
        return  # damaged before, or nothing that can be written down


def _changed(record: Record, rng: random.Random) -> Record:
    number = rng.choice(HUGE)
    if record.live and rng.randrange(2):
        entries = list(record.live)
        index = rng.randrange(len(entries))
        entries[index] = _changed_entry(entries[index], number, rng)
        return replace(record, live=tuple(entries))
    changes: list[dict[str, Any]] = [
        {"epoch": number},
        {"slot": number},
        {"kind": rng.choice(("CLAIM", "COMMIT", "RETIRE", "PIN", "UNPIN", "VERIFIED"))},
        {"live": ()},
        {"live": record.live + record.live},
        {"live": record.live[::-1]},
        {"previous": rng.choice((None, b"", bytes(32)))},
        {"time_unix": rng.choice((0.0, -1e300, 1e300, float("nan")))},
        {"attempt": rng.choice((None, "e000001-0123456789abcdef", "../..", "x" * 1000))},
        {"segments": (SegmentRef(bytes(32), max(1, number), max(1, number), 0),)},
        {"gone": (number,)},
    ]
    return replace(record, **rng.choice(changes))


def _changed_entry(entry: LiveEntry, number: int, rng: random.Random) -> LiveEntry:
    changes: list[dict[str, Any]] = [
        {"step": number},
        {"slot": number},
        {"line": rng.choice((None, number))},
        {"manifest_nbytes": number},
        {"manifest_digest": rng.choice((bytes(32), b"", b"x" * 64))},
        {"references": rng.choice(((entry.attempt,), ("e000001-0123456789abcdef",), ("../x",)))},
        {"attempt": rng.choice(("e000001-0123456789abcdef", "e999999999-0123456789abcdef", "/"))},
        {"metric": rng.choice((float("nan"), float("inf"), 0.0))},
        {"nbytes": number},
        {"committed_unix": rng.choice((-1e300, 1e300, float("nan")))},
    ]
    return replace(entry, **rng.choice(changes))


def _craft_manifest(objects: Objects, key: str, rng: random.Random) -> None:
    """A changed manifest, with records that have its digest and length."""
    target = all_targets()["manifest"]
    body = objects[key][24:-32]
    if not body:
        return
    new = target.seal(mutated(body, [body], rng))
    old_digest = manifest_digest(objects[key])
    objects[key] = new
    for name in [name for name in objects if name.startswith(LOG_PREFIX)]:
        try:
            record = decode_record(objects[name], slot=int(name[len(LOG_PREFIX) :]), where=name)
            live = tuple(
                replace(entry, manifest_digest=manifest_digest(new), manifest_nbytes=len(new))
                if entry.manifest_digest == old_digest
                else entry
                for entry in record.live
            )
            objects[name] = encode_record(replace(record, live=live))
        except (CheckpointError, ValueError):
            continue


# Calls --------------------------------------------------------------------------------------------


def _load_each(store: MemoryStore, is_crafted: bool) -> None:
    for step in (None, *STEPS):
        state = {"w": {name: torch.zeros_like(t) for name, t in weights_of(0).items()}, "step": 0}
        try:
            report = ckpt.load(state, store, step=step)
        except (CheckpointError, StorageError):
            continue
        assert is_crafted or step_of(state["w"]) == report.step  # type: ignore[arg-type]


def _open_each(store: MemoryStore) -> None:
    for info in ckpt.list_steps(store):
        with closing(ckpt.open(store, step=info.step)) as checkpoint:
            for name in checkpoint:
                checkpoint.read(name)


def _salvage_each(store: MemoryStore) -> None:
    folders = {info.key.rpartition("/")[0] for info in store.list(STEPS_PREFIX)}
    for folder in sorted(folders):
        salvage(store, folder)


def _save_and_load(store: MemoryStore) -> None:
    """What a save acknowledges is there, whatever lay in the root before."""
    report = ckpt.save({"w": weights_of(77), "step": 77}, store, step=77)
    state = {"w": {name: torch.zeros_like(t) for name, t in weights_of(0).items()}, "step": 0}
    ckpt.load(state, store, step=report.step)
    assert step_of(state["w"]) == 77  # type: ignore[arg-type]


READING: tuple[Callable[[MemoryStore], Any], ...] = (
    lambda store: list(ckpt.list_steps(store)),
    lambda store: ckpt.history(store),
    lambda store: ckpt.disk_usage(store),
    lambda store: report_of(store),
    lambda store: ckpt.verify(store),
    lambda store: ckpt.plan_ranks(store, ranks=2),
    lambda store: ckpt.diff(store, store),
    _open_each,
    _salvage_each,
)


def test_every_call_takes_or_refuses_a_hostile_root(
    scale: Scale, pytestconfig: pytest.Config, tmp_path: Path, counted: Counted
) -> None:
    seed = pytestconfig.getoption("seed")
    for number in range(scale.count(300, 20_000)):
        rng = random.Random(f"{seed}:{number}")
        objects = dict(honest())
        is_crafted = rng.randrange(2) == 1
        for _ in range(rng.choice((1, 1, 2, 3))):
            (_craft if is_crafted else _damage)(objects, rng)
        bucket = MemoryBucket()
        for key, data in objects.items():
            bucket.add(key, data)
        try:
            _try_all(bucket, is_crafted)
        except Exception as error:
            # Names and times of the honest root are new in every run: the root itself replays it.
            kept = tmp_path / "objects"
            kept.write_text(repr(objects))
            raise AssertionError(f"root {number} of seed {seed}, kept in {kept}") from error
        counted(damaged_or_crafted_roots=1, calls=len(READING))


def _try_all(bucket: MemoryBucket, is_crafted: bool) -> None:
    before = objects_in(bucket)
    _load_each(MemoryStore(bucket), is_crafted)
    for call in READING:
        try:
            call(MemoryStore(bucket))
        except (CheckpointError, StorageError):
            continue
    assert objects_in(bucket) == before, "who only reads changes nothing"
    for write in (_save_and_load, lambda store: mend(store), _save_and_load):
        try:
            write(MemoryStore(bucket))
        except (CheckpointError, StorageError):
            continue
        finally:
            ckpt.forget(MemoryStore(bucket))
