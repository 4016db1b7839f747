"""Save a state as one checkpoint: every rank writes its share, then one write makes it exist.

flatten -> assign -> write data files -> (agree) -> parts to the lead -> manifest -> commit
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.contents import Contents, PlanMemory, SavePlan, contents_of, digests_of
from ckpt.errors import Fenced, InvalidState, OutcomeUnknown, SaveDropped
from ckpt.format.codec import encode_values
from ckpt.format.datafile import BLOCK_BYTES
from ckpt.format.describe import data_file_name, file_extras, file_metadata
from ckpt.format.manifest import MODULES, Header, Manifest, encode_manifest
from ckpt.format.part import (
    FileColumns,
    Part,
    PartFile,
    assemble,
    build_manifest,
    columns_of,
    make_part,
    part_again,
    part_of_files,
    part_texts,
    replica_differences,
    value_differences,
)
from ckpt.format.references import REFERENCES
from ckpt.format.telemetry import SaveTotals
from ckpt.layout.plain import Ranks
from ckpt.log import MANIFEST_NAME, STEP_MAX, LiveEntry, manifest_digest, step_prefix
from ckpt.previous import NOTHING, Base, Previous, Referred, decode_base, everything, refer
from ckpt.session import Commit, NotRetired, RankedSession, ReferenceRetired, Session
from ckpt.stepping import Evidence
from ckpt.telemetry import Recorder, Span, stopwatch
from ckpt.telling import Committed, RankTold, SaveHistory, log_saved, totals_of, write_telemetry
from ckpt.world import collectively
from ckpt.write import FileTexts, Source, WritePath, entries_of, write_files
from storage import Store

logger = logging.getLogger(__name__)

Uint32s = npt.NDArray[np.uint32]

TRIES = 3  # of a save that refers to other checkpoints, each time that one of them is retired


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a save treats replicas that differ, how it writes, and what is kept with it.

    `metric` goes into the log, for retention by quality. With `dedup`, chunks whose bytes the
    previous checkpoint has are referred to and not written. With `telemetry`, how the save went is
    kept beside the checkpoint, for `ckpt report`. `in_line` says that it is a state of the training
    that this process runs: see `ckpt.lines`.
    """

    replicas: Literal["warn", "strict"] = "warn"
    path: WritePath = field(default_factory=WritePath)
    user: Mapping[str, str] = field(default_factory=dict)
    metric: float | None = None
    dedup: bool = False
    telemetry: bool = False
    in_line: bool = True


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
    spans: tuple[Span, ...] = field(default=(), compare=False)
    counters: Mapping[str, float] = field(default_factory=dict, compare=False)


class PartMemory:
    """What the lead knows of each rank's last part, so that an unchanged structure is sent once.

    Belongs to one session. Both sides forget together: a round that fails on one rank fails on all.
    `previous` is what a save with `dedup` may refer to, `plans` what this rank need not work out
    again, `evidence` which optimizers wait for saves in the background, `history` how saves went.
    """

    def __init__(self) -> None:
        self.sent = b""
        self.structures: dict[int, bytes] = {}
        self.previous = Previous()
        self.plans = PlanMemory()
        self.evidence = Evidence()
        self.history = SaveHistory()


class Attempt(NamedTuple):
    """One try to save: its header, and what it may refer to; None for a save without `dedup`."""

    header: Header
    base: Base | None


@dataclass(frozen=True, slots=True)
class SaveTask:
    """One save to be made: where to, of which step, and who notes what happens.

    `blocked_seconds` tells how long training stands still for it; by default all the time.
    `retries_before` are those of the store when it began.
    """

    session: RankedSession
    store: Store
    memory: PartMemory
    step: int
    options: SaveOptions
    recorder: Recorder = field(default_factory=Recorder)
    blocked_seconds: Callable[[], float] = field(default_factory=stopwatch)
    retries_before: int = 0

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.session.world.rank, self.session.world.global_ranks)

    @property
    def retries(self) -> int:
        """Requests that were repeated on this rank, so far."""
        return self.store.retries - self.retries_before

    def told(self) -> RankTold:
        """What there is to tell of it on this rank, so far."""
        return RankTold(self.recorder.spans(), self.blocked_seconds(), self.retries)


