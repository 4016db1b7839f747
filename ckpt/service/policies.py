"""When to save: policies as values, and pure decisions over what was observed. No clock is read
here.

    save=EverySteps(1000) | EverySeconds(1800) | OnSignal() | OnPreemption(grace_seconds=30)

`|` saves when either side wants to, `&` when both do. Note "who decides": ranks see different
clocks and signals, so each alternative of a policy is decided where its facts are known. Every rank
decides by itself what follows from the step alone, with the same result. The coordinator decides
what needs a clock or a measurement; a signal counts on whichever rank it arrived. Ranks agree on
these two in the background, and they take effect at a call of `step` that lies a little ahead
(`ckpt.service.agreement`), the same one on all ranks.
"""

from __future__ import annotations

import math
import signal
import statistics
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, NoReturn

from ckpt.commit.names import checked_count, plain_int


class Observation(NamedTuple):
    """What a decision may look at.

    `step` is the step that was just completed, `previous_step` that of the call before. Seconds are
    of one monotonic clock; `last_save_seconds` is when the newest save was begun, or the training.
    Seconds and costs are given where a policy that `needs_clock` is decided; 0 or None elsewhere.
    `signals` arrived on some rank since the last save. `closing`: the training is over.
    `cost_seconds` is what one save costs the training and `persist_seconds` how long it is under
    way, both None before the first was measured.
    """

    step: int
    previous_step: int
    now_seconds: float = 0.0
    last_save_seconds: float = 0.0
    signals: frozenset[int] = frozenset()
    closing: bool = False
    cost_seconds: float | None = None
    persist_seconds: float | None = None


class Combinable(ABC):
    """A value that `|` and `&` combine with one of its kind, and that refuses all else."""

    noun: ClassVar[str]
    nouns: ClassVar[str]
    examples: ClassVar[tuple[str, str]]

    # Python asks the right side only where the left one cannot: that is of another kind.
    def __ror__(self, other: object) -> NoReturn:
        self.check_combined("|", other, f"{other!r} | {self}")
        raise AssertionError("one of its kind has __or__")

    def __rand__(self, other: object) -> NoReturn:
        self.check_combined("&", other, f"{other!r} & {self}")
        raise AssertionError("one of its kind has __and__")

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{self}: `or` and `and` take one of two {self.nouns} and drop the other; write | and "
            f"&, such as {' | '.join(self.examples)}"
        )

    def check_combined(self, operator: str, other: object, text: str = "") -> None:
        """Raise TypeError for what is not of this kind: Python's own text would not say what is."""
        kind = next(one for one in type(self).__mro__ if "noun" in vars(one))
        if not isinstance(other, kind):
            raise TypeError(
                f"{text or f'{self} {operator} {other!r}'}: expected a {self.noun} on both sides, "
                f"such as {f' {operator} '.join(self.examples)}"
            )


class SavePolicy(Combinable):
    """When to save. Policies are values; combine them with `|` and `&`."""

    noun, nouns = "policy", "policies"
    examples = ("ckpt.EverySteps(1000)", "ckpt.EverySeconds(1800)")

    @abstractmethod
    def reasons(self, observation: Observation) -> tuple[str, ...]:
        """Why a save is due, in words for the log; empty when it is not."""

    @property
    def needs_clock(self) -> bool:
        """Whether the answer needs a clock or a measurement: then the coordinator gives it."""
        return False

    def alternatives(self) -> tuple[SavePolicy, ...]:
        """The policies of which any one is enough."""
        return (self,)

    def leaves(self) -> Iterator[SavePolicy]:
        """All policies that this one is made of."""
        yield self

    def __or__(self, other: SavePolicy) -> SavePolicy:
        self.check_combined("|", other)
        # Flat, because each alternative may be decided by another rank; see note "who decides".
        return AnyOf((*self.alternatives(), *other.alternatives()))

    def __and__(self, other: SavePolicy) -> SavePolicy:
        self.check_combined("&", other)
        return AllOf((self, other))


