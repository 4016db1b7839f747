"""Blocks that come from other ranks: which moves bring them, and one rank's part in these.

    held x wanted -> moves -> read, receive, pass on, put into place

Which moves there are is arithmetic on the byte line. Ranks that need the same runs form a group,
and all of a group know all of its runs, so each of them works out alone what the others do. What
lies in a file that a host lacks comes from a rank that has it, which is asked for it beforehand.

Every rank goes through its moves in the order of the byte line, a few at once, each in a thread of
its own, and nobody waits for a round. That cannot stand still: the first move that is not finished
everywhere is among the first unfinished ones of each rank that takes part in it, so all of them
have begun with it.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from ckpt.loading.plan import (
    Ints,
    NeededBlocks,
    ReadPath,
    joined,
    length,
    pieces_of,
    requests,
    united,
    without,
)
from ckpt.loading.reader import Reader
from ckpt.world.base import Message, Transfers, World

MIB = 1 << 20
AGAIN_NBYTES_MAX = 4 * MIB  # of a job: reading them takes less time than connecting its ranks

_FINE, _FAILED = b"\x01", b"\x00"


class Group(NamedTuple):
    """Runs of the byte line, ascending and disjoint, that exactly `ranks` need; these ascend."""

    ranks: Ints
    runs: Ints


class Move(NamedTuple):
    """Bytes of blocks, as one rank sees them that takes part: `runs` of the byte line, ascending.

    They come from the rank `source`, None where this one reads them, and go to `targets`.
    `is_wanted` is whether this rank wants them itself.
    """

    runs: Ints
    source: int | None
    targets: tuple[int, ...] = ()
    is_wanted: bool = True

    @property
    def start(self) -> int:
        """Where they begin on the line."""
        return int(self.runs[0, 0])

    @property
    def nbytes(self) -> int:
        """The bytes that travel."""
        return length(self.runs)


class Origins(NamedTuple):
    """Where the files of a checkpoint are. `ranks` have the same ones as this rank: they pass on to
    each other what several of them need. `owners` has, by number of a file that they lack, a rank
    that has it.
    """

    ranks: Sequence[int]
    owners: Mapping[int, int]


class Sharing(NamedTuple):
    """What one rank reads alone, as an (n, 2) array of runs, and what it has to do with others, in
    the order of the line.
    """

    private: Ints
    moves: list[Move]


class ShareLimits(NamedTuple):
    """One run is at most `run_nbytes_max` long, or one block; where a group has less than that for
    each of its ranks, runs are shorter, down to `run_nbytes_min`. A rank has at most
    `window_nbytes_max` bytes of runs under way.

    Runs below `repeated_nbytes_max`, like the step counters of an optimizer, are read by every rank
    that needs them, if that adds at most one part in `repeated_part` to all bytes: passing them on
    costs more than reading them.
    """

    run_nbytes_max: int = 4 * MIB
    run_nbytes_min: int = MIB
    window_nbytes_max: int = 16 * MIB
    repeated_nbytes_max: int = 64 << 10
    repeated_part: int = 100


class Weight(NamedTuple):
    """Bytes that a rank counts so that the sums over all ranks count every byte once: of all that
    is needed, of what reading short runs repeatedly adds, of long runs that are shared, and of what
    reading all of them repeatedly adds.
    """

    unique: int
    repeated: int
    long: int
    again: int = 0

    def is_tiny(self) -> bool:
        """Of the sums: whether ranks that share nothing read hardly more."""
        return self.again <= AGAIN_NBYTES_MAX

    def is_little(self, limits: ShareLimits) -> bool:
        """Of the sums: whether reading short runs repeatedly is next to nothing."""
        return self.repeated * limits.repeated_part <= self.unique


def weigh(needs: Ints, groups: Sequence[Group], rank: int | None, limits: ShareLimits) -> Weight:
    """The part of the sums that `rank` counts: what it alone needs, and what it needs as the first
    of a group. With None the sums themselves, of what all ranks need and all groups.
    """
    unique = length(needs) - sum(length(group.runs) for group in groups)
    repeated = long = again = 0
    for group in groups:
        if rank is None or group.ranks[0] == rank:
            nbytes = group.runs[:, 1] - group.runs[:, 0]
            short = int(nbytes[nbytes < limits.repeated_nbytes_max].sum())
            unique += int(nbytes.sum())
            long += int(nbytes.sum()) - short
            repeated += short * (len(group.ranks) - 1)
            again += int(nbytes.sum()) * (len(group.ranks) - 1)
    return Weight(unique, repeated, long, again)


def share(
    blocks: NeededBlocks,
    groups: Sequence[Group],
    rank: int,
    limits: ShareLimits,
    needs: Ints | None = None,
) -> Sharing:
    """Divide what the groups of `rank` need among their ranks; `rank` reads all else alone.

    `blocks` are all that this rank needs some of, `needs` what it needs, all of them without it;
    `groups` are all of its groups. A block is not divided within a group.
    """
    needs = blocks.runs() if needs is None else needs
    moves = [move for group in groups for move in _divided(group, blocks, rank, limits)]
    if not moves:
        return Sharing(needs, [])
    moves.sort(key=lambda move: move.start)
    return Sharing(without(needs, united(np.concatenate([move.runs for move in moves]))), moves)


def fetched(
    sharing: Sharing,
    blocks: NeededBlocks,
    files: Ints,
    owners: Mapping[int, int],
    limits: ShareLimits,
) -> Sharing:
    """`sharing`, where what lies in the files of `owners` comes from these. `files` is
    `file_starts` of the line.
    """
    if not owners:
        return sharing
    moves = []
    for move in sharing.moves:
        owner = owners.get(int(np.searchsorted(files, move.start, side="right")) - 1)
        # This rank would read it and cannot; it still passes it on to the others.
        is_read_here = move.source is None
        moves.append(move._replace(source=owner) if is_read_here else move)
    pieces, file = pieces_of(sharing.private, files[:-1], files[1:])
    is_remote = np.isin(file, list(owners))
    runs = pieces[is_remote]
    rows = blocks.within(runs)
    wanted = blocks.only(rows)
    # The owner reads the blocks of a move alone: a gap between them costs nothing.
    for one in requests(wanted, files, limits.run_nbytes_max, 1 << 62):
        start, stop = wanted.start[one.start], wanted.stop[one.stop - 1]
        first = np.searchsorted(runs[:, 1], start, side="right")
        last = np.searchsorted(runs[:, 0], stop, side="left")
        number = int(np.searchsorted(files, start, side="right")) - 1
        moves.append(Move(np.clip(runs[first:last], start, stop), owners[number]))
    moves.sort(key=lambda move: move.start)
    return Sharing(joined(pieces[~is_remote]), moves)


def long_only(groups: Sequence[Group], limits: ShareLimits) -> list[Group]:
    """The groups without their short runs, which every rank then reads by itself."""
    kept = []
    for ranks, runs in groups:
        is_long = runs[:, 1] - runs[:, 0] >= limits.repeated_nbytes_max
        if is_long.any():
            kept.append(Group(ranks, runs[is_long]))
    return kept


def _divided(group: Group, blocks: NeededBlocks, rank: int, limits: ShareLimits) -> Iterator[Move]:
    ranks = group.ranks.tolist()
    count, here = len(ranks), ranks.index(rank)
    # The rank with the fewest bytes so far reads. Groups of one run each begin with different
    # ranks, so that not all of them fall to the lowest.
    turn = int(group.runs[0, 0]) // MIB
    loads = [(0, (index - turn) % count, index) for index in range(count)]
    heapify(loads)
    for runs in _cut(group.runs, blocks, count, limits):
        load, order, reader = loads[0]
        heapreplace(loads, (load + length(runs), order, reader))
        source, targets = relay(here, reader, count)
        yield Move(
            runs,
            None if source is None else ranks[source],
            tuple([ranks[target] for target in targets]),
        )


def relay(here: int, reader: int, count: int) -> tuple[int | None, list[int]]:
    """From which of `count` members the one at `here` gets what `reader` reads, and to which it
    passes it on: a binomial tree, turned so that `reader` is its root.

    Neighbours are powers of two apart, so for any reader, a member has at most 2 log2(count) of
    them, and over all readers each passes on as much as it gets.
    """
    position = (here - reader) % count
    reach = position & -position if position else 1 << (count - 1).bit_length()
    steps = []
    while reach > 1:
        reach //= 2
        if position + reach < count:
            steps.append(reach)
    source = (reader + (position & (position - 1))) % count if position else None
    return source, [(here + step) % count for step in steps]


def _cut(runs: Ints, blocks: NeededBlocks, count: int, limits: ShareLimits) -> Iterator[Ints]:
    """`runs` in parts for `count` ranks, of one block or of several that are not too long; each has
    all of the blocks that it has bytes of, and these follow each other.
    """
    pieces, row = pieces_of(runs, blocks.start, blocks.stop)
    edges = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
    rows, edges = row[edges], np.append(edges, len(row))
    follows = blocks.start[rows[1:]] == blocks.stop[rows[:-1]]
    # Of blocks and not of what is wanted of them: one that passes them on reads them whole.
    sizes: list[int] = (blocks.stop[rows] - blocks.start[rows]).tolist()
    nbytes_max = min(max(sum(sizes) // count, limits.run_nbytes_min), limits.run_nbytes_max)
    first = nbytes = 0
    for number, size in enumerate(sizes):
        if number > first and (nbytes + size > nbytes_max or not follows[number - 1]):
            yield joined(pieces[edges[first] : edges[number]])
            first, nbytes = number, 0
        nbytes += size
    if sizes:
        yield joined(pieces[edges[first] :])


# --- one rank's part in them ----------------------------------------------------------------------


class Exchange:
    """One rank's part in the moves of a load.

    A failure here or elsewhere ends no transfer: a rank that has none of the bytes says so in place
    of them, and the ranks agree on the error afterwards. `flag`, of which all ranks know, goes up
    with the first failure; what is not read yet is not read then. `nbytes_away` are those that came
    from ranks that have other files.
    """

    def __init__(self, reader: Reader, world: World, flag: str) -> None:
        self._reader = reader
        self._for_others = reader
        self._world = world
        self._flag = flag
        self._lock = threading.Lock()
        self.nbytes_away = 0
        self.error: Exception | None = None

    def run(
        self,
        moves: Sequence[Move],
        limits: ShareLimits,
        path: ReadPath,
        owners: frozenset[int] | None = None,
    ) -> None:
        """Read, receive, pass on and deliver `moves`, which ascend. Collective over all ranks.

        `owners` are the ranks of other hosts that this one has moves from; None where no rank has
        any. Raises RankFailed when a rank is gone; `error` is what failed on this rank.
        """
        users: list[int] = []
        if owners is not None:
            mine = json.dumps(sorted(owners)).encode()
            # Who asks a rank is decided by those that ask: it cannot work that out alone.
            asked = [json.loads(one) for one in self._world.gather("readers", mine)]
            users = [rank for rank, ranks in enumerate(asked) if self._world.rank in ranks]
        with self._world.transfers("shared blocks") as wires:
            if owners is not None:
                self.nbytes_away = sum(move.nbytes for move in moves if move.source in owners)
                moves = self._with_requests(wires, moves, owners, users)
            tagged = [(move, *tag) for move, tag in zip(moves, _tags(moves), strict=True)]
            # For another host blocks are read of which few bytes may travel.
            least = 1 if owners is None else limits.run_nbytes_max
            threads = _threads(moves, limits, path, least)
            # One move at a time needs no other thread.
            if threads == 1:
                for one in tagged:
                    self._move(wires, *one)
                return
            pool = ThreadPoolExecutor(threads)
            try:
                running = [pool.submit(self._move, wires, *one) for one in tagged]
                for future in wait(running, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                wires.abort()  # else the threads would wait for other ranks
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _with_requests(
        self, wires: Transfers, moves: Sequence[Move], owners: frozenset[int], users: Sequence[int]
    ) -> list[Move]:
        """`moves`, for some of which it asks `owners`, and those that `users` ask for."""
        wanted = {
            owner: _encoded([move.runs for move in moves if move.source == owner])
            for owner in owners
        }
        given = [
            Move(runs, None, (user,), is_wanted=False)
            for user, data in zip(users, wires.swap(0, wanted, users), strict=True)
            for runs in _decoded(data)
        ]
        if given:
            # Of its own: blocks that others want are not in this rank's plan.
            self._for_others = self._reader.for_others([move.runs for move in given])
        return sorted([*moves, *given], key=lambda move: move.start)

    def _move(self, wires: Transfers, move: Move, tag: int, tags: Sequence[int]) -> None:
        data = self._read(move) if move.source is None else _received(wires, move, tag)
        # A word first: the receiver must not wait for bytes that never come.
        word = memoryview(_FAILED if data is None else _FINE)
        send = []
        for target, number in zip(move.targets, tags, strict=True):
            send.append(Message(target, number, word))
            if data is not None:
                send.append(Message(target, number + 1, data))
        wires.move(send, [])
        if data is not None and move.is_wanted:
            self._deliver(move, data)

    def _read(self, move: Move) -> memoryview | None:
        if self._world.flag_is_up(self._flag):
            return None
        try:
            reader = self._reader if move.is_wanted else self._for_others
            return reader.read_run(move.runs)
        except Exception as error:
            self._fail(error)
            return None

    def _deliver(self, move: Move, data: memoryview) -> None:
        try:
            self._reader.deliver_run(move.runs, data)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.error = self.error or error
        self._world.raise_flag(self._flag)


def _received(wires: Transfers, move: Move, tag: int) -> memoryview | None:
    assert move.source is not None, "what this rank reads comes from nobody"
    word = memoryview(bytearray(1))
    wires.move([], [Message(move.source, tag, word)])
    # Passed on as a failure: the ranks below wait for a word, too.
    if word.tobytes() == _FAILED:
        return None
    data = memoryview(bytearray(move.nbytes))
    wires.move([], [Message(move.source, tag + 1, data)])
    return data


def _tags(moves: Sequence[Move]) -> list[tuple[int, list[int]]]:
    """For each move the tag of what comes from its source, and of what goes to each target: the
    count of moves that took that way so far, which is the same at both ends. Requests have 0.
    """
    came: Counter[int] = Counter()
    went: Counter[int] = Counter()
    tags = []
    for move in moves:
        here = 0
        if move.source is not None:
            came[move.source] += 1
            here = 2 * came[move.source]
        went.update(move.targets)
        tags.append((here, [2 * went[target] for target in move.targets]))
    return tags


def _encoded(some: Sequence[Ints]) -> bytes:
    """Runs of several moves as bytes, few where they are regular."""
    edges = np.diff(np.concatenate(some).reshape(-1), prepend=0)
    numbers = np.concatenate([[len(some)], [len(runs) for runs in some], edges])
    return zlib.compress(numbers.astype("<i8").tobytes(), 1)


def _decoded(data: bytes) -> list[Ints]:
    numbers = np.frombuffer(zlib.decompress(data), dtype="<i8")
    count = int(numbers[0])
    runs = np.cumsum(numbers[count + 1 :], dtype=np.int64).reshape(-1, 2)
    return np.split(runs, np.cumsum(numbers[1:count]))


def nbytes_under_way(moves: Sequence[Move], limits: ShareLimits, path: ReadPath) -> int:
    """The most bytes of `moves` that are in memory at once."""
    return sum(sorted(move.nbytes for move in moves)[-_threads(moves, limits, path) :])


def _threads(moves: Sequence[Move], limits: ShareLimits, path: ReadPath, least: int = 1) -> int:
    """How many of `moves` may be under way, where each counts as `least` bytes or more: no more
    bytes than the window, which is as wide as reading ahead may be where several requests are to be
    in flight.
    """
    window = limits.window_nbytes_max
    if path.readers > 1:
        window = max(window, path.read_ahead_nbytes_max)
    longest = max([least, *(move.nbytes for move in moves)])
    return min(max(window // longest, 1), max(len(moves), 1))
