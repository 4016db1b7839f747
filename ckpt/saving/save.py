"""The steps of a blocking save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt.commit.names import step_prefix
from ckpt.commit.ranked import RankedSession
from ckpt.format.part import Part
from ckpt.format.rank_files import rank_files
from ckpt.saving.base import everything, refer
from ckpt.saving.compared import digests_of
from ckpt.saving.plan import Contents, contents_of
from ckpt.saving.publish import publish
from ckpt.saving.report import SaveOptions, SaveReport
from ckpt.saving.task import (
    Attempt,
    PartMemory,
    SaveTask,
    Written,
    part_of,
    rank_contents,
    texts_of,
)
from ckpt.saving.write import Source, entries_of, write_files
from storage import Store


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
    for a rank that dies while the commit is reported to the others.
    """
    task = SaveTask(session, store, memory, step, options)
    contents: Contents | Exception
    try:
        with task.recorder.span("flatten"):
            contents = contents_of(state, task.ranks, memory.plans)
    except Exception as error:
        # Raised in `write`, where all ranks agree: the others wait there for this rank.
        contents = error

    def write(attempt: Attempt) -> Part:
        if isinstance(contents, Exception):
            raise contents
        written = write_sources(contents.plan.sources, contents, attempt, task)
        return part_of(contents, written, digests_of(contents.plan.compared), task)

    modules = () if isinstance(contents, Exception) else contents.modules
    return publish(task, lambda: modules, write)


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
            referred = refer(sources, attempt.base, previous, header=header, store=task.store)
        entries = entries_of(referred.sources, path.file_nbytes_max, header.block_bytes)
    with recorder.span("write", sum(file.nbytes for file in entries)):
        texts = texts_of(contents, task)
        files = write_files(
            task.store,
            step_prefix(header.step, header.attempt),
            referred.sources,
            files=rank_files(entries, rank_contents(contents, texts, header, task, referred)),
            path=path,
        )
    return Written(files, texts, referred.division.referenced)
