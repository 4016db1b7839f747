"""What a training has at one moment, as texts under the names that its script gives it.

The state that is saved is walked first, then the variables of the script, from the innermost frame
outward: each thing has one name, and is known to be saved or not.
"""

from __future__ import annotations

import numbers
import random
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from ckpt.format.checksum import crc32c
from ckpt.layout.elements import digest_of, numbers_of
from ckpt.layout.memory import local_view
from ckpt.layout.plain import Ranks
from ckpt.state.flatten import structure_of
from ckpt.state.rng import RandomStates
from ckpt.state.types import PerGroup, PerRank, Stages
from ckpt.state.walk import walk

DEPTH_MAX = 5  # of attributes and containers below a variable
LEAVES_MAX = 20_000
TEXT_MAX = 60
# Kinds in which a difference is one of the training. Plain values may be for a log alone.
TRAINED = frozenset(("parameter", "buffer", "optimizer", "scheduler", "scaler", "copy"))
_SCALARS = (bool, str, type(None), numbers.Number, torch.dtype, torch.device)
_KEEPERS: tuple[tuple[Any, str], ...] = (
    (torch.optim.Optimizer, "optimizer"),
    ((LRScheduler, ReduceLROnPlateau), "scheduler"),
    (torch.amp.GradScaler, "scaler"),
)
_GENERATORS: dict[type, Any] = {
    torch.Generator: lambda one: one.get_state().tolist(),
    np.random.Generator: lambda one: one.bit_generator.state,
    random.Random: lambda one: one.getstate(),
}
_NO_STATE = (ModuleType, type, FunctionType, MethodType, RandomStates)
_NO_STATE_IN = ("ckpt", "storage", "sharding", "logging", "threading", "concurrent", "asyncio")
# Code of libraries, not of the training.
_LIBRARIES = (
    "<frozen",
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    *(str(Path(__file__).parents[2] / name) for name in ("ckpt", "storage", "sharding")),
)


class Seen(NamedTuple):
    """One value: its text, what it is, and whether the state that is saved has it."""

    text: str
    kind: str
    is_saved: bool


def seen(states: Iterable[Any], frame: FrameType | None) -> dict[str, Seen]:
    """All values of `states`, and of the variables of `frame` and its callers."""
    walk = _Walk()
    for state in states:
        for name, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
            walk.visit(str(name), value, True, 0)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                if not name.startswith("__"):
                    walk.visit(name, value, False, 0)
        frame = frame.f_back
    return walk.values


def digests(states: Iterable[Any], ranks: Ranks) -> dict[str, dict[str, int]]:
    """Of each parameter and optimizer tensor of `states` the digests of its regions on this rank:
    those of all ranks add up to that of the tensor, in any layout.
    """
    digests_of: dict[str, dict[str, int]] = {}
    for state in states:
        for holding in structure_of(walk(state), ranks).kept.holdings:
            for piece in holding.pieces if holding.kind in (0, 1) else ():
                flat = local_view(holding, piece).contiguous().reshape(-1)
                places = torch.arange(len(flat), device=flat.device)
                numbers = numbers_of(piece.region, piece.global_shape, places)
                each = torch.arange(flat.dtype.itemsize, device=flat.device)
                numbers = (numbers[:, None] * flat.dtype.itemsize + each).reshape(-1)
                digest = digest_of(numbers, flat.view(torch.uint8))
                digests_of.setdefault(piece.fqn, {})[repr(piece.region)] = digest
    return digests_of


def random_states() -> dict[str, str]:
    """The global random generators of this process, by their library."""
    states = RandomStates().state_dict().items()
    return {name: text_of(repr(value)) for name, value in states if value}


