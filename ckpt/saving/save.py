"""Save a state as one checkpoint: every rank writes its share, then one write makes it exist.

flatten -> assign -> write data files -> (agree) -> gather parts -> manifest -> commit
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ckpt.commit.names import MANIFEST_NAME, PART_PREFIX, step_prefix
from ckpt.commit.records import manifest_digest
from ckpt.commit.session import RankedSession, ReferenceRetired
from ckpt.commit.writer import Commit, NotRetired
from ckpt.errors import (
    CheckpointError,
    Fenced,
    InvalidState,
    LogDiverged,
    NamesChanged,
    OutcomeUnknown,
    RankFailed,
    RankFailedInCommit,
)
from ckpt.format.checksum import Uint32s
from ckpt.format.joint_manifest import differing_values
from ckpt.format.manifest import DELTA, REFERENCES, SINCE_FULL, Header, Manifest
from ckpt.format.manifest_codec import Encoded
from ckpt.format.object_parts import DataFile
from ckpt.format.part import FileColumns, Part
from ckpt.saving.dedup import NOTHING, Holdings, Referred, decode_base, refer
from ckpt.saving.holders import inventory_of, report_names
from ckpt.saving.image import plan_files, write_files
from ckpt.saving.plan import Contents, Memo, Source, entries_of
from ckpt.saving.replica_check import ReplicasDrifted, compared_live
from ckpt.saving.task import (
    NONE_HERE,
    PARTS,
    UNCHANGED,
    Attempt,
    JointReceived,
    SaveReport,
    SaveTask,
    gather_joint_parts,
    header_of,
    refuse_other_names,
    write_part,
)
from ckpt.telemetry.record import RankReport, SaveTotals, log_saved, totals_of, write_telemetry
from ckpt.world.base import collectively, from_coordinator, joined, split
from storage import KeyExistsError, Store

logger = logging.getLogger(__name__)


TRIES = 3  # of a save that refers to other checkpoints, each time that one of them is retired


def publish(
    task: SaveTask, modules: Callable[[], Sequence[str]], write: Callable[[Attempt], Part]
) -> SaveReport:
    """Agree on an attempt, let every rank `write` its share, and commit what all have written.

    `modules` returns the paths of the modules of the state. Raises like `save_task`. When a
    checkpoint that the attempt refers to is retired meanwhile, another attempt is made; the last
    one refers to nothing.
    """
    # A store is shared by all saves of the process: only the difference is this save's.
    task = replace(task, retries_before=task.store.retries)
    left = TRIES if task.options.dedup else 1
    try:
        while True:
            left -= 1
            with task.recorder.span("attempt"):
                # A commit without an answer is settled first: this attempt follows it or not.
                task.session.settle()
                attempt = _start(task, modules, may_refer=left > 0)
            try:
                return _publish(task, attempt, write)
            except ReferenceRetired as error:
                if not left:
                    raise
                # The files that this attempt refers to are gone or will be: it cannot be committed.
                logger.warning("step %d is written again: %s", task.step, error)
    except Exception:
        # Its sums may be of a state that was never committed.
        task.memory.plans.forget_part()
        raise


def _publish(task: SaveTask, attempt: Attempt, write: Callable[[Attempt], Part]) -> SaveReport:
    session, memory, header = task.session, task.memory, attempt.header

    try:
        with ExitStack() as waiting:

            def run() -> Part:
                try:
                    _refuse_other_task(attempt, task)
                    return write(attempt)
                finally:
                    # What follows in `collectively` is the time that this rank waits for slower
                    # ones.
                    waiting.enter_context(task.recorder.span("wait"))

            part = collectively(session.world, "write", run)
        with task.recorder.span("parts"):
            known, own = task.memory.structures, task.rank_report()
            parts = gather_joint_parts(part, own, session.world, known)
        report, committed = _commit(parts, task, header)
    except (Fenced, LogDiverged, OutcomeUnknown):
        # Delete nothing: the root belongs to another session now, or the commit may have happened.
        raise
    except Exception:
        memory.structures.forget()
        discard(session, header)
        raise
    except BaseException:  # Ctrl-C: end at once; the next save of this process sweeps the files
        memory.structures.forget()
        if session.session is not None:
            session.session.give_up(header.attempt, step=header.step)
        raise
    if attempt.base is not None:
        # Only after the commit: a reference to files of a failed attempt would dangle.
        memory.previous.remember(header, part, committed.holdings)
    if session.session is not None:
        _record(report, committed.reports, task)
    return report


def _record(report: SaveReport, reports: Sequence[RankReport], task: SaveTask) -> None:
    """On the coordinator: log a committed save and write its telemetry.

    The checkpoint exists already, so an error here is logged and does not fail the save.
    """
    history, session = task.memory.history, task.session.session
    assert session is not None
    log_saved(report.totals, report.path)
    if not task.options.telemetry:
        return
    try:
        history.recall(
            task.store,
            lambda: [one for one in session.state().live if one.attempt != report.attempt],
        )
        # This rank's own report is made anew: the gathered one is from before the commit.
        all_reports = [task.rank_report(), *reports[1:]]
        telemetry = history.describe(report.totals, all_reports, report.warnings)
    except Exception:
        logger.warning("step %d is saved, but its telemetry is not", task.step, exc_info=True)
        return
    write_telemetry(task.store, telemetry)
    history.saved(report.totals)


def _start(task: SaveTask, modules: Callable[[], Sequence[str]], *, may_refer: bool) -> Attempt:
    """The coordinator names the attempt; all ranks return the same one or raise the same error."""

    def made() -> bytes:
        if task.place is not None:  # one of several writers: the token has the attempt
            return joined(task.place.header.model_dump_json().encode(), b"")
        session = task.session.session
        assert session is not None, "the coordinator has it"
        header = header_of(task, session.new_attempt(), modules())
        if not task.options.dedup:
            return joined(header.model_dump_json().encode(), b"")
        base = NOTHING
        if may_refer:
            base = task.memory.previous.offer(session, task.options.full_every)
        # 0 says that this save refers to nothing, so later saves count from it.
        since_full = base.since_full if base.allowed else 0
        user = {**header.user, SINCE_FULL: str(since_full)}
        # A reader that knows no references must refuse the checkpoint, not miss its bytes.
        required = (REFERENCES,) if base.allowed else ()
        header = header.model_copy(update={"user": user, "required": required})
        return joined(header.model_dump_json().encode(), base.encode())

    received = from_coordinator(task.session.world, "attempt", made)
    encoded_header, encoded_base = split(received)
    return Attempt(
        Header.model_validate_json(encoded_header),
        decode_base(encoded_base) if encoded_base else None,
    )


def _refuse_other_task(attempt: Attempt, task: SaveTask) -> None:
    """Raises InvalidState when this rank's arguments differ from those of rank 0, which count."""
    header, is_dedup = attempt.header, attempt.base is not None
    into = header.attempt if task.place is None else task.place.header.attempt
    problems = [
        f"{name}={passed} was passed where rank 0 passed {name}={agreed}; pass the same {name}"
        for name, passed, agreed in (
            ("step", task.step, header.step),
            ("dedup", task.options.dedup, is_dedup),
            ("into", into, header.attempt),
        )
        if passed != agreed
    ]
    if problems:
        raise InvalidState(problems)


