"""Tiers: what a training saves to besides its root, newest first at a restore.

    near=[ckpt.Near("/dev/shm/run", every=ckpt.EverySteps(5)),
          ckpt.Near("/nvme/run", every=ckpt.EverySteps(50))]

The root and the tiers have one protocol at a restore: each offers candidates, which know how they
are loaded. A tier is a value that brings its own saves; `ckpt.Near` is one. Every tier saves by
itself, with a copy of the state of its own. The numbers of their records are those of one row, so
the newest of all tiers is known without a clock.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ckpt.errors import Failure, RankFailed
from ckpt.saving.staging import LentCopy
from ckpt.saving.task import SaveReport
from ckpt.service.policies import Never, SavePolicy
from ckpt.service.restore import Restorable, TierRestorable
from ckpt.service.training import Training
from storage import Store

TIERS_MAX = 8
FAILURES_MAX = 100


class RecordNumbers:
    """The numbers of records of one training, in the order in which their states were taken, also
    where several tiers take turns. By the thread that trains.
    """

    def __init__(self) -> None:
        self._newest = 0

    def begin_after(self, number: int) -> None:
        """Records up to this number are there already."""
        self._newest = max(self._newest, number)

    def take(self) -> int:
        """The next one: on all ranks alike. Never given again, should its record fail."""
        self._newest += 1
        return self._newest


class TierValue(ABC):
    """A tier as the caller of a Checkpointer describes it: the directory `path` of each host."""

    path: str | os.PathLike[str]

    @abstractmethod
    def saves(
        self,
        save: SavePolicy,
        training: Training,
        saving: Mapping[str, Any],
        numbers: RecordNumbers,
    ) -> TierSaves:
        """Its saves of one training. `save` says when durable saves are due that may use copies of
        these, `saving` has the arguments of those.
        """


class TierSaves(ABC):
    """The saves of one training in one tier, on this rank. All ranks call it in the same order.

    `shares_stage`: durable saves are made at steps of these. `reached` is how far the training had
    come that `candidates` found: a time and a step, as far as a host has noted it.
    """

    shares_stage: bool = False
    reached: tuple[float, int] | None = None
    last_report: SaveReport | None = None
    failures: tuple[Failure, ...] = ()

    @abstractmethod
    def stepped(self, *, lends: bool) -> Sequence[LentCopy]:
        """A step is done: begin a save if one is due. Waits for the one before.

        With `lends`, a durable save of this step is about to begin. Returns what it may use instead
        of a copy of its own, which the caller ends; nothing where no save begins here.

        Raises ValueError on all ranks when a host has no room; Fenced and RankFailed.
        """

    @abstractmethod
    def collect(self, *, wait: bool, timeout_seconds: float = math.inf) -> None:
        """Pass on the outcome of the save that was begun, if it is over or when `wait`.

        Raises RankFailed when a rank is gone, TimeoutError.
        """

    @abstractmethod
    def candidates(self, store: Store, root: str, epoch: int) -> Sequence[TierRestorable]:
        """Those of an epoch of the root in `store`, newest first; sets `reached`. Collective."""

    @abstractmethod
    def restored(self, chosen: Restorable, own: TierRestorable | None, number: int) -> None:
        """The training continues from `chosen`. Of this tier only `own` counts from now on, under
        `number` in the row of all tiers; None for nothing. Collective.
        """

    @abstractmethod
    def leave(self, failure: RankFailed) -> None:
        """End without the other ranks: a save under way is given up. May be repeated."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is in flight and end. Not collective."""


def checked_tiers(near: object) -> tuple[TierValue, ...]:
    """The tiers that a caller has passed: none, one or several.

    Raises TypeError for what is no tier, ValueError for two in one directory, or too many.
    """
    tiers = () if near is None else (near,) if isinstance(near, TierValue) else near
    if not isinstance(tiers, list | tuple) or not all(isinstance(one, TierValue) for one in tiers):
        raise TypeError(
            f"near={near!r}; expected ckpt.Near(path, every=ckpt.EverySteps(20)), or a list of such"
        )
    if len(tiers) > TIERS_MAX:
        raise ValueError(f"near= has {len(tiers)} tiers; expected {TIERS_MAX} at most")
    places: dict[str, str] = {}
    for one in tiers:
        path = os.fspath(one.path)
        # By their real paths: a link may lead from one tier into another.
        if (other := places.setdefault(os.path.realpath(path), path)) is not path:
            raise ValueError(
                f"near= has {other!r} and {path!r}, which are one directory: give each tier its own"
            )
    return tuple(tiers)


