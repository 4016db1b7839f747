"""What a state flattens to, in one process: names, values, ties, and every refusal by its name."""

from __future__ import annotations

import collections
import copy
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import InvalidState
from ckpt.format.codec import encode_values
from ckpt.layout.kind import Kind
from ckpt.layout.plain import Ranks
from ckpt.state.flatten import flatten_state
from ckpt.state.rng import rng_state
from ckpt.state.types import FlatState, PerRank
from tests.counting import python_calls

ALONE = Ranks.alone()


def flat(state: Any) -> FlatState:
    return flatten_state(state, ALONE)


def names(state: Any) -> list[str]:
    return [piece.fqn for holding in flat(state).holdings for piece in holding.pieces]


def problems(state: Any) -> list[str]:
    with pytest.raises(InvalidState) as caught:
        flat(state)
    return list(caught.value.problems)


def trained(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()


class Pair(NamedTuple):
    left: Any
    right: Any


def test_leaves_are_named_by_the_keys_on_their_path() -> None:
    zero = torch.zeros
    state = {"a": {"b": [zero(1), {"c": zero(2)}], 3: zero(3)}, "p": Pair(zero(4), 5)}
    assert names(state) == ["a.b.0", "a.b.1.c", "a.3", "p.0"]
    assert flat(state).values == {"p.1": 5}


def test_a_container_without_tensors_is_one_value_and_keeps_its_structure() -> None:
    meta = {"list": [1, (2, None)], "tuple": (b"x",), 7: {"empty": {}}, "float": float("inf")}
    state = {"meta": meta, "mixed": {"t": torch.zeros(1), "inner": meta, "n": 1}}
    assert flat(state).values == {"meta": meta, "mixed.inner": meta, "mixed.n": 1}
    encode_values(flat(state).values)


def test_dicts_of_the_standard_library_are_stored_as_dicts() -> None:
    state = {"c": collections.Counter("aab"), "o": collections.OrderedDict(x=1)}
    assert flat(state).values == {"c": {"a": 2, "b": 1}, "o": {"x": 1}}
    assert all(type(value) is dict for value in flat(state).values.values())


def test_a_bare_module_is_a_state_without_a_prefix() -> None:
    assert names(nn.Linear(2, 3)) == ["weight", "bias"]


def test_modules_in_a_list_are_named_by_their_index() -> None:
    assert names({"m": [nn.Linear(1, 1, bias=False), nn.ReLU()]}) == ["m.0.weight"]


def test_holdings_are_the_live_memory_and_have_their_kinds() -> None:
    module = nn.BatchNorm1d(3)
    optimizer = torch.optim.AdamW(module.parameters())
    loss: Any = module(torch.randn(4, 3)).sum()
    loss.backward()
    optimizer.step()
    ema = torch.zeros(3)
    holding_of = {
        holding.pieces[0].fqn: holding
        for holding in flat({"m": module, "o": optimizer, "ema": ema}).holdings
    }
    assert holding_of["m.weight"].local.data_ptr() == module.weight.data_ptr()
    assert holding_of["ema"].local.data_ptr() == ema.data_ptr()
    kinds = {
        fqn: holding_of[fqn].kind for fqn in ("m.weight", "m.running_var", "o.state.weight.step")
    }
    assert kinds == {
        "m.weight": Kind.PARAMETER,
        "m.running_var": Kind.BUFFER,
        "o.state.weight.step": Kind.OPTIMIZER,
    }
    assert not any(holding.local.requires_grad for holding in holding_of.values())


def test_tied_tensors_are_held_once_under_the_first_name() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    shared = torch.arange(4.0)
    state = {"m": module, "again": module, "x": shared, "y": shared, "view": shared[:2]}
    assert names(state) == ["x", "view", "m.0.weight", "m.0.bias"]
    assert flat(state).aliases == {
        "y": "x",
        "m.1.weight": "m.0.weight",
        "again.0.weight": "m.0.weight",
        "again.0.bias": "m.0.bias",
        "again.1.weight": "m.0.weight",
    }


def test_param_groups_name_parameters_and_hold_hyperparameters() -> None:
    module = nn.Linear(4, 2)
    groups: Any = [{"params": [module.bias], "lr": 0.5}, {"params": [module.weight]}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.25), betas=(0.8, 0.9), foreach=False)
    flattened = flat({"m": module, "o": optimizer})
    first, second = flattened.values["o.param_groups"]
    assert (first["params"], second["params"]) == (["bias"], ["weight"])
    assert (first["lr"], first["betas"]) == (0.5, (0.8, 0.9))
    assert second["lr"] == {"$tensor": "o.param_groups.1.lr"}
    (lr,) = [h for h in flattened.holdings if h.pieces[0].fqn == "o.param_groups.1.lr"]
    assert (lr.kind, lr.local.item()) == (Kind.OTHER, 0.25)


