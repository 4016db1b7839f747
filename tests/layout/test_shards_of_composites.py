"""How DTensors of a type are cut is declared; here the type's own slices prove each declaration.

Method: a tensor of random bytes is cut by its library, and what the slices consist of has to be
what the declaration says of the whole. What is not declared is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.composites.foreign_types import _CUTS, _cut_of
from ckpt.composites.shards import _of_shape
from ckpt.layout.composites import Parts, composite_at, description, put_together, type_of
from ckpt.layout.plain import UnsupportedTensor
from ckpt.layout.tensor import copyable
from ckpt.state.optimizer_kinds import copy_of
from tests.ranks import run_ranks

OPTIM, QUANTIZATION = "torchao.optim", "torchao.quantization"
ROWS, COLUMNS = 96, 512


def state_of(name: str) -> Any:
    kind: Any = getattr(importlib.import_module(OPTIM), name)
    return kind(nn.Linear(COLUMNS, ROWS).parameters())._new_buffer(torch.zeros(ROWS, COLUMNS), True)


def quantized(config: str, **arguments: Any) -> Any:
    library: Any = importlib.import_module(QUANTIZATION)
    linear: Any = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False)).to(torch.bfloat16)
    library.quantize_(linear, getattr(library, config)(**arguments))
    return linear[0].weight.detach()


def scales() -> torch.Tensor:
    return torch.zeros(ROWS, COLUMNS // 32)


def in_blocks(name: str, dtype: torch.dtype, block: Any = (1, 32), **parts: Any) -> Any:
    kind: Any = getattr(importlib.import_module(QUANTIZATION), name)
    shape = (4, ROWS, COLUMNS)[-len(block) :]
    scale = torch.zeros([all_ // one for all_, one in zip(shape, block, strict=True)])
    data = torch.zeros(shape).to(dtype)
    return kind(data, scale, block_size=[*block], dtype=torch.bfloat16, **parts)


def of_4_bits(name: str, *parts: torch.Tensor) -> Any:
    kind: Any = getattr(importlib.import_module(QUANTIZATION), name)
    whole = [part.contiguous() for part in parts]
    return kind(*whole, [1, 32], torch.Size((ROWS, COLUMNS)))


def nf4() -> Any:
    module: Any = importlib.import_module(f"{QUANTIZATION}.quantize_.workflows.nf4.nf4_tensor")
    return module.to_nf4(torch.randn(ROWS, COLUMNS), 64, 4)


def pair() -> Any:
    two: Any = importlib.import_module("torch.testing._internal.two_tensor").TwoTensor
    return two(torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS))


MAKERS: dict[str, Callable[[], Any]] = {
    "torch.TwoTensor": pair,
    "torchao.OptimState8bit": lambda: state_of("AdamW8bit"),
    "torchao.OptimState4bit": lambda: state_of("AdamW4bit"),
    "torchao.OptimStateFp8": lambda: state_of("AdamWFp8"),
    "torchao.Float8Tensor": lambda: in_blocks("Float8Tensor", torch.float8_e4m3fn, (1, 1, 32)),
    "torchao.Int8Tensor": lambda: in_blocks("Int8Tensor", torch.int8, zero_point=scales()),
    "torchao.Int4Tensor": lambda: of_4_bits(
        "Int4Tensor", torch.zeros(ROWS, COLUMNS // 2, dtype=torch.int8), scales().T, scales().T
    ),
    "torchao.Int4TilePackedTo4dTensor": lambda: of_4_bits(
        "Int4TilePackedTo4dTensor",
        torch.zeros(ROWS // 8, COLUMNS // 128, 32, 4, dtype=torch.int32),
        torch.zeros(COLUMNS // 32, ROWS, 2),
    ),
    "torchao.IntxUnpackedToInt8Tensor": lambda: quantized(
        "IntxWeightOnlyConfig",
        granularity=importlib.import_module(QUANTIZATION).PerGroup(32),
    ),
    "torchao.NF4Tensor": nf4,
}


def made(name: str) -> Any:
    if name.startswith("torchao."):
        pytest.importorskip("torchao")
    torch.manual_seed(0)
    return MAKERS[name]()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return copyable(tensor.contiguous()).reshape(-1).view(torch.uint8)


def slices(tensor: Any, dim: int, size: int) -> list[Any]:
    aten = torch.ops.aten
    try:
        return [aten.slice.Tensor(tensor, dim, nth * size, (nth + 1) * size) for nth in (0, 1, 2)]
    except (NotImplementedError, TypeError, AssertionError):
        return list(aten.split.Tensor(tensor, size, dim))  # of NF4 tensors, which have no slices


def taken(tensor: Any) -> Parts:
    kind = type_of(tensor)
    assert kind is not None
    return kind.take(tensor)


def without(context: Any, dtype: torch.dtype) -> Any:
    """A context without the dtype that a tensor pretends to have: some slices forget it."""
    plain = {"$data": "dtype", "value": str(dtype).removeprefix("torch.")}
    if isinstance(context, dict):
        return None if context == plain else {k: without(v, dtype) for k, v in context.items()}
    return [without(v, dtype) for v in context] if isinstance(context, list | tuple) else context


THREE_DIMS = ("torchao.Float8Tensor",)
CASES = [
    (name, dim) for name, cut in _CUTS.items() for dim in cut if dim < 2 + (name in THREE_DIMS)
]


@pytest.mark.parametrize(("name", "dim"), CASES)
def test_slices_of_a_type_are_what_it_declares(name: str, dim: int) -> None:
    whole = made(name)
    parts = taken(whole)
    for memory in parts.components.values():
        bytes_of(memory).random_()
    declared = _cut_of(name, parts.context, tuple(whole.shape))[dim]
    cut = {part: along for part, along in declared.items() if part in parts.components}
    size = whole.shape[dim] // 4
    for index, part in enumerate(slices(whole, dim, size)[:3]):
        mine = taken(part)
        assert mine.components.keys() == parts.components.keys()
        for component, memory in parts.components.items():
            expected = memory
            if component in cut:
                length, rest = divmod(memory.shape[cut[component]], 4)
                assert not rest
                expected = memory.narrow(cut[component], index * length, length)
            assert torch.equal(bytes_of(mine.components[component]), bytes_of(expected)), component
        shape, of_slice = tuple(whole.shape), tuple(part.shape)
        context = _of_shape(parts.context, shape, of_slice)
        for dtype in (whole.dtype, torch.float32):
            context, mine = (
                without(context, dtype),
                mine._replace(context=without(mine.context, dtype)),
            )
        assert context == mine.context


def test_one_scale_along_a_dim_shows_no_cut_of_it() -> None:
    """It may be that of the tensor, or that of each shard."""
    pytest.importorskip("torchao")
    for block, dims in (((1, COLUMNS), {0}), ((ROWS, COLUMNS), set()), ((32, 32), {0, 1})):
        whole = in_blocks("Float8Tensor", torch.float8_e4m3fn, block)
        assert _cut_of("torchao.Float8Tensor", taken(whole).context, (ROWS, COLUMNS)).keys() == dims


class Blocks(torch.Tensor):
    """Rows of codes in one dim, a scale for each `block` elements, and its shape."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, shape: Any, block: int) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        made.codes, made.scale, made.sizes, made.block = codes, scale, torch.Size(shape), block
        return made

    def __tensor_flatten__(self) -> Any:
        me: Any = self
        return ["codes", "scale"], [me.sizes, me.block]

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, shape: Any, strides: Any) -> Any:
        return Blocks(parts["codes"], parts["scale"], *context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            me = args[0]
            return Blocks(me.codes, me.scale, me.sizes, me.block)
        raise NotImplementedError(f"{func}")


def shard_of(rows: int, dim: int = 0) -> Any:
    """This rank's shard of a DTensor of `rows` rows of 6 elements, in blocks of 8."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = [len(part) for part in torch.arange(rows).chunk(size)] + [0] * size
    local = Blocks(torch.zeros(mine[rank] * 6), torch.ones(mine[rank] * 6 // 8), (mine[rank], 6), 8)
    shape = (rows, 6) if dim == 0 else (mine[rank], 12)
    mesh = init_device_mesh("cpu", (size,))
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )


def _refused(tensor: Any) -> str:
    try:
        composite_at("w", tensor)
    except UnsupportedTensor as refused:
        return refused.problem
    return ""


def _cases() -> Any:
    ckpt.register_tensor_type(Blocks, "mine.Blocks")
    undeclared = _refused(shard_of(8))
    ckpt.register_tensor_type(Blocks, "mine.Blocks", cut={0: {"codes": 0, "scale": 0}})
    composite = composite_at("w", shard_of(8))
    assert composite is not None
    shapes = {
        name: (tuple(part.shape), part.global_shape)
        for name, part in composite.components.items()
        if hasattr(part, "global_shape")
    }
    copied = {name: type(part.clone()) is type(part) for name, part in composite.components.items()}
    assert all(copied.values())  # copies know their place
    return undeclared, shapes, [_refused(shard_of(*one)) for one in ((8, 1), (5,), (0,))]


@pytest.mark.ranks
def test_what_is_not_declared_or_ends_inside_of_blocks_is_refused() -> None:
    for rank, (undeclared, shapes, refused) in enumerate(run_ranks(2, _cases)):
        assert "mine.Blocks declares no cut along dim 0" in undeclared
        assert shapes == {"w.codes": ((24,), (48,)), "w.scale": ((3,), (6,))}
        assert "declares no cut along dim 1" in refused[0]
        assert rank or "ends inside of a block" in refused[1]
        assert "has no elements" in refused[2]


def of_rows(numbers: range, seed: int) -> Any:
    """Rows of 8 elements, each a block, of a tensor that `seed` makes."""
    draw = torch.Generator().manual_seed(seed)
    codes, scale = torch.randn(64, generator=draw), torch.randn(8, generator=draw)
    mine = slice(numbers.start * 8, numbers.stop * 8), slice(numbers.start, numbers.stop)
    return Blocks(codes[mine[0]].clone(), scale[mine[1]].clone(), (len(numbers), 8), 8)


def float8_rows(numbers: range, seed: int) -> Any:
    kind: Any = importlib.import_module(QUANTIZATION).Float8Tensor
    draw = torch.Generator().manual_seed(seed)
    data, scale = torch.randn(8, 8, generator=draw), torch.randn(8, 1, generator=draw)
    rows = slice(numbers.start, numbers.stop)
    data = data[rows].to(torch.float8_e4m3fn)
    return kind(data, scale[rows].clone(), block_size=[1, 8], dtype=torch.float32)


def _without_elements(root: str, has_torchao: bool) -> None:
    ckpt.register_tensor_type(Blocks, "mine.Blocks", cut={0: {"codes": 0, "scale": 0}})
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    for make in (of_rows, float8_rows) if has_torchao else (of_rows,):
        for rows in (1, 2, 4):
            each = -(-rows // size)
            mine = range(rows)[rank * each : (rank + 1) * each]

            def shard(seed: int, make: Any = make, mine: range = mine, rows: int = rows) -> Any:
                local, shape = make(mine, seed), torch.Size((rows, 8))
                return DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(8, 1)
                )

            url = f"{root}/{make.__name__}-{rows}"
            holder = nn.Module()
            holder.w = nn.Parameter(shard(1), requires_grad=False)
            holder.plain = nn.Parameter(torch.ones(2))
            ckpt.save({"model": holder}, f"{url}-module", step=1)
            holder.w = nn.Parameter(shard(4), requires_grad=False)
            ckpt.load({"model": holder}, f"{url}-module")
            ckpt.save({"w": shard(1)}, url, step=1)
            whole = make(range(rows), 2)
            ckpt.load({"w": whole}, url)
            ckpt.save({"w": whole}, url, step=2)
            live = shard(3)
            ckpt.load({"w": live}, url)
            loaded = (live.to_local(), mine), (holder.w.to_local(), mine)
            for one, numbers in ((whole, range(rows)), *loaded):
                got, wanted = taken(one), taken(make(numbers, 1))
                for name, memory in wanted.components.items():
                    assert torch.equal(bytes_of(got.components[name]), bytes_of(memory)), name


@pytest.mark.ranks
def test_ranks_without_elements_save_and_load(tmp_path: Path) -> None:
    run_ranks(3, _without_elements, str(tmp_path), find_spec("torchao") is not None)


class Placed(torch.Tensor):
    """A user's tensor that says its pieces."""

    def __ckpt_pieces__(self) -> Any:
        raise AssertionError("nothing here asks where it lies")

    def cpu(self, *arguments: Any) -> Any:
        return "on the host"


def test_not_all_that_says_its_pieces_is_a_components_shard() -> None:
    whole = pair()
    whole.a, whole.b = (torch.full((2, 3), value).as_subclass(Placed) for value in (1.0, 2.0))
    kind = type_of(whole)
    assert kind is not None
    components, context = kind.take(whole)
    made: Any = put_together(description(whole, kind, context, components), "w", components)
    assert torch.equal(made.a, whole.a) and torch.equal(made.b, whole.b)
    assert copy_of(whole.a, to_cpu=True) == "on the host"
