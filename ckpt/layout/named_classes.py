"""Classes of other libraries, by names that stay the same whatever module a class moves to.

A library is imported only where something of it is loaded, and only from the places in a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module


def name_in(table: Mapping[str, str], kind: type) -> str | None:
    """What `table`, of names and the modules that have them, calls a class; None if it has not."""
    library = kind.__module__.partition(".")[0]
    name = f"{library}.{kind.__name__}"
    if name not in table:
        return None
    # Its own library has it by then; another class of the same name is another type.
    return name if class_at(table[name], name) is kind else None


@cache
def class_at(module: str, name: str) -> type | None:
    """The class `name`, which begins with its library; None when that is not installed."""
    try:
        kind = getattr(import_module(module), name.partition(".")[2], None)
    except ImportError:
        return None
    return kind if isinstance(kind, type) else None
