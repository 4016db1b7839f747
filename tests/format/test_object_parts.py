"""Objects written in parts: whole or not at all, in order where order counts, never too many parts.

Method: a store in memory that fails at a chosen part; and tensors of more bytes than any machine
has, whose save is ended when it has said how it would cut its object.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.api import write_path
from ckpt.format import object_parts
from ckpt.format.datafile import BLOCK_BYTES, StoredChunk, file_entries
from ckpt.format.object_parts import (
    PARTS_MAX,
    cut_into_parts,
    filled_parts,
    part_nbytes_for,
    write_filled,
    write_parts,
)
from ckpt.layout.region import Span
from ckpt.saving.image import Staging, WritePath, plan_files
from storage import Store, open_store
from storage.memory import MemoryStore
from storage.threads import as_done
from tests.counting import AtOnce

MIB = 1 << 20
NBYTES, PART_NBYTES = 1000, 64
EXPECTED = bytes(number % 251 for number in range(NBYTES))


def fill(start: int, part: memoryview) -> int:
    part[:] = EXPECTED[start : start + len(part)]
    return start


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://parts-{request.node.name}")


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_parts_are_finished_in_order_and_counted_when_written(store: Store, threads: int) -> None:
    finished: list[int] = []
    counted: list[int] = []
    write_filled(
        store,
        "k",
        NBYTES,
        fill=fill,
        finish=lambda start, part, filled: finished.append(filled),
        threads=threads,
        part_nbytes=PART_NBYTES,
        add=counted.append,
    )
    assert sum(counted) == NBYTES
    assert finished == list(range(0, NBYTES, PART_NBYTES))
    assert store.get("k") == EXPECTED


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_runs_of_any_length_are_cut_into_parts(store: Store, size: int, threads: int) -> None:
    runs = [memoryview(EXPECTED[start : start + size]) for start in range(0, NBYTES, size)]
    parts = cut_into_parts([memoryview(b""), *runs], PART_NBYTES)
    write_parts(store, "k", NBYTES, parts, part_nbytes=PART_NBYTES, threads=threads)
    assert store.get("k") == EXPECTED


@pytest.mark.parametrize("most", [0, 16])
def test_more_parts_are_in_flight_where_that_moves_more(
    store: Store, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a time that stands still every step is worth it. Parts wait for each other in groups: with
    fewer in flight they would wait for ever.
    """
    monkeypatch.setattr(object_parts, "as_done", partial(as_done, clock=lambda: 0.0))
    widths = [4] * 4 + [8] * 8 + [1] * 8 + [16] * 16 + [1] * 24 if most else [4] * 16
    at_once = AtOnce()
    groups = [threading.Barrier(width, timeout=60) for width in sorted({*widths})]
    barriers = {barrier.parties: barrier for barrier in groups}
    created = MemoryStore.create

    def create(self: MemoryStore, *args: Any, **how: Any) -> Any:
        writer = created(self, *args, **how)
        write_part = writer.write_part

        def write(index: int, buffers: Any) -> None:
            with at_once.entered():
                barriers[widths[index]].wait()
                write_part(index, buffers)

        monkeypatch.setattr(writer, "write_part", write)
        return writer

    monkeypatch.setattr(MemoryStore, "create", create)
    content = bytes(PART_NBYTES * len(widths))
    parts = cut_into_parts([memoryview(content)], PART_NBYTES)
    how = {"part_nbytes": PART_NBYTES, "threads": 4, "threads_max": most}
    write_parts(store, "k", len(content), parts, **how)
    assert at_once.most == (most or 4)
    assert store.get("k") == content


def test_saves_to_object_stores_may_have_more_parts_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert write_path("auto", MemoryStore(), Staging()).writers_max == 0
    monkeypatch.setattr(MemoryStore, "part_nbytes_min", 5 * MIB)
    far = write_path("auto", MemoryStore(), Staging())
    assert (far.writers, far.writers_max) == (4, 16)


