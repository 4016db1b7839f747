"""What the library costs whoever has to read it: these numbers may fall, and never grow.

The aim is 45,000 lines, 50 files and 400 functions for a save, 45 and 320 for a load. torch's
engines make 981 (`fully_shard`) and 957 Python calls for the step that is counted here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ckpt
from ckpt import process
from sharding import FullyShardedDataParallel, fully_shard
from tests.counting import profiled
from tests.ranks import run_ranks
from tests.test_house import PACKAGES, ROOT, arrows, sources

LINES_MAX = 61_603


def code_lines(path: Path) -> int:
    """Lines of a file without blank ones, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def called(fn: Callable[[], object]) -> list[tuple[str, str]]:
    """The file and name of each of our functions that `fn()` calls in this thread, in order."""
    calls = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(OURS):
            calls.append((path, f"{frame.f_code.co_name} {frame.f_code.co_firstlineno}"))

    profiled(fn, note)
    return calls


OURS = tuple(str(ROOT / package) for package in PACKAGES)


def test_the_packages_grow_no_more() -> None:
    total = sum(code_lines(path) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    assert total <= LINES_MAX


WINGS = {
    "ckpt/composites/": 0,
    "ckpt/stacks/": 1,
    "ckpt/near/": 4,
    "ckpt/convert/formats/": 0,
    "ckpt/rehearse/": 5,  # the command, the front door, a trainer
}
"""Rooms that the core knows by a registry alone, with the number of files that import them."""


def test_the_core_imports_no_wing() -> None:
    users: dict[str, set[str]] = {wing: set() for wing in WINGS}
    for user, used in arrows(sources.__wrapped__(*PACKAGES)):  # kept by nobody
        for wing in WINGS:
            if used.startswith(wing) and not user.startswith(wing):
                users[wing].add(user)
    assert all(len(users[wing]) <= most for wing, most in WINGS.items()), users


def test_few_modules_have_one_importer() -> None:
    """Such a file is a subject of its own, or belongs into its importer."""
    importers = Counter(used for _, used in arrows(sources.__wrapped__(*PACKAGES)))
    assert list(importers.values()).count(1) <= 40


def test_the_front_door_stays_small() -> None:
    assert len(ckpt.__all__) <= 49


def test_a_save_and_a_load_pass_through_so_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    monkeypatch.setattr(process, "ROOTS_MAX", sys.maxsize)  # those of other tests stay as they are
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters()), "step": 3}
    ckpt.save(state, tmp_path / "warm", step=1)
    ckpt.load(state, tmp_path / "warm")
    passed = {}
    for name, call in {
        "save": lambda: ckpt.save(state, tmp_path / "run", step=1),
        "load": lambda: ckpt.load(state, tmp_path / "run"),
    }.items():
        calls = called(call)
        passed[name] = len({path for path, _ in calls}), len(set(calls))
    most = {"save": (62, 662), "load": (61, 567)}
    assert all(a <= b for name in most for a, b in zip(passed[name], most[name], strict=True)), (
        passed
    )


def test_a_first_save_of_a_training_imports_nothing(tmp_path: Path) -> None:
    """DLIO and others time a few saves: the first takes no longer for being the first."""
    code = (
        "import sys, torch, ckpt\n"
        "state = {'x': torch.ones(3)}; before = set(sys.modules)\n"
        f"ckpt.save(state, {str(tmp_path / 'run')!r}, step=1)\n"
        f"ckpt.load(state, {str(tmp_path / 'run')!r})\n"
        "print(sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def calls_of_a_step(engine: str) -> int:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    if engine == "fully_shard":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        policy = ModuleWrapPolicy({nn.Sequential})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    torch.autograd.set_multithreading_enabled(False)
    calls = len(called(step))
    dist.barrier()
    return calls


@pytest.mark.ranks
@pytest.mark.parametrize(("engine", "most"), [("fully_shard", 981), ("wrapper", 957)])
def test_a_step_makes_no_more_python_calls_than_torchs(engine: str, most: int) -> None:
    assert max(run_ranks(2, calls_of_a_step, engine)) <= most
