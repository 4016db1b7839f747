"""Param groups and names of a load that do not correspond: refused with both lists, or decided by
the caller, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import Mismatch
from tests.ranks import run_ranks

State = dict[str, Any]
Groups = list[dict[str, Any]]


class Net(nn.Module):
    def __init__(self, *layers: str) -> None:
        super().__init__()
        for name in layers:
            setattr(self, name, nn.Linear(3, 3))


def one(model: nn.Module) -> Groups:
    return [{"params": list(model.parameters()), "lr": 0.1}]


def decayed(model: nn.Module) -> Groups:
    weights, biases = (
        [p for p in model.parameters() if (p.ndim > 1) == is_weight] for is_weight in (True, False)
    )
    return [
        {"params": weights, "weight_decay": 0.1, "lr": 0.2},
        {"params": biases, "weight_decay": 0.0, "lr": 0.3},
    ]


def training(groups: Callable[[nn.Module], Groups], *layers: str, steps: int = 0) -> State:
    torch.manual_seed(steps)
    model = Net(*(layers or ("a",)))
    optimizer = torch.optim.AdamW(groups(model))
    for _ in range(steps):
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            param.grad = torch.randn(param.shape)
        optimizer.step()
    return {"m": model, "o": optimizer}


def options(state: State, *names: str) -> list[list[Any]]:
    return [[group[name] for name in names] for group in state["o"].param_groups]


def saved(root: Path, state: State) -> str:
    ckpt.save(state, str(root), step=1)
    return str(root)


def test_other_groups_are_refused_with_both_lists(tmp_path: Path) -> None:
    """Decay 0.1 and 0.0 became 0.01 and 0.01, and the rates were overwritten."""
    root = saved(tmp_path, training(one, steps=1))
    target = training(decayed)
    with pytest.raises(Mismatch) as raised:
        ckpt.load(target, root)
    (problem,) = raised.value.problems
    for part in (
        "o.param_groups: the groups do not correspond",
        "the checkpoint has group 0 (a.weight, a.bias, lr=0.1, weight_decay=0.01)",
        "the state has group 0 (a.weight, lr=0.2, weight_decay=0.1), group 1 (a.bias, lr=0.3",
        "group_options={'lr': 'saved' or 'live', 'weight_decay': 'saved' or 'live'}",
    ):
        assert part in problem, problem
    assert options(target, "lr", "weight_decay") == [[0.2, 0.1], [0.3, 0.0]]
    assert not target["o"].state


def test_joined_groups_that_differ_are_refused(tmp_path: Path) -> None:
    root = saved(tmp_path, training(decayed, steps=1))
    with pytest.raises(Mismatch, match=r"weight_decay': 'live'"):
        ckpt.load(training(one), root, group_options={"lr": "live"})
    with pytest.raises(Mismatch, match="groups do not correspond"):
        ckpt.load(training(one), root, group_options="saved")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"lr": "saved", "weight_decay": "live"}, [[0.1, 0.1], [0.1, 0.0]]),
        ({"lr": "live", "weight_decay": "saved"}, [[0.2, 0.01], [0.3, 0.01]]),
        ("live", [[0.2, 0.1], [0.3, 0.0]]),
        ("saved", [[0.1, 0.01], [0.1, 0.01]]),
    ],
)
def test_a_policy_says_whose_option_holds(policy: Any, expected: Any, tmp_path: Path) -> None:
    source = training(one, steps=2)
    root = saved(tmp_path, source)
    target = training(decayed)
    ckpt.load(target, root, group_options=policy)
    assert options(target, "lr", "weight_decay") == expected
    mine, theirs = (s["o"].state[s["m"].a.weight]["exp_avg"] for s in (source, target))
    assert torch.equal(mine, theirs)


def test_a_policy_holds_for_equal_groups_too(tmp_path: Path) -> None:
    root = saved(tmp_path, training(decayed, steps=1))
    target = training(decayed)
    for group in target["o"].param_groups:
        group["lr"] = 7.0
    ckpt.load(target, root, group_options={"lr": "live"})
    assert options(target, "lr", "weight_decay") == [[7.0, 0.1], [7.0, 0.0]]


def test_new_parameters_take_no_options_of_lost_ones(tmp_path: Path) -> None:
    """A group of which no parameter was saved took the options of one of which none was left."""

    def by_layer(model: nn.Module) -> Groups:
        return [
            {"params": layer.parameters(), "lr": float(number)}
            for number, layer in enumerate(model.children(), 1)
        ]

    root = saved(tmp_path, training(by_layer, "a", "gone", steps=1))
    target = training(by_layer, "a", "b")
    target["o"].param_groups[1]["lr"] = 7.0
    ckpt.load(target, root, strict=False)
    assert options(target, "lr") == [[1.0], [7.0]]


def test_skip_covers_groups(tmp_path: Path) -> None:
    source = training(decayed, steps=1)
    root = saved(tmp_path, source)
    target = training(one)
    report = ckpt.load(target, root, skip=["o.param_groups"])
    assert options(target, "lr", "weight_decay") == [[0.1, 0.01]]
    assert "o.param_groups" in report.loaded.skipped
    mine, theirs = (s["o"].state[s["m"].a.weight]["exp_avg"] for s in (source, target))
    assert torch.equal(mine, theirs)


Options = dict[str, Any]
NEW_LAYER: dict[str, Options] = {
    "new": {"new": ["m.b"]},
    "skip": {"skip": ["m.b"]},
    "skip_state": {"skip": ["m.b", "o.state.b"]},
    "strict": {"strict": False},
}


@pytest.mark.parametrize("how", NEW_LAYER)
def test_a_new_layer_loads_by_name(how: str, tmp_path: Path) -> None:
    """Only `strict=False` did, which tolerates every other name too."""
    source = training(one, "a", steps=2)
    root = saved(tmp_path, source)
    target = training(one, "a", "b")
    before = target["m"].b.weight.clone()
    report = ckpt.load(target, root, **NEW_LAYER[how])
    assert torch.equal(target["m"].a.weight, source["m"].a.weight)
    assert torch.equal(target["m"].b.weight, before)
    assert set(target["o"].state) == set(target["m"].a.parameters())
    assert ("m.b.weight" in report.loaded.new) == (how == "new")


def test_an_unfrozen_layer_loads_with_new(tmp_path: Path) -> None:
    def first(model: nn.Module) -> Groups:
        return [{"params": model.get_submodule("a").parameters()}]

    source = training(first, "a", "b", steps=2)
    root = saved(tmp_path, source)
    target = training(one, "a", "b")
    with pytest.raises(Mismatch, match=r"o\.state\.b\.weight: .* has no parameter m\.b\.weight"):
        ckpt.load(target, root)
    report = ckpt.load(target, root, new=["o.state.b"])
    assert torch.equal(target["m"].b.weight, source["m"].b.weight)
    assert report.loaded.missing == () and "o.state.b.bias" in report.loaded.new


def test_a_layer_that_is_gone_loads_with_skip(tmp_path: Path) -> None:
    root = saved(tmp_path, training(one, "a", "b", steps=2))
    for skip in (["m.b"], ["m.b", "o.state.b"]):
        assert ckpt.load(training(one, "a"), root, skip=skip).loaded.unexpected == ()
    with pytest.raises(Mismatch, match="2 parameters more"):
        ckpt.load(training(one, "a"), root)


def test_what_is_new_must_be_missing(tmp_path: Path) -> None:
    root = saved(tmp_path, training(one, "a", "b", steps=1))
    for name in ("m.b", "o.state.b", "o"):
        with pytest.raises(Mismatch, match=rf"{name}.*new= says that it is not"):
            ckpt.load(training(one, "a", "b"), root, new=[name])


WRONG: dict[str, Options] = {
    "skip='m.c'": {"skip": ["m.c", "m.b"]},
    "skip='m.a.weigh'": {"skip": ["m.a.weigh"]},
    "new='m.c'": {"new": "m.c"},
    "rename='m.c'": {"rename": {"m.c": "m.a"}},
    "group_options='lrr'": {"group_options": {"lrr": "live"}},
}


@pytest.mark.parametrize("rule", WRONG)
def test_a_rule_that_matches_nothing_is_an_error(rule: str, tmp_path: Path) -> None:
    root = saved(tmp_path, training(one, "a", "b", steps=1))
    target = training(one, "a", "b")
    before = target["m"].a.weight.clone()
    with pytest.raises(Mismatch, match=f"{rule}: matches no"):
        ckpt.load(target, root, strict=False, **WRONG[rule])
    assert torch.equal(target["m"].a.weight, before)
    assert any("matches no" in text for text in plan_problems(target, root, WRONG[rule]))


def plan_problems(state: State, root: str, how: Options) -> Iterable[str]:
    return ckpt.plan_load(state, root, **how).problems


def test_nested_rules_all_count_as_matched(tmp_path: Path) -> None:
    root = saved(tmp_path, training(one, "a", "b", steps=1))
    ckpt.load(training(one, "a", "b"), root, skip=["m", "m.a", "m.a.weight", "m.b"])
    with pytest.raises(ValueError, match="group_options='kept'"):
        ckpt.load(training(one, "a", "b"), root, group_options={"lr": "kept"})  # type: ignore[dict-item]


def _ranks_of_stages(root: str) -> None:
    rank = torch.distributed.get_rank()
    stages = [training(one, name, steps=1) for name in ("a", "b")]
    state = stages[rank]
    ckpt.save(state, root, step=1)
    ckpt.load(state, root, skip=["m.a.bias"])  # matches on one rank
    ckpt.load(state, root, skip=["m.b.bias"], group_options={"lr": "live"})
    with pytest.raises(Mismatch, match=r"skip=.m\.c.: matches no"):
        ckpt.load(state, root, skip=["m.c", "m.a.bias"])


@pytest.mark.ranks
def test_a_rule_has_to_match_on_one_rank(tmp_path: Path) -> None:
    run_ranks(2, _ranks_of_stages, str(tmp_path))
