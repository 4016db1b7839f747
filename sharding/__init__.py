"""The training engine that stands on `ckpt`: fully sharded data parallel with flat parameters.

A script that trains with torch's `FullyShardedDataParallel` moves over by changing its import:

    from sharding import FullyShardedDataParallel

Strategies, policies and configs are torch's own classes, offered here under the same names, so that
objects of either import are the same. Saving with `ckpt.save` needs no gather.
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from sharding.comm_hooks import LowPrecisionState, bf16_compress_hook, fp16_compress_hook
from sharding.dtensor.meshes import DataParallelMeshDims, ShardPlacementResult
from sharding.engine.blocks import Blocks, Whole
from sharding.engine.runtime import GradientReductionHandle, UnshardHandle
from sharding.explaining import explain
from sharding.flat.members import FlatParameter
from sharding.fsdp import FullyShardedDataParallel
from sharding.fsdp_module import (
    FSDPModule,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from sharding.fully_sharding import fully_shard, replicate
from sharding.installing import install

__all__ = [
    "BackwardPrefetch",
    "Blocks",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "LowPrecisionState",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "Whole",
    "always_wrap_policy",
    "bf16_compress_hook",
    "enable_wrap",
    "explain",
    "fp16_compress_hook",
    "fully_shard",
    "install",
    "lambda_auto_wrap_policy",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
