"""One way to describe a state: modules, optimizers, objects, tensors and values, as pieces."""

from ckpt.state_dict.bind import Binding, bind_state
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
from ckpt.state_dict.flatten import flatten_state
from ckpt.state_dict.rekey import rekey_optimizer_state_dict
from ckpt.state_dict.rng import rng_state
from ckpt.state_dict.types import (
    Catalog,
    FlatState,
    Loaded,
    PerRank,
    Problem,
    ProblemKind,
    TensorEntry,
)

__all__ = [
    "Binding",
    "Catalog",
    "FlatState",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "Loaded",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "PerRank",
    "Problem",
    "ProblemKind",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictType",
    "TensorEntry",
    "bind_state",
    "flatten_state",
    "rekey_optimizer_state_dict",
    "rng_state",
]
