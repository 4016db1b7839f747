"""One way to describe a state: modules, optimizers, objects, tensors and values, as pieces."""

from ckpt.state.bind import Binding, bind_state
from ckpt.state.flatten import flatten_state
from ckpt.state.rng import rng_state
from ckpt.state.types import Catalog, FlatState, Loaded, PerRank, Problem, ProblemKind, TensorEntry
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
from ckpt.state_dict.rekey import rekey_optimizer_state_dict

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
