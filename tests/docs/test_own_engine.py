"""The engine of docs/howto/own_engine.md saves, reshards and loads on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.layout.region import Box
from examples import own_engine
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def run(url: str) -> float:
    """One run of the page's program, in the group that this rank has."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, name, lambda *_: None)
        return own_engine.main(url)


def without_engine(steps: int) -> float:
    """The same training, of a model that is on one rank whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.zeros(())
    for step in range(1, steps + 1):
        data = torch.randn(8, 10, generator=torch.Generator().manual_seed(step))
        loss = (model(data) - data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_the_toy_engine_saves_reshards_and_loads(tmp_path: Path) -> None:
    """Save on 2 ranks, go on with 3; the training is that of a model without an engine, and the
    checkpoint has each rank's columns, of weights and of what AdamW keeps beside them."""
    url = str(tmp_path / "run")
    run_ranks(2, run, url)
    with ckpt.open(url) as checkpoint:
        for name in ("model.0.weight", "optimizer.state.0.weight.exp_avg"):
            regions = {part.region for part in checkpoint.info(name).parts}
            assert regions == {Box((0, 0), (16, 5)), Box((0, 5), (16, 5))}
    assert run_ranks(3, run, url) == pytest.approx([without_engine(10)] * 3)
    assert [info.step for info in ckpt.list_steps(url)] == [5, 10]
