"""Look into a checkpoint without a process group: names, shapes, one tensor, or one region of it.

`open_checkpoint` reads the manifest and nothing else; tensors are read when requested, in whole
blocks, each checked against its checksum.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType, TracebackType
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import torch

from ckpt.commit.lines import latest_last
from ckpt.commit.locate import check_self_contained, live_entries, locate
from ckpt.commit.names import MANIFEST_NAME
from ckpt.commit.numbers import plain_int
from ckpt.commit.records import LiveEntry
from ckpt.errors import Corrupt, NoCheckpoint, UnsupportedFormat
from ckpt.format.codec import decode_values
from ckpt.format.manifest import MODULES, Manifest
from ckpt.format.manifest_codec import decode_manifest
from ckpt.layout.dtypes import DTYPES, torch_dtype
from ckpt.layout.piece import Holding, Kind, Piece
from ckpt.layout.region import Box, Region, Shape, Span, is_inside, whole
from ckpt.loading.block_sums import BlockSums
from ckpt.loading.plan import ReadPath, plan_reads
from ckpt.loading.reader import Reader
from storage import KeyNotFoundError, Store, StoreLike, open_store

Index: TypeAlias = int | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """A checkpoint in a store; `prefix` is its directory, "" or with a closing slash."""

    prefix: str
    manifest: Manifest
    entry: LiveEntry | None  # None for a step directory on its own


class StoredPart(NamedTuple):
    """A region of a tensor, and the file and bytes that hold it.

    `file` is as in the manifest: `../<step directory>/<name>` in another one's directory.
    """

    region: Region
    file: str
    byte_start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint. `alias_of` names the stored tensor of a tied one."""

    fqn: str
    dtype: torch.dtype
    shape: Shape
    kind: Kind
    nbytes: int
    parts: tuple[StoredPart, ...]
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One checkpoint of a root. `url` opens it by itself, also after it was copied elsewhere,
    unless it needs files of others: `references` are the attempts of those.

    Checkpoints of one `line` were saved by one training, one after the other; None for imports and
    copies in another layout, which no training resumes from.
    """

    step: int
    attempt: str
    url: str
    pinned: bool
    verified: bool
    metric: float | None
    references: tuple[str, ...] = ()
    line: int | None = 0


def open_checkpoint(
    url: StoreLike,
    step: SupportsIndex | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The checkpoint of `step`, by default the latest one, for reading.

    `url` is a root, or a step directory wherever it was copied to. Reads the manifest only. Raises
    NoCheckpoint when there is none, Corrupt when the log or the manifest is damaged,
    UnsupportedFormat when a newer version wrote it, and the store's errors.
    """
    store = open_store(url, **(storage_options or {}))
    try:
        return Checkpoint(store, find_checkpoint(store, step))
    except BaseException:
        store.close()
        raise


def list_steps(
    url: StoreLike, storage_options: Mapping[str, Any] | None = None
) -> tuple[StepInfo, ...]:
    """The checkpoints of a root in the order of their commits; the last one is the latest.

    Those of no line (imports, copies in another layout) stand before all others for that reason.
    Empty when nothing was saved there yet, so that a training can ask before it loads. Raises
    NoCheckpoint when something else is at `url`, and the store's errors.
    """
    store = open_store(url, **(storage_options or {}))
    try:
        live = _live_entries(store)
    finally:
        store.close()
    return tuple(
        StepInfo(
            step=entry.step,
            attempt=entry.attempt,
            url=f"{store.url.rstrip('/')}/{entry.prefix.rstrip('/')}",
            pinned=entry.pinned,
            verified=entry.verified,
            metric=entry.metric,
            references=entry.references,
            line=entry.line,
        )
        for entry in latest_last(live)
    )


def _live_entries(store: Store) -> tuple[LiveEntry, ...]:
    try:
        return live_entries(store)
    except NoCheckpoint:
        # An empty place is where a training is about to save; anything else there is a wrong url.
        if next(iter(store.list("")), None) is None:
            return ()
        raise


