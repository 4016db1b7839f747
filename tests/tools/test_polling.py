"""A run that is followed is seen as a report sees it, and costs little however long it is.

Saves of this process into stores in memory; logs of thousands of records are written as objects.
Requests are counted at the store, and the clock is a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.commit.log import FORMAT_KEY, Log, encode_format
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import JOBS_PREFIX, TELEMETRY_NAME, record_key, step_prefix
from ckpt.commit.records import LiveEntry, Record, encode_record, record_digest
from ckpt.errors import Corrupt, NoCheckpoint
from ckpt.telemetry.record import JobRecord, SaveFailure, SaveTotals, Telemetry, encode_telemetry
from ckpt.tools import polling
from ckpt.tools.overview import Event
from ckpt.tools.polling import RECORDS_MAX, RunPoller, RunState, next_pause
from ckpt.tools.report import Measurements, report_of, run_of
from storage import InvalidUrlError, ObjectInfo, TransientError
from storage.memory import MemoryBucket, MemoryStore
from storage.store import Patience
from storage.wrap import WrappedStore
from tests.stores import CountingStore


def save(store: Any, *steps: int, **how: Any) -> None:
    for step in steps:
        ckpt.save({"x": torch.ones(100)}, store, step=step, **how)


def steps_of(state: RunState) -> list[int]:
    return [save.step for save in state.run.saves]


def attempt_of(step: int) -> str:
    return f"e000001-{step:016x}"


def telemetry_of_step(step: int) -> Telemetry:
    totals = SaveTotals(
        step=step,
        attempt=attempt_of(step),
        committed_unix=1000.0 + step,
        seconds=0.5,
        blocked_seconds=0.01,
        nbytes=4000,
        nbytes_referenced=0,
        staged_nbytes=0,
        retries=0,
        ranks=1,
        slowest_rank=0,
        slowest_phase="write",
        slowest_seconds=0.4,
    )
    rows = [[100]]
    return Telemetry(
        totals=totals,
        begun_unix=1000.0,
        phases=["write"],
        started_us=rows,
        took_us=rows,
        nbytes=rows,
        blocked_us=[1],
        retries=[0],
    )


def job_of(*failures: SaveFailure) -> JobRecord:
    return JobRecord(
        begun_unix=1000.0,
        noted_unix=1090.0,
        host="node-1",
        ranks=8,
        software="shardpoint 1",
        step=7,
        failed=len(failures),
        failures=list(failures),
    )


class LongRun:
    """The log of a training that keeps its newest three checkpoints, written as objects."""

    def __init__(self, steps: int, write_id: bytes = b"w") -> None:
        self.write_id = write_id
        self.bucket = MemoryBucket()
        self.bucket.add(FORMAT_KEY, encode_format("0" * 32))
        self.slot, self.step, self.digest = -1, 0, b""
        self.live: list[LiveEntry] = []
        self._append("CLAIM", None)
        for _ in range(steps):
            self.save()

    def save(self, **telemetry: Any) -> None:
        self.step += 1
        entry = LiveEntry(
            attempt=attempt_of(self.step),
            step=self.step,
            slot=self.slot + 1,
            manifest_nbytes=10,
            manifest_digest=b"d" * 32,
            pinned=False,
            verified=False,
            metric=None,
            references=(),
            committed_unix=1000.0 + self.step,
            nbytes=4000,
        )
        self.live.append(entry)
        self._append("COMMIT", entry.attempt)
        one = telemetry_of_step(self.step).model_copy(update=telemetry)
        self.bucket.add(entry.prefix + TELEMETRY_NAME, encode_telemetry(one))
        if len(self.live) > 3:
            self._append("RETIRE", self.live.pop(0).attempt)

    def job(self, *failures: SaveFailure) -> None:
        """A job began, and says that saves have failed."""
        one = job_of(*failures)
        key = f"{JOBS_PREFIX}{len(failures):014d}-{'0' * 16}-{1:08d}"
        self.bucket.add(key, one.model_dump_json().encode())

    def _append(self, kind: Any, attempt: str | None) -> None:
        self.slot += 1
        record = Record(
            kind=kind,
            slot=self.slot,
            epoch=1,
            write_id=self.write_id * 16,
            time_unix=1000.0 + self.step,
            attempt=attempt,
            live=tuple(self.live),
            previous=self.digest or None,
        )
        data = encode_record(record)
        self.digest = record_digest(data)
        self.bucket.add(record_key(self.slot), data)


class Flaky(WrappedStore):
    """Answers nothing while `is_remote`; repeats nothing, so that no test waits."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.is_remote = False
        self._patience = Patience()

    @property
    def patience(self) -> Patience:
        return self._patience

    def _check(self) -> None:
        if self.is_remote:
            raise TransientError("the network is <away>")

    def get(self, key: str, byte_range: Any = None) -> bytes:
        self._check()
        return super().get(key, byte_range)

    def info(self, key: str) -> ObjectInfo:
        self._check()
        return super().info(key)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self._check()
        return super().list(prefix, after=after)


