"""Write the tensors of a checkpoint, of any format that we read, as files in common formats.

    source -> choose (names) -> planned files (one format) -> parts, streamed -> files

Memory is a few parts, whatever the size of the model. A file appears whole or not at all. The file
that makes several files a checkpoint is written last.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from os.path import commonprefix
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from ckpt.convert.naming import PEFT_FILE, Rename, check_file_name, is_chosen, preset_names, renamed
from ckpt.convert.sources.budget import check_output
from ckpt.convert.sources.derived import DenseSource, restacked
from ckpt.convert.sources.opening import Change, SourceOptions, is_file_name, open_source
from ckpt.convert.sources.source import CheckpointSource, SourceContents, SourceTensor
from ckpt.convert.sources.torch_pickle import SUFFIXES
from ckpt.convert.sources.tree import is_called_model
from ckpt.convert.targets.delivery import Delivery
from ckpt.convert.targets.files import (
    ExportSelection,
    Output,
    PlannedFile,
    Progress,
    known_file,
    safetensors_files,
)
from ckpt.convert.targets.model_folder import (
    CONFIG,
    SHARD_NBYTES_MAX,
    WEIGHTS,
    DescribingFiles,
    check_names,
    read_beside,
)
from ckpt.convert.targets.nesting import nested_files
from ckpt.errors import CheckpointError, InvalidArgument, InvalidState
from ckpt.format.object_parts import PART_NBYTES
from ckpt.layout.descriptions import is_description
from ckpt.layout.dtypes import DTYPES, dtype_name, torch_dtype
from ckpt.layout.kind import Kind
from ckpt.process import world_of
from ckpt.short import ShortRecord
from ckpt.state.types import Stacks
from ckpt.state.values import references
from ckpt.world.base import collectively
from storage import InvalidUrlError, Store, StoreLike, open_store, options_of_other
from storage.encoding.store import ENCODING_OPTIONS
from storage.hidden import hides_secrets
from storage.location import folder_of, is_url, url_of

Format: TypeAlias = Literal["safetensors", "torch", "dcp", "hf"]


@dataclass(frozen=True, slots=True)
class ExportTo:
    """Which tensors are exported, under which names, and how they are written. See `export`."""

    format: Format | None
    entry: str | None
    include: Sequence[str]
    exclude: Sequence[str]
    rename: Rename | None
    dtype: str | torch.dtype | None
    keep_tied: bool
    optimizer: bool
    preset: str | None
    stacks: Stacks
    config: StoreLike | None
    shard_bytes_max: int | None
    output_bytes_max: int | None
    threads: int
    verify: bool
    dequantize: bool
    target_options: Mapping[str, Any] | None
    config_options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, repr=False)
class ExportReport(ShortRecord):
    """What was written: urls of the files, names in them, their bytes, and tied names left out.

    `left_out` are all names of the state that are in no file, and files of the source's folder of
    which nothing was read. `verified` says that all tensors were read back and compared. `resumed`
    counts files that an earlier, killed export had finished.
    """

    files: tuple[str, ...]
    tensors: tuple[str, ...]
    nbytes: int
    tied: Mapping[str, str]  # name that was left out -> name that holds its tensor
    step: int | None
    left_out: tuple[str, ...] = ()
    verified: bool = False
    resumed: int = 0
    seconds: float = field(default=0.0, compare=False)


@hides_secrets
def export_source(
    url: StoreLike,
    source_options: SourceOptions,
    target: StoreLike,
    how: ExportTo,
    progress: Progress | None,
    process_group: dist.ProcessGroup | None,
) -> ExportReport:
    """Write a checkpoint's model to `target`, on a disk or in an object store."""
    config = how.config
    is_torch = is_url(target) and url_of(target).endswith(SUFFIXES)
    kind: Format = how.format or ("torch" if is_torch else "safetensors")
    if config is not None and kind != "hf":
        raise InvalidArgument('config= is for a folder of a model: pass format="hf" and a folder')
    folder, name = split_target(target, kind)
    if how.preset is not None:
        # A store has no file name in it, and PEFT looks for this one.
        name = PEFT_FILE if not is_url(target) and kind == "safetensors" else name
        check_file_name(how.preset, name)
    # Readers of the files know nothing of how our roots are encoded.
    given = how.target_options or {}
    if refused := [option for option in ENCODING_OPTIONS if given.get(option) is not None]:
        raise InvalidUrlError(
            f"an export is for other libraries, which cannot read it encoded: leave out "
            f"{' and '.join(refused)} of the target (`ckpt cp` copies into an encoded root)"
        )
    own_options = source_options.storage_options
    options = options_of_other(url, own_options, target, how.target_options)
    options = {k: v for k, v in options.items() if k not in ENCODING_OPTIONS}
    world = world_of(process_group)
    world.begin_call("ckpt.export")
    config_options = dict(how.config_options or {})
    if config is not None:
        config_options = options_of_other(url, own_options, config, how.config_options)
    changes: list[Change] = [partial(restacked, stacks=how.stacks)]
    if how.dequantize:
        changes.insert(0, DenseSource)
    opening = partial(open_source, url, source_options, open_store, changes)
    source = collectively(world, "open source", opening)

    plan = partial(_planned, source, kind, name, how, config_options)
    try:
        chosen, files, formless = collectively(world, "plan", plan)
        opening_target = partial(open_store, folder, **options)
        with closing(collectively(world, "open target", opening_target)) as store:
            # Readers of a model folder load every file that ends so.
            alone = ".safetensors" if kind == "hf" else ""
            threads = how.threads
            work = Delivery(world, store, source, files, name, threads, PART_NBYTES, alone)
            resumed = work.deliver(progress, verify=how.verify)
        where = url_of(folder).rstrip("/")
        return ExportReport(
            files=tuple(f"{where}/{file.key}" for file in files),
            tensors=tuple(sorted(output.name for output in chosen.outputs)),
            nbytes=sum(file.nbytes for file in files),
            tied=chosen.tied,
            step=source.contents.step,
            left_out=_left_out(source, chosen, formless),
            verified=how.verify,
            resumed=resumed,
        )
    finally:
        source.close()


