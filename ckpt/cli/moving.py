"""Commands that write a checkpoint to another place: cp, reshard."""

from __future__ import annotations

import argparse
import time

from ckpt.cli.commandline import OK
from ckpt.cli.screen import counted, fields_json, progress_bar, show_json, size
from ckpt.errors import CheckpointError
from ckpt.tools.copy import CopyReport, copy
from ckpt.tools.reshard import reshard


def cp(arguments: argparse.Namespace) -> int:
    """`ckpt cp`."""
    if arguments.root and arguments.step is not None:
        raise CheckpointError("--root takes all checkpoints; leave out --step, or --root")
    started = time.monotonic()
    with progress_bar("copying") as progress:
        report = copy(
            arguments.url,
            arguments.target,
            step=arguments.step,
            whole_root=arguments.root,
            threads=arguments.threads,
            progress=progress,
            storage_options=dict(arguments.option),
            target_options=dict(arguments.target_option) or None,
            metadata_nbytes_max=arguments.metadata_max,
        )
    return _show(report, time.monotonic() - started, as_json=arguments.json)


def reshard_checkpoint(arguments: argparse.Namespace) -> int:
    """`ckpt reshard`."""
    started = time.monotonic()
    with progress_bar("resharding") as progress:
        report = reshard(
            arguments.url,
            arguments.target,
            ranks=arguments.ranks,
            layout=arguments.layout,
            step=arguments.step,
            threads=arguments.threads,
            progress=progress,
            storage_options=dict(arguments.option),
            target_options=dict(arguments.target_option) or None,
            metadata_nbytes_max=arguments.metadata_max,
        )
    code = _show(report, time.monotonic() - started, as_json=arguments.json)
    if arguments.target is None and not arguments.json:
        print(f"it loads by its attempt: attempt={report.attempt!r}")
    return code


def _show(report: CopyReport, seconds: float, *, as_json: bool) -> int:
    if as_json:
        show_json({**fields_json(report), "seconds": seconds})
        return OK
    print(report.target)
    steps = ", ".join(map(str, report.steps[-8:]))
    steps = f"{len(report.steps)} steps: ... {steps}" if len(report.steps) > 8 else f"step {steps}"
    skipped = report.nbytes - report.nbytes_written
    suffix = f"; {size(skipped)} were there already" if skipped > 0 else ""
    files = counted(report.files, "file")
    print(f"{steps}: {files}, {size(report.nbytes)} in {seconds:.1f} s{suffix}")
    return OK