@dataclass(frozen=True, slots=True)
class CombinedPolicy(SavePolicy):
    """A policy made of `policies`."""

    policies: tuple[SavePolicy, ...]

    @property
    def needs_clock(self) -> bool:
        return any(policy.needs_clock for policy in self.policies)

    def leaves(self) -> Iterator[SavePolicy]:
        for policy in self.policies:
            yield from policy.leaves()


@dataclass(frozen=True, slots=True)
class AnyOf(CombinedPolicy):
    """Due when one of `policies` is."""

    def reasons(self, observation: Observation) -> tuple[str, ...]:
        reasons: tuple[str, ...] = ()
        for policy in self.policies:
            reasons += policy.reasons(observation)
        return reasons

    def alternatives(self) -> tuple[SavePolicy, ...]:
        return self.policies


@dataclass(frozen=True, slots=True)
class AllOf(CombinedPolicy):
    """Due when all of `policies` are."""

    def __post_init__(self) -> None:
        if any(isinstance(leaf, OnPreemption | AtExit) for leaf in self.leaves()):
            raise ValueError(
                "OnPreemption and AtExit are the last chance to save, which cannot wait for a "
                "second condition; combine them with | instead of &"
            )

    def reasons(self, observation: Observation) -> tuple[str, ...]:
        by_policy = [policy.reasons(observation) for policy in self.policies]
        if not all(by_policy):
            return ()
        return (" and ".join("; ".join(texts) for texts in by_policy),)


@dataclass(frozen=True, slots=True)
class Never(SavePolicy):
    """Only `save_now()` saves: not at exit, nor on a signal."""

    def reasons(self, observation: Observation) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """At each multiple of `steps`, or at the first call after one, when calls skip steps."""

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", checked_count(self.steps, f"EverySteps({self.steps!r})"))

    def reasons(self, observation: Observation) -> tuple[str, ...]:
        # Not `step % steps == 0`: a loop that counts several batches at once may jump over a
        # multiple.
        crossed = observation.step // self.steps > observation.previous_step // self.steps
        return (f"every {self.steps} steps",) if crossed else ()


@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """When the newest save was begun `seconds` ago, by the coordinator's clock."""

    seconds: float

    needs_clock = True

    def __post_init__(self) -> None:
        _check_positive(self, "seconds", self.seconds)

    def reasons(self, observation: Observation) -> tuple[str, ...]:
        due = observation.now_seconds - observation.last_save_seconds >= self.seconds
        return (f"every {self.seconds:g} s",) if due else ()


@dataclass(frozen=True, slots=True)
class Adaptive(SavePolicy):
    """As often as saves cost at most `overhead_max` of the training's time, measured while it runs.

    The method of CheckFreq (Mohan, Phanishayee, Chidambaram: CheckFreq: Frequent, Fine-Grained DNN
    Checkpointing, FAST 2021): profile what a save costs the training and how long it is under way,
    choose the interval that keeps the cost within the budget, and choose anew as the costs change.
    The cost is what `CostMeter` measures: blocked time and the slow-down of steps meanwhile. A save
    is never due while the one before would still be under way, nor before `seconds_min`. The first
    one is due at `seconds_min`, to be measured; after `seconds_max` one is due whatever it costs.
    """

    overhead_max: float = 0.03
    seconds_min: float = 10.0
    seconds_max: float = math.inf

    needs_clock = True

    def __post_init__(self) -> None:
        if not 0.0 < self.overhead_max < 1.0:
            raise ValueError(f"overhead_max={self.overhead_max!r}: expected a number in (0, 1)")
        if not 0.0 <= self.seconds_min <= self.seconds_max:
            raise ValueError(
                f"seconds_min={self.seconds_min!r}, seconds_max={self.seconds_max!r}: expected 0 "
                "<= seconds_min <= seconds_max"
            )

    def interval_seconds(self, cost_seconds: float, persist_seconds: float) -> float:
        """From the beginning of one save to that of the next, at these costs.

        Of an interval, all but the cost is training: cost / (interval - cost) is the overhead.
        """
        wanted = cost_seconds * (1.0 + 1.0 / self.overhead_max)
        return min(max(wanted, persist_seconds, self.seconds_min), self.seconds_max)

    def reasons(self, observation: Observation) -> tuple[str, ...]:
        # Before the first save nothing is measured: it is due after `seconds_min`, to be measured.
        cost = observation.cost_seconds or 0.0
        interval = self.interval_seconds(cost, observation.persist_seconds or 0.0)
        if observation.now_seconds - observation.last_save_seconds < interval:
            return ()
        return (f"{interval:.3g} s passed, a save costs {cost:.3g} s: {self.overhead_max:.2%} max",)


