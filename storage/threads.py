"""Work on many items by threads: with a bound, and with one rule for errors.

What fails first is raised. What has not begun by then never begins, and what has is waited for: no
thread uses anything any more when the caller continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from queue import Empty
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int,
    name: str,
    ahead: int = 0,
) -> Generator[Result, None, None]:
    """`work(item)` of each item, in the order of the items, by up to `threads` threads of a `name`.

    Items are taken as they are needed: `ahead` of them, by default as many as there are threads,
    are under way before the first result is waited for. A failure is raised in its turn.
    """
    waiting: deque[Future[Result]] = deque()
    with _pool(threads, name) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= (ahead or threads):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def as_done(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, name: str
) -> Iterator[Result]:
    """`work(item)` of each item as it is done, by up to `threads` threads of a `name`; without
    threads by the caller's.

    An item is taken when all threads are busy, and waits for the first that is free: one that
    stalls holds no other. A failure is raised as soon as it is seen.
    """
    if not threads:
        yield from map(work, items)
        return
    running: set[Future[Result]] = set()
    with _pool(threads, name) as pool:
        for item in items:
            is_full = len(running) >= threads
            done, running = wait(running, None if is_full else 0, FIRST_COMPLETED)
            for future in done:
                yield future.result()
            running.add(pool.submit(work, item))
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


class Pool(ThreadPoolExecutor):
    """A pool that needs no thread: where none can be started, `submit` does the work itself.

    Python 3.12.0 to 3.12.2 start no thread once the main one has ended, and a save in the
    background may still run then.
    """

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """As of any pool. The work may use other pools."""
        future = super().submit(fn, *args, **kwargs)
        if not self._threads:  # else they take what is in the queue
            with suppress(Empty):
                self._work_queue.get_nowait().run()
        return future

    def _adjust_thread_count(self) -> None:
        # No work is done here: `submit` holds a lock that all pools of the process share.
        with suppress(RuntimeError):
            super()._adjust_thread_count()


@contextmanager
def _pool(threads: int, name: str) -> Iterator[Pool]:
    pool = Pool(threads, name)  # starts no thread that it does not need
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
