"""Which form a state dict has: whole tensors, this rank's flat parts, or one chunk per rank."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class StateDictType(enum.Enum):
    """FULL: whole tensors. LOCAL: what this rank holds, flat. SHARDED: dim-0 chunks, one per rank.

    The long names are those that torch uses.
    """

    FULL = "full"
    LOCAL = "local"
    SHARDED = "sharded"
    FULL_STATE_DICT = FULL
    LOCAL_STATE_DICT = LOCAL
    SHARDED_STATE_DICT = SHARDED


@dataclass(frozen=True, slots=True)
class StateDictConfig:
    """The options that every form of a model's state dict has."""

    offload_to_cpu: bool = False


@dataclass(frozen=True, slots=True)
class OptimStateDictConfig:
    """The options that every form of an optimizer's state dict has."""

    offload_to_cpu: bool = True


@dataclass(frozen=True, slots=True)
class FullStateDictConfig(StateDictConfig):
    """Whole tensors on every rank, or (`rank0_only`) on the first; the others get an empty dict."""

    rank0_only: bool = False


@dataclass(frozen=True, slots=True)
class LocalStateDictConfig(StateDictConfig):
    """Flat parts; without offloading they are the live memory itself."""


@dataclass(frozen=True, slots=True)
class ShardedStateDictConfig(StateDictConfig):
    """Chunks. `use_dtensor`: None gives DTensors where there is a mesh; False only where the
    parameter is one itself; True refuses to do without.
    """

    use_dtensor: bool | None = None


@dataclass(frozen=True, slots=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Like `FullStateDictConfig`, offloaded by default."""

    rank0_only: bool = False


@dataclass(frozen=True, slots=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Like `LocalStateDictConfig`."""

    offload_to_cpu: bool = False


@dataclass(frozen=True, slots=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Like `ShardedStateDictConfig`, offloaded by default."""

    use_dtensor: bool | None = None


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def config_of(
    form: StateDictType, config: StateDictConfig | OptimStateDictConfig | None, *, is_model: bool
) -> StateDictConfig | OptimStateDictConfig:
    """`config`, or the default of `form`, of a model or of optimizers. Raises TypeError when it is
    that of another form.
    """
    # torch's enumeration of that name is another class, and no key of the table.
    if not isinstance(form, StateDictType):
        raise TypeError(
            f"the type of a state dict is {form!r}; expected StateDictType.FULL, LOCAL or SHARDED"
        )
    kind = _CONFIGS[form][0 if is_model else 1]
    if config is not None and type(config) is not kind:
        raise TypeError(
            f"{form} takes a {kind.__name__}, not a {type(config).__name__}; leave the config out "
            "for its defaults"
        )
    return config or kind()


def config_with(
    form: StateDictType, offload_to_cpu: bool, rank0_only: bool, *, is_model: bool
) -> StateDictConfig | OptimStateDictConfig:
    """The config of `form` with these options; `rank0_only` counts for FULL alone."""
    only = {"rank0_only": rank0_only} if form is StateDictType.FULL else {}
    return replace(config_of(form, None, is_model=is_model), offload_to_cpu=offload_to_cpu, **only)
