"""Contexts of composites as values: plain data, and torch's and libraries' small types by name.

A context is what `__tensor_flatten__` gives beside components: dtypes, sizes, settings. What has no
plain form is refused, never pickled.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from ckpt.layout.composites import DATA_KEY, NoPlainForm
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.library_classes import class_at, name_in

_AO_QUANTIZATION = "torchao.quantization"

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
    if kind is dict and all(type(key) is str for key in context) and DATA_KEY not in context:
        return {key: plain_of(item) for key, item in context.items()}
    name = name_in(_CLASSES, kind)
    if name is None:
        raise NoPlainForm(f"a {kind.__module__}.{kind.__qualname__} in its context")
    if isinstance(context, enum.Enum):
        return {DATA_KEY: name, "value": context.name}
    if dataclasses.is_dataclass(context):
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
