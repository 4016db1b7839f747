"""Compare what several ranks hold under one name, before anything is written.

Digests are taken from memory at each save and never kept: the memory stays, its content changes.

What no engine keeps equal has to be equal: every save reports digests of it with what it has
written, and fails where they differ. Ranks that hold different tensors under one name have named
them wrongly, which shows at the first save as at every later one. So the same digests are compared
in a round, once for every set of names that the ranks exchange.

Replicas that an engine declares equal are compared by a sample of their blocks, or in full. Ranks
share the writing of a replica, so what has drifted would be stored as a mixture. Each save compares
another sample, 0.5 % of what it writes; with `replicas="strict"`, and once ranks are known to
differ, everything is compared. Two more exchanges then locate the difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.errors import CheckpointError, InvalidState
from ckpt.format.checksum import Uint32s, crc32c, crc32c_of_each
from ckpt.format.datafile import region_start
from ckpt.format.joint_manifest import BY_NUMBER, TWO_MODELS, DifferingRegion, texts_of_regions
from ckpt.layout.kind import is_numbered
from ckpt.layout.memory import host_bytes, is_plain_memory, local_view
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Span, span_of
from ckpt.saving.plan import Contents, SavePlan, is_shared
from ckpt.saving.task import SaveTask
from ckpt.world.agreement import ranks_in_words
from ckpt.world.base import World, decided_json

# Tensors on a device up to this size are copied to the host together: each copy is a wait.
JOINED_NBYTES_MAX = 64 << 10
SAMPLED_SHARE = 0.005  # of the bytes that a rank writes of its replicas: 1 % of its CPU seconds
SAMPLED_NBYTES_MAX = 8 << 20  # the call of an async save copies them
BLOCK_NBYTES_MAX = 64 << 10
BLOCK_NBYTES_MIN = 512
BLOCKS_MIN = 8  # a small share is drawn at several places as well
SHOWN_MAX = 20  # tensors whose difference is located
GROUPS_SHOWN_MAX = 4  # of ranks that have the same
DIFFERING_MAX = 10_000  # blocks of a group that are looked at for that

Holders = tuple[int, ...]


def digests_of(compared: Sequence[tuple[Holding, Piece]]) -> Uint32s:
    """The crc32c of each of these pieces, as its memory is now."""
    return checksums_of([local_view(holding, piece) for holding, piece in compared])


def checksums_of(views: Sequence[torch.Tensor]) -> Uint32s:
    """The crc32c of the elements of each view, in row-major order."""
    digests = np.zeros(len(views), dtype=np.uint32)
    joined: dict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for index, view in enumerate(views):
        if is_plain_memory(view):
            digests[index] = crc32c(host_bytes(view))
        elif _is_on_host(view) or view.numel() * view.element_size() > JOINED_NBYTES_MAX:
            host = torch.empty(view.shape, dtype=view.dtype).copy_(view)
            digests[index] = crc32c(host_bytes(host))
        else:
            joined[view.device].append((index, bytes_in_order(view)))
    for members in joined.values():
        # One copy to the host for all of them: each copy waits for the device.
        host = torch.cat([data for _, data in members]).cpu()
        sizes = [data.numel() for _, data in members]
        digests[[index for index, _ in members]] = crc32c_of_each(host_bytes(host), sizes)
    return digests


def _is_on_host(view: torch.Tensor) -> bool:
    return view.is_cpu


def bytes_in_order(view: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order, as bytes on the same device."""
    return view.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


# What has to be equal --------------------------------------------------------------------------


def compared_live(
    task: SaveTask, contents: Contents | Exception
) -> tuple[Contents | Exception, Uint32s]:
    """As `compared`, of live memory; and the digests of the plan's `compared`."""
    digests, sums = np.zeros(0, dtype=np.uint32), None
    if not isinstance(contents, Exception):
        try:
            digests = digests_of(contents.plan.compared)
            sums = replica_sums(contents.plan, task, copied=False)
            sums.compute()
        except Exception as error:
            contents = error
    return compared(task, contents, digests, sums), digests


