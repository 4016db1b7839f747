"""12 layouts of 8 ranks x 12: what any of them saves, each of them loads, bit for bit.

Method: no processes. A layout is a mesh of pipeline stages, replicas (data or context), shards,
experts among the shards, and tensor parallel ranks. From it follows which rank holds which slices,
declared through `__ckpt_pieces__`, and which plain tensors, of which nothing is declared. Ranks are
threads, the store is memory. What is loaded is compared with the same slices of whole tensors, cut
in this file. Each layout saves once. The default run draws pairs, `--soak` takes all.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import ckpt
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.region import Box, whole
from ckpt.loading import load, plan
from ckpt.tools.salvage import salvage
from storage import Store, open_store
from tests.e2e.job import Job
from tests.salvaged import matches_manifest


@pytest.fixture(autouse=True)
def _listed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are small here; elsewhere they are listed whole."""
    monkeypatch.setattr(load, "LISTED_MIN", 1)
    monkeypatch.setattr(plan, "LISTED_MIN", 1)


RANKS = 8
LAYERS = 8
# Uneven along every dim; experts are the first dim of a stack.
SHAPES = {"w": (13, 10), "b": (7,), "experts": (8, 3, 5)}
PLAIN = (5,)


class Mesh(NamedTuple):
    """Sizes of the axes, outermost first; their product is the number of ranks.

    `copies` are replicas of data and context parallelism. `experts` divides `shards`: the stacks of
    experts are cut over so many of these along dim 0, and over the rest of them along dim 1.
    """

    stages: int = 1
    copies: int = 1
    shards: int = 1
    tensor: int = 1
    experts: int = 1


LAYOUTS = {
    "pp8": Mesh(stages=8),
    "tp8": Mesh(tensor=8),
    "fsdp8": Mesh(shards=8),
    "ddp8": Mesh(copies=8),
    "hsdp 2x4": Mesh(copies=2, shards=4),
    "ep4 x fsdp2": Mesh(shards=8, experts=4),
    "pp2 x fsdp4": Mesh(stages=2, shards=4),
    "pp4 x tp2": Mesh(stages=4, tensor=2),
    "pp2 x hsdp 2x2": Mesh(stages=2, copies=2, shards=2),
    "pp2 x fsdp2 x tp2": Mesh(stages=2, shards=2, tensor=2),
    "pp2 x cp2 x ep2": Mesh(stages=2, copies=2, shards=2, experts=2),
    "cp2 x ep2 x tp2": Mesh(copies=2, shards=2, tensor=2, experts=2),
}


class Place(NamedTuple):
    """Coordinates of a rank in a mesh."""

    stage: int
    copy: int
    shard: int
    tensor: int


def places(mesh: Mesh) -> list[Place]:
    """Of all ranks, in order."""
    return [
        Place(stage, copy, shard, tensor)
        for stage in range(mesh.stages)
        for copy in range(mesh.copies)
        for shard in range(mesh.shards)
        for tensor in range(mesh.tensor)
    ]


def layers_of(mesh: Mesh, place: Place) -> range:
    """The layers of the place's stage."""
    count = LAYERS // mesh.stages
    return range(place.stage * count, (place.stage + 1) * count)


