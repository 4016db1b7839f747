"""Bring checkpoints of other libraries into a root: streamed, checked, committed in one write.

    source -> names -> this rank's share of the bytes -> data files -> part -> manifest -> commit

From the parts on, an import is a save. An import that did not end never shows in the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from ckpt.commit.names import step_prefix
from ckpt.convert.naming import Rename, renamed, renamer
from ckpt.convert.sources.budget import check_output
from ckpt.convert.sources.derived import Dequantize, DequantizedSource, restacked
from ckpt.convert.sources.opening import Change, SourceOptions, open_source
from ckpt.convert.sources.source import CheckpointSource, ReadRequest, SourceContents, SourceTensor
from ckpt.convert.targets.files import Meter, Progress, plan_data_files, write_data_file
from ckpt.errors import Corrupt, InvalidState, UnsupportedFormat
from ckpt.format.checksum import crc32c
from ckpt.format.datafile import StoredChunk, order_key
from ckpt.format.part import Part, PartTexts, TensorRecord, part_of_files
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.memory import host_bytes, tensor_over
from ckpt.layout.region import Region, Span
from ckpt.loading.checkpoint import open_checkpoint
from ckpt.process import open_root, world_of
from ckpt.saving.save import publish
from ckpt.saving.task import Attempt, SaveOptions, SaveTask
from ckpt.short import ShortRecord
from ckpt.state.names import split_state_name
from ckpt.state.types import Stacks
from ckpt.state.values import all_groups, join, renamed_tree
from ckpt.world.base import collectively
from storage import PrefixStore, Store, StoreLike, open_store
from storage.hidden import hides_secrets
from storage.ranges import aligned_buffer

MIB = 1 << 20
# A multiple of every itemsize, so that no element is cut in two.
CUT_NBYTES = 4 * MIB  # shares of ranks end at multiples of it within a tensor
VERIFY_NBYTES = 4 * MIB


@dataclass(frozen=True, slots=True, repr=False)
class ImportReport(ShortRecord):
    """A checkpoint that exists. `nbytes` are the bytes of all its objects together.

    `skipped` are names of the source that `skip=` left out. `modules` are the entries that look
    like models: what `ckpt.export` takes by default if there is one. `left_out` are files of the
    source's folder of which nothing was taken, such as an optimizer's or a scheduler's next to the
    weights; DeepSpeed's optimizer files are among them where only their weights were taken.
    """

    step: int
    attempt: str
    path: str
    nbytes: int
    tensors: tuple[str, ...]
    values: tuple[str, ...]
    skipped: tuple[str, ...]
    modules: tuple[str, ...]
    verified: bool
    left_out: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)


class ImportFrom(NamedTuple):
    """What is taken of a source, and how. See `ckpt.import_checkpoint`."""

    rename: Rename | None
    skip: Sequence[str]
    stacks: Stacks
    dequantize: Dequantize | None
    output_bytes_max: int | None
    threads: int
    verify: bool
    user: Mapping[str, str]
    unsafe_single_writer: bool


@hides_secrets
def import_source(
    source: StoreLike,
    source_options: SourceOptions,
    url: StoreLike,
    step: int,
    how: ImportFrom,
    progress: Progress | None,
    process_group: dist.ProcessGroup | None,
    storage_options: Mapping[str, Any],
) -> ImportReport:
    """Make a checkpoint of another library the checkpoint of `step` below `url`."""
    world = world_of(process_group)
    changes: list[Change] = [partial(restacked, stacks=how.stacks)]
    if how.dequantize is not None:
        changes.insert(0, partial(DequantizedSource, how=how.dequantize))
    opening = partial(open_source, source, source_options, open_store, changes)
    opened = collectively(world, "open source", opening)
    try:
        chosen = collectively(world, "names", lambda: _chosen(opened, how))
        contents = chosen.contents
        # Only now is anything made at the root.
        root = open_root(
            url,
            process_group=process_group,
            storage_options=storage_options,
            unsafe_single_writer=how.unsafe_single_writer,
            beside=True,
        )
        notes = {"imported_from": f"{opened.format} {opened.url}", **how.user}
        options = SaveOptions(user=notes, in_line=False)
        task = SaveTask(root.session, root.store, root.memory, step, options)
        world = root.session.world
        # Every rank computes all shares alike, so nothing is sent.
        share = share_of(contents.tensors, world.rank, world.size)
        meter = Meter(sum(chunk.nbytes for chunk in share), progress)
        write = partial(_write, opened, chosen, share, root.store, world.rank, how.threads, meter)
        report = publish(task, lambda: list(contents.modules), write)
        if how.verify:
            # By its own directory: what is read is this attempt, whatever else has the same step.
            prefix = step_prefix(report.step, report.attempt).rstrip("/")
            verify = partial(_verify, opened, PrefixStore(root.store, prefix), share, chosen.origin)
            collectively(world, "verify", verify)
        return ImportReport(
            step=report.step,
            attempt=report.attempt,
            path=report.path,
            nbytes=report.nbytes,
            tensors=tuple(sorted(contents.tensors)),
            values=tuple(sorted(contents.values)),
            skipped=chosen.skipped,
            modules=contents.modules,
            verified=how.verify,
            left_out=opened.left_out,
        )
    finally:
        opened.close()


# Names --------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """What is imported, by its new names; `origin` gives the source's name of a tensor."""

    contents: SourceContents
    origin: dict[str, str]
    skipped: tuple[str, ...]


