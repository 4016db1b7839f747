"""Ranks find out with whom they share the blocks that they need, without anybody hearing all needs.

Each half of the ranks takes care of one half of the byte line: a rank sends what it needs of the
other half to one partner there. So do the quarters with the quarters of their half, and so on,
until each rank knows who needs what of its own stretch. The answers go back the same way. In all, a
rank sends 2 log2(N) maps, each about as long as what it needs itself; a run that many ranks need is
one run in them. This is a reduce-scatter by recursive halving and the all-gather that undoes it
(Rabenseifner, 2004), where sums are sets of ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ckpt.loading.byte_line import Ints
from ckpt.loading.needs import NeedMap, needs_of, side_by_side, together
from ckpt.loading.shared_reads import Group
from ckpt.world.base import Message, Transfers

_LENGTH = struct.Struct("<Q")


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
        received = _swap(wires, 4 * level, {half.partner: theirs}, half.senders)
        asked.append((half, received))
        known = known.part(half.mine.start, half.mine.stop)
        for one in received:
            known = together(known, one)
    answer = known.shared_in(known)
    for level, (half, received) in reversed([*enumerate(asked)]):
        pairs = zip(half.senders, received, strict=True)
        answers = {sender: answer.shared_in(one) for sender, one in pairs}
        heard = _swap(wires, 4 * level + 2, answers, (half.partner,))
        both = [answer, *heard] if half.mine.start < half.theirs.start else [*heard, answer]
        answer = side_by_side(both)
    return answer.shared_in(needs_of(rank, needs)).groups()


def _swap(
    wires: Transfers, tag: int, send: dict[int, NeedMap], senders: Sequence[int]
) -> list[NeedMap]:
    """Send a map to each of some ranks, and receive one from each of `senders`."""
    data = {rank: needs.encode() for rank, needs in send.items()}
    lengths = [memoryview(bytearray(_LENGTH.size)) for _ in senders]
    wires.move(
        [Message(rank, tag, memoryview(_LENGTH.pack(len(one)))) for rank, one in data.items()],
        [Message(rank, tag, one) for rank, one in zip(senders, lengths, strict=True)],
    )
    room = [memoryview(bytearray(_LENGTH.unpack(one)[0])) for one in lengths]
    wires.move(
        [Message(rank, tag + 1, memoryview(one)) for rank, one in data.items()],
        [Message(rank, tag + 1, one) for rank, one in zip(senders, room, strict=True)],
    )
    return [NeedMap.decode(one) for one in room]
