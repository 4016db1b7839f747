"""Saves in the background and the life of processes: the interpreter's end, and ranks that die.

Method: scripts in processes of their own, and real gloo ranks of which one kills itself while the
others' saves are in flight.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ckpt
import ckpt.state_dict
from ckpt.process import open_root
from ckpt.saving.staging import Staged
from storage.local import LocalStore
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

SAVE_AND_END = """
import sys, torch, ckpt
from ckpt.saving.image import WritePath
def failing(self, *args, **kwargs):
    raise OSError("planted: the disk is gone")
if sys.argv[2] == "failing":
    WritePath.write = failing
state = {"model": torch.nn.Linear(2000, 2000), "big": torch.zeros(1 << 22)}
ckpt.async_save(state, sys.argv[1], step=7)
"""

FORK_WHILE_SAVING = """
import multiprocessing, sys, threading, torch, ckpt
from ckpt.saving.image import WritePath
child_is_over, write = threading.Event(), WritePath.write
def waiting(self, *args, **kwargs):
    child_is_over.wait()
    return write(self, *args, **kwargs)
WritePath.write = waiting
pending = ckpt.async_save({"t": torch.ones(8)}, sys.argv[1], step=7)
child = multiprocessing.get_context("fork").Process(target=int)
child.start()
child.join(timeout=30)
print(child.exitcode)
child.kill()
child_is_over.set()
print(pending.result().step)
"""

AGREE_AND_END = """
import torch.distributed as dist
from ckpt.world.torch_world import TorchWorld
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world = TorchWorld()
world.agree("here", None)
"""


def run_script(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return subprocess.run(
        [sys.executable, "-c", text, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )


def test_the_end_of_the_interpreter_waits_for_the_save(tmp_path: Path) -> None:
    ended = run_script(SAVE_AND_END, str(tmp_path / "run"), "fine")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [info.step for info in ckpt.list_steps(str(tmp_path / "run"))] == [7]
    assert ckpt.verify(str(tmp_path / "run"), 7).ok


def test_a_failure_at_the_end_of_the_interpreter_is_reported(tmp_path: Path) -> None:
    ended = run_script(SAVE_AND_END, str(tmp_path / "run"), "failing")
    assert "the save of step 7 has failed" in ended.stderr
    assert "planted: the disk is gone" in ended.stderr


def test_a_forked_child_ends_at_once_while_its_parent_saves(tmp_path: Path) -> None:
    ended = run_script(FORK_WHILE_SAVING, str(tmp_path / "run"))
    assert ended.stdout.split() == ["0", "7"], ended.stderr
    assert ended.stderr == ""


def test_a_process_that_ends_without_leaving_its_world_ends_well() -> None:
    """Its heart is a daemon thread, which must have ended when Python is taken down."""
    for _ in range(3):
        ended = run_script(AGREE_AND_END)
        assert ended.returncode == 0, ended.stderr


def _save_while_one_dies(directory: str) -> tuple[str, float, list[int]]:
    torch.manual_seed(0)
    state: dict[str, Any] = {"t": torch.randn(1000), "step": 1}
    ckpt.async_save(state, directory, step=1).result()
    if dist.get_rank() == 2:

        def die(self: Staged) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        Staged.copy = die  # type: ignore[method-assign]
    pending = ckpt.async_save(state, directory, step=2)
    try:
        pending.result(60)
        outcome = "saved"
    except ckpt.errors.RankFailed as error:
        outcome = f"rank {error.rank}: {error}"
    return outcome, [s.step for s in ckpt.list_steps(directory)]


def test_a_rank_that_dies_is_named_by_the_others(tmp_path: Path) -> None:
    answers = run_ranks(
        3, _save_while_one_dies, str(tmp_path / "run"), allow_dead=(2,), timeout_seconds=120
    )
    for outcome, steps in answers[:2]:
        assert outcome.startswith("rank 2: rank 2 has died")
        assert steps == [1]


def _ask_on_rank_0_alone(directory: str) -> list[str]:
    """Two saves of which the first fails on rank 1: what each rank hears of the next, and how the
    one after that ends. Once the next is a `save`, once an `async_save`.
    """
    state: dict[str, Any] = {"t": torch.randn(1000)}
    write = Staged.write

    def failing(self: Staged, *args: Any) -> Any:
        raise OSError("planted")

    outcomes = []
    ckpt.async_save(state, directory, step=1).result()
    for step, save in ((2, ckpt.save), (5, ckpt.async_save)):
        if dist.get_rank() == 1:
            Staged.write = failing  # type: ignore[method-assign]
        first = ckpt.async_save(state, directory, step=step)
        first.wait()
        Staged.write = write  # type: ignore[method-assign]
        if dist.get_rank() == 0:
            with pytest.raises(ckpt.errors.RankFailed, match="planted"):
                first.result()
        dist.barrier()
        try:
            pending: Any = save(state, directory, step=step + 1)
            if isinstance(pending, ckpt.reports.PendingSave):
                pending.result()
            outcomes.append("saved")
        except (ckpt.errors.RankFailed, OSError) as error:
            outcomes.append(str(error))
        outcomes.append(f"saved {ckpt.save(state, directory, step=step + 2).step}")
    return outcomes


def test_a_failure_that_only_some_ranks_know_of_is_raised_on_all(tmp_path: Path) -> None:
    for outcomes in run_ranks(2, _ask_on_rank_0_alone, str(tmp_path / "run")):
        assert "planted" in outcomes[0] and "planted" in outcomes[2]
        assert outcomes[1::2] == ["saved 4", "saved 7"]
    assert [info.step for info in ckpt.list_steps(str(tmp_path / "run"))] == [1, 4, 7]


class HeldStore(LocalStore):
    """Writes no small object before it may: a commit waits for that."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.may_write = threading.Event()
        self.may_write.set()

    def put_if_absent(self, key: str, data: bytes) -> None:
        assert self.may_write.wait(60)
        super().put_if_absent(key, data)


def calls_beside_a_save(root: str) -> None:
    model = fully_shard(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    state, store = {"model": model, "optimizer": optimizer}, HeldStore(f"{root}/run")
    full = ckpt.state_dict.model_state_dict(model)
    calls: list[Callable[[], Any]] = [
        lambda: ckpt.state_dict.model_state_dict(model),
        lambda: ckpt.state_dict.optimizer_state_dict(model, optimizer),
        lambda: ckpt.state_dict.load_model_state_dict(model, full),
        lambda: ckpt.export(f"{root}/run", f"{root}/out.safetensors", step=1),
        lambda: ckpt.Checkpointer(state, f"{root}/other", save=ckpt.Never()).close(),
        lambda: ckpt.publish(model, f"{root}/other", step=1).result(),
        # As near tiers are opened, in the middle of a training that may be saving.
        lambda: open_root(store),
    ]
    ckpt.save(state, store, step=1)
    for step, call in enumerate(calls, 2):
        store.may_write.clear()
        pending = ckpt.async_save(state, store, step=step)
        pending.wait_staged()
        threading.Timer(0.3, store.may_write.set).start()
        call()
        assert pending.done()
        assert pending.result().step == step
    assert [one.step for one in ckpt.list_steps(store)] == [*range(1, len(calls) + 2)]


def test_collective_calls_wait_for_the_save_in_flight(tmp_path: Path) -> None:
    """Their rounds would mix with those of its worker, and end the world for both."""
    run_ranks(2, calls_beside_a_save, str(tmp_path))
