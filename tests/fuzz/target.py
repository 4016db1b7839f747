"""What one target of fuzzing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckpt.errors import CheckpointError

Refusals = tuple[type[BaseException], ...]


class Target(NamedTuple):
    """One reader. `samples` are valid inputs, before `seal`."""

    name: str
    read: Callable[[bytes], None]
    samples: Callable[[], list[bytes]]
    seal: Callable[[bytes], bytes] = bytes
    refusals: Refusals = (CheckpointError,)

    def try_(self, data: bytes) -> bool:
        """Whether the reader takes `data`. Raises what is no refusal."""
        try:
            self.read(self.seal(data))
        except self.refusals:
            return False
        return True
