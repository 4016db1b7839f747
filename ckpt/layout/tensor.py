"""What one tensor object is: plain memory, or a DTensor; and where its memory on this rank is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt.layout.dtypes import DTYPES

# Nothing else can be hidden in tensors of exactly these classes; asking for them first saves time.
PLAIN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
_STORABLE_DTYPES = frozenset(
    getattr(torch, name) for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
)
# torch has memory of these dtypes and hardly an operation on it, not even `copy_` for most.
_COPIED_AS: dict[torch.dtype, torch.dtype] = {
    getattr(torch, name): torch.int16 if entry.itemsize == 2 else torch.uint8
    for name, entry in DTYPES.items()
    if name.startswith(("bits", "float4_")) or name.strip("uint") in set("1234567")
    if hasattr(torch, name)
}


def copyable(memory: torch.Tensor) -> torch.Tensor:
    """`memory` itself, or where torch cannot copy its dtype, its bits as integers: the same
    memory, shape and strides.
    """
    known = _COPIED_AS.get(memory.dtype)
    return memory if known is None else memory.view(known)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is strided memory of a storable dtype, whole on this rank.

    False means only that an adapter has to look at it, which describes or refuses it.
    """
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.layout is torch.strided
        and tensor.dtype in _STORABLE_DTYPES
        and not tensor.is_meta
        and not tensor.is_nested
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `is_plain` says so of all of them, in two thirds of the time that asking one by one
    takes.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    return (
        PLAIN_CLASSES.issuperset(map(type, tensors))
        and not any([t.layout is not torch.strided or t.is_meta or t.is_nested for t in tensors])
        and dtypes <= _STORABLE_DTYPES
        and not any(map(torch.Tensor.is_neg, tensors))
        # Only complex numbers have a conjugate.
        and not (any(dtype.is_complex for dtype in dtypes) and not all(map(is_plain, tensors)))
    )


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor (a parameter may be one)."""
    if type(tensor) in PLAIN_CLASSES:
        return False
    # By its attributes: importing the class takes a second where nobody has used it yet.
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh")


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory `tensor` has on this rank, once it is there: a DTensor's local
    tensor, or the tensor itself.
    """
    if type(tensor) in PLAIN_CLASSES:
        return tensor
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    # The result of a collective may still be on its way.
    return local.trigger_wait() if hasattr(local, "trigger_wait") else local


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same, detached: a new object."""
    return memory_of(tensor).detach()


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor, of which `tensor` may be a shard that says so."""
    return tuple(getattr(tensor, "global_shape", tensor.shape))


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two DTensors lie alike: shape, mesh and placements. A plain tensor lies like none."""
    mesh_a, mesh_b = getattr(a, "device_mesh", None), getattr(b, "device_mesh", None)
    return (
        mesh_a is not None
        and mesh_a == mesh_b
        and a.shape == b.shape
        and tuple(a.placements) == tuple(b.placements)  # type: ignore[attr-defined]
    )
