"""Shows what was written to another place: cp, reshard, export, import."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.convert.export import ExportReport
from ckpt.convert.import_ import ImportReport
from ckpt.convert.sources.torch_pickle import SUFFIXES
from ckpt.screens.terminal import counted, show_names, size
from ckpt.tools.relay import CopyReport

NAMES_SHOWN_MAX = 20


def show_copy(report: CopyReport) -> None:
    """`ckpt cp` and `ckpt reshard`."""
    print(report.target)
    steps = ", ".join(map(str, report.steps[-8:]))
    steps = f"{len(report.steps)} steps: ... {steps}" if len(report.steps) > 8 else f"step {steps}"
    skipped = report.nbytes - report.nbytes_written
    suffix = f"; {size(skipped)} were there already" if skipped > 0 else ""
    files = counted(report.files, "file")
    print(f"{steps}: {files}, {size(report.nbytes)} in {report.seconds:.1f} s{suffix}")
    if report.is_second_form:
        print(f"it loads by its attempt: attempt={report.attempt!r}")


show_reshard = show_copy


def show_export(report: ExportReport) -> None:
    """`ckpt export`."""
    for file in report.files:
        print(file)
    what = "" if report.step is None else f"step {report.step}: "
    checked = ", every tensor read back and equal" if report.verified else ""
    tensors = counted(len(report.tensors), "tensor")
    print(f"{what}{tensors}, {size(report.nbytes)} in {report.seconds:.1f} s{checked}")
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


def show_import_checkpoint(report: ImportReport) -> None:
    """`ckpt import`."""
    print(report.path)
    checked = ", every tensor read back and equal" if report.verified else ""
    print(
        f"step {report.step}: {counted(len(report.tensors), 'tensor')}, "
        f"{counted(len(report.values), 'value')}, {size(report.nbytes)} in "
        f"{report.seconds:.1f} s{checked}"
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
