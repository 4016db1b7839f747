"""Failures of a world that all ranks raise with one text: as values and as bytes."""

from __future__ import annotations

import json
from typing import NamedTuple

from ckpt.errors import RankFailed


class Gone(NamedTuple):
    """A rank that sends nothing more. Its payloads up to round `until` are on their way.

    `is_above` says that it lies between this rank and rank 0: no answer will come.
    """

    rank: int
    how: str
    until: int
    is_above: bool


def over(gone: Gone, name: str) -> RankFailed:
    """A round that waits for a rank that is gone."""
    return RankFailed(f"rank {gone.rank} {gone.how} in phase {name!r}", rank=gone.rank, phase=name)


def other_path(theirs: int, their_name: str, ours: int, name: str) -> RankFailed:
    """Two ranks are in different rounds."""
    return RankFailed(
        f"rank {theirs} is in phase {their_name!r} while rank {ours} is in {name!r}: all "
        "ranks must make the same calls in the same order",
        rank=theirs,
        phase=name,
    )


def encode_failure(failure: RankFailed) -> str:
    """A failure as text for the rendezvous store and for messages."""
    return json.dumps([str(failure), failure.rank, failure.phase])


def decode_failure(data: bytes) -> RankFailed:
    """The inverse of `encode_failure`."""
    message, rank, phase = json.loads(data)
    return RankFailed(message, rank=rank, phase=phase)


def copied(failure: RankFailed) -> RankFailed:
    """The same failure once more: each raise needs a traceback of its own."""
    return RankFailed(str(failure), rank=failure.rank, phase=failure.phase)
