"""Bring checkpoints of other libraries into a root: streamed, checked, committed in one write.

    source -> names -> this rank's share of the bytes -> data files -> part -> manifest -> commit

From the parts on, an import is a save. An import that did not end never shows in the root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch.distributed as dist

from ckpt.commit.names import step_prefix
from ckpt.convert.naming import Rename, renamed, renamer
from ckpt.convert.sources.budget import check_output
from ckpt.convert.sources.dequantized import Dequantize, DequantizedSource
from ckpt.convert.sources.opening import SourceOptions, open_source
from ckpt.convert.sources.restacked import RestackedSource
from ckpt.convert.sources.source import CheckpointSource, ReadRequest, SourceContents, SourceTensor
from ckpt.convert.targets.files import Data, Output
from ckpt.convert.targets.writing import Meter, Progress, fill_part
from ckpt.errors import Corrupt, InvalidState, UnsupportedFormat
from ckpt.format.checksum import crc32c
from ckpt.format.datafile import (
    StoredChunk,
    file_entries,
    order_key,
    split_into_files,
)
from ckpt.format.object_parts import DataFileBuilder, write_filled
from ckpt.format.part import (
    FileColumns,
    Part,
    PartTexts,
    TensorRecord,
    part_of_files,
)
from ckpt.format.rank_files import DataFile, RankContents, rank_files
from ckpt.layout.buffers import aligned_buffer
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.memory import host_bytes, tensor_over
from ckpt.layout.region import Region, Span
from ckpt.loading.checkpoint import open_checkpoint
from ckpt.process import open_beside, world_of
from ckpt.saving.save import publish
from ckpt.saving.task import Attempt, SaveOptions, SaveTask
from ckpt.short import ShortRecord
from ckpt.state.names import split_state_name
from ckpt.state.types import Stacks
from ckpt.state.values import is_reference, join
from ckpt.world.base import collectively
from storage import PrefixStore, Store, StoreLike, open_store
from storage.hidden import hides_secrets

MIB = 1 << 20
CUT_NBYTES = 4 * MIB  # shares of ranks end at multiples of it within a tensor
FILE_NBYTES_MAX = 4 << 30
VERIFY_NBYTES = 4 * MIB


@dataclass(frozen=True, slots=True, repr=False)
class ImportReport(ShortRecord):
    """A checkpoint that exists. `nbytes` are the bytes of all its objects together.

    `skipped` are names of the source that `skip=` left out. `modules` are the entries that look
    like models: what `ckpt.export` takes by default if there is one. `left_out` are files of the
    source's folder of which nothing was taken, such as an optimizer's or a scheduler's beside the
    weights; DeepSpeed's optimizer files are among them where nothing but weights was taken of them.
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
    opened = collectively(world, "open source", lambda: _opened(source, source_options, how))
    try:
        chosen = collectively(world, "names", lambda: _chosen(opened, how))
        # Only now is anything made at the root.
        root = open_beside(
            url,
            process_group=process_group,
            storage_options=storage_options,
            unsafe_single_writer=how.unsafe_single_writer,
        )
        notes = {"imported_from": f"{opened.format} {opened.url}", **how.user}
        options = SaveOptions(user=notes, in_line=False)
        task = SaveTask(root.session, root.store, root.memory, step, options)
        writing = _Importing(opened, chosen, root.store, how.threads, progress)
        return _imported(writing, task, verify=how.verify)
    finally:
        opened.close()


def _opened(source: StoreLike, options: SourceOptions, how: ImportFrom) -> CheckpointSource:
    opened = open_source(source, options, open_store)
    try:
        if how.dequantize is not None:
            opened = DequantizedSource(opened, how.dequantize)
        return RestackedSource(opened, how.stacks) if how.stacks else opened
    except BaseException:
        opened.close()
        raise


def _imported(writing: _Importing, task: SaveTask, *, verify: bool) -> ImportReport:
    """Write and commit, and read it back if `verify` is set."""
    world, chosen = task.session.world, writing.chosen
    report = publish(
        task,
        lambda: list(chosen.contents.modules),
        lambda attempt: writing.write(attempt, world.rank, world.size),
    )
    if verify:
        # By its own directory: what is read is this attempt, whatever else has the same step.
        directory = PrefixStore(task.store, step_prefix(report.step, report.attempt).rstrip("/"))
        share = share_of(chosen.contents.tensors, world.rank, world.size)
        source = writing.source
        collectively(world, "verify", lambda: _verify(source, directory, share, chosen.origin))
    return ImportReport(
        step=report.step,
        attempt=report.attempt,
        path=report.path,
        nbytes=report.nbytes,
        tensors=tuple(sorted(chosen.contents.tensors)),
        values=tuple(sorted(chosen.contents.values)),
        skipped=chosen.skipped,
        modules=chosen.contents.modules,
        verified=verify,
        left_out=writing.source.left_out,
    )


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
    skipped = [name for name in _names(contents) if _is_skipped(name, skip)]
    gone = set(skipped)
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
            heirs = sorted(alias for alias, held in aliases.items() if held == fqn)
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
        values={names[name]: _moved(value, names) for name, value in values.items()},
        aliases={names[alias]: names[fqn] for alias, fqn in aliases.items()},
        modules=tuple(sorted(_moved_path(path, names, how.rename) for path in contents.modules)),
    )
    origin = {names[fqn]: old for fqn, (old, _) in tensors.items()}
    if not moved.tensors and not moved.values:
        raise InvalidState([f"{source!r}: skip= leaves nothing of it"])
    nbytes = sum(info.nbytes for info in moved.tensors.values())
    check_output(f"{source!r}", nbytes, source.stored_nbytes, how.output_bytes_max)
    return Chosen(moved, origin, tuple(sorted(gone)))


