"""`torch.compile` of sharded models: as many graphs as with torch's classes, and the same numbers.

Method: one model, compiled as a whole or block by block, under both classes of both engines on two
ranks: graphs and breaks are counted, and values compared bit for bit with the model that is not
compiled. What the backend makes of a graph does not matter for that, so it is a cheap one.
"""

from __future__ import annotations

import shutil
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from tests.ranks import run_ranks
from tests.sharding.fully_scenarios import (
    ENGINES,
    assert_close,
    assert_equal,
    claims,
    train,
    values,
)
from tests.sharding.models import WIDTH, engine, full_copies

SURFACES = ("flat", "in place")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Has operations of its own between its units: each of these ends a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Block(), Block(), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(self.first(x + 1.0) * 2.0)))


class Case(NamedTuple):
    """By which class the model is sharded, in which precision, and what of it is compiled."""

    surface: str
    what: str = "nothing"
    """Or "model", "blocks" (in place), "sharded blocks" (from outside)."""
    who: str = "ours"
    is_low: bool = False


class Trained(NamedTuple):
    losses: list[float]
    values: dict[str, torch.Tensor]
    graphs: int
    breaks: int


def trained(case: Case, backend: Any, **options: Any) -> Trained:
    """Some steps of the case."""
    torch._dynamo.reset()
    counters.clear()
    compiler = CompileCounterWithBackend(backend)
    model = made(case, backend=compiler, **options)
    # From outside: the wrapper's own methods are not those of what `torch.compile` returns.
    run = torch.compile(model, backend=compiler, **options) if case.what == "model" else model
    losses = train(run, steps=3)
    full = full_copies(model) if case.surface == "flat" else values(model)
    bare = {name.replace("_orig_mod.", ""): value for name, value in full.items()}
    breaks = sum(counters["graph_break"].values())
    return Trained(losses, bare, compiler.frame_count, breaks)


def made(case: Case, **options: Any) -> Any:
    torch.manual_seed(0)
    net: Any = Net()
    for name in ("first", "second"):
        if case.what == "blocks":
            getattr(net, name).compile(**options)
        sharded = shard(case, getattr(net, name))
        if case.what == "sharded blocks":
            sharded = torch.compile(sharded, **options)
        setattr(net, name, sharded)
    return shard(case, net)


def shard(case: Case, module: nn.Module) -> Any:
    low = torch.bfloat16 if case.is_low else None
    if case.surface == "flat":
        precision = MixedPrecision(param_dtype=low)
        return engine(case.who)(module, use_orig_params=True, mixed_precision=precision)
    return ENGINES[case.who].fully_shard(module, mp_policy=MixedPrecisionPolicy(low))


def as_many_graphs_and_breaks_as_with_torchs_classes() -> None:
    for surface in SURFACES:
        for what in ("model", "sharded blocks"):
            ours, torchs = (trained(Case(surface, what, who), "eager") for who in ("ours", "torch"))
            assert ours.graphs == torchs.graphs > 0, f"{surface} {what}: {ours} {torchs}"
            assert ours.breaks <= torchs.breaks, f"{surface} {what}: {ours} {torchs}"
            assert ours.losses == torchs.losses
            assert_equal(ours.values, torchs.values, f"{surface} {what}")


def blocks_are_whole_graphs_and_give_the_same_bits() -> None:
    # torch's wrapper refuses to be compiled from outside without breaks.
    for surface, what in zip(SURFACES, ("sharded blocks", "blocks"), strict=True):
        plain = trained(Case(surface), "eager")
        got = trained(Case(surface, what), "aot_eager", fullgraph=True)
        # One for the first block, whose input has no gradient, and one for all others.
        assert (got.graphs, got.breaks) == (2, 0), f"{surface} {what}: {got}"
        assert got.losses == plain.losses
        assert_equal(got.values, plain.values, f"{surface} {what}")


def models_in_low_precision_give_the_same_bits() -> None:
    for surface in SURFACES:
        plain = trained(Case(surface, is_low=True), "eager")
        got = trained(Case(surface, "model", is_low=True), "aot_eager")
        assert got.losses == plain.losses
        assert_equal(got.values, plain.values, surface)


test_on_two_ranks = claims(
    2,
    [
        as_many_graphs_and_breaks_as_with_torchs_classes,
        blocks_are_whole_graphs_and_give_the_same_bits,
        models_in_low_precision_give_the_same_bits,
    ],
)


def made_faster() -> None:
    for surface in SURFACES:
        plain = trained(Case(surface), "eager")
        for what in ("model", "blocks"):
            assert_close(trained(Case(surface, what), "inductor").values, plain.values, what)


# Inductor compiles for half a minute, and needs a compiler.
@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_numbers() -> None:
    run_ranks(2, made_faster, timeout_seconds=240)
