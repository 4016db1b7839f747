"""Steps and counts as callers pass them: `int`, or what numpy and torch have in its place."""

from __future__ import annotations

import math
import operator
from datetime import timedelta
from typing import Any


def plain_int(value: Any) -> Any:
    """`value` as an int where it stands for one, else as it is: for the check that refuses it.

    A record of the log, a header and `type(...) is int` take nothing else than an int. Bools are
    left alone, because a count that is True is a mistake.
    """
    if type(value) is int or isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def checked_count(value: Any, shown: str) -> int:
    """`value` as an int of at least 1. Raises ValueError, which begins with `shown`."""
    number = plain_int(value)
    if type(number) is not int or number < 1:
        raise ValueError(f"{shown}: expected an int of at least 1")
    return number


def checked_period(value: Any, shown: str) -> int | timedelta:
    """A period as a count of saves, or as a time. Raises ValueError, which begins with `shown`."""
    if isinstance(value, timedelta) and value > timedelta(0):
        return value
    try:
        return checked_count(value, shown)
    except ValueError as error:
        raise ValueError(f"{error}, or a timedelta above 0") from None


def plain_float(value: Any) -> Any:
    """`value` as a float where it stands for one, else as it is: for the check that refuses it.

    A tensor may change later, so its value is taken now.
    """
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        return value


def is_finite(value: Any) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)
