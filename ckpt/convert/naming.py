"""Rules that give tensors other names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from ckpt.errors import InvalidArgument

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str] | Sequence[str]
"""Names to names; a function; or rules `old=new`, one after the other: of a name that is `old` or
starts with `old.` that part becomes `new` (nothing and no dot when `new` is empty, and in front of
all names when `old` is), and `re:pattern=replacement` is a regular expression, applied anywhere in
the name."""


def renamer(rename: Rename | None) -> Callable[[str], str]:
    """`rename` as a function. Raises InvalidArgument for a rule that is none."""
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    if isinstance(rename, Mapping):
        table = dict(rename)
        return lambda name: table.get(name, name)
    if isinstance(rename, str):
        rename = [rename]
    rules = [_rule(rule) for rule in rename]

    def by_rules(name: str) -> str:
        for rule in rules:
            name = rule(name)
        return name

    return by_rules


def _rule(rule: str) -> Callable[[str], str]:
    old, matched, new = rule.rpartition("=") if rule.startswith("re:") else rule.partition("=")
    if not matched:
        raise InvalidArgument(f"rename rule {rule!r}: expected old=new or re:pattern=replacement")
    if old.startswith("re:"):
        try:
            pattern = re.compile(old[3:])
        except re.error as error:
            raise InvalidArgument(f"rename rule {rule!r}: {error}") from error
        return lambda name: pattern.sub(new, name)
    return lambda name: _moved(name, old.strip("."), new.strip("."))


def _moved(name: str, old: str, new: str) -> str:
    if name == old and new:
        return new
    if old and not name.startswith(f"{old}."):
        return name
    rest = name[len(old) + 1 :] if old else name
    return f"{new}.{rest}" if new else rest


def renamed(names: Iterable[str], rename: Rename | None) -> dict[str, str]:
    """Every name with its new one. Raises InvalidArgument when two would be the same."""
    change = renamer(rename)
    result: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in names:
        new = change(name)
        if owner.setdefault(new, name) != name:
            raise InvalidArgument(
                f"rename= gives {name!r} and {owner[new]!r} one name, {new!r}; names must differ"
            )
        result[name] = new
    return result
