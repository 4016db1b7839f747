"""Killed at any moment, an import or export leaves nothing that looks whole; run again, it ends.

Method: the store dies at its n-th operation, for every n, and refuses everything after that, as it
is when a process is gone. Then a fresh process does the same again, undisturbed.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
import ckpt.api
import ckpt.convert.export
from ckpt.convert.sources.opening import open_source
from ckpt.errors import RankFailed
from ckpt.world.base import SoloWorld
from storage import KeyExistsError, StorageError, Store, open_store
from storage.testing import FaultPlan, FaultyStore, Killed
from tests.conftest import Scale
from tests.convert.jobs import assert_same
from tests.results import Counted


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {f"layer{i}.weight": torch.randn(40 + i, 30) for i in range(5)} | {
        "half": torch.randn(7).bfloat16(),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "one": torch.tensor(3),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("dcp") / "source")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": tensors(), "step": 3}, checkpoint_id=folder)
    return folder


TARGETS: dict[str, dict[str, Any]] = {
    "model.safetensors": {"shard_bytes_max": 10_000},
    "one.safetensors": {},
    "model.pt": {},
    "directory": {"format": "dcp"},
}


def _kill(number: int) -> FaultPlan:
    return FaultPlan(number, kill=True, mode="before" if number % 2 else "after")


def whole(url: str, name: str) -> bool:
    """Whether what makes the export one thing is there."""
    last = {"model.safetensors": "model.safetensors.index.json", "directory": "directory/.metadata"}
    return any(info.key == last.get(name, name) for info in open_store(url).list(""))


@pytest.mark.parametrize("name", TARGETS)
def test_killed_exports_are_absent_or_whole_and_end_when_run_again(
    source: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    scale: Scale,
    counted: Counted,
    rng: random.Random,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(ckpt.convert.export, "PART_NBYTES", 8192)

    def run(number: int) -> bool:
        base = f"memory://kill-{tmp_path.name}-{number}"
        plan = _kill(number)

        def faulty(url: str, **options: Any) -> Store:
            store = open_store(url, **options)
            return FaultyStore(store, plan) if url.startswith("memory://") else store

        monkeypatch.setattr(ckpt.convert.export, "open_store", faulty)
        killed = _is_killed(lambda: ckpt.export(source, f"{base}/{name}", **TARGETS[name]))
        monkeypatch.setattr(ckpt.convert.export, "open_store", open_store)
        if killed:
            if whole(base, name):
                _compare(f"{base}/{name}")
            try:
                ckpt.export(source, f"{base}/{name}", **TARGETS[name])
            except ckpt.errors.CheckpointError as error:
                assert "exists already" in str(error)  # it had ended, but for its last breath
        _compare(f"{base}/{name}")
        left = [info.key for info in open_store(base).list("") if "unfinished" in info.key]
        assert not left
        counted(kills=int(killed))
        return plan.happened

    _for_every_operation(run, scale.count(12, 10_000), rng)


def _compare(url: str) -> None:
    opened = open_source(url)
    try:
        assert_same({name: opened.read(name) for name in opened.contents.tensors}, tensors())
    finally:
        opened.close()


def test_killed_imports_leave_the_root_as_it_was(
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    scale: Scale,
    counted: Counted,
    rng: random.Random,
    tmp_path: Path,
) -> None:
    def run(number: int) -> bool:
        url = f"memory://kill-import-{tmp_path.name}-{number}"
        plan = _kill(number)
        monkeypatch.setattr(ckpt.process, "this_process", ckpt.process.ProcessMemory())
        monkeypatch.setattr(
            ckpt.process, "open_store", lambda url, **o: FaultyStore(open_store(url, **o), plan)
        )
        killed = _is_killed(lambda: ckpt.import_checkpoint(source, url, step=3))
        monkeypatch.setattr(ckpt.process, "open_store", open_store)
        if killed:
            for info in ckpt.list_steps(url):
                assert ckpt.verify(info.url).ok
            monkeypatch.setattr(ckpt.process, "this_process", ckpt.process.ProcessMemory())
            ckpt.import_checkpoint(source, url, step=3, verify=True)
        with ckpt.open(url) as opened:
            assert_same({name: opened["model." + name] for name in tensors()}, tensors())
            assert opened.values == {"step": 3}
        counted(kills=int(killed))
        return plan.happened

    _for_every_operation(run, scale.count(12, 10_000), rng)


def _is_killed(run: Callable[[], object]) -> bool:
    """A store that should die after an operation lives on when that raised something itself."""
    try:
        run()
    except Killed:
        return True
    return False


def _for_every_operation(run: Callable[[int], bool], most: int, rng: random.Random) -> None:
    """`run(n)` for n from 1 on until it says that there was no n-th operation, or a sample."""
    total = 1
    while run(total):
        total *= 2
    assert total >= 8
    rest = [number for number in range(3, total) if number & (number - 1)]
    for number in sorted(rng.sample(rest, min(most, len(rest)))):
        run(number)


def killed_export(source: str, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export to `base` that dies when it publishes its second file."""
    plan = FaultPlan(0)

    def faulty(url: str, **options: Any) -> Store:
        store = open_store(url, **options)
        return FaultyStore(store, plan) if url.startswith("memory://") else store

    monkeypatch.setattr(ckpt.convert.export, "open_store", faulty)
    ckpt.export(source, f"{base}-dry/m.safetensors", shard_bytes_max=10_000)
    publishes = [n for n, (what, _) in enumerate(plan.operations, 1) if what == "publish"]
    plan = FaultPlan(publishes[1], kill=True)
    with pytest.raises(Killed):
        ckpt.export(source, f"{base}/m.safetensors", shard_bytes_max=10_000)
    monkeypatch.setattr(ckpt.convert.export, "open_store", open_store)


