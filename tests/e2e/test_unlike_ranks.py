"""Experts, tied embeddings, generator and critic, values of groups: ranks that hold unlike things.

Method: real gloo ranks, saved on four and loaded on two and on one. Values follow from names and a
seed (`tests.e2e.stages`), so that each rank knows what it has to get.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import ckpt
from ckpt.errors import InvalidState, Mismatch
from tests.e2e.stages import differences, fill, optimizer_of
from tests.ranks import run_ranks
from tests.versions import cut_here

pytestmark = pytest.mark.ranks

EXPERTS = 4


class Moe(nn.Module):
    """A router that all ranks have, experts of which each has some, and stacked weights."""

    def __init__(self, experts: Iterable[int] = range(EXPERTS)) -> None:
        super().__init__()
        self.router = nn.Linear(5, EXPERTS)
        self.experts = nn.ModuleDict({str(number): nn.Linear(5, 3) for number in experts})
        self.stacked = nn.Parameter(torch.empty(EXPERTS, 3, 5))


class Ends(nn.Module):
    """The embedding of a first and of a last stage, which are one, and a layer of its own."""

    def __init__(self, layers: Iterable[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in layers})


def state_of(model: nn.Module, seed: int) -> dict[str, Any]:
    """The model and its optimizer, stepped once on values of `seed`."""
    optimizer = optimizer_of(model)
    fill(model, seed)
    optimizer.step()
    return {"model": model, "optim": optimizer}


def whole(make: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    state = state_of(make(), seed)
    return state["model"], state["optim"]


def all_experts() -> nn.Module:
    return Moe()


def both_ends() -> nn.Module:
    return Ends(["first", "last"])


def odd_of(state: dict[str, Any], make: Callable[[], nn.Module], seed: int) -> list[str]:
    return differences(state["model"], state["optim"], seed, whole(make, seed))


def local_experts(size: int, rank: int, seed: int) -> dict[str, Any]:
    """Experts as modules of their own, the stacked ones over a mesh of experts, the router sharded
    over the data mesh: the same ranks.
    """
    count = EXPERTS // size
    model = Moe(range(rank * count, (rank + 1) * count))
    experts = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    cut = cut_here(torch.empty(EXPERTS, 3, 5), experts, [Shard(0)])
    model.stacked = nn.Parameter(cut)
    fully_shard(model.router, mesh=init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)))
    return state_of(model, seed)


def saved_by_four(root: str) -> list[str]:
    rank = dist.get_rank()
    ckpt.save(local_experts(4, rank, 1), f"{root}/experts", step=1)
    names = ["first"] if rank == 0 else ["last"]
    ends = state_of(Ends(names) if rank in (0, 3) else nn.ModuleDict(), 2) if rank in (0, 3) else {}
    ckpt.save({**ends, "n": 5}, f"{root}/ends", step=1)
    part = "generator" if rank < 2 else "critic"
    model, optimizer = whole(lambda: Moe([0]) if rank < 2 else Ends(["first"]), 3)
    trained = {part: model, f"{part}_optim": optimizer}
    ckpt.save(trained, f"{root}/pair", step=1)
    fill(model, 9)
    ckpt.load(trained, f"{root}/pair")
    make = (lambda: Moe([0])) if rank < 2 else (lambda: Ends(["first"]))
    odd = odd_of({"model": model, "optim": optimizer}, make, 3)
    return odd + groups(root, rank)


def groups(root: str, rank: int) -> list[str]:
    """Values that stages have in common, and what becomes of them in other groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    data: DeviceMesh = mesh["dp"]
    odd = []
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    schedule.last_epoch = 10 + rank // 2
    state = {"s": ckpt.PerGroup(schedule, data), "of": ckpt.PerGroup([rank // 2], data), "n": 1}
    state["alike"] = ckpt.PerGroup("all", data)
    ckpt.save(state, f"{root}/groups", step=1)
    schedule.last_epoch = 0
    state |= {"of": ckpt.PerGroup([], data), "alike": ckpt.PerGroup("", data)}
    ckpt.load(state, f"{root}/groups")
    if (schedule.last_epoch, state["of"].value) != (10 + rank // 2, [rank // 2]):
        odd.append(f"groups: {schedule.last_epoch} {state['of'].value}")
    # Other groups: what all had alike needs nobody, the rest a function of the user's.
    alone = {"alike": ckpt.PerGroup("", [rank]), "of": ckpt.PerGroup([], [rank])}
    with pytest.raises(Mismatch, match=r"of: was saved by groups \[\[0, 1\], \[2, 3\]\]"):
        ckpt.load(alone, f"{root}/groups")
    alone["of"] = ckpt.PerGroup([], [rank], lambda values, first, size: [values, first, size])
    ckpt.load(alone, f"{root}/groups")
    got = (alone["alike"].value, alone["of"].value)
    if got != ("all", [[[0], [1]], rank, 4]):
        odd.append(f"other groups: {got}")
    with pytest.raises(InvalidState, match=r"x~group0: the value differs .* on 0; .* on 1"):
        ckpt.save({"x": ckpt.PerGroup(rank, data)}, f"{root}/differing", step=1)
    with pytest.raises(InvalidState, match="this rank is not in the group"):
        ckpt.save({"x": ckpt.PerGroup(1, [(rank + 1) % 4])}, f"{root}/differing", step=1)
    with pytest.raises(Mismatch, match="was saved per group"):
        ckpt.load({"of": 0, "alike": ckpt.PerGroup("", data)}, f"{root}/groups")
    return odd


def loaded_by_two(root: str) -> list[str]:
    rank = dist.get_rank()
    state = local_experts(2, rank, 8)
    ckpt.load(state, f"{root}/experts")
    return odd_of(state, all_experts, 1) + swapped(root, rank)


def swapped(root: str, rank: int) -> list[str]:
    """What was stacked on a mesh of experts becomes parts on the ranks that have them, and what
    were modules becomes a stack on such a mesh.
    """
    count = EXPERTS // 2
    own = slice(rank * count, (rank + 1) * count)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model: Any = nn.Module()
    numbers = map(str, range(EXPERTS)[own])
    model.stacked = nn.ParameterDict({name: nn.Parameter(torch.zeros(3, 5)) for name in numbers})
    model.experts = nn.Module()
    for name, shape in (("weight", (EXPERTS, 3, 5)), ("bias", (EXPERTS, 3))):
        cut = cut_here(torch.zeros(shape), mesh, [Shard(0)])
        model.experts.register_parameter(name, nn.Parameter(cut))
    model.router = nn.Linear(5, EXPERTS)
    # The groups are those that it was saved with: biases of one dim had no weight decay.
    plain = [model.experts.bias, model.router.bias]
    decayed = [one for one in model.parameters() if all(one is not other for other in plain)]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    stacks = {"stacked.{}": "stacked", "experts": "experts.{}"}
    ckpt.load({"model": model, "optim": optimizer}, f"{root}/experts", stacks=stacks)
    whole_model, its_optimizer = whole(all_experts, 1)
    params = dict(whole_model.named_parameters())

    def pairs(of: Callable[[torch.Tensor], Any]) -> list[tuple[str, Any, Any]]:
        stacked = of(params["stacked"])
        rows = [(f"stacked {n}", of(p), stacked[int(n)]) for n, p in model.stacked.items()]
        for name in ("weight", "bias"):
            every = [of(params[f"experts.{number}.{name}"]) for number in range(EXPERTS)]
            live = of(model.experts.get_parameter(name)).to_local()
            rows.append((name, live, torch.stack(every)[own]))
        return rows

    def moments(parameter: torch.Tensor) -> Any:
        known = its_optimizer.state if parameter in its_optimizer.state else optimizer.state
        return known[parameter]["exp_avg"]

    odd = [name for name, got, good in pairs(lambda one: one) if not torch.equal(got, good)]
    odd += [f"{name} moment" for name, got, good in pairs(moments) if not torch.equal(got, good)]
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return odd if decays == [0.1, 0.0] else [*odd, f"{decays}"]


def test_what_unlike_ranks_saved_loads_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert run_ranks(4, saved_by_four, root, timeout_seconds=180.0) == [[]] * 4
    assert run_ranks(2, loaded_by_two, root, timeout_seconds=180.0) == [[]] * 2
    dense = state_of(all_experts(), 8)
    ckpt.load(dense, f"{root}/experts")
    assert odd_of(dense, all_experts, 1) == []
    ends = {**state_of(both_ends(), 8), "n": 0}
    ckpt.load(ends, f"{root}/ends")
    assert odd_of(ends, both_ends, 2) == []
    assert ends["n"] == 5
    critic = tmp_path / "critic.safetensors"
    ckpt.export(f"{root}/pair", str(critic), entry="critic")
    expected = whole(lambda: Ends(["first"]), 3)[0].state_dict()
    weights = load_file(str(critic))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def on_two_meshes(root: str) -> list[str]:
    """A tied embedding under `fully_shard` in the first and in the last stage, on meshes that share
    no rank; experts on the submesh of one of two data-parallel replicas.
    """
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    odd = []

    model = Ends(["first"] if rank < 2 else ["last"])
    fully_shard(model, mesh=mesh["dp"])
    state = state_of(model, 4)
    odd += ckpt.save(state, f"{root}/tied", step=1).warnings
    fill(state["model"], 9)
    ckpt.load(state, f"{root}/tied")
    odd += odd_of(state, both_ends, 4)
    ckpt.async_save(state, f"{root}/tied in the background", step=1).result()
    # The replicas of a model that nobody declares: the mesh of experts alone is known.
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    stack = torch.arange(60.0).view(EXPERTS, 3, 5)
    cut = cut_here(stack, replicas["ep"], [Shard(0)])
    ckpt.save({"stack": cut}, f"{root}/replicas", step=1)
    if rank > 1:
        cut.to_local()[0, 0, 0] += 1
    odd += refused(
        {"stack": cut}, f"{root}/replicas", "stack: the ranks have different values of it"
    )
    # Other values, other cuts, other numbers of ranks.
    with torch.no_grad():
        state["model"].embedding.weight.to_local().add_(rank // 2)
    expected = "model.embedding.weight: ranks 0, 1 and ranks 2, 3 have different values of it"
    odd += refused(state, f"{root}/differing", expected)
    by_rows_or_columns = [Shard(rank // 2)]
    other = cut_here(torch.zeros(4, 4), mesh["dp"], by_rows_or_columns)
    odd += refused({"w": other}, f"{root}/cut", "w: ranks 0 to 3 hold it and cut it differently")
    three = DeviceMesh("cpu", [1, 2, 3], _init_backend=False)
    alone = DeviceMesh("cpu", [0], _init_backend=False)
    piece = cut_here(torch.zeros(6), three if rank else alone, [Shard(0)])
    text = r"w: lies on groups of ranks of different sizes, which share no rank: rank 0; ranks 1 to"
    return odd + refused({"w": piece}, f"{root}/sizes", text)


def refused(state: dict[str, Any], url: str, text: str) -> list[str]:
    """What is wrong with the refusal of a save of this state."""
    try:
        ckpt.save(state, url, step=2)
    except InvalidState as error:
        return [] if re.search(text, str(error)) else [str(error)]
    return [f"{url}: was saved"]


def test_tensors_of_one_name_on_two_meshes_are_one_if_they_are_equal(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert run_ranks(4, on_two_meshes, root, timeout_seconds=180.0) == [[]] * 4
    for name in ("tied", "tied in the background"):
        ends = state_of(both_ends(), 8)
        ckpt.load(ends, f"{root}/{name}")
        assert odd_of(ends, both_ends, 4) == []
    with ckpt.open(f"{root}/replicas") as saved:
        assert torch.equal(saved["stack"], torch.arange(60.0).view(EXPERTS, 3, 5))
