"""What DCP stores of values, our storage under DCP stores, too.

Method: random states of lists, tuples, queues, sets, dtypes, arrays and tensors among them are
saved by DCP's own writer and by ours; what comes back has to be equal.
"""

from __future__ import annotations

import argparse
import pickle
import random
from collections import Counter, OrderedDict, deque, namedtuple
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItem

import ckpt
from ckpt.integrations.dcp import DcpReader, DcpWriter
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Pair = namedtuple("Pair", "first second")
LEAVES: tuple[Any, ...] = (
    None,
    True,
    7,
    2.5,
    "text",
    b"bytes",
    1 + 2j,
    range(1, 9, 2),
    slice(None, 3),
    bytearray(b"xy"),
    datetime(2026, 1, 2, 3, 4, 5, 6),
    Path("a") / "b",
    argparse.Namespace(lr=0.1, layers=[1, 2]),
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    {1, 2},
    frozenset("ab"),
    Counter("aab"),
    (),
    [],
)


def tree(draw: random.Random, depth: int = 0) -> Any:
    """A value, with tensors and arrays among it."""
    kind = draw.randrange(10 if depth < 3 else 4)
    if kind < 2:
        return draw.choice(LEAVES)
    if kind == 2:
        dtype = draw.choice([torch.float32, torch.int64, torch.bfloat16, torch.bool])
        return torch.randint(0, 9, draw.choice([(), (3,), (2, 0), (2, 2)])).to(dtype)
    if kind == 3:
        return numpy.arange(draw.randrange(4), dtype=draw.choice(["f8", "u4", "i2"]))
    items = [tree(draw, depth + 1) for _ in range(draw.randrange(3))]
    if kind == 4:
        return items
    if kind == 5:
        return tuple(items)
    if kind == 6:
        return deque(items, maxlen=draw.choice([None, 5]))
    if kind == 7:
        return Pair(tree(draw, depth + 1), draw.choice(LEAVES))
    if kind == 8:
        return OrderedDict(zip("abc", items, strict=False))
    return {"x": tree(draw, depth + 1), draw.randrange(9): 1}


def is_same(a: Any, b: Any) -> bool:
    """Equal, tensors by bits and dtype; a named tuple by its fields."""
    if isinstance(a, torch.Tensor):
        is_alike = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return is_alike and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return isinstance(b, numpy.ndarray) and a.dtype == b.dtype and numpy.array_equal(a, b)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=False)
        return len(a) == len(b) and all(x[0] == y[0] and is_same(x[1], y[1]) for x, y in pairs)
    if isinstance(a, (list, tuple, deque)):
        is_alike = isinstance(b, type(a)) or getattr(a, "_fields", 0) == getattr(b, "_fields", 1)
        is_alike = is_alike and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        return is_alike and len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and bool(a == b)


def emptied(state: Any) -> Any:
    """As `state`, with other values at its keys; containers that DCP walks stay."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: emptied(item) for key, item in state.items()}
    if isinstance(state, list):
        return [emptied(item) for item in state]
    return None


@pytest.mark.parametrize("part", range(4))
def test_values_come_back_as_from_dcp(part: int, tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    for number in range(25):
        draw = random.Random(seed * 1000 + part * 25 + number)
        state = {"w": torch.arange(3.0), "v": tree(draw), "u": {"deep": tree(draw)}}
        theirs, ours = tmp_path / f"theirs{number}", tmp_path / f"ours{number}"
        loaded = {}
        for writer, reader in (
            (dcp.FileSystemWriter(str(theirs)), dcp.FileSystemReader(str(theirs))),
            (DcpWriter(str(ours), step=1), DcpReader(str(ours))),
        ):
            dcp.save(state, storage_writer=writer)
            into = emptied(state)
            dcp.load(into, storage_reader=reader)
            loaded[type(reader)] = into
        assert is_same(*loaded.values()), (seed, number, state, loaded)
        assert ckpt.verify(str(ours)).ok


def test_values_of_dcp_load_natively_and_back(tmp_path: Path) -> None:
    plugged, own = str(tmp_path / "plugged"), str(tmp_path / "own")
    state = {"v": (torch.arange(3), 7, {"q": [torch.ones(2), "x"]})}
    state |= {"d": torch.bfloat16, "p": Path("x")}
    dcp.save(state, storage_writer=DcpWriter(plugged, step=1))
    into = {"v": (torch.zeros(3).long(), 0, {"q": [torch.zeros(2), ""]}), "d": None, "p": None}
    ckpt.load(into, plugged)
    assert is_same(into, state)
    del state["v"]  # DCP takes a tuple for a leaf
    ckpt.save(state, own, step=1)
    into = {"d": None, "p": None}
    dcp.load(into, storage_reader=DcpReader(own))
    assert is_same(into, state)


def test_a_named_tuple_that_was_restored_can_be_pickled(tmp_path: Path) -> None:
    dcp.save({"v": Pair(1, [2])}, storage_writer=DcpWriter(str(tmp_path), step=1))
    with ckpt.open(str(tmp_path)) as checkpoint:
        value = checkpoint.values["v"]
    assert value == {"$fields": ["first", "second"], "items": [1, [2]]}
    into: dict[str, Any] = {"v": None}
    dcp.load(into, storage_reader=DcpReader(str(tmp_path)))
    assert into["v"].second == [2] and pickle.loads(pickle.dumps(into["v"])) == (1, [2])


class Pickling(dcp.DefaultSavePlanner):
    """Changes what it saves, by a way of its own."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, 2 * object)


class Resolving(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.transform_object(write_item, 2 * self.lookup_object(write_item.index))


@pytest.mark.parametrize("planner", [Pickling, Resolving])
def test_a_planner_has_its_own_way_to_pickle(planner: type[Any], tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "v": (torch.arange(3), Path("x"), numpy.arange(2))}
    loaded = {}
    for writer, reader in (
        (dcp.FileSystemWriter(tmp_path / "theirs"), dcp.FileSystemReader(tmp_path / "theirs")),
        (DcpWriter(tmp_path / "ours", step=1), DcpReader(tmp_path / "ours")),
    ):
        dcp.save(state, storage_writer=writer, planner=planner())
        loaded[type(reader)] = emptied(state)
        dcp.load(loaded[type(reader)], storage_reader=reader)
    assert is_same(*loaded.values()), loaded
    assert is_same(loaded[DcpReader]["v"], 2 * state["v"])


def _queues(root: str) -> tuple[list[float], Any]:
    rank = dist.get_rank()
    state = {
        "common": deque([torch.ones(2) * 3]),
        "own": {f"rank{rank}": (torch.ones(2) * rank, {rank}, numpy.arange(rank))},
    }
    dcp.save(state, storage_writer=DcpWriter(root, step=1))
    into: dict[str, Any] = {"common": None, "own": {f"rank{rank}": None}}
    dcp.load(into, storage_reader=DcpReader(root))
    tensor, numbers, array = into["own"][f"rank{rank}"]
    assert is_same(array, numpy.arange(rank))
    return into["common"][0].tolist() + tensor.tolist(), numbers


@pytest.mark.ranks
def test_tensors_in_values_of_ranks(tmp_path: Path) -> None:
    answers = run_ranks(3, _queues, str(tmp_path / "run"))
    assert answers == [([3.0, 3.0, rank, rank], {rank}) for rank in range(3)]
