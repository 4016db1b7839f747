"""What is saved of a state by one rank: walk -> flatten -> assign -> sources.

Note "kept plans": from save to save only values change, as a rule. What follows from the structure
of a state (who writes what, the order in files, their headers, the columns for the manifest) is
kept with a session and used again as long as a fingerprint shows the same objects in the same
memory. A plan dies with the first object of the state that dies: it keeps no memory of the user's.
A fingerprint costs a small part of what flattening does, and has all that flattening depends on:
which modules, parameters, buffers and tensors of optimizers there are, under which names, and where
they lie.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import nn

from ckpt.format.checksum import Int64s, block_count
from ckpt.format.datafile import (
    BLOCK_BYTES,
    FileEntries,
    StoredChunk,
    file_entries,
    is_small_or_uneven,
    region_start,
    split_into_files,
)
from ckpt.format.part import TensorRecord
from ckpt.layout import torch_fsdp
from ckpt.layout.assign import Assignment, Share, assign, is_small_and_agreed
from ckpt.layout.composites import type_of
from ckpt.layout.dtypes import dtype_name
from ckpt.layout.kind import Kind
from ckpt.layout.memory import is_plain_memory, local_view, narrowed, storage_of, tensor_over
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.plain import Ranks, UnsupportedTensor
from ckpt.layout.region import Region, Span, boxes_of
from ckpt.layout.tensor import PLAIN_CLASSES, memory_of
from ckpt.state.binding import refuse_interrupted
from ckpt.state.flatten import Structure, structure_of, values_of
from ckpt.state.optimizer import STATE_DICT_HOOKS
from ckpt.state.optimizer_kinds import declared
from ckpt.state.types import FlatState, StagesHere
from ckpt.state.walk import Leaves, walk


@dataclass(slots=True)
class Fingerprint:
    """All that the description of a state depends on, taken at one moment.

    Two fingerprints agree when `tensors` and `objects` are the very same objects, and the `marks`
    are equal.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)

    def mark_memory(self) -> None:
        """Note where and how the memory of all tensors lies. Called once, at the end."""
        memories, marks, others = self.tensors, self.marks, list[torch.Tensor]()
        plain = memories
        if not PLAIN_CLASSES.issuperset(map(type, memories)):
            memories = [memory_of(tensor) for tensor in memories]
            plain = [one for one in memories if type(one) in PLAIN_CLASSES]
            others = [one for one in memories if type(one) not in PLAIN_CLASSES]
        # With another dtype or view, the same bits in the same place are other numbers.
        dtypes = [one.dtype for one in memories]
        marks += dtypes
        unlike = dict(zip(dtypes, memories, strict=True)).values()
        try:
            # By columns: a tuple for each of thousands of tensors takes half as long again.
            marks += map(torch.Tensor.data_ptr, memories)
            marks += [one.shape for one in memories]
            # Other classes answer these questions themselves, and need not know all of them.
            if others or not all(map(torch.Tensor.is_contiguous, plain)):
                marks += [one.stride() for one in memories]
            if any(map(torch.Tensor.is_neg, plain)):
                marks += map(torch.Tensor.is_neg, plain)
            if any(one.dtype.is_complex for one in unlike):
                marks += map(torch.Tensor.is_conj, plain)
        except (RuntimeError, ValueError):
            # A sparse, nested or lazy tensor has no one memory. A mark that equals no other lets
            # the state be described, which refuses that tensor by name.
            marks.append(object())
        # What a composite consists of, and what else it says, changes without another object.
        if any([one.is_quantized or type_of(one) is not None for one in (*others, *unlike)]):
            marks.append(object())
        marks += [tensor.requires_grad for tensor in self.tensors]


