"""Every reader of foreign bytes, on kept and on freshly mutated inputs.

Method: an input is read or refused with a documented error, and takes at most 64 MiB more than its
own length. `python -m tests.fuzz` searches with coverage for inputs that break this; what it has
found, and what reaches the most code, is kept in `corpus`.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Scale
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS, Target, all_targets
from tests.results import Counted

CORPUS = Path(__file__).parent / "corpus"
NBYTES_MAX = 64 << 20


def kept(name: str) -> list[bytes]:
    """The inputs of one target that are in the tree."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def within_bounds(target: Target, data: bytes) -> bool:
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    taken = target.try_(data)
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < NBYTES_MAX + 8 * len(data), f"{target.name}: {peak} bytes for {data!r:.200}"
    return taken


@pytest.mark.usefixtures("traced")
def test_mutated_inputs_are_read_or_refused(
    scale: Scale, pytestconfig: pytest.Config, counted: Counted
) -> None:
    seed = pytestconfig.getoption("seed")
    for name, target in all_targets().items():
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


@pytest.mark.usefixtures("traced")
def test_kept_inputs_are_read_or_refused() -> None:
    targets = all_targets()
    for folder in CORPUS.iterdir():
        for data in kept(folder.name):
            within_bounds(targets[folder.name], data)


def test_the_corpus_is_small_and_belongs_to_targets() -> None:
    names = {folder.name for folder in CORPUS.iterdir()}
    assert names <= {target.name for target in TARGETS} | set(all_targets())
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 1 << 20
