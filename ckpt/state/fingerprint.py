"""Whether a state still consists of the same objects in the same memory as at an earlier look.

A look costs a small part of what flattening does. It compares all that flattening depends on: which
modules, parameters, buffers and tensors of optimizers there are, under which names, where they lie.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt.layout.modules import Glance, look_at_module
from ckpt.state.own import declared
from ckpt.state.walk import Leaves


def look_at(leaves: Leaves) -> Glance | None:
    """A look at a state with these leaves; None for one that has to be flattened every time."""
    glance = Glance()
    glance.marks += [fqn for fqn, _ in leaves.tensors]
    glance.tensors += [tensor for _, tensor in leaves.tensors]
    for path, module in leaves.modules:
        glance.marks.append(path)
        look_at_module(module, glance)
    for path, optimizer in leaves.optimizers:
        glance.marks.append(path)
        glance.objects.append(optimizer)
        if not _look_at_optimizer(optimizer, glance):
            return None
    glance.mark_memory()
    return None if leaves.problems else glance


def _look_at_optimizer(optimizer: torch.optim.Optimizer, glance: Glance) -> bool:
    tensors, objects, marks = glance.tensors, glance.objects, glance.marks
    for group in optimizer.param_groups:
        marks.append(len(group["params"]))
        objects += group["params"]
    marks += [len(getattr(optimizer, name, ())) for name in _HOOKS]
    marks += [(name, what == "shard") for name, what in declared(optimizer).items()]
    entries: Mapping[Any, Any] = optimizer.state
    for parameter, state in entries.items():
        if not isinstance(parameter, torch.Tensor):
            continue  # the user's own state is looked at every time
        objects.append(parameter)
        marks += state
        contents = list(state.values())
        if not all([isinstance(content, torch.Tensor) for content in contents]):
            return False  # a value of its own for each parameter: told by flattening alone
        tensors += contents
    return True


_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class Remembered:
    """A look that is kept without keeping anything of the state alive.

    `forget` is called when the first of the objects goes, in the thread that lets it go.
    """

    def __init__(self, glance: Glance, forget: Callable[[], None]) -> None:
        objects = [*glance.tensors, *glance.objects]
        self._references = [weakref.ref(item, lambda _: forget()) for item in objects]
        self._marks = glance.marks

    def is_same(self, glance: Glance) -> bool:
        """Whether nothing has changed."""
        objects = [*glance.tensors, *glance.objects]
        if len(self._references) != len(objects) or self._marks != glance.marks:
            return False
        return all(map(operator.is_, [reference() for reference in self._references], objects))