def save_state(
    state: Any,
    *,
    session: RankedSession,
    store: Store,
    step: int,
    options: SaveOptions,
    memory: PartMemory,
) -> SaveReport:
    """Write and commit `state` from live memory; collective over the session's world.

    Raises the same error on all ranks, and then this step was not committed: InvalidState, Fenced,
    RankFailed. OutcomeUnknown leaves that open, and the next save settles it; so does RankFailed
    for a rank that dies when the others are told of the commit.
    """
    task = SaveTask(session, store, memory, step, options)
    contents: Contents | Exception
    try:
        with task.recorder.span("flatten"):
            contents = contents_of(state, task.ranks, memory.plans)
    except Exception as error:
        contents = error  # raised in the round that all ranks agree in

    def write(attempt: Attempt) -> Part:
        if isinstance(contents, Exception):
            raise contents
        written = write_sources(contents.plan.sources, contents, attempt, task)
        return part_of(contents, written, digests_of(contents.plan.assignment.compared), task)

    modules = () if isinstance(contents, Exception) else contents.modules
    return publish(task, lambda: modules, write)


class Written(NamedTuple):
    """This rank's files, and files of other attempts with chunks that it did not write."""

    files: Sequence[PartFile]
    referenced: Sequence[FileColumns] = ()


def write_sources(
    sources: Sequence[Source], contents: Contents, attempt: Attempt, task: SaveTask
) -> Written:
    """Write this rank's `sources`, or refer to them; durable when this returns."""
    header, recorder, path = attempt.header, task.recorder, task.options.path
    referred = everything(sources)
    entries = contents.plan.entries(path.file_nbytes_max, header.block_bytes)
    if attempt.base is not None:
        with recorder.span("digest", sum(source.chunk.nbytes for source in sources)):
            previous = task.memory.previous
            referred = refer(sources, attempt.base, previous, block_nbytes=header.block_bytes)
        entries = entries_of(referred.sources, path.file_nbytes_max, header.block_bytes)
    with recorder.span("write", sum(file.nbytes for file in entries)):
        files = write_files(
            task.store,
            file_names(header, task),
            referred.sources,
            files=entries,
            texts=file_texts(contents, header, task, referred),
            path=path,
        )
    return Written(files, referred.division.referenced)


def publish(
    task: SaveTask, modules: Callable[[], Sequence[str]], write: Callable[[Attempt], Part]
) -> SaveReport:
    """Agree on an attempt, let every rank `write` its share, and commit what all have written.

    `modules` gives the paths of the modules of the state. Raises like `save_state`. When something
    that the attempt refers to is retired meanwhile, there is another attempt; the last refers to
    nothing.
    """
    task = replace(task, retries_before=task.store.retries)
    try:
        return _publish_in_tries(task, modules, write)
    except Exception as error:
        task.memory.plans.forget_part()
        if not isinstance(error, SaveDropped):
            task.memory.history.failed(task.step, error)
        raise


def _publish_in_tries(
    task: SaveTask, modules: Callable[[], Sequence[str]], write: Callable[[Attempt], Part]
) -> SaveReport:
    tries = TRIES if task.options.dedup else 1
    for number in range(1, tries + 1):
        with task.recorder.span("attempt"):
            task.session.settle()
            attempt = _start(task, modules, may_refer=number < tries or tries == 1)
        try:
            return _publish(task, attempt, write)
        except ReferenceRetired as error:
            if number == tries:
                raise
            logger.warning("step %d is written again: %s", task.step, error)
    raise AssertionError("the last try returns or raises")


