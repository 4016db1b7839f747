"""When and how often a failed request is repeated: nothing else in the library repeats requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeVar, cast

from storage.errors import KeyExistsError, KeyNotFoundError, OutcomeUnknownError, TransientError
from storage.store import (
    ExclusiveCreate,
    JointWriter,
    ObjectInfo,
    ObjectWriter,
    Patience,
    Store,
)
from storage.wrap import WrappedStore

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class RetryPolicy:
    """Attempts within `deadline_seconds`, with growing random pauses between.

    Time bounds them and not their number, unless `attempts_max` is given: a network that is away
    comes back after seconds or minutes. `patience` may set another bound meanwhile. The pause
    before attempt n+1 is uniform between 0 and min(pause_max, pause_first * 2**(n-1)), so that many
    ranks that failed together do not come back together. No attempt starts after the deadline; one
    that runs is not interrupted. `clock`, `sleep` and `uniform` are there for tests.
    """

    attempts_max: int | None = None
    deadline_seconds: float = 120.0
    pause_first_seconds: float = 0.2
    pause_max_seconds: float = 10.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] | None = None
    uniform: Callable[[float, float], float] = random.uniform
    patience: Patience = field(default_factory=Patience, compare=False)

    def __post_init__(self) -> None:
        if self.attempts_max is not None and self.attempts_max < 1:
            raise ValueError(f"attempts_max={self.attempts_max!r}: expected at least 1, or None")
        self.patience.usual_seconds = self.deadline_seconds

    def run(self, attempt: Callable[[], T]) -> T:
        """The first result that is not a TransientError, or the last TransientError."""
        with Trial(self) as trial:
            while True:
                try:
                    return trial.answered(attempt())
                except TransientError as error:
                    (self.sleep or self.patience.sleep)(trial.pause_after(error))

    async def run_async(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """`run` on an event loop, which does other things during the pauses."""
        with Trial(self) as trial:
            while True:
                try:
                    return trial.answered(await attempt())
                except TransientError as error:
                    await asyncio.sleep(trial.pause_after(error))


class Trial:
    """One operation, repeated until it is answered or has failed for too long."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._started = policy.clock()
        self._number = 0
        self._is_waiting = self._is_answered = False

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        # In `__exit__`, so that a wait ends as well where the attempt raised another error.
        if self._is_waiting:
            self._policy.patience.end(self._policy.clock(), is_answered=self._is_answered)

    def answered(self, result: T) -> T:
        """It was answered; `result` itself."""
        self._is_answered = True
        return result

    def pause_after(self, error: TransientError) -> float:
        """Seconds until the next attempt. Raises `error` when there is none."""
        policy = self._policy
        self._number += 1
        # 2.0**1024 would overflow, after a thousand tries of a store that is away for hours.
        pause_max = policy.pause_first_seconds * 2.0 ** min(self._number - 1, 64)
        pause = policy.uniform(0.0, min(policy.pause_max_seconds, pause_max))
        now, limit = policy.clock(), policy.patience.seconds
        spent = now - self._started
        if self._number == policy.attempts_max or spent + pause >= limit:
            # The same object: its class and its cause are what handlers look at.
            error.args = (f"{error} (gave up: attempt {self._number}, after {spent:.1f} s)",)
            raise error
        if not self._is_waiting:
            self._is_waiting = True
            policy.patience.begin(now)
        policy.patience.note(error, limit, now)
        policy.patience.count()
        return pause


def run_publishing(
    policy: RetryPolicy, send: Callable[[], None], is_ours: Callable[[], bool]
) -> None:
    """Repeat `send`, which publishes an object, until its outcome is known.

    A request that is refused, because the object exists or the upload is gone, may have been
    carried out: by an earlier try whose answer was lost, or by a server or proxy that has repeated
    it. `is_ours` then decides whether the object is the one that we sent. Raises
    OutcomeUnknownError when no attempt was answered.
    """

    def attempt() -> None:
        try:
            send()
        except (KeyExistsError, KeyNotFoundError):
            if not is_ours():
                raise

    # TransientError says that nothing happened, and nobody knows that after lost answers.
    try:
        policy.run(attempt)
    except TransientError as error:
        raise OutcomeUnknownError(f"{error}; the object may exist") from error


NO_RETRY = RetryPolicy(attempts_max=1)


