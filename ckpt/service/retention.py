"""Which checkpoints to keep: rules as values, and a pure plan from what exists to what may go.

    keep=KeepLatest(3) | KeepEvery(10_000) | KeepBest(2, mode="min")

`|` keeps what either rule keeps, `&` what both keep. A rule is about one training: each line of a
root is judged by itself (`ckpt.commit.locate`), a training judges none but its own. Whatever the
rules, a plan keeps the latest checkpoint of each line, its newest verified one, pinned ones, what a
kept one needs, and what no training has saved (imports, copies in another layout); so there is
always one to load, and one of which every byte was once read back. Where a rule keeps several, two
of them share no file (`dedup`), where possible: one damaged file does not cost them all.

A rule that cannot be judged, or that keeps nothing at all, counts as a mistake: such a plan is
refused and retires nothing.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal, NamedTuple

from ckpt.commit.log import latest_of
from ckpt.commit.names import checked_count, plain_int
from ckpt.commit.records import LiveEntry, Record
from ckpt.commit.writer import NotRetired
from ckpt.service.policies import Combinable


class Verdict(NamedTuple):
    """Why a checkpoint stays, or why it goes."""

    entry: LiveEntry
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What a rule would keep and retire; nothing is done yet.

    `retire` is in the order in which to do it: a checkpoint goes before those whose files it needs.
    `refused` says why nothing is retired although rules would; "" when they are carried out.
    `jumps` are those of the clocks by which checkpoints were committed, in words.
    """

    keep: tuple[Verdict, ...]
    retire: tuple[Verdict, ...]
    refused: str = ""
    jumps: tuple[str, ...] = ()

    def describe(self) -> str:
        """The plan in words, a line for each checkpoint, oldest first."""
        rows = [(v.entry.slot, "keep  ", v) for v in self.keep]
        rows += [(v.entry.slot, "retire", v) for v in self.retire]
        lines = [
            f"{what} step {verdict.entry.step} ({verdict.entry.attempt}): "
            + "; ".join(verdict.reasons)
            for _, what, verdict in sorted(rows, key=lambda row: row[0])
        ]
        lines += [f"not counted: {jump}" for jump in self.jumps]
        return "\n".join([*lines, *([f"refused: {self.refused}"] if self.refused else [])])


Reasons = dict[str, tuple[str, ...]]

SKEW_SECONDS = 60.0  # by which the clocks of hosts may differ before that is named

UNMEASURED = "it has no metric"
EVERYTHING = "everything is kept"
NOTHING_RETIRED = "the plan is refused"
OF_ANOTHER_LINE = "another training saved it; `ckpt prune` and `ckpt rm` remove it"
OF_NO_LINE = "no training saved it; `ckpt rm` removes it"


class KeepRule(Combinable):
    """Which checkpoints to keep. Rules are values; combine them with `|` and `&`."""

    noun, nouns = "rule", "rules"
    examples = ("ckpt.KeepLatest(3)", "ckpt.KeepEvery(1000)")

    @abstractmethod
    def kept(self, candidates: Sequence[LiveEntry], now_unix: float) -> Reasons:
        """Why each kept attempt is kept. `candidates` are in the order of their commits."""

    def unjudged(self, candidates: Sequence[LiveEntry]) -> str:
        """Why this rule, or one that it consists of, has nothing to go by; "" when it has."""
        return ""

    def jumps(self, candidates: Sequence[LiveEntry]) -> tuple[str, ...]:
        """Jumps of the clock among `candidates` that this rule leaves out of their ages."""
        return ()

    def __or__(self, other: KeepRule) -> KeepRule:
        self.check_combined("|", other)
        return _Either((self, other))

    def __and__(self, other: KeepRule) -> KeepRule:
        self.check_combined("&", other)
        return _Both((self, other))


@dataclass(frozen=True, slots=True)
class CombinedRule(KeepRule):
    """A rule made of `rules`."""

    rules: tuple[KeepRule, ...]

    def unjudged(self, candidates: Sequence[LiveEntry]) -> str:
        return "; ".join(filter(None, (rule.unjudged(candidates) for rule in self.rules)))

    def jumps(self, candidates: Sequence[LiveEntry]) -> tuple[str, ...]:
        every = (jump for rule in self.rules for jump in rule.jumps(candidates))
        return tuple(dict.fromkeys(every))


class _Either(CombinedRule):
    def kept(self, candidates: Sequence[LiveEntry], now_unix: float) -> Reasons:
        kept: Reasons = {}
        for rule in self.rules:
            for attempt, reasons in rule.kept(candidates, now_unix).items():
                kept[attempt] = (*kept.get(attempt, ()), *reasons)
        return kept