def _publish(task: SaveTask, attempt: Attempt, write: Callable[[Attempt], Part]) -> SaveReport:
    session, memory, header = task.session, task.memory, attempt.header

    try:
        with ExitStack() as waiting:

            def run() -> Part:
                try:
                    _refuse_other_task(attempt, task)
                    return write(attempt)
                finally:
                    waiting.enter_context(task.recorder.span("wait"))

            part = collectively(session.world, "write", run)
        with task.recorder.span("parts"):
            parts = _hand_over(part, task)
        report, committed = _commit(parts, task, header)
    except (Fenced, OutcomeUnknown):
        raise
    except Exception:
        memory.sent = b""
        _discard(session, header)
        raise
    if attempt.base is not None:
        memory.previous.remember(header, part, committed.manifest)
    if session.session is not None:
        _tell(report, committed.told, task)
    return report


def _tell(report: SaveReport, told: Sequence[RankTold], task: SaveTask) -> None:
    """The lead tells how a save went that is committed, so nothing here may fail it."""
    history, lead = task.memory.history, task.session.session
    assert lead is not None
    log_saved(report.totals, report.path)
    if not task.options.telemetry:
        return
    try:
        history.recall(task.store, lambda: _others(lead, report))
        telemetry = history.describe(report.totals, [task.told(), *told[1:]], report.warnings)
    except Exception:
        logger.warning("step %d is saved; how it went is not kept", task.step, exc_info=True)
        return
    write_telemetry(task.store, telemetry)
    history.saved(report.totals)


def _others(lead: Session, report: SaveReport) -> list[LiveEntry]:
    return [entry for entry in lead.state().live if entry.attempt != report.attempt]


def _start(task: SaveTask, modules: Callable[[], Sequence[str]], *, may_refer: bool) -> Attempt:
    """The lead names the attempt; every rank gets the same header, or the lead's error."""
    lead = task.session.session
    offered: bytes | None = None
    error: BaseException | None = None
    if lead is not None:
        try:
            header = header_of(task, lead.new_attempt(), modules())
            base = b""
            if task.options.dedup:
                previous = task.memory.previous
                found = previous.offer(lead, block_nbytes=BLOCK_BYTES) if may_refer else NOTHING
                if found.allowed:
                    header = header.model_copy(update={"required": (REFERENCES,)})
                base = found.encode()
            offered = _joined([header.model_dump_json().encode(), base])
        except Exception as caught:
            # Told in the round that the others wait in, so that none of them waits for long.
            offered, error = b"", caught
    received = task.session.world.share("attempt", offered)
    if not received:
        task.session.world.agree("attempt", error)
    told, based = _split(received)
    return Attempt(Header.model_validate_json(told), decode_base(based) if based else None)


def header_of(task: SaveTask, attempt: str, modules: Sequence[str]) -> Header:
    """What all files of an attempt say of it. Raises InvalidState for a step or notes that cannot
    be.
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


def _refuse_other_task(attempt: Attempt, task: SaveTask) -> None:
    """Rank 0 decides; who was asked for something else must not go along in silence."""
    told = {"step": attempt.header.step, "dedup": attempt.base is not None}
    asked = {"step": task.step, "dedup": task.options.dedup}
    problems = [
        f"{name}={asked[name]} was passed where rank 0 passed {name}={told[name]}; pass the same "
        f"{name}"
        for name in told
        if asked[name] != told[name]
    ]
    if problems:
        raise InvalidState(problems)


def file_names(header: Header, task: SaveTask) -> Callable[[int], str]:
    """The keys of this rank's data files by their index."""
    directory = step_prefix(header.step, header.attempt)
    rank = task.session.world.rank
    return lambda index: directory + data_file_name(rank, index)


