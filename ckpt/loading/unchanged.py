"""Which chunks of a checkpoint are proved to have the bytes that another one of the same root has.

Two things prove it. The chunk lies at the same place of the same data file, which is written once
and never again. Or the files of both have its BLAKE3 digest, and block checksums, and they are the
same. Equal checksums alone prove nothing: one change in four billion has the same crc32c. So saves
without `dedup`, which take no digests, share nothing with each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt.format.manifest import SINCE_FULL, BoxTable, Manifest
from ckpt.format.references import is_reference, reference_to
from ckpt.format.stored_index import StoredSums
from ckpt.loading.byte_line import Ints, expanded

Mask = npt.NDArray[np.bool_]


SumsOf: TypeAlias = Callable[[Manifest, int], StoredSums | None]


def unchanged_chunks(
    old: Manifest, new: Manifest, wanted: Collection[int], sums_of: SumsOf
) -> Mask:
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
    pairs = [
        (old.chunks.of_tensor(before), new.chunks.of_tensor(after))
        for before, after in _same_tensors(old, new)
    ]
    alike = [(before, after) for before, after in pairs if len(before) == len(after)]
    olds, news = (
        expanded(np.array([r.start for r in side], int), np.array([r.stop for r in side], int))
        for side in ([a for a, _ in alike], [b for _, b in alike])
    )
    a, b = old.chunks, new.chunks
    is_same = (a.span_start[olds] == b.span_start[news]) & (a.numel[olds] == b.numel[news])
    boxes = np.stack([a.box[olds].astype(np.int64), b.box[news].astype(np.int64)], axis=1)
    is_same &= _is_same_box(boxes, a.boxes, b.boxes)
    return olds[is_same], news[is_same]


def _same_tensors(old: Manifest, new: Manifest) -> list[tuple[int, int]]:
    known = {fqn: number for number, fqn in enumerate(old.fqns)}
    return [
        (before, number)
        for number, fqn in enumerate(new.fqns)
        if (before := known.get(fqn, -1)) >= 0
        and old.dtypes[before] == new.dtypes[number]
        and old.shapes[before] == new.shapes[number]
    ]


def _is_same_box(numbers: Ints, olds: BoxTable, news: BoxTable) -> Mask:
    """Whether the two boxes of each row are the same; -1 stands for none."""
    # There are few boxes for many chunks, so each pair of them is compared once.
    pairs, which = np.unique(numbers, axis=0, return_inverse=True)
    same = [
        one == two if min(one, two) < 0 else olds[one] == news[two] for one, two in pairs.tolist()
    ]
    return np.array(same, dtype=np.bool_)[which.reshape(-1)]


def _is_same_place(old: Manifest, new: Manifest, olds: Ints, news: Ints) -> Mask:
    numbers: dict[str, int] = {}
    files = [
        np.array([numbers.setdefault(name, len(numbers)) for name in _names(manifest)], dtype=int)
        for manifest in (old, new)
    ]
    a, b = old.chunks, new.chunks
    is_same: Mask = files[0][a.file[olds]] == files[1][b.file[news]]
    is_same &= a.byte_start[olds] == b.byte_start[news]
    return is_same


def _names(manifest: Manifest) -> list[str]:
    """The data files, named as any checkpoint of the root would."""
    header = manifest.header
    return [
        name if is_reference(name) else reference_to(header.step, header.attempt, name)
        for name in manifest.files
    ]


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