def _unchanged(of_ranks: Iterable[Sequence[str]]) -> list[str]:
    """A warning when the save before had the same weights: the state may not be the trained one.

    `of_ranks` are the warnings of each rank.
    """
    warnings = {text for of_rank in of_ranks for text in (of_rank or ("",))}
    # Ranks without trainable tensors have no vote; at least one rank must have unchanged ones.
    if UNCHANGED not in warnings or not warnings <= {UNCHANGED, NONE_HERE}:
        return []
    return [
        "no trainable tensor has changed since the save before: is the saved state the one that is "
        "trained?"
    ]


class Committed(NamedTuple):
    """The outcome of a commit: `answer` is for all ranks, the rest for the coordinator alone."""

    answer: Mapping[str, Any] = {}
    holdings: Holdings | None = None  # of a save with `dedup`
    reports: Sequence[RankReport] = ()


def _commit(
    received_of: Callable[[], JointReceived | None], task: SaveTask, header: Header
) -> tuple[SaveReport, Committed]:
    """The coordinator checks that the parts are one whole checkpoint and commits it.

    Raises InvalidState and ReferenceRetired on all ranks.
    """
    ranked, store = task.session, task.store

    def run() -> Committed:
        # On all ranks: any of them may have failed to merge the parts of those below it.
        received = received_of()
        return _commit_received(received, task, header) if received else Committed()

    # On the coordinator `_commit_received` records this phase; on the other ranks it is the wait.
    with task.recorder.span("commit") if ranked.world.rank else nullcontext():
        committed = informed(ranked, run, f"step {header.step} ({header.attempt})")
    answer = committed.answer
    if "problems" in answer:
        raise InvalidState(answer["problems"])
    # As data, not as an error of one rank, so that all ranks raise the very class that `publish`
    # waits for.
    if "retired" in answer:
        raise ReferenceRetired(answer["retired"])
    for warning in () if ranked.world.rank else answer["warnings"]:
        logger.warning("step %d: %s", header.step, warning)
    totals = SaveTotals.model_construct(**answer["totals"])
    report = SaveReport(
        step=header.step,
        attempt=header.attempt,
        path=f"{store.url}/{step_prefix(header.step, header.attempt)}".rstrip("/"),
        nbytes=totals.nbytes,
        warnings=tuple(answer["warnings"]),
        totals=totals,
        nbytes_referenced=totals.nbytes_referenced,
        spans=task.recorder.spans(),
        counters={**task.recorder.counters(), "retries": task.retries},
    )
    return report, committed


