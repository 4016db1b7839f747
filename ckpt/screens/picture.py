"""`ckpt show --map`: a checkpoint as a picture, in the terminal or as one HTML page.

The page holds everything it needs: no script, font or image from anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt.layout.region import Box, Region
from ckpt.loading.contents import CheckpointContents
from ckpt.screens.terminal import (
    counted,
    date,
    screen_width,
    shape_text,
    show_table,
    size,
    write_page,
)
from ckpt.screens.visible import page_text
from ckpt.tools.shard_map import PartOnMap, TensorOnMap, TensorsMap, map_of, rectangles

SHADES = " ░▒▓█"
ROWS_IN_TERMINAL_MAX = 100
RECTANGLES_MAX = 60_000  # of a page: more of them make browsers slow
WIDTH, HEIGHT = 150, 42  # pixels of one tensor's picture
FILE_WIDTH = 900  # pixels of the longest file's bar


def show_map(checkpoint: CheckpointContents, names: Sequence[str], output: str | None) -> None:
    """Print the picture, or write it to the new or old file `output`, which names a local path."""
    tensors_map = map_of(checkpoint, names)
    if output is None:
        _show_in_terminal(checkpoint, tensors_map)
        return
    write_page(output, page_of(checkpoint, tensors_map))
    print(
        f"{output}: {counted(len(tensors_map.tensors), 'tensor')}, "
        f"{counted(len(tensors_map.ranks), 'rank')}; open it in a browser"
    )


# In the terminal -------------------------------------------------------------------------------


def _show_in_terminal(checkpoint: CheckpointContents, tensors_map: TensorsMap) -> None:
    header = checkpoint.manifest.header
    print(checkpoint.url)
    print(f"step {header.step}, {header.world_size} ranks, {date(header.created_unix)}")
    # As many ranks to a column as it takes for all to fit beside name, shape and size.
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
        shades = "".join(wide * _shade(tensor, column) for column in columns)
        info = tensor.info
        rows.append((info.fqn, shape_text(info.shape), size(info.nbytes), f"|{shades}|"))
    show_table(("name", "shape", "size", "ranks"), rows, right=("size",))
    if len(tensors_map.tensors) > ROWS_IN_TERMINAL_MAX:
        hidden = len(tensors_map.tensors) - ROWS_IN_TERMINAL_MAX
        print(f"... and {hidden} more; choose by a pattern, or see all with --output FILE.html")
    print()
    longest = max((file.nbytes for file in tensors_map.files), default=1)
    files = [
        (file.name, size(file.nbytes), "█" * max(1, round(40 * file.nbytes / longest)))
        for file in tensors_map.files[:ROWS_IN_TERMINAL_MAX]
    ]
    show_table(("file", "size", ""), files, right=("size",))
    if len(tensors_map.files) > ROWS_IN_TERMINAL_MAX:
        print(f"... and {len(tensors_map.files) - ROWS_IN_TERMINAL_MAX} more files")


def _shade(tensor: TensorOnMap, column: range) -> str:
    nbytes = sum(tensor.nbytes_by_rank[rank] for rank in column)
    if not nbytes:
        return SHADES[0]
    return SHADES[min(4, 1 + 4 * nbytes // (tensor.info.nbytes + 1))]


# As a page -------------------------------------------------------------------------------------

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px; color: #1a1a1a; background: #fff; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 28px 0 8px; }
.mono, td.name { font-family: ui-monospace, monospace; font-size: 12px; overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { padding: 3px 12px 3px 0; text-align: left; }
th { font-weight: 600; border-bottom: 1px solid #ccc; position: sticky; top: 0; background: #fff; }
td { border-bottom: 1px solid #eee; vertical-align: middle; } td.number { text-align: right; }
svg { display: block; } rect:hover { stroke: #000; stroke-width: 1.5; }
.key { display: inline-block; margin: 0 14px 6px 0; white-space: nowrap; }
.key i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; }
.note { color: #555; }
@media (prefers-color-scheme: dark) {
  body, th { background: #16181c; color: #e6e6e6; } td { border-color: #2a2d33; }
  th { border-color: #555; } rect:hover { stroke: #fff; } .note { color: #aaa; }
}
"""


def page_of(checkpoint: CheckpointContents, tensors_map: TensorsMap) -> Iterator[str]:
    """The page, in pieces: ranks, tensors with the parts that each rank stored, files."""
    header = checkpoint.manifest.header
    title = page_text(f"step {header.step} of {checkpoint.store.url}")
    yield f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
    total = sum(file.nbytes for file in tensors_map.files)
    yield (
        f'<p class="note">{page_text(checkpoint.url)}<br>attempt {page_text(header.attempt)}, '
        f"saved by {counted(header.world_size, 'rank')} on {date(header.created_unix)}, "
        f"{counted(len(tensors_map.tensors), 'tensor')}, "
        f"{counted(len(tensors_map.files), 'file')}, {size(total)}</p>\n"
    )
    yield from _ranks(tensors_map)
    yield from _tensors(tensors_map)
    yield from _files(tensors_map)
    yield "</body></html>\n"


def _ranks(tensors_map: TensorsMap) -> Iterator[str]:
    yield "<h2>Ranks</h2>\n<div>"
    for index, rank in enumerate(tensors_map.ranks):
        nbytes = sum(file.nbytes for file in tensors_map.files if file.rank == index)
        yield (
            f'<span class="key"><i style="background:{_color(index, len(tensors_map.ranks))}"></i>'
            f"{page_text(rank)}: {size(nbytes)}</span>"
        )
    yield "</div>\n"


