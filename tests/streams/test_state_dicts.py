"""State dicts of device memory: what travels is what the training had queued, and arrives in order.

Method: two ranks exchange real tensors on the CPU, and what the first gets to know of the second is
kept. It then does the same alone on the simulated device: a message reads and writes its buffers as
the host does. A mutant is one copy that goes to a stream of its own, or that the host does not wait
for. Which of the two can be wrong depends on where the copy goes: see `NEED_NOT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import ckpt.state_dict.redistribute as redistribution
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, whole
from ckpt.state_dict.config import StateDictType
from ckpt.state_dict.forms import DictForm, LiveTensors, take_out
from ckpt.state_dict.redistribute import redistribute
from ckpt.state_dict.table import gather_table
from ckpt.world.base import SoloWorld, World
from tests.ranks import run_ranks
from tests.streams.device import NAME, Stream
from tests.streams.groups import world as group
from tests.streams.mutants import applied, copy_mutants
from tests.streams.simulation import simulated
from tests.thread_ranks import run_ranks as run_threads

REDISTRIBUTE = "ckpt.state_dict.redistribute:"
COPIES = (
    f"{REDISTRIBUTE}_Flat.__init__",
    f"{REDISTRIBUTE}_Here.finish",
    f"{REDISTRIBUTE}_Batch.copy_own",
    f"{REDISTRIBUTE}_Batch.transfer",
)
# From the device to the device: the host waits for none of these.
NEED_NOT = ("_Flat.__init__", "_Here.finish")
# Large enough to travel alone, small enough to be packed, and in no row-major order.
SHAPES = {"large": (128, 600), "small": (4, 3), "turned": (64, 50)}


def tensor(shape: tuple[int, ...], device: str, *, turned: bool = False) -> torch.Tensor:
    if turned:
        return torch.zeros(*reversed(shape), device=device).t()
    return torch.zeros(shape, device=device)


def holding(name: str, rank: int, local: torch.Tensor) -> Holding:
    """That rank's half of the rows."""
    shape = SHAPES[name]
    region = Box((rank * shape[0] // 2, 0), (shape[0] // 2, shape[1]))
    piece = Piece(name, shape, local.dtype, region, whole(tuple(local.shape)), (rank,))
    return Holding(local, (piece,), Kind.PARAMETER, True)


def half(name: str, device: str, *, turned: bool) -> torch.Tensor:
    rows, columns = SHAPES[name]
    return tensor((rows // 2, columns), device, turned=turned)


def exchange(world: World, device: str) -> None:
    """Full dicts on the device and on the host; then halves change ranks, one of them twice."""
    me = world.rank
    held = [holding(name, me, half(name, device, turned=name == "turned")) for name in SHAPES]
    for one in held:
        one.local.add_(1)
    piece = Piece("own", (7,), torch.float32, whole((7,)), whole((7,)), (0, 1))
    everywhere = [Holding(tensor((7,), device).add_(1), (piece,), Kind.PARAMETER, True)]
    for holdings, on_host in ((held, False), (held, True), (everywhere, True)):
        form = DictForm(StateDictType.FULL, on_host, True, None, None)
        dicts = take_out(LiveTensors(holdings, {}, lambda name: None, {}), form, world)
        for one in holdings:
            one.local.mul_(2)
        for value in dicts.values():
            value.sum()
    turned = [half(name, device, turned=True) for name in SHAPES]
    targets = [holding(name, 1 - me, one) for name, one in zip(SHAPES, turned, strict=True)]
    twice = holding("small", 1 - me, half("small", device, turned=False))
    for one in (*targets, twice):
        one.local.sum()  # still read when the new values arrive
    redistribute(world, held, gather_table(world, "held", held), [*targets, twice])
    for one in (*targets, twice):
        one.local.mul_(2)
    local = half("large", device, turned=False).add_(me)
    region = whole(tuple(local.shape))
    piece = Piece("given", region.shape, local.dtype, region, region, (1,))
    given = [Holding(local, (piece,), Kind.PARAMETER, True)]
    local.sum()
    # To the first rank, which sends nothing and so has waited for nothing.
    gives, wants = (given, []) if me else ([], given)
    redistribute(world, gives, gather_table(world, "held", gives), wants)
    local.mul_(2)


def recorded() -> list[list[bytes]]:
    """What the first rank gets to know in an exchange of real tensors."""
    rounds: list[list[bytes]] = []

    def run(world: Any) -> None:
        gather = world.gather

        def kept(name: str, payload: bytes) -> list[bytes]:
            payloads: list[bytes] = gather(name, payload)
            if name in ("held", "wanted"):  # not what threads use to agree
                rounds.append(payloads)
            return payloads

        if world.rank == 0:
            world.gather = kept
        exchange(world, "cpu")

    run_threads(2, run)
    return rounds


class Replayed(SoloWorld):
    """The first of two ranks, by itself: the other one's messages are those of another time."""

    def __init__(self, rounds: Sequence[list[bytes]]) -> None:
        super().__init__()
        self.size, self.global_ranks = 2, (0, 1)
        self._rounds = list(rounds)

    def gather(self, name: str, payload: bytes) -> list[bytes]:
        payloads = self._rounds.pop(0)
        assert payloads[0] == payload, "the same exchange says the same"
        return payloads

    def all_to_all(self, name: str, send: Any, recv: Any) -> None:
        for buffers in send:
            for buffer in buffers:
                buffer.sum()
        for buffers in recv:
            for buffer in buffers:
                buffer.fill_(0)


def alone(rounds: Sequence[list[bytes]]) -> list[str]:
    with group(1), simulated() as device:
        with Stream(name="the training"):
            exchange(Replayed(rounds), NAME)
        device.end()
        return [str(one) for one in device.findings]


def run_all() -> tuple[list[str], dict[str, list[str]]]:
    """What is reported as it is, and with one order less."""
    module: Any = redistribution
    module.BATCH_NBYTES = 160_000  # several rounds, which use the same buffers
    rounds = recorded()
    module.host_bytes = lambda buffer: buffer
    clean = alone(rounds)
    without = {}
    for one in copy_mutants(*COPIES):
        if one.how == "unwaited" and one.function[-2:] in [tuple(f.split(".")) for f in NEED_NOT]:
            continue
        with applied(one):
            without[str(one)] = alone(rounds)
    return clean, without


@pytest.mark.ranks
def test_an_exchange_of_state_dicts_is_in_order_with_the_training() -> None:
    ((clean, without),) = run_ranks(1, run_all, group=False, timeout_seconds=150)
    assert clean == []
    assert len(without) == 9
    assert all(without.values()), [name for name, texts in without.items() if not texts]