def informed(ranked: RankedSession, run: Callable[[], Committed], which: str) -> Committed:
    """`run` on all ranks, which commits on the coordinator; then all have the coordinator's answer.

    A rank may be lost meanwhile. The coordinator knows the outcome all the same, and returns or
    raises it. Any other rank raises RankFailedInCommit unless it has learned the answer before.
    """
    # What `collectively` raises does not tell this rank's outcome from that of another.
    own: list[Committed | Exception] = []

    def noted() -> Committed:
        try:
            outcome = run()
        except Exception as error:
            own.append(error)
            raise
        own.append(outcome)
        return outcome

    world = ranked.world
    try:
        committed = collectively(world, "commit", noted)
        message = None if world.rank else json.dumps(committed.answer).encode()
        return committed._replace(answer=json.loads(world.broadcast("report", message)))
    except RankFailed as failure:
        if world.failure is None:
            raise  # a rank has reported an error, and all raise it
        if failure.phase == PARTS:
            raise  # the coordinator lacks the part of a rank, so it cannot have committed
        if world.rank:
            raise RankFailedInCommit(
                f"{which}: a rank was lost before this rank has learned whether it is committed; "
                f"the log has it or not, and the next restore finds it if so: {failure}",
                rank=failure.rank,
                phase=failure.phase,
            ) from failure
        (outcome,) = own
        if isinstance(outcome, CheckpointError):
            raise outcome from failure
        if isinstance(outcome, Exception):
            raise
        logger.warning("%s: the other ranks may not have learned the outcome: %s", which, failure)
        return outcome


