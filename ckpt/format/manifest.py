"""The manifest: everything about one checkpoint but its tensors' bytes, in columns.

FORMAT.md, "Manifest", is the specification. `joint_manifest` makes one encoding per manifest;
`decode_manifest` trusts nothing and keeps columns as views of its input where it can. Data files in
directories of other attempts, whose bytes a checkpoint shares, have names of their own.

A few hundred bytes of rules may describe tens of millions of chunks. So what is made of metadata is
charged before it is made, at what it takes from then on, and long walks over it are timed. One
command has one budget for all that it opens; each manifest has the one that it was decoded with.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ckpt.errors import UnsupportedFormat
from ckpt.format.checksum import Int64s as Int64s
from ckpt.format.checksum import Seals
from ckpt.format.columns import Ints, Progressions, distinct_by_part
from ckpt.format.datafile import BLOCK_BYTES
from ckpt.layout.dtypes import ITEMSIZES
from ckpt.layout.region import Box, Region, Shape, Span
from storage.forks import ForkSafeLock

NBYTES_MAX = 1 << 30
SECONDS_PER_GIB = 10.0
_STEP_SECONDS = 0.05  # of a walk, counted at once

_Item = TypeVar("_Item")


class MetadataBudget:
    """Counts for one command what metadata takes together: at most `nbytes_max` of memory (None:
    1 GiB), and 10 seconds of a CPU for each GiB of that. Used from several threads.
    """

    def __init__(self, nbytes_max: int | None = None) -> None:
        self.nbytes_max = NBYTES_MAX if nbytes_max is None else nbytes_max
        self.seconds_max = SECONDS_PER_GIB * self.nbytes_max / (1 << 30)
        self._nbytes = 0
        self._seconds = 0.0
        self._lock = ForkSafeLock()
        self._turn = ForkSafeLock()

    @property
    def nbytes_left(self) -> int:
        """What may still be taken."""
        with self._lock:
            return self.nbytes_max - self._nbytes

    def charge(self, nbytes: int, what: str) -> None:
        """Count memory that is about to be taken. Raises UnsupportedFormat beyond the budget."""
        with self._lock:
            taken = self._nbytes + nbytes
            if taken <= self.nbytes_max:
                self._nbytes = taken
                return
        raise UnsupportedFormat(
            f"{what} would take {taken} bytes of memory with what is open; at most "
            f"{self.nbytes_max} are allowed for metadata; {_ALLOW}"
        )

    def release(self, nbytes: int) -> None:
        """Count memory that is free again."""
        with self._lock:
            self._nbytes -= nbytes

    @contextmanager
    def using(self, nbytes: int, what: str) -> Iterator[None]:
        """Within the block so much memory is taken, by one thread at a time. Raises
        UnsupportedFormat beyond the budget, before the block begins.
        """
        # In turn, or threads that fit one by one would be refused together.
        with self._turn:
            # Refuses at once if what came before has taken too long.
            self._spend(0.0, what)
            self.charge(nbytes, what)
            began = time.thread_time()
            try:
                yield
            finally:
                self.release(nbytes)
                with self._lock:
                    self._seconds += time.thread_time() - began

    def timed(self, items: Iterable[_Item], what: str) -> Iterator[_Item]:
        """`items`; what this thread does between them is counted. Raises UnsupportedFormat when
        all of that has taken too long.
        """
        began = time.thread_time()
        stride, left = 1, 1  # items between looks at the clock, which takes as long as a small one
        for item in items:
            left -= 1
            if not left:
                now, stride = time.thread_time(), min(2 * stride, 256)
                if now - began > _STEP_SECONDS:
                    self._spend(now - began, what)
                    began, stride = now, 1
                left = stride
            yield item
        self._spend(time.thread_time() - began, what)

    def _spend(self, seconds: float, what: str) -> None:
        with self._lock:
            self._seconds += seconds
            taken = self._seconds
        if taken > self.seconds_max:
            raise UnsupportedFormat(
                f"{what}: metadata has taken {taken:.1f} seconds of a CPU; at most "
                f"{self.seconds_max:.1f} are allowed; {_ALLOW}"
            )


def unlimited() -> MetadataBudget:
    """The budget for what this process has made itself and only decodes again."""
    return MetadataBudget(sys.maxsize)


_ALLOW = "if you trust the store, pass metadata_bytes_max= (--metadata-bytes-max)"


REFERENCES = "references"  # a feature in `Header.required`
DELTA = "delta"  # another: what is stored is new in a state published before
PARENT = "../"
DATA_FILE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors"

_PLAIN = re.compile(DATA_FILE, re.ASCII)
_REFERENCE = re.compile(
    r"\.\./(?P<directory>(?P<step>[0-9]{8,18})-(?P<attempt>e(?P<epoch>[0-9]{6,18})-[0-9a-f]{16}))/"
    rf"(?P<name>{DATA_FILE})",
    re.ASCII,
)


_ATTEMPT = re.compile(r"e[0-9]{6,18}-[0-9a-f]{16}", re.ASCII)


class Reference(NamedTuple):
    """A data file of another attempt of the same root."""

    directory: str  # below steps/, without slashes
    attempt: str
    name: str


def is_reference(file: str) -> bool:
    """Whether a file of a manifest lies in another attempt's directory."""
    return file.startswith(PARENT)


