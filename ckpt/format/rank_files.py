"""The data files of one rank, planned: everything but the bytes of their chunks.

    chunks of each file + contents besides tensors -> names, headers, reserved tensors

Saves, imports and rewritten checkpoints plan their files here and nowhere else;
`ckpt.format.metadata` encodes what a file states about its place and reads it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt.format.checksum import Digests, digests_from, no_digests
from ckpt.format.datafile import ALIGNMENT, DataFileLayout, FileEntries, layout_data_file
from ckpt.format.manifest import Header
from ckpt.format.metadata import (
    FileRange,
    data_file_name,
    digest_extras,
    file_extras,
    file_metadata,
)
from ckpt.format.part import PartTexts, TensorRecord


class RankContents(NamedTuple):
    """What the files of one rank hold besides the bytes of its chunks.

    `texts` are those of the rank's part. `references` are the bytes in files of other attempts
    that the rank would have written. `digests` are those of all chunks in the order of the files;
    None for files without digests.
    """

    header: Header
    rank: int
    texts: PartTexts
    empty_tensors: Sequence[TensorRecord] = ()
    references: Sequence[FileRange] = ()
    digests: Sequence[bytes] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DataFile:
    """A data file that `rank` writes. `extras` are its reserved tensors, `digests` a row per chunk
    or none.
    """

    rank: int
    name: str
    entries: FileEntries
    layout: DataFileLayout
    extras: Mapping[str, bytes]
    digests: Digests

    def with_data_start(self, data_start: int) -> DataFile:
        """The same file, its header padded with spaces so that its chunks begin at `data_start`."""
        layout = self.layout
        shift = data_start - len(layout.header)
        assert shift >= 0 and data_start % ALIGNMENT == 0, "headers only grow, to whole pages"
        text = layout.header[8:].ljust(data_start - 8, b" ")
        moved = replace(
            layout,
            header=(data_start - 8).to_bytes(8, "little") + text,
            offsets=layout.offsets + shift,
            nbytes=layout.nbytes + shift,
        )
        return replace(self, layout=moved)


def rank_files(files: Sequence[FileEntries], contents: RankContents) -> list[DataFile]:
    """The files of one rank that hold these chunks, in this order; at least one, even if empty.

    Raises InvalidState when a header becomes longer than readers accept.
    """
    planned = []
    first_chunk = 0
    for index, entries in enumerate(files):
        chunks = slice(first_chunk, first_chunk + len(entries.chunks))
        first_chunk = chunks.stop
        extras = _extras(index, chunks, contents)
        layout = layout_data_file(
            entries,
            block_bytes=entries.block_bytes,
            metadata=_metadata(index, len(files), contents),
            extra={name: len(value) for name, value in extras.items()},
        )
        digests = no_digests()
        if contents.digests:
            digests = digests_from(b"".join(contents.digests[chunks]))
        name = data_file_name(contents.rank, index)
        planned.append(DataFile(contents.rank, name, entries, layout, extras, digests))
    return planned


def _metadata(index: int, count: int, contents: RankContents) -> dict[str, str]:
    is_first = index == 0
    return file_metadata(
        contents.header,
        rank=contents.rank,
        index=index,
        count=count,
        empty_tensors=contents.empty_tensors if is_first else (),
        aliases=contents.texts.aliases if is_first else None,
        references=contents.references if is_first else (),
    )


def _extras(index: int, chunks: slice, contents: RankContents) -> dict[str, bytes]:
    texts = contents.texts
    extras = file_extras(values=texts.values, per_rank=texts.per_rank) if index == 0 else {}
    if contents.digests is not None:
        extras |= digest_extras(b"".join(contents.digests[chunks]))
    return extras
