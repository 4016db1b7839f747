"""Sources: checkpoints of any format as names, values, and tensors that are read on request.

A format says where the elements of each tensor lie in files (`Chunk`); reading them into memory is
the same for all. Exports, imports and comparisons see a `CheckpointSource` and nothing of formats.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsIndex

import torch

from ckpt.errors import Corrupt
from ckpt.format.chunk_rules import cover_problem
from ckpt.format.manifest import MODULES, Manifest, MetadataBudget
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.kind import Kind
from ckpt.layout.memory import host_bytes, tensor_over
from ckpt.layout.region import Box, Region, Shape, Span, boxes_of, row_major_strides
from ckpt.layout.reshard import Patch, Run, copies
from ckpt.loading.checkpoint import Checkpoint, fill, piece_of
from ckpt.loading.contents import StoredTensor, leased_checkpoint
from ckpt.loading.plan import ReadPath
from storage import ShortReadError, Store
from storage.ranges import aligned_buffer

MIB = 1 << 20
SCRATCH_NBYTES = 8 * MIB
JOINED_GAP_MAX = 64 << 10  # bytes that are read and discarded, to save a request
JOINED_NBYTES_MAX = 8 * MIB
JOINED_EACH_MAX = MIB
_UNSAFE = re.compile(r"\.\.(?:[/\\]|\Z)|\0")


class SourceTensor(NamedTuple):
    """A tensor of a source. `dtype` is the canonical name, `kind` what it is to training."""

    fqn: str
    dtype: str
    shape: Shape
    kind: Kind = Kind.OTHER

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class ReadRequest(NamedTuple):
    """Elements of a tensor, and the memory of their shape to fill: 1-D for a run of its row-major
    order. Only checkpoints of ours are asked for boxes.
    """

    fqn: str
    region: Region
    target: torch.Tensor

    @property
    def span(self) -> Span:
        """The region of a request that is a run."""
        assert isinstance(self.region, Span), "only checkpoints of ours are asked for boxes"
        return self.region


class Chunk(NamedTuple):
    """A region of a tensor in a file: its first element is at byte `start`.

    `stride` is how many elements to step over per dim of the region, `None` for row-major order
    without gaps.
    """

    region: Region
    file: str
    start: int
    stride: Shape | None = None


class Refusal(NamedTuple):
    """Why something cannot be converted; whether it is a tensor, which a model needs."""

    reason: str
    is_tensor: bool


@dataclass(frozen=True, slots=True)
class SourceContents:
    """What a source holds, by the names that a state of ours would have for it.

    `aliases` are further names of a tensor. `refused` are names of what cannot be converted, each
    with the reason. `modules` are the paths of what looks like a model's state dict.
    """

    tensors: Mapping[str, SourceTensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    per_rank: Sequence[Mapping[str, Any]] = ()
    step: int | None = None


class CheckpointSource(ABC):
    """A checkpoint to read from. `fill` may be called from any thread.

    `left_out` are files of the same folder of which nothing is in `contents`. `stored_nbytes` are
    how many bytes its files have for tensors.
    """

    format: str  # for messages
    left_out: tuple[str, ...] = ()

    def __init__(self, url: str, contents: SourceContents, stored_nbytes: int) -> None:
        self.url = url
        self.contents = contents
        self.stored_nbytes = stored_nbytes

    @abstractmethod
    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        """Read elements into memory. Raises Corrupt and the store's errors; the memory is
        undefined then.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections."""

    def read(self, fqn: str) -> torch.Tensor:
        """A whole tensor in new memory. Raises KeyError, Corrupt, and the store's errors."""
        fqn = self.contents.aliases.get(fqn, fqn)
        info = self.contents.tensors[fqn]
        tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
        if tensor.numel():
            self.fill([ReadRequest(fqn, Span(0, tensor.numel()), tensor.view(-1))])
        return tensor

    def __repr__(self) -> str:
        return f"<{self.format} {self.url}: {len(self.contents.tensors)} tensors>"


