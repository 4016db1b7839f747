"""Read written files back, and compare every tensor with the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt.convert.sources.source import CheckpointSource
from ckpt.convert.targets.files import Data, PlannedFile
from ckpt.convert.targets.writing import fill_part
from ckpt.errors import Corrupt
from ckpt.format.checksum import crc32c
from ckpt.format.object_parts import PART_NBYTES
from ckpt.layout.buffers import aligned_buffer
from storage import Store


def verify_files(source: CheckpointSource, store: Store, files: Sequence[PlannedFile]) -> None:
    """Raise Corrupt naming every tensor whose bytes in the files differ from the source.

    Both are read anew, in memory bounded by two parts.
    """
    ours, theirs = aligned_buffer(PART_NBYTES), aligned_buffer(PART_NBYTES)
    wrong: list[str] = []
    for file in files:
        for start in range(0, file.nbytes, PART_NBYTES):
            nbytes = min(PART_NBYTES, file.nbytes - start)
            fill_part(source, file.pieces, start, ours[:nbytes])
            store.get_into(file.key, start, [theirs[:nbytes]])
            for piece, low, high in _data_in(file, start, start + nbytes):
                inside = slice(low - start, high - start)
                if crc32c(ours[inside]) != crc32c(theirs[inside]):
                    wrong.append(f"{piece.output.name} in {file.key}")
    if wrong:
        some = ", ".join(sorted(set(wrong))[:10])
        raise Corrupt(f"{store.url}: written bytes differ from those of {source.url}: {some}")


def _data_in(file: PlannedFile, start: int, stop: int) -> Iterator[tuple[Data, int, int]]:
    for piece in file.pieces:
        low, high = max(piece.start, start), min(piece.start + piece.nbytes, stop)
        if low < high and isinstance(piece, Data):
            yield piece, low, high
