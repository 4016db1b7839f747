"""What a load does with a state, in one process: what is filled, installed, refused and reported.

A state is put into a checkpoint in memory, and other states are bound to it and filled from it.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import InvalidState
from ckpt.state.rng import rng_state
from ckpt.state.types import Catalog, PerRank, ProblemKind, TensorEntry
from tests.state.checkpoints import Checkpoint, assert_same, bound, gathered, load, same_bits

Params = Any
Make = Callable[[Params], torch.optim.Optimizer]


def net(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(dtype)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    generator = torch.Generator().manual_seed(count)
    dtype = next(module.parameters()).dtype
    for _ in range(count):
        data = torch.randn(6, 4, generator=generator).to(dtype)

        def closure(data: torch.Tensor = data) -> Any:
            optimizer.zero_grad()
            loss: Any = module(data).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def adamw(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def stepped(make: Make = adamw, seed: int = 0, count: int = 3) -> dict[str, Any]:
    module = net(seed)
    optimizer = make(module.parameters())
    step(module, optimizer, count)
    return {"m": module, "o": optimizer}


def fresh(make: Make = adamw, seed: int = 5) -> dict[str, Any]:
    module = net(seed)
    return {"m": module, "o": make(module.parameters())}


def catalog_only(
    tensors: dict[str, TensorEntry], values: dict[str, Any] | None = None
) -> Checkpoint:
    return Checkpoint({}, Catalog(tensors, values or {}))


def texts(state: Any, checkpoint: Checkpoint, **options: Any) -> list[str]:
    return list(bound(state, checkpoint, **options).fatal)


OPTIMIZERS: dict[str, Make] = {
    "adamw": adamw,
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01, history_size=3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("is_stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_with_the_same_bits(name: str, is_stepped: bool) -> None:
    make = OPTIMIZERS[name]
    source = stepped(make)
    checkpoint = gathered(source)
    target = stepped(make, seed=7, count=1) if is_stepped else fresh(make)
    load(target, checkpoint)
    assert_same(gathered(target), checkpoint)
    step(source["m"], source["o"], 4)
    step(target["m"], target["o"], 4)
    assert_same(gathered(target), gathered(source))


def test_live_memory_is_filled_in_place() -> None:
    checkpoint = gathered(stepped())
    target = stepped(seed=7)
    state = target["o"].state[target["m"][0].weight]
    before = [target["m"][0].weight, state["exp_avg"], state["step"]]
    load(target, checkpoint)
    after = target["o"].state[target["m"][0].weight]
    assert [t is u for t, u in zip(before[1:], (after["exp_avg"], after["step"]), strict=True)]
    assert before[0].data_ptr() == target["m"][0].weight.data_ptr()
    assert same_bits(before[1], checkpoint.tensors["o.state.0.weight.exp_avg"])


def test_autograd_refuses_a_backward_of_the_values_before_a_load() -> None:
    """As after load_state_dict(): the gradients would be those of no state that ever was."""
    state = {"m": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "x": torch.ones(3)}
    ckpt.save(state, "memory://between", step=1)
    counts = {name: tensor._version for name, tensor in state["m"].named_parameters()}
    loss = state["m"](state["x"].clone()).square().sum()
    weighted = state["m"][0].weight.sum() * state["x"].requires_grad_(False)
    ckpt.load(state, "memory://between")
    assert all(t._version > counts[name] for name, t in state["m"].named_parameters())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weighted.sum().backward()


def test_nothing_changes_before_finish_but_what_is_filled() -> None:
    checkpoint = gathered({**stepped(), "epoch": 4, "rng": rng_state()})
    target = {**fresh(), "epoch": 0, "rng": rng_state()}
    generators = torch.get_rng_state()
    binding = bound(target, checkpoint)
    binding.prepare()
    assert not target["o"].state and target["epoch"] == 0
    assert torch.equal(generators, torch.get_rng_state())


def test_float32_momentum_of_bfloat16_parameters_stays_float32() -> None:
    def make(seed: int) -> dict[str, Any]:
        module = net(seed, torch.bfloat16)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        return {"m": module, "o": optimizer}

    source = make(0)
    for param in source["m"].parameters():
        source["o"].state[param]["momentum_buffer"] = torch.randn(param.shape)
    checkpoint = gathered(source)
    for target in (make(1), source):
        load(target, checkpoint)
        for param in target["m"].parameters():
            assert target["o"].state[param]["momentum_buffer"].dtype is torch.float32
        assert_same(gathered(target), checkpoint)


def test_state_that_the_checkpoint_lacks_is_removed() -> None:
    checkpoint = gathered(fresh())
    target = stepped()
    load(target, checkpoint)
    assert not any(target["o"].state.values())


def test_state_names_that_the_checkpoint_lacks_are_removed() -> None:
    checkpoint = gathered(stepped())
    target = stepped(OPTIMIZERS["amsgrad"])
    load(target, checkpoint)
    assert_same(gathered(target), checkpoint)
    assert target["o"].param_groups[0]["amsgrad"] is False


def test_parameters_without_state_stay_without() -> None:
    def make(seed: int) -> dict[str, Any]:
        module = net(seed)
        module[0].weight.requires_grad_(False)
        return {"m": module, "o": adamw(module.parameters())}

    source = make(0)
    step(source["m"], source["o"])
    target = make(1)
    load(target, gathered(source))
    assert target["m"][0].weight not in target["o"].state
    assert target["m"][0].bias in target["o"].state


def groups_of(module: nn.Sequential, order: list[int]) -> torch.optim.Optimizer:
    weights = {"params": [module[0].weight, module[2].weight], "lr": 0.5, "weight_decay": 0.25}
    rest = {"params": [*module[1].parameters(), module[2].bias, module[0].bias], "lr": 0.125}
    return torch.optim.AdamW([(weights, rest)[index] for index in order])


def test_groups_are_matched_by_their_parameters_whatever_the_order() -> None:
    source, target = net(0), net(1)
    one, other = groups_of(source, [0, 1]), groups_of(target, [1, 0])
    step(source, one)
    for group in other.param_groups:
        group["params"].reverse()
        group["lr"] = 9.0
    load({"m": target, "o": other}, gathered({"m": source, "o": one}))
    assert [group["lr"] for group in other.param_groups] == [0.125, 0.5]
    assert other.param_groups[1]["weight_decay"] == 0.25
    assert len(other.param_groups[0]["params"]) == 4


def test_other_groups_are_a_mismatch_that_names_parameters() -> None:
    source, target = net(0), net(1)
    checkpoint = gathered({"m": source, "o": groups_of(source, [0, 1])})
    (said, *_) = texts({"m": target, "o": adamw(target.parameters())}, checkpoint, strict=False)
    assert "o.param_groups" in said and "group 0" in said and "0.weight" in said


def test_state_of_another_kind_of_optimizer_is_refused() -> None:
    saved = gathered(stepped(OPTIMIZERS["adamw"]))
    for name in ("sgd", "adafactor", "rprop"):
        (said,) = texts(fresh(OPTIMIZERS[name]), saved)
        assert said.startswith("o.param_groups.0: ") and "'betas'" in said and "skip='o'" in said
    assert not texts(fresh(OPTIMIZERS["amsgrad"]), saved)
    assert not texts(fresh(OPTIMIZERS["sgd"]), saved, skip=["o"])


def test_names_that_schedulers_or_users_add_to_groups_are_no_other_optimizer() -> None:
    source = stepped()
    source["o"].param_groups[0].update(initial_lr=0.5, mine="a note")
    saved = gathered(source)
    target = fresh()
    target["o"].param_groups[0]["another"] = 1
    assert not texts(target, saved)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.6 calls its own schedulers so
def test_several_optimizers_and_schedulers_are_restored() -> None:
    def make(seed: int) -> dict[str, Any]:
        module = net(seed)
        first = adamw(module[0].parameters())
        second = torch.optim.SGD([*module[1].parameters(), *module[2].parameters()], 0.1, 0.9)
        schedulers = [
            torch.optim.lr_scheduler.MultiStepLR(first, [2, 4]),
            torch.optim.lr_scheduler.SequentialLR(
                second,
                [
                    torch.optim.lr_scheduler.LinearLR(second),
                    torch.optim.lr_scheduler.CosineAnnealingLR(second, 10),
                ],
                milestones=[2],
            ),
        ]
        return {"m": module, "os": [first, second], "s": schedulers}

    def go_on(state: dict[str, Any]) -> None:
        for optimizer, scheduler in zip(state["os"], state["s"], strict=True):
            step(state["m"], optimizer, 3)
            scheduler.step()

    source, target = make(0), make(1)
    go_on(source)
    load(target, gathered(source))
    assert type(target["s"][0].milestones) is collections.Counter
    for state in (source, target):
        go_on(state)
    assert_same(gathered(target), gathered(source))
    for a, b in zip(source["s"], target["s"], strict=True):
        assert a.get_last_lr() == b.get_last_lr()


def test_a_scheduler_of_a_tensor_learning_rate_is_restored() -> None:
    def make(seed: int) -> dict[str, Any]:
        state = fresh(OPTIMIZERS["tensor_lr"], seed)
        return {**state, "s": torch.optim.lr_scheduler.StepLR(state["o"], 1, gamma=0.5)}

    source, target = make(0), make(1)
    step(source["m"], source["o"])
    source["s"].step()
    lr = target["o"].param_groups[0]["lr"]
    load(target, gathered(source))
    assert target["o"].param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.005)
    assert target["s"].get_last_lr()[0].item() == pytest.approx(0.005)


def test_values_go_into_their_containers() -> None:
    source = {"n": 1, "d": {"x": [1, {"y": 2}]}, "l": [1], "t": (3, {"z": torch.ones(1)}, "s")}
    inner, listed, z = {"old": 0}, [9, 9], torch.zeros(1)
    target: dict[str, Any] = {"n": 0, "d": inner, "l": listed, "t": (0, {"z": z}, "")}
    load(target, gathered(source))
    assert target == source
    assert target["d"] is inner and target["l"] is listed and target["t"][1]["z"] is z


def test_a_state_that_is_a_tuple_of_values_is_refused() -> None:
    checkpoint = gathered((torch.zeros(1), 5))
    (said,) = texts((torch.zeros(1), 4), checkpoint)
    assert said.startswith("1: ") and "dict or list" in said


def test_objects_get_their_state_by_load_state_dict() -> None:
    class Thing:
        def __init__(self, factor: float) -> None:
            self.state = {"mean": torch.full((2,), factor), "deep": [(torch.tensor(factor), 1)]}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    source, target = {"t": Thing(2.0)}, {"t": Thing(0.0)}
    held: Any = target["t"].state["mean"]
    load(target, gathered(source))
    assert torch.equal(held, torch.zeros(2))  # load_state_dict decides what becomes of it
    assert str(target["t"].state) == str(source["t"].state)


def test_tied_names_load_either_way() -> None:
    def tied() -> Any:
        module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        module[1].weight = module[0].weight
        return module

    untied: Any = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    source = tied()
    load({"m": untied}, gathered({"m": source}))
    assert torch.equal(untied[0].weight, source[0].weight)
    assert torch.equal(untied[1].weight, source[0].weight)
    only_second = Checkpoint(
        {"m.1.weight": source[0].weight.detach()},
        Catalog({"m.1.weight": TensorEntry(torch.float32, (3, 3))}),
    )
    target = tied()
    load({"m": target}, only_second)
    assert torch.equal(target[0].weight, source[0].weight)


def test_what_does_not_fit_is_reported_all_together() -> None:
    state = {
        "m": nn.Linear(4, 3),
        "missing": torch.zeros(1),
        "value": 3,
        "tensor": torch.zeros(2),
        "no_value": 1,
    }
    checkpoint = catalog_only(
        {
            "m.weight": TensorEntry(torch.float32, (4, 4)),
            "m.bias": TensorEntry(torch.bfloat16, (3,)),
            "m.extra": TensorEntry(torch.float32, (1,)),
            "value": TensorEntry(torch.float32, ()),
            "other.thing": TensorEntry(torch.float32, ()),
        },
        {"tensor": 5},
    )
    binding = bound(state, checkpoint)
    kinds = {problem.fqn: problem.kind for problem in binding.problems}
    assert kinds == {
        "m.weight": ProblemKind.SHAPE,
        "m.bias": ProblemKind.DTYPE,
        "m.extra": ProblemKind.UNEXPECTED,
        "missing": ProblemKind.MISSING,
        "no_value": ProblemKind.MISSING,
        "value": ProblemKind.VALUE,
        "tensor": ProblemKind.VALUE,
    }
    said = dict(zip(kinds, binding.fatal, strict=True))
    by_name = {text.partition(":")[0]: text for text in said.values()}
    assert "(4, 4)" in by_name["m.weight"] and "(3, 4)" in by_name["m.weight"]
    assert "bfloat16" in by_name["m.bias"] and "float32" in by_name["m.bias"]
    lenient = bound(state, checkpoint, strict=False)
    assert len(lenient.fatal) == 4
    assert lenient.report.missing == ("missing", "no_value")
    assert lenient.report.not_asked == 1  # other.thing: the state has no entry "other"


def test_an_optimizer_that_was_not_saved_is_missing() -> None:
    source = stepped()
    checkpoint = gathered({"m": source["m"]})
    (said,) = texts(stepped(), checkpoint)
    assert said.startswith("o.param_groups: is not in the checkpoint")
    target = stepped(seed=3)
    before = gathered(target)
    report = load(target, checkpoint, strict=False)
    assert report.missing == ("o.param_groups",)
    after = gathered(target)
    for fqn in before.tensors:
        if fqn.startswith("o."):
            assert same_bits(before.tensors[fqn], after.tensors[fqn])


def test_only_a_part_may_be_asked_for() -> None:
    checkpoint = gathered({**stepped(), "epoch": 3})
    target: Any = net(9)
    report = load({"m": target}, checkpoint)
    assert report.not_asked > 10 and not report.unexpected
    assert same_bits(target[0].weight.detach(), checkpoint.tensors["m.0.weight"])


def test_renamed_parameters_bring_their_optimizer_state() -> None:
    source = stepped()
    checkpoint = gathered({"net": source["m"], "o": source["o"]})
    renamed: Any = nn.ModuleDict({"body": net(4)})
    target: dict[str, Any] = {"m": renamed, "o": adamw(renamed.parameters())}
    for rename in ({"m.body": "net"}, lambda fqn: fqn.replace("m.body", "net")):
        load(target, checkpoint, rename=rename)
        for index in (0, 2):
            weight = renamed["body"][index].weight
            saved = checkpoint.tensors[f"o.state.{index}.weight.exp_avg"]
            assert same_bits(target["o"].state[weight]["exp_avg"], saved)


@pytest.mark.parametrize("skip", [["m.0", "o"], lambda fqn: fqn[:3] == "m.0" or fqn[0] == "o"])
def test_skipped_names_are_left_alone(skip: Any) -> None:
    checkpoint = gathered(stepped())
    target = stepped(seed=8)
    before = gathered(target)
    report = load(target, checkpoint, skip=skip)
    after = gathered(target)
    for fqn, tensor in after.tensors.items():
        expected = before if fqn.startswith(("m.0", "o.")) else checkpoint
        assert same_bits(tensor, expected.tensors[fqn]), fqn
    assert set(report.skipped) >= {"m.0.weight", "m.0.bias", "o"}


def test_skipped_state_of_a_parameter_is_kept() -> None:
    """The rest of its state is replaced as a whole, and what is skipped stays in it."""
    saved, live = stepped(), stepped(seed=5, count=1)
    before = {p: dict(s) for p, s in live["o"].state.items()}
    names = [name for name, _ in live["m"].named_parameters()]
    load(live, gathered(saved), skip=[f"o.state.{name}.exp_avg" for name in names])
    for param, theirs in zip(live["m"].parameters(), saved["m"].parameters(), strict=True):
        state = live["o"].state[param]
        assert state["exp_avg"] is before[param]["exp_avg"]
        assert torch.equal(state["exp_avg_sq"], saved["o"].state[theirs]["exp_avg_sq"])


def test_expanded_tensors_cannot_be_filled() -> None:
    checkpoint = gathered({"t": torch.zeros(3, 4)})
    (said,) = texts({"t": torch.zeros(3, 1).expand(3, 4)}, checkpoint)
    assert "t: " in said and "contiguous()" in said


def test_extra_state_is_given_back() -> None:
    class Extra(nn.Module):
        value: Any = None

        def get_extra_state(self) -> Any:
            return self.value

        def set_extra_state(self, state: Any) -> None:
            self.value = state

    source: Any = nn.Sequential(Extra())
    target: Any = nn.Sequential(Extra())
    source[0].value = {"scale": torch.ones(2), "n": (1, 2)}
    load({"m": target}, gathered({"m": source}))
    assert str(target[0].value) == str(source[0].value)


def test_random_states_go_on_where_they_were() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.randn()), torch.rand(()).item()]

    np.random.randn()  # leaves half of a pair of normal numbers for the next call
    state = {"rng": rng_state()}
    checkpoint = gathered(state)
    expected = draw()
    draw()
    load(state, checkpoint)
    assert draw() == expected


def per_rank(values: list[Any]) -> Checkpoint:
    catalog = Catalog({}, {}, {}, [{"p": value} for value in values], [range(len(values))])
    return Checkpoint({}, catalog)


def test_per_rank_values_of_other_world_sizes_need_a_rule() -> None:
    (said,) = texts({"p": PerRank(0)}, per_rank([1, 2]))
    assert said.startswith("p: ") and "2 ranks" in said and "on_reshard" in said
    state = {"p": PerRank(0, on_reshard=lambda values, rank, size: (sum(values), rank, size))}
    load(state, per_rank([1, 2]))
    assert state["p"].value == (3, 0, 1)
    load(state, per_rank([7]))
    assert state["p"].value == 7

    def broken(values: Any, rank: int, size: int) -> Any:
        raise KeyError("no rule")

    (said,) = texts({"p": PerRank(0, broken)}, per_rank([1, 2]))
    assert "KeyError('no rule')" in said


def test_per_rank_and_common_values_are_not_confused() -> None:
    (said,) = texts({"p": 3}, per_rank([1]))
    assert "PerRank" in said
    state = {"p": PerRank(0)}
    load(state, catalog_only({}, {"p": 5}))
    assert state["p"].value == 5


def test_an_unusable_state_is_refused() -> None:
    with pytest.raises(InvalidState, match="put the model into the state"):
        bound({"o": adamw(net(0).parameters())}, gathered(stepped()))


def test_damaged_catalogs_are_problems_not_crashes() -> None:
    checkpoint = gathered(stepped())
    damage: list[Any] = [5, [5], [{"params": 3}], [{}]]
    for groups in damage:
        values = {**checkpoint.catalog.values, "o.param_groups": groups}
        damaged = Checkpoint(checkpoint.tensors, replace(checkpoint.catalog, values=values))
        assert any("o.param_groups" in text for text in texts(fresh(), damaged))


def test_state_of_the_users_own_in_an_optimizer_is_kept() -> None:
    """State under a key that is no parameter, with a tensor in it."""

    def made(seed: int) -> dict[str, Any]:
        module = nn.Linear(2, 2)
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.state["mine"] = {"seen": seed, "mean": torch.full((3,), float(seed))}
        return {"model": module, "optim": optimizer}

    checkpoint = gathered(made(1))
    other = made(2)
    load(other, checkpoint)
    assert other["optim"].state["mine"]["seen"] == 1
    assert torch.equal(other["optim"].state["mine"]["mean"], torch.ones(3))
    del other["optim"].state["mine"]
    load(other, checkpoint)
    assert other["optim"].state["mine"]["seen"] == 1
