"""Near tiers of a training: when near saves are made, what becomes of them, and what they restore.

`Near` is the value that a caller passes; `NearTraining` is that value applied to one training.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple, SupportsIndex

from ckpt.commit.numbers import plain_int
from ckpt.errors import Failure, Fenced, RankFailed
from ckpt.layout.memory import gc_paused
from ckpt.loading.load import LoadReport
from ckpt.near.peers import CopyOptions
from ckpt.near.placement import Hosts
from ckpt.near.records import NearRecord
from ckpt.near.recovery import NearCandidate, load_near, near_candidates, newest_status
from ckpt.near.saving import NearOptions, NearSaves, RecordNumbers, open_near_saves
from ckpt.near.status import StatusNotes, TierStatus
from ckpt.near.tier import Tier
from ckpt.saving.background import PendingSave
from ckpt.saving.staging import LentCopy, Snapshot
from ckpt.saving.task import SaveReport
from ckpt.service.events import NearFailed, NearSaved
from ckpt.service.policies import EverySteps, Observation, SavePolicy, are_multiples
from ckpt.service.training import Training
from ckpt.state.types import Stacks
from ckpt.world.base import collectively

logger = logging.getLogger(__name__)

FAILURES_MAX = 100
REPLICAS_MAX = 8
EVERY_DEFAULT: SavePolicy = EverySteps(20)


@dataclass(frozen=True, slots=True)
class Near:
    """Newer checkpoints, on the hosts themselves: in memory, or on a local disk.

    `path` is a directory of each host, such as one in /dev/shm, which outlives the process and not
    the host; ranks of a host share it, and so may several jobs. `every` says how often, by the step
    alone. A host keeps two states of its ranks there, which must fit: into `bytes_max` as well.

    A Checkpointer takes one of these, or a list of tiers, each with its own period: such as memory
    every 5 steps and a disk every 50.

    Copies of them lie on `replicas` other hosts, two states each, so that as many hosts may be
    lost at once; a near checkpoint counts when all copies are whole. That takes `replicas + 1`
    hosts; a training that goes on with fewer makes as many copies as it can. With `rack`, a name
    that hosts of one rack have in common, copies go to different racks.

    Each host serves its directory to the others, at `address` or at the address that the job uses,
    to those who have a token that only its ranks know. With `certificate`, the path of a PEM file
    with a key and its certificate, the same on all hosts, what is sent is encrypted.

    Where the root is encrypted, so are the files in `path` and their copies, with the root's key.
    """

    path: str | os.PathLike[str]
    every: SavePolicy = EVERY_DEFAULT
    bytes_max: SupportsIndex | None = None
    replicas: SupportsIndex = 0
    rack: str = ""
    address: str = ""
    certificate: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise TypeError(f"Near({self.path!r}): expected the path of a directory")
        if not isinstance(self.every, SavePolicy) or self.every.needs_clock:
            raise ValueError(
                f"Near(every={self.every!r}): expected a policy by the step alone, such as "
                "ckpt.EverySteps(20): near saves are too frequent for ranks to agree on each"
            )
        replicas = plain_int(self.replicas)
        if type(replicas) is not int or not 0 <= replicas <= REPLICAS_MAX:
            raise ValueError(
                f"Near(replicas={self.replicas!r}): expected the number of other hosts that keep "
                f"copies, 0 to {REPLICAS_MAX}"
            )
        for name in ("rack", "address"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"Near({name}={value!r}): expected a string")
        if not isinstance(self.certificate, str | os.PathLike):
            raise TypeError(f"Near(certificate={self.certificate!r}): expected the path of a file")


class _BegunNear(NamedTuple):
    step: int
    pending: PendingSave
    began_unix: float
    waited_seconds: float  # for the near save before, with the training stopped

    @property
    def blocked_seconds(self) -> float:
        return self.waited_seconds + self.pending.blocked_seconds


class NearTraining:
    """The near saves of one training on this rank. All ranks call its methods in the same order."""

    def __init__(
        self,
        near: Near,
        save: SavePolicy,
        training: Training,
        saving: Mapping[str, Any],
        numbers: RecordNumbers | None = None,
    ) -> None:
        self._numbers = numbers or RecordNumbers()
        self._near = near
        self._training = training
        snapshot: Snapshot = saving.get("snapshot", "step")
        bytes_max = plain_int(near.bytes_max)
        self.shares_stage = are_multiples(save, near.every)
        user = dict(saving.get("user") or {})
        copies = CopyOptions(
            plain_int(near.replicas), near.rack, near.address, os.fspath(near.certificate)
        )
        self._options = NearOptions(bytes_max, snapshot, user, self.shares_stage, copies)
        self._stepped_calls = 0
        self._stepped_seconds = 0.0  # when the last call was over
        self._tier: Tier | None = None
        self._hosts: Hosts | None = None
        self._saves: NearSaves | None = None
        self._begun: _BegunNear | None = None
        self._lasting: Exception | None = None
        self._loaded: NearRecord | None = None
        self._has_restored = False
        self._notes: StatusNotes | None = None  # on the first rank of a host
        self.reached: TierStatus | None = None
        self.last_report: SaveReport | None = None
        self.failures: tuple[Failure, ...] = ()

    # saving

    def stepped(self, *, lends: bool = False) -> Sequence[LentCopy]:
        """A step is done: begin a near save if one is due and was not begun in this call of `step`.
        Waits for the one before.

        With `lends`, a durable save of this step is about to begin. Returns what it may use instead
        of a copy of its own, which the caller ends; nothing where no near save begins here.

        Raises ValueError on all ranks when a host has no room; Fenced and RankFailed.
        """
        if self._stepped_calls == self._training.progress.calls:
            return ()
        self._stepped_calls = self._training.progress.calls
        if self._saves is None:
            self._open()
        assert self._saves is not None, "opened above"
        if self._stepped_seconds:
            self._saves.stepped(perf_counter() - self._stepped_seconds)
        try:
            return self._stepped(lends)
        finally:
            self._stepped_seconds = perf_counter()

    def _stepped(self, lends: bool) -> Sequence[LentCopy]:
        self.collect(wait=False)
        progress = self._training.progress
        if self._notes is not None:
            self._notes.stepped(progress.step)
        observation = Observation(progress.step, progress.previous_step)
        if not self._near.every.reasons(observation):
            return ()
        waited_since = perf_counter()
        self.collect(wait=True)
        waited_seconds = perf_counter() - waited_since
        if self._lasting is not None:
            raise self._lasting
        assert self._saves is not None, "opened above"
        began_unix = time.time()
        begun = self._saves.begin(self._training.state, progress.step, lends=lends)
        self._begun = _BegunNear(progress.step, begun.pending, began_unix, waited_seconds)
        return begun.copies

    def collect(self, *, wait: bool, timeout_seconds: float = math.inf) -> None:
        """Pass on the outcome of the near save that was begun, if it is over or when `wait`.

        Raises RankFailed when a rank is gone, TimeoutError.
        """
        begun = self._begun
        if begun is None or not (wait or begun.pending.done()):
            return
        begun.pending.wait(None if math.isinf(timeout_seconds) else timeout_seconds)
        self._begun = None
        try:
            report = begun.pending.result()
        except Exception as error:
            self._note(begun.step, error)
            return
        self.last_report = report
        if self._notes is not None:
            self._notes.saved(begun.step, begun.began_unix)
            if wait:  # there may be no step any more that would write it
                self._notes.stepped(self._training.progress.step)
        ended_unix = max((s.start_unix + s.seconds for s in report.spans), default=time.time())
        seconds = max(ended_unix - begun.began_unix, begun.pending.blocked_seconds)
        self._training.notify(NearSaved(report, seconds, begun.blocked_seconds))

    def _note(self, step: int, error: Exception) -> None:
        lost = self._training.target.failure()
        if lost is not None:
            raise lost
        if isinstance(error, Fenced):
            # Raised where all ranks are known to have learned of it: at the next save.
            self._lasting = error
        self._fail(step, error)

    def _fail(self, step: int, error: Exception) -> None:
        failure = Failure(step, error)
        self.failures = (*self.failures, failure)[-FAILURES_MAX:]
        logger.warning("the near save of step %d has failed: %s", step, error)
        self._training.notify(NearFailed(step, error))

    # restoring

    def candidates(self, root: str, epoch: int) -> list[NearCandidate]:
        """The near checkpoints that the hosts have of an epoch of a root, newest first.
        Collective.
        """
        self._find_tier(root)
        assert self._tier is not None and self._hosts is not None
        world = self._training.world
        self.reached = newest_status(world, self._tier, self._hosts, epoch)
        return near_candidates(world, self._tier, self._hosts, epoch)

    def load(self, candidate: NearCandidate, stacks: Stacks) -> LoadReport:
        """Fill the state from one of them. Collective; raises like `ckpt.load`, whose `stacks`
        these are.
        """
        assert self._tier is not None and self._hosts is not None, "it was found there"
        self._loaded = None
        with gc_paused():
            training, tier, hosts = self._training, self._tier, self._hosts
            report = load_near(training.state, training.world, tier, hosts, candidate, stacks)
        self._loaded = candidate.record
        return report

    def restored(self, *, is_near: bool) -> None:
        """The training continues from what was restored: the last that `load` has loaded, or a
        durable checkpoint. Collective.
        """
        self._has_restored = True
        if is_near:
            assert self._loaded is not None
            if self._saves is None:
                self._open(self._loaded.head.attempt)
            assert self._saves is not None
            self._saves.adopt(self._loaded)
            if self._notes is not None:
                self._notes.saved(self._loaded.head.step, self._loaded.head.time_unix)
        elif self._saves is not None:
            self._saves.went_back()
            if self._notes is not None:
                self._notes.saved(-1, 0.0)

    def restored_beside(self, older: NearRecord | None, number: int) -> None:
        """The training continues from a state of another tier. Of this one only `older` counts from
        now on, under `number` in the order of all tiers. Collective.
        """
        self._has_restored = True
        if self._saves is None:
            self._open("" if older is None else older.head.attempt)
        assert self._saves is not None
        self._saves.continue_beside(older, number)
        if self._notes is not None:
            newest = (-1, 0.0) if older is None else (older.head.step, older.head.time_unix)
            self._notes.saved(*newest)

    def carry_on(self, before: NearTraining) -> None:
        """These follow on those of a world before."""
        self.last_report, self.failures = before.last_report, before.failures

    def leave(self, failure: RankFailed) -> None:
        """End without the other ranks: a save under way is given up. May be repeated."""
        if self._saves is None:
            return
        self._saves.give_up(failure)
        begun, self._begun = self._begun, None
        if begun is not None and begun.pending.done():
            try:
                self.last_report = begun.pending.result()
            except Exception as error:
                self._fail(begun.step, error)
        self._saves.close()

    def close(self) -> None:
        """Wait for what is in flight and end. Not collective."""
        if self._saves is not None:
            self._saves.close()

    def _open(self, restored: str = "") -> None:
        session = self._training.target.ranked_session()
        self._find_tier(session.root)
        assert self._tier is not None and self._hosts is not None
        copies = replace(self._options.copies, allow_fewer=self._has_restored)
        self._saves = open_near_saves(
            self._training.state,
            self._tier,
            self._hosts,
            session,
            replace(self._options, copies=copies),
            restored,
            self._numbers,
        )
        if self._hosts.is_first(self._training.world.rank):
            self._notes = StatusNotes(self._tier.store.place, session.epoch)

    def _find_tier(self, root: str) -> None:
        """The tier of this host, and who shares it. Collective."""
        if self._tier is not None and self._tier.root == root:
            return
        world, path, durable = self._training.world, self._near.path, self._training.target.store()
        self._tier = collectively(world, "near tier", lambda: Tier(path, root, durable))
        self._hosts = Hosts.of(world, self._tier)
