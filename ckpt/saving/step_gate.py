"""Optimizers and saves in the background: a step waits until what it changes has been copied.

One hook before every step of every `torch.optim.Optimizer`, whether it is in the saved state or
not. The first save in the background installs it; it costs some microseconds while nothing is being
copied.

Only what passes through the hook can be held back. Note "seen": an optimizer counts as one that
waits if a step of it was seen here since the save before; otherwise its parameters are copied
before `async_save` returns. So a step that bypasses the hook, compiled or written by hand, is
recognised by its absence. Replays of a captured CUDA graph never call the hook, so an optimizer
that was seen in a capture does not count any more.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.layout.memory import is_accelerator, storage_of
from storage.forks import keep_for_ever


@dataclass(eq=False)
class Gate:
    """Holds back steps of optimizers over `storages`, or over `parameters`, until it is opened.

    Both are needed: an engine may expose a parameter whose memory is a different one at the moment.
    `parameters` are ids of objects that the save keeps alive. `waited_seconds` is the time for
    which steps were held back.
    """

    storages: frozenset[int]
    parameters: frozenset[int]
    opened: threading.Event = field(default_factory=threading.Event)
    waited_seconds: float = 0.0
    _waits_since: float = 0.0

    def open(self) -> None:
        """Let steps pass, now and from now on."""
        # Only the first `open` ends the time: a second one, as in `release`, must not count longer.
        if self._waits_since and not self.opened.is_set():
            self.waited_seconds = time.perf_counter() - self._waits_since
        self.opened.set()
        steps.forget(self)

    def wait_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Returns when the gate is open, or at once when `optimizer` changes nothing behind it."""
        if self.opened.is_set() or not self.is_behind(optimizer):
            return
        # Several optimizers may wait at once; the time counts from the first.
        self._waits_since = self._waits_since or time.perf_counter()
        self.opened.wait()

    def is_behind(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of `optimizer` changes what this gate guards."""
        return any(
            id(parameter) in self.parameters or storage_of(parameter) in self.storages
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


class Steps:
    """The optimizers of this process whose steps wait, and the gates that hold them back.

    `known` grows with every optimizer that is seen for the first time.
    """

    def __init__(self) -> None:
        self.known = 0
        self._gates: tuple[Gate, ...] = ()
        self._counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._captured: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hook: Any = None
        self._lock = threading.Lock()

    def forked(self) -> None:
        """In a forked child, which has no save under way that a step could wait for."""
        # Destroyed here, what they hold might wait for threads that only the parent has.
        keep_for_ever(self._gates)
        self._gates = ()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """From now on optimizers are seen stepping. May be called again."""
        with self._lock:
            if self._hook is None:
                self._hook = register_optimizer_step_pre_hook(self._before_step)

    def counts(self) -> list[tuple[torch.optim.Optimizer, int]]:
        """Optimizers that wait at gates, and how many steps of them were seen."""
        with self._lock:
            return [item for item in self._counts.items() if item[0] not in self._captured]

    def hold(self, gate: Gate) -> None:
        """From now on every step that changes what is behind `gate` waits until it is opened."""
        with self._lock:
            # A new tuple: a hook that iterates over the old one needs no lock.
            self._gates = (*self._gates, gate)

    def forget(self, gate: Gate) -> None:
        """Called by a gate that has opened."""
        with self._lock:
            self._gates = tuple(other for other in self._gates if other is not gate)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        is_captured = _is_captured(optimizer)
        # torch.compile traces into this hook. It stops at locks and runs from there on what is
        # written here; without one it was seen to trace a WeakSet's `add` to nothing at all.
        with self._lock:
            if is_captured:
                self._captured.add(optimizer)
            count = self._counts.get(optimizer, 0)
            self._counts[optimizer] = count + 1
            self.known += count == 0
            gates = self._gates
        for gate in gates:
            gate.wait_for(optimizer)


def seen_since(
    before: weakref.WeakKeyDictionary[torch.optim.Optimizer, int],
) -> list[torch.optim.Optimizer]:
    """The optimizers that were seen stepping since the last call with `before`, or ever at the
    first one: how many steps of each were seen then.
    """
    seen = [item for item in steps.counts() if item[1] > before.get(item[0], 0)]
    before.update(seen)
    return [optimizer for optimizer, _ in seen]


def _is_captured(optimizer: torch.optim.Optimizer) -> bool:
    filled = [group["params"] for group in optimizer.param_groups if group["params"]]
    if not filled or not is_accelerator(filled[0][0].device):
        return False
    module: Any = torch.get_device_module(filled[0][0].device)
    # Devices without graphs (MPS) have no such question.
    is_capturing = getattr(module, "is_current_stream_capturing", None)
    return is_capturing is not None and bool(is_capturing())


steps = Steps()
os.register_at_fork(after_in_child=steps.forked)
