"""The mapped files of a tier in memory: what a save does to those that are there already.

Method: `TierMemory` by itself in a folder, with the calls of the system counted.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.near.memory import TierMemory
from storage import linux

MIB = 1 << 20


def test_files_that_are_used_again_reserve_only_what_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To reserve memory that is there walks over all of its pages, which takes a fourth of a copy,
    while the training waits.
    """
    reserved: list[int] = []

    def allocate(fd: int, nbytes: int, *, start: int = 0) -> None:
        reserved.append(nbytes - start)
        linux.allocate(fd, nbytes, start=start)

    monkeypatch.setattr("ckpt.near.memory.allocate", allocate)
    memory = TierMemory(str(tmp_path))
    for number, size in enumerate((MIB, 300_000, MIB, MIB)):
        memory.expect([1], MIB, pinned=False)
        (file,) = memory.files
        # A hole would end this process by a signal, where the file system is full.
        assert os.stat(file.path).st_size == MIB
        assert os.stat(file.path).st_blocks * 512 >= MIB
        file.memory[:] = bytes([number]) * MIB
        os.truncate(file.path, size)  # as a save does at its end
        memory.published(str(number))
        memory.recycle({str(number)})
    memory.close()
    # Two generations take turns: the fourth save has the file of the second, which was cut.
    assert reserved == [MIB, MIB, MIB - 300_000]
