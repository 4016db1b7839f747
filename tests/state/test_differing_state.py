"""What a checkpoint keeps once of several ranks' optimizer state is equal on all of them, or the
save fails on all of them by name.

Real ranks, every engine: one rank's step, number or small plain tensor is changed in place, between
saves of one unchanged structure. Messages and rounds are counted on ranks that are threads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import InvalidState
from ckpt.format.joint_codec import encode_rest
from ckpt.format.part import Part, part_of_files
from ckpt.saving import task as saving_task
from ckpt.state_dict import declare_optimizer_state, optimizer_state_dict
from sharding import fully_shard
from tests.ranks import run_ranks
from tests.state.differing import (
    ENGINES,
    first_state,
    more_of,
    noted_rounds,
    on_the_last,
    one_more,
    refusal,
    same_on_all_ranks,
    trained,
    trained_by_own,
)


def refused_save(state: dict[str, Any], root: str, step: int, name: str) -> str:
    """The problem of the changed parameter; a flat one has all members of the same state."""
    texts = refusal(lambda: ckpt.save(state, root, step=step))
    assert all(text.split(":")[0].endswith(f".{name}") for text in texts), texts
    is_flat = any("flat" in part for part in root.split("/")[-1].split("_"))
    assert len(texts) == 1 or is_flat, texts
    return next(text for text in texts if text.startswith("optim.state.0.weight."))


# --- steps ---------------------------------------------------------------------------------------


def differing_steps(root: str) -> None:
    for engine in ENGINES:
        url = f"{root}/{engine}"
        state = trained(engine, fused=engine in ("fully", "ddp"))
        ckpt.save(state, url, step=1)
        ckpt.save(state, url, step=2)
        with on_the_last(state, one_more):
            text = refused_save(state, url, 3, "step")
            last = dist.get_world_size() - 1
            assert text.startswith("optim.state.0.weight.step: ") and "on 0; " in text, text
            assert f" on {last})" in text, text
            assert 'declare_optimizer_state(optimizer, {"step": PerRank(' in text, text
        ckpt.save(state, url, step=4)
        assert [info.step for info in ckpt.list_steps(url)] == [1, 2, 4], engine


@pytest.mark.ranks
def test_a_step_that_differs_is_refused_and_named_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, differing_steps, str(tmp_path), timeout_seconds=300)


@pytest.mark.ranks
def test_the_ranks_of_a_hybrid_mesh_are_all_compared(tmp_path: Path) -> None:
    run_ranks(4, on_a_hybrid_mesh, str(tmp_path), timeout_seconds=300)


def on_a_hybrid_mesh(root: str) -> None:
    """Ranks 0 and 2 store what rank 3 alone has otherwise."""
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer}
    ckpt.save(state, root, step=1)
    with on_the_last(state, one_more):
        assert "on 0, 1, 2; " in refused_save(state, root, 2, "step")
    ckpt.save(state, root, step=3)


# --- other state ---------------------------------------------------------------------------------


def other_state(root: str) -> None:
    kinds = {
        "fully": ("count",),
        "flat": ("count", "calls"),
        "their_flat": ("count", "calls"),
        "orig": ("count", "calls"),
        "ddp": ("count", "factors", "nested", "moment"),
        "bare": ("count", "factors", "nested", "moment"),
    }
    for engine, names in kinds.items():
        state = trained_by_own(engine)
        url = f"{root}/{engine}"
        ckpt.save(state, url, step=1)
        for step, name in enumerate(names, start=2):
            shown = {"calls": "calls~int", "nested": "nested.0"}.get(name, name)
            with on_the_last(state, more_of(name)):
                text = refused_save(state, url, step, shown)
                assert f'{{"{name}": PerRank(' in text, text
            for held in state["optim"].state.values():
                held["calls"] = 1
        ckpt.save(state, url, step=9)
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1 + dist.get_rank()))
    with pytest.raises(InvalidState, match=r"param_groups\.0\.lr: the ranks have different"):
        ckpt.save({"model": model, "optim": optimizer}, f"{root}/lr", step=1)


@pytest.mark.ranks
def test_numbers_and_small_plain_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    run_ranks(2, other_state, str(tmp_path), timeout_seconds=300)


def on_one_rank(root: str) -> None:
    """Rank 1 has a scalar that rank 0, which would store it, has not."""
    for engine in ("fully", "their_fully", "flat", "orig"):
        state = trained(engine)
        if dist.get_rank():
            first_state(state["optim"])["extra"] = torch.tensor(5.0)
        with pytest.raises(ckpt.CheckpointError, match=r"optim\.state\.0\.weight\.extra") as caught:
            ckpt.save(state, f"{root}/{engine}", step=1)
        same_on_all_ranks(caught.value)
        if dist.get_rank():
            del first_state(state["optim"])["extra"]
        ckpt.save(state, f"{root}/{engine}", step=2)


@pytest.mark.ranks
def test_a_scalar_that_no_rank_would_store_is_named(tmp_path: Path) -> None:
    run_ranks(2, on_one_rank, str(tmp_path), timeout_seconds=300)


def with_statistics() -> DistributedDataParallel:
    norms = [nn.BatchNorm1d(size) for size in (4, 8, 8)]
    model = nn.Sequential(nn.Linear(4, 4), norms[0], nn.Linear(4, 8), *norms[1:])
    return DistributedDataParallel(model)


def statistics(root: str) -> None:
    model = with_statistics()
    for name, buffer in model.named_buffers():
        buffer.fill_(dist.get_rank() + len(name))
    ckpt.save({"model": model}, root, step=1)
    other = with_statistics()
    ckpt.load({"model": other}, root)
    for name, buffer in other.named_buffers():
        assert torch.all(buffer == len(name)), "as rank 0 had it"


@pytest.mark.ranks
def test_buffers_that_differ_are_all_taken_from_one_rank(tmp_path: Path) -> None:
    run_ranks(2, statistics, str(tmp_path), timeout_seconds=300)


def really_own(root: str) -> None:
    for engine in ("fully", "flat", "their_orig", "ddp"):
        url = f"{root}/{engine}"
        state = trained(engine)
        rank = dist.get_rank()
        for held in state["optim"].state.values():
            held["step"].fill_(10.0 + rank)
        declare_optimizer_state(state["optim"], {"step": ckpt.PerRank(None)})
        ckpt.save(state, url, step=1)
        other = trained(engine)
        declare_optimizer_state(other["optim"], {"step": ckpt.PerRank(None)})
        ckpt.load(other, url)
        assert {float(held["step"]) for held in other["optim"].state.values()} == {10.0 + rank}


@pytest.mark.ranks
def test_a_step_that_is_declared_each_ranks_own_is_kept_for_each(tmp_path: Path) -> None:
    run_ranks(2, really_own, str(tmp_path), timeout_seconds=300)


# --- honest trainings ----------------------------------------------------------------------------


class Kept(torch.optim.SGD):
    """Keeps something of each rank's own, `content(rank)`, in its "state", "group" or as "user"."""

    def __init__(self, params: Any, where: str, content: Any) -> None:
        self.where, self.content = where, content
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        own = self.content(dist.get_rank())
        for group in self.param_groups:
            if self.where == "group":
                group["own"] = own
            for param in group["params"]:
                if self.where == "state":
                    self.state[param]["own"] = own
        if self.where == "user":
            self.state["clock"] = {"own": own}  # type: ignore[index]


