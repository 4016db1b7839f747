"""What the page cache may take, and which files leave it: read from planted files, and counted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from storage import page_cache
from storage.local import LocalStore
from storage.page_cache import memory_left
from storage.testing import write_object

pytestmark = pytest.mark.syncs  # what is not on the disk stays in the cache
MIB = 1 << 20
V1 = "4:memory:/jobs/mine\n3:cpuset:/\n"
V2 = "0::/jobs/mine\n"


def _left(place: Path, groups: str, limits: Mapping[str, tuple[object, object, str]]) -> int:
    """With 64 MiB available on the host; `limits` of groups: limit, use and statistics."""
    proc, cgroups = place / "proc", place / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable: {64 << 10} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    is_first = groups == V1
    names = ("limit_in_bytes", "usage_in_bytes") if is_first else ("max", "current")
    for group, (limit, used, statistics) in limits.items():
        folder = cgroups / ("memory" if is_first else "") / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
        (folder / f"memory.{names[1]}").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(statistics)
    return memory_left(str(proc), str(cgroups))


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        (V2, {}, 64),
        (V2, {"jobs/mine": ("max", 5 * MIB, "")}, 64),
        (V2, {"jobs/mine": (30 * MIB, 20 * MIB, "")}, 10),
        (V2, {"jobs/mine": ("max", 5 * MIB, ""), "jobs": (30 * MIB, 25 * MIB, "")}, 5),
        (V2, {"": (30 * MIB, 24 * MIB, "")}, 6),  # a container that sees itself at the top
        (V2, {"jobs": (9 * MIB, 9 * MIB, f"active_file {MIB}\ninactive_file {2 * MIB}\n")}, 3),
        (V2, {"jobs": (5 * MIB, 9 * MIB, "")}, 0),
        (V1, {"jobs/mine": (30 * MIB, 20 * MIB, f"total_inactive_file {MIB}\n")}, 11),
        (V1, {"jobs/mine": ((1 << 63) - 4096, 20 * MIB, "")}, 64),
        ("", {"": (MIB, 0, "")}, 64),
    ],
)
def test_memory_is_left_within_the_limits_of_all_groups(
    tmp_path: Path,
    groups: str,
    limits: Mapping[str, tuple[object, object, str]],
    expected: int,
) -> None:
    assert _left(tmp_path, groups, limits) == expected * MIB


def test_no_memory_is_left_where_the_system_is_silent(tmp_path: Path) -> None:
    assert memory_left(str(tmp_path), str(tmp_path)) == 0


def test_files_of_the_last_save_make_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same bytes, and before these are written. Files of one save never do for each other,
    small ones and those around the cache are left alone, and deleted ones are no error."""
    dropped: list[str] = []

    def noted(path: str) -> None:
        dropped.append(os.path.relpath(path, tmp_path))
        os.close(os.open(path, os.O_RDONLY))

    monkeypatch.setattr(page_cache, "_drop", noted)
    store = LocalStore(str(tmp_path))

    def write(key: str, mib: float, *, direct: bool = False) -> list[str]:
        dropped.clear()
        write_object(store, key, bytes(int(mib * MIB)), part_nbytes=16 * MIB, direct=direct)
        return list(dropped)

    assert write("a/one/x", 4) == write("a/one/y", 6) == write("b/one/z", 5) == []
    assert write("a/two/small", 1) == write("a/two/x", 8, direct=True) == []
    assert write("a/two/y", 4) == ["a/one/x"]
    assert write("a/two/z", 7) == ["a/one/y", "b/one/z"]
    store.delete("a/two/y")
    assert write("a/three/x", 9) == ["a/two/y", "a/two/z"]
    assert write("a/three/y", 9) == []


# In a group of its own from the start: memory that was there before counts for the old group.
IN_A_GROUP = """
import os, sys
place, group, nbytes = sys.argv[1:]
open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
import torch, ckpt
from storage.file_io import cached_nbytes
path = f"{place}/others"
with open(path, "wb") as file:
    file.write(bytes(64 << 20))
    os.fsync(file.fileno())
os.posix_fadvise(os.open(path, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
state = {"x": torch.ones(int(nbytes) // 4)}
fd = os.open(path, os.O_RDONLY)
while os.read(fd, 1 << 20):
    pass
root = f"{place}/run"
for step in range(4):
    state["x"].add_(1)
    ckpt.save(state, root, step=step)
saved = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
data = sorted(name for name in saved if name.endswith("safetensors"))[-1]
kept = [cached_nbytes(os.open(one, os.O_RDONLY), 0, os.path.getsize(one)) for one in (path, data)]
print(*kept, file=sys.stderr)
"""


@pytest.mark.parametrize("room", ["little", "much"])
def test_a_save_evicts_nothing_where_memory_is_short(tmp_path: Path, room: str) -> None:
    """In a real memory cgroup: what others read stays, and the save is cached only with room."""
    groups = Path("/sys/fs/cgroup/memory")
    controllers = Path("/proc/self/cgroup").read_text()
    limit = "memory.limit_in_bytes"
    if not os.access(groups / "cgroup.procs", os.W_OK) or "memory" not in controllers:
        pytest.skip("no memory cgroup of version 1 may be made here")
    group = groups / f"shardpoint-{os.getpid()}-{room}"
    group.mkdir()
    try:
        # Torch takes some 300 MiB. A save of 96 MiB is cached while eight times as much is left.
        (group / limit).write_text(str({"little": 640 * MIB, "much": 4096 * MIB}[room]))
        command = [sys.executable, "-c", IN_A_GROUP, str(tmp_path), str(group), str(96 * MIB)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    finally:
        group.rmdir()
    others, own = map(int, done.stderr.split()[-2:])
    # All of it, as far as the machine's own reclaim leaves it there: it takes what is old.
    assert others >= 48 * MIB
    assert (own >= 96 * MIB) == (room == "much")
