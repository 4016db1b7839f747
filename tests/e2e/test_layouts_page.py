"""docs/layouts.md says what the tests of pairs of layouts demand.

Method: these tests fail for a pair that is not equal, so the page with nothing but equal pairs is
the one that a run of all pairs writes while they pass.
"""

from __future__ import annotations

from tests.e2e.layouts_page import EQUAL, PAGE, page


def test_the_page_has_every_pair() -> None:
    assert PAGE.read_text() == page(lambda *_: EQUAL, lambda *_: EQUAL), (
        "run python -m tests.e2e.layouts_page"
    )
