"""Each kind of change on a small function, and that a mutant's code differs by its change alone."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType

import pytest

from tests.mutation.changes import code_of, mutants_of


def afters(folder: Path, body: str) -> list[str]:
    """The statements that the changes of a function with this body make of it."""
    (folder / "m.py").write_text(f"def f(a, b):\n    {body}\n")
    return [mutant.after for mutant in mutants_of(folder, "m.py")]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a < b", ["return None", "return a <= b"]),
        ("return a + 1", ["return None", "return a - 1", "return a + 2"]),
        ("return not a", ["return None", "return a"]),
        ("return False", ["return True"]),
        ("return None", []),
        ("return a or b", ["return None", "return a and b", "return b", "return a"]),
        ("return a(b, 'x')", ["return None", "return a('x', b)"]),
        ("return a(b, b)", ["return None"]),
        ("return a[:b]", ["return None", "return a[:None]"]),
        ("return a.get(b, 'x')", ["return None", "return a.get('x', b)", "return a.get(b)"]),
        ("return max(a, key=b)", ["return None", "return max(a)"]),
        ("return [x for x in a if x]", ["return None", "return [x for x in a if True]"]),
        ("return zip(a, strict=True)", ["return None"]),
        ("a(b)", ["pass"]),
        ("a.x = b", ["pass"]),
        ("x = b", []),
        ("a += b", ["pass"]),
        ("del a[b]", ["pass"]),
        ("raise a(b, 1)", ["pass"]),
        ("assert a == 1", []),
        ("logger.info('%s of %s', a, 1)", ["pass"]),
        ("x = f'{a + 1}'", []),
        ("if a < b: a()", ["if a <= b:", "if True:", "if False:", "pass"]),
        ("if a: a()", ["if not a:", "if True:", "if False:", "pass"]),
        ("while a: break", ["while not a:", "while False:", "continue"]),
    ],
)
def test_changes_of_a_statement(tmp_path: Path, body: str, expected: list[str]) -> None:
    assert afters(tmp_path, body) == expected


def test_what_runs_at_import_is_left_alone(tmp_path: Path) -> None:
    text = "LIMIT = 1\n@deco(1)\ndef f(a: int = 1) -> list[1]:\n    'text'\n"
    (tmp_path / "m.py").write_text(text + "class C:\n    x = 1\n    def g(self): return 1\n")
    assert [mutant.function for mutant in mutants_of(tmp_path, "m.py")] == [("g", 7)]


def test_the_code_of_a_mutant_has_its_change_alone(tmp_path: Path) -> None:
    text = (
        "def before(): return 1\ndef f(a, b=2):\n    c = a * 3\n    return [x + b for x in [c]]\n"
    )
    (tmp_path / "m.py").write_text(text)
    scope: dict[str, FunctionType] = {}
    exec(compile(text, "m.py", "exec"), scope)
    changed = {}
    for mutant in mutants_of(tmp_path, "m.py"):
        if mutant.function == ("f", 2):
            scope["f"].__code__ = code_of(tmp_path, mutant)
            changed[mutant.kind, mutant.after] = scope["f"](4)
    assert changed == {
        ("an operator swapped", "c = a // 3"): [3],
        ("a constant one higher", "c = a * 4"): [18],
        ("None returned", "return None"): None,
        ("an operator swapped", "return [x - b for x in [c]]"): [10],
    }


def test_lines_of_a_change_are_those_of_its_statement_without_its_body(tmp_path: Path) -> None:
    text = "def f(a):\n    if (a and\n            a > 1):\n        return (\n            a)\n"
    (tmp_path / "m.py").write_text(text)
    lines = {(mutant.first, mutant.last) for mutant in mutants_of(tmp_path, "m.py")}
    assert lines == {(2, 3), (4, 5)}
