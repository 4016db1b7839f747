"""State dicts of models that share a world: every rank gets its own model's, whoever else calls.

Four gloo ranks run all cases in one go and return what they found wrong. Models are of equal shapes
and other values, so that a byte from the other model shows. Values are compared with one without
any engine that starts alike and trains on the same batch.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import ckpt
import sharding
from ckpt.errors import InvalidState
from ckpt.state_dict import api as state_dicts
from ckpt.state_dict.config import FullOptimStateDictConfig, FullStateDictConfig
from ckpt.state_dict.config import StateDictType as Form
from tests.ranks import run_ranks

FORMS = (Form.FULL, Form.SHARDED, Form.LOCAL)
SAVED = ("flat", "fully_shard", "torch orig", "ddp")
PAIRS = ([0, 2], [1, 3])


class Trained(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer


def bare(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), inner, nn.Linear(7, 1, bias=False))


def trained(model: nn.Module, seed: int) -> Trained:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.manual_seed(100 + seed)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
    return Trained(model, optimizer)


@cache
def unsharded(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's and the optimizer's dicts of a model that no engine shares."""
    model, optimizer = trained(bare(seed), seed)
    names = [name for name, _ in model.named_parameters()]
    states = optimizer.state_dict()["state"]
    return dict(model.state_dict()), {names[index]: state for index, state in states.items()}


def flat(engine: Any, orig: bool) -> Callable[[int, list[int], Any], nn.Module]:
    def wrap(seed: int, _: list[int], group: Any) -> nn.Module:
        model = bare(seed)
        options = {"use_orig_params": orig, "device_id": torch.device("cpu")}
        model.add_module("2", engine(model[2], process_group=group, **options))
        outer: nn.Module = engine(model, process_group=group, **options)
        return outer

    return wrap


def fully(shard: Any) -> Callable[[int, list[int], Any], nn.Module]:
    def wrap(seed: int, _: list[int], group: Any) -> nn.Module:
        model, mesh = bare(seed), DeviceMesh.from_group(group, "cpu")
        shard(model[2], mesh=mesh)
        shard(model, mesh=mesh)
        return model

    return wrap


