"""What one rank writes in one attempt: its files, their headers and its part."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.commit.patience import BACKGROUND_SECONDS
from ckpt.commit.ranked import RankedSession
from ckpt.commit.records import STEP_MAX
from ckpt.errors import InvalidState, NamesChanged
from ckpt.format.codec import encode_values
from ckpt.format.datafile import BLOCK_BYTES
from ckpt.format.manifest import MODULES, Header
from ckpt.format.part import (
    FileColumns,
    Part,
    PartFile,
    PartTexts,
    ReplicaColumns,
    columns_of,
    part_again,
    part_of_files,
    part_texts,
)
from ckpt.format.rank_files import RankContents
from ckpt.layout.plain import Ranks
from ckpt.saving.base import Base, Previous, Referred
from ckpt.saving.holders import Holders, inventory_of, refuse_missing_stages
from ckpt.saving.joint_parts import JointParts
from ckpt.saving.plan import Contents, PlanMemory, SavePlan
from ckpt.saving.step_gate import Evidence
from ckpt.saving.write import WritePath
from ckpt.short import ShortRecord
from ckpt.telemetry.history import RankReport, SaveHistory
from ckpt.telemetry.record import SaveTotals
from ckpt.telemetry.recorder import PhaseSpan, Recorder, stopwatch
from storage import Store

Uint32s = npt.NDArray[np.uint32]


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


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport(ShortRecord):
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


class PartMemory:
    """What saves of one session leave to the next ones, beginning with the `structures` of the last
    parts.

    `previous` is what a save with `dedup` may refer to, `plans` holds what
    this rank need not compute again, `evidence` which optimizers wait for saves in the background,
    `history` the reports of earlier saves. `holders` is what the ranks have told each other of what
    they hold; None until they have. `is_compared`: what they share was equal when they had.
    `differing` says which replicas have drifted, as far as the save under way has compared them.
    """

    def __init__(self) -> None:
        self.structures = JointParts()
        self.previous = Previous()
        self.plans = PlanMemory()
        self.evidence = Evidence()
        self.history = SaveHistory()
        self.holders: Holders | None = None
        self.is_compared = False
        self.differing: tuple[str, ...] = ()

    def learn(self, holders: Holders | None) -> None:
        """Keep what the ranks have told each other; plans that it makes wrong are forgotten."""
        before = (self.holders.tensors, self.holders.copies) if self.holders else ({}, {})
        if holders is not None and (holders.tensors, holders.copies) != before:
            self.plans.forget()
        self.holders = holders
        self.is_compared = False


class Attempt(NamedTuple):
    """One try to save: its header, and what it may refer to; None for a save without `dedup`."""

    header: Header
    base: Base | None


@dataclass(frozen=True, slots=True)
class SaveTask:
    """One save: its step, its destination, and what records its progress.

    `blocked_seconds` returns how long training has been stopped for it; by default the whole time.
    `retries_before` is the store's count of retries when the save began. A save in the background
    repeats failed requests for up to `retry_seconds_max`.
    """

    session: RankedSession
    store: Store
    memory: PartMemory
    step: int
    options: SaveOptions
    recorder: Recorder = field(default_factory=Recorder)
    blocked_seconds: Callable[[], float] = field(default_factory=stopwatch)
    retries_before: int = 0
    retry_seconds_max: float = BACKGROUND_SECONDS

    @property
    def ranks(self) -> Ranks:
        world, holders = self.session.world, self.memory.holders
        ranks = Ranks(world.rank, world.global_ranks)
        if holders is None or not (holders.tensors or holders.copies):
            return ranks
        return ranks._replace(held=holders.tensors, copies=holders.copies)

    @property
    def retries(self) -> int:
        """Requests that were repeated on this rank, so far."""
        return self.store.retries - self.retries_before

    def rank_report(self) -> RankReport:
        """This rank's report on the save, so far."""
        return RankReport(self.recorder.spans(), self.blocked_seconds(), self.retries)


class Written(NamedTuple):
    """This rank's files, and files of other attempts with chunks that it did not write."""

    files: Sequence[PartFile]
    texts: PartTexts
    referenced: Sequence[FileColumns] = ()


