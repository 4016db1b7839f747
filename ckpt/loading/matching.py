"""Ranks find out with whom they share the blocks that they need; no rank hears all needs.

Each half of the ranks takes care of one half of the byte line: a rank sends what it needs of the
other half to one partner there. So do the quarters with the quarters of their half, and so on,
until each rank knows who needs what of its own stretch. The answers go back the same way. In all, a
rank sends 2 log2(N) maps, each about as long as what it needs itself; a run that many ranks need is
one run in them. This is a reduce-scatter by recursive halving and the all-gather that undoes it
(Rabenseifner, 2004), where sums are sets of ranks. A few ranks hear all needs, in one round.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt.loading.exchange import Group, ShareLimits, Weight, weigh
from ckpt.loading.plan import Ints
from ckpt.loading.reader import Reader
from ckpt.state.matching import Tally
from ckpt.world.base import Transfers, World, decided_json, joined, split

FEW_RANKS = 16  # one round of them takes less time than their halvings


class NeedMap(NamedTuple):
    """Ascending disjoint `runs` of the byte line, an (n, 2) array; `sets[which[i]]` are the ranks
    that need run i, ascending.

    Canonical: sets are distinct, and runs that touch have different ones.
    """

    runs: Ints
    which: Ints
    sets: tuple[Ints, ...]

    def part(self, start: int, stop: int) -> NeedMap:
        """What lies between `start` and `stop`; runs are cut there."""
        runs = np.clip(self.runs, start, stop)
        return _of(runs, self.which, self.sets, runs[:, 0] < runs[:, 1])

    def shared_in(self, needed: NeedMap) -> NeedMap:
        """The runs that several ranks need and that lie in runs of `needed`, which cuts none."""
        counts = np.array([len(ranks) for ranks in self.sets], dtype=np.int64)
        is_asked = needed.sets_at(self.runs[:, 0]) >= 0
        return _of(self.runs, self.which, self.sets, is_asked & (counts[self.which] > 1))

    def sets_at(self, places: Ints) -> Ints:
        """The number of the set at each of `places`, -1 where there is none."""
        if len(self.runs) == 0:
            return np.full(len(places), -1, dtype=np.int64)
        row = np.searchsorted(self.runs[:, 0], places, side="right") - 1
        is_there = (row >= 0) & (places < self.runs[row, 1])
        return np.where(is_there, self.which[row], -1)

    def groups(self) -> list[Group]:
        """The runs by their set of ranks, in the order of their first runs."""
        first = {number: row for row, number in reversed([*enumerate(self.which.tolist())])}
        numbers = sorted(first, key=first.__getitem__)
        return [Group(self.sets[number], self.runs[self.which == number]) for number in numbers]

    def encode(self) -> bytes:
        """As bytes: about one per run and set where these are regular."""
        counts = [len(ranks) for ranks in self.sets]
        sets = [np.diff(ranks, prepend=0) for ranks in self.sets]
        edges = np.diff(self.runs.reshape(-1), prepend=0)
        head = [len(self.runs), len(self.sets)]
        numbers = [np.array([*head, *counts], dtype=np.int64), edges, self.which, *sets]
        return zlib.compress(np.concatenate(numbers).astype("<i8").tobytes(), 1)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> NeedMap:
        """What `encode` gave."""
        numbers = np.frombuffer(zlib.decompress(data), dtype="<i8").astype(np.int64)
        runs, sets = numbers[:2].tolist()
        counts, edges, which, members = np.split(
            numbers[2:], np.cumsum([sets, 2 * runs, runs]).tolist()
        )
        ends = np.cumsum(counts)
        ranks = np.split(members, ends[:-1].tolist()) if sets else []
        return cls(np.cumsum(edges).reshape(-1, 2), which, tuple(np.cumsum(one) for one in ranks))


def needs_of(rank: int, runs: Ints) -> NeedMap:
    """The map of one rank."""
    sets = (np.array([rank], dtype=np.int64),) if len(runs) else ()
    return NeedMap(runs, np.zeros(len(runs), dtype=np.int64), sets)


def together(first: NeedMap, second: NeedMap) -> NeedMap:
    """The sum of two maps of different ranks."""
    points = np.unique(np.concatenate([first.runs.reshape(-1), second.runs.reshape(-1)]))
    if len(points) == 0:
        return first
    runs = np.stack([points[:-1], points[1:]], axis=1)
    a, b = first.sets_at(runs[:, 0]), second.sets_at(runs[:, 0])
    # A pair of sets as one number: rows would take longer to sort.
    pairs, which = np.unique((a + 1) * (len(second.sets) + 1) + b + 1, return_inverse=True)
    sets = tuple(
        np.sort(np.concatenate([_set(first, i - 1), _set(second, j - 1)]))
        for i, j in (divmod(pair, len(second.sets) + 1) for pair in pairs.tolist())
    )
    return _of(runs, which.astype(np.int64), sets, (a >= 0) | (b >= 0))


def all_together(maps: Sequence[NeedMap]) -> NeedMap:
    """The sum of maps of different ranks, at least one."""
    # In pairs: map by map, the growing sum would be sorted again each time.
    while len(maps) > 1:
        pairs = [maps[index : index + 2] for index in range(0, len(maps), 2)]
        maps = [together(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return maps[0]


def side_by_side(maps: Sequence[NeedMap]) -> NeedMap:
    """Maps of parts of the line, ascending, as one; equal sets on both sides become one."""
    known: dict[bytes, int] = {}
    sets: list[Ints] = []
    which = []
    for one in maps:
        numbers = []
        for ranks in one.sets:
            key = ranks.tobytes()
            if key not in known:
                known[key] = len(sets)
                sets.append(ranks)
            numbers.append(known[key])
        which.append(np.array(numbers, dtype=np.int64)[one.which])
    runs = np.concatenate([one.runs for one in maps])
    return _of(runs, np.concatenate(which), tuple(sets), np.ones(len(runs), dtype=np.bool_))


def _set(needs: NeedMap, number: int) -> Ints:
    return needs.sets[number] if number >= 0 else np.empty(0, dtype=np.int64)


def _of(runs: Ints, which: Ints, sets: Sequence[Ints], is_kept: np.ndarray) -> NeedMap:
    """A canonical map of the runs that are kept."""
    runs, which = runs[is_kept], which[is_kept]
    used, which = np.unique(which, return_inverse=True)
    is_new = np.append(True, (which[1:] != which[:-1]) | (runs[1:, 0] != runs[:-1, 1]))
    first = np.flatnonzero(is_new)[: len(runs)]
    last = np.append(first[1:], len(runs)) - 1
    merged = np.stack([runs[first, 0], runs[last, 1]], axis=1) if len(runs) else runs
    return NeedMap(
        merged.astype(np.int64),
        which[first].astype(np.int64) if len(runs) else which.astype(np.int64),
        tuple(sets[number] for number in used.tolist()),
    )


class Half(NamedTuple):
    """One halving as one rank sees it: the part of the line that stays with it, the part that goes
    to `partner`, and the ranks that send theirs here.
    """

    mine: range
    theirs: range
    partner: int
    senders: tuple[int, ...]


def halvings(rank: int, ranks: Sequence[int], stop: int) -> list[Half]:
    """The halvings of `rank` among `ranks`, which ascend, over a line of `stop` bytes, in order."""
    line, halves = range(stop), []
    while len(ranks) > 1:
        middle = (len(ranks) + 1) // 2
        # In proportion: with an odd number the lower half has a rank more, and more of the line.
        cut = line.start + len(line) * middle // len(ranks)
        low, high = ranks[:middle], ranks[middle:]
        low_line, high_line = range(line.start, cut), range(cut, line.stop)
        index = ranks.index(rank)
        if index < middle:
            # With an odd number the last two below have one partner above.
            partner = high[min(index, len(high) - 1)]
            halves.append(Half(low_line, high_line, partner, tuple(high[index : index + 1])))
            ranks, line = low, low_line
        else:
            index -= middle
            last = middle if index == len(high) - 1 else index + 1
            halves.append(Half(high_line, low_line, low[index], tuple(low[index:last])))
            ranks, line = high, high_line
    return halves


def match(wires: Transfers, rank: int, ranks: Sequence[int], needs: Ints, stop: int) -> list[Group]:
    """Everything that `rank` needs and others of `ranks` need too. Collective over these.

    `needs` are runs of the byte line, which is `stop` bytes long.
    """
    known = needs_of(rank, needs)
    asked: list[tuple[Half, list[NeedMap]]] = []
    for level, half in enumerate(halvings(rank, ranks, stop)):
        theirs = known.part(half.theirs.start, half.theirs.stop)
        # Four tags for each level, two each way: a fast rank may be a level ahead.
        sent = wires.swap(4 * level, {half.partner: theirs.encode()}, half.senders)
        received = [NeedMap.decode(one) for one in sent]
        asked.append((half, received))
        known = known.part(half.mine.start, half.mine.stop)
        for one in received:
            known = together(known, one)
    answer = known.shared_in(known)
    for level, (half, received) in reversed([*enumerate(asked)]):
        pairs = zip(half.senders, received, strict=True)
        answers = {sender: answer.shared_in(one).encode() for sender, one in pairs}
        (heard,) = wires.swap(4 * level + 2, answers, (half.partner,))
        both = [answer, NeedMap.decode(heard)]
        # `side_by_side` takes parts that ascend.
        if half.mine.start > half.theirs.start:
            both.reverse()
        answer = side_by_side(both)
    return answer.shared_in(needs_of(rank, needs)).groups()


class LoadSums(NamedTuple):
    """What all ranks together report before they read, and a name for this load.

    `away` are bytes that come from ranks of other hosts. `has_left` counts the ranks whose state
    has no place for something of the checkpoint, `averaged` means of rows, `unmatched` are the
    caller's rules that match nothing on any of them.
    """

    tally: Tally
    weight: Weight
    away: int = 0
    has_left: int = 0
    averaged: int = 0
    name: str = ""
    unmatched: tuple[str, ...] = ()


def matched(
    reader: Reader,
    mine: tuple[list[int], list[str]],
    world: World,
    limits: ShareLimits,
    ranks: Sequence[int] | None,
) -> tuple[list[Group], LoadSums]:
    """With whom of `ranks` this rank shares what it needs, and the sums over all ranks. Collective.

    `mine` are this rank's numbers of `LoadSums` but for the weight, and its unmatched rules.
    """
    needs, among = reader.needs, range(world.size) if ranks is None else ranks
    # The name tells the flag of this load's failure from those of earlier ones.
    own = [*mine, secrets.token_hex(8)]

    def summed(every: list[tuple[list[int], list[str], str]]) -> list[Any]:
        numbers, unmatched, names = zip(*every, strict=True)
        by_all = set(unmatched[0]).intersection(*unmatched[1:])
        return [list(map(sum, zip(*numbers, strict=True))), sorted(by_all), names[0]]

    # Hosts have groups of their own, and they partition the ranks: so all ranks go the same way.
    if len(among) == world.size <= FEW_RANKS:
        here = needs_of(world.rank, needs)
        came = world.gather("needs", joined(json.dumps(own).encode(), here.encode()))
        parts, maps = zip(*map(split, came), strict=True)
        everybodys = all_together([*map(NeedMap.decode, maps)])
        groups, shared = (everybodys.shared_in(one).groups() for one in (here, everybodys))
        weight = weigh(everybodys.runs, shared, None, limits)
        numbers, unmatched, name = summed([*map(json.loads, parts)])
    else:
        with world.transfers("needs") as wires:
            groups = match(wires, world.rank, among, needs, int(reader.files[-1]))
        own[0] = [*mine[0], *weigh(needs, groups, world.rank, limits)]
        answer = decided_json(world, "needs", "sums of needs", own, summed)
        numbers, unmatched, name = answer
        numbers, weight = numbers[:-4], Weight(*numbers[-4:])
    tally, (away, left_by, averaged) = Tally(*numbers[:4]), numbers[4:]
    return groups, LoadSums(tally, weight, away, left_by, averaged, name, tuple(unmatched))
