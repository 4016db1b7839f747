"""Silent ranks and those that do not get on: who is named, when, and when it is withdrawn.

Method: ranks are ledgers over one board in memory with a clock that is a number; a rank that is
stopped makes no moves.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ckpt
from ckpt.errors import RankFailed
from ckpt.service.events import RankHeard, RankMissed
from ckpt.world import attendance, board
from ckpt.world.attendance import (
    PERIOD_SECONDS,
    SILENT_SECONDS,
    Concern,
    Ledger,
    Status,
    _Sheet,
    behind,
)
from ckpt.world.board import ProcessBoard, WorldBoard
from tests.ranks import run_ranks, stop_here

NAMED_SECONDS_MAX = 15.0
GUARD_SECONDS = 60.0


class MemoryStore:
    """The rendezvous store, as far as boards use it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests = 0

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self.requests += 1
        self.values.update(zip(keys, values, strict=True))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.requests += 1
        return [self.values[key] for key in keys]

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self.requests += 1
        return all(key in self.values for key in keys)


class Tree:
    """The tree of a world: what is spread is heard by all at once."""

    def __init__(self) -> None:
        self.spreads = 0
        self._news = b""

    def spread(self, news: bytes) -> None:
        self.spreads += 1
        self._news = news

    def news(self) -> bytes:
        return self._news


class CutOff:
    """The tree as a rank sees it that news do not reach while `is_cut_off`."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._last = b""
        self.is_cut_off = False

    def spread(self, news: bytes) -> None:
        self._tree.spread(news)

    def news(self) -> bytes:
        self._last = self._last if self.is_cut_off else self._tree.news()
        return self._last


class Ranks:
    """`size` processes that move in turn, with a ledger for each of their `worlds`; those in
    `stopped` do not.
    """

    def __init__(self, size: int, worlds: int = 1) -> None:
        self.now = 1000.0
        self.stores = [MemoryStore() for _ in range(size)]
        for store in self.stores:
            store.values = self.stores[0].values
        self.trees = [Tree() for _ in range(worlds)]
        self.boards = [CutOff(self.trees[0]) for _ in range(size)]
        self.stopped: set[int] = set()
        self.calls = [0] * size
        self.called = [self.now] * size
        everyone = range(size)
        self.ledgers = []
        for rank in everyone:
            process = ProcessBoard(self.stores[rank], rank, lambda: self.now)
            trees: list[Any] = [self.boards[rank], *self.trees[1:]]
            for number, tree in enumerate(trees):
                board = WorldBoard(process, f"world{number}", everyone, tree)
                ledger = Ledger(board, rank, size, partial(self.status, rank), lambda: self.now)
                self.ledgers.append((rank, ledger))
        self.said: list[dict[tuple[int, str], Concern]] = [{} for _ in range(size)]

    def status(self, rank: int) -> Status:
        idle = self.now - self.called[rank]
        return Status(f"host{rank}", 7 + rank, "training", self.calls[rank], idle, 0.5)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += PERIOD_SECONDS / 3
            turn = round(self.now / (PERIOD_SECONDS / 3)) % 3
            for number, (rank, ledger) in enumerate(self.ledgers):
                if rank not in self.stopped:
                    if turn == number % 3:
                        ledger.update()
                    if turn == (number + 1) % 3:
                        concerns = ledger.concerns()
                        self.said[rank] = {(one.rank, one.kind): one for one in concerns}

    def step(self) -> None:
        for rank in range(len(self.calls)):
            if rank not in self.stopped:
                self.calls[rank] += 1
                self.called[rank] = self.now

    def named(self) -> list[set[tuple[int, str]]]:
        return [set(self.said[r]) for r in range(len(self.calls)) if r not in self.stopped]


@pytest.mark.parametrize("victim", [0, 1, 4])
def test_a_silent_rank_is_named_on_all_others_and_withdrawn(victim: int) -> None:
    ranks = Ranks(5)
    ranks.run(10.0)
    assert ranks.named() == [set()] * 5
    ranks.stopped = {victim}
    ranks.run(NAMED_SECONDS_MAX)
    assert ranks.named() == [{(victim, "silent")}] * 4
    one = ranks.said[2][victim, "silent"]
    assert (one.host, one.step, one.phase) == (f"host{victim}", 7 + victim, "training")
    ranks.run(60.0)
    assert ranks.named() == [{(victim, "silent")}] * 4
    ranks.stopped = set()
    ranks.run(4 * PERIOD_SECONDS)
    assert ranks.named() == [set()] * 5


def test_a_keeper_decodes_each_post_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at all of them once a second or so, and most are those of the look before."""
    decoded, loads = list[bytes](), json.loads

    def noted(raw: bytes) -> Any:
        decoded.append(raw)
        return loads(raw)

    ranks = Ranks(3)
    monkeypatch.setattr("ckpt.world.attendance.json.loads", noted)
    ranks.run(60.0)
    posts = [raw for raw in decoded if b'"host' in raw[:11]]  # of a sheet, the host comes later
    assert posts and len(posts) == len({*posts})