def header_of(task: SaveTask, attempt: str, modules: Sequence[str]) -> Header:
    """The header that all files of an attempt share. Raises InvalidState for a step or notes that
    cannot be saved.
    """
    step, user = task.step, task.options.user
    if type(step) is not int or not 0 <= step <= STEP_MAX:
        raise InvalidState([f"step={step!r}: expected an int from 0 to {STEP_MAX}"])
    for name, note in user.items():
        if not (isinstance(name, str) and isinstance(note, str)):
            raise InvalidState([f"user[{name!r}]={note!r}: expected a str with the name of a str"])
    return Header(
        root=task.session.root,
        attempt=attempt,
        step=step,
        world_size=task.session.world.size,
        block_bytes=BLOCK_BYTES,
        created_unix=int(time.time()),
        # Export strips these paths from the names of a model's tensors.
        user={**user, MODULES: json.dumps(modules)},
    )


def texts_of(contents: Contents, task: SaveTask) -> PartTexts:
    """What this rank's files and its part hold besides tensors."""
    texts = part_texts(
        aliases=contents.flat.aliases,
        values=contents.flat.values,
        keeps_values=False,
        per_rank=contents.flat.per_rank,
    )
    values, holders = contents.flat.values, task.memory.holders
    if task.session.world.size > 1 and holders is not None:
        values = {fqn: value for fqn, value in values.items() if fqn in holders.sends}
    # The coordinator always sends some: a checkpoint of no values has an empty mapping of them.
    is_sent = values or task.session.world.rank == 0
    return texts._replace(values=encode_values(values) if is_sent else b"")


def modules_of(contents: Contents, task: SaveTask) -> tuple[str, ...]:
    """The paths of the modules of all ranks' states, as far as the ranks know them."""
    holders = task.memory.holders
    return contents.modules if holders is None else holders.modules or contents.modules


def refuse_other_names(contents: Contents, task: SaveTask) -> None:
    """Raises NamesChanged unless the other ranks know the names of what this one holds, and
    InvalidState where there are no other ranks and a stage is missing.
    """
    if task.session.world.size == 1:
        refuse_missing_stages(contents.stages)
        return
    holders = task.memory.holders
    if holders is None or inventory_of(contents, task.ranks) != holders.of:
        raise NamesChanged("this rank holds things of other names than it has told the others")


def rank_contents(
    contents: Contents,
    texts: PartTexts,
    header: Header,
    task: SaveTask,
    referred: Referred | None = None,
) -> RankContents:
    """What this rank's data files hold besides the bytes of chunks."""
    return RankContents(
        header,
        task.session.world.rank,
        texts,
        contents.plan.empty_tensors,
        references=referred.division.ranges if referred else (),
        digests=referred.digests if referred else None,
    )


def part_of(contents: Contents, written: Written, digests: Uint32s, task: SaveTask) -> Part:
    """What this rank contributes to the manifest, once its files are durable. `digests` are those
    of `plan.compared`, of the very bytes that are saved.
    """
    replicas = ReplicaColumns(*contents.plan.compared_columns, digests)
    texts = written.texts._replace(replicas=replicas)

    def anew() -> Part:
        return part_of_files(
            [*map(columns_of, written.files), *written.referenced],
            rank=task.session.world.rank,
            tensors=contents.plan.tensors,
            texts=texts,
        )

    if task.options.dedup:
        # With digests, or with chunks in files of other attempts, the columns change with every
        # save, so nothing of the last part can be used again.
        return anew()
    last = contents.plan.of_chunks.last("part")
    if last is None:
        part = anew()
    else:
        part = part_again(last, written.files, texts)
        part = replace(part, warnings=_trained(contents.plan, last.checksums, part.checksums))
    contents.plan.of_chunks.keep("part", part)
    return part


# A rank's warning about its trainable tensors; it gives none when some have changed.
UNCHANGED = "no trainable tensor has changed"
NONE_HERE = "no trainable tensor is here"


def _trained(plan: SavePlan, before: Uint32s, now: Uint32s) -> tuple[str, ...]:
    blocks = plan.trainable_blocks
    if not len(blocks):
        return (NONE_HERE,)
    return () if np.any(before[blocks] != now[blocks]) else (UNCHANGED,)
