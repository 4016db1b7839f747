"""Distributed checkpoints for PyTorch: sharded, checked, committed in one write, loaded on any layout.

    import ckpt

    state = {"model": model, "optim": optimizer, "step": step}
    ckpt.save(state, "s3://bucket/run", step=step)
    ckpt.load(state, "s3://bucket/run")

Names are imported at their first use, so that tools which only look at a checkpoint start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.api import load as load
    from ckpt.api import save as save
    from ckpt.loading import LoadReport as LoadReport
    from ckpt.saving import SaveReport as SaveReport
    from ckpt.state_dict import PerRank as PerRank
    from ckpt.state_dict import rng_state as rng_state

_HOMES = {
    "LoadReport": "ckpt.loading",
    "PerRank": "ckpt.state_dict",
    "SaveReport": "ckpt.saving",
    "load": "ckpt.api",
    "rng_state": "ckpt.state_dict",
    "save": "ckpt.api",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
