"""Bytes from the ranks that hold regions of tensors to the ranks that want them, batch by batch.

Every rank reports which regions it holds and which it wants; all then know who sends what. A rank
takes what it holds itself from its own memory. Each other byte travels once to each rank that wants
it. A batch is at most `BATCH_NBYTES` of logical tensors, so that buffers stay small however large
the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ckpt.errors import Mismatch
from ckpt.layout.memory import host_bytes, local_view, narrowed
from ckpt.layout.piece import Holding
from ckpt.layout.region import Box, Region, Shape, whole
from ckpt.layout.reshard import Patch, clip_patch, copies
from ckpt.state_dict.table import Known, Routes, Table, gather_table, normal
from ckpt.world.base import World, collectively

BATCH_NBYTES = 256 << 20
# Of these, what may come in small parts, which pass through a buffer.
PACKED_NBYTES = 32 << 20
# From here on a copy through a buffer costs more than a message of its own.
DIRECT_NBYTES_MIN = 64 << 10


_Key = tuple[str, Region]  # a region of a tensor


def _memories(holdings: Iterable[Holding]) -> Iterator[tuple[_Key, torch.Tensor]]:
    """The memory of each piece. Regions have one form, so that equal ones are equal values."""
    for holding in holdings:
        for piece in holding.pieces:
            region = normal(piece.region, piece.global_shape)
            yield (piece.fqn, region), local_view(holding, piece)


def redistribute(
    world: World, held: Sequence[Holding], known: Table, wanted: Sequence[Holding]
) -> None:
    """Fill `wanted` from what the ranks hold: `held` here, `known` everywhere. Collective.

    Raises Mismatch on all ranks, before anything is written, when the regions that are held do not
    make up a tensor that is wanted.
    """
    requests = gather_table(world, "wanted", wanted)
    plan = _plan(known, requests)  # the same on all ranks, so it raises on all of them

    def prepare() -> tuple[_Here, list[_Batch]]:
        here = _Here(world, held, wanted)
        return here, [_Batch(batch, requests, here) for batch in plan]

    here, (local, *batches) = collectively(world, "plan", prepare)
    # Apart from the batches: what every rank has itself needs no round.
    local.copy_own()
    for batch in batches:
        batch.copy_own()
        batch.transfer()
    here.finish()


# --- who sends what ------------------------------------------------------------------------------


class _BatchPart(NamedTuple):
    """Some regions of a tensor, each with its holders; elements `start` to `stop` of a larger one,
    in its order, which one batch cannot carry whole.
    """

    fqn: str
    regions: Mapping[Region, Sequence[int]]
    window: tuple[int, int] | None
    routes: Routes


def _plan(known: Table, requests: Table) -> list[list[_BatchPart]]:
    """Batches; the first has the tensors of which every rank has what it wants."""
    local, batches = list[_BatchPart](), list[list[_BatchPart]]()
    filled = packed = 0
    problems: list[str] = []
    for fqn, request in requests.items():
        entry = known.get(fqn)
        if entry is None or (entry.shape, entry.dtype) != (request.shape, request.dtype):
            problems.append(
                f"{fqn}: is wanted as {request.shape}, {request.dtype}; nobody has that"
            )
            continue
        if not request.regions:  # of a tensor without elements
            continue
        routes = Routes(entry, request)
        if all(_has(entry, rank, regions) for rank, regions in request.regions.items()):
            local.append(_BatchPart(fqn, entry.holders(), None, routes))
            continue
        problem = routes.problem(fqn)
        if problem is not None:
            problems.append(problem)
        for part, nbytes in _cut(fqn, entry, routes):
            # By the mean size of a region, which all ranks know: they must cut alike.
            is_small = nbytes < DIRECT_NBYTES_MIN * len(part.regions)
            small = nbytes if is_small else 0
            if not batches or filled + nbytes > BATCH_NBYTES or packed + small > PACKED_NBYTES:
                batches.append([])
                filled = packed = 0
            batches[-1].append(part)
            filled += nbytes
            packed += small
    if problems:
        raise Mismatch(problems)
    return [local, *batches]


def _cut(fqn: str, entry: Known, routes: Routes) -> Iterator[tuple[_BatchPart, int]]:
    """A tensor in parts that fit into a batch, each with its bytes."""
    itemsize, regions = entry.dtype.itemsize, entry.holders()
    nbytes = math.prod(entry.shape) * itemsize
    if nbytes <= BATCH_NBYTES:
        yield _BatchPart(fqn, regions, None, routes), nbytes
        return
    step = max(BATCH_NBYTES // itemsize, 1)
    for region, holders in regions.items():
        for start in range(0, region.numel, step):
            stop = min(start + step, region.numel)
            part = _BatchPart(fqn, {region: holders}, (start, stop), routes)
            yield part, (stop - start) * itemsize


def _has(entry: Known, rank: int, regions: Sequence[Region]) -> bool:
    """Whether `rank` has every one of `regions` itself, as it is or in the whole tensor."""
    own = entry.regions.get(rank, [])
    everything = normal(whole(entry.shape), entry.shape)
    return own == [everything] or all(region in own for region in regions)


class _End(NamedTuple):
    """One end of a copy: `box` of the array of `shape` from `base` on in a region's order."""

    base: int
    shape: Shape
    box: Box