def _chosen(source: CheckpointSource, how: ImportFrom) -> Chosen:
    contents, skip = source.contents, how.skip
    if source.format == "checkpoint":
        raise UnsupportedFormat(f"{source.url} is a checkpoint of ours; copy it with `ckpt cp`")
    names_of = (contents.refused, contents.tensors, contents.aliases, contents.values)
    gone = {name for names in names_of for name in names if _is_skipped(name, skip)}
    problems = [
        f"{fqn}: {refusal.reason}; leave it out with skip="
        for fqn, refusal in sorted(contents.refused.items())
        if not _is_skipped(fqn, skip)
    ]
    if problems:
        raise InvalidState(problems)
    aliases = {a: f for a, f in contents.aliases.items() if a not in gone}
    tensors = {}
    for fqn, info in contents.tensors.items():
        stored = fqn
        if fqn in gone:
            heirs = [alias for alias, held in aliases.items() if held == fqn]
            if not heirs:
                continue
            # The first of its other names keeps the tensor, and the rest become names of that one.
            stored = heirs[0]
            del aliases[stored]
            aliases.update(dict.fromkeys(heirs[1:], stored))
        tensors[stored] = (fqn, info)
    values = {name: value for name, value in contents.values.items() if name not in gone}
    names = renamed((*tensors, *values, *aliases), how.rename)
    if how.rename is not None:
        names, values = _renamed_optimizers(contents, names, values, how.rename)
    moved = SourceContents(
        tensors={names[fqn]: info._replace(fqn=names[fqn]) for fqn, (_, info) in tensors.items()},
        values={
            names[name]: renamed_tree(value, lambda fqn: names.get(fqn, fqn))
            for name, value in values.items()
        },
        aliases={names[alias]: names[fqn] for alias, fqn in aliases.items()},
        modules=tuple(sorted(_moved_path(path, names, how.rename) for path in contents.modules)),
    )
    origin = {names[fqn]: old for fqn, (old, _) in tensors.items()}
    if not moved.tensors and not moved.values:
        raise InvalidState([f"{source!r}: skip= leaves nothing of it"])
    nbytes = sum(info.nbytes for info in moved.tensors.values())
    check_output(f"{source!r}", nbytes, source.stored_nbytes, how.output_bytes_max)
    return Chosen(moved, origin, tuple(sorted(gone)))


def _is_skipped(name: str, skip: Sequence[str]) -> bool:
    # A str is a sequence, too, each of whose characters would be a pattern.
    if isinstance(skip, str):
        skip = [skip]
    return any(
        name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
        for pattern in skip
    )


def _moved_path(path: str, names: Mapping[str, str], rename: Rename | None) -> str:
    """The new path of the module at `path`, from what its names have lost or gained in front."""
    prefix = f"{path}." if path else ""
    for old, new in names.items():
        if old.startswith(prefix) and (rest := old[len(prefix) :]):
            if new == rest:
                return ""
            if new.endswith(f".{rest}"):
                return new[: -len(rest) - 1]
    return renamer(rename)(path) if path else path