def find_checkpoint(store: Store, step: SupportsIndex | None = None) -> LocatedCheckpoint:
    """The checkpoint of `step` in a root, by default the latest, or the one of a step directory.

    Raises like `open_checkpoint`.
    """
    number: int | None = plain_int(step)
    located = locate(store, number)
    where = f"{store.url}/{located.prefix}{MANIFEST_NAME}"
    try:
        manifest = decode_manifest(located.data)
    except (Corrupt, UnsupportedFormat) as error:
        raise type(error)(f"{where}: {error}") from error
    # A step directory has its own step only, whichever was requested.
    if number is not None and manifest.header.step != number:
        raise NoCheckpoint(f"{where} is of step {manifest.header.step}; step {number} is not here")
    check_self_contained(store, located.prefix, manifest)
    return LocatedCheckpoint(located.prefix, manifest, located.entry)


class Checkpoint:
    """One checkpoint, opened for reading: a mapping from fqn to tensor that reads on request.

        with ckpt.open("s3://bucket/run") as ck:
            weight = ck["model.layers.0.weight"]
            rows = ck.read("model.embed.weight", (slice(0, 100),))

    Tied names are in it like all others. Safe to use from several threads.
    """

    def __init__(
        self, store: Store, located: LocatedCheckpoint, *, path: ReadPath | None = None
    ) -> None:
        self.store = store
        self.prefix = located.prefix
        self.manifest = located.manifest
        self.entry = located.entry
        self._path = path or ReadPath(readers=4)
        self.sums = BlockSums(store, located.prefix, located.manifest, self._path.cache)

    @property
    def url(self) -> str:
        """The step directory."""
        return f"{self.store.url.rstrip('/')}/{self.prefix}".rstrip("/")

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.manifest.header.step

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self.manifest.header.world_size

    @property
    def user(self) -> Mapping[str, str]:
        """The notes that were given to the save as `user=`."""
        return {k: note for k, note in self.manifest.header.user.items() if k != MODULES}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names, each with the fqn under which its tensor is stored."""
        return self.manifest.aliases

    @cached_property
    def values(self) -> dict[str, Any]:
        """The values that were the same on all ranks, by fqn."""
        return dict(decode_values(self.manifest.values)) if self.manifest.values else {}

    @cached_property
    def per_rank(self) -> tuple[dict[str, Any], ...]:
        """The `PerRank` values of each rank that saved, by fqn; empty when there were none."""
        return tuple(dict(decode_values(data)) for data in self.manifest.per_rank)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(sorted((*self.manifest.fqns, *self.manifest.aliases)))

    def keys(self) -> tuple[str, ...]:
        """All tensor names, tied ones included, sorted."""
        return self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, fqn: object) -> bool:
        return isinstance(fqn, str) and (fqn in self.aliases or self._is_stored(fqn))

    def __getitem__(self, fqn: str) -> torch.Tensor:
        """The whole tensor, checked. Raises like `read`."""
        return self.read(fqn)

    def read(
        self, fqn: str, region: Region | Index | tuple[Index, ...] | None = None
    ) -> torch.Tensor:
        """A region of a tensor in new memory, every byte of it checked.

        A Box gives a tensor of its shape, a Span a 1-D tensor; slices and integers are taken as by
        `tensor[...]`, with steps of at least 1. Reads the blocks that the region touches and no
        others. Raises KeyError for an unknown name, IndexError for a region outside of the tensor,
        Corrupt naming file and block when bytes were changed, NoCheckpoint when the checkpoint was
        retired meanwhile.
        """
        info = self._stored(fqn)
        if region is None:
            return self._filled(info, whole(info.shape))
        if isinstance(region, Box | Span):
            if not is_inside(region, info.shape):
                raise IndexError(f"{fqn}: {region} is outside of its shape {info.shape}")
            return self._filled(info, region)
        box, rest = _box_of(region, info.shape, fqn)
        return self._filled(info, box)[rest]

    def info(self, fqn: str) -> TensorInfo:
        """Dtype, shape and kind of a tensor, and where its parts are stored. Raises KeyError."""
        entry = self._stored(fqn)
        return TensorInfo(
            fqn=fqn,
            dtype=torch_dtype(entry.dtype),
            shape=entry.shape,
            kind=Kind.of(int(self.manifest.kinds[entry.number])),
            nbytes=math.prod(entry.shape) * DTYPES[entry.dtype].itemsize,
            parts=tuple(self._parts(entry.number)),
            alias_of=self.aliases.get(fqn),
        )

    def close(self) -> None:
        """Release connections. What was read stays valid."""
        self.store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint step {self.step} of {self.url}: {len(self)} tensors>"

    def _is_stored(self, fqn: str) -> bool:
        try:
            self.manifest.index(fqn)
        except KeyError:
            return False
        return True

    def _stored(self, fqn: str) -> StoredTensor:
        stored = self.aliases.get(fqn, fqn)
        try:
            index = self.manifest.index(stored)
        except KeyError:
            raise KeyError(f"{fqn!r} is not in {self!r}{_hint(fqn, self._names)}") from None
        return StoredTensor(index, stored, self.manifest.dtypes[index], self.manifest.shapes[index])

    def _parts(self, index: int) -> Iterator[StoredPart]:
        chunks = self.manifest.chunks
        for chunk in range(int(chunks.first[index]), int(chunks.first[index + 1])):
            yield StoredPart(
                region=self.manifest.region(chunk),
                file=self.manifest.files[int(chunks.file[chunk])],
                byte_start=int(chunks.byte_start[chunk]),
                nbytes=self.manifest.chunk_nbytes(chunk),
            )

    def _filled(self, entry: StoredTensor, region: Region) -> torch.Tensor:
        shape = region.shape if isinstance(region, Box) else (region.numel,)
        target = torch.empty(shape, dtype=torch_dtype(entry.dtype))
        wanted = [piece_of(entry, region, target)]
        try:
            fill(self, wanted, self._path)
        except KeyNotFoundError as error:
            if self._was_retired():
                raise NoCheckpoint(
                    f"{error}: step {self.step} was retired while it was open, and its files are "
                    f"deleted; open another step of {self.store.url}"
                ) from error
            raise
        return target

    def _was_retired(self) -> bool:
        """Whether the log no longer has what was opened; False for a step directory on its own."""
        if self.entry is None:
            return False
        live = live_entries(self.store)
        return all(entry.attempt != self.entry.attempt for entry in live)


class StoredTensor(NamedTuple):
    """A tensor of the manifest; `number` is its place in the columns."""

    number: int
    fqn: str
    dtype: str
    shape: Shape


def piece_of(entry: StoredTensor, region: Region, target: torch.Tensor) -> Holding:
    """`region` of a stored tensor, to be read into all of `target`."""
    piece = Piece(
        entry.fqn, entry.shape, target.dtype, region, whole(tuple(target.shape)), holders=(0,)
    )
    return Holding(target, (piece,), Kind.OTHER, synchronized=True)


def fill(checkpoint: Checkpoint, holdings: Sequence[Holding], path: ReadPath) -> None:
    """Read the holdings' pieces into their memory, every block checked.

    Raises Corrupt and the store's errors; the memory is undefined then.
    """
    reader = Reader(checkpoint.sums, plan_reads(checkpoint.manifest, holdings), path)
    reader.read_private(reader.blocks.runs())


def _hint(fqn: str, names: Sequence[str]) -> str:
    tail = fqn.rpartition(".")[2]
    close = [name for name in names if name.endswith(f".{fqn}")]
    if not close:
        some = [name for name in names if name.endswith(tail)] or list(names)
        # Bounded, since every name is compared: a hint must not take seconds.
        close = difflib.get_close_matches(fqn, some[:2000], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _box_of(
    index: Index | tuple[Index, ...], shape: Shape, fqn: str
) -> tuple[Box, tuple[int | slice, ...]]:
    """The smallest box with all elements of `tensor[index]`, and the index into that box."""
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        position = items.index(Ellipsis)
        items[position : position + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    items += [slice(None)] * (len(shape) - len(items))
    if len(items) > len(shape):
        raise IndexError(f"{fqn}: {len(items)} indices for shape {shape}")
    offset, size, rest = [], [], list[int | slice]()
    for item, total in zip(items, shape, strict=True):
        if isinstance(item, slice):
            start, stop, stride = item.indices(total)
            if stride < 1:
                raise IndexError(
                    f"{fqn}: a slice with step {stride}; flip the tensor after reading"
                )
            offset.append(start)
            size.append(max(stop - start, 0))
            rest.append(slice(None, None, stride))
            continue
        if not isinstance(item, int) or not -total <= item < total:
            raise IndexError(f"{fqn}: index {item!r} is outside of shape {shape}")
        offset.append(item % total)
        size.append(1)
        # An integer drops the dim, as in torch; the box keeps it with one element.
        rest.append(0)
    return Box(tuple(offset), tuple(size)), tuple(rest)
