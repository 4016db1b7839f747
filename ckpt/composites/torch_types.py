"""torch's own composites: sparse, quantized and nested tensors.

Components are the memory itself wherever torch shows it, so that a load can fill it in place.
"""

from __future__ import annotations

from typing import Any

import torch

from ckpt.layout.composites import CompositeType, Parts
from ckpt.layout.plain import UnsupportedTensor
from ckpt.layout.region import Shape


def type_of(tensor: torch.Tensor) -> CompositeType | None:
    """The type of a tensor that is none of one strided memory; None for others."""
    if tensor.is_nested:
        return _NESTED if tensor.layout is torch.strided else _JAGGED
    if tensor.is_quantized:
        return _QUANTIZED
    return None if tensor.layout is torch.strided else _OF_LAYOUT.get(tensor.layout)


def type_named(name: str) -> CompositeType | None:
    """The type that is called `name` in checkpoints."""
    return _OF_NAME.get(name)


# --- sparse --------------------------------------------------------------------------------------


def _take_coo(tensor: Any) -> Parts:
    # Not indices() and values(), which only coalesced tensors have.
    components = {"indices": tensor._indices(), "values": tensor._values()}
    return Parts(components, {"coalesced": tensor.is_coalesced()})


def _build_coo(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        parts.components["indices"],
        parts.components["values"],
        shape,
        # Indices come from a file: unchecked, one beyond the shape would reach other memory.
        is_coalesced=bool(parts.context["coalesced"]),
        check_invariants=True,
    )


def _replace_coo(live: Any, new: Any) -> None:
    live.copy_(new)
    live._coalesced_(new.is_coalesced())


def _replace_compressed(live: Any, new: Any) -> None:
    # Only tensors with as many elements can be copied, and only this call gives them so many.
    live.resize_as_sparse_(new).copy_(new)


def _compressed(layout: torch.layout, *names: str) -> CompositeType:
    def take(tensor: Any) -> Parts:
        return Parts({name: getattr(tensor, name)() for name in (*names, "values")}, {})

    def build(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        made: Any = torch.sparse_compressed_tensor  # its types know no components from elsewhere
        components = [parts.components[name] for name in (*names, "values")]
        built: torch.Tensor = made(*components, shape, layout=layout, check_invariants=True)
        return built

    dense = torch.Tensor.to_dense
    return CompositeType(str(layout), take, build, replace=_replace_compressed, dense=dense)


_BY_ROWS = ("crow_indices", "col_indices")
_BY_COLUMNS = ("ccol_indices", "row_indices")
_OF_LAYOUT: dict[torch.layout, CompositeType] = {
    torch.sparse_coo: CompositeType(
        "torch.sparse_coo", _take_coo, _build_coo, replace=_replace_coo, dense=torch.Tensor.to_dense
    ),
    torch.sparse_csr: _compressed(torch.sparse_csr, *_BY_ROWS),
    torch.sparse_bsr: _compressed(torch.sparse_bsr, *_BY_ROWS),
    torch.sparse_csc: _compressed(torch.sparse_csc, *_BY_COLUMNS),
    torch.sparse_bsc: _compressed(torch.sparse_bsc, *_BY_COLUMNS),
}


# --- quantized -----------------------------------------------------------------------------------

# Packed types have several elements in a byte: their memory is bytes, in one dim.
_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_SCHEMES = {
    str(scheme): scheme
    for scheme in (
        *_PER_TENSOR,
        torch.per_channel_affine,
        torch.per_channel_symmetric,
        torch.per_channel_affine_float_qparams,
    )
}


def _take_quantized(tensor: Any) -> Parts:
    scheme = tensor.qscheme()
    memory = _integers_of(tensor)
    if scheme in _PER_TENSOR:
        context = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
        return Parts({"int_repr": memory}, {"scheme": str(scheme), **context})
    components = {
        "int_repr": memory,
        "scales": tensor.q_per_channel_scales(),
        "zero_points": tensor.q_per_channel_zero_points(),
    }
    return Parts(components, {"scheme": str(scheme), "axis": tensor.q_per_channel_axis()})


def _integers_of(tensor: Any) -> torch.Tensor:
    """The memory of a quantized tensor as integers, without a copy."""
    storage, integer = tensor.untyped_storage(), _INTEGERS.get(tensor.dtype)
    if integer is not None:
        empty = torch.empty(0, dtype=integer, device=tensor.device)
        # A load fills this memory in place, which `int_repr()`, a copy, would not let it.
        return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.storage_offset() or not tensor.is_contiguous():
        raise UnsupportedTensor(
            f"is a view of a tensor of {tensor.dtype}, several elements of which share a byte; "
            "save the whole tensor"
        )
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _build_quantized(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    memory, context = parts.components["int_repr"], parts.context
    made: Any
    if _SCHEMES[context["scheme"]] in _PER_TENSOR:
        made = torch._empty_affine_quantized(
            shape,
            scale=context["scale"],
            zero_point=context["zero_point"],
            dtype=dtype,
            device=memory.device,
        )
    else:
        made = torch._empty_per_channel_affine_quantized(
            shape,
            scales=parts.components["scales"],
            zero_points=parts.components["zero_points"],
            axis=context["axis"],
            dtype=dtype,
            device=memory.device,
        )
    _integers_of(made).copy_(memory)
    return made  # type: ignore[no-any-return]


_QUANTIZED = CompositeType(
    "torch.quantized",
    _take_quantized,
    _build_quantized,
    replace=lambda live, new: live.copy_(new),  # scales and zero points as well
    dense=torch.Tensor.dequantize,
    outline=lambda context: (None, torch.float32),
)


# --- nested --------------------------------------------------------------------------------------


def _take_nested(tensor: Any) -> Parts:
    context = {
        "sizes": tensor._nested_tensor_size().tolist(),
        "strides": tensor._nested_tensor_strides().tolist(),
        "offsets": tensor._nested_tensor_storage_offsets().tolist(),
    }
    return Parts({"values": tensor.values()}, context)


def _build_nested(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    tables = [torch.tensor(parts.context[name]) for name in ("sizes", "strides", "offsets")]
    values = parts.components["values"]
    sizes, strides, offsets = tables
    # Checked here: tables of a damaged file must not let a view reach beyond its values.
    last = (offsets + ((sizes - 1) * strides).sum(-1)) if sizes.numel() else offsets
    if values.dim() != 1 or (last.numel() and int(last.max()) >= values.numel()):
        raise ValueError(f"its parts reach beyond its {values.numel()} values")
    made: torch.Tensor = torch._nested_view_from_buffer(values, sizes, strides, offsets)
    return made


def _take_jagged(tensor: Any) -> Parts:
    components = {"values": tensor._values, "offsets": tensor._offsets}
    if tensor._lengths is not None:
        components["lengths"] = tensor._lengths
    # As far as they are known already: the other properties would compute them.
    lengths = {"min": tensor._maybe_min_seqlen, "max": tensor._maybe_max_seqlen}
    return Parts(components, {"dim": tensor._ragged_idx, **lengths})


def _build_jagged(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    components, context = parts
    return torch.nested.nested_tensor_from_jagged(
        components["values"],
        components["offsets"],
        components.get("lengths"),
        jagged_dim=context["dim"],
        min_seqlen=context["min"],
        max_seqlen=context["max"],
    )


_NESTED = CompositeType("torch.nested", _take_nested, _build_nested)
_JAGGED = CompositeType("torch.jagged", _take_jagged, _build_jagged)
_OF_NAME = {kind.name: kind for kind in (*_OF_LAYOUT.values(), _QUANTIZED, _NESTED, _JAGGED)}
