"""Each example runs from the wheel alone, or says in its first line what else it needs."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FROM_THE_WHEEL = {"ckpt", "sharding", "storage", "torch", "numpy", "examples"}
PROGRAMS = sorted(EXAMPLES.rglob("*.py"))


def needed(source: str, own: set[str]) -> set[str]:
    """Packages that `source` imports and that neither Python nor the wheel brings."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add(str(node.module))
    roots = {module.partition(".")[0] for module in modules}
    return roots - FROM_THE_WHEEL - own - sys.stdlib_module_names


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example_says_first_what_else_it_needs(path: Path) -> None:
    source = path.read_text()
    first = source.partition("\n")[0]
    missing = needed(source, own={each.stem for each in path.parent.glob("*.py")})
    assert not [name for name in missing if name not in first], (first, missing)


def test_planted_imports_are_found() -> None:
    assert needed("import os, torch\nfrom ckpt.api import save\nimport mine", {"mine"}) == set()
    assert needed("def f():\n    from safetensors.torch import load_file", set()) == {"safetensors"}
