"""What a checkpoint keeps once of several ranks' optimizer state is equal on all of them, or the
save fails on all of them by name.

Real ranks, every engine: one rank's step, number or small plain tensor is changed in place, between
saves of one unchanged structure. Messages and rounds are counted on ranks that are threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.format.part import NO_REPLICAS, Part
from ckpt.saving import task as saving_task
from ckpt.world.torch_world import TorchWorld
from sharding import FullyShardedDataParallel, fully_shard
from tests.ranks import run_ranks

CPU = torch.device("cpu")
Change = Callable[[torch.optim.Optimizer], None]


def by_rows(module: nn.Module, shard: Callable[..., Any]) -> nn.Module:
    shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "ddp": DistributedDataParallel,
    "fully": lambda module: by_rows(module, fully_shard),
    "their_fully": lambda module: by_rows(module, their_fully_shard),
    "flat": lambda module: FullyShardedDataParallel(module, device_id=CPU),
    "orig": lambda module: FullyShardedDataParallel(module, device_id=CPU, use_orig_params=True),
    "their_flat": lambda module: Theirs(module, device_id=CPU),
    "their_orig": lambda module: Theirs(module, device_id=CPU, use_orig_params=True),
}


def trained(engine: str, *, fused: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ENGINES[engine](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def first_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of the first parameter of which this rank has state; the last rank shares it with another."""
    states = [optimizer.state.get(param) for param in optimizer.param_groups[0]["params"]]
    return next(state for state in states if state)


@contextmanager
def on_the_last(state: dict[str, Any], change: Change) -> Iterator[None]:
    """The optimizer's state, changed in place on the last rank for the time of the block."""
    optimizer = state["optim"]
    is_here = dist.get_rank() == dist.get_world_size() - 1
    contents = [content for held in optimizer.state.values() for content in held.values()]
    contents += [inside for content in contents if isinstance(content, list) for inside in content]
    tensors = [content for content in contents if isinstance(content, torch.Tensor)]
    kept = [tensor.detach().clone() for tensor in tensors]
    if is_here:
        change(optimizer)
    try:
        yield
    finally:
        for tensor, was in zip(tensors, kept, strict=True):
            if not torch.equal(tensor, was):
                tensor.detach().copy_(was)


def one_more(optimizer: torch.optim.Optimizer) -> None:
    first_state(optimizer)["step"].add_(1)


def refused_save(state: dict[str, Any], root: str, step: int, name: str) -> str:
    """The problem of the changed parameter; a flat one has all members of the same state."""
    with pytest.raises(ckpt.InvalidState) as caught:
        ckpt.save(state, root, step=step)
    texts = [text for text in caught.value.problems if text.split(":")[0].endswith(f".{name}")]
    assert texts and len(texts) == len(caught.value.problems), caught.value.problems
    is_flat = any("flat" in part for part in root.split("/")[-1].split("_"))
    assert len(texts) == 1 or is_flat, texts
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, str(caught.value))
    assert set(everyone) == {str(caught.value)}, "one error on all ranks"
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


class Own(torch.optim.SGD):
    """Has a number, a count without dims and small tensors for each parameter."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param].update(calls=1, count=torch.tensor(1))
            if type(param) is nn.Parameter and param.grad is not None:
                self.state[param].update(
                    factors=torch.ones(3),
                    nested=[torch.ones(2), None],
                    moment=torch.ones_like(param),
                )


def more_of(name: str) -> Change:
    def change(optimizer: torch.optim.Optimizer) -> None:
        state = first_state(optimizer)
        content = state[name][0] if name == "nested" else state[name]
        if isinstance(content, torch.Tensor):
            content.detach().add_(1)
        else:
            state[name] = content + 1

    return change


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
        model = ENGINES[engine](nn.Sequential(nn.Linear(4, 4, bias=False)))
        optimizer = Own(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        state = {"model": model, "optim": optimizer}
        url = f"{root}/{engine}"
        ckpt.save(state, url, step=1)
        for step, name in enumerate(names, start=2):
            shown = {"calls": "calls~int", "nested": "nested.0"}.get(name, name)
            with on_the_last(state, more_of(name)):
                text = refused_save(state, url, step, shown)
                assert f'{{"{name}": PerRank(' in text, text
            for held in optimizer.state.values():
                held["calls"] = 1
        ckpt.save(state, url, step=9)
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1 + dist.get_rank()))
    with pytest.raises(ckpt.InvalidState, match=r"param_groups\.0\.lr: the ranks have different"):
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
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, str(caught.value))
        assert set(everyone) == {str(caught.value)}, "one error on all ranks"
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
        ckpt.declare_optimizer_state(state["optim"], {"step": ckpt.PerRank(None)})
        ckpt.save(state, url, step=1)
        other = trained(engine)
        ckpt.declare_optimizer_state(other["optim"], {"step": ckpt.PerRank(None)})
        ckpt.load(other, url)
        assert {float(held["step"]) for held in other["optim"].state.values()} == {10.0 + rank}


@pytest.mark.ranks
def test_a_step_that_is_declared_each_ranks_own_is_kept_for_each(tmp_path: Path) -> None:
    run_ranks(2, really_own, str(tmp_path), timeout_seconds=300)


# --- saves in the background ---------------------------------------------------------------------


def in_the_background(root: str) -> None:
    for engine in ("fully", "flat", "ddp"):
        state = trained(engine)
        url = f"{root}/{engine}"
        ckpt.save(state, url, step=1)
        pending = None
        with on_the_last(state, one_more):
            pending = ckpt.async_save(state, url, step=2)
        with pytest.raises(ckpt.InvalidState, match="step: the ranks have different values"):
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
    nothing but themselves.
    """
    rounds: list[str] = []
    parts: list[Part] = []
    for name in ("gather", "gather_to_coordinator", "broadcast", "agree", "all_to_all"):
        real = getattr(TorchWorld, name)

        def noted(self: Any, phase: str, *args: Any, real: Any = real) -> Any:
            rounds.append(phase)
            return real(self, phase, *args)

        setattr(TorchWorld, name, noted)
    taken = saving_task.part_again

    def kept(*args: Any) -> Part:
        parts.append(taken(*args))
        return parts[-1]

    saving_task.part_again = kept  # type: ignore[assignment]
    state = trained("fully")
    ckpt.save(state, root, step=1)
    rounds.clear()
    ckpt.save(state, root, step=2)
    [part] = parts
    assert len(part.replicas.digests) == 4, "one for each parameter, on all ranks"
    grown = len(part.variable()) - len(replace(part, replicas=NO_REPLICAS).variable())
    return rounds, grown


SESSION = ["open", "agree on open", "settle", "agree on settle"]
ROUNDS = [*SESSION, "attempt", "write", "agree on write", "parts", "commit", "agree on commit"]


@pytest.mark.ranks
def test_digests_add_four_bytes_each_and_no_round(tmp_path: Path) -> None:
    results = run_ranks(2, counted, str(tmp_path), timeout_seconds=300)
    for rounds, grown in results:
        assert rounds == [*ROUNDS, "report"]
        assert grown == 4 * 4


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
        taken = ckpt.optimizer_state_dict(model, optimizer)
        steps[f"{engine}, dict"] = float(taken["state"]["1.bias"]["step"])
    return steps


@pytest.mark.ranks
def test_a_rank_without_elements_of_a_parameter_need_not_count_its_steps(tmp_path: Path) -> None:
    """Adagrad has state from the start: it counts none where there is nothing to step."""
    for steps in run_ranks(2, _steps_of_the_tiny, str(tmp_path)):
        assert len(steps) == 8 and set(steps.values()) == {2.0}, steps
