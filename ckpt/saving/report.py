"""The options of a save, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from ckpt.saving.write import WritePath
from ckpt.telemetry.record import SaveTotals
from ckpt.telemetry.recorder import PhaseSpan


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a save treats replicas that differ, how it writes, and what is kept with it.

    `metric` goes into the log, for retention by quality. With `dedup`, chunks whose bytes the
    previous checkpoint has are referred to and not written, unless `full_every` is over: so many
    saves, or so much time. With `telemetry`, how the save went is kept beside the checkpoint, for
    `ckpt report`. `in_line` says that it is a state of the training that this process runs: see
    `ckpt.commit.lines`.
    """

    replicas: Literal["warn", "strict"] = "warn"
    path: WritePath = field(default_factory=WritePath)
    user: Mapping[str, str] = field(default_factory=dict)
    metric: float | None = None
    dedup: bool = False
    telemetry: bool = False
    in_line: bool = True
    full_every: int | timedelta = 10


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A checkpoint that exists. `nbytes` are the bytes of all its objects together, as written by
    this save; `nbytes_referenced` are those of its chunks that lie in files of older ones.

    `spans` and `counters` are this rank's own, `totals` are of all ranks together.
    """

    step: int
    attempt: str
    path: str
    nbytes: int
    warnings: tuple[str, ...]
    totals: SaveTotals = field(compare=False)
    nbytes_referenced: int = 0
    spans: tuple[PhaseSpan, ...] = field(default=(), compare=False)
    counters: Mapping[str, float] = field(default_factory=dict, compare=False)
