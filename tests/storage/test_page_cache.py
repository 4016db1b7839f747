"""What the page cache may take, and which files leave it: read from planted files, and counted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from storage import page_cache
from storage.local import LocalStore
from storage.page_cache import memory_left
from storage.testing import write_object

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
