"""What checkpoints cost: bytes, bandwidth, requests, money, and the work that a failure takes.

    Workload (from numbers, or measured_of(report)) -> cost_of(workload, prices) -> Cost

Arithmetic alone: nothing is read, no price and no speed is assumed. What follows from a number
that is not known is None.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from ckpt.errors import CheckpointError, InvalidArgument
from ckpt.layout.dtypes import DTYPES
from ckpt.short import ShortRecord
from ckpt.tools.report import DAY_SECONDS, PerDay, Report, TrainingRun
from storage.ranges import part_count

MIB, GIB = 1 << 20, 1 << 30
MONTH_SECONDS = 365 * 86400 / 12  # 730 hours
# How saves and loads meet an object store: `WritePath.file_nbytes_max`, the parts of uploads, and
# `ReadPath.request_nbytes_max`. Their own files need torch; a test compares the numbers.
FILE_NBYTES, PART_NBYTES, READ_NBYTES = 4 * GIB, 16 * MIB, 8 * MIB
# Besides data files: MANIFEST, the record of the log that commits it, TELEMETRY.
OBJECTS_OF_A_SAVE = 3

# Tensors of the parameters' shape that an optimizer of torch keeps for each parameter.
OPTIMIZER_STATES = {
    "adam": 2,
    "adamw": 2,
    "adagrad": 1,
    "lion": 1,
    "muon": 1,
    "rmsprop": 1,
    "sgd-momentum": 1,
    "sgd": 0,
    "none": 0,
}


def state_nbytes(
    params: int, optimizer: str, *, dtype: str, state_dtype: str = "", master_dtype: str = ""
) -> int:
    """Bytes of a model of `params` parameters with the state of its optimizer.

    Parameters have `dtype`; states have `state_dtype`, by default the parameters' as in torch;
    `master_dtype` is that of a second copy of the parameters, by default there is none. Steps,
    buffers and values are left out: together they are less than a thousandth. Raises
    InvalidArgument for an unknown name.
    """
    for name in (dtype, state_dtype, master_dtype):
        if name and name not in DTYPES:
            raise InvalidArgument(f"{name!r} is not a dtype that can be stored, such as 'bfloat16'")
    if optimizer not in OPTIMIZER_STATES:
        raise InvalidArgument(f"{optimizer!r}: expected one of {', '.join(OPTIMIZER_STATES)}")
    if params < 1:
        raise InvalidArgument(f"params={params}: expected at least 1")
    each = DTYPES[dtype].itemsize
    each += OPTIMIZER_STATES[optimizer] * DTYPES[state_dtype or dtype].itemsize
    each += DTYPES[master_dtype].itemsize if master_dtype else 0
    return params * each


@dataclass(frozen=True, slots=True)
class Workload:
    """What a training saves and how often it fails. None: not known.

    `nbytes` are those of one checkpoint, `keep` how many are kept. `every_seconds` pass from save
    to save, `mtbf_seconds` from failure to failure of the whole job, on average. A save costs the
    training `blocked_seconds`, and the checkpoint exists `persist_seconds` after the call. A new
    start takes `restart_seconds` until the first step.
    """

    nbytes: int
    ranks: int
    every_seconds: float | None = None
    keep: int | None = None
    mtbf_seconds: float | None = None
    blocked_seconds: float | None = None
    persist_seconds: float | None = None
    restart_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("nbytes", "ranks", "keep"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}: expected at least 1")
        for name in ("every", "mtbf", "blocked", "persist", "restart"):
            seconds = getattr(self, f"{name}_seconds")
            if seconds is not None and not 0 < seconds < math.inf:
                raise ValueError(f"{name}_seconds={seconds}: expected a number above 0")


class ModelNumbers(NamedTuple):
    """What a state consists of, in numbers; None: not given."""

    params: int | None
    optimizer: str | None
    dtype: str | None
    state_dtype: str | None
    master_dtype: str | None

    def why(self, nbytes: int) -> str:
        """What a parameter takes, in words."""
        if self.params is None:
            return "its newest"
        optimizer, dtype = self.optimizer or "adamw", self.dtype or "float32"
        states = OPTIMIZER_STATES[optimizer]
        text = f"{nbytes // self.params} bytes a parameter: {dtype}"
        if states:
            plural = "s" * (states > 1)
            text += f", {states} state{plural} of {optimizer} in {self.state_dtype or dtype}"
        return text + (f", a copy in {self.master_dtype}" if self.master_dtype else "")


class Prices(NamedTuple):
    """In any one currency; None: not given. A price list's GB are 2^30 bytes at most providers."""

    gib_month: float | None = None
    thousand_writes: float | None = None
    thousand_reads: float | None = None
    rank_hour: float | None = None


