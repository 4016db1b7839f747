"""`ckpt report`: a page about the saves of a root, or the same for programs."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ckpt.cli.commandline import OK
from ckpt.cli.report_page import page_of
from ckpt.cli.screen import show_json
from ckpt.errors import CheckpointError
from ckpt.telemetry.record import SaveTotals
from ckpt.tools.report import Report, report_of


def report(arguments: argparse.Namespace) -> int:
    """`ckpt report`."""
    result = report_of(arguments.url, storage_options=dict(arguments.option))
    if arguments.json:
        show_json(_report_json(result))
        return OK
    try:
        with open(arguments.output, "w", encoding="utf-8") as page:
            page.writelines(page_of(result))
    except OSError as error:
        raise CheckpointError(
            f"cannot write {arguments.output}: {error.strerror or error}; --output names a local "
            "file"
        ) from error
    print(
        f"{arguments.output}: {len(result.saves)} saves, {len(result.live)} checkpoints, "
        f"{len(result.notices)} notices; open it in a browser"
    )
    for notice in result.notices:
        if notice.severity != "note":
            print(f"{notice.severity}: {notice.text}")
    return OK


def _report_json(report: Report) -> dict[str, Any]:
    return {
        "url": report.url,
        "made_unix": report.made_unix,
        "sessions": report.sessions,
        "is_whole_history": report.is_whole_history,
        "saves": [{**_fields(save), "totals": _totals_json(save.totals)} for save in report.saves],
        "failures": [one.model_dump() for one in report.failures],
        "slowest": report.slowest.model_dump() if report.slowest else None,
        "entries": [_fields(one) for one in report.entries],
        "nbytes": report.usage.nbytes,
        "live_nbytes": report.usage.live_nbytes,
        "unfinished_nbytes": report.usage.unfinished_nbytes,
        "notices": [_fields(one) for one in report.notices],
    }


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _totals_json(totals: SaveTotals | None) -> dict[str, Any] | None:
    return None if totals is None else totals.model_dump()
