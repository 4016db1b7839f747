"""`if rank == 0:` around a call that all ranks have to make: who has not called is named soon.

Method: the first rank makes each public collective call; another comes once it has been named, and
the lines that are logged until then are read. Then a rank ends without ever calling, as a script
does that saves on one rank at its end.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
import ckpt.service.agreement
import ckpt.world.missing
import ckpt.world.rounds
from tests.ranks import run_ranks

SOON = 1.0  # seconds, in place of 15
GUARD_SECONDS = 30.0


def state() -> dict[str, Any]:
    return {"model": torch.nn.Linear(2, 2)}


def saver_of(url: str) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(state(), url, save=ckpt.EverySteps(1))


def close_late(url: str, wait: Callable[[], None]) -> None:
    saver = saver_of(url)
    saver.restore()
    wait()
    saver.close()


def restore_late(url: str, wait: Callable[[], None]) -> None:
    with saver_of(url) as saver:
        wait()
        saver.restore()


def save_now_late(url: str, wait: Callable[[], None]) -> None:
    with saver_of(url) as saver:
        saver.restore()
        saver.save_now().result()
        wait()
        saver.save_now().result()


def before(call: Callable[[str], Any]) -> Callable[[str, Callable[[], None]], None]:
    def late(url: str, wait: Callable[[], None]) -> None:
        wait()
        call(url)

    return late


# What is late, and how the line calls it.
CALLS: dict[str, tuple[Callable[[str, Callable[[], None]], None], str]] = {
    "save": (before(lambda url: ckpt.save(state(), url + "2", step=1)), "ckpt.save(step=1)"),
    "async_save": (
        before(lambda url: ckpt.async_save(state(), url + "2", step=1).result()),
        "ckpt.async_save(step=1)",
    ),
    "load": (before(lambda url: ckpt.load(state(), url)), "ckpt.load"),
    "Checkpointer": (before(lambda url: saver_of(url + "2").close()), "Checkpointer()"),
    "restore": (restore_late, "Checkpointer.restore"),
    "save_now": (save_now_late, "ckpt.async_save(step=1)"),
    "close": (close_late, "Checkpointer.close"),
    "follow": (before(lambda url: ckpt.follow(state(), url).close()), "ckpt.follow"),
    "export": (before(lambda url: ckpt.export(url, url + ".pt")), "ckpt.export"),
}


def _lines(name: str, url: str, forgetful: int) -> list[str]:
    """What this rank logs in a call that the rank `forgetful` makes late: once those have named it
    who have to.
    """
    lines: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        if "has waited for" in lines[-1]:
            Path(f"{url}-named-{dist.get_rank()}").touch()

    def wait() -> None:
        naming = [0] if forgetful else [1, 2]
        until = time.monotonic() + GUARD_SECONDS
        while not all(Path(f"{url}-named-{rank}").exists() for rank in naming):
            assert time.monotonic() < until, "nobody has named this rank"
            time.sleep(0.05)
        time.sleep(1.2 * SOON)  # for a line too many

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    for room in (ckpt.world.rounds, ckpt.world.missing, ckpt.service.agreement):
        room.CALL_SECONDS = SOON  # type: ignore[attr-defined]
    ckpt.world.missing.LOOK_SECONDS = 0.5  # type: ignore[misc]
    if name != "first":
        ckpt.save(state(), url, step=1)
    is_late = dist.get_rank() == forgetful
    call, _ = CALLS["save" if name == "first" else name]
    call(url, wait if is_late else lambda: None)
    return [line for line in lines if "has waited for" in line]


@pytest.mark.ranks
@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_have_not_called_are_named(name: str, tmp_path: Path) -> None:
    first, second, _ = run_ranks(3, _lines, name, str(tmp_path / "run"), 1)
    assert len(first) == 1, first
    assert "rank 0 has waited" in first[0] and CALLS[name][1] in first[0]
    assert "which rank 1 " in first[0]
    assert not second


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["first", "load"])
def test_a_first_rank_that_has_not_called_is_named(name: str, tmp_path: Path) -> None:
    _, second, third = run_ranks(3, _lines, name, str(tmp_path / "run"), 0)
    for lines in (second, third):
        assert len(lines) == 1
        assert "for rank 0" in lines[0] or "which rank 0 " in lines[0]


def _busy(url: str) -> list[str]:
    """A save in which rank 1 is slow: it has called, so nothing is wrong."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    ckpt.world.rounds.CALL_SECONDS = 0.5

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            if dist.get_rank() == 1:
                time.sleep(1.5)
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    ckpt.save({"slow": Slow(), **state()}, url, step=1)
    return [line for line in lines if "has waited for" in line]


@pytest.mark.ranks
def test_a_slow_rank_that_has_called_is_not_named(tmp_path: Path) -> None:
    assert run_ranks(2, _busy, str(tmp_path / "run")) == [[], []]


ENDS = """
import os, sys, torch, torch.distributed as dist, ckpt, ckpt.world.missing
from ckpt.world.missing import Missing
ckpt.world.missing.LOOK_SECONDS = 1.0
looks, look = [], Missing.look
def counted(self):
    looks.append(os.path.exists(sys.argv[3]))
    look(self)
Missing.look = counted
dist.init_process_group("gloo")
state = {"weight": torch.ones(4)}
if sys.argv[2] == "again":
    ckpt.save(state, sys.argv[1], step=1)
if dist.get_rank() == 0:
    try:
        ckpt.save(state, sys.argv[1], step=2)
    except ckpt.errors.RankFailed as failure:
        print(sum(looks), failure.rank, failure)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("calls", ["first", "again"])
def test_a_rank_that_ends_without_the_call_is_named(calls: str, tmp_path: Path) -> None:
    """Started as torchrun does: on the second rank the script ends, and nobody is killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": f"run {port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, str(tmp_path / "run"), calls, str(tmp_path / "ended")],
            env={**os.environ, **job, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ranks[1].wait(timeout=60)
        (tmp_path / "ended").touch()
        said = ranks[0].communicate(timeout=60)[0].split(maxsplit=2)
        assert int(said[0]) <= 2 and said[1] == "1", "two looks after it has ended"
        assert "ended" in said[2] or "left" in said[2]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
