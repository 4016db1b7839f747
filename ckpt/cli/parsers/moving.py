"""Commands that write a checkpoint somewhere else: cp, reshard, export, import."""

from __future__ import annotations

from pathlib import Path

from ckpt.cli.parsers.arguments import (
    Commands,
    add_json,
    add_key_file,
    add_layout,
    add_memory_max,
    add_metadata_max,
    add_options,
    add_output_max,
    add_rename,
    add_stacks,
    add_step,
    add_url,
    block,
    count,
    nbytes,
)


def add_cp(commands: Commands) -> None:
    """`ckpt cp`."""
    command = commands.add(
        "cp",
        "moving:cp",
        "copy a checkpoint, or a whole root, to another place or store; every byte is verified",
        "ckpt cp /nvme/run s3://bucket/release-1200 --step 1200\n"
        "ckpt cp --root /nvme/run s3://bucket/run      all checkpoints, as a root to save to\n"
        "after an interruption, run it again: what has arrived is not sent again",
    )
    add_url(command)
    command.add_argument("target", help="a new directory, or prefix of an object store")
    add_step(command)
    command.add_argument(
        "--root", action="store_true", help="copy all checkpoints of a root to a new root"
    )
    command.add_argument("--threads", type=count, default=4, metavar="N", help="default: 4")
    add_options(command, "--target-option", "of the target's store (default: the source's)")
    add_key_file(command, "--target-option", "of the target (default: the source's)")
    add_metadata_max(command)
    add_json(command)
    command.set_defaults(after_interrupt="the target is as it was; run again to continue")


def add_reshard(commands: Commands) -> None:
    """`ckpt reshard`."""
    command = commands.add(
        "reshard",
        "moving:reshard_checkpoint",
        "rewrite a checkpoint, laid out for faster loads on another number of ranks",
        "ckpt reshard runs/7b --ranks 8                 loads by its attempt, which is printed\n"
        "ckpt reshard runs/7b runs/7b-on-8 --ranks 8\n"
        "ckpt reshard s3://bucket/run s3://bucket/run-on-64 --ranks 64 --layout flat",
    )
    add_url(command)
    command.add_argument(
        "target",
        nargs="?",
        help="a new directory, or prefix of an object store; default: the root itself, where the "
        "copy is loaded by its attempt",
    )
    command.add_argument(
        "--ranks", type=count, required=True, metavar="N", help="how many ranks will load it"
    )
    add_layout(command)
    add_step(command)
    command.add_argument("--threads", type=count, default=3, metavar="N", help="default: 3")
    add_options(command, "--target-option", "of the target's store (default: the source's)")
    add_key_file(command, "--target-option", "of the target (default: the source's)")
    add_metadata_max(command)
    add_json(command)
    command.set_defaults(after_interrupt="the target is as it was; run again to continue")


def add_export(commands: Commands) -> None:
    """`ckpt export`."""
    command = commands.add(
        "export",
        "exporting:export_checkpoint",
        "write a model, or a whole state, as safetensors, torch.save file or DCP directory",
        "ckpt export runs/7b out/model.safetensors --dtype bfloat16 --shard-size 5GB\n"
        "ckpt export runs/7b served --format hf --config models/base     for vLLM, transformers\n"
        "ckpt export fsdp-checkpoint/ model.safetensors      straight from torch's DCP directory\n"
        "ckpt export runs/7b state.pt --optimizer\n"
        "torchrun --nproc-per-node 8 -m ckpt export runs/7b s3://bucket/model.safetensors",
    )
    add_url(command, "a root, a step's directory, a DCP directory, a .pt or .safetensors file")
    command.add_argument(
        "target", help="the file or folder to write, on a disk or in an object store"
    )
    add_step(command)
    command.add_argument(
        "--format",
        choices=("safetensors", "torch", "dcp", "hf"),
        help="default: by the target's name; hf: a folder that transformers, vLLM and SGLang load",
    )
    command.add_argument(
        "--config",
        metavar="DIR_OR_FILE",
        help="with --format hf: the config.json to copy, or a folder with it and the tokenizer",
    )
    command.add_argument("--entry", help="which module of the state; default: the only one")
    command.add_argument("--dtype", help="for floating-point tensors, e.g. bfloat16")
    for name, text in (("include", "only names that match"), ("exclude", "no names that match")):
        command.add_argument(
            f"--{name}", action="append", default=[], metavar="PATTERN", help=f"{text}; repeatable"
        )
    add_rename(command, r"replace in names, such as '^backbone\.=' ; repeatable, in order")
    add_stacks(command)
    command.add_argument(
        "--preset",
        metavar="NAME",
        help="peft, or peft:ADAPTER for one of several: an adapter_model.safetensors for peft",
    )
    command.add_argument(
        "--shard-size",
        type=nbytes,
        metavar="SIZE",
        help="cut into files of at most this size, e.g. 5GB, with an index",
    )
    add_memory_max(command)
    add_output_max(command)
    command.add_argument(
        "--dequantize",
        action="store_true",
        help="write quantized and sparse tensors as dense ones; needs the library of their types",
    )
    command.add_argument("--keep-tied", action="store_true", help="write every tied name")
    command.add_argument(
        "--optimizer", action="store_true", help="export the whole state; for torch files and DCP"
    )
    command.add_argument(
        "--verify", action="store_true", help="read all files back and compare with the source"
    )
    add_options(command, "--target-option", "of the target's store (default: the source's)")
    add_json(command)


def add_import(commands: Commands) -> None:
    """`ckpt import`."""
    command = commands.add(
        "import",
        "exporting:import_foreign",
        "import a checkpoint that another library wrote; no code in it is run",
        "ckpt import fsdp-checkpoint/ runs/7b --step 1200\n"
        "ckpt import model.safetensors runs/7b --rename '^=model.' --verify\n"
        "torchrun --nproc-per-node 8 -m ckpt import dcp/ s3://bucket/run",
    )
    command.add_argument(
        "source", help="a DCP directory, a .pt file, safetensors files with or without an index"
    )
    add_url(command, "the root to save to, new or old")
    command.add_argument("--step", type=int, default=0, help="default: 0")
    add_rename(command, r"replace in names, such as '^module\.=' ; repeatable, in order")
    add_stacks(command)
    command.add_argument(
        "--skip", action="append", default=[], metavar="PATTERN", help="leave out; repeatable"
    )
    command.add_argument(
        "--parameter-names",
        type=Path,
        metavar="FILE",
        help="the names of the optimizer's parameters in its order, one per line, for an optimizer "
        "that only numbers them; from a folder with weights this imports the optimizer and the "
        "schedulers, too",
    )
    command.add_argument(
        "--dequantize",
        nargs="?",
        const="bfloat16",
        metavar="DTYPE",
        help="turn block-quantized weights (float8 with weight_scale_inv, MXFP4) into plain ones "
        "of this dtype; default: bfloat16",
    )
    command.add_argument(
        "--dequantize-block",
        type=block,
        default=(128, 128),
        metavar="ROWSxCOLUMNS",
        help="the block that shares a scale of weight_scale_inv; default: 128x128",
    )
    add_memory_max(command)
    add_output_max(command)
    command.add_argument(
        "--verify", action="store_true", help="read it back and compare with the source"
    )
    add_options(command, "--source-option", "of the source's store")
    add_json(command)