def _tensors(tensors_map: TensorsMap) -> Iterator[str]:
    yield (
        "<h2>Tensors</h2>\n<p class='note'>Each picture is the whole tensor, dim 0 downward, all "
        "other dims to the right; a colour is the rank that stored the part. Hover for the file, "
        "bytes and region.</p>\n<table><tr><th>name</th><th>kind</th><th>dtype</th><th>shape</th>"
        "<th>size</th><th>parts</th><th></th></tr>\n"
    )
    left = RECTANGLES_MAX
    for tensor in tensors_map.tensors:
        info = tensor.info
        picture, used = _picture(tensors_map, tensor, left)
        left -= used
        yield (
            f'<tr><td class="name">{page_text(info.fqn)}</td><td>{info.kind.name.lower()}</td>'
            f"<td>{info.dtype_name}</td><td>{shape_text(info.shape)}</td>"
            f'<td class="number">{size(info.nbytes)}</td><td class="number">{len(tensor.parts)}'
            f"</td><td>{picture}</td></tr>\n"
        )
    yield "</table>\n"


def _picture(tensors_map: TensorsMap, tensor: TensorOnMap, rectangles_max: int) -> tuple[str, int]:
    """The SVG of one tensor and how many rectangles it took; a note when there are none left."""
    if not tensor.parts:
        return '<span class="note">no elements</span>', 0
    drawn = []
    shape = tensor.info.shape
    for part in tensor.parts:
        color = _color(part.rank, len(tensors_map.ranks))
        about = page_text(_about(tensors_map, part))
        for left, top, width, height in rectangles(part.region, shape):
            drawn.append(
                f'<rect x="{left * WIDTH:.2f}" y="{top * HEIGHT:.2f}" '
                f'width="{max(width * WIDTH, 0.4):.2f}" height="{max(height * HEIGHT, 0.4):.2f}" '
                f'fill="{color}"><title>{about}</title></rect>'
            )
        if len(drawn) > rectangles_max:
            return f'<span class="note">{len(tensor.parts)} parts, too many to draw</span>', 0
    return f'<svg width="{WIDTH}" height="{HEIGHT}">{"".join(drawn)}</svg>', len(drawn)


def _about(tensors_map: TensorsMap, part: PartOnMap) -> str:
    stop = part.byte_start + part.nbytes
    return (
        f"rank {tensors_map.ranks[part.rank]}: {_region_text(part.region)}, {size(part.nbytes)}, "
        f"{tensors_map.files[part.file].name} bytes {part.byte_start} to {stop}"
    )


def _region_text(region: Region) -> str:
    if isinstance(region, Box):
        pairs = zip(region.offset, region.shape, strict=True)
        return "[" + ", ".join(f"{start}:{start + extent}" for start, extent in pairs) + "]"
    return f"elements {region.start} to {region.stop}"


def _files(tensors_map: TensorsMap) -> Iterator[str]:
    yield (
        "<h2>Files</h2>\n<p class='note'>Length is size; every stripe is a part of a tensor, in "
        "the order of its bytes.</p>\n<table>"
        "<tr><th>file</th><th>rank</th><th>size</th><th>parts</th><th></th></tr>\n"
    )
    inside: dict[int, list[tuple[PartOnMap, str]]] = {}
    for tensor in tensors_map.tensors:
        for part in tensor.parts:
            inside.setdefault(part.file, []).append((part, tensor.info.fqn))
    longest = max((file.nbytes for file in tensors_map.files), default=1)
    each_max = max(RECTANGLES_MAX // max(len(tensors_map.files), 1), 16)
    for number, file in enumerate(tensors_map.files):
        parts = inside.get(number, [])
        # The others would be narrower than a pixel, and are what makes a page slow.
        largest = sorted(parts, key=lambda item: -item[0].nbytes)[:each_max]
        largest.sort(key=lambda item: item[0].byte_start)
        scale = FILE_WIDTH / longest
        bars = [
            f'<rect width="{max(file.nbytes * scale, 1):.2f}" height="16" fill="#bbb">'
            "<title>header, checksums, small or other parts</title></rect>"
        ]
        for index, (part, fqn) in enumerate(largest):
            shade = 45 + 20 * (index % 2)
            about = page_text(f"{fqn}: {size(part.nbytes)} from byte {part.byte_start} on")
            bars.append(
                f'<rect x="{part.byte_start * scale:.2f}" '
                f'width="{max(part.nbytes * scale, 0.2):.2f}" height="16" '
                f'fill="{_color(file.rank, len(tensors_map.ranks), shade)}">'
                f"<title>{about}</title></rect>"
            )
        yield (
            f'<tr><td class="name">{page_text(file.name)}</td>'
            f'<td class="number">{page_text(tensors_map.ranks[file.rank])}</td>'
            f'<td class="number">{size(file.nbytes)}</td><td class="number">{len(parts)}</td>'
            f'<td><svg width="{FILE_WIDTH}" height="16">{"".join(bars)}</svg></td></tr>\n'
        )
    yield "</table>\n"


def _color(index: int, count: int, lightness: int = 52) -> str:
    """A colour of its own for each rank, neighbours far apart on the wheel."""
    golden_angle = 137.508
    hue = 360 * index / max(count, 1) if count <= 12 else index * golden_angle % 360
    return f"hsl({hue:.0f} 62% {lightness}%)"
