"""Tensors of a live state that share memory: a load fills each byte once, or refuses before it
reads.

Two views with a common element cannot both be loaded; views that only interleave can. Tied tensors
take one tensor of a checkpoint, and what it has for the other name is left over, and named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import InvalidState, Mismatch
from ckpt.layout.memory import MemoryRanges, overlaps_itself
from ckpt.service.policies import EverySteps

State = dict[str, Any]


class Buffers(nn.Module):
    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("a", a)
        self.register_buffer("b", b)


def overlaid() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.zeros(15)
    return base[:10], base[5:]


def in_array() -> State:
    base = np.zeros(15, dtype=np.float32)
    return {"a": base[:10], "b": base[5:]}


OVERLAPS: dict[str, Callable[[], State]] = {
    "tensors": lambda: dict(zip("ab", overlaid(), strict=True)),
    "arrays": in_array,
    "buffers": lambda: {"m": Buffers(*overlaid())},
}


def saved(root: str, names: State) -> None:
    flat = {"a": torch.arange(10.0), "b": torch.arange(10.0) + 100}
    ckpt.save({"m": flat} if "m" in names else flat, root, step=1)


@pytest.mark.parametrize("kind", OVERLAPS)
def test_overlapping_views_are_refused_unread(kind: str, tmp_path: Path) -> None:
    state = OVERLAPS[kind]()
    saved(str(tmp_path), state)
    with pytest.raises(InvalidState, match=r"b: shares memory with (m\.)?a"):
        ckpt.load(state, str(tmp_path))
    held = state["m"].a if "m" in state else state["a"]
    assert not held.any()


def test_a_restore_blames_the_state_for_overlapping_views(tmp_path: Path) -> None:
    """It went back over every checkpoint, and ended in NoCheckpoint."""
    saved(str(tmp_path), {})
    state = {**OVERLAPS["tensors"](), "step": 0}
    checkpointer = ckpt.Checkpointer(state, str(tmp_path), save=EverySteps(10**6))
    with checkpointer, pytest.raises(InvalidState, match="shares memory"):
        checkpointer.restore()


def test_a_near_restore_blames_the_state_too(tmp_path: Path) -> None:
    near = ckpt.Near(str(tmp_path / "near"), every=EverySteps(1))
    tensors = {"a": torch.arange(10.0), "b": torch.arange(10.0) + 100}
    rule = EverySteps(10**6)
    root = str(tmp_path / "run")
    with ckpt.Checkpointer({**tensors, "step": 0}, root, save=rule, near=near) as first:
        first.step(1)
    state = {**OVERLAPS["tensors"](), "step": 0}
    checkpointer = ckpt.Checkpointer(state, root, save=rule, near=near)
    with checkpointer, pytest.raises(InvalidState, match="shares memory"):
        checkpointer.restore()


def test_one_of_two_overlapping_views_loads_with_skip(tmp_path: Path) -> None:
    state = OVERLAPS["tensors"]()
    saved(str(tmp_path), state)
    ckpt.load(state, str(tmp_path), skip=["b"])
    assert torch.equal(state["a"], torch.arange(10.0))


def test_interleaved_views_load(tmp_path: Path) -> None:
    parts = {"a": torch.randn(4, 6), "b": torch.randn(4, 6)}
    ckpt.save(parts, str(tmp_path), step=1)
    base = torch.zeros(4, 12)
    ckpt.load({"a": base[:, :6], "b": base[:, 6:]}, str(tmp_path))
    assert torch.equal(base, torch.cat([parts["a"], parts["b"]], 1))


def test_a_view_that_overlaps_itself_is_refused(tmp_path: Path) -> None:
    ckpt.save({"a": torch.arange(10.0).reshape(5, 2)}, str(tmp_path), step=1)
    with pytest.raises(Mismatch, match="share memory"):
        ckpt.load({"a": torch.zeros(6).as_strided((5, 2), (1, 1))}, str(tmp_path))


def test_overlaps_are_those_of_single_elements() -> None:
    """Against the elements' addresses, for random strided views of one small memory."""
    generator = np.random.default_rng(1)
    counts = [0, 0]
    for _ in range(300):
        base = torch.zeros(60)
        views = []
        for _ in range(2):
            shape = generator.integers(1, 4, 2).tolist()
            stride = generator.integers(0, 8, 2).tolist()
            views.append(base.as_strided(shape, stride, int(generator.integers(0, 30))))
        places = [
            (
                v.storage_offset()
                + np.add.outer(*map(np.multiply, map(np.arange, v.shape), v.stride()))
            )
            for v in views
        ]
        shared = bool(np.intersect1d(*places).size)
        memory = MemoryRanges()
        for name, view in zip("ab", views, strict=True):
            memory.add(name, view)
        assert (memory.overlapping() is not None) == shared
        assert overlaps_itself(views[0]) == (len(np.unique(places[0])) < places[0].size)
        counts[shared] += 1
    assert min(counts) > 50