def _ends(
    source: Region, target: Region, shape: Shape, window: tuple[int, int] | None
) -> Iterator[tuple[_End, _End]]:
    """What two regions have in common: both ends of each copy, those in a window of the first."""
    for copy in copies(source, target, shape):
        if isinstance(copy, Patch):
            for patch in clip_patch(copy, *window) if window else [copy]:
                yield _End(*patch[:3]), _End(*patch[3:])
            continue
        start, to, numel = copy
        if window is not None:
            start = max(start, window[0])
            numel = min(copy.source + numel, window[1]) - start
            to += start - copy.source
        if numel > 0:
            run = Box((0,), (numel,))
            yield _End(start, run.shape, run), _End(to, run.shape, run)


# --- moving --------------------------------------------------------------------------------------


class _Flat:
    """A region's memory as a 1-D contiguous tensor: the memory itself, or a copy next to it."""

    def __init__(self, local: torch.Tensor, *, fill: bool) -> None:
        self.local = local
        # Lazy signs and conjugates: the bytes in memory are not the values.
        self.is_copy = not local.is_contiguous() or local.is_neg() or local.is_conj()
        if self.is_copy:
            self.memory = torch.empty(local.numel(), dtype=local.dtype, device=local.device)
            if fill:
                self.memory.view(local.shape).copy_(local)
        else:
            self.memory = local.reshape(-1)

    def view(self, end: _End) -> torch.Tensor:
        """The elements of `end`, as a view of the memory."""
        numel = math.prod(end.shape)
        array = self.memory[end.base : end.base + numel].view(end.shape)
        return narrowed(array, end.box)


class _Here:
    """This rank's memory: what it gives, by tensor and region, what it fills, and two buffers."""

    def __init__(self, world: World, held: Sequence[Holding], wanted: Sequence[Holding]) -> None:
        self.world = world
        self.sources = dict(_memories(held))
        self.targets: dict[_Key, _Flat] = {}
        self.duplicates: list[tuple[_Flat, torch.Tensor]] = []
        for key, local in _memories(wanted):
            # Two live tensors may be loaded from one name: its bytes are received once.
            if key in self.targets:
                self.duplicates.append((self.targets[key], local))
            elif key[1].numel:
                self.targets[key] = _Flat(local, fill=False)
        self.staging = _PackedBuffers()

    def finish(self) -> None:
        """All bytes are here: bring them from copies to the memory that is wanted."""
        for flat in self.targets.values():
            if flat.is_copy:
                flat.local.copy_(flat.memory.view(flat.local.shape))
        for first, duplicate in self.duplicates:
            duplicate.copy_(first.memory.view(duplicate.shape))


_Source = tuple[_Key, _End]


