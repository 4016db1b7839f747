"""`ckpt report`: a page about the saves of a root, or the same for programs."""

from __future__ import annotations

import argparse
from typing import Any

from ckpt.cli.commandline import OK
from ckpt.cli.near_rows import near_json
from ckpt.cli.report_page import page_of
from ckpt.cli.screen import counted, fields_json, show_json, write_page
from ckpt.tools.report import Report, report_of
from ckpt.tools.run import ReportedSave


def report(arguments: argparse.Namespace) -> int:
    """`ckpt report`."""
    result = report_of(
        arguments.url,
        storage_options=dict(arguments.option),
        near=arguments.near,
        metadata_nbytes_max=arguments.metadata_max,
    )
    if arguments.json:
        show_json(_report_json(result))
        return OK
    write_page(arguments.output, page_of(result))
    print(
        f"{arguments.output}: {counted(len(result.saves), 'save')}, "
        f"{counted(len(result.live), 'checkpoint')}, "
        f"{counted(len(result.notices), 'notice')}; open it in a browser"
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
        "saves": [_save_json(save) for save in report.saves],
        "failures": [one.model_dump() for one in report.failures],
        "slowest": report.slowest.model_dump() if report.slowest else None,
        "entries": [fields_json(one) for one in report.entries],
        "nbytes": report.usage.nbytes,
        "live_nbytes": report.usage.live_nbytes,
        "unfinished_nbytes": report.usage.unfinished_nbytes,
        "near": near_json(report.near, report.live[-1] if report.live else None),
        "notices": [fields_json(one) for one in report.notices],
    }


def _save_json(save: ReportedSave) -> dict[str, Any]:
    return {**fields_json(save), "totals": save.totals.model_dump() if save.totals else None}
