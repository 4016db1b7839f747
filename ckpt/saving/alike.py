"""What several ranks hold under one name is equal, or nothing of it is written.

Every save reports digests of such tensors with what it has written, and fails where they differ.
Two ranks that hold different tensors of one name have made a mistake in how they name things, which
the first save shows, and every later one would. So before anything is written, once for every set
of names that the ranks have told each other, the same digests are compared in a round.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import InvalidState
from ckpt.format.contradictions import DifferingRegion, texts_of_regions
from ckpt.format.datafile import region_start
from ckpt.format.disagreement import BY_NUMBER, TWO_MODELS
from ckpt.layout.kind import Kind, is_numbered
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, span_of
from ckpt.saving.holders import ranks_in_words
from ckpt.saving.plan import Contents
from ckpt.saving.task import SaveTask


def is_shared(holding: Holding, piece: Piece) -> bool:
    """Whether a tensor is on several ranks that have to agree on it, whatever optimizers have."""
    return holding.must_agree and holding.kind is not Kind.OPTIMIZER and len(piece.holders) > 1


def difference_of(
    task: SaveTask, contents: Contents | None, digests: npt.NDArray[np.uint32]
) -> InvalidState | None:
    """Why nothing may be written, on all ranks: tensors differ that are to be equal. Collective,
    where the ranks have told each other names since the last comparison; else nothing is done.

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
    # A rank without contents sends nothing, and then nobody has to have what it should have.
    mine = zlib.compress(json.dumps(rows).encode()) if contents else b""
    received = world.gather_to_coordinator("digests", mine)
    texts = None
    if received is not None:
        names = _NamesInText(contents.flat.values if contents else (), holders.copies)
        texts = json.dumps(_differences(received, names)).encode()
    if problems := json.loads(world.broadcast("differences", texts)):
        return InvalidState(problems)
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


class _NamesInText(NamedTuple):
    """Of values, which tell what is an optimizer's, and of what several groups of ranks have."""

    values: Collection[str]
    copies: Mapping[str, Sequence[Sequence[int]]]


def _differences(received: Sequence[bytes], names: _NamesInText) -> list[str]:
    """One text for each tensor of which not all that have it have the same."""
    having: dict[tuple[str, _Place], list[_Copy]] = {}
    for rank, data in enumerate(received):
        for fqn, start, shape, digest, holders in json.loads(zlib.decompress(data)) if data else ():
            copies = having.setdefault((fqn, (start, tuple(shape))), [])
            copies.append(_Copy(rank, digest, tuple(holders)))
    if all(received) and (problems := _otherwise_cut(having)):
        return problems
    differing = {
        place: copies for place, copies in having.items() if len({one.digest for one in copies}) > 1
    }
    problems = [
        f"{fqn}: {' and '.join(map(ranks_in_words, names.copies[fqn]))} have different values of "
        f"it, and {TWO_MODELS}{BY_NUMBER if is_numbered(fqn) else ''}"
        for fqn in sorted({fqn for fqn, _ in differing})
        if fqn in names.copies
    ]
    unequal = [
        DifferingRegion((fqn, start), [(one.rank, one.digest) for one in copies], True)
        for (fqn, (start, _)), copies in differing.items()
        if fqn not in names.copies
    ]
    return problems + texts_of_regions(unequal, names.values).failures


def _otherwise_cut(having: Mapping[tuple[str, _Place], Sequence[_Copy]]) -> list[str]:
    """That groups of ranks that have one tensor cut it differently, and what to do."""
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