def test_several_silent_ranks_are_named_the_keeper_among_them() -> None:
    ranks = Ranks(5)
    ranks.run(10.0)
    ranks.stopped = {0, 1, 3}
    ranks.run(2 * NAMED_SECONDS_MAX)
    assert ranks.named() == [{(0, "silent"), (1, "silent"), (3, "silent")}] * 2
    ranks.stopped = {3}
    ranks.run(NAMED_SECONDS_MAX)
    assert ranks.named() == [{(3, "silent")}] * 4


def test_who_was_stopped_itself_accuses_nobody() -> None:
    """All stop together, as when a machine sleeps, and one of them alone."""
    for stopped in ({0, 1, 2}, {1}):
        ranks = Ranks(3)
        ranks.run(10.0)
        ranks.stopped = stopped
        ranks.run(100.0)
        ranks.stopped = set()
        for _ in range(30):
            ranks.run(PERIOD_SECONDS / 3)
            accused = {r for said in ranks.said for r, kind in said if kind == "silent"}
            assert accused <= stopped
        assert ranks.named() == [set()] * 3


def test_a_rank_that_makes_no_step_is_named_while_the_others_wait_for_it() -> None:
    ranks = Ranks(4)
    for _ in range(10):
        ranks.step()
        ranks.run(1.0)
    late, ranks.stopped = ranks.stopped, {2}
    ranks.step()
    ranks.stopped = late
    ranks.run(12.0)
    assert ranks.named() == [set()] * 4
    ranks.run(10.0)
    expected: list[set[tuple[int, str]]] = [{(2, "behind")}] * 4
    expected[2] = set()
    assert ranks.named() == expected
    ranks.step()
    ranks.run(5.0)
    assert ranks.named() == [set()] * 4


def test_slow_steps_and_ranks_that_all_wait_are_nobodys_fault() -> None:
    same = Status("h", 1, "training", 9, 500.0, 1.0)
    assert behind({0: same, 1: same, 2: same}) == []
    slow = same._replace(step_seconds=200.0)
    assert behind({0: slow, 1: slow._replace(calls=8), 2: slow}) == []
    assert behind({0: same, 1: same._replace(calls=8), 2: same}) == [1]


def test_a_board_that_does_not_answer_is_noticed_by_who_does_not_wait_for_it() -> None:
    ranks = Ranks(2)
    ranks.run(10.0)
    _, ledger = ranks.ledgers[1]
    # No `update` returns from here on, as in a request to a host that is stopped.
    for _ in range(round((SILENT_SECONDS + 3) / PERIOD_SECONDS)):
        ranks.now += PERIOD_SECONDS
        concerns = ledger.concerns()
    assert [(one.rank, one.kind) for one in concerns] == [(0, "silent")]


@pytest.mark.parametrize("worlds", [1, 5])
def test_it_costs_a_process_one_request_in_five_seconds(worlds: int) -> None:
    """In all its worlds together. The keeper of their sheets reads all posts beside that."""
    ranks = Ranks(50, worlds)
    ranks.run(10.0)
    before = [store.requests for store in ranks.stores]
    spreads = sum(tree.spreads for tree in ranks.trees)
    ranks.run(20 * 5.0)
    requests = [s.requests - count for s, count in zip(ranks.stores, before, strict=True)]
    assert max(requests[1:]) <= 20
    assert requests[0] <= 20 * (1 + 4)
    assert sum(tree.spreads for tree in ranks.trees) - spreads <= 20 * worlds
    assert ranks.named() == [set()] * 50


@pytest.mark.parametrize("victim", [0, 2])
def test_who_is_cut_off_by_a_silent_rank_names_that_one_and_no_other(victim: int) -> None:
    """News stop where a rank in the tree is silent; rank 0, who keeps the sheet, is well at 2."""
    ranks = Ranks(5)
    ranks.run(10.0)
    ranks.stopped = {victim}
    for below in ranks.boards[3:]:
        below.is_cut_off = True
    for _ in range(round(NAMED_SECONDS_MAX)):
        ranks.run(1.0)
        assert set().union(*ranks.named()) <= {(victim, "silent")}
    assert ranks.named() == [{(victim, "silent")}] * 4
    ranks.stopped = set()
    for below in ranks.boards[3:]:
        below.is_cut_off = False
    ranks.run(8.0)
    assert ranks.named() == [set()] * 5
    before = sum(store.requests for store in ranks.stores[1:])
    ranks.run(60.0)
    assert sum(store.requests for store in ranks.stores[1:]) - before <= 4 * 60 / 5


