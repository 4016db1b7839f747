"""Trackers get the numbers of saves and restores, and the monitoring files name what we export.

Method: one training that restores, saves, and fails to save, observed by all adapters at once;
TensorBoard's files are read back by TensorBoard, other trackers are objects with the methods that
their documentation has, called with the same names.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import ckpt
from ckpt.integrations.trackers import (
    MlflowSaves,
    OpenTelemetrySaves,
    TensorBoardSaves,
    WandbSaves,
    scalars_of,
)
from ckpt.service.events import (
    NearFailed,
    NearSaved,
    RankHeard,
    Restored,
    SaveEvent,
    SaveFailed,
    SaveSkipped,
    SaveSucceeded,
)
from ckpt.world.attendance import Concern

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"


class Calls:
    """An object of which any method can be called; what it is called with is kept."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **how: Any) -> None:
            self.made.append((name, *args, *([how] if how else [])))

        return call


class Sample(NamedTuple):
    """What an instrument was given."""

    name: str
    amount: float
    attributes: Mapping[str, str] | None


class Meter:
    """As of opentelemetry.metrics, with instruments that keep what they are given."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Any:
        assert unit and description
        return Instrument(name, self.samples, "add")

    def create_histogram(self, name: str, unit: str = "", description: str = "") -> Any:
        assert unit == "s" and description
        return Instrument(name, self.samples, "record")


class Instrument:
    """A counter or a histogram: it has the one method or the other."""

    def __init__(self, name: str, samples: list[Sample], method: str) -> None:
        def take(amount: float, attributes: Mapping[str, str] | None = None) -> None:
            samples.append(Sample(name, amount, attributes))

        setattr(self, method, take)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[SaveEvent]:
    """A restore of step 1, two saves, one that failed, one that was skipped, one about a rank."""
    url = str(tmp_path_factory.mktemp("trackers") / "run")
    state = {"x": torch.ones(30)}
    ckpt.save(state, url, step=1)
    events: list[SaveEvent] = []
    with ckpt.Checkpointer(
        state, url, save=ckpt.EverySteps(1), observers=[events.append]
    ) as checkpointer:
        checkpointer.restore()
        for step in (2, 3):
            checkpointer.step(step)
            checkpointer.wait()
    assert [type(event) for event in events] == [Restored, SaveSucceeded, SaveSucceeded]
    concern = Concern(3, "silent", "host", 2, "step", 9.0)
    return [*events, SaveFailed(4, OSError("disk full")), SaveSkipped(5), RankHeard(concern)]


def test_scalars_are_those_of_the_reports(events: list[SaveEvent]) -> None:
    restored, _, saved, failed, skipped, heard = events
    assert isinstance(restored, Restored) and isinstance(saved, SaveSucceeded)
    assert scalars_of(saved) == {
        "save_seconds": saved.seconds,
        "save_blocked_seconds": saved.blocked_seconds,
        "saved_bytes": saved.report.nbytes,
        "retries": 0,
    }
    assert scalars_of(restored) == {
        "restore_seconds": restored.seconds,
        "restore_read_bytes": restored.report.nbytes_read,
        "restore_skipped": 0,
    }
    assert scalars_of(failed) == {"save_failed": 1}
    assert scalars_of(skipped) == {"save_skipped": 1}
    assert scalars_of(heard) == {}


def test_near_saves_are_noted_by_every_tracker(events: list[SaveEvent]) -> None:
    from prometheus_client import CollectorRegistry

    from ckpt.integrations.prometheus import SaveMetrics

    saved = events[1]
    assert isinstance(saved, SaveSucceeded)
    near = NearSaved(saved.report, 0.5, 0.25), NearFailed(6, OSError("full"))
    nbytes = saved.report.totals.nbytes
    assert scalars_of(near[0]) == {
        "near_seconds": 0.5,
        "near_blocked_seconds": 0.25,
        "near_saved_bytes": nbytes,
    }
    assert scalars_of(near[1]) == {"near_failed": 1}
    writer, meter, registry = Calls(), Meter(), CollectorRegistry()
    for observe in (
        TensorBoardSaves(writer),
        OpenTelemetrySaves(meter),
        SaveMetrics(registry),
    ):
        for event in near:
            observe(event)
    assert writer.made == [
        ("add_scalar", "ckpt/near_seconds", 0.5, 2),
        ("add_scalar", "ckpt/near_blocked_seconds", 0.25, 2),
        ("add_scalar", "ckpt/near_saved_bytes", nbytes, 2),
        ("add_scalar", "ckpt/near_failed", 1.0, 6),
    ]
    assert meter.samples == [
        ("ckpt.near_saves", 1, {"outcome": "saved"}),
        ("ckpt.near_save.duration", 0.5, None),
        ("ckpt.near_save.blocked", 0.25, None),
        ("ckpt.near_saves", 1, {"outcome": "failed"}),
    ]
    assert registry.get_sample_value("ckpt_near_blocked_seconds_sum") == 0.25
    assert registry.get_sample_value("ckpt_last_near_step") == 2


def test_tensorboard_reads_back_what_was_noted(events: list[SaveEvent], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not among our dependencies")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:  # type: ignore[no-untyped-call]
        observer = TensorBoardSaves(writer)
        for event in events:
            observer(event)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == sorted(
        {f"ckpt/{name}" for event in events for name in scalars_of(event)}
    )
    saved = [event for event in events if isinstance(event, SaveSucceeded)]
    noted = read.Scalars("ckpt/save_seconds")
    assert [one.step for one in noted] == [2, 3]
    assert [one.value for one in noted] == pytest.approx([event.seconds for event in saved])
    (text,) = read.Tensors("ckpt/failures/text_summary")
    assert text.step == 4 and b"OSError: disk full" in text.tensor_proto.string_val[0]


def test_a_writer_is_asked_for_what_is_noted_alone(events: list[SaveEvent]) -> None:
    """One without texts notes numbers; methods may be exchanged while it is observed."""
    noted: list[str] = []
    writer = SimpleNamespace()
    observer = TensorBoardSaves(writer)
    writer.add_scalar = lambda name, number, step: noted.append(name)
    for event in events:
        if not isinstance(event, SaveFailed):
            observer(event)
    assert "ckpt/save_seconds" in noted


def test_wandb_gets_numbers_over_their_own_step_and_alerts(events: list[SaveEvent]) -> None:
    run = Calls()
    observer = WandbSaves(run)
    for event in events:
        observer(event)
    definition, *calls = run.made
    assert definition == ("define_metric", "ckpt/*", {"step_metric": "ckpt/step"})
    assert [call[0] for call in calls] == ["log"] * 4 + ["alert", "log"]
    logged = [call[1] for call in calls if call[0] == "log"]
    assert [data["ckpt/step"] for data in logged] == [1, 2, 3, 4, 5]
    assert logged[1]["ckpt/save_seconds"] == events[1].seconds  # type: ignore[union-attr]
    assert "OSError: disk full" in calls[4][1]["text"]
    quiet = Calls()
    WandbSaves(quiet, alerts=False)(events[3])
    assert [call[0] for call in quiet.made] == ["define_metric", "log"]


def test_mlflow_gets_metrics_of_its_run_and_the_failure_as_a_tag(events: list[SaveEvent]) -> None:
    client = Calls()
    observer = MlflowSaves(client, "run-7")
    for event in events:
        observer(event)
    metrics = [call for call in client.made if call[0] == "log_metric"]
    assert ("log_metric", "run-7", "ckpt/save_failed", 1.0, {"step": 4}) in metrics
    assert len(metrics) == sum(len(scalars_of(event)) for event in events)
    # What MLflow allows in a key.
    assert all(re.fullmatch(r"[\w\-. /]+", call[2]) for call in metrics)
    (tag,) = [call for call in client.made if call[0] == "set_tag"]
    assert tag[1:3] == ("run-7", "ckpt.failure") and "step 4" in tag[3]


def test_opentelemetry_counts_and_measures(events: list[SaveEvent]) -> None:
    meter = Meter()
    observer = OpenTelemetrySaves(meter)
    for event in events:
        observer(event)
    outcomes = [s.attributes["outcome"] for s in meter.samples if s.attributes is not None]
    assert outcomes == ["saved", "saved", "failed", "skipped"]
    saved = [event for event in events if isinstance(event, SaveSucceeded)]
    for name, values in (
        ("ckpt.save.duration", [event.seconds for event in saved]),
        ("ckpt.save.blocked", [event.blocked_seconds for event in saved]),
        ("ckpt.save.io", [event.report.nbytes for event in saved]),
        ("ckpt.restores", [1]),
    ):
        assert [s.amount for s in meter.samples if s.name == name] == values


# Monitoring ------------------------------------------------------------------------------------


def exported() -> dict[str, set[str]]:
    """The labels of each series that `SaveMetrics` exports, by its name."""
    prometheus = pytest.importorskip("prometheus_client", reason="the extra [metrics]")
    from ckpt.integrations.prometheus import SaveMetrics

    registry = prometheus.CollectorRegistry()
    metrics = SaveMetrics(registry)
    labels: dict[str, set[str]] = {}
    for family in registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        for suffix in suffixes.get(family.type, ("",)):
            labels[family.name + suffix] = set()
    for name in labels:
        if "phase_seconds" in name:
            labels[name] = {"phase"}
        elif name in ("ckpt_saves_total", "ckpt_near_saves_total"):
            labels[name] = {"outcome"}
        if name.endswith("_bucket"):
            labels[name] |= {"le"}
    assert metrics is not None and len(labels) > 20
    return labels


OUTCOMES = {"saved", "failed", "skipped"}


def check_expression(text: str) -> None:
    """Series are exported, labels are theirs or `job`, brackets close."""
    labels = exported()
    for name, selector in re.findall(r"(ckpt_\w+)(?:\{([^}]*)\})?", text):
        assert name in labels, f"{name} is not exported: {text}"
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', selector):
            assert label in labels[name] | {"job"}, f"{name} has no label {label}: {text}"
            assert label != "outcome" or value in OUTCOMES
    for group in re.findall(r"by \(([^)]*)\)", text):
        known = {"job"}.union(*(labels[name] for name in re.findall(r"ckpt_\w+", text)))
        assert {label.strip() for label in group.split(",")} <= known, text
    for opening, closing in ("()", "{}", "[]"):
        assert text.count(opening) == text.count(closing), text


def test_alerts_name_what_is_exported() -> None:
    yaml = pytest.importorskip("yaml", reason="comes with the extra [docs]")
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) >= 7
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "$labels.job" in rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "1m"))
        check_expression(rule["expr"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")
def test_alerts_fire_for_what_they_say_and_for_nothing_else(tmp_path: Path) -> None:
    """By Prometheus' own tool. A rule that is taken away, or always fires, is found."""
    for name in ("alerts.yml", "alerts_test.yml"):
        shutil.copy(MONITORING / name, tmp_path)

    def is_right() -> bool:
        command = ["promtool", "test", "rules", "alerts_test.yml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert "parse" not in done.stderr, done.stderr
        return done.returncode == 0

    assert is_right()
    text = (MONITORING / "alerts.yml").read_text()
    for name in re.findall(r"alert: (\w+)", text):
        for wrong in ("vector(0) > 0", 'label_replace(vector(1), "job", "a", "", "")'):
            before, rule, rest = text.partition(f"alert: {name}\n")
            start = rest.index("expr:")
            end = re.compile(r"^        (for|labels):", re.M).search(rest, start)
            assert end is not None
            changed = before + rule + rest[:start] + f"expr: {wrong}\n" + rest[end.start() :]
            (tmp_path / "alerts.yml").write_text(changed)
            assert not is_right(), (name, wrong)


def test_the_dashboard_names_what_is_exported() -> None:
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [
        (panel["gridPos"]["x"] + column, panel["gridPos"]["y"])
        for panel in panels
        for column in range(panel["gridPos"]["w"])
    ]
    assert len(set(places)) == len(places) and max(x for x, _ in places) < 24
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            check_expression(target["expr"])
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables
    check_expression(dashboard["templating"]["list"][1]["query"]["query"])
    shown = {
        name
        for panel in panels
        for t in panel["targets"]
        for name in re.findall(r"ckpt_\w+", t["expr"])
    }
    assert len(shown) > 12


def test_a_name_that_is_not_exported_is_found() -> None:
    for wrong in ("ckpt_saves", 'ckpt_saves_total{result="failed"}', "rate(ckpt_retries_total[1m]"):
        with pytest.raises(AssertionError):
            check_expression(wrong)