def fingerprint_of(leaves: Leaves) -> Fingerprint | None:
    """The fingerprint of a state with these leaves; None if it has to be flattened every time."""
    fingerprint = Fingerprint()
    if leaves.tensors:
        fqns, tensors = zip(*leaves.tensors, strict=True)
        fingerprint.marks += fqns
        fingerprint.tensors += tensors
    for path, module in leaves.modules:
        fingerprint.marks.append(path)
        add_module(module, fingerprint)
    for path, optimizer in leaves.optimizers:
        fingerprint.marks.append(path)
        fingerprint.objects.append(optimizer)
        if not _add_optimizer(optimizer, fingerprint):
            return None
    fingerprint.mark_memory()
    # A state with problems is described anew, so that the error lists all of them.
    return None if leaves.problems else fingerprint


def add_module(root: nn.Module, fingerprint: Fingerprint) -> None:
    """Add what `describe_module` depends on, in about two microseconds per module."""
    tensors, objects, marks = fingerprint.tensors, fingerprint.objects, fingerprint.marks
    seen: set[int] = set()
    unit_classes: dict[type, bool] = {}
    stack = [root]
    while stack:
        module = stack.pop()
        # A shared module adds nothing: its other paths follow from the names of its parents.
        if id(module) in seen:
            continue
        seen.add(id(module))
        objects.append(module)
        kind = type(module)
        params, buffers, children = module._parameters, module._buffers, module._modules
        marks.append(kind)
        # A hook that was added since may refuse the state.
        marks.append(len(module._state_dict_hooks) + len(module._state_dict_pre_hooks))
        if params:
            # The names: a list takes the keys of a dict.
            marks += params
            tensors += [tensor for tensor in params.values() if tensor is not None]
        if buffers:
            marks += (*buffers, *module._non_persistent_buffers_set)
            tensors += [tensor for tensor in buffers.values() if tensor is not None]
        if children:
            marks += children
            stack += [child for child in children.values() if child is not None]
        is_unit = unit_classes.get(kind)
        if is_unit is None:
            # FSDP2 adds nothing: its sharded parameters are where modules show parameters; where
            # others are shown there, the fingerprint is another one already.
            is_unit = torch_fsdp.is_fsdp1(module) or hasattr(module, "__ckpt_pieces__")
            unit_classes[kind] = is_unit
        if is_unit:
            _add_unit(module, fingerprint)


def _add_unit(module: Any, fingerprint: Fingerprint) -> None:
    if torch_fsdp.is_fsdp1(module):
        for param, memory in torch_fsdp.fsdp1_memory(module):
            fingerprint.objects.append(param)
            fingerprint.tensors.append(memory)
    if hasattr(module, "__ckpt_pieces__"):
        try:
            for owned in module.__ckpt_pieces__():
                fingerprint.objects.append(owned.param)
                local = owned.local
                fingerprint.marks += (local.data_ptr(), local.shape, local.stride(), owned.views)
        except (UnsupportedTensor, RuntimeError):
            fingerprint.marks.append(object())  # as above: described, it is refused by name


def _add_optimizer(optimizer: torch.optim.Optimizer, fingerprint: Fingerprint) -> bool:
    tensors, objects, marks = fingerprint.tensors, fingerprint.objects, fingerprint.marks
    for group in optimizer.param_groups:
        marks.append(len(group["params"]))
        objects += group["params"]
    # A hook makes flattening refuse the optimizer, and a declaration changes how state is held.
    marks += [len(getattr(optimizer, name, ())) for name in STATE_DICT_HOOKS]
    marks += [(name, what == "shard") for name, what in declared(optimizer).items()]
    entries: Mapping[Any, Any] = optimizer.state
    for parameter, state in entries.items():
        if not isinstance(parameter, torch.Tensor):
            continue  # the user's own state is read at every save
        objects.append(parameter)
        marks += state
        contents = list(state.values())
        # A list: for three items it takes 0.7 of a generator's time, and there are thousands.
        if not all([isinstance(content, torch.Tensor) for content in contents]):
            return False  # a value of its own for each parameter: only flattening compares it
        tensors += contents
    return True


