"""What a state dict has once of several ranks' optimizer state is equal on all of them, or the call
fails on all of them by name; where torch gives each rank its own, so do we.

Real ranks, every engine: one rank's step, number or small plain tensor is changed in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import StateDictType as TheirType

import ckpt
from ckpt.state_dict import like_torch
from ckpt.state_dict.api import load_optimizer_state_dict, optimizer_state_dict
from ckpt.state_dict.config import StateDictType
from sharding import FullyShardedDataParallel as Ours
from tests.ranks import run_ranks
from tests.state.differing import (
    ENGINES,
    first_state,
    more_of,
    noted_rounds,
    on_the_last,
    one_more,
    refusal,
    trained,
    trained_by_own,
)

pytestmark = pytest.mark.ranks
FULL, SHARDED, LOCAL = StateDictType.FULL, StateDictType.SHARDED, StateDictType.LOCAL
CPU = torch.device("cpu")


def steps_in(state_dict: dict[str, Any]) -> dict[str, float]:
    return {name: float(state["step"]) for name, state in state_dict["state"].items()}


def refused(call: Callable[[], Any], name: str) -> str:
    """The problem of the changed parameter, which is the same on all ranks."""
    texts = refusal(call)
    assert {text.split(":")[0].rpartition(".")[2] for text in texts} == {name}
    return next(text for text in texts if text.startswith("optim.state.0.weight."))


# --- one value for all ---------------------------------------------------------------------------


def differing_steps() -> None:
    for engine in ENGINES:
        if engine == "bare":  # no rank shares it: its dicts are each rank's own
            continue
        state = trained(engine)
        model, optimizer = state["model"], state["optim"]
        calls = [
            partial(optimizer_state_dict, model, optimizer, FULL),
            partial(optimizer_state_dict, model, optimizer, SHARDED),
            partial(like_torch.get_optimizer_state_dict, model, optimizer),
        ]
        for call in calls:
            with on_the_last(state, one_more):
                text = refused(call, "step")
                assert text.startswith("optim.state.0.weight.step: the ranks have different"), text
                assert " on 0; " in text and " on 1)" in text, text
                assert 'declare_optimizer_state(optimizer, {"step": PerRank(' in text, text
        for call in calls:
            assert set(steps_in(call()).values()) == {1.0}, engine


def test_a_step_that_differs_is_refused_and_named_on_all_ranks() -> None:
    run_ranks(2, differing_steps, timeout_seconds=300)


def other_state() -> None:
    kinds = {
        "fully": ("count",),
        "flat": ("count", "calls"),
        "their_orig": ("count", "calls"),
        "ddp": ("count", "factors", "nested", "moment"),
    }
    for engine, names in kinds.items():
        state = trained_by_own(engine)
        model, optimizer = state["model"], state["optim"]
        for name in names:
            shown = {"calls": "calls~int", "nested": "0"}.get(name, name)
            with on_the_last(state, more_of(name)):
                text = refused(partial(optimizer_state_dict, model, optimizer), shown)
                assert f'{{"{name}": PerRank(' in text, text
            for held in optimizer.state.values():
                held["calls"] = 1
        optimizer_state_dict(model, optimizer)


def test_numbers_and_small_plain_tensors_that_differ_are_refused() -> None:
    run_ranks(2, other_state, timeout_seconds=300)


def on_one_rank() -> None:
    for engine in ("fully", "their_fully", "flat", "orig"):
        state = trained(engine)
        if dist.get_rank():
            first_state(state["optim"])["extra"] = torch.tensor(5.0)
        text = refused(partial(optimizer_state_dict, state["model"], state["optim"]), "extra")
        assert "extra: ranks [1] have it, and the rank that holds the parameter's first" in text
        assert '{"extra": PerRank(' in text, text


def test_a_scalar_that_no_rank_gives_is_named() -> None:
    run_ranks(2, on_one_rank, timeout_seconds=300)


def declared() -> None:
    for engine in ("fully", "flat"):
        state = trained(engine)
        for held in state["optim"].state.values():
            held["step"].fill_(10.0 + dist.get_rank())
        ckpt.state_dict.declare_optimizer_state(state["optim"], {"step": ckpt.PerRank(None)})
        taken = optimizer_state_dict(state["model"], state["optim"])
        # A flat parameter has one, and its first member has that.
        steps = {float(held["step"]) for held in taken["state"].values() if "step" in held}
        assert steps == {10.0 + dist.get_rank()}, engine


def test_a_step_that_is_declared_each_ranks_own_is_each_ranks() -> None:
    run_ranks(2, declared, timeout_seconds=300)


# --- a value for each rank -----------------------------------------------------------------------


def own_steps() -> None:
    """LOCAL dicts have this rank's steps, and it gets them back from them."""
    for engine in ("ddp", "flat", "orig", "their_flat"):
        state = trained(engine)
        for held in state["optim"].state.values():
            held["step"].fill_(10.0 + dist.get_rank())
        taken = optimizer_state_dict(state["model"], state["optim"], LOCAL)
        wanted = {10.0 + dist.get_rank()}
        mine = {float(held["step"]) for held in state["optim"].state.values()}
        assert mine == wanted and mine <= set(steps_in(taken).values()), engine
        if engine != "orig":  # there a rank is given the steps of what it has nothing of
            assert set(steps_in(taken).values()) == wanted, engine
        other = trained(engine)
        load_optimizer_state_dict(other["model"], other["optim"], taken)
        assert {float(held["step"]) for held in other["optim"].state.values()} == wanted, engine


