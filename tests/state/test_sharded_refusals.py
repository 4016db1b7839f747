"""Optimizer state that has no place in shards is refused by name; what has one is kept exactly.

Real ranks. State of unusual kinds is put into optimizers of sharded models, flattened and loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor

from ckpt.errors import InvalidState, Mismatch
from ckpt.layout.tensor import is_dtensor, local_tensor
from ckpt.state.flatten import flatten_state
from ckpt.state.rng import rng_state
from ckpt.state.types import PerRank
from tests.ranks import run_ranks
from tests.state.checkpoints import (
    Checkpoint,
    assembled,
    assert_same,
    bound,
    fill,
    gathered,
    load,
    part_of,
    world,
)
from tests.state.engines import State, model, train

pytestmark = pytest.mark.ranks

Tree = dict[str, Any]


def _tree(
    engine: str, make: Callable[..., torch.optim.Optimizer], seed: int = 0, **kw: Any
) -> Tree:
    module = model(engine, seed)
    return {"model": module, "optim": make(module.parameters(), **kw)}


def _refused(tree: Tree) -> list[str]:
    try:
        flatten_state(tree, world())
    except InvalidState as error:
        return list(error.problems)
    return []


def _lbfgs(engine: str) -> list[str]:
    return _refused(_tree(engine, torch.optim.LBFGS))


@pytest.mark.parametrize("engine", ["fsdp1_flat", "fsdp1_orig", "fsdp2"])
def test_lbfgs_over_shards_is_refused(engine: str) -> None:
    for problems in run_ranks(2, _lbfgs, engine):
        assert len(problems) == 1
        assert problems[0].startswith("optim: LBFGS") and "unsharded" in problems[0]


def _odd_shape(engine: str, content: str) -> list[str]:
    tree = _tree(engine, torch.optim.SGD, lr=0.1)
    odd: Any = {"strange": [torch.ones(2, device="meta")], "text": "abc"}[content]
    for param in tree["model"].parameters():
        tree["optim"].state[param]["odd"] = odd
    return _refused(tree)


@pytest.mark.parametrize(
    ("engine", "content", "said"),
    [
        ("fsdp1_flat", "strange", "odd.0: is no plain strided tensor"),
        ("fsdp2", "strange", "odd.0: is no plain strided tensor"),
    ],
)
def test_ambiguous_state_is_refused_by_name(engine: str, content: str, said: str) -> None:
    for problems in run_ranks(2, _odd_shape, engine, content):
        assert problems and all(said in problem for problem in problems)
        assert any(problem.startswith("optim.state.conv.weight.odd") for problem in problems)


def _numbers(engine: str, checkpoint: Checkpoint | None) -> Any:
    """Third-party optimizers count their steps with Python numbers."""
    tree = _tree(engine, torch.optim.SGD, lr=0.1)
    params = [p for p in tree["model"].parameters() if local_tensor(p).numel() or is_dtensor(p)]
    if checkpoint is None:
        for param in params:
            tree["optim"].state[param].update(step=3, rate=0.1, done=True)
        return part_of(tree)
    load(tree, checkpoint)
    for param in params:
        state = tree["optim"].state[param]
        assert state == {"step": 3, "rate": 0.1, "done": True}
        assert [type(state[name]) for name in ("step", "rate", "done")] == [int, float, bool]
    return None


@pytest.mark.parametrize("target", ["bare", "fsdp1_flat", "fsdp1_orig", "fsdp2"])
@pytest.mark.parametrize("source", ["fsdp1_flat", "fsdp1_orig", "fsdp2"])
def test_python_numbers_in_state_stay_python_numbers(source: str, target: str) -> None:
    checkpoint = assembled(run_ranks(3, _numbers, source, None))
    run_ranks(1 if target == "bare" else 2, _numbers, target, checkpoint)


def _factored(engine: str, checkpoint: Checkpoint | None) -> Any:
    """State of another shape than its parameter, which DTensors can hold whole."""
    tree = _tree(engine, torch.optim.SGD, lr=0.1, seed=0 if checkpoint is None else 5)
    if checkpoint is not None:
        load(tree, checkpoint)
        assert_same(gathered(tree), checkpoint)
        return None
    for param in tree["model"].parameters():
        rows: Any = torch.arange(float(param.shape[0]))
        if is_dtensor(param):
            mesh: Any = param.device_mesh
            rows = distribute_tensor(rows, mesh, [Replicate()] * mesh.ndim)
        tree["optim"].state[param]["rows"] = rows
    return part_of(tree)


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("source", ["bare", "ddp", "fsdp2"])
def test_state_of_another_shape_is_kept_whole_under_fully_shard(source: str, m: int) -> None:
    checkpoint = assembled(run_ranks(1 if source == "bare" else 2, _factored, source, None))
    assert checkpoint.tensors["optim.state.body.0.weight.rows"].shape == (7,)
    run_ranks(m, _factored, "fsdp2", checkpoint)


def _load_factored(checkpoint: Checkpoint) -> list[str]:
    tree = _tree("fsdp1_flat", torch.optim.Adafactor, lr=0.01)
    return list(bound(tree, checkpoint).fatal)


def test_factored_state_does_not_load_into_flat_shards() -> None:
    tree = _tree("bare", torch.optim.Adafactor, lr=0.01)
    train(tree["model"], tree["optim"], range(2))
    for problems in run_ranks(2, _load_factored, gathered(tree)):
        assert any("embed.weight.row_var" in text and "(7, 1)" in text for text in problems)


def _partly(checkpoint: Checkpoint) -> tuple[str, str]:
    """What a flat parameter does with members of unequal step, and with a member without state."""
    tensors = dict(checkpoint.tensors)
    tensors["optim.state.body.0.bias.step"] = torch.tensor(9.0)
    tree = _tree("fsdp1_flat", torch.optim.AdamW)
    binding = bound(tree, checkpoint)
    fill(binding, Checkpoint(tensors, checkpoint.catalog))
    try:
        binding.finish()
        unequal = ""
    except Mismatch as error:
        unequal = str(error)
    untouched = not tree["optim"].state
    lacking = {
        fqn: entry
        for fqn, entry in checkpoint.catalog.tensors.items()
        if not fqn.startswith("optim.state.body.0.weight")
    }
    catalog = type(checkpoint.catalog)(
        lacking, checkpoint.catalog.values, checkpoint.catalog.aliases
    )
    train(tree["model"], tree["optim"], range(2))
    load(tree, Checkpoint(checkpoint.tensors, catalog))
    after = gathered(tree)
    zeros = after.tensors["optim.state.body.0.weight.exp_avg"]
    kept = after.tensors["optim.state.body.0.bias.exp_avg"]
    assert not zeros.any()
    assert torch.equal(kept, checkpoint.tensors["optim.state.body.0.bias.exp_avg"])
    return unequal, str(untouched)


def test_members_of_a_flat_parameter_share_a_step_and_lack_as_zeros() -> None:
    state = State("bare", "adamw")
    state.train(range(3))
    tree = {"model": state.model, "optim": state.optimizer}
    for unequal, untouched in run_ranks(2, _partly, gathered(tree)):
        assert "body.0.bias.step: is 9.0" in unequal and "use_orig_params" in unequal
        assert untouched == "True"


def _per_rank(checkpoint: Checkpoint | None) -> Any:
    rank = dist.get_rank()
    torch.manual_seed(rank if checkpoint is None else 99)
    if checkpoint is None:
        part = part_of({"rng": rng_state(), "pos": PerRank(rank * 10)})
        return part, torch.rand(()).item()
    size = len(checkpoint.catalog.worlds[0])
    on_reshard = None if size == dist.get_world_size() else _by_rank
    state = {"rng": rng_state(on_reshard), "pos": PerRank(0, on_reshard)}
    load(state, checkpoint)
    return state["pos"].value, torch.rand(()).item()


def _by_rank(values: Any, rank: int, size: int) -> Any:
    return values[rank % len(values)]


@pytest.mark.parametrize("m", [2, 3])
def test_each_rank_gets_its_own_value_back(m: int) -> None:
    saved = run_ranks(2, _per_rank, None)
    loaded = run_ranks(m, _per_rank, assembled([part for part, _ in saved]))
    expected = [(10 * (rank % 2), saved[rank % 2][1]) for rank in range(m)]
    assert loaded == expected
