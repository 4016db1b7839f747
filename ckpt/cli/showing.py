"""The command that opens one checkpoint and shows what is in it: show, also as a picture."""

from __future__ import annotations

import argparse
import fnmatch
from collections import Counter
from collections.abc import Sequence
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
from ckpt.layout.region import Box, Region
from ckpt.loading.contents import CheckpointContents, TensorInfo, open_contents
from ckpt.state.descriptions import is_description, shown_type
from ckpt.tools.shard_map import rank_of, rank_order


def show(arguments: argparse.Namespace) -> int:
    """`ckpt show`."""
    if arguments.output and not arguments.map:
        raise CheckpointError("--output is for --map; send other output to a file with >")
    with open_contents(
        arguments.url, arguments.step, storage_options=dict(arguments.option)
    ) as checkpoint:
        names = fnmatch.filter(checkpoint.keys(), arguments.pattern)
        if not names and len(checkpoint):
            raise CheckpointError(
                f"no name matches {arguments.pattern!r}; quote patterns, as in 'model.*'; "
                f"the first name is {checkpoint.keys()[0]!r}"
            )
        if arguments.map and not arguments.json:
            show_map(checkpoint, names, arguments.output)
            return OK
        infos = [checkpoint.info(name) for name in names]
        if arguments.json:
            show_json(_checkpoint_json(checkpoint, infos))
        else:
            _show_tables(checkpoint, infos)
    return OK


def _show_tables(checkpoint: CheckpointContents, infos: Sequence[TensorInfo]) -> None:
    header = checkpoint.manifest.header
    print(checkpoint.url)
    line = "" if checkpoint.entry is None else f", {line_text(checkpoint.entry.line)}"
    ranks = counted(header.world_size, "rank")
    print(f"step {header.step}{line}, {ranks}, {date(header.created_unix)}\n")
    rows = []
    for info in infos:
        kind = f"= {info.alias_of}" if info.alias_of else info.kind.name.lower()
        dtype, shape = info.dtype_name, shape_text(info.shape)
        rows.append((info.fqn, kind, dtype, shape, size(info.nbytes), _writers(info)))
    show_table(("name", "kind", "dtype", "shape", "size", "stored by"), rows, right=("size",))
    print()
    _show_ranks(checkpoint)
    if checkpoint.values:
        print()
        values = [(name, _shown_value(value)) for name, value in checkpoint.values.items()]
        show_table(("value of", ""), values)


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


def _writers(info: TensorInfo) -> str:
    """The ranks that stored parts, and how many parts: `0, 1, 2 (3 parts)`."""
    ranks = sorted({rank_of(part.file) for part in info.parts}, key=rank_order)
    if not ranks:
        return "nobody (empty)"
    # A tensor of a large job is stored by thousands of ranks.
    shown = ", ".join(ranks) if len(ranks) <= 8 else f"{len(ranks)} ranks"
    return f"{shown} ({len(info.parts)} parts)" if len(info.parts) > 1 else shown


def _checkpoint_json(checkpoint: CheckpointContents, infos: Sequence[TensorInfo]) -> dict[str, Any]:
    header = checkpoint.manifest.header
    return {
        "url": checkpoint.url,
        "step": header.step,
        "attempt": header.attempt,
        "line": None if checkpoint.entry is None else checkpoint.entry.line,
        "world_size": header.world_size,
        "created_unix": header.created_unix,
        "user": dict(header.user),
        "tensors": {info.fqn: _tensor_json(info) for info in infos},
        "files": dict(
            zip(checkpoint.manifest.files, checkpoint.manifest.file_nbytes.tolist(), strict=True)
        ),
        "values": {name: value_json(value) for name, value in checkpoint.values.items()},
    }


def _tensor_json(info: TensorInfo) -> dict[str, Any]:
    return {
        "dtype": info.dtype_name,
        "shape": list(info.shape),
        "kind": info.kind.name.lower(),
        "nbytes": info.nbytes,
        "alias_of": info.alias_of,
        "parts": [
            {
                "file": part.file,
                "byte_start": part.byte_start,
                "nbytes": part.nbytes,
                **_region_json(part.region),
            }
            for part in info.parts
        ],
    }


def _region_json(region: Region) -> dict[str, Any]:
    if isinstance(region, Box):
        return {"box": {"offset": list(region.offset), "shape": list(region.shape)}}
    return {"span": [region.start, region.stop]}
