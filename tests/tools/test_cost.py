"""`ckpt cost` computes what it says, and shows nothing that it does not know.

Method: sizes against real optimizers, intervals against the figures of the papers, the work that is
lost against a simulated failure at every moment, requests against a save and a load on a counting
store, prices against sums in whole numbers.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.api import read_path, write_path
from ckpt.cli import main
from ckpt.operate.looking import OPTIMIZERS
from ckpt.saving.image import Staging, WritePath
from ckpt.screens.pages import PageChoice, PageMatter, sections_of
from ckpt.screens.terminal import size
from ckpt.tools.cost import (
    FILE_NBYTES,
    GIB,
    MIB,
    MONTH_SECONDS,
    OBJECTS_OF_A_SAVE,
    OPTIMIZER_STATES,
    PART_NBYTES,
    READ_NBYTES,
    Bill,
    Prices,
    Workload,
    cost_of,
    daly,
    lost_seconds,
    measured_of,
    requests_of_upload,
    state_nbytes,
    young,
)
from ckpt.tools.polling import RunPoller
from ckpt.tools.report import report_of
from storage.memory import MemoryStore
from tests.stores import CountingStore

FULL = Workload(
    840_000_000_000,
    512,
    every_seconds=600.0,
    keep=3,
    mtbf_seconds=21_600.0,
    blocked_seconds=0.5,
    persist_seconds=30.0,
    restart_seconds=300.0,
)
PRICES = Prices(gib_month=0.5, thousand_writes=2.0, thousand_reads=4.0, rank_hour=3.0)


# Bytes -----------------------------------------------------------------------------------------


def real_optimizers() -> dict[str, Any]:
    known: dict[str, Any] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "sgd": torch.optim.SGD,
        "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    }
    if hasattr(torch.optim, "Muon"):
        known["muon"] = torch.optim.Muon
    return known


@pytest.mark.parametrize("name", real_optimizers())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_a_real_optimizer(name: str, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(30, 20, dtype=dtype))
    optimizer = real_optimizers()[name]([weight])
    weight.sum().backward()
    optimizer.step()
    states = [
        tensor
        for tensor in optimizer.state[weight].values()
        if isinstance(tensor, torch.Tensor) and tensor.shape == weight.shape
    ]
    expected = weight.nbytes + sum(tensor.nbytes for tensor in states)
    assert state_nbytes(600, name, dtype=str(dtype)[6:]) == expected


def test_bytes_of_other_dtypes_and_of_a_second_copy() -> None:
    assert state_nbytes(10, "none", dtype="bfloat16") == 20
    assert state_nbytes(10, "adamw", dtype="bfloat16", state_dtype="float32") == 100
    with_copy = {"state_dtype": "float32", "master_dtype": "float32"}
    assert state_nbytes(10, "adamw", dtype="bfloat16", **with_copy) == 140
    for wrong in (
        lambda: state_nbytes(10, "adamw", dtype="float31"),
        lambda: state_nbytes(10, "adamw", dtype="float32", master_dtype="x"),
        lambda: state_nbytes(10, "sdg", dtype="float32"),
        lambda: state_nbytes(0, "sgd", dtype="float32"),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_the_command_offers_the_optimizers_that_are_known() -> None:
    assert sorted(OPTIMIZERS) == sorted(OPTIMIZER_STATES)


# Requests --------------------------------------------------------------------------------------


class Remote(MemoryStore):
    """In memory, and met like an object store."""

    part_nbytes_min = 5 * MIB


def test_sizes_are_those_of_saves_and_loads() -> None:
    path = write_path("auto", Remote(), Staging())
    assert (path.file_nbytes_max, path.part_nbytes) == (FILE_NBYTES, PART_NBYTES)
    assert WritePath().file_nbytes_max == FILE_NBYTES
    assert read_path(Remote()).request_nbytes_max == READ_NBYTES


@pytest.mark.parametrize("mib", [1, 40])
def test_requests_are_those_of_a_save_and_a_load(mib: int) -> None:
    counting = CountingStore(Remote())
    state = {"x": torch.zeros(mib * MIB // 4)}
    ckpt.save(state, counting, step=1)  # begins the root, too
    counting.reset()
    ckpt.save(state, counting, step=2)
    requests = counting.stats.requests
    cost = cost_of(Workload(mib * MIB, 1))
    parts = requests["write_part"] - 2  # those of MANIFEST and TELEMETRY
    assert parts == -(-mib * MIB // PART_NBYTES)
    expected = requests_of_upload(mib * MIB) + OBJECTS_OF_A_SAVE
    assert cost.requests_of_save == expected == (parts + 2 if parts > 1 else 1) + 3
    counting.reset()
    ckpt.load(state, counting)
    assert counting.stats.requests["get_into"] >= cost.requests_of_load == -(-mib // 8)


def test_requests_of_one_upload() -> None:
    full = FILE_NBYTES // PART_NBYTES + 2
    for nbytes, expected in (
        (1, 1),
        (PART_NBYTES, 1),
        (PART_NBYTES + 1, 4),
        (FILE_NBYTES, full),
        (FILE_NBYTES + 1, full + 1),
        (2 * FILE_NBYTES + 3 * PART_NBYTES, 2 * full + 5),
        (FILE_NBYTES << 40, full << 40),  # at once: `ckpt cost` takes any number of parameters
    ):
        assert requests_of_upload(nbytes) == expected


# Time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mtbf_minutes", "best_minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)]
)
def test_dalys_interval_is_that_of_his_figures_3_to_5(
    mtbf_minutes: float, best_minutes: float
) -> None:
    """A dump of 5 minutes, and failures every 24 hours, 6 hours and 15 minutes."""
    minutes = daly(5 * 60, mtbf_minutes * 60) / 60
    assert round(minutes, 1 if best_minutes < 10 else 0) == best_minutes


def test_a_save_that_costs_more_than_it_can_spare() -> None:
    assert daly(200.0, 100.0) == daly(300.0, 100.0) == 100.0
    assert daly(199.0, 100.0) > 0


def test_youngs_interval_loses_the_least_in_first_order() -> None:
    def lost(every: float, blocked: float, mtbf: float) -> float:
        return blocked / every + every / (2 * mtbf)

    for blocked, mtbf in itertools.product((0.01, 1.0, 30.0), (3600.0, 86_400.0)):
        best = young(blocked, mtbf)
        assert best == math.sqrt(2 * blocked * mtbf)
        for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
            assert lost(best, blocked, mtbf) < lost(factor * best, blocked, mtbf)


@pytest.mark.parametrize("persist", [0, 7, 50, 100])
def test_lost_work_is_that_of_failures_at_every_moment(persist: int) -> None:
    """Saves at 0, 100, 200, ...; each exists `persist` later; a failure in the middle of each
    second of the interval that begins at 1000.
    """
    every = 100
    losses = []
    for second in range(1000, 1000 + every):
        moment = second + 0.5
        there = [save for save in range(0, 2000, every) if save + persist <= moment]
        losses.append(moment - max(there))
    assert sum(losses) / every == pytest.approx(lost_seconds(every, persist))


def test_a_save_that_takes_longer_than_the_interval_sets_the_interval() -> None:
    cost = cost_of(replace(FULL, every_seconds=10.0, persist_seconds=40.0))
    assert cost.lost_seconds_per_failure == 60.0
    assert cost.saves_per_month == MONTH_SECONDS / 40
    assert cost.nbytes_per_second == cost.burst_nbytes_per_second == FULL.nbytes / 40


# All together ----------------------------------------------------------------------------------


def test_every_number_follows_from_those_given() -> None:
    cost = cost_of(FULL, PRICES)
    uploads = requests_of_upload(840_000_000_000 // 512)
    assert cost.nbytes_per_rank == 1_640_625_000
    assert cost.nbytes_per_second == 1.4e9
    assert cost.burst_nbytes_per_second == 2.8e10
    assert cost.requests_of_save == 512 * uploads + 3 == 512 * 100 + 3
    assert cost.requests_of_load == 512 * 196
    assert cost.stored_nbytes_max == 4 * FULL.nbytes
    assert cost.saves_per_month == 4380.0
    assert cost.failures_per_month == pytest.approx(730 / 6)
    assert cost.lost_seconds_per_failure == 330.0
    assert cost.blocked_share == 0.5 / 600
    assert cost.lost_share == (330 + 300) / 21_600
    assert cost.blocked_seconds_at_best == 600**2 / 43_200
    assert cost.best_every_young == young(0.5, 21_600)
    assert cost.best_every_daly == daly(0.5, 21_600)
    lost_hours = ((330 + 300) / 21_600 + 0.5 / 600) * 512 * 730
    expected = (
        4 * FULL.nbytes / GIB / 2,
        4380 * cost.requests_of_save / 500,
        730 / 6 * cost.requests_of_load / 250,
        lost_hours * 3,
    )
    assert cost.bill == pytest.approx(expected)
    assert cost.bill.total == pytest.approx(sum(expected))


NEEDS = {
    "nbytes_per_second": {"every"},
    "burst_nbytes_per_second": {"persist"},
    "stored_nbytes_max": {"keep"},
    "saves_per_month": {"every"},
    "failures_per_month": {"mtbf"},
    "lost_seconds_per_failure": {"every"},
    "blocked_share": {"blocked", "every"},
    "lost_share": {"every", "mtbf"},
    "best_every_young": {"blocked", "mtbf"},
    "best_every_daly": {"blocked", "mtbf"},
    "blocked_seconds_at_best": {"every", "mtbf"},
}
NEEDS_OF_BILL = {
    "storage": {"keep"},
    "writes": {"every"},
    "reads": {"mtbf"},
    "lost_work": {"every", "mtbf"},
}


def test_what_is_not_known_is_left_out_and_nothing_else() -> None:
    optional = [field.name for field in fields(Workload) if field.default is None]
    assert len(optional) == 6
    for count in range(len(optional) + 1):
        for missing in itertools.combinations(optional, count):
            load = replace(FULL, **dict.fromkeys(missing))
            known = {name.removesuffix("_seconds") for name in optional if name not in missing}
            cost = cost_of(load, PRICES)
            for name, needed in NEEDS.items():
                assert (getattr(cost, name) is not None) == (needed <= known), (name, missing)
            for name, needed in NEEDS_OF_BILL.items():
                assert (getattr(cost.bill, name) is not None) == (needed <= known), (name, missing)
            assert (cost.bill.total is not None) == bool(known & {"keep", "every", "mtbf"})


def test_only_what_has_a_price_is_on_the_bill() -> None:
    for count in range(5):
        for missing in itertools.combinations(Prices._fields, count):
            bill = cost_of(FULL, PRICES._replace(**dict.fromkeys(missing))).bill
            priced = [name not in missing for name in Prices._fields]
            assert [amount is not None for amount in bill] == priced
    assert cost_of(FULL).bill == Bill(None, None, None, None)
    assert cost_of(FULL, Prices(gib_month=0.0)).bill.total == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"nbytes": 0},
        {"ranks": 0},
        {"keep": 0},
        {"every_seconds": 0.0},
        {"mtbf_seconds": math.inf},
        {"persist_seconds": math.nan},
        {"blocked_seconds": -1.0},
    ],
    ids=str,
)
def test_a_number_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(FULL, **wrong)


# The command -----------------------------------------------------------------------------------

SEVENTY = ["cost", "--params", "70B", "--ranks", "512"]
MORE = ["--optimizer", "adamw", "--every", "10m", "--keep", "3", "--mtbf", "6h"]


def test_the_command_shows_what_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVENTY, *MORE]) == 0
    out = capsys.readouterr().out
    for text in (
        "782.3 GiB",
        "12 bytes a parameter",
        "51,203",
        "Young 1974",
        "Daly 2006",
        "8.33 s",
    ):
        assert text in out
    assert "in a month  " not in out.replace("saves in a month", ""), "no price, no bill"
    assert main([*SEVENTY, *MORE, "--blocked", "0.5s", "--bandwidth", "28GB", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["workload"]["persist_seconds"] == 30.0
    assert shown["cost"]["lost_seconds_per_failure"] == 330.0
    assert shown["cost"]["bill"]["total"] is None and shown["measured"] is None
    assert main([*SEVENTY, *MORE, "--price-storage", "0.5"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line[:7] == "storage")
    assert row.split()[:5] == ["storage", "in", "a", "month", "1,564.62"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give a url, or --params and --ranks"),
        (["--params", "7B"], "give a url, or --ranks"),
        (["runs/7b", "--params", "7B"], "--params goes without a url"),
        (["runs/7b", "--state-dtype", "float32"], "--state-dtype goes without a url"),
        ([*SEVENTY[1:], "--persist", "3s", "--bandwidth", "3GB"], "give one of them"),
        (["--params", "7X"], "is not a number of parameters"),
        (["--params", "0"], "is not a number of parameters"),
        ([*SEVENTY[1:], "--every", "10"], "is not a time"),
        ([*SEVENTY[1:], "--price-reads=-1"], "is not a number of at least 0"),
        ([*SEVENTY[1:], "--price-reads", "nan"], "is not a number of at least 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cost", *arguments])
    assert problem in capsys.readouterr().err


def test_an_unknown_dtype_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*SEVENTY, "--dtype", "float31"])
    assert "'float31' is not a dtype" in capsys.readouterr().err


def test_a_root_gives_what_its_saves_took(
    plain_root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(plain_root)
    measured = measured_of(report)
    assert measured is not None and measured.saves == 2 and measured.sessions == 1
    load = measured.workload
    first, second = report.saves
    assert load.nbytes == report.totals[-1].nbytes and load.ranks == 1 and load.keep == 2
    assert load.every_seconds == second.committed_unix - first.committed_unix
    assert load.persist_seconds == sum(one.seconds for one in report.totals) / 2
    assert main(["cost", plain_root, "--json", "--mtbf", "6h", "--keep", "7"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["measured"]["workload"]["every_seconds"] == load.every_seconds
    assert shown["workload"] == {
        **shown["measured"]["workload"],
        "mtbf_seconds": 21_600.0,
        "keep": 7,
    }
    assert main(["cost", plain_root]) == 0
    assert "medians of 2 saves; 1 job in" in capsys.readouterr().out


def test_every_screen_shows_what_a_day_costs(
    plain_root: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prices = ["--price-storage", "0.02", "--price-writes", "5"]
    assert main(["cost", plain_root, "--json", *prices]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    a_day = 12 / 365 * (cost["bill"]["storage"] + cost["bill"]["writes"])
    nbytes = cost["nbytes_per_second"] * 86_400  # not more than saves one after the other write
    text = f"{size(int(nbytes))} saved, cost {a_day:.3g}"
    for command in (["watch", plain_root, "--once"], ["report", plain_root]):
        assert main([*command, *prices, "--json"]) == 0
        day = json.loads(capsys.readouterr().out)["per_day"]
        assert day == {"nbytes": pytest.approx(nbytes), "cost": pytest.approx(a_day)}
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["per_day"]["cost"] is None
        page = ["--output", str(tmp_path / "page.html")] * (command[0] == "report")
        assert main([*command, *prices, *page]) == 0
        assert f"a day: {text}" in capsys.readouterr().out
    assert text in (tmp_path / "page.html").read_text()
    poller = RunPoller(plain_root)
    states = (poller.poll(),)
    poller.close()
    of_prices = Prices(0.02, 5.0)
    look = PageMatter(states, PageChoice(), lambda run, attempt: None, None, 0.0, of_prices)
    assert text in sections_of(look)["runs"]


def test_a_root_without_telemetry_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    url = str(tmp_path / "run")
    ckpt.save({"x": torch.ones(3)}, url, step=1, telemetry=False)
    assert main(["cost", url]) == 1
    assert "says how its save went" in capsys.readouterr().err


def test_the_page_about_it_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "cost.md").read_text()
    command, shown = page.split("```sh\n")[1].split("```\n\n```text\n")
    assert main(command.split()[1:]) == 0
    assert shown.partition("```")[0] == capsys.readouterr().out