class _RetryingJointWriter(JointWriter):
    def __init__(self, inner: JointWriter, policy: RetryPolicy) -> None:
        self.receipts = inner.receipts
        self._inner = inner
        self._policy = policy

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._policy.run(lambda: self._inner.write_part(index, buffers))

    def close(self) -> None:
        self._inner.close()


def _repeated(method: F) -> F:
    """The same method of the store within, repeated as the policy says."""
    name = method.__name__

    @wraps(method, updated=())  # not that it is abstract
    def call(store: RetryingStore, *args: Any, **named: Any) -> Any:
        return store._policy.run(partial(getattr(store.inner, name), *args, **named))

    return cast(F, call)


class RetryingStore(WrappedStore):
    """`inner`, with every operation repeated that failed with a TransientError.

    A TransientError says that nothing happened, so that repeating is right for every operation,
    `put_if_absent` and parts of an object included. Other errors pass through at once, above all
    OutcomeUnknownError, which only a caller can settle.
    """

    def __init__(self, inner: Store, policy: RetryPolicy) -> None:
        super().__init__(inner)
        self._policy = policy

    @property
    def retries(self) -> int:
        return self._policy.patience.repeated

    @property
    def patience(self) -> Patience:
        return self._policy.patience

    @property
    def exclusive_create(self) -> ExclusiveCreate:  # type: ignore[override]
        return self._policy.run(lambda: self.inner.exclusive_create)  # may have to be proved

    get = _repeated(Store.get)
    get_bounded = _repeated(Store.get_bounded)
    get_into = _repeated(Store.get_into)
    get_direct_into = _repeated(Store.get_direct_into)
    is_cold = _repeated(Store.is_cold)
    begin_joint = _repeated(Store.begin_joint)
    put_if_absent = _repeated(Store.put_if_absent)
    info = _repeated(Store.info)
    delete = _repeated(Store.delete)
    abort_unfinished = _repeated(Store.abort_unfinished)

    def create(
        self, key: str, nbytes: int, *, part_nbytes: int, **how: bool
    ) -> AbstractContextManager[ObjectWriter]:
        begin = partial(self.inner.create, key, nbytes, part_nbytes=part_nbytes, **how)
        return _RetryingWriter(begin, part_nbytes, self._policy)

    def joint(self, key: str, nbytes: int, *, part_nbytes: int, token: str) -> JointWriter:
        inner = self.inner.joint(key, nbytes, part_nbytes=part_nbytes, token=token)
        return _RetryingJointWriter(inner, self._policy)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Resumes after the last object seen; every step has attempts and a deadline of its own."""
        listing: Iterator[ObjectInfo] | None = None

        def step() -> ObjectInfo | None:
            nonlocal listing
            if listing is None:
                listing = self.inner.list(prefix, after=after)
            try:
                return next(listing, None)
            except TransientError:
                listing = None  # a generator that raised cannot be resumed
                raise

        while (entry := self._policy.run(step)) is not None:
            after = entry.key
            yield entry

    def sync(self, keys: Iterable[str]) -> None:
        wanted = tuple(keys)  # a generator would be empty at the second attempt
        self._policy.run(lambda: self.inner.sync(wanted))


class _RetryingWriter(ObjectWriter):
    """Repeats the beginning and the parts. Only the back-end can decide whether to repeat
    publishing.
    """

    def __init__(
        self,
        begin: Callable[[], AbstractContextManager[ObjectWriter]],
        part_nbytes: int,
        policy: RetryPolicy,
    ) -> None:
        self.part_nbytes = part_nbytes
        self._begin = begin
        self._policy = policy

    def __enter__(self) -> _RetryingWriter:
        # A context manager is entered once: each attempt begins with a new one.
        def enter() -> tuple[AbstractContextManager[ObjectWriter], ObjectWriter]:
            context = self._begin()
            return context, context.__enter__()

        self._context, self._writer = self._policy.run(enter)
        return self

    def write_part(self, index: int, buffers: Sequence[memoryview]) -> None:
        self._policy.run(lambda: self._writer.write_part(index, buffers))

    def shorten(self, nbytes: int) -> None:
        self._writer.shorten(nbytes)

    def __exit__(self, *raised: Any) -> bool | None:
        return self._context.__exit__(*raised)
