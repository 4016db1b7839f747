"""Connections of strangers are few, and those of one address fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

_T = TypeVar("_T")


def to_end(strangers: Mapping[_T, str], address: str, most: int, most_of_one: int) -> _T | None:
    """Which of `strangers` to end before one more comes from `address`; None while there is room.

    They are connections, in the order in which they came, with their addresses. Of an address that
    has `most_of_one` it is the oldest; where there are `most` of all addresses, it is the oldest of
    the address that has the most. So a flood ends its own, and nobody waits for its end.
    """
    counts = Counter(strangers.values())
    if counts[address] < most_of_one:
        if len(strangers) < most:
            return None
        address = counts.most_common(1)[0][0]
    return next(one for one, whose in strangers.items() if whose == address)