def is_data_file_name(file: str) -> bool:
    """Whether `file` is the name of a data file in the checkpoint's own directory."""
    return _PLAIN.fullmatch(file) is not None


def reference_to(step: int, attempt: str, name: str) -> str:
    """How a manifest names the data file `name` of another attempt."""
    return f"{PARENT}{step:08d}-{attempt}/{name}"


def parse_reference(file: str) -> Reference | None:
    """The inverse of `reference_to`; None for everything that it does not make, to the letter."""
    match = _REFERENCE.fullmatch(file)
    if match is None:
        return None
    step, epoch = match["step"], match["epoch"]
    # One spelling for one file: whatever keeps files alive compares names.
    if f"{int(step):08d}" != step or f"{int(epoch):06d}" != epoch or int(epoch) < 1:
        return None
    return Reference(match["directory"], match["attempt"], match["name"])


VERSION = 1
# The names in `required` that this version can read.
FEATURES: frozenset[str] = frozenset({REFERENCES, DELTA})
# The bytes of a manifest say nothing of how many chunks there can be.
CHUNKS_MAX = 1 << 26
# Far beyond any checkpoint; sums of element and byte counts below it cannot wrap around.
NUMEL_MAX = 1 << 58

WRITERS = "ckpt.writers"  # key of `Header.user`: of several, the names and numbers of ranks
MODULES = "ckpt.modules"  # key of `Header.user`: the paths of the state's modules, a JSON list
SINCE_FULL = "ckpt.since_full"  # another: saves with references since one without, their number
PUBLICATION = "ckpt.publication"  # of a delta: attempts with the state it goes from


