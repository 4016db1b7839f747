"""What saves and loads cost as ranks grow: the real code, driven with N simulated ranks.

    python -m benchmarks.scale [--ranks 64 512 4096] [--tensors 48] [--only-saves]

Every rank runs `save_task` twice and `load_state`, then the checkpoint is loaded on N/4 and on
4 N ranks; see `benchmarks.simulation` for what is counted and how time is computed. Layouts are
arithmetic, tensors are small: control traffic, plans, parts and manifests depend on the number of
tensors and ranks, hardly on bytes. Sizes at which a case would take too long are left out, and the
table names the first.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.simulation import Clock, Cost, SimulatedStore, SimulatedWorld, Simulation
from ckpt.commit.appender import Sources
from ckpt.commit.session import SessionRegistry, open_session
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.region import Box, Region, Shape, Span, even_part, whole
from ckpt.loading.exchange import ShareLimits
from ckpt.loading.load import LoadOptions, load_state
from ckpt.saving.save import save_task
from ckpt.saving.task import PartMemory, SaveOptions, SaveTask
from storage.memory import MemoryBucket

ROWS = 32_768
SMALL_ROWS = 256  # of a model that every rank holds
UNEVEN_ROWS = 1_001  # more, which no number of ranks divides
FLAT_MEMBERS = 8
REPLICAS = 32
TENSOR_PARALLEL = 8


_everyone: dict[int, tuple[int, ...]] = {}


class Held(NamedTuple):
    """What a rank holds of a tensor: where, and which ranks hold the same."""

    shape: Shape
    region: Region
    holders: tuple[int, ...]


Layout = Callable[[int, int, int], Held]  # of tensor, rank and ranks


def _even(tensor: int, rank: int, ranks: int) -> Held:
    return _cut((ROWS, 1), rank, ranks, (rank,))


def _uneven(tensor: int, rank: int, ranks: int) -> Held:
    return _cut((ROWS + UNEVEN_ROWS, 1), rank, ranks, (rank,))


def _cut(shape: Shape, index: int, parts: int, holders: tuple[int, ...]) -> Held:
    region = even_part(shape, index, parts, "fsdp2")
    assert region is not None
    return Held(shape, region, holders)


def _flat(tensor: int, rank: int, ranks: int) -> Held:
    """One of the members that a flat parameter consists of, one after the other."""
    numel = ROWS - 7
    chunk = -(-FLAT_MEMBERS * numel // ranks)
    begin = tensor % FLAT_MEMBERS * numel
    start, stop = (min(max(edge - begin, 0), numel) for edge in (rank * chunk, (rank + 1) * chunk))
    return Held((numel, 1), Span(start, stop), (rank,))


def _hybrid(tensor: int, rank: int, ranks: int) -> Held:
    shards = max(ranks // REPLICAS, 1)
    return _cut((ROWS, 1), rank % shards, shards, tuple(range(rank % shards, ranks, shards)))


def _tensor_parallel(tensor: int, rank: int, ranks: int) -> Held:
    """By turns cut along dim 0 twice, and along dim 1 and dim 0."""
    group, index = divmod(rank, TENSOR_PARALLEL)
    groups = max(ranks // TENSOR_PARALLEL, 1)
    columns = 1 if tensor % 2 else TENSOR_PARALLEL
    rows = ROWS // columns
    if columns > 1:
        part = _cut((rows, 1), group, groups, (rank,)).region
        assert isinstance(part, Box)
        return Held((rows, columns), Box((part.offset[0], index), (part.shape[0], 1)), (rank,))
    part = _cut((rows // TENSOR_PARALLEL, 1), group, groups, (rank,)).region
    assert isinstance(part, Box)
    first = index * (rows // TENSOR_PARALLEL) + part.offset[0]
    return Held((rows, 1), Box((first, 0), (part.shape[0], 1)), (rank,))


def _replicated(tensor: int, rank: int, ranks: int) -> Held:
    everyone = _everyone.setdefault(ranks, tuple(range(ranks)))
    shape = (SMALL_ROWS, 8)
    return Held(shape, whole(shape), everyone)


LAYOUTS: dict[str, Layout] = {
    "FSDP2 even": _even,
    "FSDP2 uneven": _uneven,
    "flat": _flat,
    f"HSDP {REPLICAS} x N/{REPLICAS}": _hybrid,
    f"TP{TENSOR_PARALLEL} x FSDP": _tensor_parallel,
    "DDP, small": _replicated,
}


class Model(nn.Module):
    """One rank's part of a model of `tensors` tensors, with a counter for each."""

    def __init__(self, layout: Layout, tensors: int, rank: int, ranks: int) -> None:
        super().__init__()
        everyone = _everyone.setdefault(ranks, tuple(range(ranks)))
        self._held = [layout(tensor, rank, ranks) for tensor in range(tensors)]
        # A counter for each, as an optimizer has them: on every rank.
        self._held += [Held((), whole(()), everyone)] * tensors
        self._locals = []
        for number, held in enumerate(self._held):
            local = torch.zeros(_local_shape(held.region))
            parameter = nn.Parameter(local, requires_grad=False)
            self.register_parameter(f"w{number}", parameter)
            self._locals.append(parameter)

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        for number, (held, parameter) in enumerate(zip(self._held, self._locals, strict=True)):
            local = parameter.detach()
            inside = whole(tuple(local.shape))
            piece = Piece(f"w{number}", held.shape, local.dtype, held.region, inside, held.holders)
            yield Owned(parameter, local, (View((piece,)),), True)


