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
    from ckpt import errors as errors
    from ckpt import integrations as integrations
    from ckpt import operate as operate
    from ckpt import reports as reports
    from ckpt import state_dict as state_dict
    from ckpt.api import async_save as async_save
    from ckpt.api import begin as begin
    from ckpt.api import forget as forget
    from ckpt.api import load as load
    from ckpt.api import save as save
    from ckpt.errors import CheckpointError as CheckpointError
    from ckpt.errors import Corrupt as Corrupt
    from ckpt.errors import Mismatch as Mismatch
    from ckpt.errors import NoCheckpoint as NoCheckpoint
    from ckpt.layout.composites import register_tensor_type as register_tensor_type
    from ckpt.loading.checkpoint import Checkpoint as Checkpoint
    from ckpt.loading.checkpoint import open_checkpoint
    from ckpt.loading.contents import list_steps as list_steps
    from ckpt.near.value import Near as Near
    from ckpt.operate import copy as copy
    from ckpt.operate import diff as diff
    from ckpt.operate import disk_usage as disk_usage
    from ckpt.operate import export as export
    from ckpt.operate import import_checkpoint as import_checkpoint
    from ckpt.operate import pin as pin
    from ckpt.operate import plan_ranks as plan_ranks
    from ckpt.operate import reshard as reshard
    from ckpt.operate import unpin as unpin
    from ckpt.operate import verify as verify
    from ckpt.rehearse.watch import watch_resume as watch_resume
    from ckpt.service.alarm import Alarm as Alarm
    from ckpt.service.checkpointer import Checkpointer as Checkpointer
    from ckpt.service.follower import follow as follow
    from ckpt.service.policies import Adaptive as Adaptive
    from ckpt.service.policies import AtExit as AtExit
    from ckpt.service.policies import EverySeconds as EverySeconds
    from ckpt.service.policies import EverySteps as EverySteps
    from ckpt.service.policies import Never as Never
    from ckpt.service.policies import OnPreemption as OnPreemption
    from ckpt.service.policies import OnSignal as OnSignal
    from ckpt.service.preemption import Preempted as Preempted
    from ckpt.service.publisher import publish as publish
    from ckpt.service.retention import KeepAll as KeepAll
    from ckpt.service.retention import KeepBest as KeepBest
    from ckpt.service.retention import KeepEvery as KeepEvery
    from ckpt.service.retention import KeepLatest as KeepLatest
    from ckpt.service.retention import KeepYounger as KeepYounger
    from ckpt.state.rng import rng_state as rng_state
    from ckpt.state.types import PerGroup as PerGroup
    from ckpt.state.types import PerRank as PerRank
    from ckpt.state.types import Stages as Stages
    from ckpt.tools.overview import history as history
    from ckpt.tools.plan import plan_load as plan_load
    from storage.schemes import register_store as register_store

    # Not `import ... as open`: type checkers hide an import under another name from users.
    open = open_checkpoint

_HOMES = {
    name: home
    for home, names in {
        "ckpt.api": "async_save begin forget load save",
        "ckpt.errors": "CheckpointError Corrupt Mismatch NoCheckpoint",
        "ckpt.layout.composites": "register_tensor_type",
        "ckpt.loading.checkpoint": "Checkpoint open",
        "ckpt.loading.contents": "list_steps",
        "ckpt.near.value": "Near",
        "ckpt.operate": (
            "copy diff disk_usage export import_checkpoint pin plan_ranks reshard unpin verify"
        ),
        "ckpt.rehearse.watch": "watch_resume",
        "ckpt.service.alarm": "Alarm",
        "ckpt.service.checkpointer": "Checkpointer",
        "ckpt.service.follower": "follow",
        "ckpt.service.policies": (
            "Adaptive AtExit EverySeconds EverySteps Never OnPreemption OnSignal"
        ),
        "ckpt.service.preemption": "Preempted",
        "ckpt.service.publisher": "publish",
        "ckpt.service.retention": "KeepAll KeepBest KeepEvery KeepLatest KeepYounger",
        "ckpt.state.rng": "rng_state",
        "ckpt.state.types": "PerGroup PerRank Stages",
        "ckpt.tools.overview": "history",
        "ckpt.tools.plan": "plan_load",
        "storage.schemes": "register_store",
    }.items()
    for name in names.split()
}

# What is needed less often: `ckpt.errors.RankFailed`, `ckpt.state_dict.model_state_dict`.
_PARTS = ("errors", "integrations", "operate", "reports", "state_dict")

__all__ = sorted(_HOMES)


# Type checkers, which know all names by the imports above, are to report any other.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return import_module(f"ckpt.{name}")
        home = _HOMES.get(name)
        if home is None:
            words = sorted(name.split("_"))
            close = [one for one in _HOMES if sorted(one.split("_")) == words]
            close = close or import_module("difflib").get_close_matches(name, _HOMES, n=1)
            hint = f"; did you mean ckpt.{close[0]}?" if close else ""
            raise AttributeError(f"module 'ckpt' has no attribute {name!r}{hint}")
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

# A training has torch by now: its first save then takes no longer than the next. Tools have not,
# and import what they use.
if "torch" in sys.modules:
    import_module("ckpt.api")
    import_module("numpy.ma")  # np.unique would, in the first load

# Set by `ckpt rehearse`, in the processes that it starts.
if "CKPT_REHEARSAL" in os.environ:
    import_module("ckpt.rehearse.hooks").install(os.environ["CKPT_REHEARSAL"])


def __dir__() -> list[str]:
    # What is imported here is no name of ours, and the modules below are found by their own names.
    return sorted([*(name for name in globals() if name.startswith("__")), *_HOMES, *_PARTS])
