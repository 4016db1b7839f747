"""Load the newest checkpoint that is whole, and report which ones were not.

A damaged checkpoint does not stop a training that can continue from the one before. A store that
does not answer does: going back would lose work that is still there.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, cast

from ckpt.commit.locate import ResumePoint, file_keys, locate, of_step, resumable
from ckpt.commit.log import Log, read_format
from ckpt.errors import (
    CheckpointError,
    Corrupt,
    InvalidArgument,
    LoadInterrupted,
    NoCheckpoint,
    RankFailed,
)
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.load import BYTES_AWAY, LoadReport
from ckpt.service.target import Target
from ckpt.short import ShortRecord
from ckpt.state.types import Loaded
from ckpt.telemetry.record import PhaseSpan
from ckpt.world.base import World, from_coordinator
from storage import CorruptObjectError, KeyNotFoundError, StorageError, Store, StoreLike

logger = logging.getLogger(__name__)

TRIES_MAX = 2  # of one checkpoint when nothing says that it is damaged
LOOKS_MAX = 8  # at what there is: a job that saves on may retire faster than this one loads

Condition = Literal["damaged", "retired", "unknown"]
Origin = Literal["durable", "near", "elsewhere"]
Source = Literal["own host", "other hosts", "durable"]


class Skipped(NamedTuple):
    """A newer checkpoint that was not restored, and why."""

    step: int
    attempt: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class RestoreReport(ShortRecord):
    """What was restored, and what was skipped on the way to it, newest first.

    `nbytes_read` and `spans` are those of the load on this rank. `origin` says whether it came from
    the durable root, or from near tiers; then `nbytes_of_other_hosts` were read at other ranks; or
    from `from_`.

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
        """The steps between this checkpoint and the newest one that was skipped: work that is
        done again. Steps after the newest checkpoint are in none, so they are not counted; see
        `reached_step`.
        """
        return max([self.step, *(one.step for one in self.skipped)]) - self.step

    @property
    def nbytes_by_source(self) -> Mapping[Source, int]:
        """`nbytes_read`, by where this rank read them."""
        others = self.nbytes_of_other_hosts
        if self.origin != "near":
            return {"own host": 0, "other hosts": 0, "durable": self.nbytes_read}
        return {"own host": self.nbytes_read - others, "other hosts": others, "durable": 0}


@dataclass(frozen=True)
class Restorable(ABC):
    """A checkpoint that may be restored. `saved_unix` is when its commit or record was written; a
    training that restores it continues `resumes`.
    """

    step: int
    attempt: str
    saved_unix: float
    resumes: ResumePoint

    @abstractmethod
    def load(self, state: Any, options: Mapping[str, Any]) -> LoadReport | str:
        """Fill `state`: the report, or why this checkpoint has to be skipped. Collective;
        `options` are arguments of `ckpt.load`.
        """


@dataclass(frozen=True)
class TierRestorable(Restorable):
    """One of a tier: `number` is its place in the row of all tiers; `problem` says why it cannot
    be loaded, "" when it can.
    """

    number: int
    problem: str

    @abstractmethod
    def is_before(self, slot: int, step: int) -> bool:
        """Whether a durable checkpoint of this step, committed in this slot, is the newer one."""


class Elsewhere(Protocol):
    """What has newer checkpoints than the root; `ckpt.service.tiers.Tiers` is one.

    `reached` is how far the training had come that `candidates` found: a time and a step.
    """

    @property
    def reached(self) -> tuple[float, int] | None: ...

    def candidates(self, store: Store, root: str, epoch: int) -> Sequence[TierRestorable]:
        """Those of an epoch of the root in `store`, newest first; sets `reached`. Collective."""

    def restored(self, candidate: Restorable) -> None:
        """The training continues from this one, which may be one of the root. Collective."""


@dataclass(frozen=True)
class _Durable(Restorable):
    """A checkpoint of the root, committed in `slot`."""

    slot: int
    target: Target
    world: World

    def load(self, state: Any, options: Mapping[str, Any]) -> LoadReport | str:
        # Trying again is cheap where a store has failed for a moment; going back loses work.
        for left in reversed(range(TRIES_MAX)):
            try:
                return self.target.load(state, step=self.step, attempt=self.attempt, **options)
            except (Corrupt, NoCheckpoint) as error:
                return str(error)
            except (LoadInterrupted, RankFailed, StorageError) as error:
                # The state is half filled, and the next candidate overwrites all of it.
                if isinstance(error.__cause__, Corrupt):
                    return str(error.__cause__)
                condition = condition_of(self.target.store(), self.world, self.attempt)
                if condition != "unknown":
                    return f"{condition}: {error.__cause__ or error}"
                if not left:
                    raise
                if self.world.rank == 0:
                    logger.warning("loading step %d once more after: %s", self.step, error)
        raise AssertionError("the last try returns or raises")


