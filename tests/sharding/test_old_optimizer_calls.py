"""The old calls for optimizer dicts, held against torch's class on the same ranks: what they return
and whether they raise, with `optim_input`, with nothing that tells the parameters, with another
order on each rank, with None in the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs

from sharding import FullyShardedDataParallel as Ours
from sharding import OptimStateKeyType
from tests.ranks import run_ranks
from tests.sharding.models import build, wrapped
from tests.sharding.test_state_dicts import assert_same, quiet

pytestmark = pytest.mark.ranks
BOTH: tuple[tuple[str, Any], ...] = (("torch", Theirs), ("ours", Ours))
NAME, ID = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID


def adam(params: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(params, lr=lr)
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        if param.numel():  # as after steps of which each rank computes the same
            state = optimizer.state[param]
            state["step"] = torch.tensor(3.0)
            state["exp_avg"] = param.detach() + 1
            state["exp_avg_sq"] = param.detach() + 1  # torch gives one memory for both on the CPU
    return optimizer


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return quiet(call, *args, **kwargs)
    except (ValueError, TypeError) as error:
        return type(error).__name__


def same_outcomes(case: Callable[[str, Any, bool], list[Any]]) -> None:
    for orig in (False, True):
        theirs, ours = (case(name, engine, orig) for name, engine in BOTH)
        assert len(theirs) == len(ours)
        for index, (wanted, got) in enumerate(zip(theirs, ours, strict=True)):
            assert_same(got, wanted, f"{orig} {index}")


def by_input(name: str, engine: Any, orig: bool) -> list[Any]:
    model = wrapped(name, build("uneven"), use_orig_params=orig)
    params = list(model.parameters())
    groups = [{"params": params[1:]}, {"params": params[:1], "lr": 0.5}]
    outcomes = []
    for given in (params, groups):
        optimizer = adam(given)
        full = quiet(engine.full_optim_state_dict, model, optimizer, given, rank0_only=False)
        assert_same(full, quiet(engine.full_optim_state_dict, model, optimizer, rank0_only=False))
        outcomes.append(full)
        for chosen in ({"optim_input": given}, {"optim": optimizer}, {}):
            outcomes.append(quiet(engine.shard_full_optim_state_dict, full, model, **chosen))
            given_full = full if dist.get_rank() == 0 else None
            outcomes.append(
                quiet(engine.scatter_full_optim_state_dict, given_full, model, **chosen)
            )
        for bad in ([], [params[0], {"params": params}], 3, ["a"]):
            outcomes.append(outcome(engine.shard_full_optim_state_dict, full, model, bad))
        bare = build("uneven")
        bare_params = list(bare.parameters())
        for chosen in (
            {},
            {"optim_input": bare_params[::-1]},
            {"optim": torch.optim.SGD(bare_params)},
        ):
            outcomes.append(quiet(engine.rekey_optim_state_dict, full, ID, bare, **chosen))
            back = quiet(engine.rekey_optim_state_dict, outcomes[-1], NAME, bare, **chosen)
            outcomes.append(back)
    with pytest.warns(FutureWarning, match="optim_input"):
        engine.rekey_optim_state_dict(full, ID, bare, bare_params)
    return outcomes


def inputs() -> None:
    same_outcomes(by_input)


def test_what_tells_the_parameters_is_optional() -> None:
    run_ranks(2, inputs)


def by_mesh(name: str, engine: Any, orig: bool) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = wrapped(name, build("uneven"), use_orig_params=orig, device_mesh=mesh)
    optimizer = adam(model.parameters())
    sharded = quiet(engine.sharded_optim_state_dict, model, optimizer)
    assert type(sharded["state"]["0.weight"]["exp_avg"]).__name__ == "ShardedTensor", name
    taken = quiet(engine.flatten_sharded_optim_state_dict, sharded, model, optimizer)
    return [sharded, taken]


def meshes() -> None:
    same_outcomes(by_mesh)


def test_sharded_dicts_of_models_on_a_mesh_are_of_sharded_tensors() -> None:
    run_ranks(2, meshes)


def by_order(name: str, engine: Any, orig: bool) -> list[Any]:
    """Rank 1 has its parameters, and with two groups the groups too, the other way round."""
    model = wrapped(name, build("uneven"), use_orig_params=orig)
    turn = slice(None, None, -1 if dist.get_rank() else 1)
    params = list(model.parameters())[turn]
    outcomes = []
    for given in (params, [{"params": params[:1]}, {"params": params[1:]}]):
        if isinstance(given[0], dict) and dist.get_rank():
            given = [{"params": params[:-1]}, {"params": params[-1:]}][::-1]
        optimizer = adam(given)
        full = quiet(engine.full_optim_state_dict, model, optimizer, rank0_only=False)
        sharded = quiet(engine.sharded_optim_state_dict, model, optimizer)
        outcomes += [full, sharded]
        fresh = torch.optim.Adam(given)
        for taken in (
            quiet(engine.shard_full_optim_state_dict, full, model, optim=fresh),
            quiet(engine.scatter_full_optim_state_dict, full, model, optim=fresh),
            quiet(engine.flatten_sharded_optim_state_dict, sharded, model, fresh),
        ):
            fresh.load_state_dict(taken)
            again = quiet(engine.full_optim_state_dict, model, fresh, rank0_only=False)
            assert_same(again["state"], full["state"])
    return outcomes


def orders() -> None:
    same_outcomes(by_order)


def test_each_rank_may_have_an_order_of_its_own() -> None:
    run_ranks(2, orders)


def by_nothing(name: str, engine: Any, orig: bool) -> list[Any]:
    model = wrapped(name, build("uneven"), use_orig_params=orig)
    optimizer = adam(model.parameters())
    for state in optimizer.state.values():
        state["nothing"] = None
    full = quiet(engine.full_optim_state_dict, model, optimizer, rank0_only=False)
    sharded = quiet(engine.sharded_optim_state_dict, model, optimizer)
    own = quiet(engine.shard_full_optim_state_dict, full, model, optim=optimizer)
    if engine is Ours:  # torch's breaks off here
        assert_same(quiet(engine.scatter_full_optim_state_dict, full, model, optim=optimizer), own)
    flat = quiet(engine.flatten_sharded_optim_state_dict, sharded, model, optimizer)
    return [full, sharded, own, flat]


def nothings() -> None:
    same_outcomes(by_nothing)


def test_none_in_the_state_stays_none() -> None:
    run_ranks(2, nothings)


def by_rest(name: str, engine: Any, orig: bool) -> list[Any]:
    """A dict of what the engine manages, for a model with parameters beside the unit."""
    model = wrapped(name, build("uneven"), use_orig_params=orig)
    full = quiet(engine.full_optim_state_dict, model, adam(model.parameters()), rank0_only=False)
    around: Any = torch.nn.Module()
    around.inner, around.head = model, torch.nn.Linear(2, 2)
    given = {
        "state": {f"inner.{key}": state for key, state in full["state"].items()},
        "param_groups": [
            {**group, "params": [f"inner.{key}" for key in group["params"]]}
            for group in full["param_groups"]
        ],
    }
    return [
        quiet(call, given, around, optim=torch.optim.Adam(around.parameters()))
        for call in (engine.shard_full_optim_state_dict, engine.scatter_full_optim_state_dict)
    ]


def rests() -> None:
    same_outcomes(by_rest)


def test_a_dict_may_lack_what_stands_beside_the_units() -> None:
    run_ranks(2, rests)
