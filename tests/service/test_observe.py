"""Every rank reports how saves went, in the log, to observers and beside the checkpoint, and
a failing report never fails a save.

Method: ranks that are threads, one of them slowed down, over stores that fail as scripted; the
reports are compared with what was done.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.commit.log import Log
from ckpt.commit.names import TELEMETRY_NAME
from ckpt.commit.session import Session, SessionRegistry
from ckpt.errors import Corrupt
from ckpt.saving.task import SaveOptions
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.events import Restored, SaveEvent, SaveFailed, SaveSucceeded
from ckpt.telemetry.record import (
    HISTORY_MAX,
    JsonLines,
    PhaseSpan,
    RankReport,
    SaveHistory,
    SaveTotals,
    Telemetry,
    decode_telemetry,
    encode_telemetry,
    read_telemetry,
    totals_of,
)
from ckpt.tools.report import report_of
from ckpt.world.base import SoloWorld, World
from storage import RetryPolicy, StorageError, Store, TransientError, open_store
from storage.memory import MemoryStore
from storage.retry import RetryingStore
from storage.store import ObjectWriter
from storage.testing import FaultPlan, FaultyStore
from storage.wrap import WrappedStore
from tests.e2e.job import state_at
from tests.service.chaos import ThreadTarget
from tests.thread_ranks import run_ranks

RANKS, SLOW = 4, 2


def trained(
    stores: list[Store], steps: int, *, observers: Any = lambda rank: (), first: int = 1
) -> None:
    """A training of as many ranks as stores, which saves every step and waits for it."""
    registry = SessionRegistry()

    def train(world: World) -> None:
        target = ThreadTarget(world, stores[world.rank], registry)
        state = state_at(0, world.rank, world.size)
        with Checkpointer(
            state, target, save=ckpt.EverySteps(1), observers=observers(world.rank)
        ) as checkpointer:
            checkpointer.restore()
            for step in range(first, first + steps):
                state["step"] = step
                checkpointer.step(step)
                checkpointer.wait()

    run_ranks(len(stores), train)


class Slow(WrappedStore):
    """Has work to do before every object."""

    def create(self, key: str, nbytes: int, **how: Any) -> AbstractContextManager[ObjectWriter]:
        torch.ones(2_000_000).sort()
        return self.inner.create(key, nbytes, **how)


def telemetry_of(store: Store) -> list[Telemetry]:
    telemetry = [read_telemetry(store, entry.prefix) for entry in Log(store).state().live]
    return [one for one in telemetry if one is not None]


# What is reported ---------------------------------------------------------------------------------


def test_every_rank_tells_its_phases_and_the_slowest_is_named() -> None:
    inner = MemoryStore()
    trained([Slow(inner) if rank == SLOW else inner for rank in range(RANKS)], 2)
    for number, telemetry in enumerate(telemetry_of(inner)):
        assert telemetry.totals.step == number + 1 and telemetry.totals.ranks == RANKS
        assert telemetry.totals.slowest_rank == SLOW and telemetry.totals.slowest_phase == "write"
        expected = ["attempt", "flatten", "stage", "write", "wait", "parts", "manifest", "commit"]
        assert telemetry.phases == expected
        write = telemetry.phases.index("write")
        assert all(row[write] > 0 for row in telemetry.took_us)
        assert telemetry.took_us[SLOW][write] / 1e6 == pytest.approx(
            telemetry.totals.slowest_seconds, abs=1e-5
        )
        # Only the coordinator makes the manifest and commits.
        assert all(row[-1] == 0 for row in telemetry.took_us[1:]) and telemetry.took_us[0][-1] > 0
        assert sum(row[write] for row in telemetry.nbytes) <= telemetry.totals.nbytes
        assert telemetry.totals.blocked_seconds <= telemetry.totals.seconds + 1
        assert [one.step for one in telemetry.history] == list(range(1, number + 1))


def test_all_ranks_get_the_same_totals() -> None:
    inner = MemoryStore()
    events: list[list[SaveEvent]] = [[] for _ in range(RANKS)]
    trained([inner] * RANKS, 1, observers=lambda rank: [events[rank].append])
    (first, *others) = [event for (event,) in events if isinstance(event, SaveSucceeded)]
    assert len(others) == RANKS - 1
    assert all(event.report.totals == first.report.totals for event in others)
    assert first.report.totals.nbytes == first.report.nbytes


def test_totals_are_sums_and_maxima() -> None:
    reports = [
        RankReport(
            (PhaseSpan("stage", 100.0, 0.5, 10), PhaseSpan("write", 100.5, 1.0, 10)), 0.2, 1
        ),
        RankReport(
            (PhaseSpan("stage", 100.0, 0.1, 20), PhaseSpan("write", 100.1, 2.0, 20)), 0.7, 2
        ),
        RankReport((PhaseSpan("wait", 100.0, 9.0, 0),), 0.0, 0),
    ]
    assert [RankReport.decode(one.encode()) for one in reports] == reports
    made = {"nbytes": 1000, "nbytes_referenced": 5, "warnings": 1}
    totals = totals_of(reports, 7, "e000001-0000000000000000", now_unix=104.0, **made)
    assert (totals.seconds, totals.blocked_seconds, totals.retries) == (4.0, 0.7, 3)
    assert (totals.slowest_rank, totals.slowest_phase, totals.slowest_seconds) == (1, "write", 2.0)
    assert (totals.staged_nbytes, totals.nbytes_per_second, totals.warnings) == (30, 250.0, 1)
    assert totals.ended(110.0).seconds == 10.0 and totals.ended(0.0).seconds == 0.0


class Hiccup(WrappedStore):
    """Every object fails once."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.seen: set[str] = set()

    def create(self, key: str, nbytes: int, **how: Any) -> AbstractContextManager[ObjectWriter]:
        return self._failing_once(key, nbytes, how)

    @contextmanager
    def _failing_once(self, key: str, nbytes: int, how: Any) -> Iterator[ObjectWriter]:
        if key not in self.seen:
            self.seen.add(key)
            raise TransientError(f"create {key}: planted")
        with self.inner.create(key, nbytes, **how) as writer:
            yield writer


