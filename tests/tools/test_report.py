"""`ckpt report` says what happened, shows it in a real browser, and trusts nothing that it reads.

Four ranks that are threads train under a Checkpointer over a local root, one of them slow, one save
failing. What the report says is compared with what the log, the disk and the ranks say; the page is
run in headless Chromium where it is installed, its DOM and its console are read.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import TELEMETRY_NAME
from ckpt.commit.session import SessionRegistry
from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.screens.pages import report_page
from ckpt.screens.terminal import size
from ckpt.service.checkpointer import Checkpointer
from ckpt.telemetry.record import SaveFailure, Telemetry
from ckpt.tools.report import Report, report_of
from ckpt.world.base import World
from storage import StorageError, open_store
from storage.testing import FaultPlan, FaultyStore
from tests.e2e.job import state_at
from tests.service.chaos import ThreadTarget
from tests.thread_ranks import run_ranks
from tests.tools.browser import BARE_HEADS, CHROMIUM, CUT, HARD_TO_READ, TAB_STOPS, browser
from tests.tools.test_polling import job_of

RANKS, STEPS, KEPT, SLOW, BROKEN = 4, 9, 4, 2, 5


class Moody(FaultyStore):
    """Rank `SLOW` is late with its file of the last step but one, and the files of step `BROKEN`
    fail on rank 0.
    """

    def __init__(self, url: str, rank: int) -> None:
        super().__init__(open_store(url), FaultPlan(0))
        self._rank = rank

    def create(self, key: str, nbytes: int, **how: Any) -> Any:
        if self._rank == 0 and key.startswith(f"steps/{BROKEN:08d}"):
            raise StorageError("the disk is <b>full</b>")
        if self._rank == SLOW and key.startswith(f"steps/{STEPS - 1:08d}"):
            torch.ones(12_000_000).sort()  # work, more than half a second
        return self.inner.create(key, nbytes, **how)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("report") / "run")
    registry = SessionRegistry()

    def train(world: World) -> None:
        target = ThreadTarget(world, Moody(url, world.rank), registry)
        state = state_at(0, world.rank, world.size)
        with Checkpointer(
            state, target, save=ckpt.EverySteps(1), keep=ckpt.KeepLatest(KEPT), only=True
        ) as checkpointer:
            for step in range(1, STEPS + 1):
                state["step"] = step
                checkpointer.step(step, metric=1 / step)

    run_ranks(RANKS, train)
    failed = SaveFailure(step=BROKEN, time_unix=1000.0, error="the disk is <b>full</b>")
    data = job_of(failed).model_dump_json().encode()
    open_store(url).put_if_absent(f"jobs/{1:014d}-{1:016x}-{1:08d}", data)
    maintenance = Maintenance.open(open_store(url))
    maintenance.pin(ckpt.list_steps(url)[0].attempt)
    return url


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def text_of(report: Report) -> str:
    return Page("".join(report_page(report))).text


def test_report_tells_all_saves_and_what_became_of_them(root: str) -> None:
    report = report_of(root)
    steps = [step for step in range(1, STEPS + 1) if step != BROKEN]
    assert [save.step for save in report.saves] == steps
    assert [save.step for save in report.live] == steps[-KEPT:]
    assert [save.pinned for save in report.live] == [True] + [False] * (KEPT - 1)
    assert all((save.retired_unix is None) == save.is_live for save in report.saves)
    assert [save.metric for save in report.saves] == [1 / step for step in steps]
    assert "<figcaption>Metric</figcaption>" in "".join(report_page(report))
    assert report.sessions == 1 and report.is_whole_history
    stored = {attempt.attempt: attempt.nbytes for attempt in ckpt.disk_usage(root).attempts}
    for save in report.live:
        assert save.totals is not None and save.nbytes_stored == stored[save.attempt]
        kept = Path(root) / f"steps/{save.step:08d}-{save.attempt}" / TELEMETRY_NAME
        assert save.totals.nbytes == stored[save.attempt] - kept.stat().st_size


def test_later_saves_keep_the_history_of_retired_ones(root: str) -> None:
    retired = [save for save in report_of(root).saves if not save.is_live]
    assert retired and all(save.totals is not None for save in retired)
    assert [save.totals.step for save in retired if save.totals] == [s.step for s in retired]


def test_slow_rank_is_named_and_failures_are_reported_once(root: str) -> None:
    report = report_of(root)
    assert report.slowest is not None
    assert report.slowest.totals.slowest_rank == SLOW
    assert report.slowest.totals.slowest_phase == "write"
    wait, write = (report.slowest.phases.index(phase) for phase in ("wait", "write"))
    took = report.slowest.took_us
    assert max(range(RANKS), key=lambda rank: took[rank][write]) == SLOW
    assert min(range(RANKS), key=lambda rank: took[rank][wait]) == SLOW
    assert [one.step for one in report.failures] == [BROKEN]
    assert "full" in report.failures[0].error
    shown = [notice.text for notice in report.notices if notice.severity == "bad"]
    assert len(shown) == 1 and f"step {BROKEN} has failed" in shown[0]
    assert any("verify --mark" in notice.text for notice in report.notices)


def test_entries_have_the_sizes_of_the_state(root: str) -> None:
    state = state_at(STEPS, 0, 1)
    sizes = {entry.entry: entry.nbytes for entry in report_of(root).entries}
    assert sizes["replica"] == state["replica"].nbytes
    assert sizes["rows"] == state["rows"].local.nbytes
    assert [entry.nbytes for entry in report_of(root).entries] == sorted(
        sizes.values(), reverse=True
    )


def test_gaps_between_saves_are_reported(root: str) -> None:
    from ckpt.tools.report import _notices_of_gaps

    saves = report_of(root).saves[:5]
    times = (0.0, 60.0, 120.0, 3720.0, 3780.0)
    spaced = [replace(s, committed_unix=t) for s, t in zip(saves, times, strict=True)]
    (gap,) = _notices_of_gaps(spaced, 3800.0)
    assert gap.text.startswith(
        "60 min without a save between steps 3 and 4; the usual interval is 60 s"
    )
    assert "has the training ended" in _notices_of_gaps(spaced, 9999.0)[-1].text


def test_root_without_telemetry_and_a_place_that_is_no_root(tmp_path: Path) -> None:
    url = str(tmp_path / "plain")
    for step in (1, 2):
        ckpt.save({"x": torch.ones(8)}, url, step=step, telemetry=False)
    report = report_of(url)
    assert [save.totals for save in report.saves] == [None, None] and report.slowest is None
    assert "nothing is known of how 2 of 2 saves went" in text_of(report)
    with pytest.raises(NoCheckpoint):
        report_of(str(tmp_path / "nothing"))


def test_damaged_or_foreign_telemetry_is_left_out(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    for step in (1, 2, 3):
        ckpt.save({"x": torch.ones(8)}, url, step=step)
    first, second, _ = sorted(Path(url, "steps").iterdir())
    (first / TELEMETRY_NAME).write_bytes(b"{" * 100_000)
    data = json.loads((second / TELEMETRY_NAME).read_bytes())
    data["totals"]["attempt"] = "e000001-ffffffffffffffff"
    (second / TELEMETRY_NAME).write_text(json.dumps(data))
    report = report_of(url)
    # The third one still has the history of those before it.
    assert report.slowest is not None and report.slowest.totals.step == 3
    assert [save.totals is not None for save in report.saves] == [True, True, True]
    assert ckpt.verify(url, step=1).ok
    ckpt.load({"x": torch.zeros(8)}, url, step=1)


def test_command_writes_the_page_or_json(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.html"
    assert main(["report", root, "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert f"{STEPS - 1} saves, {KEPT} checkpoints" in out and "bad: the save of step" in out
    assert main(["report", root, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [save["step"] for save in shown["saves"]] == [s.step for s in report_of(root).saves]
    assert shown["slowest"]["totals"]["slowest_rank"] == SLOW
    assert main(["report", root, "--output", str(tmp_path / "no" / "x.html")]) == 1
    assert "--output names a local file" in capsys.readouterr().err


EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">\'"&'


def evil(report: Report) -> Report:
    """The same report, with hostile texts wherever storage could have brought them."""
    assert report.slowest is not None
    totals = report.slowest.totals.model_copy(update={"slowest_phase": EVIL, "attempt": EVIL})
    slowest = report.slowest.model_copy(
        update={"phases": [EVIL] * len(report.slowest.phases), "totals": totals}
    )
    return replace(
        report,
        url=EVIL,
        slowest=slowest,
        saves=tuple(replace(save, attempt=EVIL, totals=totals) for save in report.saves),
        jobs=(job_of(SaveFailure(step=1, time_unix=0.0, error=EVIL)),),
        notices=tuple(replace(notice, text=EVIL, severity=EVIL) for notice in report.notices),
        entries=tuple(replace(entry, entry=EVIL, kind=EVIL) for entry in report.entries),
    )


def test_hostile_texts_stay_texts(root: str) -> None:
    page = Page("".join(report_page(evil(report_of(root)))))
    assert "script" not in page.tags and "img" not in page.tags
    assert page.text.count(EVIL) > 20
    assert page.addresses == ["data:,"]  # nothing is fetched from anywhere


def test_names_and_notes_of_a_hostile_checkpoint_stay_texts(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    ckpt.save({EVIL: torch.ones(8)}, url, step=1, user={"note": EVIL})
    page = Page("".join(report_page(report_of(url))))
    assert "script" not in page.tags and "img" not in page.tags and "<script>" in page.text


def shown(page: Path, profile: Path, *more: str) -> tuple[str, str]:
    """What headless Chromium makes of a page: its DOM, and its console."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=2000", *more, page.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
