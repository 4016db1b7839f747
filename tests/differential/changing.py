"""State dicts that lost, gained or garbled entries before they are loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch


def changed(state: dict[str, Any], how: str) -> dict[str, Any]:
    """A state dict that lost, gained or garbled an entry."""
    state = dict(state)
    keys = list(state)
    if how == "add":
        state["not.there"] = torch.ones(2)
    elif how == "drop_all":
        state = {}
    elif keys and how == "drop":
        del state[keys[0]]
    elif keys and how == "shape":
        state[keys[-1]] = torch.ones(9, 9)
    elif how == "plus":
        state = {key: _plus(value) for key, value in state.items()}
    return state


def _plus(value: Any) -> Any:
    if hasattr(value, "local_shards"):
        value = copy.deepcopy(value)
        for shard in value.local_shards():
            shard.tensor.detach().add_(1)
        return value
    return value + 1


def changed_optimizer(state: dict[str, Any], how: str) -> dict[str, Any]:
    """An optimizer dict that lost an entry or whose values are others."""
    if not state.get("state"):
        return state
    state = {**state, "state": dict(state["state"])}
    names = list(_sorted(state["state"]))
    if how in ("drop_first", "drop_last"):
        del state["state"][names[0 if how == "drop_first" else -1]]
    elif how == "groups":
        state["param_groups"] = [{**group, "lr": 0.5} for group in state["param_groups"]]
    elif how == "scale":
        for name in names:
            state["state"][name] = {
                key: value * 2 if type(value) is torch.Tensor and value.ndim else value
                for key, value in state["state"][name].items()
            }
    return state


def _sorted(state: dict[Any, Any]) -> Iterator[Any]:
    yield from sorted(state, key=str)
