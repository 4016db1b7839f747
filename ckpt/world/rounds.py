"""The control rounds of one world: payloads go up the tree to rank 0, answers down from it.

A rank leaves its part in a round with the heart of its process and continues, or waits for the
answer. The hearts join payloads on the way up and pass answers on at once, so no rank holds up
another by being late, and a rank sends and receives one message per round and neighbour.

Note "who is to blame": a rank that waits sees its neighbours in the tree only. A death is reported
to all by those that were connected to the dead, with the last round for which its payload has
passed: later ones can never end. At the deadline rank 0 asks down the tree who has not come, since
a child that is missing may itself wait for another; the others ask their parent whether it is there
at all. What ends a world is written to the rendezvous store once, first come first served, so that
all ranks raise one text even when two find two reasons.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ckpt.errors import RankFailed
from ckpt.world.agreement import ranks_in_words
from ckpt.world.base import pack, unpack
from ckpt.world.failures import Gone, copied, decode_failure, encode_failure, other_path, over
from ckpt.world.heart import LEFT, Heart
from ckpt.world.link import Frame, FrameKind, Neighbour
from ckpt.world.tree import Family, family

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
UNMET = "unmet"
NEVER_MET = (
    "it has never connected to the others: it did not start, died before anybody could know of it, "
    "or does something else"
)
CALL_SECONDS = 15.0  # until a rank that waits says who has not made the same call
ROLL_SECONDS = 1.0  # for the answers of those
STORE_SECONDS = 2.0  # for a request during a failure, to a store whose host may be gone


@dataclass(frozen=True, slots=True)
class Deadlines:
    """When ranks give up on each other, in seconds.

    A process that ends is noticed at once, on any machine. One that is there but does nothing, or a
    machine that is silent, is given up at `round_seconds_max`, or at `storage_seconds_max` while
    any rank waits for its storage. `grace_seconds` is for finding the rank to blame after that.
    """

    round_seconds_max: float = 600.0
    storage_seconds_max: float = 1800.0
    grace_seconds: float = 4.0


class Rounds:
    """One rank's part in the rounds of a world, and what its neighbours have reported.

    `store` is a part of the rendezvous store that only this world uses. `ranks` are those of
    torch.distributed, in rank order.
    """

    def __init__(
        self,
        heart: Heart,
        world: bytes,
        ranks: tuple[int, ...],
        rank: int,
        store: Any,
        deadlines: Deadlines,
    ) -> None:
        self._heart = heart
        self._world = world
        self._rank = rank
        self._size = len(ranks)
        self._store = store
        self._deadlines = deadlines
        self._family: Family = family(rank, len(ranks))
        parent = self._family.parent
        above = {} if parent is None else {parent: Neighbour(True, ranks[parent])}
        below = {child: Neighbour(False, ranks[child]) for child in self._family.children}
        self._neighbours: dict[int, Neighbour] = {**above, **below}
        self._rank_of = {neighbour: rank for rank, neighbour in self._neighbours.items()}
        self._changed = threading.Condition()
        self._number = 0  # of the round this rank has come to
        self._mine: dict[int, tuple[str, bytes]] = {}
        self._ups: dict[int, dict[int, Frame]] = {}
        self._last_ups = dict.fromkeys(self._family.children, 0)
        self._collected: dict[int, bytes] = {}
        self._downs: dict[int, Frame] = {}
        self._gone: dict[int, Gone] = {}
        self._absent: dict[int, set[int]] = {}
        self._here: set[int] = set()
        self._call, self._calls = "", 0
        self._uncalled: dict[int, set[int]] = {}
        self._unmet: set[int] = set()
        self._flags: set[str] = set()
        self._news = b""
        self._failure: RankFailed | None = None
        self._is_abandoned = False

    # one rank's part

    def begin_call(self, name: str) -> None:
        """This rank makes a call that all ranks have to make."""
        with self._changed:
            self._call, self._calls = name, self._calls + 1

    def begin(self) -> int:
        """The number of the next round."""
        with self._changed:
            self._number += 1
            return self._number

    def contribute(self, number: int, name: str, payload: bytes) -> None:
        """Leave this rank's payload for rank 0. Does not wait."""
        with self._changed:
            self._mine[number] = (name, payload)
            self._pass_up(number)
            self._find_stuck()

    def from_below(self, number: int, name: str) -> list[bytes]:
        """What each of the ranks right below passes up, in rank order, when all have come, for this
        rank to merge: what it contributes after that goes up without them.
        """
        blocks = len(self._family.blocks)

        def ready() -> dict[int, Frame] | None:
            ups = self._ups.get(number, {})
            return self._ups.pop(number, {}) if len(ups) == blocks else None

        frames = self._wait(number, name, ready, needs_all=True) if blocks else {}
        for child, frame in sorted(frames.items()):
            if frame.name != name:
                raise other_path(child, frame.name, self._rank, name)
        # Back without their bodies: `_pass_up` waits for frames of all that are below.
        if self._family.parent is not None:
            with self._changed:
                taken = {child: frame._replace(body=b"") for child, frame in frames.items()}
                self._ups[number] = taken
        return [part for child in self._family.children for part in unpack(frames[child].body)]

    def answer(self, number: int, name: str, body: bytes) -> None:
        """Rank 0's answer to all. Does not wait."""
        self._send(self._family.children, Frame(FrameKind.DOWN, self._world, number, name, body))

    def collected(self, number: int, name: str) -> bytes:
        """On rank 0: every rank's payload, packed, in rank order, when all have come."""
        return self._wait(number, name, lambda: self._collected.pop(number, None), needs_all=True)

    def answered(self, number: int, name: str, *, needs_all: bool) -> bytes:
        """What rank 0 answers. `needs_all` if it cannot do so before every rank has come."""
        frame = self._wait(number, name, lambda: self._downs.pop(number, None), needs_all=needs_all)
        if frame.name != name:
            raise other_path(0, frame.name, self._rank, name)
        return frame.body

    def wait_for(self, done: Callable[[], bool], name: str, seconds: float) -> bool:
        """Wait for something else, `done()`, which `notice` announces; false when time is up.

        Raises RankFailed when a rank dies meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: done() or self._why_over(name), timeout=seconds)
            failure = None if done() else self._why_over(name)
        if failure is not None:
            raise failure
        return done()

    def notice(self) -> None:
        """Have waiting threads look again."""
        with self._changed:
            self._changed.notify_all()

    def check(self, name: str) -> None:
        """Raise RankFailed when this world has come to its end, or a neighbour has left it, as far
        as is known here.
        """
        with self._changed:
            failure = self._why_over(name, left=True)
        if failure is not None:
            raise failure

    def raise_flag(self, name: str) -> None:
        """Set a flag on all ranks."""
        with self._changed:
            self._flags.add(name)
            self._send(self._neighbours, Frame(FrameKind.FLAG, self._world, name=name))

    def flag_is_up(self, name: str) -> bool:
        """Whether any rank has set that flag, as far as has come here."""
        with self._changed:
            return name in self._flags

    def spread(self, news: bytes) -> None:
        """Tell all ranks the newest of something; who is cut off does not hear it."""
        with self._changed:
            self._news = news
            self._send(self._neighbours, Frame(FrameKind.NEWS, self._world, body=news))

    def news(self) -> bytes:
        """The newest that was spread, as far as has come here; empty before."""
        with self._changed:
            return self._news

    def abandon(self) -> None:
        """End a wait of another thread of this process."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    @property
    def failure(self) -> RankFailed | None:
        """Why this world is at its end."""
        with self._changed:
            return None if self._failure is None else copied(self._failure)

    def end(self, failure: RankFailed) -> RankFailed:
        """End this world on all ranks; returns the failure that all raise, which may be another."""
        known = self.failure
        if known is None:
            # Without an answer of the store, this rank's own reason is better than none.
            known = self._heart.aside(lambda: self._first(failure), STORE_SECONDS) or failure
            self._hear(known, source=None)
        return self.failure or known

    def leave(self) -> None:
        """Take part no more, once what this rank has contributed is on its way to rank 0: who is
        below in the tree reaches rank 0 through this rank only, and may come later.
        """
        with self._changed:
            is_over = self._failure is not None or self._heart.is_stopped
            number = 0 if is_over else max(self._mine, default=0)  # rounds count from 1
            name = self._mine[number][0] if number else ""
        try:
            if number:
                self._wait(number, name, lambda: None if self._mine else True, needs_all=True)
        except RankFailed as failure:  # rank 0 waits for the same, and raises why
            logger.warning("this rank has left before the others: %s", failure)
        with self._changed:
            self._send(self._neighbours, Frame(FrameKind.LEFT, self._world))
        self._heart.forget(self._world)

    # what comes from the heart

    def receive(self, neighbour: Neighbour, frame: Frame) -> None:
        """Take a message of a neighbour."""
        sender = self._rank_of.get(neighbour)
        if sender is None:
            return
        if frame.kind is FrameKind.FAILURE:
            self._hear(decode_failure(frame.body), source=sender)
            return
        with self._changed:
            self._take(sender, frame)
            self._changed.notify_all()

    def lost(self, neighbour: Neighbour, how: str) -> None:
        """A neighbour's process has ended: report it to all, but for one that has left."""
        sender = self._rank_of.get(neighbour)
        if sender is None or sender in self._gone:
            return
        with self._changed:
            self._note_gone(sender, how)
            if how != LEFT:
                gone = self._gone[sender]
                others = [rank for rank in self._neighbours if rank != sender]
                body = json.dumps([gone.rank, how]).encode()
                name = "above" if gone.is_above else ""
                # Below the lost one's parent it is no parent; above, it is one of those below.
                self._send(others, Frame(FrameKind.GONE, self._world, gone.until, name, body))
            self._changed.notify_all()

    def _take(self, sender: int, frame: Frame) -> None:
        others = [rank for rank in self._neighbours if rank != sender]
        if frame.kind in (FrameKind.DOWN, FrameKind.GONE, FrameKind.FLAG, FrameKind.NEWS):
            self._send(others, frame)
        if frame.kind is FrameKind.UP:
            self._ups.setdefault(frame.number, {})[sender] = frame
            self._last_ups[sender] = frame.number
            self._pass_up(frame.number)
        elif frame.kind is FrameKind.DOWN:
            self._downs[frame.number] = frame
        elif frame.kind is FrameKind.GONE:
            rank, how = json.loads(frame.body)
            self._gone.setdefault(rank, Gone(rank, how, frame.number, bool(frame.name)))
        elif frame.kind is FrameKind.LEFT:
            self._note_gone(sender, LEFT)
        elif frame.kind is FrameKind.FLAG:
            self._flags.add(frame.name)
        elif frame.kind is FrameKind.NEWS:
            self._news = frame.body
        elif frame.kind is FrameKind.ASK:
            self._reply(sender, frame)
        elif frame.kind is FrameKind.ABSENT:
            is_down = self._is_above(sender)
            self._send([rank for rank in others if self._is_above(rank) != is_down], frame)
            self._absent.setdefault(frame.number, set()).add(int(frame.body))
            if frame.name == UNMET:
                self._unmet.add(int(frame.body))
        elif frame.kind is FrameKind.HERE:
            self._here.add(frame.number)
        elif frame.kind is FrameKind.ROLL:
            self._answer_roll(sender, frame)
        elif frame.kind is FrameKind.UNCALLED:
            rank = int(frame.body or sender)
            self._uncalled.setdefault(frame.number, set()).add(rank)
            if self._family.parent is not None and not self._is_above(sender):
                self._send([self._family.parent], frame._replace(body=b"%d" % rank))

    def _pass_up(self, number: int) -> None:
        """Send a round's payloads on when all from below have come, and this rank's own."""
        ups = self._ups.get(number, {})
        if number not in self._mine or len(ups) < len(self._family.blocks):
            return
        name, payload = self._mine.pop(number)
        self._ups.pop(number, None)
        for child, frame in sorted(ups.items()):
            if frame.name != name:
                self._end_soon(other_path(child, frame.name, self._rank, name))
                return
        # This rank first: those below it follow it by number, so payloads stay in rank order.
        body = b"".join([pack(payload), *(ups[child].body for child in self._family.children)])
        if self._family.parent is None:
            self._collected[number] = body
        else:
            self._send([self._family.parent], Frame(FrameKind.UP, self._world, number, name, body))

    def _note_gone(self, rank: int, how: str) -> None:
        is_above = self._is_above(rank)
        until = 0 if is_above else self._last_ups[rank]
        self._gone.setdefault(rank, Gone(rank, how, until, is_above))
        self._find_stuck()

    def _find_stuck(self) -> None:
        """A round that this rank has left to the heart, and that waits for a child that is gone."""
        lost = [self._gone[child] for child in self._family.children if child in self._gone]
        for number, (name, _) in self._mine.items():
            for gone in lost:
                if number > gone.until:
                    self._end_soon(over(gone, name))
                    return

    def _reply(self, sender: int, frame: Frame) -> None:
        if not self._is_above(sender):
            self._send([sender], frame._replace(kind=FrameKind.HERE))
        can_be_missed = self._family.parent is None or self._is_above(sender)
        if can_be_missed and frame.number > self._number:
            self._send([sender], frame._replace(kind=FrameKind.ABSENT, body=b"%d" % self._rank))
        if self._is_above(sender):
            lacking = self._lacking(frame.number)
            for child in self._never_met(lacking):  # it cannot answer for itself
                absent = frame._replace(kind=FrameKind.ABSENT, name=UNMET, body=b"%d" % child)
                self._send([sender], absent)
            self._send(lacking, frame)
        elif self._family.parent is not None:
            self._send([self._family.parent], frame)

    def _answer_roll(self, sender: int, frame: Frame) -> None:
        uncalled = [self._rank] if int(frame.body) > self._calls else []
        if self._is_above(sender):
            unmet = self._never_met(list(self._family.children))
            uncalled += unmet
            self._send([one for one in self._family.children if one not in unmet], frame)
        for rank in uncalled:
            self._send([sender], frame._replace(kind=FrameKind.UNCALLED, body=b"%d" % rank))

    def _lacking(self, number: int) -> list[int]:
        return [child for child, last in self._last_ups.items() if last < number]

    def _never_met(self, children: list[int]) -> list[int]:
        return [one for one in children if not self._heart.has_met(self._neighbours[one])]

    def _is_above(self, rank: int) -> bool:
        return rank == self._family.parent

    def _send(self, ranks: Any, frame: Frame) -> None:
        data = frame.encode() if ranks else b""
        for rank in ranks:
            self._heart.send(self._neighbours[rank], data)

    # failures

    def _end_soon(self, failure: RankFailed) -> None:
        # The heart's thread may be here, and `end` waits for the store.
        self._heart.begin(lambda: self.end(failure))

    def _first(self, failure: RankFailed) -> RankFailed:
        """The failure that was first in the store, which is this one if there was none."""
        return decode_failure(self._store.compare_set("broken", "", encode_failure(failure)))

    def _hear(self, failure: RankFailed, source: int | None) -> None:
        with self._changed:
            # The first is passed on and stays; what comes later is the same news by another way.
            if self._failure is None:
                self._failure = failure
                others = [rank for rank in self._neighbours if rank != source]
                body = encode_failure(failure).encode()
                self._send(others, Frame(FrameKind.FAILURE, self._world, body=body))
            self._changed.notify_all()

    def _why_over(
        self, name: str, number: float = math.inf, *, needs_all: bool = True, left: bool = False
    ) -> RankFailed | None:
        """Why a round cannot end, as far as is known here."""
        if self._failure is not None:
            return copied(self._failure)
        if self._is_abandoned:
            text = f"rank {self._rank} gave up in phase {name!r}, because its process ends"
            return RankFailed(text, rank=self._rank, phase=name)
        for gone in self._gone.values():
            if (left or gone.how != LEFT) and (
                gone.is_above or (needs_all and number > gone.until)
            ):
                return over(gone, name)
        return None

    # waiting

    def _wait(
        self, number: int, name: str, ready: Callable[[], _T | None], *, needs_all: bool
    ) -> _T:
        """`ready()` once it gives something. Raises RankFailed when it never will."""
        waiting = _Wait(self, number, name)
        why_not = partial(self._why_over, name, number, needs_all=needs_all, left=True)
        result: list[_T] = []

        def is_over() -> bool:
            got = ready()
            if got is not None:
                result.append(got)
            return bool(result) or why_not() is not None

        while True:
            with self._changed:
                timeout = waiting.due - time.monotonic()
                is_early = self._changed.wait_for(
                    lambda: is_over() or waiting.is_answered(), timeout=max(0.0, timeout)
                )
                if result:
                    self._absent.pop(number, None)
                    return result[0]
                failure = why_not()
            if failure is not None:
                raise failure
            waiting.next(is_early)

    def stored_failure(self) -> RankFailed | None:
        """The failure in the store, which may not have come here by the tree."""
        is_there = self._store.check(["broken"])
        return decode_failure(self._store.get("broken")) if is_there else None

    def storage_waits(self) -> bool:
        """Whether any rank waits for its storage."""
        return int(self._store.add("storage waits", 0)) > 0


