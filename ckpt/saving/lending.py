"""One copy of a state for two saves: the one that has made it lends it to another of the same step.

    stage -> copy -> files of a near save, in the tier
                  -> files of a durable save, in its store

Both only read the tensor bytes of the copy, each makes headers and checksums of its own, and the
memory is used again when both are done with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from ckpt.errors import CheckpointError
from ckpt.saving.image import FilePlan, Hold
from ckpt.saving.plan import Contents
from ckpt.saving.replicas import ReplicaSums

COPY_SECONDS_MAX = 600.0  # no rank is waited for meanwhile, only memory is copied: a guess


@dataclass(eq=False)
class LentCopy:
    """The copy of one save, lent to another save of the same state on this rank.

    `files` say where everything lies; `is_one_range`: each file is one range of memory. Whoever is
    given it calls `end`, as often as it likes. `snapshot` is how a copy of one's own would be made.
    """

    contents: Contents
    digests: npt.NDArray[np.uint32]
    replicas: ReplicaSums
    files: tuple[FilePlan, ...]
    hold: Hold
    is_one_range: bool
    snapshot: Literal["step", "now"]
    _buffers: Sequence[memoryview] = ()
    _error: BaseException | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)

    def made(self, buffers: Sequence[memoryview]) -> None:
        """All is copied, into `buffers`: the parts of all files, in order."""
        self._buffers = buffers
        self._is_over.set()

    def failed(self, error: BaseException) -> None:
        """Nothing will be copied any more. Without effect on a copy that was made."""
        if not self._is_over.is_set():
            self._error = error
            self._is_over.set()

    def wait(self) -> None:
        """Returns when all is copied. Raises the error that has prevented that."""
        if not self._is_over.wait(COPY_SECONDS_MAX):
            raise CheckpointError(f"the near save has copied nothing for {COPY_SECONDS_MAX:.0f} s")
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """The borrower needs the copy no more."""
        self._buffers = ()
        self.hold.end()

    def tensor_bytes(self) -> list[list[memoryview]]:
        """The bytes of all chunks of each file, in order. Valid until `end`."""
        runs, first = [], 0
        for file in self.files:
            own = self._buffers[first : first + len(file.parts)]
            first += len(own)
            start, stop = file.data_start, file.data_start + file.entries.nbytes
            cut = []
            for buffer in own:
                low, high = max(start, 0), min(stop, file.part_nbytes)
                if low < high:
                    cut.append(buffer[low:high])
                start, stop = start - file.part_nbytes, stop - file.part_nbytes
            runs.append(cut)
        return runs
