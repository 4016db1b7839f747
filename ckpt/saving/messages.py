"""Two messages as one."""

from __future__ import annotations


def joined(first: bytes, second: bytes) -> bytes:
    """Two messages as one; see `split`."""
    return len(first).to_bytes(8, "little") + first + second


def split(data: bytes) -> tuple[bytes, bytes]:
    """The two messages that were joined."""
    size = int.from_bytes(data[:8], "little")
    return data[8 : 8 + size], data[8 + size :]