# What is seen -----------------------------------------------------------------------------------


def test_a_run_is_seen_as_a_report_sees_it(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    poller = RunPoller(url)
    assert poller.poll().availability == "waiting"
    seen = []
    for step in (1, 2, 3, 4):
        save(url, step, metric=1 / step)
        seen.append(poller.poll())
    maintenance = Maintenance.open(ckpt_store := polling.open_store(url))
    live = Log(ckpt_store).state().live
    maintenance.pin(live[2].attempt)
    maintenance.retire(live[0].attempt)
    state = poller.poll()
    report = report_of(url)
    assert [steps_of(one) for one in seen] == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert [one.version for one in (*seen, state)] == sorted(
        {one.version for one in (*seen, state)}
    )
    same = [replace(save, nbytes_stored=None) for save in state.run.saves]
    assert same == [replace(save, nbytes_stored=None) for save in report.saves]
    assert [save.is_live for save in state.run.saves] == [False, True, True, True]
    assert [save.pinned for save in state.run.saves] == [False, False, True, False]
    # The log keeps the size of what was retired.
    assert all(save.nbytes_stored for save in state.run.saves)
    assert (state.run.sessions, state.run.is_whole_history) == (report.sessions, True)
    assert state.run.totals == report.totals and len(state.run.totals) == 4
    assert state.availability == "there" and state.problem == ""
    assert RunPoller(url).poll().run.saves == state.run.saves


def test_failures_are_those_that_jobs_have_noted() -> None:
    long = LongRun(1)
    poller = RunPoller(MemoryStore(long.bucket))
    before = poller.poll()
    assert before.run.failures == ()
    early = SaveFailure(step=8, time_unix=1.0, error="early")
    late = SaveFailure(step=9, time_unix=2.0, error="late")
    long.job(late)
    long.job(early, early)
    assert poller.poll().version > before.version
    run = poller.poll().run
    assert [one.error for one in run.failures] == ["early", "early", "late"]
    assert run.failed_saves == 3 and [job.ending for job in run.jobs] == ["died", ""]
    bad = [notice.text for notice in run.notices(2000.0) if notice.severity == "bad"]
    assert [text.partition(" has failed")[0] for text in bad] == [
        "the save of step 9",
        "the save of step 8",
        "the save of step 8",
    ]


def test_checkpoints_older_than_what_was_read_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "RECORDS_MAX", 2)
    long = LongRun(3)
    state = RunPoller(MemoryStore(long.bucket)).poll()
    assert steps_of(state) == [1, 2, 3] and not state.run.is_whole_history
    assert state.run.sessions == 0  # the claim is in no record that was read


def test_telemetry_in_full_is_read_when_somebody_chooses_a_save() -> None:
    long = LongRun(3)
    store = CountingStore(MemoryStore(long.bucket))
    poller = RunPoller(store)
    poller.poll()
    assert poller.telemetry(attempt_of(2)) == telemetry_of_step(2)
    poller = RunPoller(store)
    poller.state = replace(poller.state, entries=tuple(long.live))
    store.reset()
    for _ in range(3):
        assert poller.telemetry(attempt_of(1)) == telemetry_of_step(1)
    assert store.stats.requests_total == 2
    assert poller.telemetry(attempt_of(9)) is None
    long.bucket.remove(step_prefix(3, attempt_of(3)) + TELEMETRY_NAME)
    store.reset()
    assert [poller.telemetry(attempt_of(3)) for _ in range(3)] == [None] * 3
    assert store.stats.requests_total == 1
    poller.state = replace(poller.state, version=poller.state.version + 1)
    assert poller.telemetry(attempt_of(3)) is None and store.stats.requests_total == 2


