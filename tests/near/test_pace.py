"""The rate of copies follows the steps of the training.

Method: a simulated training in simulated time. A step takes one second, and longer by the share of
a link of known speed that copies take of it beyond what the training leaves free.
"""

from __future__ import annotations

import pytest

from ckpt.near.peers import RATE_MAX, RATE_MIN, SEND_SECONDS_MAX, SHARE_MAX, CopyPace

MIB = 1 << 20


class Simulated:
    """A training that needs `used` of a link of `link` bytes per second, and saves every `every`
    steps with copies of `nbytes`.
    """

    def __init__(self, link: float, used: float, every: int, nbytes: int) -> None:
        self.pace = CopyPace()
        self.link, self.used, self.every, self.nbytes = link, used, every, nbytes
        self.now = 0.0
        self.left = 0
        self.seconds: list[float] = []
        self.lags: list[int] = []
        self._begun = 0

    def run(self, steps: int) -> None:
        saved = self.now
        for step in range(steps):
            if step % self.every == 0:
                if step:
                    self.pace.saved(self.nbytes, self.now - saved)
                assert not self.left or step < 5 * self.every, "copies take more than the period"
                saved, self.left, self._begun = self.now, self.nbytes, step
            took = self._step()
            self.now += took
            self.seconds.append(took)
            self.pace.stepped(took)

    def _step(self) -> float:
        """Copies get what they ask for, up to the link, and the training what is left of it."""
        if not self.left:
            return 1.0
        speed = min(self.pace.rate, self.link)
        took, spent = 1.0 + max(0.0, (speed + self.used) / self.link - 1.0), 0.0
        while self.left and spent < took:
            part = min(MIB, self.left)
            spent += max(self.pace.wait_seconds(part, self.now + spent), part / self.link)
            self.left -= part
            if not self.left:
                self.lags.append(len(self.seconds) - self._begun + 1)
        return took


def test_a_free_network_is_used_at_full_speed() -> None:
    training = Simulated(link=100 * MIB, used=0, every=20, nbytes=500 * MIB)
    training.run(400)
    assert max(training.seconds) == 1.0
    assert training.pace.rate == RATE_MAX and max(training.lags) <= 6


def test_copies_give_way_to_a_training_that_needs_the_network() -> None:
    training = Simulated(link=100 * MIB, used=80 * MIB, every=20, nbytes=200 * MIB)
    training.run(2000)
    first, last = training.seconds[:20], training.seconds[-400:]
    assert max(first) > 1.5
    assert sum(last) / len(last) < 1.03
    assert training.pace.rate < 40 * MIB
    # They are still made well before the next ones.
    assert max(training.lags[-20:]) <= SHARE_MAX * 20 + 1


def test_copies_are_made_within_the_period_whatever_they_cost() -> None:
    training = Simulated(link=100 * MIB, used=100 * MIB, every=10, nbytes=400 * MIB)
    training.run(1000)
    assert max(training.lags[-20:]) <= 10
    assert training.pace.rate >= 400 * MIB / (SHARE_MAX * 15)


def test_the_rate_rises_again_when_the_network_is_free() -> None:
    training = Simulated(link=100 * MIB, used=80 * MIB, every=20, nbytes=200 * MIB)
    training.run(1000)
    slow = training.pace.rate
    training.used = 0
    training.run(1000)
    assert training.pace.rate > 5 * slow


def test_copies_of_a_long_period_are_made_before_they_are_given_up() -> None:
    pace, nbytes = CopyPace(), 64 << 30
    for _ in range(10):
        pace.stepped(1.0)
    pace.saved(nbytes, 3600.0)
    for _ in range(200):
        pace.wait_seconds(MIB, 0.0)
        pace.stepped(9.0)
    assert nbytes / pace.rate < 0.7 * SEND_SECONDS_MAX


def test_nothing_is_concluded_from_a_few_steps_or_from_steps_with_copies_alone() -> None:
    pace = CopyPace()
    for _ in range(50):
        assert pace.wait_seconds(MIB, 0.0) < 1.0
        pace.stepped(5.0)
    assert pace.rate == RATE_MAX
    pace.saved(1, 1e9)
    assert pace.rate == RATE_MAX


def test_waits_add_up_to_the_rate() -> None:
    pace = CopyPace()
    pace.rate = 10.0 * MIB
    waits = [pace.wait_seconds(MIB, 1.0) for _ in range(11)]
    assert waits == pytest.approx([n / 10 for n in range(11)])
    assert pace.wait_seconds(MIB, 100.0) == 0.0
    assert pace.rate >= RATE_MIN
