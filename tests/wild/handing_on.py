"""Trainers of other libraries that hand one training on: to other ranks, cut in another way.

Method: a trainer runs in one process, and nothing interrupts it. Then the same training begins
there, stops, and goes on in fresh processes on another number of ranks and in another layout, from
what the one before saved, and so on, back to one process. Every loss and, at the end, every bit of
the model and of the optimizer must be those of the first.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tests.ranks import RanksFailed, run_ranks
from tests.wild.engines import ERRORS, compute_alike, in_a_line
from tests.wild.resuming import difference

Writer = Literal["ours", "DCP", "nothing"]
SECONDS_MAX = 900.0


class Stretch(NamedTuple):
    """A part of a training: how its model is cut, on how many ranks, to which step."""

    layout: str
    size: int
    last_step: int

    def __str__(self) -> str:
        return f"{self.layout}@{self.size}"


class Outcome(NamedTuple):
    """What a stretch gave on a rank: losses of its steps, and all tensors as this rank has them."""

    losses: list[float]
    tensors: dict[str, torch.Tensor]


class Trainer(NamedTuple):
    """A row of the table. `run` trains one stretch on a rank, from the newest checkpoint below a
    folder; what it raises fails the row. `remark` says what is not quite the library's own.
    """

    name: str
    package: str
    what: str
    stretches: tuple[Stretch, ...]
    run: Callable[[Stretch, Writer, str], Outcome]
    remark: str = ""


def stretches(*layouts: tuple[str, int]) -> tuple[Stretch, ...]:
    """One step in each."""
    return tuple(Stretch(*layout, step) for step, layout in enumerate(layouts, 1))


def try_trainer(row: Trainer, writer: Writer) -> str:
    """What failed on any rank; empty when nothing did."""
    whole = Stretch(row.stretches[0].layout, 1, row.stretches[-1].last_step)
    with tempfile.TemporaryDirectory() as folder:
        wanted = ranks_of(row, whole, "nothing", str(Path(folder) / "alone"))
        if isinstance(wanted, str):
            return f"without a stop: {wanted}"
        losses: list[float] = []
        for stretch in row.stretches:
            got = ranks_of(row, stretch, writer, str(Path(folder) / "handed"))
            if isinstance(got, str):
                return f"{stretch}: {got}"
            losses += got.losses
            if losses != wanted.losses[: len(losses)]:
                return f"{stretch}: losses {losses}, and {wanted.losses} without a stop"
    if not wanted.tensors:
        raise AssertionError(f"{row.name}: nothing to compare")
    return difference(dict(got.tensors), dict(wanted.tensors))


def ranks_of(row: Trainer, stretch: Stretch, writer: Writer, folder: str) -> Outcome | str:
    """The outcome of the last rank, which has the losses of a pipeline, or what failed on any."""
    job: tuple[Any, ...] = (run_stretch, row, stretch, writer, folder)
    try:
        answers = run_ranks(stretch.size, *job, timeout_seconds=SECONDS_MAX)
    except RanksFailed as error:
        return in_a_line(error)
    failed = next((answer for answer in answers if isinstance(answer, str)), None)
    return answers[-1] if failed is None else failed


def run_stretch(row: Trainer, stretch: Stretch, writer: Writer, folder: str) -> Outcome | str:
    compute_alike()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return row.run(stretch, writer, folder)
        except ERRORS as error:
            return in_a_line(error)
