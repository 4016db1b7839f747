"""`ckpt show`: opens one checkpoint and shows what is in it; with `--map` as a picture, in the
terminal or as one HTML page.

The page holds everything it needs: no script, font or image from anywhere else.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ckpt.commit.locate import line_text
from ckpt.format.manifest import MetadataBudget
from ckpt.layout.descriptions import is_description, shown_type
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.kind import Kind
from ckpt.layout.region import Box, Region, Shape, boxes_of
from ckpt.loading.contents import CheckpointContents, StoredPart, TensorInfo
from ckpt.screens.folding import folded
from ckpt.screens.terminal import (
    as_json,
    counted,
    date,
    screen_width,
    shape_text,
    short,
    show_json,
    show_table,
    size,
    write_page,
)

PART_NBYTES = 2000  # of a stored part, as it is shown
CHUNKS_READ = 4096  # rows of the table that are made at once
SHADES = " ░▒▓█"
ROWS_IN_TERMINAL_MAX = 100
RECTANGLES_MAX = 60_000  # of a page: more of them make browsers slow


def show_tables(
    checkpoint: CheckpointContents, names: Sequence[str], budget: MetadataBudget, unfold: bool
) -> None:
    """The tensors, who stored how much, and the values."""
    header = checkpoint.manifest.header
    print(checkpoint.url)
    line = "" if checkpoint.entry is None else f", {line_text(checkpoint.entry.line)}"
    ranks = counted(header.world_size, "rank")
    about = f"step {header.step}{line}, {ranks}, {date(header.created_unix)}"
    print(about if checkpoint.manifest.is_sealed else header.attempt, end="\n\n")
    each = budget.timed(_rows(checkpoint, names), "tensors")
    rows = each if unfold else folded(each)
    show_table(("name", "kind", "dtype", "shape", "size", "stored by"), rows, right=("size",))
    print()
    _show_ranks(checkpoint)
    if checkpoint.values:
        print()
        values = [(name, _shown_value(value)) for name, value in checkpoint.values.items()]
        show_table(("value of", ""), values)


def _rows(checkpoint: CheckpointContents, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A row for each tensor, made when it is asked for. Where chunks lie is not needed."""
    manifest, aliases = checkpoint.manifest, checkpoint.aliases
    ranks = [rank_of(file) for file in manifest.files]
    writers: dict[tuple[int, ...], str] = {}
    stored_by: list[str] = []
    for count, files in manifest.chunks.files_by_tensor():
        # Most tensors are stored by the same ranks: their text is made once.
        key = (count, *files)
        if key not in writers:
            writers[key] = _writers({ranks[file] for file in files}, count)
        stored_by.append(writers[key])
    columns = (manifest.kinds.tolist(), manifest.dtypes, manifest.shapes, stored_by)
    # What follows a name is mostly one of a few.
    rests = {one: _described(*one) for one in set(zip(*columns, strict=True))}
    each = map(rests.__getitem__, zip(*columns, strict=True))
    rest_of = dict(zip(manifest.fqns, each, strict=True))
    for name in names:
        if name in aliases:
            yield name, f"= {aliases[name]}", *rest_of[aliases[name]][1:]
        else:
            yield name, *rest_of[name]


def _described(kind: int, dtype: str, shape: Shape, stored_by: str) -> tuple[str, ...]:
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    return Kind.of(kind).name.lower(), dtype, shape_text(shape), size(nbytes), stored_by


def _shown_value(value: Any) -> str:
    if is_description(value):
        return f"{shown_type(value)}: {', '.join(value['components'])}"
    return short(repr(value))


def _show_ranks(checkpoint: CheckpointContents) -> None:
    """Who stored how much: bytes and files by rank."""
    manifest, nbytes = checkpoint.manifest, Counter[str]()
    files = Counter(map(rank_of, manifest.files))
    for name, file_nbytes in zip(manifest.files, manifest.file_nbytes.tolist(), strict=True):
        nbytes[rank_of(name)] += file_nbytes
    ranks = sorted(nbytes, key=rank_order)
    rows = [(rank, f"{files[rank]}", size(nbytes[rank])) for rank in ranks]
    rows.append(("all", f"{sum(files.values())}", size(sum(nbytes.values()))))
    titles = ("stored by rank", "files", "size")
    show_table(titles, rows, right=titles)


