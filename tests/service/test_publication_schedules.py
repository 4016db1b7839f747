"""Seeded schedules of a trainer that publishes and a follower, with everything that befalls them.

Method: the real code on a store in memory. A schedule publishes sparse, dense and no changes, on
one rank or two, back and forth; lets writes fail, with and without effect; restarts, prunes,
retires and damages; swaps once, twice, and half. After every event the follower has the bits of the
publication that it names, what a live delta needs is live, and what is whole can be followed. Bugs
that are planted are caught.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from ckpt.commit.locate import NewCommits, live_entries, read_manifest
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.records import LiveEntry
from ckpt.commit.writer import NotRetired
from ckpt.errors import CheckpointError
from ckpt.format.manifest_codec import decode_manifest
from ckpt.loading.patch import DeltaPatch, SparseWrite
from ckpt.service.publisher import Due, Publication
from storage import KeyNotFoundError, Store, TransientError, open_store
from storage.wrap import WrappedStore
from tests.conftest import Scale
from tests.service.test_publication import SHAPE, Trainer, blank, follower_of, weights, whole_model
from tests.thread_ranks import RanksFailed

EVENTS = 14


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("ckpt").setLevel(logging.NOTSET)


class Flaky(WrappedStore):
    """Fails the n-th request that writes, once it is armed, before or after it has its effect."""

    fails_in, has_effect = -1, False

    def _failing(self, run: Callable[[], Any]) -> Any:
        self.fails_in -= 1
        if self.fails_in:
            return run()
        if self.has_effect:
            run()
        raise TransientError("planted")

    def put_if_absent(self, key: str, data: Any) -> None:
        self._failing(lambda: self.inner.put_if_absent(key, data))

    def create(self, key: str, *args: Any, **named: Any) -> Any:
        return self._failing(lambda: self.inner.create(key, *args, **named))


class Schedule:
    """One schedule; `run` raises AssertionError with its events where something is wrong."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.store: Store = open_store(f"memory://schedule{seed}")
        self.flaky = Flaky(self.store)
        self.full = weights(0)
        self.step, self.events = 0, [f"seed {seed}"]
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        self.numbered: list[dict[str, torch.Tensor]] = []
        self.is_damaged = self.has_drifted = False
        self.retired: set[str] = set()
        self.served = blank(whole_model)
        self.follower = follower_of(self.served, self.store)
        self.restart()
        self.publish()

    def run(self) -> None:
        choices = (
            *[self.publish] * 4,
            *[self.follow] * 4,
            *(self.publish_failing, self.restart, self.retire, self.swap_half, self.swap_twice),
            *(self.damage, self.drift, self.begin_anew),
        )
        for _ in range(EVENTS):
            event = self.random.choice(choices)
            self.events.append(event.__name__)
            event()
            self.check()
        self.trainer.due = Due(0, 0.0)
        self.publish()
        self.is_damaged = False
        self.follow()
        self.check()

    def check(self) -> None:
        self.learn()
        live = {entry.attempt: entry for entry in live_entries(self.store)}
        for entry in live.values():
            assert live.keys() >= set(entry.references), self.events
        if self.follower.attempt and not self.has_drifted:
            expected = self.states[self.follower.attempt]
            same = (torch.equal(self.served[n].local.reshape(SHAPE), expected[n]) for n in expected)
            assert all(same), self.events

    def publish(self) -> None:
        share = self.random.choice((0.0, 0.02, 0.2, 1.0))
        for tensor in self.full.values():
            places = torch.rand(SHAPE) < share
            tensor[places] += self.random.randint(1, 9)
        self.step = max(0, self.step + self.random.choice((-1, 0, 1, 1, 1)))
        taken = {name: tensor.to(torch.bfloat16) for name, tensor in self.full.items()}
        self.numbered.append(taken)
        try:
            self.trainer.publish(self.step, self.full, number=len(self.numbered) - 1)
        finally:
            self.learn()

    def learn(self) -> None:
        """The state of each publication, by the number that its writer gave it."""
        for entry in self.live:
            if entry.attempt not in self.states:
                with suppress(CheckpointError, KeyNotFoundError):
                    header = decode_manifest(read_manifest(self.store, entry)).header
                    self.states[entry.attempt] = self.numbered[int(header.user["number"])]

    def publish_failing(self) -> None:
        self.flaky.fails_in = self.random.randint(1, 6)
        self.flaky.has_effect = self.random.random() < 0.5
        with suppress(RanksFailed):
            self.publish()
        self.flaky.fails_in = -1

    @property
    def live(self) -> tuple[LiveEntry, ...]:
        try:
            return live_entries(self.store)
        except CheckpointError:
            return ()

    def restart(self) -> None:
        due = Due(self.random.choice((1, 2, 3, 50)), self.random.choice((0.5, 1e9)))
        self.trainer = Trainer(self.flaky, self.random.choice((1, 2)), due)
        if self.states and self.random.random() < 0.5:
            old = self.random.choice(list(self.states.values()))
            self.full = {name: tensor.float() for name, tensor in old.items()}

    def retire(self) -> None:
        keeper = Maintenance.open(self.store)
        with suppress(NotRetired):
            keeper.retire(chosen := self.random.choice(self.live).attempt)
            self.retired.add(chosen)

    def damage(self) -> None:
        entry = self.random.choice(self.live)
        for key in [one.key for one in self.store.list(entry.prefix) if "rank" in one.key]:
            self.store.delete(key)
        self.is_damaged = True

    def drift(self) -> None:
        with torch.no_grad():
            self.served[self.random.choice(list(self.full))].local.mul_(-1.5)
        # What no delta touches is seen when all is read: see `follow`.
        self.has_drifted = True
        self.follower._present.clear()
        self.follower._staged.clear()
        self.follower._commits.look_again()

    def begin_anew(self) -> None:
        self.served = blank(whole_model)
        self.follower = follower_of(self.served, self.store)
        self.has_drifted = False

    def poll(self) -> bool:
        try:
            return self.follower.poll() is not None
        except CheckpointError:
            assert self.is_damaged, self.events
            return False

    def follow(self) -> None:
        is_ready = self.poll()
        if is_ready and self.follower.swap():
            self.has_drifted = False
        # Who has what was retired by hand since then keeps it.
        if not self.is_damaged and self.follower.attempt not in self.retired:
            newest = self.states[self.live[-1].attempt]
            for name in newest:
                there = self.served[name].local.reshape(SHAPE)
                assert torch.equal(there, newest[name]), self.events

    def swap_half(self) -> None:
        """A write fails, and perhaps the first one that takes it back, too."""
        if not self.poll():
            return
        left, write = [self.random.randint(1, 4)], SparseWrite.write

        def fails(one: SparseWrite, values: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] == 0:
                write(one._replace(positions=one.positions[:1]), values[:1])
                raise RuntimeError("planted")
            write(one, values)

        with pytest.MonkeyPatch.context() as patch, suppress(RuntimeError):
            patch.setattr(SparseWrite, "write", fails)
            self.follower.swap()
            self.has_drifted = False

    def swap_twice(self) -> None:
        """A delta that arrives twice."""
        if self.poll():
            staged = self.follower._staged[0][1]
            if isinstance(staged, DeltaPatch):
                staged.swap(self.follower._world)
            self.follower.swap()
            self.has_drifted = False


