"""A save in the background from a copy that another save of the same step has made.

A durable save at the step of a near save copies nothing: it sends the bytes of the near save's
files, under headers of its own. What it commits is what it would have committed without: the same
names, the same places, the same bytes. Each rank decides alone whether the copy serves it, and
makes one of its own where it does not, for that cannot be seen in the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.commit.names import step_prefix
from ckpt.format.part import Part
from ckpt.format.rank_files import rank_files
from ckpt.layout.buffers import address_of, bytes_at
from ckpt.layout.memory import tensor_over
from ckpt.saving.image import FilePlan, placed_files, write_copied
from ckpt.saving.lending import LentCopy
from ckpt.saving.plan import Contents, SavePlan, contents_of
from ckpt.saving.replicas import ReplicaSums, compares_all
from ckpt.saving.save import write_sources
from ckpt.saving.staging import Snapshot, Staged, StageOptions, planned_files, stage
from ckpt.saving.step_gate import Gate
from ckpt.saving.task import Attempt, SaveTask, Written, part_of, rank_contents, texts_of
from ckpt.saving.write import Source, Staging


@dataclass
class BorrowedState:
    """A state that another save copies; `Staged` for whoever runs the save.

    Its gate holds nothing back: the other save's does.
    """

    task: SaveTask
    contents: Contents
    files: tuple[FilePlan, ...]
    lent: LentCopy
    gate: Gate = field(default_factory=lambda: Gate(frozenset(), frozenset()))
    is_blocking: bool = False

    @property
    def digests(self) -> npt.NDArray[np.uint32]:
        """Those of `plan.compared`, once the state is copied."""
        return self.lent.digests

    @property
    def replicas(self) -> ReplicaSums:
        """What the other save compares."""
        return self.lent.replicas

    def copy(self) -> None:
        """Returns when the other save has copied the state. Raises its error."""
        with self.task.recorder.span("stage", 0):
            self.lent.wait()
        self.gate.open()

    def write(self, attempt: Attempt, give_up: Callable[[], None]) -> Part:
        """Write the files of this rank. Calls `give_up` often. May be called again."""
        task, header = self.task, attempt.header
        nbytes = sum(file.entries.nbytes for file in self.files)
        task.recorder.count("near_bytes", nbytes)
        if attempt.base is not None:
            give_up()
            written = write_sources(self._sources(), self.contents, attempt, task)
            return part_of(self.contents, written, self.digests, task)
        with task.recorder.span("write", nbytes):
            texts = texts_of(self.contents, task)
            entries = [file.entries for file in self.files]
            files = rank_files(entries, rank_contents(self.contents, texts, header, task))
            parts = write_copied(
                task.store,
                step_prefix(header.step, header.attempt),
                self.lent.tensor_bytes(),
                files=placed_files(self.files, files),
                path=task.options.path,
                part_nbytes=self.files[0].part_nbytes,
                writers=max(1, task.options.path.writers),
                between_parts=give_up,
            )
        return part_of(self.contents, Written(parts, texts), self.digests, task)

    def _sources(self) -> list[Source]:
        """The sources, each where it was copied to, in files that are one range of memory each."""
        moved = []
        for file, runs in zip(self.lent.files, self.lent.tensor_bytes(), strict=True):
            address = address_of(runs[0]) if runs else 0
            for source in self.contents.plan.sources[file.first :][: len(file.entries.chunks)]:
                nbytes, dtype = source.chunk.nbytes, source.view.dtype
                view = tensor_over(bytes_at(address, nbytes), dtype, (nbytes // dtype.itemsize,))
                moved.append(Source(source.chunk, view, 0, address))
                address += nbytes
        return moved

    def release(self) -> None:
        """Let go of the copy."""
        self.gate.open()
        self.lent.end()


def stage_or_share(
    state: Any,
    task: SaveTask,
    how: Snapshot | LentCopy,
    host_bytes_max: int | None,
    staging: Staging,
) -> Staged | BorrowedState:
    """Stage `state`, or use the copy that another save makes of it, if `how` is one and serves.

    Raises like `stage`.
    """
    if not isinstance(how, LentCopy):
        return stage(state, task, StageOptions(how, host_bytes_max), staging)
    try:
        if how.is_one_range or not task.options.dedup:
            with task.recorder.span("flatten"):
                contents = contents_of(state, task.ranks, task.memory.plans)
                files = planned_files(contents, task)
                are_alike = [file.first for file in files] == [file.first for file in how.files]
                are_alike = are_alike and compares_all(task) == how.replicas.is_whole
                if are_alike and _is_same(contents.plan, how.contents.plan):
                    task.recorder.count("blocking_bytes", 0)
                    return BorrowedState(task, contents, files, how)
        own = stage(state, task, StageOptions(how.snapshot, host_bytes_max), staging)
    except BaseException:
        how.end()
        raise
    how.end()
    return own


def _is_same(own: SavePlan, other: SavePlan) -> bool:
    """Whether two plans, of the same state, write the same chunks and compare the same pieces."""
    # Thousands of chunks are compared once: the results of a plan live as long as it holds.
    if own.of_memory.last("copied by") is other.of_memory:
        return True
    is_same = [one.chunk for one in own.sources] == [one.chunk for one in other.sources] and [
        (holding.must_agree, piece) for holding, piece in own.compared
    ] == [(holding.must_agree, piece) for holding, piece in other.compared]
    if is_same:
        own.of_memory.keep("copied by", other.of_memory)
    return is_same
