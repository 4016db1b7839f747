"""Saves in the background read device memory beside the training: in order with what it has queued.

Method: the training works on a stream of its own, the save in a thread, whose current stream is
another. The device is none that the library knows by name. What a save does with bytes is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ckpt.saving.replica_check
from ckpt.layout.kind import Kind
from ckpt.layout.memory import SideStreams, devices_of, is_accelerator
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import whole
from ckpt.saving.image import copy_order
from ckpt.saving.replica_check import ReplicaSums
from ckpt.saving.staging import Staged
from tests.ranks import run_ranks
from tests.streams.device import NAME, Stream, using
from tests.streams.groups import world
from tests.streams.mutants import SAVES, Mutant, applied, mutants
from tests.streams.simulation import simulated

DIGEST = 0xC0FFEE


def in_a_thread(body: Callable[[], None]) -> None:
    """Run it to its end in another thread; raises what it raises."""
    modes, errors = using().modes, []

    def run() -> None:
        try:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def trained() -> torch.Tensor:
    x = torch.zeros(100, device=NAME)
    return x.add_(1)


def copies_go_aside() -> None:
    with Stream(name="the training"):
        x = trained()
        assert is_accelerator(x.device) and not is_accelerator(torch.device("cpu"))
        source: Any = SimpleNamespace(view=x, address=0, chunk=SimpleNamespace(nbytes=400))
        order = copy_order((), [source], ())
        assert order.devices == (x.device,)
        side = SideStreams(order.devices)
        host = torch.empty(100, pin_memory=True)

        def save() -> None:
            with side.copying():
                host.copy_(x, non_blocking=True)
            host.sum()

        in_a_thread(save)
        x.mul_(2)  # a step that was held back until the copy was there


def digests_are_of_what_the_training_had_queued() -> None:
    with Stream(name="the training"):
        x = trained()
        region = whole((100,))
        piece = Piece("x", (100,), x.dtype, region, region, (0, 1))
        compared = [(Holding(x, (piece,), Kind.PARAMETER, False), piece)]
        nothing: Any = SimpleNamespace(
            plan=SimpleNamespace(compared=compared),
            recorder=SimpleNamespace(span=lambda *args: nullcontext()),
            copy=lambda: None,
            is_whole=False,
            opened=threading.Event(),
        )
        staged = Staged(
            task=nothing,
            contents=nothing,
            files=(),
            image=nothing,
            gate=nothing,
            digests=np.zeros(1, dtype=np.uint32),
            replicas=ReplicaSums(False, {}),
            compared_later=[0],
            is_blocking=False,
            nbytes_later=0,
            reading=SideStreams(devices_of([x])),
        )
        in_a_thread(staged.copy)
        assert staged.digests.tolist() == [DIGEST]


def host_reads(tensor: torch.Tensor) -> memoryview:
    tensor.sum()
    return memoryview(b"")


def same_digests(data: memoryview, sizes: Sequence[int]) -> list[int]:
    return [DIGEST for _ in sizes]


SCENARIOS = {
    "copies": copies_go_aside,
    "digests": digests_are_of_what_the_training_had_queued,
}


def run(name: str) -> list[str]:
    with world(1), simulated() as device:
        SCENARIOS[name]()
        device.end()
        return [str(one) for one in device.findings]


def run_all() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """What is found as it is, and with one wait less."""
    ckpt.saving.replica_check.host_bytes = host_reads  # type: ignore[attr-defined]
    ckpt.saving.replica_check.crc32c_of_each = same_digests  # type: ignore[attr-defined]
    clean = {name: run(name) for name in SCENARIOS}
    without = {}
    for one in of_streams():
        with applied(one):
            without[str(one)] = [text for name in SCENARIOS for text in run(name)]
    return clean, without


def of_streams() -> list[Mutant]:
    # A device without streams has one queue, and no other order than that.
    return [one for one in mutants(SAVES) if not one.call.startswith("module.")]


@pytest.mark.ranks
def test_a_save_reads_what_the_training_had_queued_whatever_the_stream() -> None:
    ((clean, without),) = run_ranks(1, run_all, group=False, timeout_seconds=150)
    assert clean == {"copies": [], "digests": []}
    assert len(without) == 2 and all(without.values()), without
