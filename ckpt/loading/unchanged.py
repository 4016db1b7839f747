"""Which chunks of a checkpoint are proved to have the bytes that another one of the same root has.

Two things prove it. The chunk lies at the same place of the same data file, which is written once
and never again. Or both manifests have its BLAKE3 digest, and block checksums, and they are the
same. Equal checksums alone prove nothing: one change in four billion has the same crc32c. So saves
without `dedup`, which take no digests, share nothing with each other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt.format.manifest import BoxTable, Manifest
from ckpt.format.references import is_reference, reference_to
from ckpt.loading.byte_line import Ints, expanded

Mask = npt.NDArray[np.bool_]


def unchanged_chunks(old: Manifest, new: Manifest) -> Mask:
    """A bool for each chunk of `new`: whether `old` has the same region of a tensor of the same
    name, dtype and shape, with bytes that are proved to be equal.
    """
    equal = np.zeros(len(new.chunks), dtype=np.bool_)
    olds, news = _of_same_regions(old, new)
    is_proved = _is_same_place(old, new, olds, news)
    rest = np.flatnonzero(~is_proved)
    is_proved[rest] = _is_same_digest(old, new, olds[rest], news[rest])
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


def _is_same_digest(old: Manifest, new: Manifest, olds: Ints, news: Ints) -> Mask:
    if not len(old.digests) or not len(new.digests):
        return np.zeros(len(olds), dtype=np.bool_)
    is_same: Mask = (old.digests[olds] == new.digests[news]).all(axis=1)
    # A block whose checksum differs from what was hashed had changed before it was written.
    a, b = old.chunks.first_block, new.chunks.first_block
    counts = (b[news + 1] - b[news]).astype(np.int64)
    is_same &= counts == (a[olds + 1] - a[olds])
    rows = np.flatnonzero(is_same)
    before = old.checksums[expanded(a[olds[rows]], a[olds[rows] + 1])]
    after = new.checksums[expanded(b[news[rows]], b[news[rows] + 1])]
    differing = np.repeat(rows, counts[rows])[before != after]
    is_same[differing] = False
    return is_same