def test_telemetry_that_is_written_after_a_look_is_found_by_a_later_one() -> None:
    long = LongRun(1)
    poller = RunPoller(MemoryStore(long.bucket))
    poller.poll()
    long.save()
    key = step_prefix(2, attempt_of(2)) + TELEMETRY_NAME
    long.bucket.remove(key)
    before = poller.poll()
    assert before.run.saves[-1].totals is None
    long.bucket.add(key, encode_telemetry(telemetry_of_step(2)))
    after = poller.poll()
    assert after.run.saves[-1].totals == telemetry_of_step(2).totals
    assert after.version > before.version and poller.poll() is after


def test_telemetry_that_never_comes_is_looked_for_a_few_times() -> None:
    long = LongRun(1)
    long.bucket.remove(step_prefix(1, attempt_of(1)) + TELEMETRY_NAME)
    store = CountingStore(MemoryStore(long.bucket))
    poller = RunPoller(store)
    for _ in range(polling.TRIES):
        poller.poll()
    store.reset()
    poller.poll()
    assert store.stats.requests_total == 4


def test_telemetry_of_another_save_does_not_speak_for_this_one() -> None:
    long = LongRun(2)
    key = step_prefix(2, attempt_of(2)) + TELEMETRY_NAME
    long.bucket.remove(key)
    first = telemetry_of_step(1)
    wrong = first.model_copy(update={"totals": first.totals.model_copy(update={"retries": 9})})
    long.bucket.add(key, encode_telemetry(wrong))
    state = RunPoller(MemoryStore(long.bucket)).poll()
    assert [save.totals for save in state.run.saves] == [first.totals, None]


# What it costs ----------------------------------------------------------------------------------


def test_a_long_run_is_read_once_and_then_only_what_is_new() -> None:
    counts = {}
    for steps in (10, 10_000):
        long = LongRun(steps)
        store = CountingStore(MemoryStore(long.bucket))
        poller = RunPoller(store)
        state = poller.poll()
        first = store.stats.requests_total
        # A record is its size and its bytes here; finding the last one is a logarithm.
        assert first <= 2 * RECORDS_MAX + 2 * polling.FULL_MAX + 60
        store.reset()
        assert poller.poll() is state
        idle = store.stats.requests_total
        long.save()
        store.reset()
        state = poller.poll()
        assert state.run.saves[-1].step == steps + 1 and state.run.saves[-1].totals is not None
        counts[steps] = (idle, store.stats.requests_total)
    assert counts[10] == counts[10_000]
    idle, with_a_save = counts[10_000]
    # The last record that was read, whether another one follows, and the jobs; then two records,
    # the last with the one before it, and one telemetry.
    assert idle == 4 and with_a_save <= 20


def test_after_a_long_pause_the_newest_records_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "RECORDS_MAX", 20)
    long = LongRun(5)
    store = CountingStore(MemoryStore(long.bucket))
    poller = RunPoller(store)
    assert poller.poll().run.is_whole_history
    for _ in range(1000):
        long.save()
    store.reset()
    state = poller.poll()
    assert store.stats.requests_total < 2 * 21 + 60
    assert steps_of(state)[-3:] == [1003, 1004, 1005] and not state.run.is_whole_history


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "EVENTS_MAX", 30)
    long = LongRun(5)
    poller = RunPoller(MemoryStore(long.bucket))
    for _ in range(40):
        poller.poll()
        long.save()
    run = poller.poll().run
    assert 15 <= len(run.saves) <= 33 and not run.is_whole_history
    assert len(run.measured.full) <= polling.FULL_MAX
    assert {*run.measured.totals} <= {save.attempt for save in run.saves}


def test_pauses_grow_while_nothing_happens() -> None:
    pauses = [2.0]
    for _ in range(8):
        pauses.append(next_pause(pauses[-1], shortest_seconds=2.0, has_changed=False))
    assert pauses[:3] == [2.0, 3.0, 4.5] and pauses[-1] == 16.0
    assert next_pause(16.0, shortest_seconds=2.0, has_changed=True) == 2.0


# What may go wrong ------------------------------------------------------------------------------


def test_a_store_that_is_away_is_shown_so_and_comes_back() -> None:
    now = [100.0]
    long = LongRun(2)
    store = Flaky(MemoryStore(long.bucket))
    poller = RunPoller(store, clock=lambda: now[0])
    seen = poller.poll()
    store.is_remote, now[0] = True, 200.0
    away = poller.poll()
    now[0] = 300.0
    assert poller.poll() is away
    assert (away.availability, away.since_unix, away.run) == ("away", 200.0, seen.run)
    assert "the network is <away>" in away.problem
    store.is_remote = False
    long.save()
    back = poller.poll()
    assert (back.availability, back.problem, back.since_unix) == ("there", "", 300.0)
    assert steps_of(back) == [1, 2, 3]


