"""The same chaos on S3: a real server, and a proxy that makes a fifth of all requests fail.

Method: lives as in test_chaos.py, on one bucket of a moto server behind the proxy, with the retries
that the store has by itself. Ranks and jobs are killed at random operations. What was acknowledged
must be there, whole and bit for bit, for a process that goes past the proxy; a sweep leaves no
unfinished upload.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from ckpt.commit.log import Log
from ckpt.commit.session import Session
from ckpt.service.retention import KeepLatest
from storage import Store, open_store
from storage.retry import RetryPolicy
from tests.conftest import Scale
from tests.e2e.job import NO_WAITING, Job, assert_is_step, left_by_sweep, state_at
from tests.fault_proxy import fault_proxy
from tests.results import Counted
from tests.servers import S3Server, moto_server
from tests.service.chaos import Faults, FlakyStore, Life

pytestmark = pytest.mark.server

SIZE = 2
RATE = 0.2
KEEP = KeepLatest(2)
QUICK = RetryPolicy(
    attempts_max=6, deadline_seconds=30.0, pause_first_seconds=0.01, pause_max_seconds=0.05
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("ckpt")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


def _check(store: Store, acknowledged: dict[str, int]) -> None:
    history = list(Log(store).history())
    committed = {r.attempt for r in history if r.kind == "COMMIT"}
    retired = {r.attempt for r in history if r.kind == "RETIRE"}
    live = {entry.attempt: entry.step for entry in Log(store).state().live}
    assert not [name for name in acknowledged if name not in committed]
    assert not [name for name in acknowledged if name not in live and name not in retired]
    for step in live.values():
        loaded = [state_at(0, rank, SIZE) for rank in range(SIZE)]
        Job(SIZE, lambda rank: store).load(loaded.__getitem__, step=step)
        for rank, state in enumerate(loaded):
            assert_is_step(state, step, rank, SIZE)


def test_saves_to_s3_under_faults_and_deaths_lose_nothing(
    moto: S3Server, scale: Scale, rng: random.Random, counted: Counted
) -> None:
    wanted = scale.count(4, 100)
    url = f"s3://{moto.make_bucket()}/run"
    direct = open_store(url, **moto.options)
    acknowledged: dict[str, int] = {}
    begun = failed = lives = killed = 0
    seed = rng.getrandbits(32)
    with fault_proxy(moto.endpoint_url, rate=RATE, seed=seed, held_seconds=0.05) as proxy:
        options = {**moto.options, "endpoint_url": proxy.endpoint_url}
        while begun < wanted:
            saves = rng.randint(2, 6)
            kills: dict[int, tuple[int, ...]] = {}
            if rng.random() < 0.5:
                victims = rng.choice([(0,), (1,), (0, 1)])
                kills[rng.randrange(1, 40 * saves)] = victims
            flaky: list[FlakyStore] = []

            def kill(ranks: tuple[int, ...], stores: list[FlakyStore] = flaky) -> None:
                for rank in ranks:
                    stores[rank].dead = True

            faults = Faults(0.0, 0, kills)  # these only kill; the proxy makes requests fail
            inner = [open_store(url, retry=QUICK, **options) for _ in range(SIZE)]
            flaky += [FlakyStore(store, faults, kill) for store in inner]
            life = Life(SIZE, list(flaky), saves, KEEP)
            killed += life.run() == "killed"
            for store in inner:
                store.close()
            lives += 1
            acknowledged.update(life.saved)
            begun += len(life.saved) + life.failures
            failed += life.failures
            _check(direct, acknowledged)
            assert lives < 20 + wanted, "lives end before they save anything"
        counts = {kind: count for kind, count in proxy.counts.items() if kind}
    counted(saves=begun, acknowledged=len(acknowledged), failed=failed, lives=lives)
    counted(killed_lives=killed, faults=sum(counts.values()))
    print(f"{dict(counted)}, faults {counts}")
    assert acknowledged and sum(counts.values()) > begun
    session = Session.claim(direct, sources=NO_WAITING)
    session.sweep_unfinished()
    session.sweep()
    assert direct.abort_unfinished("steps/") == 0
    assert not left_by_sweep(direct, session.state())
    direct.close()
