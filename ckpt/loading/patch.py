"""Read deltas, and bring a state in memory from the publication that it has to a later one.

    deltas -> blocks -> new values per live piece -> check digests -> write at the caller's word

Everything is read and checked before the first write: that the state in memory is the one that the
first delta goes from, and that the new values make it the one that the last delta goes to. A write
that fails is taken back with the values that were there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.errors import Corrupt
from ckpt.format.delta import INDEX_NBYTES_MAX, DeltaBlock, decode_delta
from ckpt.format.manifest import DELTA, Manifest
from ckpt.layout.dtypes import DTYPES, dtype_name
from ckpt.layout.elements import (
    bits_of,
    digest_of,
    digest_of_run,
    numbers_of,
    positions_in,
    unsigned,
)
from ckpt.loading.load import LoadOptions, bind_to
from ckpt.loading.reader import may_write
from ckpt.loading.swap_load import Aside, Copied, LivePiece, Present, Where, live_pieces, read_aside
from ckpt.state.binding import Binding, filling
from ckpt.world.base import World, collectively
from storage import Store

Digests = Mapping[str, int]  # of whole tensors
_MODULUS = 1 << 64


class ReadDelta(NamedTuple):
    """The blocks of a delta by tensor, and the digests of each tensor before and after it."""

    blocks: Mapping[str, Sequence[DeltaBlock]]
    before: Digests
    after: Digests


class SparseWrite(NamedTuple):
    """New bits of some elements of a live piece, and those that are there."""

    piece: LivePiece
    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor

    def write(self, values: torch.Tensor) -> None:
        """Write the bits; all other elements stay."""
        with torch.no_grad(), may_write(self.piece.view):
            bits = bits_of(self.piece.view)
            if bits.is_contiguous():  # a third faster
                bits.view(-1).scatter_(0, self.positions, values)
            else:
                bits.put_(self.positions, values)


@dataclass(frozen=True, slots=True)
class DeltaPatch:
    """Deltas that were read and checked; otherwise like `Aside`."""

    state: Any
    binding: Binding
    known: Present
    writes: tuple[SparseWrite, ...]
    digests: Digests
    nbytes: int
    nbytes_total: int
    nbytes_read: int
    names: tuple[str, ...]

    def swap(self, world: World) -> Present:
        """Write the new values; collective. Returns what the state then has.

        What fails is taken back on every rank, and raised: the state is as it was. LoadInterrupted
        where that fails, too: the state is a mixture then.
        """
        begun: list[SparseWrite] = []

        def write() -> None:
            self.binding.prepare()
            for one in self.writes:
                # Noted before it is written: a write that fails half-way is taken back, too.
                begun.append(one)
                one.write(one.new)
            self.binding.finish()

        try:
            collectively(world, "swap", write)
        except BaseException:
            with filling(self.state, "new values over those that were there"):
                for one in begun:
                    one.write(one.old)
            raise
        return replace(self.known, digests=self.digests)


def read_patch(
    state: Any,
    store: Store,
    located: Sequence[tuple[str, Manifest]],
    world: World,
    how: tuple[LoadOptions, Present, str],
) -> DeltaPatch:
    """Read deltas that bring `state` to a later publication; collective.

    `how` are the options, what the state has in memory, and the attempt of that. Raises Corrupt
    where the state or a delta is not the one that fits, as `read_aside` else; the state is
    unchanged.
    """
    options, known, attempt = how
    deltas, nbytes_read = _read_deltas(store, located, world, options, (attempt, known.manifest))

    def bound() -> tuple[Binding, list[LivePiece]]:
        binding = bind_to(state, known.manifest, world, options, "the publication in memory")
        targets = list(live_pieces(binding.holdings))
        if any(target.key not in known.views for target in targets):
            raise Corrupt("the tensors of the state lie elsewhere than when they were filled")
        return binding, targets

    binding, targets = collectively(world, "compare", bound)
    writes, digests = _checked(targets, deltas, world, known.digests)
    return DeltaPatch(
        state,
        binding,
        known,
        writes,
        digests,
        sum(one.new.numel() * one.new.element_size() for one in writes),
        sum(target.view.numel() * target.view.element_size() for target in targets),
        nbytes_read,
        tuple(sorted({one.piece.piece.fqn for one in writes})),
    )


def read_state(
    state: Any,
    store: Store,
    located: Sequence[tuple[str, Manifest]],
    world: World,
    how: tuple[LoadOptions, Present | None, Where],
) -> Aside:
    """Read a checkpoint, and the deltas behind it, into memory aside; collective.

    Arguments and errors as for `read_aside`.
    """
    options, known, where = how
    first, *others = located
    # What deltas have changed is not what the manifest says.
    known = None if others or (known is not None and known.digests) else known
    aside = read_aside(state, store, first, world, (options, known, where))
    if not others:
        return aside
    start = first[1].header.attempt, first[1]
    deltas, nbytes_read = _read_deltas(store, others, world, options, start)
    targets = [LivePiece(copy.piece, copy.aside) for copy in aside.copies]
    writes, digests = _checked(targets, deltas, world, {})
    for one in writes:
        one.write(one.new)
    return replace(aside, digests=digests, nbytes_read=aside.nbytes_read + nbytes_read)


def _read_deltas(
    store: Store,
    located: Sequence[tuple[str, Manifest]],
    world: World,
    options: LoadOptions,
    start: tuple[str, Manifest],
) -> tuple[list[ReadDelta], int]:
    """The deltas of a chain that begins at an attempt, where the tensors are those of a manifest;
    and the bytes that came from the store.
    """
    deltas, nbytes_read = list[ReadDelta](), 0
    attempt, base = start
    published = dict(zip(base.fqns, zip(base.dtypes, base.shapes, strict=True), strict=True))
    # A new value takes its bytes, and at most those of a gap.
    nbytes = (
        math.prod(shape) * (DTYPES[dtype].itemsize + 4) for dtype, shape in published.values()
    )
    nbytes_max = sum(nbytes) + INDEX_NBYTES_MAX
    for prefix, manifest in located:
        header = manifest.header
        if DELTA not in header.required or attempt not in (header.publication or ()):
            raise Corrupt(f"{store.url}/{prefix} is no delta from {attempt}: {header.publication}")
        # Before memory is made for them: the sizes are the delta's own word.
        is_plain = {*manifest.dtypes} <= {"uint8"} and {*map(len, manifest.shapes)} <= {1}
        if not is_plain or sum(map(sum, manifest.shapes)) > nbytes_max:
            raise Corrupt(f"{store.url}/{prefix} has other tensors than a delta")
        names = (fqn.partition(".") for fqn in manifest.fqns)
        sizes = zip(names, manifest.shapes, strict=True)
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for (group, _, name), shape in sizes:
            tensors.setdefault(group, {})[name] = torch.empty(shape, dtype=torch.uint8)
        plain = LoadOptions(path=options.path)
        aside = read_aside(tensors, store, (prefix, manifest), world, (plain, None, "host"))
        deltas.append(collectively(world, "delta", partial(_decoded, aside.copies, published)))
        nbytes_read += aside.nbytes_read
        attempt = header.attempt
    return deltas, nbytes_read


def _decoded(
    stored: Sequence[Copied], published: Mapping[str, tuple[str, tuple[int, ...]]]
) -> ReadDelta:
    blocks: dict[str, list[DeltaBlock]] = {}
    left = {fqn: math.prod(shape) for fqn, (_, shape) in published.items()}
    for one in stored:
        for block in decode_delta(one.aside.numpy().data, published):
            blocks.setdefault(block.fqn, []).append(block)
            left[block.fqn] -= block.numel
        if wrong := [fqn for fqn, numel in left.items() if numel < 0]:
            raise Corrupt(f"{wrong[0]}: ranks have more than all of it in a delta")
    before = {fqn: sum(one.before for one in own) % _MODULUS for fqn, own in blocks.items()}
    after = {fqn: sum(one.after for one in own) % _MODULUS for fqn, own in blocks.items()}
    return ReadDelta(blocks, before, after)


def _checked(
    targets: Sequence[LivePiece], deltas: Sequence[ReadDelta], world: World, digests: Digests
) -> tuple[tuple[SparseWrite, ...], Digests]:
    """What brings `targets` from the state before the deltas to that after them; collective.

    `digests` are those of the tensors in memory; where there are none they are taken, of all ranks
    together. Raises Corrupt unless they are those that the first delta goes from, each delta goes
    from where the one before it ended, and what is written ends where the last one does.
    """
    before, after = deltas[0].before, deltas[-1].after
    fqns = sorted(after)
    counted = {fqn: [0, 0] for fqn in fqns}

    def planned() -> list[SparseWrite]:
        for one, other in pairwise(deltas):
            _refuse_other(one.after, other.before)
        if digests:
            _refuse_other({fqn: digests.get(fqn, -1) for fqn in fqns}, before)
        writes = []
        for target in targets:
            piece, view = target
            if piece.fqn not in counted:
                raise Corrupt(f"{piece.fqn}: no delta has this tensor")
            grown = 0
            for write, numbers in _writes_of(target, deltas):
                # On every rank: from here on what it reads is there, whatever stream writes.
                grown += digest_of(numbers, unsigned(write.new) - unsigned(write.old))
                writes.append(write)
            # Each element is counted once, by the first of its holders.
            if world.rank == piece.holders[0]:
                own = counted[piece.fqn]
                own[0] += view.numel()
                run = piece.region, piece.global_shape, 0
                own[1] += grown + (0 if digests else digest_of_run(*run, bits_of(view).reshape(-1)))
        return writes

    writes = collectively(world, "patch", planned)
    mine = np.array([[a, b % _MODULUS] for a, b in counted.values()], dtype=np.uint64)
    every = [np.frombuffer(one, np.uint64) for one in world.gather("digests", mine.tobytes())]
    sums = np.sum(every, axis=0, dtype=np.uint64).reshape(-1, 2).tolist()
    wrong = []
    for fqn, (numel, digest) in zip(fqns, sums, strict=True):
        expected = (after[fqn] - (before[fqn] if digests else 0)) % _MODULUS
        # Ranks may hold a part of a tensor only, as stages do, and the digest is that of the whole.
        is_whole = numel == int(np.prod(deltas[0].blocks[fqn][0].shape, dtype=np.int64))
        if is_whole and digest != expected:
            wrong.append(fqn)
    if wrong:
        raise Corrupt(
            f"{', '.join(wrong[:5])}: {len(wrong)} of {len(fqns)} tensors in memory are not what "
            "was published, so their new values are not written; somebody else changed them"
        )
    return tuple(writes), after


def _refuse_other(has: Digests, needs: Digests) -> None:
    wrong = sorted(fqn for fqn in {*has, *needs} if has.get(fqn) != needs.get(fqn))
    if wrong:
        raise Corrupt(f"{', '.join(wrong[:5])}: a delta goes from another state than there is")


def _writes_of(
    target: LivePiece, deltas: Sequence[ReadDelta]
) -> Iterator[tuple[SparseWrite, torch.Tensor]]:
    """What the deltas write into a live piece, the last of them where several do; and the numbers
    of these elements in the tensor. Each element once.
    """
    piece, view = target
    bits = bits_of(view)
    parts = [_parts(target, delta.blocks[piece.fqn]) for delta in deltas]
    if len(deltas) > 1 and (every := [part for own in parts for part in own]):
        numbers, positions, new = map(torch.cat, zip(*every, strict=True))
        # Stable: of equal positions, that of the last delta stays last.
        ordered, order = torch.sort(positions, stable=True)
        is_last = torch.ones_like(ordered, dtype=torch.bool)
        is_last[:-1] = ordered[1:] != ordered[:-1]
        kept = order[is_last]
        parts = [iter([(numbers[kept], positions[kept], new[kept])])]
    for numbers, positions, new in parts[0]:
        there = positions.to(view.device)
        flat = bits.is_contiguous()
        old = bits.view(-1).gather(0, there) if flat else bits.take(there)
        yield SparseWrite(target, there, old, new.to(view.device)), numbers.to(view.device)


def _parts(
    target: LivePiece, blocks: Sequence[DeltaBlock]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    piece, view = target
    dtype = bits_of(view).dtype
    for block in blocks:
        if block.dtype != dtype_name(piece.dtype) or block.shape != piece.global_shape:
            raise Corrupt(
                f"{block.fqn}: a delta of {block.dtype} {block.shape} for {piece.dtype} "
                f"{piece.global_shape}"
            )
        if not len(block.positions):
            continue
        positions = torch.from_numpy(block.positions) + block.start
        values = torch.frombuffer(bytearray(block.values), dtype=dtype)
        numbers = numbers_of(block.region, block.shape, positions)
        is_there, positions = positions_in(piece.region, piece.global_shape, numbers)
        if len(positions):
            yield numbers[is_there], positions, values[is_there]
