"""Errors of the checkpoint layer, grouped by what a handler can do next.

All are CheckpointErrors, `storage.StorageError`s included: failures of a store itself. On one rank
of several these arrive on every rank as a `RankFailed` that names the rank and carries the text of
the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from storage.errors import CheckpointError as CheckpointError


class InvalidState(CheckpointError):
    """The state cannot be saved, or loaded into, as it is; every problem is listed with its fqn."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        problems = [problems] if isinstance(problems, str) else problems
        super().__init__(_listed("the state cannot be used as it is", problems))
        self.problems = tuple(problems)


class Mismatch(CheckpointError):
    """State and checkpoint do not fit; every problem is listed, nothing was changed.

    `where` names the checkpoint, its step and its path; "" for a state dict in memory.
    """

    def __init__(self, problems: str | Sequence[str], where: str = "") -> None:
        problems = [problems] if isinstance(problems, str) else problems
        named = f"the checkpoint {where}".rstrip()
        super().__init__(_listed(f"{named} does not fit the state", problems))
        self.problems = tuple(problems)
        self.where = where


class InvalidArgument(CheckpointError, ValueError):
    """An argument that can never be right, alone or with the others; nothing was looked at."""


class NoCheckpoint(CheckpointError):
    """There is no checkpoint where one was looked for: empty root, unknown step, or no root."""


class Corrupt(CheckpointError):
    """Bytes differ from what was written; the message names the object and the block or field."""


class UnsupportedFormat(CheckpointError):
    """Written by a newer version, or needs a feature that this version does not have."""


class StoreRefused(CheckpointError):
    """The store cannot commit safely (it overwrites where it should refuse), or ranks see different
    roots.
    """


class LogDiverged(StoreRefused):
    """The log in the store is not the one that this process has built on: it was removed, rolled
    back, restored from a backup or replaced by a copy. Nothing is acknowledged.
    """


class Fenced(CheckpointError):
    """A newer session has claimed this root. This process must not write here again; nothing was
    lost.
    """


class OutcomeUnknown(CheckpointError):
    """The commit was sent and no answer came. The next save settles it; nothing is deleted."""


class Forked(CheckpointError):
    """This process was forked from one that saves, whose saves and Checkpointers cannot be used
    here.
    """


class SaveDropped(CheckpointError):
    """This save was not made, because another one was in flight and `when_busy` says so.

    Not a failure: the checkpoints before it are untouched.
    """


class NamesChanged(CheckpointError):
    """A rank holds things of other names than the other ranks know. No caller meets this."""


class RankFailed(CheckpointError):
    """A rank failed or died; raised on every rank with the same text."""

    def __init__(self, message: str, *, rank: int, phase: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase


class RankFailedInCommit(RankFailed, OutcomeUnknown):
    """A rank was lost while the ranks were being informed of a commit, and this rank has not
    learned whether it was made. Others may know. These ranks can save nothing more.
    """


class LoadInterrupted(CheckpointError):
    """A load failed after it had begun to write into the target, which is now a mixture.

    Stepping or saving the target raises this again until a load into it succeeds.
    """


class Failure(NamedTuple):
    """A save that failed."""

    step: int
    error: Exception


class SavesFailed(CheckpointError):
    """So many saves in a row have failed that somebody should look before training continues."""

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        lines = "".join(f"\n  - step {one.step}: {one.error}" for one in failures[-5:])
        super().__init__(f"{len(failures)} saves in a row have failed; the newest ones:{lines}")
        self.failures = failures


def _listed(summary: str, problems: Sequence[str], shown_max: int = 20) -> str:
    lines = [f"{summary} ({len(problems)} problem{'s' if len(problems) != 1 else ''}):"]
    lines += [f"  - {problem}" for problem in problems[:shown_max]]
    if len(problems) > shown_max:
        lines.append(f"  ... and {len(problems) - shown_max} more (all in .problems)")
    return "\n".join(lines)
