"""Whoever wrote the files of a checkpoint: they say of themselves all that its manifest says.

Method: every writer stores the same kinds of content, several files per rank; the manifest is
deleted and `ckpt salvage` builds it from the files alone. It must be equal to the byte, and what is
loaded then must be what was saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.commit.locate import live_entries, locate
from ckpt.commit.names import MANIFEST_NAME
from ckpt.commit.session import SessionRegistry, open_session
from ckpt.convert.targets import files as targets
from ckpt.format.datafile import PER_RANK, VALUES
from ckpt.format.datafile_index import describe_file, read_data_file_index
from ckpt.format.manifest_codec import decode_manifest
from ckpt.integrations import dcp as dcp_plugin
from ckpt.integrations.dcp import DcpWriter
from ckpt.saving.background import Background
from ckpt.saving.image import MIB, Staging, WritePath
from ckpt.saving.save import store_manifest
from ckpt.saving.staging import stage
from ckpt.saving.task import PartMemory, SaveOptions, SaveTask
from ckpt.world.base import SoloWorld, World
from storage import KeyExistsError, open_store
from storage.memory import MemoryStore
from tests.e2e.job import NO_WAITING, Job, assert_is_step, state_at
from tests.stores import PowerLossStore
from tests.thread_ranks import run_ranks

RANKS = 2
FILE_NBYTES_MAX = 64  # a few chunks of the state fit into one file


class Tied(nn.Module):
    """Two names of one weight, and buffers without elements."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        nn.init.constant_(self.head.weight, fill)
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("nothing_too", torch.empty(5, 0, dtype=torch.int16))


def full_state_at(step: int, rank: int, size: int) -> dict[str, Any]:
    """What changes from step to step, what does not, and all that is no chunk."""
    return {
        **state_at(step, rank, size),
        "frozen": {f"f{index}": torch.full((6,), float(index)) for index in range(12)},
        "turned": torch.arange(6.0).view(2, 3).t() + step,
        "model": Tied(step),
        "own": ckpt.PerRank({"rank": rank, "step": step}),
        "words": ["a", {"b": step}],
    }


def options(*, dedup: bool) -> SaveOptions:
    return SaveOptions(path=WritePath(file_nbytes_max=FILE_NBYTES_MAX), dedup=dedup)


def save_in_the_background(root: str, steps: list[int], *, dedup: bool) -> None:
    registry = SessionRegistry()

    def rank_main(world: World) -> None:
        store = open_store(root)
        session = open_session(world, store, registry, sources=NO_WAITING)
        background, staging, memory = Background(world), Staging(), PartMemory()
        for step in steps:
            task = SaveTask(session, store, memory, step, options(dedup=dedup))
            staged = stage(full_state_at(step, world.rank, world.size), task, staging)
            background.start(task, lambda staged=staged: staged).result(60)
        background.close()

    run_ranks(RANKS, rank_main)


def save_in_the_foreground(root: str, steps: list[int], *, dedup: bool) -> None:
    job = Job(RANKS, lambda rank: open_store(root), memories={})
    for step in steps:
        job.save(
            lambda rank, step=step: full_state_at(step, rank, RANKS), step, options(dedup=dedup)
        )


def lose_and_find(directory: Path) -> None:
    """Delete the manifest in `directory`, and have it built again."""
    for path in directory.glob("*.safetensors"):
        assert_tells_nothing_twice(path)
    path = directory / "MANIFEST"
    before = path.read_bytes()
    path.unlink()
    assert main(["salvage", str(directory)]) == 0
    assert path.read_bytes() == before


def assert_tells_nothing_twice(path: Path) -> None:
    """Only the first file of a rank tells of more than chunks, only rank 0 of common values."""
    data = path.read_bytes()
    index = read_data_file_index(lambda start, stop: data[start:stop], len(data), name=path.name)
    place = describe_file(index)
    if place.file_index:
        assert (place.empty_tensors, place.aliases, place.references) == ((), {}, ())
        assert PER_RANK not in index.extras
    assert (VALUES in index.extras) == (place.rank == place.file_index == 0)


