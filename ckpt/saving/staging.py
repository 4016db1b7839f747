"""What a save in the background copies before its call returns, and what after it.

state -> contents -> sources -> image: copied now, or copied before the next step

Only a step of an optimizer changes trainable parameters and the tensors of their shape in the
optimizer's state. They are copied while the next forward and backward run, and a step waits until
that is done. Everything else may change at any time, so it is copied at once: buffers, frozen
parameters, copies of weights, counts and learning rates, values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ckpt.commit.names import attempt_name, step_prefix
from ckpt.errors import CheckpointError
from ckpt.format.checksum import Uint32s
from ckpt.format.object_parts import DataFile
from ckpt.format.part import FileColumns, Part, PartTexts
from ckpt.layout.kind import Kind
from ckpt.layout.memory import SideStreams, devices_of, storage_of
from ckpt.layout.plain import Ranks, times_changed
from ckpt.layout.tensor import local_tensor
from ckpt.saving.image import (
    HEADER_SLACK_NBYTES,
    CopyOrder,
    FilePlan,
    Image,
    Staging,
    WritePath,
    copied_parts,
    copy_order,
    part_count,
    placed_files,
    plan_files,
)
from ckpt.saving.plan import Contents, PlanMemory, SavePlan, Source, contents_of, copy_elements
from ckpt.saving.replica_check import ReplicaSums, compares_all, digests_of, replica_sums
from ckpt.saving.save import write_sources
from ckpt.saving.step_gate import Gate, seen_since, steps
from ckpt.saving.task import Attempt, SaveTask, files_of, header_of, write_part
from ckpt.state.types import FlatState
from storage.ranges import address_of, aligned_buffer, copy_bytes

logger = logging.getLogger(__name__)

MIB = 1 << 20
# Tensors that are copied in the call stop training for that long: 64 MiB take some 10 ms.
BLOCKING_NBYTES_MAX = 64 * MIB

WHOLE_FILE = 1 << 62  # bytes of a part: all of a file is one

Snapshot = Literal["step", "now"]


class Changes(NamedTuple):
    """What of a state changes in steps of optimizers alone: memory, and the parameters' ids.

    `unowned` are trainable parameters that no optimizer is known to change, by name.
    """

    storages: frozenset[int]
    parameters: frozenset[int]
    unowned: tuple[str, ...]


def changed_by_steps(flat: FlatState, optimizers: Iterable[torch.optim.Optimizer]) -> Changes:
    """What of `flat` only steps of `optimizers` change. They may be in the state or not."""
    optimizers = list(optimizers)
    known = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    storages: set[int] = set()
    parameters: set[int] = set()
    unowned: dict[str, None] = {}
    for key, owned in flat.owned_by_param.items():
        if key in known and owned.param.requires_grad:
            parameters.add(key)
            storages.add(storage_of(owned.local))
    for owned in flat.owned_by_param.values():
        if owned.param.requires_grad and storage_of(owned.local) not in storages:
            unowned.update((piece.fqn, None) for view in owned.views for piece in view.pieces)
    # Their state is looked for where something else than their parameters is saved.
    for optimizer in optimizers if len(flat.holdings) > len(parameters) else ():
        for parameter, state in optimizer.state.items():
            if id(parameter) in parameters:
                shape = flat.owned_by_param[id(parameter)].local.shape
                for content in state.values():
                    if isinstance(content, torch.Tensor) and content.ndim:
                        local = local_tensor(content)
                        # Moments have the parameter's shape. What has another may change elsewhere.
                        if local.shape == shape:
                            storages.add(storage_of(local))
    storages.discard(0)  # the address of tensors without memory
    return Changes(frozenset(storages), frozenset(parameters), tuple(unowned))


COPY_SECONDS_MAX = 600.0  # no rank is waited for meanwhile, only memory is copied: a guess


@dataclass(eq=False)
class LentCopy:
    """The copy of one save, lent to another save of the same state on this rank, which reads it.

    Each makes headers and checksums of its own, and the memory is used again when both are done
    with it. The borrower calls `end`, once or more. `snapshot` is how it would make its own copy.
    """

    staged: Staged
    snapshot: Snapshot
    _is_over: bool = False

    def wait(self) -> None:
        """Returns when all is copied. Raises the error that has prevented that."""
        if wait([self.staged.copied], COPY_SECONDS_MAX).not_done:
            raise CheckpointError(f"the near save has copied nothing for {COPY_SECONDS_MAX:.0f} s")
        self.staged.copied.result()

    def end(self) -> None:
        """The borrower needs the copy no more."""
        if not self._is_over:
            self._is_over = True
            self.staged.image.release()


@dataclass
class Staged:
    """A state that is partly copied; the rest is copied before the next step of an optimizer.

    With `is_blocking`, the call may return only when everything is copied. `files` are those that
    this save writes. With a `lent` copy, which another save makes, this one only waits for it: a
    durable save at the step of a near save sends the bytes of the near save's files. It commits
    what it would have committed without.
    """

    task: SaveTask
    contents: Contents
    files: Sequence[FilePlan]
    image: Image
    gate: Gate
    digests: Uint32s
    replicas: ReplicaSums
    compared_later: Sequence[int] = ()
    is_blocking: bool = False
    nbytes_later: int = 0
    versions: Sequence[tuple[Source, int | None]] = ()
    side: memoryview = field(default_factory=lambda: memoryview(b""))
    # Made where the training runs: another thread's current stream knows nothing of it.
    reading: SideStreams = field(default_factory=lambda: SideStreams(()))
    lent: LentCopy | None = None
    copied: Future[None] = field(default_factory=Future)

    def lend(self, snapshot: Snapshot) -> LentCopy:
        """Another save of the same state may use this copy, of which all fits into memory."""
        self.image.lend()
        return LentCopy(self, snapshot)

    def copy(self) -> None:
        """Copy the rest, as far as there is room for it.

        Raises CheckpointError when something else than an optimizer has changed it meanwhile.
        """
        try:
            with self.task.recorder.span("stage", self.nbytes_later):
                if self.lent is not None:
                    self.lent.wait()
                else:
                    # On the side stream, behind what the training had queued when the save began.
                    with self.reading.copying():
                        _digest(self.digests, self.contents, self.compared_later)
                        self.replicas.compute()
                    self.image.copy()
            self._let_steps_pass()
        except BaseException as error:
            # A borrower waits for this future and must learn of it.
            self.copied.set_exception(error)
            raise
        self.copied.set_result(None)

    def write(self, attempt: Attempt, give_up: Callable[[], None]) -> Part:
        """Write the files of this rank and copy the rest on the way. Calls `give_up` often.

        A save with `dedup` is copied as a whole before, and may be written several times.
        """
        task, header, path = self.task, attempt.header, self.task.options.path
        nbytes = sum(file.entries.nbytes for file in self.files)
        if self.lent is not None:
            task.recorder.count("near_bytes", nbytes)
        if attempt.base is not None:
            give_up()
            sources = self.image.staged()
            part = write_sources(sources, self.contents, attempt, task, self.digests)
        else:

            def between_parts() -> None:
                self._let_steps_pass()
                give_up()

            def write(planned: list[DataFile]) -> list[FileColumns]:
                files, part_nbytes = placed_files(self.files, planned), self.files[0].part_nbytes
                if self.lent is None:
                    parts = self.image.parts(files, between_parts)
                else:
                    runs = self.image.tensor_bytes()
                    parts = [copied_parts(of_file, part_nbytes, between_parts) for of_file in runs]
                prefix, writers = step_prefix(header.step, header.attempt), max(1, path.writers)
                sizes = {"part_nbytes": part_nbytes, "writers": writers}
                return path.write(task.store, prefix, files, parts, **sizes)

            with task.recorder.span("write", nbytes):
                entries = [file.entries for file in self.files]
                part = write_part(entries, self.contents, header, task, self.digests, write)
        if self.lent is None:
            task.recorder.count("step_wait_seconds", self.gate.waited_seconds)
        return part

    def _let_steps_pass(self) -> None:
        """Open the gate once all is copied. Raises CheckpointError when something has changed."""
        if self.gate.opened.is_set() or not self.image.is_whole:
            return
        changed = [one for one, times in self.versions if times_changed(one.view) != times]
        if changed:
            raise CheckpointError(
                f"step {self.task.step}: {changed[0].chunk.fqn} and {len(changed) - 1} other "
                "tensors were changed in place, not by a step of an optimizer, before they were "
                "copied, so this save is given up. Call wait_staged() before such a change, or "
                'save with snapshot="now"'
            )
        self.gate.open()

    def release(self) -> None:
        """Let steps pass and give all buffers back."""
        self.gate.open()
        if self.lent is not None:
            self.lent.end()
            return
        if not self.copied.done():
            error = CheckpointError("the near save has ended before it copied the state")
            self.copied.set_exception(error)
        self.image.release()
        self.side = memoryview(b"")  # a kept exception keeps its frames, and so this buffer


def stage(
    state: Any,
    task: SaveTask,
    staging: Staging,
    how: Snapshot | LentCopy = "step",
    host_bytes_max: int | None = None,
) -> Staged:
    """Copy what may change before the next step, and hold that step until the rest is copied; or
    use the copy that another save makes, if `how` is one and serves.

    Each rank decides that alone: it cannot be seen in the files. Raises InvalidState,
    LoadInterrupted, ValueError for a budget that is too small; then nothing is held.
    """
    if isinstance(how, LentCopy):
        shared: Staged | None = None
        try:
            shared = _shared(state, task, how)
        finally:
            # The lender keeps its memory until then, also for a borrower that copies by itself.
            if shared is None:
                how.end()
        if shared is not None:
            return shared
        how = how.snapshot
    steps.watch()
    with task.recorder.span("flatten"):
        contents = contents_of(state, task.ranks, task.memory.plans)
        files = planned_files(contents, task)
        split = _split(contents, files, how, seen_since(task.memory.steps_seen))
    _report(split, how, task)
    sources: Sequence[Source] = contents.plan.sources
    buffers_max, fits, is_aside = _room_for(files, split, host_bytes_max, task)
    if task.options.dedup:
        staging = task.memory.previous.staging  # for buffers of the size of files
    staging.keep(buffers_max)
    order, side = split.order, memoryview(b"")
    with task.recorder.span("stage", split.nbytes_now):
        if not fits:
            order = copy_order(files, sources, ())
        if is_aside:
            sources, side = _copied_aside(sources, split.now)
        image = Image(files, sources, staging, order=order, buffers_max=buffers_max)
        digests = np.zeros(len(contents.plan.compared), dtype=np.uint32)
        _digest(digests, contents, split.compared_now)
        replicas = replica_sums(contents.plan, task, copied=True)
    compared_later = [contents.plan.compared[index] for index in split.compared_later]
    read_later = [holding for holding, _ in (*compared_later, *contents.plan.replicated)]
    reading = SideStreams(devices_of(holding.local for holding in read_later))
    late = [contents.plan.sources[index] for index in split.later]
    versions = [(source, times_changed(source.view)) for source in late]
    gate = Gate(split.changes.storages, split.changes.parameters)
    try:
        steps.hold(gate)
        if fits and not order.later_nbytes and not split.compared_later:
            gate.open()
        return Staged(
            task,
            contents,
            files,
            image,
            gate,
            digests,
            replicas,
            split.compared_later,
            is_blocking=not (fits or is_aside),
            nbytes_later=order.later_nbytes,
            versions=versions,
            side=side,
            reading=reading,
        )
    except BaseException:  # Ctrl-C too: no step may wait for a copy that is never made
        gate.open()
        raise


def _digest(digests: Uint32s, contents: Contents, indices: Sequence[int]) -> None:
    """Fill in the digests of those of the compared pieces."""
    compared = contents.plan.compared
    digests[list(indices)] = digests_of([compared[index] for index in indices])


class _Split(NamedTuple):
    """Which sources of a state are copied `now` and which `later`, by index; and which of the
    compared pieces are read then.

    `others` are sources that are copied now and are no parameters, largest first.
    """

    changes: Changes
    now: tuple[int, ...]
    later: tuple[int, ...]
    nbytes_now: int
    others: tuple[Source, ...]
    order: CopyOrder
    compared_now: tuple[int, ...]
    compared_later: tuple[int, ...]


def _split(
    contents: Contents,
    files: Sequence[FilePlan],
    snapshot: Snapshot,
    optimizers: Sequence[torch.optim.Optimizer],
) -> _Split:
    """The split, computed once for a state and the `optimizers` that are known to wait."""
    # Without optimizers nothing is known to wait, so all is copied in the call.
    if snapshot == "now":
        optimizers = ()
    # Python may use an id again after an optimizer died, but its successor then increases
    # `steps.known`, so the key changes all the same.
    key = ("split", id(files), snapshot, frozenset(map(id, optimizers)), steps.known)

    def worked_out() -> _Split:
        changes = changed_by_steps(contents.flat, optimizers)
        plan = contents.plan
        now = [i for i, s in enumerate(plan.sources) if storage_of(s.view) not in changes.storages]
        later = sorted(set(range(len(plan.sources))).difference(now))
        sources = [plan.sources[index] for index in now]
        # As long as no optimizer was seen to step these parameters, the state of its optimizer
        # cannot be distinguished from tensors that no step changes: nobody is warned about it.
        usual = (Kind.PARAMETER, Kind.OPTIMIZER) if changes.unowned else (Kind.PARAMETER,)
        others = [source for source in sources if source.chunk.kind not in usual]
        waits = [storage_of(holding.local) in changes.storages for holding, _ in plan.compared]
        return _Split(
            changes,
            tuple(now),
            tuple(later),
            sum(source.chunk.nbytes for source in sources),
            tuple(sorted(others, key=lambda source: -source.chunk.nbytes)),
            copy_order(files, plan.sources, set(now)),
            tuple(index for index, waiting in enumerate(waits) if not waiting),
            tuple(index for index, waiting in enumerate(waits) if waiting),
        )

    return contents.plan.of_memory.once(key, worked_out)


def planned_files(contents: Contents, task: SaveTask) -> tuple[FilePlan, ...]:
    """Files and parts, before the attempt has its name: any name of an attempt is as long."""
    header = header_of(task, attempt_name(task.session.epoch, bytes(8)), contents.modules)
    path, least = task.options.path, task.store.part_nbytes_min
    if task.options.dedup:
        # Which chunks are written is known only when all are hashed, so parts cannot be laid out
        # as the files will have them; each file is staged as one part.
        path = replace(path, part_nbytes=WHOLE_FILE)
    entries = contents.plan.entries(path.file_nbytes_max)
    # The slack in headers covers what differs from save to save: digits of steps and seconds.
    key = ("files", path.part_nbytes, least, path.file_nbytes_max, len(str(header.user)))

    def planned() -> tuple[FilePlan, ...]:
        texts = PartTexts(contents.flat.aliases)
        files = files_of(entries, contents, texts, header, task)
        starts = [len(file.header) + HEADER_SLACK_NBYTES for file in files]
        return plan_files(entries, starts, path, least)

    return contents.plan.of_chunks.once(key, planned)


def _report(split: _Split, snapshot: Snapshot, task: SaveTask) -> None:
    """Log which tensors stop training: only what an optimizer changes can be copied later."""
    task.recorder.count("blocking_bytes", split.nbytes_now)
    if snapshot == "now":
        return
    unowned = split.changes.unowned
    if unowned:
        logger.info(
            "step %d: %d trainable parameters (%s, ...) are copied before async_save returns, as "
            'with snapshot="now": no optimizer was seen stepping them since the save before',
            task.step,
            len(unowned),
            unowned[0],
        )
    nbytes = sum([source.chunk.nbytes for source in split.others])
    if nbytes > BLOCKING_NBYTES_MAX:
        largest = [source.chunk for source in split.others[:5]]
        logger.warning(
            "step %d: %.0f MiB on this rank are copied before async_save returns, because they may "
            "change outside of optimizers: %s%s",
            task.step,
            nbytes / MIB,
            ", ".join(f"{chunk.fqn} ({chunk.nbytes / MIB:.1f} MiB)" for chunk in largest),
            ", ..." if len(split.others) > len(largest) else "",
        )


class BufferNeed(NamedTuple):
    """Buffers that a save will take: how many, of how many bytes each, and whether pinned."""

    nbytes: int
    number: int
    pinned: bool


def buffers_for(
    state: Any, ranks: Ranks, path: WritePath, host_bytes_max: int | None
) -> BufferNeed:
    """What a save of `state` takes without `dedup`, or a little less; none for small states.

    Raises like `contents_of`.
    """
    # With a memory of its own: the names of ranks, which a kept plan needs, are exchanged later.
    plan = contents_of(state, ranks, PlanMemory()).plan
    files = plan.entries(path.file_nbytes_max)
    nbytes = path.part_nbytes
    if max((file.nbytes for file in files), default=0) < nbytes:
        return BufferNeed(nbytes, 0, False)  # its parts are of another size
    # A header comes before the tensors, so there are at least so many.
    count = sum(file.nbytes // nbytes + 1 for file in files)
    if host_bytes_max is not None:
        count = min(count, host_bytes_max // nbytes)
    return BufferNeed(nbytes, count, bool(devices_of(source.view for source in plan.sources)))


def _room_for(
    files: Sequence[FilePlan], split: _Split, budget: int | None, task: SaveTask
) -> tuple[int, bool, bool]:
    """How many parts are in memory at once, whether these are all, and else whether what may change
    is copied aside first, so that the call can return.
    """
    part_nbytes = files[0].part_nbytes
    count = part_count(files)
    if budget is None or count * part_nbytes <= budget:
        return count, True, False
    if task.options.dedup:
        raise ValueError(
            f"host_bytes_max={budget}: with dedup=True at least {count * part_nbytes} are needed "
            "on this rank, to hash all of the state before any of it is written"
        )
    if budget < 2 * part_nbytes:
        raise ValueError(
            f"host_bytes_max={budget}: at least {2 * part_nbytes} are needed, one part to fill "
            "while another one is written"
        )
    aside = split.nbytes_now
    is_aside = aside + 2 * part_nbytes <= budget
    logger.warning(
        "step %d: %.1f MiB on this rank do not fit host_bytes_max=%d: they are copied in waves, "
        "as memory is written; %s waits for the last wave",
        task.step,
        count * part_nbytes / MIB,
        budget,
        "the next step of the optimizer" if is_aside else "this call",
    )
    # What is copied aside stays until the last wave, within the same budget.
    return (budget - aside * is_aside) // part_nbytes, False, is_aside


def _copied_aside(
    sources: Sequence[Source], wanted: Sequence[int]
) -> tuple[list[Source], memoryview]:
    """`sources`, those `wanted` copied to memory of their own, which the caller keeps."""
    side = aligned_buffer(sum(sources[index].chunk.nbytes for index in wanted))
    moved = list(sources)
    offset = 0
    for index in wanted:
        source = sources[index]
        target = side[offset : offset + source.chunk.nbytes]
        if source.address:
            copy_bytes(address_of(target), source.address, len(target))
        else:
            copy_elements(source, 0, target)
        # The view stays that of live memory: versions and storages are asked of it.
        moved[index] = source._replace(address=address_of(target))
        offset += len(target)
    return moved, side


def _shared(state: Any, task: SaveTask, lent: LentCopy) -> Staged | None:
    """A state that another save copies, if this one needs the same; None otherwise."""
    other = lent.staged
    if task.options.dedup and not other.image.staging.is_one_range:
        return None
    with task.recorder.span("flatten"):
        contents = contents_of(state, task.ranks, task.memory.plans)
        files = planned_files(contents, task)
        are_alike = [file.first for file in files] == [file.first for file in other.files]
        # Sums of a sample cannot stand for sums of all.
        are_alike = are_alike and compares_all(task) == other.replicas.is_whole
        if not are_alike or not _is_same(contents.plan, other.contents.plan):
            return None
    task.recorder.count("blocking_bytes", 0)
    gate = Gate(frozenset(), frozenset())  # the other save's holds steps back
    sums = other.digests, other.replicas
    return Staged(task, contents, files, other.image, gate, *sums, lent=lent)


def _is_same(own: SavePlan, other: SavePlan) -> bool:
    """Whether two plans, of one state, write the same chunks and compare the same pieces."""
    # Thousands of chunks are compared once: the results of a plan live as long as it holds.
    if own.of_memory.get("copied by") is other.of_memory:
        return True
    is_same = [one.chunk for one in own.sources] == [one.chunk for one in other.sources] and [
        (holding.must_agree, piece) for holding, piece in own.compared
    ] == [(holding.must_agree, piece) for holding, piece in other.compared]
    if is_same:
        own.of_memory["copied by"] = other.of_memory
    return is_same
