"""Which versions of Python and torch work: `make versions` tries them and writes the table of
docs/versioning.md.

Every interpreter that is seen (3.10 to 3.13, on PATH and under pyenv), with the oldest torch that
pyproject.toml allows, the pinned one and the newest, gets an environment in build/versions and runs
the checks below. An environment stays and is used again. With LIBRARIES=FOLDER, CUDA's libraries in
`FOLDER/cu12` and `FOLDER/cu13` are linked, rather than installed once for each environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "versioning.md"
SEEN = REPOSITORY / "docs" / "history" / "differences_seen.md"
ABOUT_SEEN = """\
# Which differences each torch shows

Written by `make versions`: what was seen of each row of docs/engine_differences.md. In so many
calls of draws; *asked*: torch was asked for what draws leave out because it may not survive it;
*side by side*: one case, played by both engines. *torch cannot*: its own `fully_shard` does not run
on the CPU (torch 2.6 asks streams of the CPU for events that they do not have).

"""
BEGIN, END = "<!-- written by make versions -->", "<!-- end -->"
NEWEST = "newest"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
NEEDS = """
    numpy fsspec s3fs msgpack pydantic crc32c blake3 rich setuptools filelock typing-extensions
    sympy networkx jinja2 pytest pytest-timeout pytest-xdist hypothesis psutil safetensors vulture
    moto[server] cryptography zstandard obstore prometheus-client
"""
"""torch's own, ours, and those of the tests."""
COLUMN = "rows.json"
"""In an environment: which differences from torch its torch shows."""
QUICK = "not ranks and not server"
CHECKS = {
    "import": ["-c", "import ckpt, sharding, storage"],
    "states": ["-m", "pytest", "-q", "-m", QUICK, "tests/state", "tests/layout", "tests/sharding"],
    "quick": [
        *("-m", "pytest", "-q", "-n", str(os.cpu_count()), "--dist", "loadfile", "-m", QUICK)
    ],
    "engine": [
        *("-m", "pytest", "-q", "tests/sharding/test_torch_names.py"),
        *("tests/sharding/test_training.py", "tests/sharding/test_fully_training.py"),
        "tests/sharding/test_torch_2_15.py",
    ],
    "relay": ["-m", "pytest", "-q", "tests/test_relay.py"],
    "draws": ["-m", "tests.differential.rows", "--json", COLUMN],
    "differences": ["-m", "pytest", "-q", "tests/differential/test_listed.py"],
}


class Version(NamedTuple):
    """What is tried."""

    python: str
    torch: str
    """A version, or "newest"."""

    @property
    def folder(self) -> Path:
        return REPOSITORY / "build" / "versions" / f"python{self.python}-torch{self.torch}"

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"


def interpreters() -> dict[str, str]:
    """By version, what runs it."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    seen = {}
    for version in PYTHONS:
        under = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
        command = shutil.which(f"python{version}") or (str(under[-1]) if under else None)
        # A shim of pyenv is there for what is not chosen, too.
        for one in (*map(str, reversed(under)), command):
            if one and subprocess.run([one, "-c", ""], capture_output=True).returncode == 0:
                seen[version] = one
                break
    return seen


def torches() -> tuple[str, ...]:
    """The oldest that is allowed, the pinned one, and "newest"."""
    floor = re.search(r'"torch>=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    pinned = re.search(r"^torch==([\d.]+)", (REPOSITORY / "constraints.txt").read_text(), re.M)
    assert floor and pinned
    return (f"{floor[1]}.0", pinned[1], NEWEST)


def prepare(version: Version, interpreter: str, libraries: Path | None) -> None:
    """Make the environment, unless it is there."""
    if (version.folder / "ready").exists():
        return
    subprocess.run([interpreter, "-m", "venv", "--clear", str(version.folder)], check=True)
    torch = "torch" if version.torch == NEWEST else f"torch=={version.torch}"
    pip = [str(version.interpreter), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *(["--no-deps"] if libraries else []), torch], check=True)
    if libraries is not None:
        (packages,) = version.folder.glob("lib/python*/site-packages")
        wants = next(packages.glob("torch-*.dist-info/METADATA")).read_text()
        for library in (libraries / ("cu12" if "-cu12" in wants else "cu13")).iterdir():
            if library.suffix != ".dist-info":
                (packages / library.name).symlink_to(library)
    pinned = ["-c", "constraints.txt"] if version.torch == torches()[1] else []
    subprocess.run([*pip, *pinned, *NEEDS.split()], check=True, cwd=REPOSITORY)
    (version.folder / "ready").touch()


def run(version: Version, check: str, limit_seconds: float, draws: int) -> str:
    """What came of a check, in a few words."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    column = str(version.folder / COLUMN)
    command = [str(version.interpreter)]
    command += [column if part == COLUMN else part for part in CHECKS[check]]
    command += ["--count", str(draws)] if check == "draws" else []
    if "pytest" in command:
        command += ["-p", "no:cacheprovider", "--timeout", "900"]
    log = version.folder / f"{check}.log"
    try:
        with log.open("w") as out:
            subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=out,
                stderr=out,
                check=True,
                timeout=limit_seconds,
            )
    except subprocess.TimeoutExpired:
        return f"not done after {limit_seconds:.0f} s"
    except subprocess.CalledProcessError:
        return _counts(log) or "fails"
    return _counts(log) or "pass"