def _writers(ranks: Set[str], parts: int) -> str:
    """The ranks that stored parts, and how many parts: `0, 1, 2 (3 parts)`."""
    if not ranks:
        return "nobody (empty)"
    # A tensor of a large job is stored by thousands of ranks.
    shown = ", ".join(sorted(ranks, key=rank_order)) if len(ranks) <= 8 else f"{len(ranks)} ranks"
    return f"{shown} ({parts} parts)" if parts > 1 else shown


def print_json(
    checkpoint: CheckpointContents, names: Sequence[str], budget: MetadataBudget
) -> None:
    """The same and every stored part, for programs."""
    manifest, header = checkpoint.manifest, checkpoint.manifest.header
    manifest.chunks.first  # noqa: B018  # is refused before anything is printed
    tensors = budget.timed(_tensors_json(checkpoint, names, budget), "tensors")
    fields = {
        "schema": "ckpt.show",
        "version": 1,
        "url": checkpoint.url,
        "step": header.step,
        "attempt": header.attempt,
        "line": None if checkpoint.entry is None else checkpoint.entry.line,
        "world_size": header.world_size,
        "created_unix": header.created_unix,
        "user": dict(header.user),
        "files": dict(zip(manifest.files, manifest.file_nbytes.tolist(), strict=True)),
        "values": {name: as_json(value) for name, value in checkpoint.values.items()},
    }
    show_json(fields, "tensors", tensors)


def _tensors_json(
    checkpoint: CheckpointContents, names: Sequence[str], budget: MetadataBudget
) -> Iterator[tuple[str, str]]:
    """One tensor after the other, as JSON; few parts are in memory."""
    manifest, aliases, chunks = checkpoint.manifest, checkpoint.aliases, checkpoint.manifest.chunks
    counts = np.diff(chunks.first)
    if len(counts):
        most = int(counts.argmax())
        budget.charge(PART_NBYTES * int(counts[most]), f"the parts of {manifest.fqns[most]}")
    first, boxes, kinds = chunks.first.tolist(), chunks.boxes, manifest.kinds.tolist()
    columns = (chunks.file, chunks.byte_start, chunks.numel, chunks.span_start, chunks.box)
    files = [json.dumps(file) for file in manifest.files]
    numbers = {fqn: number for number, fqn in enumerate(manifest.fqns)}
    texts: dict[tuple[str, Shape, int], str] = {}  # mostly the same few
    low, rows = 0, list[tuple[int, ...]]()  # chunks that follow each other, from that one on
    for name in names:
        number = numbers[aliases.get(name, name)]
        key = dtype, shape, kind = manifest.dtypes[number], manifest.shapes[number], kinds[number]
        itemsize = DTYPES[dtype].itemsize
        if key not in texts:
            words = {"dtype": dtype, "shape": shape, "kind": Kind.of(kind).name.lower()}
            described = words | {"nbytes": math.prod(shape) * itemsize}
            texts[key] = json.dumps(described)[:-1]
        start, stop = first[number], first[number + 1]
        # Many chunks at once: most tensors have few, and each conversion of numpy has its price.
        if start < low or stop > low + len(rows):
            low, until = start, max(stop, start + CHUNKS_READ)
            rows = list(zip(*(column[low:until].tolist() for column in columns), strict=True))
        parts = [
            f'{{"file": {files[file]}, "byte_start": {byte_start}, "nbytes": {numel * itemsize}, '
            + (_box_json(boxes[box]) if box >= 0 else f'"span": [{span}, {span + numel}]}}')
            for file, byte_start, numel, span, box in rows[start - low : stop - low]
        ]
        alias_of = json.dumps(aliases[name]) if name in aliases else "null"
        yield name, f'{texts[key]}, "alias_of": {alias_of}, "parts": [{", ".join(parts)}]}}'


def _box_json(box: Box) -> str:
    return f'"box": {json.dumps({"offset": box.offset, "shape": box.shape})}}}'


