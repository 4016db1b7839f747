"""Write the tensors of a checkpoint as safetensors files that everybody can load.

    names -> outputs (file order) -> parts of the file -> spans of stored tensors -> checked bytes

A part is filled by reading straight into its buffer, so memory is bounded by the number of threads,
whatever the size of the model. A file appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import torch

from ckpt.errors import CheckpointError, InvalidState
from ckpt.format.dtypes import DTYPES, DType, dtype_name, torch_dtype
from ckpt.format.manifest import MODULES
from ckpt.layout.piece import Holding, Kind
from ckpt.layout.region import Span
from ckpt.memory import aligned_buffer, tensor_over
from ckpt.read import ReadPath
from ckpt.reader import Checkpoint, StoredTensor, fill, find_checkpoint, piece_of
from storage import KeyNotFoundError, ObjectWriter, Store, open_store

MIB = 1 << 20
PART_NBYTES = 16 * MIB
PARTS_MAX = 10_000  # S3's limit for one object
HEADER_ALIGNMENT = 64
CAST_SCRATCH_NBYTES = 8 * MIB

Progress: TypeAlias = Callable[[int, int], None]
Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors of a checkpoint go into the export, and under which names.

    `entry` is the name of a module in the saved state ("model" in {"model": net, ...}); names in
    the file are those inside of it. `include` and `exclude` are shell patterns of such names.
    `rename` maps them to other names. `dtype` applies to floating-point tensors. Of tied names the
    alphabetically first is kept, as `safetensors.torch.save_model` does, unless `keep_tied`: then
    all are written.
    """

    entry: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Rename | None = None
    dtype: str | torch.dtype | None = None
    keep_tied: bool = False


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: urls of the files, names in them, their bytes, and tied names left out."""

    files: tuple[str, ...]
    tensors: tuple[str, ...]
    nbytes: int
    tied: Mapping[str, str]  # name that was left out -> name that holds its tensor
    step: int


class Output(NamedTuple):
    """One tensor of the export: its name there, where it is stored, its type and size there."""

    name: str
    stored: StoredTensor
    dtype: DType
    nbytes: int


class Chosen(NamedTuple):
    """All tensors of the export, and the tied names that stand for one of them."""

    outputs: list[Output]
    tied: dict[str, str]


def export(
    url: str,
    target: str,
    *,
    step: int | None = None,
    selection: Selection | None = None,
    shard_nbytes_max: int | None = None,
    threads: int = 3,
    progress: Progress | None = None,
    target_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write a checkpoint's model to the safetensors file `target`, on a disk or in an object store.

    With `shard_nbytes_max`, tensors beyond that size go to several files with an index, named as
    Hugging Face names them. `target_options` are for the target's store, by default those of the
    source when both have the same protocol. `progress(done, total)` counts bytes of the new files.

    Raises CheckpointError when the selection is empty or ambiguous or the target exists,
    InvalidState for dtypes that safetensors lacks, Corrupt when stored bytes were changed, and the
    stores' errors. After any of these nothing is left at the target.
    """
    folder, name = split_target(target)
    if target_options is None:
        target_options = storage_options if _protocol(url) == _protocol(target) else None
    with ExitStack() as stack:
        source = open_store(url, **(storage_options or {}))
        stack.callback(source.close)
        checkpoint = Checkpoint(source, find_checkpoint(source, step))
        chosen = choose(checkpoint, selection or Selection())
        files = plan_files(chosen, name, shard_nbytes_max)
        target_store = open_store(folder, **(target_options or {}))
        stack.callback(target_store.close)
        _check_absent(target_store, [file.key for file in files], target)
        meter = _Meter(sum(file.nbytes for file in files), progress)
        _write_all(checkpoint, target_store, files, threads=threads, meter=meter)
    return ExportReport(
        files=tuple(f"{folder.rstrip('/')}/{file.key}" if folder else file.key for file in files),
        tensors=tuple(sorted(output.name for output in chosen.outputs)),
        nbytes=sum(file.nbytes for file in files),
        tied=chosen.tied,
        step=checkpoint.step,
    )


def split_target(target: str) -> tuple[str, str]:
    """Folder and name of the file to write. Raises CheckpointError when there is no name."""
    folder, _, name = target.rpartition("/")
    if not name.endswith(".safetensors") or name == ".safetensors":
        raise CheckpointError(
            f"{target!r} names no safetensors file; end it with a name such as model.safetensors"
        )
    return (folder or ("/" if target.startswith("/") else ".")), name


