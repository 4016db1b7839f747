"""Saves under injected faults, with ranks and whole jobs killed: nothing acknowledged is ever lost.

Method: lives of one job follow each other on one root. 20 % of all storage operations fail, in five
ways; a life may lose a rank, or all of them, at a random operation. What is acknowledged to any
rank is written down. After every life, a fresh process without faults must find all of it in the
log, and every live checkpoint whole and bit for bit the state of its step; it must be able to save,
and to sweep all orphans and unfinished uploads. At the end the promises of the protocol are checked
over the whole history. A life that hangs fails by its deadline.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from ckpt.commit.log import Log
from ckpt.commit.session import Session
from ckpt.service.retention import KeepBest, KeepEvery, KeepLatest
from storage import Store
from storage.memory import MemoryStore
from storage.retry import RetryingStore, RetryPolicy
from tests.conftest import Scale
from tests.e2e.job import NO_WAITING, Job, left_by_sweep
from tests.protocol.invariants import (
    History,
    RecordingStore,
    check_all,
    check_references,
    files_needed,
)
from tests.results import Counted
from tests.service.chaos import (
    Faults,
    FlakyStore,
    Life,
    UploadingStore,
    assert_is_partly_frozen,
    partly_frozen_at,
)

SIZE = 3
RATE = 0.2
KEEP = KeepLatest(2) | KeepEvery(10) & KeepLatest(20) | KeepBest(1, mode="max")
AT_ONCE = RetryPolicy(attempts_max=6, sleep=lambda seconds: None)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("ckpt")
    before = logger.level
    logger.setLevel(logging.CRITICAL)  # injected failures are logged by the thousand
    yield
    logger.setLevel(before)


class Root:
    """The bytes of one root, and what anybody was promised about them."""

    def __init__(self, inner: Store) -> None:
        self.history = History()
        self.uploads = UploadingStore(inner)
        self.store = RecordingStore(self.uploads, self.history)
        self.acknowledged: dict[str, int] = {}

    def stores(self, faults: Faults) -> list[Store]:
        """One for each rank, with a death of its own."""
        flaky: list[FlakyStore] = []

        def kill(ranks: tuple[int, ...]) -> None:
            for rank in ranks:
                flaky[rank].dead = True

        flaky += [FlakyStore(self.store, faults, kill) for _ in range(SIZE)]
        return [RetryingStore(store, AT_ONCE) for store in flaky]

    def check(self) -> None:
        """What a fresh process must find; see the top of the file."""
        state = Log(self.store).state()
        live = {entry.attempt: entry.step for entry in state.live}
        history = list(Log(self.store).history())
        committed = {r.attempt for r in history if r.kind == "COMMIT"}
        retired = {r.attempt for r in history if r.kind == "RETIRE"}
        lost = [a for a in self.acknowledged if a not in committed]
        assert not lost, f"acknowledged and not in the log: {lost}"
        gone = [a for a in self.acknowledged if a not in live and a not in retired]
        assert not gone, f"acknowledged and neither live nor retired: {gone}"
        if self.acknowledged:
            assert live
        for entry in state.live:
            loaded = [partly_frozen_at(0, rank, SIZE, blank=True) for rank in range(SIZE)]
            Job(SIZE, lambda rank: self.store).load(loaded.__getitem__, step=entry.step)
            for rank, one in enumerate(loaded):
                assert_is_partly_frozen(one, entry.step, rank, SIZE)

    def check_leftovers(self) -> None:
        """After a fresh claim has swept: no upload, and no attempt without need."""
        session = Session.claim(self.store, sources=NO_WAITING)
        session.sweep_unfinished()
        session.sweep()
        assert not self.uploads.uploads
        assert not left_by_sweep(self.store, session.state())


def _live_under_faults(
    root: Root, rng: random.Random, saves: int, dedup: bool
) -> tuple[Life, str, Faults]:
    """One life with about `saves` saves, which may be cut short."""
    per_save = 60  # operations, about
    kills: dict[int, tuple[int, ...]] = {}
    fate = rng.choice(["nothing", "a rank dies", "the job dies"])
    if fate != "nothing":
        victims = tuple(range(SIZE)) if fate == "the job dies" else (rng.randrange(SIZE),)
        kills[rng.randrange(1, per_save * saves)] = victims
    faults = Faults(RATE, rng.getrandbits(32), kills)
    life = Life(SIZE, root.stores(faults), saves, KEEP, dedup=dedup)
    ended = life.run()
    root.acknowledged.update(life.saved)
    return life, ended, faults


@pytest.mark.parametrize("dedup", [False, True], ids=["full", "dedup"])
def test_saves_under_faults_and_deaths_lose_nothing(
    scale: Scale, rng: random.Random, counted: Counted, dedup: bool
) -> None:
    wanted = scale.count(15 if dedup else 30, 1000)
    root = Root(MemoryStore())
    begun = lives = failed = 0
    ends: dict[str, int] = {}
    kinds: dict[str, int] = {}
    while begun < wanted:
        life, ended, faults = _live_under_faults(root, rng, rng.randint(2, 12), dedup)
        begun += len(life.saved) + life.failures
        failed += life.failures
        lives += 1
        ends[ended] = ends.get(ended, 0) + 1
        for kind, count in faults.counts.items():
            kinds[kind] = kinds.get(kind, 0) + count
        root.check()
        if scale.soak or lives % 3 == 0:
            root.check_leftovers()
        assert lives < 20 + wanted, "lives end before they save anything"
    counted(saves=begun, acknowledged=len(root.acknowledged), failed=failed, lives=lives)
    counted(faults=sum(kinds.values()))
    print(f"{dict(counted)}, ends {ends}, faults {kinds}")
    assert root.acknowledged and len(kinds) == 5
    peaceful = Life(SIZE, [root.store] * SIZE, 3, KEEP, dedup=dedup)
    assert peaceful.run() == "done" and not peaceful.failures
    root.acknowledged.update(peaceful.saved)
    root.check()
    root.check_leftovers()
    root.history.acknowledged = list(root.acknowledged)
    assert check_all(root.store, root.history, files_of=files_needed) == []
    assert check_references(root.store) == []
    live = Log(root.store).state().live
    assert any(entry.references for entry in live) == dedup
