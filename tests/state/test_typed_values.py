"""Queues, sets, sizes, dtypes, devices, enums and objects of libraries come back as they were.

Method: each is saved in the places where states have values, and loaded over others of its type, or
where there is nothing yet. "A library's" classes are of this module, entered in the list of known
ones; those of pytorch_optimizer itself are tried by `tests/wild`.
"""

from __future__ import annotations

import enum
from collections import deque
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.errors import CheckpointError, InvalidState, Mismatch
from ckpt.format.codec import encode_values
from ckpt.state import optimizer_kinds, typed_values
from ckpt.state.optimizer_kinds import PerShard
from ckpt.state.values import join_tree, split_tree, unknown_leaves
from sharding import FullyShardedDataParallel
from tests.ranks import run_ranks


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


class Mode(enum.Flag):
    FAST = 1
    SAFE = 2


class Inner:
    def __init__(self) -> None:
        self.shape = torch.Size((2, 3))


class Projector:
    """An object of a library: plain data, a tensor, and another object."""

    def __init__(self, matrix: torch.Tensor | None) -> None:
        self.matrix, self.steps, self.inner = matrix, 3, Inner()


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Inner", "Projector"):
        monkeypatch.setitem(typed_values._CLASSES, f"tests.{name}", __name__)


VALUES: dict[str, tuple[Any, Any]] = {
    "queue": (deque([1, 2.5, (None,)], maxlen=4), deque(maxlen=4)),
    "endless": (deque([deque([1])]), deque([0, 0], maxlen=2)),
    "set": ({3, 1, "a", None, 2.0}, {7}),
    "frozen": (frozenset({b"x"}), frozenset[bytes]()),
    "size": (torch.Size((2, 0)), torch.Size(())),
    "dtype": (torch.bfloat16, torch.float32),
    "device": (torch.device("cpu"), torch.device("cpu")),
    "enum": (Color.BLUE, Color.RED),
    "flags": (Mode.FAST | Mode.SAFE, Mode.FAST),
    "nested": ([{"kinds": (torch.int8, Color.BLUE)}], [{"kinds": (torch.int32, Color.RED)}]),
    "object": (Projector(None), Projector(None)),
    "complex": (1 + 2j, 0j),
    "range": (range(1, 9, 2), range(1)),
    "slice": (slice(None, 3), slice(None)),
    "bytearray": (bytearray(b"xy"), bytearray()),
    "datetime": (datetime(2026, 1, 2, 3, 4, 5, 6, timezone.utc), datetime.min),
    "path": (PurePosixPath("a/b"), PurePosixPath()),
    "namespace": (SimpleNamespace(lr=0.1, layers=[1, 2]), SimpleNamespace()),
}


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple | deque):
        is_long = not isinstance(a, deque) or a.maxlen == b.maxlen
        return is_long and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Projector | Inner):
        return same(vars(a), vars(b))
    return bool(a == b)


@pytest.mark.parametrize("name", VALUES)
def test_each_comes_back_as_what_it_was(name: str, tmp_path: Path) -> None:
    value, live = VALUES[name]
    into = {"x": live, "in": [live, 0], "own": ckpt.PerRank(live)}
    ckpt.save({"x": value, "in": [value, 1], "own": ckpt.PerRank(value)}, tmp_path / "root", step=1)
    ckpt.load(into, tmp_path / "root")
    assert same(into["x"], value) and same(into["in"], [value, 1])
    assert same(into["own"].value, value)
    if name in ("queue", "set"):
        assert into["x"] is live  # others may hold on to it


def test_the_form_is_data_that_names_a_type() -> None:
    problems: list[str] = []
    value, tensors = split_tree(
        {"a": deque([torch.ones(2), Color.RED]), "b": {2, 1}}, "s", problems
    )
    assert not problems and [fqn for fqn, _ in tensors] == ["s.a.0"]
    color = {"$data": f"{__name__}.Color", "value": "RED"}
    items = [{"$tensor": "s.a.0"}, color]
    assert value == {
        "a": {"$data": "deque", "value": {"maxlen": None, "items": items}},
        "b": {"$data": "set", "value": [1, 2]},
    }
    assert encode_values(value)[0] == 2  # what knows version 1 alone refuses it


