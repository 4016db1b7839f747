"""Transformer Engine's quantized tensors: stored as their parts, cut where their blocks end.

Method: it does not install here, so its classes are written as its public source declares them
(version of 2026: attributes, arguments, padding of scales), as modules of its names. Bytes of a
tensor that is whole are held against those of its slices on real ranks.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.errors import CheckpointError, InvalidState, Mismatch
from tests.ranks import run_ranks

PACKAGE = "transformer_engine.pytorch.tensor"
PARTS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


class DType(enum.Enum):
    kFloat8E4M3 = 1
    kFloat4E2M1 = 2


class Quantized(torch.Tensor):
    """What the two classes share: attributes of the names of their arguments."""

    parts: tuple[str, ...] = PARTS
    form = "fp8_dtype"

    def __new__(cls, shape: Any, dtype: torch.dtype, **given: Any) -> Any:
        # As theirs: every argument has to be given.
        assert given.keys() == {*cls.parts, cls.form, "quantizer", "with_gemm_swizzled_scales"}
        made: Any = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        for name, value in given.items():
            setattr(made, f"_{name}", value)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.view.default, aten.detach.default):
            me = args[0]
            names = (*cls.parts, cls.form, "quantizer", "with_gemm_swizzled_scales")
            return type(me)(me.shape, me.dtype, **{n: getattr(me, f"_{n}") for n in names})
        raise NotImplementedError(f"{func}")

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("needs an accelerator")


class MXFP8Tensor(Quantized):
    """Its class: a byte for each element, a power of two for each 32, by rows and by columns."""


class NVFP4Tensor(Quantized):
    """Its class: two elements in a byte, parts by columns lie the other way round."""

    parts = (*PARTS, "amax_rowwise", "amax_columnwise")
    form = "fp4_dtype"


MXFP8Tensor.__module__ = f"{PACKAGE}.mxfp8_tensor"
NVFP4Tensor.__module__ = f"{PACKAGE}.nvfp4_tensor"


@contextmanager
def installed() -> Iterator[None]:
    """Modules of its names, for a while: other libraries look whether it is there."""
    made = {
        name: types.ModuleType(name)
        for name in (
            "transformer_engine",
            "transformer_engine.pytorch",
            PACKAGE,
            f"{PACKAGE}.mxfp8_tensor",
            f"{PACKAGE}.nvfp4_tensor",
            "transformer_engine_torch",
        )
    }
    vars(made[f"{PACKAGE}.mxfp8_tensor"])["MXFP8Tensor"] = MXFP8Tensor
    vars(made[f"{PACKAGE}.nvfp4_tensor"])["NVFP4Tensor"] = NVFP4Tensor
    vars(made["transformer_engine_torch"])["DType"] = DType
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def padded(n: int, to: int) -> int:
    return -(-n // to) * to


def quantized(kind: Any, rows: int, columns: int, seed: int, **other: Any) -> Any:
    """A tensor of random bytes with scales of the padded shapes of `get_scale_shape`."""
    made = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 255, shape, dtype=torch.uint8, generator=made)

    given: dict[str, Any]
    if kind is MXFP8Tensor:
        given = {
            "rowwise_data": some(rows, columns),
            "rowwise_scale_inv": some(padded(rows, 128), padded(columns // 32, 4)),
            "columnwise_data": some(rows, columns),
            "columnwise_scale_inv": some(padded(rows // 32, 4), padded(columns, 128)),
            "fp8_dtype": DType.kFloat8E4M3,
        }
    else:
        given = {
            "rowwise_data": some(rows, columns // 2),
            "rowwise_scale_inv": some(padded(rows, 128), padded(columns // 16, 4)),
            "columnwise_data": some(columns, rows // 2),
            "columnwise_scale_inv": some(padded(columns, 128), padded(rows // 16, 4)),
            "amax_rowwise": torch.ones(1) * seed,
            "amax_columnwise": torch.ones(1) * seed,
            "fp4_dtype": DType.kFloat4E2M1,
        }
    rest = {"quantizer": "its own", "with_gemm_swizzled_scales": False}
    return kind((rows, columns), torch.bfloat16, **{**given, **rest, **other})


def bytes_of(tensor: Any) -> dict[str, torch.Tensor]:
    known = {name: getattr(tensor, f"_{name}") for name in tensor.parts}
    return {name: part for name, part in known.items() if part is not None}


def assert_equal(one: Any, other: Any) -> None:
    a, b = bytes_of(one), bytes_of(other)
    assert a.keys() == b.keys() and len(a) >= 2
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


class Layer(nn.Module):
    """A module whose weight is quantized, with the extra state of its recipe as bytes."""

    def __init__(self, weight: Any, extra: bytes = b"") -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.extra = extra

    def get_extra_state(self) -> torch.Tensor:
        return (
            torch.frombuffer(bytearray(self.extra), dtype=torch.uint8)
            if self.extra
            else (torch.empty(0, dtype=torch.uint8))
        )

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = bytes(state.tolist())


@pytest.mark.parametrize("kind", [MXFP8Tensor, NVFP4Tensor])
def test_a_module_with_quantized_weights_comes_back(tmp_path: Path, kind: Any) -> None:
    with installed():
        layer = Layer(quantized(kind, 96, 64, 1), b"amax history")
        ckpt.save({"model": layer, "w": quantized(kind, 32, 32, 3)}, str(tmp_path), step=1)
        other = Layer(quantized(kind, 96, 64, 2))
        state = {"model": other, "w": quantized(kind, 32, 32, 4)}
        ckpt.load(state, str(tmp_path))
        assert_equal(layer.weight, other.weight)
        assert_equal(state["w"], quantized(kind, 32, 32, 3))
        assert other.extra == b"amax history"
        assert other.weight._quantizer == "its own"
        by_rows: Any = {"columnwise_data": None, "columnwise_scale_inv": None}
        half = Layer(quantized(kind, 96, 64, 2, **by_rows))
        with pytest.raises(Mismatch, match=r"model\.weight.*consists of"):
            ckpt.load({"model": half}, str(tmp_path))


def test_a_quantized_tensor_inside_a_value_is_built_anew(tmp_path: Path) -> None:
    class Keeper:
        def __init__(self) -> None:
            self.held: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.held

        def load_state_dict(self, held: dict[str, Any]) -> None:
            self.held = held

    with installed():
        keeper, other = Keeper(), Keeper()
        keeper.held = {"w": quantized(MXFP8Tensor, 64, 64, 5)}
        ckpt.save({"k": keeper}, str(tmp_path), step=1)
        ckpt.load({"k": other}, str(tmp_path))
        assert_equal(other.held["w"], keeper.held["w"])
        assert other.held["w"]._fp8_dtype is DType.kFloat8E4M3 and other.held["w"].shape == (64, 64)


def part(kind: Any, whole: Any, dim: int) -> Any:
    """This rank's slice of `whole`, as its class cuts it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shape = list(whole.shape)
    shape[dim] //= size
    local = quantized(kind, *shape, 1)
    for name, memory in bytes_of(local).items():
        along = 1 - dim if kind is NVFP4Tensor and name.startswith("column") else dim
        if not name.startswith("amax"):
            memory.copy_(getattr(whole, f"_{name}").chunk(size, along)[rank])
        else:
            memory.copy_(getattr(whole, f"_{name}"))
    return local