class FileSource(CheckpointSource):
    """A checkpoint of another format: chunks of tensors in files of one store.

    Its files carry no checksums that a partial read could compare: bytes are taken as they are.
    Raises Corrupt for names that lead out of a folder.
    """

    def __init__(
        self,
        store: Store,
        format: str,
        contents: SourceContents,
        chunks: Mapping[str, Sequence[Chunk]],
        stored_nbytes: int,
    ) -> None:
        super().__init__(store.url, contents, stored_nbytes)
        for fqn in (*contents.tensors, *contents.aliases, *contents.refused):
            # Other programs take names for paths, or end them at a NUL.
            if _UNSAFE.search(fqn):
                files = [one.file for one in chunks.get(contents.aliases.get(fqn, fqn), ())]
                where = "/".join([store.url, *files[:1]])
                raise Corrupt(f"{where}: {fqn[:200]!r} is no name of a tensor")
        self.format = format
        self.store = store
        self.files = frozenset(
            chunk.file for tensor_chunks in chunks.values() for chunk in tensor_chunks
        )
        self.chunks = {
            fqn: _ChunkIndex(list(tensor_chunks)) for fqn, tensor_chunks in chunks.items()
        }

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        reads: list[_FileRead] = []
        for request in wanted:
            fqn, span, target = request.fqn, request.span, request.target
            info = self.contents.tensors[fqn]
            for chunk in self.chunks[fqn].near(span):
                for copy in copies(chunk.region, span, info.shape):
                    if isinstance(copy, Run) and chunk.stride is None:
                        start = chunk.start + copy.source * target.element_size()
                        memory = host_bytes(target[copy.target : copy.target + copy.numel])
                        reads.append((chunk.file, start, memory))
                    else:
                        for part in _gathers(chunk, copy, target.element_size()):
                            self._gather(chunk.file, part, target)
        for file, start, buffers in _joined(reads):
            self._read(file, start, buffers)

    def _read(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        try:
            self.store.get_into(file, start, buffers)
        except ShortReadError as error:
            raise Corrupt(f"{self.store.url}/{file} is shorter than its metadata says") from error

    def _gather(self, file: str, part: _Gather, target: torch.Tensor) -> None:
        """Read a box whose elements are not contiguous in both file and target, band by band."""
        itemsize = target.element_size()
        # Mapped, and for all bands: blocks of this size from the allocator stay with the threads.
        scratch = aligned_buffer(min(_extent(part.box, part.stride) * itemsize, SCRATCH_NBYTES))
        for box, start, stride, into, target_stride in _bands(part, itemsize):
            extent = _extent(box, stride)
            here = scratch[: extent * itemsize]
            self._read(file, start, [here])
            view = tensor_over(here, target.dtype, (extent,)).as_strided(box, stride)
            target.as_strided(box, target_stride, target.storage_offset() + into).copy_(view)

    def close(self) -> None:
        self.store.close()


class _ChunkIndex:
    """The chunks of one tensor, those near a run of it found by bisection."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._are_spans = all(isinstance(chunk.region, Span) for chunk in chunks)
        if self._are_spans:
            chunks.sort(key=lambda chunk: chunk.region)
        self.chunks = chunks
        self._stops = [c.region.stop for c in chunks if isinstance(c.region, Span)]

    def near(self, span: Span) -> Iterator[Chunk]:
        if not self._are_spans:
            yield from self.chunks
            return
        # From the first chunk that stops behind the start of the span.
        for chunk in self.chunks[bisect_left(self._stops, span.start + 1) :]:
            assert isinstance(chunk.region, Span)
            if chunk.region.start >= span.stop:
                return
            yield chunk


_FileRead = tuple[str, int, memoryview]  # from which byte of which file


def _joined(reads: list[_FileRead]) -> Iterator[tuple[str, int, list[memoryview]]]:
    """Joins small reads that lie near each other in a file; bytes between them are discarded."""
    # Not by the buffers: memoryviews have no order.
    reads.sort(key=lambda read: read[:2])
    # One for all gaps, because nobody looks at what is read into it.
    gap_buffer = memoryview(bytearray(JOINED_GAP_MAX))
    buffers: list[memoryview] = []
    name, start, end = "", 0, 0  # of what is joined so far
    for file, first, buffer in reads:
        gap, stop = first - end, first + len(buffer)
        are_small = bool(buffers) and max(len(buffers[0]), len(buffer)) <= JOINED_EACH_MAX
        is_near = file == name and 0 <= gap <= JOINED_GAP_MAX and stop - start <= JOINED_NBYTES_MAX
        if buffers and not (are_small and is_near):
            yield name, start, buffers
            buffers = []
        if not buffers:
            name, start = file, first
        elif gap:
            buffers.append(gap_buffer[:gap])
        buffers.append(buffer)
        end = stop
    if buffers:
        yield name, start, buffers


class _Gather(NamedTuple):
    """A box of elements: in a file from byte `start` on, in the target from element `into` on."""

    box: Shape
    start: int
    stride: Shape
    into: int
    target_stride: Shape


def _gathers(chunk: Chunk, copy: Run | Patch, itemsize: int) -> Iterator[_Gather]:
    """What to do for a copy that is no run of the file."""
    if isinstance(copy, Patch):
        box = copy.source_box
        stride = chunk.stride or row_major_strides(copy.source_shape)
        source = copy.source_base + _dot(box.offset, stride)
        to = row_major_strides(copy.target_shape)
        into = copy.target_base + _dot(copy.target_box.offset, to)
        yield _Gather(box.shape, chunk.start + source * itemsize, stride, into, to)
        return
    assert chunk.stride is not None and isinstance(chunk.region, Box), "a run is read directly"
    into = copy.target
    for box in boxes_of(Span(copy.source, copy.source + copy.numel), chunk.region.shape):
        start = chunk.start + _dot(box.offset, chunk.stride) * itemsize
        yield _Gather(box.shape, start, chunk.stride, into, row_major_strides(box.shape))
        into += box.numel


def _extent(box: Shape, stride: Shape) -> int:
    """How many elements of a file a box lies over, from its first to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(box, stride, strict=True))


