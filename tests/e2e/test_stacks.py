"""Stacks of experts and one module per expert load into each other, however either lies on ranks.

Method: the same training state in both forms, whole or cut by boxes and spans over four ranks
(threads over one memory store), saved in every layout of one form, loaded in every layout of the
other by a rule. What is loaded is compared, bit for bit, with the same slices of whole tensors, cut
in this file; so are the moments and steps of AdamW and the options of its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt
from ckpt.errors import CheckpointError, Mismatch
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.region import Box, Region, Span, whole
from ckpt.loading.load import LoadOptions
from storage import Store, open_store
from tests.e2e.job import Job
from tests.thread_ranks import RanksFailed

RANKS = 4
EXPERTS = 4
LAYERS = 2
SHAPES = {"weight": (3, 5), "bias": (3,), "scale": (1,)}  # of one expert
STACKS = {"experts": "experts.{}"}  # the state has stacks, the checkpoint slices
SLICES = {"experts.{}": "experts"}

Regions = Callable[[tuple[int, ...], int], Region | None]
"""What a rank has of a tensor of that shape: None for nothing."""


class Layout(NamedTuple):
    """`is_stacked`, and for tensors of experts the region of a rank; others are whole everywhere.
    `experts_of` are the experts of which a rank has anything, where they are slices.
    """

    is_stacked: bool
    region_of: Regions
    experts_of: Callable[[int], range] = lambda rank: range(EXPERTS)


def everything(shape: tuple[int, ...], rank: int) -> Region:
    return whole(shape)


def rows(shape: tuple[int, ...], rank: int) -> Region:
    """A box along the first dim, the last ranks with less or nothing."""
    return along(0, shape, rank)


def columns(shape: tuple[int, ...], rank: int) -> Region:
    """A box along the last dim."""
    return along(len(shape) - 1, shape, rank)


def along(dim: int, shape: tuple[int, ...], rank: int) -> Region:
    size = -(-shape[dim] // RANKS)
    start = min(rank * size, shape[dim])
    stop = min(start + size, shape[dim])
    offset = tuple(start if d == dim else 0 for d in range(len(shape)))
    return Box(offset, tuple(stop - start if d == dim else n for d, n in enumerate(shape)))


def runs(shape: tuple[int, ...], rank: int) -> Region:
    """A run of elements, which ends in the middle of an expert."""
    numel = torch.Size(shape).numel()
    return Span(numel * rank // RANKS, numel * (rank + 1) // RANKS)


LAYOUTS = {
    "stacked, whole": Layout(True, everything),
    "stacked, experts over ranks": Layout(True, rows),
    "stacked, columns over ranks": Layout(True, columns),
    "stacked, runs over ranks": Layout(True, runs),
    "slices, whole": Layout(False, everything),
    "slices, each on one rank": Layout(False, everything, lambda rank: range(rank, rank + 1)),
    "slices, rows over ranks": Layout(False, rows),
    "slices, runs over ranks": Layout(False, runs),
}


class Moe(nn.Module):
    """A rank's share of a model, under the names of the whole; what no region cuts is plain."""

    def __init__(self, layout: str, rank: int, full: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        how = LAYOUTS[layout]
        self.plain = nn.ParameterDict()
        self.cut = nn.ParameterDict()
        self.pieces: dict[str, tuple[Piece, Region]] = {}
        for fqn, tensor in full.items():
            shape = tuple(tensor.shape)
            if "experts" not in fqn:
                self.plain[fqn.replace(".", "/")] = nn.Parameter(tensor.clone())
                continue
            if not how.is_stacked and int(fqn.split(".")[3]) not in how.experts_of(rank):
                continue
            region = how.region_of(shape, rank)
            assert region is not None
            self.cut[fqn.replace(".", "/")] = nn.Parameter(taken(tensor, region))
            if how.region_of is everything:
                holders = tuple(r for r in range(RANKS) if how.is_stacked or _has(how, fqn, r))
            else:
                holders = (rank,)
            local = tuple(self.cut[fqn.replace(".", "/")].shape)
            piece = Piece(fqn, shape, tensor.dtype, region, whole(local), holders)
            self.pieces[fqn] = (piece, region)

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        for fqn, (piece, _) in self.pieces.items():
            parameter = self.cut[fqn.replace(".", "/")]
            yield Owned(parameter, parameter.detach(), (View((piece,)),), True)
        for name, parameter in self.plain.items():
            box = whole(tuple(parameter.shape))
            piece = Piece(
                name.replace("/", "."),
                box.shape,
                parameter.dtype,
                box,
                box,
                tuple(range(RANKS)),
            )
            yield Owned(parameter, parameter.detach(), (View((piece,)),), True)


def _has(how: Layout, fqn: str, rank: int) -> bool:
    return int(fqn.split(".")[3]) in how.experts_of(rank)


def taken(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    if isinstance(region, Span):
        return tensor.reshape(-1)[region.start : region.stop].clone()
    for dim, (start, size) in enumerate(zip(region.offset, region.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor.clone()


def full_tensors(seed: int, *, is_stacked: bool) -> dict[str, torch.Tensor]:
    """The whole model, in one form; the same numbers in both."""
    generator = torch.Generator().manual_seed(seed)
    full: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        full[f"layers.{layer}.router"] = torch.randn(7, generator=generator)
        for name, shape in SHAPES.items():
            stack = torch.randn((EXPERTS, *shape), generator=generator)
            if is_stacked:
                full[f"layers.{layer}.experts.{name}"] = stack
                continue
            for number, slice in enumerate(stack):
                full[f"layers.{layer}.experts.{number}.{name}"] = slice
    return full


def state_of(layout: str, rank: int, seed: int) -> dict[str, Any]:
    """What a rank holds after one step of AdamW, which works element by element, in two groups."""
    is_stacked = LAYOUTS[layout].is_stacked
    gradients = full_tensors(seed + 1000, is_stacked=is_stacked)
    model = Moe(layout, rank, full_tensors(seed, is_stacked=is_stacked))
    groups = [
        {"params": list(model.cut.values()), "lr": 0.01 * (seed + 1)},
        {"params": list(model.plain.values()), "weight_decay": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    for fqn, (_, region) in model.pieces.items():
        model.cut[fqn.replace(".", "/")].grad = taken(gradients[fqn], region)
    for name, parameter in model.plain.items():
        parameter.grad = gradients[name.replace("/", ".")].clone()
    optimizer.step()
    return {"model": model, "optim": optimizer, "step": seed}


def expect(state: dict[str, Any], good: dict[str, Any]) -> None:
    loaded, wanted = state["optim"], good["optim"]
    assert state["step"] == good["step"]
    for group, its in zip(loaded.param_groups, wanted.param_groups, strict=True):
        assert (group["lr"], group["weight_decay"]) == (its["lr"], its["weight_decay"])
        for parameter, expected in zip(group["params"], its["params"], strict=True):
            assert torch.equal(parameter, expected)
            if parameter.numel():  # a rank that holds nothing needs no state
                for key, value in wanted.state[expected].items():
                    assert torch.equal(loaded.state[parameter][key], value), key


@cache
def saved(layout: str) -> Store:
    store = open_store(f"memory://stacks-{layout.replace(' ', '-')}")
    states = [state_of(layout, rank, seed=3) for rank in range(RANKS)]
    Job(RANKS, lambda rank: store).save(states.__getitem__, step=3)
    return store


PAIRS = [
    (source, target)
    for source in LAYOUTS
    for target in LAYOUTS
    if LAYOUTS[source].is_stacked != LAYOUTS[target].is_stacked
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_stacks_and_slices_load_into_each_other(source: str, target: str) -> None:
    states = [state_of(target, rank, seed=5) for rank in range(RANKS)]
    store = saved(source)
    rule = STACKS if LAYOUTS[target].is_stacked else SLICES
    options = LoadOptions(stacks=rule)
    Job(RANKS, lambda rank: store).load(states.__getitem__, options=options)
    for rank, state in enumerate(states):
        expect(state, state_of(target, rank, seed=3))


def refused(state: Any, stacks: Mapping[str, str], error: type[Exception] = Mismatch) -> str:
    """Why a process by itself cannot load what was saved as slices on many ranks."""
    store = saved("slices, rows over ranks")
    with pytest.raises(RanksFailed) as failed:
        Job(1, lambda rank: store).load(lambda rank: state, options=LoadOptions(stacks=stacks))
    (raised,) = failed.value.errors.values()
    assert isinstance(raised, error)
    return str(raised)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"experts": "expert"}, "expected {} once"),
        ({"experts.{}": "expert.{}"}, "expected {} once"),
        ({"experts": "experts.{}.{}"}, "expected {} once"),
        ({"": "experts.{}"}, "something between their dots"),
        ({"experts.": "experts.{}"}, "something between their dots"),
        ({"a": "experts.{}", "b": "experts.{}"}, "another one for the same name"),
    ],
)
def test_what_is_no_rule_is_refused(rule: dict[str, str], text: str) -> None:
    message = refused({"step": 0}, rule, CheckpointError)
    assert text in message and repr(next(iter(rule))) in message


def test_a_rule_that_holds_nowhere_is_refused_and_one_that_needs_not_is_not() -> None:
    text = refused({"step": 0}, {"expert": "expert.{}"})
    assert "stacks=: expert.{}: the checkpoint has it not, and no expert" in text
    states = [state_of("slices, whole", rank, seed=5) for rank in range(RANKS)]
    store = saved("stacked, whole")
    job = Job(RANKS, lambda rank: store)
    job.load(states.__getitem__, options=LoadOptions(stacks=SLICES))
    again = [state_of("stacked, whole", rank, seed=5) for rank in range(RANKS)]
    # The state has what the checkpoint has: a script may always pass its rule.
    job.load(again.__getitem__, options=LoadOptions(stacks=STACKS))
    expect(again[0], state_of("stacked, whole", 0, seed=3))


def changed_and_loaded(change: Callable[[dict[str, Any]], None]) -> str:
    """Why slices of one process, changed before they are saved, cannot be loaded as a stack."""
    store = open_store("memory://changed-stacks")
    model: Any = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(3, 2) for _ in range(3))})
    optimizer = torch.optim.AdamW(model.parameters())
    model["experts"][0].weight.sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state: dict[str, Any] = {"model": model, "optim": optimizer}
    change(state)
    Job(1, lambda rank: store).save(lambda rank: state, step=1)
    stacked: Any = nn.Module()
    stacked.experts = nn.Module()
    stacked.experts.weight = nn.Parameter(torch.zeros(3, 2, 3))
    stacked.experts.bias = nn.Parameter(torch.zeros(3, 2))
    into = {"model": stacked, "optim": torch.optim.AdamW(stacked.parameters())}
    with pytest.raises(RanksFailed) as failed:
        options = LoadOptions(stacks=STACKS)
        Job(1, lambda rank: store).load(lambda rank: into, options=options)
    return str(failed.value)


