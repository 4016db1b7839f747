"""Who may write: claims, fencing, lost replies, stores that cannot commit, retirement and sweeping.

Method: sessions against memory and local stores with scripted faults; every operation of a small
life fails or kills once, and the promises are checked afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt.commit.appender import Appender, Sources
from ckpt.commit.log import Log
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME, step_prefix
from ckpt.commit.records import LiveEntry, manifest_digest
from ckpt.commit.session import ReferenceRetired, Session, SessionRegistry, open_session
from ckpt.commit.writer import Commit, NotRetired
from ckpt.errors import CheckpointError, Corrupt, Fenced, NoCheckpoint, OutcomeUnknown, StoreRefused
from ckpt.world.base import SoloWorld, World
from storage import open_store
from storage.errors import (
    AccessDeniedError,
    NoSpaceError,
    OutcomeUnknownError,
    StorageError,
    TransientError,
)
from storage.memory import MemoryBucket, MemoryStore
from storage.store import ExclusiveCreate, Store
from storage.testing import FaultPlan, FaultyStore
from storage.wrap import WrappedStore
from tests.protocol.invariants import History, RecordingStore, check_all, check_fresh_session
from tests.thread_ranks import RanksFailed, run_ranks

NO_PAUSE = Sources(pause=lambda seconds: None)


def claim(store: Store, **options: Any) -> Session:
    return Session.claim(store, sources=replace(NO_PAUSE, tries_max=3), **options)


def save(session: Session, step: int, references: tuple[str, ...] = ()) -> LiveEntry:
    attempt, manifest = session.new_attempt(), b"manifest %d" % step
    prefix = step_prefix(step, attempt)
    session.store.put_if_absent(prefix + "rank00000-000.safetensors", b"data")
    session.store.put_if_absent(prefix + MANIFEST_NAME, manifest)
    digest = manifest_digest(manifest)
    return session.commit(Commit(attempt, step, len(manifest), digest, references=references))


def keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


class Scripted(WrappedStore):
    """Writes to the log end as the script says: each entry is used up by one write."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.script: list[str] = []
        self.late: list[tuple[str, bytes]] = []

    def put_if_absent(self, key: str, data: bytes) -> None:
        order = self.script.pop(0) if self.script and key.startswith("log/") else "done"
        if order in ("done", "applied"):
            self.inner.put_if_absent(key, data)
        if order == "late":
            self.late.append((key, data))
        if order == "transient":
            raise TransientError("throttled")
        if order == "full":
            raise NoSpaceError("no space left")
        if order not in ("done", "answered"):  # answered: and nothing was stored
            raise OutcomeUnknownError(f"create {key}: no answer")


class Overwriting(WrappedStore):
    """Accepts the condition and overwrites all the same, as rclone's S3 server does."""

    exclusive_create = ExclusiveCreate.CONDITIONAL

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.inner.delete(key)
        self.inner.put_if_absent(key, data)


class CheckThenWrite(WrappedStore):
    exclusive_create = ExclusiveCreate.NONE


def test_first_claim_makes_a_root_and_saves_are_found() -> None:
    store = MemoryStore()
    session = claim(store)
    assert session.epoch == 1 and Log(store).state().live == ()
    first, second = save(session, 1), save(session, 2)
    state = Log(store).state()
    assert state.live == (first, second) and state.latest == second


def test_older_session_is_fenced_for_ever_and_deletes_nothing() -> None:
    store = MemoryStore()
    zombie = claim(store)
    kept = save(zombie, 1)
    save(zombie, 2)
    claim(store)
    before = keys(store, "steps/")
    for action in (
        lambda: zombie.commit(Commit(zombie.new_attempt(), 3, 1, b"d")),
        lambda: zombie.retire(kept.attempt),
        lambda: zombie.pin(kept.attempt),
        zombie.sweep,
        zombie.sweep_unfinished,
        zombie.state,
    ):
        with pytest.raises(Fenced, match=r"epoch 2.*epoch 1"):
            action()
    assert zombie._fenced_by is not None and keys(store, "steps/") == before
    assert [r.kind for r in Log(store).history()] == ["CLAIM", "COMMIT", "COMMIT", "CLAIM"]


