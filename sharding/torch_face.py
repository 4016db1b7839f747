"""What torch's own functions ask of its FSDP classes, answered for ours.

`get_state_dict` and its relatives, and tools above them, tell FSDP1 by `isinstance` of torch's
class, walk its units by attributes, and call its static methods with the model. So ours derives
from torch's class and takes nothing else of it, and the static methods that would look into torch's
own units hand models with units of ours over to our methods of the same names. For all other models
they do what they did.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchClass
from torch.distributed.fsdp import UnshardHandle as TorchHandle

__all__ = ["HANDED_OVER", "TorchHandle", "TorchUnit", "TorchWrapper", "hand_over"]

HANDED_OVER = (
    "flatten_sharded_optim_state_dict",
    "fsdp_modules",
    "full_optim_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "summon_full_params",
)
"""Static methods of torch's class that are told the model. Those that choose the form of state
dicts are missing: they set attributes of units, ours too.
"""

if TYPE_CHECKING:

    class TorchWrapper(nn.Module):
        """An instance of torch's class that behaves like a plain module."""

    class TorchUnit:
        """What `isinstance(module, torch.distributed.fsdp.FSDPModule)` holds for."""
else:
    TorchUnit = TorchModule
    # What torch's class changed of `nn.Module` is as it was there; the rest, our class overrides.
    _plain = {
        name: getattr(nn.Module, name)
        for name in vars(TorchClass)
        if hasattr(nn.Module, name) and name not in ("__module__", "__doc__", "__annotations__")
    }
    TorchWrapper = type("TorchWrapper", (TorchClass,), {**_plain, "__module__": __name__})


def hand_over(ours: type[nn.Module]) -> None:
    """Let torch's static methods call those of `ours` for models that have units of that class."""
    for name in HANDED_OVER:
        setattr(TorchClass, name, staticmethod(_choosing(ours, name)))


def _choosing(ours: type[nn.Module], name: str) -> Any:
    before = getattr(TorchClass, name)
    signature = inspect.signature(before)

    @functools.wraps(before)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        model = given.get("model", given.get("module"))
        is_ours = isinstance(model, nn.Module) and any(isinstance(m, ours) for m in model.modules())
        return (getattr(ours, name) if is_ours else before)(*args, **kwargs)

    return chosen
