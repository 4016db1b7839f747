"""Saves in the background under every engine, on real ranks: the state of the call is stored.

Method: as in test_async_staging.py, but every rank clones its own pieces at the call and compares
them with the same regions of the checkpoint. Copies happen when the next step is held back, that is
after forward and backward: gathered parameters have come and gone by then.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.layout.memory import local_view
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Region
from ckpt.state.flatten import flatten_state
from tests.e2e.engines import Training, build
from tests.ranks import run_ranks
from tests.service.staging import late_copies

pytestmark = pytest.mark.ranks

ENGINES = ("fsdp2", "fsdp1-flat", "fsdp1-orig", "ddp", "tp", "ours-flat", "ours-orig")


Pieces = dict[tuple[str, Region], torch.Tensor]


def built(engine: str) -> Training:
    if not engine.startswith("ours"):
        return build(engine, "adamw")  # type: ignore[arg-type]
    from tests.sharding.test_checkpoints import build as build_ours

    return build_ours(engine, "adamw")


def pieces_now(state: Any) -> Pieces:
    ranks = Ranks(dist.get_rank(), tuple(range(dist.get_world_size())))
    return {
        (piece.fqn, piece.region): local_view(holding, piece).clone()
        for holding in flatten_state(state, ranks).holdings
        for piece in holding.pieces
        if piece.region.numel
    }


def wrong_pieces(
    url: str, step: int, expected: dict[tuple[str, Region], torch.Tensor]
) -> list[str]:
    with ckpt.open(url, step) as checkpoint:
        return [
            f"{fqn} {region}"
            for (fqn, region), tensor in expected.items()
            if not torch.equal(checkpoint.read(fqn, region).reshape(-1), tensor.reshape(-1))
        ]


def save_under_every_engine(directory: str) -> dict[str, list[str]]:
    problems: dict[str, list[str]] = {}
    for engine in ENGINES:
        training = built(engine)
        url = os.path.join(directory, engine)
        training.step(0)
        ckpt.async_save(training.state, url, step=0).result()
        training.step(1)
        with pytest.MonkeyPatch.context() as patch, late_copies(patch):
            expected = pieces_now(training.state)
            pending = ckpt.async_save(training.state, url, step=1)
            assert not pending.staged()
            training.step(2)
            training.step(3)
            report = pending.result(60)
        # BatchNorm statistics and step counts; a little for each.
        assert report.counters["blocking_bytes"] < 1000, (engine, report.counters)
        problems[engine] = [
            problem for problem in wrong_pieces(url, 1, expected) if "running" not in problem
        ]
        assert ckpt.verify(url, 1).ok if dist.get_rank() == 0 else True
    return problems


def test_every_engine_stores_the_state_of_the_call(tmp_path: Path) -> None:
    for problems in run_ranks(2, save_under_every_engine, str(tmp_path), timeout_seconds=150):
        assert problems == {engine: [] for engine in ENGINES}


def save_replicas_and_step(directory: str) -> list[str]:
    """A plain model on every rank, equal everywhere: one rank stores it, all digest it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    warnings: list[str] = []
    for step in range(3):
        with pytest.MonkeyPatch.context() as patch, late_copies(patch):
            pending = ckpt.async_save({"model": model}, directory, step=step, replicas="strict")
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + step)
            optimizer.step()
        warnings += pending.result(60).warnings
    return warnings


def test_replicas_are_digested_before_they_change(tmp_path: Path) -> None:
    """A rank that stores nothing of a replica has its digest to take before the next step."""
    assert run_ranks(2, save_replicas_and_step, str(tmp_path / "run")) == [[], []]