def _commit_received(received: JointReceived, task: SaveTask, header: Header) -> Committed:
    rest = received.rest
    failures, drifted = received.all.regions.differences(rest)
    # All problems at once: each try would cost the writing of a whole state.
    problems = differing_values(rest) + failures
    problems += drifted if task.options.replicas == "strict" else []
    if problems:
        return Committed({"problems": problems})
    warnings = [
        *task.memory.differing,
        *drifted,
        *_unchanged([json.loads(group.data)[1] for group in rest.texts]),
    ]
    with task.recorder.span("manifest"):
        name = MANIFEST_NAME
        if task.place is not None:
            name = PART_PREFIX + task.place.writer
            header = header.model_copy(update={"world_size": task.place.ranks})
        table, own_nbytes = received.all.table, int(rest.own.nbytes.sum())
        encoded, others = table.manifest(header, rest), table.referenced
        commit = _create_manifest(task.store, header, encoded, own_nbytes, others, name=name)
    commit = commit._replace(metric=task.options.metric, in_line=task.options.in_line)
    referenced = sum(others.values())
    totals = totals_of(
        received.reports,
        header.step,
        header.attempt,
        nbytes=commit.nbytes,
        now_unix=time.time(),
        nbytes_referenced=referenced,
        warnings=len(warnings),
    )
    with task.recorder.span("commit"):
        try:
            if task.session.session is not None:
                task.session.session.commit(commit)
        except ReferenceRetired as error:
            return Committed({"retired": str(error)})
    # From here on the checkpoint exists, or this part of it, so nothing may fail any more.
    answer = {"warnings": warnings, "totals": totals.ended(time.time()).model_dump()}
    held = {header.attempt: table.nbytes - referenced, **others}
    return Committed(answer, Holdings(held, own_nbytes), received.reports)


def store_manifest(store: Store, manifest: Manifest) -> Commit:
    """Create the MANIFEST of an attempt in its root, durable on return; returns its commit."""
    encoded = Encoded(manifest.data, manifest_digest(manifest.data))
    referenced = manifest.nbytes_referenced()
    return _create_manifest(store, manifest.header, encoded, manifest.own_nbytes, referenced)


def _create_manifest(
    store: Store,
    header: Header,
    encoded: Encoded,
    own_nbytes: int,
    referenced: Mapping[str, int],
    *,
    name: str = MANIFEST_NAME,
) -> Commit:
    data, digest = encoded
    key = step_prefix(header.step, header.attempt) + name
    # What a delta goes from is referred to like a file: nothing retires it under the delta.
    base = (header.publication or ())[:1] if DELTA in header.required else ()
    # Not `put_if_absent`, which leaves a lost answer to its caller: the end of `create` is repeated
    # until its outcome is known.
    try:
        with store.create(key, len(data), part_nbytes=len(data)) as writer:
            writer.write_part(0, [memoryview(data)])
    except KeyExistsError:
        # A `ckpt salvage` that ran meanwhile found the data files complete and no MANIFEST.
        if store.get_bounded(key, len(data)) != data:
            raise
        store.sync([key])
    return Commit(
        attempt=header.attempt,
        step=header.step,
        manifest_nbytes=len(data),
        manifest_digest=digest,
        references=tuple(sorted({*referenced, *base})),
        nbytes=own_nbytes + len(data),
    )


def discard(session: RankedSession, header: Header) -> None:
    """Remove what a failed save left, so that a full disk has room again."""
    if session.session is None:
        return
    try:
        session.session.discard(header.attempt, step=header.step)
    except NotRetired:
        logger.warning(
            "step %d (%s) is committed all the same: the failure came after the commit",
            header.step,
            header.attempt,
        )
    except Exception as error:
        # Do not raise: the caller must see the failure of the save itself. These files do no harm,
        # and the next session sweeps them.
        logger.warning(
            "the files of the failed attempt %s could not be deleted yet: %s", header.attempt, error
        )


def save_task(state: Any, task: SaveTask) -> SaveReport:
    """Write and commit `state` from live memory; collective over the session's world.

    Raises the same error on all ranks, and then this step was not committed: InvalidState, Fenced,
    RankFailed. OutcomeUnknown leaves that open, and the next save settles it. A rank that is lost
    while the others are informed of the commit leaves it open for those that have not learned the
    outcome: they raise RankFailedInCommit, and the coordinator returns. With a `place`, the part of
    one of several writers is stored there, and nothing is committed.
    """
    # Names may change again while the ranks exchange them. A state that changes in every try is
    # being changed by another thread.
    for _ in range(TRIES - 1):
        try:
            return _save_once(state, task)
        except NamesChanged:
            task.memory.learn(None)
        except ReplicasDrifted:
            pass  # now the first replica is taken
    return _save_once(state, task)


