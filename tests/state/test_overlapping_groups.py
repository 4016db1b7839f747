"""State dicts of models over groups that no single rank knows all of.

Method: five gloo ranks run all cases in one go. Hybrid units by two process groups, without a mesh,
over four of them: the fifth makes no call, so that a state dict that waits for the world never
ends. Units over groups that overlap: the ranks of both must hear of it, instead of waiting for
different ones.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy

import sharding
from ckpt.errors import InvalidState
from ckpt.layout.modules import describe_module
from ckpt.layout.plain import Ranks
from ckpt.state_dict import api as state_dicts
from ckpt.state_dict.config import StateDictType as Form
from tests.ranks import run_ranks

ENGINES = {"ours": sharding.FullyShardedDataParallel, "torch": TorchFSDP}
CPU = torch.device("cpu")


def bare(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)))


def groups_of(*parts: list[int]) -> Any:
    """This rank's group of those, or None; every rank makes all of them."""
    made = [(ranks, dist.new_group(ranks)) for ranks in parts]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)


def hybrid(engine: str, groups: tuple[Any, Any], orig: bool) -> nn.Module:
    options = {"device_id": CPU, "use_orig_params": orig, "process_group": groups}
    options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    model = bare(1)
    cls: Any = ENGINES[engine]
    model.add_module("1", cls(model[1], **options))
    wrapped: nn.Module = cls(model, **options)
    return wrapped


def taken_and_loaded(engine: str, groups: tuple[Any, Any], orig: bool) -> list[str]:
    if dist.get_rank() == 4:
        return []
    model = hybrid(engine, groups, orig)
    expected = bare(1).state_dict()
    problems = []
    for form in (Form.FULL, Form.SHARDED, Form.LOCAL):
        taken = state_dicts.model_state_dict(model, form)
        if list(taken) != list(expected):
            problems.append(f"{form.name}: {list(taken)}")
        whole = expected if form is Form.LOCAL else taken
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        state_dicts.load_model_state_dict(model, whole)
        again = state_dicts.model_state_dict(model)
        problems += [f"{form.name} {k}" for k in expected if not torch.equal(again[k], expected[k])]
    return problems


def declared(groups: tuple[Any, Any]) -> list[str]:
    """Our units say all their ranks without asking anybody."""
    if dist.get_rank() == 4:
        return []
    layout = describe_module(hybrid("ours", groups, True), Ranks(dist.get_rank(), tuple(range(5))))
    return [str(owned.owners) for owned in layout.params if owned.owners != (0, 1, 2, 3)]


def chained(engine: str, first: Any, second: Any) -> list[str]:
    """A unit on [0, 1] and one on [1, 2]: ranks 0 and 2 know only one of them each."""
    model = nn.Sequential()
    cls: Any = ENGINES[engine]
    for name, group in (("a", first), ("b", second)):
        if group is not None:
            model.add_module(name, cls(nn.Linear(4, 4), process_group=group, device_id=CPU))
    return calls(model)


def crossed(engine: str, rows: Any, columns: Any) -> list[str]:
    """A unit over rows and one over columns of a square: every rank knows two of four groups."""
    if dist.get_rank() == 4:
        return []
    cls: Any = ENGINES[engine]
    model = nn.Sequential(
        *(cls(nn.Linear(4, 4), process_group=one, device_id=CPU) for one in (rows, columns))
    )
    return calls(model)


def calls(model: nn.Module) -> list[str]:
    """The errors of a dict taken and a dict loaded; both are of all ranks of the groups."""
    if not list(model.parameters()):
        return []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = []
    for call in (
        lambda: state_dicts.model_state_dict(model),
        lambda: state_dicts.optimizer_state_dict(model, optimizer),
        lambda: state_dicts.load_model_state_dict(model, {}),
        lambda: state_dicts.load_optimizer_state_dict(model, optimizer, {}),
    ):
        with pytest.raises(InvalidState) as raised:
            call()
        texts.append(str(raised.value))
    return texts