class Remembered:
    """A fingerprint that is kept without keeping anything of the state alive.

    `forget` is called when the first of the objects is freed, in the thread that frees it.
    """

    def __init__(self, fingerprint: Fingerprint, forget: Callable[[], None]) -> None:
        objects = [*fingerprint.tensors, *fingerprint.objects]
        self._references = [weakref.ref(item, lambda _: forget()) for item in objects]
        self._marks = fingerprint.marks

    def is_same(self, fingerprint: Fingerprint) -> bool:
        """Whether nothing has changed."""
        objects = [*fingerprint.tensors, *fingerprint.objects]
        if len(self._references) != len(objects) or self._marks != fingerprint.marks:
            return False
        # `==` of tensors compares elements, and an id may be that of a new object.
        return all(map(operator.is_, [reference() for reference in self._references], objects))


_Result = TypeVar("_Result")


class Memo(dict[Any, Any]):
    """Results that are computed once for each key."""

    def once(self, key: Any, work_out: Callable[[], _Result]) -> _Result:
        """The result of the first call of `work_out` for `key`."""
        if key not in self:
            self[key] = work_out()
        return cast(_Result, self[key])


class Source(NamedTuple):
    """A chunk to write, and where its bytes are: at `address` in host memory, or (address 0) in
    `view`, which is on a device or strided and is copied from its element `start` on.
    """

    chunk: StoredChunk
    view: torch.Tensor
    start: int
    address: int


def sources_of(shares: Sequence[Share]) -> list[Source]:
    """Where the bytes of every share are now, in the canonical order of a data file."""
    keys: list[tuple[bool, int, str, int, Region, int]] = []
    sources: list[Source] = []
    dtypes: dict[torch.dtype, tuple[str, int]] = {}
    for holding, piece, start, stop, region in shares:
        fqn, global_shape, dtype, _, _, _ = piece
        known = dtypes.get(dtype)  # an attribute of torch's takes longer
        if known is None:
            known = dtypes[dtype] = dtype_name(dtype), dtype.itemsize
        name, itemsize = known
        view = local_view(holding, piece)
        nbytes = (stop - start) * itemsize
        # With an address, later saves copy thousands of tensors without a call into torch for each.
        address = view.data_ptr() + start * itemsize if is_plain_memory(view) else 0
        chunk = StoredChunk(fqn, name, global_shape, region, nbytes, int(holding.kind))
        # This is `order_key`, with the regions compared only where their starts are the same.
        first = region_start(region, global_shape)
        late = is_small_or_uneven(nbytes)
        keys.append((late, -itemsize, fqn, first, region, len(sources)))
        sources.append(Source(chunk, view, start, address))
    keys.sort()
    return [sources[key[5]] for key in keys]


def entries_of(sources: Sequence[Source], file_nbytes_max: int) -> tuple[FileEntries, ...]:
    """The files that hold `sources`, in this order; at least one."""
    groups = split_into_files([source.chunk for source in sources], file_nbytes_max)
    return tuple(file_entries(group, BLOCK_BYTES) for group in groups)


def copy_elements(
    source: Source, start: int, target: memoryview, *, non_blocking: bool = False
) -> None:
    """Fill `target` with the source's bytes from `start` on, in row-major order of its view.

    With `non_blocking`, copies from a device into pinned memory are only started.
    """
    dtype = source.view.dtype
    first = source.start + start // dtype.itemsize
    last = first + len(target) // dtype.itemsize
    # A run of a strided view is no view itself: the boxes that it consists of are.
    for box in boxes_of(Span(first, last), tuple(source.view.shape)):
        nbytes = box.numel * dtype.itemsize
        place = tensor_over(target[:nbytes], dtype, box.shape)
        place.copy_(narrowed(source.view, box), non_blocking=non_blocking)
        target = target[nbytes:]


def is_shared(holding: Holding, piece: Piece) -> bool:
    """Whether a tensor is on several ranks that have to agree on it, whatever optimizers have."""
    return holding.must_agree and holding.kind is not Kind.OPTIMIZER and len(piece.holders) > 1


