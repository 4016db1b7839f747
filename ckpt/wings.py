"""Wings: rooms that the core calls by name and never imports, so that it works without them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


@cache
def wing(name: str) -> Any:
    """A module of a wing, such as "stacks.rules"; loaded when it is first needed."""
    return import_module(f"ckpt.{name}")