class Header(BaseModel):
    """The facts about a checkpoint that are not columns. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    version: int = VERSION
    root: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    attempt: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")]
    step: Annotated[int, Field(ge=0, lt=1 << 63)]
    world_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    block_bytes: Annotated[int, Field(ge=16, lt=1 << 31, multiple_of=16)] = BLOCK_BYTES
    created_unix: Annotated[int, Field(ge=0, lt=1 << 63)]
    required: tuple[str, ...] = ()
    user: dict[str, str] = Field(default_factory=dict)

    @property
    def worlds(self) -> list[range]:
        """The ranks of each world that saved: of one, or of each of several writers."""
        try:
            sizes = [int(size) for _, size in json.loads(self.user[WRITERS])]
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            sizes = []
        if sum(sizes) != self.world_size or min(sizes) < 1:
            # What makes no sense counts as one world: the ranks' number alone is checked.
            sizes = [self.world_size]
        return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    @property
    def publication(self) -> tuple[str, ...] | None:
        """Of a delta the attempts with the state that it goes from, the one that it needs first; of
        an anchor the delta with the same state, if there is one; None for what was not published.

        Raises ValueError where it says something else.
        """
        if PUBLICATION not in self.user:
            return None
        attempts = tuple(json.loads(self.user[PUBLICATION]))
        wrong = [one for one in attempts if not (isinstance(one, str) and _ATTEMPT.fullmatch(one))]
        if wrong or (DELTA in self.required and not attempts):
            raise ValueError(f"{PUBLICATION}: {self.user[PUBLICATION]:.200}")
        return attempts


class BoxTable:
    """Unique boxes as columns; a Box is created on access."""

    __slots__ = ("first", "offsets", "sizes")

    def __init__(self, first: Ints, offsets: Ints, sizes: Ints) -> None:
        self.first, self.offsets, self.sizes = first, offsets, sizes

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> BoxTable:
        offsets = int64s([start for box in boxes for start in box.offset])
        shapes = [box.shape for box in boxes]
        return cls(starts_of(list(map(len, shapes))), offsets, int64s(list(chain(*shapes))))

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, index: int) -> Box:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = slice(int(self.first[index]), int(self.first[index + 1]))
        return Box(tuple(self.offsets[part].tolist()), tuple(self.sizes[part].tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """All chunks, sorted by tensor, then by the row-major index of their first element.

    Columns may be read-only, of any integer type, and views of stride zero. Contiguous regions are
    always spans: `box` is -1 for them. For the others `span_start` is -1 and `boxes[box]` is the
    region.
    """

    first: Int64s  # [tensors + 1] chunks of tensor t are first[t]:first[t + 1]
    file: Ints
    byte_start: Ints  # offset in the file
    span_start: Ints
    numel: Ints
    box: Ints
    boxes: BoxTable
    first_block: Ints  # [chunks + 1] blocks of chunk i are first_block[i]:first_block[i + 1]

    def __len__(self) -> int:
        return len(self.file)

    def region(self, index: int) -> Region:
        """The region of chunk `index` in its tensor's index space."""
        box = int(self.box[index])
        if box >= 0:
            return self.boxes[box]
        start = int(self.span_start[index])
        return Span(start, start + int(self.numel[index]))

    def of_tensor(self, tensor: int) -> range:
        """The chunks of a tensor, by its position in the manifest."""
        return range(int(self.first[tensor]), int(self.first[tensor + 1]))

    def files_by_tensor(self) -> Iterator[tuple[int, list[int]]]:
        """How many chunks each tensor has, and the files that they are in, each once."""
        return distinct_by_part(self.file, np.diff(self.first).tolist())


class Wanted(NamedTuple):
    """Elements of tensors: of `tensor[i]` the row-major indexes `low[i]` to `high[i]`."""

    tensor: Int64s
    low: Int64s
    high: Int64s