def test_slices_that_are_no_stack_are_refused_by_name() -> None:
    def without_one(state: dict[str, Any]) -> None:
        experts = dict(state["model"]["experts"].named_children())
        del experts["1"]
        state["model"] = nn.ModuleDict({"experts": nn.ModuleDict(experts)})
        state["optim"] = torch.optim.AdamW(state["model"].parameters())

    text = changed_and_loaded(without_one)
    assert "model.experts.weight: the checkpoint has 2 of its 3 slices and lacks" in text
    assert "lacks model.experts.1.weight" in text

    def another_shape(state: dict[str, Any]) -> None:
        state["model"]["experts"][2] = nn.Linear(4, 2)
        state["optim"] = torch.optim.AdamW(state["model"].parameters())

    text = changed_and_loaded(another_shape)
    assert "model.experts.weight: its slices differ: model.experts.0.weight is" in text
    assert "model.experts.2.weight is torch.float32[2, 4]" in text

    def in_two_groups(state: dict[str, Any]) -> None:
        first, *others = state["model"].parameters()
        groups = [{"params": [first]}, {"params": others, "lr": 0.5}]
        state["optim"] = torch.optim.AdamW(groups)

    text = changed_and_loaded(in_two_groups)
    assert "the slices of experts.weight are in groups [0, 1]" in text

    def beside_a_stack(state: dict[str, Any]) -> None:
        state["more"] = {"model.experts.weight": torch.zeros(1)}
        model: Any = nn.Module()
        model.experts = state["model"]["experts"]
        model.experts.weight = nn.Parameter(torch.zeros(3, 2, 3))
        state["model"] = model
        state["optim"] = torch.optim.AdamW(model.parameters())

    assert "model.experts.weight: the checkpoint has it, and model.experts.0.weight" in (
        changed_and_loaded(beside_a_stack)
    )