class _Both(CombinedRule):
    def kept(self, candidates: Sequence[LiveEntry], now_unix: float) -> Reasons:
        # Each judges all candidates, not what the other has left: `&` is the same both ways round.
        by_rule = [rule.kept(candidates, now_unix) for rule in self.rules]
        by_all = [name for name in by_rule[0] if all(name in kept for kept in by_rule)]
        return {name: (" and ".join("; ".join(kept[name]) for kept in by_rule),) for name in by_all}


@dataclass(frozen=True, slots=True)
class KeepAll(KeepRule):
    """Everything; nothing is ever retired."""

    def kept(self, candidates: Sequence[LiveEntry], now_unix: float) -> Reasons:
        return {entry.attempt: (EVERYTHING,) for entry in candidates}


@dataclass(frozen=True, slots=True)
class KeepLatest(KeepRule):
    """The `count` newest commits."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", checked_count(self.count, f"KeepLatest({self.count!r})"))

    def kept(self, candidates: Sequence[LiveEntry], now_unix: float) -> Reasons:
        newest = candidates[-self.count :]
        return {entry.attempt: (f"one of the latest {self.count}",) for entry in newest}


@dataclass(frozen=True, slots=True)
class KeepEvery(KeepRule):
    """For each multiple of `steps`, the first checkpoint at or after it.

    A step that was saved more than once counts by its newest commit.
    """

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", checked_count(self.steps, f"KeepEvery({self.steps!r})"))

    def kept(self, candidates: Sequence[LiveEntry], now_unix: float) -> Reasons:
        # Candidates come in the order of their commits, so the newest of a step is the last one.
        newest_by_step = {entry.step: entry for entry in candidates}
        first_by_period: dict[int, LiveEntry] = {}
        for step in sorted(newest_by_step):
            first_by_period.setdefault(step // self.steps, newest_by_step[step])
        return {
            entry.attempt: (f"the first from step {period * self.steps} on",)
            for period, entry in first_by_period.items()
        }


@dataclass(frozen=True, slots=True)
class KeepBest(KeepRule):
    """The `count` best by the metric that `step(n, metric=...)` was given; the newer of equals.

    Checkpoints without a metric are kept too, because it is not known how good they are; with
    `unmeasured="retire"` they go. Where none has a metric, nothing is retired.
    """

    count: int
    mode: Literal["min", "max"] = "min"
    unmeasured: Literal["keep", "retire"] = "keep"

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", checked_count(self.count, f"KeepBest({self.count!r})"))
        if self.mode not in ("min", "max"):
            raise ValueError(f"KeepBest(mode={self.mode!r}): expected 'min' or 'max'")
        shown = f"KeepBest(unmeasured={self.unmeasured!r})"
        if self.unmeasured not in ("keep", "retire"):
            raise ValueError(f"{shown}: expected 'keep' or 'retire'")

    def kept(self, candidates: Sequence[LiveEntry], now_unix: float) -> Reasons:
        sign = 1.0 if self.mode == "min" else -1.0
        measured = [(e.metric, e) for e in candidates if e.metric is not None]
        best = heapq.nsmallest(self.count, measured, lambda one: (sign * one[0], -one[1].slot))
        text = f"one of the best {self.count} ({self.mode})"
        kept: Reasons = {entry.attempt: (f"{text}: {metric:g}",) for metric, entry in best}
        if self.unmeasured == "keep":
            kept |= {e.attempt: (UNMEASURED,) for e in candidates if e.metric is None}
        return kept

    def unjudged(self, candidates: Sequence[LiveEntry]) -> str:
        if not candidates or any(entry.metric is not None for entry in candidates):
            return ""
        return (
            f"{self} has nothing to go by: none of {len(candidates)} checkpoints has a metric; "
            "save with metric=, or choose another rule"
        )


@dataclass(frozen=True, slots=True)
class KeepYounger(KeepRule):
    """Those committed less than `seconds` ago, as far as the clocks of their writers can be
    believed.

    An age is the sum of the times between a commit, those after it, and now. Between two commits, a
    time below zero counts as none, and so does one that is larger than both `seconds` and 10 times
    the median of all others: a clock may have jumped, or nobody trained. So neither retires what
    came before.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not (isinstance(plain_int(self.seconds), int | float) and 0.0 < self.seconds < math.inf):
            raise ValueError(f"KeepYounger({self.seconds!r}): expected seconds above 0")

    def kept(self, candidates: Sequence[LiveEntry], now_unix: float) -> Reasons:
        ages = _ages(candidates, now_unix, self.seconds)
        young = [one.attempt for one in candidates if ages[one.attempt] < self.seconds]
        return {name: (f"{ages[name]:.0f} s old",) for name in young}

    def jumps(self, candidates: Sequence[LiveEntry]) -> tuple[str, ...]:
        return tuple(
            f"between steps {before.step} and {after.step} the clock went {abs(seconds):.0f} s "
            f"{'ahead, or nobody trained' if seconds > 0 else 'back'}"
            for before, after, seconds, counted in _gaps(candidates, self.seconds)
            if counted < abs(seconds) and not -SKEW_SECONDS <= seconds <= 0
        )


