"""How often a publication touches a state: counts of elements and bytes, no times.

Method: a state of which 1 % is new. torch's operations are counted by a dispatch mode, numpy's
memory by tracemalloc, digests and compression where they are called.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt
from ckpt.format import delta
from ckpt.format.delta import encode_delta
from ckpt.layout.elements import digest_of
from ckpt.layout.piece import Piece
from ckpt.layout.plain import Ranks
from ckpt.layout.region import whole
from ckpt.loading import patch
from ckpt.saving import published
from ckpt.saving.published import LivePart, Published

NUMEL, NEW = 3_000_000, 30_000  # three blocks
VIEWS = ("aten.view", "aten._unsafe_view", "aten.slice", "aten.detach", "aten.alias")
HERE = Ranks(0, (0,))


class Elements(TorchDispatchMode):
    """Counts elements that torch's operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), str(func)
        if isinstance(result, torch.Tensor) and not name.startswith(VIEWS) and "empty" not in name:
            # What is scattered writes as many as it has positions.
            written = args[2] if name.startswith("aten.scatter_") else result
            self.written[name] += written.numel()
        return result


@pytest.fixture
def changed() -> tuple[Published, list[LivePart]]:
    """What was published, and the state since."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(NUMEL, generator=generator)
    region = whole((NUMEL,))
    views = [(Piece("w", (NUMEL,), torch.float32, region, region, (0,)), weights)]
    state = Published(torch.bfloat16, ({}, {}, {}))
    state.fill(views)
    list(state.difference(views, HERE))  # takes the digests of all
    weights[torch.randperm(NUMEL, generator=generator)[:NEW]] += 1
    return state, views


def test_a_state_is_cast_once_and_read_no_more(changed: tuple[Published, list[LivePart]]) -> None:
    state, views = changed
    with Elements() as seen:
        blocks = [block for block, _ in state.difference(views, HERE) if block is not None]
    new = sum(len(block.positions) for block in blocks)
    assert new > NEW / 2
    assert seen.written.pop("aten.copy_.default") == NUMEL
    assert sum(seen.written.values()) <= 8 * new, seen.written


def test_digests_and_zstd_see_new_elements_alone(
    changed: tuple[Published, list[LivePart]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, views = changed
    digested, packed = list[int](), list[int]()
    encode = delta.Zstd.encode

    def digest(numbers: torch.Tensor, bits: torch.Tensor) -> int:
        digested.append(len(numbers))
        return digest_of(numbers, bits)

    def counted(zstd: delta.Zstd, data: memoryview, planes: int = 0) -> Any:
        packed.append(data.nbytes)
        return encode(zstd, data, planes)

    monkeypatch.setattr(published, "digest_of", digest)
    monkeypatch.setattr(published, "digest_of_run", None)
    monkeypatch.setattr(delta.Zstd, "encode", counted)
    blocks = [block for block, _ in state.difference(views, HERE) if block is not None]
    encode_delta(blocks)
    new = sum(len(block.positions) for block in blocks)
    assert sum(digested) == new
    assert len(packed) == 2 * len(blocks) + 1  # gaps, values, and the index
    assert sum(packed) <= 3.1 * new + 300


def test_temporaries_are_of_one_block(changed: tuple[Published, list[LivePart]]) -> None:
    state, views = changed
    tracemalloc.start()
    try:
        for _ in state.difference(views, HERE):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 2 * delta.BLOCK_NUMEL  # the whole has six bytes for each of three


def test_followers_check_and_write_new_elements_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, served = {"w": torch.randn(NUMEL)}, {"w": torch.zeros(NUMEL, dtype=torch.bfloat16)}
    digested = list[int]()

    def digest(numbers: torch.Tensor, bits: torch.Tensor) -> int:
        digested.append(len(numbers))
        return digest_of(numbers, bits)

    with ckpt.follow(served, tmp_path, line="published") as follower:
        for step in range(3):
            state["w"][torch.randperm(NUMEL)[:NEW]] += 1
            ckpt.publish(state, tmp_path, step=step, anchor_larger=1e9).result()
            if step == 2:  # the digests are known since the first delta
                monkeypatch.setattr(patch, "digest_of", digest)
                monkeypatch.setattr(patch, "digest_of_run", None)
            before = served["w"].clone()
            with Elements() as read:
                update = follower.poll()
            with Elements() as written:
                follower.swap()
    new = int((served["w"] != before).sum())
    assert update is not None and update.nbytes == 2 * new
    assert sum(digested) == new > NEW / 2
    assert sum(read.written.values()) <= 12 * new, read.written
    assert sum(written.written.values()) == new, written.written
