"""Hundreds of real processes on one machine: they save, one dies, and fewer of them resume.

Method: processes forked from a server that has imported everything, around one TCPStore, as
torchrun gives them one; our requests to it are counted. Prints counts and memory (-s shows them).
"""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import ckpt
import tests.ranks
from benchmarks.scale import LAYOUTS, Model
from ckpt.errors import RankFailed
from ckpt.world import job
from tests.protocol.test_world_counts import TCP_STORE, CountingStore
from tests.ranks import run_ranks

RANKS, RESUMED, VICTIM = 256, 200, 77
TENSORS = 3
PROCESS_MIB = 44
SECONDS_MAX = 1500.0

pytestmark = [pytest.mark.ranks, pytest.mark.soak]


class Outcome(NamedTuple):
    """What one rank saw: our requests to the rendezvous store, its own memory, the failure."""

    requests: int
    private_mib: int
    failure: str = ""


def _outcome(store: CountingStore, requests: int, failure: str = "") -> Outcome:
    """`private_mib` is what a process has for itself; the rest it shares with its fork server."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    (kib,) = re.findall(r"Private_Dirty: +([0-9]+) kB", rollup)
    return Outcome(requests, int(kib) // 1024, failure)


def _join(port: int, size: int) -> CountingStore:
    """Join the job whose store listens there; returns the store as this library sees it."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # or torch connects every rank with every other
    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=SECONDS_MAX)
    store = TCP_STORE("127.0.0.1", port, None, False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    process = job.this_process.in_job()
    counting = CountingStore(process.store)
    process.store = process.board.store = counting
    return counting


def _state(rank: int, size: int, *, filled: bool) -> dict[str, Any]:
    model = Model(LAYOUTS["FSDP2 uneven"], TENSORS, rank, size)
    if filled:
        for local, expected in _expected(model):
            local.data.copy_(expected)
    return {"model": model, "step": 1 if filled else 0}


def _expected(model: Model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every element is its own row, whatever rank has it."""
    return [
        (
            owned.local,
            torch.arange(owned.local.shape[0])[:, None].float()
            + owned.views[0].pieces[0].region.offset[0],  # type: ignore[union-attr]
        )
        for owned in model.__ckpt_pieces__()
    ]


def _save_and_lose_one(root: str, port: int) -> Outcome:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _join(port, size)
    state = _state(rank, size, filled=True)
    ckpt.save(state, root, step=1)
    requests = store.counts.total()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ckpt.save(state, root, step=2)
    except RankFailed as failure:
        return _outcome(store, requests, str(failure))
    raise AssertionError("a save without one of its ranks")


def _resume(root: str, port: int) -> Outcome:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _join(port, size)
    state = _state(rank, size, filled=False)
    ckpt.load(state, root)
    requests = store.counts.total()
    assert state["step"] == 1
    assert all(torch.equal(local, expected) for local, expected in _expected(state["model"]))
    ckpt.save(state, root, step=3)
    dist.barrier()
    return _outcome(store, requests)


def _free_mib() -> int:
    (kib,) = re.findall(r"MemAvailable: +([0-9]+) kB", Path("/proc/meminfo").read_text())
    return int(kib) // 1024


def test_hundreds_of_processes_save_lose_one_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes some 35 MiB for itself, and the fork server's memory is shared."""
    if _free_mib() < RANKS * PROCESS_MIB:
        pytest.skip(f"{RANKS} processes need {RANKS * PROCESS_MIB} MiB, and {_free_mib()} are free")
    imported = ("ckpt.api", "benchmarks.scale", "tests.protocol.test_many_processes")
    monkeypatch.setattr(tests.ranks, "PRELOADED", (*tests.ranks.PRELOADED, *imported))
    root = str(tmp_path / "root")
    server = TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    saved = run_ranks(
        RANKS,
        _save_and_lose_one,
        root,
        server.port,
        group=False,
        timeout_seconds=SECONDS_MAX,
        allow_dead=[VICTIM],
    )
    saved.pop(VICTIM)
    _report(f"{RANKS} processes save, one dies", saved)
    assert {one.failure for one in saved} == {saved[0].failure}
    assert f"rank {VICTIM} has died" in saved[0].failure
    server = TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    loaded = run_ranks(
        RESUMED, _resume, root, server.port, group=False, timeout_seconds=SECONDS_MAX
    )
    _report(f"{RESUMED} processes resume and save", loaded)
    assert [step.step for step in ckpt.list_steps(root)] == [1, 3]
    # Creating a world takes 3. In a load gloo connects those that share something: 2 for each. Who
    # waits for a process that begins late asks once in 5 seconds, on top of that.
    assert _most_of_nine_in_ten(saved) <= 4
    assert _most_of_nine_in_ten(loaded) <= 4 + 4 * RESUMED.bit_length()


def _most_of_nine_in_ten(outcomes: list[Outcome]) -> int:
    return sorted(one.requests for one in outcomes)[len(outcomes) * 9 // 10]


def _report(what: str, outcomes: list[Outcome]) -> None:
    print(
        f"{what}: requests to the rendezvous store {sum(one.requests for one in outcomes)}, at "
        f"most {max(one.requests for one in outcomes)} of one rank; memory of its own at most "
        f"{max(one.private_mib for one in outcomes)} MiB a process"
    )