def test_lost_reply_of_a_commit_is_a_success() -> None:
    store = Scripted(MemoryStore())
    session = claim(store)
    store.script = ["applied"]
    entry = save(session, 1)
    assert [e.attempt for e in Log(store).state().live] == [entry.attempt]
    assert [r.kind for r in Log(store).history()] == ["CLAIM", "COMMIT"]


def test_unanswered_commit_is_unknown_until_the_same_slot_answers() -> None:
    store = Scripted(MemoryStore())
    session = claim(store)
    store.script = ["late", "lost", "lost"]
    with pytest.raises(OutcomeUnknown, match="COMMIT of e000001"):
        save(session, 1)
    first_attempt = session._appender.pending
    assert first_attempt is not None
    store.script = ["lost"] * 3
    with pytest.raises(OutcomeUnknown):
        save(session, 2)
    second_attempt = session._appender.pending
    settled = session.settle()
    assert settled is not None and settled.landed and settled.record == second_attempt
    assert session._appender.pending is None and session.settle() is None
    assert [e.step for e in Log(store).state().live] == [1]


def test_late_arrival_after_a_successors_claim_changes_nothing() -> None:
    store = Scripted(MemoryStore())
    session = claim(store)
    save(session, 1)
    store.script = ["late", "lost", "lost"]
    with pytest.raises(OutcomeUnknown):
        save(session, 2)
    claim(store.inner)
    for key, data in store.late:
        with pytest.raises(StorageError):
            store.inner.put_if_absent(key, data)
    settled = session.settle()
    assert settled is not None and not settled.landed
    with pytest.raises(Fenced):
        save(session, 3)
    assert [e.step for e in Log(store).state().live] == [1]


@pytest.mark.parametrize(
    ("order", "error"), [("full", NoSpaceError), ("transient", TransientError)]
)
def test_definite_failure_leaves_nothing_unsettled(order: str, error: type[Exception]) -> None:
    store = Scripted(MemoryStore())
    session = claim(store)
    store.script = [order] * 3
    with pytest.raises(error):
        save(session, 1)
    store.script = []
    assert session._appender.pending is None
    assert save(session, 2).step == 2


@pytest.mark.parametrize("times", [1, 50])
def test_a_record_that_the_store_has_lost_is_sent_again(times: int) -> None:
    """It answered 200 and stored nothing: no reason to refuse all saves of this process."""
    store = Scripted(MemoryStore())
    session = claim(store)
    first = save(session, 1)
    store.script = ["answered"] * times
    if times == 1:
        second = save(session, 2)
    else:
        with pytest.raises(OutcomeUnknown):
            save(session, 2)
        store.script = []
        settled = session.settle()
        assert settled is not None and settled.landed
        second = settled.record.live[-1]
    third = save(session, 3)
    session.retire(first.attempt)
    assert Log(store).state().live == (second, third)


def test_definite_failure_after_an_unanswered_try_settles_nothing() -> None:
    store = Scripted(MemoryStore())
    session = claim(store)
    store.script = ["late", "full"]
    with pytest.raises(OutcomeUnknown):
        save(session, 1)
    assert session._appender.pending is not None


def test_a_taken_slot_that_cannot_be_read_stays_unsettled() -> None:
    """Our own record may be in it: its reply was lost."""

    class Unreadable(Scripted):
        fails = False

        def get_bounded(self, key: str, nbytes_max: int) -> bytes:
            if self.fails and key.startswith("log/"):
                raise TransientError("throttled")
            return super().get_bounded(key, nbytes_max)

        def put_if_absent(self, key: str, data: bytes) -> None:
            self.fails = self.script == ["done"]
            super().put_if_absent(key, data)

    store = Unreadable(MemoryStore())
    session = claim(store)
    store.script = ["applied", "done"]
    with pytest.raises(OutcomeUnknown, match="COMMIT of"):
        save(session, 1)
    store.fails = False
    settled = session.settle()
    assert settled is not None and settled.landed
    assert [e.step for e in Log(store).state().live] == [1]


