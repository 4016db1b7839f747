"""Load the newest checkpoint that is whole, and report which ones were not.

Damage of one checkpoint is no reason to stop a training that can go on from the one before. A store
that does not answer is a reason: going back would lose work that is still there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, cast

from ckpt.commit.lines import of_step, resumable
from ckpt.commit.locate import file_keys, locate
from ckpt.commit.log import Log, read_format
from ckpt.commit.records import LiveEntry
from ckpt.errors import (
    CheckpointError,
    Corrupt,
    InvalidState,
    LoadInterrupted,
    Mismatch,
    NoCheckpoint,
    RankFailed,
)
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.load import BYTES_AWAY, LoadReport
from ckpt.near.recovery import NearCandidate
from ckpt.near.status import TierStatus
from ckpt.service.target import Target
from ckpt.short import ShortRecord
from ckpt.state.types import Loaded, Stacks
from ckpt.telemetry.recorder import PhaseSpan
from ckpt.world.base import World, collectively
from storage import CorruptObjectError, KeyNotFoundError, StorageError, Store

logger = logging.getLogger(__name__)

TRIES_MAX = 2  # of one checkpoint when nothing says that it is damaged
LOOKS_MAX = 8  # at what there is: a job that saves on may retire faster than this one loads

Condition = Literal["damaged", "retired", "unknown"]
Origin = Literal["durable", "near"]
Source = Literal["own host", "other hosts", "durable"]


class Skipped(NamedTuple):
    """A newer checkpoint that was not restored, and why."""

    step: int
    attempt: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class RestoreReport(ShortRecord):
    """What was restored, and what was passed over on the way to it, newest first.

    `nbytes_read` and `spans` are those of the load on this rank. `origin` says whether it came from
    the durable root, or from near tiers; then `nbytes_of_other_hosts` were read at other ranks.

    `reached_step` is the last step that the training before had done, as far as a host with a near
    tier has noted it (about once a second), and `seconds_lost` is the time from this checkpoint to
    then. None where no host says so.
    """

    step: int
    attempt: str
    loaded: Loaded
    skipped: tuple[Skipped, ...]
    nbytes_read: int = 0
    spans: tuple[PhaseSpan, ...] = field(default=(), compare=False)
    origin: Origin = "durable"
    nbytes_of_other_hosts: int = 0
    reached_step: int | None = None
    seconds_lost: float | None = None

    @property
    def steps_lost(self) -> int:
        """The steps between this checkpoint and the newest one that was passed over: work that is
        done again. Steps after the newest checkpoint are in none, so they are not counted; see
        `reached_step`.
        """
        return max([self.step, *(one.step for one in self.skipped)]) - self.step

    @property
    def nbytes_by_source(self) -> Mapping[Source, int]:
        """`nbytes_read`, by where this rank read them."""
        others = self.nbytes_of_other_hosts
        if self.origin == "durable":
            return {"own host": 0, "other hosts": 0, "durable": self.nbytes_read}
        return {"own host": self.nbytes_read - others, "other hosts": others, "durable": 0}


class NearSource(Protocol):
    """Where near checkpoints come from; `ckpt.service.near_stack.NearStack` is one."""

    @property
    def reached(self) -> TierStatus | None:
        """How far the training of that epoch had come, where a host has noted it."""

    def candidates(self, root: str, epoch: int) -> Sequence[NearCandidate]:
        """Those of an epoch of a root, newest first; sets `reached`. Collective."""

    def load(self, candidate: NearCandidate, stacks: Stacks) -> LoadReport:
        """Fill the state from one; `stacks` are those of `ckpt.load`. Collective."""


class _Restorable(NamedTuple):
    """A checkpoint that may be restored. `slot` is that of its commit, -1 of a near one;
    `saved_unix` is when that or its record was written, None where a listing does not say so.
    """

    step: int
    attempt: str
    slot: int
    saved_unix: float | None
    near: NearCandidate | None = None


def restore_latest(
    state: Any,
    target: Target,
    world: World,
    *,
    step: int | None = None,
    attempt: str = "",
    near: NearSource | None = None,
    stacks: Stacks | None = None,
    metadata_bytes_max: int | None = None,
) -> RestoreReport | None:
    """Fill `state` from the newest checkpoint, or the newest of `step`, that can be loaded whole,
    or from `attempt`. Without either, only what `ckpt.commit.lines.resumable` gives is tried, and
    what `near` has. `stacks` and `metadata_bytes_max` are those of `ckpt.load`.

    Collective; all ranks take the same one. None when nothing was ever saved there and none
    was requested: the state is as it was. Raises NoCheckpoint when none can be loaded, with what is
    wrong with each; Mismatch and UnsupportedFormat with the state as it was;
    LoadInterrupted or RankFailed when the store or a rank fails.
    """
    store = target.store()
    is_latest = step is None and not attempt
    candidates = _candidates(store, world, step, attempt, near if is_latest else None)
    is_empty, looks = not candidates, 1
    skipped: list[Skipped] = []
    any_durable = False
    # Targets from before know nothing of them.
    options = {"stacks": stacks, "metadata_bytes_max": metadata_bytes_max}
    options = {name: value for name, value in options.items() if value is not None}
    while candidates:
        candidate = candidates.pop(0)
        any_durable = any_durable or candidate.near is None
        if candidate.near is None:
            result = _try(state, target, world, candidate, options)
        else:
            assert near is not None, "near ones come from there"
            result = _try_near(near, world, candidate.near, stacks or {})
        if isinstance(result, LoadReport):
            # Going back by step or attempt begins a new line; this continues the one it is of.
            if candidate.near is not None:
                head = candidate.near.record.head
                target.resumed(head.anchor, on_purpose=head.is_new_line)
            elif is_latest:
                target.resumed(result.attempt)
            reached = near.reached if near is not None and is_latest else None
            return _report(candidate, result, skipped, reached)
        skipped.append(Skipped(candidate.step, candidate.attempt, result))
        if world.rank == 0:
            logger.warning("step %d (%s) is passed over: %s", *skipped[-1])
        if candidate.near is None and looks < LOOKS_MAX:
            # It may have been retired, for one that was not there at the look before.
            looks += 1
            again = _candidates(store, world, step, attempt, near if is_latest else None)
            tried = {one.attempt for one in skipped}
            candidates = [one for one in again if one.attempt not in tried]
    if is_empty and is_latest:
        return None
    reasons = [f"\n  - step {one.step} ({one.attempt}): {one.reason}" for one in skipped]
    requested = "checkpoint" if step is None else f"checkpoint of step {step}"
    requested += f" {attempt}" if attempt else ""
    next_move = "\nTry `ckpt verify` and `ckpt salvage`" if reasons else ""
    if reasons and not any_durable:
        next_move = (
            "\nThere is no durable checkpoint yet. Start the job on the hosts that it had; if they "
            "are lost, remove the near directory from all hosts, and it begins anew"
        )
    raise NoCheckpoint(
        f"{store.url} has no {requested} that can be loaded whole{''.join(reasons)}{next_move}"
    )


def _report(
    candidate: _Restorable,
    result: LoadReport,
    skipped: Sequence[Skipped],
    reached: TierStatus | None,
) -> RestoreReport:
    lost = None
    if reached is not None and candidate.saved_unix is not None:
        lost = reached.since(candidate.step, candidate.saved_unix).seconds
    return RestoreReport(
        result.step,
        result.attempt,
        result.loaded,
        tuple(skipped),
        result.nbytes_read,
        result.spans,
        "durable" if candidate.near is None else "near",
        int(result.counters.get(BYTES_AWAY, 0)),
        None if reached is None else max(reached.step, result.step),
        lost,
    )


def _try(
    state: Any, target: Target, world: World, candidate: _Restorable, options: Mapping[str, Any]
) -> LoadReport | str:
    """The report of a load, or why this checkpoint has to be passed over."""
    # Trying again is cheap where a store has failed for a moment; going back loses work.
    for left in reversed(range(TRIES_MAX)):
        try:
            step, attempt = candidate.step, candidate.attempt
            return target.load(state, step=step, attempt=attempt, **options)
        except (Corrupt, NoCheckpoint) as error:
            return str(error)
        except (LoadInterrupted, RankFailed, StorageError) as error:
            if isinstance(error.__cause__, Corrupt):
                return str(error.__cause__)
            condition = condition_of(target.store(), world, candidate.attempt)
            if condition != "unknown":
                return f"{condition}: {error.__cause__ or error}"
            if not left:
                raise
            if world.rank == 0:
                logger.warning("loading step %d once more after: %s", candidate.step, error)
    raise AssertionError("the last try returns or raises")


def _try_near(
    near: NearSource, world: World, candidate: NearCandidate, stacks: Stacks
) -> LoadReport | str:
    """The report of a load, or why this near checkpoint has to be passed over."""
    if candidate.problem:
        return candidate.problem
    try:
        return near.load(candidate, stacks)
    except (InvalidState, Mismatch):
        raise  # the state is another one, as it is to older checkpoints
    except CheckpointError as error:
        # A host that cannot read its tier is as good as one that has none: there are others.
        if world.failure is not None:
            raise
        return str(error.__cause__ or error) if isinstance(error, LoadInterrupted) else str(error)


def _candidates(
    store: Store, world: World, step: int | None, attempt: str, near: NearSource | None
) -> list[_Restorable]:
    """What could be restored, newest first. The coordinator lists them for all ranks."""

    def listed() -> bytes:
        if world.rank != 0:
            return b""
        return json.dumps(_newest_first(store, step, attempt)).encode()

    mine = collectively(world, "look for checkpoints", listed)
    listing = json.loads(world.broadcast("candidates", mine if world.rank == 0 else None))
    root, epoch, entries = _Listing(*listing)
    durable = [_Restorable(*entry) for entry in entries]
    if near is None or not root:
        return durable
    return _merged(near.candidates(root, epoch), durable)


def _merged(near: Sequence[NearCandidate], durable: Sequence[_Restorable]) -> list[_Restorable]:
    """Both kinds in one order, newest first; each is in that order already.

    A near checkpoint comes before what was committed before its training began, or went back, and
    before later commits of no higher step.
    """
    left = list(durable)
    order: list[_Restorable] = []
    for candidate in near:
        head = candidate.record.head
        while left and head.is_before(left[0].slot, left[0].step):
            order.append(left.pop(0))
        order.append(_Restorable(head.step, head.attempt, -1, head.time_unix, candidate))
    return [*order, *left]


class _Listing(NamedTuple):
    """The durable checkpoints of a root, "" for none, at its newest epoch: step, attempt, slot,
    time of the commit.
    """

    root: str
    epoch: int
    entries: list[tuple[int, str, int, float]]


def _newest_first(store: Store, step: int | None, attempt: str) -> _Listing:
    try:
        root = read_format(store).root
    except NoCheckpoint:
        # A new run finds nothing at all; anything else there means that the url is wrong, or that
        # another job has made the root since.
        if step is None and not attempt and next(iter(store.list("")), None) is None:
            return _Listing("", 0, [])
        root = read_format(store).root
    log = Log(store).state()
    is_latest = step is None and not attempt
    if is_latest and (text := log.uncommitted_text(store.url)):
        logger.warning(text)
    entries = resumable(log.live) if is_latest else of_step(log.live, step)
    rows = [
        (e.step, e.attempt, e.slot, e.committed_unix) for e in entries if attempt in ("", e.attempt)
    ]
    return _Listing(root, log.epoch, rows)


def condition_of(store: Store, world: World, attempt: str) -> Condition:
    """Whether this checkpoint itself is why a load failed. Collective: the coordinator examines its
    files.
    """
    mine = examine(store, attempt).encode() if world.rank == 0 else None
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
    except (Corrupt, CorruptObjectError):
        return "damaged"
    except CheckpointError:
        return "unknown"


def _has_all_files(store: Store, entry: LiveEntry) -> bool:
    located = locate(store, entry.step, attempt=entry.attempt)
    manifest = decode_manifest(located.data, ruled=True)
    sizes = manifest.file_nbytes.tolist()
    try:
        return all(
            store.info(key).nbytes == nbytes
            for key, nbytes in zip(file_keys(located.prefix, manifest), sizes, strict=True)
        )
    except KeyNotFoundError:
        return False