def _planned(
    source: CheckpointSource,
    kind: Format,
    name: str,
    how: ExportTo,
    config_options: Mapping[str, Any],
) -> tuple[ExportSelection, list[PlannedFile], tuple[str, ...]]:
    """What goes into the files, the files, and names that have no place in them."""
    described, wanted = None, how
    if kind == "hf":
        described = read_beside(how.config, config_options)
        if how.optimizer or how.preset is not None:
            raise InvalidArgument(
                'format="hf" is for a whole model: leave out optimizer= and preset='
            )
        wanted = replace(how, keep_tied=how.keep_tied or described.unties)
    chosen = choose(source, wanted, kind)
    nbytes = sum(output.nbytes for output in chosen.outputs)
    check_output(f"{source!r}", nbytes, source.stored_nbytes, how.output_bytes_max)
    if described is not None:
        files = _model_folder(chosen, how, described)
    elif kind == "safetensors":
        files = safetensors_files(chosen.outputs, chosen.tied, name, how.shard_bytes_max)
    else:
        return chosen, *nested_files(source, chosen, kind, name, whole=how.optimizer)
    return chosen, files, tuple(sorted(chosen.values))


def _model_folder(
    chosen: ExportSelection, how: ExportTo, beside: DescribingFiles
) -> list[PlannedFile]:
    """The files of a model folder; the last one is what readers look for first."""
    check_names(beside, {output.name: output.tensor for output in chosen.outputs})
    if how.dtype is not None:
        beside = beside.of_dtype(_name_of(how.dtype))
    nbytes_max = SHARD_NBYTES_MAX if how.shard_bytes_max is None else how.shard_bytes_max
    weights = safetensors_files(chosen.outputs, chosen.tied, WEIGHTS, nbytes_max)
    # Readers take a folder with a config for a whole model, so it comes last.
    others = sorted(beside.files.items(), key=lambda item: (item[0] == CONFIG, item[0]))
    return [*weights, *(known_file(*item) for item in others)]


def _name_of(dtype: str | torch.dtype) -> str:
    return dtype if isinstance(dtype, str) else dtype_name(dtype)


def _left_out(
    source: CheckpointSource, chosen: ExportSelection, formless: Collection[str]
) -> tuple[str, ...]:
    """What is in the source and not in the files; `formless` names have no form there."""
    contents = source.contents
    written = {output.tensor.fqn for output in chosen.outputs} | chosen.values.keys()
    described = {
        fqn
        for fqn, value in contents.values.items()
        if is_description(value) and written.issuperset(references(value))
    }
    names = {*contents.tensors, *contents.values, *contents.refused}
    names.update(*contents.per_rank)
    return (*sorted((names - written - described) | set(formless)), *source.left_out)