class Tiers:
    """The saves of one training in all of its tiers, on this rank; there may be none. All ranks
    call its methods in the same order. The methods are those of `TierSaves`.
    """

    def __init__(
        self,
        tiers: Iterable[TierValue],
        save: SavePolicy,
        training: Training,
        saving: Mapping[str, Any],
        before: Tiers | None = None,
    ) -> None:
        self._progress = training.progress
        self._stepped_calls = 0
        self._numbers = RecordNumbers()
        self._tiers: list[TierSaves] = []
        self._offered: list[tuple[TierRestorable, TierSaves]] = []
        for tier in tiers:
            # One of them lends its copies to durable saves: the others need no room for that.
            policy = Never() if self.shares_stage else save
            self._tiers.append(tier.saves(policy, training, saving, self._numbers))
        # The same settings made both rows, so tiers correspond by their place.
        for own, former in zip(self._tiers, before._tiers if before else (), strict=False):
            own.last_report, own.failures = former.last_report, former.failures

    @property
    def shares_stage(self) -> bool:
        """Whether durable saves are made at steps of near saves."""
        return any(tier.shares_stage for tier in self._tiers)

    @property
    def reached(self) -> tuple[float, int] | None:
        """How far the training had come that `candidates` found."""
        return max((tier.reached for tier in self._tiers if tier.reached), default=None)

    @property
    def last_report(self) -> SaveReport | None:
        """The newest near checkpoint of this process."""
        reports = [tier.last_report for tier in self._tiers if tier.last_report is not None]
        return max(reports, key=lambda one: one.step, default=None)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The newest failed near saves, by their steps."""
        failures = [failure for tier in self._tiers for failure in tier.failures]
        return tuple(sorted(failures, key=lambda one: one.step)[-FAILURES_MAX:])

    def stepped(self, *, lends: bool = False) -> Sequence[LentCopy]:
        """A step is done: begin the near saves that are due, once in a call of `step`. Of several,
        the first lends its copy to a durable save.
        """
        copies: Sequence[LentCopy] = ()
        # A durable save that is due calls this first, for its copies; the end of `step` again.
        if self._stepped_calls == self._progress.calls:
            return copies
        self._stepped_calls = self._progress.calls
        try:
            for tier in self._tiers:
                copies = [*copies, *tier.stepped(lends=lends and not copies)]
        except BaseException:
            # A later tier has failed: nobody else ends the copies of those before it.
            for copy in copies:
                copy.end()
            raise
        return copies

    def collect(self, *, wait: bool, timeout_seconds: float = math.inf) -> None:
        """Pass on the outcomes of near saves that are over, or of all when `wait`."""
        # One deadline for all: a timeout for each would add up to several times the grace period.
        until = time.monotonic() + timeout_seconds
        for tier in self._tiers:
            left = math.inf if math.isinf(until) else max(0.0, until - time.monotonic())
            tier.collect(wait=wait, timeout_seconds=left)

    def candidates(self, store: Store, root: str, epoch: int) -> list[TierRestorable]:
        """The near checkpoints of all tiers, newest first. Collective."""
        offered = [(c, tier) for tier in self._tiers for c in tier.candidates(store, root, epoch)]
        offered.sort(key=lambda pair: pair[0].number, reverse=True)
        self._offered = []
        for _, same in groupby(offered, key=lambda pair: pair[0].step):
            # Of one step, the first tier has the one that is read fastest.
            self._offered += sorted(same, key=lambda pair: self._tiers.index(pair[1]))
        return [candidate for candidate, _ in self._offered]

    def restored(self, candidate: Restorable) -> None:
        """The training continues from this one. Other tiers keep their newest state that is older
        than that. Collective.
        """
        if not isinstance(candidate, TierRestorable):
            for tier in self._tiers:
                tier.restored(candidate, None, 0)
            return
        offered = [one for one, _ in self._offered]
        place = offered.index(candidate)
        chosen, older = self._offered[place][1], self._offered[place + 1 :]
        self._numbers.begin_after(max(one.number for one in offered))
        numbers = [self._numbers.take() for _ in self._tiers]  # before that of the newest
        # First: a crash between the two must not leave the older one alone.
        chosen.restored(candidate, candidate, self._numbers.take())
        for tier, number in zip(self._tiers, numbers, strict=True):
            if tier is not chosen:
                whole = (one for one, whose in older if whose is tier and not one.problem)
                tier.restored(candidate, next(whole, None), number)

    def leave(self, failure: RankFailed) -> None:
        """End without the other ranks: saves under way are given up. May be repeated."""
        for tier in self._tiers:
            tier.leave(failure)

    def close(self) -> None:
        """Wait for what is in flight and end. Not collective."""
        for tier in self._tiers:
            tier.close()