def test_the_copy_in_the_store_does_not_replace_a_newer_sheet_that_was_heard() -> None:
    """The keeper spreads a sheet at once and leaves it in the store with its next request, before
    which it may be stopped: what is reported is what it said last.
    """
    ranks = Ranks(3)
    ranks.run(10.0)
    sheet = _Sheet.decode(ranks.trees[0].news())
    newer = sheet._replace(number=sheet.number + 1, status=sheet.status._replace(step=99))
    ranks.trees[0].spread(newer.encode())
    ranks.stopped = {0}
    first: dict[int, Concern] = {}
    for _ in range(round(NAMED_SECONDS_MAX)):
        ranks.run(1.0)
        for rank in (1, 2):
            if ranks.said[rank]:
                first.setdefault(rank, ranks.said[rank][0, "silent"])
    assert [first[rank].step for rank in (1, 2)] == [99, 99]


# --- real processes -------------------------------------------------------------------------------


def _wait_until_known(checkpointer: Any, step: int) -> None:
    """Until all ranks have posted that step, and the sheet that is known here names it for rank 0:
    what is reported of the rank that keeps the sheet is what its last sheet says.
    """
    board = checkpointer._training.world.board()

    def steps() -> list[int]:
        sheet = board.heard()
        posts = [json.loads(post)[1:] if post else None for post in board.statuses()]
        statuses = [Status(*post) if post else None for post in posts]
        statuses.append(_Sheet.decode(sheet).status if sheet else None)
        return [-1 if one is None else one.step for one in statuses]

    until = time.monotonic() + GUARD_SECONDS
    while set(known := steps()) != {step}:
        assert time.monotonic() < until, known
        time.sleep(0.1)


def _halve_all_waits() -> None:
    for module in (attendance, board):
        for name, seconds in list(vars(module).items()):
            if name.endswith("_SECONDS"):
                setattr(module, name, seconds / 2)


def _train(scratch: str, victim: int, silence_seconds_max: float | None) -> Any:
    """The victim stops itself in step 3 and all others wait for it, as in a collective."""
    rank, notices = dist.get_rank(), []
    _halve_all_waits()
    pids = Path(scratch)
    (pids / f"{rank}").write_text(str(os.getpid()))

    def observe(event: Any) -> None:
        if isinstance(event, RankMissed | RankHeard):
            notices.append((type(event).__name__, event.concern))

    with ckpt.Checkpointer(
        {"x": 1},
        f"{scratch}/root",
        save=ckpt.Never(),
        observers=[observe],
        silence_seconds_max=silence_seconds_max,
    ) as checkpointer:
        for step in range(1, 4):
            checkpointer.step(step)
            time.sleep(0.35)
        _wait_until_known(checkpointer, step=3)
        dist.barrier()
        notices.clear()  # a loaded machine may have kept a rank from being heard before
        if rank == victim:
            stop_here()
            time.sleep(2.0)  # woken: it posts again before it continues
        elif silence_seconds_max is None:
            while "RankMissed" not in [name for name, _ in notices]:
                time.sleep(0.1)
            (pids / f"heard{rank}").touch()
            heard = [pids / f"heard{other}" for other in range(3) if other != victim]
            while not all(path.exists() for path in heard):
                time.sleep(0.05)
            os.kill(int((pids / f"{victim}").read_text()), signal.SIGCONT)
        else:
            for step in range(4, 500):
                time.sleep(0.1)
                checkpointer.step(step)
        dist.barrier()
        checkpointer.step(4)
        until = time.monotonic() + 30
        while rank != victim and len(notices) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        dist.barrier()
    return notices


@pytest.mark.ranks
@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_process_is_named_to_observers_and_withdrawn(victim: int, tmp_path: Path) -> None:
    results = run_ranks(3, _train, str(tmp_path), victim, None, timeout_seconds=180.0)
    for rank, notices in enumerate(results):
        if rank == victim:
            continue
        # A loaded machine may keep another rank, or the victim once more, from being heard.
        of_victim = [one for one in notices if one[1].rank == victim]
        if of_victim[0][0] == "RankHeard":  # of a silence before
            of_victim.pop(0)
        (name, concern), (again, _), *_ = of_victim
        assert (name, again) == ("RankMissed", "RankHeard")
        assert concern.kind == "silent"
        assert concern.host == socket.gethostname() and concern.step == 3


@pytest.mark.ranks
def test_a_silence_too_long_is_an_error_where_that_was_asked_for(tmp_path: Path) -> None:
    results = run_ranks(3, _train_and_fail, str(tmp_path), 1, allow_dead=[1], timeout_seconds=180.0)
    for rank in (0, 2):
        failed, text = results[rank]
        assert failed == 1 and "silent" in text and "silence_seconds_max" in text


def _train_and_fail(scratch: str, victim: int) -> tuple[int, str]:
    rank, pids = dist.get_rank(), Path(scratch)
    try:
        _train(scratch, victim, 4.5)
    except RankFailed as failed:
        (pids / f"heard{rank}").touch()
        while rank == 0 and not (pids / "heard2").exists():
            time.sleep(0.05)
        if rank == 0:
            os.kill(int((pids / f"{victim}").read_text()), signal.SIGKILL)
        return failed.rank, str(failed)
    raise AssertionError("nothing was raised")
