"""Distributed checkpoints for PyTorch: sharded, checked, committed in one write, loaded on any
layout.

    import ckpt
    state = {"model": model, "optim": optimizer, "step": step}
    ckpt.save(state, "s3://bucket/run", step=step)
    ckpt.load(state, "s3://bucket/run")

Names are imported at their first use, so that tools which only look at a checkpoint start without
torch.
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt.version import __version__ as __version__

if TYPE_CHECKING:
    from ckpt.api import async_save as async_save
    from ckpt.api import forget as forget
    from ckpt.api import load as load
    from ckpt.api import save as save
    from ckpt.convert.dcp_plugin import DcpReader as DcpReader
    from ckpt.convert.dcp_plugin import DcpWriter as DcpWriter
    from ckpt.convert.export import ExportReport as ExportReport
    from ckpt.convert.export import Selection as Selection
    from ckpt.convert.export import export as export
    from ckpt.convert.import_ import ImportReport as ImportReport
    from ckpt.convert.import_ import import_checkpoint as import_checkpoint
    from ckpt.convert.sources.dequantized import Dequantize as Dequantize
    from ckpt.errors import CheckpointError as CheckpointError
    from ckpt.errors import Corrupt as Corrupt
    from ckpt.errors import Fenced as Fenced
    from ckpt.errors import Forked as Forked
    from ckpt.errors import InvalidState as InvalidState
    from ckpt.errors import LoadInterrupted as LoadInterrupted
    from ckpt.errors import LogDiverged as LogDiverged
    from ckpt.errors import Mismatch as Mismatch
    from ckpt.errors import NoCheckpoint as NoCheckpoint
    from ckpt.errors import OutcomeUnknown as OutcomeUnknown
    from ckpt.errors import RankFailed as RankFailed
    from ckpt.errors import RankFailedInCommit as RankFailedInCommit
    from ckpt.errors import SaveDropped as SaveDropped
    from ckpt.errors import StoreRefused as StoreRefused
    from ckpt.errors import UnsupportedFormat as UnsupportedFormat
    from ckpt.layout.composites import register_tensor_type as register_tensor_type
    from ckpt.loading.checkpoint import Checkpoint as Checkpoint
    from ckpt.loading.checkpoint import open_checkpoint
    from ckpt.loading.contents import StepInfo as StepInfo
    from ckpt.loading.contents import list_steps as list_steps
    from ckpt.loading.load import LoadReport as LoadReport
    from ckpt.saving.background import PendingSave as PendingSave
    from ckpt.saving.report import SaveReport as SaveReport
    from ckpt.service.alarm import Alarm as Alarm
    from ckpt.service.alarm import SavesFailed as SavesFailed
    from ckpt.service.checkpointer import Checkpointer as Checkpointer
    from ckpt.service.follower import Follower as Follower
    from ckpt.service.follower import Swapped as Swapped
    from ckpt.service.follower import Update as Update
    from ckpt.service.follower import follow as follow
    from ckpt.service.inflight import Saved as Saved
    from ckpt.service.near import Near as Near
    from ckpt.service.policies import Adaptive as Adaptive
    from ckpt.service.policies import AtExit as AtExit
    from ckpt.service.policies import EverySeconds as EverySeconds
    from ckpt.service.policies import EverySteps as EverySteps
    from ckpt.service.policies import Never as Never
    from ckpt.service.policies import OnPreemption as OnPreemption
    from ckpt.service.policies import OnSignal as OnSignal
    from ckpt.service.preemption import Preempted as Preempted
    from ckpt.service.restore import RestoreReport as RestoreReport
    from ckpt.service.retention import KeepAll as KeepAll
    from ckpt.service.retention import KeepBest as KeepBest
    from ckpt.service.retention import KeepEvery as KeepEvery
    from ckpt.service.retention import KeepLatest as KeepLatest
    from ckpt.service.retention import KeepYounger as KeepYounger
    from ckpt.state.own import declare_optimizer_state as declare_optimizer_state
    from ckpt.state.rng import rng_state as rng_state
    from ckpt.state.types import PerGroup as PerGroup
    from ckpt.state.types import PerRank as PerRank
    from ckpt.state.types import Stages as Stages
    from ckpt.state_dict.api import load_model_state_dict as load_model_state_dict
    from ckpt.state_dict.api import load_optimizer_state_dict as load_optimizer_state_dict
    from ckpt.state_dict.api import model_state_dict as model_state_dict
    from ckpt.state_dict.api import optimizer_state_dict as optimizer_state_dict
    from ckpt.state_dict.api import optimizer_state_dict_to_load as optimizer_state_dict_to_load
    from ckpt.state_dict.api import rekey_optimizer_state_dict as rekey_optimizer_state_dict
    from ckpt.state_dict.api import shard_optimizer_state_dict as shard_optimizer_state_dict
    from ckpt.state_dict.config import StateDictType as StateDictType
    from ckpt.tools.copy import CopyReport as CopyReport
    from ckpt.tools.copy import copy as copy
    from ckpt.tools.diff import DiffOptions as DiffOptions
    from ckpt.tools.diff import DiffReport as DiffReport
    from ckpt.tools.diff import diff as diff
    from ckpt.tools.overview import DiskUsage as DiskUsage
    from ckpt.tools.overview import Event as Event
    from ckpt.tools.overview import disk_usage as disk_usage
    from ckpt.tools.overview import history as history
    from ckpt.tools.pins import pin as pin
    from ckpt.tools.pins import unpin as unpin
    from ckpt.tools.plan import LoadPlan as LoadPlan
    from ckpt.tools.plan import plan_load as plan_load
    from ckpt.tools.plan import plan_ranks as plan_ranks
    from ckpt.tools.reshard import reshard as reshard
    from ckpt.tools.verify import VerifyReport as VerifyReport
    from ckpt.tools.verify import verify as verify
    from storage.schemes import register_store as register_store

    # Not `import ... as open`: type checkers hide an import under another name from users.
    open = open_checkpoint

_HOMES = {
    "Adaptive": "ckpt.service.policies",
    "Alarm": "ckpt.service.alarm",
    "AtExit": "ckpt.service.policies",
    "Checkpoint": "ckpt.loading.checkpoint",
    "CheckpointError": "ckpt.errors",
    "Checkpointer": "ckpt.service.checkpointer",
    "CopyReport": "ckpt.tools.copy",
    "Corrupt": "ckpt.errors",
    "Dequantize": "ckpt.convert.sources.dequantized",
    "DiffOptions": "ckpt.tools.diff",
    "DiffReport": "ckpt.tools.diff",
    "DiskUsage": "ckpt.tools.overview",
    "Event": "ckpt.tools.overview",
    "EverySeconds": "ckpt.service.policies",
    "EverySteps": "ckpt.service.policies",
    "DcpReader": "ckpt.convert.dcp_plugin",
    "DcpWriter": "ckpt.convert.dcp_plugin",
    "ExportReport": "ckpt.convert.export",
    "Fenced": "ckpt.errors",
    "ImportReport": "ckpt.convert.import_",
    "InvalidState": "ckpt.errors",
    "KeepAll": "ckpt.service.retention",
    "KeepBest": "ckpt.service.retention",
    "KeepEvery": "ckpt.service.retention",
    "KeepLatest": "ckpt.service.retention",
    "KeepYounger": "ckpt.service.retention",
    "LoadInterrupted": "ckpt.errors",
    "LoadPlan": "ckpt.tools.plan",
    "LoadReport": "ckpt.loading.load",
    "Mismatch": "ckpt.errors",
    "Near": "ckpt.service.near",
    "Never": "ckpt.service.policies",
    "NoCheckpoint": "ckpt.errors",
    "OnPreemption": "ckpt.service.policies",
    "OnSignal": "ckpt.service.policies",
    "OutcomeUnknown": "ckpt.errors",
    "PendingSave": "ckpt.saving.background",
    "PerGroup": "ckpt.state.types",
    "PerRank": "ckpt.state.types",
    "Preempted": "ckpt.service.preemption",
    "RankFailed": "ckpt.errors",
    "RankFailedInCommit": "ckpt.errors",
    "RestoreReport": "ckpt.service.restore",
    "SaveDropped": "ckpt.errors",
    "SaveReport": "ckpt.saving.report",
    "Saved": "ckpt.service.inflight",
    "SavesFailed": "ckpt.service.alarm",
    "Selection": "ckpt.convert.export",
    "StateDictType": "ckpt.state_dict.config",
    "Stages": "ckpt.state.types",
    "StepInfo": "ckpt.loading.contents",
    "StoreRefused": "ckpt.errors",
    "Swapped": "ckpt.service.follower",
    "LogDiverged": "ckpt.errors",
    "Follower": "ckpt.service.follower",
    "Forked": "ckpt.errors",
    "UnsupportedFormat": "ckpt.errors",
    "Update": "ckpt.service.follower",
    "VerifyReport": "ckpt.tools.verify",
    "async_save": "ckpt.api",
    "copy": "ckpt.tools.copy",
    "declare_optimizer_state": "ckpt.state.own",
    "diff": "ckpt.tools.diff",
    "disk_usage": "ckpt.tools.overview",
    "export": "ckpt.convert.export",
    "follow": "ckpt.service.follower",
    "history": "ckpt.tools.overview",
    "import_checkpoint": "ckpt.convert.import_",
    "list_steps": "ckpt.loading.contents",
    "load": "ckpt.api",
    "load_model_state_dict": "ckpt.state_dict.api",
    "load_optimizer_state_dict": "ckpt.state_dict.api",
    "model_state_dict": "ckpt.state_dict.api",
    "open": "ckpt.loading.checkpoint",
    "optimizer_state_dict": "ckpt.state_dict.api",
    "optimizer_state_dict_to_load": "ckpt.state_dict.api",
    "pin": "ckpt.tools.pins",
    "plan_load": "ckpt.tools.plan",
    "plan_ranks": "ckpt.tools.plan",
    "register_store": "storage.schemes",
    "register_tensor_type": "ckpt.layout.composites",
    "rekey_optimizer_state_dict": "ckpt.state_dict.api",
    "reshard": "ckpt.tools.reshard",
    "rng_state": "ckpt.state.rng",
    "forget": "ckpt.api",
    "save": "ckpt.api",
    "shard_optimizer_state_dict": "ckpt.state_dict.api",
    "unpin": "ckpt.tools.pins",
    "verify": "ckpt.tools.verify",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    # `open` is the only name that would hide a builtin in its own file.
    value = getattr(import_module(home), "open_checkpoint" if name == "open" else name)
    globals()[name] = value
    return value


def _leave(pid: int) -> None:
    """Ranks that wait in a call which this process never makes learn that it ends."""
    dist = sys.modules.get("torch.distributed")
    # What a fork inherits is its parent's.
    if dist is not None and dist.is_available() and os.getpid() == pid:
        import_module("ckpt.world.job").leave_uncalled()


atexit.register(_leave, os.getpid())


def __dir__() -> list[str]:
    # What is imported here is no name of ours, and the modules below are found by their own names.
    return sorted([*(name for name in globals() if name.startswith("__")), *_HOMES])