def test_an_optimizer_over_two_modules_names_parameters_by_their_paths() -> None:
    left, right = nn.Linear(4, 4), nn.Linear(4, 4)
    both = torch.optim.SGD([*left.parameters(), *right.parameters()], lr=0.1, momentum=0.9)
    one = torch.optim.SGD(left.parameters(), lr=0.1, momentum=0.9)
    trained(nn.Sequential(left, right), both)
    state = {"l": left, "r": right, "both": both, "one": one}
    assert flat(state).values["one.param_groups"][0]["params"] == ["weight", "bias"]
    assert [name for name in names(state) if name.startswith("both.")] == [
        "both.state.l.weight.momentum_buffer",
        "both.state.l.bias.momentum_buffer",
        "both.state.r.weight.momentum_buffer",
        "both.state.r.bias.momentum_buffer",
    ]


def test_an_optimizer_of_bare_parameters_of_the_state_is_served() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    loss: Any = weight.sum()
    loss.backward()
    optimizer.step()
    assert names({"w": weight, "o": optimizer}) == ["w", "o.state.w.momentum_buffer"]


def test_an_optimizer_of_plain_tensors_of_the_state_is_served() -> None:
    """As in functional training: leaves that need gradients, in a dict."""
    params = {"w": torch.ones(3, requires_grad=True), "frozen": torch.ones(2)}
    optimizer = torch.optim.SGD([params["w"]], lr=0.1, momentum=0.9)
    loss: Any = params["w"].sum()
    loss.backward()
    optimizer.step()
    state = {"params": params, "o": optimizer}
    assert names(state) == ["params.w", "params.frozen", "o.state.params.w.momentum_buffer"]
    saved = [param.clone() for param in params.values()], optimizer.state[params["w"]]
    ckpt.save(state, "memory://plain", step=1)
    fresh = {"w": torch.zeros(3, requires_grad=True), "frozen": torch.zeros(2)}
    other = torch.optim.SGD([fresh["w"]], lr=0.5, momentum=0.1)
    ckpt.load({"params": fresh, "o": other}, "memory://plain")
    assert all(map(torch.equal, fresh.values(), saved[0]))
    assert torch.equal(other.state[fresh["w"]]["momentum_buffer"], saved[1]["momentum_buffer"])
    assert other.param_groups[0]["lr"] == 0.1


