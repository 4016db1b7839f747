"""Sparse and quantized tensors as torch.save writes them: calls of torch's own functions.

Components lie beside the pickle as other tensors do. What `torch.load(weights_only=True)` does not
make anew bit for bit has no such form, and stays the components that it consists of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckpt.convert.sources.torch_pickle import CallOut, GlobalOut, StorageOut, TensorOut
from ckpt.layout.descriptions import TYPE_KEY
from ckpt.state.values import TENSOR_KEY, is_reference

_POINTERS = {
    "torch.sparse_csr": ("crow_indices", "col_indices"),
    "torch.sparse_bsr": ("crow_indices", "col_indices"),
    "torch.sparse_csc": ("ccol_indices", "row_indices"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices"),
}
# By dtype, the storage that torch has for it, and the dtype of its integers.
_QUANTIZED = {
    "qint8": ("QInt8Storage", "int8"),
    "quint8": ("QUInt8Storage", "uint8"),
    "qint32": ("QInt32Storage", "int32"),
}
# By scheme, the dtypes of scales and zero points. torch.save refuses the symmetric ones.
_PER_CHANNEL = {
    "torch.per_channel_affine": ("float64", "int64"),
    "torch.per_channel_affine_float_qparams": ("float32", "float32"),
}


def composite_out(described: Mapping[str, Any], outputs: Mapping[str, TensorOut]) -> Any:
    """The call that makes the tensor of a description, over `outputs` by name; None without one."""
    components: dict[str, TensorOut] = {}
    for name, item in described["components"].items():
        if not is_reference(item) or item[TENSOR_KEY] not in outputs:
            return None
        components[name] = outputs[item[TENSOR_KEY]]
    kind, context = described[TYPE_KEY], described["context"]
    shape = tuple(described["shape"])
    try:
        if kind == "torch.quantized":
            return _quantized(str(described["dtype"]), shape, components, context)
        if kind == "torch.sparse_coo":
            parts = components["indices"], components["values"]
            return _sparse(kind, (*parts, _size(shape), context["coalesced"]))
        if kind in _POINTERS:
            first, second = _POINTERS[kind]
            parts = components[first], components[second]
            return _sparse(kind, (*parts, components["values"], _size(shape)))
    except KeyError:
        return None  # damaged: the components say what there is
    return None


def _size(shape: tuple[int, ...]) -> CallOut:
    return CallOut(GlobalOut("torch", "Size"), (shape,))


def _sparse(layout: str, data: tuple[Any, ...]) -> CallOut:
    kind = CallOut(GlobalOut("torch.serialization", "_get_layout"), (layout,))
    return CallOut(GlobalOut("torch._utils", "_rebuild_sparse_tensor"), (kind, data))


def _quantized(
    dtype: str, shape: tuple[int, ...], components: Mapping[str, TensorOut], context: Any
) -> CallOut | None:
    if dtype not in _QUANTIZED:
        return None
    storage, integer = _QUANTIZED[dtype]
    memory, scheme = components["int_repr"], str(context["scheme"])
    if memory.dtype != integer:
        return None
    quantizer: tuple[Any, ...]
    if scheme == "torch.per_tensor_affine":
        quantizer = float(context["scale"]), int(context["zero_point"])
    elif scheme in _PER_CHANNEL:
        tables = components["scales"], components["zero_points"]
        if tuple(table.dtype for table in tables) != _PER_CHANNEL[scheme]:
            return None
        quantizer = (*tables, context["axis"])
    else:
        return None
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    module, _, name = scheme.rpartition(".")
    hooks = CallOut(GlobalOut("collections", "OrderedDict"), ())
    held = StorageOut(storage, memory.key, math.prod(shape))
    arguments = (held, 0, shape, strides, (GlobalOut(module, name), *quantizer), False, hooks)
    return CallOut(GlobalOut("torch._utils", "_rebuild_qtensor"), arguments)
