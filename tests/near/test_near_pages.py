"""Near tiers on the pages of `ckpt serve` and `ckpt report`.

Method: a training whose hosts are folders has saved; the pages are made of its root and folders,
compared as texts, and where Chromium is installed looked at in it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckpt.cli import main
from ckpt.near.status import STATUS_NAME, TierStatus, write_status
from ckpt.near.tier import tiers_in
from ckpt.screens.pages import PageChoice, PageMatter, sections_of
from ckpt.service.policies import EverySteps
from ckpt.tools.near_tiers import tier_views
from ckpt.tools.polling import RunPoller, RunState
from storage.local import LocalStore
from tests.near.test_near_training import folders
from tests.near.training import Life
from tests.tools.browser import CHROMIUM, CUT, HARD_TO_READ, browser
from tests.tools.test_report import EVIL, Page
from tests.tools.test_serving import serving


@pytest.fixture
def trained(tmp_path: Path) -> tuple[str, list[str]]:
    """A root with step 5, two hosts with near steps 6 and 4, and a training that has done step 20,
    nine seconds after step 6.
    """
    root, hosts = str(tmp_path / "root"), folders(tmp_path, 0, 1)
    Life(2, LocalStore(root), hosts, save=EverySteps(5)).run(7)
    for host in hosts:
        (tier,) = tiers_in(host / "near")
        status = TierStatus(1, 20, 1009.0, 6, 1000.0)
        write_status(tier.store.place, status)
    return root, [str(host / "near") for host in hosts]


def section(state: RunState) -> str:
    look = PageMatter((state,), PageChoice(), lambda run, attempt: None, None, 1100.0)
    return sections_of(look)["near"]


def test_served_page_shows_both_tiers_and_the_work_at_risk(trained: tuple[str, list[str]]) -> None:
    root, paths = trained
    poller = RunPoller(root, near=paths)
    html = section(poller.poll())
    poller.close()
    text = Page(html).text
    assert "step 20 done" in text
    assert "work at risk: 14 steps, 9 s since the newest near checkpoint; 15 steps, " in text
    assert html.count("<tr>") == 1 + 2 and text.count("1 of 2") == 2
    for path, view in zip(paths, tier_views(paths), strict=True):
        assert path in text and view.nbytes > 0
    bare = RunPoller(root)
    assert "--near DIR" in Page(section(bare.poll())).text
    bare.close()


def test_texts_of_a_tier_are_escaped(trained: tuple[str, list[str]], tmp_path: Path) -> None:
    root, paths = trained
    evil = tmp_path / EVIL.replace("/", "_")
    os.rename(paths[0], evil)
    (tier,) = tiers_in(evil)
    (Path(tier.store.place) / STATUS_NAME).write_bytes(b"<script>" * 20)
    poller = RunPoller(root, near=[str(evil), paths[1]])
    html = section(poller.poll())
    poller.close()
    assert "<script" not in html and "<img" not in html
    assert "no status of a near tier" in Page(html).text


def test_report_has_the_near_tiers_of_the_root_alone(
    trained: tuple[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, paths = trained
    other = str(tmp_path / "other")
    Life(2, LocalStore(other), [Path(path).parent for path in paths]).run(2)
    flags = [word for path in paths for word in ("--near", path)]
    page = tmp_path / "report.html"
    assert main(["report", root, "--output", str(page), *flags]) == 0
    text = Page(page.read_text(encoding="utf-8")).text
    assert "work at risk: 14 steps, 9 s since the newest near checkpoint; 15 steps, " in text
    assert all(text.count(path) == 1 for path in paths)
    capsys.readouterr()
    assert main(["report", root, "--json", *flags]) == 0
    near = json.loads(capsys.readouterr().out)["near"]
    assert [[one["step"] for one in tier["steps"]] for tier in near["tiers"]] == [[6, 4], [6, 4]]
    assert near["at_risk_near"] == {"steps": 14, "seconds": 9.0}
    assert main(["report", root, "--output", str(page)]) == 0
    assert "work at risk" not in page.read_text(encoding="utf-8")


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
def test_browser_shows_tiers_and_follows_them(
    trained: tuple[str, list[str]], tmp_path: Path
) -> None:
    root, paths = trained
    with serving(root, near=paths) as server, browser(tmp_path / "profile") as page:
        page.open(f"{server.url}#near")
        near = "document.getElementById('near').textContent"
        page.wait_for("document.getElementById('live').textContent === 'live'")
        assert "14 steps, 9 s" in page.evaluate(near)
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                page.show_as(width=width, scheme=scheme)
                assert page.evaluate(CUT) == [], (width, scheme)
                assert page.evaluate(HARD_TO_READ) == [], (width, scheme)
        (tier,) = tiers_in(paths[0])
        write_status(tier.store.place, TierStatus(1, 26, 1012.0, 6, 1000.0))
        page.wait_for(f"{near}.includes('20 steps, 12 s')")
        assert page.complaints == []