def text_of(value: Any) -> str:
    """A short text that differs where the bits do."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value.copy())
    if isinstance(value, torch.Tensor):
        return _text_of_tensor(value.detach())
    if isinstance(value, Mapping):
        return text_of([f"{key} {text_of(one)}" for key, one in value.items()])
    if isinstance(value, (list, tuple)) and not all(isinstance(one, _SCALARS) for one in value):
        return text_of([text_of(one) for one in value])
    # Others have an address in their text.
    text = repr(value) if isinstance(value, (*_SCALARS, list, tuple)) else type(value).__name__
    return text if len(text) <= TEXT_MAX else f"{text[:20]}... {crc32c(text.encode()):08x}"


def _text_of_tensor(tensor: torch.Tensor) -> str:
    shape = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return text_of([shape, *(getattr(tensor, name) for name in names)])
    try:
        # A copy: torch cannot free the memory of what numpy has seen, as engines do.
        flat = tensor.clone().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if len(flat) == 1:
            return repr(flat.item())
        return f"{shape} {list(flat.shape)} {crc32c(flat.view(torch.uint8).numpy().tobytes()):08x}"
    except (RuntimeError, NotImplementedError, TypeError):
        return shape  # on meta


class _Walk:
    def __init__(self) -> None:
        self.values: dict[str, Seen] = {}
        self._known: dict[Any, Any] = {}  # an identity counts as long as its object lives
        self._shapes: set[tuple[int, ...]] = set()

    def visit(self, path: str, value: Any, is_saved: bool, depth: int) -> None:
        """Record `value` and its parts, unless they are recorded already."""
        if isinstance(value, PerRank | PerGroup):
            value = value.value
        if isinstance(value, Stages):
            value = value.parts
        home = type(value).__module__.partition(".")[0]
        if isinstance(value, _SCALARS):
            kind = "value" if isinstance(value, numbers.Number | None) else "text"
            self._take(path, value, kind, is_saved)
        elif isinstance(value, _NO_STATE) or home in _NO_STATE_IN or self._is_known(value):
            return
        elif isinstance(value, torch.Tensor | np.ndarray):
            # A copy of the parameters, such as an average: it has their shapes.
            is_copy = is_saved or ("." in path and tuple(value.shape) in self._shapes)
            is_parameter = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
            kind = "parameter" if is_parameter else "copy" if is_copy else "tensor"
            self._take(path, value, kind, is_saved)
        elif isinstance(value, nn.Module):
            self._module(path, value, is_saved)
        elif kind := next((kind for types, kind in _KEEPERS if isinstance(value, types)), ""):
            for name, one in _leaves(path, value.state_dict()):
                if "._" not in name.removeprefix(path):
                    self._take(name, one, kind, is_saved)
        elif draws := next((d for one, d in _GENERATORS.items() if isinstance(value, one)), None):
            self._take(path, text_of(repr(draws(value)))[-9:-1], "random", is_saved)
        elif depth < DEPTH_MAX:
            for name, child in _children(value):
                self.visit(f"{path}.{name}", child, is_saved, depth + 1)

    def _take(self, path: str, value: Any, kind: str, is_saved: bool) -> None:
        if path not in self.values and len(self.values) < LEAVES_MAX:
            self.values[path] = Seen(text_of(value), kind, is_saved)

    def _is_known(self, value: Any) -> bool:
        key: Any = id(value)
        # A state dict of a module has other tensors of the same memory.
        if type(value) in (torch.Tensor, nn.Parameter) and value.device.type != "meta":
            key = (value.data_ptr(), value.shape) if value.numel() else key
        is_known = key in self._known
        self._known[key] = value
        return is_known

    def _module(self, path: str, module: nn.Module, is_saved: bool) -> None:
        for prefix, one in module.named_modules(prefix=path):
            self._is_known(one)
            fleeting = vars(one).get("_non_persistent_buffers_set", ())
            for key, parameter in one.named_parameters(prefix, recurse=False):
                self._shapes.add(tuple(parameter.shape))
                if not self._is_known(parameter):
                    self._take(key, parameter, "parameter", is_saved)
                    grad = parameter.grad
                    # None and zeros are the same: no gradient is accumulated.
                    is_none = grad is None or not bool(grad.any())
                    self._take(f"{key}.grad", None if is_none else grad, "gradient", False)
            for key, buffer in one.named_buffers(prefix, recurse=False):
                if not self._is_known(buffer):
                    lasts = key.rpartition(".")[2] not in fleeting
                    self._take(key, buffer, "buffer", is_saved and lasts)
            for key, value in list(vars(one).items()):
                if isinstance(value, numbers.Number) and not key.startswith("_"):
                    self._take(f"{prefix}.{key}", value, "value", False)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    children = list(_children(value)) if isinstance(value, (dict, list, tuple)) else []
    for name, child in children:
        yield from _leaves(f"{path}.{name}", child)
    if not children:
        yield path, value


def _children(value: Any) -> list[tuple[Any, Any]]:
    """What a container or an object has. The data of a dataset are no state."""
    try:
        if isinstance(value, Mapping):
            return list(value.items())
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            is_set = isinstance(value, (set, frozenset))
            many = sorted(value, key=repr) if is_set else list(value)
            plain = all(isinstance(one, _SCALARS) for one in many)
            return [("values", text_of(many))] if plain else list(enumerate(many))
        items = list(getattr(value, "__dict__", {}).items())
    except RuntimeError:  # another thread has changed it meanwhile
        return []
    is_data = isinstance(value, Dataset)
    return [one for one in items if not is_data or isinstance(one[1], _SCALARS)]
