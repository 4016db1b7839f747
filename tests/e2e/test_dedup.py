"""Saves that write only what changed: how many bytes, and that all of it loads bit for bit.

Method: ranks as threads save the training of `lora.py` (95 % frozen) with `dedup`, with and without
a memory of the save before; what lies in the store is measured there. Then the same checkpoints
under other layouts, retired references, damage, copies, and every reader that there is.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.commit.locate import live_entries, read_manifest
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.records import LiveEntry
from ckpt.commit.session import ReferenceRetired, Session, open_session
from ckpt.commit.writer import Commit, NotRetired
from ckpt.errors import CheckpointError, Corrupt, NoCheckpoint
from ckpt.format.codec import encode_values
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.contents import find_checkpoint
from ckpt.saving import dedup as previous
from ckpt.saving.dedup import ATTEMPTS_MAX, NBYTES_MULTIPLE_MAX
from ckpt.saving.save import save_task
from ckpt.saving.task import PartMemory, SaveOptions, SaveTask
from ckpt.service.retention import KeepLatest, carry_out, plan_retention
from ckpt.tools.salvage import salvage, write_manifest
from ckpt.world.base import World
from storage import StorageError, Store, open_store
from storage.wrap import WrappedStore
from tests.e2e.job import NO_WAITING, Job
from tests.e2e.lora import DEDUP, assert_is_lora, full_at, lora_at, nbytes_at
from tests.protocol.invariants import (
    History,
    RecordingStore,
    check_all,
    check_references,
    files_needed,
)
from tests.salvaged import matches_manifest
from tests.thread_ranks import RanksFailed, run_ranks


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.name}")


def _job(size: int, store: Store, *, remembers: bool = True) -> Job:
    return Job(size, lambda rank: store, memories={} if remembers else None)


def _save(job: Job, step: int) -> int:
    """Saves `step` with dedup; the bytes that are in the store because of it."""
    job.save(lambda rank: lora_at(step, rank, job.size), step=step, options=DEDUP)
    store = job.store_of(0)
    entry = live_entries(store)[-1]
    assert entry.step == step
    return sum(info.nbytes for info in store.list(entry.prefix))


def _check(store: Store, step: int | None, size: int, expected: int) -> None:
    states = [lora_at(0, rank, size) for rank in range(size)]
    Job(size, lambda rank: store).load(lambda rank: states[rank], step=step)
    for rank, state in enumerate(states):
        assert_is_lora(state, expected, rank, size)


def _manifest(store: Store, entry: LiveEntry) -> Manifest:
    return decode_manifest(read_manifest(store, entry))


@pytest.mark.parametrize("remembers", [True, False], ids=["same-process", "new-process"])
def test_a_training_with_frozen_weights_writes_what_changed(store: Store, remembers: bool) -> None:
    """The tensors are 95 % frozen: at most 6 % of the state, but for the first and fourth save.

    A state of 7 MiB, so that headers, manifest and checksums of small files do not hide it.
    """
    rows = 1200
    frozen = sum(t.nbytes for name, t in full_at(0, rows).items() if name.startswith("frozen"))
    assert 0.95 < frozen / nbytes_at(rows) < 0.955
    job = _job(2, store, remembers=remembers)
    written = []
    for step in range(1, 6):
        (report, _) = job.save(
            lambda rank, step=step: lora_at(step, rank, 2, rows), step=step, options=DEDUP
        )
        entry = live_entries(store)[-1]
        written.append(sum(info.nbytes for info in store.list(entry.prefix)))
        assert report.nbytes == written[-1]
        assert report.nbytes_referenced == (0 if step in (1, 4) else frozen)
    total = nbytes_at(rows)
    assert min(written[0], written[3]) > total
    few = [*written[1:3], *written[4:]]
    assert all(nbytes <= 0.06 * total for nbytes in few), [n / total for n in written]
    states = [lora_at(0, rank, 2, rows) for rank in range(2)]
    Job(2, lambda rank: store).load(lambda rank: states[rank])
    for rank, state in enumerate(states):
        assert_is_lora(state, 5, rank, 2)


def test_references_are_flat_however_many_saves_lie_between(store: Store) -> None:
    job = _job(2, store)
    for step in range(1, 8):
        _save(job, step)
    live = live_entries(store)
    assert [entry.step for entry in live if not entry.references] == [1, 4]
    assert all(entry.references == (live[0].attempt,) for entry in live[1:3])
    assert all(entry.references == (live[3].attempt,) for entry in live[4:])
    for entry in (*live[1:3], *live[4:]):
        manifest = _manifest(store, entry)
        assert manifest.references == entry.references
        assert manifest.header.required == ("references",)


def test_every_step_loads_on_any_number_of_ranks(store: Store) -> None:
    job = _job(3, store)
    for step in (1, 2, 3):
        _save(job, step)
    for step in (1, 2, 3):
        for size in (1, 2, 3, 4):
            _check(store, step, size, step)


def test_after_a_change_of_layout_only_regions_that_stayed_are_referred_to(store: Store) -> None:
    """Two ranks, then three, then three again: rows are cut elsewhere, the replica is not."""
    _save(_job(2, store), 1)
    three = _job(3, store)
    moved = _save(three, 2)
    assert moved > 0.8 * nbytes_at()
    manifest = _manifest(store, live_entries(store)[-1])
    referenced = {
        manifest.fqns[manifest.tensor_of(chunk)]
        for chunk in range(len(manifest.chunks))
        if manifest.files[int(manifest.chunks.file[chunk])].startswith("../")
    }
    assert referenced == {"replica"}
    again = _save(three, 3)
    assert again < moved / 2
    _check(store, None, 2, 3)


def test_a_save_without_dedup_between_two_with_it_is_the_end_of_references(store: Store) -> None:
    """It has no digests, so the one after it writes everything, and the next little again."""
    job = _job(2, store)
    full = _save(job, 1)
    job.save(lambda rank: lora_at(2, rank, 2), step=2)
    assert _save(job, 3) == full
    assert _save(job, 4) < full / 2
    assert [len(entry.references) for entry in live_entries(store)] == [0, 0, 0, 1]
    _check(store, None, 2, 4)


def test_ranks_that_want_different_things_get_one_error(store: Store) -> None:
    job = _job(2, store)
    _save(job, 1)
    with pytest.raises(RanksFailed, match="dedup=True was passed where rank 0 passed dedup=False"):
        _save_with(job, 2, lambda rank: SaveOptions(dedup=rank == 1))
    with pytest.raises(RanksFailed, match="dedup=False was passed where rank 0 passed dedup=True"):
        _save_with(job, 2, lambda rank: SaveOptions(dedup=rank == 0))
    _save(job, 3)
    _check(store, None, 2, 3)


def _save_with(job: Job, step: int, options_of: Callable[[int], SaveOptions]) -> None:
    def rank_main(world: World) -> None:
        store = job.store_of(world.rank)
        save_task(
            lora_at(step, world.rank, world.size),
            SaveTask(
                open_session(world, store, job.registry, sources=NO_WAITING),
                store,
                PartMemory(),
                step,
                options_of(world.rank),
            ),
        )

    run_ranks(job.size, rank_main)


def test_a_tensor_that_changes_and_changes_back_is_right_every_time(store: Store) -> None:
    """What was written at step 2 is not mistaken for what was written at step 1."""
    job = _job(1, store)
    for step, value in ((1, 1.0), (2, 2.0), (3, 1.0), (4, 2.0), (5, 1.0), (6, 1.0)):
        state = {"w": torch.full((64, 64), value), "v": torch.ones(8)}
        job.save(lambda rank, state=state: state, step=step, options=DEDUP)
        loaded = {"w": torch.zeros(64, 64), "v": torch.zeros(8)}
        job.load(lambda rank, loaded=loaded: loaded)
        assert torch.equal(loaded["w"], state["w"]) and torch.equal(loaded["v"], state["v"])
    held = [_manifest(store, entry).nbytes_referenced() for entry in live_entries(store)]
    assert [sum(one.values()) for one in held] == [0, 32, 32, 0, 32, 64 * 64 * 4 + 32]


def test_views_that_are_no_plain_memory_are_recognised_too(store: Store) -> None:
    """Transposed, strided, conjugated and tiny tensors are hashed as they are stored."""
    base = torch.arange(6000, dtype=torch.float32).reshape(60, 100)

    def state() -> dict[str, torch.Tensor]:
        return {
            "transposed": base.t(),
            "strided": base[:, ::3],
            "conjugated": torch.complex(base, base).conj(),
            "scalar": torch.tensor(5, dtype=torch.int64),
            "empty": torch.zeros(0, 3),
        }

    job = _job(1, store)
    job.save(lambda rank: state(), step=1, options=DEDUP)
    (report,) = job.save(lambda rank: state(), step=2, options=DEDUP)
    assert report.nbytes_referenced == 60 * 100 * 4 + 60 * 34 * 4 + 60 * 100 * 8 + 8
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    job.load(lambda rank: loaded)
    for name, tensor in state().items():
        assert torch.equal(loaded[name], tensor), name


def test_bytes_that_change_between_being_hashed_and_written_are_never_trusted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest of bytes that were not the written ones: the checksums differ, and the chunk is
    written. Here all digests of a save are those of another state."""
    job = _job(1, store)
    state = {"w": torch.zeros(4096)}
    wrong = previous.digest_of([bytes(4 * 4096)])
    with monkeypatch.context() as patch:
        patch.setattr(previous, "digest_of", lambda parts: wrong)
        job.save(lambda rank: {"w": torch.ones(4096)}, step=1, options=DEDUP)
    (report,) = job.save(lambda rank: state, step=2, options=DEDUP)
    assert report.nbytes_referenced == 0
    loaded = {"w": torch.ones(4096)}
    job.load(lambda rank: loaded)
    assert torch.equal(loaded["w"], state["w"])


