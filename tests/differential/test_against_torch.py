"""Our classes do what torch's do, over random models, wrappings, settings and orders of calls.

Method: a seed decides on a draw (`draws`); both classes play it on the same ranks, and what each
call gives is compared: values, keys, shapes, dtypes, exception or not. Differences that are meant
are data (`listed`) and stand in docs/engine_differences.md. `python -m tests.differential SEED
--ranks N` replays one draw.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable

import pytest

from tests.conftest import Scale
from tests.differential.comparing import differences, frozen, raised
from tests.differential.draws import Draw, drawn
from tests.differential.listed import LISTED, Listed
from tests.differential.planting import PLANTS
from tests.differential.playing import Outcome, play
from tests.results import Counted
from tests.test_house import ROOT

SHARES = {2: (0.8, 2), 4: (0.2, 2)}
"""Of the draws, by ranks; and in how many parts, so that no part is long."""


@pytest.mark.ranks
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("ranks", "part"),
    [(ranks, part) for ranks, (_, parts) in SHARES.items() for part in range(parts)],
)
def test_draws_have_no_difference_that_is_not_listed(
    ranks: int, part: int, scale: Scale, seed: int, counted: Counted
) -> None:
    share, parts = SHARES[ranks]
    count = round(scale.count(300, 5000) * share / parts)
    first = random.Random(seed).randrange(10**9)
    wrong = [one for one in play(ranks, range(first, first + count)) if one.differences]
    counted(draws=count, unlisted_differences=len(wrong))
    assert not wrong, "\n\n".join(map(str, wrong[:10]))


def _is_low(draw: Draw) -> bool:
    # torch's mixed precision fails around norms over the batch and ignored modules.
    casts = draw.precision != "none" and "'batch'" not in str(draw.tree) and draw.ignored is None
    return casts or (draw.dtype == "bfloat16" and draw.precision == "none")


def _is_noisy(draw: Draw) -> bool:
    divides = draw.optimizer != "sgd" and draw.dtype != "bfloat16" and draw.precision == "none"
    return divides and "'batch'" in str(draw.tree)


def _confuses(draw: Draw, names: tuple[str, ...]) -> bool:
    """Whether one of these calls has a whole dict with parameters of one shape."""
    calls = [op for op in draw.ops if op.name in names and op.args["form"] == "FULL"]
    whole = [op for op in calls if not op.args["rank0"] and not op.args["offload"]]
    return str(draw.tree).count("'norm'") > 1 and bool(whole)


TAKING = functools.partial(_confuses, names=("state", "optim_state"))
LOADING = functools.partial(_confuses, names=("load", "optim_load"))
PLANTED: tuple[tuple[str, int, Callable[[Draw], bool]], ...] = (
    ("gradients 1 % too large", 4, _is_low),
    ("gradients 1 % too large", 4, _is_noisy),
    ("one rank's gradients dropped", 4, _is_noisy),
    ("members swapped in dicts", 2, TAKING),
    ("another tensor of the shape loaded", 2, LOADING),
)


@pytest.mark.ranks
@pytest.mark.parametrize(("plant", "ranks", "is_kind"), PLANTED)
def test_a_planted_error_is_found(plant: str, ranks: int, is_kind: Callable[[Draw], bool]) -> None:
    """In draws of low precision, and of norms over the batch under optimizers that divide by
    gradients, where rounding could hide it; or with parameters that could be confused.
    """
    candidates = [drawn(seed, ranks) for seed in range(20000, 21000)]
    plain = [one for one in candidates if one.ops[0].name == "train" and one.precision != "keep"]
    # Every draw has gradients. Dicts that both sides refuse, or that end a draw, hide a mix-up.
    count = 3 if "gradients" in plant else 8
    seeds = [draw.seed for draw in plain if is_kind(draw)][:count]
    seen = [bool(outcome.differences) for outcome in play(ranks, seeds, plant=plant)]
    assert len(seen) == count and (all(seen) if "gradients" in plant else any(seen))


def test_every_plant_is_tried() -> None:
    assert {plant for plant, _, _ in PLANTED} == set(PLANTS)


@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: entry.reason)
def test_what_is_listed_stands_on_the_page(entry: Listed) -> None:
    page = (ROOT / "docs" / "engine_differences.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert any(line.startswith(f"| {entry.page}") for line in table)


def test_a_seed_always_gives_the_same_draw() -> None:
    assert str(drawn(5, 2)) == str(drawn(5, 2)) != str(drawn(6, 2))


def test_differences_are_seen() -> None:
    import torch

    ones = {"a": torch.ones(2), "b": [1, torch.ones(1)]}
    for change, what in (
        ({"a": torch.full((2,), 1.1)}, "value"),
        ({"a": torch.ones(3)}, "shape"),
        ({"a": torch.ones(2).double()}, "about"),
        ({"c": 1}, "keys"),
        ({"b": [2, torch.ones(1)]}, "value"),
        ({"b": [1]}, "kind"),
        ({"b": None}, "kind"),
    ):
        seen = differences(frozen(ones), frozen({**ones, **change}), 1e-6)
        assert [one.what for one in seen] == [what]
    assert not list(differences(frozen(ones), frozen(ones), 0.0))
    errors = raised(ValueError("a")), raised(KeyError("a"))
    assert [one.what for one in differences(*errors, 0.0)] == ["raised"]
    assert [one.what for one in differences(errors[0], None, 0.0)] == ["raised"]
    assert not list(differences(errors[0], raised(ValueError("b")), 0.0))


def test_a_failing_draw_tells_how_to_replay_it() -> None:
    text = str(Outcome(7, 4, differences=["rank 0: something"]))
    assert re.search(r"seed 7: .* on 4 ranks", text) and "something" in text
    assert "python -m tests.differential 7 --ranks 4" in text
