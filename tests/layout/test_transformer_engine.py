"""Transformer Engine's quantized tensors: stored as their parts, cut where their blocks end.

Method: it does not install here, so its classes are written as its public source declares them
(version of 2026: attributes, arguments, padding of scales), as modules of its names. Bytes of a
tensor that is whole are held against those of its slices on real ranks.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
NO_PARTS: dict[str, Any] = {"columnwise_data": None, "columnwise_scale_inv": None}


class DType(enum.IntEnum):
    kFloat8E4M3 = 7
    kFloat4E2M1 = 10


class Quantized(torch.Tensor):
    """`QuantizedTensor` and what its classes share: attributes of the names of their arguments."""

    parts: tuple[str, ...] = ("rowwise_data", "rowwise_scale_inv", *NO_PARTS)
    flags: tuple[str, ...] = ("fp8_dtype", "with_gemm_swizzled_scales")
    attributes: Mapping[str, str] = MappingProxyType({})

    def __new__(cls, *, shape: Any, dtype: torch.dtype, device: Any = None, **given: Any) -> Any:
        # As theirs: every argument has to be given, and memory is on a device if nothing is said.
        assert device is not None, "torch.cuda.current_device()"
        assert given.keys() == {*cls.parts, *cls.flags, "quantizer"}
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device
        )
        for name, value in given.items():
            setattr(made, cls.attributes.get(name, f"_{name}"), value)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.view.default, aten.detach.default):
            me = args[0]
            names = (*cls.parts, *cls.flags, "quantizer")
            given = {n: getattr(me, cls.attributes.get(n, f"_{n}")) for n in names}
            made = type(me)(shape=me.shape, dtype=me.dtype, device=me.device, **given)
            return made
        raise NotImplementedError(f"{func}")

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("needs an accelerator")


class Float8Tensor(Quantized):
    """Its class: a byte for each element, one scale, and a transpose that it makes by itself."""

    parts = ("data", "data_transpose", "fp8_scale_inv")
    flags = ("fp8_dtype",)
    attributes = MappingProxyType({"data_transpose": "_transpose", "fp8_scale_inv": "_scale_inv"})

    def __new__(cls, **given: Any) -> Any:
        made = super().__new__(cls, **given)
        made._transpose_invalid = made._transpose is None
        return made

    def _reset_caches(self) -> None:
        self._transpose_invalid = True


class MXFP8Tensor(Quantized):
    """Its class: a byte for each element, a power of two for each 32, by rows and by columns."""


class NVFP4Tensor(Quantized):
    """Its class: two elements in a byte, parts by columns lie the other way round."""

    parts = (*Quantized.parts, "amax_rowwise", "amax_columnwise")
    flags = (
        "fp4_dtype",
        "with_gemm_swizzled_scales",
        "row_scaled_nvfp4",
        "nvfp4_use_4over6",
        "nvfp4_e4m3_max",
    )


class Float8BlockwiseQTensor(Quantized):
    """Its class: a float for each square of 128, or for 128 of a row and of a column."""

    flags = ("fp8_dtype", "is_2D_scaled")


CLASSES: dict[str, type[Quantized]] = {
    "float8_tensor": Float8Tensor,
    "mxfp8_tensor": MXFP8Tensor,
    "nvfp4_tensor": NVFP4Tensor,
    "float8_blockwise_tensor": Float8BlockwiseQTensor,
}
for module, its in CLASSES.items():
    its.__module__ = f"{PACKAGE}.{module}"


@contextmanager
def installed() -> Iterator[None]:
    """Modules of its names, for a while: other libraries look whether it is there."""
    names = ("transformer_engine", "transformer_engine.pytorch", PACKAGE)
    made = {name: types.ModuleType(name) for name in (*names, "transformer_engine_torch")}
    for name, kind in CLASSES.items():
        made[kind.__module__] = types.ModuleType(kind.__module__)
        vars(made[f"{PACKAGE}.{name}"])[kind.__name__] = kind
    vars(made["transformer_engine_torch"])["DType"] = DType
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def padded(n: int, to: int) -> int:
    return -(-n // to) * to


class Memory(NamedTuple):
    """A part of a tensor: its shape without padding, what it is padded to, and the dim along which
    it is cut with dim 0 of the tensor (None: it is not).
    """

    used: tuple[int, ...]
    pad: tuple[int, int] = (1, 1)
    rows: int | None = 0
    dtype: torch.dtype = torch.uint8

    def filled(self, draw: torch.Generator) -> torch.Tensor:
        sizes = self.used if len(self.used) == 1 else tuple(map(padded, self.used, self.pad))
        bits = torch.randint(0, 255, sizes, dtype=torch.uint8, generator=draw)
        return bits.to(self.dtype)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of the memory is used."""
        return tensor[tuple(slice(0, size) for size in self.used)]