class Queues(torch.optim.SGD):
    """Keeps gradients in a queue, and an object of its library beside them."""

    def __init__(self, params: Any, kind: Color = Color.RED) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        for group in self.param_groups:
            group.update(kind=kind, dtype=torch.float64 if kind is Color.BLUE else torch.float32)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            state.setdefault("queue", deque(maxlen=2)).append(param.grad.clone())
            state.setdefault("projector", Projector(param.detach().clone() + 1))
            # What it is depends on what this rank has of the parameter.
            state.setdefault("plan", [] if param.numel() % 2 else [1, "x"])
            state["norm"] = param.detach().norm()


def trained(seed: int, kind: Color, wrap: Any = lambda module: module) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = wrap(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    optimizer = Queues(model.parameters(), kind)
    return {"model": model, "optim": optimizer}


def step(state: dict[str, Any], times: int) -> None:
    for index in range(times):
        state["optim"].zero_grad()
        state["model"](torch.full((2, 3), 1.0 + index)).sum().backward()
        state["optim"].step()


def states(state: dict[str, Any]) -> list[dict[str, Any]]:
    optimizer = state["optim"]
    params = [param for param in optimizer.param_groups[0]["params"] if param.numel()]
    return [dict(optimizer.state[param]) for param in params]


def test_an_optimizer_has_them_back_before_its_first_step(tmp_path: Path) -> None:
    saved, other = trained(0, Color.BLUE), trained(1, Color.RED)
    step(saved, 3)
    ckpt.save(saved, tmp_path / "root", step=1)
    ckpt.load(other, tmp_path / "root")
    assert same(states(other), states(saved))
    group = other["optim"].param_groups[0]
    assert group["kind"] is Color.BLUE and group["dtype"] is torch.float64
    [queue] = [states(other)[0]["queue"]]
    assert queue.maxlen == 2 and len(queue) == 2
    step(other, 1)
    assert queue[0] is not states(saved)[0]["queue"][1]


def on_flat_shards(root: str) -> None:
    for name in ("Inner", "Projector"):  # in a process of its own
        typed_values._CLASSES[f"tests.{name}"] = __name__
    optimizer_kinds._MODULES = {"tests.Queues": __name__}
    optimizer_kinds._OF_LIBRARIES = {"tests.Queues": {"norm": PerShard(None)}}

    def wrap(module: nn.Module) -> nn.Module:
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(module, device_id=cpu, use_orig_params=True)

    saved, other = trained(0, Color.BLUE, wrap), trained(1, Color.RED, wrap)
    step(saved, 3)
    norms: list[Any] = [None, None]
    dist.all_gather_object(norms, [float(one["norm"]) for one in states(saved)])
    assert norms[0] != norms[1]  # else a common one would do
    ckpt.save(saved, root, step=1)
    ckpt.load(other, root)
    assert same(states(other), states(saved))
    # Of another layout there is nothing to make it of.
    alone = trained(2, Color.RED)
    with pytest.raises(CheckpointError, match="saved as each rank's own state"):
        ckpt.load(alone, root)
    # Where parameters are whole, the norm is common, and no rank's own.
    step(alone, 1)
    ckpt.save(alone, f"{root}-whole", step=1)
    again = trained(3, Color.RED)
    ckpt.load(again, f"{root}-whole")
    assert same(states(again), states(alone))
    assert ckpt.open(f"{root}-whole", step=1)["optim.state.0.weight.norm"].shape == ()


@pytest.mark.ranks
def test_beside_flat_shards_each_rank_keeps_its_own(tmp_path: Path) -> None:
    run_ranks(2, on_flat_shards, str(tmp_path / "root"))


@pytest.mark.ranks
def test_a_hook_that_reshards_gets_what_was_saved(tmp_path: Path) -> None:
    ckpt.save({"own": ckpt.PerRank(deque([1], maxlen=2))}, tmp_path / "root", step=1)
    run_ranks(2, load_on_two_ranks, str(tmp_path / "root"))


def load_on_two_ranks(root: str) -> None:
    seen: list[Any] = []

    def first(values: Any, rank: int, size: int) -> Any:
        seen.extend(values)
        return values[0]

    state = {"own": ckpt.PerRank(deque[Any](), first)}
    ckpt.load(state, root)
    assert same(seen, [deque([1], maxlen=2)]) and same(state["own"].value, seen[0])


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"q": deque([torch.ones(1)])}, ["q: ", "collections.deque", "with tensors", "list"]),
        ({"in": {"o": Projector(torch.ones(1))}}, ["in.o: ", "Projector", "with tensors"]),
        ({"s": {(1, 2)}}, ["s: ", "builtins.set", "list()"]),
        ({"d": {"$data": 1}}, ["d: ", "'$data'", "reserved"]),
        ({"q": deque([len])}, ["q.0: ", "builtin_function_or_method"]),
        ({"cut": slice(1.5, 2)}, ["cut: ", "builtins.slice", "cannot be stored"]),
        ({"cut": [slice(torch.ones(1))]}, ["cut.0: ", "builtins.slice", "cannot be stored"]),
    ],
    ids=lambda case: "" if isinstance(case, dict) else case[0],
)
def test_what_has_no_such_form_is_named(state: Any, said: list[str], tmp_path: Path) -> None:
    with pytest.raises(InvalidState) as caught:
        ckpt.save(state, tmp_path / "root", step=1)
    assert all(part in str(caught.value) for part in said), caught.value


