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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.api import async_save as async_save
    from ckpt.api import load as load
    from ckpt.api import save as save
    from ckpt.background import PendingSave as PendingSave
    from ckpt.convert.dcp_plugin import DcpReader as DcpReader
    from ckpt.convert.dcp_plugin import DcpWriter as DcpWriter
    from ckpt.convert.importing import ImportReport as ImportReport
    from ckpt.convert.importing import import_checkpoint as import_checkpoint
    from ckpt.errors import CheckpointError as CheckpointError
    from ckpt.errors import Corrupt as Corrupt
    from ckpt.errors import Fenced as Fenced
    from ckpt.errors import InvalidState as InvalidState
    from ckpt.errors import LoadInterrupted as LoadInterrupted
    from ckpt.errors import Mismatch as Mismatch
    from ckpt.errors import NoCheckpoint as NoCheckpoint
    from ckpt.errors import OutcomeUnknown as OutcomeUnknown
    from ckpt.errors import RankFailed as RankFailed
    from ckpt.errors import SaveDropped as SaveDropped
    from ckpt.errors import StoreRefused as StoreRefused
    from ckpt.errors import UnsupportedFormat as UnsupportedFormat
    from ckpt.loading import LoadReport as LoadReport
    from ckpt.saving import SaveReport as SaveReport
    from ckpt.service.checkpointer import Alarm as Alarm
    from ckpt.service.checkpointer import Checkpointer as Checkpointer
    from ckpt.service.checkpointer import Saved as Saved
    from ckpt.service.checkpointer import SavesFailed as SavesFailed
    from ckpt.service.policies import Adaptive as Adaptive
    from ckpt.service.policies import AtExit as AtExit
    from ckpt.service.policies import EverySeconds as EverySeconds
    from ckpt.service.policies import EverySteps as EverySteps
    from ckpt.service.policies import Never as Never
    from ckpt.service.policies import OnPreemption as OnPreemption
    from ckpt.service.policies import OnSignal as OnSignal
    from ckpt.service.preemption import Preempted as Preempted
    from ckpt.service.restoring import RestoreReport as RestoreReport
    from ckpt.service.retention import KeepAll as KeepAll
    from ckpt.service.retention import KeepBest as KeepBest
    from ckpt.service.retention import KeepEvery as KeepEvery
    from ckpt.service.retention import KeepLatest as KeepLatest
    from ckpt.service.retention import KeepYounger as KeepYounger
    from ckpt.state_dict import PerRank as PerRank
    from ckpt.state_dict import StateDictType as StateDictType
    from ckpt.state_dict import rng_state as rng_state
    from ckpt.state_dicts import load_model_state_dict as load_model_state_dict
    from ckpt.state_dicts import load_optimizer_state_dict as load_optimizer_state_dict
    from ckpt.state_dicts import model_state_dict as model_state_dict
    from ckpt.state_dicts import optimizer_state_dict as optimizer_state_dict
    from ckpt.state_dicts import optimizer_state_dict_to_load as optimizer_state_dict_to_load
    from ckpt.state_dicts import rekey_optimizer_state_dict as rekey_optimizer_state_dict
    from ckpt.state_dicts import shard_optimizer_state_dict as shard_optimizer_state_dict
    from ckpt.tools.copying import CopyReport as CopyReport
    from ckpt.tools.copying import copy as copy
    from ckpt.tools.diffing import DiffOptions as DiffOptions
    from ckpt.tools.diffing import DiffReport as DiffReport
    from ckpt.tools.diffing import diff as diff
    from ckpt.tools.exporting import ExportReport as ExportReport
    from ckpt.tools.exporting import Selection as Selection
    from ckpt.tools.exporting import export as export
    from ckpt.tools.overview import DiskUsage as DiskUsage
    from ckpt.tools.overview import Event as Event
    from ckpt.tools.overview import disk_usage as disk_usage
    from ckpt.tools.overview import history as history
    from ckpt.tools.planning import LoadPlan as LoadPlan
    from ckpt.tools.planning import plan_load as plan_load
    from ckpt.tools.planning import plan_ranks as plan_ranks
    from ckpt.tools.reader import Checkpoint as Checkpoint
    from ckpt.tools.reader import StepInfo as StepInfo
    from ckpt.tools.reader import list_steps as list_steps
    from ckpt.tools.reader import open_checkpoint as open  # noqa: F401  # another name than there
    from ckpt.tools.resharding import reshard as reshard
    from ckpt.tools.verifying import VerifyReport as VerifyReport
    from ckpt.tools.verifying import verify as verify

