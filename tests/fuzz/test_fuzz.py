"""Every reader of foreign bytes, on kept and on freshly mutated inputs.

Method: an input is read or refused with a documented error, within 2 seconds of a CPU and 64 MiB
more than its own length. `python -m tests.fuzz` searches with coverage for inputs that break this;
what it has found, and what reaches the most code, is kept in `corpus`.
"""

from __future__ import annotations

import logging
import mmap
import random
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Scale
from tests.fuzz import bounds
from tests.fuzz.bounds import NBYTES_MAX, within_bounds, within_rough_bounds
from tests.fuzz.mutations import mutated
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS, all_targets
from tests.results import Counted

pytestmark = pytest.mark.long

CORPUS = Path(__file__).parent / "corpus"


def kept(name: str) -> list[bytes]:
    """The inputs of one target that are in the tree."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # what lies in a tier and does not count is logged


READERS = [target.name for target in TARGETS]
FIELDS = "fields of a manifest"


@pytest.mark.usefixtures("traced", "quiet")
@pytest.mark.timeout(3600)  # in full
@pytest.mark.parametrize("reader", [*READERS, FIELDS])
def test_mutated_inputs_are_read_or_refused(
    reader: str, scale: Scale, pytestconfig: pytest.Config, counted: Counted
) -> None:
    seed = pytestconfig.getoption("seed")
    every = all_targets()
    for name in [reader] if reader != FIELDS else [one for one in every if one not in READERS]:
        target = every[name]
        samples = target.samples()
        assert samples and all(within_bounds(target, sample) for sample in samples), name
        inputs = samples + kept(name)
        rng = random.Random(f"{seed}:{name}")
        for _ in range(scale.count(40, 20_000)):
            data = mutated(rng.choice(inputs), inputs, rng)
            try:
                counted(inputs=1, taken=int(within_bounds(target, data)))
            except Exception as error:
                raise AssertionError(f"{name}: {data!r}") from error
        counted(readers=1)


@pytest.mark.usefixtures("traced", "quiet")
def test_kept_inputs_are_read_or_refused() -> None:
    targets = all_targets()
    for folder in CORPUS.iterdir():
        for data in kept(folder.name):
            within_bounds(targets[folder.name], data)


def test_the_corpus_is_small_and_belongs_to_targets() -> None:
    names = {folder.name for folder in CORPUS.iterdir()}
    assert names <= {target.name for target in TARGETS} | set(all_targets())
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 1 << 20


def _greedy(data: bytes) -> None:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    np.ones(peak - resident + NBYTES_MAX + (8 << 20), np.uint8)


def _slow(data: bytes) -> None:
    until = time.thread_time() + bounds.SECONDS_MAX
    while time.thread_time() < until:
        pass


def _wrong(data: bytes) -> None:
    raise IndexError("no error that is documented")


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("read", "error"), [(_greedy, "bytes"), (_slow, " s"), (_wrong, "no error")]
)
def test_a_reader_beyond_its_bounds_is_seen(
    read: Callable[[bytes], None], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if read is _slow:
        monkeypatch.setattr(bounds, "SECONDS_MAX", 0.3)
    for check in (within_bounds, within_rough_bounds):
        with pytest.raises((AssertionError, IndexError), match=error):
            check(Target("planted", read, list), b"data")
