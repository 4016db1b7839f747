"""Two trainings on one root that forget calls: none of them loses a checkpoint of the other.

    python examples/share_a_root.py

Every order of two jobs after a first training, each of which restores, begins anew, does both or
forgets both. Each keeps its two newest checkpoints. Then two trainings with names.
"""

from __future__ import annotations

import itertools
import logging
import sys
from typing import Any

import torch

import ckpt

CALLS = ("forgets both", "restores", "begins anew", "does both")


def main() -> None:
    """Raises SystemExit when a checkpoint of another training is gone."""
    logging.basicConfig(level=logging.ERROR)  # each new line is warned of, which is wanted here
    for number, calls in enumerate(itertools.product(CALLS, repeat=2)):
        url = f"memory://share-a-root-{number}"
        job(url, steps=range(1, 6))
        outcomes = [protected(url, 100 * place, call) for place, call in enumerate(calls, 1)]
        print("; ".join(f"job {2 + i} {one}" for i, one in enumerate(outcomes)))
    names = ("generator", "critic")
    for name in (*names, *names):
        job("memory://gan", steps=range(1, 6), restores=True, line=name)
    kept = {name: steps_of(f"memory://gan/lines/{name}") for name in names}
    print(f"named lines keep {kept}")
    assert set(kept) == set(names) and all(kept.values())


def job(url: str, *, steps: range, restores: bool = False, **options: Any) -> None:
    """One job, as a process of its own would run it."""
    line = options.get("line")
    ckpt.forget(f"{url}/lines/{line}" if line else url)
    state = {"weight": torch.zeros(4)}
    options = {"save": ckpt.EverySteps(1), "keep": ckpt.KeepLatest(2), **options}
    with ckpt.Checkpointer(state, url, **options) as checkpointer:
        report = checkpointer.restore() if restores else None
        first = 0 if report is None else report.step
        for step in steps:
            checkpointer.step(first + step)


def protected(url: str, first: int, call: str) -> str:
    """What a job does to the root, in words; ends the program when it takes what it may not."""
    before = ckpt.list_steps(url)
    try:
        job(
            url,
            steps=range(first, first + 3),
            restores=call in ("restores", "does both"),
            begin_anew=call in ("begins anew", "does both"),
        )
    except ckpt.errors.StoreRefused:
        outcome = "is refused"
    else:
        outcome = f"{call} and saves line {ckpt.list_steps(url)[-1].line}"
    after = ckpt.list_steps(url)
    gone = [one for one in before if one.line != after[-1].line and one not in after]
    if gone:
        sys.exit(f"a job that {call} has retired {gone} of another training")
    return outcome


def steps_of(url: str) -> list[int]:
    """The steps of a root."""
    return [entry.step for entry in ckpt.list_steps(url)]


if __name__ == "__main__":
    main()
