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
    found = report_of(arguments.url, storage_options=dict(arguments.option))
    if arguments.json:
        show_json(_report_json(found))
        return OK
    try:
        with open(arguments.output, "w", encoding="utf-8") as page:
            page.writelines(page_of(found))
    except OSError as error:
        raise CheckpointError(
            f"cannot write {arguments.output}: {error.strerror or error}; --output names a local "
            "file"
        ) from error
    print(
        f"{arguments.output}: {len(found.saves)} saves, {len(found.live)} checkpoints, "
        f"{len(found.notices)} notices; open it in a browser"
    )
    for notice in found.notices:
        if notice.severity != "note":
            print(f"{notice.severity}: {notice.text}")
    return OK


def _report_json(found: Report) -> dict[str, Any]:
    return {
        "url": found.url,
        "made_unix": found.made_unix,
        "sessions": found.sessions,
        "is_whole_history": found.is_whole_history,
        "saves": [{**_fields(save), "totals": _totals_json(save.totals)} for save in found.saves],
        "failures": [one.model_dump() for one in found.failures],
        "slowest": found.slowest.model_dump() if found.slowest else None,
        "entries": [_fields(one) for one in found.entries],
        "nbytes": found.usage.nbytes,
        "live_nbytes": found.usage.live_nbytes,
        "unfinished_nbytes": found.usage.unfinished_nbytes,
        "notices": [_fields(one) for one in found.notices],
    }


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _totals_json(totals: SaveTotals | None) -> dict[str, Any] | None:
    return None if totals is None else totals.model_dump()
