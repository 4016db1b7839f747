"""What one rank writes in one attempt: its files, their headers, and its part, on its way up the
tree of ranks.

Every rank merges its part with what those right below it have sent, and sends that on.

Note "known structures": while only values change, the structure of a part stays the same from save
to save, and so does all that follows from the structures of all: the rules of chunks, the proof
that they cover every tensor, and most of the manifest's bytes. A rank sends its structure when it
has changed, and forgets it with the ranks above: a round that fails on one rank fails on all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ckpt.commit.appender import BACKGROUND_SECONDS
from ckpt.commit.names import is_finite
from ckpt.commit.records import STEP_MAX
from ckpt.commit.session import RankedSession
from ckpt.errors import Corrupt, InvalidArgument, NamesChanged
from ckpt.format.checksum import Uint32s
from ckpt.format.datafile import BLOCK_BYTES, FileEntries
from ckpt.format.joint_codec import (
    SentStructure,
    StructureReader,
    decode_rest,
    digest_of_structure,
    encode_rest,
    encode_structure,
)
from ckpt.format.joint_manifest import JointTable, ReplicaRegions
from ckpt.format.manifest import DELTA, MODULES, PUBLICATION, Header
from ckpt.format.object_parts import DataFile, rank_files
from ckpt.format.part import (
    FileColumns,
    JointMerge,
    JointRest,
    JointStructure,
    Part,
    PartTexts,
    ReplicaColumns,
    merge_structures,
    part_of_files,
    structure_of,
)
from ckpt.layout.plain import Ranks
from ckpt.saving.dedup import Base, Previous, Referred
from ckpt.saving.holders import Holders, inventory_of, refuse_missing_stages
from ckpt.saving.image import WritePath
from ckpt.saving.plan import Contents, PlanMemory, contents_of
from ckpt.saving.published import Published
from ckpt.short import ShortRecord
from ckpt.telemetry.record import (
    PhaseSpan,
    RankReport,
    Recorder,
    SaveHistory,
    SaveTotals,
    stopwatch,
)
from ckpt.world.base import World, joined, pack, split, unpack
from storage import Store

PARTS = "parts"  # the round in which parts go to the coordinator


class Merged:
    """The structures of some ranks as one, and what follows from them alone, made when it is first
    needed. To make the `table` may refuse the save.
    """

    def __init__(self, merge: JointMerge) -> None:
        self.merge = merge

    @cached_property
    def encoded(self) -> tuple[bytes, bytes]:
        """The structure as bytes, and its digest."""
        data = encode_structure(self.merge.structure)
        return data, digest_of_structure(data)

    @cached_property
    def table(self) -> JointTable:
        """Raises InvalidState."""
        return JointTable(self.merge.structure)

    @cached_property
    def regions(self) -> ReplicaRegions:
        """What the ranks may have in common."""
        return ReplicaRegions(self.merge.structure)


class JointReceived(NamedTuple):
    """What all ranks have contributed, as the coordinator has it, and the reports of all, in rank
    order.
    """

    rest: JointRest
    reports: list[RankReport]
    all: Merged


class JointParts:
    """What one rank keeps from save to save: its own structure, those of the ranks right below, and
    what it has made of them. `below` are those of the ranks below, in rank order.
    """

    def __init__(self) -> None:
        self._sent = b""  # digest of the structure that the rank above knows
        self._own: JointStructure | None = None
        self.below: list[SentStructure] = []
        self._merged: Merged | None = None

    def forget(self) -> None:
        """Have this rank send its structure again."""
        self._sent = b""

    def payload(self, part: Part, report: RankReport, below: Sequence[bytes]) -> bytes:
        """This rank's part and report, and what came from below, as one message to the rank above.

        Raises Corrupt.
        """
        merged, rest, reports = self._update(part, below)
        structure, digest = merged.encoded
        known = digest == self._sent
        # Before it has arrived: if the round fails, all ranks `forget`.
        self._sent = digest
        reports = pack(report.encode()) + reports
        return joined(reports, joined(b"" if known else structure, encode_rest(rest, digest)))

    def received(self, part: Part, report: RankReport, below: Sequence[bytes]) -> JointReceived:
        """On the coordinator, the contributions of all. Raises Corrupt."""
        merged, rest, reports = self._update(part, below)
        return JointReceived(rest, [report, *map(RankReport.decode, unpack(reports))], merged)

    def _update(self, part: Part, below: Sequence[bytes]) -> tuple[Merged, JointRest, bytes]:
        """All structures merged, the rests merged, and the reports of those below, packed."""
        reports, sent = list[bytes](), list[tuple[bytes, bytes]]()
        for message in below:
            of_ranks, rest = split(message)
            reports.append(of_ranks)
            sent.append(split(rest))
        # Compared with what is kept, which has its columns in memory: a new one is encoded only if
        # it differs.
        if self._own is None or not part.structure.is_like(self._own):
            self._own, self._merged = part.structure, None
        if sent and self._note_below([structure for structure, _ in sent], self._own):
            self._merged = None  # what is replaced need not be in memory with the new one
        if self._merged is None:
            structures = [self._own, *[one.structure for one in self.below]]
            self._merged = Merged(merge_structures(structures))
        pairs = zip(sent, self.below, strict=True)
        rests = [part.rest, *[decode_rest(rest, known) for (_, rest), known in pairs]]
        return self._merged, self._merged.merge.rest(rests), b"".join(reports)

    def _note_below(self, structures: Sequence[bytes], own: JointStructure) -> bool:
        """Keep the structures that were sent, empty ones being known; whether any has changed."""
        known: dict[int, SentStructure] = dict(enumerate(self.below))
        new: dict[int, SentStructure] = {}
        reader = StructureReader([own])
        for index, data in enumerate(structures):
            if data and (index not in known or digest_of_structure(data) != known[index].digest):
                new[index] = reader.read(data)
            if not data and index not in known:
                raise Corrupt("a rank's structure is taken for known, and was never sent")
        if new:
            self.below = [new.get(index) or known[index] for index in range(len(structures))]
        return bool(new)


def gather_joint_parts(
    part: Part, report: RankReport, world: World, known: JointParts
) -> Callable[[], JointReceived | None]:
    """Send this rank's part up the tree, merged with those below. Returns a function that decodes
    what arrived at the coordinator, and gives None elsewhere.

    Decoding and merging may raise. The function raises what this rank met, so it must be called in
    a step in which all ranks agree; on a rank above one that failed it gives None as well.
    """
    failed: list[Exception] = []

    def merged(below: list[bytes]) -> bytes:
        # A rank below has failed and will say so where all agree; there is nothing to merge until
        # then.
        if not all(below):
            return b""
        try:
            return known.payload(part, report, below)
        except Exception as error:
            # The ranks above wait for this message: an error is raised when all have met.
            failed.append(error)
            return b""

    received = world.merge_to_coordinator(PARTS, merged)

    def decode() -> JointReceived | None:
        if failed:
            raise failed[0]
        if received is None or not all(received):
            return None
        return known.received(part, report, received)

    return decode


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a save treats replicas that differ, how it writes, and what is kept with it.

    `metric` goes into the log, for retention by quality. With `dedup`, chunks whose bytes the
    previous checkpoint has are referred to and not written, unless `full_every` is over: so many
    saves, or so much time. With `telemetry`, how the save went is kept next to the checkpoint, for
    `ckpt report`. `in_line` says that it is a state of the training that this process runs: see
    `ckpt.commit.locate`. `publication` is that of the header: not in a line it is a delta's.
    """

    replicas: Literal["warn", "strict"] = "warn"
    path: WritePath = field(default_factory=WritePath)
    user: Mapping[str, str] = field(default_factory=dict)
    metric: float | None = None
    dedup: bool = False
    full_every: int | timedelta = 10
    telemetry: bool = False
    in_line: bool = True
    publication: tuple[str, ...] | None = None


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

    `previous` is what a save with `dedup` may refer to, `plans` holds what this rank need not
    compute again, `steps_seen` which optimizers wait for saves in the background, `history` the
    reports of earlier saves. `holders` is what the ranks hold, once they have exchanged it, else
    None. `is_compared`: what they share was equal when they had. `differing` says
    which replicas have drifted, as far as the save under way has compared them. `published` are the
    bits that were published last.
    """

    def __init__(self) -> None:
        self.structures = JointParts()
        self.previous = Previous()
        self.plans = PlanMemory()
        self.steps_seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self.history = SaveHistory()
        self.holders: Holders | None = None
        self.is_compared = False
        self.differing: tuple[str, ...] = ()
        self.published: Published | None = None

    def rest(self) -> None:
        """Give back what the next save can make anew: other roots are saved to."""
        self.plans.rest()

    def learn(self, holders: Holders | None) -> None:
        """Keep what the ranks have exchanged; plans that it makes wrong are forgotten."""
        before = (self.holders.tensors, self.holders.copies) if self.holders else ({}, {})
        if holders is not None and (holders.tensors, holders.copies) != before:
            self.plans.forget()
        self.holders = holders
        # Other names, other replicas: they are compared once more.
        self.is_compared = False


class Attempt(NamedTuple):
    """One try to save: its header, and what it may refer to; None for a save without `dedup`."""

    header: Header
    base: Base | None


class WriterPlace(NamedTuple):
    """Where one of several writers puts its part of an attempt. Its ranks are those of the attempt
    from `first_rank` on.
    """

    header: Header
    writer: str
    first_rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class SaveTask:
    """One save: its step, its destination, and what records its progress.

    `blocked_seconds` returns how long training has been stopped for it; by default the whole time.
    `retries_before` is the store's count of retries when the save began. A save in the background
    repeats failed requests for up to `retry_seconds_max`. With a `place` it is one part of several.
    `contents` gives what is saved.
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
    place: WriterPlace | None = None
    contents: Callable[[Any, Ranks, PlanMemory], Contents] = contents_of

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


