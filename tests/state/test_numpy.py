"""Arrays and scalars of numpy in a state: what is saved of them, and what a load gives back.

Method: states are saved and loaded through the public functions; values of the dtypes are compared
with numpy itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import InvalidState, Mismatch

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
SCALARS: Sequence[Any] = [
    np.bool_(True),
    np.int8(-128),
    np.int64(-(2**63)),
    np.uint64(2**64 - 1),
    np.float16(1 / 3),
    np.float32(1 / 3),
    np.float64(1 / 3),
    np.float32("inf"),
    np.float64("nan"),
    np.float32(-0.0),
    np.str_("é"),
    np.bytes_(b"\x00x"),
]


def _moved(state: Any, into: Any, tmp_path: Path) -> Any:
    ckpt.save(state, tmp_path / "root", step=1)
    ckpt.load(into, tmp_path / "root")
    return into


def _filled(dtype: str, *shape: int) -> Any:
    """An array of random bits (of 0 and 1 for bool)."""
    count = int(np.prod(shape))
    if dtype == "?":
        return (np.arange(count) % 3 == 0).reshape(shape)
    bits = np.random.default_rng(3).bytes(count * np.dtype(dtype).itemsize)
    return np.frombuffer(bits, dtype).reshape(shape).copy()


def test_arrays_are_filled_in_place_bit_for_bit(tmp_path: Path) -> None:
    state = {dtype: _filled(dtype, 5, 7) for dtype in DTYPES}
    state |= {"point": np.array(2.5), "none": np.zeros((0, 3), "f4"), "columns": state["f4"].T}
    state["fixed"] = _filled("i4", 6)
    state["fixed"].flags.writeable = False
    into = {name: np.zeros_like(array) for name, array in state.items()}
    arrays = dict(into)
    _moved(state, into, tmp_path)
    for name, array in state.items():
        assert into[name] is arrays[name]
        assert into[name].tobytes() == array.tobytes(), name
    assert ckpt.verify(tmp_path / "root").ok


def test_an_array_is_a_tensor_of_the_checkpoint(tmp_path: Path) -> None:
    array = _filled("f4", 3, 2)
    tensors = _moved({"x": array}, {"x": torch.zeros(3, 2)}, tmp_path)
    assert np.array_equal(tensors["x"].numpy(), array, equal_nan=True)
    again = {"x": np.zeros((3, 2), "f4")}
    ckpt.load(again, tmp_path / "root")
    assert again["x"].tobytes() == array.tobytes()
    for other in (np.zeros((2, 3), "f4"), np.zeros((3, 2), "f8")):
        with pytest.raises(Mismatch, match="x: "):
            ckpt.load({"x": other}, tmp_path / "root")


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_a_scalar_comes_back_with_the_live_ones_type(scalar: Any, tmp_path: Path) -> None:
    live = type(scalar)()
    into = _moved({"x": scalar, "in": {"y": [scalar]}}, {"x": live, "in": {"y": [live]}}, tmp_path)
    for loaded in (into["x"], into["in"]["y"][0]):
        assert type(loaded) is type(scalar)
        assert np.asarray(loaded).tobytes() == np.asarray(scalar).tobytes()
    plain = {"x": None, "in": None}
    ckpt.load(plain, tmp_path / "root")
    assert type(plain["x"]) is type(scalar.item())


def test_what_the_live_type_does_not_have_stays_as_it_was_saved(tmp_path: Path) -> None:
    saved = {"a": 0.1, "b": 300, "c": 2.5, "d": "x", "e": True, "f": 7, "g": None}
    live = {
        "a": np.float32(0),
        "b": np.int8(0),
        "c": np.int64(0),
        "d": np.float64(0),
        "e": np.int64(0),
        "f": np.int64(0),
        "g": np.float64(0),
    }
    _moved(saved, live, tmp_path)
    assert live == saved
    assert [type(value) for value in live.values()] == [
        float,
        int,
        float,
        str,
        bool,
        np.int64,
        type(None),
    ]


class Statistics:
    """A user's object that keeps its state in arrays."""

    def __init__(self, mean: Any, count: Any) -> None:
        self.mean, self.count = mean, count

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count, "halves": {"one": self.count // 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.count = state["mean"], state["count"]


def test_objects_get_arrays_and_scalars_where_they_have_them(tmp_path: Path) -> None:
    saved = Statistics(_filled("f8", 4), np.int64(9))
    live = Statistics(np.zeros(4), np.int64(0))
    _moved({"s": saved}, {"s": live}, tmp_path)
    assert type(live.mean) is np.ndarray and live.mean.tobytes() == saved.mean.tobytes()
    assert live.count == 9 and type(live.count) is np.int64
    other = Statistics(None, 0)
    ckpt.load({"s": other}, tmp_path / "root")
    assert isinstance(other.mean, torch.Tensor) and type(other.count) is int


def test_a_value_of_each_rank_gets_its_type(tmp_path: Path) -> None:
    into: Any = {"x": ckpt.PerRank(np.float32(0)), "t": torch.ones(1)}
    _moved({"x": ckpt.PerRank(np.float32(1.5)), "t": torch.ones(1)}, into, tmp_path)
    assert type(into["x"].value) is np.float32 and into["x"].value == 1.5


def test_a_background_save_sees_the_array_as_it_was(tmp_path: Path) -> None:
    array = np.arange(6.0)
    state = {"x": array, "t": torch.ones(2)}
    with ckpt.Checkpointer(state, tmp_path / "root", save=ckpt.EverySteps(1)) as checkpointer:
        for step in (1, 2, 3):
            array += 1
            checkpointer.step(step)
            array[0] += 0  # training goes on
    into: Any = {"x": np.zeros(6), "t": torch.zeros(2)}
    ckpt.load(into, tmp_path / "root", step=2)
    assert into["x"].tolist() == [2.0, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array(["a"]), [".tolist()"]),
        (np.array([None]), ["object", ".tolist()"]),
        (np.array(["2026-01-01"], "M8[D]"), [".tolist()"]),
        (np.zeros(2, [("a", "f4")]), [".tolist()"]),
        (np.zeros(2, ">f4"), ["newbyteorder"]),
        (np.arange(4)[::-1], ["ascontiguousarray"]),
        (np.zeros(2, np.longdouble), ["a dtype that torch has"]),
        (np.ma.masked_array([1.0, 2.0], [False, True]), ["MaskedArray"]),
        (np.complex64(1), ["complex64", "an array"]),
        (np.timedelta64(1, "s"), ["timedelta64"]),
        (np.longdouble(1), ["longdouble"]),
    ],
    ids=lambda case: "" if isinstance(case, list) else repr(case)[:20],
)
def test_what_has_no_equal_is_refused_by_name(array: Any, said: list[str], tmp_path: Path) -> None:
    class Keeper:
        def state_dict(self) -> dict[str, Any]:
            return {"a": array}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("nothing to load")

    for state, name in (({"x": array}, "x: "), ({"o": Keeper()}, "o.a: "), ({"l": [array]}, "l.0")):
        with pytest.raises(InvalidState) as caught:
            ckpt.save(state, tmp_path / "root", step=1)
        for part in (name, *said):
            assert part in str(caught.value)
    assert ckpt.list_steps(tmp_path / "root") == ()


def test_a_load_refuses_an_array_that_cannot_be_written_to(tmp_path: Path) -> None:
    ckpt.save({"x": np.ones(2)}, tmp_path / "root", step=1)
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    with pytest.raises(Mismatch, match=r"x: .*cannot be written to.*copy\(\)"):
        ckpt.load({"x": fixed}, tmp_path / "root")
    assert fixed.tolist() == [0, 0]
    assert ckpt.load({"x": fixed, "y": 1}, tmp_path / "root", skip=["x", "y"]).step == 1
