"""The state dict half of `FullyShardedDataParallel`; it does not gather or run anything.

Model dicts: `state_dict()` and `load_state_dict()` of the wrapper or of any module around it, in
the form that `set_state_dict_type` chose. Optimizer dicts: static methods. All are collective over
all ranks. What `ckpt` calls Mismatch or InvalidState is a RuntimeError here, and a ValueError where
an optimizer dict does not fit the model, as torch's class has it.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from ckpt.errors import InvalidState, Mismatch
from ckpt.layout.sharded_tensor import is_sharded_tensor
from ckpt.layout.tensor import local_tensor
from ckpt.state.names import bare_names
from ckpt.state.types import STATE_DICT, LoadRequest, Unshared
from ckpt.state_dict import api as state_dicts
from ckpt.state_dict.api import TakeRequest
from ckpt.state_dict.config import FullOptimStateDictConfig, ShardedOptimStateDictConfig
from ckpt.state_dict.config import OptimStateDictConfig as OurOptimConfig
from ckpt.state_dict.config import StateDictType as Form
from ckpt.state_dict.keys import (
    ListedParams,
    by_name,
    by_number,
    own_names,
    rekey_optimizer_state_dict,
)
from sharding.attributes import UnitAttributes
from sharding.engine.torch_seam import (
    norm_counters,
    set_versions,
    version_in,
    versioned_dict,
)
from sharding.flat.wrappers import managed_below
from sharding.torch_face import (
    TorchWrapper,
    checked_settings,
    default_settings,
    form_of,
)

logger = logging.getLogger(__name__)

# What `load_state_dict` and `optim_state_dict_to_load` of torch's class have of our arguments.
_LOAD_CALL = STATE_DICT._replace(rank0_only=False, cast=False)
_OPTIM_CALL = _LOAD_CALL._replace(strict=False)
Optimizer = torch.optim.Optimizer
# The class of what `load_state_dict` returns has no public name.
_Keys = type(nn.Module().load_state_dict({}))


class StatefulUnit(UnitAttributes, TorchWrapper):
    """The half of a wrapper that gives and loads state dicts, of everything below it."""

    def __init__(self) -> None:
        super().__init__()
        self.fsdp_state_dict = default_settings()
        hook: Any = self.register_load_state_dict_post_hook
        hook(_forget_inner_names)

    @property
    def fsdp_state_dict(self) -> StateDictSettings:
        """The form of state dicts that was chosen, kept where torch's functions choose it too."""
        return StateDictSettings(
            self._state_dict_type, self._state_dict_config, self._optim_state_dict_config
        )

    @fsdp_state_dict.setter
    def fsdp_state_dict(self, chosen: StateDictSettings) -> None:
        self._state_dict_type = chosen.state_dict_type
        self._state_dict_config = chosen.state_dict_config
        self._optim_state_dict_config = chosen.optim_state_dict_config

    # --- settings -------------------------------------------------------------------------------

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings | None:
        """Choose the form of the state dicts of all units below `module`; returns the former one.

        None where there are no units. Raises RuntimeError for a config of another class,
        AssertionError when the units were set differently.
        """
        warnings.warn(
            "set_state_dict_type is deprecated: use the functions of ckpt.state_dict.api",
            FutureWarning,
            stacklevel=2,
        )
        return _set(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """`set_state_dict_type` for the time of a context, however it is left."""
        before = _set(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            if before is not None:
                for unit in _units(module):
                    unit.fsdp_state_dict = before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """The form that all units below `module` are set to; None without units."""
        units = _units(module)
        if not units:
            return None
        # In full, configs included: what is returned is said of all of them.
        for unit in units:
            if unit.fsdp_state_dict != units[0].fsdp_state_dict:
                raise AssertionError(
                    "units below this module have different state dict types: "
                    f"{units[0].fsdp_state_dict}, {unit.fsdp_state_dict}; set them together"
                )
        return units[0].fsdp_state_dict

    # --- models ---------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Everything below this unit by bare name, in the chosen form. Collective.

        As from torch's class, what is ignored and buffers are live memory.
        """
        # `nn.Module` still takes them by position, too.
        names = ("destination", "prefix", "keep_vars")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        destination = given.get("destination")
        destination = versioned_dict() if destination is None else destination
        _warn_of_unsharded(self)
        form, config = form_of(_servable(self), is_model=True)
        with _as_torch_raises():
            copied = managed_below(self)
            state = state_dicts.take(self, None, TakeRequest(form, config, copied=copied))
        prefix = given.get("prefix", "")
        set_versions(self, prefix, destination)
        for name in self._in_order(state):
            destination[f"{prefix}{name}"] = state[name]
        if logger.isEnabledFor(logging.INFO):  # one line to format for each entry
            for name, value in state.items():
                logger.info("state dict entry %s: %s", name, _described(value))
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a dict of any form, from any number of ranks, in place. Collective."""
        if assign:
            raise NotImplementedError("assign=True would replace sharded memory; load in place")
        _warn_of_unsharded(self)
        missing, unexpected = self._load(state_dict, strict=strict)
        return _Keys(missing, unexpected)

    def _load(self, state_dict: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
        versioned = state_dict
        # torch's set_model_state_dict puts the model's own parameters where a full dict lacks some:
        # parts of tensors where they are sharded, values for none of them.
        live = set().union(*(managed_below(unit) for unit in _units(self) if unit.is_sharded))
        state_dict = {name: value for name, value in state_dict.items() if id(value) not in live}
        self._log_absent(state_dict)
        # Norms had no counters before version 2, which is what a dict without metadata is taken
        # for: they keep theirs. An empty dict stands for those of other ranks.
        old = {
            clean: counter
            for name, counter in norm_counters(self)
            for clean in bare_names({name: None}, self.fsdp_names)
            if version_in(versioned, (one.rpartition(".")[0] for one in (name, clean))) < 2
        }
        given = {**old, **bare_names(state_dict, self.fsdp_names)} if state_dict else state_dict
        request = LoadRequest(strict, cast=True, every_name=True, call=_LOAD_CALL)
        with _as_torch_raises(text=self._text_of):
            loaded = state_dicts.load_model(self, given, request)
        missing = [name for name in self._in_order(loaded.missing) if name not in old]
        return missing, list(loaded.unexpected)

    def _text_of(self, error: Mismatch) -> str:
        """The error behind torch's words for keys that one side lacks: tools look for those."""
        lines = [f"Error(s) in loading state_dict for {type(self).__name__}:"]
        for word, what in (("Missing", "is not in the dict"), ("Unexpected", "is in the dict and")):
            problems = [problem.partition(": ") for problem in error.problems]
            keys = [f'"{key}"' for key, _, problem in problems if problem.startswith(what)]
            lines += [f"\t{word} key(s) in state_dict: {', '.join(keys)}. "] if keys else []
        return "\n".join([*lines, str(error)] if len(lines) > 1 else [str(error)])

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """`names` as the bare module's state dict has them; what it does not list comes last."""
        order = {name: position for position, name in enumerate(self.fsdp_names)}
        return sorted(names, key=lambda name: order.get(name, len(order)))

    def _log_absent(self, state_dict: Mapping[str, Any]) -> None:
        """Say which parameters a sharded dict leaves as they are, whatever becomes of the load."""
        sharded = self.fsdp_state_dict.state_dict_type is StateDictType.SHARDED_STATE_DICT
        if sharded and self.is_sharded and state_dict:
            given = bare_names(state_dict, set(self.fsdp_names))
            for name in self.fsdp_names:
                if name not in given:
                    logger.warning("%s: is not in the sharded state dict and is not filled", name)

    def _load_from_state_dict(  # called where a module around this unit is loaded
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Not strict: the caller collects names over all modules, and decides at the end.
        own = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        missing, unexpected = self._load(own, strict=False)
        missing_keys.extend(f"{prefix}{name}" for name in missing)
        unexpected_keys.extend(f"{prefix}{name}" for name in unexpected)

    # --- optimizers -----------------------------------------------------------------------------

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The optimizer's state by parameter names, in the form that the model is set to."""
        _check_one_mode(model)
        settings = StatefulUnit.get_state_dict_type(model) or default_settings()
        _refuse_local_with_mesh(model, settings)
        given: Any = optim_state_dict
        # A dict without "state" is passed on as it is, for the error that says what it lacks.
        if given and isinstance(given.get("state"), Mapping):
            given = by_number(given, model, optim)
        return _taken(model, optim, *form_of(settings, is_model=False), given, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes on this rank, of a dict of any form.

        With `load_directly` it is loaded too. With `is_named_optimizer` the keys are the names that
        `optim.state_dict()` has, or those of `model.named_parameters()` where it has numbers.
        Raises ValueError for what does not fit the model or the optimizer.
        """
        settings = StatefulUnit.get_state_dict_type(model) or default_settings()
        rank0_only = bool(getattr(settings.optim_state_dict_config, "rank0_only", False))
        given = optim_state_dict
        to_load = _to_load(model, optim, given, rank0_only=rank0_only, group=group)
        if not is_named_optimizer:
            if load_directly:
                optim.load_state_dict(to_load)
            return to_load
        names = own_names(optim)
        with _as_torch_raises(ValueError):
            named = by_name(to_load, model, optim, names)
        if load_directly:  # an optimizer that is keyed by numbers loads what is keyed so
            optim.load_state_dict(named if names else to_load)
        return named

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Iterable[Any] | None = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Deprecated: the full dict, on the CPU; {} on ranks other than the first."""
        _legacy("full_optim_state_dict", "optim_state_dict", optim_input)
        _check_one_mode(model)
        config = FullOptimStateDictConfig(True, rank0_only)
        # What is listed gives the ids, so the optimizer gives its state by ids.
        listed: Any = optim if optim_input is None else ListedParams(optim_input)
        state = None if optim_input is None else optim.state_dict()
        return _taken(model, listed, Form.FULL, config, state, group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """Deprecated: the sharded dict, on the CPU, of ShardedTensors even on a mesh."""
        _legacy("sharded_optim_state_dict", "optim_state_dict", None)
        config = ShardedOptimStateDictConfig(True, use_dtensor=False)
        return _taken(model, optim, Form.SHARDED, config, None, group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Deprecated: this rank's part of a full dict that every rank has; no communication."""
        _legacy("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        optimizer = _listed(model, optim_input, optim)
        _check_one_mode(model)
        request = LoadRequest(call=_OPTIM_CALL, beside=Unshared.OWN)
        with _as_torch_raises(ValueError):
            given = full_optim_state_dict
            return state_dicts.optimizer_to_load(model, optimizer, given, request, alone=True)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Deprecated: this rank's part of a full dict that the first rank has."""
        _legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        optimizer = _listed(model, optim_input, optim)
        given = full_optim_state_dict or {}
        return _to_load(model, optimizer, given, rank0_only=True, group=group)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """Deprecated: this rank's part of a sharded dict."""
        _legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load", None)
        return _to_load(model, optim, sharded_optim_state_dict, rank0_only=False, group=None)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """The dict keyed by names or by ids, for moving to and from unwrapped models.

        Ids count `optim`'s parameters, or those of `optim_input`, or `model.parameters()`. A dict
        that is keyed as wanted comes back as it is. Raises ValueError for mixed keys.
        """
        _warn_of_input("rekey_optim_state_dict", optim_input)
        to_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
        keys = {isinstance(key, str) for key in optim_state_dict["state"]}
        if len(keys) > 1:
            raise ValueError("keys of the optimizer state are both names and ids; use one kind")
        if keys == {to_names}:
            return optim_state_dict
        optimizer = _listed(model, optim_input, optim)
        with _as_torch_raises(ValueError):
            state = rekey_optimizer_state_dict(
                optim_state_dict, "fqn" if to_names else "id", model, optimizer
            )
        # As torch's class has them: copies, and sorted.
        state["param_groups"] = [
            {**copy.deepcopy(group), "params": sorted(group["params"])}
            for group in state["param_groups"]
        ]
        return state


def _units(module: nn.Module) -> list[StatefulUnit]:
    return [inner for inner in module.modules() if isinstance(inner, StatefulUnit)]


def _set(
    module: nn.Module,
    form: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings | None:
    settings = checked_settings(form, config, optim_config)
    units = _units(module)
    kinds = {
        (s.state_dict_type, type(s.state_dict_config), type(s.optim_state_dict_config))
        for s in (unit.fsdp_state_dict for unit in units)
    }
    if len(kinds) > 1:
        names = sorted(form.name for form, _, _ in kinds)
        raise AssertionError(
            f"units below this module are set to different state dict types ({', '.join(names)}); "
            "set the inner ones back to the type of the others first"
        )
    # Configs of one class may differ below: what is set here holds for all of them.
    before = units[0].fsdp_state_dict if units else None
    for unit in units:
        unit.fsdp_state_dict = settings
    return before


def _servable(unit: StatefulUnit) -> StateDictSettings:
    """The unit's settings, or what stands for them where nothing below it is sharded.

    Raises RuntimeError for LOCAL with a mesh.
    """
    settings = unit.fsdp_state_dict
    if any(below.is_sharded for below in _units(unit)):
        _refuse_local_with_mesh(unit, settings)
        return settings
    return default_settings()


def _warn_of_unsharded(unit: StatefulUnit) -> None:
    if any(not below.is_sharded for below in _units(unit)):
        warnings.warn(
            "units with NO_SHARD have no state dict but the full one, with the default config: "
            f"{unit.fsdp_state_dict.state_dict_type.name} and its config hold for other units only",
            stacklevel=4,
        )


def _described(value: Any) -> str:
    """Class, shapes, dtype and device of an entry of a state dict."""
    if is_sharded_tensor(value):
        shapes = [tuple(shard.tensor.shape) for shard in value.local_shards()]
        return f"ShardedTensor of {tuple(value.size())}, here {shapes}, {value.dtype}"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    local = local_tensor(value)
    return (
        f"{type(value).__name__} of {tuple(value.shape)}, here {tuple(local.shape)}, "
        f"{value.dtype}, {local.device}"
    )


def _refuse_local_with_mesh(model: nn.Module, settings: StateDictSettings) -> None:
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT and any(
        unit.fsdp_mesh is not None for unit in _units(model)
    ):
        raise RuntimeError(
            "LOCAL_STATE_DICT cannot be had with device_mesh: use SHARDED_STATE_DICT"
        )


def _check_one_mode(model: nn.Module) -> None:
    modes = {unit.shows_original_params for unit in _units(model)}
    if len(modes) > 1:
        raise AssertionError(
            "some units have use_orig_params=True and some have not: an optimizer state dict needs "
            "one mode for all; wrap all units alike"
        )


def _beside(model: nn.Module) -> Unshared:
    """torch's class takes the first rank's names for all where it shows flat parameters."""
    shows_original = any(unit.shows_original_params for unit in _units(model))
    return Unshared.OWN if shows_original else Unshared.OWN_BY_FIRST


def _to_load(
    model: nn.Module, optim: Optimizer, given: Mapping[str, Any], *, rank0_only: bool, group: Any
) -> dict[str, Any]:
    _check_one_mode(model)
    request = LoadRequest(rank0_only=rank0_only, call=_OPTIM_CALL, beside=Unshared.OWN)
    with _as_torch_raises(ValueError):
        return state_dicts.optimizer_to_load(model, optim, given, request, group)


def _taken(
    model: nn.Module,
    optim: Optimizer,
    form: Form,
    config: OurOptimConfig,
    given: Mapping[str, Any] | None,
    group: Any,
) -> dict[str, Any]:
    """The optimizer's state, or that of `given` in its place. Collective."""
    request = TakeRequest(form, config, given, _beside(model))
    with _as_torch_raises():
        return state_dicts.take(model, optim, request, group)


@contextmanager
def _as_torch_raises(
    mismatch: type[Exception] = RuntimeError, text: Callable[[Mismatch], str] = str
) -> Iterator[None]:
    """What `ckpt` raises inside becomes what torch's class raises: scripts catch that."""
    try:
        yield
    except Mismatch as error:
        raise mismatch(text(error)) from error
    except InvalidState as error:
        raise RuntimeError(str(error)) from error


def _legacy(name: str, instead: str, optim_input: Iterable[Any] | None) -> None:
    warnings.warn(f"{name} is deprecated: use {instead}", FutureWarning, stacklevel=3)
    _warn_of_input(name, optim_input)


def _warn_of_input(name: str, optim_input: Iterable[Any] | None) -> None:
    if optim_input is not None:
        warnings.warn(
            f"optim_input of {name} is deprecated: pass optim", FutureWarning, stacklevel=4
        )


def _listed(model: nn.Module, optim_input: Iterable[Any] | None, optim: Optimizer | None) -> Any:
    """What gives the ids: `optim_input` before `optim`, and without both the model's parameters."""
    if optim_input is not None:
        return ListedParams(optim_input)
    return ListedParams(model.parameters()) if optim is None else optim


def _forget_inner_names(module: nn.Module, keys: Any) -> None:
    """Modules inside a unit find none of their names in the dict: the unit has loaded them."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if "_fsdp_wrapped_module" not in key]