def test_a_type_that_is_not_known_here_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = trained(0, Color.BLUE)
    step(saved, 1)
    ckpt.save({**saved, "mode": Mode.SAFE}, tmp_path / "root", step=1)
    other = {**trained(1, Color.RED), "mode": 5}
    before = other["model"][0].weight.detach().clone()
    monkeypatch.delitem(typed_values._CLASSES, "tests.Projector")
    with pytest.raises(Mismatch) as caught:
        ckpt.load(other, tmp_path / "root")
    text = str(caught.value)
    assert "optim.state.0.weight.projector: holds a 'tests.Projector'" in text
    assert f"mode: holds a '{__name__}.Mode'" in text and "install its library" in text
    assert torch.equal(other["model"][0].weight, before) and not other["optim"].state


DAMAGED: list[tuple[Any, Any]] = [
    ({"$data": "dtype", "value": "float31"}, None),
    ({"$data": "dtype", "value": "nn"}, None),
    ({"$data": "device", "value": "cuda:1"}, None),
    ({"$data": "size", "value": [1]}, None),
    ({"$data": "set", "value": [[1]]}, None),
    ({"$data": "deque", "value": [1]}, None),
    ({"$data": "deque", "value": {"maxlen": -1, "items": []}}, None),
    ({"$data": "complex", "value": [1.0]}, None),
    ({"$data": "range", "value": [1, 2, 0]}, None),
    ({"$data": "slice", "value": [1, "a", None]}, None),
    ({"$data": "bytearray", "value": "xy"}, None),
    ({"$data": "datetime", "value": "today"}, None),
    ({"$data": "path", "value": b"a"}, None),
    ({"$data": "argparse.Namespace", "value": [1]}, None),
    ({"$data": "tests.Projector", "value": [1]}, None),
    ({"$data": f"{__name__}.Color", "value": "GREEN"}, Color.RED),
    ({"$data": f"{__name__}.Color", "value": "RED"}, Mode.FAST),
    ({"$data": f"{__name__}.Mode", "value": "FAST"}, Mode.FAST),
    ({"$data": "builtins.eval", "value": {}}, None),
    ({"$data": ["set"], "value": []}, None),
]


@pytest.mark.parametrize(("value", "like"), DAMAGED, ids=lambda one: str(one)[:40])
def test_a_damaged_form_is_an_error_and_nothing_else(value: Any, like: Any) -> None:
    assert unknown_leaves([value], [like])
    with pytest.raises(Mismatch):
        join_tree([value], lambda fqn: fqn, [like])
