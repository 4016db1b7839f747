"""Reads the corpus again and prints a row for each format: python -m tests.corpus.table

Runs all of tests/convert/test_corpus.py, counts in full, and puts into docs/compatibility.md what
came out: formats that fail first, then those that pass, folded.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.wild.page import opened

ROOT = Path(__file__).parents[2]
CORPUS, PAGE = ROOT / "tests/corpus", ROOT / "docs/compatibility.md"
CHECKS = {"bit_for_bit": "whole", "writers_reader": "whole", "three_ranks": "3 ranks"}
CHECKS |= {"commands": "commands"}
PARAGRAPH = re.compile(r"^\d+ formats of `make corpus`.*\n", re.MULTILINE)


class Outcomes:
    """What each test of a case came to: "pass", "FAILS" or "-", by the columns of the table."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test, _, case = report.nodeid.rpartition("::")[2].rstrip("]").partition("[")
        column = next((short for words, short in CHECKS.items() if words in test), "")
        if not (case and column) or (report.when != "call" and report.passed):
            return
        came = "FAILS" if report.failed else "-" if report.skipped else "pass"
        self.rows.setdefault(case, {})[column] = came


def main(arguments: list[str]) -> int:
    outcomes = Outcomes()
    tests = str(ROOT / "tests/convert/test_corpus.py")
    code = pytest.main([tests, "--soak", "-q", *arguments], plugins=[outcomes])
    columns = list(dict.fromkeys(CHECKS.values()))
    rows = sorted(outcomes.rows.items(), key=lambda row: ("FAILS" not in row[1].values(), row[0]))
    print(f"\n{'format':28}" + "".join(f"{column:11}" for column in columns) + "written by")
    for case, came in rows:
        by = json.loads((CORPUS / case / "by.json").read_text())
        packages = ", ".join(f"{name} {version}" for name, version in by.items())
        print(f"{case:28}" + "".join(f"{came.get(one, '-'):11}" for one in columns) + packages)
    failed = [case for case, came in rows if "FAILS" in came.values()]
    print(f"{len(rows) - len(failed)} of {len(rows)} formats pass\n")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(PARAGRAPH.sub(lambda _: opened(failed), page), encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