# Retirement ---------------------------------------------------------------------------------------


def test_what_a_live_checkpoint_refers_to_cannot_be_retired(store: Store) -> None:
    job = _job(2, store)
    for step in (1, 2, 3):
        _save(job, step)
    first, second, third = live_entries(store)
    pruning = Maintenance.open(store)
    with pytest.raises(NotRetired, match=r"needed by e0"):
        pruning.retire(first.attempt)
    with pytest.raises(NotRetired):
        pruning.delete_retired(first.attempt, step=1)
    assert pruning.retire(second.attempt) is not None
    _check(store, None, 2, 3)
    _save(job, 4)
    assert pruning.retire(third.attempt) is not None
    _check(store, None, 3, 4)
    assert [entry.step for entry in live_entries(store)] == [1, 4]


class RetiringStore(WrappedStore):
    """Retires an attempt of the root when the manifest of another one is being written."""

    def __init__(self, inner: Store, retire: list[str]) -> None:
        super().__init__(inner)
        self.retire = retire

    def create(self, key: str, nbytes: int, **options: Any) -> Any:
        if key.endswith("MANIFEST") and self.retire:
            pruning = Maintenance.open(self.inner)
            for attempt in self.retire.pop(0).split():
                pruning.retire(attempt)
        return self.inner.create(key, nbytes, **options)


