"""Errors for our side to make, so that a test can see the comparison find them.

Each is of a kind that has no symptom but wrong values. Patched on one process's classes, for the
draws that are played inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ckpt.state_dict import api
from sharding.dtensor.store import DTensorStore
from sharding.flat.param import FlatParam

__all__ = ["PLANTS", "planted"]


def _scaled(original: Any) -> Any:
    """Reduced gradients are 1 % too large."""

    def add(store: Any, outgoing: Any, new: Any, *, keep_dtype: bool) -> None:
        original(store, outgoing, [part * 1.01 for part in new], keep_dtype=keep_dtype)

    return add


def _dropped(original: Any) -> Any:
    """The last rank's gradients do not take part."""

    def outgoing(store: Any, grads: Any, form: Any) -> Any:
        grads_out = original(store, grads, form)
        if dist.get_rank() == dist.get_world_size() - 1:
            for member in grads_out.members:
                member.whole.zero_()
        return grads_out

    return outgoing


def _swapped(values: Any) -> Any:
    """Two entries of one shape under each other's names."""
    if not isinstance(values, dict):
        return values
    seen: dict[Any, Any] = {}
    for key, value in values.items():
        about = _about(value)
        if about is None:
            continue
        if about in seen:
            values[seen[about]], values[key] = values[key], values[seen[about]]
            return values
        seen[about] = key
    return values


def _about(value: Any) -> Any:
    """What makes two entries interchangeable; None for what is no tensor."""
    if isinstance(value, dict):
        abouts = [(key, _about(item)) for key, item in value.items()]
        return tuple(abouts) if any(about for _, about in abouts) else None
    if isinstance(value, torch.Tensor):
        return type(value).__name__, tuple(value.shape), value.dtype
    return None


def _swaps_members(original: Any) -> Any:
    def take(*args: Any, **kwargs: Any) -> Any:
        return _swapped(original(*args, **kwargs))

    return take


def _swaps_states(original: Any) -> Any:
    def take(*args: Any, **kwargs: Any) -> Any:
        taken = original(*args, **kwargs)
        _swapped(taken.get("state"))
        return taken

    return take


def _loads_another(original: Any) -> Any:
    def put(model: Any, state_dict: Any, *args: Any) -> Any:
        return original(model, _swapped(dict(state_dict)), *args)

    return put


def _loads_other_states(original: Any) -> Any:
    def prepare(target: Any, state_dict: Any, request: Any) -> Any:
        states = _swapped(dict(state_dict.get("state", {})))
        return original(target, {**state_dict, "state": states}, request)

    return prepare


_Patch = tuple[Any, str, Callable[[Any], Any]]
PLANTS: dict[str, tuple[_Patch, ...]] = {
    "gradients 1 % too large": (
        (FlatParam, "add_gradients", _scaled),
        (DTensorStore, "add_gradients", _scaled),
    ),
    "one rank's gradients dropped": (
        (FlatParam, "outgoing_gradients", _dropped),
        (DTensorStore, "outgoing_gradients", _dropped),
    ),
    "members swapped in dicts": (
        (api, "take_model", _swaps_members),
        (api, "take_optimizer", _swaps_states),
    ),
    "another tensor of the shape loaded": (
        (api, "put_model", _loads_another),
        (api, "put_optimizer", _loads_other_states),
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, our side makes the error of this name; none for ""."""
    with ExitStack() as patches:
        for owner, attribute, changed in PLANTS.get(name, ()):
            wrong = changed(getattr(owner, attribute))
            patches.enter_context(mock.patch.object(owner, attribute, wrong))
        yield
