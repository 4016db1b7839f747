"""What a load would do, before it touches data: bytes and requests per rank, memory, names.

    wanted pieces of every rank -> the plan of a load -> the requests that it would make

The plan is made by the code that loads (`plan_reads`, `share`, `Reader`), so it shows what
would happen, and MANIFEST alone is read. No rank has to exist: `plan_ranks` plans for N of
them with an even layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import torch
import torch.distributed as dist

from ckpt.api import read_path
from ckpt.commit.names import plain_int
from ckpt.convert.export import default_entry
from ckpt.convert.sources.source import NativeSource, SourceContents
from ckpt.format.manifest import Manifest, MetadataBudget
from ckpt.layout.dtypes import DTYPES, dtype_name, torch_dtype
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Box, EvenLayout, wanted_part, whole
from ckpt.loading.block_sums import sums_of
from ckpt.loading.checkpoint import Checkpoint
from ckpt.loading.contents import LocatedCheckpoint, store_and_checkpoint
from ckpt.loading.exchange import (
    ShareLimits,
    Sharing,
    long_only,
    nbytes_under_way,
    share,
    weigh,
)
from ckpt.loading.load import catalog_of, in_form_of_state
from ckpt.loading.matching import all_together, needs_of
from ckpt.loading.plan import NeededBlocks, ReadPath, ReadPlan, plan_reads
from ckpt.loading.reader import Reader
from ckpt.short import ShortRecord
from ckpt.state.bind import bind_state
from ckpt.state.names import GroupOptions
from ckpt.state.resize import Resize
from ckpt.state.types import TensorEntry
from storage import Store, StoreLike
from storage.hidden import hides_secrets

MANIFEST_MEMORY = 4  # a decoded manifest takes at most this many times the bytes of MANIFEST
# Of memory for a plan, measured: of each chunk, on the rank that wants it, and of each block.
NEED_NBYTES = 1000
BLOCK_NBYTES = 64


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank would do. All numbers but `requests` are bytes.

    `nbytes_wanted` is the memory that is filled. `nbytes_read` comes from the store in `requests`
    reads, in whole blocks; `nbytes_received` comes from other ranks that read it. `nbytes_extra` is
    the memory that the load needs besides the state, at its peak.
    """

    rank: int
    nbytes_wanted: int
    nbytes_read: int
    nbytes_received: int
    requests: int
    nbytes_extra: int