def test_a_reference_that_is_retired_meanwhile_is_written_anew(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 3 refers to step 1; just before its commit, steps 2 and 1 go, and step 0 stays."""
    job = _job(2, store)
    job.save(lambda rank: {"other": torch.zeros(3)}, step=0)
    full = _save(job, 1)
    _save(job, 2)
    _, first, second = live_entries(store)
    racing = RetiringStore(store, [f"{second.attempt} {first.attempt}"])
    with caplog.at_level(logging.WARNING, logger="ckpt.saving.save"):
        job.store_of = lambda rank: racing
        (report, _) = job.save(lambda rank: lora_at(3, rank, 2), step=3, options=DEDUP)
    assert report.nbytes == full and report.nbytes_referenced == 0
    assert "step 3 is written again" in caplog.text and first.attempt in caplog.text
    assert [entry.step for entry in live_entries(store)] == [0, 3]
    directories = {info.key.split("/")[1] for info in store.list("steps/")}
    assert directories == {entry.prefix.split("/")[1] for entry in live_entries(store)}
    _check(store, None, 2, 3)
    assert _save(job, 4) < full / 2


def test_the_last_of_three_tries_refers_to_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(1, store)
    _save(job, 1)
    tried: list[int] = []
    commit = Session.commit

    def refuse(session: Session, wanted: Commit) -> LiveEntry:
        tried.append(len(wanted.references))
        if wanted.references:
            raise ReferenceRetired("of a test")
        return commit(session, wanted)

    monkeypatch.setattr(Session, "commit", refuse)
    job.save(lambda rank: lora_at(2), step=2, options=DEDUP)
    assert tried == [1, 1, 0]
    _check(store, None, 1, 2)


def test_a_previous_manifest_that_is_damaged_costs_bytes_and_nothing_else(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    full = _save(_job(1, store), 1)
    entry = live_entries(store)[-1]
    key = entry.prefix + "MANIFEST"
    data = store.get(key)
    store.delete(key)
    store.put_if_absent(key, data[:-1] + bytes([data[-1] ^ 1]))
    with caplog.at_level(logging.WARNING, logger="ckpt.saving.dedup"):
        assert _save(_job(1, store), 2) == full
    assert "this save writes everything" in caplog.text
    _check(store, None, 2, 2)


def test_a_long_training_that_changes_a_little_of_everything_stays_small(store: Store) -> None:
    """A third of the tensors changes at each save, retention keeps two checkpoints: neither the
    number of checkpoints nor their bytes grow with the number of saves, and the last one loads."""
    generator = torch.Generator().manual_seed(3)
    # 18 MB: less than 16 MiB is kept alive whatever it is.
    tensors = {f"t{index:02}": torch.randn(500, 300, generator=generator) for index in range(30)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    job = _job(1, store)
    stayed = []
    for step in range(1, 17):
        for name in sorted(tensors):
            if torch.rand(1, generator=generator).item() < 1 / 3:
                tensors[name] = tensors[name] + 1
        job.save(lambda rank: tensors, step=step, options=DEDUP)
        live = live_entries(store)
        rule = KeepLatest(2)
        plan = plan_retention(live, rule, now_unix=0.0)
        gone, refused = carry_out(plan, Maintenance.open(store).retire)
        assert len(gone) == len(plan.retire) and not refused
        stayed.append(len(live_entries(store)))
        held = sum(info.nbytes for info in store.list("steps/"))
        assert held <= 2 * (1 + NBYTES_MULTIPLE_MAX) * total
    assert max(stayed) <= 2 * (1 + ATTEMPTS_MAX) and stayed[-1] < 20
    assert check_references(store) == []
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    job.load(lambda rank: loaded)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_new_session_sweeps_what_is_dead_and_nothing_that_is_referred_to(store: Store) -> None:
    history = History()
    recording = RecordingStore(store, history)
    job = _job(2, recording)
    for step in (1, 2, 3):
        _save(job, step)
    orphan = "steps/00000009-e000001-ffffffffffffffff/rank00000-000.safetensors"
    recording.put_if_absent(orphan, b"of a save that died")
    fresh = _job(2, recording)
    _save(fresh, 4)
    assert orphan not in {info.key for info in store.list("steps/")}
    pruning = Maintenance.open(recording)
    for entry in live_entries(store)[1:3]:
        pruning.retire(entry.attempt)
    assert check_all(store, history, files_of=files_needed) == []
    assert check_references(store) == []
    _check(store, None, 2, 4)


# Readers ------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three steps on disk, saved by two ranks; the later two refer to the first."""
    root = tmp_path / "root"
    job = _job(2, open_store(str(root)))
    for step in (1, 2, 3):
        _save(job, step)
    return root


def test_every_reader_reads_through_references(root: Path, tmp_path: Path) -> None:
    """open, verify, export and salvage, through the root."""
    full = full_at(3)
    with ckpt.open(str(root)) as opened:
        for name, tensor in full.items():
            prefix = "" if name == "frozen.0" else f"weights.{name}"
            stored = opened[f"{prefix}.tensor" if prefix else "replica"]
            assert torch.equal(stored, tensor), name
        parts = opened.info("weights.frozen.1.tensor").parts
        assert all(part.file.startswith("../00000001-") for part in parts)
    report = ckpt.verify(str(root))
    assert report.ok and report.step == 3
    target = tmp_path / "out.safetensors"
    ckpt.export(str(root), str(target), entry="")
    exported = load_file(str(target))
    assert torch.equal(exported["weights.frozen.1.tensor"], full["frozen.1"])
    store = open_store(str(root))
    for entry in live_entries(store):
        assert matches_manifest(store, salvage(store, entry.prefix)) is True


def test_a_lost_manifest_is_salvaged_to_the_committed_bytes(root: Path) -> None:
    store = open_store(str(root))
    entry = live_entries(store)[-1]
    (root / entry.prefix / "MANIFEST").unlink()
    with pytest.raises(Corrupt, match="ckpt mend"):
        find_checkpoint(store)
    write_manifest(store, salvage(store, entry.prefix))
    _check(store, None, 2, 3)


def test_a_bare_copy_is_refused_with_the_way_out_and_nothing_is_loaded(
    root: Path, tmp_path: Path
) -> None:
    entry = live_entries(open_store(str(root)))[-1]
    bare = shutil.copytree(root / entry.prefix, tmp_path / "bare")
    state = lora_at(9)
    for url in (str(bare), str(root / entry.prefix)):
        with pytest.raises(NoCheckpoint, match="ckpt cp ROOT TARGET --step 3"):
            ckpt.load(state, url)
        with pytest.raises(NoCheckpoint, match="dedup=True"):
            ckpt.open(url)
        with pytest.raises(NoCheckpoint, match="dedup=True"):
            ckpt.verify(url)
    assert_is_lora(state, 9)
    first = live_entries(open_store(str(root)))[0]
    copied = shutil.copytree(root / first.prefix, tmp_path / "first")
    state = lora_at(0)
    ckpt.load(state, str(copied))
    assert_is_lora(state, 1)


def test_listing_tells_what_a_step_needs(root: Path) -> None:
    first, *later = ckpt.list_steps(str(root))
    assert first.references == () and {step.references for step in later} == {(first.attempt,)}


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_in_a_referenced_file_is_found_by_load_and_verify(root: Path, damage: str) -> None:
    """It is damage of every step that refers there, and the message names the file."""
    store = open_store(str(root))
    first, _, last = live_entries(store)
    manifest = _manifest(store, last)
    chunk = int(manifest.chunks.file.argmax())
    name = manifest.files[int(manifest.chunks.file[chunk])].removeprefix("../")
    path = root / "steps" / name
    data = bytearray(path.read_bytes())
    data[int(manifest.chunks.byte_start[chunk])] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(data if damage == "flip" else data[:4200])
    assert first.prefix in f"steps/{name}"
    reported = ckpt.verify(str(root)).damage
    assert reported and all(one.file == f"steps/{name}" for one in reported)
    state = lora_at(0)
    with pytest.raises((CheckpointError, StorageError), match=name.replace(".", r"\.")):
        ckpt.load(state, str(root))


def test_a_copy_is_self_contained_and_says_the_same(root: Path, tmp_path: Path) -> None:
    """`ckpt cp` of a step writes it anew: it opens, verifies and salvages by its path alone."""
    target = tmp_path / "copy"
    ckpt.copy(str(root), str(target))
    state = lora_at(0)
    ckpt.load(state, str(target))
    assert_is_lora(state, 3)
    assert ckpt.verify(str(target)).ok
    with ckpt.open(str(target)) as opened:
        assert opened.manifest.references == () and opened.manifest.header.required == ()
    store = open_store(str(tmp_path))
    assert matches_manifest(store, salvage(store, "copy")) is True


def test_a_copied_root_keeps_its_references_and_goes_on(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    ckpt.copy(str(root), str(target), root=True)
    shutil.rmtree(root)
    store = open_store(str(target))
    assert [len(entry.references) for entry in live_entries(store)] == [0, 1, 1]
    full = sum(info.nbytes for info in store.list(live_entries(store)[0].prefix))
    for step in (1, 2, 3):
        _check(store, step, 2, step)
    assert _save(_job(2, store), 4) >= full  # the three before hang on one file
    assert _save(_job(2, store), 5) < full / 2
    assert check_references(store) == [] and ckpt.verify(str(target)).ok


def test_damage_in_what_is_not_referred_to_is_none_of_the_later_checkpoint(root: Path) -> None:
    """The first checkpoint's own adapters and values; `verify` and loads of step 3 do not mind."""
    store = open_store(str(root))
    first = _manifest(store, live_entries(store)[0])
    path = root / live_entries(store)[0].prefix / first.files[0]
    data = bytearray(path.read_bytes())
    tensor = first.index("weights.adapter.a.tensor")
    chunk = int(first.chunks.first[tensor])
    assert int(first.chunks.file[chunk]) == 0
    data[int(first.chunks.byte_start[chunk])] ^= 1
    data[data.index(encode_values(0.1)[1:]) + 1] ^= 1  # lr, among the values of step 1
    path.write_bytes(data)
    assert ckpt.verify(str(root)).ok
    _check(store, None, 2, 3)
    assert len(ckpt.verify(str(root), 1).damage) == 2


def test_a_local_copy_of_what_is_shared_serves_every_step(root: Path, tmp_path: Path) -> None:
    """A load of step 2 with `cache=` leaves what step 3 shares with it: its file may be gone."""
    state = lora_at(0)
    ckpt.load(state, str(root), step=2, cache=tmp_path / "cache")
    store = open_store(str(root))
    for file in (root / live_entries(store)[0].prefix).glob("*.safetensors"):
        file.unlink()
    ckpt.load(state, str(root), step=3, cache=tmp_path / "cache")
    assert_is_lora(state, 3)
