"""A root protects its trainings: no forgotten call deletes, continues or hides another one's work.

Method: small jobs on one root, each as a new process (`ckpt.forget`), in the orders in which users
forget calls. What another job has saved must be there afterwards.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.commit.log import Log
from storage import open_store

CALLS = ("", "restore", "anew", "both")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "run")


def job(
    url: str, steps: range, *, restore: bool = False, **options: Any
) -> ckpt.reports.RestoreReport | None:
    """A job of its own, which saves at every step and keeps two."""
    ckpt.forget(url)
    if name := options.get("line"):
        ckpt.forget(f"{url}/lines/{name}")
    state = {"weight": torch.zeros(4)}
    options = {"save": ckpt.EverySteps(1), "keep": ckpt.KeepLatest(2), **options}
    with ckpt.Checkpointer(state, url, **options) as saver:
        report = saver.restore() if restore else None
        for step in steps:
            state["weight"] += step
            saver.step(step)
        saver.wait()
    return report


def steps_of(url: str) -> list[int]:
    return [one.step for one in ckpt.list_steps(url)]


def test_job_without_restore_is_refused(url: str) -> None:
    job(url, range(1, 11))
    before = steps_of(url)
    epoch = Log(open_store(url)).state().epoch
    with pytest.raises(ckpt.errors.StoreRefused) as refused:
        job(url, range(1, 4))
    assert "line 0, whose newest checkpoint is step 10" in str(refused.value)
    for way in ("restore()", "begin_anew=True", "another url"):
        assert way in str(refused.value)
    assert steps_of(url) == before == [9, 10]
    assert Log(open_store(url)).state().epoch == epoch, "the running training would be fenced"


def test_begin_anew_leaves_the_other_line(url: str, caplog: pytest.LogCaptureFixture) -> None:
    job(url, range(1, 11))
    with caplog.at_level(logging.WARNING, "ckpt"):
        job(url, range(1, 6), begin_anew=True)
    assert "begin_anew=True" in caplog.text and "step 10" in caplog.text
    assert steps_of(url) == [9, 10, 4, 5]
    assert job(url, range(6, 8), restore=True).step == 5  # type: ignore[union-attr]
    assert steps_of(url) == [9, 10, 6, 7]


def test_bare_save_warns_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    job(url, range(1, 4))
    ckpt.forget(url)
    with caplog.at_level(logging.WARNING, "ckpt"):
        for step in (1, 2):
            ckpt.save({"weight": torch.zeros(4)}, url, step=step)
    warnings = [one.getMessage() for one in caplog.records if "restored nor" in one.getMessage()]
    assert len(warnings) == 1
    assert "newest checkpoint is step 3" in warnings[0] and "begin_anew=True" in warnings[0]
    assert steps_of(url) == [2, 3, 1, 2]


def test_loaded_root_may_be_saved_to(url: str, caplog: pytest.LogCaptureFixture) -> None:
    job(url, range(1, 4))
    ckpt.forget(url)
    ckpt.load({"weight": torch.zeros(4)}, url)
    with caplog.at_level(logging.WARNING, "ckpt"):
        ckpt.save({"weight": torch.zeros(4)}, url, step=4)
    assert "restored nor" not in caplog.text


@pytest.mark.parametrize("first", CALLS)
def test_no_order_of_calls_loses_a_commit(url: str, first: str) -> None:
    """A training, and then others, each with or without a call that it needs."""
    for number, calls in enumerate((first, *rest) for rest in itertools.product(CALLS, repeat=2)):
        root = f"memory://{Path(url).parent.name}-{number}"
        job(root, range(1, 6))
        for place, call in enumerate(calls):
            before = Log(open_store(root)).state().live
            options: dict[str, Any] = {"restore": call in ("restore", "both")}
            options["begin_anew"] = call in ("anew", "both")
            try:
                job(root, range(10 * place + 6, 10 * place + 9), **options)
            except ckpt.errors.StoreRefused:
                assert call == ""
            state = Log(open_store(root)).state()
            assert state.latest is not None
            others = {one.attempt for one in before if one.line != state.latest.line}
            gone = others - {one.attempt for one in state.live}
            assert not gone, f"{calls}: {call!r} has retired checkpoints of another training"


def test_named_lines_are_apart(url: str) -> None:
    states = {name: {"weight": torch.full((4,), i)} for i, name in enumerate(("g", "d"))}
    options: dict[str, Any] = {"save": ckpt.EverySteps(1), "keep": ckpt.KeepLatest(2)}
    with (
        ckpt.Checkpointer(states["g"], url, line="g", **options) as g,
        ckpt.Checkpointer(states["d"], url, line="d", **options) as d,
    ):
        for step in range(1, 6):
            g.step(step)
            d.step(step)
    for value, name in enumerate(("g", "d")):
        assert steps_of(f"{url}/lines/{name}") == [4, 5]
        state = {"weight": torch.full((4,), 9)}
        with ckpt.Checkpointer(state, url, line=name, **options) as saver:
            assert saver.restore().step == 5  # type: ignore[union-attr]
        assert state["weight"].tolist() == [value] * 4


def test_named_line_is_saved_and_loaded_bare(url: str) -> None:
    ckpt.save({"weight": torch.ones(4)}, url, step=1, line="g")
    state = {"weight": torch.zeros(4)}
    assert ckpt.load(state, url, line="g").step == 1
    assert state["weight"].tolist() == [1.0] * 4
    assert ckpt.async_save(state, url, step=2, line="g").result().step == 2
    assert steps_of(f"{url}/lines/g") == [1, 2]


def test_claim_of_one_line_fences_no_other(url: str) -> None:
    state = {"weight": torch.zeros(4)}
    with ckpt.Checkpointer(state, url, line="g", save=ckpt.EverySteps(1)) as saver:
        saver.step(1)
        job(url, range(1, 3), line="d")
        saver.step(2)
        saver.wait()
    assert steps_of(f"{url}/lines/g") == [1, 2]


@pytest.mark.parametrize(
    ("first", "second"), [("", ""), ("g", "g"), ("", "g"), ("g", ""), ("g", "by its url")]
)
def test_second_checkpointer_is_refused(url: str, first: str, second: str) -> None:
    state = {"weight": torch.zeros(4)}
    with ckpt.Checkpointer(state, url, line=first, save=ckpt.EverySteps(1)) as saver:
        place, name = (f"{url}/lines/g", "") if second == "by its url" else (url, second)
        with pytest.raises(ckpt.errors.StoreRefused, match="line='generator'"):
            ckpt.Checkpointer(state, place, line=name)
        saver.step(1)
    with ckpt.Checkpointer(state, url, line=first) as saver:
        saver.restore()


def test_unnamed_job_sees_named_lines(url: str) -> None:
    job(url, range(1, 3), line="g")
    job(url, range(1, 3), line="d")
    with pytest.raises(ckpt.errors.StoreRefused, match="the named lines d, g"):
        job(url, range(1, 3))
    with pytest.raises(ckpt.NoCheckpoint, match="lines d, g"):
        job(url, range(1, 3), restore=True)
    with pytest.raises(ckpt.NoCheckpoint, match="lines d, g"):
        ckpt.load({"weight": torch.zeros(4)}, url)


def test_forget_lets_an_open_checkpointer_go_on(url: str, tmp_path: Path) -> None:
    """As `LogDiverged` advises where a backup was restored under a running job."""
    state = {"weight": torch.zeros(4)}
    with ckpt.Checkpointer(state, url, save=ckpt.EverySteps(1)) as saver:
        saver.step(1)
        saver.wait()
        shutil.copytree(url, tmp_path / "backup")
        saver.step(2)
        saver.wait()
        shutil.rmtree(url)
        shutil.copytree(tmp_path / "backup", url)
        with pytest.raises(ckpt.errors.LogDiverged, match=r"ckpt\.forget"):
            saver.step(3)
            saver.wait()
        ckpt.forget(url)
        saver.step(4)
    assert steps_of(url) == [1, 4]


def test_bad_names_of_lines_are_refused(url: str) -> None:
    for name in ("a/b", "..", " ", "x" * 101):
        with pytest.raises(ValueError, match="line="):
            ckpt.Checkpointer({}, url, line=name)