def compared(
    task: SaveTask, contents: Contents | Exception, digests: Uint32s, sums: ReplicaSums | None
) -> Contents | Exception:
    """`contents`, or why nothing may be written: see `difference_of` and `differing_replicas`, in
    which a rank without contents takes part, as the others may wait for it. Raises ReplicasDrifted
    on all ranks.
    """
    known = None if isinstance(contents, Exception) else contents
    difference = difference_of(task, known, digests)
    if known is not None and difference is not None:
        contents, known = difference, None
    return differing_replicas(task, known, sums) or contents


def difference_of(
    task: SaveTask, contents: Contents | None, digests: Uint32s
) -> InvalidState | None:
    """Why nothing may be written, on all ranks: tensors differ that must be equal. Collective where
    the ranks have exchanged names since the last comparison; else nothing is done.

    `digests` are those of the plan's `compared`. A rank without contents cannot save, and says so
    later.
    """
    world, holders = task.session.world, task.memory.holders
    if holders is None or not holders.are_shared or task.memory.is_compared:
        return None
    rows = [
        (piece.fqn, *_place(piece), digest, piece.holders)
        for (holding, piece), digest in zip(
            contents.plan.compared if contents else (), digests.tolist(), strict=True
        )
        if is_shared(holding, piece)
    ]
    differences = partial(_differences, contents.flat.values if contents else (), holders.copies)
    # A rank without contents sends nothing, and then nobody has to have what it should have.
    mine = rows if contents else None
    if problems := decided_json(world, "digests", "differences", mine, differences):
        return InvalidState(problems)
    # Only where all were equal: a save that failed compares again.
    task.memory.is_compared = True
    return None


_Place = tuple[int, tuple[int, ...]]


def _place(piece: Piece) -> _Place:
    """Where a piece begins in its tensor, and its shape, or its length where it is one run."""
    region = piece.region
    if isinstance(region, Box) and span_of(region, piece.global_shape) is None:
        return region_start(region, piece.global_shape), region.shape
    return region_start(region, piece.global_shape), (region.numel,)


class _Copy(NamedTuple):
    """What a rank has of a region, and who has to have it as well."""

    rank: int
    digest: int
    holders: tuple[int, ...]


def _differences(
    values: Collection[str],
    groups: Mapping[str, Sequence[Sequence[int]]],
    received: Sequence[Sequence[Any] | None],
) -> list[str]:
    """One text for each tensor whose holders differ. The names of `values` show what belongs to an
    optimizer; `groups` are those of ranks that each have all of a tensor.
    """
    having: dict[tuple[str, _Place], list[_Copy]] = {}
    for rank, rows in enumerate(received):
        for fqn, start, shape, digest, holders in rows or ():
            copies = having.setdefault((fqn, (start, tuple(shape))), [])
            copies.append(_Copy(rank, digest, tuple(holders)))
    # A rank without contents has sent nothing, so what is missing proves nothing.
    if None not in received and (problems := _otherwise_cut(having)):
        return problems
    differing = {
        place: copies for place, copies in having.items() if len({one.digest for one in copies}) > 1
    }
    problems = [
        f"{fqn}: {' and '.join(map(ranks_in_words, groups[fqn]))} have different values of "
        f"it, and {TWO_MODELS}{BY_NUMBER if is_numbered(fqn) else ''}"
        for fqn in sorted({fqn for fqn, _ in differing})
        if fqn in groups
    ]
    unequal = [
        DifferingRegion((fqn, start), [(one.rank, one.digest) for one in copies], True)
        for (fqn, (start, _)), copies in differing.items()
        if fqn not in groups
    ]
    failures, _ = texts_of_regions(unequal, values)
    return problems + failures


def _otherwise_cut(having: Mapping[tuple[str, _Place], Sequence[_Copy]]) -> list[str]:
    """Texts for tensors that groups of ranks cut differently: their pieces cannot be compared."""
    holders: dict[str, set[int]] = {}
    for (fqn, _), copies in having.items():
        ranks = tuple(one.rank for one in copies)
        if any(one.holders != ranks for one in copies):
            holders.setdefault(fqn, set()).update(*(one.holders for one in copies), ranks)
    return [
        f"{fqn}: {ranks_in_words(ranks)} hold it and cut it differently; cut it over the same dims "
        "of ranks in the same order in each of their meshes, or give each a name of its own"
        for fqn, ranks in sorted(holders.items())
    ]


# What is declared equal -------------------------------------------------------------------------


