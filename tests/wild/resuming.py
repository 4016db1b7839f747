"""Two trainings that must not differ: one goes on after its save, the other from the checkpoint.

Method: for a row and an engine, a training takes two steps, saves, and takes two more. A second
one, from other weights, loads, and takes the last two: its losses and all of its tensors and values
must be those of the first, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from tests.wild.engines import (
    ERRORS,
    Training,
    Writer,
    barrier,
    compute_alike,
    in_a_line,
    load,
    save,
    training_of,
)
from tests.wild.optimizers import Optimizer

BEFORE, AFTER = (1, 2), (3, 4)


class Resumed(NamedTuple):
    """What became of one row under one engine.

    `failed` is ours; `refused` is the optimizer's own error, which needs no checkpoint. `losses`
    are those without a stop.
    """

    engine: str
    failed: str = ""
    refused: str = ""
    losses: tuple[float, ...] = ()


def resume_all(
    rows: Sequence[Optimizer], engines: Sequence[str], writer: Writer, folder: str
) -> dict[str, list[Resumed]]:
    """All rows under all engines, on the ranks of the default group."""
    compute_alike()
    outcomes: dict[str, list[Resumed]] = {row.name: [] for row in rows}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows:
            for engine in engines:
                if engine in row.engines:
                    root = f"{folder}/{row.package}.{row.name}-{engine}".replace(" ", "-")
                    outcomes[row.name].append(resume_one(row, engine, writer, root))
                    barrier()
    return outcomes


def resume_one(row: Optimizer, engine: Any, writer: Writer, root: str) -> Resumed:
    try:
        first = training_of(engine, row.net, row.make, seed=1)
        before = [stepped(first, row, step) for step in BEFORE]
        assert len(before) == len(BEFORE)
    except ERRORS as error:
        return Resumed(engine, refused=in_a_line(error))
    try:
        save(writer, first, root, BEFORE[-1])
        second = training_of(engine, row.net, row.make, seed=2)
        load(writer, second, root, BEFORE[-1])
    except ERRORS as error:
        return Resumed(engine, failed=in_a_line(error))
    wanted = [stepped(first, row, step) for step in AFTER]
    try:
        got = [stepped(second, row, step) for step in AFTER]
    except ERRORS as error:
        return Resumed(engine, failed=f"after the load: {in_a_line(error)}")
    if got != wanted:
        return Resumed(engine, failed=f"losses {got} after the load, {wanted} without it")
    why = difference(parts_of(second), parts_of(first))
    return Resumed(engine, failed=why, losses=(*before, *wanted))


def stepped(training: Training, row: Optimizer, step: int) -> float:
    """One step; optimizers that take several gradients a step get a closure, as all may."""
    torch.manual_seed(step)
    np.random.seed(step)  # kron balances its preconditioners by chance
    set_mode = getattr(training.optimizer, "train", None)
    if callable(set_mode):  # schedule-free ones have two modes, as modules have
        set_mode()
    losses: list[float] = []

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = row.loss(training.model, step)
        loss.backward(create_graph=row.name in CREATES_GRAPHS)
        losses.append(float(loss.detach()))
        return loss

    if row.name in CLOSURES:
        training.optimizer.step(closure)
    else:
        closure()
        training.optimizer.step()
    return losses[0]


CLOSURES = ("LBFGS", "lbfgs", "alig", "bsam")
CREATES_GRAPHS = ("adahessian", "sophiah")


def parts_of(training: Training) -> dict[str, Any]:
    """All tensors and values of a training on this rank, by where they are."""
    parts = dict(leaves("model", training.model.state_dict()))
    optimizer = training.optimizer
    kept = optimizer.state_dict()["param_groups"]  # some leave caches out
    for index, group in enumerate(optimizer.param_groups):
        names = kept[index].keys() - {"params", "param_names"}
        options = {key: value for key, value in group.items() if key in names}
        parts.update(leaves(f"group {index}", options))
        for number, param in enumerate(group["params"]):
            if not param.numel():
                continue  # a rank's empty share: nothing steps it, and nothing of it is stored
            parts.update(leaves(f"state {index}.{number}", dict(optimizer.state.get(param, {}))))
    return parts


def leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from leaves(f"{path}.{key}", item)
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from leaves(f"{path}.{index}", item)
    else:
        yield path, tree


def difference(got: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first part that differs; empty when none does."""
    if got.keys() != wanted.keys():
        return f"other parts: {sorted(got.keys() ^ wanted.keys())[:3]}"
    for path, part in got.items():
        if not same(part, wanted[path]):
            return f"{path} differs from the training that went on"
    return ""


def same(a: Any, b: Any) -> bool:
    """Whether two leaves of a state are equal, tensors by their bytes: a NaN is equal to itself."""
    if type(a) is not type(b):
        return False
    if not isinstance(a, torch.Tensor):
        return bool(a == b) if isinstance(a, PLAIN) else True
    if isinstance(a, DTensor):
        return same(a.to_local(), b.to_local())
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if hasattr(a, "__tensor_flatten__"):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.__tensor_flatten__()[0])
    flat = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
    return torch.equal(*flat)


# What is compared beside tensors. Options may be functions and objects of a library, as they were
# given to the constructor.
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