def flattened(state: Any, task: SaveTask) -> Contents | Exception:
    """What is to be saved, or why it cannot be. Collective where the ranks have not exchanged
    what they hold: they do so here.
    """
    memory, world = task.memory, task.session.world
    contents = _flattened(state, task)
    if world.size == 1 or memory.holders is not None:
        return contents
    known = None if isinstance(contents, Exception) else contents
    try:
        holders = report_names(world, known, task.ranks)
    except InvalidState as error:
        return error  # raised on all ranks, so all get it back here
    memory.learn(holders)
    if holders is not None and (holders.tensors or holders.copies):
        contents = _flattened(state, task)
    return contents


def report_names_of_copied(contents: Contents, task: SaveTask) -> None:
    """Let the ranks exchange what they hold, after the state was copied. Collective.

    Raises InvalidState on all ranks when one has not copied what is its share then.
    """
    before, world = task.ranks, task.session.world
    task.memory.learn(report_names(world, contents, before))
    after = task.ranks
    moved = [
        tensor.fqn
        for tensor in inventory_of(contents, before).tensors
        if (tensor.is_plain and before.held.get(tensor.fqn) != after.held.get(tensor.fqn))
        or before.copies.get(tensor.fqn) != after.copies.get(tensor.fqn)
    ]
    problems = [
        f"{fqn}: other ranks hold it now than at the last save, and were found out only after the "
        "state was copied in the background; save again, which works now"
        for fqn in moved
    ]
    world.agree("holders", InvalidState(problems) if problems else None)


def _flattened(state: Any, task: SaveTask) -> Contents | Exception:
    try:
        with task.recorder.span("flatten"):
            return task.contents(state, task.ranks, task.memory.plans)
    except Exception as error:
        # Raised in `write`, where all ranks agree: the others wait there for this rank.
        return error


def _save_once(state: Any, task: SaveTask) -> SaveReport:
    contents = flattened(state, task)
    digests = np.zeros(0, dtype=np.uint32)
    # A rank alone has nobody to compare with.
    if task.session.world.size > 1:
        contents, digests = compared_live(task, contents)

    def write(attempt: Attempt) -> Part:
        if isinstance(contents, Exception):
            raise contents
        refuse_other_names(contents, task)
        return write_sources(contents.plan.sources, contents, attempt, task, digests)

    modules: Sequence[str] = ()
    if not isinstance(contents, Exception):  # of all ranks, as far as they know them
        holders = task.memory.holders
        modules = (holders.modules if holders else ()) or contents.modules
    return publish(task, lambda: modules, write)


def write_sources(
    sources: Sequence[Source],
    contents: Contents,
    attempt: Attempt,
    task: SaveTask,
    digests: Uint32s,
) -> Part:
    """Write this rank's `sources`, or refer to them; durable when this returns. `digests` are as
    for `write_part`.
    """
    header, recorder, path = attempt.header, task.recorder, task.options.path
    referred: Referred | None = None
    entries = contents.plan.entries(path.file_nbytes_max)
    if attempt.base is not None:
        with recorder.span("digest", sum(source.chunk.nbytes for source in sources)):
            referred = refer(sources, attempt.base, task.memory.previous, task.store)
        sources = referred.sources
        entries = entries_of(sources, path.file_nbytes_max)
    # With `dedup` the sources differ at each save, so plans kept for the whole state do not fit.
    memo = contents.plan.of_chunks if attempt.base is None else Memo()

    def write(files: list[DataFile]) -> list[FileColumns]:
        starts = tuple([len(file.header) for file in files])
        least = task.store.part_nbytes_min
        share = path.cached_share_max
        key = ("parts", path.part_nbytes, path.file_nbytes_max, share, least, starts)
        plans = memo.once(key, lambda: plan_files(entries, starts, path, least))
        prefix = step_prefix(header.step, header.attempt)
        return write_files(task.store, prefix, sources, files=files, path=path, plans=plans)

    with recorder.span("write", sum(file.nbytes for file in entries)):
        return write_part(entries, contents, header, task, digests, write, referred)
