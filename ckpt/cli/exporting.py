"""The command that turns checkpoints into files for others: export."""

from __future__ import annotations

import argparse
import re
import time

from ckpt.cli.commandline import OK
from ckpt.cli.screen import progress_bar, show_json, size
from ckpt.exporting import Selection, export


def export_checkpoint(arguments: argparse.Namespace) -> int:
    """`ckpt export`."""
    substitutions: list[tuple[re.Pattern[str], str]] = arguments.rename

    def rename(name: str) -> str:
        for pattern, replacement in substitutions:
            name = pattern.sub(replacement, name)
        return name

    started = time.monotonic()
    with progress_bar("exporting") as progress:
        report = export(
            arguments.url,
            arguments.target,
            step=arguments.step,
            selection=Selection(
                entry=arguments.entry,
                include=arguments.include,
                exclude=arguments.exclude,
                rename=rename if substitutions else None,
                dtype=arguments.dtype,
                keep_tied=arguments.keep_tied,
            ),
            shard_nbytes_max=arguments.shard_size,
            progress=progress,
            storage_options=dict(arguments.option),
            target_options=dict(arguments.target_option) or None,
        )
    seconds = max(time.monotonic() - started, 1e-9)
    if arguments.json:
        show_json(
            {
                "files": list(report.files),
                "tensors": list(report.tensors),
                "nbytes": report.nbytes,
                "tied": dict(report.tied),
                "step": report.step,
                "seconds": seconds,
            }
        )
        return OK
    for file in report.files:
        print(file)
    what = f"step {report.step}: {len(report.tensors)} tensors"
    print(f"{what}, {size(report.nbytes)} in {seconds:.1f} s")
    for left_out, held in report.tied.items():
        print(f"tied: {left_out} is {held}, which is in the file")
    return OK