def test_optimizer_state_that_does_not_follow_is_refused_by_name() -> None:
    def other_steps(state: dict[str, Any]) -> None:
        parameter = state["model"]["experts"][1].weight
        state["optim"].state[parameter]["step"] += 1

    text = changed_and_loaded(other_steps)
    assert "optim.state.experts.weight.step: its slices have different ones" in text
    assert "experts.0.weight.step 1.0 and " in text and "experts.1.weight.step 2.0" in text

    def one_untrained(state: dict[str, Any]) -> None:
        state["optim"].state.pop(state["model"]["experts"][1].bias)

    text = changed_and_loaded(one_untrained)
    assert "experts.bias.exp_avg: the checkpoint has 2 of its 3 slices" in text

    def another_shape(state: dict[str, Any]) -> None:
        parameter = state["model"]["experts"][0].weight
        state["optim"].state[parameter]["exp_avg"] = torch.zeros(7)

    text = changed_and_loaded(another_shape)
    assert "experts.0.weight.exp_avg: has shape [7], another one than its parameter" in text


def test_experts_without_a_place_are_refused_by_the_names_that_the_state_would_have() -> None:
    def state_of_rank(rank: int) -> dict[str, Any]:
        state = state_of("slices, each on one rank", min(rank, 2), seed=5)
        return {"model": state["model"], "step": 0}

    store = saved("stacked, experts over ranks")
    options = LoadOptions(stacks=SLICES)
    with pytest.raises(RanksFailed) as failed:
        Job(RANKS, lambda rank: store).load(state_of_rank, options=options)
    text = str(failed.value.errors[0])
    assert "layers.0.experts.3.weight: is in the checkpoint and has no place" in text
    assert "experts.2" not in text