def test_interrupted_write_stays_unsettled() -> None:
    class Interrupted(WrappedStore):
        armed = False

        def put_if_absent(self, key: str, data: bytes) -> None:
            self.inner.put_if_absent(key, data)
            if self.armed and key.startswith("log/"):
                raise KeyboardInterrupt

    store = Interrupted(MemoryStore())
    session = claim(store)
    store.armed = True
    with pytest.raises(KeyboardInterrupt):
        save(session, 1)
    store.armed = False
    settled = session.settle()
    assert settled is not None and settled.landed


@pytest.mark.parametrize("wrap", [Overwriting, CheckThenWrite])
def test_store_that_cannot_refuse_a_second_writer_is_refused(
    wrap: Callable[[Store], Store],
) -> None:
    store = wrap(MemoryStore())
    with pytest.raises(StoreRefused, match="unsafe_single_writer"):
        claim(store)
    assert keys(store, "log/") == []
    session = claim(store, unsafe_single_writer=True)
    save(session, 1)
    claim(store, unsafe_single_writer=True)
    with pytest.raises(Fenced):
        save(session, 2)
    assert [r.kind for r in Log(store).history()] == ["CLAIM", "COMMIT", "CLAIM"]


def test_honest_conditional_store_is_accepted() -> None:
    store = CheckThenWrite(MemoryStore())
    store.exclusive_create = ExclusiveCreate.CONDITIONAL
    assert claim(store).epoch == 1


def test_log_without_format_is_not_claimed_anew() -> None:
    store = MemoryStore()
    save(claim(store), 1)
    store.delete("FORMAT")
    with pytest.raises(Corrupt, match=r"no FORMAT object.*ckpt mend"):
        claim(store)


def test_maintenance_does_not_disturb_a_running_session() -> None:
    store = MemoryStore()
    session = claim(store)
    old, kept = save(session, 1), save(session, 2)
    keeper = Maintenance.open(store)
    assert keeper.pin(old.attempt) is not None and keeper.pin(old.attempt) is None
    with pytest.raises(NotRetired, match="pinned"):
        keeper.retire(old.attempt)
    keeper.unpin(old.attempt)
    keeper.verified(kept.attempt)
    assert keeper.retire(old.attempt) is not None and keeper.retire(old.attempt) is None
    assert keys(store, old.prefix) == []
    new = save(session, 3)
    assert [(e.step, e.verified) for e in Log(store).state().live] == [(2, True), (3, False)]
    assert new.slot == Log(store).state().slot


def test_a_copy_is_committed_only_beside_its_original_and_in_its_epoch() -> None:
    store = MemoryStore()
    session = claim(store)
    original = save(session, 1)
    save(session, 2)
    keeper = Maintenance.open(store, sources=NO_PAUSE)
    copy = Commit("e000001-00000000000000cc", 1, 3, b"d" * 32)
    claim(store)
    with pytest.raises(CheckpointError, match="was claimed by a new session while"):
        keeper.commit_copy(copy, of=original.attempt)
    keeper.retire(original.attempt)
    with pytest.raises(CheckpointError, match="was retired while it was copied"):
        keeper.commit_copy(copy, of=original.attempt)
    assert [entry.step for entry in Log(store).state().live] == [2]


def test_the_last_of_a_training_and_the_last_of_all_stay() -> None:
    session = claim(MemoryStore())
    imported = session.new_attempt()
    session.store.put_if_absent(step_prefix(1, imported) + MANIFEST_NAME, b"m")
    session.commit(Commit(imported, 1, 1, b"d" * 32, in_line=False))
    with pytest.raises(NotRetired, match="is the only checkpoint; save another first"):
        session.retire(imported)
    trained = save(session, 2)
    with pytest.raises(NotRetired, match="only checkpoint that a training has saved here"):
        session.retire(trained.attempt)
    assert session.retire(imported) is not None