def test_optimizer_state_keeps_its_dtype() -> None:
    module = nn.Linear(4, 2).to(torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for param in module.parameters():
        optimizer.state[param]["momentum"] = torch.zeros_like(param, dtype=torch.float32)
        optimizer.state[param]["count"] = 3
    flattened = flat({"m": module, "o": optimizer})
    dtypes = {h.pieces[0].fqn: h.pieces[0].dtype for h in flattened.holdings}
    assert dtypes["o.state.weight.momentum"] is torch.float32
    assert dtypes["m.weight"] is torch.bfloat16
    assert flattened.values["o.state.bias.count"] == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.LBFGS(p, history_size=2),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.Adagrad(p),
    ],
)
def test_every_optimizer_of_an_unsharded_model_is_served(make: Any) -> None:
    module = nn.Linear(4, 2)
    optimizer = make(module.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = module(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert any(name.startswith("o.state.weight.") for name in names({"m": module, "o": optimizer}))
    encode_values(flat({"m": module, "o": optimizer}).values)


def test_objects_give_their_state_with_tensors_beside() -> None:
    class Thing:
        def state_dict(self) -> dict[str, Any]:
            return {"mean": torch.ones(2), "n": [1, torch.zeros(())]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    flattened = flat({"thing": Thing()})
    assert flattened.values["thing"] == {
        "mean": {"$tensor": "thing.mean"},
        "n": [1, {"$tensor": "thing.n.1"}],
    }
    assert names({"thing": Thing()}) == ["thing.mean", "thing.n.1"]


class Wrapper:
    """As Accelerate's DataLoader: it has the functions, and what it wraps may have no state."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def state_dict(self) -> Any:
        return self.wrapped.state

    def load_state_dict(self, state: Any) -> None:
        self.wrapped.state = state


@pytest.mark.parametrize("marked", [False, True])
def test_an_object_without_state_is_refused_by_name_and_not_by_its_own_error(marked: bool) -> None:
    """It ended in a bare AttributeError that named no part of the state."""
    empty = Wrapper(object())
    state = {"data": {"train": PerRank(empty) if marked else empty}}
    with pytest.raises(
        InvalidState, match=r"data\.train: .*AttributeError.*leave it out"
    ) as caught:
        flat(state)
    assert isinstance(caught.value.__cause__, AttributeError)


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_is_taken_from_modules() -> None:
    module = nn.Sequential(WithExtra({"scale": torch.ones(1), "n": 2}))
    flattened = flat({"m": module})
    assert flattened.values == {
        "m.0._extra_state": {"scale": {"$tensor": "m.0._extra_state.scale"}, "n": 2}
    }


def test_per_rank_values_are_kept_apart_and_random_states_are_values() -> None:
    flattened = flat({"pos": PerRank([1, 2]), "rng": rng_state()})
    assert flattened.values == {}
    assert flattened.per_rank["pos"] == [1, 2]
    encode_values(flattened.per_rank)


def test_flattening_draws_no_random_number_and_changes_nothing() -> None:
    module = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    trained(module, optimizer)
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    flat({"m": module, "o": optimizer, "rng": rng_state()})
    after = (module.state_dict(), optimizer.state_dict(), torch.get_rng_state())
    assert str(before) == str(after)


class Odd:
    pass


def strange_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def hooked_optimizer() -> dict[str, Any]:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(lambda optimizer, state: None)
    return {"m": module, "o": optimizer}


def hooked_module() -> nn.Module:
    module: Any = nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda *args: None)
    return nn.Sequential(module)


def script_module() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        return torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))


def itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": {"x": np.complex64(1)}}, ["a.x", "numpy.complex64", "float()"]),
        ({"a": np.array(["x"])}, ["a: ", "array of <U1", ".tolist()"]),
        ({"o": Odd()}, ["o: ", "Odd", "state_dict()"]),
        ({"f": len}, ["f: ", "builtin_function_or_method"]),
        ({"c": nn.Linear}, ["c: ", "type"]),
        ({"v": {frozenset(): 1}}, ["v: ", "key", "frozenset"]),
        ({"v": {(1, 2): torch.zeros(1)}}, ["v: ", "key (1, 2)", "str or int"]),
        ({"v": {"$tensor": 1}}, ["v: ", "'$tensor'", "reserved"]),
        ({"loop": itself()}, ["nested deeper"]),
        (3, ["the state is a int", "dict"]),
        ({"g": torch.Generator()}, ["g: ", "torch._C.Generator", "get_state()", "set_state()"]),
        ({"m": script_module()}, ["m: ", "TorchScript", "made from"]),
        ({"o": strange_optimizer()}, ["o: ", "2 of its parameters", "put the model into"]),
        (hooked_optimizer(), ["o: ", "hook", "<lambda>"]),
        ({"m": hooked_module()}, ["m.0: ", "hook", "<lambda>"]),
        ({"m": nn.LazyLinear(3, bias=False)}, ["m.weight", "lazy"]),
        ({"t": torch.zeros(2, device="meta")}, ["t: ", "meta"]),
        ({"v": {"$tensor_type": 1}}, ["v: ", "'$tensor_type'", "reserved"]),
        ({"m": WithExtra(Odd())}, ["m._extra_state", "Odd"]),
        ({"p": PerRank(torch.zeros(1))}, ["p: ", "PerRank", ".tolist()"]),
        ({"a.b": torch.zeros(1), "a": {"b": torch.ones(2)}}, ["a.b: ", "['a.b']", "['a']['b']"]),
        ({"a.b": 1, "a": {"b": torch.zeros(2)}}, ["a.b: ", "['a.b']", "['a']['b']"]),
        ({1: torch.zeros(1), "1": torch.zeros(1)}, ["1: ", "[1]", "['1']"]),
    ],
    ids=lambda case: "-".join(case)[:30] if isinstance(case, list) else "",
)
def test_what_cannot_be_saved_is_named_with_the_next_move(state: Any, said: list[str]) -> None:
    texts = problems(state)
    assert len(texts) == 1
    for part in said:
        assert part in texts[0]


def test_wrappers_of_optimizers_are_refused_when_there_are_several_ranks() -> None:
    class Wrapper:
        param_groups: list[Any] = []  # noqa: RUF012

        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    assert flat({"o": Wrapper()}).values == {"o": {"n": 1}}
    with pytest.raises(InvalidState, match=r"o: a .*Wrapper has param_groups"):
        flatten_state({"o": Wrapper()}, Ranks(0, (0, 1)))


def test_all_problems_are_reported_together() -> None:
    assert len(problems({"a": Odd(), "b": {"c": np.complex64(1)}, "m": hooked_module()})) == 3


def test_flattening_costs_the_same_for_each_tensor() -> None:
    """Counted, not timed: the work of a tensor does not grow with their number."""

    def calls(n_tensors: int) -> int:
        state = {f"layer.{index}.weight": torch.zeros(16, 16) for index in range(n_tensors)}
        return python_calls(lambda: flat(state))

    few, more, most = calls(200), calls(400), calls(4000)
    assert (most - more) / 3600 == pytest.approx((more - few) / 200, rel=0.05)
    assert (most - more) / 3600 < 20  # measured 13