def _local_shape(region: Region) -> Shape:
    return region.shape if isinstance(region, Box) else (region.numel,)


class Case(NamedTuple):
    """One layout at one number of ranks."""

    layout: str
    ranks: int
    tensors: int

    def state(self, rank: int, ranks: int) -> dict[str, Any]:
        """What `rank` of `ranks` has."""
        return {"model": Model(LAYOUTS[self.layout], self.tensors, rank, ranks), "step": 1}


def measure(case: Case, loads: Sequence[int]) -> dict[str, Cost]:
    """Save twice, and load on each number of ranks in `loads`. Returns the cost of every phase."""
    bucket, registry, clock = MemoryBucket(), SessionRegistry(), Clock()
    saving = Simulation(case.ranks, clock, bucket)

    def save(world: SimulatedWorld) -> None:
        state = case.state(world.rank, world.size)
        store, memory = SimulatedStore(world), PartMemory()
        sources = Sources(pause=lambda seconds: None)
        session = open_session(world, store, registry, sources=sources)
        for step, phase in enumerate(("save", "second save"), 1):
            world.enter(phase)
            save_task(state, SaveTask(session, store, memory, step, SaveOptions()))
            world.spend()
        world.enter("end")

    saving.run(save)
    costs = {phase: saving.costs[phase] for phase in ("save", "second save")}
    for ranks in loads:
        gc.collect()
        loading = Simulation(ranks, clock, bucket)

        def load(world: SimulatedWorld) -> None:
            state = case.state(world.rank, world.size)
            world.enter("load")
            # One run at a time, since the clock of a rank is that of its thread.
            options = LoadOptions(sharing=ShareLimits(window_nbytes_max=1))
            load_state(state, store=SimulatedStore(world), world=world, step=None, options=options)
            world.spend()
            world.enter("end")

        loading.run(load)
        costs[_load_name(case.ranks, ranks)] = loading.costs["load"]
    return costs


def _load_name(saved: int, loaded: int) -> str:
    if saved == loaded:
        return "load on N"
    return f"load on N/{saved // loaded}" if loaded < saved else f"load on {loaded // saved} N"


