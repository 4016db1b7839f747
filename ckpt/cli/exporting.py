"""Commands between our checkpoints and those of others: export, import.

Under torchrun every rank runs the command, and they divide the work; only rank 0 prints.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from ckpt.cli.commandline import OK
from ckpt.cli.ranks import ranks_of_launcher
from ckpt.cli.screen import counted, fields_json, progress_bar, show_json, show_names, size
from ckpt.convert.export import ExportReport, Selection, export
from ckpt.convert.import_ import ImportReport, import_checkpoint
from ckpt.convert.sources.dequantized import Dequantize
from ckpt.convert.sources.torch_file import SUFFIXES
from ckpt.tools.diff import renaming

NAMES_SHOWN_MAX = 20


def export_checkpoint(arguments: argparse.Namespace) -> int:
    """`ckpt export`."""
    started = time.monotonic()
    with ranks_of_launcher() as rank, progress_bar("exporting", shown=rank == 0) as progress:
        report = export(
            arguments.url,
            arguments.target,
            step=arguments.step,
            selection=Selection(
                entry=arguments.entry,
                include=arguments.include,
                exclude=arguments.exclude,
                rename=renaming(arguments.rename),
                dtype=arguments.dtype,
                keep_tied=arguments.keep_tied,
                optimizer=arguments.optimizer,
                preset=arguments.preset,
                stacks=dict(arguments.stack),
            ),
            format=arguments.format,
            config=arguments.config,
            shard_nbytes_max=arguments.shard_size,
            memory_nbytes_max=arguments.memory_max,
            output_nbytes_max=arguments.output_max,
            verify=arguments.verify,
            dequantize=arguments.dequantize,
            progress=progress,
            storage_options=dict(arguments.option),
            target_options=dict(arguments.target_option) or None,
        )
    if rank == 0:
        _show_export(report, time.monotonic() - started, as_json=arguments.json)
    return OK


def _show_export(report: ExportReport, seconds: float, *, as_json: bool) -> None:
    if as_json:
        show_json({**fields_json(report), "seconds": seconds})
        return
    for file in report.files:
        print(file)
    what = "" if report.step is None else f"step {report.step}: "
    checked = ", every tensor read back and equal" if report.verified else ""
    tensors = counted(len(report.tensors), "tensor")
    print(f"{what}{tensors}, {size(report.nbytes)} in {seconds:.1f} s{checked}")
    if report.resumed:
        print(f"{report.resumed} files were there already, from a run that was interrupted")
    for left_out, held in report.tied.items():
        print(f"tied: {left_out} is {held}, which is in the file")
    show_names("not written", _by_entry(report.left_out), NAMES_SHOWN_MAX)


def _by_entry(names: Sequence[str]) -> list[str]:
    """A line for each entry of a state that `names` are in."""
    entries: dict[str, list[str]] = {}
    for name in names:
        entries.setdefault(name.partition(".")[0], []).append(name)
    return [
        inside[0] if len(inside) == 1 else f"{entry} ({len(inside)} names)"
        for entry, inside in entries.items()
    ]


def import_foreign(arguments: argparse.Namespace) -> int:
    """`ckpt import`."""
    started = time.monotonic()
    dtype, names = arguments.dequantize, arguments.parameter_names
    dequantize = None if dtype is None else Dequantize(dtype, arguments.dequantize_block)
    with ranks_of_launcher() as rank, progress_bar("importing", shown=rank == 0) as progress:
        report = import_checkpoint(
            arguments.source,
            arguments.url,
            step=arguments.step,
            rename=renaming(arguments.rename),
            skip=arguments.skip,
            parameter_names=None if names is None else names.read_text("utf-8").split(),
            stacks=dict(arguments.stack),
            dequantize=dequantize,
            memory_nbytes_max=arguments.memory_max,
            output_nbytes_max=arguments.output_max,
            verify=arguments.verify,
            progress=progress,
            source_options=dict(arguments.source_option),
            storage_options=dict(arguments.option),
        )
    if rank == 0:
        _show_import(report, time.monotonic() - started, as_json=arguments.json)
    return OK


def _show_import(report: ImportReport, seconds: float, *, as_json: bool) -> None:
    if as_json:
        show_json({**fields_json(report), "seconds": seconds})
        return
    print(report.path)
    checked = ", every tensor read back and equal" if report.verified else ""
    print(
        f"step {report.step}: {counted(len(report.tensors), 'tensor')}, "
        f"{counted(len(report.values), 'value')}, {size(report.nbytes)} in {seconds:.1f} s{checked}"
    )
    if report.modules:
        print(f"models in it: {', '.join(name or '(the whole state)' for name in report.modules)}")
    show_names("skipped", report.skipped, NAMES_SHOWN_MAX)
    show_names("left out", report.left_out, NAMES_SHOWN_MAX)
    if any(name.endswith(SUFFIXES) for name in report.left_out):
        print(
            "a file of torch.save can be imported by its own path, into a root of its own; "
            "--parameter-names brings an optimizer and schedulers together with the weights"
        )
