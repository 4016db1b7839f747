"""Optimizers whose state crosses from one process to two ranks under an engine, and back.

Method: a training in one process takes two steps, saves, and takes two more. Two ranks under an
engine load what it saved and save that again as it is, then take the third step and save. One
process loads both. What was only loaded and saved must be the saved model and state, bit for bit.
After the third step on two ranks and the fourth in one process, losses, model and state must be
those of the training that went on, wherever an uninterrupted training has the same losses under
that engine as in one process; elsewhere the steps of the optimizer depend on the layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.ranks import RanksFailed, run_ranks
from tests.wild.engines import (
    ERRORS,
    Writer,
    barrier,
    compute_alike,
    in_a_line,
    load,
    save,
    training_of,
)
from tests.wild.optimizers import Optimizer
from tests.wild.resuming import PLAIN, Resumed, difference, parts_of, stepped

SAVED, CROSSED, LAST = 2, 3, 4
PATIENT: dict[str, Any] = dict(timeout_seconds=1800)


class Course(NamedTuple):
    """A training without a stop: losses of its steps, its parts when it saved and at the end."""

    losses: list[float]
    saved: dict[str, Any]
    end: dict[str, Any]


def cross(
    rows: Sequence[Optimizer],
    engines: Mapping[str, Sequence[str]],
    writer: Writer,
    folder: Path,
) -> dict[str, dict[str, str]]:
    """What went wrong, by the name of the row and by engine; "" for nothing.

    `engines` are those under which the optimizer of a row can step, with "*" behind the name of one
    where its steps depend on the layout.
    """
    job = (writer, str(folder))
    (begun,) = run_ranks(1, begin_all, rows, *job, group=False, **PATIENT)
    going = [row for row in rows if isinstance(begun[row.name], Course)]
    crossed = on_two_ranks(going, engines, *job)
    (ended,) = run_ranks(1, end_all, going, crossed, begun, *job, group=False, **PATIENT)
    return ended


def on_two_ranks(
    rows: Sequence[Optimizer], engines: Mapping[str, Sequence[str]], writer: Writer, folder: str
) -> dict[str, dict[str, str]]:
    """As of the first rank that something failed on; of rows that end their ranks, each alone."""
    try:
        both = run_ranks(2, cross_all, rows, engines, writer, folder, **PATIENT)
    except RanksFailed as error:
        if len(rows) == 1:
            return {rows[0].name: dict.fromkeys(engines[rows[0].name], in_a_line(error))}
        alone = [on_two_ranks([row], engines, writer, folder) for row in rows]
        return {name: each for one in alone for name, each in one.items()}
    first, second = both
    return {
        name: {engine: why or second[name][engine] for engine, why in first[name].items()}
        for name in first
    }


def begin_all(rows: Sequence[Optimizer], writer: Writer, folder: str) -> dict[str, Course | str]:
    compute_alike()
    outcomes: dict[str, Course | str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows:
            try:
                outcomes[row.name] = begin(row, writer, folder)
            except ERRORS as error:
                outcomes[row.name] = in_a_line(error)
    return outcomes


def begin(row: Optimizer, writer: Writer, folder: str) -> Course:
    training = training_of("plain", row.net, row.make, seed=1)
    losses = [stepped(training, row, step) for step in range(1, SAVED + 1)]
    save(writer, training, f"{folder}/{row.name}", SAVED)
    saved = copied(parts_of(training))
    losses += [stepped(training, row, step) for step in range(SAVED + 1, LAST + 1)]
    return Course(losses, saved, copied(parts_of(training)))


def cross_all(
    rows: Sequence[Optimizer], engines: Mapping[str, Sequence[str]], writer: Writer, folder: str
) -> dict[str, dict[str, str]]:
    compute_alike()
    outcomes: dict[str, dict[str, str]] = {row.name: {} for row in rows}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows:
            for marked in engines[row.name]:
                try:
                    cross_one(row, marked.rstrip("*"), writer, folder)
                    outcomes[row.name][marked] = ""
                except ERRORS as error:
                    outcomes[row.name][marked] = in_a_line(error)
                barrier()
    return outcomes


def cross_one(row: Optimizer, engine: Any, writer: Writer, folder: str) -> None:
    training = training_of(engine, row.net, row.make, seed=2)
    load(writer, training, f"{folder}/{row.name}", SAVED)
    root = root_of(row, engine, folder)
    save(writer, training, root, SAVED)
    stepped(training, row, CROSSED)
    save(writer, training, root, CROSSED)


def end_all(
    rows: Sequence[Optimizer],
    crossed: Mapping[str, Mapping[str, str]],
    begun: Mapping[str, Course],
    writer: Writer,
    folder: str,
) -> dict[str, dict[str, str]]:
    compute_alike()
    outcomes: dict[str, dict[str, str]] = {row.name: dict(crossed[row.name]) for row in rows}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows:
            for marked, why in crossed[row.name].items():
                if not why:
                    try:
                        why = end(row, marked, begun[row.name], writer, folder)
                    except ERRORS as error:
                        why = f"back in one process: {in_a_line(error)}"
                    outcomes[row.name][marked] = why
    return outcomes


def end(row: Optimizer, marked: str, course: Course, writer: Writer, folder: str) -> str:
    root = root_of(row, marked.rstrip("*"), folder)
    training = training_of("plain", row.net, row.make, seed=3)
    load(writer, training, root, SAVED)
    if why := difference(copied(parts_of(training)), course.saved):
        return f"what was loaded and saved again: {why}"
    training = training_of("plain", row.net, row.make, seed=4)
    load(writer, training, root, CROSSED)
    loss = stepped(training, row, LAST)
    if marked.endswith("*"):
        return ""
    if loss != course.losses[-1]:
        return f"the loss of step {LAST} is {loss!r}, and {course.losses[-1]!r} without a stop"
    return difference(copied(parts_of(training)), course.end)


def root_of(row: Optimizer, engine: str, folder: str) -> str:
    return f"{folder}/{row.name}-{engine}".replace(" ", "-")


def copied(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of tensors and values; what else a library keeps among its options is left out."""
    return {
        path: part.detach().clone() if isinstance(part, torch.Tensor) else part
        for path, part in parts.items()
        if isinstance(part, (torch.Tensor, *PLAIN))
    }


def engines_to_cross(resumed: Sequence[Resumed]) -> list[str]:
    """Of how a row was resumed, the engines under which it could step, marked as `cross` says."""
    plain = next((each.losses for each in resumed if each.engine == "plain"), ())
    return [
        each.engine + ("" if each.losses == plain else "*")
        for each in resumed
        if each.engine != "plain" and not each.refused and not each.failed
    ]
