"""Checkpoints of other libraries, presented as one of ours: a manifest of what they have, and a
store that reads it as one data file, which exists nowhere. So loads, `ckpt.open` and the commands
take them as they are, on any layout, and read no byte that they do not need.

Such files have no checksums of blocks: bytes are taken as they are. Every rank opens the files
itself; what they describe has to be the same on all.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate, islice
from typing import Any

import numpy as np

from ckpt.convert.sources.opening import LISTED_MAX, SourceOptions, is_file_name, open_source
from ckpt.convert.sources.source import FileSource, ReadRequest
from ckpt.convert.sources.tree import GroupedNames
from ckpt.errors import Mismatch, NoCheckpoint
from ckpt.format.checksum import DIGEST_NBYTES, Seal, Seals
from ckpt.format.codec import encode_values
from ckpt.format.manifest import (
    BoxTable,
    ChunkTable,
    Header,
    Manifest,
    MetadataBudget,
    int64s,
    starts_of,
)
from ckpt.layout.dtypes import DTYPES, torch_dtype
from ckpt.layout.memory import tensor_over
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Shape, Span
from ckpt.loading.contents import LocatedCheckpoint
from ckpt.loading.exchange import Origins
from ckpt.loading.load import LoadOptions, LoadReport, in_form_of_state, load_located
from ckpt.loading.plan import ReadPath
from ckpt.state.describe import describe_modules
from ckpt.state.names import clean_name
from ckpt.state.values import join
from ckpt.state.walk import walk
from ckpt.world.base import World, collectively
from storage import ByteRange, Store, StoreLike, open_store
from storage.location import url_of
from storage.wrap import WrappedStore

logger = logging.getLogger(__name__)

KIB = 1 << 10
BLOCK_BYTES = 64 * KIB  # loads read whole ones; nothing is checked by them
ALIGNED = 64
FILE = "tensors.safetensors"
# Records of a log, files of a checkpoint; data files in any folder.
_OURS = re.compile(
    r"log/\d{20}$|(spread/[^/]+/)?steps/\d{8,18}-e\d{6,18}-[0-9a-f]{16}/"
    r"|(.*/)?rank\d{5,}-\d{3,}\.safetensors$"
)
DEPTH_MAX = 3  # of paths whose names are compared


class SourceStore(WrappedStore):
    """The files of a source, read as `FILE`: its tensors one after the other, at `starts`."""

    def __init__(
        self, source: FileSource, url: str, fqns: Sequence[str], starts: Sequence[int]
    ) -> None:
        super().__init__(source.store)
        self.source = source
        self._url, self._fqns, self._starts = url, fqns, starts

    @property
    def url(self) -> str:  # type: ignore[override]
        return self._url

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        wanted = []
        for buffer in buffers:
            stop = start + len(buffer)
            number = bisect_right(self._starts, start) - 1
            while number < len(self._fqns) and self._starts[number] < stop:
                info = self.source.contents.tensors[self._fqns[number]]
                base, itemsize = self._starts[number], DTYPES[info.dtype].itemsize
                low, high = max(start, base), min(stop, base + info.nbytes)
                if low < high:
                    memory = buffer[low - start : high - start]
                    span = Span((low - base) // itemsize, (high - base) // itemsize)
                    target = tensor_over(memory, torch_dtype(info.dtype), (span.numel,))
                    wanted.append(ReadRequest(info.fqn, span, target))
                number += 1
            start = stop
        self.source.fill(wanted)

    # The source reads files of others, where tensors lie at any byte: none of that is aligned.
    def get_direct_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self.get_into(key, start, buffers)

    def is_cold(self, key: str, byte_range: ByteRange) -> bool:
        return False


def foreign(
    url: StoreLike,
    error: Exception,
    storage_options: Mapping[str, Any] | None = None,
    budget: MetadataBudget | None = None,
    parameters: tuple[Sequence[str] | None, Mapping[str, Shape] | None] = (None, None),
) -> tuple[SourceStore, LocatedCheckpoint]:
    """The checkpoint of another library at `url`. Raises `error`, which says why there is none of
    ours, where there is none; Corrupt, UnsupportedFormat and the store's errors.
    `parameters` are the names of an optimizer's, if it only numbers them, and a model's shapes.
    """
    budget = budget or MetadataBudget()
    options = SourceOptions(
        parameter_names=parameters[0],
        shapes=parameters[1],
        memory_bytes_max=budget.nbytes_max,
        storage_options=dict(storage_options or {}),
    )
    place = url.url if isinstance(url, Store) else url_of(url)
    is_file = not isinstance(url, Store) and is_file_name(place)
    # A data file of ours is part of a checkpoint, though it is a whole safetensors file.
    if is_file and _OURS.match(place.rpartition("/")[2]):
        raise error
    opener = open_store if is_file else partial(_open_unless_ours, error)
    try:
        source = open_source(url, options, opener)
    except NoCheckpoint:
        raise error from None
    try:
        if not isinstance(source, FileSource):
            raise error
        return _located(source, place, budget)
    except BaseException:
        source.close()
        raise


def _open_unless_ours(error: Exception, url: StoreLike, **options: Any) -> Store:
    """The store at `url`. Raises `error` where files of ours are: they are to be mended, not read
    as if others had written them.
    """
    with ExitStack() as stack:
        store = open_store(url, **options)
        stack.callback(store.close)
        if any(_OURS.match(one.key) for one in islice(store.list(""), LISTED_MAX)):
            raise error
        stack.pop_all()
        return store


def _located(
    source: FileSource, url: str, budget: MetadataBudget
) -> tuple[SourceStore, LocatedCheckpoint]:
    contents = source.contents
    if unread := _unread(source):
        logger.warning("%s: not read: %s", url, "; ".join(unread[:20]))
    fqns = tuple(sorted(contents.tensors))
    tensors = [contents.tensors[fqn] for fqn in fqns]
    sizes = int64s([one.nbytes for one in tensors])
    starts = starts_of(-(-sizes // ALIGNED) * ALIGNED)
    some = np.flatnonzero(sizes)  # a tensor without elements has no chunk
    numel = sizes[some] // int64s([DTYPES[tensors[row].dtype].itemsize for row in some.tolist()])
    none = np.zeros(len(some), dtype=np.int64)
    chunks = ChunkTable(
        first=starts_of((sizes > 0).astype(np.int64)),
        file=none,
        byte_start=starts[:-1][some],
        span_start=none,
        numel=numel,
        box=none - 1,
        boxes=BoxTable.of([]),
        first_block=starts_of(-(-sizes[some] // BLOCK_BYTES)),
    )
    # A manifest has one; what other libraries do not record is 0 or the least that is valid.
    header = Header(
        root="0" * 32,
        attempt=re.sub(r"[^A-Za-z0-9]+", "-", source.format),
        step=contents.step or 0,
        world_size=max(1, len(contents.per_rank)),
        block_bytes=BLOCK_BYTES,
        created_unix=0,
    )
    manifest = Manifest(
        header=header,
        files=(FILE,),
        file_nbytes=starts[-1:],
        file_data_start=int64s([0]),
        fqns=fqns,
        dtypes=tuple(one.dtype for one in tensors),
        shapes=tuple(one.shape for one in tensors),
        kinds=int64s([int(one.kind) for one in tensors]),
        aliases=contents.aliases,
        chunks=chunks,
        values=encode_values(dict(contents.values)),
        per_rank=tuple(encode_values(dict(one)) for one in contents.per_rank),
        seals=Seals.of([Seal(0, bytes(DIGEST_NBYTES))]),
        budget=budget,
    )
    store = SourceStore(source, url, fqns, starts[:-1].tolist())
    return store, LocatedCheckpoint("", manifest, None)


def _unread(source: FileSource) -> list[str]:
    refused = sorted(source.contents.refused.items())
    return [f"{name}: {one.reason}" for name, one in refused if one.is_tensor or "groups" in name]


def load_foreign(
    state: Any,
    url: StoreLike,
    error: Exception,
    world: World,
    options: LoadOptions,
    path_of: Callable[[Store], ReadPath],
    storage_options: Mapping[str, Any] | None,
) -> LoadReport:
    """Load what another library has written into `state`; collective, and raises like `load_state`.
    `path_of` says how to read from a store, `error` why it is no checkpoint of ours.
    """
    ranks = Ranks(world.rank, world.global_ranks)
    with ExitStack() as stack:

        def opened() -> tuple[SourceStore, LocatedCheckpoint]:
            budget = MetadataBudget(options.metadata_bytes_max)
            parameters = _parameters(state, ranks)
            store, located = foreign(url, error, storage_options, budget, parameters)
            stack.callback(store.close)
            return store, located

        store, located = collectively(world, "open source", opened)
        # A digest is enough: each rank has read the whole description itself.
        mine = _described(located.manifest)
        first = world.broadcast("source", mine if world.rank == 0 else None)

        def compared() -> LoadOptions:
            if mine != first:
                raise Mismatch(
                    [f"rank {world.rank} sees other tensors or values there than rank 0"]
                )
            rename = options.rename
            # A caller's own `rename` is complete: nothing is deduced in addition.
            if rename is None:
                catalog = in_form_of_state(located.manifest, options.stacks).catalog
                stored = (*catalog.tensors, *catalog.aliases)
                rename = deduced(names_of(state, ranks), stored)
            return replace(options, rename=rename, path=path_of(store))

        try:
            return load_located(
                state,
                store=store,
                world=world,
                located=(located.prefix, located.manifest),
                options=collectively(world, "compare source", compared),
                origins=Origins(tuple(range(world.size)), {}),
            )
        except Mismatch as mismatch:
            # What could not be read may be what is missing.
            problems = [*mismatch.problems, *_unread(store.source)]
            raise Mismatch(problems, mismatch.where) from None


def deduced(names: Sequence[Sequence[str]], stored: Sequence[str]) -> Callable[[str], str] | None:
    """The stored name of each name of a state, where that is certain: what is below one path of the
    state lies below one path there, apart from what wrappers put into names, and no other pair of
    paths would do. None where names are equal, or no way is certain.

    `names` are those of each tensor of the state, several where it is tied.
    """
    plain: dict[str, str] = {}
    for name in stored:
        parts = clean_name(name).split(".")
        plain.setdefault(".".join(part for part in parts if part != "module"), name)  # DDP's
    # An exact name counts more than one that is equal without its wrappers.
    plain |= {name: name for name in stored}
    every = [name for tied in names for name in tied]
    if not every or all(any(plain.get(name) == name for name in tied) for tied in names):
        return None
    here = [end for end in _paths(every[0]) if all(_is_below(name, end) for name in every)]

    def moved(name: str, old: str, new: str) -> str:
        return join(new, name[len(old) + 1 :] if old else name)

    ways = {}
    # In any order: only a way that is the only one counts.
    for new in {end for name in plain for end in _paths(name)}:
        for old in here:
            known: dict[str, str] = {}
            for tied in names:
                places = [plain.get(moved(name, old, new)) for name in tied]
                # A tied tensor is stored under one of its names at least; under none, this is no
                # way.
                if (first := next(filter(None, places), None)) is None:
                    break
                known |= {name: place or first for name, place in zip(tied, places, strict=True)}
            else:
                # By what it leads to: two pairs of paths with the same stored names are one way.
                ways[tuple(known.values())] = old, new, known
    if len(ways) != 1:
        return None
    ((old, new, known),) = ways.values()

    def rename(name: str) -> str:
        if name in known or not _is_below(name, old):
            return known.get(name, name)
        return plain.get(moved(name, old, new), moved(name, old, new))

    logger.info("names below %r of the state are read from below %r", old, new)
    return rename


def _paths(name: str) -> Iterator[str]:
    """The root, and the paths of `DEPTH_MAX` parts at most that a name may lie below."""
    return accumulate(name.split(".")[:-1][:DEPTH_MAX], join, initial="")


def _is_below(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")


def names_of(state: Any, ranks: Ranks) -> list[tuple[str, ...]]:
    """The names of each tensor of a state's modules; of all its tensors where it has none."""
    leaves = walk(state)
    described = describe_modules(leaves, ranks, loading=True)
    names = {fqn: [fqn] for source, _ in described.tensors() for fqn in source.fqns}
    for alias, fqn in described.aliases.items():
        names.setdefault(fqn, [fqn]).append(alias)
    return list(map(tuple, names.values())) or [(fqn,) for fqn, _ in leaves.tensors]


