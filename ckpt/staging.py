"""What a save in the background copies before its call returns, and what while training goes on.

state -> contents -> sources -> image: copied now, or copied before the next step

Only a step of an optimizer changes trainable parameters and the tensors of their shape in the
optimizer's state. They are copied while the next forward and backward run, and a step waits until
that is done. Everything else may change at any time, so it is copied at once: buffers, frozen
parameters, copies of weights, counts and learning rates, values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from ckpt.contents import Contents, contents_of, digests_of
from ckpt.format.part import Part
from ckpt.image import FilePlan, Image, part_count, plan_files
from ckpt.layout.dtensor import local_tensor
from ckpt.layout.piece import Holding, Kind, Piece
from ckpt.log import attempt_name
from ckpt.memory import address_of, aligned_buffer, copy_bytes
from ckpt.saving import (
    Attempt,
    SaveTask,
    Written,
    file_names,
    file_texts,
    header_of,
    part_of,
)
from ckpt.state_dict import FlatState
from ckpt.stepping import Gate, steps, storage_of
from ckpt.write import Source, Staging, copy_elements

logger = logging.getLogger(__name__)

MIB = 1 << 20
# Tensors that are copied in the call stop training for that long: 64 MiB take some 10 ms.
BLOCKING_NBYTES_MAX = 64 * MIB

Snapshot = Literal["step", "now"]


class Changes(NamedTuple):
    """What of a state changes in steps of optimizers alone: memory, and the parameters' ids.

    `unowned` are trainable parameters that no optimizer is known to change, by name.
    """

    storages: frozenset[int]
    parameters: frozenset[int]
    unowned: tuple[str, ...]


NOTHING = Changes(frozenset(), frozenset(), ())


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
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if id(parameter) in parameters:
                shape = flat.owned_by_param[id(parameter)].local.shape
                storages.update(_shaped_like(shape, state.values()))
    storages.discard(0)  # the address of tensors without memory
    return Changes(frozenset(storages), frozenset(parameters), tuple(unowned))


def _shaped_like(shape: torch.Size, state: Iterable[Any]) -> Iterable[int]:
    for content in state:
        if isinstance(content, torch.Tensor) and content.ndim:
            local = local_tensor(content)
            if local.shape == shape:
                yield storage_of(local)


@dataclass
class Staged:
    """A state of which a part is copied already, and the rest is before the next step.

    `is_blocking` says that the call may return only when everything is copied.
    """

    task: SaveTask
    contents: Contents
    image: Image
    gate: Gate
    digests: dict[str, int]
    compared_later: Sequence[tuple[Holding, Piece]]
    is_blocking: bool
    side: memoryview = field(default_factory=lambda: memoryview(b""))

    def copy(self) -> None:
        """Copy the rest, as far as there is room for it."""
        with self.task.recorder.span("stage", self.image.nbytes_missing):
            self.digests.update(digests_of(self.compared_later))
            self.image.copy()
        if self.image.is_whole:
            self.gate.open()

    def write(self, attempt: Attempt, give_up: Callable[[], None]) -> Part:
        """Write the files of this rank; copies the rest on the way. Calls `give_up` often."""
        task, header = self.task, attempt.header

        def between_parts() -> None:
            if self.image.is_whole:
                self.gate.open()
            give_up()

        with task.recorder.span("write", sum(s.chunk.nbytes for s in self.image.sources)):
            files = self.image.write(
                task.store,
                file_names(header, task),
                texts=file_texts(self.contents, header, task),
                path=task.options.path,
                between_parts=between_parts,
            )
        task.recorder.count("step_wait_seconds", self.gate.waited_seconds)
        return part_of(self.contents, Written(files), self.digests, task)

    def release(self) -> None:
        """Let go of everything: steps pass, buffers are free."""
        self.gate.open()
        self.image.release()


@dataclass(frozen=True, slots=True)
class StageOptions:
    """When a state is copied, and into how much memory of this rank."""

    snapshot: Snapshot = "step"
    host_bytes_max: int | None = None


def stage(state: Any, task: SaveTask, options: StageOptions, staging: Staging) -> Staged:
    """Copy what may change before the next step, and hold that step until the rest is copied.

    Raises InvalidState, LoadInterrupted, ValueError for a budget that is too small; then nothing
    is held.
    """
    with task.recorder.span("flatten"):
        contents = contents_of(state, task.ranks, task.memory.plans)
        sources: Sequence[Source] = contents.plan.sources
        files = _plan(contents, task)
    changes = _changes(contents.flat, options.snapshot, task)
    later = {i for i, source in enumerate(sources) if storage_of(source.view) in changes.storages}
    now = [index for index in range(len(sources)) if index not in later]
    _report_blocking([sources[index] for index in now], changes, options.snapshot, task)
    room = _room_for(files, sources, now, options, task)
    staging.keep(room.buffers_max)
    compared = contents.plan.assignment.compared
    is_later = [storage_of(holding.local) in changes.storages for holding, _ in compared]
    with task.recorder.span("stage", sum(sources[index].chunk.nbytes for index in now)):
        sources, side = _copied_aside(sources, now) if room.is_aside else (sources, memoryview(b""))
        image = Image(files, sources, staging, buffers_max=room.buffers_max)
        if room.fits:
            image.copy(set(now))
        digests = digests_of(one for one, wait in zip(compared, is_later, strict=True) if not wait)
    return Staged(
        task,
        contents,
        image,
        steps.hold(changes.storages, changes.parameters),
        digests,
        [one for one, wait in zip(compared, is_later, strict=True) if wait],
        is_blocking=not (room.fits or room.is_aside),
        side=side,
    )


def _plan(contents: Contents, task: SaveTask) -> tuple[FilePlan, ...]:
    """Files and parts, before the attempt has its name: any name of an attempt is as long."""
    header = header_of(task, attempt_name(task.session.epoch, bytes(8)), contents.modules)
    path = task.options.path
    entries = contents.plan.entries(path.file_nbytes_max, header.block_bytes)
    # The slack in headers covers what differs from save to save: digits of steps and seconds.
    key = ("files", path.part_nbytes, path.file_nbytes_max, len(str(header.user)))
    return contents.plan.of_chunks.once(
        key,
        lambda: plan_files(entries, texts=file_texts(contents, header, task), path=path),
    )


def _changes(flat: FlatState, snapshot: Snapshot, task: SaveTask) -> Changes:
    steps.watch()
    if snapshot == "now":
        return NOTHING
    changes = changed_by_steps(flat, steps.seen())
    if changes.unowned:
        logger.info(
            "step %d: %d trainable parameters (%s, ...) are copied before async_save returns, as "
            'with snapshot="now": no optimizer was seen stepping them yet',
            task.step,
            len(changes.unowned),
            changes.unowned[0],
        )
    return changes


def _report_blocking(
    now: Sequence[Source], changes: Changes, snapshot: Snapshot, task: SaveTask
) -> None:
    """Tell of tensors that stop training, because only an optimizer's own can wait."""
    nbytes = sum(source.chunk.nbytes for source in now)
    task.recorder.count("blocking_bytes", nbytes)
    # Until an optimizer was seen, its state cannot be told from what it does not change.
    usual = (Kind.PARAMETER, Kind.OPTIMIZER) if changes.unowned else (Kind.PARAMETER,)
    others = [source for source in now if source.chunk.kind not in usual]
    large = sum(source.chunk.nbytes for source in others)
    if snapshot == "step" and large > BLOCKING_NBYTES_MAX:
        named = sorted(others, key=lambda source: -source.chunk.nbytes)[:5]
        told = ", ".join(f"{s.chunk.fqn} ({s.chunk.nbytes / MIB:.1f} MiB)" for s in named)
        logger.warning(
            "step %d: %.0f MiB on this rank are copied before async_save returns, because they may "
            "change outside of optimizers: %s%s",
            task.step,
            large / MIB,
            told,
            ", ..." if len(others) > len(named) else "",
        )


