"""Models, optimizers and frameworks of other libraries come out as `docs/compatibility.md` says.

Method: every row is tried as the page describes; what passes there has to pass, and what fails has
to fail, or the page is out of date. A seeded sample of single rows runs by default, in this
process; everything, on several ranks, runs in `make soak` and `make test-wild`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wild.crossing import engines_to_cross
from tests.wild.models import TRANSFORMERS, Model
from tests.wild.optimizers import SCHEDULE_FREE, TORCH, Optimizer
from tests.wild.page import (
    cell,
    expected,
    page_of,
    sections_now,
    sections_of,
    verdicts_of,
    versions_of,
)
from tests.wild.relay import adamw
from tests.wild.resuming import AFTER, BEFORE, Resumed, resume_one
from tests.wild.rows import Group, Result, groups, missing_of, with_crossings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries


def assert_resumed(row: Optimizer, folder: Path) -> None:
    resumed = resume_one(row, "plain", "ours", str(folder))
    assert not resumed.failed and not resumed.refused, resumed
    assert len(resumed.losses) == len(BEFORE) + len(AFTER)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", TORCH, ids=lambda row: row.name)
def test_optimizers_of_torch_go_on_with_the_same_bits(row: Optimizer, tmp_path: Path) -> None:
    assert_resumed(row, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("row", SCHEDULE_FREE, ids=lambda row: row.name)
def test_schedule_free_optimizers_go_on_with_the_same_bits(row: Optimizer, tmp_path: Path) -> None:
    pytest.importorskip("schedulefree", reason="the extra `wild` is not installed")
    assert_resumed(row, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", TRANSFORMERS, ids=lambda row: row.name)
def test_models_of_transformers_go_on_with_the_same_bits(row: Model, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `huggingface` is not installed")
    one = Optimizer(row.name, row.package, adamw, row.build, row.loss)
    assert_resumed(one, tmp_path)


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.parametrize("group", groups(), ids=lambda group: group.title)
def test_all_rows_of_a_group_come_out_as_the_page_says(group: Group) -> None:
    if missing := missing_of(group):
        pytest.skip(f"`make test-wild` installs what is missing: {missing}")
    page = expected(PAGE.read_text(encoding="utf-8"))
    outcomes = {}
    for result in group.try_rows((), ["ours"]):
        outcomes[group.title, result.name] = result
    said = {key: verdict for key, verdict in page.items() if key[0] == group.title}
    wrong = [
        f"{result.name}: {result.ours or 'passes'}"
        for key, result in outcomes.items()
        if said.get(key) != verdicts_of(result)[0]
    ]
    assert not wrong, "not as the page says:\n" + "\n".join(wrong)
    assert outcomes.keys() == said.keys(), "write the page anew: python -m tests.wild --table"


def test_the_page_has_all_rows_that_need_no_library() -> None:
    """The page is generated; a row that was added or renamed shows here without a run."""
    page = expected(PAGE.read_text(encoding="utf-8"))
    for title, rows in (("Models of transformers", TRANSFORMERS), ("Optimizers of torch", TORCH)):
        assert {name for head, name in page if head == title} == {row.name for row in rows}


def test_what_does_not_cross_fails_a_row_unless_the_steps_depend_on_the_layout() -> None:
    row = Result("optimizers", "torch", "Adam", "plain, ddp, fsdp2, our FSDP", "", "ddp: lost")
    ours = {"ddp": "", "fsdp2": "no place", "our FSDP*": "Mismatch", "our fully_shard*": ""}
    outcome = with_crossings(row, ours, {"ddp": "", "fsdp2": "other bits"})
    assert outcome.ours == "to fsdp2 and back: no place"
    assert outcome.dcp == "ddp: lost; to fsdp2 and back: other bits"
    assert "(our fully_shard): loads alone" in outcome.remark
    assert "it keeps (our FSDP): Mismatch" in outcome.remark
    resumed = [Resumed("plain", losses=(1.0, 2.0)), Resumed("ddp", losses=(1.0, 2.0))]
    resumed += [Resumed("fsdp2", losses=(1.0, 3.0)), Resumed("our FSDP", refused="no steps")]
    assert engines_to_cross(resumed) == ["ddp", "fsdp2*"]


def test_groups_of_another_run_stay_on_the_page_with_their_date() -> None:
    old = PAGE.read_text(encoding="utf-8")
    older = sections_of(old)
    assert {title for title, _ in expected(old)} == older.keys()
    new = Result("Optimizers of torch", "torch", "Adam", "plain", "", "ddp: lost")
    passes = Result("Optimizers of torch", "torch", "SGD", "plain", "", "", "steps depend")
    sections = {**older, **sections_now([new, passes])}
    known = versions_of(old)
    page = page_of(sections, {}, "plain@1", known)
    now = sections_of(page)
    assert page_of(now, {}, "plain@1", versions_of(page)) == page, "what a page says is kept"
    assert {t: one.date for t, one in now.items()} == {t: one.date for t, one in sections.items()}
    of_row = "Optimizers of torch"
    assert now[of_row].lines == (
        "- DCP fails (ddp: lost): `Adam`\n",
        "- both pass (plain): `SGD`\n",
    )
    assert expected(page)[of_row, "Adam"] == expected(page)[of_row, "SGD"] == "pass"
    others = {key: said for key, said in expected(old).items() if key[0] != of_row}
    assert others.items() <= expected(page).items() and "fails" in others.values()
    alone = page_of(sections_now([new, passes]), {}, "plain@1", known)
    assert (
        "torchtitan 0.3.0" in alone
        and "Of 2 rows, 2 pass with this library and 1 with DCP." in alone
    )
    assert "Tried on" not in alone and sections_of(alone).keys()


def test_a_cell_breaks_no_table() -> None:
    """Errors of others hold anything."""
    text = cell("a | b\n<c> `d` /tmp/x/y.py " + "long " * 100)
    assert "\n" not in text and text.startswith("a / b (c) 'd' y.py") and text.endswith(" ...")
