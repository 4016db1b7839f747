"""One error for all ranks: how failures travel and which one is raised everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

from ckpt import errors
from ckpt.errors import CheckpointError, RankFailed

_SHARED_CLASSES: dict[str, Callable[[Any], CheckpointError]] = {
    cls.__name__: cls
    for cls in (
        errors.InvalidState,
        errors.InvalidArgument,
        errors.Mismatch,
        errors.NoCheckpoint,
        errors.Corrupt,
        errors.UnsupportedFormat,
        errors.StoreRefused,
        errors.LogDiverged,
        errors.Forked,
        errors.Fenced,
        errors.OutcomeUnknown,
        errors.LoadInterrupted,
        errors.SaveDropped,
        errors.NamesChanged,
    )
}
_AGAIN = errors.NamesChanged.__name__
_FIRST = errors.Mismatch.__name__


def encode_error(error: BaseException | None) -> bytes:
    """An error as other ranks need it; no bytes when there is none."""
    if error is None:
        return b""
    # As JSON, not as a pickle: an error of a library may not be picklable, and here it must travel.
    body: dict[str, Any] = {"class": type(error).__name__, "message": str(error)}
    if isinstance(error, errors.InvalidState | errors.Mismatch):
        body["problems"] = list(error.problems)
    if isinstance(error, errors.Mismatch):
        body["where"] = error.where
    if isinstance(error, RankFailed):
        body["failed"] = [error.rank, error.phase]
    # A subclass that only one module knows travels as the shared class it is a kind of.
    body["shared"] = next(
        (c.__name__ for c in type(error).__mro__ if c.__name__ in _SHARED_CLASSES), ""
    )
    return json.dumps(body).encode("utf-8", "backslashreplace")


def encode_failures(answers: Sequence[bytes]) -> bytes:
    """What rank 0 answers to all when it has heard all: nothing when there is no error."""
    failed = [[rank, json.loads(answer)] for rank, answer in enumerate(answers) if answer]
    return json.dumps(failed).encode() if failed else b""


def error_of_failures(phase: str, failures: bytes, size: int) -> CheckpointError | None:
    """The one error that all `size` ranks raise, from what rank 0 sent to them."""
    if not failures:
        return None
    failed = {rank: body for rank, body in json.loads(failures)}
    # Ranks that would only have begun again must not hide why another one cannot.
    failed = {r: b for r, b in failed.items() if b["shared"] != _AGAIN} or failed
    shared = {body["shared"] for body in failed.values()}
    # A state that does not fit would not load anyway, whatever else is wrong.
    if "" not in shared and _FIRST in shared:
        failed = {r: b for r, b in failed.items() if b["shared"] == _FIRST}
        shared = {_FIRST}
    cls = _SHARED_CLASSES.get(shared.pop()) if len(shared) == 1 else None
    if cls is None:
        return _rank_failed(phase, failed)
    if "problems" in next(iter(failed.values())):
        pairs = [(problem, rank) for rank, body in failed.items() for problem in body["problems"]]
        problems = _by_text(pairs, size)
        where = next((body["where"] for body in failed.values() if body.get("where")), "")
        return errors.Mismatch(problems, where) if cls is errors.Mismatch else cls(problems)
    return cls("; ".join(_by_text([(b["message"], r) for r, b in failed.items()], size)))


def _rank_failed(phase: str, failed: dict[int, Any], shown_max: int = 8) -> RankFailed:
    first_rank, first = next(iter(failed.items()))
    # All saw the same rank die: that is one failure, and it was not theirs.
    if "failed" in first and all(body.get("failed") == first["failed"] for body in failed.values()):
        return RankFailed(first["message"], rank=first["failed"][0], phase=first["failed"][1])
    texts = [
        f"rank {rank} failed in phase {phase!r}: {body['class']}: {body['message']}"
        for rank, body in list(failed.items())[:shown_max]
    ]
    if len(failed) > shown_max:
        texts.append(f"and {len(failed) - shown_max} more ranks")
    return RankFailed("; ".join(texts), rank=first_rank, phase=phase)


def _by_text(pairs: Sequence[tuple[str, int]], size: int) -> list[str]:
    """Each text once, with the ranks that have it, in order of the first."""
    ranks: dict[str, list[int]] = {}
    for text, rank in pairs:
        if rank not in ranks.setdefault(text, []):
            ranks[text].append(rank)
    return [
        text if len(on) == size else f"{ranks_in_words(on)}: {text}" for text, on in ranks.items()
    ]


def ranks_in_words(ranks: Collection[int], shown_max: int = 8) -> str:
    """Some ranks for a message: "rank 3", "ranks 0 to 3", "ranks 0, 2 and 5 more"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and all(b == a + 1 for a, b in pairwise(ordered)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    more = len(ordered) - shown_max
    shown = ", ".join(map(str, ordered[:shown_max]))
    return f"ranks {shown}" + (f" and {more} more" if more > 0 else "")
