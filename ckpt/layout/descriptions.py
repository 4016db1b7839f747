"""Descriptions: what stands for a composite among values. They name its type and its components.

    {"$tensor_type": "torch.sparse_coo", "shape": (3, 4), "dtype": "float32",
     "context": {"coalesced": True},
     "components": {"indices": {"$tensor": "mask.indices"}, "values": {"$tensor": "mask.values"}}}

A component's name is that of the tensor, a dot, and its own; a component may be a composite itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

# Values with this key need version 2 of the encoding, see `ckpt.format.codec`.
TYPE_KEY = "$tensor_type"
_KEYS = frozenset({TYPE_KEY, "shape", "dtype", "context", "components"})


def is_description(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value stands for a composite."""
    # Exactly these keys: nothing of the user's passes for one by accident.
    return isinstance(value, dict) and value.keys() == _KEYS


def descriptions(value: Any) -> Iterator[dict[str, Any]]:
    """The descriptions in a value, those of components after that which they belong to."""
    if is_description(value):
        yield value
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        for item in items:
            yield from descriptions(item)


def shown_type(described: Mapping[str, Any]) -> str:
    """A composite in a few words: its type, dtype and shape."""
    sizes = ", ".join("?" if size == -1 else str(size) for size in described["shape"])
    return f"{described[TYPE_KEY]} of {described['dtype']} ({sizes})"
