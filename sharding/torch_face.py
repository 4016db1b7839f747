"""What torch's own functions expect of its FSDP classes, provided by ours.

`get_state_dict` and its relatives, and tools above them, recognize FSDP1 by `isinstance` of torch's
class, walk its units by attributes, and call its static methods with the model. So our class
derives from torch's and inherits nothing else from it, and those static methods of torch's class
that look into torch's own units call our methods of the same names for models that have units of
ours. For all other models they do what they did.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchClass
from torch.distributed.fsdp import UnshardHandle as TorchHandle

__all__ = ["REDIRECTED", "TorchHandle", "TorchUnit", "TorchWrapper", "redirect_static_methods"]

REDIRECTED = (
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
"""Static methods of torch's class that take the model. Those that choose the form of state dicts
are missing: they set attributes of units, which works on ours too.
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


def redirect_static_methods(ours: type[nn.Module]) -> None:
    """Let torch's static methods call those of `ours` for models that have units of that class."""
    for name in REDIRECTED:
        setattr(TorchClass, name, staticmethod(_choosing(ours, name)))


def _choosing(ours: type[nn.Module], name: str) -> Any:
    before = getattr(TorchClass, name)
    signature = inspect.signature(before)

    @functools.wraps(before)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        # By name, since the model stands at another position in each of them.
        given = signature.bind_partial(*args, **kwargs).arguments
        model = given.get("model", given.get("module"))
        is_ours = isinstance(model, nn.Module) and any(isinstance(m, ours) for m in model.modules())
        return (getattr(ours, name) if is_ours else before)(*args, **kwargs)

    return chosen
