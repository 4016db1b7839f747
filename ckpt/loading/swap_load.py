"""Read a checkpoint into other memory; the live state takes it over by one copy.

    bind -> pieces whose bytes are not proved to be there -> memory aside -> reads, exchange -> swap

Until `Aside.swap` nothing of the state changes. What is proved to be in memory already is neither
read nor copied. Two things prove that a chunk has the bytes that another checkpoint of the same
root has. It lies at the same place of the same data file, which is written once and never again.
Or the files of both have its BLAKE3 digest, and block checksums, and they are the same. Checksums
alone prove nothing: one change in four billion has the same crc32c. So saves without `dedup`, which
take no digests, share nothing with each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from ckpt.commit.locate import file_key
from ckpt.commit.names import step_prefix
from ckpt.errors import CheckpointError
from ckpt.format.checksum import is_outage
from ckpt.format.chunk_rules import Bools
from ckpt.format.datafile_index import StoredSums, stored_sums
from ckpt.format.manifest import SINCE_FULL, Manifest, is_reference, reference_to
from ckpt.layout.kind import Kind
from ckpt.layout.memory import is_accelerator, local_view
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import whole
from ckpt.loading.block_sums import BlockSums
from ckpt.loading.exchange import Sharing, share
from ckpt.loading.load import LoadOptions, bind_to, compared, transfer
from ckpt.loading.plan import Ints, chunks_of, expanded, plan_reads
from ckpt.loading.reader import Reader, may_write
from ckpt.state.binding import Binding, filling
from ckpt.world.base import World, collectively
from storage import Store

SumsOf: TypeAlias = Callable[[Manifest, int], StoredSums | None]
Where = Literal["host", "device"]


class LivePiece(NamedTuple):
    """One piece of the live state, as a view of its memory."""

    piece: Piece
    view: torch.Tensor

    @property
    def key(self) -> Hashable:
        """Which elements these are, and where they lie: the same while nobody moves them."""
        view, piece = self.view, self.piece
        place = (str(view.device), view.data_ptr(), tuple(view.shape), view.stride(), view.dtype)
        return piece.fqn, piece.region, place


@dataclass(frozen=True, slots=True)
class Present:
    """What a state holds: all pieces of a checkpoint that were put into it, by their keys.

    The views keep the memory from being given to anything else, which would have the same key. Once
    deltas have changed it there are `digests` of its tensors, and the manifest proves nothing.
    """

    manifest: Manifest
    views: Mapping[Hashable, torch.Tensor]
    digests: Mapping[str, int] = field(default_factory=dict)


class Copied(NamedTuple):
    """A piece of the live state, and the memory aside that has its new elements."""

    piece: Piece
    view: torch.Tensor
    aside: torch.Tensor
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Aside:
    """A checkpoint that was read and checked, ready to be taken over.

    `nbytes` are those that a swap copies on this rank, of `nbytes_total` that the state has;
    `nbytes_read` came from the store. `names` are tensors of which something is new here.
    """

    manifest: Manifest
    state: Any
    binding: Binding
    copies: tuple[Copied, ...]
    views: Mapping[Hashable, torch.Tensor]
    nbytes: int
    nbytes_total: int
    nbytes_read: int
    names: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    digests: Mapping[str, int] = field(default_factory=dict)

    def swap(self, world: World) -> Present:
        """Put what was read into the live state; collective. Returns what it then has.

        Raises LoadInterrupted where that fails: the state is a mixture then.
        """
        header = self.manifest.header
        with filling(self.state, f"step {header.step} ({header.attempt})"):
            collectively(world, "swap", self._copy)
        return Present(self.manifest, self.views, self.digests)

    def _copy(self) -> None:
        self.binding.prepare()
        with torch.no_grad():
            for _, view, aside, is_pinned in self.copies:
                with may_write(view):
                    # Behind what the caller has queued on the device, before all it queues next.
                    view.copy_(aside, non_blocking=is_pinned)
        self.binding.finish()


@dataclass(slots=True)
class _Choice:
    """What of a state has to be read: pieces to be filled aside, and chunks that need not be."""

    holdings: list[Holding] = field(default_factory=list)
    copies: list[Copied] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    kept_chunks: set[int] = field(default_factory=set)


def read_aside(
    state: Any,
    store: Store,
    located: tuple[str, Manifest],
    world: World,
    how: tuple[LoadOptions, Present | None, Where],
) -> Aside:
    """Read what `state` needs of a checkpoint and does not have; collective.

    `how` are the options, what the state has in memory (None: nothing is known of it), and where
    the memory aside lies. Raises as `ckpt.load` does, and the state is unchanged whatever happens.
    """
    prefix, manifest = located
    options, known, where = how
    header = manifest.header
    text = f"{store.url.rstrip('/')}/{prefix} (step {header.step}, {header.attempt})"
    block_sums = BlockSums(store, prefix, manifest, options.path.cache)

    def plan() -> tuple[Binding, Reader, _Choice, tuple[LivePiece, ...]]:
        binding = bind_to(state, manifest, world, options, text)
        targets = tuple(live_pieces(binding.holdings))
        choice = _choose(store, manifest, targets, known, where)
        reads, kept = plan_reads(manifest, choice.holdings), choice.kept_chunks
        # `aside` has these bytes already, from where they are.
        reads = reads._replace(
            needs={chunk: need for chunk, need in reads.needs.items() if chunk not in kept},
            packed={chunk: place for chunk, place in reads.packed.items() if chunk not in kept},
        )
        return binding, Reader(block_sums, reads, options.path), choice, targets

    binding, reader, choice, targets = collectively(world, "compare", plan)
    groups, sums, warnings = compared(reader, binding, (block_sums, text), world, options)

    def prepare() -> Sharing:
        return share(reader.blocks, groups, world.rank, options.sharing)

    transfer(reader, collectively(world, "prepare", prepare), world, options, sums)
    return Aside(
        manifest,
        state,
        binding,
        tuple(choice.copies),
        {target.key: target.view for target in targets},
        sum(_nbytes(copy.view) for copy in choice.copies),
        sum(_nbytes(target.view) for target in targets),
        reader.nbytes_read,
        tuple(sorted(choice.names)),
        warnings,
    )


def _nbytes(view: torch.Tensor) -> int:
    return view.numel() * view.element_size()


def live_pieces(holdings: Sequence[Holding]) -> Iterator[LivePiece]:
    """The pieces that have elements."""
    for holding in holdings:
        for piece in holding.pieces:
            if piece.local_region.numel:
                yield LivePiece(piece, local_view(holding, piece))


def _choose(
    store: Store,
    manifest: Manifest,
    targets: Sequence[LivePiece],
    known: Present | None,
    where: Where,
) -> _Choice:
    """The pieces that have to be read, with memory aside for them."""
    chunks = chunks_of(manifest, [target.piece for target in targets])
    unchanged: Bools | None = None
    if known is not None:
        wanted = set(chain.from_iterable(chunks))
        sums_of = partial(_sums_of, store)
        unchanged = unchanged_chunks(known.manifest, manifest, wanted, sums_of)
    choice, fresh = _Choice(), set[int]()
    for target, own in zip(targets, chunks, strict=True):
        is_known = known is not None and target.key in known.views
        new = [chunk for chunk in own if unchanged is None or not unchanged[chunk]]
        # All of it is proved to be in memory.
        if is_known and not new:
            continue
        view = target.view
        if where == "device":
            aside = torch.empty(view.shape, dtype=view.dtype, device=view.device)
        else:  # copies from pinned memory take a fraction of the time
            pinned = is_accelerator(view.device)
            aside = torch.empty(view.shape, dtype=view.dtype, pin_memory=pinned)
        if not is_known:
            fresh.update(own)
        elif len(new) < len(own):
            # Only some of its chunks are read; the others come from where they are.
            aside.copy_(view)
            choice.kept_chunks.update(set(own) - set(new))
        region = whole(tuple(aside.shape))
        piece = target.piece._replace(local_region=region)
        choice.holdings.append(Holding(aside, (piece,), Kind.OTHER, synchronized=True))
        choice.copies.append(Copied(piece, view, aside, aside.is_pinned()))
        choice.names.add(piece.fqn)
    # A chunk that goes to memory of which nothing is known is read, even where others have it.
    choice.kept_chunks -= fresh
    return choice


def _sums_of(store: Store, manifest: Manifest, file: int) -> StoredSums | None:
    """What a data file says of its chunks; None where it is gone or damaged, and proves nothing."""
    prefix = step_prefix(manifest.header.step, manifest.header.attempt)
    try:
        return stored_sums(store, file_key(prefix, manifest.files[file]), manifest, file)
    except CheckpointError as error:
        if is_outage(error):
            raise
        return None


# --- what is proved to be unchanged ---------------------------------------------------------------


def unchanged_chunks(
    old: Manifest, new: Manifest, wanted: Collection[int], sums_of: SumsOf
) -> Bools:
    """A bool for each chunk of `new`: whether `old` has the same region of a tensor of the same
    name, dtype and shape, with bytes that are proved to be equal.

    `sums_of(manifest, file)` is what a data file says of its chunks, or None. It is called for the
    files of `wanted` chunks at another place, in checkpoints that were saved with digests.
    """
    equal = np.zeros(len(new.chunks), dtype=np.bool_)
    olds, news = _of_same_regions(old, new)
    is_proved = _is_same_place(old, new, olds, news)
    rest = np.flatnonzero(~is_proved & np.isin(news, list(wanted)))
    if SINCE_FULL in old.header.user and SINCE_FULL in new.header.user:
        pairs = zip(
            _contents(old, olds[rest], sums_of), _contents(new, news[rest], sums_of), strict=True
        )
        is_proved[rest] = [before is not None and before == after for before, after in pairs]
    equal[news[is_proved]] = True
    return equal


def _of_same_regions(old: Manifest, new: Manifest) -> tuple[Ints, Ints]:
    """The chunks that both have of the same tensors, cut alike: their numbers in each."""
    records = zip(old.fqns, old.dtypes, old.shapes, strict=True)
    known = {record: old.chunks.of_tensor(number) for number, record in enumerate(records)}
    records = zip(new.fqns, new.dtypes, new.shapes, strict=True)
    pairs = [
        (known[record], new.chunks.of_tensor(number))
        for number, record in enumerate(records)
        if record in known
    ]
    # Chunk by chunk in order: a tensor that was cut otherwise is read anew.
    alike = [(before, after) for before, after in pairs if len(before) == len(after)]
    olds, news = (
        expanded(np.array([r.start for r in side], int), np.array([r.stop for r in side], int))
        for side in ([a for a, _ in alike], [b for _, b in alike])
    )
    a, b = old.chunks, new.chunks
    is_same = (a.span_start[olds] == b.span_start[news]) & (a.numel[olds] == b.numel[news])
    boxes = np.stack([a.box[olds].astype(np.int64), b.box[news].astype(np.int64)], axis=1)
    # There are few boxes for many chunks, so each pair of them is compared once; -1 is none.
    unique, which = np.unique(boxes, axis=0, return_inverse=True)
    same = [
        one == two if min(one, two) < 0 else a.boxes[one] == b.boxes[two]
        for one, two in unique.tolist()
    ]
    is_same &= np.array(same, dtype=np.bool_)[which.reshape(-1)]
    return olds[is_same], news[is_same]


def _is_same_place(old: Manifest, new: Manifest, olds: Ints, news: Ints) -> Bools:
    numbers: dict[str, int] = {}
    files: list[Ints] = []
    for manifest in (old, new):
        step, attempt = manifest.header.step, manifest.header.attempt
        # Named as any other checkpoint of the root would name them.
        names = [
            name if is_reference(name) else reference_to(step, attempt, name)
            for name in manifest.files
        ]
        files.append(np.array([numbers.setdefault(one, len(numbers)) for one in names], dtype=int))
    a, b = old.chunks, new.chunks
    is_same: Bools = files[0][a.file[olds]] == files[1][b.file[news]]
    is_same &= a.byte_start[olds] == b.byte_start[news]
    return is_same


def _contents(manifest: Manifest, chunks: Ints, sums_of: SumsOf) -> list[bytes | None]:
    """Per chunk its digest and the checksums of its blocks, as its file has them: a block whose
    checksum differs from what was hashed had changed before it was written.
    """
    files = manifest.chunks.file[chunks].tolist()
    opened = {file: sums_of(manifest, file) for file in sorted(set(files))}
    contents: list[bytes | None] = []
    for file, start in zip(files, manifest.chunks.byte_start[chunks].tolist(), strict=True):
        content = None
        if (sums := opened[file]) is not None:
            index, digests = sums
            place = bisect_left(index.offsets, start)
            if place < len(index.offsets) and index.offsets[place] == start:
                blocks = index.checksums[index.first_block[place] : index.first_block[place + 1]]
                content = digests[place].tobytes() + blocks.tobytes()
        contents.append(content)
    return contents
