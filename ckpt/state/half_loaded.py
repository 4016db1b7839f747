"""The mark on a state that a failed load left as a mixture: it may not be stepped or saved.

The mark sits in this process only, on the modules, optimizers and tensors that the state consists
of, and goes away with them or with the next load that succeeds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.errors import LoadInterrupted
from ckpt.state.optimizer import params_of
from ckpt.state.walk import walk
from storage import KeyNotFoundError

_marked: dict[int, tuple[weakref.ref[Any], str]] = {}  # by id of what is half-loaded
_hooked: list[Any] = []  # torch's handle of the hook on steps, once there is one


@contextmanager
def filling(state: Any, what: str) -> Iterator[None]:
    """Around the writing of `what` into `state`: a failure leaves the mark, success takes it away.

    Raises LoadInterrupted for any Exception of the block. Once marked, a step of an optimizer over
    the state, or saving it, raises.
    """
    try:
        yield
    except BaseException as error:
        _mark(state, what)
        # A KeyboardInterrupt leaves a mixture as well, and stays what it is for those above.
        if not isinstance(error, Exception):
            raise
        move = "Load again, or load another checkpoint"
        if isinstance(error, KeyNotFoundError):
            move = "Load an older checkpoint (step=); `ckpt verify` lists all that is missing"
        raise LoadInterrupted(
            f"loading {what} failed after it had begun to write into the state, which is now a "
            f"mixture: {error}\n{move}, before the state is used."
        ) from error
    if _marked:
        # A load that succeeded has overwritten all of it.
        for item in _objects_of(state):
            _marked.pop(id(item), None)


def _mark(state: Any, what: str) -> None:
    # Only from the first failure on: a hook on every step of every optimizer is not free.
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_refuse_step))
    text = (
        f"a load of {what} into this state failed half-way, so it is a mixture of old and "
        "new values; load a checkpoint into it before stepping or saving"
    )
    for item in _objects_of(state):
        forget = partial(_marked.pop, id(item))  # called with the reference, which it returns
        _marked[id(item)] = (weakref.ref(item, forget), text)


def refuse_interrupted(state: Any) -> None:
    """Raises LoadInterrupted when a part of `state` was left half-loaded."""
    if _marked:
        _refuse(_objects_of(state))


def _objects_of(state: Any) -> Iterator[Any]:
    leaves = walk(state)
    for _, module in leaves.modules:
        yield module
        yield from module.parameters()
    for _, optimizer in leaves.optimizers:
        yield optimizer
        yield from params_of(optimizer)
    for _, tensor in leaves.tensors:
        yield tensor
    for _, array in leaves.arrays:
        yield array


def _refuse(items: Iterable[Any]) -> None:
    for item in items:
        mark = _marked.get(id(item))
        # The id may by now be that of another object.
        if mark is not None and mark[0]() is item:
            raise LoadInterrupted(mark[1])


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Its parameters too: the state that was loaded may have had no optimizer, or another one.
    _refuse((optimizer, *params_of(optimizer)))
