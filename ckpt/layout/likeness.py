"""How a tensor lies compared with a parameter: what decides which kind of optimizer state it is."""

from __future__ import annotations

import enum
from typing import Any

import torch

from ckpt.layout.piece import Owned
from ckpt.layout.region import Shape
from ckpt.layout.tensor import is_dtensor, is_plain, same_layout


class Likeness(enum.Enum):
    """How a tensor lies compared with a parameter."""

    SAME = "a DTensor of the parameter's shape, mesh and placements"
    OTHER = "a DTensor with a layout of its own, or what says its pieces itself"
    LOCAL = "plain memory of the shape of the parameter's local tensor"
    PLAIN = "plain memory of another shape"
    SPECIAL = "neither plain nor a DTensor: an adapter describes or refuses it"

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is plain memory."""
        return self in (Likeness.LOCAL, Likeness.PLAIN)

    @property
    def tells_layout(self) -> bool:
        """Whether the tensor says by itself how it is laid out."""
        return self in (Likeness.SAME, Likeness.OTHER)


def likeness(tensor: torch.Tensor, owned: Owned) -> Likeness:
    """How `tensor` lies compared with the parameter that is `owned`."""
    if is_dtensor(tensor):
        return Likeness.SAME if same_layout(tensor, owned.param) else Likeness.OTHER
    if hasattr(tensor, "__ckpt_pieces__"):
        return Likeness.OTHER
    if not is_plain(tensor):
        return Likeness.SPECIAL
    return Likeness.LOCAL if tensor.shape == owned.local.shape else Likeness.PLAIN


def zeros_like(owned: Owned, dtype: torch.dtype, *, local: bool) -> torch.Tensor:
    """Zeros laid out like the parameter: a DTensor where it is one.

    With `local`, always plain memory of the shape of the local tensor.
    """
    template = None if local else owned.template
    if template is None:
        return torch.zeros_like(owned.local, dtype=dtype)
    return torch.zeros_like(template, dtype=dtype, requires_grad=False)


def zeros_beside(owned: Owned, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of any shape, whole on each rank: replicated over the parameter's mesh, if it has one.

    An optimizer that works on DTensors cannot mix them with plain tensors.
    """
    template: Any = owned.template
    if template is None:
        return torch.zeros(shape, dtype=dtype, device=owned.local.device)
    from torch.distributed.tensor import zeros

    replicated: torch.Tensor = zeros(*shape, dtype=dtype, device_mesh=template.device_mesh)
    return replicated
