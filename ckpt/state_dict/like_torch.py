"""The functions of `torch.distributed.checkpoint.state_dict`, by the same names and arguments.

A script changes its import and no more:

    from ckpt.state_dict.like_torch import StateDictOptions, get_state_dict, set_state_dict

They work on what the rest of `ckpt` works on, and stand on `ckpt.state_dict.api`: keys are
those of torch, errors are the same on all ranks, and nothing is loaded before everything fits.
Differences: dicts have memory of their own where torch's may be the live one; state that is made so
that a fresh optimizer has a dict is not left in it; `broadcast_from_rank0` works for every layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from ckpt.errors import InvalidState
from ckpt.layout.plain import Ranks
from ckpt.state.names import bare_name, heads
from ckpt.state.optimizer import params_of
from ckpt.state_dict.api import (
    load_model_state_dict,
    load_optimizer_state_dict,
    model_state_dict,
    optimizer_state_dict,
)
from ckpt.state_dict.api import several as _several
from ckpt.state_dict.config import StateDictType, config_with
from ckpt.state_dict.model import describe_model, names_of

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

# Torch's names of what the dicts hold, for annotations.
FQNS_T = set[str]
PrimitiveType = torch.Tensor | int | float | str
ValueType = Any
DictValueType = dict[str, ValueType]
ListDictValueType = list[DictValueType]
OptimizerStateType = dict[str, DictValueType | ListDictValueType]

Optimizer = torch.optim.Optimizer
Optimizers = Optimizer | Iterable[Optimizer]
# The class of what `load_state_dict` returns has no public name.
_Keys: Any = type(nn.Module().load_state_dict({}))


@dataclass
class StateDictOptions:
    """What state dicts shall be; torch's own object of that name is taken too.

    `full_state_dict`: whole tensors, not shards. `cpu_offload`: on the host, and with
    `full_state_dict` only on the first rank ({} elsewhere). `ignore_frozen_params`: without what
    needs no gradient. `keep_submodule_prefixes`: whether names below `submodules` are whole.
    `strict`: whether a load tolerates no missing and unexpected names. `broadcast_from_rank0`: a
    load looks at the first rank's dict only. `flatten_optimizer_state_dict`: names joined by dots,
    "state.FQN.exp_avg" and "param_groups.FQN.lr". `dsd_fqn_modifiers`: the method by which a module
    would rename keys; a module that has it is refused.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, ValueType]:
    """The parameters, persistent buffers and extra states of `model` by bare name. Collective.

    Sharded tensors are DTensors, or ShardedTensors where their unit has no mesh. Raises ValueError
    for options that contradict each other, InvalidState for what has no such form.
    """
    chosen = _checked(model, options)
    prefixes = _prefixes(model, submodules)
    state_dict = model_state_dict(model, *_form(chosen, is_model=True))
    if chosen.ignore_frozen_params:
        frozen = _frozen(model)
        state_dict = {name: value for name, value in state_dict.items() if name not in frozen}
    if prefixes is None:
        return state_dict
    kept = {}
    for name, value in state_dict.items():
        for prefix in prefixes:
            if name.startswith(prefix):
                kept[name if chosen.keep_submodule_prefixes else name[len(prefix) :]] = value
    return kept


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> OptimizerStateType:
    """The state of one or several optimizers of `model`, by the names of parameters. Collective.

    A fresh optimizer's dict has the state that a first step makes, so that it can be loaded into.
    Raises RuntimeError without optimizers, NotImplementedError for state that cannot be flattened.
    """
    chosen = _checked(model, options)
    # For its warning and its check: torch narrows no optimizer's dict by `submodules` either.
    _prefixes(model, submodules)
    several = _several(optimizers)
    if not several:
        raise RuntimeError("get_optimizer_state_dict needs an optimizer, got none; pass it")
    with _with_state(several):
        state_dict = optimizer_state_dict(model, several, *_form(chosen, is_model=False))
    return _flattened(state_dict) if chosen.flatten_optimizer_state_dict else state_dict


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """Both dicts; ({...}, {}) without optimizers. See the functions for each."""
    several = _several(optimizers)
    model_dict = get_model_state_dict(model, submodules=submodules, options=options)
    if not several:
        return model_dict, {}
    return model_dict, get_optimizer_state_dict(model, several, options=options)


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[Any, Any],
    *,
    options: StateDictOptions | None = None,
) -> Any:
    """Load a dict of any form, of any number of ranks, in place. Collective.

    Keys may be modules of `model`, then values are their dicts. Returns missing and unexpected keys
    as `nn.Module.load_state_dict` does. Raises Mismatch with the model as it was.
    """
    chosen = _checked(model, options)
    given = _by_name(model, model_state_dict)
    loaded = load_model_state_dict(
        model, given, strict=chosen.strict, rank0_only=chosen.broadcast_from_rank0
    )
    return _Keys(list(loaded.missing), list(loaded.unexpected))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load a dict of any form, nested or flattened, into the optimizers of `model`. Collective.

    Call it before a backward or after a step. Raises Mismatch with the optimizers as they were.
    """
    chosen = _checked(model, options)
    several = _several(optimizers)
    if not several:
        raise RuntimeError("set_optimizer_state_dict needs an optimizer, got none; pass it")
    load_optimizer_state_dict(
        model,
        several,
        optim_state_dict,
        strict=chosen.strict,
        rank0_only=chosen.broadcast_from_rank0,
    )


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Load both; see the functions for each. Optimizers come first."""
    several = _several(optimizers)
    if several:
        set_optimizer_state_dict(model, several, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)


