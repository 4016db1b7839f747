"""A state moves between all ways of holding it, bit for bit, and trains on as if it had not.

Real ranks. A state is trained and flattened on n ranks; the parts are put together and compared
with the flattened state of an unsharded model that saw the same data. Then a fresh state of another
engine on m ranks is bound and filled, flattened again, compared, and trained on.
"""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks
from tests.state.checkpoints import Checkpoint, assembled, assert_same, gathered, load, part_of
from tests.state.engines import ENGINES, OPTIMIZERS, PLAIN_STRIDES, State

pytestmark = pytest.mark.ranks

FIRST, THEN = range(3), range(3, 6)


def _save(engine: str, optimizer: str) -> tuple[object, list[float]]:
    state = State(engine, optimizer)
    state.train(FIRST)
    part = part_of(state.tree)
    return part, state.train(THEN)


def saved(engine: str, optimizer: str, ranks: int) -> tuple[Checkpoint, list[float]]:
    """The checkpoint after FIRST, and the losses of going on."""
    results = run_ranks(ranks, _save, engine, optimizer)
    return assembled([part for part, _ in results]), results[0][1]


def unsharded(engine: str, optimizer: str) -> Checkpoint:
    """The checkpoint of an unsharded model in this process."""
    state = State("bare_plain" if engine in PLAIN_STRIDES else "bare", optimizer)
    state.train(FIRST)
    return gathered(state.tree)


def _load(engine: str, optimizer: str, checkpoint: Checkpoint, stepped: bool) -> list[float]:
    state = State(engine, optimizer, seed=9)
    if stepped:  # into the state of an optimizer that is somewhere else in its life
        state.train(range(7, 9))
    report = load(state.tree, checkpoint)
    assert not report.missing and not report.unexpected and not report.not_asked
    assert state.tree["step"] == FIRST.stop
    assert_same(gathered(state.tree), checkpoint)
    return state.train(THEN)


@pytest.mark.parametrize(
    ("engine", "optimizer"),
    [(engine, "adamw") for engine in ENGINES]
    + [(engine, name) for engine in ("fsdp1_flat", "fsdp1_orig", "fsdp2") for name in OPTIMIZERS],
)
def test_what_ranks_flatten_is_the_state_of_an_unsharded_model(engine: str, optimizer: str) -> None:
    checkpoint, _ = saved(engine, optimizer, 1 if engine.startswith("bare") else 4)
    expected = unsharded(engine, optimizer)
    for one in (checkpoint, expected):  # FSDP1 has another order of units, and so of parameters
        for group in one.catalog.values["optim.param_groups"]:
            group["params"].sort()
    assert checkpoint.catalog.values == expected.catalog.values
    if optimizer == "fused":  # its kernel rounds the last elements of a vector otherwise
        assert sorted(checkpoint.tensors) == sorted(expected.tensors)
        for fqn, tensor in expected.tensors.items():
            torch.testing.assert_close(checkpoint.tensors[fqn], tensor)
    else:
        assert_same(checkpoint, expected)


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    ("source", "n", "target", "m", "optimizer"),
    [
        ("fsdp1_flat", 3, "fsdp1_flat", 2, "adamw"),
        ("fsdp1_flat", 2, "fsdp1_orig", 3, "momentum"),
        ("fsdp1_orig", 3, "fsdp1_flat", 4, "tensor_lr"),
        ("fsdp1_orig", 2, "fsdp2", 4, "amsgrad"),
        ("fsdp2", 3, "fsdp1_flat", 2, "fused"),
        ("fsdp2", 4, "fsdp2", 3, "momentum"),
        ("fsdp2", 4, "bare", 1, "rmsprop"),
        ("bare", 1, "hsdp", 4, "adamw"),
        ("hsdp", 4, "ddp", 2, "tensor_lr"),
        ("ddp", 2, "fsdp1_orig", 4, "adamw"),
    ],
)
def test_a_state_moves_between_engines(
    source: str, n: int, target: str, m: int, optimizer: str, stepped: bool
) -> None:
    checkpoint, losses = saved(source, optimizer, n)
    results = run_ranks(m, _load, target, optimizer, checkpoint, stepped)
    assert all(result == results[0] for result in results)
    torch.testing.assert_close(results[0], losses, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["ddp", "fsdp1_flat", "fsdp1_orig", "fsdp2"])
def test_training_goes_on_with_the_same_bits_on_as_many_ranks(engine: str) -> None:
    checkpoint, losses = saved(engine, "adamw", 2)
    assert run_ranks(2, _load, engine, "adamw", checkpoint, False)[0] == losses
