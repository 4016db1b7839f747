"""Mutation testing of a few packages: `python -m tests.mutation --count 60 ckpt/commit`.

Draws COUNT changes of each package (`changes.py`), runs for each the fast tests that reach the
changed line until one fails, and prints the score and the changes that no test noticed. One run
over all tests comes first, to learn which lines each of them reaches. Every mutant runs in a fork
of one process that has imported everything, where the code of one function is exchanged: nothing is
written to the sources, and one mutant costs about a second.

What was found is kept in FOLDER, so a run that was interrupted, or one with a higher count or
budget, continues where the last one ended, as long as the sources of the packages are the same.
`--again` repeats the mutants that survived, for tests that were added since.

Tests that start processes are left out: the change would not be in those. A survivor may be known
to them, or change nothing that anybody can see; look at each.
"""

from __future__ import annotations

import argparse
import collections
import gc
import hashlib
import importlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutation.changes import FunctionKey, Mutant, code_of, mutants_of

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = "not ranks and not server and not soak and not ceph and not gpu"
MAPPED_AT_ONCE = 100  # tests between two savings of the map
MEMORY_BYTES_MAX = 16 << 30  # address space of a mutant that allocates without end
# A mutant that runs on: a deadlock is seen by the clock, a loop by its processor time.
HANGS_SECONDS = 120.0


class Reach:
    """Which lines each test runs, and for how long; kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        kept = json.loads(path.read_text()) if path.exists() else {"seconds": {}, "lines": {}}
        self.seconds: dict[str, float] = kept["seconds"]
        self.lines: dict[str, dict[str, list[int]]] = kept["lines"]  # test: file: lines

    def keep(self) -> None:
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps({"seconds": self.seconds, "lines": self.lines}))
        beside.replace(self.path)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that run a line of the statement, quickest first."""
        statement = range(mutant.first, mutant.last + 1)
        reaching = [
            test
            for test, files in self.lines.items()
            if not set(statement).isdisjoint(files.get(mutant.path, ()))
        ]
        return sorted(reaching, key=lambda test: (self.seconds[test], test))


