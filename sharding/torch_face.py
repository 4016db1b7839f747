"""What torch's own functions expect of its FSDP classes, provided by ours.

`get_state_dict` and its relatives, and tools above them, recognize FSDP1 by `isinstance` of torch's
class, walk its units by attributes, and call its static methods with the model. So our class
derives from torch's and inherits nothing else from it, and those static methods of torch's class
that look into torch's own units call our methods of the same names for models that have units of
ours. For all other models they do what they did.

A wrapper remembers the type of state dicts and the configs that the user set, torch's classes, by
their exact class as torch compares them; `form_of` says what they are in `ckpt`.

What a newer torch adds to these classes, or to its classes of options, is refused by name until it
is implemented here: it would be ignored, or look for torch's own state in a module of ours.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchClass
from torch.distributed.fsdp import MixedPrecisionPolicy as Precision
from torch.distributed.fsdp import UnshardHandle as TorchHandleClass

from ckpt.state_dict.config import StateDictType, config_with

_LEFT_ALONE = ("get_state_dict_type", "set_state_dict_type", "state_dict_type")
"""Static methods of torch's class that set attributes of units, which works on ours too."""

_OFFLOADS = frozenset({"offload_to_cpu"})
_KNOWN = {
    "BackwardPrefetch": {"BACKWARD_PRE", "BACKWARD_POST"},
    "CPUOffload": {"offload_params"},
    "CPUOffloadPolicy": {"pin_memory"},
    "DataParallelMeshDims": {"shard", "replicate"},
    "FullOptimStateDictConfig": _OFFLOADS | {"rank0_only"},
    "FullStateDictConfig": _OFFLOADS | {"rank0_only"},
    "LocalOptimStateDictConfig": _OFFLOADS,
    "LocalStateDictConfig": _OFFLOADS,
    "MixedPrecision": {
        "param_dtype",
        "reduce_dtype",
        "buffer_dtype",
        "keep_low_precision_grads",
        "cast_forward_inputs",
        "cast_root_forward_inputs",
        "_module_classes_to_ignore",
    },
    "MixedPrecisionPolicy": {
        "param_dtype",
        "reduce_dtype",
        "output_dtype",
        "cast_forward_inputs",
        "param_dtype_override_fn",
    },
    "OffloadPolicy": set(),
    "OptimStateDictConfig": _OFFLOADS,
    "ShardedOptimStateDictConfig": _OFFLOADS | {"_use_dtensor"},
    "ShardedStateDictConfig": _OFFLOADS | {"_use_dtensor"},
    "ShardingStrategy": {
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    },
    "StateDictConfig": _OFFLOADS,
}
"""Fields and members of torch's classes of options that are implemented here."""


def follows_grad_dtype() -> bool:
    """Whether `fully_shard` of this torch sums gradients in the `grad_dtype` of parameters where
    `reduce_dtype` is None: from 2.15 on. Before, it does in `param_dtype`.
    """
    return any(field.name == "param_dtype_override_fn" for field in dataclasses.fields(Precision))


def check_known(*options: object) -> None:
    """Refuse options of torch's classes that this library does not implement.

    Raises NotImplementedError, with the name, for a field that is not known and not at its default,
    a member of an enumeration, or a class.
    """
    for given in options:
        kinds = [kind for kind in type(given).__mro__ if kind.__module__.startswith("torch.")]
        if not kinds:
            continue
        name, known = kinds[0].__name__, _KNOWN.get(kinds[0].__name__)
        if known is None:
            raise _refusal(name, "leave it out, or use torch's own engine")
        if isinstance(given, enum.Enum) and given.name not in known:
            raise _refusal(f"{name}.{given.name}", f"choose one of {', '.join(sorted(known))}")
        for field in dataclasses.fields(kinds[0]) if dataclasses.is_dataclass(given) else ():
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if field.name not in known and getattr(given, field.name) != default:
                raise _refusal(f"{name}.{field.name}", f"leave it at its default, {default!r}")


