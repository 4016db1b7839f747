"""A training on a device gives the CPU's result: all scenarios of `tests/streams`, both surfaces.

Method: the same ranks train on the CPU and on the device, with the same values, and compare shards,
outputs and gradients; one rank by itself does so with torch's classes on that device, too, bit by
bit. Ranks are one by itself (NCCL or what the device has), four that share one device (gloo), and
one per device where there are several. The default run has a sample of all that with the CPU as the
device, which has to give the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.conftest import Scale
from tests.gpu.real import Result, compared, differences
from tests.gpu.setups import SETUPS, Setup, run, why_not
from tests.streams.scenarios import SCENARIOS

CONTROLS = ("plain", "repeated_over_an_axis", "low_precision_parameters")


def cases() -> Iterator[Any]:
    for kind in SETUPS:
        names = [
            name
            for name, scenario in SCENARIOS.items()
            if fits(name, 1 if kind == "one" else 4)
            and not (kind == "sharing" and scenario.captures)
        ]
        # What four processes need of one device to begin takes longer than ten scenarios.
        step = 10 if kind == "sharing" else 1
        for start in range(0, len(names), step):
            some = names[start : start + step]
            runs = [("ours", surface, one) for one in some for surface in SCENARIOS[one].surfaces]
            title = some[0] if step == 1 else f"{start}_to_{start + len(some) - 1}"
            yield pytest.param(kind, runs, id=f"{kind}-{title}")
    for name in CONTROLS:
        runs = [("torch", surface, name) for surface in SCENARIOS[name].torchs]
        yield pytest.param("one", runs, id=f"one-{name}-torchs")


def fits(name: str, ranks: int) -> bool:
    scenario = SCENARIOS[name]
    return ranks >= scenario.ranks_min and (scenario.world > 1 or ranks == 1)


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "runs"), list(cases()))
def test_a_scenario_gives_the_cpus_result(
    kind: str, runs: list[tuple[str, str, str]], accelerator: str
) -> None:
    setup = SETUPS[kind](accelerator)
    why = why_not(setup)
    fitting = [one for one in runs if fits(one[2], setup.ranks)]
    if not why and not fitting:
        why = f"needs {SCENARIOS[runs[0][2]].ranks_min} devices"
    if why:
        pytest.skip(why)
    check(run(setup, several_compared, fitting, accelerator, timeout_seconds=400))


def check(problems: list[list[str]]) -> None:
    texts = [f"rank {rank}, {text}" for rank, mine in enumerate(problems) for text in mine]
    assert not texts, "\n".join(texts)


def several_compared(runs: Sequence[tuple[str, str, str]], device: str) -> list[str]:
    problems = []
    for who, surface, name in runs:
        print(f"  {name}, {surface}", flush=True)  # where one that hangs is
        problems += [f"{name}, {text}" for text in compared(who, (surface,), name, device)]
    return problems


@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "sample"), [(1, 8), (4, 2)])
def test_on_the_cpu_the_same_code_gives_the_same_bits(
    ranks: int, sample: int, scale: Scale, rng: random.Random
) -> None:
    everything = [
        ("ours", surface, name)
        for name, scenario in SCENARIOS.items()
        if fits(name, ranks)
        for surface in scenario.surfaces
    ]
    chosen = rng.sample(everything, scale.count(sample, len(everything)))
    chosen.append(("torch", "fully", "plain"))
    setup = Setup("one" if ranks == 1 else "sharing", "cpu", ranks, ranks > 1)
    check(run(setup, several_compared, chosen, "cpu", timeout_seconds=800))


def result(**changed: Any) -> Result:
    final: dict[str, Any] = {"w": torch.tensor([1.0, 2.0]), "g": torch.tensor([1.0]), "n": None}
    return Result({}, {}, {**final, **changed}, torch.float32)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"w": torch.tensor([1.0, 2.001])}, "w: differs by"),
        ({"w": torch.tensor([1.0, torch.nan])}, "w: differs by nan"),
        ({"g": None}, "g: is missing"),
        ({"n": torch.ones(1)}, "n: is there"),
        ({"w": torch.tensor([1.0, 2.0, 3.0])}, "w: torch.float32"),
        ({"w": torch.tensor([1.0, 2.0]).bfloat16()}, "w: torch.bfloat16"),
        ({"more": None}, "['more'] are on one side only"),
    ],
)
def test_what_differs_is_named(changed: dict[str, Any], said: str) -> None:
    (text,) = differences(result(**changed), result(), exact=False)
    assert text.startswith(said), text


def test_roundings_are_allowed_where_a_device_computes_and_not_where_it_copies() -> None:
    rounded = {"w": torch.tensor([1.0, 2.00001])}
    assert not differences(result(**rounded), result(), exact=False)
    assert differences(result(**rounded), result(), exact=True)
    wrapped, other = (one._replace(wrapped=one.final) for one in (result(**rounded), result()))
    assert len(differences(wrapped, other, exact=False)) == 1


def test_values_that_are_not_finite_show_nothing() -> None:
    bad = result(w=torch.tensor([1.0, torch.inf]))
    (text,) = differences(bad, bad, exact=True)
    assert "not finite" in text


def test_several_devices_are_asked_for_where_there_are_not() -> None:
    assert "needs 2 devices" in why_not(SETUPS["several"]("cpu"))
    assert not why_not(SETUPS["one"]("cpu")) and not why_not(SETUPS["sharing"]("cpu"))