def _dot(index: Shape, stride: Shape) -> int:
    return sum(coordinate * step for coordinate, step in zip(index, stride, strict=True))


def _bands(part: _Gather, itemsize: int) -> Iterator[_Gather]:
    """Boxes of `part`, each of which lies within the scratch memory in the file."""
    box, start, stride, into, target_stride = part
    # Halving the dim with the longest step shortens the stretch of the file the most.
    widest = max(range(len(box)), key=lambda d: stride[d] if box[d] > 1 else -1, default=0)
    is_small = _extent(box, stride) <= SCRATCH_NBYTES // itemsize
    if is_small or not box or box[widest] == 1:
        yield part
        return
    half = box[widest] // 2
    first = (*box[:widest], half, *box[widest + 1 :])
    second = (*box[:widest], box[widest] - half, *box[widest + 1 :])
    start += half * stride[widest] * itemsize
    yield from _bands(part._replace(box=first), itemsize)
    moved = into + half * target_stride[widest]
    yield from _bands(_Gather(second, start, stride, moved, target_stride), itemsize)


def check_chunks(tensor: SourceTensor, chunks: Iterable[Chunk], sizes: Mapping[str, int]) -> None:
    """Raise Corrupt unless `chunks` hold every element of `tensor` once, within their files."""
    listed = list(chunks)
    itemsize = DTYPES[tensor.dtype].itemsize
    for chunk in listed:
        extent = chunk.region.numel
        if chunk.stride is not None and extent:
            assert isinstance(chunk.region, Box)
            extent = 1 + _dot(tuple(n - 1 for n in chunk.region.shape), chunk.stride)
        stop = chunk.start + extent * itemsize
        if chunk.start < 0 or stop > sizes[chunk.file]:
            raise Corrupt(
                f"{chunk.file}: {tensor.fqn} is said to be in bytes {chunk.start} to {stop}, the "
                f"file has {sizes[chunk.file]}"
            )
    # Most tensors are one run, which needs no general check.
    if len(listed) == 1 and listed[0].region == Span(0, math.prod(tensor.shape)):
        return
    problem = cover_problem([chunk.region for chunk in listed], tensor.shape)
    if problem is not None:
        raise Corrupt(f"{tensor.fqn}: {problem}")