@dataclass(frozen=True, slots=True)
class OnSignal(SavePolicy):
    """When one of `signals` arrived on any rank; the training continues. For "save now" by hand."""

    signals: tuple[int, ...] = (signal.SIGUSR1,)

    def __post_init__(self) -> None:
        _check_signals(self, self.signals)

    def reasons(self, observation: Observation) -> tuple[str, ...]:
        return _arrived("on", self.signals, observation)


@dataclass(frozen=True, slots=True)
class OnPreemption(SavePolicy):
    """When one of `signals` says that this job must end: save within `grace_seconds`, then exit.

    `grace_seconds` is how long the scheduler waits after the signal before it kills: 30 by default
    in Kubernetes (terminationGracePeriodSeconds) and in Slurm (KillWait).
    """

    grace_seconds: float = 30.0
    signals: tuple[int, ...] = (signal.SIGTERM,)

    def __post_init__(self) -> None:
        _check_positive(self, "grace_seconds", self.grace_seconds)
        _check_signals(self, self.signals)

    def reasons(self, observation: Observation) -> tuple[str, ...]:
        return _arrived("preempted by", self.signals, observation)


@dataclass(frozen=True, slots=True)
class AtExit(SavePolicy):
    """When the training is over and steps were made since the last save.

    Not after an exception, because the state may be half changed then.
    """

    def reasons(self, observation: Observation) -> tuple[str, ...]:
        return ("at exit",) if observation.closing else ()


def _check_positive(policy: SavePolicy, name: str, value: float) -> None:
    if not (isinstance(plain_int(value), int | float) and 0.0 < value < math.inf):
        raise ValueError(f"{type(policy).__name__}({name}={value!r}): expected a number above 0")


def _check_signals(policy: SavePolicy, signals: Sequence[int]) -> None:
    # The kernel lets no process catch these two, and `signal.signal` would say so in the job only.
    caught = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}
    if not signals or any(number not in caught for number in signals):
        raise ValueError(
            f"{type(policy).__name__}(signals={signals!r}): expected signals that can be caught"
        )


def _arrived(what: str, signals: Collection[int], observation: Observation) -> tuple[str, ...]:
    if not observation.signals:
        return ()
    arrived = sorted(observation.signals & set(signals))
    return tuple(f"{what} {signal.Signals(number).name}" for number in arrived)


# --- who decides ----------------------------------------------------------------------------------


def by_all(policy: SavePolicy) -> AnyOf:
    """The alternatives that every rank decides by itself, alike; see note "who decides"."""
    return AnyOf(tuple(part for part in policy.alternatives() if not part.needs_clock))


def by_coordinator(policy: SavePolicy) -> AnyOf:
    """The alternatives that the coordinator decides for all."""
    return AnyOf(tuple(part for part in policy.alternatives() if part.needs_clock))


def is_regular(policy: SavePolicy) -> bool:
    """Whether saves are due while a training runs, not only when something happens to it."""
    return bool(_regular(policy))


def _regular(policy: SavePolicy) -> list[SavePolicy]:
    rare = (Never, OnSignal, OnPreemption, AtExit)
    return [
        one
        for one in policy.alternatives()
        if not any(isinstance(leaf, rare) for leaf in one.leaves())
    ]


