"""Several near tiers of one training as one: each with its own period, newest first at a restore.

    near=[ckpt.Near("/dev/shm/run", every=ckpt.EverySteps(5)),
          ckpt.Near("/nvme/run", every=ckpt.EverySteps(50))]

Every tier saves by itself, with a copy of the state of its own. The numbers of their records are
those of one row, so the newest of all tiers is known without a clock.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ckpt.errors import Failure, RankFailed
from ckpt.loading.load import LoadReport
from ckpt.near.recovery import NearCandidate
from ckpt.near.saving import RecordNumbers
from ckpt.near.status import TierStatus
from ckpt.saving.staging import LentCopy
from ckpt.saving.task import SaveReport
from ckpt.service.near import FAILURES_MAX, Near, NearTraining
from ckpt.service.policies import Never, SavePolicy
from ckpt.service.training import Training
from ckpt.state.types import Stacks

TIERS_MAX = 8


def near_tiers(near: object) -> tuple[Near, ...]:
    """The tiers that a caller has passed: none, one or several.

    Raises TypeError for what is no tier, ValueError for two in one directory, or too many.
    """
    tiers = () if near is None else (near,) if isinstance(near, Near) else near
    if not isinstance(tiers, list | tuple) or not all(isinstance(one, Near) for one in tiers):
        raise TypeError(
            f"near={near!r}; expected ckpt.Near(path, every=ckpt.EverySteps(20)), or a list of such"
        )
    if len(tiers) > TIERS_MAX:
        raise ValueError(f"near= has {len(tiers)} tiers; expected {TIERS_MAX} at most")
    places: dict[str, str] = {}
    for one in tiers:
        path = os.fspath(one.path)
        if (other := places.setdefault(os.path.realpath(path), path)) is not path:
            raise ValueError(
                f"near= has {other!r} and {path!r}, which are one directory: give each tier its own"
            )
    return tuple(tiers)


class NearStack:
    """The near saves of one training in all of its tiers, on this rank. All ranks call its methods
    in the same order. The methods are those of `NearTraining`.
    """

    def __init__(
        self,
        tiers: Sequence[Near],
        save: SavePolicy,
        training: Training,
        saving: Mapping[str, Any],
    ) -> None:
        self._numbers = RecordNumbers()
        self._tiers: list[NearTraining] = []
        self._offered: list[tuple[NearCandidate, NearTraining]] = []
        self._loaded = ""  # the attempt
        for near in tiers:
            # One of them lends its copies to durable saves: the others need no room for that.
            policy = Never() if self.shares_stage else save
            self._tiers.append(NearTraining(near, policy, training, saving, self._numbers))

    @property
    def shares_stage(self) -> bool:
        """Whether durable saves are made at steps of near saves."""
        return any(tier.shares_stage for tier in self._tiers)

    @property
    def reached(self) -> TierStatus | None:
        """How far the training had come that `candidates` found."""
        known = [tier.reached for tier in self._tiers if tier.reached is not None]
        return max(known, key=lambda one: one.order, default=None)

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
        """A step is done: begin the near saves that are due. Of several, the first lends its copy
        to a durable save.
        """
        copies: Sequence[LentCopy] = ()
        try:
            for tier in self._tiers:
                copies = [*copies, *tier.stepped(lends=lends and not copies)]
        except BaseException:
            for copy in copies:
                copy.end()
            raise
        return copies

    def collect(self, *, wait: bool, timeout_seconds: float = math.inf) -> None:
        """Pass on the outcomes of near saves that are over, or of all when `wait`."""
        until = time.monotonic() + timeout_seconds
        for tier in self._tiers:
            left = math.inf if math.isinf(until) else max(0.0, until - time.monotonic())
            tier.collect(wait=wait, timeout_seconds=left)

    def candidates(self, root: str, epoch: int) -> list[NearCandidate]:
        """The near checkpoints of all tiers, newest first. Collective."""
        offered = [(one, tier) for tier in self._tiers for one in tier.candidates(root, epoch)]
        offered.sort(key=lambda pair: pair[0].record.order, reverse=True)
        self._offered = []
        for _, same in groupby(offered, key=lambda pair: pair[0].record.head.step):
            # Of one step, the first tier has the one that is read fastest.
            self._offered += sorted(same, key=lambda pair: self._tiers.index(pair[1]))
        return [candidate for candidate, _ in self._offered]

    def load(self, candidate: NearCandidate, stacks: Stacks) -> LoadReport:
        """Fill the state from one of them. Collective."""
        self._loaded = candidate.record.head.attempt
        return self._tiers[self._index_of(self._loaded)].load(candidate, stacks)

    def restored(self, *, is_near: bool) -> None:
        """The training continues from what was restored. Other tiers keep their newest state that
        is older than that. Collective.
        """
        if not is_near:
            for tier in self._tiers:
                tier.restored(is_near=False)
            return
        attempts = [candidate.record.head.attempt for candidate, _ in self._offered]
        older = self._offered[attempts.index(self._loaded) + 1 :]
        chosen = self._tiers[self._index_of(self._loaded)]
        self._numbers.begin_after(max(one.record.head.number for one, _ in self._offered))
        numbers = [self._numbers.take() for _ in self._tiers]  # before that of the newest
        # First: a crash between the two must not leave the older one alone.
        chosen.restored(is_near=True)
        for tier, number in zip(self._tiers, numbers, strict=True):
            if tier is not chosen:
                whole = (one for one, whose in older if whose is tier and not one.problem)
                kept = next(whole, None)
                tier.restored_beside(None if kept is None else kept.record, number)

    def _index_of(self, attempt: str) -> int:
        whose = next(t for one, t in self._offered if one.record.head.attempt == attempt)
        return self._tiers.index(whose)

    def carry_on(self, before: NearStack) -> None:
        """These follow on those of a world before."""
        for tier, former in zip(self._tiers, before._tiers, strict=True):
            tier.carry_on(former)

    def leave(self, failure: RankFailed) -> None:
        """End without the other ranks: saves under way are given up. May be repeated."""
        for tier in self._tiers:
            tier.leave(failure)

    def close(self) -> None:
        """Wait for what is in flight and end. Not collective."""
        for tier in self._tiers:
            tier.close()
