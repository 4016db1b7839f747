"""Which cases of a test marked `sampled` the default run leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import left_out


def _cases(name: str, count: int, sampled: int | None) -> list[Any]:
    mark = None if sampled is None else pytest.mark.sampled(sampled).mark
    return [
        SimpleNamespace(nodeid=f"{name}[{case}]", get_closest_marker=lambda _: mark)
        for case in range(count)
    ]


def test_of_each_test_as_many_cases_stay_as_its_marker_says() -> None:
    items = _cases("a.py::x", 9, 4) + _cases("a.py::y", 7, 2) + _cases("a.py::z", 5, None)
    for seed in range(20):
        out = [item.nodeid for item in left_out(items, seed)]
        left = [item.nodeid for item in items if item.nodeid not in out]
        counts = [sum(name in one for one in left) for name in ("::x[", "::y[", "::z[")]
        assert counts == [4, 2, 5]


def test_every_case_is_in_the_sample_of_some_seed_and_one_seed_gives_one_sample() -> None:
    items = _cases("a.py::x", 9, 2)
    samples = [{item.nodeid for item in left_out(items, seed)} for seed in range(60)]
    assert set.intersection(*samples) == set()
    assert samples == [{item.nodeid for item in left_out(items, seed)} for seed in range(60)]


def test_what_is_asked_for_by_name_runs() -> None:
    assert list(left_out(_cases("a.py::x", 1, 6), 3)) == []
