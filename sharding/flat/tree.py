"""The wrappers of a model: which there are, what they hold, and names without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from sharding.attributes import CHILD, UnitAttributes
from sharding.engine.torch_seam import persistent_buffers
from sharding.wrapping.init import Ignored, find_ignored

__all__ = [
    "clean_name",
    "ignored_below",
    "is_wrapper",
    "managed_below",
    "state_names",
    "synced_below",
    "wrappers_below",
]


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module is a wrapper of this engine."""
    return isinstance(module, UnitAttributes)


def wrappers_below(module: nn.Module, *, root_only: bool = False) -> list[UnitAttributes]:
    """The wrappers below `module`, itself included, in walk order; or only the outermost ones."""
    wrappers: list[UnitAttributes] = []
    skipped = ""
    for name, inner in module.named_modules():
        if not isinstance(inner, UnitAttributes):
            continue
        # Below the last outermost wrapper names start with its name; below "" is everything.
        if root_only and wrappers and (skipped == "" or name.startswith(f"{skipped}.")):
            continue
        wrappers.append(inner)
        skipped = name
    return wrappers


def clean_name(name: str) -> str:
    """A dotted name without what wrappers put in."""
    wrappers = (CHILD, "_checkpoint_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def state_names(module: nn.Module) -> Iterator[str]:
    """Clean names of parameters and buffers below the module, in its state dict's order."""
    inside = ""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        if inside and prefix.startswith(f"{inside}."):
            continue
        base = f"{clean_name(prefix)}." if clean_name(prefix) else ""
        if isinstance(inner, UnitAttributes):
            # Its flat parameter hides the names of its members; the wrapper has kept them.
            inside = prefix
            yield from (f"{base}{name}" for name in inner.fsdp_names)
        else:
            own = {"recurse": False, "remove_duplicate": False}
            yield from (f"{base}{name}" for name, _ in inner.named_parameters(**own))
            yield from (f"{base}{name}" for name in persistent_buffers(inner))


def managed_below(module: nn.Module) -> set[int]:
    """Identities of the parameters that wrappers below the module hold, and of flat ones."""
    managed: set[int] = set()
    for wrapper in wrappers_below(module):
        store = wrapper.fsdp_unit.store if "fsdp_unit" in wrapper.__dict__ else None
        if store is not None:
            managed.add(id(store.flat))
            managed.update(id(param) for param in store.params)
    return managed


def ignored_below(module: nn.Module, modules: Any, states: Any) -> Ignored:
    """What the arguments ignore, and what the units below ignore already."""
    ignored = find_ignored(module, modules, states, is_unit=is_wrapper)
    all_modules, params = set(ignored.modules), set(ignored.params)
    for wrapper in wrappers_below(module):
        all_modules |= wrapper.fsdp_ignored.modules
        params |= wrapper.fsdp_ignored.params
    return Ignored(frozenset(all_modules), frozenset(params), ignored.buffers)


def synced_below(module: nn.Module) -> set[int]:
    """Identities of the buffers that inner units have broadcast already; not every unit does."""
    synced: set[int] = set()
    for wrapper in wrappers_below(module):
        if wrapper.syncs_states:
            synced.update(id(buffer) for buffer in wrapper.fsdp_unit.wrapped.buffers())
    return synced
