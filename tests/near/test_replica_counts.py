"""What a near save with copies costs: rounds, requests and bytes, over any number of hosts.

Method: ranks as threads, one on each of 4, 8 and 16 hosts that are folders, with real servers on
the loopback; rounds are counted in the world of near saves, requests and bytes at the clients.
"""

from __future__ import annotations

import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ckpt.near.saving import NearSaves
from ckpt.service.checkpointer import Checkpointer
from ckpt.world.base import World
from storage.memory import MemoryStore
from storage.peers.store import PeerStore
from tests.near.test_near_training import data_files, folders
from tests.near.test_replicas import life
from tests.near.training import advance

# The names agree, the attempt, files written, copies whole, files reported, the record, and that
# all have it.
ROUNDS = 7
# The newest epoch there; begin, the one part of a file, its end; its length and seal read back.
REQUESTS = {"list": 1, "begin": 1, "part": 1, "end": 1, "info": 1, "o": 1}


class Sent:
    """What all clients have sent since the last look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.nbytes = 0

    def note(self, method: str, target: str, body: Any) -> None:
        with self._lock:
            self.requests[target.strip("/").partition("?")[0].partition("/")[0]] += 1
            self.nbytes += sum(part.nbytes for part in body)

    def taken(self) -> tuple[Counter[str], int]:
        with self._lock:
            result = self.requests, self.nbytes
            self.requests, self.nbytes = Counter(), 0
        return result


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_near_save_with_copies_costs_as_many_rounds_and_requests_over_any_number_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, replicas: int
) -> None:
    worlds, sent = dict[int, Any](), Sent()
    opened, request = NearSaves.open, PeerStore._request

    def noted(saves: NearSaves, *how: Any, **options: Any) -> None:
        opened(saves, *how, **options)
        worlds[saves.session.world.rank] = saves.session.world

    def counted(store: PeerStore, method: str, target: str, **how: Any) -> Any:
        sent.note(method, target, how.get("body", ()))
        return request(store, method, target, **how)

    monkeypatch.setattr(NearSaves, "open", noted)
    monkeypatch.setattr(PeerStore, "_request", counted)
    hosts = folders(tmp_path, *range(size))

    def count(service: Checkpointer, state: Any, world: World) -> list[Any]:
        service.wait()
        world.gather("one is over", b"")
        if world.rank == 0:
            sent.taken()
        counts, looks = [worlds[world.rank].calls], []
        world.gather("counted", b"")
        for step in (3, 4, 5):
            advance(state, step, world.rank, world.size)
            service.step(step)
            service.wait()
            counts.append(worlds[world.rank].calls)
            world.gather("step", b"")
            looks.append(sent.taken() if world.rank == 0 else None)
            world.gather("looked", b"")
        return [[after - before for before, after in pairwise(counts)], looks]

    answers = life(MemoryStore(), hosts, replicas).run(2, then=count)
    assert [rounds for rounds, _ in answers] == [[0, ROUNDS, 0]] * size
    before, (requests, nbytes), after = answers[0][1]
    assert before == after == (Counter(), 0)
    assert requests == {name: size * replicas * one for name, one in REQUESTS.items()}
    kept = [path for host in hosts for path in data_files(host) if "00000004" in str(path.parent)]
    assert len(kept) == size * (1 + replicas)
    own = {path.name: path.stat().st_size for path in kept}
    assert len(own) == size and nbytes == replicas * sum(own.values())
