"""One wrong change of a source file, and the tests that must fail for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """`old`, which is in the file at `path` once, becomes `new`; then `test` must fail.

    `test` is a node id of pytest, or several with spaces between them, of which one must fail. Of
    a change that nobody can see, `equivalent` says why, and there is no test.
    """

    wrong: str
    path: str
    old: str
    new: str
    test: str = ""
    equivalent: str = ""

    def applied(self, source: str) -> str:
        """The changed source. Raises ValueError where the pattern is not there exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.wrong}: {self.path} has {source.count(self.old)} places that match "
                f"{self.old!r}, expected one: follow the change of the source"
            )
        return source.replace(self.old, self.new)
