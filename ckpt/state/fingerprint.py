"""Whether a state still consists of the same objects in the same memory as at an earlier save.

A fingerprint costs a small part of what flattening does. It has all that flattening depends on:
which modules, parameters, buffers and tensors of optimizers there are, under which names, and where
they lie.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt.layout.fingerprint import Fingerprint, add_module
from ckpt.state.optimizer import STATE_DICT_HOOKS
from ckpt.state.own import declared
from ckpt.state.walk import Leaves


def fingerprint_of(leaves: Leaves) -> Fingerprint | None:
    """The fingerprint of a state with these leaves; None if it has to be flattened every time."""
    fingerprint = Fingerprint()
    fingerprint.marks += [fqn for fqn, _ in leaves.tensors]
    fingerprint.tensors += [tensor for _, tensor in leaves.tensors]
    for path, module in leaves.modules:
        fingerprint.marks.append(path)
        add_module(module, fingerprint)
    for path, optimizer in leaves.optimizers:
        fingerprint.marks.append(path)
        fingerprint.objects.append(optimizer)
        if not _add_optimizer(optimizer, fingerprint):
            return None
    fingerprint.mark_memory()
    return None if leaves.problems else fingerprint


def _add_optimizer(optimizer: torch.optim.Optimizer, fingerprint: Fingerprint) -> bool:
    tensors, objects, marks = fingerprint.tensors, fingerprint.objects, fingerprint.marks
    for group in optimizer.param_groups:
        marks.append(len(group["params"]))
        objects += group["params"]
    # A hook makes flattening refuse the optimizer, and a declaration changes how state is held.
    marks += [len(getattr(optimizer, name, ())) for name in STATE_DICT_HOOKS]
    marks += [(name, what == "shard") for name, what in declared(optimizer).items()]
    entries: Mapping[Any, Any] = optimizer.state
    for parameter, state in entries.items():
        if not isinstance(parameter, torch.Tensor):
            continue  # the user's own state is read at every save
        objects.append(parameter)
        marks += state
        contents = list(state.values())
        # A list: for three items it takes 0.7 of a generator's time, and there are thousands.
        if not all([isinstance(content, torch.Tensor) for content in contents]):
            return False  # a value of its own for each parameter: only flattening compares it
        tensors += contents
    return True


class Remembered:
    """A fingerprint that is kept without keeping anything of the state alive.

    `forget` is called when the first of the objects is freed, in the thread that frees it.
    """

    def __init__(self, fingerprint: Fingerprint, forget: Callable[[], None]) -> None:
        objects = [*fingerprint.tensors, *fingerprint.objects]
        self._references = [weakref.ref(item, lambda _: forget()) for item in objects]
        self._marks = fingerprint.marks

    def is_same(self, fingerprint: Fingerprint) -> bool:
        """Whether nothing has changed."""
        objects = [*fingerprint.tensors, *fingerprint.objects]
        if len(self._references) != len(objects) or self._marks != fingerprint.marks:
            return False
        # `==` of tensors compares elements, and an id may be that of a new object.
        return all(map(operator.is_, [reference() for reference in self._references], objects))