class _Wait:
    """How long one wait lasts, and whom it blames in the end; see note "who is to blame"."""

    def __init__(self, rounds: Rounds, number: int, name: str) -> None:
        self._rounds = rounds
        self._number = number
        self._name = name
        self._started = time.monotonic()
        self._asked = 0
        limits = rounds._deadlines
        self._is_root = rounds._family.parent is None
        # Rank 0 sees more: the others leave it the time to find who is missing.
        spare = 0.0 if self._is_root else 2 * limits.grace_seconds
        self._due = self._started + limits.round_seconds_max + spare
        # Rank 0 asks all, those right below it ask it; nobody asks in rounds of no public call.
        self._call, self._calls = rounds._call, rounds._calls
        can_ask = self._call and (self._is_root or rounds._family.parent == 0)
        self._roll_due = self._started + CALL_SECONDS if can_ask else math.inf
        self._has_called_roll = False

    @property
    def due(self) -> float:
        """When `next` is to be called."""
        return min(self._due, self._roll_due)

    def is_answered(self) -> bool:
        """Whether there is no need to wait for more answers."""
        if not self._asked:
            return False
        absent = self._rounds._absent.get(self._number, set())
        if not self._is_root:
            return 0 in absent
        lacking = self._lacking_blocks()
        return bool(lacking) and all(absent & set(block) for block in lacking)

    def next(self, is_early: bool) -> None:
        """Time is up, or all answers are here: wait on for some reason, or raise RankFailed."""
        rounds, limits = self._rounds, self._rounds._deadlines
        waited = time.monotonic() - self._started
        if self._started + waited >= self._roll_due:
            self._call_roll()
            return
        heart = rounds._heart
        # Any rank's wait counts: the missing rank may wait for one that waits for its storage.
        may_wait = waited <= limits.storage_seconds_max
        if may_wait and heart.aside(rounds.storage_waits, STORE_SECONDS):
            # Who was missing may have come when time is up again.
            self._asked = 0
            with rounds._changed:
                rounds._absent.pop(self._number, None)
                rounds._here.discard(self._number)
            self._due = time.monotonic() + limits.round_seconds_max
            return
        if self._asked and is_early:
            self._blame()
            return
        stored = heart.aside(rounds.stored_failure, STORE_SECONDS)
        if stored is not None:
            rounds._hear(stored, source=None)
            return
        if not self._asked:
            self._asked = 1
            self._ask()
            self._due = time.monotonic() + limits.grace_seconds
        elif self._asked == 1 and not self._is_root and self._number in rounds._here:
            # The parent is there and waits, too: its own deadline, or rank 0's, comes later.
            self._asked = 2
            self._due = time.monotonic() + limits.round_seconds_max + limits.grace_seconds
        else:
            self._blame()

    def _call_roll(self) -> None:
        """Ask who has not made this call; at the second time, say so."""
        rounds, root = self._rounds, self._is_root
        with rounds._changed:
            whom = list(rounds._family.children) if root else [0]
            unmet = rounds._never_met(whom) if root else []
            if not self._has_called_roll:
                self._has_called_roll = True
                self._roll_due = time.monotonic() + ROLL_SECONDS
                body = b"%d" % self._calls
                frame = Frame(FrameKind.ROLL, rounds._world, self._number, self._name, body)
                rounds._send([one for one in whom if one not in unmet], frame)
                return
            self._roll_due = math.inf
            uncalled = sorted({*unmet, *rounds._uncalled.pop(self._number, ())})
        if uncalled:
            logger.warning(
                "rank %d has waited for %.0f s in %s, which %s not called: all ranks have to make "
                "this call, also those that have nothing to add (no `if rank == 0:` around it)",
                rounds._rank,
                time.monotonic() - self._started,
                self._call,
                ranks_in_words(uncalled) + (" has" if len(uncalled) == 1 else " have"),
            )

    def _ask(self) -> None:
        rounds = self._rounds
        with rounds._changed:
            parent = rounds._family.parent
            whom = [parent] if parent is not None else rounds._lacking(self._number)
            if parent is None:
                unmet = rounds._never_met(whom)  # they cannot answer for themselves
                rounds._absent.setdefault(self._number, set()).update(unmet)
                rounds._unmet.update(unmet)
            rounds._send(whom, Frame(FrameKind.ASK, rounds._world, self._number, self._name))

    def _lacking_blocks(self) -> list[range]:
        lacking = self._rounds._lacking(self._number)
        return [block for block in self._rounds._family.blocks if block.start in lacking]

    def _blame(self) -> None:
        """Raise RankFailed, unless the missing have come at the last moment."""
        rounds, parent = self._rounds, self._rounds._family.parent
        with rounds._changed:
            absent = rounds._absent.get(self._number, set())
            if parent is None:
                parts = [absent & set(block) or {block.start} for block in self._lacking_blocks()]
                missing = sorted(set().union(*parts))
            else:
                missing = [0 if 0 in absent or self._asked > 1 else parent]
        if not missing:
            return
        raise RankFailed(
            f"rank {missing[0]} did not answer within {rounds._deadlines.round_seconds_max:g} "
            f"s in phase {self._name!r} ({ranks_in_words(missing)} missing); "
            + (NEVER_MET if missing[0] in rounds._unmet else "it hangs, or took another path"),
            rank=missing[0],
            phase=self._name,
        )
