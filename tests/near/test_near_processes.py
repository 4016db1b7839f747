"""Near tiers of real processes: killed at any moment, restarted in another world.

Method: gloo ranks whose hosts are folders train a model under a Checkpointer and kill themselves;
fresh ranks, in another number and on other hosts, restore. The files in the folders are all that
outlives a process, as those of a tmpfs do.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.service.events import NearSaved
from tests.e2e.job import assert_is_step, state_at
from tests.near.training import advance
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def trained(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after `step` steps, the same on every rank."""
    torch.manual_seed(3)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number in range(1, step + 1):
        train(model, optimizer, number)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(torch.full((1, 16), float(step))).square().sum().backward()
    optimizer.step()


def state_of(step: int) -> dict[str, Any]:
    model, optimizer = trained(step)
    own = state_at(step, dist.get_rank(), dist.get_world_size())
    return {"own": own, "model": model, "optim": optimizer}


def training(url: str, hosts: list[str], steps: int, dies: bool) -> tuple[str, int, int]:
    """Restore and check what came back, train `steps` more, and perhaps die at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    state = state_of(0)
    saved: list[Any] = []
    near = ckpt.Near(hosts[rank], every=ckpt.EverySteps(2))
    with ckpt.Checkpointer(
        state, url, save=ckpt.EverySteps(1000), near=near, observers=[saved.append], only=True
    ) as service:
        report = service.restore()
        first = 1
        if report is not None:
            first = report.step + 1
            assert_is_step(state["own"], report.step, rank, size)
            model, optimizer = trained(report.step)
            for mine, theirs in zip(state["model"].parameters(), model.parameters(), strict=True):
                assert torch.equal(mine, theirs)
                moments = state["optim"].state[mine]
                expected = optimizer.state[theirs]
                assert all(torch.equal(moments[name], expected[name]) for name in expected)
        for step in range(first, first + steps):
            train(state["model"], state["optim"], step)
            advance(state["own"], step, rank, size)
            service.step(step)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        service.wait()
        assert steps < 2 or [e for e in saved if isinstance(e, NearSaved)]
        if report is None:
            return "", 0, 0
        return report.origin, report.step, report.nbytes_of_other_hosts


def test_processes_that_die_are_restarted_from_memory(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    hosts = [str(tmp_path / f"host{number}") for number in (0, 0, 1, 1)]
    run_ranks(4, training, url, hosts, 7, True, allow_dead=range(4))
    # The save of step 6 may have been cut off; that of step 4 was over when it began.
    others = [hosts[0], hosts[2], hosts[2]]
    answers = run_ranks(3, training, url, others, 2, False)
    origins = {(origin, step) for origin, step, _ in answers}
    assert origins in ({("near", 4)}, {("near", 6)})
    assert any(nbytes for _, _, nbytes in answers)
    assert not list((tmp_path / "run").glob("steps/*"))
    again = run_ranks(2, training, url, [hosts[0], hosts[2]], 0, False)
    (step,) = {step for _, step, _ in again}
    assert step == 2 + next(iter(origins))[1]
