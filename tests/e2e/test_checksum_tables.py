"""The checksums are in the data files: every reader, dedup, requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.commit.locate import live_entries, read_manifest
from ckpt.errors import Corrupt
from ckpt.format.manifest import Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.block_sums import BlockCache
from ckpt.loading.load import LoadOptions
from ckpt.loading.plan import ReadPath
from ckpt.tools.salvage import salvage
from storage import Store, open_store
from storage.wrap import WrappedStore
from tests.e2e.job import Job
from tests.e2e.lora import DEDUP, assert_is_lora, full_at, lora_at
from tests.salvaged import matches_manifest


class ReadKeys(WrappedStore):
    """`inner`, noting the names of data files in the order of the requests for their bytes."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.names: list[str] = []
        self.ends: list[tuple[str, int]] = []

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        if key.endswith(".safetensors"):
            self.names.append(key.rpartition("/")[2])
            self.ends.append((key, start + sum(buffer.nbytes for buffer in buffers)))
        self.inner.get_into(key, start, buffers)


def test_a_damaged_block_is_named_with_its_bytes(tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(3 << 18)}, tmp_path, step=1)
    (path,) = tmp_path.rglob("*.safetensors")
    with path.open("r+b") as file:
        file.seek(4096 + (1 << 20) + 5)
        file.write(b"x")
    with pytest.raises(Corrupt, match=r"block 1 of 'w' \(bytes 1052672 to 2101248\)"):
        ckpt.open(tmp_path)["w"]


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.name}")


def manifest_of(store: Store) -> Manifest:
    return decode_manifest(read_manifest(store, live_entries(store)[-1]))


def job_of(size: int, store: Store, *, remembers: bool = True) -> Job:
    return Job(size, lambda rank: store, memories={} if remembers else None)


def save(job: Job, step: int) -> int:
    """Saves `step` with dedup; the bytes that it did not write."""
    reports = job.save(lambda rank: lora_at(step, rank, job.size), step=step, options=DEDUP)
    return reports[0].nbytes_referenced


def check(store: Store, size: int, step: int, path: ReadPath | None = None) -> int:
    """Loads the latest on `size` ranks, which must be `step`; bytes of tensors from the store."""
    states = [lora_at(0, rank, size) for rank in range(size)]
    options = LoadOptions(path=path or ReadPath())
    reports = Job(size, lambda rank: store).load(states.__getitem__, options=options)
    for rank, state in enumerate(states):
        assert_is_lora(state, step, rank, size)
    return sum(report.nbytes_read for report in reports)


@pytest.mark.parametrize("remembers", [True, False], ids=["same-process", "new-process"])
def test_saves_refer_to_what_files_say(store: Store, remembers: bool) -> None:
    """What is frozen is not written again; the manifest rebuilt from the files is the stored one;
    it loads on any number of ranks.
    """
    job = job_of(2, store, remembers=remembers)
    assert save(job, 1) == 0
    frozen = sum(t.nbytes for name, t in full_at(0).items() if name.startswith("frozen"))
    assert save(job, 2) == frozen
    manifest = manifest_of(store)
    assert manifest.references == (live_entries(store)[0].attempt,)
    assert matches_manifest(store, salvage(store, live_entries(store)[-1].prefix))
    for size in (1, 2, 3):
        check(store, size, 2)
    # What the other ranks wrote, a rank needs only where it has the same regions now.
    assert 0 < save(job_of(3, store), 3) < frozen
    check(store, 2, 3)


def test_a_new_process_reads_the_tables_of_its_own_files_alone(store: Store) -> None:
    """No rank needs the checksums of the others, the coordinator neither."""
    save(job_of(2, store), 1)
    seen = [ReadKeys(store) for _ in range(2)]
    assert save(Job(2, seen.__getitem__), 2)
    # The replica is rank 0's; each rank opens one file: header, table, digests.
    assert [set(one.names) for one in seen] == [
        {"rank00000-000.safetensors"},
        {"rank00001-000.safetensors"},
    ]
    assert [len(one.names) for one in seen] == [3, 3]


def test_a_damaged_table_is_not_referred_to(store: Store, tmp_path: Path) -> None:
    """The save that meets it writes everything of that file again, and loads."""
    root = str(tmp_path / "run")
    disk = open_store(root)
    save(job_of(2, disk), 1)
    (path,) = (tmp_path / "run").glob("steps/*/rank00001-000.safetensors")
    spoil(path)
    kept = save(job_of(2, disk), 2)
    manifest = manifest_of(disk)
    (shared,) = (name for name in manifest.files if name.startswith("../"))
    assert kept and shared.endswith("rank00000-000.safetensors")
    check(disk, 2, 2)


