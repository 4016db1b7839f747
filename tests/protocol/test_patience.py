"""How often the log is written again when no answer comes: by number, or for as long as the store
waits. Method: pauses that are noted and not made.
"""

from __future__ import annotations

import math

import pytest

from ckpt.commit.appender import PAUSE_SECONDS_MAX, Sources, checked_seconds, patience_for
from ckpt.world.base import SoloWorld
from storage.memory import MemoryStore
from storage.store import Patience
from storage.wrap import WrappedStore


class Patient(WrappedStore):
    """A store that repeats what fails for `patience.seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(MemoryStore())
        self._patience = Patience()
        self._patience.usual_seconds = seconds

    @property
    def patience(self) -> Patience:
        return self._patience


def tries_and_pauses(
    store: WrappedStore | MemoryStore, **changes: float
) -> tuple[int, list[float]]:
    pauses: list[float] = []
    bounds = {"tries_max": 3, "first_pause_seconds": 0.2, **changes}
    numbers = list(Sources(**bounds, pause=pauses.append).tries(store))  # type: ignore[arg-type]
    assert numbers == list(range(len(numbers)))
    return len(numbers), pauses


def test_without_patience_the_number_of_tries_is_the_bound() -> None:
    assert tries_and_pauses(MemoryStore()) == (3, [0.2, 0.4])
    assert tries_and_pauses(MemoryStore(), tries_max=1) == (1, [])


def test_pauses_double_up_to_a_limit() -> None:
    count, pauses = tries_and_pauses(MemoryStore(), tries_max=70)
    assert pauses[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    assert set(pauses[6:]) == {PAUSE_SECONDS_MAX} and count == 70


def test_with_patience_the_time_is_the_bound() -> None:
    """0.2 + 0.4 + ... + 3.2 is 6.2: the sixth pause would end after 12.6 seconds."""
    assert tries_and_pauses(Patient(12.0))[0] == 6
    assert tries_and_pauses(Patient(13.0)) == (7, [0.2, 0.4, 0.8, 1.6, 3.2, 6.4])
    assert tries_and_pauses(Patient(0.0)) == (1, [])


def test_other_ranks_know_that_this_one_waits_and_when_it_does_not_any_more() -> None:
    store = Patient(1000.0)
    heard: list[bool] = []
    store.patience.set(1000.0, heard.append)
    waiting = Sources(tries_max=1, pause=lambda seconds: None).tries(store)
    for number in waiting:
        assert heard == [True][:number]
        if number == 2:
            break
    waiting.close()  # type: ignore[attr-defined]
    assert heard == [True, False]
    for _ in Sources(tries_max=1, pause=lambda seconds: None).tries(store):
        break
    assert heard == [True, False]


def test_a_bound_holds_for_its_block_alone() -> None:
    store = Patient(7.0)
    with patience_for(store, SoloWorld(), 3.0):
        assert store.patience.seconds == 3.0
    assert store.patience.seconds == 7.0
    with pytest.raises(RuntimeError), patience_for(store, SoloWorld(), 3.0):
        raise RuntimeError
    assert store.patience.seconds == 7.0
    with patience_for(MemoryStore(), SoloWorld(), 3.0):
        assert MemoryStore().patience is None


@pytest.mark.parametrize("seconds", [-0.1, math.inf, math.nan, "3", None])
def test_seconds_that_are_no_time_are_refused(seconds: object) -> None:
    assert (checked_seconds(0), checked_seconds(2.5)) == (0.0, 2.5)
    with pytest.raises(ValueError, match="retry_seconds_max="):
        checked_seconds(seconds)  # type: ignore[arg-type]