def test_repeated_requests_are_counted() -> None:
    inner = MemoryStore()

    def store() -> Store:
        return RetryingStore(Hiccup(inner), RetryPolicy(sleep=lambda seconds: None))

    events: list[SaveEvent] = []
    trained([store(), store()], 2, observers=lambda rank: [events.append] if rank else [])
    for telemetry in telemetry_of(inner):
        # A data file on each rank; on the coordinator the manifest, too, after the parts.
        assert telemetry.retries == [2, 1] and telemetry.totals.retries == 2
    assert [e.report.counters["retries"] for e in events if isinstance(e, SaveSucceeded)] == [1, 1]


# Telling never fails a save -----------------------------------------------------------------------


class NoTelemetry(WrappedStore):
    def create(self, key: str, nbytes: int, **how: Any) -> AbstractContextManager[ObjectWriter]:
        if key.endswith(TELEMETRY_NAME):
            raise StorageError(f"create {key}: planted failure")
        return self.inner.create(key, nbytes, **how)


def test_failure_to_keep_it_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    inner = MemoryStore()
    trained([NoTelemetry(inner)], 2)
    assert [entry.step for entry in Log(inner).state().live] == [1, 2]
    assert telemetry_of(inner) == []
    assert caplog.text.count("is saved, but its telemetry is not") == 2


def test_mistake_of_ours_after_the_commit_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def mistaken(*arguments: Any) -> Telemetry:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(SaveHistory, "describe", mistaken)
    inner = MemoryStore()
    trained([inner], 1)
    assert [entry.step for entry in Log(inner).state().live] == [1]
    assert "planted" in caplog.text


def test_observer_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: SaveEvent) -> None:
        raise ValueError("planted")

    inner = MemoryStore()
    trained([inner], 2, observers=lambda rank: [broken])
    assert [entry.step for entry in Log(inner).state().live] == [1, 2]
    assert caplog.text.count("an observer of saves has failed on SaveSucceeded") == 2


def test_plain_saves_keep_none_unless_asked(tmp_path: Path) -> None:
    for wanted in (False, True):
        url = str(tmp_path / str(wanted))
        ckpt.save({"x": torch.ones(3)}, url, step=1, telemetry=wanted)
        kept = list(Path(url).rglob(TELEMETRY_NAME))
        assert len(kept) == wanted
        assert not SaveOptions().telemetry


def test_checkpointer_keeps_telemetry_by_default(tmp_path: Path) -> None:
    for wanted in (False, True):
        url = str(tmp_path / str(wanted))
        with Checkpointer(
            {"x": torch.ones(3)}, url, save=ckpt.EverySteps(1), telemetry=wanted
        ) as checkpointer:
            checkpointer.step(1)
        assert len(list(Path(url).rglob(TELEMETRY_NAME))) == wanted


