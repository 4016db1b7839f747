"""The rows of docs/engine_differences.md, shown on the torch that is here.

    python -m tests.differential.rows [--count 300] [--json FILE] [--plant NAME]

Plays so many draws, then those of `SEEDS`, then the calls of `CASES` on both engines. Ends with 1
where something differs that is in no row, or a row does not show; `make versions` runs it on each
torch and writes the columns. Rows of `fully_shard` are not asked for where torch's own does not run
on the CPU.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.differential.cases import CASES
from tests.differential.draws import drawn
from tests.differential.listed import LISTED, Listed
from tests.differential.planting import PLANTS
from tests.differential.playing import play
from tests.ranks import RanksFailed, run_ranks
from tests.versions import torch_shards_on_cpu

PAGE = Path(__file__).parents[2] / "docs" / "engine_differences.md"
SEEDS: dict[str, tuple[int, int]] = {
    "SHARDED dicts of a wrapper over tensor-parallel members": (4, 45),
    "optimizer dicts of a wrapper over tensor-parallel members": (4, 14),
    "tensor-parallel members of a wrapper with original parameters, under `NO_SHARD` or in "
    "FULL dicts": (4, 32),
    "`clip_grad_norm_` of a wrapper over tensor-parallel members": (4, 51),
    "`no_sync` over tensor-parallel members with original parameters": (4, 14),
    "a step, or a write into parameters, after a forward without gradients": (2, 33),
    "a write into parameters after a backward in `no_sync` under SHARD_GRAD_OP": (2, 1481),
    "a write into parameters of a frozen unit after a forward under SHARD_GRAD_OP": (2, 1512),
    "a full optimizer dict on the first rank, loaded by models side by side": (4, 5310),
    "`rank0_only` in state dicts": (4, 199),
    "LOCAL state dicts": (2, 21),
    "gathered parameters of `fully_shard`": (2, 71),
    "`set_reshard_after_forward` while a unit is sharded over fewer ranks": (4, 17637),
    "a weight tied across units": (2, 16),
    "frozen parameters": (2, 58),
    "`.grad` after a backward in `no_sync` when reduced gradients are there": (2, 120),
    "SHARDED optimizer dicts of `NO_SHARD` units": (2, 103),
    "an optimizer dict that lacks some members of a flat parameter": (2, 8),
    "SHARDED dicts with entries of another kind or shape": (2, 10),
}
"""By the beginning of a row: ranks and seed of a draw that shows it; random ones show some."""
OLD = "`buffer_dtype` under a root without parameters of its own"
"""A row that torch 2.6 shows, and newer ones do not."""
SHARE_OF_FOUR_RANKS = 0.2
NOT_SEEN, CANNOT = "not seen", "torch cannot"
LEFT_OUT = {one.page for one in LISTED if one.skips is not Listed.skips}
"""Rows for which draws do not ask torch: it may not survive."""


def rows() -> list[str]:
    """The first cells of the table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.split(" | ")[0][2:] for line in lines if line.startswith("| ")]
    return [cell for cell in cells if cell.strip("-: |")]


def _outcome(case: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return CASES[case][0](name)
        except Exception as error:
            return type(error).__name__


def _on_ranks(case: str, name: str) -> list[Any]:
    try:
        return run_ranks(4 if "part of" in case else 2, _outcome, case, name, timeout_seconds=30.0)
    except RanksFailed as failed:  # they may end, or wait for each other
        return [f"the ranks {sorted(failed.errors) or failed.silent} failed"]


def _side_by_side(case: str) -> str:
    """What two ranks of each engine do."""
    try:
        theirs, ours = (_on_ranks(case, name) for name in ("torch", "ours"))
    except pytest.skip.Exception:
        return CANNOT
    if ours == [CASES[case][1]] * len(ours) and theirs != ours:
        return "side by side"
    return f"{NOT_SEEN}: ours {ours}, torch's {theirs}"


def _is_playable(ranks: int, seed: int) -> bool:
    return torch_shards_on_cpu() or drawn(seed, ranks).face != "fully"


def _asked(page: str) -> str:
    """What a draw does to torch that others leave out."""
    ranks, seed = SEEDS[page]
    (outcome,) = play(ranks, [seed], asks=True)
    return "asked" if outcome.differences or page in outcome.known else NOT_SEEN


def _shown(row: str, counts: Mapping[str, int]) -> str:
    if row == OLD:
        return f"{counts[row]} calls" if counts[row] else "no longer"
    case = next((one for one in CASES if row.startswith(one)), None)
    if case is not None:
        return _side_by_side(case)
    page = next(one for one in SEEDS if row.startswith(one))
    if not _is_playable(*SEEDS[page]):
        return CANNOT
    if page in LEFT_OUT:
        return _asked(page)
    return f"{counts[page]} calls" if counts[page] else NOT_SEEN


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential.rows", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="draws besides those of the rows")
    parser.add_argument("--json", type=Path, help="where to write the column")
    parser.add_argument("--plant", default="", choices=("", *PLANTS), help="an error to make")
    given = parser.parse_args(arguments)
    of_four, outcomes = round(given.count * SHARE_OF_FOUR_RANKS), []
    for ranks, count in ((2, given.count - of_four), (4, of_four)):
        playable = (seed for seed in itertools.count() if _is_playable(ranks, seed))
        seeds = {*itertools.islice(playable, count)}
        seeds |= {seed for of, seed in SEEDS.values() if of == ranks and _is_playable(of, seed)}
        outcomes += play(ranks, sorted(seeds), plant=given.plant)
    counts: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        counts.update(outcome.known)
    wrong = [outcome for outcome in outcomes if outcome.differences]
    print(*wrong, sep="\n")
    column = {}
    for row in rows():
        column[row] = _shown(row, counts)
        print(f"{column[row]}: {row}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(column))
    unseen = sum(cell.startswith(NOT_SEEN) for cell in column.values())
    print(
        f"{len(outcomes)} draws, {sum(one.calls for one in outcomes)} calls, {len(wrong)} draws "
        f"with differences, {unseen} of {len(column)} rows not seen"
    )
    return int(bool(wrong or unseen))


if __name__ == "__main__":
    sys.exit(main())