def test_an_unanswered_commit_stays_unsettled_while_the_store_refuses() -> None:
    """A refusal says nothing about the request that got no answer."""
    store = Scripted(MemoryStore())
    session = claim(store)
    store.script = ["late"] * 3
    with pytest.raises(OutcomeUnknown):
        save(session, 1)
    (attempt,) = {key.split("-", 1)[1].split("/")[0] for key in keys(store, "steps/")}
    before = keys(store)
    store.script = ["transient"] * 6
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            session.discard(attempt, step=1)
        assert session._appender.pending is not None and keys(store) == before


def test_a_copy_whose_commit_got_no_answer_is_committed_once() -> None:
    store = Scripted(MemoryStore())
    original = save(claim(store), 1)
    keeper = Maintenance.open(store, sources=replace(NO_PAUSE, tries_max=1))
    copy = Commit("e000001-00000000000000cc", 1, 3, b"d" * 32)
    store.put_if_absent(step_prefix(1, copy.attempt) + MANIFEST_NAME, b"abc")
    store.script = ["applied"]
    with pytest.raises(OutcomeUnknown):
        keeper.commit_copy(copy, of=original.attempt)
    entry = keeper.commit_copy(copy, of=original.attempt)
    assert (entry.attempt, entry.line) == (copy.attempt, None)
    assert [r.kind for r in Log(store).history()] == ["CLAIM", "COMMIT", "COMMIT"]


def test_last_checkpoint_and_unknown_ones_are_not_retired() -> None:
    store = MemoryStore()
    only = save(claim(store), 1)
    keeper = Maintenance.open(store)
    with pytest.raises(NotRetired, match="only checkpoint"):
        keeper.retire(only.attempt)
    with pytest.raises(NoCheckpoint):
        keeper.pin("e000001-0000000000000000")
    assert keeper.retire("e000001-0000000000000000") is None


def test_referenced_attempt_is_kept_and_a_retired_reference_drops_the_commit() -> None:
    store = MemoryStore()
    session = claim(store)
    base, other = save(session, 1), save(session, 2)
    user = save(session, 3, references=(base.attempt,))
    keeper = Maintenance.open(store)
    with pytest.raises(NotRetired, match=user.attempt):
        keeper.retire(base.attempt)
    keeper.retire(other.attempt)
    with pytest.raises(ReferenceRetired, match=other.attempt):
        save(session, 4, references=(other.attempt,))
    assert session._appender.pending is None


def test_save_under_way_is_not_deleted_as_retired() -> None:
    store = MemoryStore()
    session = claim(store)
    save(session, 1)
    attempt = session.new_attempt()
    store.put_if_absent(step_prefix(2, attempt) + "rank00000-000.safetensors", b"x")
    with pytest.raises(NotRetired, match="under way"):
        Maintenance.open(store).delete_retired(attempt, step=2)
    assert Maintenance.open(claim(store).store).delete_retired(attempt, step=2) == 1


def test_files_of_a_live_checkpoint_are_deleted_by_nobody() -> None:
    store = MemoryStore()
    session = claim(store)
    entry = save(session, 1)
    with pytest.raises(NotRetired, match="is live or needed"):
        session.discard(entry.attempt, step=1)
    with pytest.raises(NotRetired, match="is live or needed"):
        claim(store).delete_retired(entry.attempt, step=1)
    assert len(keys(store, entry.prefix)) == 2


def test_interrupted_deletion_of_a_retired_checkpoint_can_be_repeated() -> None:
    store = MemoryStore()
    session = claim(store)
    old = save(session, 1)
    save(session, 2)
    session.retire(old.attempt, delete=False)
    store.delete(old.prefix + MANIFEST_NAME)
    assert session.delete_retired(old.attempt, step=1) == 1
    assert session.delete_retired(old.attempt, step=1) == 0


