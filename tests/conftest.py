"""What every test shares: printed seeds, one thread, and how much of a test to run.

The default run takes a seeded sample of each large space; `--soak` takes all of it, under a new
seed.
"""

from __future__ import annotations

import gc
import os

# Before torch and numpy start their pools: tests run several ranks on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch asks for the name of each address that it connects to: a lost answer took five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import random
import secrets
import signal
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.ranks
from storage.url import _memory_buckets as memory_buckets
from tests.results import Counted, Run, append, this_run

# A fixed seed makes two runs of one commit the same run.
SEED_DEFAULT = 20261120


@dataclass(frozen=True)
class Scale:
    """How much of a large space this run looks at."""

    soak: bool

    def count(self, sample: int, full: int) -> int:
        """`sample` in the default run, `full` with --soak."""
        return full if self.soak else sample


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardpoint")
    group.addoption("--soak", action="store_true", help="full counts, and tests marked soak")
    group.addoption("--seed", help="a number; the printed seed of a failed run repeats it")
    group.addoption(
        "--device",
        metavar="TYPE",
        help="where tests marked gpu run: cuda, xpu, ...; cpu runs what can be run without a "
        "device; by default this machine's accelerator",
    )
    group.addoption(
        "--results", metavar="FILE", help="append what long tests count; docs/guarantee_counts.py"
    )
    group.addoption("--failures", metavar="FILE", help="append each failure when it happens")
    group.addoption("--cluster", action="store_true", help="tests on hosts in network namespaces")
    group.addoption("--judges", action="store_true", help="tests that other libraries wrote")
    group.addoption(
        "--ceph", metavar="URL", help="endpoint of a Ceph RADOS gateway to test against"
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # The processes of xdist take the seed of the one that started them: one run has one seed.
    chosen = getattr(config, "workerinput", {}).get("seed", config.getoption("seed"))
    if chosen is None:
        chosen = secrets.randbits(32) if config.getoption("soak") else SEED_DEFAULT
    config.stash[_SEED] = int(chosen)
    config.option.seed = str(chosen)
    gc.disable()  # until all tests are collected: nothing of that is garbage
    tests.ranks.ARE_LEFT_OUT = "not ranks" in config.option.markexpr
    if config.getoption("failures") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(config.getoption("failures")).resolve()))
    if config.getoption("results"):
        config.option.results = str(Path(config.getoption("results")).resolve())
        config.stash[_RUN] = this_run(_command(config), int(chosen))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of xdist: what a process that it starts is handed."""
    node.workerinput["seed"] = node.config.stash[_SEED]


def _command(config: pytest.Config) -> str:
    full = "make test-cluster" if config.getoption("cluster") else "make test"
    return "make soak" if config.getoption("soak") else full


def pytest_report_header(config: pytest.Config) -> str:
    tier = "soak" if config.getoption("soak") else "sample"
    return f"shardpoint: seed {config.stash[_SEED]}, {tier} counts, torch {torch.__version__}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skipped = {
        "soak": (config.getoption("soak"), "full counts; run with --soak"),
        "ceph": (config.getoption("ceph"), "needs a Ceph gateway; run `make test-ceph`"),
        "judges": (config.getoption("judges"), "run `make judges`"),
        "cluster": (config.getoption("cluster"), "needs root; run `make test-cluster`"),
        "gpu": (accelerator_of(config), "needs an accelerator; --device cpu runs it without"),
    }
    for item in items:
        for marker, (wanted, reason) in skipped.items():
            if item.get_closest_marker(marker) and not wanted:
                item.add_marker(pytest.mark.skip(reason=reason))
    if not config.getoption("soak"):
        for item in left_out(items, config.stash[_SEED]):
            item.add_marker(pytest.mark.skip(reason=skipped["soak"][1]))


def pytest_collection_finish() -> None:
    # Full collections, which run often, would look through all of torch and thousands of tests.
    gc.enable()
    gc.collect()
    gc.freeze()


def left_out(items: Sequence[pytest.Item], seed: int) -> Iterator[pytest.Item]:
    """The cases of tests marked `sampled` that are not in the sample of this seed."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, those in cases.items():
        marker = those[0].get_closest_marker("sampled")
        assert marker is not None
        count = min(marker.args[0], len(those))  # fewer where cases are asked for by name
        chosen = random.Random(f"{seed}:{name}").sample(range(len(those)), count)
        yield from (item for index, item in enumerate(those) if index not in chosen)


def accelerator_of(config: pytest.Config) -> str:
    """Where tests marked gpu run, as torch names it; empty for nowhere."""
    chosen = config.getoption("device")
    if chosen is not None:
        return str(chosen)
    own = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if own is None else own.type


@pytest.fixture
def accelerator(pytestconfig: pytest.Config) -> str:
    """Where tests marked gpu run."""
    return accelerator_of(pytestconfig)


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, accelerator: str) -> str:
    """The CPU, and the accelerator for `make test-gpu`: the same test on both."""
    return "cpu" if request.param == "cpu" else accelerator


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> Scale:
    """How much to run: `scale.count(sample, full)`."""
    return Scale(soak=bool(pytestconfig.getoption("soak")))


@pytest.fixture(autouse=True)
def _memory_roots_end_with_their_test() -> Iterator[None]:
    """`memory://` roots live as long as their process: thousands of tests would fill gigabytes."""
    before = set(memory_buckets)
    yield
    for name in set(memory_buckets) - before:
        del memory_buckets[name]


@pytest.fixture(autouse=True)
def _signals_end_with_their_test() -> Iterator[None]:
    """A Checkpointer that a test leaves open catches signals: a second order to end would kill."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _nobody_loses_power(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process a sync asks only whether the file is open: thousands wait for the disk. Ranks
    that are processes, programs and tests marked `syncs` do sync.
    """
    if request.node.get_closest_marker("syncs") is None:
        monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture(autouse=True)
def _small_states_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of tests are small, and ranks that are threads pass their blocks on all the same."""
    monkeypatch.setattr("ckpt.loading.exchange.AGAIN_NBYTES_MAX", 0)


@pytest.fixture
def seed(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> int:
    """A number that differs from test to test and repeats from run to run."""
    return random.Random(f"{pytestconfig.stash[_SEED]}:{request.node.nodeid}").getrandbits(32)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A generator seeded with `seed`."""
    return random.Random(seed)


class Failures:
    """Appends each failure to a file: who ends a run in the middle sees them there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line as in pytest's summary, and the text."""
        if report.failed:
            with self._path.open("a") as file:
                print(f"FAILED {report.nodeid}\n{report.longreprtext}\n", file=file, flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_OUTCOME] = report.outcome
    return report


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Iterator[Counted]:
    """Takes what a long test counts: `counted(saves=203, lost=0)`. See tests/results.py."""
    counts = Counted()
    yield counts
    outcome = request.node.stash.get(_OUTCOME, "skipped")
    if outcome != "skipped" and _RUN in request.config.stash:
        path = Path(request.config.getoption("results"))
        test = request.node.nodeid
        append(path, test, outcome == "passed", counts, request.config.stash[_RUN])


@pytest.fixture
def ceph_url(pytestconfig: pytest.Config) -> str:
    """Endpoint of the gateway that --ceph names; for tests marked ceph."""
    return str(pytestconfig.getoption("ceph"))


_SEED = pytest.StashKey[int]()
_RUN = pytest.StashKey[Run]()
_OUTCOME = pytest.StashKey[str]()  # of the test itself, without its fixtures