class ReplicasDrifted(CheckpointError):
    """Ranks differ in what is declared equal. The save begins again and takes all of it from the
    first replica, so that no caller meets this.
    """


class Block(NamedTuple):
    """Elements of a piece from `start` on, in the piece's own row-major order."""

    piece: Piece
    start: int
    view: torch.Tensor


@dataclass
class ReplicaSums:
    """Checksums of this rank's replicas, by the ranks that hold the same.

    `is_whole`: of all blocks, else of a sample. Blocks in live memory may have changed when they
    are looked at again.
    """

    is_whole: bool
    blocks: dict[Holders, list[Block]]
    sums: dict[Holders, Uint32s] = field(default_factory=dict)

    def compute(self) -> None:
        """Read the blocks; a second call has no effect."""
        for holders, blocks in self.blocks.items():
            if holders not in self.sums:
                self.sums[holders] = checksums_of([block.view for block in blocks])


def replica_sums(plan: SavePlan, task: SaveTask, *, copied: bool) -> ReplicaSums:
    """What this save compares, to be computed. With `copied`, a sample is copied now."""
    is_whole = compares_all(task)
    blocks: dict[Holders, list[Block]] = {}
    for holders, members in replicas_of(plan).items():
        blocks[holders] = [*_all_of(members)] if is_whole else _sample(members, holders, task.step)
    if copied and not is_whole:
        for those in blocks.values():
            those[:] = [block._replace(view=block.view.clone()) for block in those]
    sums = ReplicaSums(is_whole, blocks)
    views = [block.view for those in blocks.values() for block in those]
    if views:
        nbytes = sum(view.numel() * view.element_size() for view in views)
        task.recorder.count("replica_bytes", nbytes)
    if copied and is_whole:
        sums.compute()  # not copied, so before the state changes
    return sums


def compares_all(task: SaveTask) -> bool:
    """Whether a save of this task compares all replicas."""
    return task.options.replicas == "strict" or task.memory.plans.first_only


def replicas_of(plan: SavePlan) -> Mapping[Holders, Sequence[tuple[Holding, Piece]]]:
    """The plan's replicas by the ranks that hold them, in the same order on each of these."""

    def grouped() -> dict[Holders, list[tuple[Holding, Piece]]]:
        groups: dict[Holders, list[tuple[Holding, Piece]]] = {}
        for one in plan.replicated:
            groups.setdefault(one[1].holders, []).append(one)
        for members in groups.values():
            members.sort(key=lambda member: (member[1].fqn, member[1].region))
        return groups

    return plan.of_memory.once("replicas", grouped)


def _all_of(members: Sequence[tuple[Holding, Piece]]) -> Iterator[Block]:
    for holding, piece in members:
        view = local_view(holding, piece)
        if not view.is_contiguous():
            yield Block(piece, 0, view)
            continue
        flat, count = view.view(-1), BLOCK_NBYTES_MAX // view.element_size()
        for start in range(0, flat.numel(), count):
            yield Block(piece, start, flat[start : start + count])