def show_map(
    checkpoint: CheckpointContents, names: Sequence[str], output: str, budget: MetadataBudget
) -> None:
    """Print the picture, or write it to the new or old file `output`, which names a local path, in
    pieces: ranks, tensors with the parts that each rank stored, files.
    """
    # Before anything is drawn: a manifest of a few MiB can describe a page of many GiB.
    count = len(checkpoint.manifest.chunks)
    budget.charge(PART_NBYTES * count, f"a picture of {count} chunks")
    tensors_map = map_of(checkpoint, names)
    if not output:
        _show_in_terminal(checkpoint, tensors_map)
        return
    from ckpt.screens.pages import pieces_of  # the terminal does without

    pieces = pieces_of(
        "map.html",
        header=checkpoint.manifest.header,
        root=checkpoint.store.url,
        url=checkpoint.url,
        map=tensors_map,
        tensors=_drawn(tensors_map),
        files=_striped(tensors_map),
        color=_color,
        region_text=_region_text,
    )
    write_page(output, pieces)
    print(
        f"{output}: {counted(len(tensors_map.tensors), 'tensor')}, "
        f"{counted(len(tensors_map.ranks), 'rank')}; open it in a browser"
    )


# In the terminal -------------------------------------------------------------------------------


def _show_in_terminal(checkpoint: CheckpointContents, tensors_map: TensorsMap) -> None:
    header = checkpoint.manifest.header
    print(checkpoint.url)
    print(f"step {header.step}, {header.world_size} ranks, {date(header.created_unix)}")
    # As many ranks to a column as it takes for all to fit next to name, shape and size.
    per_column = -(-len(tensors_map.ranks) // max(screen_width() - 80, 16))
    ranks = tensors_map.ranks
    every = range(len(ranks))
    columns = [every[start : start + per_column] for start in every[::per_column]]
    print(
        f"a column is {'one rank' if per_column == 1 else f'{per_column} ranks'}, "
        f"{ranks[0] if ranks else ''} to {ranks[-1] if ranks else ''}; "
        "its shade is the share of the tensor's bytes that it stored:  ░ to 1/4, ▒ to 1/2, "
        "▓ to 3/4, █ more\n"
    )
    rows = []
    wide = 2 if len(columns) <= 32 else 1
    for tensor in tensors_map.tensors[:ROWS_IN_TERMINAL_MAX]:
        by_rank = tensors_map.nbytes_by_rank(tensor)
        stored = (sum(by_rank[rank] for rank in column) for column in columns)
        shades = "".join(wide * _shade(nbytes, tensor.nbytes) for nbytes in stored)
        rows.append((tensor.fqn, shape_text(tensor.shape), size(tensor.nbytes), f"|{shades}|"))
    show_table(("name", "shape", "size", "ranks"), rows, right=("size",))
    if len(tensors_map.tensors) > ROWS_IN_TERMINAL_MAX:
        hidden = len(tensors_map.tensors) - ROWS_IN_TERMINAL_MAX
        print(f"... and {hidden} more; choose by a pattern, or see all with --output FILE.html")
    print()
    # Bars are of one scale: a rank that stores far more than others is seen at once.
    longest = max((file.nbytes for file in tensors_map.files.values()), default=1)
    files = [
        (file.name, size(file.nbytes), "█" * max(1, round(40 * file.nbytes / longest)))
        for file in islice(tensors_map.files.values(), ROWS_IN_TERMINAL_MAX)
    ]
    show_table(("file", "size", ""), files, right=("size",))
    if len(tensors_map.files) > ROWS_IN_TERMINAL_MAX:
        print(f"... and {len(tensors_map.files) - ROWS_IN_TERMINAL_MAX} more files")


def _shade(nbytes: int, of_nbytes: int) -> str:
    return SHADES[min(4, 1 + 4 * nbytes // (of_nbytes + 1)) if nbytes else 0]


# As a page -------------------------------------------------------------------------------------


def _drawn(
    tensors_map: TensorsMap,
) -> Iterator[tuple[TensorInfo, list[tuple[StoredPart, Rectangle]] | None]]:
    """Each tensor with the rectangles of its parts; None when there are none left."""
    left = RECTANGLES_MAX
    for tensor in tensors_map.tensors:
        drawn: list[tuple[StoredPart, Rectangle]] = []
        for part in tensor.parts if len(tensor.parts) <= left else ():
            drawn += ((part, place) for place in rectangles(part.region, tensor.shape))
            if len(drawn) > left:
                break
        is_whole = len(tensor.parts) <= left and len(drawn) <= left
        left -= len(drawn) if is_whole else 0
        yield tensor, drawn if is_whole else None


def _striped(
    tensors_map: TensorsMap,
) -> Iterator[tuple[FileOnMap, list[tuple[StoredPart, str]], list[tuple[StoredPart, str]]]]:
    """Each file with its parts, and the largest of them in their order: others would be narrower
    than a pixel, and are what makes a page slow.
    """
    inside: dict[str, list[tuple[StoredPart, str]]] = {}
    for tensor in tensors_map.tensors:
        for part in tensor.parts:
            inside.setdefault(part.file, []).append((part, tensor.fqn))
    each_max = max(RECTANGLES_MAX // max(len(tensors_map.files), 1), 16)
    for name, file in tensors_map.files.items():
        parts = inside.get(name, [])
        largest = sorted(parts, key=lambda item: -item[0].nbytes)[:each_max]
        yield file, parts, sorted(largest, key=lambda item: item[0].byte_start)


def _region_text(region: Region) -> str:
    if isinstance(region, Box):
        pairs = zip(region.offset, region.shape, strict=True)
        return "[" + ", ".join(f"{start}:{start + extent}" for start, extent in pairs) + "]"
    return f"elements {region.start} to {region.stop}"


def _color(index: int, count: int, lightness: int = 52) -> str:
    """A colour of its own for each rank, neighbours far apart on the wheel."""
    # Turned by the golden angle, no two of the next few hues are near each other.
    golden_angle = 137.508
    hue = 360 * index / max(count, 1) if count <= 12 else index * golden_angle % 360
    return f"hsl({hue:.0f} 62% {lightness}%)"


# Where tensors lie ------------------------------------------------------------------------------


class Rectangle(NamedTuple):
    """A part of a tensor drawn on a unit square: rows are dim 0, columns all other dims in order.

    All four numbers are from 0 to 1.
    """

    left: float
    top: float
    width: float
    height: float


class FileOnMap(NamedTuple):
    """One data file: its name in the step's directory, the place of its rank, its length."""

    name: str
    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorsMap:
    """Which rank stored which part of which tensor in which file, by the name of the file.

    `ranks` are the names of those who wrote: numbers, or file names where a name has no rank.
    """

    ranks: tuple[str, ...]
    files: Mapping[str, FileOnMap]
    tensors: tuple[TensorInfo, ...]

    def nbytes_by_rank(self, tensor: TensorInfo) -> list[int]:
        """One number per rank of the map."""
        nbytes = [0] * len(self.ranks)
        for part in tensor.parts:
            nbytes[self.files[part.file].rank] += part.nbytes
        return nbytes


def map_of(checkpoint: CheckpointContents, names: Sequence[str] | None = None) -> TensorsMap:
    """The map of all tensors of a checkpoint, or of those in `names`, in that order.

    Tied names are left out: their parts are those of the stored tensor. Reads no tensor. Raises
    KeyError for an unknown name.
    """
    manifest = checkpoint.manifest
    # By name, for the manifest does not say who wrote a file.
    ranks = sorted({rank_of(name) for name in manifest.files}, key=rank_order)
    place = {rank: index for index, rank in enumerate(ranks)}
    sizes = zip(manifest.files, manifest.file_nbytes.tolist(), strict=True)
    files = {name: FileOnMap(name, place[rank_of(name)], nbytes) for name, nbytes in sizes}
    infos = map(checkpoint.info, checkpoint.keys() if names is None else names)
    return TensorsMap(tuple(ranks), files, tuple(one for one in infos if one.alias_of is None))


def rank_of(file: str) -> str:
    """The rank in a data file's name, or the name itself; files of another attempt too."""
    match = re.match(r"rank0*(\d+)-", file.rpartition("/")[2])
    return match[1] if match else file


def rank_order(rank: str) -> tuple[int, str]:
    """A sort key for what `rank_of` returns: by number, then other names."""
    return len(rank), rank


def rectangles(region: Region, shape: Shape) -> list[Rectangle]:
    """`region` of a tensor of `shape` on the unit square; the whole tensor is all of it.

    A part that is cut along dims behind the second is drawn from its first column to its last.
    """
    if not shape:
        return [Rectangle(0.0, 0.0, 1.0, 1.0)]
    # At least 1, for tensors without elements.
    rows, columns = max(shape[0], 1), max(math.prod(shape[1:]), 1)
    drawn = []
    for box in boxes_of(region, shape):
        first = last = 0
        for length, offset, extent in zip(shape[1:], box.offset[1:], box.shape[1:], strict=True):
            first = first * length + offset
            last = last * length + offset + extent - 1
        left, width = first / columns, (last + 1 - first) / columns
        drawn.append(Rectangle(left, box.offset[0] / rows, width, box.shape[0] / rows))
    return drawn