def test_a_store_that_is_away_from_the_start_may_come() -> None:
    store = Flaky(MemoryStore(LongRun(2).bucket))
    store.is_remote = True
    poller = RunPoller(store)
    assert poller.poll().availability == "away"
    store.is_remote = False
    assert steps_of(poller.poll()) == [1, 2]


def test_a_place_that_holds_other_things_is_refused_as_by_any_command(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(NoCheckpoint, match=r"notes.txt"):
        RunPoller(str(tmp_path)).poll()
    with pytest.raises(InvalidUrlError, match="did you mean s3"):
        RunPoller("s4://bucket/run").poll()


def test_an_empty_place_is_waited_for_whatever_comes_there() -> None:
    bucket = MemoryBucket()
    poller = RunPoller(MemoryStore(bucket))
    assert poller.poll().availability == "waiting"
    bucket.add("config.json", b"{}")
    state = poller.poll()
    assert state.availability == "waiting" and "config.json" in state.problem
    for key, (data, _) in list(LongRun(1).bucket._objects.items()):
        bucket.add(key, data)
    assert steps_of(poller.poll()) == [1]


def test_a_root_that_was_exchanged_is_read_anew() -> None:
    long = LongRun(5)
    poller = RunPoller(MemoryStore(long.bucket))
    poller.poll()
    for key in long.bucket.keys_from("", ""):
        long.bucket.remove(key)
    gone = poller.poll()
    assert gone.availability == "away" and steps_of(gone) == [1, 2, 3, 4, 5]
    assert "is empty or does not exist" in gone.problem
    other = LongRun(8, write_id=b"o")
    for key in other.bucket.keys_from("steps/", ""):
        other.bucket.remove(key)  # and without telemetry
    for key in other.bucket.keys_from("", ""):
        data = other.bucket.find(key)
        assert data is not None
        long.bucket.add(key, data[0])
    state = poller.poll()
    assert state.availability == "there" and len(state.run.saves) == 8
    assert state.run.totals == ()


def test_a_damaged_record_is_an_error_at_first_and_later_a_state() -> None:
    long = LongRun(2)
    poller = RunPoller(MemoryStore(long.bucket))
    seen = poller.poll()
    long.save()
    key = record_key(long.slot)
    long.bucket.remove(key)
    long.bucket.add(key, b"damaged")
    state = poller.poll()
    assert state.availability == "away" and state.run == seen.run and "damaged" in state.problem
    with pytest.raises(Corrupt):
        RunPoller(MemoryStore(long.bucket)).poll()


# The value --------------------------------------------------------------------------------------


def event(slot: int, kind: str, step: int | None = None, **more: Any) -> Event:
    attempt = None if step is None else attempt_of(step)
    return Event(slot, kind, 1000.0 + slot, 1, attempt, step, None, 0, **more)


def test_records_that_count_for_nothing_bring_no_save() -> None:
    events = [event(0, "CLAIM"), event(1, "COMMIT", 1), event(2, "COMMIT", 2, problem="void")]
    entry = LongRun(1).live[0]
    run = run_of("x", events, [entry], Measurements(), ())
    assert [save.step for save in run.saves] == [1] and run.saves[0].is_live
    # One that was retired did exist: the log was mended there.
    events.append(event(3, "RETIRE", 2))
    run = run_of("x", events, [entry], Measurements(), ())
    assert [(save.step, save.retired_unix) for save in run.saves] == [(1, None), (2, 1003.0)]


def test_a_commit_that_is_made_again_is_one_save() -> None:
    events = [event(0, "COMMIT", 1), event(1, "RETIRE", 1), event(2, "COMMIT", 1)]
    run = run_of("x", events, LongRun(1).live, Measurements(), ())
    (one,) = run.saves
    assert one.is_live and one.retired_unix is None and one.committed_unix == 1000.0


def test_what_a_save_says_of_itself_counts_before_what_others_carry() -> None:
    first, second = telemetry_of_step(1), telemetry_of_step(2)
    wrong = first.totals.model_copy(update={"retries": 9})
    carrying = second.model_copy(update={"history": [wrong]})
    for measured in (
        Measurements().with_telemetry([first, carrying]),
        Measurements().with_telemetry([first]).with_telemetry([carrying]),
        Measurements().with_telemetry([carrying]).with_telemetry([first]),
    ):
        assert measured.totals[attempt_of(1)].retries == 0