def test_local_dicts_have_the_steps_of_the_rank() -> None:
    run_ranks(2, own_steps, timeout_seconds=300)


def wrapper_calls(engine: Any, strategy: ShardingStrategy, *, orig: bool) -> list[Any]:
    """The steps in what the wrapper's calls return where ranks have different ones."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = engine(layers, device_id=CPU, sharding_strategy=strategy, use_orig_params=orig)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    outcomes: list[Any] = []
    with on_the_last({"optim": optimizer}, one_more):
        for form in (TheirType.FULL_STATE_DICT, TheirType.SHARDED_STATE_DICT):
            with engine.state_dict_type(model, form):
                outcomes.append(steps_or_error(lambda: engine.optim_state_dict(model, optimizer)))
        outcomes.append(
            steps_or_error(lambda: engine.full_optim_state_dict(model, optimizer, rank0_only=False))
        )
    return outcomes


def steps_or_error(call: Callable[[], dict[str, Any]]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return steps_in(call())
        except (AssertionError, RuntimeError):
            return "refused"


def like_torchs_wrapper() -> None:
    own = 2.0 if dist.get_rank() else 1.0
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for orig in (False, True):
            theirs = wrapper_calls(Theirs, strategy, orig=orig)
            assert wrapper_calls(Ours, strategy, orig=orig) == theirs, (strategy, orig)
            is_refused = orig and strategy is ShardingStrategy.FULL_SHARD
            assert ("refused" in theirs) == is_refused, theirs
            assert is_refused or theirs[0]["0.weight"] == own, "torch gives each rank its own"


@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*:FutureWarning")
def test_the_wrappers_calls_give_each_rank_its_own_where_torchs_do() -> None:
    run_ranks(2, like_torchs_wrapper, timeout_seconds=300)


# --- what it costs -------------------------------------------------------------------------------


def counted() -> list[str]:
    rounds = noted_rounds("gather", "broadcast", "agree", "transfers")
    state = trained("fully")
    optimizer_state_dict(state["model"], state["optim"])
    return rounds


ROUNDS = ["describe", "values", "held", "allocate", "wanted", "plan", "state dict"]


def test_the_comparison_is_no_round_of_its_own() -> None:
    for rounds in run_ranks(2, counted, timeout_seconds=300):
        assert rounds == ROUNDS