_HOMES = {
    "Adaptive": "ckpt.service.policies",
    "Alarm": "ckpt.service.checkpointer",
    "AtExit": "ckpt.service.policies",
    "Checkpoint": "ckpt.tools.reader",
    "CheckpointError": "ckpt.errors",
    "Checkpointer": "ckpt.service.checkpointer",
    "CopyReport": "ckpt.tools.copying",
    "Corrupt": "ckpt.errors",
    "DiffOptions": "ckpt.tools.diffing",
    "DiffReport": "ckpt.tools.diffing",
    "DiskUsage": "ckpt.tools.overview",
    "Event": "ckpt.tools.overview",
    "EverySeconds": "ckpt.service.policies",
    "EverySteps": "ckpt.service.policies",
    "DcpReader": "ckpt.convert.dcp_plugin",
    "DcpWriter": "ckpt.convert.dcp_plugin",
    "ExportReport": "ckpt.tools.exporting",
    "Fenced": "ckpt.errors",
    "ImportReport": "ckpt.convert.importing",
    "InvalidState": "ckpt.errors",
    "KeepAll": "ckpt.service.retention",
    "KeepBest": "ckpt.service.retention",
    "KeepEvery": "ckpt.service.retention",
    "KeepLatest": "ckpt.service.retention",
    "KeepYounger": "ckpt.service.retention",
    "LoadInterrupted": "ckpt.errors",
    "LoadPlan": "ckpt.tools.planning",
    "LoadReport": "ckpt.loading",
    "Mismatch": "ckpt.errors",
    "Never": "ckpt.service.policies",
    "NoCheckpoint": "ckpt.errors",
    "OnPreemption": "ckpt.service.policies",
    "OnSignal": "ckpt.service.policies",
    "OutcomeUnknown": "ckpt.errors",
    "PendingSave": "ckpt.background",
    "PerRank": "ckpt.state_dict",
    "Preempted": "ckpt.service.preemption",
    "RankFailed": "ckpt.errors",
    "RestoreReport": "ckpt.service.restoring",
    "SaveDropped": "ckpt.errors",
    "SaveReport": "ckpt.saving",
    "Saved": "ckpt.service.checkpointer",
    "SavesFailed": "ckpt.service.checkpointer",
    "Selection": "ckpt.tools.exporting",
    "StateDictType": "ckpt.state_dict",
    "StepInfo": "ckpt.tools.reader",
    "StoreRefused": "ckpt.errors",
    "UnsupportedFormat": "ckpt.errors",
    "VerifyReport": "ckpt.tools.verifying",
    "async_save": "ckpt.api",
    "copy": "ckpt.tools.copying",
    "diff": "ckpt.tools.diffing",
    "disk_usage": "ckpt.tools.overview",
    "export": "ckpt.tools.exporting",
    "history": "ckpt.tools.overview",
    "import_checkpoint": "ckpt.convert.importing",
    "list_steps": "ckpt.tools.reader",
    "load": "ckpt.api",
    "load_model_state_dict": "ckpt.state_dicts",
    "load_optimizer_state_dict": "ckpt.state_dicts",
    "model_state_dict": "ckpt.state_dicts",
    "open": "ckpt.tools.reader",
    "optimizer_state_dict": "ckpt.state_dicts",
    "optimizer_state_dict_to_load": "ckpt.state_dicts",
    "plan_load": "ckpt.tools.planning",
    "plan_ranks": "ckpt.tools.planning",
    "rekey_optimizer_state_dict": "ckpt.state_dicts",
    "reshard": "ckpt.tools.resharding",
    "rng_state": "ckpt.state_dict",
    "save": "ckpt.api",
    "shard_optimizer_state_dict": "ckpt.state_dicts",
    "verify": "ckpt.tools.verifying",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
