"""Who writes what: a pure rule by which every rank finds its own share without asking the others.

Ranks that hold the same region form a group. All members of a group see the same items, put them
through the same arithmetic, and each takes the bin of its own index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Region, Span, span_of

MIB = 1 << 20
# Optimizer state next to parameters that an engine keeps equal is compared up to this size: counts
# and the few numbers per parameter that nobody synchronizes. Digests of more would read a state
# twice that follows from equal parameters and gradients.
COMPARED_NBYTES_MAX = 4 << 10


class Share(NamedTuple):
    """Elements `start` to `stop` of a piece's own row-major order, for this rank to write.

    `region` is the same part in the logical tensor's coordinates.
    """

    holding: Holding
    piece: Piece
    start: int
    stop: int
    region: Region


class Assignment(NamedTuple):
    """What one rank writes, and what it holds that is not trusted to be equal on other ranks.

    `compared` lists pieces that several ranks hold and no engine keeps equal, and small ones on
    which the ranks must agree; each rank reports a digest of them, the writer included.
    """

    shares: list[Share]
    compared: list[tuple[Holding, Piece]]


def assign(holdings: Iterable[Holding], rank: int, *, first_only: bool = False) -> Assignment:
    """The part of `holdings` that `rank` writes. Over all ranks every element is written once.

    With `first_only`, ranks that hold the same share no writing: the first of them writes all.
    """
    shares: list[Share] = []
    compared: list[tuple[Holding, Piece]] = []
    groups: dict[tuple[int, ...], list[tuple[Holding, Piece]]] = defaultdict(list)
    for holding in holdings:
        for piece in holding.pieces:
            numel = piece.local_region.numel
            if not numel:
                continue
            if len(piece.holders) == 1 or (first_only and piece.holders[0] == rank):
                shares.append(Share(holding, piece, 0, numel, piece.region))
            elif not first_only:
                groups[piece.holders].append((holding, piece))
            # Other ranks may have what only one holds for storing: the step of a sharded parameter.
            is_repeated = len(piece.holders) > 1 and not holding.synchronized
            if is_repeated or is_small_and_agreed(holding, piece):
                compared.append((holding, piece))
    for holders, members in sorted(groups.items()):
        shares += _share_of(members, holders.index(rank), len(holders))
    return Assignment(shares, compared)


def is_small_and_agreed(holding: Holding, piece: Piece) -> bool:
    """Whether a difference between ranks is an error, and the piece so small that all compare."""
    nbytes = piece.local_region.numel * piece.dtype.itemsize
    return holding.must_agree and nbytes <= COMPARED_NBYTES_MAX


def _share_of(members: list[tuple[Holding, Piece]], index: int, count: int) -> list[Share]:
    # All holders must come to the same order, however each of them has walked its state.
    members.sort(key=lambda member: (member[1].fqn, member[1].region))
    of_modules: dict[str, int] = defaultdict(int)  # bytes of buffers that may differ
    for holding, piece in members:
        if _is_loose_buffer(holding):
            of_modules[_module_of(piece)] += piece.local_region.numel * piece.dtype.itemsize
    items = []
    for holding, piece in members:
        nbytes = piece.local_region.numel * piece.dtype.itemsize
        # Replicas that may differ are not cut: halves of two of them are a tensor that nobody had.
        # The mean of one rank and the variance of another are statistics that nobody had.
        of_first = _is_loose_buffer(holding) and of_modules[_module_of(piece)] <= MIB
        unit_nbytes = _unit_nbytes(piece) if holding.synchronized else 0
        items.append(Item(nbytes, unit_nbytes, of_first))
    mine = []
    # All bins are computed: only that shows which parts are this rank's.
    for index_of_item, start, stop in share_evenly(items, count)[index]:
        holding, piece = members[index_of_item]
        itemsize = piece.dtype.itemsize
        first, last = start // itemsize, stop // itemsize
        mine.append(Share(holding, piece, first, last, part_of(piece, first, last)))
    return mine


def _is_loose_buffer(holding: Holding) -> bool:
    """Whether it is a buffer that no engine keeps equal, such as the statistics of BatchNorm."""
    return holding.kind is Kind.BUFFER and not holding.synchronized


def _module_of(piece: Piece) -> str:
    return piece.fqn.rpartition(".")[0]


def _unit_nbytes(piece: Piece) -> int:
    """Bytes between two places where the piece may be cut: a block, or as many whole rows."""
    if isinstance(piece.region, Span) or span_of(piece.region, piece.global_shape) is not None:
        return MIB
    rows = piece.region.shape[0]
    row_nbytes = piece.region.numel // rows * piece.dtype.itemsize
    return row_nbytes * max(1, MIB // row_nbytes)


def part_of(piece: Piece, start: int, stop: int) -> Region:
    """Elements `start` to `stop` of `piece`, in the logical tensor's coordinates.

    All of them are the piece's own region. A box that is no single run is cut at whole rows only.
    """
    region = piece.region
    if start == 0 and stop == region.numel:
        return region
    if isinstance(region, Box):
        span = span_of(region, piece.global_shape)
        if span is None:
            row = region.numel // region.shape[0]
            assert start % row == 0 and stop % row == 0, "a box is cut at whole rows"
            offset = (region.offset[0] + start // row, *region.offset[1:])
            return Box(offset, ((stop - start) // row, *region.shape[1:]))
        region = span
    return Span(region.start + start, region.start + stop)


class Item(NamedTuple):
    """Something to place: its size, and the bytes between possible cuts (0: never cut).

    `of_first`: it belongs into the first bin, which gets less of the others for it.
    """

    nbytes: int
    unit_nbytes: int
    of_first: bool = False


def share_evenly(items: Sequence[Item], count: int) -> list[list[tuple[int, int, int]]]:
    """`items` on `count` bins, as (item, start byte, stop byte), every byte exactly once.

    What cannot be cut goes first, largest onto the emptiest bin; what can be cut is poured over the
    bins up to the mean, cut at its units; the small rest evens out, up to 1 MiB of it together:
    each rank that loads needs all of it. The fullest bin exceeds the mean by at most the largest
    uncuttable item or 2 MiB, unless what belongs into the first bin is more than that. Pouring with
    cuts is McNaughton's wrap-around rule (1959), placing the largest first is Graham's LPT (1969).
    """
    bins = _Bins(items, [[] for _ in range(count)], [])
    bins.parts[0] = [(index, 0, item.nbytes) for index, item in enumerate(items) if item.of_first]
    bins.loads.extend(sum(stop for _, _, stop in parts) for parts in bins.parts)
    others = [index for index, item in enumerate(items) if not item.of_first]
    by_size = sorted(others, key=lambda index: (-items[index].nbytes, index))
    # What is smaller is not cut: a part has at least 1 MiB, or its request costs more than its
    # bytes.
    large = [index for index in by_size if items[index].nbytes >= 2 * MIB]
    cuttable = [
        index for index in large if 0 < items[index].unit_nbytes <= items[index].nbytes // 2
    ]
    poured = set(cuttable)
    bins.place_largest_first([[index] for index in large if index not in poured])
    bins.pour(cuttable, mean=sum(item.nbytes for item in items) / count)
    bundles: list[list[int]] = []
    left = -1
    for index in by_size[len(large) :]:
        left -= items[index].nbytes
        if left < 0:
            bundles.append([])
            left = MIB - items[index].nbytes
        bundles[-1].append(index)
    bins.place_largest_first(bundles)
    return bins.parts


class _Bins(NamedTuple):
    """Which parts of which items each bin has, and how many bytes they are."""

    items: Sequence[Item]
    parts: list[list[tuple[int, int, int]]]
    loads: list[int]

    def place_largest_first(self, order: list[list[int]]) -> None:
        """Each list of items onto one bin."""
        heap = [(load, index) for index, load in enumerate(self.loads)]
        heapify(heap)
        for bundle in order:
            load, emptiest = heap[0]
            parts = [(index, 0, self.items[index].nbytes) for index in bundle]
            self.parts[emptiest] += parts
            self.loads[emptiest] = load + sum(stop for _, _, stop in parts)
            heapreplace(heap, (self.loads[emptiest], emptiest))

    def pour(self, order: list[int], *, mean: float) -> None:
        loads = self.loads
        # No bin is below the mean only where the mean itself was rounded.
        to_fill = [n for n, load in enumerate(loads) if load < mean] or list(range(len(loads)))
        current = 0
        owed = 0.0  # what cuts at units took from the bins so far, for the next one to make up
        for index in order:
            nbytes, unit = self.items[index].nbytes, self.items[index].unit_nbytes
            start = 0
            while start < nbytes:
                bin_index = to_fill[current]
                is_last = current == len(to_fill) - 1
                room = mean + owed - loads[bin_index]
                stop = nbytes if is_last else start + max(0, round(room / unit)) * unit
                stop = min(stop, nbytes)
                if stop > start:
                    self.parts[bin_index].append((index, start, stop))
                    loads[bin_index] += stop - start
                if stop < nbytes or (loads[bin_index] >= mean + owed and not is_last):
                    owed += mean - loads[bin_index]
                    current += 1
                start = stop