def _protocol(url: str) -> str:
    return url.partition("://")[0] if "://" in url else ""


def _check_absent(store: Store, keys: Iterable[str], target: str) -> None:
    for key in keys:
        try:
            store.info(key)
        except KeyNotFoundError:
            continue
        raise CheckpointError(
            f"{store.url}/{key} is there already and nothing is ever overwritten; remove it, or "
            f"export to another name than {target}"
        )


# What goes into the export ------------------------------------------------------------------


def choose(checkpoint: Checkpoint, selection: Selection) -> Chosen:
    """The tensors that `selection` means, sorted by name."""
    entry = selection.entry if selection.entry is not None else default_entry(checkpoint)
    names = _names_of(checkpoint, entry)
    kept = {name: fqn for name, fqn in names.items() if _is_selected(name, selection)}
    if not kept:
        wanted = f"include={list(selection.include)}, exclude={list(selection.exclude)}"
        raise CheckpointError(
            f"nothing to export: {checkpoint!r} has {len(names)} tensors in {entry!r}, and "
            f"{wanted} leaves none; entries are {', '.join(map(repr, module_entries(checkpoint)))}"
        )
    tied = {} if selection.keep_tied else _tied_names(checkpoint, kept)
    renamed = _renamed(kept, selection.rename)
    outputs = [
        _output(checkpoint, renamed[name], fqn, selection.dtype)
        for name, fqn in sorted(kept.items())
        if name not in tied
    ]
    _check_dtypes(outputs)
    return Chosen(outputs, {renamed[gone]: renamed[held] for gone, held in sorted(tied.items())})