class RuledChunks:
    """A `ChunkTable` that stays the rules that are stored, until a chunk is asked for.

    Only then `make` makes it and checks it, and raises what it raises. How many chunks a tensor
    has, and in which files, is known without it. `some` makes the table of the files alone that
    have any of what is wanted; None where all have to be listed.
    """

    def __init__(
        self,
        first: Int64s,
        files: Ints | Progressions,
        make: Callable[[], ChunkTable],
        some: Callable[[Wanted], ChunkTable | None],
    ) -> None:
        self._first = first
        self._files = files
        self._make = make
        self.some = some
        self._lock = threading.Lock()
        self._made: ChunkTable | None = None

    def __len__(self) -> int:
        return int(self._first[-1])

    def files_by_tensor(self) -> Iterator[tuple[int, list[int]]]:
        """How many chunks each tensor has, and the files that they are in, each once."""
        return distinct_by_part(self._files, np.diff(self._first).tolist())

    def __getattr__(self, name: str) -> Any:
        # Called for what is no attribute here, the columns: two threads must not both make the
        # table.
        with self._lock:
            if self._made is None:
                self._made = self._make()
        return getattr(self._made, name)


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """One checkpoint. Two manifests are the same when their encodings are.

    Checksums and digests of chunks are in the data files, and here are the `seals` of the tables
    there: `ckpt.loading.block_sums` reads them. What is made of a manifest later is charged to its
    `budget`.
    """

    header: Header
    files: tuple[str, ...]  # names relative to the step's directory, own ones first
    file_nbytes: Int64s
    file_data_start: Int64s  # length of each file's header
    fqns: tuple[str, ...]  # sorted
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    kinds: Ints
    aliases: Mapping[str, str]  # tied name -> stored fqn
    chunks: ChunkTable | RuledChunks
    values: bytes
    per_rank: tuple[bytes, ...]  # of each rank of the saving world, or empty
    seals: Seals
    data: bytes = field(default=b"", repr=False)  # all of it, as it is stored
    budget: MetadataBudget = field(default_factory=unlimited, repr=False)

    @property
    def is_sealed(self) -> bool:
        """Whether its files have checksums: not those of other libraries, whose manifest this
        process has made and nobody has stored.
        """
        return bool(self.data)

    @property
    def own_nbytes(self) -> int:
        """Bytes of the data files in the checkpoint's own directory."""
        sizes = zip(self.files, self.file_nbytes.tolist(), strict=True)
        return sum(nbytes for name, nbytes in sizes if not is_reference(name))

    @property
    def references(self) -> tuple[str, ...]:
        """The attempts that this checkpoint needs besides its own files, ascending."""
        base = (self.header.publication or ())[:1] if DELTA in self.header.required else ()
        return tuple(sorted({*self.nbytes_referenced(), *base}))

    def nbytes_referenced(self) -> dict[str, int]:
        """Bytes of this checkpoint's chunks that lie in files of other attempts, by attempt."""
        parsed_names = [parse_reference(name) for name in self.files]
        # Most checkpoints refer to nothing, and chunks that are rules need not be listed for that.
        if not any(parsed_names):
            return {}
        nbytes = self.chunk_sizes()
        held: dict[str, int] = {}
        for file, reference in enumerate(parsed_names):
            if reference is not None:
                here = int(nbytes[self.chunks.file == file].sum())
                held[reference.attempt] = held.get(reference.attempt, 0) + here
        return held

    @property
    def itemsizes(self) -> Int64s:
        """Bytes of an element of each tensor."""
        return int64s(list(map(ITEMSIZES.__getitem__, self.dtypes)))

    def chunk_sizes(self) -> Ints:
        """Stored bytes of each chunk."""
        return self.chunks.numel * np.repeat(self.itemsizes, np.diff(self.chunks.first))

    def index(self, fqn: str) -> int:
        """The position of a stored tensor (not of an alias). Raises KeyError."""
        position = bisect_left(self.fqns, fqn)
        if position == len(self.fqns) or self.fqns[position] != fqn:
            raise KeyError(fqn)
        return position

    def tensor_of(self, chunk: int) -> int:
        """The position of the tensor that `chunk` is a region of."""
        return bisect_right(self.chunks.first, chunk) - 1

    def chunk_nbytes(self, chunk: int) -> int:
        """Stored bytes of `chunk`."""
        return int(self.chunks.numel[chunk]) * ITEMSIZES[self.dtypes[self.tensor_of(chunk)]]

    def region(self, chunk: int) -> Region:
        """The region of `chunk` in its tensor's index space."""
        return self.chunks.region(chunk)

    @property
    def block_count(self) -> int:
        """How many blocks all chunks have together."""
        return int(self.chunks.first_block[-1])


def starts_of(counts: Ints | Sequence[int]) -> Int64s:
    """Where runs of these lengths start, and where the last one ends: one more than counts."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def int64s(values: Sequence[int]) -> Int64s:
    """`values` as a column, of the same type for no values at all."""
    return np.array(values, dtype=np.int64)


def narrowed(values: Int64s) -> Ints:
    """`values`, none negative, in 32 bits each where they fit: tables have millions of rows."""
    return values.astype(np.uint32) if not len(values) or values.max() < 1 << 32 else values


def no_chunks() -> ChunkTable:
    """A table without chunks."""
    none = int64s([])
    return ChunkTable(starts_of([]), none, none, none, none, none, BoxTable.of([]), starts_of([]))