def _counts(log: Path) -> str:
    written = log.read_text(errors="replace").splitlines()
    lines = [line for line in written if re.search(r" in [\d.]+s|draws with differences", line)]
    kinds = "passed|failed|skipped|errors?|draws with differences|draws|of \\d+ rows not seen"
    return ", ".join(re.findall(rf"\d+ (?:{kinds})", lines[-1])) if lines else ""


def versions_of(version: Version) -> tuple[str, str]:
    code = "import sys, torch; print(sys.version.split()[0], torch.__version__)"
    reported = subprocess.run(
        [str(version.interpreter), "-c", code], capture_output=True, text=True, check=True
    )
    python, torch = reported.stdout.split()[-2:]
    return python, torch


def write() -> list[list[str]]:
    """Put the table of all that was ever run in these environments into the page; its cells."""
    rows = []
    for reported in sorted(REPOSITORY.glob("build/versions/*/results.json")):
        results = json.loads(reported.read_text())
        rows.append([results.pop("python"), results.pop("torch"), *map(results.get, CHECKS)])
    rows.sort(key=lambda row: [[int(n) for n in re.findall(r"\d+", one)] for one in row[:2]])
    cells = [[cell or "-" for cell in row] for row in rows]
    columns = {}
    for path in sorted(REPOSITORY.glob(f"build/versions/*/{COLUMN}")):
        about = json.loads(path.with_name("results.json").read_text())
        columns[f"torch {about['torch']}"] = json.loads(path.read_text())
    names = sorted(columns, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    differences = list(dict.fromkeys(row for one in columns.values() for row in one))
    shown = [[row, *(columns[name].get(row, "not run") for name in names)] for row in differences]
    SEEN.write_text(f"{ABOUT_SEEN}{_table(['difference from torch', *names], shown)}\n")
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    first = _table(["Python", "torch", *CHECKS], cells)
    PAGE.write_text(f"{text[:begin]}\n{first}\n{text[end:]}")
    return cells


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.on_versions", description=__doc__)
    parser.add_argument("--pythons", nargs="*", default=list(PYTHONS))
    parser.add_argument("--torches", nargs="*", default=list(torches()))
    parser.add_argument("--checks", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--draws", type=int, default=300, help="how many models and calls")
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit of one check")
    given = parser.parse_args()
    libraries = os.environ.get("LIBRARIES")
    for python, interpreter in interpreters().items():
        for torch in given.torches if python in given.pythons else ():
            version = Version(python, torch)
            reported = version.folder / "results.json"
            try:
                prepare(version, interpreter, Path(libraries) if libraries else None)
                results = json.loads(reported.read_text()) if reported.exists() else {}
                results["python"], results["torch"] = versions_of(version)
                for check in given.checks:
                    results[check] = run(version, check, given.seconds, given.draws)
                    print(python, torch, check, results[check], sep=" | ", flush=True)
            except subprocess.CalledProcessError as error:
                results = {"python": python, "torch": torch, "import": f"not installed: {error}"}
            reported.write_text(json.dumps(results))
    bad = re.compile("^-$|fail|error|not |[1-9][0-9]* draws with")
    return int(any(bad.search(cell) for row in write() for cell in row))


if __name__ == "__main__":
    sys.exit(main())