class Bill(NamedTuple):
    """Of one month, in the currency of the prices; None where a price or a number is missing."""

    storage: float | None
    writes: float | None
    reads: float | None
    lost_work: float | None

    @property
    def total(self) -> float | None:
        """The sum of those that are known; None when none is."""
        known = [amount for amount in self if amount is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Cost:
    """What `cost_of` computed. Seconds, bytes, and shares of the training's time from 0 on.

    `nbytes_per_second` is what the store takes on average, `burst_nbytes_per_second` while a save
    is under way. `stored_nbytes_max` counts those kept, and the one being written.
    `best_every_young` and `best_every_daly` are None unless `blocked_seconds` is known;
    `blocked_seconds_at_best` is the cost of a save for which `every_seconds` is the best by Young's
    formula.
    """

    nbytes_per_rank: int
    nbytes_per_second: float | None
    burst_nbytes_per_second: float | None
    requests_of_save: int
    requests_of_load: int
    stored_nbytes_max: int | None
    saves_per_month: float | None
    failures_per_month: float | None
    lost_seconds_per_failure: float | None
    blocked_share: float | None
    lost_share: float | None
    best_every_young: float | None
    best_every_daly: float | None
    blocked_seconds_at_best: float | None
    bill: Bill


def cost_of(load: Workload, prices: Prices | None = None) -> Cost:
    """What follows from the numbers of `load`, and from prices where they are given."""
    every, mtbf, persist = load.every_seconds, load.mtbf_seconds, load.persist_seconds
    price = prices or Prices()
    # A save waits until the one before it is written, so saves are never closer than that.
    every = None if every is None else max(every, persist or 0.0)
    per_rank = -(-load.nbytes // load.ranks)
    lost = _known(lost_seconds, every, persist or 0.0)
    down = _known(lambda work: work + (load.restart_seconds or 0.0), lost)
    to_save = load.ranks * requests_of_upload(per_rank) + OBJECTS_OF_A_SAVE
    to_load = load.ranks * part_count(per_rank, READ_NBYTES)
    stored = None if load.keep is None else (load.keep + 1) * load.nbytes
    saves = _known(operator.truediv, MONTH_SECONDS, every)
    failures = _known(operator.truediv, MONTH_SECONDS, mtbf)
    blocked_share = _known(operator.truediv, load.blocked_seconds, every)
    lost_share = _known(operator.truediv, down, mtbf)
    share = _known(operator.add, lost_share, blocked_share or 0.0)
    return Cost(
        nbytes_per_rank=per_rank,
        nbytes_per_second=_known(operator.truediv, load.nbytes, every),
        burst_nbytes_per_second=_known(operator.truediv, load.nbytes, persist),
        requests_of_save=to_save,
        requests_of_load=to_load,
        stored_nbytes_max=stored,
        saves_per_month=saves,
        failures_per_month=failures,
        lost_seconds_per_failure=lost,
        blocked_share=blocked_share,
        lost_share=lost_share,
        best_every_young=_known(young, load.blocked_seconds, mtbf),
        best_every_daly=_known(daly, load.blocked_seconds, mtbf),
        # Young's formula, solved for the cost of a save.
        blocked_seconds_at_best=_known(lambda t, m: t**2 / (2 * m), every, mtbf),
        bill=Bill(
            storage=_known(lambda n, p: n / GIB * p, stored, price.gib_month),
            writes=_known(lambda n, p: n * to_save / 1000 * p, saves, price.thousand_writes),
            # After a failure all ranks load once.
            reads=_known(lambda n, p: n * to_load / 1000 * p, failures, price.thousand_reads),
            lost_work=_known(
                lambda n, p: n * load.ranks * MONTH_SECONDS / 3600 * p, share, price.rank_hour
            ),
        ),
    )


def requests_of_upload(nbytes: int) -> int:
    """Requests that store one rank's data in S3, in files of at most `FILE_NBYTES`: one for a small
    file, else one for each part and two around them.
    """
    full, rest = divmod(nbytes, FILE_NBYTES)
    parts = (part_count(size, PART_NBYTES) for size in (FILE_NBYTES, rest))
    of_full, of_rest = (count + 2 if count > 1 else count for count in parts)
    return full * of_full + of_rest


def lost_seconds(every_seconds: float, persist_seconds: float) -> float:
    """Training that a failure at a random moment takes back, on average.

    A failure `t` seconds after a save began loses `t`, or `t + every` while that save is not
    committed yet: half an interval, and `persist` seconds more. `persist` is at most `every`.
    """
    return every_seconds / 2 + persist_seconds


def young(blocked_seconds: float, mtbf_seconds: float) -> float:
    """The best seconds between saves, in first order: sqrt(2 * cost of a save * MTBF).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of
    the ACM 17(9), 1974, pages 530-531.
    """
    return math.sqrt(2 * blocked_seconds * mtbf_seconds)


def daly(blocked_seconds: float, mtbf_seconds: float) -> float:
    """The best seconds of work between saves, in higher order; the MTBF where a save costs twice
    that or more.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), 2006, pages 303-312.
    """
    if blocked_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    x = blocked_seconds / (2 * mtbf_seconds)
    return young(blocked_seconds, mtbf_seconds) * (1 + math.sqrt(x) / 3 + x / 9) - blocked_seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """What a root shows of its training: medians over `saves` of its newest saves.

    `sessions` jobs have written to it within `span_seconds`: every restart is one, and so is every
    other job; so they bound the failures and do not count them.
    """

    workload: Workload
    saves: int
    sessions: int
    span_seconds: float


def measured_of(report: Report | TrainingRun) -> Measured | None:
    """The numbers of the newest saves of a root; None where telemetry is known of none of them.

    The time between saves is the median, which a few restarts do not move. A checkpoint that needs
    files of others counts as if it had its own.
    """
    if not (totals := report.totals):
        return None
    times = [save.committed_unix for save in report.saves]
    gaps = [after - before for before, after in pairwise(times) if after > before]
    newest = totals[-1]
    load = Workload(
        nbytes=max(newest.nbytes + newest.nbytes_referenced, 1),
        ranks=max(newest.ranks, 1),
        every_seconds=statistics.median(gaps) if gaps else None,
        keep=len(report.live) or None,
        blocked_seconds=statistics.median(one.blocked_seconds for one in totals) or None,
        persist_seconds=statistics.median(one.seconds for one in totals) or None,
    )
    return Measured(load, len(totals), report.sessions, times[-1] - times[0])


def per_day(run: Report | TrainingRun, prices: Prices) -> PerDay:
    """What a day of a run costs, where its newest saves and `prices` say so."""
    if (measured := measured_of(run)) is None:
        return PerDay()
    cost = cost_of(measured.workload, prices)
    total = _known(lambda bill: bill * DAY_SECONDS / MONTH_SECONDS, cost.bill.total)
    return PerDay(_known(lambda rate: rate * DAY_SECONDS, cost.nbytes_per_second), total)


@dataclass(frozen=True, slots=True, repr=False)
class CostReport(ShortRecord):
    """What was computed, and of what. `measured` is what the root `url` shows, None without one."""

    url: str
    workload: Workload
    measured: Measured | None
    model: ModelNumbers
    prices: Prices
    cost: Cost


def cost_report(
    read: Callable[[], Report] | None,
    model: ModelNumbers,
    given: Mapping[str, Any],
    prices: Prices,
    bandwidth: int | None,
) -> CostReport:
    """The cost of a model, or of the report that `read` brings, with the `given` fields of
    `Workload` in the place of those that were measured. `bandwidth` is that of the store, in bytes
    per second.

    Raises InvalidArgument for numbers that do not go together, CheckpointError for a report
    without telemetry.
    """
    if bandwidth and "persist_seconds" in given:
        raise InvalidArgument("bandwidth= determines persist_seconds=: give one of them")
    of_model = [f"{name}=" for name, value in model._asdict().items() if value]
    url, measured = "", None
    if read is None:
        needed = {"params": model.params, "ranks": given.get("ranks")}
        if missing := [f"{name}=" for name, value in needed.items() if value is None]:
            raise InvalidArgument(f"give a url, or {' and '.join(missing)}")
        nbytes = state_nbytes(
            model.params or 0,
            model.optimizer or "adamw",
            dtype=model.dtype or "float32",
            state_dtype=model.state_dtype or "",
            master_dtype=model.master_dtype or "",
        )
        load = Workload(nbytes, **given)
    elif of_model:
        raise InvalidArgument(f"{of_model[0]} goes without a url: a root has its own size")
    else:
        report = read()
        url, measured = report.url, measured_of(report)
        if measured is None:
            raise CheckpointError(
                f"{url}: no checkpoint there says how its save went; give params= and ranks= "
                "instead of a url"
            )
        load = replace(measured.workload, **given)
    if bandwidth:
        load = replace(load, persist_seconds=load.nbytes / bandwidth)
    return CostReport(url, load, measured, model, prices, cost_of(load, prices))


def _known(formula: Callable[..., float], *numbers: float | None) -> float | None:
    """The formula's value; None where one of its numbers is not known."""
    return None if any(number is None for number in numbers) else formula(*numbers)