def ddp(seed: int, _: list[int], group: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(bare(seed), process_group=group)


ENGINES: dict[str, Callable[[int, list[int], Any], nn.Module]] = {
    "flat": flat(sharding.FullyShardedDataParallel, False),
    "orig": flat(sharding.FullyShardedDataParallel, True),
    "fully_shard": fully(sharding.fully_shard),
    "torch flat": flat(TorchFSDP, False),
    "torch orig": flat(TorchFSDP, True),
    "torch fully_shard": fully(torch_fully_shard),
    "ddp": ddp,
}


class Groups:
    """Process groups by ranks, all made by all ranks at once."""

    def __init__(self) -> None:
        several = (*PAIRS, [0, 1], [1, 2], *([rank] for rank in range(4)))
        self.known = {tuple(ranks): dist.new_group(ranks) for ranks in several}

    def of(self, ranks: list[int]) -> Any:
        return self.known[tuple(ranks)]


def build(engine: str, groups: Groups, seed: int, ranks: list[int]) -> Trained:
    return trained(ENGINES[engine](seed, ranks, groups.of(ranks)), seed)


def whole(value: Any) -> torch.Tensor | None:
    """A tensor of a dict, if this rank has all of it."""
    return value if type(value) in (torch.Tensor, nn.Parameter) else None


def differences(got: Any, expected: Any, where: str) -> list[str]:
    if set(got) != set(expected):
        return [f"{where}: has {sorted(got)}, expected {sorted(expected)}"]
    problems = []
    for name, value in got.items():
        if isinstance(value, dict):
            problems += differences(value, expected[name], f"{where} {name}")
        elif (tensor := whole(value)) is not None and not torch.allclose(
            tensor, expected[name], rtol=1e-3, atol=1e-4
        ):
            problems.append(f"{where} {name}: {tensor.flatten()[:3]}, {expected[name][:3]}")
    return problems


def check_model(one: Trained, seed: int, group: Any, where: str) -> list[str]:
    """All that is taken of a model, and taken again from a model that it was loaded into."""
    expected, states = unsharded(seed)
    problems = []
    for form in FORMS:
        if form is Form.LOCAL and "fully_shard" in where:
            continue  # DTensors have no such form
        taken = state_dicts.model_state_dict(one.model, form, process_group=group)
        state = state_dicts.optimizer_state_dict(
            one.model, one.optimizer, form, process_group=group
        )
        problems += differences(taken, expected, f"{where} {form.name}")
        problems += differences(state["state"], states, f"{where} {form.name} optimizer")
        with torch.no_grad():
            for tensor in (*one.model.parameters(), *one.model.buffers()):
                tensor.mul_(0)
            for kept in one.optimizer.state.values():
                for tensor in kept.values():
                    tensor.mul_(0)
        if form is Form.LOCAL:  # was live memory itself: loaded from the whole one
            taken = expected
            state = {"state": states, "param_groups": state["param_groups"]}
        state_dicts.load_model_state_dict(one.model, taken, process_group=group)
        state_dicts.load_optimizer_state_dict(one.model, one.optimizer, state, process_group=group)
        again = state_dicts.model_state_dict(one.model, process_group=group)
        problems += differences(again, expected, f"{where} {form.name} loaded")
        more = state_dicts.optimizer_state_dict(one.model, one.optimizer, process_group=group)
        problems += differences(more["state"], states, f"{where} {form.name} loaded optimizer")
    return problems


def check_coordinator(one: Trained, seed: int, is_first: bool, where: str) -> list[str]:
    """The first rank of the model's own has the dict, and gives it back to the others."""
    expected, states = unsharded(seed)
    taken = state_dicts.model_state_dict(one.model, config=FullStateDictConfig(rank0_only=True))
    state = state_dicts.optimizer_state_dict(
        one.model, one.optimizer, config=FullOptimStateDictConfig(rank0_only=True)
    )
    if bool(taken) is not is_first or bool(state) is not is_first:
        return [f"{where}: has {list(taken)} and {list(state)}, is first: {is_first}"]
    with torch.no_grad():
        for tensor in (*one.model.parameters(), *one.model.buffers()):
            tensor.mul_(0)
    one.optimizer.state.clear()
    state_dicts.load_model_state_dict(one.model, taken, rank0_only=True)
    loaded = state_dicts.optimizer_state_dict_to_load(
        one.model, one.optimizer, state, rank0_only=True
    )
    one.optimizer.load_state_dict(loaded)
    again = state_dicts.model_state_dict(one.model)
    more = state_dicts.optimizer_state_dict(one.model, one.optimizer)
    return [
        *differences(again, expected, f"{where} lead"),
        *differences(more["state"], states, f"{where} lead optimizer"),
    ]


# --- cases ---------------------------------------------------------------------------------------


def two_models(groups: Groups, engine: str) -> list[str]:
    """One on [0, 2], one on [1, 3]; all four ranks call, among their own and among all."""
    me = dist.get_rank()
    seed = me % 2
    one = build(engine, groups, seed, PAIRS[seed])
    return [
        *check_model(one, seed, None, engine),
        *check_model(one, seed, dist.group.WORLD, f"{engine}, world"),
        *check_coordinator(one, seed, me < 2, engine),
    ]


def some_ranks_only(groups: Groups, engine: str) -> list[str]:
    """Ranks 0 and 1 have a model and call; the others do not."""
    if dist.get_rank() > 1:
        return []
    one = build(engine, groups, 5, [0, 1])
    return [
        *check_model(one, 5, None, engine),
        *check_coordinator(one, 5, not dist.get_rank(), engine),
    ]


def overlapping(groups: Groups, engine: str) -> list[str]:
    """One model on [0, 1], one on [1, 2]: rank 1 has parts of both."""
    me = dist.get_rank()
    mine = [(seed, ranks) for seed, ranks in ((6, [0, 1]), (7, [1, 2])) if me in ranks]
    built = [(seed, build(engine, groups, seed, ranks)) for seed, ranks in mine]
    return [text for seed, one in built for text in check_model(one, seed, None, engine)]


def one_each(groups: Groups, engine: str) -> list[str]:
    """Every rank has a model of its own, in a group of its own."""
    me = dist.get_rank()
    one = build(engine, groups, 10 + me, [me])
    return [
        *check_model(one, 10 + me, None, engine),
        *check_coordinator(one, 10 + me, True, engine),
    ]


def unshared(groups: Groups) -> list[str]:
    """Every rank has a bare model of its own; ranks 1 and 3 take it, and rank 3 has no state."""
    me = dist.get_rank()
    if me % 2 == 0:
        return []
    model, optimizer = trained(bare(me), me)
    expected, states = unsharded(me)
    if me == 3:
        optimizer.state.clear()
        states = {}
    problems = differences(state_dicts.model_state_dict(model), expected, "bare")
    pair = groups.of([1, 3])
    for group in (None, pair):
        state_dict = state_dicts.optimizer_state_dict(model, optimizer, process_group=group)
        problems += differences(state_dict["state"], states, f"bare optimizer {group is pair}")
    return problems


def saved_under_one_name(groups: Groups, root: str) -> list[str]:
    """What all ranks hear when they save two models under one name."""
    me = dist.get_rank()
    texts = []
    for engine in SAVED:
        one = build(engine, groups, me % 2, PAIRS[me % 2])
        with pytest.raises(InvalidState) as raised:
            ckpt.save({"model": one.model}, f"{root}/{engine}", step=1)
        texts.append(str(raised.value))
    return texts


def saved_by_some(groups: Groups, root: str) -> list[str]:
    """Ranks 0 and 1 have a model: all four save and load it, then those two with its optimizer."""
    has, pair = dist.get_rank() < 2, groups.of([0, 1])
    problems = []
    for engine in SAVED:
        state: dict[str, Any] = {"n": 1}
        if has:
            one = build(engine, groups, 5, [0, 1])
            state["model"] = one.model
        ckpt.save(state, f"{root}/{engine}/all", step=1)
        if has:
            clear(one)
        ckpt.load(state, f"{root}/{engine}/all")
        if has:
            own = {"model": one.model, "o": one.optimizer}
            problems += check_model(one, 5, None, engine)
            ckpt.save(own, f"{root}/{engine}/own", step=1, process_group=pair)
            clear(one)
            ckpt.load(own, f"{root}/{engine}/own", process_group=pair)
            problems += check_model(one, 5, None, f"{engine}, own")
    return problems


def clear(one: Trained) -> None:
    with torch.no_grad():
        for tensor in (*one.model.parameters(), *one.model.buffers()):
            tensor.mul_(0)


def rows_of_a_mesh(_: Groups, root: str) -> list[str]:
    """One model on each row of a mesh, sharded over the row: they are no replicas of each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    seed = dist.get_rank() // 2
    options = {"device_id": torch.device("cpu"), "device_mesh": mesh["shard"]}
    model = bare(seed)
    model.add_module("2", sharding.FullyShardedDataParallel(model[2], **options))
    one = trained(sharding.FullyShardedDataParallel(model, **options), seed)
    problems = check_model(one, seed, None, "mesh")
    with pytest.raises(InvalidState, match="no declared replicas"):
        ckpt.save({"model": one.model}, f"{root}/one", step=1)
    state = {f"model{seed}": one.model}
    ckpt.save(state, f"{root}/two", step=1)
    clear(one)
    ckpt.load(state, f"{root}/two")
    return problems + check_model(one, seed, None, "mesh")


def run_all(root: str) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    groups = Groups()
    problems: dict[str, list[str]] = {}
    for engine in ENGINES:
        for case in (two_models, some_ranks_only, overlapping, one_each):
            try:
                problems[f"{case.__name__} {engine}"] = case(groups, engine)
            except Exception:
                problems[f"{case.__name__} {engine}"] = [traceback.format_exc()]
    problems["unshared"] = unshared(groups)
    problems["saved under one name"] = saved_under_one_name(groups, f"{root}/two")
    problems["rows of a mesh"] = rows_of_a_mesh(groups, f"{root}/mesh")
    problems["saved by some"] = saved_by_some(groups, f"{root}/some")
    return problems


@pytest.fixture(scope="module")
def problems_by_case(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return run_ranks(4, run_all, str(tmp_path_factory.mktemp("roots")), timeout_seconds=170)


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["two_models", "some_ranks_only", "overlapping", "one_each"])
def test_each_rank_gets_its_own_model(
    problems_by_case: list[dict[str, list[str]]], case: str, engine: str
) -> None:
    assert [rank[f"{case} {engine}"] for rank in problems_by_case] == [[]] * 4


@pytest.mark.ranks
def test_a_model_that_no_engine_shares_is_its_ranks_own(
    problems_by_case: list[dict[str, list[str]]],
) -> None:
    assert [rank["unshared"] for rank in problems_by_case] == [[]] * 4


@pytest.mark.ranks
def test_two_models_saved_under_one_name_are_an_error_that_names_the_ranks(
    problems_by_case: list[dict[str, list[str]]],
) -> None:
    texts = [rank["saved under one name"] for rank in problems_by_case]
    assert texts[1:] == texts[:1] * 3 and len(texts[0]) == len(SAVED)
    for text in texts[0]:
        assert "model.0.weight: ranks 0, 2 and ranks 1, 3 have different values of it" in text
        assert "no declared replicas" in text and "process_group=" in text


@pytest.mark.ranks
def test_ranks_without_the_model_save_and_load_beside_those_that_have_it(
    problems_by_case: list[dict[str, list[str]]],
) -> None:
    assert [rank["saved by some"] for rank in problems_by_case] == [[]] * 4


@pytest.mark.ranks
def test_models_on_rows_of_one_mesh_are_no_replicas(
    problems_by_case: list[dict[str, list[str]]],
) -> None:
    assert [rank["rows of a mesh"] for rank in problems_by_case] == [[]] * 4