# Of a file that has no name of its own, because its target is a store and not a url.
FILE_NAMES: Mapping[Format, str] = {
    "safetensors": "model.safetensors",
    "torch": "pytorch_model.bin",
    "dcp": "",
    "hf": WEIGHTS,
}


def split_target(target: StoreLike, format: Format = "safetensors") -> tuple[StoreLike, str]:
    """Folder and name of the file to write, in a caller's store or place on a filesystem by the
    name that Hugging Face looks for. Raises CheckpointError when there is no name.
    """
    url = "" if isinstance(target, Store) else url_of(target)
    if not is_url(target) and not is_file_name(url):
        return target, FILE_NAMES[format]
    if format in ("dcp", "hf"):
        if is_file_name(url):
            what = "a DCP checkpoint" if format == "dcp" else 'format="hf"'
            raise CheckpointError(f"{url!r}: {what} is a directory; name one")
        return url.rstrip("/") or "/", FILE_NAMES[format]
    name = url.rpartition("/")[2]
    suffixes = SUFFIXES if format == "torch" else (".safetensors",)
    if not name.endswith(suffixes) or name in suffixes:
        raise CheckpointError(
            f"{url!r} names no file that can be written; end it with a name such as "
            "model.safetensors or model.pt, or choose the format dcp for a directory"
        )
    return folder_of(target), name


# What goes into the export ------------------------------------------------------------------


def choose(source: CheckpointSource, how: ExportTo, format: Format) -> ExportSelection:
    """The tensors that `how` means, sorted by name."""
    contents = source.contents
    values: Mapping[str, Any] = {}
    if how.optimizer:
        every = (*contents.tensors, *contents.aliases)
        names = {fqn: contents.aliases.get(fqn, fqn) for fqn in every}
        values = {n: v for n, v in contents.values.items() if is_chosen(n, how)}
        entry = ""
        if how.preset is not None:
            raise InvalidArgument("preset= is for models; export it without optimizer=True")
        if how.rename is not None:
            raise InvalidArgument(
                "rename= with optimizer=True: the optimizer names parameters too; import the "
                "checkpoint with rename=, or export the model alone"
            )
    else:
        entry = how.entry if how.entry is not None else default_entry(source)
        names = _names_of(contents, entry)
        # An entry that was chosen, or is called a model, leaves no doubt about what is meant.
        if how.entry is None and not is_called_model(entry):
            _check_elsewhere(source, entry, set(names.values()))
    kept = {name: fqn for name, fqn in names.items() if is_chosen(name, how)}
    if not kept:
        wanted = f"include={list(how.include)}, exclude={list(how.exclude)}"
        raise CheckpointError(
            f"nothing to export: {source!r} has {len(names)} tensors in {entry!r}, and "
            f"{wanted} leaves none; entries are {', '.join(map(repr, contents.modules))}"
        )
    prefix = f"{entry}." if entry else ""
    problems = [
        f"{fqn}: {refusal.reason}; leave it out with exclude="
        for fqn, refusal in sorted(contents.refused.items())
        if fqn.startswith(prefix)
        and is_chosen(fqn.removeprefix(prefix), how)
        and (how.optimizer or refusal.is_tensor)
    ]
    if problems:
        raise InvalidState(problems)
    # A preset leaves names out as well.
    new_names = _new_names(kept, how)
    kept = {name: fqn for name, fqn in kept.items() if name in new_names}
    tied = {}
    # torch and DCP store a tied tensor once under both names: there is no copy to keep.
    if not how.keep_tied or format not in ("safetensors", "hf"):
        tied = _tied_names(kept, prefix)
    outputs = [
        _output(contents.tensors[fqn], new_names[name], how.dtype)
        for name, fqn in sorted(kept.items())
        if name not in tied
    ]
    if format in ("safetensors", "hf"):
        problems = [
            f"{output.name}: safetensors has no {output.dtype.name}; leave it out with exclude="
            for output in outputs
            if not output.dtype.is_native
        ]
    if problems:
        raise InvalidState(problems)
    tied_names = {new_names[gone]: new_names[held] for gone, held in sorted(tied.items())}
    return ExportSelection(outputs, tied_names, values)