def module_entries(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The entries of the saved state that hold a model, sorted; "" when the state is one itself.

    Checkpoints tell the paths of their modules; for those that do not, it is the first part of the
    names of parameters.
    """
    told = checkpoint.manifest.header.user.get(MODULES)
    if told is not None:
        paths = [str(path) for path in json.loads(told)]
        return tuple(sorted(path for path in paths if _names_of(checkpoint, path)))
    manifest = checkpoint.manifest
    names = (
        fqn
        for fqn, kind in zip(manifest.fqns, manifest.kinds.tolist(), strict=True)
        if kind == Kind.PARAMETER
    )
    return tuple(sorted({fqn.partition(".")[0] if "." in fqn else "" for fqn in names}))


def default_entry(checkpoint: Checkpoint) -> str:
    """The one entry that is a model. Raises CheckpointError when there is none, or a choice."""
    entries = module_entries(checkpoint)
    if len(entries) == 1:
        return entries[0]
    if not entries:
        firsts = sorted({fqn.partition(".")[0] for fqn in checkpoint})
        raise CheckpointError(
            f"{checkpoint!r} holds no module; say which entry to export with entry=, one of "
            f"{', '.join(map(repr, firsts[:20]))}"
        )
    raise CheckpointError(
        f"{checkpoint!r} holds {len(entries)} modules; say which one to export with entry=, one of "
        f"{', '.join(map(repr, entries[:20]))}"
    )


def _names_of(checkpoint: Checkpoint, entry: str) -> dict[str, str]:
    """Names inside of `entry`, each with the fqn of its stored tensor.

    Parameters and buffers, or all tensors when it has neither (an EMA copy that is a plain dict).
    """
    prefix = f"{entry}." if entry else ""
    names = {
        fqn.removeprefix(prefix): checkpoint.aliases.get(fqn, fqn)
        for fqn in checkpoint
        if fqn.startswith(prefix)
    }
    manifest = checkpoint.manifest
    model = {
        name: fqn
        for name, fqn in names.items()
        if int(manifest.kinds[manifest.index(fqn)]) in (Kind.PARAMETER, Kind.BUFFER)
    }
    return model or names


def _is_selected(name: str, selection: Selection) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in selection.exclude):
        return False
    return not selection.include or any(fnmatchcase(name, p) for p in selection.include)


def _tied_names(checkpoint: Checkpoint, names: Mapping[str, str]) -> dict[str, str]:
    """Names to leave out, each with the name kept for its tensor: the alphabetically first."""
    first: dict[str, str] = {}
    tied = {}
    for name in sorted(names):
        held = first.setdefault(names[name], name)
        if held != name:
            tied[name] = held
    return tied


def _renamed(names: Iterable[str], rename: Rename | None) -> dict[str, str]:
    result: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in names:
        new = name
        if rename is not None:
            new = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
        if owner.setdefault(new, name) != name:
            raise CheckpointError(
                f"rename= gives {name!r} and {owner[new]!r} one name, {new!r}; names must differ"
            )
        result[name] = new
    return result


def _output(checkpoint: Checkpoint, name: str, fqn: str, dtype: str | torch.dtype | None) -> Output:
    manifest = checkpoint.manifest
    number = manifest.index(fqn)
    stored = StoredTensor(number, fqn, manifest.dtypes[number], manifest.shapes[number])
    wanted = stored.dtype
    if dtype is not None and torch_dtype(stored.dtype).is_floating_point:
        wanted = dtype if isinstance(dtype, str) else dtype_name(dtype)
        if wanted not in DTYPES or not torch_dtype(wanted).is_floating_point:
            raise CheckpointError(
                f"dtype={wanted!r} is no floating-point type; use e.g. 'bfloat16'"
            )
    known = DTYPES[wanted]
    return Output(name, stored, known, math.prod(stored.shape) * known.itemsize)


def _check_dtypes(outputs: Iterable[Output]) -> None:
    problems = [
        f"{output.name}: safetensors has no {output.dtype.name}; leave it out with exclude="
        for output in outputs
        if not output.dtype.is_native
    ]
    if problems:
        raise InvalidState(problems)


# Which file holds what ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file to be written: `header`, then `outputs` one after the other."""

    key: str
    header: bytes
    outputs: tuple[Output, ...]
    starts: tuple[int, ...]  # of each output in the file, and the end of the last
    nbytes: int


@dataclass(frozen=True, slots=True)
class IndexFile:
    """The file that tells which of several safetensors files holds which name."""

    key: str
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


PlannedFile: TypeAlias = TensorFile | IndexFile


def plan_files(chosen: Chosen, name: str, shard_nbytes_max: int | None) -> list[PlannedFile]:
    """The files to write, in writing order: the index of several comes last."""
    groups = _groups(chosen.outputs, shard_nbytes_max)
    if len(groups) == 1:
        return [_tensor_file(name, chosen.outputs, chosen.tied)]
    stem = name.removesuffix(".safetensors")
    files: list[PlannedFile] = []
    weight_map = {}
    for number, group in enumerate(groups, 1):
        key = f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        held = {output.name for output in group}
        files.append(_tensor_file(key, group, {a: b for a, b in chosen.tied.items() if b in held}))
        weight_map.update({output.name: key for output in group})
    total = sum(output.nbytes for output in chosen.outputs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    files.append(IndexFile(f"{name}.index.json", json.dumps(index, indent=2).encode() + b"\n"))
    return files


def _groups(outputs: Sequence[Output], nbytes_max: int | None) -> list[list[Output]]:
    """Outputs in name order, cut before `nbytes_max` is passed. A larger one stays whole."""
    groups: list[list[Output]] = [[]]
    filled = 0
    for output in outputs:
        if nbytes_max is not None and groups[-1] and filled + output.nbytes > nbytes_max:
            groups.append([])
            filled = 0
        groups[-1].append(output)
        filled += output.nbytes
    return groups


def _tensor_file(key: str, outputs: Sequence[Output], tied: Mapping[str, str]) -> TensorFile:
    # Widest first, as safetensors' own writer does: then every tensor is aligned to its elements.
    ordered = sorted(outputs, key=lambda output: (-output.dtype.itemsize, output.name))
    # "format" is what Hugging Face's loaders ask for; tied names stand as `save_model` notes them.
    head: dict[str, Any] = {"__metadata__": {"format": "pt", **tied}}
    at = 0
    relative = [0]
    for output in ordered:
        head[output.name] = {
            "dtype": output.dtype.code,
            "shape": list(output.stored.shape),
            "data_offsets": [at, at + output.nbytes],
        }
        at += output.nbytes
        relative.append(at)
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    padded = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    header = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8, b" ")
    return TensorFile(
        key=key,
        header=header,
        outputs=tuple(ordered),
        starts=tuple(padded + start for start in relative),
        nbytes=padded + at,
    )


# Writing ------------------------------------------------------------------------------------


class _Meter:
    """Adds up what is done and tells the caller; used from one thread."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _write_all(
    checkpoint: Checkpoint,
    store: Store,
    files: Sequence[PlannedFile],
    *,
    threads: int,
    meter: _Meter,
) -> None:
    """Write `files` in order; when one fails, those before it are removed again."""
    written: list[str] = []
    try:
        for file in files:
            if isinstance(file, IndexFile):
                store.put_if_absent(file.key, file.data)
                meter.add(file.nbytes)
            else:
                _write_file(checkpoint, store, file, threads=threads, meter=meter)
            written.append(file.key)
    except BaseException:
        for key in written:
            store.delete(key)
        raise


def _write_file(
    checkpoint: Checkpoint, store: Store, file: TensorFile, *, threads: int, meter: _Meter
) -> None:
    part_nbytes = max(PART_NBYTES, -(-file.nbytes // (PARTS_MAX * MIB)) * MIB)
    count = -(-file.nbytes // part_nbytes)
    threads = max(1, min(threads, count))
    # One buffer per thread, used again for every part: fresh memory costs more than the copy.
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        buffers.put(aligned_buffer(min(part_nbytes, file.nbytes)))
    # Around the page cache: a third of the CPU seconds, and what others have cached stays.
    is_large = file.nbytes >= PART_NBYTES
    with store.create(file.key, file.nbytes, part_nbytes=part_nbytes, direct=is_large) as writer:

        def write(index: int) -> int:
            start = index * part_nbytes
            stop = min(start + part_nbytes, file.nbytes)
            buffer = buffers.get()
            try:
                part = buffer[: stop - start]
                fill_part(checkpoint, file, start, part)
                return _written(writer, index, part)
            finally:
                buffers.put(buffer)

        with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-export") as pool:
            parts = [pool.submit(write, index) for index in range(count)]
            try:
                for part in as_completed(parts):
                    meter.add(part.result())
            except BaseException:
                for part in parts:
                    part.cancel()
                raise


def _written(writer: ObjectWriter, index: int, part: memoryview) -> int:
    writer.write_part(index, [part])
    return len(part)


def fill_part(checkpoint: Checkpoint, file: TensorFile, start: int, part: memoryview) -> None:
    """Fill `part` with the bytes of `file` from `start` on, read and checked."""
    stop = start + len(part)
    if start < len(file.header):
        head = file.header[start:stop]
        part[: len(head)] = head
    direct: list[Holding] = []
    number = max(bisect_right(file.starts, start) - 1, 0)
    while number < len(file.outputs) and file.starts[number] < stop:
        output = file.outputs[number]
        low, high = max(file.starts[number], start), min(file.starts[number + 1], stop)
        if low < high:
            width = output.dtype.itemsize
            at = file.starts[number]
            span = Span((low - at) // width, (high - at) // width)
            memory = part[low - start : high - start]
            target = tensor_over(memory, torch_dtype(output.dtype.name), (span.numel,))
            if output.dtype.name == output.stored.dtype:
                direct.append(piece_of(output.stored, span, target))
            else:
                _fill_cast(checkpoint, output, span, target)
        number += 1
    _fill(checkpoint, direct)


def _fill_cast(checkpoint: Checkpoint, output: Output, span: Span, target: torch.Tensor) -> None:
    """Read `span` in its own type, band by band, and convert it into `target`."""
    source = torch_dtype(output.stored.dtype)
    step = CAST_SCRATCH_NBYTES // source.itemsize
    for start in range(span.start, span.stop, step):
        band = Span(start, min(start + step, span.stop))
        scratch = torch.empty(band.numel, dtype=source)
        _fill(checkpoint, [piece_of(output.stored, band, scratch)])
        target[band.start - span.start : band.stop - span.start].copy_(scratch)


def _fill(checkpoint: Checkpoint, holdings: Sequence[Holding]) -> None:
    fill(checkpoint.store, checkpoint.prefix, checkpoint.manifest, holdings, ReadPath())


def parse_nbytes(text: str) -> int:
    """A size such as 5GB, 500MB, 2GiB or 1048576. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is no size; write e.g. 5GB, 500MB or 2GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2] or " "))