def slices_of(name: str, mesh: Mesh, place: Place) -> tuple[slice, ...]:
    """What a place of the layer's own stage holds of a tensor, whichever layer it is of."""
    shape = SHAPES[name]
    cuts = {0: (mesh.shards, place.shard)}
    if name == "w":
        cuts[1] = (mesh.tensor, place.tensor)
    elif name == "experts":
        rest = mesh.shards // mesh.experts
        cuts = {0: (mesh.experts, place.shard % mesh.experts)}
        cuts[1] = (rest, place.shard // mesh.experts)
    return tuple(_chunk(length, *cuts.get(dim, (1, 0))) for dim, length in enumerate(shape))


def _chunk(length: int, parts: int, part: int) -> slice:
    size = -(-length // parts)
    return slice(min(part * size, length), min((part + 1) * size, length))


class Laid(nn.Module):
    """A rank's parts of its stage's layers."""

    def __init__(self, layout: str, rank: int, full: dict[str, torch.Tensor]) -> None:
        super().__init__()
        mesh = LAYOUTS[layout]
        everywhere = places(mesh)
        self.place = everywhere[rank]
        self.slices: dict[str, tuple[slice, ...]] = {}
        self.holders: dict[str, tuple[int, ...]] = {}
        self.cut = nn.ParameterDict()
        for layer in layers_of(mesh, self.place):
            for name in SHAPES:
                fqn = f"layers.{layer}.{name}"
                mine = slices_of(name, mesh, self.place)
                self.slices[fqn] = mine
                self.holders[fqn] = tuple(
                    other
                    for other, place in enumerate(everywhere)
                    if place.stage == self.place.stage and slices_of(name, mesh, place) == mine
                )
                self.cut[fqn.replace(".", "/")] = nn.Parameter(full[fqn][mine].clone())

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        for fqn, cut in self.slices.items():
            parameter = self.cut[fqn.replace(".", "/")]
            local = parameter.detach()
            inside = whole(tuple(local.shape))
            region = Box(tuple(one.start for one in cut), inside.shape)
            shape = SHAPES[fqn.rpartition(".")[2]]
            piece = Piece(fqn, shape, local.dtype, region, inside, self.holders[fqn])
            yield Owned(parameter, local, (View((piece,)),), True)


class Scales(nn.Module):
    """Plain tensors of a stage: one for each layer, and one in the first and the last stage."""

    def __init__(self, layers: range, full: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.scales = nn.ParameterDict(
            {str(layer): nn.Parameter(full[f"scales.{layer}"].clone()) for layer in layers}
        )
        if 0 in layers or LAYERS - 1 in layers:
            self.tied = nn.Parameter(full["tied"].clone())


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    """The whole model."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"layers.{n}.{name}": s for n in range(LAYERS) for name, s in SHAPES.items()}
    shapes |= {f"scales.{n}": PLAIN for n in range(LAYERS)} | {"tied": PLAIN}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def state_of(layout: str, rank: int, seed: int) -> dict[str, Any]:
    """What a rank holds after one step on values of `seed`; AdamW works element by element."""
    full, gradients = full_tensors(seed), full_tensors(seed + 1000)
    laid = Laid(layout, rank, full)
    scales = Scales(layers_of(LAYOUTS[layout], laid.place), full)
    optimizer = torch.optim.AdamW([*laid.parameters(), *scales.parameters()], lr=0.01 * (seed + 1))
    for fqn, cut in laid.slices.items():
        laid.cut[fqn.replace(".", "/")].grad = gradients[fqn][cut].clone()
    for name, parameter in scales.named_parameters():
        parameter.grad = gradients[name].clone()
    optimizer.step()
    return {"model": ckpt.Stages(laid, scales), "optim": optimizer, "step": seed}


def expect(state: dict[str, Any], good: dict[str, Any]) -> None:
    assert state["step"] == good["step"]
    loaded, wanted = state["optim"], good["optim"]
    assert loaded.param_groups[0]["lr"] == wanted.param_groups[0]["lr"]
    pairs = zip(loaded.param_groups[0]["params"], wanted.param_groups[0]["params"], strict=True)
    for parameter, expected in pairs:
        assert torch.equal(parameter, expected)
        if not parameter.numel():
            continue  # a rank that holds nothing needs no state
        for key, value in wanted.state[expected].items():
            assert torch.equal(loaded.state[parameter][key], value), key


@cache
def saved(layout: str) -> Store:
    """A store with a checkpoint of that layout."""
    store = open_store(f"memory://pairs-{layout.replace(' ', '-')}")
    states = [state_of(layout, rank, seed=3) for rank in range(RANKS)]
    Job(RANKS, lambda rank: store).save(states.__getitem__, step=3)
    return store


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_what_a_layout_saved_every_layout_loads(source: str, target: str) -> None:
    states = [state_of(target, rank, seed=5) for rank in range(RANKS)]
    store = saved(source)
    Job(RANKS, lambda rank: store).load(states.__getitem__)
    for rank, state in enumerate(states):
        expect(state, state_of(target, rank, seed=3))


@pytest.mark.parametrize("layout", ["pp8", "pp4 x tp2"])
def test_a_lost_manifest_of_stages_is_rebuilt_from_the_files_of_all_ranks(layout: str) -> None:
    """Values and param groups lie in the files of several ranks."""
    store = saved(layout)
    (manifest,) = [info.key for info in store.list("steps/") if info.key.endswith("MANIFEST")]
    prefix = manifest.rpartition("/")[0]
    report = salvage(store, prefix)
    assert not report.problems and not report.missing
    assert matches_manifest(store, report)
