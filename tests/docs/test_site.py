"""The site of the documents can be read on every screen, and strangers find what they came for.

Method: mkdocs builds it, strictly, and a browser opens its pages by http, as a reader does (a
seeded sample of them in `make test`, all in `make soak`). Text has the contrast of WCAG 2 with what
is behind it, nothing makes the page scroll to the side, and no script complains. A stranger begins
at the home page and clicks on links by their texts, at most three times, or types words into the
search, takes one of its first hits and clicks at most twice more. What counts is the text of the
section where that ends. Without a browser the links alone are followed.
"""

from __future__ import annotations

import json
import posixpath
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest
import torch

import ckpt
from tests.conftest import Scale
from tests.tools.browser import CHROMIUM, HARD_TO_READ, browser

ROOT = Path(__file__).resolve().parents[2]
SCREENS = [(width, scheme) for width in (1440, 800, 390) for scheme in ("light", "dark")]
FIRST_HITS = 5
IS_WIDER_THAN_THE_SCREEN = (
    "document.documentElement.scrollWidth > document.documentElement.clientWidth"
)


class Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, without a log."""

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The url of a folder."""
    handler = partial(Quiet, directory=str(folder))
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(server.serve_forever, 0.05)
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            running.result()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("mkdocs", reason="comes with the extra [docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    yield folder


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
def test_pages_can_be_read_on_every_screen(
    site: Path, tmp_path: Path, rng: random.Random, scale: Scale
) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    bad = []
    with served(site) as url, browser(tmp_path / "profile") as page:
        for file in rng.sample(pages, scale.count(8, len(pages))):
            name = str(file.relative_to(site))
            page.open(f"{url}/{name}")
            for width, scheme in SCREENS:
                page.show_as(width=width, scheme=scheme)
                bad += [(name, width, scheme, *text) for text in page.evaluate(HARD_TO_READ)]
                if page.evaluate(IS_WIDER_THAN_THE_SCREEN):
                    bad.append((name, width, scheme, "is wider than the screen"))
        # The list of pages is scrolled to the current one, and the search is still there.
        page.show_as(width=1280, scheme="light")
        page.open(f"{url}/limits.html")
        assert page.evaluate("document.elementFromPoint(150, 65).matches('input[type=text]')")
        errors = [one for one in page.complaints if '"level": "error"' in one or "thrown" in one]
    assert (bad, errors) == ([], [])


# Strangers ---------------------------------------------------------------------------------------


class Task(NamedTuple):
    """What a stranger wants, and how one goes about it."""

    clicks: tuple[str, ...]  # texts of links, from the home page on
    words: str  # into the search
    hit: str  # the page and section that one of the first hits has to be
    answer: tuple[str, ...]  # texts of the section


TASKS = {
    "resume my Accelerate run elsewhere": Task(
        ("move from another library", "Accelerate"),
        "resume accelerate",
        "howto/migrate.html#accelerate",
        ('restore(from_="out/accelerate"', "runs/moved", "EverySteps"),
    ),
    "put checkpoints to S3 with KMS": Task(
        ("Prepare a bucket", "Encryption"),
        "S3 KMS key",
        "howto/s3_operator.html#encryption",
        ("SSEKMSKeyId", "kms:GenerateDataKey", "kms:Decrypt", "storage_options"),
    ),
    "why did my load fail with this text": Task(
        ("find an error", "Mismatch"),
        "",  # the text of the error itself, see `error_text`
        "troubleshooting.html#mismatch",
        ("ckpt show URL", "rename=", "skip=", "strict=False"),
    ),
}


class Links(HTMLParser):
    """The links of a page, by their texts, and the text of each of its sections by its anchor."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: dict[str, str] = {}
        self.sections: dict[str, str] = {"": ""}
        self._anchor, self._href, self._text = "", "", ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "a" and named.get("href"):
            self._href, self._text = str(named["href"]), ""
        if tag in ("h1", "h2", "h3") and named.get("id"):
            self._anchor = str(named["id"])
            self.sections[self._anchor] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._href:
            self.links.setdefault(" ".join(self._text.split()), self._href)
            self._href = ""

    def handle_data(self, data: str) -> None:
        self._text += data
        self.sections[self._anchor] += data


def text_at(site: Path, place: str) -> str:
    """The text of a section of a page, as a reader sees it."""
    page, _, anchor = place.partition("#")
    return Links(site / page).sections[anchor]


def error_text(folder: Path) -> str:
    """What a stranger copies: the first line of an error of a load, without its path."""
    ckpt.save({"model": torch.nn.Linear(2, 2)}, folder / "root", step=1)
    with pytest.raises(ckpt.Mismatch) as caught:
        ckpt.load({"model": torch.nn.Linear(3, 3)}, folder / "root")
    return str(caught.value).splitlines()[0].replace(str(folder / "root"), "")


@pytest.mark.server
@pytest.mark.parametrize("name", TASKS)
def test_task_takes_three_clicks_at_most(name: str, site: Path) -> None:
    task, place = TASKS[name], "index.html"
    assert len(task.clicks) <= 3
    for text in task.clicks:
        page = place.partition("#")[0]
        href = Links(site / page).links[text]
        target, _, anchor = href.partition("#")
        joined = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        place = f"{joined if target else page}#{anchor}" if anchor else joined
    assert place == task.hit
    assert [text for text in task.answer if text not in text_at(site, place)] == []


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
def test_search_finds_the_section_of_each_task(site: Path, tmp_path: Path) -> None:
    missed = []
    with served(site) as url, browser(tmp_path / "profile") as page:
        for name, task in TASKS.items():
            words = task.words or error_text(tmp_path)
            page.open(f"{url}/search.html?q={quote(words, safe='')}")
            page.wait_for("document.querySelector('#mkdocs-search-results a') !== null")
            hits = page.evaluate(
                "[...document.querySelectorAll('#mkdocs-search-results h3 a')]"
                ".map(one => [one.getAttribute('href'), one.textContent])"
            )
            first = [(href.removeprefix("./"), title) for href, title in hits[:FIRST_HITS]]
            if task.hit not in dict(first):
                missed.append((name, words, first))
    assert missed == []


def test_titles_of_hits_say_their_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {one["location"]: one["title"] for one in index["docs"]}
    assert titles["limits.html#the-engine"] == "The engine - Limits"
    assert titles["api/ckpt.html#ckpt.Checkpointer.close"] == "ckpt.Checkpointer.close"
    sections = [place for place in titles if "#" in place]
    pages = {place.partition("#")[0] for place in sections}
    silent = [
        place
        for place in sections
        if titles[place.partition("#")[0]] not in titles[place]
        and not place.startswith("api/")
        and "index.html" not in place
    ]
    assert len(pages) > 40 and silent == []