def are_multiples(policy: SavePolicy, other: SavePolicy) -> bool:
    """Whether `other` is due whenever `policy` is, during a training: its period divides all
    periods of `policy`. Other policies than `EverySteps` do not count.
    """
    regular = _regular(policy)
    return bool(regular) and all(
        isinstance(one, EverySteps)
        and isinstance(other, EverySteps)
        and one.steps % other.steps == 0
        for one in regular
    )


def with_last_saves(policy: SavePolicy) -> SavePolicy:
    """`policy`, and saves on SIGUSR1, on SIGTERM and at exit, as far as it says nothing about these
    itself. `Never` stays as it is.
    """
    if isinstance(policy, Never):
        return policy
    leaves = tuple(policy.leaves())
    for last in (OnSignal(), OnPreemption(), AtExit()):
        is_said = any(isinstance(leaf, type(last)) for leaf in leaves)
        # `OnSignal((SIGTERM,))` says that the training continues after it: no default ends it.
        if not is_said and not signals_of(last) & signals_of(policy):
            policy = policy | last
    return policy


def preemption_of(policy: SavePolicy) -> OnPreemption | None:
    """How the job may be preempted: the first policy for that, None when there is none."""
    return next((leaf for leaf in policy.leaves() if isinstance(leaf, OnPreemption)), None)


def signals_of(policy: SavePolicy) -> frozenset[int]:
    """All signals that a policy names."""
    return frozenset(
        int(number)
        for leaf in policy.leaves()
        if isinstance(leaf, OnSignal | OnPreemption)
        for number in leaf.signals
    )


# --- what a save costs ----------------------------------------------------------------------------


@dataclass
class CostMeter:
    """What saves cost a training, from the lengths of its steps.

    The cost of one save is the time that it blocked the training, plus how much longer the steps
    were during it, each against the median of the newest steps without a save. The largest
    of the newest saves counts: a budget should hold on a bad day too.
    """

    plain_kept: int = 31
    saves_kept: int = 3
    training_seconds: float = 0.0  # between calls of `step`, all together
    blocked_seconds: float = 0.0  # in them
    _plain: list[float] = field(default_factory=list)
    _beside: list[float] = field(default_factory=list)
    _costs: list[float] = field(default_factory=list)
    _persists: list[float] = field(default_factory=list)

    def step(self, seconds: float, *, saving: bool) -> None:
        """One step took that long; `saving` when a save was under way during any of it."""
        self.training_seconds += seconds
        if saving:
            # All of them: what a save slows down is a sum over the steps that it lasts.
            self._beside.append(seconds)
        else:
            self._plain.append(seconds)
            # The newest alone: steps get longer and shorter as a training changes.
            del self._plain[: -self.plain_kept]

    def saved(self, *, blocked_seconds: float, persist_seconds: float) -> None:
        """The save that ran during the newest steps is over. `blocked_seconds` are not in them."""
        plain = self.step_seconds
        slower = 0.0
        if plain is not None:
            # A sum of differences, not of their positive parts: noise has to cancel out.
            slower = max(0.0, sum(self._beside) - plain * len(self._beside))
        self._beside = []
        self._costs = [*self._costs, blocked_seconds + slower][-self.saves_kept :]
        self._persists = [*self._persists, persist_seconds][-self.saves_kept :]

    @property
    def step_seconds(self) -> float | None:
        """A step during which no save ran: the median of the newest; None before the first."""
        # Not the mean: one step that waits for data, or evaluates, would outweigh a save.
        return statistics.median(self._plain) if self._plain else None

    @property
    def cost_seconds(self) -> float | None:
        """What a save costs the training; None before the first was over."""
        return max(self._costs, default=None)

    @property
    def persist_seconds(self) -> float | None:
        """How long a save is under way; None before the first was over."""
        return max(self._persists, default=None)
