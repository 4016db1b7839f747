"""Rules of retention from the command line."""

from __future__ import annotations

import argparse
from functools import reduce
from operator import or_
from typing import Literal

from ckpt.service.retention import KeepBest, KeepEvery, KeepLatest, KeepRule, KeepYounger


def rule_of(arguments: argparse.Namespace) -> KeepRule | None:
    """What any of the options of `add_rules` keeps; None without any."""
    rules: list[KeepRule] = []
    if arguments.keep_last is not None:
        rules.append(KeepLatest(arguments.keep_last))
    if arguments.keep_every is not None:
        rules.append(KeepEvery(arguments.keep_every))
    if arguments.keep_best is not None:
        count, mode = arguments.keep_best
        unmeasured: Literal["keep", "retire"] = "retire" if arguments.retire_unmeasured else "keep"
        rules.append(KeepBest(count, mode=mode, unmeasured=unmeasured))
    if arguments.keep_younger is not None:
        rules.append(KeepYounger(arguments.keep_younger))
    return reduce(or_, rules) if rules else None
