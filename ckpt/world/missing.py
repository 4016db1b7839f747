"""Ranks that die before their first connection: no connection ends, so they are looked for.

A process leaves its card in the rendezvous store before it connects to anybody. The parent of a
rank that does not come reads that card and asks for the process in a second way, as for one whose
connection has ended. One that ends without a call of this library leaves a card that says so
(`job.leave_uncalled`), where it still can. A rank without a card may be late, or never
come: where torchrun's variables do not say that it has ended on this machine, only a deadline
tells.

Note "one request": while ranks are missing, a process asks the store once in `LOOK_SECONDS` whether
all of a group have left their cards; the cards are read when they have, and the group is halved
when not. So one rank that never starts hides no other, and 32 cost no more than one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from ckpt.world.by_store import Calls, call
from ckpt.world.heart import Heart
from ckpt.world.link import Neighbour
from ckpt.world.liveness import CONNECT_SECONDS, ENDED_UNCALLED, Card, has_ended
from ckpt.world.rounds import CALL_SECONDS

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
LOOK_CALLS = 5  # looks for calls by the store, to one for ranks
LOOK_CONNECT_SECONDS = 2.0


class Missing:
    """The children of a process, in any of its worlds, that have not connected. For all threads.

    `store` gives the rendezvous store that all ranks share.
    """

    def __init__(self, heart: Heart, store: Callable[[], Any]) -> None:
        self._heart = heart
        self._store = store
        self._lock = threading.Lock()
        self._expected: set[int] = set()
        self._groups: deque[list[int]] = deque()  # of ranks whose cards are not known
        self._cards: dict[int, Card] = {}
        self._is_looking = False
        self._calls = Calls(heart.begin, heart.card.rank)

    def expect(self, children: Sequence[int]) -> None:
        """Look for ranks of torch.distributed that should connect to this process, until they
        have.
        """
        with self._lock:
            new = [rank for rank in children if rank not in self._expected and self._lacks(rank)]
            if not new:
                return
            self._expected.update(new)
            self._groups.append(new)
            if not self._is_looking:
                self._is_looking = True
                self._heart.begin(self._look_on)

    def _lacks(self, rank: int) -> bool:
        return not self._heart.has_met(Neighbour(False, rank))

    def _look_on(self) -> None:
        quiet = 0
        while True:
            time.sleep(LOOK_SECONDS / LOOK_CALLS)
            quiet += 1
            with self._lock:
                self._expected = {rank for rank in self._expected if self._lacks(rank)}
                callers = [one for one in self._heart.by_store() if not one.is_parent]
                is_idle = not self._expected and not callers
                if is_idle or self._heart.is_stopped:
                    self._is_looking = False
                    return
            try:
                while (sock := self._calls.next(self._store())) is not None:
                    self._heart.adopt(sock)
                    quiet = 0  # not to be judged by its port before it has said who it is
                if quiet >= LOOK_CALLS:
                    quiet = 0
                    self.look()
            except Exception as error:  # the round's deadline is left
                logger.debug("no look for ranks that have not connected: %s", error)

    def look(self) -> None:
        """Ask the store for cards, once, and see whether those whose cards are known live."""
        with self._lock:
            group = self._groups.popleft() if self._groups else []
        group = [rank for rank in group if self._lacks(rank)]
        try:
            known = self._read(group)
        except BaseException:
            self._ask_again(group)  # a store that was away answers the next look
            raise
        # The store tells of all keys of a group or of none: one missing rank hides the others, and
        # halves of halves find it.
        if not known and group:
            self._ask_again(group[: len(group) // 2], group[len(group) // 2 :])
        for rank in group:
            if rank not in known and has_ended(rank):
                self._heart.give_up(Neighbour(False, rank), ENDED_UNCALLED)
        self._cards.update(known)
        for rank, card in list(self._cards.items()):
            if not self._lacks(rank):
                del self._cards[rank]
            elif how := _death(card):
                how += " before its first connection" if card.port else ""
                self._heart.give_up(Neighbour(False, rank), how)

    def _ask_again(self, *groups: list[int]) -> None:
        with self._lock:
            self._groups.extend(group for group in groups if group)

    def _read(self, group: list[int]) -> dict[int, Card]:
        keys = [card_key(rank) for rank in group]
        if not keys or not self._store().check(keys):
            return {}
        cards = self._store().multi_get(keys)
        return {rank: Card.decode(one) for rank, one in zip(group, cards, strict=True)}


def _death(card: Card) -> str:
    """What proves that a process is gone, "" if nothing does."""
    if card.process.runs() is None:
        try:
            card.connect(LOOK_CONNECT_SECONDS).close()
        except OSError as error:
            return card.death(error)
    return card.death()


def connect_to_parent(heart: Heart, store: Any, parent: int, seconds: float) -> None:
    """Connect to the process of a rank of torch.distributed, when it has come.

    Without success it counts as lost, and the first round says so.
    """
    neighbour = Neighbour(True, parent)
    if heart.has_met(neighbour):
        return
    # A client that waits holds up all other threads that use it.
    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
        store = store.clone()
    if how := _wait_for_card(heart, store, parent, seconds):
        heart.give_up(neighbour, how)
        return
    try:
        card = Card.decode(store.get(card_key(parent)))
        try:
            heart.connect(card, CONNECT_SECONDS)
        except OSError as error:
            # A process that is gone takes no call by the store either.
            if not card.port or card.process.runs() is False:
                raise
            if card.certificate != heart.card.certificate:
                own = heart.card.rank  # its parent looks for it there
                store.set(card_key(own), Card.of_absent(own, f"cannot join: {error}").encode())
                raise
            heart.connect(card, CONNECT_SECONDS, partial(call, heart.begin, store, parent, error))
    except OSError as error:
        how = card.death(error) or f"cannot be reached ({type(error).__name__}: {error})"
        heart.give_up(neighbour, how)
    except RuntimeError as error:
        heart.give_up(neighbour, f"cannot be found ({type(error).__name__}: {error})")


def _wait_for_card(heart: Heart, store: Any, rank: int, seconds: float) -> str:
    """Why the card of a rank of torch.distributed has not come, "" once it has."""
    began = time.monotonic()
    names_at = began + CALL_SECONDS
    while True:
        asked = time.monotonic()
        left = min(began + seconds - asked, LOOK_SECONDS)
        try:
            store.wait([card_key(rank)], timedelta(seconds=max(0.0, left)))
            return ""
        except (RuntimeError, OSError) as error:
            cause = f"{type(error).__name__}: {error}"
        if has_ended(rank):
            return ENDED_UNCALLED
        now = time.monotonic()
        if left < LOOK_SECONDS or now - asked < left / 2:  # or the store is gone
            return f"has not joined this job within {seconds:g} s ({cause})"
        if now >= names_at:
            names_at = math.inf
            logger.warning(
                "rank %d has waited for %.0f s for rank %d, which has not made its first call of "
                "this library: all ranks have to make the same ones",
                heart.card.rank,
                now - began,
                rank,
            )


def card_key(rank: int) -> str:
    """Where the card of a rank of torch.distributed lies in the rendezvous store."""
    return f"shardpoint/process/{rank}"