def model_of(form: str) -> dict[str, torch.Tensor]:
    return full_tensors(7, is_stacked=form == "stacked")


@pytest.mark.parametrize("form", ["stacked", "slices"])
def test_exports_and_imports_change_the_form(form: str, tmp_path: Path) -> None:
    """By one tensor a slice and back: of a model's file, and of a state with its optimizer."""
    other = "slices" if form == "stacked" else "stacked"
    forth = STACKS if form == "stacked" else SLICES  # from old names to new ones
    expected = model_of(other)
    torch.save(model_of(form), tmp_path / "model.pt")
    root = str(tmp_path / "imported")
    ckpt.import_checkpoint(str(tmp_path / "model.pt"), root, stacks=forth, verify=True)
    with ckpt.open(root) as made:
        assert set(made.keys()) == set(expected)
        assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    for target in ("again.safetensors", "again.pt"):
        file = tmp_path / target
        selection = dict(entry="", stacks={new: old for old, new in forth.items()})
        ckpt.export(root, str(file), **selection, verify=True)
        load = load_file if target.endswith("safetensors") else torch.load
        weights = load(str(file))
        assert weights.keys() == model_of(form).keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in model_of(form).items())
    with pytest.raises(CheckpointError, match="expert: the checkpoint has it not"):
        ckpt.export(
            root,
            str(tmp_path / "no.pt"),
            entry="",
            stacks={"expert": "expert.{}"},
        )


