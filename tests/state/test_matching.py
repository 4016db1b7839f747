"""A load that finds nothing, or little, of a state: an error, or a warning with the nearest names.

Method: checkpoints of small nets, loaded with `strict=False` into states that call things
otherwise; ranks are threads.
"""

from __future__ import annotations

import logging

import pytest
import torch

import ckpt
from ckpt.errors import Mismatch
from ckpt.loading.load import LoadOptions, LoadReport, load_state
from ckpt.state.matching import nearest, with_nearest
from ckpt.state.names import split_state_name
from ckpt.world.base import World
from storage import open_store
from tests.thread_ranks import run_ranks


def net(depth: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(depth)))


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    url = f"memory://{request.node.name}"
    ckpt.save({"model": {"layers": net()}, "step": 7}, url, step=7)
    return url


def test_nothing_matched_is_an_error_whatever_strict_says(url: str) -> None:
    target = net()
    before = [p.detach().clone() for p in target.parameters()]
    with pytest.raises(Mismatch, match="none of the 6 names") as caught:
        ckpt.load({"net": target}, url, strict=False)
    assert "which has 'model.layers.0.bias'" not in str(caught.value)
    assert "model.layers.0.bias" in str(caught.value)
    for old, new in zip(before, target.parameters(), strict=True):
        assert torch.equal(old, new)
    loaded = ckpt.load({"net": target}, url, strict=False, rename={"net": "model.layers"})
    assert len(loaded.loaded.tensors) == 6 and loaded.warnings == ()


@pytest.mark.parametrize(
    ("names", "more"), [("abcd", ""), ("abcde", ""), ("abcdef", " and 1 more")]
)
def test_the_first_names_of_a_checkpoint_without_a_match_are_shown(
    request: pytest.FixtureRequest, names: str, more: str
) -> None:
    url = f"memory://{request.node.name}"
    ckpt.save({name: torch.zeros(1) for name in names}, url, step=1)
    with pytest.raises(Mismatch) as caught:
        ckpt.load({"other": torch.zeros(1)}, url, strict=False)
    assert f"it has {', '.join(names[:5])}{more}\n" in str(caught.value)


def test_what_was_skipped_is_not_missed(url: str) -> None:
    report = ckpt.load({"net": net()}, url, strict=False, skip=["net"])
    assert report.loaded.tensors == () and report.warnings == ()
    assert ckpt.load({}, url, strict=False).warnings == ()


def test_small_share_is_a_warning_with_the_nearest_names(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    known, step = torch.zeros(2, 2), 0
    state = {"model": {"blocks": net(), "layers": {"0": {"weight": known}}}, "step": step}
    with caplog.at_level(logging.WARNING, logger="ckpt"):
        report = ckpt.load(state, url, strict=False)
    assert state["step"] == 7 and known.any()
    (warning,) = report.warnings
    assert warning in caplog.text and "only 2 of 8 names" in warning and "step 7" in warning
    assert "model.blocks.0.weight (the checkpoint has model.layers.0.weight)" in warning


def test_a_step_that_matches_is_no_load_of_a_model_that_does_not(url: str) -> None:
    state = {"model": {"blocks": net()}, "step": 0}
    with pytest.raises(Mismatch, match="none of the 6 tensors of the state"):
        ckpt.load(state, url, strict=False)
    assert state["step"] == 0
    report = ckpt.load({"step": 0, "epoch": 0}, url, strict=False)  # a state of values alone
    assert report.loaded.values == ("step",)


def test_new_head_on_a_known_body_is_no_warning(url: str) -> None:
    class Grown(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()
            self.head = torch.nn.Linear(2, 2)

    report = ckpt.load({"model": Grown()}, url, strict=False)
    assert report.loaded.missing == ("model.head.weight", "model.head.bias")
    assert report.warnings == ()


def test_mismatch_names_checkpoint_step_and_path(url: str) -> None:
    wider = {"model": {"layers": torch.nn.Sequential(torch.nn.Linear(3, 3))}}
    (info,) = ckpt.list_steps(url)
    for strict in (True, False):
        with pytest.raises(Mismatch) as caught:
            ckpt.load(wider, url, strict=strict)
        for part in (info.url, "step 7", info.attempt):
            assert part in str(caught.value).splitlines()[0] and part in caught.value.where


def load_on(world: World, url: str, state: object) -> LoadReport:
    options = LoadOptions(strict=False)
    return load_state(state, store=open_store(url), world=world, step=None, options=options)


def test_rank_that_holds_only_what_is_new_is_no_error_where_others_found_theirs(url: str) -> None:
    def run(world: World) -> LoadReport:
        state = {"model": {"layers": net()}} if world.rank == 0 else {"new": torch.zeros(2)}
        return load_on(world, url, state)

    reports = run_ranks(2, run)
    assert [len(report.loaded.tensors) for report in reports] == [6, 0]


def test_nothing_matched_is_the_same_error_on_all_ranks(url: str) -> None:
    def run(world: World) -> str:
        state = {"net": net()} if world.rank == 0 else {}
        with pytest.raises(Mismatch) as caught:
            load_on(world, url, state)
        assert url in caught.value.where and "step 7" in caught.value.where
        return str(caught.value)

    first, second = run_ranks(2, run)
    assert first == second and "none of the 6 names" in first


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.model.0.weight", "model.0.weight"),
        ("model.0.wieght", "model.0.weight"),
        ("backbone.layers.11.attn.q", "encoder.layers.11.attn.q"),
        ("something", ""),
    ],
)
def test_nearest_name(name: str, expected: str) -> None:
    known = ["model.0.weight", "model.0.bias", "encoder.layers.1.attn.q"]
    assert nearest(name, [*known, "encoder.layers.11.attn.q"]) == expected
    assert nearest(name, []) == ""


def test_the_longest_parameter_name_wins() -> None:
    params = {"layer", "layer.weight", "w"}
    assert split_state_name("layer.weight.moments.first", params) == (
        "layer.weight",
        "moments.first",
    )
    assert split_state_name("layer.bias.step", params) == ("layer", "bias.step")
    assert split_state_name("w.step", params) == ("w", "step")
    for other in ("layer", "other.step", ".step", "", "wide.step"):
        assert split_state_name(other, params) is None


def test_only_the_first_missing_names_are_shown() -> None:
    text = with_nearest([f"a.{n}" for n in range(9)], ["b.0"])
    assert text.startswith("a.0 (the checkpoint has b.0), ") and text.endswith(" and 4 more")