def test_it_goes_with_its_checkpoint_and_copies_do_without(tmp_path: Path) -> None:
    url, copied = str(tmp_path / "run"), str(tmp_path / "copy")
    for step in (1, 2):
        ckpt.save({"x": torch.ones(3)}, url, step=step)
    assert ckpt.verify(url).ok
    ckpt.copy(url, copied)
    assert ckpt.verify(copied).ok
    session = Session.claim(open_store(url))
    session.retire(ckpt.list_steps(url)[0].attempt)
    assert len(list(Path(url).rglob(TELEMETRY_NAME))) == 1
    assert len(list(Path(url, "steps").iterdir())) == 1


# History ------------------------------------------------------------------------------------------


def test_history_survives_restarts_retention_and_failures() -> None:
    inner = MemoryStore()
    trained([inner], 3)

    class Full(FaultyStore):
        def create(self, key: str, nbytes: int, **how: Any) -> Any:
            if key.startswith("steps/00000005"):
                raise StorageError("the disk is full")
            return self.inner.create(key, nbytes, **how)

    registry = SessionRegistry()
    target = ThreadTarget(SoloWorld(), Full(inner, FaultPlan(0)), registry)
    state = state_at(0, 0, 1)
    with Checkpointer(
        state, target, save=ckpt.EverySteps(1), keep=ckpt.KeepLatest(1)
    ) as checkpointer:
        checkpointer.restore()
        for step in (4, 5, 6):
            checkpointer.step(step)
    (newest,) = telemetry_of(inner)
    assert [one.step for one in newest.history] == [1, 2, 3, 4] and newest.totals.step == 6


def totals_at(step: int) -> SaveTotals:
    report = RankReport((), 0.0, 0)
    return totals_of([report], step, f"e000001-{step:016x}", nbytes=1000, now_unix=100.0)


def test_history_is_bounded_and_so_is_what_is_kept_of_texts() -> None:
    history = SaveHistory()
    for step in range(HISTORY_MAX + 50):
        history.saved(totals_at(step))
    now = totals_at(1000)
    telemetry = history.describe(now, [RankReport((), 0.0, 0)], ["y" * 10_000] * 1000)
    assert [one.step for one in telemetry.history] == list(range(50, HISTORY_MAX + 50))
    assert decode_telemetry(encode_telemetry(telemetry)) == telemetry
    assert len(encode_telemetry(telemetry)) < 200_000


def test_a_thousand_ranks_take_little_room() -> None:
    spans = tuple(
        PhaseSpan(phase, 1e9 + index, 1.5, 1 << 33) for index, phase in enumerate("abcdefgh")
    )
    reports = [RankReport(spans, 0.01, 3)] * 1000
    made = SaveHistory().describe(totals_at(1), reports, ())
    assert len(encode_telemetry(made)) < 400_000 and len(reports[0].encode()) < 600


# Hostile objects ----------------------------------------------------------------------------------


def good() -> dict[str, Any]:
    spans = (PhaseSpan("write", 100.0, 1.0, 10),)
    made = SaveHistory().describe(totals_at(1), [RankReport(spans, 0.0, 0)] * 2, ["w"])
    fields: dict[str, Any] = json.loads(encode_telemetry(made))
    return fields


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "something else"),
        (("version",), 2),
        (("totals", "seconds"), float("nan")),
        (("totals", "seconds"), -1.0),
        (("totals", "step"), "1"),
        (("totals", "committed_unix"), 1e300),
        (("phases",), ["write"] * 65),
        (("phases", 0), "x" * 65),
        (("took_us",), [[1]]),
        (("took_us", 0), [1, 2]),
        (("nbytes", 0, 0), -1),
        (("blocked_us",), [0]),
        (("warnings",), ["x"] * 21),
        (("warnings", 0), "x" * 501),
        (("history",), [good()["totals"]] * 201),
        (("totals",), None),
    ],
)
def test_hostile_telemetry_is_refused(path: tuple[Any, ...], value: Any) -> None:
    data = good()
    decode_telemetry(json.dumps(data).encode())
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(Corrupt, match="telemetry"):
        decode_telemetry(json.dumps(data).encode())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_any_bytes_are_telemetry_or_corrupt(noise: bytes, offset: int) -> None:
    data = json.dumps(good()).encode()
    offset %= len(data)
    for hostile in (
        noise,
        data[:offset] + noise + data[offset + len(noise) :],
        b"[" * 10_000 + noise,
    ):
        with suppress(Corrupt):
            decode_telemetry(hostile)