def test_maintenance_of_an_empty_root_says_so() -> None:
    with pytest.raises(NoCheckpoint):
        Maintenance.open(MemoryStore())


def test_only_the_first_claim_of_a_root_looks_for_no_leftovers() -> None:
    """Nobody has written there, and on an object store each look is a request of the first save."""
    bucket = MemoryBucket()
    looks = []
    for _ in range(2):
        plan = FaultPlan(0)
        SessionRegistry().session(FaultyStore(MemoryStore(bucket), plan))
        looks.append([key for name, key in plan.operations if name == "abort_unfinished"])
    assert looks == [[], ["steps/"]]


def test_sweep_removes_orphans_of_older_epochs_and_nothing_else() -> None:
    store = MemoryStore()
    old = claim(store)
    live = save(old, 1)
    orphan = step_prefix(2, old.new_attempt())
    store.put_if_absent(orphan + "rank00000-000.safetensors", b"x")
    session = claim(store)
    mine = step_prefix(3, session.new_attempt())
    foreign = ["steps/README", "steps/x/r0.safetensors", live.prefix + "notes.txt"]
    for key in [mine + "rank00000-000.safetensors", orphan + "notes.txt", *foreign]:
        store.put_if_absent(key, b"x")
    before = set(keys(store))
    assert session.sweep() == [orphan.rstrip("/").partition("-")[2]]
    assert before - set(keys(store)) == {orphan + "rank00000-000.safetensors"}


def test_discarded_attempt_can_never_be_committed() -> None:
    session = claim(MemoryStore())
    save(session, 1)
    attempt = session.new_attempt()
    session.store.put_if_absent(step_prefix(2, attempt) + "rank00000-000.safetensors", b"x")
    assert session.discard(attempt, step=2) == 1
    with pytest.raises(Exception, match="not an open attempt"):
        session.commit(Commit(attempt, 2, 1, b"d"))


def test_what_another_session_began_cannot_be_committed() -> None:
    store = MemoryStore()
    foreign = claim(store).new_attempt()
    session = claim(store)
    with pytest.raises(CheckpointError, match=f"{foreign} is not an open attempt"):
        session.commit(Commit(foreign, 1, 1, b"d"))
    assert Log(store).state().live == ()


def test_a_live_attempt_that_was_given_up_is_not_swept() -> None:
    """A save that fails after its commit, as when a rank dies, gives up what is live."""
    session = claim(MemoryStore())
    entry = save(session, 1)
    session.give_up(entry.attempt, step=1)
    before = keys(session.store)
    assert session.sweep_failed() == [] and keys(session.store) == before


def test_a_commit_that_others_refer_to_is_not_taken_back() -> None:
    session = claim(MemoryStore())
    first = save(session, 1)
    second = save(session, 2, references=(first.attempt,))
    appender = Appender(session.store, check_first=False, sources=NO_PAUSE)
    assert appender.take_back(first.attempt) is None
    assert session.state().live == (first, second)
    assert appender.take_back(second.attempt) is not None
    assert session.state().live == (first,)


def test_a_store_that_overwrites_does_not_overwrite_the_record_of_another() -> None:
    """The promise of a single writer was not kept while a record got no answer."""

    class Forgetful(CheckThenWrite):
        is_remote = False

        def put_if_absent(self, key: str, data: bytes) -> None:
            if self.is_remote:
                raise OutcomeUnknownError("no answer")
            self.inner.delete(key)
            self.inner.put_if_absent(key, data)

    bucket = MemoryBucket()
    store = Forgetful(MemoryStore(bucket))
    session = claim(store, unsafe_single_writer=True)
    entry = save(session, 1)
    store.is_remote = True
    with pytest.raises(OutcomeUnknown):
        session.pin(entry.attempt)
    store.is_remote = False
    other = claim(Forgetful(MemoryStore(bucket)), unsafe_single_writer=True)
    settled = session.settle()
    assert settled is not None and not settled.landed
    assert Log(store).state().epoch == other.epoch == 2