def spoil(path: Path) -> None:
    """Change one word of the table at the end of a file."""
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def test_tables_come_with_the_last_blocks_or_by_a_request_of_their_own(store: Store) -> None:
    """One more request per file, and none where the table is near."""
    job_of(2, store).save(lambda rank: lora_at(1, rank, 2), step=1)
    counts = []
    for path in (ReadPath(), ReadPath(gap_nbytes_max=0), ReadPath(readers=3, gap_nbytes_max=0)):
        seen = ReadKeys(store)
        check(seen, 1, 1, path)
        counts.append(sorted(seen.names))
    names = ["rank00000-000.safetensors", "rank00001-000.safetensors"]
    assert counts[0] == names
    # Rank 0's has the values between blocks and table; in rank 1's nothing is between them.
    assert counts[1] == counts[2] == [names[0], *names]
    # Many requests for a file share the one table.
    seen = ReadKeys(store)
    check(seen, 1, 1, ReadPath(request_nbytes_max=4096, readers=3))
    keys = [f"{live_entries(store)[0].prefix}{name}" for name in names]
    tables = [end for end in seen.ends if end[1] == store.info(end[0]).nbytes]
    assert len(seen.names) > 10 and sorted(tables) == [(k, store.info(k).nbytes) for k in keys]


def test_a_plan_lists_the_requests_that_a_load_makes(store: Store, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    disk = open_store(root)
    job_of(2, disk).save(lambda rank: lora_at(1, rank, 2), step=1)
    seen = ReadKeys(disk)
    check(seen, 1, 1)
    report = ckpt.plan_load(lora_at(0), root)
    assert report.ranks[0].requests == len(seen.names) == 2


def test_a_cache_keeps_tables_too(store: Store, tmp_path: Path) -> None:
    job_of(2, store).save(lambda rank: lora_at(1, rank, 2), step=1)
    for gap in (1 << 16, 0):
        path = ReadPath(cache=BlockCache(tmp_path / str(gap)), gap_nbytes_max=gap)
        assert check(store, 2, 1, path) > 0
        seen = ReadKeys(store)
        assert check(seen, 2, 1, path) == 0 and not seen.names


def test_every_tool_takes_them(tmp_path: Path) -> None:
    """verify, diff, copies of a step and of a root, export, reads of parts."""
    root, copied = str(tmp_path / "run"), str(tmp_path / "copied")
    disk = open_store(root)
    job = job_of(2, disk)
    for step in (1, 2):
        save(job, step)
    assert ckpt.verify(root).ok
    report = ckpt.diff(root, root, step_a=1, step_b=2, quick=True)
    assert len(report.changed) == 4 and report.same == len(ckpt.open(root)) - 4
    for whole_root in (False, True):
        target = f"{copied}{int(whole_root)}"
        ckpt.copy(root, target, root=whole_root)
        assert ckpt.verify(target).ok
        assert ckpt.diff(root, target).identical
        state = lora_at(0)
        ckpt.load(state, target)
        assert_is_lora(state, 2)
    selection = dict(entry="weights.adapter.a")
    ckpt.export(root, str(tmp_path / "model.safetensors"), **selection)
    with ckpt.open(root) as opened:
        name = next(name for name in opened if name.endswith("adapter.a.tensor"))
        assert torch.equal(opened.read(name, slice(1, 3)), full_at(2)["adapter.a"][1:3])


def test_tools_name_the_file_with_a_damaged_table(tmp_path: Path) -> None:
    """Also one that fits its own file, of another checkpoint."""
    root = str(tmp_path / "run")
    disk = open_store(root)
    for step in (1, 2):
        job_of(2, disk).save(lambda rank, step=step: lora_at(step, rank, 2), step=step)
    first, second = (tmp_path / "run" / e.prefix for e in live_entries(disk))
    name = "rank00001-000.safetensors"
    whole = (second / name).read_bytes()
    for damage in ("bit", "swapped", "cut"):
        (second / name).write_bytes(whole)
        if damage == "bit":
            spoil(second / name)
        elif damage == "cut":
            (second / name).write_bytes(whole[:-50])
        else:
            (second / name).write_bytes((first / name).read_bytes())
        report = ckpt.verify(root)
        assert report.damage and all(one.file.endswith(name) for one in report.damage), damage
        assert report.damage[0].block == -1 and len(report.damage) == 1, damage
        with pytest.raises(Corrupt, match=name):
            ckpt.copy(root, str(tmp_path / f"copied-{damage}"))
        with pytest.raises(Corrupt, match=name):
            ckpt.diff(root, root, step_a=1, step_b=2)
