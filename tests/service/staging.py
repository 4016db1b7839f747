"""Helpers for tests of saves in the background: when copies happen is scripted, not timed.

`late_copies` keeps the worker from copying until a step of an optimizer is held back, or until
`release` is called: whatever a training does after `async_save` has returned has been done by then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ckpt
from ckpt.layout.memory import local_view
from ckpt.layout.plain import Ranks
from ckpt.saving.staging import Staged
from ckpt.saving.step_gate import Gate
from ckpt.state.flatten import flatten_state

Tensors = dict[str, torch.Tensor]


def tensors_now(state: Any) -> Tensors:
    """Clones of all tensors that a save of `state` by this process alone would store."""
    return {
        piece.fqn: local_view(holding, piece).clone()
        for holding in flatten_state(state, Ranks.alone()).holdings
        for piece in holding.pieces
    }


def saved_tensors(url: str, step: int) -> Tensors:
    """All tensors of a checkpoint, its checksums compared."""
    with ckpt.open(url, step) as checkpoint:
        return {fqn: checkpoint[fqn] for fqn in checkpoint.keys()}  # noqa: SIM118  # no dict


def differing(got: Tensors, expected: Tensors) -> list[str]:
    """Names of tensors that are not bit for bit the same, or are on one side only."""
    names = sorted(got.keys() | expected.keys())
    return [
        name
        for name in names
        if name not in got or name not in expected or not torch.equal(got[name], expected[name])
    ]


@contextmanager
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Within the block, what may be copied in the background is copied as late as it can be."""
    release = threading.Event()
    copy, wait_for = Staged.copy, Gate.wait_for

    def late_copy(self: Staged) -> None:
        assert release.wait(30), "nothing released the copy"
        copy(self)

    def released_wait(self: Gate, optimizer: torch.optim.Optimizer) -> None:
        if self.is_behind(optimizer):
            release.set()
        wait_for(self, optimizer)

    with monkeypatch.context() as patch:
        patch.setattr(Staged, "copy", late_copy)
        patch.setattr(Gate, "wait_for", released_wait)
        try:
            yield release
        finally:
            release.set()