class Mutating:
    """A pytest plugin that runs mutants in place of the tests that were collected."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.packages: list[str] = options.packages
        self.folder = Path(options.folder) / _digest(self.packages)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.reach = Reach(self.folder / "reach.json")
        self.items: dict[str, pytest.Item] = {}
        self.functions: dict[tuple[str, FunctionKey], list[FunctionType]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for path in _sources(self.packages):
            importlib.import_module(path.removesuffix(".py").replace("/", "."))
        self.functions = _functions_of(self.packages)
        gc.collect()
        gc.freeze()
        self.learn()
        draw = _drawn(self.packages, self.options.count, self.options.seed)
        self.report(draw, self.run(draw))
        return True

    def learn(self) -> None:
        """Run the tests that the map does not know."""
        unknown = [test for test in self.items if test not in self.reach.seconds]
        for first in range(0, len(unknown), MAPPED_AT_ONCE):
            some = unknown[first : first + MAPPED_AT_ONCE]
            answer = self.folder / "mapped.json"
            answer.unlink(missing_ok=True)
            self._in_fork(lambda some=some, answer=answer: self._map(some, answer), 3600.0, None)
            learned = json.loads(answer.read_text())
            self.reach.seconds.update(learned["seconds"])
            self.reach.lines.update(learned["lines"])
            self.reach.keep()
            for test in learned["failed"]:
                print(f"left out, fails without a change: {test}", flush=True)
            print(f"mapped {first + len(some)} of {len(unknown)} tests", flush=True)

    def _map(self, tests: Sequence[str], answer: Path) -> int:
        import coverage

        include = [f"{ROOT / package}/*" for package in self.packages]
        tracer = coverage.Coverage(data_file=None, config_file=False, include=include)
        outcomes = _Outcomes()
        _register(self.items[tests[0]], outcomes)
        tracer.start()
        self._play(tests, tracer.switch_context)
        tracer.stop()
        data, lines = tracer.get_data(), collections.defaultdict(dict)  # type: ignore[var-annotated]
        for path in data.measured_files():
            for line, contexts in data.contexts_by_lineno(path).items():
                for test in contexts:
                    if test and test not in outcomes.failed:
                        name = str(Path(path).relative_to(ROOT))
                        lines[test].setdefault(name, []).append(line)
        failed = sorted(outcomes.failed)
        # Those that failed are run again by the next call: the machine may have been too busy.
        seconds = {test: outcomes.seconds[test] for test in tests if test not in failed}
        answer.write_text(json.dumps({"seconds": seconds, "lines": lines, "failed": failed}))
        return 0

    def run(self, draw: Sequence[Mutant]) -> dict[str, dict[str, Any]]:
        """The outcome of every mutant of the draw, from the file where it is known."""
        path = self.folder / "outcomes.jsonl"
        known: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                outcome = json.loads(line)
                known[outcome["mutant"]] = outcome
        for mutant in draw:
            name = f"{mutant.path}#{mutant.number}"
            outcome = known.get(name)
            tests, left = self._affordable(mutant)
            if outcome is not None and (outcome["by"] or not self._is_due(outcome, left)):
                continue
            began = time.monotonic()
            known[name] = outcome = {
                "mutant": name,
                "by": self._killer(mutant, tests),
                "tests": len(tests),
                "left": left,
            }
            with path.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
            by = outcome["by"] or f"SURVIVED {len(tests)} tests, {left} not run"
            print(f"{time.monotonic() - began:5.1f} s  {name} {by}", flush=True)
        return {name: known[name] for name in (f"{m.path}#{m.number}" for m in draw)}

    def _is_due(self, outcome: dict[str, Any], left: int) -> bool:
        return self.options.again or left < outcome["left"]

    def _affordable(self, mutant: Mutant) -> tuple[list[str], int]:
        """The tests to run, and how many more there are."""
        tests = [test for test in self.reach.tests_of(mutant) if test in self.items]
        spent, some = 0.0, []
        for test in tests:
            spent += self.reach.seconds[test]
            if some and spent > self.options.budget:
                break
            some.append(test)
        return some, len(tests) - len(some)

    def _killer(self, mutant: Mutant, tests: Sequence[str]) -> str | None:
        """What noticed the change: a test, the clock or the end of the process. None: nothing."""
        if not tests:
            return None
        try:
            code = code_of(ROOT, mutant)
        except SyntaxError:
            return "the compiler"
        answer = self.folder / "killer.txt"
        answer.unlink(missing_ok=True)
        expected = sum(self.reach.seconds[test] for test in tests)
        ended = self._in_fork(
            lambda: self._try(mutant, code, tests, answer),
            HANGS_SECONDS + 10 * expected,
            int(20 + 4 * expected),
        )
        if answer.exists():
            return answer.read_text()
        return None if ended == 0 else f"the end of the process: {ended}"

    def _try(self, mutant: Mutant, code: CodeType, tests: Sequence[str], answer: Path) -> int:
        for function in self.functions[mutant.path, mutant.function]:
            try:
                function.__code__ = code
            except ValueError:  # it closes over other names than the function does
                answer.write_text("the compiler")
                return 1

        def failed(test: str) -> None:
            answer.write_text(test)
            os._exit(1)

        _register(self.items[tests[0]], _Outcomes(failed))
        self._play(tests, lambda test: None)
        return 0

    def _play(self, tests: Sequence[str], before: Callable[[str], None]) -> None:
        items = [self.items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            before(item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _in_fork(self, work: Callable[[], int], seconds: float, cpu_seconds: int | None) -> int:
        return _in_fork(work, self.folder / "output.txt", seconds, cpu_seconds)

    def report(self, draw: Sequence[Mutant], outcomes: dict[str, dict[str, Any]]) -> None:
        for package in self.packages:
            of_it = [m for m in draw if m.path.startswith(package)]
            alive = [m for m in of_it if not outcomes[f"{m.path}#{m.number}"]["by"]]
            for mutant in alive:
                outcome = outcomes[f"{mutant.path}#{mutant.number}"]
                print(f"\n{mutant}\n  {outcome['tests']} tests, {outcome['left']} not run")
            killed = len(of_it) - len(alive)
            print(f"\n{package}: {killed} of {len(of_it)} killed, seed {self.options.seed}")


class _Outcomes:
    """Collects how long tests take and which fail, or calls `failed` at the first failure."""

    def __init__(self, failed: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.failed: set[str] = set()
        self._failed = failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)
            if self._failed is not None:
                self._failed(report.nodeid)


def _register(item: pytest.Item, plugin: _Outcomes) -> None:
    manager = item.config.pluginmanager
    manager.unregister(manager.get_plugin("terminalreporter"))
    manager.register(plugin)


def _in_fork(
    work: Callable[[], int], output: Path, seconds_max: float, cpu_seconds_max: int | None
) -> int:
    """The exit status of a fork of this process that runs `work`; 9, SIGKILL's, when it takes
    longer.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            os.setsid()
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if cpu_seconds_max is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds_max, cpu_seconds_max))
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
            status = work()
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds_max
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)  # it, and what it started: the id is its own until it is reaped
    return os.waitpid(pid, 0)[1]


def _sources(packages: Iterable[str]) -> list[str]:
    paths = [path for package in packages for path in sorted((ROOT / package).glob("*.py"))]
    return [str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"]


def _digest(packages: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in _sources(packages):
        digest.update(path.encode() + (ROOT / path).read_bytes())
    return digest.hexdigest()[:12]


def _functions_of(packages: Sequence[str]) -> dict[tuple[str, FunctionKey], list[FunctionType]]:
    """The function objects of this process by where they were defined."""
    paths = {str(ROOT / path): path for path in _sources(packages)}
    functions = collections.defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename in paths:
            code = thing.__code__
            key = paths[code.co_filename], (code.co_name, code.co_firstlineno)
            functions[key].append(thing)
    return functions


def _drawn(packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of each package. A higher count adds to those of a lower one."""
    drawn = []
    for package in packages:
        every = [mutant for path in _sources([package]) for mutant in mutants_of(ROOT, path)]
        random.Random(f"{seed}:{package}").shuffle(every)
        print(f"{package}: {min(count, len(every))} of {len(every)} mutants", flush=True)
        drawn += every[:count]
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("packages", nargs="+", help="folders with sources, such as ckpt/commit")
    parser.add_argument("--count", type=int, default=60, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", nargs="+", default=["tests"], help="where the tests are")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests per mutant")
    parser.add_argument("--again", action="store_true", help="repeat those that survived")
    parser.add_argument("--folder", default=str(ROOT / ".mutants"), help="where to keep outcomes")
    options = parser.parse_args()
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", LEFT_OUT]
    arguments += ["--basetemp", str(Path(options.folder).absolute() / "tmp"), "-s"]
    return int(pytest.main([*arguments, *options.tests], plugins=[Mutating(options)]))


if __name__ == "__main__":
    sys.exit(main())