def _renamed_optimizers(
    contents: SourceContents, names: dict[str, str], values: Mapping[str, Any], rename: Rename
) -> tuple[dict[str, str], dict[str, Any]]:
    """`names` and `values` with the new names of parameters in optimizers and their state, too."""
    new_names, new_values = dict(names), dict(values)
    moved = {path: _moved_path(path, names, rename) for path in contents.modules}
    for path, groups in all_groups(values):
        fqn = join(path, "param_groups")
        params = {param: param for group in groups for param in group["params"]}
        for param in params:  # its name in its module now
            for path_of_module, new_path in moved.items():
                if (full := join(path_of_module, param)) in names:
                    params[param] = names[full].removeprefix(f"{new_path}." if new_path else "")
                    break
        new_values[fqn] = [
            {**group, "params": [params[param] for param in group["params"]]} for group in groups
        ]
        state = join(path, "state.")
        new_state = join(names[fqn].removesuffix("param_groups").removesuffix("."), "state.")
        for name in names:
            if name.startswith(state) and (parts := split_state_name(name[len(state) :], params)):
                param, tail = parts
                new_names[name] = f"{new_state}{params[param]}.{tail}"
    return new_names, new_values


# Bytes --------------------------------------------------------------------------------------


def share_of(tensors: Mapping[str, SourceTensor], rank: int, size: int) -> list[StoredChunk]:
    """What `rank` of `size` writes: a run of all bytes of the tensors, in the order of names."""
    total = sum(info.nbytes for info in tensors.values())
    low, high = (total * share // size for share in (rank, rank + 1))
    chunks = []
    offset = 0
    for fqn in sorted(tensors):
        info = tensors[fqn]
        start, stop = (_cut(edge - offset, info.nbytes) for edge in (low, high))
        offset += info.nbytes
        if start < stop:
            itemsize = DTYPES[info.dtype].itemsize
            region: Region = Span(start // itemsize, stop // itemsize)
            nbytes = stop - start
            chunks.append(StoredChunk(fqn, info.dtype, info.shape, region, nbytes, int(info.kind)))
    return sorted(chunks, key=order_key)


def _cut(edge: int, nbytes: int) -> int:
    """`edge`, in bytes from the start of a tensor, moved to where it may be cut."""
    if edge <= 0 or edge >= nbytes:
        return min(max(edge, 0), nbytes)
    return min(round(edge / CUT_NBYTES) * CUT_NBYTES, nbytes)


def _write(
    source: CheckpointSource,
    chosen: Chosen,
    share: Sequence[StoredChunk],
    store: Store,
    rank: int,
    threads: int,
    meter: Meter,
    attempt: Attempt,
) -> Part:
    """The share of `rank`, durable in the store, and its part of the manifest."""
    header, contents = attempt.header, chosen.contents
    tensors = [
        TensorRecord(t.fqn, t.dtype, t.shape, int(t.kind)) for t in contents.tensors.values()
    ]
    sends = None if rank else contents.values
    texts = PartTexts.of(contents.aliases, contents.values, {}, sends=sends)
    directory = step_prefix(header.step, header.attempt)
    columns = []
    for file in plan_data_files(header, rank, [share], texts, tensors):
        key, origin = directory + file.name, chosen.origin
        columns.append(
            write_data_file(source, file, store, key, threads=threads, add=meter.add, origin=origin)
        )
    # Before the part is sent: what a manifest names has to survive a power failure.
    store.sync([directory + file.name for file in columns])
    return part_of_files(columns, rank=rank, tensors=tensors, texts=texts)


def _verify(
    source: CheckpointSource,
    directory: Store,
    share: Sequence[StoredChunk],
    origin: Mapping[str, str],
) -> None:
    """Read what was imported back through our own reader, and compare it with the source. Raises
    Corrupt naming the tensors of `share` that differ; `origin` has the source's names.
    """
    theirs = aligned_buffer(VERIFY_NBYTES)
    wrong = set()
    with open_checkpoint(directory) as checkpoint:
        for chunk in share:
            assert isinstance(chunk.region, Span)
            step = VERIFY_NBYTES // DTYPES[chunk.dtype].itemsize
            for start in range(chunk.region.start, chunk.region.stop, step):
                band = Span(start, min(start + step, chunk.region.stop))
                ours = checkpoint.read(chunk.fqn, band)
                here = theirs[: ours.nbytes]
                expected = tensor_over(here, ours.dtype, (band.numel,))
                source.fill([ReadRequest(origin[chunk.fqn], band, expected)])
                if crc32c(host_bytes(ours)) != crc32c(here):
                    wrong.add(chunk.fqn)
    if wrong:
        some = ", ".join(sorted(wrong)[:10])
        raise Corrupt(f"{directory.url}: differs from {source.url}: {some}")