def memories(kind: str, m: int, k: int) -> dict[str, Memory]:
    """The parts of a tensor of m rows and k columns, by `inner_tensor_specs` of its quantizer."""
    blocks = -(-m // 128), -(-k // 128)
    float32 = torch.float32
    match kind:
        case "float8":
            return {"data": Memory((m, k)), "fp8_scale_inv": Memory((1,), rows=None, dtype=float32)}
        case "float8 by columns":
            scale = Memory((1,), rows=None, dtype=float32)
            return {"data_transpose": Memory((k, m), rows=1), "fp8_scale_inv": scale}
        case "mxfp8":
            return {
                "rowwise_data": Memory((m, k)),
                "rowwise_scale_inv": Memory((m, k // 32), (128, 4)),
                "columnwise_data": Memory((m, k)),
                "columnwise_scale_inv": Memory((m // 32, k), (4, 128)),
            }
        case "nvfp4" | "nvfp4 by rows":
            amax = (m,) if kind == "nvfp4 by rows" else (1,)
            return {
                "rowwise_data": Memory((m, k // 2)),
                "rowwise_scale_inv": Memory((m, k // 16), (128, 4)),
                "columnwise_data": Memory((k, m // 2), rows=1),
                "columnwise_scale_inv": Memory((k, m // 16), (128, 4), rows=1),
                "amax_rowwise": Memory(amax, rows=None if amax == (1,) else 0, dtype=float32),
                "amax_columnwise": Memory((1,), rows=None, dtype=float32),
            }
        case "squares":
            return {
                "rowwise_data": Memory((m, k)),
                "rowwise_scale_inv": Memory(blocks, (1, 4), dtype=float32),
                "columnwise_data": Memory((k, m), rows=1),
                "columnwise_scale_inv": Memory(blocks[::-1], (1, 4), 1, float32),
            }
    assert kind == "lines"
    return {
        "rowwise_data": Memory((m, k)),
        "rowwise_scale_inv": Memory((blocks[1], m), (1, 4), 1, float32),
        "columnwise_data": Memory((k, m), rows=1),
        "columnwise_scale_inv": Memory((blocks[0], k), (1, 4), 0, float32),
    }


KINDS = {
    "float8": Float8Tensor,
    "float8 by columns": Float8Tensor,
    "mxfp8": MXFP8Tensor,
    "nvfp4": NVFP4Tensor,
    "nvfp4 by rows": NVFP4Tensor,
    "squares": Float8BlockwiseQTensor,
    "lines": Float8BlockwiseQTensor,
}
BLOCKS = {Float8Tensor: 1, MXFP8Tensor: 32, NVFP4Tensor: 16, Float8BlockwiseQTensor: 128}


def quantized(kind: str, rows: int, columns: int, seed: int, **other: Any) -> Any:
    """A tensor of random bytes, what is padded included."""
    draw, cls = torch.Generator().manual_seed(seed), KINDS[kind]
    given: dict[str, Any] = dict.fromkeys(cls.parts)
    given |= {name: one.filled(draw) for name, one in memories(kind, rows, columns).items()}
    given |= {
        "fp8_dtype": DType.kFloat8E4M3,
        "fp4_dtype": DType.kFloat4E2M1,
        "with_gemm_swizzled_scales": False,
        "row_scaled_nvfp4": kind == "nvfp4 by rows",
        "nvfp4_use_4over6": False,
        "nvfp4_e4m3_max": 448,
        "is_2D_scaled": kind == "squares",
        "quantizer": "its own",
    }
    given = {name: given[name] for name in (*cls.parts, *cls.flags, "quantizer")} | other
    return cls(shape=(rows, columns), dtype=torch.bfloat16, device="cpu", **given)


def memory_of(tensor: Any, part: str) -> Any:
    return getattr(tensor, tensor.attributes.get(part, f"_{part}"))


def assert_equal(kind: str, one: Any, other: Any) -> None:
    """Of both, all bytes that stand for something."""
    assert one.shape == other.shape
    parts = memories(kind, *one.shape)
    for name, part in parts.items():
        a, b = memory_of(one, name), memory_of(other, name)
        assert a.shape == b.shape and torch.equal(part.of(a), part.of(b)), (kind, name)


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


class Keeper:
    """A part of a state that is replaced as a whole."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.held = held


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_with_quantized_weights_comes_back(tmp_path: Path, kind: str) -> None:
    with installed():
        layer = Layer(quantized(kind, 288, 160, 1), b"amax history")
        ckpt.save({"model": layer, "w": quantized(kind, 32, 32, 3)}, str(tmp_path), step=1)
        other = Layer(quantized(kind, 288, 160, 2))
        state = {"model": other, "w": quantized(kind, 32, 32, 4)}
        ckpt.load(state, str(tmp_path))
        assert_equal(kind, layer.weight, other.weight)
        assert_equal(kind, state["w"], quantized(kind, 32, 32, 3))
        assert other.extra == b"amax history"
        assert other.weight._quantizer == "its own"


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_tensor_inside_a_value_is_built_anew(tmp_path: Path, kind: str) -> None:
    with installed():
        keeper, other = Keeper(), Keeper()
        keeper.held = {"w": quantized(kind, 160, 96, 5)}
        ckpt.save({"k": keeper}, str(tmp_path), step=1)
        ckpt.load({"k": other}, str(tmp_path))
        made = other.held["w"]
        assert_equal(kind, made, keeper.held["w"])
        for flag in made.flags:
            assert getattr(made, f"_{flag}") == getattr(keeper.held["w"], f"_{flag}"), flag
        assert made.device.type == "cpu"


def test_a_transpose_of_old_data_is_made_anew(tmp_path: Path) -> None:
    """It is a cache: left as it is, the backward would use the weights before the load."""
    with installed():
        own = {"data_transpose": torch.zeros(32, 64, dtype=torch.uint8)}
        ckpt.save({"w": quantized("float8", 64, 32, 1, **own)}, str(tmp_path), step=1)
        for more in (own, {}):
            live = quantized("float8", 64, 32, 2, **more)
            ckpt.load({"w": live}, str(tmp_path))
            assert_equal("float8", live, quantized("float8", 64, 32, 1))
            assert live._transpose_invalid


def test_a_transpose_without_data_is_what_was_loaded(tmp_path: Path) -> None:
    with installed():
        kind = "float8 by columns"
        ckpt.save({"w": quantized(kind, 64, 32, 1)}, str(tmp_path), step=1)
        live = quantized(kind, 64, 32, 2)
        ckpt.load({"w": live}, str(tmp_path))
        assert_equal(kind, live, quantized(kind, 64, 32, 1))
        assert not live._transpose_invalid
        ckpt.save({"w": live}, str(tmp_path), step=2)


def test_what_is_made_or_scaled_otherwise_is_refused(tmp_path: Path) -> None:
    with installed():
        ckpt.save({"w": quantized("mxfp8", 64, 64, 1)}, str(tmp_path / "mx"), step=1)
        with pytest.raises(Mismatch, match=r"w: consists of"):
            ckpt.load({"w": quantized("mxfp8", 64, 64, 2, **NO_PARTS)}, str(tmp_path / "mx"))
        ckpt.save({"w": quantized("nvfp4", 64, 64, 1)}, str(tmp_path / "nv"), step=1)
        other = quantized("nvfp4", 64, 64, 2, nvfp4_use_4over6=True, nvfp4_e4m3_max=256)
        with pytest.raises(Mismatch, match=r"context differs.*4over6"):
            ckpt.load({"w": other}, str(tmp_path / "nv"))
        gathered = quantized("squares", 128, 128, 1)
        gathered._data_format = types.SimpleNamespace(name="COMPACT")
        with pytest.raises(InvalidState, match="compact form of a gather"):
            ckpt.save({"w": gathered}, str(tmp_path / "gathered"), step=1)


def part(kind: str, whole: Any, dim: int) -> Any:
    """This rank's slice of `whole`, as its class cuts it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shape = list(whole.shape)
    shape[dim] //= size
    local = quantized(kind, *shape, 1)
    of_local = memories(kind, *shape)
    for name, one in memories(kind, *whole.shape).items():
        mine, of_whole = of_local[name].of(memory_of(local, name)), one.of(memory_of(whole, name))
        if one.rows is None or (dim and len(one.used) == 1):
            mine.copy_(of_whole)
        else:
            mine.copy_(of_whole.chunk(size, abs(dim - one.rows))[rank])
    return local


def sharded(local: Any, dim: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)


CASES = [(kind, dim) for kind in KINDS for dim in (0, 1)]


def on_ranks(root: str) -> list[str]:
    said = []
    with installed():
        for nth, (kind, dim) in enumerate(CASES):
            block = BLOCKS[KINDS[kind]]
            # An odd number of blocks on each rank: padding begins in the middle of the whole.
            whole = quantized(kind, 2 * 3 * block, 2 * 3 * block, 7)
            local = part(kind, whole, dim)
            ckpt.save({"w": sharded(local, dim)}, f"{root}/{nth}", step=1)
            empty = quantized(kind, *whole.shape, 9)
            ckpt.load({"w": empty}, f"{root}/{nth}")
            assert_equal(kind, empty, whole)
            ckpt.save({"w": whole}, f"{root}/{nth}", step=2)
            other = quantized(kind, *local.shape, 8)
            ckpt.load({"w": sharded(other, dim)}, f"{root}/{nth}", step=2)
            assert_equal(kind, other, local)
        of_old = torch.zeros(4, 2, dtype=torch.uint8)
        stale = sharded(quantized("float8", 2, 4, 1, data_transpose=of_old), 0)
        assert not stale._local_tensor._transpose_invalid
        ckpt.save({"w": stale}, f"{root}/stale", step=1)
        ckpt.load({"w": stale}, f"{root}/stale")
        assert stale._local_tensor._transpose_invalid
        # The scale of a rank without elements is read of it by a gather: it is loaded, too.
        own_scale = torch.full((1,), 3.0)
        without = quantized("float8", 1 - dist.get_rank(), 4, 11, fp8_scale_inv=own_scale)
        row = DTensor.from_local(
            without, stale.device_mesh, [Shard(0)], run_check=False, shape=(1, 4), stride=(4, 1)
        )
        ckpt.save({"w": row}, f"{root}/row", step=1)
        without._scale_inv.zero_()
        ckpt.load({"w": row}, f"{root}/row")
        assert without._scale_inv.item() == 3.0
        for rows, more in ((96, {}), (40, {}), (128, {"with_gemm_swizzled_scales": True})):
            odd = sharded(quantized("mxfp8", rows // 2, 128, 1, **more), 0)
            with pytest.raises(InvalidState) as refused:
                ckpt.save({"w": odd}, f"{root}/odd", step=1)
            said.append(str(refused.value))
        # An amax of each shard's own is not one of the tensor, nor a scale.
        own, of_shard = quantized("nvfp4", 128, 128, 1), quantized("float8", 4, 4, 1)
        own._amax_rowwise.add_(dist.get_rank())
        of_shard._scale_inv.add_(dist.get_rank())
        for tensor, name in ((own, "amax_rowwise"), (of_shard, "fp8_scale_inv")):
            with pytest.raises(CheckpointError, match=name):
                ckpt.save({"w": sharded(tensor, 0)}, f"{root}/own", step=1)
    return said


@pytest.mark.ranks
def test_shards_of_quantized_tensors_load_on_other_layouts(tmp_path: Path) -> None:
    for thirds, small, swizzled in run_ranks(2, on_ranks, str(tmp_path), timeout_seconds=240):
        assert "48 of 96 elements along dim 0, in blocks of 32" in thirds
        assert "parts that end where blocks end: 1, 3" in thirds
        assert "20 of 40 elements along dim 0, in blocks of 32" in small and "none" in small
        assert "declares no cut along dim 0" in swizzled
