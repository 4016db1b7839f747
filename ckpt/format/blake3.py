"""The strong digest of chunks: BLAKE3, 32 bytes. The only user of the package of that name."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from blake3 import blake3

DIGEST_NBYTES = 32
Digests = npt.NDArray[np.uint8]  # one row of DIGEST_NBYTES per chunk


def digest_of(parts: Iterable[memoryview | bytes]) -> bytes:
    """The BLAKE3 digest, 32 bytes, of the parts one after the other.

    One thread, which leaves the other cores to the training. Releases the GIL for large parts.
    """
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def digests_from(data: bytes | memoryview) -> Digests:
    """Digests one after the other as rows, a view of `data`. Its length is a multiple of 32."""
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, DIGEST_NBYTES)


def no_digests() -> Digests:
    """The column of a checkpoint without digests: no rows."""
    return digests_from(b"")
