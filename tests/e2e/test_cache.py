"""A load with `cache=` reads nothing twice on one machine, and never trusts what it finds there.

Method: ranks as threads over a counting store; the cache directory is damaged, emptied, cut and
filled by others between loads, and the bytes that came from the store are counted.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.loading.block_sums import BlockCache
from ckpt.loading.load import LoadOptions
from ckpt.loading.plan import ReadPath
from storage import open_store
from tests.e2e.job import Job, Sharded
from tests.stores import CountingStore

MIB = 1 << 20
NBYTES = 3 * 6 * MIB


def _tensor(seed: int) -> torch.Tensor:
    return torch.randn((1024, 1536), generator=torch.Generator().manual_seed(seed))


def _state(size: int, dim: int | None, blank: bool = False) -> Callable[[int], Any]:
    def state_of(rank: int) -> dict[str, Any]:
        scale = 0.0 if blank else 1.0
        state: dict[str, Any] = {
            f"t{i}": Sharded(_tensor(i) * scale, rank, size, dim=dim) for i in range(3)
        }
        return state | {f"small{i}": torch.full((5,), i * scale) for i in range(20)}

    return state_of


class Cached:
    """One checkpoint that two ranks saved, and loads of it through a cache."""

    def __init__(self, name: str, directory: Path) -> None:
        self.store = CountingStore(open_store(f"memory://{name}"))
        self.directory = directory
        Job(2, lambda rank: self.store).save(_state(2, 0), step=1)

    def load(self, size: int = 2, dim: int | None = 0, nbytes_max: int | None = None) -> int:
        """Bytes of data files that came from the store; the state is right."""
        self.store.reset()
        states = [_state(size, dim, blank=True)(rank) for rank in range(size)]
        path = ReadPath(2 * MIB, readers=3, cache=BlockCache(self.directory, nbytes_max))
        reports = Job(size, lambda rank: self.store).load(
            lambda rank: states[rank], options=LoadOptions(path=path)
        )
        for rank, state in enumerate(states):
            expected = _state(size, dim)(rank)
            for name, value in state.items():
                wanted = expected[name]
                if isinstance(value, Sharded):
                    value, wanted = value.local, wanted.local
                assert torch.equal(value, wanted)
        nbytes = sum(report.nbytes_read for report in reports)
        # And the checksums of each file, unless the cache has them.
        assert 0 <= self.store.stats.nbytes.get("get_into", 0) - nbytes < 1000
        return nbytes

    def files(self) -> list[Path]:
        return sorted(self.directory.iterdir())


@pytest.fixture
def cached(request: pytest.FixtureRequest, tmp_path: Path) -> Cached:
    return Cached(request.node.name, tmp_path / "cache")


def test_a_second_load_reads_no_data_from_the_store(cached: Cached) -> None:
    assert cached.load() >= NBYTES
    assert cached.load() == 0


@pytest.mark.parametrize("dim", [0, 1, None], ids=["rows", "columns", "runs"])
def test_another_layout_is_served_from_the_same_copy(cached: Cached, dim: int | None) -> None:
    """What matters is where blocks lie in their files, not who wanted them."""
    cached.load()
    assert cached.load(3, dim) == 0


def test_damaged_blocks_are_read_again_and_put_right(cached: Cached, rng: random.Random) -> None:
    cached.load()
    for path in cached.files():
        data = bytearray(path.read_bytes())
        data[rng.randrange(8192, len(data) - 100_000)] ^= 1
        path.write_bytes(data)
    assert 0 < cached.load() < NBYTES
    assert cached.load() == 0


def test_content_of_someone_else_is_never_used(cached: Cached, tmp_path: Path) -> None:
    """Other bytes, other files, directories and links in the place of ours."""
    cached.load()
    first, second = cached.files()
    first.write_bytes(os.urandom(first.stat().st_size))
    second.unlink()
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    second.symlink_to(other)
    assert cached.load() >= NBYTES
    assert other.read_bytes() == b"precious"
    second.unlink()
    second.mkdir()
    cached.load()


def test_cut_files_serve_what_they_still_have(cached: Cached) -> None:
    cached.load()
    for path in cached.files():
        os.truncate(path, path.stat().st_size // 2)
    assert 0 < cached.load() < NBYTES
    assert cached.load() == 0


def test_a_full_cache_lets_old_checkpoints_go_and_nothing_foreign(
    cached: Cached, tmp_path: Path
) -> None:
    """Room for one checkpoint and a half: loads of two in turn keep the last, whole."""
    limit = NBYTES * 3 // 2
    foreign = cached.directory / "notes.txt"
    cached.directory.mkdir()
    foreign.write_text("mine")
    for name in ("a", "b"):
        another = Cached(f"{tmp_path.name}-{name}", cached.directory)
        assert another.load(nbytes_max=limit) >= NBYTES
        assert another.load(nbytes_max=limit) == 0
        assert sum(p.stat().st_blocks for p in cached.files()) * 512 <= limit + MIB
    assert foreign.read_text() == "mine"


def test_what_does_not_fit_is_not_kept_and_loads_all_the_same(cached: Cached) -> None:
    assert cached.load(nbytes_max=NBYTES // 2) >= NBYTES
    assert 0 < cached.load(nbytes_max=NBYTES // 2) < NBYTES
    assert sum(p.stat().st_blocks for p in cached.files()) * 512 <= NBYTES // 2 + MIB


def test_files_of_one_load_make_no_room_for_each_other(tmp_path: Path) -> None:
    """Whichever is read first."""
    data = [memoryview(bytearray(2 * MIB))]
    for keys in ("ab", "ba"):
        cache = BlockCache(tmp_path / "cache", 3 * MIB)
        cache.expect("root", "ab")
        for key in keys:
            if not cache.fill("root", key, 0, data):
                cache.keep("root", key, 0, data)
        assert cache.fill("root", "a", 0, data) and not cache.fill("root", "b", 0, data)


def test_a_cache_that_cannot_be_written_is_only_slow(
    cached: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    assert cached.load() >= NBYTES
    monkeypatch.undo()
    assert cached.load() >= NBYTES


def test_a_broken_cache_is_named_once_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BlockCache(tmp_path / "cache")
    data = [memoryview(bytes(100))]
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", _no_space)
        for key in "abc":
            cache.keep("root", key, 0, data)
    cache.keep("root", "d", 0, data)
    assert [record.message for record in caplog.records] == [
        f"the cache {tmp_path / 'cache'} cannot be written: [Errno 28] No space left on device"
    ]
    assert list((tmp_path / "cache").iterdir()) == []


def _no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_no_more_is_dropped_than_is_needed_and_the_oldest_first(tmp_path: Path) -> None:
    """Three files of others, used long ago; a fourth and a fifth of our own take their place."""
    data = [memoryview(os.urandom(MIB))]
    for age, key in ((20, "b"), (30, "a"), (10, "c")):
        BlockCache(tmp_path).keep("root", key, 0, data)
        (path,) = (file for file in tmp_path.iterdir() if file.stat().st_mtime > 1000)
        os.utime(path, (100 - age, 100 - age))
    limit = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir()) + MIB // 2
    cache = BlockCache(tmp_path, limit)

    def there() -> str:
        other, got = BlockCache(tmp_path), [memoryview(bytearray(MIB))]
        return "".join(key for key in "abcdefg" if other.fill("root", key, 0, got))

    ages = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert there() == "abc"
    for path, age in ages.items():
        os.utime(path, ns=(age, age))
    cache.keep("root", "d", 0, data)
    assert len(list(tmp_path.iterdir())) == 3
    cache.keep("root", "e", 0, data)
    cache.keep("root", "f", 0, data)
    cache.keep("root", "g", 0, data)  # has no room beside those that this object uses
    assert there() == "def"


def test_the_public_load_takes_a_cache_directory(tmp_path: Path) -> None:
    state = {"w": torch.arange(300_000.0)}
    url = str(tmp_path / "root")
    ckpt.save(state, url, step=1)
    for expected in (True, False):
        other = {"w": torch.zeros(300_000)}
        report = ckpt.load(other, url, cache=tmp_path / "cache")
        assert (report.nbytes_read > 0) is expected
        assert (report.nbytes_cached > 0) is not expected
        assert torch.equal(other["w"], state["w"])
    for path in (tmp_path / "root").rglob("*.safetensors"):
        path.unlink()
    ckpt.load({"w": torch.zeros(300_000)}, url, cache=tmp_path / "cache")
