"""What a follower fills: a model, a state of any nesting, or tensors that are named."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ckpt.errors import CheckpointError, Mismatch
from ckpt.format.manifest import MODULES, Manifest
from ckpt.layout.dtypes import torch_dtype


class Followed(ABC):
    """The live state behind a follower."""

    @abstractmethod
    def state_for(self, manifest: Manifest) -> Any:
        """The state as a load of that checkpoint takes it. Nothing of it is changed."""

    def taken(self, state: Any) -> None:
        """`state`, as `state_for` made it, was filled."""
        return

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Tensors by their names, of what is followed by name."""
        return {}


def followed(model_or_names: Any) -> Followed:
    """What is to be filled. Raises TypeError for what is neither a state nor names."""
    if isinstance(model_or_names, nn.Module):
        return _OneModel(model_or_names)
    if isinstance(model_or_names, str):
        return _NamedTensors([model_or_names])
    if isinstance(model_or_names, os.PathLike):
        raise TypeError(f"follow(url, model_or_names): got the path {model_or_names} second")
    if not isinstance(model_or_names, Mapping):
        items = list(model_or_names)
        if items and all(isinstance(item, str) for item in items):
            return _NamedTensors(items)
    if not model_or_names:
        raise ValueError("follow(url, model_or_names): nothing to follow was given")
    return _AnyState(model_or_names)


class _AnyState(Followed):
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_for(self, manifest: Manifest) -> Any:
        return self._state


class _OneModel(Followed):
    """A model on its own. In the checkpoint it stands under a name, most often."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_for(self, manifest: Manifest) -> Any:
        entries = json.loads(manifest.header.user.get(MODULES, '[""]'))
        if len(entries) > 1:
            raise CheckpointError(
                f"step {manifest.header.step} has {len(entries)} modules, "
                f"{', '.join(map(repr, entries[:20]))}; say which one is followed, as in "
                f"follow(url, {{{entries[0]!r}: model}})"
            )
        state: Any = self._model
        for part in reversed(entries[0].split(".") if entries and entries[0] else []):
            state = {part: state}
        return state


class _NamedTensors(Followed):
    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return MappingProxyType(self._tensors)

    def state_for(self, manifest: Manifest) -> Any:
        """The tensors of these names: those that there are, or new memory."""
        stored = {name: name for name in manifest.fqns} | dict(manifest.aliases)
        matched: dict[str, torch.Tensor] = {}
        missing = []
        for pattern in self._patterns:
            names = [pattern] if pattern in stored else sorted(_matching(stored, pattern))
            if not names:
                missing.append(f"{pattern}: no tensor of the checkpoint has this name")
            for name in names:
                if name not in matched:
                    matched[name] = self._tensor(manifest, name, stored[name])
        if missing:
            raise Mismatch(missing, f"of step {manifest.header.step}")
        return matched

    def taken(self, state: Any) -> None:
        # Who holds on to the mapping sees the new tensors.
        self._tensors.clear()
        self._tensors.update(state)

    def _tensor(self, manifest: Manifest, name: str, stored: str) -> torch.Tensor:
        number = manifest.index(stored)
        dtype, shape = torch_dtype(manifest.dtypes[number]), manifest.shapes[number]
        known = self._tensors.get(name)
        if known is not None and known.dtype is dtype and tuple(known.shape) == shape:
            return known
        return torch.empty(shape, dtype=dtype)


def _matching(names: Mapping[str, str], pattern: str) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]