def test_page_is_whole_and_can_be_read_on_any_screen(root: str, tmp_path: Path) -> None:
    report = report_of(root)
    fast = {"nbytes": 1023 << 20, "seconds": 1.0}
    saves = [
        replace(save, totals=save.totals.model_copy(update=fast))
        for save in report.saves
        if save.totals is not None
    ]
    path = tmp_path / "report.html"
    path.write_text("".join(report_page(replace(report, saves=tuple(saves)))), encoding="utf-8")
    with browser(tmp_path / "profile") as page:
        page.open(path.as_uri())
        labels = "[...document.querySelectorAll('.ys span')].map((one) => one.textContent)"
        assert "1023.0 MiB/s" in page.evaluate(labels)
        assert page.evaluate(TAB_STOPS) <= 60 and page.evaluate(BARE_HEADS) == []
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                page.show_as(width=width, scheme=scheme)
                assert page.evaluate(CUT) == [], (width, scheme)
                assert page.evaluate(HARD_TO_READ) == [], (width, scheme)


def test_bars_of_a_metric_rise_from_the_least(root: str) -> None:
    """Rewards may be negative, and losses far from zero and close to each other."""
    report = report_of(root)
    count = len(report.saves)
    for least, step in ((-90.0, 10.0), (2.0, 1e-3), (1e17, 0.0)):
        metrics = [least + step * nth for nth in range(count)]
        pairs = zip(report.saves, metrics, strict=True)
        page = "".join(
            report_page(replace(report, saves=tuple(replace(one, metric=m) for one, m in pairs)))
        )
        chart = page[page.index("<figcaption>Metric<") :]
        shown = re.findall(r'height="([\d.]+)"><title>', chart[: chart.index("</figure>")])
        expected = [max(100 * nth / (count - 1), 0.5) if step else 0.5 for nth in range(count)]
        assert [*map(float, shown)] == pytest.approx(expected, abs=0.01)
        assert f">{least:.4g}</span>" in chart


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
def test_browser_shows_the_numbers_without_complaint(root: str, tmp_path: Path) -> None:
    report = report_of(root)
    page = tmp_path / "report.html"
    page.write_text("".join(report_page(report)), encoding="utf-8")
    dom, console = shown(page, tmp_path / "profile", "--dump-dom")
    assert console == ""
    assert f"rank {SLOW}" in dom and f'Slowest was <b class="slowest">rank {SLOW}</b>' in dom
    assert dom.count('<rect class="bar') == 5 * len(report.saves)  # and their metric
    cells = re.findall(r'<td class="h\d', dom)
    assert len(cells) >= RANKS * 4
    for save in report.saves:
        assert save.attempt in dom and save.totals is not None
        assert size(save.totals.nbytes) in dom
    picture = tmp_path / "report.png"
    shown(page, tmp_path / "profile", "--window-size=1280,2000", f"--screenshot={picture}")
    assert picture.stat().st_size > 50_000


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
def test_browser_runs_nothing_of_a_hostile_page(root: str, tmp_path: Path) -> None:
    """A page is looked at in which hostile texts were also put in without escaping: the policy of
    the page lets none of it run or load.
    """
    text = "".join(report_page(evil(report_of(root))))
    loud = '<script>document.title = "owned"</script><img src="https://example.com/x.png">'
    page = tmp_path / "report.html"
    page.write_text(text, encoding="utf-8")
    dom, console = shown(page, tmp_path / "profile", "--dump-dom")
    assert console == "" and "<script>" not in dom
    page.write_text(text.replace("</main>", f"{loud}</main>"), encoding="utf-8")
    dom, console = shown(page, tmp_path / "profile", "--dump-dom")
    assert "<title>owned" not in dom and "Content Security Policy" in console