class Row(NamedTuple):
    """One line of the table."""

    first_cpu: float
    mean_cpu: float
    first_mib: float
    messages: float
    most_messages: float
    requests: float
    kib: float
    seconds: float
    total: float

    @classmethod
    def of(cls, cost: Cost) -> Row:
        """The figures of one phase."""
        return cls(
            first_cpu=float(cost.cpu_seconds[0]),
            mean_cpu=float(cost.cpu_seconds[1:].mean()),
            first_mib=cost.first_memory / 2**20,
            messages=float(cost.messages.mean()),
            most_messages=float(cost.messages.max()),
            requests=float(cost.requests.mean()),
            kib=float(cost.nbytes.mean()) / 1024,
            seconds=cost.seconds,
            total=float(cost.messages.sum() + cost.requests.sum()),
        )


HEAD = (
    f"{'N':>7}{'rank 0 CPU s':>14}{'rank CPU ms':>13}{'rank 0 MiB':>12}{'msg/rank':>10}"
    f"{'most':>7}{'req/rank':>10}{'KiB/rank':>10}{'seconds':>9}"
)


def _line(ranks: int, row: Row) -> str:
    return (
        f"{ranks:>7}{row.first_cpu:>14.3f}{1000 * row.mean_cpu:>13.2f}{row.first_mib:>12.1f}"
        f"{row.messages:>10.2f}{row.most_messages:>7.0f}{row.requests:>10.2f}{row.kib:>10.1f}"
        f"{row.seconds:>9.2f}"
    )


def exponent(values: Sequence[tuple[int, float]]) -> float:
    """The power of N with which something grows, fitted over all N by least squares."""
    points = [(math.log(n), math.log(value)) for n, value in values if value > 0]
    if len(points) < 2:
        return math.nan
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tensors", type=int, default=48)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--ranks-max", type=int, default=16_384, help="of loads on 4 N, too")
    parser.add_argument("--only-saves", action="store_true")
    parser.add_argument("--seconds-max", type=float, default=600.0, help="of one case")
    options = parser.parse_args()
    sys.setswitchinterval(0.05)  # threads that work in turn need not be interrupted
    for layout in options.layouts:
        print(f"\n{layout}, {options.tensors} tensors")
        rows = _rows(layout, options)
        for phase, by_ranks in rows.items():
            _print_phase(phase, by_ranks)


def _rows(layout: str, options: argparse.Namespace) -> dict[str, dict[int, Row]]:
    rows: dict[str, dict[int, Row]] = {}
    spent, before = 0.0, 0
    for ranks in sorted(options.ranks):
        # A case grows at least as its ranks do.
        if before and spent * ranks / before > options.seconds_max:
            print(
                f"  not driven at {ranks} ranks and above: {spent:.0f} s of this machine at "
                f"{before}"
            )
            break
        began = time.perf_counter()
        numbers = () if options.only_saves else (ranks, ranks // 4, 4 * ranks)
        loads = [n for n in numbers if 1 < n <= options.ranks_max]
        for phase, cost in measure(Case(layout, ranks, options.tensors), loads).items():
            rows.setdefault(phase, {})[ranks] = Row.of(cost)
            if phase.endswith("save"):
                assert cost.objects.max() <= 2, f"{cost.objects.max()} data files of one rank"
        spent, before = time.perf_counter() - began, ranks
        gc.collect()
    return rows


def _print_phase(phase: str, rows: dict[int, Row]) -> None:
    print(f"  {phase}\n  {HEAD}")
    for ranks, row in rows.items():
        print(f"  {_line(ranks, row)}")
    grows = {
        "rank 0 CPU": [(n, row.first_cpu) for n, row in rows.items()],
        "rank CPU": [(n, row.mean_cpu) for n, row in rows.items()],
        "operations in all": [(n, row.total) for n, row in rows.items()],
        "bytes per rank": [(n, row.kib) for n, row in rows.items()],
        "seconds": [(n, row.seconds) for n, row in rows.items()],
    }
    if len(rows) > 1:
        text = ", ".join(f"{name} N^{exponent(points):.2f}" for name, points in grows.items())
        print(f"    grows as: {text}", flush=True)


if __name__ == "__main__":
    main()
