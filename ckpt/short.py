"""Records that people look at: short as a text, a table in a notebook."""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from typing import Any

ITEMS_SHOWN = 3  # in a text
ROWS_SHOWN = 20  # in a table
TEXT_SHOWN = 80


class ShortRecord:
    """The base of what functions return. Made for dataclasses with `repr=False`."""

    __slots__ = ()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={_short(value)}" for name, value in _fields(self))
        return f"{type(self).__name__}({fields})"

    def _repr_html_(self) -> str:
        """For Jupyter, which looks for this name."""
        rows = "".join(
            f"<tr><th>{name}</th><td>{_cell(value)}</td></tr>" for name, value in _fields(self)
        )
        return f"<b>{type(self).__name__}</b><table>{rows}</table>"


def _fields(record: Any) -> list[tuple[str, Any]]:
    names: Any = getattr(type(record), "__dataclass_fields__", getattr(record, "_fields", ()))
    return [(name, getattr(record, name)) for name in names]


def _short(value: Any) -> str:
    is_long = isinstance(value, Collection) and not isinstance(value, str | bytes)
    if is_long and (len(value) > ITEMS_SHOWN or any(map(_fields, value))):
        return f"<{len(value)} items>"
    text = repr(value)
    return text if len(text) <= TEXT_SHOWN else f"{text[: TEXT_SHOWN - 3]}..."


def _cell(value: Any) -> str:
    """A table of a list of records, and a text of anything else. Names may hold anything."""
    rows = list(value)[:ROWS_SHOWN] if isinstance(value, list | tuple) else []
    if rows and all(map(_fields, rows)):
        heads = "".join(f"<th>{name}</th>" for name, _ in _fields(rows[0]))
        body = "".join(
            "<tr>" + "".join(f"<td>{_text(one)}</td>" for _, one in _fields(row)) + "</tr>"
            for row in rows
        )
        more = len(value) - len(rows)
        rest = f"<tr><td>and {more} more</td></tr>" if more else ""
        return f"<table><tr>{heads}</tr>{body}{rest}</table>"
    return _text(value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else _short(value)
    return escape(text if text.isprintable() else ascii(text))
