"""Ranks that die before their first connection, or never come: who is named, when, at what cost.

Method: processes that are gone are cards with the start time of another one; their parents are told
to look, and what they ask the store is counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ckpt.world.missing
from ckpt.errors import RankFailed
from ckpt.world.by_store import Calls
from ckpt.world.heart import Heart
from ckpt.world.job import Process
from ckpt.world.link import Frame, FrameKind, Neighbour, greeting
from ckpt.world.liveness import Card, ProcessIdentity
from ckpt.world.missing import Missing, card_key, connect_to_parent
from ckpt.world.rounds import Deadlines
from ckpt.world.torch_world import TorchWorld
from tests.protocol.test_world_counts import TCP_STORE, CountingStore, client_of
from tests.ranks import run_ranks


class Losses:
    """The world of a parent, as far as it hears of ranks that are lost."""

    def __init__(self) -> None:
        self.all: dict[int, str] = {}

    def receive(self, neighbour: Neighbour, frame: Frame) -> None:
        raise AssertionError("nobody sends anything")

    def lost(self, neighbour: Neighbour, how: str) -> None:
        assert not neighbour.is_parent
        self.all[neighbour.rank] = how


@contextlib.contextmanager
def hearts(count: int) -> Iterator[list[Heart]]:
    made = [Heart(rank, ("127.0.0.1",)) for rank in range(count)]
    try:
        yield made
    finally:
        for heart in made:
            heart.stop()


def _of_dead(card: Card) -> Card:
    who = ProcessIdentity.this()
    return card._replace(process=ProcessIdentity(who.machine, who.pid, f"not {who.started}"))


def _elsewhere(card: Card, *, port: int) -> Card:
    return card._replace(process=ProcessIdentity("another machine", 1, "1"), port=port)


def test_looking_costs_one_request_and_one_more_for_the_cards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 32 missing ranks 9 has died, 20 has no card, and the others live: 9 alone is lost."""
    monkeypatch.setattr(ckpt.world.missing, "LOOK_SECONDS", 1e6)
    server = TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store, losses, children = CountingStore(server), Losses(), range(1, 33)
    with hearts(1) as (heart,):
        heart.register(b"w" * 16, losses, losses)
        for rank in set(children) - {20}:
            card = heart.card._replace(rank=rank)
            server.set(card_key(rank), (_of_dead(card) if rank == 9 else card).encode())
        missing = Missing(heart, lambda: store)
        missing.expect(children)
        missing.expect(children)  # as for another world of the same ranks
        costs = []
        for _ in range(40):
            before = store.counts.total()
            missing.look()
            costs.append(store.counts.total() - before)
        assert losses.all == {9: "has died before its first connection"}
        assert max(costs) <= 2 and set(costs[-20:]) == {1}, "rank 20 is still asked for"
        assert store.counts["multi_get"] <= 6
        server.set(card_key(20), _of_dead(heart.card._replace(rank=20)).encode())
        missing.look()
        assert set(losses.all) == {9, 20}
        before = store.counts.total()
        missing.look()
        assert store.counts.total() == before, "all cards are known"


def test_ranks_of_other_machines_are_looked_for_at_their_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ckpt.world.missing, "LOOK_SECONDS", 1e6)
    server = TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    losses = Losses()
    with hearts(3) as (parent, gone, alive):
        parent.register(b"w" * 16, losses, losses)
        gone.stop()
        for heart in (gone, alive):
            card = _elsewhere(heart.card, port=heart.card.port)
            server.set(card_key(card.rank), card.encode())
        missing = Missing(parent, lambda: server)
        missing.expect([1, 2])
        missing.look()
        assert losses.all == {1: "has died (its port is closed) before its first connection"}