def _names(contents: SourceContents) -> Iterator[str]:
    yield from contents.refused
    yield from contents.tensors
    yield from contents.aliases
    yield from contents.values


def _is_skipped(name: str, skip: Sequence[str]) -> bool:
    if isinstance(skip, str):
        skip = [skip]
    return any(
        name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
        for pattern in skip
    )


def _moved(value: Any, names: Mapping[str, str]) -> Any:
    """`value` with references to the tensors' new names."""
    if is_reference(value):
        return {key: names.get(fqn, fqn) for key, fqn in value.items()}
    if isinstance(value, dict):
        return {key: _moved(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_moved(item, names) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


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
    for fqn, value in values.items():
        if not _is_groups(fqn, value):
            continue
        path = fqn.removesuffix("param_groups").rstrip(".")
        params = {
            param: _param_name(param, names, moved) for group in value for param in group["params"]
        }
        new_values[fqn] = [
            {**group, "params": [params[param] for param in group["params"]]} for group in value
        ]
        state = join(path, "state.")
        new_state = join(names[fqn].removesuffix("param_groups").rstrip("."), "state.")
        for name in names:
            if name.startswith(state) and (parts := split_state_name(name[len(state) :], params)):
                param, tail = parts
                new_names[name] = f"{new_state}{params[param]}.{tail}"
    return new_names, new_values


def _is_groups(fqn: str, value: Any) -> bool:
    return fqn.rpartition(".")[2] == "param_groups" and isinstance(value, list)


def _param_name(param: str, names: Mapping[str, str], moved: Mapping[str, str]) -> str:
    """What a parameter is called in its module now; `moved` maps modules to their new paths."""
    for path, new_path in moved.items():
        full = join(path, param)
        if full in names:
            new = names[full]
            inside = new_path and new.startswith(f"{new_path}.")
            return new[len(new_path) + 1 :] if inside else new
    return param


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


@dataclass(frozen=True, slots=True)
class _Importing:
    """Writes one rank's data files."""

    source: CheckpointSource
    chosen: Chosen
    store: Store
    threads: int
    progress: Progress | None

    def write(self, attempt: Attempt, rank: int, size: int) -> Part:
        """This rank's share, durable in the store, and its part of the manifest."""
        header, contents = attempt.header, self.chosen.contents
        infos = [
            TensorRecord(t.fqn, t.dtype, t.shape, int(t.kind)) for t in contents.tensors.values()
        ]
        sends = None if rank else contents.values
        texts = PartTexts.of(contents.aliases, contents.values, {}, sends=sends)
        chunks = share_of(contents.tensors, rank, size)
        groups = split_into_files(chunks, FILE_NBYTES_MAX)
        entries = [file_entries(group, header.block_bytes) for group in groups]
        empty = [t for t in infos if 0 in t.shape]
        planned = rank_files(entries, RankContents(header, rank, texts, empty))
        meter = Meter(sum(chunk.nbytes for chunk in chunks), self.progress)
        directory = step_prefix(header.step, header.attempt)
        files = [self.write_file(file, directory, meter) for file in planned]
        self.store.sync([directory + file.name for file in planned])
        return part_of_files(files, rank=rank, tensors=infos, texts=texts)

    def write_file(self, file: DataFile, directory: str, meter: Meter) -> FileColumns:
        """One data file, read from the source part by part."""
        nbytes, pieces = file.layout.nbytes, self.pieces_of(file)
        builder = DataFileBuilder(file)
        write_filled(
            self.store,
            directory + file.name,
            nbytes,
            fill=lambda start, part: fill_part(self.source, pieces, start, part),
            finish=lambda start, part, _: builder.complete(start, part),
            threads=self.threads,
            add=meter.add,
        )
        return builder.result()

    def pieces_of(self, file: DataFile) -> list[Data]:
        """The chunks of a file, under the source's names."""
        pieces = []
        for chunk, start in zip(file.entries.chunks, file.layout.offsets.tolist(), strict=True):
            info = self.chosen.contents.tensors[chunk.fqn]
            origin = info._replace(fqn=self.chosen.origin[chunk.fqn])
            output = Output(chunk.fqn, origin, DTYPES[chunk.dtype], info.nbytes)
            assert isinstance(chunk.region, Span)
            pieces.append(Data(start, chunk.nbytes, output, chunk.region))
        return pieces


# Verification -------------------------------------------------------------------------------


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
    wrong = []
    with open_checkpoint(directory) as checkpoint:
        for chunk in share:
            for band in _bands(chunk):
                ours = checkpoint.read(chunk.fqn, band)
                here = theirs[: ours.nbytes]
                expected = tensor_over(here, ours.dtype, (band.numel,))
                source.fill([ReadRequest(origin[chunk.fqn], band, expected)])
                if crc32c(host_bytes(ours)) != crc32c(here):
                    wrong.append(chunk.fqn)
    if wrong:
        some = ", ".join(sorted(set(wrong))[:10])
        raise Corrupt(f"{directory.url}: differs from {source.url}: {some}")


def _bands(chunk: StoredChunk) -> Iterator[Span]:
    assert isinstance(chunk.region, Span)
    step = VERIFY_NBYTES // DTYPES[chunk.dtype].itemsize
    for start in range(chunk.region.start, chunk.region.stop, step):
        yield Span(start, min(start + step, chunk.region.stop))