class _Stubborn(WrappedStore):
    """Deletes nothing while `refuses`."""

    refuses = True

    def delete(self, key: str) -> None:
        if self.refuses:
            raise TransientError(f"delete {key}: not now")
        self.inner.delete(key)


def test_what_a_discard_could_not_delete_is_swept_by_the_same_session() -> None:
    store = _Stubborn(MemoryStore())
    session = claim(store)
    kept = save(session, 1)
    attempt = session.new_attempt()
    store.put_if_absent(step_prefix(2, attempt) + "rank00000-000.safetensors", b"x")
    for clean_up in (lambda: session.discard(attempt, step=2), session.sweep_failed):
        with pytest.raises(TransientError):
            clean_up()
    store.refuses = False
    assert session.sweep_failed() == [attempt]
    assert session.sweep_failed() == []
    assert {key.split("/")[1] for key in keys(store, "steps/")} == {kept.prefix.split("/")[1]}


def test_a_commit_of_unknown_outcome_that_another_record_displaced_is_swept() -> None:
    """Maintenance took the slot while nobody knew."""
    bucket = MemoryBucket()
    store = _Silent(MemoryStore(bucket), kind=b"COMMIT")
    session = claim(store)
    kept = save(session, 1)
    store.silent = True
    with pytest.raises(OutcomeUnknown):
        save(session, 2)
    with pytest.raises(OutcomeUnknown):
        session.sweep_failed() or session.settle()
    Maintenance.open(MemoryStore(bucket)).pin(kept.attempt)
    store.silent = False
    settled = session.settle()
    assert settled is not None and not settled.landed
    (swept,) = session.sweep_failed()
    assert swept == settled.record.attempt
    assert not keys(store, step_prefix(2, swept))


class _Silent(WrappedStore):
    """While `silent`, records of that kind are lost on their way, and no answer comes."""

    silent = False

    def __init__(self, inner: Store, *, kind: bytes) -> None:
        super().__init__(inner)
        self.kind = kind

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self.silent and key.startswith("log/") and self.kind in data:
            raise OutcomeUnknownError(f"put {key}: no answer")
        self.inner.put_if_absent(key, data)


def test_a_metric_may_be_any_number_and_a_record_that_cannot_be_read_is_never_sent() -> None:
    session = claim(MemoryStore())
    attempt = session.new_attempt()
    session.store.put_if_absent(step_prefix(1, attempt) + MANIFEST_NAME, b"m")
    assert session.commit(Commit(attempt, 1, 1, b"d", metric=3)).metric == 3.0
    before = session.state()
    for bad in (
        Commit(session.new_attempt(), 2, 1, b"d", metric=float("nan")),
        Commit(session.new_attempt(), 2.0, 1, b"d"),  # type: ignore[arg-type]
        Commit(session.new_attempt(), 2, 1, "d"),  # type: ignore[arg-type]
    ):
        with pytest.raises(CheckpointError):
            session.commit(bad)
    assert Log(session.store).state() == before and session._appender.pending is None


def test_registry_claims_once_and_stays_fenced() -> None:
    bucket = MemoryBucket()
    registry = SessionRegistry()
    first = registry.session(MemoryStore(bucket))
    assert registry.session(MemoryStore(bucket)) is first
    claim(MemoryStore(bucket))
    with pytest.raises(Fenced):
        save(registry.session(MemoryStore(bucket)), 1)
    assert registry.session(MemoryStore(bucket))._fenced_by is not None


def test_ranks_share_one_session() -> None:
    store, registry = MemoryStore(), SessionRegistry()

    def rank(world: World) -> tuple[str, int, bool]:
        session = open_session(world, store, registry)
        return session.root, session.epoch, session.session is not None

    results = run_ranks(3, rank)
    assert len({r[:2] for r in results}) == 1
    assert [r[2] for r in results] == [True, False, False]


