"""Writes the counts of the last full runs into docs/guarantee_tests.md.

    make soak                                                appends to build/results.jsonl
    python docs/guarantee_counts.py build/results.jsonl      keeps what is new, rewrites the page

What is kept is docs/full_runs.jsonl, one line for each case of each run (tests/results.py writes
them); tests/docs/test_guarantee_counts.py compares it with the page. The page shows the last run of
each test, failed or not, and how many of the kept runs passed.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KEPT, PAGE = HERE / "full_runs.jsonl", HERE / "guarantee_tests.md"
EVERYDAY = "make test"
HEAD = "| test | counted | last full run: commit, seed | passed |\n| --- | --- | --- | --- |\n"

Line = Mapping[str, Any]


def lines_of(path: Path) -> list[Line]:
    """The lines of a file of results, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def merged(kept: Sequence[Line], new: Iterable[Line]) -> list[Line]:
    """`kept`, and after it what of `new` is of full runs and not there yet."""
    return [*kept, *(one for one in new if one["command"] != EVERYDAY and one not in kept)]


def filled(page: str, kept: Iterable[Line]) -> str:
    """`page` with the table of what is kept. Raises ValueError for a page without its place."""
    pattern = r"(<!-- full runs -->\n).*?(<!-- /full runs -->)"
    if len(re.findall(pattern, page, re.S)) != 1:
        raise ValueError(f"{PAGE.name} has no place <!-- full runs --> ... <!-- /full runs -->")
    table = "\n" + HEAD + "".join(_rows(kept)) + "\n"
    return re.sub(pattern, lambda match: match[1] + table + match[2], page, flags=re.S)


def _rows(kept: Iterable[Line]) -> list[str]:
    """A row per test function, in the order of their files."""
    # Of each test the runs in the order in which they ended, of each run the last line per case.
    runs: dict[str, dict[tuple[Any, ...], dict[str, Line]]] = {}
    for line in kept:
        test, run = line["test"].partition("[")[0], _run_of(line)
        cases = runs.setdefault(test, {})
        cases[run] = {**cases.pop(run, {}), line["test"]: line}
    return [_row(test, list(runs[test].values())) for test in sorted(runs)]


def _run_of(line: Line) -> tuple[Any, ...]:
    return line["command"], line["commit"], line["seed"], line["cores"]


def _row(test: str, runs: Sequence[Mapping[str, Line]]) -> str:
    passed = [all(line["passed"] for line in run.values()) for run in runs]
    counts: Counter[str] = Counter()
    for line in runs[-1].values():
        for name, count in line["counts"].items():
            counts[name] += count
    path, _, name = test.partition("::")
    counted = [f"{count:,} {what}" for what, count in counts.items()]
    if len(runs[-1]) > 1:
        counted.insert(0, f"{len(runs[-1])} cases")
    last = max(runs[-1].values(), key=lambda line: str(line["date"]))
    command, commit, seed, cores = _run_of(last)
    run = f"`{command}`, {last['date']}, {commit}, {seed}, {cores} cores"
    claim = name.removeprefix("test_").replace("_", " ")
    cells = (
        f"{claim} (`{path}`)",
        ", ".join(counted if passed[-1] else ["**failed**", *counted]),
        run,
        f"{sum(passed)} of {len(passed)}",
    )
    return f"| {' | '.join(cells)} |\n"


def main(files: Sequence[str]) -> None:
    """Take the results in `files`, and write the page."""
    kept = lines_of(KEPT) if KEPT.exists() else []
    for file in files:
        kept = merged(kept, lines_of(Path(file)))
    KEPT.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