def file_texts(
    contents: Contents, header: Header, task: SaveTask, referred: Referred | None = None
) -> FileTexts:
    """What this rank's data files tell besides tensors."""
    flat, rank = contents.flat, task.session.world.rank
    values = encode_values(flat.values) if rank == 0 else b""
    per_rank = encode_values(flat.per_rank) if flat.per_rank else b""
    empty = contents.plan.empty_tensors

    def metadata(index: int, count: int) -> Mapping[str, str]:
        first = index == 0
        return file_metadata(
            header,
            rank=rank,
            index=index,
            count=count,
            empty_tensors=empty if first else (),
            aliases=flat.aliases if first else None,
            references=referred.division.ranges if first and referred else (),
        )

    extras = file_extras(values=values, per_rank=per_rank)
    return FileTexts(metadata, extras, referred.digests if referred else None)


def part_of(
    contents: Contents, written: Written, digests: Mapping[str, int], task: SaveTask
) -> Part:
    """What the manifest has to know of this rank's share, once its files are durable."""
    flat, rank = contents.flat, task.session.world.rank
    if task.options.dedup:
        # With digests, or chunks in files of other attempts, the columns are others every time.
        return make_part(
            rank=rank,
            files=written.files,
            referenced=written.referenced,
            tensors=contents.plan.tensors,
            aliases=flat.aliases,
            values=flat.values,
            keeps_values=rank == 0,
            per_rank=flat.per_rank,
            replica_digests=digests,
        )
    last = contents.plan.of_chunks.last("part")
    texts = part_texts(
        aliases=flat.aliases,
        values=flat.values,
        keeps_values=rank == 0,
        per_rank=flat.per_rank,
        replica_digests=digests,
    )
    if last is None:
        part = part_of_files(
            [columns_of(file) for file in written.files],
            rank=rank,
            tensors=contents.plan.tensors,
            texts=texts,
        )
    else:
        part = part_again(last, written.files, texts)
        part = replace(part, warnings=_trained(contents.plan, last.checksums, part.checksums))
    contents.plan.of_chunks.keep("part", part)
    return part


# What a rank may say of its trainable tensors; nothing when some have changed.
UNCHANGED = "no trainable tensor has changed"
NONE_HERE = "no trainable tensor is here"


def _trained(plan: SavePlan, before: Uint32s, now: Uint32s) -> tuple[str, ...]:
    blocks = plan.trainable_blocks
    if not len(blocks):
        return (NONE_HERE,)
    return () if np.any(before[blocks] != now[blocks]) else (UNCHANGED,)


def _unchanged(parts: Sequence[Part]) -> list[str]:
    """A warning when a training goes on and the same weights are saved again."""
    told = {text for part in parts for text in (part.warnings or ("",))}
    if UNCHANGED not in told or not told <= {UNCHANGED, NONE_HERE}:
        return []
    return [
        "no trainable tensor has changed since the save before: is the state that is saved the one "
        "that is trained?"
    ]


class _Received(NamedTuple):
    """What all ranks have handed over, in rank order; nothing but on the lead."""

    parts: list[Part]
    told: list[RankTold]


def _hand_over(part: Part, task: SaveTask) -> Callable[[], _Received]:
    """A function that gives what the lead has received.

    It may raise, so it is called where the others wait for the lead's answer.
    """
    world, memory = task.session.world, task.memory
    if world.size == 1:
        return lambda: _Received([part], [task.told()])
    structure = part.structure()
    known = structure == memory.sent
    payload = _joined([b"" if known else structure, part.variable()])
    received = world.gather_to_lead("parts", _joined([task.told().encode(), payload]))
    memory.sent = structure
    return lambda: _assembled(received or [], memory)


def _assembled(received: Sequence[bytes], memory: PartMemory) -> _Received:
    parts, told = [], []
    for rank, data in enumerate(received):
        telling, payload = _split(data)
        structure, variable = _split(payload)
        if structure:
            memory.structures[rank] = structure
        parts.append(assemble(memory.structures[rank], variable))
        told.append(RankTold.decode(telling))
    return _Received(parts, told)


def _joined(parts: Sequence[bytes]) -> bytes:
    return len(parts[0]).to_bytes(8, "little") + parts[0] + parts[1]