def linked(first: Any, second: Any, whole: Any) -> list[str]:
    """A unit over all three around the two: nothing overlaps that is not covered."""
    if dist.get_rank() > 2:
        return []
    model, cls = nn.Sequential(nn.Linear(4, 4)), sharding.FullyShardedDataParallel
    for name, group in (("a", first), ("b", second)):
        if group is not None:
            model.add_module(name, cls(nn.Linear(4, 4), process_group=group, device_id=CPU))
    outer = cls(model[0], process_group=whole, device_id=CPU)
    model[0] = outer
    return sorted(state_dicts.model_state_dict(model))


def run_all() -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    rows, columns = groups_of([0, 1], [2, 3]), groups_of([0, 2], [1, 3])
    first, second, whole = groups_of([0, 1]), groups_of([1, 2]), groups_of([0, 1, 2])
    cases: dict[str, Callable[[], list[str]]] = {"declared": lambda: declared((rows, columns))}
    for engine in ENGINES:
        for orig in (False, True):
            name = f"hybrid {engine} {'orig' if orig else 'flat'}"
            cases[name] = lambda e=engine, o=orig: taken_and_loaded(e, (rows, columns), o)
        cases[f"chained {engine}"] = lambda e=engine: chained(e, first, second)
        cases[f"crossed {engine}"] = lambda e=engine: crossed(e, rows, columns)
    cases["linked"] = lambda: linked(first, second, whole)
    outcomes = {}
    for name, case in cases.items():
        try:
            outcomes[name] = case()
        except Exception:
            outcomes[name] = [traceback.format_exc()]
    return outcomes


@pytest.fixture(scope="module")
def outcomes_by_case() -> list[dict[str, list[str]]]:
    return run_ranks(5, run_all, timeout_seconds=120)


@pytest.mark.ranks
@pytest.mark.parametrize("engine", [f"{e} {k}" for e in ENGINES for k in ("flat", "orig")])
def test_hybrid_units_by_two_groups_wait_for_their_own_ranks_only(
    outcomes_by_case: list[dict[str, list[str]]], engine: str
) -> None:
    assert [rank[f"hybrid {engine}"] for rank in outcomes_by_case] == [[]] * 5


@pytest.mark.ranks
def test_hybrid_units_by_two_groups_declare_all_their_ranks(
    outcomes_by_case: list[dict[str, list[str]]],
) -> None:
    assert [rank["declared"] for rank in outcomes_by_case] == [[]] * 5


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ENGINES)
def test_overlapping_groups_are_an_error_that_names_both_on_all_their_ranks(
    outcomes_by_case: list[dict[str, list[str]]], engine: str
) -> None:
    texts = [rank[f"chained {engine}"] for rank in outcomes_by_case]
    assert texts[3:] == [[], []] and all(len(of_rank) == 4 for of_rank in texts[:3])
    for text in [one for of_rank in texts for one in of_rank]:
        assert "over ranks [0, 1] and" in text and "over ranks [1, 2]" in text
        assert "overlap at rank 1" in text and "process_group=" in text


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ENGINES)
def test_crossing_groups_are_an_error_on_all_ranks(
    outcomes_by_case: list[dict[str, list[str]]], engine: str
) -> None:
    texts = [rank[f"crossed {engine}"] for rank in outcomes_by_case[:4]]
    assert all(len(of_rank) == 4 for of_rank in texts)
    assert all("over ranks [0, 1] and" in text for text in texts[0] + texts[1])
    assert all("over ranks [2, 3]" in text for text in texts[2] + texts[3])


@pytest.mark.ranks
def test_overlapping_groups_under_a_unit_over_both_are_served(
    outcomes_by_case: list[dict[str, list[str]]],
) -> None:
    for rank, names in ((0, "0a"), (1, "0ab"), (2, "0b")):
        assert {key[0] for key in outcomes_by_case[rank]["linked"]} == set(names)