def _sample(members: Sequence[tuple[Holding, Piece]], holders: Holders, step: int) -> list[Block]:
    """Blocks drawn by a rule that all holders share; each step draws others."""
    sizes = [piece.local_region.numel * piece.dtype.itemsize for _, piece in members]
    ends = np.cumsum(sizes)
    # A rank writes its share of the replicas, and compares in proportion.
    share = int(ends[-1]) * SAMPLED_SHARE / len(holders)
    budget = min(share, SAMPLED_NBYTES_MAX)
    block_nbytes = min(max(budget / BLOCKS_MIN, BLOCK_NBYTES_MIN), BLOCK_NBYTES_MAX)
    # The same seed on all holders, so that they read the same blocks without a message.
    generator = np.random.default_rng([step, *holders])
    places = generator.integers(int(ends[-1]), size=max(1, int(budget / block_nbytes)))
    blocks: dict[tuple[int, int], Block] = {}
    for place in places.tolist():
        index = int(np.searchsorted(ends, place, side="right"))
        holding, piece = members[index]
        itemsize = piece.dtype.itemsize
        element = (place - int(ends[index]) + sizes[index]) // itemsize
        count = max(1, int(block_nbytes) // itemsize)
        start, view = _block_at(local_view(holding, piece), element, count)
        # A block that was drawn twice is read once.
        blocks[index, start] = Block(piece, start, view)
    return list(blocks.values())


def _block_at(view: torch.Tensor, element: int, count: int) -> tuple[int, torch.Tensor]:
    """About `count` elements around `element`: whole rows, or part of one, and where they begin."""
    start = 0
    while view.ndim and view.numel() > count:
        row = view.numel() // view.shape[0]
        rows = max(1, count // row)
        first = (element - start) // row // rows * rows
        start += first * row
        view = view[first : first + rows]
        if row <= count:
            break
        view = view[0]
    return start, view


def differing_replicas(
    task: SaveTask, contents: Contents | None, sums: ReplicaSums | None
) -> CheckpointError | None:
    """Why nothing may be written, on all ranks. Collective where ranks hold replicas; else nothing
    is done. A rank without contents takes part without any.

    What differs is left in `task.memory.differing`, as texts. Raises ReplicasDrifted where another
    try, or another save, takes all from the first replica.
    """
    memory = task.memory
    memory.differing = ()
    if memory.holders is None or not memory.holders.are_replicated:
        return None
    compared = _texts(task.session.world, contents, sums)
    if compared is None:
        return CheckpointError(
            "the ranks compare different replicas: pass the same replicas= on all of them, and "
            "save again where one has failed alone"
        )
    texts, is_of_all = compared
    was_first_only = memory.plans.first_only
    if not texts:
        # All of it is equal again, if all was compared; ranks may share the writing from now on.
        if was_first_only and is_of_all and sums is not None and sums.is_whole:
            memory.plans.take_from_first(False)
        return None
    if task.options.replicas == "strict":
        return InvalidState(texts)
    memory.plans.take_from_first(True)
    memory.differing = tuple(f"{text}; the first replica's is stored" for text in texts)
    if was_first_only:
        return None
    raise ReplicasDrifted(
        "ranks differ in what is declared equal on them, and this save would mix what they have: "
        f"{'; '.join(texts)}; the next save stores the first replica's. Make them equal"
    )


class _DifferingBlock(NamedTuple):
    """A block that differs, as one rank had it; `data` is None where it has changed since."""

    holders: list[int]
    fqn: str
    number: int  # of the block in its group
    start: int
    itemsize: int
    offset: Sequence[int]  # of the piece: its region
    shape: Sequence[int]
    checksum: int
    data: str | None


def _texts(
    world: World, contents: Contents | None, sums: ReplicaSums | None
) -> tuple[list[str], bool] | None:
    """What differs, and whether all ranks took part; None where ranks do not know alike whether
    they have differed.
    """
    mine: dict[str, Any] = {}
    own: dict[Holders, Uint32s] = {}
    if contents is not None and sums is not None:
        own = sums.sums
        mine = {
            "first_only": contents.plan.is_first_only,
            "whole": sums.is_whole,
            "sums": [(holders, crc32c(array.tobytes())) for holders, array in own.items()],
        }

    answered = decided_json(world, "replicas", "replicas that differ", mine, _groups_that_differ)
    if answered is None:
        return None
    differing, is_of_all = [tuple(holders) for holders in answered[0]], answered[1]
    if not differing:
        return [], is_of_all
    known = [(h, own[h].tolist()) for h in differing if h in own]
    blocks = decided_json(
        world, "sums of replicas", "blocks that differ", known, _blocks_that_differ
    )
    located = _located(sums, blocks) if own and sums is not None else []
    texts: list[str] = decided_json(
        world, "differing blocks", "differing replicas", located, _in_words
    )
    # Where ranks have no two blocks of one place, they do not hold the same tensors.
    texts = texts or [f"{ranks_in_words(h)}: other tensors are declared equal" for h in differing]
    return texts, is_of_all


def _groups_that_differ(received: Sequence[Mapping[str, Any]]) -> tuple[list[Holders], bool] | None:
    if len({(one["first_only"], one["whole"]) for one in received if one}) > 1:
        return None
    digests: dict[Holders, set[int]] = {}
    for one in received:
        for holders, digest in one.get("sums", ()):
            digests.setdefault(tuple(holders), set()).add(digest)
    differing = sorted(holders for holders, those in digests.items() if len(those) > 1)
    return differing, all(received)


def _blocks_that_differ(received: Sequence[Sequence[Any]]) -> list[tuple[Holders, list[int]]]:
    arrays: dict[Holders, list[Uint32s]] = {}
    for one in received:
        for holders, sums in one:
            arrays.setdefault(tuple(holders), []).append(np.array(sums, dtype=np.uint32))
    differing = []
    for holders, those in sorted(arrays.items()):
        # Ranks that hold other tensors have other numbers of blocks; that is reported below, not
        # here.
        count = min(map(len, those))
        table = np.stack([array[:count] for array in those])
        indices = np.flatnonzero((table != table[0]).any(axis=0))[:DIFFERING_MAX]
        differing.append((holders, indices.tolist()))
    return differing


def _located(
    sums: ReplicaSums, differing: Sequence[tuple[list[int], list[int]]]
) -> list[_DifferingBlock]:
    """This rank's first differing block of each tensor."""
    located: list[_DifferingBlock] = []
    for holders, indices in differing:
        blocks = sums.blocks.get(tuple(holders), [])
        own = sums.sums.get(tuple(holders), ())
        known: set[str] = set()
        # A sample is in no order; all holders have the same one.
        rows = [(blocks[n].piece.fqn, blocks[n].start, n) for n in indices] if blocks else []
        for fqn, start, index in sorted(rows):
            # The first differing block of a tensor is enough for the message.
            if fqn in known or len(known) >= SHOWN_MAX:
                continue
            known.add(fqn)
            (_, shape, dtype, region, *_), _, view = blocks[index]
            # Of a run of elements its first one, and the shape of the tensor.
            offset, shape = ((region.start,), shape) if isinstance(region, Span) else region
            data, checksum = bytes_in_order(view).cpu().numpy().tobytes(), int(own[index])
            # Bytes that changed since the comparison would show a wrong place.
            shown = data.hex() if crc32c(data) == checksum else None
            located.append(
                _DifferingBlock(
                    holders=holders,
                    fqn=fqn,
                    number=index,
                    start=start,
                    itemsize=dtype.itemsize,
                    offset=offset,
                    shape=shape,
                    checksum=checksum,
                    data=shown,
                )
            )
    return located


def _in_words(received: Sequence[Sequence[Any]]) -> list[str]:
    """One text for each tensor: who differs, and where first."""
    having: dict[tuple[str, Holders, int], dict[int, _DifferingBlock]] = {}
    for rank, one in enumerate(received):
        for row in one:
            block = _DifferingBlock(*row)
            key = block.fqn, tuple(block.holders), block.number
            having.setdefault(key, {})[rank] = block
    texts: dict[str, str] = {}
    for (fqn, holders, _), by_rank in sorted(having.items()):
        groups: dict[int, list[int]] = {}
        known: dict[int, str] = {}
        for rank, block in sorted(by_rank.items()):
            groups.setdefault(block.checksum, []).append(rank)
            if block.data is not None:
                known[block.checksum] = block.data
        if len(groups) < 2:
            continue  # other ranks have another tensor there
        first = next(iter(by_rank.values()))
        element, where = first.start, "at or after"
        # The exact element needs the bytes of all; otherwise only the block is known.
        if len(known) == len(groups):
            table = np.stack([np.frombuffer(bytes.fromhex(d), np.uint8) for d in known.values()])
            byte = int(np.flatnonzero((table != table[0]).any(axis=0))[0])
            element, where = first.start + byte // first.itemsize, "at"
        on = " and on ".join(map(ranks_in_words, [*groups.values()][:GROUPS_SHOWN_MAX]))
        texts.setdefault(
            fqn,
            f"{fqn}: declared equal on {ranks_in_words(holders)}, and different on {on}, first "
            f"{where} index {_index(element, first)}",
        )
    return [texts[fqn] for fqn in sorted(texts)]


def _index(element: int, block: _DifferingBlock) -> list[int]:
    """The index in the tensor of an element of a piece, from its place in the piece."""
    if len(block.offset) != len(block.shape):  # a run of the tensor
        return [int(i) for i in np.unravel_index(block.offset[0] + element, block.shape)]
    place = np.unravel_index(element, block.shape) if block.shape else ()
    return [int(i) + start for i, start in zip(place, block.offset, strict=True)]
