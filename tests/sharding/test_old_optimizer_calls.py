"""The old calls for optimizer dicts, held against torch's class on the same ranks: what they return
and whether they raise, with `optim_input`, with nothing that names the parameters, with another
order on each rank, with None in the state, with parameters beside the units that are each rank's
own, and with dicts that lack some.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs

from ckpt import CheckpointError
from ckpt.state_dict import load_optimizer_state_dict
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
    except (ValueError, TypeError, RuntimeError) as error:
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


def around(name: str, kind: str, *, orig: bool) -> Any:
    """A model with a wrapped part, and parameters beside it that differ between ranks by `kind`."""
    rank = dist.get_rank()
    model: Any = torch.nn.Module()
    model.inner = wrapped(name, build("uneven"), use_orig_params=orig)
    torch.manual_seed(7)
    model.head = torch.nn.Linear(2, 2 + (rank if kind == "shapes" else 0))
    if kind == f"only on {rank}":
        model.extra = torch.nn.Linear(1, 1)
    return model


def differing(model: Any, kind: str) -> torch.optim.Optimizer:
    """An optimizer with state of its own on each rank for what stands beside the unit."""
    rank = dist.get_rank()
    rate: Any = torch.tensor if kind == "rates in tensors" else float
    params = list(model.parameters())
    groups = [{"params": params[:1], "lr": rate(0.1)}, {"params": params[1:], "lr": rate(0.2)}]
    optimizer = adam(groups[:: -1 if rank else 1], lr=0.1)
    if kind == "rates":
        optimizer.param_groups[0]["lr"] = 0.5 + rank
    for param in (param for part in ("head", "extra") for param in params_of(model, part)):
        state = optimizer.state[param]
        state["step"] = torch.tensor(3.0 + rank)
        state["exp_avg"] = param.detach() + 2 + rank
        if kind == "values":
            state["note"] = [rank, torch.full((rank + 1,), 2.0)]
            state["number"] = 1.5 + rank
            if rank:
                state["nothing"] = None
    return optimizer


def params_of(model: Any, part: str) -> list[Any]:
    return list(getattr(model, part).parameters()) if hasattr(model, part) else []


KINDS = ("shapes", "only on 0", "only on 1", "values", "rates", "rates in tensors")


def by_rank(name: str, engine: Any, orig: bool) -> list[Any]:
    outcomes = []
    for kind in KINDS:
        model = around(name, kind, orig=orig)
        optimizer = differing(model, kind)
        takes = {
            "full": lambda m, o: engine.full_optim_state_dict(m, o, rank0_only=False),
            "first": engine.full_optim_state_dict,
            "sharded": engine.sharded_optim_state_dict,
            "set": engine.optim_state_dict,
            "given": lambda m, o: engine.optim_state_dict(m, o, o.state_dict()),
        }
        taken = {call: outcome(take, model, optimizer) for call, take in takes.items()}
        outcomes.append((kind, taken))
        if not isinstance(taken["full"], dict):
            continue
        fresh = torch.optim.Adam([{"params": g["params"]} for g in optimizer.param_groups])
        full, flat = taken["full"], engine.flatten_sharded_optim_state_dict
        scatter = engine.scatter_full_optim_state_dict
        loads: dict[str, Callable[[], Any]] = {
            "shard": partial(engine.shard_full_optim_state_dict, full, model, optim=fresh),
            "flatten": partial(flat, taken["sharded"], model, fresh),
            "load": partial(engine.optim_state_dict_to_load, model, fresh, full),
        }
        if "rates" in kind:  # torch hangs, or gives the values to others, where ranks differ
            loads["scatter"] = partial(scatter, taken["first"], model, optim=fresh)
        for call, load in loads.items():
            ready = outcome(load)
            if call == "scatter":  # torch has the groups in the first rank's order
                ready = {**ready, "param_groups": by_params(ready)}
                outcomes.append((kind, call, ready))
                continue
            outcomes.append((kind, call, ready))
            fresh.load_state_dict(ready)
            again = outcome(takes["full"], model, fresh)
            assert_same(again, taken["full"], f"{orig} {kind} {call}")
    return outcomes


def by_params(state: Any) -> list[Any]:
    return sorted(state["param_groups"], key=lambda group: list(group["params"]))


def own_state() -> None:
    same_outcomes(by_rank)


def test_what_stands_beside_the_units_is_each_ranks_own() -> None:
    run_ranks(2, own_state, timeout_seconds=300.0)


def without(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A dict that lacks these parameters, state and group."""
    return {
        "state": {key: one for key, one in state["state"].items() if key not in names},
        "param_groups": [
            {**group, "params": [key for key in group["params"] if key not in names]}
            for group in state["param_groups"]
        ],
    }


def by_lack(name: str, engine: Any, orig: bool) -> list[Any]:
    """Dicts that lack what a unit manages: all of the inner unit, or of both, or a group."""
    outcomes = []
    model = wrapped(name, build("uneven"), use_orig_params=orig)
    params = list(model.parameters())
    inner = ["1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"]
    for given in (params, [{"params": params[:-1]}, {"params": params[-1:]}]):
        optimizer = adam(given)
        full = quiet(engine.full_optim_state_dict, model, optimizer, rank0_only=False)
        last = full["param_groups"][-1]["params"]
        for names in (inner, last, sorted(full["state"]), ["1.0.bias"] if orig else inner):
            lacking = without(full, names)
            if len(full["param_groups"]) > 1 and names is last:
                lacking["param_groups"].pop()
            shard, scatter = (
                engine.shard_full_optim_state_dict,
                engine.scatter_full_optim_state_dict,
            )
            for call in (
                partial(scatter, lacking, model, optim=optimizer),
                partial(engine.optim_state_dict_to_load, model, optimizer, lacking),
                partial(shard, lacking, model, optim_input=given),
            ):
                outcomes.append((names, outcome(call)))
    return outcomes


def lacks() -> None:
    same_outcomes(by_lack)


def test_a_dict_may_lack_what_units_manage() -> None:
    run_ranks(2, lacks, timeout_seconds=300.0)


def partly(caught: Any) -> None:
    """What is lacking is named; members of a flat parameter that lack get zeros."""
    for orig in (False, True):
        model = wrapped("ours", build("uneven"), use_orig_params=orig)
        optimizer = adam(model.parameters())
        full = quiet(Ours.full_optim_state_dict, model, optimizer, rank0_only=False)
        lacking = without(full, ["1.0.bias"])
        caught.clear()
        ready = quiet(Ours.optim_state_dict_to_load, model, optimizer, lacking)
        (message,) = caught
        assert "1.0.bias" in message and "ckpt.state_dict.load_optimizer_state_dict" in message
        assert "1.0.weight" not in message
        with pytest.raises(CheckpointError, match=r"no parameter 1\.0\.bias"):
            load_optimizer_state_dict(model, optimizer, lacking)
        if orig:
            with pytest.raises(ValueError, match="size"):
                optimizer.load_state_dict(ready)
            continue
        optimizer.load_state_dict(ready)
        again = quiet(Ours.full_optim_state_dict, model, optimizer, rank0_only=False)
        filled = again["state"].pop("1.0.bias")
        assert not filled["exp_avg"].any() and filled["step"] == 3
        assert_same(again["state"], lacking["state"])


class Caught(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def partly_on_a_rank() -> None:
    handler = Caught()
    logging.getLogger("ckpt").addHandler(handler)
    partly(handler.messages)


def test_what_a_dict_lacks_is_named() -> None:
    run_ranks(2, partly_on_a_rank)
