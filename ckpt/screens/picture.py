"""`ckpt show --map`: a checkpoint as a picture, in the terminal or as one HTML page.

The page holds everything it needs: no script, font or image from anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from ckpt.layout.region import Box, Region
from ckpt.loading.contents import CheckpointContents, StoredPart, TensorInfo
from ckpt.screens.terminal import (
    counted,
    date,
    screen_width,
    shape_text,
    show_table,
    size,
    write_page,
)
from ckpt.tools.shard_map import FileOnMap, Rectangle, TensorsMap, map_of, rectangles

SHADES = " ░▒▓█"
ROWS_IN_TERMINAL_MAX = 100
RECTANGLES_MAX = 60_000  # of a page: more of them make browsers slow


def show_map(checkpoint: CheckpointContents, names: Sequence[str], output: str | None) -> None:
    """Print the picture, or write it to the new or old file `output`, which names a local path."""
    tensors_map = map_of(checkpoint, names)
    if output is None:
        _show_in_terminal(checkpoint, tensors_map)
        return
    write_page(output, _page_of(checkpoint, tensors_map))
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
    columns = [
        range(start, min(start + per_column, len(tensors_map.ranks)))
        for start in range(0, len(tensors_map.ranks), per_column)
    ]
    ranks = tensors_map.ranks
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


def _page_of(checkpoint: CheckpointContents, tensors_map: TensorsMap) -> Iterator[str]:
    """The page, in pieces: ranks, tensors with the parts that each rank stored, files."""
    from ckpt.screens.pages import pieces_of  # the terminal does without

    return pieces_of(
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
