"""Rows of an embedding and of its moments grow or shrink on load, on any layout.

Method: a small model with AdamW, whole or cut by boxes and spans over four ranks (threads over one
memory store), saved with one vocabulary and loaded with another by each rule for new rows. What is
loaded is compared with slices of whole tensors, cut and filled in this file; so it is for torch's
own engines, on four processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.errors import Mismatch
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.region import Region, whole
from ckpt.loading.load import LoadOptions
from storage import Store, open_store
from tests.e2e.job import Job
from tests.e2e.test_stacks import columns, everything, rows, runs, taken
from tests.ranks import run_ranks
from tests.thread_ranks import RanksFailed

RANKS = 4
WIDTH = 6
LAYOUTS = {"whole": everything, "rows": rows, "columns": columns, "runs": runs}
RULES = ("zeros", "mean", "init")
OLD, MORE, FEWER = 10, 17, 5
MOMENTS = ("exp_avg", "exp_avg_sq")


def numbers(seed: int, vocabulary: int, kind: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + kind)
    return torch.randn(vocabulary, WIDTH, generator=generator)


class Embedding(nn.Module):
    """A rank's share of an embedding and of a layer that keeps its size."""

    def __init__(self, layout: str, rank: int, vocabulary: int, seed: int) -> None:
        super().__init__()
        self.pieces: dict[str, Piece] = {}
        for name, full in {
            "embed": numbers(seed, vocabulary),
            "out": numbers(seed, 4, kind=1),
        }.items():
            shape = tuple(full.shape)
            region: Region | None = LAYOUTS[layout](shape, rank)
            assert region is not None
            local = nn.Parameter(taken(full, region))
            self.register_parameter(name, local)
            holders = tuple(range(RANKS)) if layout == "whole" else (rank,)
            self.pieces[name] = Piece(
                name, shape, full.dtype, region, whole(tuple(local.shape)), holders
            )

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        for name, piece in self.pieces.items():
            parameter = self.get_parameter(name)
            yield Owned(parameter, parameter.detach(), (View((piece,)),), True)


