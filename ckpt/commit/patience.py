"""How long a save waits for a store that is away.

A store that is away comes back after a second (a connection that broke), half a minute (a switch, a
fail-over) or ten minutes (an incident). A save in the background costs a training nothing while it
waits, so it waits for long; only a newer save that has to wait for it makes it hurry. A blocking
save holds up the training and a person or script behind it, so it waits for less.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt.commit.numbers import plain_int
from ckpt.world.base import World
from storage import Store

BACKGROUND_SECONDS = 600.0
BLOCKING_SECONDS = 120.0
PAUSE_SECONDS_MAX = 10.0
HURRIED_SECONDS = 10.0  # throttling and broken connections end by then, outages do not


def checked_seconds(seconds: float) -> float:
    """`seconds`, if requests can be repeated for so long. Raises ValueError."""
    if not (isinstance(plain_int(seconds), int | float) and 0.0 <= seconds < math.inf):
        raise ValueError(f"retry_seconds_max={seconds!r}: expected a number of at least 0")
    return float(seconds)


def tries(
    store: Store, *, tries_max: int, first_pause_seconds: float, pause: Callable[[float], None]
) -> Iterator[int]:
    """Numbers of tries, with pauses between, for what the store itself must not repeat: a write
    whose answer was lost.

    As long as `store` repeats what fails; `tries_max` where it repeats nothing.
    """
    patience = store.patience
    began, waited, is_waiting = time.monotonic(), 0.0, False
    try:
        for number in itertools.count():
            if number:
                # The exponent is bounded because a float overflows at 1024, which hours of tries
                # reach.
                seconds = min(first_pause_seconds * 2.0 ** min(number - 1, 64), PAUSE_SECONDS_MAX)
                # The pauses count by themselves as well: a caller's `pause` need not take real
                # time.
                waited = max(time.monotonic() - began, waited + seconds)
                if number >= tries_max if patience is None else waited >= patience.seconds:
                    return
                if patience is not None:
                    if not is_waiting:
                        is_waiting = True
                        patience.begin(time.monotonic())
                    text = f"{store.url}: no answer to a write of the log"
                    patience.note(text, patience.seconds, time.monotonic())
                pause(seconds)
            yield number
    finally:
        if patience is not None and is_waiting:
            patience.end(time.monotonic(), is_answered=False)


@contextmanager
def patience_for(store: Store, world: World, seconds: float) -> Iterator[None]:
    """Requests to `store` that fail are repeated for up to `seconds` each meanwhile, and the other
    ranks know that this one waits.
    """
    patience = store.patience
    if patience is None:
        yield
        return
    patience.who = f"rank {world.rank}" if world.size > 1 else ""
    patience.set(seconds, world.report_storage_wait)
    try:
        yield
    finally:
        patience.set(None)
