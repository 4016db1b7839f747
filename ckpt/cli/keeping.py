"""Commands that check, mend and keep checkpoints and logs: verify, salvage, mend, pin."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any

from ckpt.cli.commandline import OK, PROBLEM
from ckpt.cli.screen import counted, fields_json, progress_bar, show_json, size
from ckpt.commit.log import FORMAT_KEY
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME, STEPS_PREFIX, parse_step_key
from ckpt.errors import NoCheckpoint
from ckpt.tools.mend import MendReport, mend
from ckpt.tools.pins import pin, unpin
from ckpt.tools.salvage import SalvageReport, is_data_file, salvage, write_manifest
from ckpt.tools.verify import VerifyReport, summary, verify
from storage import Store, open_store

DAMAGE_SHOWN_MAX = 50


# verify ----------------------------------------------------------------------------------------


def verify_checkpoint(arguments: argparse.Namespace) -> int:
    """`ckpt verify`."""
    options = dict(arguments.option)
    with progress_bar("verifying") as progress:
        report = verify(
            arguments.url,
            arguments.step,
            progress=progress,
            storage_options=options,
            metadata_nbytes_max=arguments.metadata_max,
        )
    # By its attempt: a newer checkpoint may have become the latest while this one was read.
    if arguments.mark and report.ok:
        with closing(open_store(arguments.url, **options)) as store:
            Maintenance.open(store).verified(report.attempt)
    if arguments.json:
        show_json(_report_json(report))
    else:
        _show_report(report)
    return OK if report.ok else PROBLEM


def _show_report(report: VerifyReport) -> None:
    what = (
        f"step {report.step}: {counted(report.files, 'file')}, "
        f"{counted(report.blocks, 'block')}, {size(report.nbytes)}"
    )
    if report.ok:
        print(f"{report.url}\n{what}: every byte is as it was written")
        return
    print(f"{report.url}\n{what}: {summary(report.damage)}")
    for damage in report.damage[:DAMAGE_SHOWN_MAX]:
        print(f"  {damage.text}")
    if len(report.damage) > DAMAGE_SHOWN_MAX:
        print(f"  ... and {len(report.damage) - DAMAGE_SHOWN_MAX} more; --json lists all")


def _report_json(report: VerifyReport) -> dict[str, Any]:
    damage = [damage._asdict() for damage in report.damage]
    return {"ok": report.ok, **fields_json(report), "damage": damage}


# salvage ---------------------------------------------------------------------------------------


def salvage_checkpoint(arguments: argparse.Namespace) -> int:
    """`ckpt salvage`."""
    options = dict(arguments.option)
    url, _, name = arguments.url.rstrip("/").rpartition("/")
    is_directory = parse_step_key(f"steps/{name}/{MANIFEST_NAME}") is not None
    if not is_directory and arguments.step is None:
        is_directory = bool(name) and _is_copy(arguments.url, options)
    store = open_store(url or "." if is_directory else arguments.url, **options)
    try:
        prefixes = [name] if is_directory else _directories_without(store, arguments.step)
        reports = [_salvage_one(store, prefix, arguments) for prefix in prefixes]
    finally:
        store.close()
    if arguments.json:
        show_json([_salvage_json(report) for report in reports])
    elif not reports:
        print(f"{store.url}: every checkpoint has its MANIFEST; say --step to rebuild one anyway")
    return OK if all(report.is_complete for report in reports) else PROBLEM


def _is_copy(url: str, options: dict[str, Any]) -> bool:
    """Whether data files lie right at `url`: a copy of one checkpoint, whatever its name."""
    with closing(open_store(url, **options)) as store:
        if store.exists(FORMAT_KEY):
            return False
        return any(is_data_file(info.key) for info in store.list(""))


def _directories_without(store: Store, step: int | None) -> list[str]:
    """The step directories of a root that have no MANIFEST, or all those of `step`."""
    files: dict[str, set[str]] = {}
    for info in store.list(STEPS_PREFIX):
        parsed = parse_step_key(info.key)
        if parsed is not None and step in (None, parsed[0]):
            folder, _, name = info.key.rpartition("/")
            files.setdefault(folder, set()).add(name)
    if not files:
        wanted = "no step directories" if step is None else f"nothing of step {step}"
        raise NoCheckpoint(f"{store.url}: {wanted} below {STEPS_PREFIX}")
    return [name for name in files if step is not None or MANIFEST_NAME not in files[name]]


def _salvage_one(store: Store, prefix: str, arguments: argparse.Namespace) -> SalvageReport:
    report = salvage(store, prefix)
    if report.manifest is not None and not arguments.dry_run:
        write_manifest(store, report)
    if not arguments.json:
        _show_salvage(store, report, dry_run=arguments.dry_run)
    return report


def _show_salvage(store: Store, report: SalvageReport, *, dry_run: bool) -> None:
    checked = f"{counted(len(report.files), 'file')}, {size(report.nbytes_checked)} checked"
    print(f"{store.url}/{report.prefix}: {checked}")
    for name in report.missing:
        print(f"  missing: {name}")
    for problem in report.problems:
        print(f"  {problem}")
    if report.manifest is None:
        print("  the checkpoint is not whole; no MANIFEST was written")
        return
    tensors = counted(len(report.manifest.fqns), "tensor")
    done = "nothing was written" if dry_run else "MANIFEST written, open it by its own path"
    print(f"  whole: {tensors} of step {report.manifest.header.step}; {done}")


def _salvage_json(report: SalvageReport) -> dict[str, Any]:
    return {
        "directory": report.prefix,
        "whole": report.is_complete,
        "files": list(report.files),
        "nbytes_checked": report.nbytes_checked,
        "missing": list(report.missing),
        "problems": list(report.problems),
    }


# mend ------------------------------------------------------------------------------------------


def mend_log(arguments: argparse.Namespace) -> int:
    """`ckpt mend`."""
    options = dict(arguments.option)
    report = mend(arguments.url, dry_run=arguments.dry_run, storage_options=options)
    if arguments.json:
        show_json(_mend_json(report))
        return PROBLEM if report.lost else OK
    for slot, problem in sorted(report.breaks.items()):
        print(f"slot {slot}: {problem}")
    would = "would be " if arguments.dry_run else ""
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
    return PROBLEM if report.lost else OK


def _mend_json(report: MendReport) -> dict[str, Any]:
    return {
        "breaks": {str(slot): problem for slot, problem in sorted(report.breaks.items())},
        "filled": list(report.filled),
        "format_written": report.format_written,
        "rebuilt": [entry.attempt for entry in report.rebuilt],
        "brought_back": [entry.attempt for entry in report.brought_back],
        "lost": [entry.attempt for entry in report.lost],
        "latest": report.latest.attempt if report.latest else None,
    }


# pin -------------------------------------------------------------------------------------------


def pin_checkpoint(arguments: argparse.Namespace) -> int:
    """`ckpt pin` and `ckpt unpin`."""
    change, done = (pin, "pinned") if arguments.pinned else (unpin, "unpinned")
    options = dict(arguments.option)
    attempt = change(
        arguments.url, arguments.step, attempt=arguments.attempt, storage_options=options
    )
    if arguments.json:
        show_json({"step": arguments.step, "attempt": attempt, "pinned": arguments.pinned})
    else:
        print(f"{done} step {arguments.step} ({attempt})")
    return OK
