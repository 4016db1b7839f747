"""Processes that were forked from one that saves: jobs of their own, or refused in one sentence.

Method: scripts of their own, in which a parent with a save under way forks; the child has 30 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt

pytestmark = pytest.mark.ranks

PARENT = """
import multiprocessing, sys, threading, torch, ckpt, ckpt.errors
from torch.utils.data import DataLoader
import ckpt.saving.background as background
url = sys.argv[1]
ckpt.save({"x": torch.ones(8)}, url, step=1)
may_go, run = threading.Event(), background._run
def held(*arguments):
    may_go.wait()
    return run(*arguments)
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
def step():
    weight.grad = torch.ones(8)
    optimizer.step()
ckpt.async_save({"w": weight, "o": optimizer}, url, step=2).result()
step()
background._run = held
pending = ckpt.async_save({"w": weight, "o": optimizer}, url, step=3)
def outcome(call):
    try:
        return repr(call())
    except ckpt.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
def in_child(call):
    def run():
        background._run = run_before
        print(outcome(call), flush=True)
    run_before = run_original
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(timeout=30)
    print("exit", child.exitcode, flush=True)
    child.kill()
run_original = run
"""

SAVES = """
in_child(lambda: ckpt.save({"x": 1}, url + "-own", step=1).step)
in_child(lambda: ckpt.async_save({"x": torch.ones(3)}, url + "-own", step=2).result().step)
in_child(lambda: ckpt.save({"x": 1}, url, step=9).step)
in_child(lambda: ckpt.load({"x": torch.zeros(8)}, url, step=1).step)
may_go.set()
print(outcome(lambda: pending.result().step))
"""

INHERITED = """
in_child(lambda: pending.result())
in_child(lambda: pending.wait_staged())
in_child(step)
in_child(lambda: [batch.tolist() for batch in DataLoader([1.0, 2.0], num_workers=1)])
may_go.set()
print(outcome(lambda: pending.result().step))
"""

CHECKPOINTER = """
may_go.set()
pending.result()
every = ckpt.EverySteps(1)
with ckpt.Checkpointer({"w": weight}, url + "-service", save=every, only=True) as checkpointer:
    checkpointer.step(1)
    checkpointer.wait()
    in_child(lambda: checkpointer.step(2))
    in_child(checkpointer.close)
    checkpointer.step(2)
print([step.step for step in ckpt.list_steps(url + "-service")])
"""

READERS = """
import gc, threading, types
from collections import deque
may_go.set()
pending.result()
ckpt.save({"x": torch.arange(4096.0), "y": torch.ones(7)}, url + "-read", step=1)
reader = ckpt.open(url + "-read")
assert float(reader["x"][5]) == 5.0
reader.values, reader.keys()
LOCKS = (type(threading.Lock()), type(threading.RLock()))
def locks_behind(thing):
    seen, left, locks = {id(thing)}, deque([thing]), []
    while left:
        for inner in gc.get_referents(left.popleft()):
            if isinstance(inner, (type, types.ModuleType, types.FunctionType)) or id(inner) in seen:
                continue
            seen.add(id(inner))
            left.append(inner)
            locks += [inner] if isinstance(inner, LOCKS) else []
    return locks
def check():
    for number in range(20):
        assert torch.equal(reader.read("x", slice(number, 4096)), torch.arange(4096.0)[number:])
    return float(reader["y"].sum())
held, may_end = threading.Event(), threading.Event()
def hold():
    taken = [lock for lock in locks_behind(reader) if lock.acquire(False)]
    held.set()
    may_end.wait()
    for lock in taken:
        lock.release()
    print("held", len(taken) > 0)
holder = threading.Thread(target=hold)
holder.start()
held.wait()
in_child(check)
in_child(lambda: float(ckpt.open(url + "-read")["x"].sum()))
may_end.set()
holder.join()
busy = threading.Thread(target=lambda: [check() for _ in range(20)])
busy.start()
for _ in range(3):
    in_child(check)
