"""Digests of what ranks have in common and no engine keeps equal, taken from memory at each save.

Never kept from one save to the next: the memory is the same, what lies in it is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ckpt.format.checksum import crc32c, crc32c_of_each
from ckpt.layout.memory import host_bytes, is_plain_memory, local_view
from ckpt.layout.piece import Holding, Piece

# Tensors on a device up to this size are copied to the host together: each copy is a wait.
JOINED_NBYTES_MAX = 64 << 10


def digests_of(compared: Sequence[tuple[Holding, Piece]]) -> npt.NDArray[np.uint32]:
    """The crc32c of each of these pieces, as its memory is now."""
    return checksums_of([local_view(holding, piece) for holding, piece in compared])


def checksums_of(views: Sequence[torch.Tensor]) -> npt.NDArray[np.uint32]:
    """The crc32c of the elements of each view, in row-major order."""
    digests = np.zeros(len(views), dtype=np.uint32)
    joined: dict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for index, view in enumerate(views):
        if is_plain_memory(view):
            digests[index] = crc32c(host_bytes(view))
        elif _is_on_host(view) or view.numel() * view.element_size() > JOINED_NBYTES_MAX:
            host = torch.empty(view.shape, dtype=view.dtype).copy_(view)
            digests[index] = crc32c(host_bytes(host))
        else:
            joined[view.device].append((index, bytes_in_order(view)))
    for members in joined.values():
        host = torch.cat([data for _, data in members]).cpu()
        sizes = [data.numel() for _, data in members]
        digests[[index for index, _ in members]] = crc32c_of_each(host_bytes(host), sizes)
    return digests


def _is_on_host(view: torch.Tensor) -> bool:
    return view.is_cpu


def bytes_in_order(view: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order, as bytes on the same device."""
    return view.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
