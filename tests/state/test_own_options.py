"""Options of groups that an optimizer estimates on each rank: declared, each rank gets its own.

Method: an optimizer with the options of prodigyopt's Prodigy, which it changes in each step by what
this rank alone sees; real ranks. The real class is used too where it is installed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.errors import InvalidState, Mismatch
from ckpt.state_dict import declare_optimizer_state
from tests.ranks import run_ranks

OWN = ("d", "d_max", "d_numerator")


class Prodigy(torch.optim.Optimizer):
    """Its groups, and steps whose size each rank estimates for itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-6, "d_max": 1e-6, "d_numerator": 0.0, "k": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] = group["d"] * 2 + 0.01 * (dist.get_rank() + 1)
            group["d_max"] = (group["d"], dist.get_rank())
            group["d_numerator"] += dist.get_rank() + 0.5
            group["k"] += 1
            for param in group["params"]:
                self.state[param].setdefault("exp_avg", torch.zeros_like(param)).add_(1)


def made(seed: int, *, declares: Any = None, groups: int = 2) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    params = [*model.parameters()]
    optimizer = Prodigy([{"params": params[n::groups]} for n in range(groups)])
    if declares:
        declare_optimizer_state(optimizer, {f"param_groups.{key}": declares for key in OWN})
    return {"model": model, "optim": optimizer}


def own_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups]


def on_two(root: str) -> list[dict[str, Any]]:
    state = made(1)
    state["optim"].step()
    with pytest.raises(InvalidState) as refused:
        ckpt.save(state, root, step=1)
    said = re.search(r"declare_optimizer_state\(optimizer, (\{.*?\})\)", str(refused.value))
    assert said is not None, refused.value
    assert said[1] == '{"param_groups.d": PerRank(None, on_reshard)}'
    declare_optimizer_state(state["optim"], {"param_groups.d": ckpt.PerRank(None)})
    with pytest.raises(InvalidState, match="param_groups: the value differs"):
        ckpt.save(state, root, step=1)
    rest = dict.fromkeys(("param_groups.d_max", "param_groups.d_numerator"), ckpt.PerRank(None))
    declare_optimizer_state(state["optim"], rest)
    state["optim"].param_groups[1]["d"] += 1.0
    ckpt.save(state, root, step=1)
    state["optim"].step()
    ckpt.async_save(state, root, step=2).result()
    other = made(2)  # on as many ranks, whatever is declared now
    ckpt.load(other, root)
    assert own_of(other["optim"]) == own_of(state["optim"])
    assert own_of(other["optim"])[0]["k"] == 2
    kept = made(2)
    before = own_of(kept["optim"])
    live: Any = {key: "live" for key in OWN}
    ckpt.load(kept, root, group_options=live)
    assert [{**one, "k": 0} for one in own_of(kept["optim"])] == before
    return own_of(state["optim"])


def on_one(root: str, saved: list[list[dict[str, Any]]]) -> None:
    state = made(3)
    before = [own_of(state["optim"]), [p.clone() for p in state["model"].parameters()]]
    with pytest.raises(Mismatch, match=r'optim\.param_groups\.0\.d: .*"param_groups\.d": PerRank'):
        ckpt.load(state, root)
    assert own_of(state["optim"]) == before[0]
    assert all(map(torch.equal, state["model"].parameters(), before[1]))
    calls = []

    def largest(values: Any, rank: int, size: int) -> Any:
        calls.append((rank, size, len(values)))
        return max(values)

    state = made(3, declares=ckpt.PerRank(None, largest))
    ckpt.load(state, root)
    assert calls == [(0, 1, 2)] * 6
    for index, group in enumerate(own_of(state["optim"])):
        for key in OWN:
            assert group[key] == max(one[index][key] for one in saved), (index, key)
    # One group of two: what each had is not the same.
    with pytest.raises(Mismatch, match="param_groups"):
        ckpt.load(made(4, groups=1), root)
    state["optim"].step()
    ckpt.save(state, root, step=3)


