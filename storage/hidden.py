"""Options of stores whose secrets no repr shows: tools that report errors show the variables of
every frame, and debuggers show attributes.

Only copies are hidden. The caller's own mapping and frames stay as they are.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, cast

from storage.encoding.encryption_keys import out_of_sight
from storage.store import redacted

F = TypeVar("F", bound=Callable[..., Any])

_SECRETS = re.compile(
    r"key|secret|token|pass|cred|sas|sign|auth|header|cookie|connection_string", re.IGNORECASE
)
_SALT = os.urandom(16)


class HiddenText(str):
    """A string whose repr shows only whether it is equal to another one in this process."""

    __slots__ = ()

    def __repr__(self) -> str:
        # Salted anew in each process: a plain hash of a short secret could be guessed.
        digest = hmac.digest(_SALT, self.encode("utf-8", "backslashreplace"), hashlib.sha256)
        return f"<hidden {digest.hex()[:16]}>"


def without_secrets(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """`options`, which open the same store; no repr of them shows a key or a credential, which
    the names of options reveal.
    """
    if not hasattr(options or {}, "items"):
        kind = type(options).__name__  # the value may be a secret
        raise TypeError(f"storage_options is a {kind}; expected a mapping of names to values")
    return {name: _hidden(name, value) for name, value in (options or {}).items()}


def hides_secrets(function: F) -> F:
    """`function` with its `*options` hidden, so that its frames, those below and what it keeps show
    no secret.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        args, named = hidden_arguments(function, args, named)
        return function(*args, **named)

    return cast(F, call)


def hidden_arguments(
    function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `function` is to be called with: the same arguments, its `*options` hidden.

    Raises TypeError for an argument that it does not have, with the nearest names.
    """
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    unknown = not code.co_flags & inspect.CO_VARKEYWORDS and set(named).difference(known)
    if unknown:
        name, called = min(unknown), function.__qualname__.removesuffix(".__init__")
        if near := get_close_matches(name, known, 1):
            move = f"did you mean {near[0]}?"
        elif "storage_options" in known:
            move = f"an option of the store goes into storage_options={{{name!r}: ...}}"
        else:
            move = f"help(ckpt.{called}) lists them"
        raise TypeError(f"{called}() has no argument {name!r}; {move}")

    def seen(name: str, value: Any) -> Any:
        is_options = "options" in name and isinstance(value, Mapping)
        return without_secrets(value) if is_options else value

    pairs = zip(function.__code__.co_varnames, args, strict=False)
    return tuple(seen(*pair) for pair in pairs), {n: seen(n, value) for n, value in named.items()}


def _hidden(name: str, value: Any, *, is_secret: bool = False) -> Any:
    """`value`, that of the option `name`, with what in it is a secret, or all of it, hidden."""
    is_secret = is_secret or _SECRETS.search(name) is not None
    if name == "encryption_key" and isinstance(value, bytes | bytearray):
        return out_of_sight(value)
    if isinstance(value, str):
        is_hidden = isinstance(value, HiddenText) or not (is_secret or redacted(value) != value)
        return value if is_hidden else HiddenText(value)
    if isinstance(value, dict):
        return {key: _hidden(str(key), one, is_secret=is_secret) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_hidden("", one, is_secret=is_secret) for one in value)
    return value
