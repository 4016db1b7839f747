"""What a load fills in a state, what does not fit, and what it installs afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.layout.holdings import WholeTensors
from ckpt.layout.piece import Holding
from ckpt.state.describe import Described
from ckpt.state.matching import Tally
from ckpt.state.names import Left
from ckpt.state.resize import NewRows
from ckpt.state.types import Loaded, Problem, ProblemKind


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
        """Make the engines drop gathered copies, so that what is filled is what they will use."""
        for layout in self.described.layouts:
            layout.reshard()

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
