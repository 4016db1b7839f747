"""State dicts in torch's forms: full, sharded and local, of models and optimizers."""

from ckpt.state.optimizer_kinds import declare_optimizer_state
from ckpt.state_dict.api import (
    load_model_state_dict,
    load_optimizer_state_dict,
    model_state_dict,
    optimizer_state_dict,
    optimizer_state_dict_to_load,
    shard_optimizer_state_dict,
)
from ckpt.state_dict.config import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
)
from ckpt.state_dict.keys import rekey_optimizer_state_dict

__all__ = [
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictType",
    "declare_optimizer_state",
    "load_model_state_dict",
    "load_optimizer_state_dict",
    "model_state_dict",
    "optimizer_state_dict",
    "optimizer_state_dict_to_load",
    "rekey_optimizer_state_dict",
    "shard_optimizer_state_dict",
]
