"""Whether a state still consists of the same objects in the same memory as at an earlier save.

A fingerprint costs a small part of what flattening does. It has all that flattening depends on:
which modules, parameters, buffers and tensors of optimizers there are, under which names, and where
they lie.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt.layout import torch_fsdp
from ckpt.layout.composites import type_of
from ckpt.layout.plain import UnsupportedTensor
from ckpt.layout.tensor import PLAIN_CLASSES, memory_of
from ckpt.state.optimizer import STATE_DICT_HOOKS
from ckpt.state.own import declared
from ckpt.state.walk import Leaves


@dataclass(slots=True)
class Fingerprint:
    """All that the description of a state depends on, taken at one moment.

    Two fingerprints agree when `tensors` and `objects` are the very same objects, and the `marks`
    are equal.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)

    def mark_memory(self) -> None:
        """Note where and how the memory of all tensors lies. Called once, at the end."""
        memories = [memory_of(tensor) for tensor in self.tensors]
        try:
            self.marks += [memory.data_ptr() for memory in memories]
            self.marks += [memory.shape for memory in memories]
            self.marks += [memory.stride() for memory in memories]
        except RuntimeError:
            # A sparse or nested tensor has no one memory. A mark that equals no other lets the
            # state be described, which refuses that tensor by name.
            self.marks.append(object())
        # What a composite consists of, and what else it says, changes without another object.
        if any([memory.is_quantized for memory in memories]) or any(
            type_of(memory) is not None for memory in memories if type(memory) not in PLAIN_CLASSES
        ):
            self.marks.append(object())
        self.marks += [tensor.requires_grad for tensor in self.tensors]


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


def add_module(root: nn.Module, fingerprint: Fingerprint) -> None:
    """Add what `describe_module` depends on, in about two microseconds per module."""
    tensors, objects, marks = fingerprint.tensors, fingerprint.objects, fingerprint.marks
    seen: set[int] = set()
    unit_classes: dict[type, bool] = {}
    stack = [root]
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        objects.append(module)
        kind = type(module)
        params, buffers, children = module._parameters, module._buffers, module._modules
        marks.append(kind)
        # A hook that was added since may refuse the state.
        marks.append(len(module._state_dict_hooks) + len(module._state_dict_pre_hooks))
        if params:
            # The names: a list takes the keys of a dict.
            marks += params
            tensors += [tensor for tensor in params.values() if tensor is not None]
        if buffers:
            marks += (*buffers, *module._non_persistent_buffers_set)
            tensors += [tensor for tensor in buffers.values() if tensor is not None]
        if children:
            marks += children
            stack += [child for child in children.values() if child is not None]
        is_unit = unit_classes.get(kind)
        if is_unit is None:
            # FSDP2 adds nothing: its sharded parameters are where modules show parameters; where
            # others are shown there, the fingerprint is another one already.
            is_unit = torch_fsdp.is_fsdp1(module) or hasattr(module, "__ckpt_pieces__")
            unit_classes[kind] = is_unit
        if is_unit:
            _add_unit(module, fingerprint)


def _add_unit(module: Any, fingerprint: Fingerprint) -> None:
    if torch_fsdp.is_fsdp1(module):
        for param, memory in torch_fsdp.fsdp1_memory(module):
            fingerprint.objects.append(param)
            fingerprint.tensors.append(memory)
    if hasattr(module, "__ckpt_pieces__"):
        try:
            for owned in module.__ckpt_pieces__():
                fingerprint.objects.append(owned.param)
                local = owned.local
                fingerprint.marks += (local.data_ptr(), local.shape, local.stride(), owned.views)
        except (UnsupportedTensor, RuntimeError):
            fingerprint.marks.append(object())  # as above: described, it is refused by name


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