# --- options -------------------------------------------------------------------------------------


def _checked(model: nn.Module, options: StateDictOptions | None) -> StateDictOptions:
    chosen = _known(options)
    if chosen.broadcast_from_rank0 and not chosen.full_state_dict:
        raise ValueError("broadcast_from_rank0=True needs full_state_dict=True as well; pass both")
    # What such a module's hooks do to a dict shows only in running them on one (DECISIONS.md G12).
    renaming = [
        name for name, module in model.named_modules() if hasattr(module, chosen.dsd_fqn_modifiers)
    ]
    if renaming:
        raise InvalidState(
            [
                f"{name or 'the model'}: renames keys by {chosen.dsd_fqn_modifiers}(), which is "
                "not served; take it off and give the dict's keys the names of the modules"
                for name in renaming
            ]
        )
    return chosen


def _known(options: Any) -> StateDictOptions:
    """Our own for torch's: an older torch has fewer, and what a newer one adds is refused by name,
    unless it is at its default.
    """
    if options is None or isinstance(options, StateDictOptions):
        return options or StateDictOptions()
    ours = {field.name for field in fields(StateDictOptions)}
    known = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in ours:
            known[field.name] = value
        elif value != field.default:
            raise NotImplementedError(
                f"StateDictOptions.{field.name} of torch {torch.__version__} is not implemented by "
                f"this version of ckpt: leave it at its default, {field.default!r}"
            )
    return StateDictOptions(**known)


def _form(options: StateDictOptions, *, is_model: bool) -> tuple[StateDictType, Any]:
    form = StateDictType.FULL if options.full_state_dict else StateDictType.SHARDED
    return form, config_with(form, options.cpu_offload, options.cpu_offload, is_model=is_model)


# --- models --------------------------------------------------------------------------------------


def _prefixes(model: nn.Module, submodules: set[nn.Module] | None) -> list[str] | None:
    """What names of tensors below the submodules begin with; None for all of the model."""
    if not submodules:
        return None
    warnings.warn("submodules is deprecated: filter the dict by names", FutureWarning, stacklevel=3)
    return [_prefix(model, module) for module in submodules]


def _by_name(model: nn.Module, given: Mapping[Any, Any]) -> dict[str, Any]:
    if not any(isinstance(key, nn.Module) for key in given):
        return dict(given)
    warnings.warn(
        "modules as keys of a state dict are deprecated: use names", FutureWarning, stacklevel=3
    )
    return {
        f"{_prefix(model, module)}{name}": value
        for module, inner in given.items()
        for name, value in inner.items()
    }


def _prefix(model: nn.Module, wanted: nn.Module) -> str:
    """What names of tensors in a module begin with; nothing for what wraps the model, or is all of
    it (torch gives an empty dict then).
    """
    described = describe_model(model, Ranks.alone(), loading=False)
    known = {"", *(f"{path}." for name in names_of(described) for path in heads(name))}
    for name, module in model.named_modules():
        if module is wanted:
            return bare_name(name and f"{name}.", known)
    raise InvalidState(
        [f"{type(wanted).__name__}: is not a module of the model; pass one that is in it"]
    )


def _frozen(model: nn.Module) -> set[str]:
    """Names of parameters that need no gradient, and of what is tied to them."""
    described = describe_model(model, Ranks.alone(), loading=False)
    frozen = {
        fqn
        for source in described.params
        if not source.owned.param.requires_grad
        for fqn in source.fqns
    }
    frozen |= {
        fqn
        for fqn, tensor in described.composites.items()
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    }
    return frozen | {name for name, stored in described.tied.items() if stored in frozen}


# --- optimizers ----------------------------------------------------------------------------------


@contextmanager
def _with_state(optimizers: list[Optimizer]) -> Iterator[None]:
    """Inside, optimizers that have not stepped have the state that a first step makes.

    It steps with gradients of zero and a learning rate of zero, which changes no parameter, and is
    left out where there are gradients: those wait for the user's own step.
    """
    fresh = [
        optimizer
        for optimizer in optimizers
        if not optimizer.state and all(param.grad is None for param in params_of(optimizer))
    ]
    try:
        for optimizer in fresh:
            _step_in_place(optimizer)
        yield
    finally:
        for optimizer in fresh:
            optimizer.state.clear()


def _step_in_place(optimizer: Optimizer) -> None:
    rates = [group.get("lr") for group in optimizer.param_groups]
    params = params_of(optimizer)
    try:
        for param in params:
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            # A new tensor in the place of the user's, which a scheduler may hold.
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for param in params:
            param.grad = None


def _flattened(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Levels joined by dots: "state.FQN.exp_avg", "param_groups.FQN.lr"."""
    flat: dict[str, Any] = {}
    for fqn, state in state_dict.get("state", {}).items():
        _join(f"state.{fqn}", state, flat)
    for group in state_dict.get("param_groups", ()):
        for fqn in group["params"]:
            for key, value in group.items():
                if key != "params":
                    flat[f"param_groups.{fqn}.{key}"] = value
    return flat


def _join(path: str, value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _join(f"{path}.{key}", inner, flat)
    elif isinstance(value, int | float | torch.Tensor) or hasattr(value, "local_shards"):
        flat[path] = value
    else:
        raise NotImplementedError(
            f"{path}: is a {type(value).__name__}; only tensors and numbers can be flattened; "
            "leave flatten_optimizer_state_dict out"
        )