def test_schedules_end_at_a_publication(scale: Scale) -> None:
    for seed in range(scale.count(60, 10_000)):
        Schedule(seed).run()


def _taken_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    save = Publication._save_delta

    def early(one: Publication, encoded: bytes) -> Any:
        one.published.take(one.fresh)
        return save(one, encoded)

    patch.setattr(Publication, "_save_delta", early)


def _bases_are_retired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ckpt.commit.writer.why_not_retire", lambda state, entry: "")


def _failed_writes_are_dropped(patch: pytest.MonkeyPatch) -> None:
    swap = DeltaPatch.swap

    def dropped(one: DeltaPatch, world: Any) -> Any:
        try:
            return swap(one, world)
        except RuntimeError:
            return one.known

    patch.setattr(DeltaPatch, "swap", dropped)


def _any_anchor_has_the_state_of_its_step(patch: pytest.MonkeyPatch) -> None:
    def guessed(commits: NewCommits, anchor: LiveEntry) -> str:
        live = live_entries(commits.store)
        return next((e.attempt for e in live if e.step == anchor.step and e.line is None), "")

    patch.setattr(NewCommits, "_same_as", guessed)


def _last_value_is_lost(patch: pytest.MonkeyPatch) -> None:
    write = SparseWrite.write
    patch.setattr(
        SparseWrite,
        "write",
        lambda one, values: write(one._replace(positions=one.positions[:-1]), values[:-1]),
    )


@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (_taken_before_the_commit, 107),
        (_bases_are_retired, 5),
        (_failed_writes_are_dropped, 1),
        (_any_anchor_has_the_state_of_its_step, 42),
        (_last_value_is_lost, 1),
    ],
)
def test_planted_bugs_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    first: int,
    monkeypatch: pytest.MonkeyPatch,
    scale: Scale,
) -> None:
    """The `first` seed saw it once; a long run begins at none."""
    plant(monkeypatch)
    for seed in range(scale.count(first, 0), 400):
        try:
            Schedule(seed).run()
        except (AssertionError, RanksFailed, CheckpointError, RuntimeError):
            return
    pytest.fail("400 schedules have not seen it")