# The log ------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    logged = [json.loads(JsonLines().format(record)) for record in caplog.records]
    return [line for line in logged if line.get("event") == event]


def test_one_line_for_each_save_and_restore(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ckpt")
    inner = MemoryStore()
    trained([inner, inner], 2)
    trained([inner, inner], 1, first=3)
    saved = lines(caplog, "saved")
    assert [line["step"] for line in saved] == [1, 2, 3]
    for line, telemetry in zip(saved, telemetry_of(inner), strict=True):
        assert line["level"] == "info" and line["logger"] == "ckpt.telemetry.record"
        assert line["message"].startswith(f"saved step {line['step']} in ")
        assert f"slowest rank {line['slowest_rank']} " in line["message"]
        assert telemetry.totals.model_dump(exclude={"warnings"}).items() <= line.items()
    (restored,) = lines(caplog, "restored")
    assert restored["step"] == 2 and restored["nbytes_read"] > 0
    assert set(restored["phase_seconds"]) == {"manifest", "bind", "plan", "read", "finish"}


def test_json_lines_tell_exceptions_and_what_json_lacks() -> None:
    try:
        raise ValueError("planted\nsecond line")
    except ValueError:
        record = logging.LogRecord(
            "x", logging.ERROR, __file__, 1, "it is %s", ("over",), sys.exc_info()
        )
    record.ckpt = {"path": Path("/a"), "message": "must not win"}
    text = JsonLines().format(record)
    fields = json.loads(text)
    assert "\n" not in text and fields["message"] == "it is over" and fields["path"] == "/a"
    assert "planted" in fields["exception"]


# Prometheus ---------------------------------------------------------------------------------------


def test_metrics_for_prometheus() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from ckpt.integrations.prometheus import SaveMetrics

    inner = MemoryStore()
    trained([inner], 2)
    registry = prometheus.CollectorRegistry()
    metrics = SaveMetrics(registry)
    events: list[SaveEvent] = []
    trained([inner], 3, first=3, observers=lambda rank: [metrics, events.append])
    metrics(SaveFailed(9, ValueError("planted")))

    def value(name: str, **labels: str) -> float:
        sample = registry.get_sample_value(name, labels)
        assert sample is not None, name
        return sample

    saved = [event for event in events if isinstance(event, SaveSucceeded)]
    assert [type(event) for event in events] == [Restored] + [SaveSucceeded] * 3
    assert value("ckpt_saves_total", outcome="saved") == 3
    assert value("ckpt_saves_total", outcome="failed") == 1
    assert value("ckpt_saves_total", outcome="skipped") == 0
    assert value("ckpt_save_seconds_count") == 3
    assert value("ckpt_save_blocked_seconds_sum") == pytest.approx(
        sum(event.blocked_seconds for event in saved)
    )
    assert value("ckpt_save_phase_seconds_count", phase="write") == 3
    written = sum(s.nbytes for e in saved for s in e.report.spans if s.phase == "write")
    assert value("ckpt_save_written_bytes_total") == written > 0
    assert value("ckpt_last_saved_step") == 5
    totals = saved[-1].report.totals
    assert value("ckpt_last_saved_timestamp_seconds") == totals.committed_unix
    assert value("ckpt_last_saved_bytes") == totals.nbytes
    assert value("ckpt_restores_total") == 1 and value("ckpt_restored_step") == 2
    assert value("ckpt_restore_read_bytes_total") > 0
    text = prometheus.generate_latest(registry).decode()
    assert "# HELP ckpt_save_blocked_seconds How long a save blocked" in text


def test_report_of_what_observers_received(tmp_path: Path) -> None:
    """The same numbers on all ways."""
    url = str(tmp_path / "run")
    events: list[SaveEvent] = []
    with Checkpointer(
        {"x": torch.ones(30)}, url, save=ckpt.EverySteps(1), observers=[events.append]
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.step(step)
    totals = [event.report.totals for event in events if isinstance(event, SaveSucceeded)]
    assert [save.totals for save in report_of(url).saves] == totals and len(totals) == 2
