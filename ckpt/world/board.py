"""Where ranks post their status: one request of a process in five seconds, for all its worlds.

Every process has one key in the rendezvous store, with its status in each world that it watches.
What is not urgent waits for the next request; what several worlds read at nearly the same time is
read once.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpt.world.rounds import Rounds

POST_SECONDS = 5.0
URGENT_SECONDS = 1.0  # between requests that do not wait for their time
FRESH_SECONDS = 1.25  # what was read is read again after that


class ProcessBoard:
    """The posts of one process, and what it has read of others. For all threads.

    `rank` is that of torch.distributed, `store` the rendezvous store that all ranks share.
    """

    def __init__(self, store: Any, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self.clock = clock
        self._rank = rank
        self._lock = threading.Lock()
        self._statuses: dict[str, str] = {}
        self._others: dict[str, bytes] = {}  # to be set with the statuses, by key
        self._sent = self._read = -POST_SECONDS
        self._of_interest: set[int] = set()
        self._arrived: set[int] = set()
        self._seen: dict[int, dict[str, str]] = {}

    def post_status(self, world: str, status: bytes | None, *, at_once: bool) -> None:
        """This rank's status in a world; None when it leaves, and then at once."""
        with self._lock:
            if status is None:
                self._statuses.pop(world, None)
                self._send()
                return
            self._statuses[world] = status.decode()
            self._send_if_due(at_once)

    def post(self, key: str, value: bytes, *, at_once: bool) -> None:
        """Set another key, also one that is set."""
        with self._lock:
            self._others[key] = value
            self._send_if_due(at_once)

    def statuses(self, world: str, ranks: Sequence[int]) -> list[bytes | None]:
        """The statuses of ranks of torch.distributed in that world; None of those without one."""
        with self._lock:
            # A world that is new here: what was read before lacks some of its ranks.
            if not self._of_interest.issuperset(ranks):
                self._of_interest.update(ranks)
                self._read = -POST_SECONDS
            if self.clock() - self._read >= FRESH_SECONDS:
                self._seen = self._look()
                self._read = self.clock()
            statuses = [self._seen.get(rank, {}).get(world) for rank in ranks]
        return [None if one is None else one.encode() for one in statuses]

    def _send_if_due(self, at_once: bool) -> None:
        if self.clock() - self._sent >= (URGENT_SECONDS if at_once else POST_SECONDS):
            self._send()

    def _send(self) -> None:
        self._sent = self.clock()
        values = {_key(self._rank): json.dumps(self._statuses).encode(), **self._others}
        self._others = {}
        self.store.multi_set(list(values), list(values.values()))

    def _look(self) -> dict[int, dict[str, str]]:
        """What the processes of interest have posted, as far as they have come."""
        # Only of those that are there: `multi_get` waits for keys that do not exist.
        waiting = sorted(self._of_interest - self._arrived)
        self._arrived.update(self._there(waiting))
        there = sorted(self._arrived)
        if not there:
            return {}
        posts = self.store.multi_get([_key(rank) for rank in there])
        return {rank: json.loads(post) for rank, post in zip(there, posts, strict=True)}

    def _there(self, ranks: Sequence[int]) -> Iterator[int]:
        """Which of `ranks` have posted: in few requests when it is most of them, or hardly any."""
        if not ranks:
            return
        if self.store.check([_key(rank) for rank in ranks]):
            yield from ranks
        elif len(ranks) > 1:
            middle = len(ranks) // 2
            yield from self._there(ranks[:middle])
            yield from self._there(ranks[middle:])


def _key(rank: int) -> str:
    return f"shardpoint/status/{rank}"


class WorldBoard:
    """The board of one world, whose `ranks` are those of torch.distributed, in rank order.

    News go through the tree of the world; the sheet lies in the store as well, for those whom news
    do not reach.
    """

    def __init__(
        self, process: ProcessBoard, world: str, ranks: Sequence[int], rounds: Rounds
    ) -> None:
        self._process = process
        self._world = world
        self._ranks = ranks
        self._rounds = rounds
        self._sheet = f"shardpoint/sheet/{world}"
        self._has_sheet = False

    def post(self, status: bytes | None, *, at_once: bool) -> None:
        self._process.post_status(self._world, status, at_once=at_once)

    def statuses(self) -> list[bytes | None]:
        return self._process.statuses(self._world, self._ranks)

    def post_sheet(self, sheet: bytes, *, at_once: bool) -> None:
        self._process.post(self._sheet, sheet, at_once=at_once)

    def sheet(self) -> bytes:
        store = self._process.store
        self._has_sheet = self._has_sheet or store.check([self._sheet])
        return bytes(store.get(self._sheet)) if self._has_sheet else b""

    def spread(self, news: bytes) -> None:
        self._rounds.spread(news)

    def heard(self) -> bytes:
        return self._rounds.news()
