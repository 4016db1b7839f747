"""Commands about near checkpoints, which lie on the hosts of a training: rescue, ls --near."""

from __future__ import annotations

import argparse
from typing import Any

from ckpt.cli.commandline import OK
from ckpt.cli.near_rows import problems, risks_text
from ckpt.cli.screen import counted, date, fields_json, show_json, show_table, size
from ckpt.cli.visible import visible
from ckpt.near.records import NearRecord
from ckpt.near.status import TierStatus
from ckpt.near.tier import Tier, tiers_in
from ckpt.tools.near_tiers import newest_status_of, tier_views
from ckpt.tools.rescue import rescue


def rescue_near(arguments: argparse.Namespace) -> int:
    """`ckpt rescue`."""
    options = dict(arguments.option)
    report = rescue(arguments.near, arguments.url, storage_options=options)
    if arguments.json:
        show_json(fields_json(report))
        return OK
    for step, reason in report.passed_over:
        print(f"passed over: step {step}: {reason}")
    what = f"step {report.step} ({report.attempt}), {counted(report.files, 'file')}"
    print(f"{what}, {size(report.nbytes)}: {report.path}")
    return OK


def ls_near(arguments: argparse.Namespace) -> int:
    """`ckpt ls --near`."""
    path = arguments.url
    tiers = tiers_in(path)
    rows = [(tier, record) for tier in tiers for record in reversed(tier.records())]
    views = {tier.root: tier_views([path], tier.root) for tier in tiers}
    if arguments.json:
        reached = {root: newest_status_of(seen) for root, seen in views.items()}
        show_json([_near_json(*row) | _reached_json(reached[row[0].root]) for row in rows])
        return OK
    print(f"{path}: {counted(len(rows), 'near checkpoint')} of {counted(len(tiers), 'root')}")
    for root, seen in views.items():
        status = newest_status_of(seen)
        if status is not None:
            risks = risks_text(seen, None)
            print(f"root {root}: step {status.step} done, {date(status.time_unix)}; {risks}")
        for problem in problems(seen):
            print(f"root {root}: {visible(problem)}")
    shown = []
    for tier, record in rows:
        here = _near_json(tier, record)
        ranks = f"{here['ranks_here']} of {here['ranks']}"
        when = date(record.head.time_unix)
        nbytes, epoch = size(here["nbytes_here"]), f"{record.head.epoch}"
        shown.append((f"{record.head.step}", when, nbytes, ranks, epoch, tier.root))
    titles = ("step", "recorded", "size here", "ranks here", "epoch", "root")
    show_table(titles, shown, right=("step", "size here", "ranks here", "epoch"))
    return OK


def _reached_json(status: TierStatus | None) -> dict[str, Any]:
    """How far the training of a near checkpoint is, as its host has noted it."""
    if status is None:
        return {"reached_step": None, "reached_unix": None}
    return {"reached_step": status.step, "reached_unix": status.time_unix}


def _near_json(tier: Tier, record: NearRecord) -> dict[str, Any]:
    """What this host has of a near checkpoint."""
    here = set(tier.whole_ranks(record))
    return {
        "root": tier.root,
        "step": record.head.step,
        "attempt": record.head.attempt,
        "epoch": record.head.epoch,
        "recorded_unix": record.head.time_unix,
        "ranks": record.head.world_size,
        "ranks_here": len(here),
        "nbytes_here": sum(file.nbytes for file in record.files if file.rank in here),
        "in_memory": tier.is_in_memory,
    }