class Tied(nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


Form = Callable[[nn.Module], Any]
FORMS: dict[str, Form] = {"module": lambda m: m, "state_dict": lambda m: m.state_dict()}


@pytest.mark.parametrize("form", FORMS)
def test_untied_tensors_do_not_load_into_tied_ones(form: str, tmp_path: Path) -> None:
    """A state dict reported `head.weight` as loaded, and never read it."""
    ckpt.save({"m": FORMS[form](Tied(tie=False))}, str(tmp_path), step=1)
    live = Tied(tie=True)
    before, state = live.embed.weight.clone(), {"m": FORMS[form](live)}
    with pytest.raises(Mismatch, match=r"m\.head\.weight: .* ties it to m\.embed\.weight.*differ"):
        ckpt.load(state, str(tmp_path))
    assert torch.equal(live.embed.weight, before), "the state was changed"
    loaded = ckpt.load(state, str(tmp_path), strict=False).loaded
    assert (loaded.tensors, loaded.unexpected) == (("m.embed.weight",), ("m.head.weight",))


@pytest.mark.parametrize("form", FORMS)
def test_two_tensors_of_the_same_bits_load_into_a_tied_one(form: str, tmp_path: Path) -> None:
    """As torch's DCP stores it, which knows no ties."""
    source, target = Tied(tie=False), Tied(tie=True)
    source.head.weight = nn.Parameter(source.embed.weight.detach().clone())
    ckpt.save({"m": FORMS[form](source)}, str(tmp_path), step=1)
    ckpt.load({"m": FORMS[form](target)}, str(tmp_path))
    assert torch.equal(target.head.weight, source.embed.weight)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tie", [False, True])
def test_tied_tensors_load_into_tied_and_untied(form: str, tie: bool, tmp_path: Path) -> None:
    source, target = Tied(tie=True), Tied(tie=tie)
    ckpt.save({"m": FORMS[form](source)}, str(tmp_path), step=1)
    ckpt.load({"m": FORMS[form](target)}, str(tmp_path))
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name


def two_groups(rates: tuple[torch.Tensor, torch.Tensor], shared: torch.Tensor | None) -> State:
    model = nn.Linear(3, 2)
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), rates, strict=True)]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    if shared is not None:
        for param in model.parameters():
            optimizer.state[param]["calls"] = shared
    return {"m": model, "o": optimizer}


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.5, 0.25)])
def test_a_tensor_of_two_groups_stays_one_where_it_can(
    rates: tuple[float, float], tmp_path: Path
) -> None:
    """Groups share the tensor of a rate, parameters a counter; a checkpoint may have two values."""
    calls = torch.tensor(7.0)
    source = two_groups((torch.tensor(rates[0]), torch.tensor(rates[1])), calls)
    weight, bias = source["m"].parameters()
    if rates[0] != rates[1]:
        source["o"].state[bias]["calls"] = torch.tensor(8.0)
    ckpt.save(source, str(tmp_path), step=1)
    rate, live = torch.tensor(0.1), torch.tensor(0.0)
    target = two_groups((rate, rate), live)
    ckpt.load(target, str(tmp_path))
    groups, states = target["o"].param_groups, target["o"].state
    weight, bias = target["m"].parameters()
    assert [float(group["lr"]) for group in groups] == list(rates)
    assert [float(states[p]["calls"]) for p in (weight, bias)] == [
        7,
        7 if rates[0] == rates[1] else 8,
    ]
    is_one = groups[0]["lr"] is groups[1]["lr"] is rate
    assert is_one == (rates[0] == rates[1])
    assert (states[weight]["calls"] is states[bias]["calls"] is live) == is_one