@pytest.mark.parametrize("form", ["stacked", "slices"])
def test_an_export_of_the_whole_state_changes_the_optimizer_too(form: str, tmp_path: Path) -> None:
    other = "slices" if form == "stacked" else "stacked"
    root, file = str(tmp_path / "root"), tmp_path / "state.pt"
    model, optimizer = trained(form, 1)
    ckpt.save({"model": model, "optim": optimizer}, root, step=1)
    forth = STACKS if form == "stacked" else SLICES
    selection = dict(optimizer=True, stacks=forth)
    ckpt.export(root, str(file), **selection)
    ckpt.import_checkpoint(str(file), str(tmp_path / "imported"))
    loaded, its_optimizer = trained(other, 2)
    ckpt.load({"model": loaded, "optim": its_optimizer}, str(tmp_path / "imported"))
    good, good_optimizer = trained(other, 1)
    for one, expected in zip(loaded.parameters(), good.parameters(), strict=True):
        assert torch.equal(one, expected)
        for key, value in good_optimizer.state[expected].items():
            assert torch.equal(its_optimizer.state[one][key], value)


def trained(form: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain model of that form, after one step."""
    model = nn.Module()
    for name, tensor in full_tensors(seed, is_stacked=form == "stacked").items():
        *path, leaf = name.split(".")
        inner = model
        for slice in path:
            if not hasattr(inner, slice):
                inner.add_module(slice, nn.Module())
            inner = getattr(inner, slice)
        inner.register_parameter(leaf, nn.Parameter(tensor.clone()))
    optimizer = torch.optim.AdamW(model.parameters())
    gradients = full_tensors(seed + 9, is_stacked=form == "stacked")
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("form", ["stacked", "slices"])
def test_restores_plans_and_comparisons_take_the_rule_of_a_load(form: str, tmp_path: Path) -> None:
    other = "slices" if form == "stacked" else "stacked"
    root, again = str(tmp_path / "root"), str(tmp_path / "again")
    model, optimizer = trained(form, 1)
    ckpt.save({"model": model, "optim": optimizer}, root, step=1)
    to_state = STACKS if other == "stacked" else SLICES  # from names of the state
    forth = {old: new for new, old in to_state.items()}  # from names of the checkpoint
    restored, its_optimizer = trained(other, 2)
    state = {"model": restored, "optim": its_optimizer}

    assert not ckpt.plan_load(state, root).fits
    plan = ckpt.plan_load(state, root, stacks=to_state)
    assert plan.fits and plan.nbytes_read > 0, plan.problems
    nowhere = ckpt.plan_load(state, root, stacks={"no.{}": "no"})
    assert any(
        text.startswith("stacks=: no: the checkpoint has it not") for text in nowhere.problems
    )

    for _ in range(2):  # of the other form, and then of what this one saved
        with ckpt.Checkpointer(state, root, save=ckpt.EverySteps(1)) as checkpointer:
            report = checkpointer.restore(stacks=to_state)
            assert report is not None
            checkpointer.step(report.step + 1)
    good, good_optimizer = trained(other, 1)
    for one, expected in zip(restored.parameters(), good.parameters(), strict=True):
        assert torch.equal(one, expected)
        for key, value in good_optimizer.state[expected].items():
            assert torch.equal(its_optimizer.state[one][key], value)

    rules = {"stacks": forth}
    same = ckpt.diff(root, root, step_a=1, step_b=2, **rules)
    assert not same.changed and not same.only_a and not same.only_b
    # Their params in another order.
    assert {value.fqn.partition("[")[0] for value in same.values} <= {"optim.param_groups"}
    with torch.no_grad():
        list(restored.parameters())[-1].view(-1)[-1] += 1
    ckpt.save(state, again, step=1)
    (changed,) = ckpt.diff(root, again, step_a=1, **rules).changed
    assert changed.amount is not None and changed.amount.changed == 1
    assert changed.fqn == f"model.{list(restored.state_dict())[-1]}"
    assert ckpt.diff(root, again, step_a=1).only_a