def _refusal(what: str, move: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what} of torch {torch.__version__} is not implemented by this version of sharding: "
        f"{move}"
    )


def _refused(kind: type, name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _refusal(f"{kind.__name__}.{name}()", "do without it, or use torch's own engine")

    return refuse


def _refusing(kind: type) -> type:
    """A subclass that has torch's class above it, and nothing of what that does.

    What torch changed of `nn.Module` is as it was there; the rest refuses, unless it is overridden.
    """
    bare: dict[str, Any] = {"__module__": __name__}
    for name, value in vars(kind).items():
        is_code = inspect.isroutine(value) or isinstance(value, property)
        if issubclass(kind, nn.Module) and hasattr(nn.Module, name):
            if name not in ("__module__", "__doc__", "__annotations__"):
                bare[name] = getattr(nn.Module, name)
        elif is_code and not hasattr(object, name):
            refuse: Any = _refused(kind, name)
            if isinstance(value, property | staticmethod):
                refuse = type(value)(refuse)
            bare[name] = refuse
    return type(f"Torch{kind.__name__}", (kind,), bare)


if TYPE_CHECKING:

    class TorchWrapper(nn.Module):
        """An instance of torch's class that behaves like a plain module."""

    class TorchUnit:
        """What `isinstance(module, torch.distributed.fsdp.FSDPModule)` holds for."""

    class TorchHandle:
        """What `isinstance(handle, torch.distributed.fsdp.UnshardHandle)` holds for."""

    class TorchReductionHandle:
        """The same for torch's `GradientReductionHandle`, from torch 2.15 on."""
else:
    TorchUnit = _refusing(TorchModule)
    TorchWrapper = _refusing(TorchClass)
    TorchHandle = _refusing(TorchHandleClass)
    TorchReductionHandle = _refusing(getattr(fsdp, "GradientReductionHandle", object))


def redirect_static_methods(ours: type[nn.Module]) -> None:
    """Let torch's static methods call those of `ours` for models that have units of that class."""
    for name, value in list(vars(TorchClass).items()):
        is_public = isinstance(value, staticmethod) and not name.startswith("_")
        if is_public and name not in _LEFT_ALONE:
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


def default_settings() -> fsdp.StateDictSettings:
    """FULL, with default configs."""
    return checked_settings(fsdp.StateDictType.FULL_STATE_DICT, None, None)


def checked_settings(
    form: fsdp.StateDictType,
    config: fsdp.StateDictConfig | None,
    optim_config: fsdp.OptimStateDictConfig | None,
) -> fsdp.StateDictSettings:
    """The settings, with defaults for what is None. Raises RuntimeError for other classes, and
    NotImplementedError for options of a newer torch that are not implemented here.
    """
    check_known(config, optim_config)
    kind = form.name.partition("_")[0].title()
    model_class = getattr(fsdp, f"{kind}StateDictConfig")
    optim_class = getattr(fsdp, f"{kind}OptimStateDictConfig")
    config = model_class() if config is None else config
    optim_config = optim_class() if optim_config is None else optim_config
    # By exact class, as torch compares them: all derive from one, and mean different things.
    for given, wanted in ((config, model_class), (optim_config, optim_class)):
        if type(given) is not wanted:
            raise RuntimeError(
                f"{form.name} needs a {wanted.__name__}, got a {type(given).__name__}"
            )
    return fsdp.StateDictSettings(form, config, optim_config)


def form_of(settings: fsdp.StateDictSettings, *, is_model: bool) -> tuple[StateDictType, Any]:
    """What the settings are called in `ckpt`. LOCAL of optimizers is served as SHARDED: torch's
    class tells full dicts of optimizers from all others, which are sharded.
    """
    form = StateDictType[settings.state_dict_type.name]
    if form is StateDictType.LOCAL and not is_model:
        form = StateDictType.SHARDED
    given: Any = settings.state_dict_config if is_model else settings.optim_state_dict_config
    rank0_only = getattr(given, "rank0_only", False)
    return form, config_with(form, given.offload_to_cpu, rank0_only, is_model=is_model)