# Our own checkpoints ------------------------------------------------------------------------------

# A value that DcpWriter keeps: the flat keys of DCP's state, their paths, and its plain values; and
# for values of single ranks, on those: which tensors in them are arrays of numpy.
DCP_RECORD = "ckpt.dcp"


def native_source(
    store: Store,
    step: SupportsIndex | None = None,
    attempt: str = "",
    budget: MetadataBudget | None = None,
) -> NativeSource:
    """The checkpoint of `step` or `attempt`, or the latest, in a root, or the one in a step
    directory; leased until it is closed. What describes it is charged to `budget`.

    Raises like `ckpt.open`.
    """
    with ExitStack() as stack:
        located = stack.enter_context(
            leased_checkpoint(store, step, attempt=attempt, budget=budget)
        )
        # The source holds the lease from here on; before, a failure ends it.
        return NativeSource(Checkpoint(store, located), stack.pop_all())


class NativeSource(CheckpointSource):
    """A checkpoint of ours; every block that is read is checked."""

    format = "checkpoint"

    def __init__(self, checkpoint: Checkpoint, lease: ExitStack | None = None) -> None:
        manifest = checkpoint.manifest
        tensors = {
            fqn: SourceTensor(fqn, dtype, shape, Kind.of(kind))
            for fqn, dtype, shape, kind in zip(
                manifest.fqns,
                manifest.dtypes,
                manifest.shapes,
                manifest.kinds.tolist(),
                strict=True,
            )
        }
        values, *per_rank = (
            {name: value for name, value in own.items() if name != DCP_RECORD}
            for own in (checkpoint.values, *checkpoint.per_rank)
        )
        contents = SourceContents(
            tensors,
            values,
            checkpoint.aliases,
            modules=_modules(manifest),
            per_rank=per_rank,
            step=checkpoint.step,
        )
        super().__init__(checkpoint.url, contents, int(manifest.file_nbytes.sum()))
        self.checkpoint = checkpoint
        self._lease = lease or ExitStack()

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        checkpoint, tensors = self.checkpoint, self.contents.tensors
        holdings = []
        for fqn, region, target in wanted:
            info = tensors[fqn]
            entry = StoredTensor(checkpoint.manifest.index(fqn), fqn, info.dtype, info.shape)
            holdings.append(piece_of(entry, region, target))
        fill(checkpoint, holdings, ReadPath())

    def close(self) -> None:
        # While the store is open: the lease is an object in it.
        self._lease.close()
        self.checkpoint.close()


def _modules(manifest: Manifest) -> tuple[str, ...]:
    """The paths of modules that the checkpoint records; for checkpoints without them, the first
    parts of the names of parameters.
    """
    recorded = manifest.header.user.get(MODULES)
    if recorded is not None:
        paths = {str(path) for path in json.loads(recorded)}
        names = (*manifest.fqns, *manifest.aliases)
        return tuple(
            # A recorded module may have no tensors, and then nothing to export.
            sorted(p for p in paths if not p or any(fqn.startswith(f"{p}.") for fqn in names))
        )
    parameters = (
        fqn
        for fqn, kind in zip(manifest.fqns, manifest.kinds.tolist(), strict=True)
        if kind == Kind.PARAMETER
    )
    return tuple(sorted({fqn.partition(".")[0] if "." in fqn else "" for fqn in parameters}))
