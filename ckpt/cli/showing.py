"""The command that opens one checkpoint and shows what is in it: show, also as a picture."""

from __future__ import annotations

import argparse
import fnmatch
import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any

from ckpt.cli.commandline import OK
from ckpt.cli.picture import show_map
from ckpt.cli.screen import (
    counted,
    date,
    shape_text,
    short,
    show_json,
    show_table,
    size,
    value_json,
)
from ckpt.commit.lines import line_text
from ckpt.errors import CheckpointError
from ckpt.format.metadata_budget import MetadataBudget
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.kind import Kind
from ckpt.layout.region import Box, Region
from ckpt.loading.contents import CheckpointContents, open_contents
from ckpt.state.descriptions import is_description, shown_type
from ckpt.tools.shard_map import rank_of, rank_order

PART_NBYTES = 2000  # of a stored part, as it is shown
PARTS_USUAL = 64  # of a tensor


def show(arguments: argparse.Namespace) -> int:
    """`ckpt show`."""
    if arguments.output and not arguments.map:
        raise CheckpointError("--output is for --map; send other output to a file with >")
    budget, options = MetadataBudget(arguments.metadata_max), dict(arguments.option)
    with open_contents(arguments.url, arguments.step, options, budget=budget) as checkpoint:
        names = fnmatch.filter(checkpoint.keys(), arguments.pattern)
        if not names and len(checkpoint):
            raise CheckpointError(
                f"no name matches {arguments.pattern!r}; quote patterns, as in 'model.*'; "
                f"the first name is {checkpoint.keys()[0]!r}"
            )
        if arguments.map and not arguments.json:
            count = len(checkpoint.manifest.chunks)
            budget.charge(PART_NBYTES * count, f"a picture of {count} chunks")
            show_map(checkpoint, names, arguments.output)
            return OK
        if arguments.json:
            checkpoint.manifest.chunks.first  # noqa: B018  # is refused before anything is printed
            tensors = _tensors_json(checkpoint, names, budget)
            if len(checkpoint.manifest.chunks) > PARTS_USUAL * len(checkpoint):
                tensors = budget.timed(tensors, "tensors")  # others are as many as their names
            show_json(_checkpoint_json(checkpoint), "tensors", tensors)
        else:
            _show_tables(checkpoint, names, budget)
    return OK


def _show_tables(
    checkpoint: CheckpointContents, names: Sequence[str], budget: MetadataBudget
) -> None:
    header = checkpoint.manifest.header
    print(checkpoint.url)
    line = "" if checkpoint.entry is None else f", {line_text(checkpoint.entry.line)}"
    ranks = counted(header.world_size, "rank")
    print(f"step {header.step}{line}, {ranks}, {date(header.created_unix)}\n")
    rows = budget.timed(_rows(checkpoint, names), "tensors")
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
    stored_by: list[str] = []  # mostly the same few texts
    for count, files in manifest.chunks.files_by_tensor():
        key = (count, *files)
        if key not in writers:
            writers[key] = _writers({ranks[file] for file in files}, count)
        stored_by.append(writers[key])
    kind_names = {kind: Kind.of(kind).name.lower() for kind in set(manifest.kinds.tolist())}
    kinds = [kind_names[kind] for kind in manifest.kinds.tolist()]
    shapes = {shape: shape_text(shape) for shape in set(manifest.shapes)}
    numbers = {fqn: number for number, fqn in enumerate(manifest.fqns)}
    for name in names:
        number = numbers[aliases.get(name, name)]
        kind = f"= {aliases[name]}" if name in aliases else kinds[number]
        shape, dtype = manifest.shapes[number], manifest.dtypes[number]
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        yield name, kind, dtype, shapes[shape], size(nbytes), stored_by[number]


def _shown_value(value: Any) -> str:
    if is_description(value):
        return f"{shown_type(value)}: {', '.join(value['components'])}"
    return short(repr(value))


def _show_ranks(checkpoint: CheckpointContents) -> None:
    """Who stored how much: bytes and files by rank."""
    manifest = checkpoint.manifest
    nbytes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, file_nbytes in zip(manifest.files, manifest.file_nbytes.tolist(), strict=True):
        nbytes[rank_of(name)] += file_nbytes
        files[rank_of(name)] += 1
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


def _checkpoint_json(checkpoint: CheckpointContents) -> dict[str, Any]:
    header = checkpoint.manifest.header
    return {
        "url": checkpoint.url,
        "step": header.step,
        "attempt": header.attempt,
        "line": None if checkpoint.entry is None else checkpoint.entry.line,
        "world_size": header.world_size,
        "created_unix": header.created_unix,
        "user": dict(header.user),
        "files": dict(
            zip(checkpoint.manifest.files, checkpoint.manifest.file_nbytes.tolist(), strict=True)
        ),
        "values": {name: value_json(value) for name, value in checkpoint.values.items()},
    }


def _tensors_json(
    checkpoint: CheckpointContents, names: Sequence[str], budget: MetadataBudget
) -> Iterator[tuple[str, Any]]:
    """One tensor after the other; only its parts are in memory."""
    manifest, aliases = checkpoint.manifest, checkpoint.aliases
    chunks, first = manifest.chunks, manifest.chunks.first.tolist()
    numbers = {fqn: number for number, fqn in enumerate(manifest.fqns)}
    kinds = {kind: Kind.of(kind).name.lower() for kind in range(16)}
    for name in names:
        number = numbers[aliases.get(name, name)]
        shape, dtype = manifest.shapes[number], manifest.dtypes[number]
        itemsize = DTYPES[dtype].itemsize
        inside = range(first[number], first[number + 1])
        budget.charge(PART_NBYTES * len(inside), f"the parts of {name}")
        parts = [
            {
                "file": manifest.files[chunks.file[chunk]],
                "byte_start": int(chunks.byte_start[chunk]),
                "nbytes": int(chunks.numel[chunk]) * itemsize,
                **_region_json(chunks.region(chunk)),
            }
            for chunk in inside
        ]
        yield (
            name,
            {
                "dtype": dtype,
                "shape": shape,
                "kind": kinds[int(manifest.kinds[number])],
                "nbytes": math.prod(shape) * itemsize,
                "alias_of": aliases.get(name),
                "parts": parts,
            },
        )
        budget.release(PART_NBYTES * len(inside))


def _region_json(region: Region) -> dict[str, Any]:
    if isinstance(region, Box):
        return {"box": {"offset": list(region.offset), "shape": list(region.shape)}}
    return {"span": [region.start, region.stop]}