def directory_of(root: Path) -> Path:
    return root / live_entries(open_store(str(root)))[-1].prefix


def files_of(directory: Path, rank: int) -> int:
    return len(list(directory.glob(f"rank{rank:05d}-*.safetensors")))


def assert_is_loaded(url: str, step: int) -> None:
    """`url` loads into ranks and has there what `full_state_at(step)` has."""
    states = [full_state_at(0, rank, RANKS) for rank in range(RANKS)]
    Job(RANKS, lambda rank: open_store(url)).load(lambda rank: states[rank])
    for rank, state in enumerate(states):
        expected = full_state_at(step, rank, RANKS)
        assert_is_step(state, step, rank, RANKS)
        assert torch.equal(state["turned"], expected["turned"])
        assert state["own"].value == expected["own"].value and state["words"] == expected["words"]
        for name, tensor in expected["frozen"].items():
            assert torch.equal(state["frozen"][name], tensor)
        assert torch.equal(state["model"].head.weight, expected["model"].head.weight)
    with ckpt.open(url) as checkpoint:
        assert len(checkpoint.aliases) == 1
        assert checkpoint["model.nothing"].shape == (0, 4)
        assert checkpoint["model.nothing_too"].dtype is torch.int16


@pytest.mark.parametrize("dedup", [False, True], ids=["whole", "dedup"])
@pytest.mark.parametrize("save", [save_in_the_foreground, save_in_the_background])
def test_files_of_a_save_say_what_its_manifest_says(save: Any, dedup: bool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(str(root), [1, 2], dedup=dedup)
    for entry in live_entries(open_store(str(root))):
        lose_and_find(root / entry.prefix)
    assert all(files_of(directory_of(root), rank) > 1 for rank in range(RANKS))
    assert bool(live_entries(open_store(str(root)))[-1].references) == dedup
    assert ckpt.verify(str(root)).ok
    assert_is_loaded(str(root), 2)


def test_values_of_more_parts_than_all_tensors_come_whole(tmp_path: Path) -> None:
    """In the background, parts are cut before anybody knows how long the values are."""
    root = str(tmp_path / "run")
    store, world = open_store(root), SoloWorld()
    session = open_session(world, store, SessionRegistry(), sources=NO_WAITING)
    state = {"t": torch.arange(MIB // 4), "notes": "n" * (5 * MIB // 2)}
    path = WritePath(part_nbytes=MIB)
    task = SaveTask(session, store, PartMemory(), 1, SaveOptions(path=path))
    staged = stage(state, task, Staging())
    background = Background(world)
    background.start(task, lambda: staged).result(60)
    background.close()
    lose_and_find(directory_of(tmp_path / "run"))
    loaded = {"t": torch.zeros(MIB // 4, dtype=torch.int64), "notes": ""}
    ckpt.load(loaded, root)
    assert loaded["notes"] == state["notes"] and torch.equal(loaded["t"], state["t"])


def test_files_of_a_resharded_checkpoint_say_what_its_manifest_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "FILE_NBYTES_MAX", FILE_NBYTES_MAX)
    root = tmp_path / "run"
    save_in_the_foreground(str(root), [1], dedup=False)
    target = tmp_path / directory_of(root).name  # the command knows directories of steps by these
    ckpt.reshard(str(root), str(target), ranks=RANKS)
    assert all(files_of(target, rank) > 1 for rank in range(RANKS))
    lose_and_find(target)
    assert ckpt.verify(str(target)).ok
    assert_is_loaded(str(target), 1)


@pytest.mark.parametrize("ranks", [1, 40])
def test_files_of_ranks_that_others_saved_for_say_what_their_manifest_says(
    tmp_path: Path, ranks: int
) -> None:
    """One rank has everything; of forty, some have nothing."""
    root = tmp_path / "run"
    save = Job(RANKS, lambda rank: open_store(str(root))).save
    save(lambda rank: {**state_at(4, rank, RANKS), "model": Tied(4)}, step=4)
    target = tmp_path / directory_of(root).name
    ckpt.reshard(str(root), str(target), ranks=ranks)
    assert [files_of(target, rank) for rank in range(ranks)] == [2] + [1] * (ranks - 1)
    lose_and_find(target)
    assert ckpt.verify(str(target)).ok and ckpt.diff(str(root), str(target)).identical


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_of_an_import_say_what_its_manifest_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "FILE_NBYTES_MAX", FILE_NBYTES_MAX)
    root, model = tmp_path / "run", Tied(3)
    own = {f"f{index}": torch.full((6,), float(index)) for index in range(12)}
    torch.save({"model": model.state_dict(), "own": own, "step": 7}, tmp_path / "a.pt")
    ckpt.import_checkpoint(str(tmp_path / "a.pt"), str(root))
    assert files_of(directory_of(root), 0) > 1
    lose_and_find(directory_of(root))
    with ckpt.open(str(root)) as checkpoint:
        assert checkpoint.values == {"step": 7}
        assert checkpoint.aliases == {"model.head.weight": "model.embed.weight"}
        assert checkpoint["model.nothing"].shape == (0, 4)
        assert torch.equal(checkpoint["model.embed.weight"], model.embed.weight)
        assert all(torch.equal(checkpoint[f"own.{name}"], own[name]) for name in own)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_of_a_save_by_dcp_say_what_its_manifest_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_plugin, "WritePath", lambda: WritePath(file_nbytes_max=FILE_NBYTES_MAX))
    root = tmp_path / "run"
    own = {f"f{index}": torch.full((6,), float(index)) for index in range(12)}
    large = torch.arange(8192.0).view(64, 128)  # too large to be packed with others
    tensors = {"nothing": torch.empty(0, 4), "large": large, "strided": large.t(), **own}
    state = {"step": 7, "words": ["a", {"b": 1}], "tensors": tensors}
    dcp.save(state, storage_writer=DcpWriter(str(root), step=3))
    assert files_of(directory_of(root), 0) > 1
    lose_and_find(directory_of(root))
    loaded: dict[str, Any] = {
        "step": 0,
        "words": ["", {"b": 0}],
        "tensors": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
    }
    ckpt.load(loaded, str(root))
    assert loaded["words"] == state["words"] and loaded["step"] == 7
    assert all(torch.equal(loaded["tensors"][name], tensors[name]) for name in tensors)
    assert ckpt.verify(str(root)).ok


@pytest.mark.parametrize("writer", ["save", "async_save", "import"])
def test_files_are_durable_before_their_checkpoint_exists(writer: str, tmp_path: Path) -> None:
    store = PowerLossStore(open_store(str(tmp_path / "run")))
    state = {"t": torch.arange(6.0), "step": 3}
    if writer == "save":
        ckpt.save(state, store, step=3, telemetry=False)  # that is written later, and may be lost
    elif writer == "async_save":
        ckpt.async_save(state, store, step=3, telemetry=False).result(60)
    else:
        torch.save(state, tmp_path / "a.pt")
        ckpt.import_checkpoint(str(tmp_path / "a.pt"), store, step=3)
    assert store.lose_power() == ()
    assert ckpt.verify(str(tmp_path / "run")).ok


def test_a_manifest_of_other_bytes_is_not_taken_for_ones_own() -> None:
    """As when `ckpt salvage` was faster; what it wrote must be this manifest, to the byte."""
    store = MemoryStore()
    ckpt.save({"x": torch.arange(6.0)}, store, step=1, telemetry=False)
    located = locate(store)
    assert located.entry is not None
    manifest, key = decode_manifest(located.data), located.entry.prefix + MANIFEST_NAME
    assert store_manifest(store, manifest).manifest_nbytes == len(located.data)
    store.delete(key)
    store.put_if_absent(key, located.data[:-1] + b"?")
    with pytest.raises(KeyExistsError):
        store_manifest(store, manifest)
