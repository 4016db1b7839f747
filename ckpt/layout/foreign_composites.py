"""Composites of other libraries, by names that are the same whatever module a class moves to.

A library is imported only where one of its tensors is loaded, and only from the places listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ckpt.layout.composite import CompositeType, Parts, wrapper_type
from ckpt.layout.region import Shape

__all__ = [
    "class_at",
    "class_named",
    "library_buffers",
    "library_type_named",
    "library_type_of",
    "name_in",
    "name_of_class",
]

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
}

# What stands in the contexts of these: enums, dataclasses and named tuples.
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


def library_type_of(tensor: Any) -> CompositeType | None:
    """The type of a tensor, if its class is one of a known library."""
    name = name_in(_TYPES, type(tensor))
    # Before it is quantized, it is a parameter like others.
    if name is None or (name == _PARAMS_4BIT and tensor.quant_state is None):
        return None
    return library_type_named(name)


@cache
def library_type_named(name: str) -> CompositeType | None:
    """The type that is called `name` in checkpoints; None when its library is not installed."""
    kind = class_at(_TYPES[name], name) if name in _TYPES else None
    if kind is None:
        return None
    if name == _PARAMS_4BIT:
        return CompositeType(
            name, _take_4bit, _build_4bit, dense=_dense_4bit, outline=_outline_4bit
        )
    made = wrapper_type(kind, name)
    if name == _NF4:  # its `dequantize` is a function of parts of it
        made = replace(made, dense=lambda tensor: tensor.get_original_weight())
    return made


def name_of_class(kind: type) -> str | None:
    """What a class that may stand in contexts is called in checkpoints."""
    return name_in(_CLASSES, kind)


def class_named(name: str) -> type | None:
    """The inverse of `name_of_class`; None when its library is not installed."""
    return class_at(_CLASSES[name], name) if name in _CLASSES else None


def name_in(table: Mapping[str, str], kind: type) -> str | None:
    """What `table`, of names and the modules that have them, calls a class; None if it has not."""
    library = kind.__module__.partition(".")[0]
    name = f"{library}.{kind.__name__}"
    if name not in table:
        return None
    # Its own library has it by then; another class of the same name is another type.
    return name if class_at(table[name], name) is kind else None


@cache
def class_at(module: str, name: str) -> type | None:
    """The class `name`, which begins with its library; None when that is not installed."""
    try:
        kind = getattr(import_module(module), name.partition(".")[2], None)
    except ImportError:
        return None
    return kind if isinstance(kind, type) else None


# --- bitsandbytes --------------------------------------------------------------------------------


def library_buffers(module: Any) -> dict[str, torch.Tensor]:
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
    return tuple(context["shape"]), context["dtype"]


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
    return Parts(components, context)


def _build_4bit(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    components, context = parts
    make_state: Any = class_at("bitsandbytes.functional", "bitsandbytes.QuantState")
    make: Any = class_at(_TYPES[_PARAMS_4BIT], _PARAMS_4BIT)
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
        shape=context["shape"],
        code=components["quant_map"],
        blocksize=context["blocksize"],
        quant_type=context["quant_type"],
        dtype=context["dtype"],
        offset=components.get("nested_offset"),
        state2=inner,
    )
    made: torch.Tensor = make(
        components["data"],
        requires_grad=False,
        quant_state=state,
        blocksize=context["blocksize"],
        compress_statistics=context["compress_statistics"],
        quant_type=context["quant_type"],
        quant_storage=context["quant_storage"],
        bnb_quantized=True,
    )
    return made
