"""What a tensor is to training."""

from __future__ import annotations

import enum


class Kind(enum.IntEnum):
    """What a tensor is to training. The numbers are part of the format."""

    PARAMETER = 0
    OPTIMIZER = 1  # optimizer state of any shape
    BUFFER = 2
    OTHER = 3  # any other tensor in the state

    @classmethod
    def of(cls, number: int) -> Kind:
        """The kind with that number. One that a later version added counts as `OTHER`, so that its
        checkpoints stay readable.
        """
        return cls(number) if number in _KIND_NUMBERS else cls.OTHER


_KIND_NUMBERS = frozenset(int(kind) for kind in Kind)


def is_numbered(fqn: str) -> bool:
    """Whether a tensor is named as in the state dict of an optimizer: `<path>.state.3.exp_avg`."""
    number, _, rest = fqn.rpartition("state.")[2].partition(".")
    return number.isdecimal() and bool(rest) and "." not in rest