@dataclass(frozen=True)
class SavePlan:
    """Which tensors a state has and which parts of them this rank writes, from which memory.

    `compared` are the pieces of which every save reports digests, as no engine keeps them equal on
    all ranks; `replicated` are those that one keeps equal, of which the first rank alone writes all
    where the plan `is_first_only`. `trainable` are the addresses of the memory of trainable
    parameters. `of_chunks` has what follows from the chunks alone, `of_memory` what follows from
    where they lie as well.
    """

    tensors: tuple[TensorRecord, ...]
    assignment: Assignment
    compared: tuple[tuple[Holding, Piece], ...]
    sources: tuple[Source, ...]
    trainable: frozenset[int]
    replicated: tuple[tuple[Holding, Piece], ...] = ()
    is_first_only: bool = False
    of_chunks: Memo = field(default_factory=Memo)
    of_memory: Memo = field(default_factory=Memo)

    def entries(self, file_nbytes_max: int) -> tuple[FileEntries, ...]:
        """All files of this rank, as far as they follow from their chunks."""
        key = ("entries", file_nbytes_max)
        return self.of_chunks.once(key, lambda: entries_of(self.sources, file_nbytes_max))

    @cached_property
    def compared_columns(self) -> tuple[Int64s, Int64s, Int64s]:
        """Of the pieces that are compared: their tensors, by index in sorted order, their first
        elements, and 1 where the ranks must agree.
        """
        index = {tensor.fqn: number for number, tensor in enumerate(sorted(self.tensors))}
        rows = [
            (index[piece.fqn], region_start(piece.region, piece.global_shape), holding.must_agree)
            for holding, piece in self.compared
        ]
        tensors, starts, must_agree = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return tensors, starts, must_agree

    @cached_property
    def trainable_blocks(self) -> Int64s:
        """Which of this rank's blocks, counted over all its files, are of trainable parameters."""
        if not self.trainable:
            return np.zeros(0, dtype=np.int64)
        counts = [block_count(source.chunk.nbytes, BLOCK_BYTES) for source in self.sources]
        is_trainable = [storage_of(source.view) in self.trainable for source in self.sources]
        return np.flatnonzero(np.repeat(is_trainable, counts))

    @cached_property
    def empty_tensors(self) -> Sequence[TensorRecord]:
        """Those without elements."""
        return [tensor for tensor in self.tensors if 0 in tensor.shape]


@dataclass(frozen=True, slots=True)
class Contents:
    """What is saved of a state, as this rank holds it: live memory, values as they were then.

    `modules` are the paths of the state's modules, `stages` the numbered stages of pipelines.
    """

    flat: FlatState
    plan: SavePlan
    modules: tuple[str, ...]
    stages: tuple[StagesHere, ...] = ()


def contents_of(state: Any, ranks: Ranks, memory: PlanMemory) -> Contents:
    """`state` by name, and this rank's share of it. No rank waits for another; nothing is copied.

    Raises InvalidState, and LoadInterrupted for a state that was left half-loaded.
    """
    refuse_interrupted(state)
    leaves = walk(state)
    fingerprint = fingerprint_of(leaves)
    kept = memory.same(fingerprint)
    structure = structure_of(leaves, ranks) if kept is None else kept.structure
    flat = values_of(structure, leaves, ranks, state)
    others = flat.holdings[len(structure.kept.holdings) :]
    modules = tuple(sorted({path for path, _ in leaves.modules}))
    stages = tuple(sorted(leaves.stages))
    if kept is not None and _lie_alike(kept.others, others):
        return Contents(flat, kept.plan, modules, stages)
    plan = plan_of(flat, ranks, memory)
    # A plan is dropped when an object of the state dies. The structure itself holds bare
    # parameters, so these would never die, and their memory would be kept.
    bare = any(id(tensor) in structure.owned_by_param for _, tensor in leaves.tensors)
    if fingerprint is not None and not bare:
        memory.keep(fingerprint, structure, others, plan)
    return Contents(flat, plan, modules, stages)