@dataclass(frozen=True, slots=True)
class _Graced(CombinedRule):
    """What its rule keeps, and what that has given up less than `seconds` ago: what it kept of the
    checkpoints that were there then, and those that were committed since.
    """

    seconds: float = 0.0

    def kept(self, candidates: Sequence[LiveEntry], now_unix: float) -> Reasons:
        (rule,) = self.rules
        ages = _ages(candidates, now_unix, self.seconds)
        then = [one for one in candidates if ages[one.attempt] >= self.seconds]
        stays = {name for name, age in ages.items() if age < self.seconds}
        if then:
            # `seconds` ago by the same ages, which leave jumps of the clocks out.
            then_unix = then[-1].committed_unix + ages[then[-1].attempt] - self.seconds
            stays |= _judged(then, rule, then_unix)[0].keys()
        text = f"given up less than {self.seconds:.0f} s ago; `ckpt pin` keeps it"
        return dict.fromkeys(stays, (text,)) | rule.kept(candidates, now_unix)

    def jumps(self, candidates: Sequence[LiveEntry]) -> tuple[str, ...]:
        every = (*KeepYounger(self.seconds).jumps(candidates), *self.rules[0].jumps(candidates))
        return tuple(dict.fromkeys(every))


def with_grace(rule: KeepRule, seconds: float | None) -> KeepRule:
    """`rule`, which retires a checkpoint only `seconds` after it has given it up; None for at once.
    Until then the checkpoint is live as before, and a pin keeps it for good. Raises ValueError.
    """
    if seconds is None:
        return rule
    if not (isinstance(plain_int(seconds), int | float) and 0.0 < seconds < math.inf):
        raise ValueError(f"retire_after={seconds!r}: expected seconds above 0")
    return _Graced((rule,), float(seconds))


def _ages(candidates: Sequence[LiveEntry], now_unix: float, seconds: float) -> dict[str, float]:
    """The age of each attempt, as `KeepYounger(seconds)` counts it."""
    ages: dict[str, float] = {}
    if candidates:
        newest = candidates[-1]
        ages[newest.attempt] = max(0.0, now_unix - newest.committed_unix)
    for before, after, _, counted in reversed(_gaps(candidates, seconds)):
        ages[before.attempt] = ages[after.attempt] + counted
    return ages


def _gaps(
    candidates: Sequence[LiveEntry], bound: float
) -> list[tuple[LiveEntry, LiveEntry, float, float]]:
    """Each two commits in a row, the seconds between them, and how many of these count."""
    gaps = [(a, b, b.committed_unix - a.committed_unix) for a, b in pairwise(candidates)]
    # Sorted once: a median for each gap of a long history would otherwise take its square.
    others = sorted(seconds for _, _, seconds in gaps if seconds >= 0.0)
    return [
        (one, other, seconds, seconds if 0.0 <= seconds <= limit else 0.0)
        for one, other, seconds in gaps
        for limit in [max(bound, 10 * _median_without(others, seconds))]
    ]


def _median_without(ascending: Sequence[float], one: float) -> float:
    """The lower median of all but one of them; 0 where there is no other."""
    # Counted without `one`: taking it out moves the middle up by one where it is not above that.
    middle = (len(ascending) - 2) // 2
    if middle < 0:
        return 0.0
    return ascending[middle + (one <= ascending[middle])]


