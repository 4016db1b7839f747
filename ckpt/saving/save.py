"""The steps of a blocking save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt.commit.names import step_prefix
from ckpt.commit.session import RankedSession
from ckpt.errors import InvalidState, NamesChanged
from ckpt.format.part import Part
from ckpt.format.rank_files import rank_files
from ckpt.saving.dedup import Referred, refer
from ckpt.saving.holders import inventory_of, report_names
from ckpt.saving.image import plan_files, write_files
from ckpt.saving.plan import Contents, Memo, contents_of
from ckpt.saving.publish import TRIES, publish
from ckpt.saving.replica_check import (
    ReplicasDrifted,
    difference_of,
    differing_replicas,
    digests_of,
    is_shared,
    replica_sums,
)
from ckpt.saving.task import (
    Attempt,
    PartMemory,
    SaveOptions,
    SaveReport,
    SaveTask,
    Written,
    modules_of,
    part_of,
    rank_contents,
    refuse_other_names,
    texts_of,
)
from ckpt.saving.write import Source, entries_of
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
    RankFailed. OutcomeUnknown leaves that open, and the next save settles it. A rank that is lost
    while the others are informed of the commit leaves it open for those that have not learned the
    outcome: they raise RankFailedInCommit, and the coordinator returns.
    """
    task = SaveTask(session, store, memory, step, options)
    # Names may change once more while the ranks tell them; a state that changes in every try is
    # changed by another thread.
    for _ in range(TRIES - 1):
        try:
            return _save_once(state, task)
        except NamesChanged:
            memory.learn(None)
        except ReplicasDrifted:
            pass  # now the first replica is taken
    return _save_once(state, task)


def flattened(state: Any, task: SaveTask) -> Contents | Exception:
    """What is to be saved, or why it cannot be. Collective where the ranks have not told each other
    what they hold, which they do here then.
    """
    memory, world = task.memory, task.session.world
    contents = _flattened(state, task)
    if world.size == 1 or memory.holders is not None:
        return contents
    inventory, are_shared = None, False
    if not isinstance(contents, Exception):
        inventory = inventory_of(contents, task.ranks)
        are_shared = any(is_shared(*one) for one in contents.plan.compared)
    try:
        holders = report_names(world, inventory, are_shared=are_shared)
    except InvalidState as error:
        return error  # raised on all ranks, so all get it back here
    memory.learn(holders)
    if holders is not None and (holders.tensors or holders.copies):
        contents = _flattened(state, task)
    return contents


def report_names_of_copied(contents: Contents, task: SaveTask) -> None:
    """Let the ranks tell each other what they hold, after the state was copied. Collective.

    Raises InvalidState on all ranks when one has not copied what is its share then.
    """
    before, world = task.ranks, task.session.world
    inventory = inventory_of(contents, task.ranks)
    are_shared = any(is_shared(*one) for one in contents.plan.compared)
    holders = report_names(world, inventory, are_shared=are_shared)
    task.memory.learn(holders)
    after = task.ranks
    moved = [
        tensor.fqn
        for tensor in inventory.tensors
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
            return contents_of(state, task.ranks, task.memory.plans)
    except Exception as error:
        # Raised in `write`, where all ranks agree: the others wait there for this rank.
        return error


def _save_once(state: Any, task: SaveTask) -> SaveReport:
    contents = flattened(state, task)
    digests = np.zeros(0, dtype=np.uint32)
    sums = None
    if not isinstance(contents, Exception):
        try:
            digests = digests_of(contents.plan.compared)
            sums = replica_sums(contents.plan, task, copied=False)
            sums.compute()
        except Exception as error:
            contents = error
    if isinstance(contents, Exception):
        difference_of(task, None, digests)  # the other ranks may wait for this one
    else:
        contents = difference_of(task, contents, digests) or contents
    drifted = differing_replicas(task, None if isinstance(contents, Exception) else contents, sums)
    if isinstance(drifted, ReplicasDrifted):
        raise drifted
    contents = drifted or contents

    def write(attempt: Attempt) -> Part:
        if isinstance(contents, Exception):
            raise contents
        refuse_other_names(contents, task)
        written = write_sources(contents.plan.sources, contents, attempt, task)
        return part_of(contents, written, digests, task)

    modules = () if isinstance(contents, Exception) else modules_of(contents, task)
    return publish(task, lambda: modules, write)


def write_sources(
    sources: Sequence[Source], contents: Contents, attempt: Attempt, task: SaveTask
) -> Written:
    """Write this rank's `sources`, or refer to them; durable when this returns."""
    header, recorder, path = attempt.header, task.recorder, task.options.path
    referred: Referred | None = None
    entries = contents.plan.entries(path.file_nbytes_max, header.block_bytes)
    if attempt.base is not None:
        with recorder.span("digest", sum(source.chunk.nbytes for source in sources)):
            previous = task.memory.previous
            referred = refer(sources, attempt.base, previous, header=header, store=task.store)
        sources = referred.sources
        entries = entries_of(sources, path.file_nbytes_max, header.block_bytes)
    with recorder.span("write", sum(file.nbytes for file in entries)):
        texts = texts_of(contents, task)
        files = rank_files(entries, rank_contents(contents, texts, header, task, referred))
        starts = tuple(len(file.layout.header) for file in files)
        least = task.store.part_nbytes_min
        key = ("parts", path.part_nbytes, path.file_nbytes_max, least, starts)
        memo = contents.plan.of_chunks if attempt.base is None else Memo()
        written = write_files(
            task.store,
            step_prefix(header.step, header.attempt),
            sources,
            files=files,
            path=path,
            plans=memo.once(key, lambda: plan_files(entries, starts, path, least)),
        )
    return Written(written, texts, referred.division.referenced if referred else ())