def kept(engine: str, where: str, content: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ENGINES[engine](nn.Sequential(nn.Linear(4, 4)))
    optimizer = Kept(model.parameters(), where, content)
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


CONTENTS: dict[str, Any] = {
    "seconds": lambda rank: 0.5 + rank,
    "counts": lambda rank: [rank, rank + 1],
    "host": lambda rank: f"host {rank}",
    "nested": lambda rank: {"n": rank, "seen": torch.ones(2) * rank},
    "seen": lambda rank: torch.tensor(1.0 + rank),
}


def followed_literally(root: str) -> None:
    """What the refusal says is written, in its own words, and the state comes back."""
    for engine in ("ddp", "fully", "their_orig"):
        for name, content in CONTENTS.items():
            url = f"{root}/{engine}-{name}"
            state = kept(engine, "state", content)
            calls = [lambda state=state, url=url: ckpt.save(state, url, step=1)]
            if engine != "their_orig":
                calls.append(
                    lambda state=state: optimizer_state_dict(state["model"], state["optim"])
                )
            said = 'declare_optimizer_state(optimizer, {"own": PerRank(None, on_reshard)})'
            # Of a sharded parameter, a value with tensors is each rank's own as it is; of a flat
            # one, everything but numbers is, which may be steps.
            own = {"fully": ("nested",), "their_orig": ("counts", "host", "nested")}
            for call in calls if name not in own.get(engine, ()) else ():
                with pytest.raises(ckpt.CheckpointError) as caught:
                    call()
                assert said in str(caught.value), (engine, name, caught.value)
            scope = {"on_reshard": None, "PerRank": ckpt.PerRank}
            scope["declare_optimizer_state"] = declare_optimizer_state
            other = kept(engine, "state", lambda rank: None)
            for one in (state, other):
                eval(said, {**scope, "optimizer": one["optim"]})
            ckpt.save(state, url, step=1)
            ckpt.load(other, url)
            mine = [str(held["own"]) for held in other["optim"].state.values()]
            assert set(mine) == {str(content(dist.get_rank()))}, (engine, name, mine)


@pytest.mark.ranks
def test_the_declaration_that_a_refusal_names_is_the_one_to_write(tmp_path: Path) -> None:
    run_ranks(2, followed_literally, str(tmp_path), timeout_seconds=300)


def beside_the_optimizer(root: str) -> None:
    for where in ("group", "user"):
        for name in ("seconds", "seen"):
            state = kept("fully", where, CONTENTS[name])
            [text] = refusal(lambda state=state: ckpt.save(state, root, step=1))
            said = "next to it in the state, as PerRank(value)"
            if (where, name) == ("group", "seconds"):
                said = '{"param_groups.d": PerRank(None, on_reshard)}'
            assert said in text and "wrap it" not in text, text
    state["optim"].state.pop("clock")
    ckpt.save({**state, "clock": ckpt.PerRank(0.5 + dist.get_rank())}, root, step=1)
    loaded = {**kept("fully", "", CONTENTS["seconds"]), "clock": ckpt.PerRank(0.0)}
    ckpt.load(loaded, root)
    assert loaded["clock"].value == 0.5 + dist.get_rank()
    own = {"job": {"state": {"n": dist.get_rank()}}}  # no optimizer's
    [text] = refusal(lambda: ckpt.save(own, f"{root}/own", step=1))
    assert "wrap it in PerRank" in text and "declare_optimizer_state" not in text, text


@pytest.mark.ranks
def test_what_param_groups_have_for_each_rank_belongs_beside_the_optimizer(tmp_path: Path) -> None:
    run_ranks(2, beside_the_optimizer, str(tmp_path), timeout_seconds=300)


def by_lbfgs() -> dict[str, Any]:
    """Under DDP, each rank with a batch and so a loss of its own."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(3, 4) * (1 + dist.get_rank())).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    return {"model": model, "optim": optimizer, "closure": closure}


def losses_of_its_own(root: str) -> list[torch.Tensor]:
    state = by_lbfgs()
    closure = state.pop("closure")
    ckpt.save(state, root, step=1)
    optimizer_state_dict(state["model"], state["optim"])
    other = by_lbfgs()
    resume = other.pop("closure")
    ckpt.load(other, root)
    assert first_state(other["optim"])["prev_loss"] == first_state(state["optim"])["prev_loss"]
    for optimizer, step in ((state["optim"], closure), (other["optim"], resume)):
        optimizer.step(step)
    for one, two in zip(state["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(one, two)
    return [param.detach() for param in state["model"].parameters()]


def on_another_number(root: str) -> None:
    other = by_lbfgs()
    del other["closure"]
    ckpt.load(other, root)
    assert "prev_loss" in first_state(other["optim"])


@pytest.mark.ranks
def test_lbfgs_keeps_each_ranks_own_loss(tmp_path: Path) -> None:
    run_ranks(2, losses_of_its_own, str(tmp_path), timeout_seconds=300)
    run_ranks(1, on_another_number, str(tmp_path), timeout_seconds=300)


# --- saves in the background ---------------------------------------------------------------------


def in_the_background(root: str) -> None:
    for engine in ("fully", "flat", "ddp"):
        state = trained(engine)
        url = f"{root}/{engine}"
        ckpt.save(state, url, step=1)
        pending = None
        with on_the_last(state, one_more):
            pending = ckpt.async_save(state, url, step=2)
        with pytest.raises(InvalidState, match="step: the ranks have different values"):
            pending.result()
        pending = ckpt.async_save(state, url, step=3)
        with on_the_last(state, one_more):  # after the call the state is the training's again
            pending.result()
        assert [info.step for info in ckpt.list_steps(url)] == [1, 3]


@pytest.mark.ranks
def test_a_background_save_compares_what_it_has_copied(tmp_path: Path) -> None:
    run_ranks(2, in_the_background, str(tmp_path), timeout_seconds=300)


# --- what it costs -------------------------------------------------------------------------------


def counted(root: str) -> tuple[list[str], int]:
    """The rounds of a save of an unchanged structure, and what digests add to this rank's message:
    themselves, and a few bytes that say whose they are.
    """
    kinds = ("gather", "gather_to_coordinator", "merge_to_coordinator", "broadcast", "agree")
    rounds = noted_rounds(*kinds, "transfers")
    parts: list[Part] = []
    taken = part_of_files

    def kept(*args: Any, **named: Any) -> Part:
        parts.append(taken(*args, **named))
        return parts[-1]

    saving_task.part_of_files = kept  # type: ignore[attr-defined]
    state = trained("fully")
    ckpt.save(state, root, step=1)
    rounds.clear()
    ckpt.save(state, root, step=2)
    rest = parts[-1].rest
    assert len(rest.replicas[0][0].data) == 4 * 4, "one for each parameter, on all ranks"
    sizes = [len(encode_rest(one, bytes(32))) for one in (replace(rest, replicas=()), rest)]
    return rounds, sizes[1] - sizes[0]


ROUNDS = ["open", "settle", "attempt", "write", "parts", "commit", "report"]


@pytest.mark.ranks
def test_digests_add_four_bytes_each_and_no_round(tmp_path: Path) -> None:
    results = run_ranks(2, counted, str(tmp_path), timeout_seconds=300)
    for rounds, grown in results:
        assert rounds == ROUNDS
        assert 4 * 4 < grown < 4 * 4 + 50


def _steps_of_the_tiny(directory: str) -> dict[str, float]:
    """By engine, the step of a bias of one element after two steps, in a save and in a dict."""
    steps = {}
    for engine in ("orig", "their_orig", "fully", "their_fully"):
        torch.manual_seed(0)
        model = ENGINES[engine](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
        state = {"model": model, "optim": optimizer}
        ckpt.save(state, f"{directory}/{engine}", step=1)
        with ckpt.open(f"{directory}/{engine}") as checkpoint:
            steps[engine] = float(checkpoint["optim.state.1.bias.step"])
        taken = optimizer_state_dict(model, optimizer)
        steps[f"{engine}, dict"] = float(taken["state"]["1.bias"]["step"])
    return steps


@pytest.mark.ranks
def test_a_rank_without_elements_of_a_parameter_need_not_count_its_steps(tmp_path: Path) -> None:
    """Adagrad has state from the start: it counts none where there is nothing to step."""
    for steps in run_ranks(2, _steps_of_the_tiny, str(tmp_path)):
        assert len(steps) == 8 and set(steps.values()) == {2.0}, steps