def _split(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:8], "little")
    return data[8 : 8 + size], data[8 + size :]


class _Committed(NamedTuple):
    """What came of a commit: `answer` is for all ranks, the rest for the lead alone."""

    answer: Mapping[str, Any] = {}
    manifest: Manifest | None = None
    told: Sequence[RankTold] = ()


def _commit(
    received_of: Callable[[], _Received], task: SaveTask, header: Header
) -> tuple[SaveReport, _Committed]:
    """The lead checks that the parts are one whole checkpoint, and makes it exist.

    Raises ReferenceRetired on all ranks.
    """
    session, store = task.session, task.store
    lead = session.session

    def run() -> _Committed:
        return _Committed() if lead is None else _commit_parts(received_of(), task, header, lead)

    # The lead's own phase is the commit itself, for the others it is waiting for that.
    with nullcontext() if lead is not None else task.recorder.span("commit"):
        committed = collectively(session.world, "commit", run)
        told = None if lead is None else json.dumps(committed.answer).encode()
        report = json.loads(session.world.share("report", told))
    if "problems" in report:
        raise InvalidState(report["problems"])
    if "retired" in report:
        raise ReferenceRetired(report["retired"])
    for warning in report["warnings"] if lead is not None else ():
        logger.warning("step %d: %s", header.step, warning)
    totals = SaveTotals.model_construct(**report["totals"])
    told_to_all = SaveReport(
        step=header.step,
        attempt=header.attempt,
        path=f"{store.url}/{step_prefix(header.step, header.attempt)}".rstrip("/"),
        nbytes=totals.nbytes,
        warnings=tuple(report["warnings"]),
        totals=totals,
        nbytes_referenced=totals.nbytes_referenced,
        spans=task.recorder.spans(),
        counters={**task.recorder.counters(), "retries": task.retries},
    )
    return told_to_all, committed


def _commit_parts(received: _Received, task: SaveTask, header: Header, lead: Session) -> _Committed:
    parts, told = received
    warnings = replica_differences(parts)
    problems = value_differences(parts)
    problems += warnings if task.options.replicas == "strict" else []
    warnings += _unchanged(parts)
    if problems:
        return _Committed({"problems": problems})
    with task.recorder.span("manifest"):
        manifest = build_manifest(header, parts)
        data = encode_manifest(manifest)
        key = step_prefix(header.step, header.attempt) + MANIFEST_NAME
        with task.store.create(key, len(data), part_nbytes=len(data)) as writer:
            writer.write_part(0, [memoryview(data)])
    held = manifest.nbytes_referenced()
    commit = Commit(
        header.attempt,
        header.step,
        len(data),
        manifest_digest(data),
        metric=task.options.metric,
        references=tuple(held),
        in_line=task.options.in_line,
    )
    nbytes = manifest.own_nbytes + len(data)
    made = Committed(header.step, header.attempt, nbytes, sum(held.values()), warnings)
    totals = totals_of(made, told, now_unix=time.time())
    try:
        with task.recorder.span("commit"):
            lead.commit(commit)
    except ReferenceRetired as error:
        return _Committed({"retired": str(error)})
    # From here on the checkpoint exists, so nothing may fail any more.
    answer = {"warnings": warnings, "totals": totals.ended(time.time()).model_dump()}
    return _Committed(answer, manifest, told)


def _discard(session: RankedSession, header: Header) -> None:
    """Remove what a failed save left, so that a full disk has room again."""
    if session.session is None:
        return
    try:
        session.session.discard(header.attempt, step=header.step)
    except NotRetired:
        logger.warning(
            "step %d (%s) is committed all the same: what failed came after that",
            header.step,
            header.attempt,
        )
    except Exception as error:
        # The failure of the save itself is what the caller must hear of; the next session sweeps.
        logger.warning("files of the failed attempt %s stay for now: %s", header.attempt, error)
