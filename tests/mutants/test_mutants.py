"""Wrong changes of the protocol, each of which a test must find.

Method: the tree is copied, one pattern of one source file is exchanged, and the test that is named
beside it runs there in a process of its own; it must fail. `make test` tries a seeded sample,
`make soak` all of them. What a change would break is in its name, so the list says what the tests
of the protocol promise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import commits, files, readers, tiers
from tests.mutants.edit import ROOT, Mutant
from tests.results import Counted

MUTANTS = (*commits.ALL, *files.ALL, *tiers.ALL, *readers.ALL)
VISIBLE = [mutant for mutant in MUTANTS if not mutant.equivalent]
COPIED = ("ckpt", "examples", "sharding", "storage", "tests", "pyproject.toml")
TESTS_FAILED = 1  # pytest's exit status; others mean that no test ran


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the sources and tests, in which one file at a time is changed."""
    top = tmp_path_factory.mktemp("mutants")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, top / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, top / name)
    yield top
    shutil.rmtree(top)


def _run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Bytecode of the file as it was would be taken where size and second of the change agree.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_the_copy_is_what_runs(tree: Path) -> None:
    shown = _run(tree, "-c", "import ckpt, storage; print(ckpt.__file__, storage.__file__)")
    assert shown.stdout.split() == [
        str(tree / package / "__init__.py") for package in ("ckpt", "storage")
    ], shown.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.wrong)
def test_the_pattern_is_there_once_and_the_test_exists(mutant: Mutant) -> None:
    changed = mutant.applied((ROOT / mutant.path).read_text())
    compile(changed, mutant.path, "exec")
    assert bool(mutant.test) != bool(mutant.equivalent)
    for node in mutant.test.split():
        path, _, name = node.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), node


@pytest.mark.sampled(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", VISIBLE, ids=lambda mutant: mutant.wrong)
def test_a_test_finds_it(tree: Path, mutant: Mutant, counted: Counted) -> None:
    source = (ROOT / mutant.path).read_text()
    (tree / mutant.path).write_text(mutant.applied(source))
    try:
        done = _run(
            tree, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.test.split()
        )
    finally:
        (tree / mutant.path).write_text(source)
    counted(wrong_changes=1, seen=int(done.returncode == TESTS_FAILED))
    assert done.returncode == TESTS_FAILED, f"{mutant.wrong}\n{done.stdout}\n{done.stderr}"
