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
    from ckpt.api import load as load
    from ckpt.api import save as save
    from ckpt.exporting import ExportReport as ExportReport
    from ckpt.exporting import Selection as Selection
    from ckpt.exporting import export as export
    from ckpt.loading import LoadReport as LoadReport
    from ckpt.reader import Checkpoint as Checkpoint
    from ckpt.reader import StepInfo as StepInfo
    from ckpt.reader import list_steps as list_steps
    from ckpt.reader import open_checkpoint as open  # noqa: F401  # another name than there
    from ckpt.saving import SaveReport as SaveReport
    from ckpt.state_dict import PerRank as PerRank
    from ckpt.state_dict import rng_state as rng_state
    from ckpt.verifying import VerifyReport as VerifyReport
    from ckpt.verifying import verify as verify

_HOMES = {
    "Checkpoint": "ckpt.reader",
    "ExportReport": "ckpt.exporting",
    "LoadReport": "ckpt.loading",
    "PerRank": "ckpt.state_dict",
    "SaveReport": "ckpt.saving",
    "Selection": "ckpt.exporting",
    "StepInfo": "ckpt.reader",
    "VerifyReport": "ckpt.verifying",
    "export": "ckpt.exporting",
    "list_steps": "ckpt.reader",
    "load": "ckpt.api",
    "open": "ckpt.reader",
    "rng_state": "ckpt.state_dict",
    "save": "ckpt.api",
    "verify": "ckpt.verifying",
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
