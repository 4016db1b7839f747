"""A checkpoint to another place, for other ranks, into other formats and out of them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal, SupportsIndex

from ckpt.operate import arguments as given
from ckpt.operate.arguments import Argument, operation

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ckpt.convert.export import ExportReport
    from ckpt.convert.import_ import ImportReport
    from ckpt.tools.relay import CopyReport
    from storage import StoreLike


@operation
def copy(
    url: given.Url,
    target: Annotated["StoreLike", Argument("a new directory, or prefix of an object store")],
    *,
    step: given.Step = None,
    attempt: given.Attempt = "",
    root: Annotated[bool, Argument("copy all checkpoints of a root to a new root")] = False,
    threads: given.Threads = 4,
    progress: "given.Progress | None" = None,
    metadata_bytes_max: given.MetadataMax = None,
    storage_options: given.Options = None,
    other_options: given.OtherOptions = None,
) -> "CopyReport":
    """Copy a checkpoint, or a whole root, to another place or store; every byte is verified.

    The copy opens, loads and verifies by its path alone; it needs nothing of the source. With
    `root`, all checkpoints that exist in the root `url` go to the new root `target`, where
    trainings can load and save as in the old one; the first save there begins a new session.

    Every byte is compared with its checksum before it is published. Bytes that are there from an
    earlier run are not sent again. `progress(done, total)` counts bytes. `other_options` are of the
    target, by default `storage_options` when both urls have the same protocol. Retention leaves
    what is copied. What describes it may take `metadata_bytes_max` bytes of memory (None: 1 GiB).

    Raises NoCheckpoint, UnsupportedFormat beyond that memory, Corrupt when stored bytes were
    changed, CheckpointError when something else is at the target, and the stores' errors. The
    target then opens as it did before, and another run continues the copy.
    """
    from ckpt.commit.leases import LEASE_SECONDS_MAX, leased
    from ckpt.commit.locate import live_entries
    from ckpt.commit.names import plain_int
    from ckpt.errors import InvalidArgument
    from ckpt.format.manifest import MetadataBudget
    from ckpt.loading.contents import leased_checkpoint
    from ckpt.tools.copy import copy_checkpoint, copy_root
    from storage import options_of_other

    if root and (step is not None or attempt):
        raise InvalidArgument("root= takes all checkpoints; leave out step= and attempt=")
    threads_max = plain_int(threads)
    budget = MetadataBudget(plain_int(metadata_bytes_max))
    of_target = options_of_other(url, storage_options, target, other_options)
    with ExitStack() as stack:
        source = stack.enter_context(given.opened(url, storage_options))
        there = stack.enter_context(given.opened(target, of_target))
        if root:
            # All before the first byte: retention would delete the oldest while others are copied,
            # and a copy of a root with a hole in it is of no use.
            for entry in live_entries(source):
                stack.enter_context(leased(source, entry.attempt, LEASE_SECONDS_MAX))
            return copy_root(source, there, threads=threads_max, progress=progress, budget=budget)
        chosen = leased_checkpoint(source, step, attempt=attempt, budget=budget)
        located = stack.enter_context(chosen)
        return copy_checkpoint(source, located, there, threads=threads_max, progress=progress)


@operation
def reshard(
    url: given.Url,
    target: Annotated[
        "StoreLike | None",
        Argument(
            "a new directory, or prefix of an object store; default: the root itself, where the "
            "copy is loaded by its attempt"
        ),
    ] = None,
    *,
    ranks: Annotated[SupportsIndex, Argument("how many ranks will load it", given.count, "N")],
    layout: given.Layout = "fsdp2",
    step: given.Step = None,
    attempt: given.Attempt = "",
    threads: given.Threads = 3,
    progress: "given.Progress | None" = None,
    metadata_bytes_max: given.MetadataMax = None,
    storage_options: given.Options = None,
    other_options: given.OtherOptions = None,
) -> "CopyReport":
    """Rewrite a checkpoint, laid out for faster loads on another number of ranks.

    The new checkpoint has the same tensors and values, bit for bit, and loads on any number of
    ranks; on `ranks` of that layout each rank reads its own file from one end to the other.

    The checkpoint of `step`, by default the latest, goes to the directory `target`, which opens by
    its path. Without `target` it gets a second form in the root `url`, which is loaded by its
    attempt: `ckpt.load(..., attempt=report.attempt)`, `Checkpointer.restore(attempt=...)`. It is of
    no line, so nothing else loads it, and a training that runs or resumes is not disturbed. When a
    new job begins to save there meanwhile, nothing is committed and this raises. When the training
    retires the latest meanwhile, this begins again with the one that is the latest then.

    Every byte is checked on the way. After a run that died, run it again: it continues. What
    describes the checkpoint may take `metadata_bytes_max` bytes of memory (None: 1 GiB). Raises
    like `ckpt.copy`, and InvalidArgument for no ranks or an unknown layout.
    """
    from ckpt.commit.names import plain_int
    from ckpt.tools.reshard import NewLayout, reshard_in
    from storage import options_of_other

    new = NewLayout(plain_int(ranks), layout)
    nbytes_max, count = plain_int(metadata_bytes_max), plain_int(threads)
    with ExitStack() as stack:
        source = stack.enter_context(given.opened(url, storage_options))
        there = None
        if target is not None:
            options = options_of_other(url, storage_options, target, other_options)
            there = stack.enter_context(given.opened(target, options))
        return reshard_in(source, there, new, step, attempt, count, progress, nbytes_max)


@operation
def export(
    url: Annotated[
        "StoreLike",
        Argument("a root, a step's directory, a DCP directory, a .pt or .safetensors file"),
    ],
    target: Annotated[
        "StoreLike", Argument("the file or folder to write, on a disk or in an object store")
    ],
    *,
    step: given.Step = None,
    attempt: given.Attempt = "",
    format: Annotated[
        Literal["safetensors", "torch", "dcp", "hf"] | None,
        Argument(
            "default: by the target's name; hf: a folder that transformers, vLLM and SGLang load",
            choices=("safetensors", "torch", "dcp", "hf"),
        ),
    ] = None,
    config: Annotated[
        "StoreLike | None",
        Argument(
            "with --format hf: the config.json to copy, or a folder with it and the tokenizer",
            metavar="DIR_OR_FILE",
        ),
    ] = None,
    entry: Annotated[
        str | None, Argument("which module of the state; default: the only one")
    ] = None,
    dtype: Annotated[
        "str | torch.dtype | None", Argument("for floating-point tensors, e.g. bfloat16")
    ] = None,
    include: given.Include = (),
    exclude: given.Exclude = (),
    rename: given.Rename = None,
    stacks: given.Stacks = None,
    preset: Annotated[
        str | None,
        Argument(
            "peft, or peft:ADAPTER for one of several: an adapter_model.safetensors for peft",
            metavar="NAME",
        ),
    ] = None,
    shard_bytes_max: Annotated[
        SupportsIndex | None,
        Argument(
            "cut into files of at most this size, e.g. 5GB, with an index",
            given.nbytes,
            metavar="SIZE",
        ),
    ] = None,
    dequantize: Annotated[
        bool,
        Argument(
            "write quantized and sparse tensors as dense ones; needs the library of their types"
        ),
    ] = False,
    keep_tied: Annotated[bool, Argument("write every tied name")] = False,
    optimizer: Annotated[bool, Argument("export the whole state; for torch files and DCP")] = False,
    parameter_names: "Sequence[str] | None" = None,
    verify: Annotated[bool, Argument("read all files back and compare with the source")] = False,
    threads: given.Threads = 3,
    memory_bytes_max: given.MemoryMax = None,
    output_bytes_max: given.OutputMax = None,
    progress: "given.Progress | None" = None,
    process_group: "dist.ProcessGroup | None" = None,
    config_options: "Mapping[str, Any] | None" = None,
    storage_options: given.Options = None,
    other_options: given.OtherOptions = None,
) -> "ExportReport":
    """Write a model, or a whole state, as safetensors, torch.save file or DCP directory.

    `url` is a root or step of ours, a directory of torch.distributed.checkpoint, a file of
    torch.save, or safetensors files. `format` follows from the name of the target: `.safetensors`,
    or `.pt`, `.pth`, `.bin`, `.ckpt` for a file that `torch.load(weights_only=True)` reads; "dcp"
    is a directory that `torch.distributed.checkpoint.load` reads. With `shard_bytes_max`, tensors
    beyond that size go to several safetensors files with an index, as Hugging Face names them.

    `entry` is the name of a module in the saved state ("model" in {"model": net, ...}, "" for all
    of it); names in the file are those inside of it. It can be left out where one entry is called
    "model" or the like, or is the only one with weights. `include` and `exclude` are shell patterns
    of such names, or regular expressions that begin with `re:`. `rename` maps them to other names:
    names to names, a function, or rules such as `backbone=model` and `re:^old=new`. `stacks` are
    rules from names in the checkpoint to others, for experts that are one tensor there and one for
    each in the files, or the other way round: `{"experts.weight": "experts.{}.weight"}`; all others
    see the names that they make. `dtype` applies to floating-point tensors. Of tied names the
    one that the model has first is kept in safetensors files, whose headers note the others;
    `keep_tied` writes all. Files of torch.save and DCP directories have all names, and each tensor
    once.

    `optimizer` exports the whole state, model, optimizer and values, by its full names. Where a
    source only numbers the parameters of an optimizer, `parameter_names` are their names.
    `preset="peft"` takes the adapter of a model of peft, under the names that its `from_pretrained`
    loads from `adapter_model.safetensors`; "peft:name" is one of several adapters. `rename` comes
    after it, `include` and `exclude` are of names in the checkpoint.

    "hf" is a folder that `transformers`, vLLM and SGLang load: `model.safetensors`, or from 5 GB
    (or `shard_bytes_max`) on shards and their index, and what `config` has next to it. That is a
    folder as `save_pretrained` writes it, from which config, tokenizer and templates are copied, or
    a config file; its store takes `config_options`. With `dtype` the copied config names that
    dtype. All tied names are written where it says `"tie_word_embeddings": false`. Names that the
    config's model cannot have are refused as far as they show: wrappers, a doubled `model.`, a
    beginning that the weights next to the config do not have, rows that are not the vocabulary's.

    Called by all ranks of a process group (default: all, if there is one), it divides the files
    among them. What a killed export had finished is not written again by the next with the same
    arguments. `verify` reads all files back and compares every tensor with the source.
    A `Store` as the target gets `model.safetensors`, or `pytorch_model.bin` with `format="torch"`.
    With `dequantize`, tensors that consist of others (quantized, sparse) are written as the dense
    ones that they stand for, of their outer dtype, by the library that has their type; one at a
    time is in memory whole. Without it, their components are written, under their names here.
    `memory_bytes_max` and `output_bytes_max` are as in `ckpt.import_checkpoint`.
    `other_options` are for the target's store, by default those of the source when both have the
    same protocol. `progress(done, total)` counts bytes of the new files.

    Raises CheckpointError when the selection is empty or ambiguous (weights would be left out that
    nothing in it leaves out), the target exists or the config is refused, NoCheckpoint when there
    is none, InvalidState for what the format has no form for, Corrupt when stored bytes were
    changed, and the stores' errors. After any of these nothing is left at the target.
    """
    from ckpt.commit.names import plain_int
    from ckpt.convert.export import ExportTo, export_source
    from ckpt.convert.sources.opening import SourceOptions

    source = SourceOptions(
        step,
        parameter_names,
        plain_int(memory_bytes_max),
        dict(storage_options or {}),
        attempt,
    )
    how = ExportTo(
        format=format,
        entry=entry,
        include=include,
        exclude=exclude,
        rename=rename,
        dtype=dtype,
        keep_tied=keep_tied,
        optimizer=optimizer,
        preset=preset,
        stacks=dict(stacks or {}),
        config=config,
        shard_bytes_max=plain_int(shard_bytes_max),
        output_bytes_max=plain_int(output_bytes_max),
        threads=plain_int(threads),
        verify=verify,
        dequantize=dequantize,
        target_options=other_options,
        config_options=config_options,
    )
    return export_source(url, source, target, how, progress, process_group)


@operation
def import_checkpoint(
    source: Annotated[
        "StoreLike",
        Argument("a DCP directory, a .pt file, safetensors files with or without an index"),
    ],
    url: Annotated["StoreLike", Argument("the root to save to, new or old")],
    *,
    step: Annotated[SupportsIndex, Argument("its number there", given.whole, flag="--step")] = 0,
    rename: given.Rename = None,
    stacks: given.Stacks = None,
    skip: Annotated[
        Sequence[str], Argument("leave out; repeatable", metavar="PATTERN", collect=list)
    ] = (),
    parameter_names: Annotated[
        Sequence[str] | None,
        Argument(
            "the names of the optimizer's parameters in its order, one per line, for an optimizer "
            "that only numbers them; from a folder with weights this imports the optimizer and the "
            "schedulers, too",
            given.lines_of,
            "FILE",
        ),
    ] = None,
    dequantize: Annotated[
        str | None,
        Argument(
            "turn block-quantized weights (float8, int8, MXFP4, NVFP4) into plain ones "
            "of this dtype; default: bfloat16",
            metavar="DTYPE",
            bare="bfloat16",
        ),
    ] = None,
    dequantize_block: Annotated[
        tuple[int, int],
        Argument(
            "the block that shares a scale of weight_scale_inv; default: 128x128",
            given.block,
            "ROWSxCOLUMNS",
        ),
    ] = (128, 128),
    verify: Annotated[bool, Argument("read it back and compare with the source")] = False,
    user: "Mapping[str, str] | None" = None,
    threads: given.Threads = 3,
    memory_bytes_max: given.MemoryMax = None,
    output_bytes_max: given.OutputMax = None,
    progress: "given.Progress | None" = None,
    process_group: "dist.ProcessGroup | None" = None,
    unsafe_single_writer: bool = False,
    storage_options: given.Options = None,
    other_options: given.OtherOptions = None,
) -> "ImportReport":
    """Import a checkpoint that another library wrote; no code in it is run.

    It becomes the checkpoint of `step` below `url`.

    `source` is a directory of torch.distributed.checkpoint (also those of Accelerate, Lightning and
    torchtitan), a file of torch.save, or safetensors files with or without an index, local or in an
    object store. Nothing in it is executed. Tensors are streamed through a part of 16 MiB for each
    of `threads`. With three, a file of torch.save or a directory of DCP takes at most 64 MiB of
    memory, or `memory_bytes_max`, besides as many bytes as its tensors have there: it is refused
    when what describes them, and its other values, need more. It is also refused when its tensors
    are more than 64 MiB and 8 times the bytes that are stored of them, or than `output_bytes_max`:
    one stored element may stand for any number. Names are those of the nested state:
    what was saved as `{"model": ..., "optim": ...}` is loaded into such a state.

    `rename` gives names new ones as in `ckpt.export`; `skip` are names, dotted beginnings of names,
    or shell patterns to leave out. `stacks` are rules for experts that are one tensor in the source
    and are to be one for each, or the other way round: `{"experts.{}.weight": "experts.weight"}`;
    `rename` and `skip` see the names that they make. `parameter_names` are needed where an
    optimizer numbers its parameters and does not name them; of a folder with weights in files of
    safetensors or torch.save, they bring what Accelerate or a Trainer keeps next to them, as
    `model`, `optimizer`, `scheduler` and `scaler`, where an import without them takes the weights
    alone. Block-quantized weights (float8 with `weight_scale_inv`, MXFP4 blocks and scales) are
    imported as they are, or turned into plain ones of the dtype `dequantize`, which takes about
    6 MiB more for each thread; `dequantize_block` is the block that shares a scale of
    `weight_scale_inv`. `verify` reads the new checkpoint back and compares every tensor with the
    source. Collective over `process_group` (default: all ranks, if there are any); the ranks
    divide the bytes among them. `other_options` are for the source's store.

    Raises the same error on every rank, and the root is as before then: NoCheckpoint, Corrupt and
    UnsupportedFormat for the source, InvalidState listing what cannot be stored, and the errors of
    `ckpt.save`.
    """
    from ckpt.commit.names import plain_int
    from ckpt.convert.import_ import ImportFrom, import_source
    from ckpt.convert.sources.derived import Dequantize
    from ckpt.convert.sources.opening import SourceOptions

    how = ImportFrom(
        rename=rename,
        skip=skip,
        stacks=dict(stacks or {}),
        dequantize=None if dequantize is None else Dequantize(dequantize, dequantize_block),
        output_bytes_max=plain_int(output_bytes_max),
        threads=plain_int(threads),
        verify=verify,
        user=user or {},
        unsafe_single_writer=unsafe_single_writer,
    )
    options = SourceOptions(
        None, parameter_names, plain_int(memory_bytes_max), dict(other_options or {})
    )
    return import_source(
        source, options, url, plain_int(step), how, progress, process_group, storage_options or {}
    )