@dataclass(frozen=True, slots=True, repr=False)
class LoadPlan(ShortRecord):
    """What a load would do on the given ranks.

    `missing` are names that the state has and the checkpoint has not. `unexpected` are names of the
    checkpoint that the state does not have, in entries that it has; `not_asked` counts the names in
    other entries.
    `problems` say what a strict load would refuse, `missing` and `unexpected` included.
    `nbytes_stored` are all tensor bytes of the checkpoint.
    """

    url: str
    step: int
    attempt: str
    ranks: tuple[RankPlan, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    not_asked: int
    problems: tuple[str, ...]
    nbytes_stored: int

    @property
    def fits(self) -> bool:
        """Whether a strict load would go through."""
        return not self.problems

    @property
    def nbytes_read(self) -> int:
        """Bytes that all these ranks would read from the store."""
        return sum(rank.nbytes_read for rank in self.ranks)


@hides_secrets
def plan_load(
    state: Any,
    url: StoreLike,
    *,
    step: SupportsIndex | None = None,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    skip: Callable[[str], bool] | Iterable[str] = (),
    new: Callable[[str], bool] | Iterable[str] = (),
    group_options: GroupOptions = None,
    stacks: Mapping[str, str] | None = None,
    resize: Resize = None,
    storage_options: Mapping[str, Any] | None = None,
    metadata_bytes_max: SupportsIndex | None = None,
) -> LoadPlan:
    """What `ckpt.load` with these arguments would do on this rank; reads MANIFEST, changes nothing.

    No rank waits for another, so bytes that ranks would share count in full: `nbytes_read` is what
    this rank needs, and a load on several ranks reads at most that. Problems are listed in the plan
    and not raised. Raises CheckpointError for `stacks` that are no rules, NoCheckpoint, Corrupt,
    UnsupportedFormat, InvalidState for a state that can never be loaded into, and the store's
    errors.
    """
    budget = MetadataBudget(plain_int(metadata_bytes_max))
    store, located = store_and_checkpoint(url, step, storage_options, budget=budget)
    with closing(store):
        manifest = located.manifest
        ranks = Ranks.alone()
        if dist.is_available() and dist.is_initialized():
            ranks = Ranks(dist.get_rank(), tuple(range(dist.get_world_size())))
        form = in_form_of_state(manifest, stacks or {})
        binding = bind_state(
            state,
            form.catalog,
            ranks,
            rename=rename,
            skip=skip,
            new=new,
            group_options=group_options,
            resize=resize,
        )
        of_stacks = [f"stacks=: {problem}" for problem in form.problems]
        fatal = (*of_stacks, *binding.fatal, *binding.unmatched)
        needs = _RankNeeds.of(manifest, form.stored(binding).holdings)
        alone = Sharing(needs.blocks.runs(), [])
        planned = needs.plan(store, located, read_path(store), ranks.rank, alone)
        report = binding.report
        names = _MatchedNames(report.missing, report.unexpected, report.not_asked, fatal)
        return _load_plan(store, located, (planned,), names)


class RequestedNames(NamedTuple):
    """What a state wants of a checkpoint: tensors by name, and names of values."""

    tensors: Mapping[str, TensorEntry]
    values: frozenset[str]


def plan_of_ranks(
    store: Store,
    located: LocatedCheckpoint,
    ranks: int | None,
    layout: EvenLayout,
    like: SourceContents | None,
    entry: str | None,
    budget: MetadataBudget,
) -> LoadPlan:
    """As `ckpt.plan_ranks`; `like` is what is in the checkpoint that the state looks like."""
    manifest = located.manifest
    # Refused before it is taken: a manifest of a few MiB can claim billions of blocks.
    nbytes = NEED_NBYTES * len(manifest.chunks) + BLOCK_NBYTES * manifest.block_count
    budget.charge(nbytes, f"a plan of {manifest.block_count} blocks")
    catalog = catalog_of(manifest)
    per_rank = {name for own in catalog.per_rank for name in own}
    everything = wanted = RequestedNames(catalog.tensors, frozenset(catalog.values) | per_rank)
    if like is not None and entry is None:
        # A module at the path "" is the whole state: the file of a model and nothing else.
        source = NativeSource(Checkpoint(store, located))
        is_bare = like.modules == ("",) and "" not in source.contents.modules
        entry = default_entry(source) if is_bare else ""
    if like is not None:
        wanted = _wanted_like(like, f"{entry}." if entry else "")
    tensors, names = _compared(everything, wanted, manifest.aliases)
    path, limits = read_path(store), ShareLimits()
    count = ranks or manifest.header.world_size

    def needed(rank: int) -> _RankNeeds:
        return _RankNeeds.of(manifest, _holdings(tensors, rank, count, layout))

    each = budget.timed(range(count), "a plan")
    needs = [needs_of(rank, needed(rank).blocks.runs()) for rank in each]
    everybodys = all_together(needs)
    groups = [everybodys.shared_in(one).groups() for one in needs]
    shared = everybodys.shared_in(everybodys).groups()
    weight = weigh(everybodys.runs, shared, None, limits)
    if weight.is_tiny():
        groups = [[] for _ in groups]
    elif weight.is_little(limits):
        groups = [long_only(one, limits) for one in groups]
    plans = []
    for rank in budget.timed(range(count), "a plan"):
        # Made anew: the memory of all ranks at once would be that of the whole cluster.
        planned = needed(rank)
        sharing = share(planned.blocks, groups[rank], rank, limits)
        plans.append(planned.plan(store, located, path, rank, sharing))
    return _load_plan(store, located, tuple(plans), names)


class _MatchedNames(NamedTuple):
    """How names of a state and of a checkpoint go together; see `LoadPlan`."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    not_asked: int
    problems: tuple[str, ...]


def _load_plan(
    store: Store, located: LocatedCheckpoint, ranks: tuple[RankPlan, ...], names: _MatchedNames
) -> LoadPlan:
    manifest = located.manifest
    header, url = manifest.header, Checkpoint(store, located).url
    stored = zip(manifest.shapes, manifest.dtypes, strict=True)
    nbytes = sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in stored)
    return LoadPlan(url, header.step, header.attempt, ranks, *names, nbytes)


# What is wanted -----------------------------------------------------------------------------


def _wanted_like(contents: SourceContents, prefix: str) -> RequestedNames:
    """What a state wants that is like a checkpoint, with its names behind `prefix`: "model." for
    the state {"model": net} and the file of a bare model.
    """
    tensors = {
        prefix + name: TensorEntry(torch_dtype(info.dtype), info.shape, info.kind)
        for name, info in contents.tensors.items()
    }
    tensors |= {prefix + name: tensors[prefix + held] for name, held in contents.aliases.items()}
    per_rank = {name for own in contents.per_rank for name in own}
    return RequestedNames(tensors, frozenset(prefix + n for n in {*contents.values, *per_rank}))


def _compared(
    there: RequestedNames, wanted: RequestedNames, aliases: Mapping[str, str]
) -> tuple[dict[str, TensorEntry], _MatchedNames]:
    """What is loaded by the checkpoint's names, and the names of both sides, by the rules of a
    load: top-level entries that are not wanted do not count.
    """
    loaded: dict[str, TensorEntry] = {}
    missing, problems = [], []
    for fqn, entry in sorted(wanted.tensors.items()):
        stored = aliases.get(fqn, fqn)
        if (stored_entry := there.tensors.get(stored)) is None:
            missing.append(fqn)
            problems.append(f"{fqn}: is not in the checkpoint")
        elif stored_entry.shape != entry.shape:
            shapes = f"has shape {stored_entry.shape}, state has {entry.shape}"
            problems.append(f"{fqn}: checkpoint {shapes}")
        elif stored_entry.dtype is not entry.dtype:
            stored_dtype, dtype = dtype_name(stored_entry.dtype), dtype_name(entry.dtype)
            dtypes = f"has dtype {stored_dtype}, state has {dtype}; a load never casts"
            problems.append(f"{fqn}: checkpoint {dtypes}")
        else:
            loaded[stored] = stored_entry
    for fqn in sorted(wanted.values - there.values):
        missing.append(fqn)
        problems.append(f"{fqn}: is a value of the state and not in the checkpoint")
    entries = {fqn.partition(".")[0] for fqn in (*wanted.tensors, *wanted.values)}
    asked = {aliases.get(fqn, fqn) for fqn in wanted.tensors} | wanted.values
    left = sorted((there.tensors.keys() | there.values) - asked)
    unexpected = tuple(fqn for fqn in left if fqn.partition(".")[0] in entries)
    problems += [f"{fqn}: is in the checkpoint and has no place in the state" for fqn in unexpected]
    not_asked = len(left) - len(unexpected)
    return loaded, _MatchedNames(tuple(missing), unexpected, not_asked, tuple(problems))


# The plans of ranks -------------------------------------------------------------------------


def _holdings(
    tensors: Mapping[str, TensorEntry], rank: int, ranks: int, layout: EvenLayout
) -> list[Holding]:
    """Holdings in the layout of a rank that need not exist, in memory that is never touched."""
    holdings = []
    for fqn, entry in sorted(tensors.items()):
        is_sharded = entry.kind in (Kind.PARAMETER, Kind.OPTIMIZER)
        region = wanted_part(entry.shape, rank, ranks, layout if is_sharded else "replicated")
        shape = region.shape if isinstance(region, Box) else (region.numel,)
        # Never written, so the system gives it no pages, however large it is.
        local = torch.empty(shape, dtype=entry.dtype)
        piece = Piece(fqn, entry.shape, entry.dtype, region, whole(shape), holders=(rank,))
        holdings.append(Holding(local, (piece,), entry.kind, synchronized=True))
    return holdings


class _RankNeeds(NamedTuple):
    """What one rank wants of a checkpoint."""

    reads: ReadPlan
    blocks: NeededBlocks
    nbytes_wanted: int

    @classmethod
    def of(cls, manifest: Manifest, holdings: Sequence[Holding]) -> _RankNeeds:
        plan = plan_reads(manifest, holdings)
        pieces = [piece for holding in holdings for piece in holding.pieces]
        nbytes = sum(piece.local_region.numel * piece.dtype.itemsize for piece in pieces)
        return cls(plan, plan.blocks(manifest), nbytes)

    def plan(
        self, store: Store, located: LocatedCheckpoint, path: ReadPath, rank: int, sharing: Sharing
    ) -> RankPlan:
        """The plan of this rank among others, with which it shares so much."""
        manifest = located.manifest
        sums = sums_of(store, located.prefix, manifest, path.cache)
        reader = Reader(sums, self.reads, path)
        own = [move.runs for move in sharing.moves if move.source is None]
        reader.expect(sharing.private, own)
        requests = reader.requests(sharing.private)
        private_max = max((request.stop - request.start for request in requests), default=0)
        for runs in own:
            requests += reader.requests(runs, shared=True)
        window = nbytes_under_way(sharing.moves, ShareLimits(), path)
        # Each reader has one request under way.
        in_flight = private_max * min(path.in_flight_max, max(len(requests), 1))
        return RankPlan(
            rank=rank,
            nbytes_wanted=self.nbytes_wanted,
            nbytes_read=sum(request.nbytes for request in requests),
            nbytes_received=sum(one.nbytes for one in sharing.moves if one.source is not None),
            requests=len(requests),
            nbytes_extra=MANIFEST_MEMORY * len(manifest.data) + max(in_flight, window),
        )