def state_of(layout: str, rank: int, vocabulary: int, seed: int) -> dict[str, Any]:
    """A training whose moments are numbers that tell rows apart."""
    model = Embedding(layout, rank, vocabulary, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 * seed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, piece in model.pieces.items():
        parameter = model.get_parameter(name)
        full_rows = piece.global_shape[0]
        kinds = (0, 2, 3) if name == "embed" else (1, 4, 5)
        parameter.data.copy_(taken(numbers(seed, full_rows, kinds[0]), piece.region))
        for key, kind in zip(MOMENTS, kinds[1:], strict=True):
            state = optimizer.state[parameter][key]
            state.copy_(taken(numbers(seed, full_rows, kind), piece.region))
    return {"model": model, "optim": optimizer, "step": seed}


def resized(saved: torch.Tensor, live: torch.Tensor, rule: str) -> torch.Tensor:
    """What a load has to make, by hand."""
    count = min(len(saved), len(live))
    result = live.clone()
    result[:count] = saved[:count]
    if rule == "zeros":
        result[count:] = 0
    elif rule == "mean":
        result[count:] = saved.double().mean(0).to(saved.dtype)
    return result


def expect(state: dict[str, Any], vocabulary: int, rule: str, *, fresh: bool = False) -> None:
    model, optimizer = state["model"], state["optim"]
    assert state["step"] == 3 and optimizer.param_groups[0]["lr"] == 1.5
    for name, kinds in {"embed": (0, 2, 3), "out": (1, 4, 5)}.items():
        parameter, region = model.get_parameter(name), model.pieces[name].region
        tensors = [parameter.detach()]
        if parameter.numel():
            tensors += [optimizer.state[parameter][key] for key in MOMENTS]
        for tensor, kind in zip(tensors, kinds, strict=False):
            old, new = (OLD, vocabulary) if name == "embed" else (4, 4)
            live = numbers(5, new, kind)
            if fresh and kind != kinds[0]:
                live = torch.zeros_like(live)
            wanted = taken(resized(numbers(3, old, kind), live, rule), region)
            assert torch.equal(tensor, wanted), (name, kind)


def saved(layout: str) -> Store:
    store = open_store(f"memory://resize-{layout}")
    states = [state_of(layout, rank, OLD, seed=3) for rank in range(RANKS)]
    Job(RANKS, lambda rank: store).save(states.__getitem__, step=3)
    return store


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocabulary", [MORE, FEWER])
def test_rows_grow_and_shrink_on_every_pair_of_layouts(vocabulary: int, rule: Any) -> None:
    for source in LAYOUTS:
        store = saved(source)
        for target in LAYOUTS:
            states = [state_of(target, rank, vocabulary, seed=5) for rank in range(RANKS)]
            options = LoadOptions(resize={"model.embed": rule})
            Job(RANKS, lambda rank, store=store: store).load(states.__getitem__, options=options)
            for state in states:
                expect(state, vocabulary, rule)


def test_fresh_moments_of_new_rows_are_zeros_with_init() -> None:
    store = saved("rows")
    states = [state_of("runs", rank, MORE, seed=5) for rank in range(RANKS)]
    for state in states:
        state["optim"].state.clear()
    Job(RANKS, lambda rank: store).load(
        states.__getitem__, options=LoadOptions(resize={"model": "init"})
    )
    for state in states:
        expect(state, MORE, "init", fresh=True)


def test_moments_can_have_a_rule_of_their_own() -> None:
    store = saved("columns")
    states = [state_of("whole", rank, MORE, seed=5) for rank in range(RANKS)]
    resize: Any = {"model.embed": "mean", "optim.state.embed": "zeros"}
    Job(RANKS, lambda rank: store).load(states.__getitem__, options=LoadOptions(resize=resize))
    model, optimizer = states[2]["model"], states[2]["optim"]
    assert torch.equal(model.embed[-1].detach(), numbers(3, OLD).double().mean(0).float())
    assert not optimizer.state[model.embed]["exp_avg"][OLD:].any()
    assert optimizer.state[model.embed]["exp_avg"][:OLD].all()


def refused(resize: Any, change: Any = None, layout: str = "rows") -> str:
    """The one error of all ranks; no state may have changed."""
    store = saved("rows")
    states = [state_of(layout, rank, MORE, seed=5) for rank in range(RANKS)]
    for rank, state in enumerate(states):
        if change is not None:
            change(state, rank)
    before = [state["model"].embed.detach().clone() for state in states]
    with pytest.raises(RanksFailed) as failed:
        Job(RANKS, lambda rank: store).load(states.__getitem__, options=LoadOptions(resize=resize))
    errors = failed.value.errors
    assert len(errors) == RANKS and all(isinstance(one, Mismatch) for one in errors.values())
    (text,) = {str(one) for one in errors.values()}
    for state, old in zip(states, before, strict=True):
        assert torch.equal(state["model"].embed, old)
    return text


def test_without_a_rule_the_error_names_resize() -> None:
    text = refused({})
    assert "model.embed: checkpoint has shape (10, 6), state has (17, 6)" in text
    assert "resize={'model.embed': 'zeros'}" in text


def test_a_rule_that_matches_nothing_is_refused() -> None:
    text = refused({"model.embed": "mean", "model.embedding": "mean"})
    assert "resize='model.embedding': matches no tensor of the state" in text


def test_other_dims_than_rows_are_refused() -> None:
    def wider(state: dict[str, Any], rank: int) -> None:
        model = state["model"]
        piece = model.pieces["out"]
        region = rows((4, WIDTH + 1), rank)
        model.out = nn.Parameter(torch.zeros(region.shape))
        model.pieces["out"] = piece._replace(
            global_shape=(4, WIDTH + 1), region=region, local_region=whole(region.shape)
        )
        state["optim"] = torch.optim.AdamW(model.parameters())

    text = refused({"model": "zeros"}, wider)
    assert "model.out: checkpoint has shape (4, 6), state has (4, 7)" in text
    assert "resize= cannot change: dim 0 alone" in text


def test_state_that_no_row_owns_is_refused(tmp_path: Path) -> None:
    def training(vocabulary: int, *, preconditioner: bool) -> dict[str, Any]:
        model = nn.Embedding(vocabulary, 3)
        optimizer = torch.optim.Adafactor(model.parameters())
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        if preconditioner:
            its = optimizer.state[model.weight]
            its["left"] = torch.eye(vocabulary)
        return {"model": model, "optim": optimizer}

    for preconditioner in (False, True):
        url = str(tmp_path / str(preconditioner))
        old, new = (training(v, preconditioner=preconditioner) for v in (8, 11))
        ckpt.save(old, url, step=1)
        if preconditioner:
            with pytest.raises(Mismatch) as failed:
                ckpt.load(new, url, resize={"model": "zeros"})
            text = "optim.state.weight.left: checkpoint has (8, 8), the parameter (11, 3)"
            assert text in str(failed.value)
            continue
        ckpt.load(new, url, resize={"model": "zeros"})
        mine, its = (one["optim"].state[one["model"].weight] for one in (new, old))
        assert torch.equal(mine["row_var"][:8], its["row_var"]) and not mine["row_var"][8:].any()
        assert torch.equal(mine["col_var"], its["col_var"])


def test_numbers_that_have_no_mean_are_refused(tmp_path: Path) -> None:
    ckpt.save({"ids": torch.arange(6)}, str(tmp_path), step=1)
    with pytest.raises(Mismatch, match=r"6 rows of torch\.int64, which have no mean"):
        ckpt.load({"ids": torch.zeros(8, dtype=torch.int64)}, str(tmp_path), resize={"ids": "mean"})
    with pytest.raises(ValueError, match="expected one of 'zeros', 'mean', 'init'"):
        ckpt.load({"ids": torch.zeros(8)}, str(tmp_path), resize={"ids": "random"})


def test_a_tied_embedding_is_resized_by_either_name(tmp_path: Path) -> None:
    def tied(vocabulary: int) -> nn.Module:
        model = nn.ModuleDict(
            {"embed": nn.Embedding(vocabulary, 3), "head": nn.Linear(3, vocabulary, bias=False)}
        )
        model["head"].weight = model["embed"].weight  # type: ignore[assignment]
        return model

    old = tied(8)
    ckpt.save(old, str(tmp_path), step=1)
    for name in ("embed", "head.weight"):
        new = tied(9)
        ckpt.load(new, str(tmp_path), resize={name: "mean"})
        weight = new.get_parameter("head.weight")
        assert torch.equal(weight[:8], old.get_parameter("head.weight"))
        assert torch.equal(weight[8], weight[:8].double().mean(0).float())


def test_tied_rows_are_resized_for_each_name(tmp_path: Path) -> None:
    """What was one tensor is two now: of other sizes, or with rules that contradict each other."""
    rows = numbers(1, 4)
    ckpt.save({"a": rows, "b": rows}, tmp_path, step=1)
    state = {"a": torch.full_like(numbers(2, 6), 9), "b": torch.full_like(numbers(2, 8), 9)}
    with pytest.raises(ckpt.Mismatch, match="one rule for both"):
        ckpt.load(state, tmp_path, resize={"a": "zeros", "b": "mean"})
    ckpt.load(state, tmp_path, resize={"a": "zeros", "b": "zeros"})
    for one in state.values():
        assert torch.equal(one[:4], rows) and not one[4:].any()


def test_checkpointer_and_plan_take_resize(tmp_path: Path) -> None:
    def training(vocabulary: int) -> dict[str, Any]:
        model = nn.Embedding(vocabulary, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return {"model": model, "optim": optimizer}

    old = training(8)
    ckpt.save(old, str(tmp_path), step=4)
    assert not ckpt.plan_load(training(11), str(tmp_path)).fits
    assert ckpt.plan_load(training(11), str(tmp_path), resize={"model": "init"}).fits
    for vocabulary in (11, 8):  # the rule may stay in the script
        state = training(vocabulary)
        with ckpt.Checkpointer(state, str(tmp_path)) as checkpointer:
            report = checkpointer.restore(resize={"model": "zeros"})
        assert report is not None and report.step == 4
        assert torch.equal(state["model"].weight[:8], old["model"].weight)
        assert not state["model"].weight[8:].any()


def _engine(kind: str, vocabulary: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(vocabulary)
    model = nn.Sequential(nn.Embedding(vocabulary, 6), nn.Linear(6, 5))
    if kind == "fsdp1":
        model = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=False
        )
    elif kind == "fsdp2":
        fully_shard(model)
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def _train_wider(url: str) -> None:
    model, optimizer = _engine("fsdp2", OLD)
    ckpt.save({"model": model, "optim": optimizer}, url, step=1)
    with ckpt.open(url) as checkpoint:
        names = [n for n in checkpoint if checkpoint.info(n).shape == (OLD, 6)]
        full = {name: checkpoint[name] for name in names}
    assert len(full) == 3
    for kind in ("fsdp1", "fsdp2", "ddp"):
        for vocabulary in (13, 7):
            model, optimizer = _engine(kind, vocabulary)
            state = {"model": model, "optim": optimizer}
            ckpt.load(state, url, resize={"model.0.weight": "mean"})
            ckpt.save(state, f"{url}-{kind}", step=vocabulary)
            with ckpt.open(f"{url}-{kind}", step=vocabulary) as checkpoint:
                for name, old in full.items():
                    live = torch.zeros(vocabulary, 6)
                    assert torch.equal(checkpoint[name], resized(old, live, "mean")), (kind, name)
            model(torch.arange(4)).square().mean().backward()
            optimizer.step()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in (Shard(0), Shard(1), Replicate()):
        table = {
            "model": {"0": {"weight": distribute_tensor(torch.ones(13, 6), mesh, [placement])}}
        }
        ckpt.load(table, url, strict="state", resize={"model": "zeros"})
        weight: DTensor = table["model"]["0"]["weight"]
        wanted = resized(full["model.0.weight"], torch.ones(13, 6), "zeros")
        assert torch.equal(weight.full_tensor(), wanted)


@pytest.mark.ranks
def test_torch_engines_load_other_vocabularies(tmp_path: Path) -> None:
    run_ranks(RANKS, _train_wider, str(tmp_path / "run"))


@pytest.mark.parametrize("wrong", ["zeros", ["model.embed.weight"]])
def test_a_rule_without_names_is_refused(wrong: Any, tmp_path: Path) -> None:
    ckpt.save({"x": torch.ones(2)}, str(tmp_path), step=1)
    with pytest.raises(TypeError, match="expected a mapping"):
        ckpt.load({"x": torch.ones(3)}, str(tmp_path), resize=wrong)
