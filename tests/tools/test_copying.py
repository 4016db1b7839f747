"""Copies and resharded checkpoints are bit-equal, verified, and whole or absent after any failure.

The copy of a checkpoint is opened, verified and compared by `diff`. Then every storage operation of
a copy fails, or kills the process, one after the other: the target must open as before, and running
again must finish.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
import storage
from ckpt.cli import main
from ckpt.commit.log import Log
from ckpt.commit.names import MANIFEST_NAME, step_prefix
from ckpt.commit.session import Session
from ckpt.convert.sources.source import NativeSource
from ckpt.convert.targets.files import Data, Meter, Output, fill_part
from ckpt.errors import CheckpointError, Corrupt, NoCheckpoint
from ckpt.format.checksum import crc32c
from ckpt.format.datafile import CHECKSUM_MAGIC
from ckpt.format.datafile_index import index_of
from ckpt.format.manifest import Manifest
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Box, Span, boxes_of, even_part
from ckpt.loading.checkpoint import Checkpoint
from ckpt.loading.contents import LocatedCheckpoint, find_checkpoint
from ckpt.tools.copy import copy_checkpoint, copy_root
from ckpt.tools.reshard import (
    NewLayout,
    commit_second_form,
    cut_for,
    new_header,
    own_layout,
    rewrite,
)
from ckpt.tools.salvage import salvage
from storage import StorageError, Store, open_store
from storage.memory import MemoryBucket, MemoryStore
from storage.testing import FaultPlan, FaultyStore, Killed
from tests.format.encoding import encode_manifest
from tests.stores import PowerLossStore
from tests.tools.conftest import data_files, make_net, sliced_net


def assert_same(a: str, b: str, **options: object) -> None:
    report = ckpt.diff(a, b, **options)  # type: ignore[arg-type]
    assert report.identical, report
    assert ckpt.verify(b).ok


def test_copy_opens_by_its_path_and_is_equal_to_the_byte(plain_root: str, tmp_path: Path) -> None:
    target = str(tmp_path / "copies" / "five")
    seen: list[tuple[int, int]] = []
    report = ckpt.copy(
        plain_root, target, step=5, progress=lambda done, total: seen.append((done, total))
    )
    assert report.steps == (5,) and report.nbytes == report.nbytes_written
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert_same(plain_root, target, step_a=5)
    folder = data_files(plain_root)[0].parent
    for name in {*os.listdir(folder)} - {"TELEMETRY"}:  # of the save, and no part of what it saved
        assert (folder / name).read_bytes() == (Path(target) / name).read_bytes()
    state = {"model": make_net(99), "epoch": 0}
    ckpt.load(state, target, skip=lambda name: not name.startswith(("model", "epoch")))
    assert state["epoch"] == 5


def test_second_run_writes_nothing(plain_root: str, tmp_path: Path) -> None:
    for expected in (True, False):
        report = ckpt.copy(plain_root, str(tmp_path / "copy"))
        assert bool(report.nbytes_written) is expected


def test_whole_root_goes_to_a_root_that_trainings_go_on_with(
    plain_root: str, tmp_path: Path
) -> None:
    target = str(tmp_path / "new")
    report = ckpt.copy(plain_root, target, root=True)
    assert report.steps == (5, 10)
    old, new = ckpt.list_steps(plain_root), ckpt.list_steps(target)
    assert [(i.step, i.attempt) for i in old] == [(i.step, i.attempt) for i in new]
    for step in (5, 10):
        assert_same(plain_root, target, step_a=step, step_b=step)
    ids = {Path(root, "FORMAT").read_text() for root in (plain_root, target)}
    assert len(ids) == 2, "two roots with one identity would be taken for one"
    assert len(list(Log(open_store(target)).history())) == 3
    ckpt.save({"x": torch.ones(3)}, target, step=11)
    assert [info.step for info in ckpt.list_steps(target)] == [5, 10, 11]
    assert len(ckpt.list_steps(plain_root)) == 2
    assert ckpt.copy(plain_root, target, root=True).nbytes_written == 0


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["fsdp2", "flat", "replicated"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_resharded_checkpoint_is_the_same_in_other_files(
    sliced_root: str, tmp_path: Path, layout: str, ranks: int
) -> None:
    target = str(tmp_path / "new")
    report = ckpt.reshard(sliced_root, target, ranks=ranks, layout=layout)  # type: ignore[arg-type]
    assert report.files == ranks + (layout == "replicated"), "one more for what all ranks read"
    assert_same(sliced_root, target)
    with ckpt.open(target) as ck:
        assert ck.world_size == ranks
        parts = ck.info("model.2.weight").parts
        assert len(parts) == (1 if layout == "replicated" else ranks)
        assert [part.file for part in parts] == sorted({part.file for part in parts})
    net = sliced_net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    ckpt.load({"model": net}, target)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_resharding_keeps_ties_values_and_empty_tensors(plain_root: str, tmp_path: Path) -> None:
    target = str(tmp_path / "new")
    ckpt.reshard(plain_root, target, ranks=3, layout="flat")
    assert_same(plain_root, target)
    with ckpt.open(plain_root) as old, ckpt.open(target) as new:
        assert (old.aliases, old.values) == (new.aliases, new.values)
        assert new["model.nothing"].shape == (0, 4)


def test_values_of_single_ranks_stay_with_their_ranks(tmp_path: Path) -> None:
    root, target = str(tmp_path / "run"), str(tmp_path / "new")
    ckpt.save({"x": torch.arange(40.0), "rng": ckpt.PerRank(7)}, root, step=1)
    ckpt.reshard(root, target, ranks=4)
    state = {"x": torch.zeros(40), "rng": ckpt.PerRank(0)}
    ckpt.load(state, target)
    assert state["rng"].value == 7 and torch.equal(state["x"], torch.arange(40.0))


@pytest.mark.ranks
def test_manifest_of_a_resharded_checkpoint_can_be_salvaged(
    sliced_root: str, tmp_path: Path
) -> None:
    """The data files have everything that MANIFEST has, to the byte."""
    target = tmp_path / "new" / "copy"
    ckpt.reshard(sliced_root, str(target), ranks=2)
    report = salvage(open_store(str(target.parent)), "copy")
    assert report.manifest is not None, report.problems
    assert encode_manifest(report.manifest) == (target / "MANIFEST").read_bytes()


@pytest.mark.ranks
def test_own_layout_gives_the_same_chunks(sliced_root: str) -> None:
    source = open_store(sliced_root)
    checkpoint = Checkpoint(source, find_checkpoint(source))
    target = MemoryStore()
    old = checkpoint.manifest
    new = rewrite(checkpoint, old.header, own_layout(old), target, threads=2, meter=Meter(0, None))
    # The tables hold checksums of headers, and only rank 0 lists empty tensors in the new ones.
    assert encode_manifest(replace(new, seals=old.seals)) == encode_manifest(old)


def test_even_parts_are_those_of_torch_and_cover_everything() -> None:
    for shape in ((7, 3), (2, 2), (8,), (1, 5)):
        numel = torch.Size(shape).numel()
        for ranks in (1, 2, 3, 5):
            rows = torch.arange(numel).view(shape).chunk(ranks)
            seen: list[int] = []
            for rank in range(ranks):
                part = even_part(shape, rank, ranks, "fsdp2")
                assert isinstance(part, Box)
                assert part.shape[0] == (rows[rank].shape[0] if rank < len(rows) else 0)
                span = even_part(shape, rank, ranks, "flat")
                assert isinstance(span, Span)
                seen += range(span.start, span.stop)
            assert seen == list(range(numel))
    assert even_part((), 1, 2, "fsdp2") is None and even_part((4,), 1, 2, "replicated") is None


def test_parts_of_a_region_follow_its_order(tmp_path: Path) -> None:
    """Parts of any length of a box, or of a run, hold its elements in row-major order."""
    shape = (5, 6, 7)
    tensor = torch.arange(5 * 6 * 7).view(shape)
    ckpt.save({"x": tensor}, tmp_path / "run", step=1)
    with ckpt.open(str(tmp_path / "run")) as checkpoint:
        source = NativeSource(checkpoint)
        output = Output("x", source.contents.tensors["x"], DTYPES["int64"], tensor.nbytes)
        for region in (
            Span(3, 200),
            Box((0, 0, 0), shape),
            Box((1, 2, 3), (4, 3, 2)),
            Box((0, 1, 0), (5, 5, 7)),
        ):
            expected = torch.cat([_cut(tensor, box).flatten() for box in boxes_of(region, shape)])
            for numel in (1, 5, 8, 50, 1000):
                data = memoryview(bytearray(8 * region.numel))
                pieces = [Data(0, len(data), output, region)]
                for start in range(0, len(data), 8 * numel):
                    fill_part(source, pieces, start, data[start : start + 8 * numel])
                assert data.cast("q").tolist() == expected.tolist()


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


def test_checkpoint_gets_a_second_form_in_its_root(plain_root: str, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    shutil.copytree(plain_root, root)
    report = ckpt.reshard(root, ranks=3)
    second, old, first = ckpt.list_steps(root)
    assert (old.step, first.step, second.step) == (5, 10, 10) and report.target == second.url
    assert report.attempt == second.attempt and second.line is None
    assert_same(first.url, second.url)
    assert {part.file[:9] for part in ckpt.open(second.url).info("model.big").parts} == {
        f"rank0000{rank}" for rank in range(3)
    }
    for step in (None, 10):
        with ckpt.open(root, step) as checkpoint:
            assert checkpoint.url == first.url
    again = ckpt.reshard(root, ranks=3)
    assert again.nbytes_written == 0 and again.target == report.target
    assert len(ckpt.list_steps(root)) == 3
    assert ckpt.reshard(root, ranks=2, step=5).nbytes_written > 0
    ckpt.save({"x": torch.ones(1)}, root, step=11)
    assert [info.step for info in ckpt.list_steps(root)] == [10, 5, 5, 10, 11]


def test_step_directory_has_no_place_for_a_second_form(plain_root: str) -> None:
    with pytest.raises(CheckpointError, match="give a target"):
        ckpt.reshard(ckpt.list_steps(plain_root)[0].url, ranks=2)


def test_second_form_never_becomes_what_a_training_resumes(tmp_path: Path) -> None:
    """The copy of step 1 is ready when step 2 appears, or another session claims the root."""
    root = str(tmp_path / "run")
    ckpt.save({"x": torch.ones(9)}, root, step=1)
    store = open_store(root)

    def copied() -> tuple[LocatedCheckpoint, Manifest]:
        source = find_checkpoint(store)
        epoch = Log(store).state().epoch
        header = new_header(source.manifest, NewLayout(1), epoch=epoch)
        manifest = replace(source.manifest, header=header)
        key = step_prefix(header.step, header.attempt) + MANIFEST_NAME
        store.put_if_absent(key, encode_manifest(manifest))
        return source, manifest

    copy = copied()
    ckpt.save({"x": torch.ones(9)}, root, step=2)
    commit_second_form(store, *copy)
    assert [(info.step, info.line) for info in ckpt.list_steps(root)] == [(1, None), (1, 0), (2, 0)]
    copy = copied()
    Session.claim(store)
    with pytest.raises(CheckpointError, match="claimed by a new session"):
        commit_second_form(store, *copy)
    assert [info.step for info in ckpt.list_steps(root)] == [1, 1, 2]


@pytest.mark.parametrize("mode", ["before", "after"])
def test_resharding_in_a_root_leaves_the_latest_loadable_at_every_death(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stores, that of the root and that of the new directory, die at the n-th operation."""

    def run(number: int, plan: FaultPlan) -> str:
        url = f"memory://in-root-{mode}-{number}"
        if not list(open_store(url).list("")):
            ckpt.save({"x": torch.arange(300.0) * 2, "n": 2}, url, step=2)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(storage, "open_store", lambda url: FaultyStore(open_store(url), plan))
            ckpt.reshard(url, ranks=2, threads=1)
        return url

    dry = FaultPlan(0)
    run(0, dry)
    for nth in range(1, len(dry.operations) + 1):
        url = run(nth, FaultPlan(nth, kill=True, mode=mode))  # type: ignore[arg-type]
        state = {"x": torch.zeros(300), "n": 0}
        ckpt.load(state, url)
        assert torch.equal(state["x"], torch.arange(300.0) * 2)
        run(nth, FaultPlan(0))
        assert [info.step for info in ckpt.list_steps(url)] == [2, 2]
        assert ckpt.verify(url).ok and ckpt.diff(url, url, step_a=2).identical


