"""Which names are chosen, and rules that give them other ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any, TypeAlias

from ckpt.errors import CheckpointError, InvalidArgument

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
    return lambda name: reduce(lambda changed, rule: rule(changed), rules, name)


def is_chosen(name: str, chosen: Any) -> bool:
    """Whether `chosen.include` (all names where it is empty) without `chosen.exclude` has a name.

    Both are patterns of the shell, or regular expressions that begin with `re:`. Raises
    InvalidArgument for one that is none.
    """
    if any(_matches(name, pattern) for pattern in chosen.exclude):
        return False
    return not chosen.include or any(_matches(name, pattern) for pattern in chosen.include)


def _matches(name: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatchcase(name, pattern)
    try:
        return re.search(pattern[3:], name) is not None
    except re.error as error:
        raise InvalidArgument(f"pattern {pattern!r}: {error}") from error


def _rule(rule: str) -> Callable[[str], str]:
    # An expression may have `=` in it, as in `(?=...)`: there the last one counts.
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
    # Without `new` nothing would be left of such a name: it stays as it is.
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


# Presets: names that other libraries' own files have, for exports that these libraries load ------

# peft looks for a file of this name, next to its adapter_config.json.
PEFT_FILE = "adapter_model.safetensors"
_PEFT_FILES = (PEFT_FILE, "adapter_model.bin")
# PeftModel holds the adapter's module as `base_model`, and that one the model as `model`.
_PEFT_PREFIX = "base_model.model."
# Beginnings of what layers call the parts of an adapter; the next part of the name is the adapter.
_PEFT_PARTS = ("lora_", "ia3_", "trainable_tokens_")
_PEFT_COPIES = "modules_to_save"


def _adapter_of(preset: str) -> str:
    """The adapter that a preset names, or "". Raises InvalidArgument for what is no preset."""
    library, _, adapter = preset.partition(":")
    if library != "peft":
        raise InvalidArgument(f"preset={preset!r}: there is only 'peft', or 'peft:<adapter>'")
    return adapter


def preset_names(preset: str, names: Iterable[str]) -> dict[str, str]:
    """Those of `names` that go into the file, with their names there: for peft one adapter, under
    the names that `PeftModel.from_pretrained` looks for. Raises CheckpointError when there is no
    adapter, or one has to be chosen.
    """
    wanted = _adapter_of(preset)
    by_adapter: dict[str, dict[str, str]] = {}
    for name in names:
        if (known := _peft_name(name)) is not None:
            by_adapter.setdefault(known[0], {})[name] = known[1]
    adapters = sorted(by_adapter)
    if not adapters:
        raise CheckpointError(
            f"preset={preset!r}: none of the tensors belongs to a peft adapter, such as a "
            "...lora_A.default.weight; pass entry= for the model that has one"
        )
    if wanted and wanted not in by_adapter:
        raise CheckpointError(f"preset={preset!r}: the adapters are {', '.join(adapters)}")
    if not wanted and len(adapters) > 1:
        raise CheckpointError(
            f"preset={preset!r}: there are the adapters {', '.join(adapters)}, and a file has one; "
            f"say which, as in preset='peft:{adapters[0]}'"
        )
    return by_adapter[wanted or adapters[0]]


def check_file_name(preset: str, name: str) -> None:
    """Raise CheckpointError for a file that the preset's library would not find."""
    _adapter_of(preset)
    if name not in _PEFT_FILES:
        raise CheckpointError(
            f"{name!r}: peft loads a folder with {' or '.join(_PEFT_FILES)} in it; name the target "
            f".../{PEFT_FILE}"
        )


def _peft_name(name: str) -> tuple[str, str] | None:
    """The adapter that a tensor belongs to, and its name in peft's files; None for others."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part == _PEFT_COPIES:
            # A whole copy of a module: in files neither the word nor the adapter is in its name.
            kept = [*parts[:index], *parts[index + 2 :]]
        elif part.startswith(_PEFT_PARTS):
            kept = [*parts[: index + 1], *parts[index + 2 :]]
            if part == "lora_magnitude_vector" and kept[-1] == "weight":
                kept.pop()  # a parameter in files, a module of its own in models
        else:
            continue
        new = ".".join(kept)
        return parts[index + 1], new if new.startswith(_PEFT_PREFIX) else _PEFT_PREFIX + new
    return None