@pytest.mark.parametrize("where", ["fill", "finish", "write"])
def test_nothing_is_visible_and_no_thread_writes_after_a_failure(
    store: Store, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a part in the middle, while others are in flight."""
    running: list[str] = []

    def failing_at(name: str, start: int) -> None:
        running.append(threading.current_thread().name)
        if name == where and start == 5 * PART_NBYTES:
            raise OSError("planned")

    def filling(start: int, part: memoryview) -> int:
        failing_at("fill", start)
        return fill(start, part)

    created = MemoryStore.create

    def create(self: MemoryStore, *args: Any, **how: Any) -> Any:
        writer = created(self, *args, **how)
        write_part = writer.write_part

        def write(index: int, buffers: Any) -> None:
            failing_at("write", index * PART_NBYTES)
            write_part(index, buffers)

        monkeypatch.setattr(writer, "write_part", write)
        return writer

    monkeypatch.setattr(MemoryStore, "create", create)
    with pytest.raises(OSError, match="planned"):
        write_filled(
            store,
            "k",
            NBYTES,
            fill=filling,
            finish=lambda start, part, filled: failing_at("finish", start),
            threads=2,
            part_nbytes=PART_NBYTES,
        )
    assert list(store.list("")) == []
    names = {thread.name for thread in threading.enumerate()}
    assert running and names.isdisjoint(set(running) - {threading.current_thread().name})


def test_a_part_that_stalls_holds_no_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part ends when all others are written, by the one other thread."""
    others = threading.Semaphore(0)
    count = -(-NBYTES // PART_NBYTES) - 1
    created = MemoryStore.create

    def create(self: MemoryStore, *args: Any, **how: Any) -> Any:
        writer = created(self, *args, **how)
        write_part = writer.write_part

        def write(index: int, buffers: Any) -> None:
            for _ in range(0 if index else count):
                assert others.acquire(timeout=60), "held by the first part"
            write_part(index, buffers)
            others.release()

        monkeypatch.setattr(writer, "write_part", write)
        return writer

    monkeypatch.setattr(MemoryStore, "create", create)
    write_filled(
        store,
        "k",
        NBYTES,
        fill=fill,
        finish=lambda start, part, filled: None,
        threads=2,
        part_nbytes=PART_NBYTES,
    )
    assert store.get("k") == EXPECTED


def test_parts_end_though_what_took_them_keeps_their_memory() -> None:
    """As a write does that has failed, or is interrupted, before its thread began."""
    read: list[int] = []

    def reading(start: int, part: memoryview) -> None:
        read.append(start)

    def take_two() -> None:
        parts = filled_parts(NBYTES, PART_NBYTES, fill=reading, finish=finish, threads=3)
        kept = [next(parts), next(parts)]
        time.sleep(0.2)  # a thread waits for memory by then
        parts.close()
        assert len(kept) == 2

    def finish(start: int, part: memoryview, filled: None) -> None:
        pass

    ended = threading.Thread(target=take_two, daemon=True)
    ended.start()
    ended.join(20.0)
    assert not ended.is_alive()
    assert len(read) <= 3, "of three buffers"
    assert not [one for one in threading.enumerate() if one.name.startswith("ckpt-fill")]


def test_a_part_of_another_length_is_refused(store: Store) -> None:
    """The last of them are in flight then."""
    parts = cut_into_parts([memoryview(EXPECTED[:-1])], PART_NBYTES)
    with pytest.raises(ValueError, match=r"part 15 has 40 bytes, got 39"):
        write_parts(store, "k", NBYTES, parts, part_nbytes=PART_NBYTES, threads=3)
    assert list(store.list("")) == []


def test_parts_grow_where_there_would_be_too_many() -> None:
    limit = PARTS_MAX * 8 * MIB
    assert part_nbytes_for(limit, 8 * MIB) == 8 * MIB
    assert part_nbytes_for(limit + 1, 8 * MIB) == 9 * MIB
    assert part_nbytes_for(0, 8 * MIB) == 8 * MIB
    for nbytes in (limit + 1, 10 * limit, 10 * limit + 1):
        assert math.ceil(nbytes / part_nbytes_for(nbytes, 8 * MIB)) <= PARTS_MAX


class Seen(Exception):
    """The object would have been written now."""


@pytest.mark.parametrize("way", ["save", "async_save", "import"])
def test_a_tensor_of_any_size_is_cut_into_as_many_parts_as_object_stores_take(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def create(self: MemoryStore, key: str, nbytes: int, *, part_nbytes: int, **how: Any) -> Any:
        assert nbytes > 90 << 30
        counts.append(math.ceil(nbytes / part_nbytes))
        raise Seen

    monkeypatch.setattr(MemoryStore, "create", create)
    url = f"memory://parts-huge-{way}"
    # No memory of that size: one element, as often as the shape says.
    state = {"t": torch.zeros(1, dtype=torch.uint8).expand(90 << 30)}
    with pytest.raises(Seen):
        if way == "save":
            ckpt.save(state, url, step=1)
        elif way == "async_save":
            ckpt.async_save(state, url, step=1, host_bytes_max=32 * MIB, snapshot="now").result()
        else:
            ckpt.import_checkpoint(str(sparse_file(tmp_path, 170 << 30)), url)
    (count,) = counts
    assert count <= PARTS_MAX


def test_a_staged_file_is_planned_in_as_many_parts_as_object_stores_take() -> None:
    """Its parts are cut when it is copied, before the object is begun."""
    nbytes = 90 << 30
    entries = file_entries(
        [StoredChunk("t", "uint8", (nbytes,), Span(0, nbytes), nbytes, 0)], BLOCK_BYTES
    )
    (plan,) = plan_files([entries], [4096], WritePath(), 1)
    assert len(plan.parts) <= PARTS_MAX
    assert plan.part_nbytes == part_nbytes_for(nbytes, plan.part_nbytes)


def sparse_file(folder: Path, nbytes: int) -> Path:
    """A safetensors file of one tensor that occupies no space on the disk."""
    entry = {"t": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
    header = json.dumps(entry).encode()
    path = folder / "huge.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + nbytes)
    return path
