"""State dicts the way torch's class offers them, all of them by calling `ckpt.state_dict.api`.

A wrapper remembers the type and the configs that the user set; what they mean is in `ckpt`. The
configs are torch's classes, compared by their exact class as torch does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from ckpt import state_dict as ours
from sharding.torch_face import check_known

__all__ = ["checked_settings", "default_settings", "model_form", "optim_form", "relative"]

_CLASSES: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def default_settings() -> StateDictSettings:
    """FULL, with default configs."""
    return checked_settings(StateDictType.FULL_STATE_DICT, None, None)


def checked_settings(
    form: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """The settings, with defaults for what is None. Raises RuntimeError for other classes, and
    NotImplementedError for options of a newer torch that are not implemented here.
    """
    check_known(config, optim_config)
    model_class, optim_class = _CLASSES[form]
    config = model_class() if config is None else config
    optim_config = optim_class() if optim_config is None else optim_config
    # By exact class, as torch compares them: all derive from one, and mean different things.
    for given, wanted in ((config, model_class), (optim_config, optim_class)):
        if type(given) is not wanted:
            raise RuntimeError(
                f"{form.name} needs a {wanted.__name__}, got a {type(given).__name__}"
            )
    return StateDictSettings(form, config, optim_config)


def model_form(settings: StateDictSettings) -> tuple[ours.StateDictType, ours.StateDictConfig]:
    """What the settings are called in `ckpt`, for models."""
    config: Any = settings.state_dict_config
    offload = config.offload_to_cpu
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        rank0_only = config.rank0_only
        return ours.StateDictType.FULL, ours.FullStateDictConfig(offload, rank0_only)
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        return ours.StateDictType.LOCAL, ours.LocalStateDictConfig(offload)
    return ours.StateDictType.SHARDED, ours.ShardedStateDictConfig(offload)


def optim_form(
    settings: StateDictSettings,
) -> tuple[ours.StateDictType, ours.OptimStateDictConfig]:
    """What the settings are called in `ckpt`, for optimizers. LOCAL is served as SHARDED."""
    # torch's class tells full dicts of optimizers from all others, which are sharded.
    config: Any = settings.optim_state_dict_config
    offload = config.offload_to_cpu
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        rank0_only = config.rank0_only
        return ours.StateDictType.FULL, ours.FullOptimStateDictConfig(offload, rank0_only)
    return ours.StateDictType.SHARDED, ours.ShardedOptimStateDictConfig(offload)


def relative(state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries under `prefix`, without it."""
    return {k[len(prefix) :]: value for k, value in state_dict.items() if k.startswith(prefix)}
