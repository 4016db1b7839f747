"""STATUS: how far a training has come, in the tier of each host, for observers outside the job.

60 bytes, overwritten in place about once a second, without a sync: the checksum shows a torn read.
No checkpoint depends on them. FORMAT.md, "Near tiers".
"""

from __future__ import annotations

import logging
import math
import os
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.commit.records import INTEGER_MAX, STEP_MAX
from ckpt.errors import CheckpointError, Corrupt, UnsupportedFormat
from ckpt.format.checksum import crc32c

logger = logging.getLogger(__name__)

STATUS_NAME = "STATUS"
STATUS_MAGIC = b"SHPTSTAT"
STATUS_VERSION = 1
STATUS_SECONDS = 1.0  # between two writes
_FIELDS = struct.Struct("<8sQQQqdd")  # magic, version, epoch, step, near step, time, near time
STATUS_NBYTES = _FIELDS.size + 4
_READS = 5  # of a status that does not match its checksum: a write may be under way
_UNIX_MAX = 1e11  # later ones are no dates


class WorkAtRisk(NamedTuple):
    """What would be done again after a failure: the steps since a checkpoint, and their time."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierStatus:
    """How far the training of `epoch` has come: `step` was done, and it trained on at `time_unix`.

    `near_step` is its newest near checkpoint, whose state is that of `near_unix`; -1 and 0.0
    stand for none.
    """

    epoch: int
    step: int
    time_unix: float
    near_step: int = -1
    near_unix: float = 0.0

    @property
    def order(self) -> tuple[int, float]:
        """Of the statuses of several hosts, the highest one is the newest."""
        return self.epoch, self.time_unix

    def since(self, step: int, time_unix: float) -> WorkAtRisk:
        """The work since a checkpoint of `step`, whose state is that of `time_unix`."""
        return WorkAtRisk(max(self.step - step, 0), max(self.time_unix - time_unix, 0.0))


def encode_status(status: TierStatus) -> bytes:
    """The bytes of STATUS. Raises ValueError for a status that makes no sense."""
    if problem := _problem(status):
        raise ValueError(f"status: {problem}")
    steps, times = (status.step, status.near_step), (status.time_unix, status.near_unix)
    data = _FIELDS.pack(STATUS_MAGIC, STATUS_VERSION, status.epoch, *steps, *times)
    return data + struct.pack("<I", crc32c(data))


def decode_status(data: bytes, where: str) -> TierStatus:
    """The inverse of `encode_status`, for bytes of anybody.

    Raises Corrupt, or UnsupportedFormat for those of a newer version, both with `where` they lie.
    """
    if len(data) != STATUS_NBYTES or not data.startswith(STATUS_MAGIC):
        raise Corrupt(f"{where}: {len(data)} bytes are no status of a near tier")
    if struct.pack("<I", crc32c(data[:-4])) != data[-4:]:
        raise Corrupt(f"{where}: the status does not match its checksum")
    _, version, epoch, step, near_step, time_unix, near_unix = _FIELDS.unpack(data[:-4])
    if version != STATUS_VERSION:
        raise UnsupportedFormat(f"{where}: a status of version {version}; upgrade shardpoint")
    status = TierStatus(epoch, step, time_unix, near_step, near_unix)
    if problem := _problem(status):
        raise Corrupt(f"{where}: {problem}")
    return status


def read_status(folder: str) -> TierStatus | None:
    """The status in the directory of a tier, None where there is none.

    Raises Corrupt, UnsupportedFormat, OSError. Reads a few bytes of a regular file and of nothing
    else, so that nothing that lies there can make it wait.
    """
    path = os.path.join(folder, STATUS_NAME)
    for left in reversed(range(_READS)):
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            _check_regular(file, path)
            return decode_status(os.pread(file, STATUS_NBYTES + 1, 0), path)
        except Corrupt:
            if not left:
                raise
        finally:
            os.close(file)
    raise AssertionError("the last read returns or raises")


def write_status(folder: str, status: TierStatus) -> None:
    """Put `status` into the directory of a tier, unless one of a later epoch is there.

    Raises Corrupt for anything but a regular file in its place, OSError.
    """
    path, data = os.path.join(folder, STATUS_NAME), encode_status(status)
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, 0o666)
    try:
        _check_regular(file, path)
        try:
            # A fenced process must not hide how far its successor has come.
            if decode_status(os.pread(file, STATUS_NBYTES + 1, 0), path).epoch > status.epoch:
                return
        except CheckpointError:
            os.ftruncate(file, 0)  # nothing is there, or nothing that anybody can read
        os.pwrite(file, data, 0)
    finally:
        os.close(file)


def _check_regular(file: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise Corrupt(f"{path} is not a file: remove it")


def _problem(status: TierStatus) -> str:
    """What is wrong with a status, "" when it makes sense."""
    if not 1 <= status.epoch <= INTEGER_MAX:
        return f"epoch {status.epoch} is out of range"
    if not 0 <= status.step <= STEP_MAX or not -1 <= status.near_step <= STEP_MAX:
        return f"step {status.step} or near step {status.near_step} is out of range"
    for unix in (status.time_unix, status.near_unix):
        if not (math.isfinite(unix) and 0 <= unix <= _UNIX_MAX):
            return f"{unix} is no time"
    return ""


class StatusNotes:
    """Writes the status of one tier, at most about once a second, or at once where it matters.

    Nothing depends on it: a failure is logged once and not raised. Without a `folder` it does
    nothing: the first rank of a host writes for all.
    """

    def __init__(
        self, folder: str, epoch: int, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._epoch = epoch
        self._monotonic = monotonic
        self._newest: tuple[int, float] = (-1, 0.0)
        self._written_seconds = -math.inf
        self._has_failed = False

    def saved(self, step: int, time_unix: float) -> None:
        """There is a near checkpoint of `step`, with the state of that time; -1 and 0.0: none."""
        self._newest = (step, time_unix)
        self._written_seconds = -math.inf

    def stepped(self, step: int) -> None:
        """The training has done `step`."""
        now = self._monotonic()
        if not self._folder or now - self._written_seconds < STATUS_SECONDS:
            return
        self._written_seconds = now
        try:
            write_status(self._folder, TierStatus(self._epoch, step, time.time(), *self._newest))
        except (CheckpointError, OSError, ValueError) as error:
            if not self._has_failed:
                logger.warning("how far the training is cannot be noted: %s", error)
            self._has_failed = True
