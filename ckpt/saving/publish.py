"""Save a state as one checkpoint: every rank writes its share, then one write makes it exist.

flatten -> assign -> write data files -> (agree) -> parts to the lead -> manifest -> commit
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt.commit.names import MANIFEST_NAME, step_prefix
from ckpt.commit.ranked import RankedSession
from ckpt.commit.records import LiveEntry, manifest_digest
from ckpt.commit.session import ReferenceRetired, Session
from ckpt.commit.sweep import NotRetired
from ckpt.commit.writer import Commit
from ckpt.errors import Fenced, InvalidState, LogDiverged, OutcomeUnknown, SaveDropped
from ckpt.format.datafile import BLOCK_BYTES
from ckpt.format.manifest import Header, Manifest
from ckpt.format.manifest_codec import encode_manifest
from ckpt.format.merging import build_manifest, replica_differences, value_differences
from ckpt.format.part import Part, assemble
from ckpt.format.references import REFERENCES
from ckpt.saving.base import NOTHING, decode_base
from ckpt.saving.report import SaveReport
from ckpt.saving.task import NONE_HERE, UNCHANGED, Attempt, PartMemory, SaveTask, header_of
from ckpt.telemetry.history import CommittedSave, RankReport, log_saved, totals_of, write_telemetry
from ckpt.telemetry.record import SaveTotals
from ckpt.world.base import collectively

logger = logging.getLogger(__name__)


TRIES = 3  # of a save that refers to other checkpoints, each time that one of them is retired


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
    except (Fenced, LogDiverged, OutcomeUnknown):
        raise  # nothing is deleted in a place that is not ours, or may not be
    except Exception:
        memory.sent = b""
        _discard(session, header)
        raise
    except BaseException:  # Ctrl-C, which nobody should have to wait for
        memory.sent = b""
        if session.session is not None:
            session.session.give_up(header.attempt, step=header.step)
        raise
    if attempt.base is not None:
        memory.previous.remember(header, part, committed.manifest)
    if session.session is not None:
        _tell(report, committed.told, task)
    return report


def _tell(report: SaveReport, told: Sequence[RankReport], task: SaveTask) -> None:
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
    received = task.session.world.broadcast("attempt", offered)
    if not received:
        task.session.world.agree("attempt", error)
    told, based = _split(received)
    return Attempt(Header.model_validate_json(told), decode_base(based) if based else None)


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
    told: list[RankReport]


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
    received = world.gather_to_coordinator("parts", _joined([task.told().encode(), payload]))
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
        told.append(RankReport.decode(telling))
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
    told: Sequence[RankReport] = ()


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
        report = json.loads(session.world.broadcast("report", told))
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
    made = CommittedSave(header.step, header.attempt, nbytes, sum(held.values()), warnings)
    totals = totals_of(made, told, now_unix=time.time())
    try:
        with task.recorder.span("commit"):
            lead.commit(commit)
            lead.confirm(commit)
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
