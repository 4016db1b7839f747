"""The values that describe a state: what is saved, what a checkpoint has, what a load shall do, and
what it did.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeGuard

import torch
from torch import nn

from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding, Owned
from ckpt.layout.region import Shape

OnReshard = Callable[[Sequence[Any], int, int], Any]


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value of the state that each rank has for itself: a random state, a position in the
    data.

    `value` is a value, or an object with `state_dict()` and `load_state_dict()`. A load on as many
    ranks as saved gives each rank its own back. On another number, `on_reshard(all_values, rank,
    world_size)` is called for the value of each rank; without it the load fails before it touches
    anything.
    """

    value: Any
    on_reshard: OnReshard | None = None


@dataclass(frozen=True, slots=True)
class PerGroup:
    """Marks a value of the state that the ranks of a group have in common, and other groups have
    otherwise: the scheduler of a stage.

    `value` is as in `PerRank`, `group` a device mesh, a process group or the numbers of the ranks,
    this rank among them. The ranks of a group must have equal values, or the save fails. A load in
    the same groups of as many ranks gives each its own back; in others, what all groups had alike.
    Where that differs, `on_reshard(values of the groups, first rank of this group, world_size)` is
    called; without it the load fails before it touches anything.
    """

    value: Any
    group: Any
    on_reshard: OnReshard | None = None


class StagesHere(NamedTuple):
    """Of a pipeline of `total` stages the numbers of those that are on this rank, under a name."""

    path: str
    total: int
    numbers: tuple[int, ...]


class PipelineStage(Protocol):
    """What a stage of `torch.distributed.pipelining` says of itself."""

    submod: nn.Module
    stage_index: int
    num_stages: int


class Stages:
    """Marks several modules, or several optimizers, that are parts of one under one name.

    For ranks with several stages of a pipeline, each with the names of the whole model: `{"model":
    Stages(first, third), "optim": Stages(optimizer_of_first, optimizer_of_third)}`. No two of them
    may have a name in common.

    The stages of `torch.distributed.pipelining` may stand for their modules. They know their
    numbers, from 0 on, and how many there are; otherwise `numbers` and `count` say it. A save then
    fails, before anything is written, when one of the stages is on no rank.

    Raises TypeError for anything else, and ValueError for numbers that are none of stages.
    """

    def __init__(
        self,
        *parts: nn.Module | torch.optim.Optimizer | PipelineStage,
        numbers: Sequence[int] | None = None,
        count: int | None = None,
    ) -> None:
        kinds = (nn.Module, torch.optim.Optimizer)
        stages = [one for one in parts if _is_pipeline_stage(one)]
        if parts and len(stages) == len(parts):
            if numbers is None and count is None:
                numbers = [one.stage_index for one in stages]
                counts = [one.num_stages for one in stages]
                if len(set(counts)) > 1:
                    raise ValueError(
                        f"Stages: parts of pipelines of {counts} stages; they have to be of one"
                    )
                count = counts[0]
            parts = tuple(one.submod for one in stages)
        if not parts or not any(all(isinstance(one, kind) for one in parts) for kind in kinds):
            names = ", ".join(type(one).__name__ for one in parts)
            raise TypeError(f"Stages({names}): expected modules alone, or optimizers alone")
        self.parts = parts
        self.numbers = tuple(numbers or ())
        self.count = count
        if (numbers is None) != (count is None):
            raise ValueError("Stages: numbers= and count= belong together; pass both")
        distinct = set(self.numbers)
        if count is not None and not (
            len(self.numbers) == len(distinct) == len(parts) and distinct <= set(range(count))
        ):
            raise ValueError(
                f"Stages: numbers={list(self.numbers)}, count={count}: expected {len(parts)} "
                "different numbers from 0 to count - 1, one for each of the stages"
            )


def _is_pipeline_stage(part: object) -> TypeGuard[PipelineStage]:
    """Whether it says what a stage says: torch's pipelines, which take long to load, may be none of
    this process.
    """
    return isinstance(getattr(part, "submod", None), nn.Module) and all(
        type(getattr(part, name, None)) is int for name in ("stage_index", "num_stages")
    )


class TensorEntry(NamedTuple):
    """Dtype, shape and kind of one tensor of a checkpoint."""

    dtype: torch.dtype
    shape: Shape
    kind: Kind = Kind.OTHER


