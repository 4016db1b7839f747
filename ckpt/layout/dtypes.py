"""Element types: their names in our files, their sizes, and what safetensors calls them.

The canonical name is `str(torch.dtype)` without `torch.`. Only `torch_dtype`, `dtype_name` and
`refusal_reason` need torch, and import it when called: manifests are read without it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class DType(NamedTuple):
    """A storable element type. `code` is safetensors' name, `U8` when it has none of its own."""

    name: str
    itemsize: int
    code: str

    @property
    def is_native(self) -> bool:
        """Whether a safetensors reader shows the tensor with its true type."""
        return self.code != "U8" or self.name == "uint8"

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point or complex numbers, as weights are."""
        return self.name.startswith(("float", "bfloat", "complex"))


# safetensors knows more codes (F8_E8M0, F8_E4M3FNUZ, ...) than its torch loader, or than older
# versions
# of it: those types are bytes, with the true name next to them, so that anyone can open the file.
_TABLE = (
    DType("float64", 8, "F64"),
    DType("float32", 4, "F32"),
    DType("float16", 2, "F16"),
    DType("bfloat16", 2, "BF16"),
    DType("float8_e4m3fn", 1, "F8_E4M3"),
    DType("float8_e5m2", 1, "F8_E5M2"),
    DType("float8_e4m3fnuz", 1, "U8"),
    DType("float8_e5m2fnuz", 1, "U8"),
    DType("float8_e8m0fnu", 1, "U8"),
    DType("complex32", 4, "U8"),
    DType("complex64", 8, "C64"),
    DType("complex128", 16, "U8"),
    DType("int64", 8, "I64"),
    DType("int32", 4, "I32"),
    DType("int16", 2, "I16"),
    DType("int8", 1, "I8"),
    DType("uint64", 8, "U64"),
    DType("uint32", 4, "U32"),
    DType("uint16", 2, "U16"),
    DType("uint8", 1, "U8"),
    DType("bool", 1, "BOOL"),
    # Two 4-bit floats in each byte, which torch counts as one element.
    DType("float4_e2m1fn_x2", 1, "U8"),
    # Each element takes a whole byte (`bits16` two), whatever it uses of it.
    *(DType(f"{sign}int{bits}", 1, "U8") for sign in ("", "u") for bits in range(1, 8)),
    *(DType(name, 1, "U8") for name in ("bits8", "bits1x8", "bits2x4", "bits4x2")),
    DType("bits16", 2, "U8"),
)

DTYPES: dict[str, DType] = {entry.name: entry for entry in _TABLE}
ITEMSIZES: dict[str, int] = {entry.name: entry.itemsize for entry in _TABLE}
NATIVE_BY_CODE: dict[str, DType] = {entry.code: entry for entry in _TABLE if entry.is_native}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The canonical name, also of types that cannot be stored (see `refusal_reason`)."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a canonical name.

    Raises ValueError when it is none of ours, or when this torch does not have it.
    """
    import torch

    dtype = getattr(torch, name, None) if name in DTYPES else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


@cache
def refusal_reason(dtype: torch.dtype) -> str | None:
    """Why tensors of this type cannot be stored, with the next move; None when they can."""
    name = dtype_name(dtype)
    if name in DTYPES:
        return None
    if name.startswith(("qint", "quint")):
        return f"quantized dtype {name}: save int_repr(), scales and zero points as plain tensors"
    return f"dtype {name} is not known: save tensor.view(torch.uint8) instead"
