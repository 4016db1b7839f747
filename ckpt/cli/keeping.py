"""Shows what keeps a root sound and small: verify, salvage, rescue, mend, prune, rm, pin."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ckpt.commit.log import FORMAT_KEY
from ckpt.screens.terminal import asked, counted, size
from ckpt.service.removing import DELETED_NOTHING, PinReport, PruneReport, Removal
from ckpt.tools.mend import MendReport
from ckpt.tools.rescue import RescueReport
from ckpt.tools.salvage import Salvaged
from ckpt.tools.verify import VerifyReport, summary

DAMAGE_SHOWN_MAX = 50


def show_verify(report: VerifyReport) -> None:
    """`ckpt verify`."""
    what = (
        f"step {report.step}: {counted(report.files, 'file')}, "
        f"{counted(report.blocks, 'block')}, {size(report.nbytes)}"
    )
    if report.ok:
        other = "all bytes can be read; nothing has checksums here"
        checked = "every byte is as it was written" if report.blocks else other
        print(f"{report.url}\n{what}: {checked}")
        return
    print(f"{report.url}\n{what}: {summary(report.damage)}")
    for damage in report.damage[:DAMAGE_SHOWN_MAX]:
        print(f"  {damage.text}")
    if len(report.damage) > DAMAGE_SHOWN_MAX:
        print(f"  ... and {len(report.damage) - DAMAGE_SHOWN_MAX} more; --json lists all")


def show_salvage(reports: Sequence[Salvaged]) -> None:
    """`ckpt salvage`."""
    if not reports:
        print("every checkpoint has its MANIFEST; --step rebuilds one anyway")
    for report in reports:
        checked = f"{counted(len(report.files), 'file')}, {size(report.nbytes_checked)} checked"
        print(f"{report.directory}: {checked}")
        for name in report.missing:
            print(f"  missing: {name}")
        for problem in report.problems:
            print(f"  {problem}")
        if not report.whole:
            print("  the checkpoint is not whole; no MANIFEST was written")
            continue
        wrote = "MANIFEST written, open it by its own path"
        done = "nothing was written" if report.dry_run else wrote
        print(f"  whole: {counted(report.tensors, 'tensor')} of step {report.step}; {done}")


def show_rescue(report: RescueReport) -> None:
    """`ckpt rescue`."""
    for step, reason in report.passed_over:
        print(f"skipped: step {step}: {reason}")
    what = f"step {report.step} ({report.attempt}), {counted(report.files, 'file')}"
    print(f"{what}, {size(report.nbytes)}: {report.path}")


def show_mend(report: MendReport) -> None:
    """`ckpt mend`."""
    for slot, problem in sorted(report.breaks.items()):
        print(f"slot {slot}: {problem}")
    would = "would be " if report.dry_run else ""
    if report.format_written:
        print(f"{FORMAT_KEY} {would}written")
    for entry in report.rebuilt:
        print(f"MANIFEST of step {entry.step} ({entry.attempt}) {would}rebuilt")
    for entry in report.brought_back:
        print(f"step {entry.step} ({entry.attempt}) {would}brought back")
    for entry in report.lost:
        print(f"step {entry.step} ({entry.attempt}) is not all here")
    latest = f"step {report.latest.step} is the latest" if report.latest else "no checkpoint"
    print(f"{counted(len(report.filled), 'slot')} {would}filled; {latest}")


def show_pin(report: PinReport) -> None:
    """`ckpt pin` and `ckpt unpin`."""
    print(f"{'pinned' if report.pinned else 'unpinned'} step {report.step} ({report.attempt})")


show_unpin = show_pin


def show_prune(report: PruneReport) -> None:
    """`ckpt prune`, after `confirmed` has shown what was to go."""
    if _deleted_nothing(report):
        return
    for one in report.deleted:
        print(f"deleted step {one.step} ({one.attempt})")
    for reason in report.stayed:
        print(f"kept: {reason}", file=sys.stderr)
    print(f"{counted(len(report.deleted), 'checkpoint')} deleted, {len(report.kept)} kept")


def show_rm(report: Removal) -> None:
    """`ckpt rm`, after `confirmed` has shown what was to go."""
    if not _deleted_nothing(report):
        print(f"deleted step {report.step} ({report.attempt})")


def confirmed(report: PruneReport | Removal, *, yes: bool, as_json: bool) -> bool:
    """Show what will be deleted and ask."""
    _show_victims(report, as_json=as_json)
    count = 1 if isinstance(report, Removal) else len(report.deleted)
    question = "delete it?" if count == 1 else f"delete these {count}?"
    return not count or asked(question, yes=yes)


def _deleted_nothing(report: PruneReport | Removal) -> bool:
    if report.outcome == "dry run":
        _show_victims(report, as_json=False)
        print(DELETED_NOTHING)
    elif report.outcome == "declined":
        print(DELETED_NOTHING, file=sys.stderr)
    return report.outcome != "deleted"


def _show_victims(report: PruneReport | Removal, *, as_json: bool) -> None:
    # With --json, stdout is for the answer alone.
    file = sys.stderr if as_json else sys.stdout
    if isinstance(report, PruneReport):
        print(report.why, file=file)
        count = counted(len(report.deleted), "checkpoint")
        print(f"{count} to delete, {size(report.nbytes)}", file=file)
        return
    text = f"step {report.step} ({report.attempt}), {report.line}, {size(report.nbytes)}"
    if report.resumes_from is not None:
        text += f"; it is the latest: a training resumes from step {report.resumes_from} then"
    print(text, file=file)