busy.join()
print(check())
"""

RANK = """
import multiprocessing, sys, warnings, torch, ckpt
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ckpt.save({"x": 1}, sys.argv[1], step=1)
def child():
    try:
        ckpt.save({"x": 1}, sys.argv[1] + "-own", step=2)
    except ckpt.CheckpointError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(timeout=30)
print("exit", process.exitcode)
process.kill()
ckpt.save({"x": 1}, sys.argv[1], step=2)
"""


def run_script(text: str, url: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ended = subprocess.run(
        [sys.executable, "-c", text, str(url)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_save_in_a_forked_child_is_that_of_another_job(tmp_path: Path) -> None:
    lines = run_script(PARENT + SAVES, tmp_path / "run")
    assert lines[:8] == ["1", "exit 0", "2", "exit 0", "9", "exit 0", "1", "exit 0"]
    assert lines[8].startswith("Fenced: "), "the child has claimed the root after its parent"
    kinds = [event.kind for event in ckpt.history(str(tmp_path / "run-own"))]
    assert kinds == ["COMMIT", "CLAIM", "COMMIT", "CLAIM"]
    assert [step.step for step in ckpt.list_steps(str(tmp_path / "run"))] == [1, 2, 9]


def test_what_a_child_inherits_is_refused_and_holds_nothing_back(tmp_path: Path) -> None:
    lines = run_script(PARENT + INHERITED, tmp_path / "run")
    assert lines[0].startswith("Forked: the save of step 3 belongs to process ")
    assert lines[2].startswith("Forked: ")
    assert lines[1::2] == ["exit 0"] * 4
    assert lines[4] == "None", "a step in the child waits for no copy of its parent"
    assert lines[6] == "[[1.0], [2.0]]"
    assert lines[8] == "3"


def test_a_checkpointer_is_not_carried_over(tmp_path: Path) -> None:
    lines = run_script(PARENT + CHECKPOINTER, tmp_path / "run")
    assert lines[0].startswith("Forked: this Checkpointer belongs to process ")
    assert lines[1:4] == ["exit 0", "None", "exit 0"]
    assert lines[4] == "[1, 2]"


def test_a_reader_of_the_parent_reads_in_the_child_whatever_the_parents_threads_hold(
    tmp_path: Path,
) -> None:
    lines = run_script(PARENT + READERS, tmp_path / "run")
    whole = str(float(sum(range(4096))))
    assert lines[:4] == ["7.0", "exit 0", whole, "exit 0"]
    assert lines[4] == "held True", "the parent's thread held no lock: nothing was shown"
    assert lines[5:11] == ["7.0", "exit 0"] * 3
    assert lines[11] == "7.0"


def test_a_process_forked_from_a_rank_is_no_member_of_its_group(tmp_path: Path) -> None:
    lines = run_script(RANK, tmp_path / "run")
    assert lines[0].startswith("Forked: this process was forked from a rank")
    assert lines[1:] == ["exit 0"]
    assert [step.step for step in ckpt.list_steps(str(tmp_path / "run"))] == [1, 2]


DESTROYED = """
import os, sys
from ckpt import process
from ckpt.saving.step_gate import steps
from ckpt.world.job import this_process
end, begin = os.pipe()
class OfParent:
    def __del__(self):
        os.write(begin, b"destroyed ")
process.this_process._contexts.append(OfParent())
this_process.process = OfParent()
steps._gates = (OfParent(),)
child = os.fork()
if not child:
    sys.exit(0)  # not os._exit: the interpreter clears its modules
os.waitpid(child, 0)
os.write(begin, b".")
print(os.read(end, 100).decode(), flush=True)
os._exit(0)
"""


def test_a_child_destroys_nothing_of_its_parent() -> None:
    """Connections and pools would wait for threads that it does not have: workers of data loaders
    hung in the fork.
    """
    command = [sys.executable, "-c", DESTROYED]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == ".\n", run.stdout + run.stderr
