"""Counts of saves, loads and steps do not grow unseen."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

import benchmarks.counts
from benchmarks.__main__ import Result, before, worse
from benchmarks.counts import counted, grown, recorded, versions
from tests.counting import python_calls

ENTRY = {
    "date": "2026-11-27",
    **versions(),
    "counts": {"save: syncs": 7, "save: Python calls": 100},
}


def test_nothing_asks_for_more_than_when_it_was_recorded() -> None:
    entry = recorded()[-1]
    assert not (more := grown(counted(), entry)), (
        "\n".join(more) + "\nwith a good reason: python -m benchmarks.counts --record"
    )


class Left:
    """Garbage that is finalized by a function of Python."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None: ...


@pytest.mark.parametrize("count", [python_calls, benchmarks.counts.python_calls])
def test_garbage_of_earlier_tests_is_not_counted(count: Callable[..., int]) -> None:
    def run() -> None:
        gc.enable()  # as a thread does that an earlier test has left
        kept = [[] for _ in range(10_000)]
        assert len(kept) == 10_000

    alone = count(run)
    for _ in range(1000):
        Left()
    assert count(run) == alone


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"save: syncs": 7, "save: Python calls": 105}, []),
        ({"save: syncs": 8, "save: Python calls": 1}, ["save: syncs: 7 on 2026-11-27, now 8"]),
        ({"save: syncs": 7}, ["save: Python calls: 100 on 2026-11-27, now None"]),
        (
            {"save: syncs": 7, "save: Python calls": 106, "lists": 0},
            ["lists: None on 2026-11-27, now 0", "save: Python calls: 100 on 2026-11-27, now 106"],
        ),
    ],
)
def test_a_count_that_grows_is_named(counts: dict[str, int], expected: list[str]) -> None:
    assert grown(counts, ENTRY) == expected
    other = {**ENTRY, "python": "3.1.4"}
    assert grown(counts, other) == [text for text in expected if "Python calls" not in text]


@pytest.mark.parametrize(
    ("bar", "then", "now", "is_worse"),
    [
        (">= 2", "2.00x", "1.91x", False),
        (">= 2", "2.00x", "1.90x", True),
        ("<= 1", "0.52 of torch's time", "0.546 of torch's time", False),
        ("<= 1", "0.52 of torch's time", "0.55 of torch's time", True),
        ("<= 1", "1,000 requests", "1,051 requests", True),
        ("none", "1", "9", False),
        ("<= 1", "", "9", False),
    ],
)
def test_a_row_that_gets_worse_by_its_bar_is_named(
    bar: str, then: str, now: str, is_worse: bool
) -> None:
    history = [
        {"machine": "a", "measured": {"save | speed": "0.0001"}},
        {"machine": "a", "measured": {"save | speed": then}},
        {"machine": "b", "measured": {"save | speed": "3"}},
    ]
    result = Result("save", "speed", now, bar)
    problems = worse([result], before(history, "a"))
    assert problems == ([f"save | speed: {now}, was {then}"] if is_worse else [])
    assert not worse([result], before(history, "c"))
