"""The mapped files of a tier in memory: what a save does to those that are there already.

Method: `TierMemory` by itself in a folder, and trainings whose ranks are threads, with the calls
of the system and of the tier's store counted.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ckpt.near.memory import MappedFile, TierMemory
from ckpt.service.checkpointer import Checkpointer
from ckpt.world.base import World
from storage import file_io
from storage.local import LocalStore
from storage.memory import MemoryStore
from tests.near.test_near_training import folders
from tests.near.training import Life, advance

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
        file_io.allocate(fd, nbytes, start=start)

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


class Calls:
    """What threads that are `inside` do with files of a tier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inside = threading.local()
        for name in ("list", "get", "get_into", "get_bounded", "delete", "info", "put_if_absent"):
            monkeypatch.setattr(LocalStore, name, self._counted(name, getattr(LocalStore, name)))
        monkeypatch.setattr("ckpt.near.memory.os", self)
        monkeypatch.setattr(
            "ckpt.near.memory.MappedFile.__init__",
            self._counted("new file", MappedFile.__init__),
        )

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        return self._counted(name, value) if callable(value) and name != "fsencode" else value

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **how: Any) -> Any:
            counts = getattr(self._inside, "counts", None)
            if counts is not None:
                counts[name] += 1
            return call(*args, **how)

        return counted

    def of(self, call: Any, *args: Any) -> Counter[str]:
        self._inside.counts = counts = Counter[str]()
        try:
            call(*args)
        finally:
            del self._inside.counts
        return counts


@pytest.mark.parametrize("restored", [False, True])
def test_a_near_save_holds_training_up_for_a_handful_of_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: bool
) -> None:
    """From the third save on: one list of the records, for the fence, and one name for each file.
    Nothing else of a tier is looked at, read or deleted while the training waits.
    """
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: True)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0)
    if restored:
        Life(2, store, hosts, near_every=1).run(3)
    calls = Calls(monkeypatch)

    def count(service: Checkpointer, state: Any, world: World) -> list[Counter[str]]:
        service.wait()
        counts = []
        first = 6 if restored else 3
        for step in range(first, first + 4):
            advance(state, step, world.rank, world.size)
            counts.append(calls.of(service.step, step))
            service.wait()
            world.gather("saved", b"")
        return counts

    for counts in Life(2, store, hosts, near_every=1).run(2, then=count):
        for one in counts:
            assert one == {
                "list": 1,
                "rename": 1,
                "open": 1,
                "fstat": 1,
                "ftruncate": 1,
                "close": 1,
            }