def back_on_two(root: str) -> list[dict[str, Any]]:
    state = made(5)  # one rank has saved: nothing to decide
    ckpt.load(state, root)
    return own_of(state["optim"])


@pytest.mark.ranks
def test_declared_options_are_kept_for_each_rank(tmp_path: Path) -> None:
    root = str(tmp_path)
    saved = run_ranks(2, on_two, root, timeout_seconds=120)
    assert saved[0] != saved[1]
    run_ranks(1, on_one, root, saved, timeout_seconds=120)
    one, two = run_ranks(2, back_on_two, root, timeout_seconds=120)
    assert one == two and one[0]["k"] == 3


def test_an_option_cannot_be_declared_a_shard() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"say PerRank\(None, on_reshard\)"):
        declare_optimizer_state(optimizer, {"param_groups.lr": "shard"})


@pytest.mark.parametrize(
    "foreign",
    [5, [1], [{"first": None}], [{"first": None, "options": 3}], [{"first": ["a"], "options": {}}]],
)
def test_what_is_no_list_of_own_options_does_not_load(tmp_path: Path, foreign: Any) -> None:
    """Anything may stand under the name in a checkpoint of others."""
    model = nn.Linear(2, 2)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    more = {"optim.param_groups~own": ckpt.PerRank(foreign)}
    ckpt.save({**state, **more}, tmp_path, step=1)
    with pytest.raises(Mismatch, match=r"optim\.param_groups~own: is not a list of options"):
        ckpt.load(state, tmp_path, strict="state")


def test_a_tensor_in_a_declared_option_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    declare_optimizer_state(optimizer, {"param_groups.lr": ckpt.PerRank(None)})
    with pytest.raises(InvalidState, match=r"optim\.param_groups\.0\.lr: a tensor in an option"):
        ckpt.save({"model": model, "optim": optimizer}, str(tmp_path), step=1)


def real(root: str) -> None:
    from prodigyopt import Prodigy as Real

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        fully_shard(model)
        return {"model": model, "optim": Real(model.parameters(), lr=1.0, slice_p=1)}

    state = made(1)
    estimated = (*OWN, "d_hat", "d_denom")
    own = {f"param_groups.{key}": ckpt.PerRank(None) for key in estimated}
    for _ in range(3):
        state["model"](torch.randn(3, 4)).square().mean().backward()
        state["optim"].step()
    declare_optimizer_state(state["optim"], own)
    ckpt.save(state, root, step=1)
    other = made(2)
    ckpt.load(other, root)
    assert own_of(other["optim"]) == own_of(state["optim"])


@pytest.mark.ranks
def test_the_real_prodigy_resumes_with_what_it_estimated(tmp_path: Path) -> None:
    pytest.importorskip("prodigyopt")
    run_ranks(2, real, str(tmp_path), timeout_seconds=120)


def as_stages(root: str) -> None:
    """Each rank has a stage: one group of all of them in the checkpoint."""
    layer = nn.Sequential(nn.Identity(), nn.Identity())
    layer[dist.get_rank()] = nn.Linear(4, 4)
    optimizer = Prodigy(layer.parameters())
    declare_optimizer_state(optimizer, {f"param_groups.{key}": ckpt.PerRank(None) for key in OWN})
    optimizer.step()
    state = {"model": layer, "optim": optimizer}
    ckpt.save(state, root, step=1)
    saved = own_of(optimizer)
    optimizer.step()
    ckpt.load(state, root)
    assert own_of(optimizer) == saved


@pytest.mark.ranks
def test_stages_have_options_of_their_own_in_one_group(tmp_path: Path) -> None:
    run_ranks(2, as_stages, str(tmp_path), timeout_seconds=120)


def test_a_state_dict_has_declared_options_too() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    declare_optimizer_state(optimizer, {"param_groups.lr": ckpt.PerRank(None)})
    taken = ckpt.state_dict.optimizer_state_dict(model, optimizer)
    assert [group["lr"] for group in taken["param_groups"]] == [0.1]
