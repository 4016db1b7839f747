"""What a load fills in a state, what does not fit, and what it installs afterwards; and the mark on
a state that a failed load left as a mixture, which may not be stepped or saved.

The mark sits in this process only, on the modules, optimizers and tensors that the state consists
of, and goes away with them or with the next load that succeeds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.errors import LoadInterrupted
from ckpt.layout.holdings import WholeTensors
from ckpt.layout.piece import Holding
from ckpt.state.describe import Described
from ckpt.state.matching import Tally
from ckpt.state.names import Left
from ckpt.state.optimizer import params_of
from ckpt.state.resize import NewRows
from ckpt.state.types import Loaded, Problem, ProblemKind
from ckpt.state.walk import walk
from storage import KeyNotFoundError

_marked: dict[int, tuple[weakref.ref[Any], str]] = {}  # by id of what is half-loaded
_hooked: list[Any] = []  # torch's handle of the hook on steps, once there is one


@dataclass(frozen=True, slots=True)
class Binding:
    """What to fill, what does not fit, and the two steps around the filling.

    `plain` and `others` are live memory, or fresh memory that `finish()` installs; they bear the
    checkpoint's names. `fatal` are the texts of the problems that forbid the load; what is `left`
    does not, where another rank has a place for it, and rules that are `unmatched` do not, where
    they match something on another rank.
    """

    plain: Sequence[WholeTensors]
    others: Sequence[Holding]
    problems: tuple[Problem, ...]
    fatal: tuple[str, ...]
    described: Described
    steps: list[Callable[[], None]]
    report: Loaded
    missing_tensors_count: int
    left: Left
    warnings: Sequence[str] = ()
    unmatched: Sequence[str] = ()
    new_rows: Sequence[NewRows] = ()

    @property
    def fatal_here(self) -> list[str]:
        """Those of `fatal` that no other rank's state can make right."""
        # What this rank has no place for may have one on another rank.
        rest = [p for p in self.problems if p.kind is not ProblemKind.UNEXPECTED]
        fatal = set(self.fatal)
        return [problem.text for problem in rest if problem.text in fatal]

    @property
    def holdings(self) -> list[Holding]:
        """All that is filled."""
        plain = [holding for whole in self.plain for holding in whole.holdings(kept=False)]
        return [*plain, *self.others]

    @property
    def tally(self) -> Tally:
        """How much of the state the checkpoint has."""
        report = self.report
        matched = len(report.tensors) + len(report.values)
        return Tally(matched, len(report.missing), len(report.tensors), self.missing_tensors_count)

    def prepare(self) -> None:
        """Make the engines drop gathered copies, so that what is filled is what they will use, and
        autograd refuse the backward of a forward that used the values of before.
        """
        for layout in self.described.layouts:
            layout.reshard()
        changed: list[torch.Tensor] = []
        for whole in self.plain:
            changed += whole.tensors
        for holding in self.others:
            changed.append(holding.local)
        torch.autograd.graph.increment_version(changed)

    @property
    def averaged(self) -> list[str]:
        """Names of the checkpoint whose rows have to be averaged."""
        return sorted({rows.fqn for rows in self.new_rows if rows.rule == "mean"})

    def finish(self, means: Mapping[str, Sequence[float]] | None = None) -> Loaded:
        """Install what is not filled in place, once all of `holdings` is filled; `means` are those
        of `averaged`.

        Optimizer state and param groups, objects and extra states, values, random states, in this
        order. Raises Mismatch when members of one flat parameter have different scalar state.
        """
        for rows in self.new_rows:
            rows.fill(means or {})
        for step in self.steps:
            step()
        return self.report


@contextmanager
def filling(state: Any, what: str) -> Iterator[None]:
    """Around the writing of `what` into `state`: a failure leaves the mark, success takes it away.

    Raises LoadInterrupted for any Exception of the block. Once marked, a step of an optimizer over
    the state, or saving it, raises.
    """
    try:
        yield
    except BaseException as error:
        _mark(state, what)
        # A KeyboardInterrupt leaves a mixture as well, and stays what it is for those above.
        if not isinstance(error, Exception):
            raise
        move = "Load again, or load another checkpoint"
        if isinstance(error, KeyNotFoundError):
            move = "Load an older checkpoint (step=); `ckpt verify` lists all that is missing"
        raise LoadInterrupted(
            f"loading {what} failed after it had begun to write into the state, which is now a "
            f"mixture: {error}\n{move}, before the state is used."
        ) from error
    if _marked:
        # A load that succeeded has overwritten all of it.
        for item in _objects_of(state):
            _marked.pop(id(item), None)


def _mark(state: Any, what: str) -> None:
    # Only from the first failure on: a hook on every step of every optimizer is not free.
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_refuse_step))
    text = (
        f"a load of {what} into this state failed half-way, so it is a mixture of old and "
        "new values; load a checkpoint into it before stepping or saving"
    )
    for item in _objects_of(state):
        forget = partial(_marked.pop, id(item))  # called with the reference, which it returns
        _marked[id(item)] = (weakref.ref(item, forget), text)


def refuse_interrupted(state: Any) -> None:
    """Raises LoadInterrupted when a part of `state` was left half-loaded."""
    if _marked:
        _refuse(_objects_of(state))


def _objects_of(state: Any) -> Iterator[Any]:
    leaves = walk(state)
    for _, module in leaves.modules:
        yield module
        yield from module.parameters()
    for _, optimizer in leaves.optimizers:
        yield optimizer
        yield from params_of(optimizer)
    for _, tensor in leaves.tensors:
        yield tensor
    for _, array in leaves.arrays:
        yield array


def _refuse(items: Iterable[Any]) -> None:
    for item in items:
        mark = _marked.get(id(item))
        # The id may by now be that of another object.
        if mark is not None and mark[0]() is item:
            raise LoadInterrupted(mark[1])


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Its parameters too: the state that was loaded may have had no optimizer, or another one.
    _refuse((optimizer, *params_of(optimizer)))