def restore_latest(
    state: Any,
    target: Target,
    world: World,
    *,
    step: int | None = None,
    attempt: str = "",
    tiers: Elsewhere | None = None,
    from_: StoreLike | None = None,
    from_options: Mapping[str, Any] | None = None,
    **how: Any,
) -> RestoreReport | None:
    """Fill `state` from the newest checkpoint, or the newest of `step`, that can be loaded whole,
    or from `attempt`. Without either, only what `ckpt.commit.locate.resumable` gives is tried, and
    what `tiers` have; they learn what was restored. `how` are more arguments of `ckpt.load`.

    Collective; all ranks take the same one. When nothing was ever saved there and none was
    requested, `from_` fills the state; without it the answer is None. Raises NoCheckpoint when none
    can be loaded, with what is wrong with each; Mismatch and UnsupportedFormat with the state as it
    was; LoadInterrupted or RankFailed when the store or a rank fails.
    """
    is_latest = step is None and not attempt
    if from_ is not None and not is_latest:
        raise InvalidArgument("from_= is where a training begins: leave out step= and attempt=")

    def look() -> list[Restorable]:
        return _candidates(target, world, step, attempt, tiers if is_latest else None)

    candidates, looks = look(), 1
    if not candidates and is_latest:
        if from_ is None:
            return None
        return _report("elsewhere", target.load_from(state, from_, from_options or {}))
    skipped: list[Skipped] = []
    any_durable = False
    # A target of the caller's own may know nothing of them.
    options = {name: value for name, value in how.items() if value is not None}
    while candidates:
        candidate = candidates.pop(0)
        is_durable = isinstance(candidate, _Durable)
        # A failure without any durable checkpoint has another next move; see below.
        any_durable = any_durable or is_durable
        result = candidate.load(state, options)
        if isinstance(result, LoadReport):
            if is_latest:  # going back by step or attempt begins a new line
                resumes = candidate.resumes
                target.resumed(resumes.attempt, on_purpose=resumes.on_purpose)
            if tiers is not None:
                tiers.restored(candidate)
            report = _report("durable" if is_durable else "near", result, skipped)
            if tiers is None or not is_latest or tiers.reached is None:
                return report
            until, reached = tiers.reached
            lost = max(until - candidate.saved_unix, 0.0)
            return replace(report, reached_step=max(reached, result.step), seconds_lost=lost)
        skipped.append(Skipped(candidate.step, candidate.attempt, result))
        if world.rank == 0:
            logger.warning("step %d (%s) is skipped: %s", *skipped[-1])
        if is_durable and looks < LOOKS_MAX:
            # It may have been retired, for one that was not there at the look before.
            looks += 1
            tried = {one.attempt for one in skipped}
            candidates = [one for one in look() if one.attempt not in tried]
    reasons = [f"\n  - step {one.step} ({one.attempt}): {one.reason}" for one in skipped]
    requested = "checkpoint" if step is None else f"checkpoint of step {step}"
    requested += f" {attempt}" if attempt else ""
    next_move = "\nTry `ckpt verify` and `ckpt salvage`" if reasons else ""
    if reasons and not any_durable:
        next_move = (
            "\nThere is no durable checkpoint yet. Start the job on the hosts that it had; if they "
            "are lost, remove the near directory from all hosts, and it begins anew"
        )
    why = f"that can be loaded whole{''.join(reasons)}{next_move}"
    raise NoCheckpoint(f"{target.store().url} has no {requested} {why}")


def _report(origin: Origin, one: LoadReport, skipped: Sequence[Skipped] = ()) -> RestoreReport:
    return RestoreReport(
        one.step,
        one.attempt,
        one.loaded,
        tuple(skipped),
        nbytes_read=one.nbytes_read,
        spans=one.spans,
        origin=origin,
        nbytes_of_other_hosts=int(one.counters.get(BYTES_AWAY, 0)),
    )


def _candidates(
    target: Target, world: World, step: int | None, attempt: str, tiers: Elsewhere | None
) -> list[Restorable]:
    """What could be restored, newest first. The coordinator lists durable ones for all ranks.

    One of a tier comes before what was committed before its training began, or went back, and
    before later commits of no higher step.
    """
    store = target.store()

    def listed() -> bytes:
        return json.dumps(_newest_first(store, step, attempt)).encode()

    root, epoch, rows = json.loads(from_coordinator(world, "look for checkpoints", listed))
    left = [
        _Durable(step, attempt, saved_unix, ResumePoint(attempt, False), slot, target, world)
        for step, attempt, slot, saved_unix in rows
    ]
    order: list[Restorable] = []
    for candidate in tiers.candidates(store, root, epoch) if tiers is not None and root else ():
        while left and candidate.is_before(left[0].slot, left[0].step):
            order.append(left.pop(0))
        order.append(candidate)
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
        root = read_format(store)
    except NoCheckpoint:
        # A new run finds nothing at all; anything else there means that the url is wrong, or that
        # another job has made the root since.
        if step is None and not attempt and next(iter(store.list("")), None) is None:
            return _Listing("", 0, [])
        root = read_format(store)
    log = Log(store).state()
    is_latest = step is None and not attempt
    if is_latest and (text := log.uncommitted_text(store.url)):
        logger.warning(text)
    entries = resumable(log.live) if is_latest else of_step(log.live, step)
    entries = [entry for entry in entries if attempt in ("", entry.attempt)]
    rows = [(e.step, e.attempt, e.slot, e.committed_unix) for e in entries]
    return _Listing(root, log.epoch, rows)


def condition_of(store: Store, world: World, attempt: str) -> Condition:
    """Whether this checkpoint itself is why a load failed: is it live, are all its files there in
    full length? "unknown" when nothing is wrong with it, or when the store does not answer.

    Collective: the coordinator looks.
    """
    mine = _condition(store, attempt).encode() if world.rank == 0 else None
    return cast(Condition, world.broadcast("condition", mine).decode())


def _condition(store: Store, attempt: str) -> Condition:
    try:
        if (entry := Log(store).state().find(attempt)) is None:
            return "retired"
        located = locate(store, entry.step, attempt=attempt)
        manifest = decode_manifest(located.data, ruled=True)
        # By lengths alone: all ranks wait for this, and a try that follows compares every byte.
        sizes = zip(file_keys(located.prefix, manifest), manifest.file_nbytes.tolist(), strict=True)
        try:
            are_whole = all(store.info(key).nbytes == nbytes for key, nbytes in sizes)
        except KeyNotFoundError:
            are_whole = False
        return "unknown" if are_whole else "damaged"
    except (Corrupt, CorruptObjectError):
        return "damaged"
    except CheckpointError:
        return "unknown"
