"""Optimizers and saves in the background: a step waits until what it changes has been copied.

One hook before every step of every `torch.optim.Optimizer`, in the state that is saved or not. It
is installed by the first save in the background and costs well under a microsecond while nothing is
being copied.

Only what passes through the hook can be held back. Note "seen": an optimizer counts as one that
waits from the first step that was seen here; until then its parameters are copied before
`async_save` returns. A step that runs inside of a captured CUDA graph never comes through again, so
an optimizer that was seen capturing does not count any more.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.layout.dtensor import local_tensor


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory behind a tensor, which names it while it lives; 0 without any."""
    return local_tensor(tensor).untyped_storage().data_ptr()


@dataclass(eq=False)
class Gate:
    """Holds back steps of optimizers over `storages`, or over `parameters`, until it is opened.

    Both are needed: an engine may show a parameter whose memory is at the moment another one.
    `parameters` are ids of objects that the save holds on to. `waited_seconds` is the time that
    steps were held back for.
    """

    storages: frozenset[int]
    parameters: frozenset[int]
    opened: threading.Event = field(default_factory=threading.Event)
    waited_seconds: float = 0.0

    def open(self) -> None:
        """Let steps pass, now and from now on."""
        self.opened.set()
        steps.forget(self)

    def wait_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Returns when the gate is open, or at once when `optimizer` changes nothing behind it."""
        if self.opened.is_set() or not self.is_behind(optimizer):
            return
        started = time.perf_counter()
        self.opened.wait()
        self.waited_seconds += time.perf_counter() - started

    def is_behind(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of `optimizer` changes what this gate guards."""
        return any(
            id(parameter) in self.parameters or storage_of(parameter) in self.storages
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


class Steps:
    """The optimizers of this process whose steps wait, and the gates they wait at."""

    def __init__(self) -> None:
        self._gates: tuple[Gate, ...] = ()
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._captured: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._changes = 0
        self._hook: Any = None
        self._lock = threading.Lock()

    def watch(self) -> None:
        """From now on optimizers are seen stepping. May be called again."""
        with self._lock:
            if self._hook is None:
                self._hook = register_optimizer_step_pre_hook(self._before_step)

    def seen(self) -> list[torch.optim.Optimizer]:
        """Optimizers that wait at gates: seen stepping, and never inside of a captured graph."""
        return [optimizer for optimizer in self._seen if optimizer not in self._captured]

    @property
    def version(self) -> tuple[int, int]:
        """Another value whenever `seen` gives other optimizers."""
        return self._changes, len(self._seen)

    def captured(self) -> list[torch.optim.Optimizer]:
        """Optimizers that were seen inside of a captured graph; their steps cannot be held back."""
        return list(self._captured)

    def hold(self, storages: Iterable[int], parameters: Iterable[int]) -> Gate:
        """A gate before every step that changes these, closed until it is opened."""
        gate = Gate(frozenset(storages), frozenset(parameters))
        with self._lock:
            self._gates = (*self._gates, gate)
        return gate

    def forget(self, gate: Gate) -> None:
        """Called by a gate that has opened."""
        with self._lock:
            self._gates = tuple(other for other in self._gates if other is not gate)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _is_captured(optimizer):
            self._captured.add(optimizer)
            self._changes += 1
            return
        known = len(self._seen)
        # torch.compile does not trace into this call, so it runs this hook as it is, every time.
        self._seen.add(optimizer)
        if len(self._seen) != known:
            self._changes += 1
        for gate in self._gates:
            gate.wait_for(optimizer)


def _is_captured(optimizer: torch.optim.Optimizer) -> bool:
    parameters = optimizer.param_groups[0]["params"]
    is_on_cuda = bool(parameters) and parameters[0].is_cuda
    return is_on_cuda and torch.cuda.is_current_stream_capturing()


steps = Steps()
