"""Digests of what ranks have in common: of the bytes that lie there now, on any device, in order.

Tensors on a device are stood in for by tensors that are said to be no host memory.
"""

from __future__ import annotations

import pytest
import torch

from ckpt.format.checksum import crc32c
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Span, whole
from ckpt.saving import replica_check
from ckpt.saving.replica_check import JOINED_NBYTES_MAX, digests_of


def held(tensor: torch.Tensor) -> tuple[Holding, Piece]:
    shape = tuple(tensor.shape)
    piece = Piece("t", shape, tensor.dtype, whole(shape), whole(shape), (0, 1))
    return Holding(tensor, (piece,), Kind.OPTIMIZER, False), piece


def bytes_of(tensor: torch.Tensor) -> bytes:
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.view(-1).view(torch.uint8).numpy().tobytes()


TENSORS = [
    torch.tensor(3.0),
    torch.tensor(True),
    torch.arange(12, dtype=torch.int64).view(3, 4).t(),
    torch.arange(6, dtype=torch.bfloat16),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    torch.ones(JOINED_NBYTES_MAX // 4 + 1),
    torch.tensor(7, dtype=torch.int16),
]


@pytest.mark.parametrize("on_device", [False, True])
def test_digests_are_of_the_elements_in_order(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    joins = []
    if on_device:
        cat = torch.cat
        monkeypatch.setattr(replica_check, "is_plain_memory", lambda view: False)
        monkeypatch.setattr(replica_check, "_is_on_host", lambda view: False)
        monkeypatch.setattr(torch, "cat", lambda parts: joins.append(len(parts)) or cat(parts))
    digests = digests_of([held(tensor) for tensor in TENSORS])
    assert digests.tolist() == [crc32c(bytes_of(tensor)) for tensor in TENSORS]
    assert joins == ([len(TENSORS) - 1] if on_device else []), "one copy for all small ones"


def test_a_region_is_read_alone_and_anew() -> None:
    tensor = torch.arange(6.0)
    piece = Piece("t", (12,), tensor.dtype, Span(6, 9), Span(2, 5), (0, 1))
    holding = Holding(tensor, (piece,), Kind.OPTIMIZER, False)
    for _ in range(2):
        assert digests_of([(holding, piece)]).tolist() == [crc32c(bytes_of(tensor[2:5]))]
        tensor += 1
    assert digests_of([]).tolist() == []