def header_of(task: SaveTask, attempt: str, modules: Sequence[str]) -> Header:
    """The header that all files of an attempt share. Raises InvalidArgument for a step, a metric or
    notes that cannot be saved.
    """
    step, user, metric = task.step, task.options.user, task.options.metric
    if type(step) is not int or not 0 <= step <= STEP_MAX:
        raise InvalidArgument(f"step={step!r}: expected an int from 0 to {STEP_MAX}")
    if metric is not None and not is_finite(metric):
        # Before any data: the log would refuse it after all is written.
        raise InvalidArgument(f"metric={metric!r}: expected a finite number, or None")
    if user:
        refuse_notes(user)
    known, published = {MODULES: json.dumps(modules)}, task.options.publication
    if published is not None:
        known[PUBLICATION] = json.dumps(published)
    return Header(
        root=task.session.root,
        attempt=attempt,
        step=step,
        world_size=task.session.world.size,
        block_bytes=BLOCK_BYTES,
        created_unix=int(time.time()),
        required=() if published is None or task.options.in_line else (DELTA,),
        # Export strips the paths of modules from the names of a model's tensors.
        user={**user, **known},
    )


def refuse_notes(user: Mapping[str, str]) -> None:
    """Raise InvalidArgument for notes that are no texts, or have names that the library gives."""
    for name, note in user.items():
        if not (isinstance(name, str) and isinstance(note, str)):
            raise InvalidArgument(f"user[{name!r}]={note!r}: expected a str with the name of a str")
        if name.startswith("ckpt."):
            text = f"user[{name!r}]: names with 'ckpt.' are the library's; rename it"
            raise InvalidArgument(text)