Stacks: TypeAlias = Mapping[str, str]
"""Names to names, one with `{}` for the number of a slice: `{"experts.weight":
"experts.{}.weight"}`. They stand anywhere in a name, between dots: a rule holds in every layer."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """What a checkpoint holds, without any tensor data.

    `aliases` gives the stored fqn of a tied name. `per_rank` has one mapping per rank of the world
    that saved, or nothing when no value was per rank. `worlds` are the ranks of each world that
    saved: of one, or of each of several writers.
    """

    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    per_rank: Sequence[Mapping[str, Any]] = ()
    worlds: Sequence[range] = (range(1),)


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state as this rank holds it: memory with pieces, values, and tied names.

    `values` have to be the same on all ranks, `per_rank` is this rank's own. `witnesses` are what
    this rank has of tensors that only other ranks store: to be compared. From `optimizers` and
    `owned_by_param` (keyed by the id of an object that optimizers know) a save in the background
    works out what only the next step changes.
    """

    holdings: list[Holding]
    values: dict[str, Any]
    per_rank: dict[str, Any]
    aliases: dict[str, str]
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    owned_by_param: Mapping[int, Owned] = field(default_factory=dict)
    witnesses: Sequence[Holding] = ()


class ProblemKind(enum.Enum):
    """Why a leaf of the state cannot be loaded. The first two are tolerated with `strict=False`."""

    MISSING = "missing"
    UNEXPECTED = "unexpected"
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUE = "value"
    PER_RANK = "per rank"
    UNSUPPORTED = "unsupported"


class Problem(NamedTuple):
    """One thing that does not fit; `text` names the fqn, both sides and the next move."""

    kind: ProblemKind
    fqn: str
    text: str


# What a load insists on: that state and checkpoint have the same names, that the checkpoint has all
# names of the state ("state"), or neither.
Strict = bool | Literal["state"]


def fatal_texts(problems: Iterable[Problem], *, strict: Strict) -> list[str]:
    """The texts of the problems that forbid a load; without `strict`, names may be missing."""
    # A name on one side only leaves memory as it is; a wrong shape, dtype or value would end as
    # wrong numbers, so nothing tolerates that.
    tolerated: tuple[ProblemKind, ...] = ()
    if strict is not True:
        tolerated = (ProblemKind.UNEXPECTED, *((ProblemKind.MISSING,) if not strict else ()))
    return [problem.text for problem in problems if problem.kind not in tolerated]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did, by the state's names.

    `missing` were left as they were, `unexpected` are names of the checkpoint that the state has no
    place for, `skipped` were dropped by `skip=`, and `not_asked` counts what the checkpoint has
    under entries that the state does not have at all; `new` were left as they were by `new=`. Loads
    of state dicts have none of the three.
    """

    tensors: tuple[str, ...]
    values: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    not_asked: int = 0
    new: tuple[str, ...] = ()


# --- what a load shall do ------------------------------------------------------------------------
# Errors advise the next move in the words of the call that raises them; a call that lacks an
# argument must not be advised to pass it.


class Unshared(enum.Enum):
    """Who owns what no engine shares between ranks in an optimizer's state dict: the state of
    parameters that stand next to the units, and the options of groups.

    COMPARED: all ranks have the same, or the call refuses. OWN: each rank has its own, whatever the
    others have, and a dict to load may lack what the optimizer has. OWN_BY_FIRST: like OWN, but a
    dict that is taken has state only of parameters of which the first rank has state.
    """

    COMPARED = enum.auto()
    OWN = enum.auto()
    OWN_BY_FIRST = enum.auto()


class CallArguments(NamedTuple):
    """Which arguments a call has. `source` says what it loads, in the words of its errors."""

    source: str = "checkpoint"
    rename: bool = True
    skip: bool = True
    strict: bool = True
    rank0_only: bool = False
    cast: bool = False
    new: bool = True

    def moves(self, rename: str, leave: str, *, is_missing: bool = False) -> str:
        """The end of a message about a name that one side lacks: what to pass to this call to give
        it its other name, or to leave it be.
        """
        names = (
            ("new=", self.new and is_missing),
            ("skip=", self.skip),
            ("strict=False", self.strict),
        )
        given = [name for name, has in names if has]
        ways = " or ".join([", ".join(given[:-1]), given[-1]] if len(given) > 2 else given)
        moves = [rename] if self.rename else []
        moves += [f"{ways} to {leave}"] if ways else []
        return f"; {', '.join(moves)}" if moves else "; take it from a state with the same names"

    @property
    def or_skip(self) -> str:
        """The end of a list of moves."""
        return ", or skip= it" if self.skip else ""


CHECKPOINT = CallArguments()
STATE_DICT = CallArguments("dict", rename=False, skip=False, rank0_only=True, cast=True, new=False)


class LoadRequest(NamedTuple):
    """How a state dict is to be loaded.

    `rank0_only`: only the first rank's dict counts. `cast`: to the dtypes of the state, as `copy_`
    does. `every_name`: a tied tensor is found by any of its names, and missing under those that the
    dict lacks. `call` has the arguments that errors may advise, `beside` says what is a rank's own.
    """

    strict: bool = True
    rank0_only: bool = False
    cast: bool = False
    every_name: bool = False
    call: CallArguments = STATE_DICT
    beside: Unshared = Unshared.COMPARED
