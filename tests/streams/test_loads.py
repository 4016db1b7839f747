"""Loads write into device memory in order with what the training has queued, whatever the stream.

Method: a checkpoint of real tensors is loaded into tensors of the simulated device while a stream
of the training's computes with them, by the caller's thread and, as from an object store, by
several. These have current streams of their own, which know nothing of the training's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ckpt
import ckpt.loading.reader
import storage.threads
from ckpt.layout.memory import CallersStreams
from storage.memory import MemoryStore
from storage.ranges import aligned_buffer
from tests.ranks import run_ranks
from tests.streams.device import NAME, Stream, using
from tests.streams.groups import world
from tests.streams.mutants import applied, copy_mutants
from tests.streams.simulation import simulated

URL = "memory://loads"
COPIES = ("ckpt.loading.reader:Reader._scatter",)


def watched_pool(readers: int, name: str = "") -> ThreadPoolExecutor:
    """Threads whose operations are seen."""
    modes = using().modes

    def enter() -> None:
        for mode in modes:
            mode.__enter__()

    return ThreadPoolExecutor(readers, initializer=enter)


def load_while_computing() -> list[str]:
    with world(1), simulated() as device:
        with Stream(name="the training"):
            x = torch.zeros(64, 1000, device=NAME)
            turned = torch.zeros(1000, 64, device=NAME).t()
            x.sum()
            turned.add_(1)
            ckpt.load({"x": x, "turned": turned}, URL)
            x.sum()
            turned.mul_(2)
        device.end()
        copies = device.counts["aten::copy_"]
        return [*map(str, device.findings), *([] if copies >= 2 else ["nothing was loaded"])]


@contextmanager
def nothing_entered(self: CallersStreams) -> Any:
    yield


def run_all() -> tuple[list[list[str]], dict[str, list[str]]]:
    """What is reported as it is, by one thread and by several, and with one order less."""
    store: Any = MemoryStore
    reader: Any = ckpt.loading.reader
    threads: Any = storage.threads
    reader.ThreadPoolExecutor = threads.Pool = watched_pool
    # Memory that the simulated device has pinned is no memory of Python's.
    reader.staging_buffer = lambda nbytes, *, pinned: aligned_buffer(nbytes)
    ckpt.save({"x": torch.ones(64, 1000), "turned": torch.ones(64, 1000)}, URL, step=1)
    clean = [load_while_computing()]
    store.part_nbytes_min = 5 << 20  # as of an object store, which several threads read
    clean.append(load_while_computing())
    without = {}
    for one in copy_mutants(*COPIES):
        with applied(one):
            without[str(one)] = load_while_computing()
    streams: Any = CallersStreams
    streams.entered = nothing_entered
    without["the caller's streams are not entered"] = load_while_computing()
    return clean, without


@pytest.mark.ranks
def test_a_load_waits_for_what_the_training_had_queued_and_is_over_when_it_returns() -> None:
    ((clean, without),) = run_ranks(1, run_all, group=False, timeout_seconds=150)
    assert clean == [[], []]
    assert len(without) == 3 and all(without.values()), without
