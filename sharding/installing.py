"""Our classes under the names of torch's, for trainers that import those themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from torch.distributed import fsdp

from sharding import fsdp_module, fully_sharding
from sharding.engine.torch_seam import torch_replicate
from sharding.fsdp import FullyShardedDataParallel

_OURS: dict[str, Any] = {
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "fully_shard": fully_sharding.fully_shard,
    "replicate": fully_sharding.replicate,
    "register_fsdp_forward_method": fsdp_module.register_fsdp_forward_method,
    "share_comm_ctx": fsdp_module.share_comm_ctx,
}
_THEIRS: dict[str, Any] = {name: getattr(fsdp, name) for name in _OURS if hasattr(fsdp, name)}
"""What is replaced. `FSDPModule` is not: our modules are instances of torch's."""
if torch_replicate is not None:
    _THEIRS["replicate"] = torch_replicate
# torch's pipelines ask it for the state of a module.
_OURS["fully_shard"].state = _OURS["replicate"].state = _THEIRS["fully_shard"].state


def install() -> AbstractContextManager[None]:
    """Have everybody who uses torch's `FullyShardedDataParallel`, `fully_shard` or `replicate`
    (that of `replicate_with_fsdp`) use ours.

    Takes effect at once, in torch's public modules and in every other module that has imported the
    names: Accelerate, Lightning, torchtitan, before or after they are imported. For good, or until
    the end of a `with`:

        sharding.install()
        with sharding.install(): ...

    Models that were sharded inside stay so, and so do classes that modules have derived from ours
    and names that modules other than torch's have imported inside. Installing twice is harmless.
    """
    undo = _replaced()

    @contextmanager
    def until_the_end() -> Iterator[None]:
        try:
            yield
        finally:
            for restore in reversed(undo):
                restore()
            if undo:
                _give_back()

    return until_the_end()


def _replaced() -> list[Callable[[], None]]:
    """Put ours in place of torch's wherever modules show them; returns what puts them back."""
    ours = {id(value): _OURS[name] for name, value in _THEIRS.items()}
    undo: list[Callable[[], None]] = []
    # Copies of dicts: other threads may import meanwhile.
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == "sharding":
            continue
        shown = {name: value for name, value in list(vars(module).items()) if id(value) in ours}
        if not shown:
            continue
        if module.__name__.startswith("torch."):
            # torch's own functions still find torch's classes; importers get ours.
            names = {name: _showing(ours[id(value)]) for name, value in shown.items()}
            undo.append(partial(setattr, module, "__class__", module.__class__))
            module.__class__ = type("Showing", (module.__class__,), names)
        else:
            for name, value in shown.items():
                undo.append(partial(setattr, module, name, value))
                setattr(module, name, ours[id(value)])
    return undo


def _give_back() -> None:
    """torch's modules that were imported meanwhile have ours for good."""
    theirs = {id(_OURS[name]): value for name, value in _THEIRS.items()}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.startswith("torch."):
            for name, value in list(vars(module).items()):
                if id(value) in theirs:
                    setattr(module, name, theirs[id(value)])


def _showing(value: object) -> property:
    return property(lambda module: value)