def refuse_other_names(contents: Contents, task: SaveTask) -> None:
    """Raises NamesChanged unless the other ranks know the names of what this one holds, and
    InvalidState where there are no other ranks and a stage is missing.
    """
    if task.session.world.size == 1:
        if contents.stages:
            refuse_missing_stages(contents.stages)
        return
    holders = task.memory.holders
    if holders is None or inventory_of(contents, task.ranks) != holders.of:
        raise NamesChanged("this rank holds things of other names than it has sent to the others")


def files_of(
    entries: Sequence[FileEntries],
    contents: Contents,
    texts: PartTexts,
    header: Header,
    task: SaveTask,
    referred: Referred | None = None,
) -> list[DataFile]:
    """This rank's data files, all but the bytes of chunks."""
    return rank_files(
        entries,
        header,
        task.session.world.rank + (task.place.first_rank if task.place else 0),
        texts,
        empty_tensors=contents.plan.empty_tensors,
        references=referred.division.ranges if referred else (),
        digests=referred.digests if referred else None,
    )


# A rank's warning about its trainable tensors; it gives none when some have changed.
UNCHANGED = "no trainable tensor has changed"
NONE_HERE = "no trainable tensor is here"


def write_part(
    entries: Sequence[FileEntries],
    contents: Contents,
    header: Header,
    task: SaveTask,
    digests: Uint32s,
    write: Callable[[list[DataFile]], list[FileColumns]],
    referred: Referred | None = None,
) -> Part:
    """What this rank contributes to the manifest, once its files are durable, which `write` makes
    them: of these and of other attempts. `digests` are those of `plan.compared`, of the very bytes
    that are saved.
    """
    flat, holders, plan = contents.flat, task.memory.holders, contents.plan
    world, rank = task.session.world, task.session.world.rank
    sends: Mapping[str, Any] | None = flat.values
    if world.size > 1 and holders is not None:
        # Each value is sent by one rank; the others would send the same bytes up the tree.
        sends = {fqn: value for fqn, value in flat.values.items() if fqn in holders.sends}
    if not sends and rank:
        sends = None  # the coordinator sends an empty mapping where there are no values
    texts = PartTexts.of(flat.aliases, flat.values, flat.per_rank, sends=sends)
    files = write(files_of(entries, contents, texts, header, task, referred))
    files += referred.division.referenced if referred else ()
    texts = texts._replace(replicas=ReplicaColumns(*plan.compared_columns, digests))
    structure = None
    # With digests, or with chunks in files of other attempts, it changes with every save.
    if not task.options.dedup:
        memo, (_, _, _, chunks, _, _, checksums, *_) = plan.of_chunks, zip(*files, strict=True)
        counts, sums = map(len, chunks), np.concatenate(checksums)
        compared = np.concatenate(plan.compared_columns).tobytes()
        structure = memo.once(
            ("structure", rank, *counts, compared, *texts.aliases.items()),
            lambda: structure_of(files, rank, plan.tensors, texts),
        )
        # The sums of the blocks are there anyway: comparing them shows for free whether any weight
        # has changed.
        if (last := memo.get("sums")) is not None:
            blocks = plan.trainable_blocks
            unchanged = UNCHANGED if len(blocks) else NONE_HERE
            has_changed = np.any(last[blocks] != sums[blocks])
            texts = texts._replace(warnings=() if has_changed else (unchanged,))
        memo["sums"] = sums
    return part_of_files(files, rank=rank, tensors=plan.tensors, texts=texts, structure=structure)