class _Batch:
    """What this rank copies, sends and receives for some tensors, in the order all ranks share."""

    def __init__(self, parts: Sequence[_BatchPart], requests: Table, here: _Here) -> None:
        size = here.world.size
        self.here = here
        self.own: list[tuple[_Key, _End, _Flat, _End]] = []
        self.send: list[list[_Source]] = [[] for _ in range(size)]
        self.recv: list[list[tuple[_Flat, _End]]] = [[] for _ in range(size)]
        for part in parts:
            for region, holders in part.regions.items():
                self.add(part, region, holders, requests[part.fqn])

    def add(self, part: _BatchPart, region: Region, holders: Sequence[int], request: Known) -> None:
        """Everything that moves from `region` of a tensor and concerns this rank."""
        fqn, _, window, routes = part
        me, size = self.here.world.rank, self.here.world.size
        key = (fqn, region)
        takers = [me] if me in request.regions else []
        if me in holders:  # else it gives nothing of this region
            takers = list(request.regions)
        for taker in takers:
            giver = routes.giver(holders, taker, size)
            if giver is None or me not in (giver, taker):
                continue
            for wanted in dict.fromkeys(request.regions.get(taker, ())):
                for start, stop in _ends(region, wanted, request.shape, window):
                    if taker != me:
                        self.send[taker].append((key, start))
                    elif giver != me:
                        self.recv[giver].append((self.here.targets[fqn, wanted], stop))
                    else:
                        self.own.append((key, start, self.here.targets[fqn, wanted], stop))

    def copy_own(self) -> None:
        """What this rank has itself."""
        flat: dict[_Key, _Flat] = {}
        for key, start, target, stop in self.own:
            target.view(stop).copy_(self.read(key, flat).view(start))

    def read(self, key: _Key, flat: dict[_Key, _Flat]) -> _Flat:
        """A source as flat memory; `flat` remembers copies for as long as the caller does."""
        if key not in flat:
            flat[key] = _Flat(self.here.sources[key], fill=True)
        return flat[key]

    def transfer(self) -> None:
        """One round between all ranks. Ranks that get the same are sent the same memory."""
        flat: dict[_Key, _Flat] = {}  # copies live until the round is over
        packed: dict[tuple[_Source, ...], list[memoryview]] = {}
        for moves in map(tuple, self.send):
            # Ranks of one replica group get the same moves: they are packed once.
            if moves not in packed:
                views = [self.read(key, flat).view(end) for key, end in moves]
                packed[moves], staged = self.packed(views)
                for view, place in staged:
                    place.copy_(view)
        arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []
        room = []
        for coming in self.recv:
            buffers, staged = self.packed([target.view(end) for target, end in coming])
            room.append(buffers)
            arrivals += staged
        outgoing = [packed[tuple(moves)] for moves in self.send]
        self.here.world.all_to_all("state dict", outgoing, room)
        for target, arrived in arrivals:
            target.copy_(arrived.view(target.shape))
        self.here.staging.clear()

    def packed(
        self, views: Sequence[torch.Tensor]
    ) -> tuple[list[memoryview], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The buffers of a message with room for `views`, in one order on both sides; and each view
        whose buffer is not its own memory, with its place there.
        """
        # What is large travels alone, straight from memory to memory.
        small = [view for view in views if view.nbytes < DIRECT_NBYTES_MIN]
        buffers: list[memoryview] = []
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        if small:
            buffer = self.here.staging.take(sum(_aligned(view.nbytes) for view in small))
            offset = 0
            for view in small:
                staged.append((view, _part(buffer, offset, view)))
                offset += _aligned(view.nbytes)
            buffers.append(host_bytes(buffer))
        for view in views:
            if view.nbytes < DIRECT_NBYTES_MIN:
                continue
            place = view
            if not (view.is_cpu and view.is_contiguous()):
                place = _part(self.here.staging.take(view.nbytes), 0, view)
                staged.append((view, place))
            buffers.append(host_bytes(place))
        return buffers, staged


class _PackedBuffers:
    """Host memory for one round, used again in the next; it grows to what a round has needed."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.taken = 0
        self.others: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Room for `nbytes`, until the round is over."""
        start, self.taken = self.taken, self.taken + _aligned(nbytes)
        if self.taken <= self.memory.numel():
            return self.memory[start : start + nbytes]
        # The memory of this round cannot grow: views of it are in use until the round is over.
        self.others.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.others[-1]

    def clear(self) -> None:
        """The round is over."""
        if self.others:
            self.others.clear()
            self.memory = torch.empty(self.taken, dtype=torch.uint8)
        self.taken = 0


def _part(buffer: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes of `buffer` from `start` on, as a tensor of the dtype and shape of `like`."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _aligned(nbytes: int) -> int:
    """Rounded up, so that elements of every dtype may stand behind it."""
    return -(-nbytes // 16) * 16