def _parameters(state: Any, ranks: Ranks) -> tuple[list[str] | None, Mapping[str, Shape] | None]:
    """The names of an optimizer's parameters in its order, as on their module; None where there is
    not one optimizer, or where one of its parameters is several of the module's. And the shapes of
    a module's parameters, if there is one module.
    """
    leaves = walk(state)
    described = describe_modules(leaves, ranks, loading=True)
    shapes = None
    if len(leaves.modules) == 1:
        members = [member for source in described.params for member in source.members]
        shapes = {member.fqn: tuple(member.global_shape) for member in members}
    if len(leaves.optimizers) != 1:
        return None, shapes
    ((_, optimizer),) = leaves.optimizers
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sources = [described.by_param.get(id(param)) for param in params]
    each = (source.members[0].fqn for source in sources if source and len(source.members) == 1)
    names = GroupedNames(each)
    names.sizes = [len(group["params"]) for group in optimizer.param_groups]
    return names if len(names) == len(params) else None, shapes


def _described(manifest: Manifest) -> bytes:
    whole = repr((manifest.fqns, manifest.dtypes, manifest.shapes, dict(manifest.aliases)))
    parts = [whole.encode(), manifest.values, *manifest.per_rank]
    return blake2b(b"\0".join(parts), digest_size=16).digest()
