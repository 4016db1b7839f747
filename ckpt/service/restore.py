"""Load the newest checkpoint that is whole, and report which ones were not.

Damage of one checkpoint is no reason to stop a training that can go on from the one before. A store
that does not answer is a reason: going back would lose work that is still there.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from ckpt.commit.lines import of_step, resumable
from ckpt.commit.locate import file_keys, locate
from ckpt.commit.log import Log, read_format
from ckpt.commit.records import LiveEntry
from ckpt.errors import CheckpointError, Corrupt, LoadInterrupted, NoCheckpoint, RankFailed
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.load import LoadReport
from ckpt.service.target import Target
from ckpt.state.types import Loaded
from ckpt.telemetry.recorder import PhaseSpan
from ckpt.world.base import World, collectively
from storage import KeyNotFoundError, StorageError, Store

logger = logging.getLogger(__name__)

TRIES_MAX = 2  # of one checkpoint when nothing says that it is damaged

Condition = Literal["damaged", "retired", "unknown"]


class Skipped(NamedTuple):
    """A newer checkpoint that was not restored, and why."""

    step: int
    attempt: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What was restored, and what was passed over on the way to it, newest first.

    `nbytes_read` and `spans` are those of the load on this rank.
    """

    step: int
    attempt: str
    loaded: Loaded
    skipped: tuple[Skipped, ...]
    nbytes_read: int = 0
    spans: tuple[PhaseSpan, ...] = field(default=(), compare=False)


class _Restorable(NamedTuple):
    """A checkpoint that may be restored."""

    step: int
    attempt: str


def restore_latest(
    state: Any, target: Target, world: World, *, step: int | None = None, attempt: str = ""
) -> RestoreReport | None:
    """Fill `state` from the newest checkpoint, or the newest of `step`, that can be loaded whole,
    or from `attempt`. Without either, only what `ckpt.commit.lines.resumable` gives is tried.

    Collective; all ranks take the same one. None when nothing was ever saved there and none
    was requested: the state is as it was. Raises NoCheckpoint when none can be loaded, with what is
    wrong with each; Mismatch and UnsupportedFormat with the state as it was;
    LoadInterrupted or RankFailed when the store or a rank fails.
    """
    store = target.store()
    candidates = _candidates(store, world, step, attempt)
    skipped: list[Skipped] = []
    for candidate in candidates:
        result = _try(state, target, world, candidate)
        if isinstance(result, LoadReport):
            # Going back by step or attempt begins a new line; this continues the one it is of.
            if step is None and not attempt:
                target.resumed(result.attempt)
            return RestoreReport(
                result.step,
                result.attempt,
                result.loaded,
                tuple(skipped),
                result.nbytes_read,
                result.spans,
            )
        skipped.append(Skipped(*candidate, result))
        if world.rank == 0:
            logger.warning("step %d (%s) is passed over: %s", *candidate, result)
    if not candidates and step is None and not attempt:
        return None
    reasons = [f"\n  - step {one.step} ({one.attempt}): {one.reason}" for one in skipped]
    requested = "checkpoint" if step is None else f"checkpoint of step {step}"
    requested += f" {attempt}" if attempt else ""
    raise NoCheckpoint(
        f"{store.url} has no {requested} that can be loaded whole{''.join(reasons)}"
        + ("\nTry `ckpt verify` and `ckpt salvage`" if reasons else "")
    )


def _try(state: Any, target: Target, world: World, candidate: _Restorable) -> LoadReport | str:
    """The report of a load, or why this checkpoint has to be passed over."""
    # Trying again is cheap where a store has failed for a moment; going back loses work.
    for left in reversed(range(TRIES_MAX)):
        try:
            return target.load(state, step=candidate.step, attempt=candidate.attempt)
        except (Corrupt, NoCheckpoint) as error:
            return str(error)
        except (LoadInterrupted, RankFailed, StorageError) as error:
            if isinstance(error.__cause__, Corrupt):
                return str(error.__cause__)
            condition = _condition(target.store(), world, candidate)
            if condition != "unknown":
                return f"{condition}: {error.__cause__ or error}"
            if not left:
                raise
            if world.rank == 0:
                logger.warning("loading step %d once more after: %s", candidate.step, error)
    raise AssertionError("the last try returns or raises")


def _candidates(store: Store, world: World, step: int | None, attempt: str) -> list[_Restorable]:
    """What could be restored, newest first. The coordinator lists them for all ranks."""

    def listed() -> bytes:
        if world.rank != 0:
            return b""
        return json.dumps([entry[:2] for entry in _newest_first(store, step, attempt)]).encode()

    mine = collectively(world, "look for checkpoints", listed)
    pairs = json.loads(world.broadcast("candidates", mine if world.rank == 0 else None))
    return [_Restorable(*pair) for pair in pairs]


def _newest_first(store: Store, step: int | None, attempt: str) -> list[_Restorable]:
    try:
        read_format(store)
    except NoCheckpoint:
        # A new run finds nothing at all; anything else there means that the url is wrong.
        if step is None and not attempt and next(iter(store.list("")), None) is None:
            return []
        raise
    live = Log(store).state().live
    entries = resumable(live) if step is None and not attempt else of_step(live, step)
    return [_Restorable(e.step, e.attempt) for e in entries if attempt in ("", e.attempt)]


def _condition(store: Store, world: World, candidate: _Restorable) -> Condition:
    """Whether this checkpoint itself is why a load failed. The coordinator examines its files."""
    mine = examine(store, candidate.attempt).encode() if world.rank == 0 else None
    return cast(Condition, world.broadcast("condition", mine).decode())


def examine(store: Store, attempt: str) -> Condition:
    """A cheap examination of a checkpoint: is it live, are all its files there in full length?

    "unknown" when nothing is wrong with it, or when the store does not answer.
    """
    try:
        entry = Log(store).state().find(attempt)
        if entry is None:
            return "retired"
        return "unknown" if _has_all_files(store, entry) else "damaged"
    except Corrupt:
        return "damaged"
    except (CheckpointError, StorageError):
        return "unknown"


def _has_all_files(store: Store, entry: LiveEntry) -> bool:
    located = locate(store, entry.step, attempt=entry.attempt)
    manifest = decode_manifest(located.data)
    sizes = manifest.file_nbytes.tolist()
    try:
        return all(
            store.info(key).nbytes == nbytes
            for key, nbytes in zip(file_keys(located.prefix, manifest), sizes, strict=True)
        )
    except KeyNotFoundError:
        return False