class _Room(NamedTuple):
    """How the state goes into the budget: all at once, or in waves of `buffers_max` parts.

    With `is_aside`, what may change is copied aside first, so that the call can return.
    """

    buffers_max: int
    fits: bool
    is_aside: bool


def _room_for(
    files: Sequence[FilePlan],
    sources: Sequence[Source],
    now: Sequence[int],
    options: StageOptions,
    task: SaveTask,
) -> _Room:
    part_nbytes = files[0].part_nbytes
    count = part_count(files)
    budget = options.host_bytes_max
    if budget is None or count * part_nbytes <= budget:
        return _Room(count, True, False)
    if budget < 2 * part_nbytes:
        raise ValueError(
            f"host_bytes_max={budget}: at least {2 * part_nbytes} are needed, one part to fill "
            "while another one is written"
        )
    aside = sum(sources[index].chunk.nbytes for index in now)
    is_aside = aside + 2 * part_nbytes <= budget
    logger.warning(
        "step %d: %.1f MiB on this rank do not fit host_bytes_max=%d: they are copied in waves, "
        "as memory is written; %s waits for the last wave",
        task.step,
        count * part_nbytes / MIB,
        budget,
        "the next step of the optimizer" if is_aside else "this call",
    )
    return _Room((budget - aside * is_aside) // part_nbytes, False, is_aside)


def _copied_aside(
    sources: Sequence[Source], wanted: Sequence[int]
) -> tuple[list[Source], memoryview]:
    """`sources`, those `wanted` copied to memory of their own, which the caller keeps."""
    side = aligned_buffer(sum(sources[index].chunk.nbytes for index in wanted))
    moved = list(sources)
    at = 0
    for index in wanted:
        source = sources[index]
        target = side[at : at + source.chunk.nbytes]
        if source.address:
            copy_bytes(address_of(target), source.address, len(target))
        else:
            copy_elements(source, 0, target)
        moved[index] = source._replace(address=address_of(target))
        at += len(target)
    return moved, side