def plan_retention(
    candidates: Sequence[LiveEntry], rule: KeepRule, *, now_unix: float, line: int | None = None
) -> RetentionPlan:
    """What `rule` keeps and retires of the live checkpoints of `line`, or of each line by itself.
    Pure; see the top for what it never retires.
    """
    ordered = sorted(candidates, key=lambda entry: entry.slot)
    by_line: dict[int | None, list[LiveEntry]] = {}
    for entry in ordered:
        by_line.setdefault(entry.line, []).append(entry)
    reasons: Reasons = {}
    refused: list[str] = []
    jumps: list[str] = []
    judged = 0
    for own, members in by_line.items():
        # What no training has saved is removed by name only, unless there is nothing else.
        if (own is None and len(by_line) > 1) or line not in (None, own):
            text = OF_NO_LINE if own is None else OF_ANOTHER_LINE
            reasons |= {entry.attempt: (text,) for entry in members}
            continue
        judged += 1
        jumps += rule.jumps(members)
        kept, problem = _judged(members, rule, now_unix)
        reasons |= kept
        refused += [problem] if problem else []
    by_name = {entry.attempt: entry for entry in ordered}
    # What a kept one needs may itself need others.
    waiting = [by_name[name] for name in reasons]
    while waiting:
        user = waiting.pop()
        for needed in user.references:
            if needed in by_name and needed not in reasons:
                reasons[needed] = (f"needed by step {user.step}",)
                waiting.append(by_name[needed])
    keep = [Verdict(entry, reasons[entry.attempt]) for entry in ordered if entry.attempt in reasons]
    # References point to older commits only, so the newest goes first.
    retire = [
        Verdict(entry, ("no rule keeps it",))
        for entry in reversed(ordered)
        if entry.attempt not in reasons
    ]
    # A line that cannot be judged stays; the others are pruned all the same.
    why = "; ".join(refused) if len(refused) == judged else ""
    return RetentionPlan(tuple(keep), tuple(retire), why, tuple(jumps))


def _judged(members: Sequence[LiveEntry], rule: KeepRule, now_unix: float) -> tuple[Reasons, str]:
    """Why a rule keeps checkpoints of one line, and why all of them stay, "" where it can be
    judged.
    """
    reasons = rule.kept(members, now_unix)
    refused = rule.unjudged(members)
    # Carried out, it would leave what is protected and nothing more: taken for a mistake.
    if not reasons and not refused:
        refused = f"the rule keeps none of {len(members)} checkpoints; choose another one"
    if refused:
        reasons = {entry.attempt: (NOTHING_RETIRED,) for entry in members}
    for attempt, text in _protected(members):
        reasons[attempt] = (*reasons.get(attempt, ()), text)
    return reasons | _independent(members, reasons), refused


def _independent(entries: Sequence[LiveEntry], kept: Reasons) -> Reasons:
    """The newest entry that shares no file with the newest kept one, where several are kept and all
    of them do.
    """
    newest, *older = [entry for entry in reversed(entries) if entry.attempt in kept]
    # A rule that keeps one has said that one is enough.
    if not older or any(map(newest.is_apart_from, older)):
        return {}
    text = f"the newest that shares no file with step {newest.step}"
    apart = filter(newest.is_apart_from, reversed(entries))
    return {entry.attempt: (text,) for entry in islice(apart, 1)}


def _protected(entries: Sequence[LiveEntry]) -> list[tuple[str, str]]:
    """What no rule may give up. `entries` are in the order of their commits."""
    protected = [(entry.attempt, "pinned") for entry in entries if entry.pinned]
    if (latest := latest_of(entries)) is not None:
        protected.append((latest.attempt, "the latest"))
    if verified := [entry for entry in entries if entry.verified]:
        protected.append((verified[-1].attempt, "the last one that was verified"))
    return protected


def carry_out(
    plan: RetentionPlan,
    retire: Callable[[str], Record | None],
    *,
    stop: Callable[[], bool] = lambda: False,
    leases: Callable[[], Mapping[str, float]] = lambda: {},
) -> tuple[tuple[LiveEntry, ...], tuple[str, ...]]:
    """Retire and delete what the plan retires. Returns those, and why others stayed after all.

    `retire` is the method of a session or of `Maintenance`. A checkpoint that was pinned, or came
    to be needed, after the plan was made stays, and so does one that a reader has leased. `leases`
    are the attempts of those; it is called when there is anything to retire. Once `stop()` is true,
    nothing more is begun. Raises Fenced and the store's errors.
    """
    gone: list[LiveEntry] = []
    stayed: list[str] = []
    read = leases() if plan.retire else {}
    for entry, _ in plan.retire:
        if stop():
            break
        if entry.attempt in read:
            stayed.append(f"{entry.attempt} (step {entry.step}) is leased by a reader")
            continue
        try:
            if retire(entry.attempt) is not None:
                gone.append(entry)
        except NotRetired as refused:
            stayed.append(str(refused))
    return tuple(gone), tuple(stayed)
