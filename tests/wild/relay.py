"""A training that is handed on: one step under each engine, saved there and resumed by the next.

Method: a training in one process, which nothing interrupts, is the reference. Then the same
training begins in one process, saves, and is resumed under another engine on another number of
ranks, which takes the next step and saves, and so on through all links, back to one process. Every
loss and, at the end, every bit of the model and of the optimizer must be those of the reference.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import ckpt
from tests.ranks import run_ranks
from tests.wild.engines import (
    ERRORS,
    LINKS,
    Link,
    Training,
    Writer,
    barrier,
    compute_alike,
    in_a_line,
    load,
    save,
    training_of,
)
from tests.wild.models import Model

SEED = 7
LEARNING_RATE = 0.01
# Of rows that are not exact: of a loss, and of a tensor's largest element. AdamW divides by small
# numbers.
LOSS_ROUNDING, TENSOR_ROUNDING = 1e-6, 1e-3
PATIENT: dict[str, Any] = dict(timeout_seconds=1800)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.1)


class Reference(NamedTuple):
    """The losses of a training that nothing interrupts, and its tensors at the end."""

    losses: list[float]
    tensors: dict[str, torch.Tensor]


def references_of(rows: Sequence[Model], steps: int) -> dict[str, Reference]:
    compute_alike()
    return {row.name: reference_of(row, steps) for row in rows}


def reference_of(row: Model, steps: int) -> Reference:
    training = training_of("plain", row.build, adamw, SEED)
    losses = [training.step(row.loss, step) for step in range(1, steps + 1)]
    return Reference(losses, tensors_of(training))


def tensors_of(training: Training) -> dict[str, torch.Tensor]:
    """All tensors of a plain training by name."""
    outcomes = {f"model.{name}": each for name, each in training.model.state_dict().items()}
    for name, param in training.model.named_parameters():
        for key, each in training.optimizer.state.get(param, {}).items():
            outcomes[f"optimizer.{name}.{key}"] = torch.as_tensor(each)
    return outcomes


def relay(rows: Sequence[Model], writer: Writer, folder: Path) -> dict[str, str]:
    """Hand on the training of each row through all links of `writer`; what failed, by row.

    "" means that every loss and every bit was that of a training that nothing interrupts.
    """
    links = LINKS[writer]
    (references,) = run_ranks(1, references_of, rows, len(links), group=False, **PATIENT)
    failed: dict[str, str] = {}
    first = 1
    for size, run in groupby(links, key=lambda link: link.size):
        part = list(run)
        going = [row for row in rows if row.name not in failed]
        expected = {row.name: references[row.name].losses for row in going}
        job = (writer, part, first, expected, str(folder))
        # Fresh processes for each part, one rank too: a process that others have fenced stays out.
        for answer in run_ranks(size, run_links, going, *job, group=size > 1, **PATIENT):
            failed.update(answer)
        first += len(part)
    going = [row for row in rows if row.name not in failed]
    job = (writer, references, str(folder))
    failed.update(run_ranks(1, check_ends, going, *job, group=False, **PATIENT)[0])
    return {row.name: failed.get(row.name, "") for row in rows}


def run_links(
    rows: Sequence[Model],
    writer: Writer,
    links: Sequence[Link],
    first: int,
    expected: dict[str, list[float]],
    folder: str,
) -> dict[str, str]:
    """The part of a relay that runs on one number of ranks; what failed, by row."""
    compute_alike()
    failed = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows:
            for step, link in enumerate(links, first):
                if why := run_link(row, writer, link, step, expected[row.name], folder):
                    failed[row.name] = f"{link}: {why}"
                    break
            barrier()
    return failed


def run_link(
    row: Model, writer: Writer, link: Link, step: int, expected: list[float], folder: str
) -> str:
    root = f"{folder}/{row.name}"
    try:
        seed = SEED if step == 1 else SEED + step
        training = training_of(link.engine, row.build, adamw, seed)
        if step > 1:
            load(writer, training, root, step - 1)
        loss = training.step(row.loss, step)
        save(writer, training, root, step)
    except ERRORS as error:
        return in_a_line(error)
    wanted = expected[step - 1]
    far = abs(loss - wanted)
    if far <= (0 if row.is_exact else LOSS_ROUNDING * abs(wanted)):
        return ""
    return f"the loss of step {step} is {loss!r}, and not {wanted!r}"


def check_ends(
    rows: Sequence[Model], writer: Writer, references: dict[str, Reference], folder: str
) -> dict[str, str]:
    """Compare what is last in each root with its reference, and open what is exported from it."""
    outcomes = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows:
            try:
                outcomes[row.name] = check_end(row, writer, references[row.name], folder)
            except ERRORS as error:
                outcomes[row.name] = in_a_line(error)
    return outcomes


def check_end(row: Model, writer: Writer, reference: Reference, folder: str) -> str:
    root = f"{folder}/{row.name}"
    last = training_of("plain", row.build, adamw, SEED - 1)
    load(writer, last, root, len(reference.losses))
    why = unequal(tensors_of(last), reference.tensors, 0 if row.is_exact else TENSOR_ROUNDING)
    if why or writer != "ours" or row.open is None:
        return why
    exported = f"{folder}/{row.name}-exported"
    ckpt.export(root, f"{exported}/model.safetensors", verify=True)
    opened = row.open(last.model, exported)
    return unequal(opened.state_dict(), last.model.state_dict(), 0)


def unequal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> str:
    """The first name whose tensor differs in dtype, shape or by more than `tolerance` of its
    largest element, or of the learning rate; empty when none does.
    """
    if got.keys() != wanted.keys():
        return f"other names: {sorted(got.keys() ^ wanted.keys())[:3]}"
    for name, tensor in got.items():
        other = wanted[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)} after the relay"
        if torch.equal(tensor, other):
            continue
        far = (tensor.double() - other.double()).abs().max().item()
        # At least of a step: a gradient that is nothing but rounding (that of a bias of keys, which
        # no softmax sees) moves its parameter by as much as one that is something.
        largest = max(other.double().abs().max().item(), LEARNING_RATE)
        if not far <= tolerance * largest:
            return f"{name} differs from the uninterrupted training by up to {far:.2g}"
    return ""
