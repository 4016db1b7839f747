"""Composites of libraries. A library is imported only where one of its tensors is loaded."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch

from ckpt.layout.composites import DATA_KEY, CompositeType, Cut, NoPlainForm, Parts
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.named_classes import class_at, name_in
from ckpt.layout.region import Shape, row_major_strides

_AO_QUANTIZATION = "torchao.quantization"
_AO_OPTIM = "torchao.optim"
_PARAMS_4BIT = "bitsandbytes.Params4bit"
_NF4 = "torchao.NF4Tensor"


# Where each class is.
_TYPES: dict[str, str] = {
    "torch.TwoTensor": "torch.testing._internal.two_tensor",
    "torchao.OptimState8bit": f"{_AO_OPTIM}.subclass_8bit",
    "torchao.OptimState4bit": f"{_AO_OPTIM}.subclass_4bit",
    "torchao.OptimStateFp8": f"{_AO_OPTIM}.subclass_fp8",
    "torchao.Float8Tensor": _AO_QUANTIZATION,
    "torchao.Int8Tensor": _AO_QUANTIZATION,
    "torchao.IntxUnpackedToInt8Tensor": _AO_QUANTIZATION,
    "torchao.Int4Tensor": _AO_QUANTIZATION,
    "torchao.Int4PlainInt32Tensor": _AO_QUANTIZATION,
    "torchao.Int4TilePackedTo4dTensor": _AO_QUANTIZATION,
    "torchao.NF4Tensor": _AO_QUANTIZATION,
    "bitsandbytes.Params4bit": "bitsandbytes.nn",
    "transformer_engine.Float8Tensor": "transformer_engine.pytorch.tensor.float8_tensor",
    "transformer_engine.Float8BlockwiseQTensor": (
        "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
    ),
    "transformer_engine.MXFP8Tensor": "transformer_engine.pytorch.tensor.mxfp8_tensor",
    "transformer_engine.NVFP4Tensor": "transformer_engine.pytorch.tensor.nvfp4_tensor",
}

# How DTensors over these are cut: what one dim of the tensor cuts, as `Cut` says it. The others are
# not cut with the tensor, or their shards say nothing that is the same for all.
_ROWS = 0
_ALIKE: Cut = {dim: dict.fromkeys(("qdata", "scale", "zero_point"), dim) for dim in range(3)}
_OF_ONE_BLOCK = ("torchao.Float8Tensor", "torchao.Int8Tensor")
_CUTS: dict[str, Cut] = {
    "torch.TwoTensor": {dim: {"a": dim, "b": dim} for dim in range(8)},
    "torchao.OptimState8bit": {_ROWS: {"codes": 0, "scale": 0}},
    "torchao.OptimState4bit": {_ROWS: {"codes": 0, "scale": 0}},
    "torchao.OptimStateFp8": {_ROWS: {"codes": 0, "scale": 0}},
    "torchao.Float8Tensor": _ALIKE,
    "torchao.Int8Tensor": _ALIKE,
    "torchao.IntxUnpackedToInt8Tensor": _ALIKE,
    # Their scales lie the other way round.
    "torchao.Int4Tensor": {
        dim: {"qdata": dim, "scale": 1 - dim, "zero_point": 1 - dim} for dim in (0, 1)
    },
    "torchao.Int4TilePackedTo4dTensor": {
        dim: {"qdata": dim, "scale_and_zero": 1 - dim} for dim in (0, 1)
    },
    _NF4: {_ROWS: dict.fromkeys(("quantized_data", "quantization_factor", "quantized_scalers"), 0)},
}


# What stands in the contexts of types of libraries: enums, dataclasses and named tuples.
_CLASSES: dict[str, str] = {
    "torchao.PerRow": _AO_QUANTIZATION,
    "torchao.PerTensor": _AO_QUANTIZATION,
    "torchao.PerGroup": _AO_QUANTIZATION,
    "torchao.MappingType": _AO_QUANTIZATION,
    "torchao.KernelPreference": f"{_AO_QUANTIZATION}.quantize_.common",
    "torchao.QuantizeTensorToFloat8Kwargs": f"{_AO_QUANTIZATION}.quantize_.workflows",
    "torchao.QuantizeTensorToInt8Kwargs": f"{_AO_QUANTIZATION}.quantize_.workflows",
    "torchao.Float8MMConfig": "torchao.float8.inference",
    "torchao.SubclassTensorArgs": f"{_AO_QUANTIZATION}.quantize_.workflows.nf4.nf4_tensor",
}

# Modules with tensors of their own that are no buffers.
_MODULES: dict[str, str] = {"bitsandbytes.Linear8bitLt": "bitsandbytes.nn"}


def type_of(tensor: Any) -> CompositeType | None:
    """The type of a tensor, if its class is one of a known library."""
    name = name_in(_TYPES, type(tensor))
    # Before it is quantized, it is a parameter like others.
    if name is None or (name == _PARAMS_4BIT and tensor.quant_state is None):
        return None
    return type_named(name)


# Once for each name: each of many parameters asks for its type.
@cache
def type_named(name: str) -> CompositeType | None:
    """The type that is called `name` in checkpoints; None when its library is not installed."""
    # From our own table: a checkpoint never says what is imported.
    kind = class_at(_TYPES[name], name) if name in _TYPES else None
    if kind is None:
        return None
    if name == _PARAMS_4BIT:
        return CompositeType(
            name, _take_4bit, _build_4bit, dense=_dense_4bit, outline=_outline_4bit
        )
    if (te := _OF_TE.get(name)) is not None:
        return CompositeType(
            name,
            te.take,
            partial(te.build, kind),
            te.cut,
            dense=lambda tensor: tensor.dequantize(),
            is_wrapper=True,
            blocks=dict.fromkeys(range(2), te.block),
            filled=_forget_transpose if "data" in te.parts else None,
        )
    made = wrapper_type(kind, name, lambda context, shape: _cut_of(name, context, shape))
    if name == _NF4:  # its `dequantize` is a function of parts of it
        made = dataclasses.replace(made, dense=lambda tensor: tensor.get_original_weight())
    return made


def _cut_of(name: str, context: Any, shape: Shape) -> Cut:
    cut = _CUTS.get(name, {})
    if name.startswith("torchao.Int4") and len(shape) != 2:
        return {}
    if name not in _OF_ONE_BLOCK:
        return cut
    # One scale along a dim may be that of the tensor or of each shard: nothing shows which. Of a
    # shard without elements others show it.
    blocks = context.get("block_size") if isinstance(context, dict) else None
    if not isinstance(blocks, list | tuple) or any(type(size) is not int for size in blocks):
        return {}
    sizes = enumerate(zip(blocks, shape, strict=False))
    shown = {dim for dim, (one, all_) in sizes if one == 1 or one < all_ or not all_}
    return {dim: cut[dim] for dim in shown & cut.keys()}


def wrapper_type(kind: Any, name: str, cut: Callable[[Any, Shape], Cut]) -> CompositeType:
    """The type of a traceable wrapper subclass, by torch's protocol of them."""

    def take(tensor: Any) -> Parts:
        names, context = tensor.__tensor_flatten__()
        return Parts({name: getattr(tensor, name) for name in names}, plain_of(context))

    def build(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        context, size = context_of(parts.context, _device_of(parts)), torch.Size(shape)
        made: torch.Tensor = kind.__tensor_unflatten__(
            dict(parts.components), context, size, row_major_strides(shape)
        )
        return made

    own = getattr(kind, "dequantize", None)
    # Every tensor has one of torch's, for torch's own quantized tensors.
    has_own = callable(own) and own is not torch.Tensor.dequantize
    dense = (lambda tensor: tensor.dequantize()) if has_own else None
    return CompositeType(name, take, build, cut, dense=dense, is_wrapper=True)


def _device_of(parts: Parts) -> torch.device:
    first = next(iter(parts.components.values()), None)
    return torch.device("cpu") if first is None else first.device


# --- contexts ------------------------------------------------------------------------------------

# A context is what `__tensor_flatten__` gives besides components: dtypes, sizes, settings. Torch's
# and libraries' small types have names in values. What has no plain form is refused, never pickled.
_SCALARS = (type(None), bool, int, float, str, bytes)


def plain_of(context: Any) -> Any:
    """`context` as a value. Raises NoPlainForm, saying what has none."""
    kind = type(context)
    if kind in _SCALARS:
        return context
    if kind is torch.Size:
        return {DATA_KEY: "size", "value": tuple(context)}
    if kind is torch.dtype:
        return {DATA_KEY: "dtype", "value": dtype_name(context)}
    if kind is torch.device:
        # Where it lay, which a load decides anew.
        return {DATA_KEY: "device", "value": None}
    if kind is list or kind is tuple:
        return kind(plain_of(item) for item in context)
    # A dict with our own mark in it would come back as something else.
    if kind is dict and all(type(key) is str for key in context) and DATA_KEY not in context:
        return {key: plain_of(item) for key, item in context.items()}
    name = name_in(_CLASSES, kind)
    if name is None:
        raise NoPlainForm(f"a {kind.__module__}.{kind.__qualname__} in its context")
    if isinstance(context, enum.Enum):
        # By name: numbers of `enum.auto` move when a library adds a member.
        return {DATA_KEY: name, "value": context.name}
    if dataclasses.is_dataclass(context):
        # Fields that `__init__` does not take are computed by the class.
        fields = {f.name: getattr(context, f.name) for f in dataclasses.fields(context) if f.init}
        return {DATA_KEY: name, "value": plain_of(fields)}
    return {DATA_KEY: name, "value": plain_of(context._asdict())}


def context_of(value: Any, device: torch.device) -> Any:
    """The inverse of `plain_of`, for a tensor on `device`. Raises NoPlainForm as well."""
    if isinstance(value, dict):
        if DATA_KEY in value:
            return _special(value[DATA_KEY], value.get("value"), device)
        return {key: context_of(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(context_of(item, device) for item in value)
    return value


def _special(name: Any, value: Any, device: torch.device) -> Any:
    if name == "size":
        return torch.Size(value)
    if name == "dtype":
        dtype = getattr(torch, value, None) if isinstance(value, str) else None
        if not isinstance(dtype, torch.dtype):
            raise NoPlainForm(f"this torch has no dtype {value!r:.100}")
        return dtype
    if name == "device":
        return device
    kind: Any = class_at(_CLASSES[name], name) if name in _CLASSES else None
    if kind is None:
        raise NoPlainForm(f"its context has a {name!r:.100}, which is not known here")
    if issubclass(kind, enum.Enum):
        return kind[value]
    return kind(**context_of(value, device))


# --- Transformer Engine --------------------------------------------------------------------------

# Its quantized tensors have no protocol of wrappers in all versions: their attributes are the
# arguments of their class with a "_" in front, but for these.
_ATTRIBUTES = {"fp8_scale_inv": "_scale_inv", "data_transpose": "_transpose"}
_SWIZZLED = "with_gemm_swizzled_scales"
_DATA, _STALE, _RESET = "_data", "_transpose_invalid", "_reset_caches"


class _Lies(NamedTuple):
    """How a part lies, of a tensor as rows and columns: its dim 0 is along dim `first` of that; one
    scale is of `per` elements along each dim of the part, in memory of multiples of `pad`.
    """

    first: int = 0
    per: tuple[int, int] | None = None
    pad: tuple[int, int] = (1, 1)

    def sizes(self, shape: Shape) -> tuple[int, int]:
        """How many scales a tensor of `shape` has, without what is padded."""
        rows_columns = math.prod(shape[:-1]), shape[-1]
        assert self.per is not None, "asked of scales alone"
        own = (rows_columns[self.first], rows_columns[1 - self.first])
        return -(-own[0] // self.per[0]), -(-own[1] // self.per[1])


class _OfTe(NamedTuple):
    """A class: the argument with its format, further ones (older versions have not all), how its
    parts lie (None: one for the whole tensor), and the elements of a block along each dim.
    """

    form: str
    flags: tuple[str, ...]
    parts: Mapping[str, _Lies | None]
    block: int

    def lies(self, part: str, context: Any) -> _Lies | None:
        lines = None if context.get("is_2D_scaled", True) else _OF_LINES.get(part)
        return lines or self.parts[part]

    def scales(self, part: str, context: Any) -> _Lies | None:
        """How the scales `part` lie that may be padded; None of others."""
        lies = self.lies(part, context)
        return None if lies is None or lies.per is None or context.get(_SWIZZLED) else lies

    def take(self, tensor: Any) -> Parts:
        if getattr(getattr(tensor, "_data_format", None), "name", "GEMM_READY") != "GEMM_READY":
            raise NotImplementedError("its data is in the compact form of a gather")
        context = {self.form: getattr(tensor, f"_{self.form}").name}
        known = [flag for flag in self.flags if hasattr(tensor, f"_{flag}")]
        context |= {flag: getattr(tensor, f"_{flag}") for flag in known}
        parts = {}
        for part in self.parts:
            memory = getattr(tensor, _ATTRIBUTES.get(part, f"_{part}"))
            # A transpose next to the data is a copy that the class makes when it needs one.
            is_copy = part == "data_transpose" and ("data" in parts or getattr(tensor, _STALE))
            if memory is None or is_copy:
                continue
            if (lies := self.scales(part, context)) is not None:
                rows, columns = lies.sizes(tuple(tensor.shape))
                memory = memory[:rows, :columns]  # what is padded depends on the layout
            parts[part] = memory
        return Parts(parts, context)

    def build(self, kind: Any, parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        formats: Any = class_at("transformer_engine_torch", "transformer_engine_torch.DType")
        known = {} if formats is None else formats.__members__
        context = {**parts.context, self.form: known[parts.context[self.form]]}
        memory = {part: parts.components.get(part) for part in self.parts}
        for part, one in memory.items():
            if one is not None and (lies := self.scales(part, context)) is not None:
                more = [-size % pad for size, pad in zip(one.shape, lies.pad, strict=True)]
                memory[part] = torch.nn.functional.pad(one, (0, more[1], 0, more[0]))
        # Its class makes a quantizer where it has to quantize again; a live tensor keeps its own.
        fixed: dict[str, Any] = {"dtype": dtype, "quantizer": None}
        news = [vars(base).get("__new__") for base in kind.__mro__]
        # Those of older versions lie on the device that is current.
        if any("device" in signature(n).parameters for n in news if isinstance(n, staticmethod)):
            fixed["device"] = _device_of(parts)
        made: torch.Tensor = kind(shape=shape, **fixed, **memory, **context)
        return made

    def cut(self, context: Any, shape: Shape) -> Cut:
        if len(shape) != 2 or context.get(_SWIZZLED):  # scales that lie in tiles of the whole
            return {}
        lying = {part: self.lies(part, context) for part in self.parts}
        made = {
            dim: {part: abs(dim - lies.first) for part, lies in lying.items() if lies is not None}
            for dim in range(2)
        }
        if context.get("row_scaled_nvfp4"):
            made[0]["amax_rowwise"] = 0
        return made


def _by_both(row: _Lies, column: _Lies, first: int) -> dict[str, _Lies | None]:
    """Parts by rows and by columns; data by columns has dim `first` of the tensor first."""
    return {
        "rowwise_data": _Lies(),
        "rowwise_scale_inv": row,
        "columnwise_data": _Lies(first),
        "columnwise_scale_inv": column,
    }


_4OVER6 = ("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max")
_OF_TE: dict[str, _OfTe] = {
    "transformer_engine.Float8Tensor": _OfTe(
        "fp8_dtype", (), {"data": _Lies(), "data_transpose": _Lies(1), "fp8_scale_inv": None}, 1
    ),
    "transformer_engine.MXFP8Tensor": _OfTe(
        "fp8_dtype",
        (_SWIZZLED,),
        _by_both(_Lies(0, (1, 32), (128, 4)), _Lies(0, (32, 1), (4, 128)), 0),
        32,
    ),
    "transformer_engine.NVFP4Tensor": _OfTe(
        "fp4_dtype",
        (_SWIZZLED, *_4OVER6),
        _by_both(_Lies(0, (1, 16), (128, 4)), _Lies(1, (1, 16), (128, 4)), 1)
        | {"amax_rowwise": None, "amax_columnwise": None},
        16,
    ),
    "transformer_engine.Float8BlockwiseQTensor": _OfTe(
        "fp8_dtype",
        ("is_2D_scaled",),
        _by_both(_Lies(0, (128, 128), (1, 4)), _Lies(1, (128, 128), (1, 4)), 1),
        128,
    ),
}
# Where a factor is of 128 elements of a row or column, and not of a square.
_OF_LINES = {
    "rowwise_scale_inv": _Lies(1, (128, 1), (1, 4)),
    "columnwise_scale_inv": _Lies(0, (128, 1), (1, 4)),
}


def _forget_transpose(tensor: Any) -> None:
    """A transpose made of the data before is no longer one; without data it is what was loaded."""
    if getattr(tensor, _DATA) is not None:
        getattr(tensor, _RESET)()


# --- bitsandbytes --------------------------------------------------------------------------------


def buffers_of(module: Any) -> dict[str, torch.Tensor]:
    """Tensors of a library's module that are no buffers of it and belong to its weights, by the
    names that the library's own state dicts give them.
    """
    if name_in(_MODULES, type(module)) is None or module.state.has_fp16_weights:
        return {}
    # Scales of the rows; with the first forward they move from the weight to the module's state.
    scales = getattr(module.weight, "SCB", None)
    scales = module.state.SCB if scales is None else scales
    return {} if scales is None else {"SCB": scales}


def _dense_4bit(tensor: Any) -> torch.Tensor:
    functional: Any = import_module("bitsandbytes.functional")
    dense: torch.Tensor = functional.dequantize_4bit(tensor.data, tensor.quant_state)
    return dense


def _outline_4bit(context: Any) -> tuple[Shape, torch.dtype]:
    # Any device will do: only shape and dtype are wanted.
    plain = context_of(context, torch.device("cpu"))
    return tuple(plain["shape"]), plain["dtype"]


def _take_4bit(tensor: Any) -> Parts:
    """Names are those of the library's own files, but for the packed data and the offset."""
    state = tensor.quant_state
    components = {"data": tensor.data, "absmax": state.absmax, "quant_map": state.code}
    context = {
        "quant_type": state.quant_type,
        "blocksize": state.blocksize,
        "shape": None if state.shape is None else torch.Size(state.shape),
        "dtype": state.dtype,
        "compress_statistics": tensor.compress_statistics,
        "quant_storage": tensor.quant_storage,
    }
    if state.nested:
        inner = state.state2
        nested = {"nested_absmax": inner.absmax, "nested_quant_map": inner.code}
        components |= {**nested, "nested_offset": state.offset}
        context |= {"nested_blocksize": inner.blocksize, "nested_dtype": inner.dtype}
    return Parts(components, plain_of(context))


def _build_4bit(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    components, context = parts.components, context_of(parts.context, _device_of(parts))
    make_state: Any = class_at("bitsandbytes.functional", "bitsandbytes.QuantState")
    make: Any = class_at(_TYPES[_PARAMS_4BIT], _PARAMS_4BIT)

    def some(*names: str) -> dict[str, Any]:
        return {name: context[name] for name in names}

    inner = None
    if "nested_absmax" in components:
        inner = make_state(
            absmax=components["nested_absmax"],
            blocksize=context["nested_blocksize"],
            code=components["nested_quant_map"],
            dtype=context["nested_dtype"],
        )
    state = make_state(
        absmax=components["absmax"],
        code=components["quant_map"],
        offset=components.get("nested_offset"),
        state2=inner,
        **some("shape", "blocksize", "quant_type", "dtype"),
    )
    made: torch.Tensor = make(
        components["data"],
        requires_grad=False,
        quant_state=state,
        # Otherwise the first move to a device would quantize the packed bytes once more.
        bnb_quantized=True,
        **some("blocksize", "compress_statistics", "quant_type", "quant_storage"),
    )
    return made
