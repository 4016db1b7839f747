"""The near saves of a training: when they are made, what becomes of them, what they restore."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from ckpt.errors import Failure, Fenced, RankFailed
from ckpt.near.placement import Hosts
from ckpt.near.recovery import NearCandidate, near_candidates
from ckpt.near.saving import NearSaves
from ckpt.near.tier import Tier
from ckpt.near.value import Near
from ckpt.saving.background import PendingSave
from ckpt.saving.staging import LentCopy
from ckpt.service.events import NearFailed, NearSaved
from ckpt.service.policies import Observation, SavePolicy, are_multiples
from ckpt.service.restore import Restorable, TierRestorable
from ckpt.service.tiers import FAILURES_MAX, RecordNumbers, TierSaves
from ckpt.service.training import Training, saved_seconds
from storage import Store

logger = logging.getLogger(__name__)


class NearTraining(TierSaves):
    """The near saves of one training on this rank. All ranks call its methods in the same order."""

    def __init__(
        self,
        near: Near,
        save: SavePolicy,
        training: Training,
        saving: Mapping[str, Any],
        numbers: RecordNumbers,
    ) -> None:
        self._near = near
        self._training = training
        self._saving = saving
        self._numbers = numbers
        self.shares_stage = are_multiples(save, near.every)
        self._stepped_seconds = 0.0  # when the last call was over
        self._hosts: Hosts | None = None
        self._saves: NearSaves | None = None
        self._begun: tuple[int, PendingSave, float] | None = None  # its step, when it began
        self._waited_seconds = 0.0  # for the near save before that, with the training stopped
        self._lasting: Exception | None = None
        self._has_restored = False

    # saving

    def stepped(self, *, lends: bool = False) -> Sequence[LentCopy]:
        progress = self._training.progress
        saves = self._opened()
        if self._stepped_seconds:
            saves.stepped(perf_counter() - self._stepped_seconds)
        try:
            self.collect(wait=False)
            saves.notes.stepped(progress.step)
            if not self._near.every.reasons(Observation(progress.step, progress.previous_step)):
                return ()
            # One save at a time: the next would take a third generation.
            waited_since = perf_counter()
            self.collect(wait=True)
            self._waited_seconds = perf_counter() - waited_since
            if self._lasting is not None:
                raise self._lasting
            began_unix = time.time()
            pending, copies = saves.begin(self._training.state, progress.step, lends=lends)
            self._begun = progress.step, pending, began_unix
            return copies
        finally:
            self._stepped_seconds = perf_counter()

    def collect(self, *, wait: bool, timeout_seconds: float = math.inf) -> None:
        if self._begun is None or not (wait or self._begun[1].done()):
            return
        step, pending, began_unix = self._begun
        pending.wait(None if math.isinf(timeout_seconds) else timeout_seconds)
        self._begun = None
        try:
            report = pending.result()
        except Exception as error:
            if (lost := self._training.target.failure()) is not None:
                raise lost from error
            if isinstance(error, Fenced):
                # Raised where all ranks are known to have learned of it: at the next save.
                self._lasting = error
            self._fail(step, error)
            return
        self.last_report = report
        saves = self._opened()
        saves.notes.saved(step, began_unix)
        if wait:  # there may be no step any more that would write it
            saves.notes.stepped(self._training.progress.step)
        blocked = pending.blocked_seconds
        seconds = saved_seconds(report, began_unix, blocked)
        self._training.notify(NearSaved(report, seconds, self._waited_seconds + blocked))

    def _fail(self, step: int, error: Exception) -> None:
        self.failures = (*self.failures, Failure(step, error))[-FAILURES_MAX:]
        logger.warning("the near save of step %d has failed: %s", step, error)
        self._training.notify(NearFailed(step, error))

    # restoring

    def candidates(self, store: Store, root: str, epoch: int) -> Sequence[NearCandidate]:
        status, offered = near_candidates(self._hosts_of(root, lambda: store), epoch, self._near)
        self.reached = None if status is None else (status.time_unix, status.step)
        return offered

    def restored(self, chosen: Restorable, own: TierRestorable | None, number: int) -> None:
        self._has_restored = True
        if self._saves is None and not isinstance(chosen, TierRestorable):
            return  # when it is opened, no state that is there counts
        assert isinstance(own, NearCandidate | None), "it was offered by this tier"
        saves = self._opened("" if own is None else own.attempt)
        saves.restored(chosen, None if own is None else own.record, number)

    # the end

    def leave(self, failure: RankFailed) -> None:
        if self._saves is None:
            return
        self._saves.give_up(failure)
        begun, self._begun = self._begun, None
        if begun is not None and begun[1].done():
            try:
                self.last_report = begun[1].result()
            except Exception as error:
                self._fail(begun[0], error)
        self._saves.close()

    def close(self) -> None:
        if self._saves is not None:
            self._saves.close()

    # opening

    def _opened(self, restored: str = "") -> NearSaves:
        """The saves under the session of the root, opened now if they were not: collective then.
        Of jobs before, only the near attempt `restored` stays.
        """
        if self._saves is None:
            training = self._training
            session = training.target.ranked_session()
            hosts = self._hosts_of(session.root, training.target.store)
            saves = NearSaves(self._near, hosts, session, self._saving, self._numbers)
            try:
                saves.open(
                    training.state,
                    restored,
                    allow_fewer=self._has_restored,
                    shares_stage=self.shares_stage,
                )
            except BaseException:
                saves.close()
                raise
            self._saves = saves
        return self._saves

    def _hosts_of(self, root: str, store: Callable[[], Store]) -> Hosts:
        """The tier of this host for the root in a durable store, and who shares it. Collective."""
        if self._hosts is None or self._hosts.tier.root != root:
            path, durable = self._near.path, store()
            self._hosts = Hosts.of(self._training.world, lambda: Tier(path, root, durable))
        return self._hosts