def _new_names(names: Iterable[str], how: ExportTo) -> dict[str, str]:
    """What is exported, by its names in the checkpoint, with its names in the files."""
    if how.preset is None:
        return renamed(names, how.rename)
    chosen = preset_names(how.preset, names)
    again = renamed(chosen.values(), how.rename)
    return {name: again[new] for name, new in chosen.items()}


def default_entry(source: CheckpointSource) -> str:
    """The only entry that is a model. Raises CheckpointError when there is none, or several."""
    entries = source.contents.modules
    if len(entries) == 1:
        return entries[0]
    if not entries:
        names = (*source.contents.tensors, *source.contents.aliases)
        firsts = sorted({fqn.partition(".")[0] for fqn in names})
        raise CheckpointError(f"{source!r} holds no module; {_which(firsts)}")
    raise CheckpointError(f"{source!r} holds {len(entries)} modules; {_which(entries)}")


def _which(entries: Iterable[str]) -> str:
    some = ", ".join(map(repr, sorted({"", *entries})[:20]))
    return f"name the one to export with entry= (--entry): one of {some}; '' is the whole state"


def _check_elsewhere(source: CheckpointSource, entry: str, taken: Collection[str]) -> None:
    """Raise CheckpointError when weights are not among `taken`, which is `entry` by default."""
    others = sorted(
        info.fqn
        for info in source.contents.tensors.values()
        # One element is a count or a scale, such as the `step` of torch's Adam, a float as well.
        if _is_weight(info) and math.prod(info.shape) > 1 and info.fqn not in taken
    )
    if others:
        firsts = {fqn.partition(".")[0] for fqn in others if "." in fqn}
        raise CheckpointError(
            f"{source!r}: {len(others)} more tensors of weights are outside of {entry!r}, such as "
            f"{others[0]}; {_which({entry, *firsts})}"
        )


def _is_weight(info: SourceTensor) -> bool:
    """Whether a tensor may be a model's: optimizers that no one recognised have no kind."""
    in_optimizer = any(part.startswith("optim") for part in info.fqn.split("."))
    return DTYPES[info.dtype].is_float and info.kind != Kind.OPTIMIZER and not in_optimizer


def _names_of(contents: SourceContents, entry: str) -> dict[str, str]:
    """Names inside of `entry`, each with the fqn of its stored tensor.

    Parameters and buffers, or all tensors when it has neither (an EMA copy that is a plain dict);
    of the whole state, other weights as well.
    """
    prefix = f"{entry}." if entry else ""
    names = {
        fqn.removeprefix(prefix): contents.aliases.get(fqn, fqn)
        for fqn in (*contents.tensors, *contents.aliases)
        if fqn.startswith(prefix)
    }
    model = {
        name: fqn
        for name, fqn in names.items()
        if contents.tensors[fqn].kind in (Kind.PARAMETER, Kind.BUFFER)
        or (not entry and _is_weight(contents.tensors[fqn]))
    }
    return model or names


def _tied_names(names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Names below `prefix` to leave out, each with the name kept for its tensor.

    A checkpoint stores a tied tensor under the name that its model has first. That name is kept, as
    `transformers` does: a model without the head knows no other. Where it is not among `names`, as
    a second module shares the tensor, the one that ends most like it is.
    """

    def order(name: str) -> tuple[int, int, str]:
        ends = [(prefix + name)[::-1], names[name][::-1]]
        return -len(commonprefix(ends)), len(name), name  # noqa: RUF071 (of characters)

    first: dict[str, str] = {}
    tied = {}
    for name in sorted(names, key=order):
        held = first.setdefault(names[name], name)
        if held != name:
            tied[name] = held
    return tied


def _output(stored: SourceTensor, name: str, dtype: str | torch.dtype | None) -> Output:
    wanted = stored.dtype
    # Integers keep their dtype: they count, or index.
    if dtype is not None and torch_dtype(stored.dtype).is_floating_point:
        wanted = _name_of(dtype)
        if wanted not in DTYPES or not torch_dtype(wanted).is_floating_point:
            raise InvalidArgument(
                f"dtype={wanted!r} is not a floating-point type; use e.g. 'bfloat16'"
            )
    known = DTYPES[wanted]
    return Output(name, stored, known, math.prod(stored.shape) * known.itemsize)