@pytest.fixture
def sharing_root(tmp_path: Path) -> str:
    """Step 2 needs the file of step 1 for what did not change."""
    root = str(tmp_path / "sharing")
    torch.manual_seed(0)
    state = {"frozen": torch.randn(300_000), "w": torch.randn(400, 3), "n": 1}
    ckpt.save(state, root, step=1, dedup=True)
    ckpt.save(state | {"w": state["w"] + 1, "n": 2}, root, step=2, dedup=True)
    assert ckpt.list_steps(root)[-1].references
    return root


def test_copy_of_a_checkpoint_that_shares_files_needs_no_other(
    sharing_root: str, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "copy"
    ckpt.copy(sharing_root, str(target), step=2)
    ckpt.reshard(sharing_root, str(tmp_path / "resharded"), ranks=2)
    moved = tmp_path / "moved"
    shutil.move(sharing_root, moved)
    for copy in (str(target), str(tmp_path / "resharded")):
        assert_same(str(moved), copy)
        with ckpt.open(copy) as ck:
            assert not ck.manifest.references and not ck.manifest.header.required
    salvaged = salvage(open_store(str(target.parent)), "copy")
    assert salvaged.manifest is not None, salvaged.problems
    assert encode_manifest(salvaged.manifest) == (target / "MANIFEST").read_bytes()
    assert ckpt.copy(str(moved), str(target), step=2).nbytes_written == 0


def test_copy_of_a_root_keeps_what_its_checkpoints_share(sharing_root: str, tmp_path: Path) -> None:
    target = str(tmp_path / "new")
    report = ckpt.copy(sharing_root, target, root=True)
    assert report.nbytes == sum(path.stat().st_size for path in data_files(target))
    shutil.rmtree(sharing_root)
    for step in (1, 2):
        assert ckpt.verify(target, step).ok
    assert ckpt.list_steps(target)[-1].references


# Damage and mistakes ----------------------------------------------------------------------------


def test_changed_bytes_are_never_published(plain_root: str, tmp_path: Path) -> None:
    """In the header, in a block that two parts of the copy share, in the checksums, in values."""
    root = tmp_path / "run"
    shutil.copytree(plain_root, root)
    path = data_files(str(root))[-1]
    size = path.stat().st_size
    for offset in (20, 5000, size // 2, size - 2, size - 200):
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
        with pytest.raises(Corrupt, match=path.name):
            ckpt.copy(str(root), str(tmp_path / "copy"))
        assert not (tmp_path / "copy" / "MANIFEST").exists()
        assert not (tmp_path / "copy" / path.name).exists()
        data[offset] ^= 1
        path.write_bytes(data)
    ckpt.copy(str(root), str(tmp_path / "copy"))
    assert ckpt.verify(str(tmp_path / "copy")).ok


def test_damaged_source_is_not_resharded(plain_root: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(plain_root, root)
    path = data_files(str(root))[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"block \d+ of"):
        ckpt.reshard(str(root), str(tmp_path / "new"), ranks=2)
    with pytest.raises(NoCheckpoint):
        ckpt.open(str(tmp_path / "new"))


@pytest.mark.parametrize("command", ["copy", "reshard"])
def test_a_copy_that_has_ended_can_be_repeated_whatever_else_is_there(
    plain_root: str, tmp_path: Path, command: str
) -> None:
    def run() -> ckpt.reports.CopyReport:
        if command == "copy":
            return ckpt.copy(plain_root, str(tmp_path / "copy"))
        return ckpt.reshard(plain_root, str(tmp_path / "copy"), ranks=2)

    first = run()
    (tmp_path / "copy" / "notes.txt").write_text("mine")
    again = run()
    assert again.nbytes_written == 0 and again.attempt == first.attempt
    (tmp_path / "copy" / "MANIFEST").unlink()
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        run()


def test_a_file_of_the_same_header_and_other_bytes_is_refused(
    plain_root: str, tmp_path: Path
) -> None:
    """A whole file, with checksums that fit its bytes: no earlier run has left it."""
    target = tmp_path / "copy"
    ckpt.copy(plain_root, str(target), step=5)
    (target / "MANIFEST").unlink()
    path = min(target.iterdir())
    data = bytearray(path.read_bytes())
    index = index_of(open_store(str(target)), path.name, len(data))
    start, nbytes = int(index.offsets[0]), index.chunks[0].nbytes
    data[start] ^= 1
    sums = index.checksums.copy()
    sums[0] = crc32c(bytes(data[start : start + min(nbytes, index.block_bytes)]))
    words = [CHECKSUM_MAGIC, crc32c(index.header), *index.extra_checksums.values(), *sums.tolist()]
    body = np.array(words, dtype="<u4").tobytes()
    data[index.checksum_offset :] = body + crc32c(body).to_bytes(4, "little")
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is not the file to be written"):
        ckpt.copy(plain_root, str(target), step=5)
    assert path.read_bytes() == data


@pytest.mark.parametrize("command", ["copy", "reshard"])
def test_nothing_that_exists_is_overwritten(plain_root: str, tmp_path: Path, command: str) -> None:
    def run(target: Path) -> None:
        if command == "copy":
            ckpt.copy(plain_root, str(target))
        else:
            ckpt.reshard(plain_root, str(target), ranks=2)

    ckpt.save({"x": torch.ones(1)}, str(tmp_path / "root"), step=0)
    with pytest.raises(CheckpointError, match="is the root of a run"):
        run(tmp_path / "root")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        run(tmp_path / "other")
    ckpt.copy(plain_root, str(tmp_path / "five"), step=5)
    with pytest.raises(CheckpointError, match="nothing is ever overwritten"):
        run(tmp_path / "five")
    assert ckpt.verify(str(tmp_path / "five")).ok


# Failing and dying at every operation -----------------------------------------------------------


@pytest.fixture(scope="module")
def source() -> Store:
    """Two steps, two files each: enough for every kind of operation of a copy."""
    url = "memory://copied-small"
    store = open_store(url)
    for step in (1, 2):
        state = {"x": torch.arange(300.0) * step, "y": torch.ones(2, 2), "n": step}
        ckpt.save(state, url, step=step)
    return store


def copied_one(source: Store, target: Store) -> None:
    copy_checkpoint(source, find_checkpoint(source, 2), target, threads=1)


def copied_root(source: Store, target: Store) -> None:
    copy_root(source, target, threads=1)


def resharded(source: Store, target: Store) -> None:
    checkpoint = Checkpoint(source, find_checkpoint(source, 2))
    new = NewLayout(2, "flat")
    header = new_header(checkpoint.manifest, new)
    layout = cut_for(checkpoint.manifest, new, header.world_size)
    rewrite(checkpoint, header, layout, target, threads=1, meter=Meter(0, None))


def is_absent(bucket: MemoryBucket) -> bool:
    try:
        find_checkpoint(MemoryStore(bucket))
    except (Corrupt, NoCheckpoint):  # there is no FORMAT yet
        return True
    return False


def check_whole(bucket: MemoryBucket) -> None:
    store = MemoryStore(bucket)
    opened = Checkpoint(store, find_checkpoint(store))
    assert torch.equal(opened["x"], torch.arange(300.0) * 2) and opened.values["n"] == 2


@pytest.mark.parametrize("work", [copied_one, copied_root, resharded])
@pytest.mark.parametrize(
    ("kill", "mode"), [(False, "before"), (False, "after"), (True, "before"), (True, "after")]
)
def test_target_is_absent_or_whole_and_running_again_finishes(
    source: MemoryStore, work: Callable[[Store, Store], None], kill: bool, mode: str
) -> None:
    """Every operation on the target, the n-th for every n, fails or is the last one.

    Then the power fails: what was not synced is lost.
    """
    dry = FaultPlan(0)
    work(source, FaultyStore(MemoryStore(), dry))
    total = len(dry.operations)
    assert total > 5
    for nth in range(1, total + 1):
        bucket = MemoryBucket()
        plan = FaultPlan(nth, kill=kill, mode=mode)  # type: ignore[arg-type]
        disk = PowerLossStore(MemoryStore(bucket))
        try:
            work(source, FaultyStore(disk, plan))
        except (StorageError, Killed):
            disk.lose_power()
        else:
            # What had happened already was found out, or cleaning up needed no success.
            assert not disk.lose_power()
            check_whole(bucket)
        assert plan.happened
        if not is_absent(bucket):
            check_whole(bucket)
        work(source, MemoryStore(bucket))
        check_whole(bucket)


@pytest.mark.parametrize("work", [copied_one, copied_root, resharded])
def test_failing_reads_leave_the_target_absent(
    source: MemoryStore, work: Callable[[Store, Store], None]
) -> None:
    dry = FaultPlan(0)
    work(FaultyStore(source, dry), MemoryStore())
    for nth in range(1, len(dry.operations) + 1):
        bucket = MemoryBucket()
        with pytest.raises(StorageError, match="injected"):
            work(FaultyStore(source, FaultPlan(nth)), MemoryStore(bucket))
        assert is_absent(bucket)


@pytest.mark.parametrize("work", [copied_one, copied_root, resharded])
def test_file_that_lost_bytes_in_a_power_failure_is_written_again(
    source: MemoryStore, work: Callable[[Store, Store], None], tmp_path: Path
) -> None:
    """Its header and its checksums reached the disk, a block in the middle did not."""
    work(source, open_store(str(tmp_path)))
    for last in ("MANIFEST", "FORMAT"):
        for path in tmp_path.rglob(last):
            path.unlink()
    for path in tmp_path.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[4097:4107] = bytes(10)
        path.write_bytes(data)
    work(source, open_store(str(tmp_path)))
    assert ckpt.verify(str(tmp_path)).ok


@pytest.mark.ranks
def test_killed_run_is_continued_not_begun_anew(sliced_root: str) -> None:
    """Three files; the run dies in the third: the first two are not written again."""
    source = open_store(sliced_root)
    checkpoint = find_checkpoint(source)
    dry = FaultPlan(0)
    copy_checkpoint(source, checkpoint, FaultyStore(MemoryStore(), dry), threads=1)
    third = [n for n, (what, _) in enumerate(dry.operations, 1) if what == "publish"][2]
    bucket = MemoryBucket()
    with pytest.raises(Killed):
        store = FaultyStore(MemoryStore(bucket), FaultPlan(third, kill=True))
        copy_checkpoint(source, checkpoint, store, threads=1)
    report = copy_checkpoint(source, checkpoint, MemoryStore(bucket))
    assert report.nbytes_written == int(checkpoint.manifest.file_nbytes[2])


@pytest.mark.ranks
@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", [["cp"], ["reshard", "--ranks", "3"]], ids=lambda c: c[0])
def test_command_killed_by_the_system_is_continued(tmp_path: Path, command: list[str]) -> None:
    """SIGKILL as soon as something is at the target; a file under construction counts."""
    root, target = str(tmp_path / "run"), tmp_path / "copy"
    torch.manual_seed(0)
    ckpt.save({f"x{index}": torch.randn(4 << 20) for index in range(3)}, root, step=1)
    line = [sys.executable, "-m", "ckpt", *command, root, str(target)]
    running = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    while not (target.exists() and os.listdir(target)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(timeout=0.01)
            break
    running.kill()
    running.wait()
    if running.returncode:
        with pytest.raises((Corrupt, NoCheckpoint)):
            ckpt.open(str(target))
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, timeout=120)
    assert_same(root, str(target))
    assert not [name for name in os.listdir(target) if name.startswith(".tmp-")]


# The commands -----------------------------------------------------------------------------------


def test_commands_say_what_they_did(
    plain_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cp", plain_root, str(tmp_path / "copy"), "--step", "5"]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "copy") in out and "step 5: 1 file," in out
    assert main(["cp", plain_root, str(tmp_path / "copy"), "--step", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nbytes_written"] == 0
    assert main(["cp", "--root", plain_root, str(tmp_path / "root")]) == 0
    assert "step 5, 10" in capsys.readouterr().out
    assert main(["reshard", plain_root, str(tmp_path / "new"), "--ranks", "2"]) == 0
    assert "step 10: 3 files" in capsys.readouterr().out
    assert main(["diff", plain_root, str(tmp_path / "new")]) == 0


def test_a_root_has_no_step_to_copy(plain_root: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cp", plain_root, "target", "--root", "--step", "5"])
    assert "leave out --step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cp", "/nowhere/run", "TARGET"], "no shardpoint checkpoint"),
        (["cp", "ROOT", "TARGET", "--step", "7"], "has no step 7"),
        (["cp", "ROOT", "ROOT"], "is the root of a run"),
        (["reshard", "ROOT", "ROOT", "--ranks", "2"], "is the root of a run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_reported_in_one_line(
    plain_root: str,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"ROOT": plain_root, "TARGET": str(tmp_path / "target")}
    assert main([names.get(argument, argument) for argument in arguments]) == 1
    err = capsys.readouterr().err
    assert err.startswith("ckpt: error: ") and message in err and err.count("\n") == 1
    assert not (tmp_path / "target").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_target_without_permission_is_reported(
    plain_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert main(["cp", plain_root, str(tmp_path / "closed" / "copy")]) == 1
    assert "give this user the right to" in capsys.readouterr().err