def test_another_export_does_not_go_on_after_a_killed_one(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = f"memory://other-{tmp_path.name}"
    killed_export(source, base, monkeypatch)
    half = dict(dtype="bfloat16")
    with pytest.raises(ckpt.errors.CheckpointError, match="of another export"):
        ckpt.export(source, f"{base}/m.safetensors", shard_bytes_max=10_000, **half)
    report = ckpt.export(source, f"{base}/m.safetensors", shard_bytes_max=10_000, verify=True)
    assert report.resumed == 1


@pytest.mark.parametrize("nbytes", [None, 8])
def test_a_killed_export_goes_on_with_its_own_files_alone(
    source: str, nbytes: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another file was put in the place of one that was finished: of the same size, or not."""
    base = f"memory://replaced-{tmp_path.name}-{nbytes}"
    killed_export(source, base, monkeypatch)
    store = open_store(base)
    (done,) = (info for info in store.list("") if info.key.endswith(".safetensors"))
    store.delete(done.key)
    store.put_if_absent(done.key, bytes(nbytes or done.nbytes))
    with pytest.raises(ckpt.errors.CheckpointError, match="is not the file to be written"):
        ckpt.export(source, f"{base}/m.safetensors", shard_bytes_max=10_000)
    assert store.get(done.key) == bytes(nbytes or done.nbytes)
    store.delete(done.key)
    ckpt.export(source, f"{base}/m.safetensors", shard_bytes_max=10_000, verify=True)


def test_a_failed_export_removes_no_file_of_another(source: str, tmp_path: Path) -> None:
    """Somebody creates the very file while it is being written: theirs stays, ours goes."""
    target = tmp_path / "m.safetensors"

    def progress(done: int, total: int) -> None:
        target.write_bytes(b"theirs")

    with pytest.raises(KeyExistsError):
        ckpt.export(source, str(target), progress=progress)
    assert target.read_bytes() == b"theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


class LosesRank(SoloWorld):
    """A world in which another rank is found dead when all files but the last are written."""

    dead: RankFailed | None = None

    @property
    def failure(self) -> RankFailed | None:
        return self.dead

    def agree(self, phase: str, error: BaseException | None) -> None:
        if phase == "write":
            self.dead = RankFailed("rank 1 died", rank=1, phase=phase)
            raise self.dead
        super().agree(phase, error)


def test_an_export_that_lost_a_rank_is_continued(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the dead rank has written is known to nobody, so nothing is removed."""
    target = str(tmp_path / "m.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(ckpt.convert.export, "world_of", lambda group: LosesRank())
        with pytest.raises(RankFailed):
            ckpt.export(source, target, shard_bytes_max=10_000)
    assert ckpt.export(source, target, shard_bytes_max=10_000, verify=True).resumed > 1


def test_a_failed_export_leaves_nothing(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = f"memory://failed-{tmp_path.name}"
    plan = FaultPlan(12)

    def faulty(url: str, **options: Any) -> Store:
        store = open_store(url, **options)
        return FaultyStore(store, plan) if url.startswith("memory://") else store

    monkeypatch.setattr(ckpt.convert.export, "open_store", faulty)
    with pytest.raises(StorageError):
        ckpt.export(source, f"{base}/m.safetensors", shard_bytes_max=10_000)
    assert plan.happened and not list(open_store(base).list(""))
