"""Reductions in low precision as communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharding.reduction import CommHook

__all__ = ["hook_of"]


def hook_of(state: object, hook: Callable[..., Any]) -> CommHook:
    """A user's hook as the engine calls it; torch's own compression hooks cast by themselves."""
    casts = getattr(hook, "__name__", "") in ("fp16_compress_hook", "bf16_compress_hook")
    return CommHook(state, hook, casts)