def test_a_rank_that_calls_by_the_store_is_not_judged_by_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its call is taken just when the parent would look, and it says who it is a moment later."""
    monkeypatch.setattr(ckpt.world.missing, "LOOK_SECONDS", 0.5)
    server = TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    losses, (ours, theirs) = Losses(), socket.socketpair()
    with hearts(2) as (parent, child), ours, theirs:
        parent.register(b"w" * 16, losses, losses)
        child.stop()
        card = _elsewhere(child.card, port=child.card.port)
        server.set(card_key(1), card.encode())
        missing = Missing(parent, lambda: server)
        calls: list[socket.socket | None] = [*[None] * 4, theirs, None]

        def take(_: Calls, store: Any) -> socket.socket | None:
            if not calls:
                ours.sendall(greeting(FrameKind.HELLO, card, parent.card))
                calls.append(None)
            return calls.pop(0)

        monkeypatch.setattr(Calls, "next", take)
        missing.expect([1])
        until = time.monotonic() + 30
        while not parent.has_met(Neighbour(False, 1)):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert losses.all == {}


@pytest.mark.parametrize("why", ["cannot join: no port", "has died"])
def test_an_absent_parent_is_no_fault_of_the_certificate(why: str) -> None:
    """What this process left of itself in the store stays, for the ranks below it."""
    server = TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with hearts(2) as (_, child):
        child.card = child.card._replace(certificate="of the job")
        server.set(card_key(0), Card.of_absent(0, why).encode())
        server.set(card_key(1), child.card.encode())
        connect_to_parent(child, server, 0, 5.0)
        assert child._lost == {Neighbour(True, 0): why}
        assert Card.decode(server.get(card_key(1))) == child.card


def _fail_without(
    last: int, place: Callable[[Any, Heart], object], deadlines: Deadlines
) -> set[str]:
    """What the ranks before `last`, which does not come, hear in a round."""
    server = TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with hearts(last + 1) as made, ThreadPoolExecutor(last) as pool:
        place(server, made[last])
        for heart in made[:last]:
            server.set(card_key(heart.card.rank), heart.card.encode())

        def come(rank: int) -> str:
            process = Process(rank, client_of(server), made[rank])
            world = TorchWorld(members=tuple(range(last + 1)), process=process, deadlines=deadlines)
            with pytest.raises(RankFailed) as caught:
                world.gather("parts", b"")
            assert caught.value.rank == last
            world.close()
            return str(caught.value)

        return set(pool.map(come, range(last)))


@pytest.mark.parametrize("children_max", [1, 32])
def test_a_death_before_the_first_connection_is_named_long_before_the_deadline(
    children_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its parent, which is rank 0 or one that rank 0 waits for."""
    monkeypatch.setattr("ckpt.world.tree.CHILDREN_MAX", children_max)
    monkeypatch.setattr(ckpt.world.missing, "LOOK_SECONDS", 0.1)

    def place(server: Any, heart: Heart) -> None:
        server.set(card_key(2), _of_dead(heart.card).encode())

    said = _fail_without(2, place, Deadlines(round_seconds_max=60.0))
    assert said == {"rank 2 has died before its first connection in phase 'parts'"}


@pytest.mark.parametrize("children_max", [1, 32])
def test_a_rank_that_never_came_is_named_at_the_deadline_and_the_error_says_so(
    children_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its parent, which waits for it, too, and answers for it."""
    monkeypatch.setattr("ckpt.world.tree.CHILDREN_MAX", children_max)
    deadlines = Deadlines(round_seconds_max=1.0, grace_seconds=60.0)
    (said,) = _fail_without(2, lambda server, heart: None, deadlines)
    assert said == (
        "rank 2 did not answer within 1 s in phase 'parts' (rank 2 missing); it has never "
        "connected to the others: it did not start, died before anybody could know of it, or does "
        "something else"
    )


# --- real processes -------------------------------------------------------------------------------


def _die_in_connecting() -> str:
    ckpt.world.missing.LOOK_SECONDS = 0.2

    def die(heart: Heart, card: Card, seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "2":
        pytest.MonkeyPatch().setattr(Heart, "connect", die)
    world = TorchWorld()
    with pytest.raises(RankFailed) as caught:
        world.gather("parts", b"")
    return str(caught.value)


@pytest.mark.ranks
def test_a_process_killed_before_its_first_connection_is_named() -> None:
    results = run_ranks(3, _die_in_connecting, allow_dead=[2])
    assert set(results[:2]) == {"rank 2 has died before its first connection in phase 'parts'"}


SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import ckpt
import ckpt.world.missing

ckpt.world.missing.LOOK_SECONDS = 0.2
dist.init_process_group("gloo")
if os.environ["RANK"] == sys.argv[2]:
    try:
        ckpt.save({"x": torch.ones(2)}, sys.argv[1], step=1)
    except ckpt.errors.RankFailed as error:
        print(error)
elif sys.argv[3] == "destroys its group":
    dist.destroy_process_group()
elif sys.argv[3] == "fails":
    raise SystemExit(1)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("caller", "end"), [(0, "returns"), (0, "destroys its group"), (1, "fails")]
)
def test_a_rank_that_ends_uncalled_is_named_at_once(caller: int, end: str, tmp_path: Path) -> None:
    """`if rank == 0: ckpt.save(...)`, with a launcher of which no trace is known."""
    server = TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(2):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
        }
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(caller), end]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        said = ranks[caller].communicate(timeout=60)[0]
        ranks[1 - caller].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert f"rank {1 - caller} has ended without a call of this library in phase" in said
    assert not (tmp_path / "run").exists()