def test_ranks_that_see_other_roots_are_named_on_all_ranks() -> None:
    shared, registry = MemoryStore(), SessionRegistry()
    other = MemoryStore(name="other")
    claim(other)

    def rank(world: World) -> None:
        store = {1: other, 2: MemoryStore(name="bare")}.get(world.rank, shared)
        open_session(world, store, registry)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(4, rank)
    errors = caught.value.errors
    assert len(errors) == 4 and all(isinstance(e, StoreRefused) for e in errors.values())
    text = str(errors[3])
    assert "rank 1: memory://other" in text and "rank 2: memory://bare shows no root" in text


def test_refused_store_is_the_same_error_on_all_ranks() -> None:
    store, registry = CheckThenWrite(MemoryStore()), SessionRegistry()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, lambda world: open_session(world, store, registry))
    assert {type(e) for e in caught.value.errors.values()} == {StoreRefused}


def test_read_only_root_is_an_error_of_the_store() -> None:
    class ReadOnly(WrappedStore):
        def put_if_absent(self, key: str, data: bytes) -> None:
            raise AccessDeniedError(f"create {key}: read-only")

    with pytest.raises(AccessDeniedError):
        open_session(SoloWorld(), ReadOnly(MemoryStore()), SessionRegistry())


class Power(WrappedStore):
    """Ends the process at its n-th operation: before it, or after it was applied; or fails it."""

    def __init__(self, inner: Store, nth: int, how: str) -> None:
        super().__init__(inner)
        self.left, self.how, self.used = nth, how, 0

    def _step(self, apply: Callable[[], object]) -> object:
        self.used += 1
        self.left -= 1
        if self.left > 0 or (self.left < 0 and self.how in ("fails", "unknown")):
            return apply()
        if self.how.startswith("fails"):
            raise TransientError("connection reset")
        if self.left == 0 and self.how in ("killed after", "unknown"):
            apply()
        if self.how == "unknown":
            raise OutcomeUnknownError("no answer")
        raise Gone

    def info(self, key: str):  # type: ignore[no-untyped-def]
        return self._step(lambda: self.inner.info(key))

    def get(self, key: str, byte_range=None):  # type: ignore[no-untyped-def]
        return self._step(lambda: self.inner.get(key, byte_range))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._step(lambda: self.inner.put_if_absent(key, data))

    def delete(self, key: str) -> None:
        self._step(lambda: self.inner.delete(key))


class Gone(BaseException):
    """The process ends."""


def life(store: Store, history: History) -> None:
    """Claim, save two steps, retire the older one, sweep."""
    session = claim(store)
    entries = []
    for step in (2, 3):
        entries.append(save(session, step))
        history.acknowledged.append(entries[-1].attempt)
    session.retire(entries[0].attempt)
    session.sweep()


@pytest.mark.parametrize(
    "how", ["killed before", "killed after", "fails", "fails for ever", "unknown"]
)
@pytest.mark.parametrize("back_end", ["memory", "local"])
def test_every_operation_of_a_life_may_fail_or_kill(
    how: str, back_end: str, tmp_path: Path
) -> None:
    for nth in range(1, 1000):
        history = History()
        inner = MemoryStore() if back_end == "memory" else open_store(str(tmp_path / str(nth)))
        bottom = RecordingStore(inner, history)
        history.acknowledged.append(save(claim(bottom), 1).attempt)
        power = Power(bottom, nth, how)
        with contextlib.suppress(Gone, StorageError, OutcomeUnknown):
            life(power, history)
        problems = check_all(bottom, history) + check_fresh_session(bottom)
        assert not problems, f"operation {nth} {how}: " + "\n".join(problems)
        if power.left > 0:  # this life ended before its turn came
            break
    assert 20 < nth < 999