def plan_of(flat: FlatState, ranks: Ranks, memory: PlanMemory) -> SavePlan:
    """Which parts of a flat state this rank writes, from which memory."""
    assignment = assign(flat.holdings, ranks.rank, first_only=memory.first_only)
    sources = tuple(sources_of(assignment.shares))
    tensors = tuple(_tensors_of(flat))
    compared: list[tuple[Holding, Piece]] = []
    # A rank alone has nobody to compare with, and its digests would be computed for nothing.
    if len(ranks.global_ranks) > 1:
        witnesses = [holding for holding in flat.witnesses if holding.must_agree]
        witnessed = [(holding, piece) for holding in witnesses for piece in holding.pieces]
        compared = [*assignment.compared, *witnessed]
    replicated = [
        (holding, piece)
        for holding in flat.holdings
        if holding.synchronized
        for piece in holding.pieces
        if len(piece.holders) > 1 and piece.local_region.numel
        if not is_small_and_agreed(holding, piece)  # compared by every save
    ]
    chunks = [source.chunk for source in sources]
    trainable = {
        storage_of(owned.local)
        for owned in flat.owned_by_param.values()
        if owned.param.requires_grad
    }
    return SavePlan(
        tensors,
        assignment,
        tuple(compared),
        sources,
        frozenset(trainable),
        tuple(replicated),
        memory.first_only,
        memory.memo_of(chunks, tensors),
    )


def _lie_alike(old: Sequence[Holding], new: Sequence[Holding]) -> bool:
    # `old` keeps its memory alive, so an equal address means the same memory.
    return len(old) == len(new) and all(
        a[1:] == b[1:]
        and a.local.data_ptr() == b.local.data_ptr()
        and a.local.shape == b.local.shape
        and a.local.stride() == b.local.stride()
        for a, b in zip(old, new, strict=True)
    )


class _Kept(NamedTuple):
    remembered: Remembered
    structure: Structure
    others: list[Holding]
    plan: SavePlan


class PlanMemory:
    """The plan of the last save of one session, until the state changes or goes away.

    `first_only`: ranks were found to differ in replicas, so none is put together from several.
    """

    _kept: _Kept | None
    _chunks: tuple[Sequence[StoredChunk], tuple[TensorRecord, ...], Memo]

    def __init__(self) -> None:
        self.first_only = False
        self.rest()

    @property
    def is_empty(self) -> bool:
        """Whether nothing of a state is held."""
        return self._kept is None

    def same(self, fingerprint: Fingerprint | None) -> _Kept | None:
        """What was kept, if it was of the same objects in the same memory."""
        kept = self._kept
        if fingerprint is None or kept is None or not kept.remembered.is_same(fingerprint):
            return None
        return kept

    def keep(
        self, fingerprint: Fingerprint, structure: Structure, others: list[Holding], plan: SavePlan
    ) -> None:
        """Remember a plan as long as all objects of the state live."""
        self._kept = _Kept(Remembered(fingerprint, self.forget), structure, others, plan)

    def memo_of(self, chunks: Sequence[StoredChunk], tensors: tuple[TensorRecord, ...]) -> Memo:
        """The results for these chunks, which hold wherever they lie in memory."""
        if self._chunks[0] != chunks or self._chunks[1] != tensors:
            self._chunks = (chunks, tensors, Memo())
        return self._chunks[2]

    def forget_part(self) -> None:
        """After a failed save: the next one must not be compared with its part."""
        self._chunks[2]["sums"] = None

    def take_from_first(self, first_only: bool) -> None:
        """From now on the first rank alone writes replicas, or the ranks share them again."""
        if self.first_only != first_only:
            self.first_only = first_only
            self.forget()

    def forget(self) -> None:
        """The next plan is made anew."""
        self._kept = None

    def rest(self) -> None:
        """Keep nothing that grows with the state."""
        self._kept, self._chunks = None, ((), (), Memo())


def _tensors_of(flat: FlatState) -> list[TensorRecord]:
    """Every tensor of this rank's state, once, including those of which it holds no element."""
    seen: dict[str, TensorRecord] = {}
    for _, pieces, kind, *_ in (*flat.holdings, *flat.witnesses):
        for fqn, shape, dtype, _, _, _ in pieces:
            if fqn not in seen:
                seen[fqn] = TensorRecord(fqn, dtype_name(dtype), shape, int(kind))
    return list(seen.values())
