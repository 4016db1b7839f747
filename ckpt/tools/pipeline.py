"""Work on many items by a pool of threads, with a bound on how far it runs ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    pool: ThreadPoolExecutor,
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    in_flight_max: int,
) -> Iterator[Result]:
    """`work(item)` for each item, in the order of the items, `in_flight_max` of them at once.

    Items are taken only as they are needed. The first failure is raised in its turn; what has not
    begun by then is cancelled, and what has is waited for.
    """
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= in_flight_max:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        # Waits, and drops later failures: the first one is raised, and threads must have ended
        # before the caller closes what they use.
        for future in waiting:
            if not future.cancelled():
                future.exception()
