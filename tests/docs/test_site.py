"""The site of the documents can be read on wide and narrow screens, light and dark.

Method: mkdocs builds it, strictly, and a browser opens its pages by http, as a reader does (a
seeded sample of them in `make test`, all in `make soak`). Text has the contrast of WCAG 2 with what
is behind it, nothing makes the page scroll to the side, and no script complains.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import Scale
from tests.tools.browser import CHROMIUM, HARD_TO_READ, browser

ROOT = Path(__file__).resolve().parents[2]
SCREENS = [(width, scheme) for width in (1440, 800, 390) for scheme in ("light", "dark")]
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


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
def test_pages_can_be_read_on_every_screen(
    tmp_path: Path, rng: random.Random, scale: Scale
) -> None:
    pytest.importorskip("mkdocs", reason="comes with the extra [docs]")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
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