def test_page_says_what_took_longest_when_that_was_the_coordinator(root: str) -> None:
    report = report_of(root)
    assert report.slowest is not None
    took = [list(row) for row in report.slowest.took_us]
    took[0][report.slowest.phases.index("manifest")] = 90_000_000
    slowest = report.slowest.model_copy(update={"took_us": took})
    shown = text_of(replace(report, slowest=slowest))
    assert "Of all phases longest was manifest on rank 0 (90 s)" in shown


def test_page_tells_of_a_retired_save_that_was_slower(root: str) -> None:
    report = report_of(root)
    first, *others = report.saves
    assert first.totals is not None and not first.is_live
    slower = first.totals.model_copy(update={"seconds": 500.0})
    shown = text_of(replace(report, saves=(replace(first, totals=slower), *others)))
    assert "Step 1 took 500 s, but is retired" in shown


def test_telemetry_of_many_ranks_is_bounded_in_the_page(root: str) -> None:
    report = report_of(root)
    assert report.slowest is not None
    many = 1000
    slowest = Telemetry.model_validate(
        {
            **report.slowest.model_dump(),
            "started_us": report.slowest.started_us[:1] * many,
            "took_us": report.slowest.took_us[:1] * many,
            "nbytes": report.slowest.nbytes[:1] * many,
            "blocked_us": [0] * many,
            "retries": [0] * many,
        }
    )
    assert "128 of 1000 ranks" in text_of(replace(report, slowest=slowest))


def test_page_cannot_be_made_of_a_damaged_log(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    ckpt.save({"x": torch.ones(8)}, url, step=1)
    for record in Path(url, "log").iterdir():
        record.chmod(0o644)
        record.write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        report_of(url)