def sharded(local: Any, dim: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)


CASES = [(kind, dim) for kind in (MXFP8Tensor, NVFP4Tensor) for dim in (0, 1)]


def on_ranks(root: str) -> list[str]:
    said = []
    with installed():
        for nth, (kind, dim) in enumerate(CASES):
            whole = quantized(kind, 256, 256, 7)
            local = part(kind, whole, dim)
            ckpt.save({"w": sharded(local, dim)}, f"{root}/{nth}", step=1)
            empty = quantized(kind, 256, 256, 9)
            ckpt.load({"w": empty}, f"{root}/{nth}")
            assert_equal(empty, whole)
            ckpt.save({"w": whole}, f"{root}/{nth}", step=2)
            other = quantized(kind, *local.shape, 8)
            ckpt.load({"w": sharded(other, dim)}, f"{root}/{nth}", step=2)
            assert_equal(other, local)
        for rows, more in ((384, {}), (96, {}), (256, {"with_gemm_swizzled_scales": True})):
            odd = sharded(quantized(MXFP8Tensor, rows // 2, 128, 1, **more), 0)
            with pytest.raises(InvalidState) as refused:
                ckpt.save({"w": odd}, f"{root}/odd", step=1)
            said.append(str(refused.value))
        # An amax of each shard's own is not one of the tensor.
        own = quantized(NVFP4Tensor, 128, 128, 1)
        own._amax_rowwise.add_(dist.get_rank())
        with pytest.raises(CheckpointError, match="amax_rowwise"):
            ckpt.save({"w": sharded(own, 0)}, f"{root}/own", step=1)
    return said


@pytest.mark.ranks
def test_shards_of_quantized_tensors_load_on_other_layouts(tmp_path: Path) -> None:
    for thirds, small, swizzled in run_ranks(2, on_ranks, str(tmp_path), timeout_seconds=120):
        assert "192 of 384 elements along dim 0, in blocks of 128" in thirds
        assert "parts that end where blocks end: 1, 3" in thirds
        assert "48 of 96 elements along dim 0, in blocks of 128" in small and "none" in small
        assert "declares no cut along dim 0" in swizzled
