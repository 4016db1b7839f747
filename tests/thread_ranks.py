"""Ranks as threads of one process, for tests of anything that takes a `World`.

`run_ranks(3, fn)` calls `fn(world)` on three threads. Rounds follow the rules of `TorchWorld` and
check them harder: another name, another kind of round or a buffer of another length is an error at
once, on all ranks. A rank can be killed at its n-th call, and nothing hangs: whoever waits for a
rank that is gone, or too long, gets the error that names it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

from ckpt.errors import RankFailed
from ckpt.world.agreement import encode_error, encode_failures, error_of_failures
from ckpt.world.base import Message, Transfers, World, lengths_problem
from ckpt.world.tree import family

T = TypeVar("T")
_Op = Literal[
    "gather",
    "gather_to_coordinator",
    "merge_to_coordinator",
    "broadcast",
    "transfers",
]


class RankKilled(BaseException):
    """Ends the thread of a killed rank as SIGKILL ends a process: no handler should catch it."""


class RanksFailed(AssertionError):
    """Some ranks raised. `errors` has what each of them raised, by rank; `results` what the others
    gave.
    """

    def __init__(self, errors: Mapping[int, BaseException], results: Mapping[int, Any]) -> None:
        lines = [f"rank {r}: {type(e).__name__}: {e}" for r, e in sorted(errors.items())]
        super().__init__("ranks failed:\n  " + "\n  ".join(lines))
        self.errors = dict(errors)
        self.results = dict(results)


def run_ranks(
    n: int,
    fn: Callable[[World], T],
    *,
    kill: Mapping[int, int] | None = None,
    deadline_seconds: float = 30.0,
) -> list[T]:
    """`fn(world)` on each of `n` ranks at once; their results in rank order.

    `kill={2: 3}` kills rank 2 when it makes its third call (the first is 1), before the others see
    that call. Raises RanksFailed when any rank raised, killed ones included. `deadline_seconds`
    limits every single wait for another rank.
    """
    hub = _Hub(n, dict(kill or {}), deadline_seconds)

    def one(rank: int) -> T:
        try:
            return fn(ThreadWorld(hub, rank))
        finally:
            hub.leave(rank)

    with ThreadPoolExecutor(n, thread_name_prefix="rank") as pool:
        futures = [pool.submit(one, rank) for rank in range(n)]
    errors = {r: e for r, f in enumerate(futures) if (e := f.exception()) is not None}
    results = {r: f.result() for r, f in enumerate(futures) if r not in errors}
    if errors:
        raise RanksFailed(errors, results)
    return [results[rank] for rank in range(n)]


class _Call(NamedTuple):
    op: _Op
    name: str
    payload: Any


class _Later:
    """A payload that its rank has yet to merge."""

    data: bytes | None = None


class _Hub:
    """Where the threads meet: the calls of every round, and who is gone."""

    def __init__(self, size: int, kill: dict[int, int], deadline_seconds: float) -> None:
        self.size = size
        self._kill = kill
        self._deadline_seconds = deadline_seconds
        self._rounds: list[dict[int, _Call]] = []
        self._gone: dict[int, str] = {}
        self._broken: RankFailed | None = None
        self._flags: set[str] = set()
        self._duplicates: list[_Hub] = []
        self._mail: dict[tuple[int, int, int, int], bytes] = {}  # by block, sender, receiver, tag
        self._changed = threading.Condition()

    def leave(self, rank: int, why: str = "has left") -> None:
        """`rank` makes no more calls, here and in the duplicates."""
        with self._changed:
            self._gone.setdefault(rank, why)
            self._changed.notify_all()
            duplicates = list(self._duplicates)
        for duplicate in duplicates:
            duplicate.leave(rank, why)

    @property
    def failure(self) -> RankFailed | None:
        with self._changed:
            return None if self._broken is None else _copied(self._broken)

    def end(self, failure: RankFailed) -> None:
        """Have all rounds raise `failure`, or what has ended them before."""
        with self._changed:
            if self._broken is None:
                self._broken = _copied(failure)
            self._changed.notify_all()

    def raise_flag(self, name: str) -> None:
        with self._changed:
            self._flags.add(name)

    def flag_is_up(self, name: str) -> bool:
        with self._changed:
            return name in self._flags

    def check_others(self, rank: int, phase: str) -> None:
        """Raise when another rank is known to be gone."""
        with self._changed:
            others = [other for other in range(self.size) if other != rank and other in self._gone]
            if others and self._broken is None:
                self._check_gone(others, phase, math.inf)
            if self._broken is not None:
                raise _copied(self._broken)

    def duplicate(self, number: int) -> _Hub:
        """The `number`-th hub beside this one, the same for all ranks."""
        with self._changed:
            while len(self._duplicates) <= number:
                duplicate = _Hub(self.size, {}, self._deadline_seconds)
                for rank, why in self._gone.items():
                    duplicate.leave(rank, why)
                self._duplicates.append(duplicate)
            return self._duplicates[number]

    def call(self, rank: int, round_number: int, call: _Call) -> None:
        """Note what `rank` contributes to a round."""
        with self._changed:
            if self._kill.get(rank) == round_number:
                self.leave(rank, "has died")
                raise RankKilled(f"rank {rank} killed at its call {round_number} ({call.name!r})")
            while len(self._rounds) < round_number:
                self._rounds.append({})
            calls = self._rounds[round_number - 1]
            # What rank 0 has passed to all before counts for a rank that comes late.
            is_answered = call.op == "broadcast" and rank != 0 and 0 in calls
            if self._broken is not None and not is_answered:
                raise _copied(self._broken)
            self._check_same(rank, call, calls)
            calls[rank] = call
            self._changed.notify_all()

    def wait(self, round_number: int, call: _Call, ranks: Sequence[int]) -> dict[int, Any]:
        """What `ranks` contributed to a round, once all did."""
        until = time.monotonic() + self._deadline_seconds
        with self._changed:
            calls = self._rounds[round_number - 1]
            while True:
                missing = [rank for rank in ranks if rank not in calls]
                if not missing:
                    return {rank: calls[rank].payload for rank in ranks}
                if self._broken is None:
                    self._check_gone(missing, call.name, until)
                if self._broken is not None:
                    raise _copied(self._broken)
                self._changed.wait(max(0.0, until - time.monotonic()))

    def post(self, address: tuple[int, int, int, int], data: bytes, name: str) -> None:
        """Leave a message."""
        with self._changed:
            if self._broken is not None:
                raise _copied(self._broken)
            if address in self._mail:
                self._break(f"rank {address[1]} uses a tag again in {name!r}", address[1], name)
                raise _copied(self._broken_now())
            self._mail[address] = data
            self._changed.notify_all()

    def take(
        self, address: tuple[int, int, int, int], is_over: Callable[[], bool], name: str
    ) -> bytes:
        """A message, once it is there."""
        until = time.monotonic() + self._deadline_seconds
        with self._changed:
            while address not in self._mail:
                if self._broken is None:
                    self._check_gone([address[1]], name, until)
                if self._broken is not None:
                    raise _copied(self._broken)
                if is_over():
                    raise RankFailed(
                        f"rank {address[2]} left phase {name!r}", rank=address[2], phase=name
                    )
                self._changed.wait(max(0.0, until - time.monotonic()))
            return self._mail.pop(address)

    def notice(self) -> None:
        """Have waiting threads look again."""
        with self._changed:
            self._changed.notify_all()

    def merged(self, later: Mapping[int, _Later], name: str) -> dict[int, bytes]:
        """What ranks pass on, once all of them have merged it."""
        until = time.monotonic() + self._deadline_seconds
        with self._changed:
            while missing := [rank for rank, one in later.items() if one.data is None]:
                if self._broken is None:
                    self._check_gone(missing, name, until)
                if self._broken is not None:
                    raise _copied(self._broken)
                self._changed.wait(max(0.0, until - time.monotonic()))
            return {rank: one.data or b"" for rank, one in later.items()}

    def _check_gone(self, missing: Sequence[int], name: str, until: float) -> None:
        gone = [rank for rank in missing if rank in self._gone]
        if gone:
            self._break(f"rank {gone[0]} {self._gone[gone[0]]} in phase {name!r}", gone[0], name)
        elif time.monotonic() >= until:
            text = f"rank {missing[0]} did not answer within {self._deadline_seconds:g} s"
            self._break(f"{text} in phase {name!r}", missing[0], name)

    def _check_same(self, rank: int, call: _Call, calls: Mapping[int, _Call]) -> None:
        for other, theirs in calls.items():
            if (theirs.op, theirs.name) != (call.op, call.name):
                text = (
                    f"rank {rank} is in {call.op} {call.name!r} while rank {other} is in "
                    f"{theirs.op} {theirs.name!r}: all ranks must make the same calls in the "
                    "same order"
                )
                self._break(text, rank, call.name)
                raise _copied(self._broken_now())

    def _broken_now(self) -> RankFailed:
        assert self._broken is not None
        return self._broken

    def _break(self, text: str, rank: int, phase: str) -> None:
        self._broken = RankFailed(text, rank=rank, phase=phase)
        self._changed.notify_all()


class ThreadWorld(World):
    """One rank of `run_ranks`. `calls` counts its rounds, to choose where to kill it."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.rank = rank
        self.size = hub.size
        self.global_ranks = tuple(range(hub.size))
        self.calls = 0
        self._hub = hub
        self._duplicates = 0

    @property
    def failure(self) -> RankFailed | None:
        return self._hub.failure

    def gather(self, name: str, payload: bytes) -> list[bytes]:
        payloads = self._round("gather", name, bytes(payload), range(self.size))
        return [payloads[rank] for rank in range(self.size)]

    def gather_to_coordinator(self, name: str, payload: bytes) -> list[bytes] | None:
        waits_for = range(self.size) if self.rank == 0 else (self.rank,)
        got = self._round("gather_to_coordinator", name, bytes(payload), waits_for)
        return [got[rank] for rank in range(self.size)] if self.rank == 0 else None

    def merge_to_coordinator(
        self, name: str, merge: Callable[[list[bytes]], bytes]
    ) -> list[bytes] | None:
        own, children = _Later(), family(self.rank, self.size).children
        later = self._round("merge_to_coordinator", name, own, (self.rank, *children))
        below = self._hub.merged({child: later[child] for child in children}, name)
        payloads = [below[child] for child in children]
        if self.rank == 0:
            return payloads
        own.data = bytes(merge(payloads))
        self._hub.notice()
        return None

    def broadcast(self, name: str, payload: bytes | None) -> bytes:
        if (payload is None) == (self.rank == 0):
            raise ValueError(
                f"broadcast {name!r}: the coordinator passes a payload and no other rank"
            )
        mine = None if payload is None else bytes(payload)
        shared: bytes = self._round("broadcast", name, mine, (0,))[0]
        return shared

    def agree(self, phase: str, error: BaseException | None) -> None:
        answers = self.gather(f"agree on {phase}", encode_error(error))
        agreed = error_of_failures(phase, encode_failures(answers), self.size)
        if agreed is not None:
            raise agreed from error

    @contextmanager
    def transfers(
        self, name: str, sends: Sequence[int] = (), expects: Sequence[int] = ()
    ) -> Iterator[Transfers]:
        came = self._round("transfers", name, (sends, expects), range(self.size))
        problem = lengths_problem(name, [*came.values()]) if sends else None
        if problem is not None:
            raise problem
        wires = _ThreadTransfers(self._hub, self.rank, (self.calls, name))
        try:
            yield wires
        except BaseException:
            wires.abort()
            raise

    def raise_flag(self, name: str) -> None:
        self._hub.raise_flag(name)

    def flag_is_up(self, name: str) -> bool:
        return self._hub.flag_is_up(name)

    def check_neighbour(self, phase: str) -> None:
        self._hub.check_others(self.rank, phase)

    def duplicate(self) -> World:
        self._duplicates += 1
        return ThreadWorld(self._hub.duplicate(self._duplicates - 1), self.rank)

    def end(self, failure: RankFailed) -> None:
        self._hub.end(failure)

    def close(self) -> None:
        self._hub.leave(self.rank)

    def _round(self, op: _Op, name: str, payload: Any, ranks: Sequence[int]) -> dict[int, Any]:
        self.calls += 1
        call = _Call(op, name, payload)
        self._hub.call(self.rank, self.calls, call)
        return self._hub.wait(self.calls, call, ranks)


class _ThreadTransfers(Transfers):
    """Messages through the hub, in the block that begins with call `block[0]`."""

    def __init__(self, hub: _Hub, rank: int, block: tuple[int, str]) -> None:
        self._hub = hub
        self._rank = rank
        self._number, self._name = block
        self._is_over = threading.Event()

    def move(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        for to, tag, data in send:
            self._hub.post((self._number, self._rank, to, tag), bytes(data), self._name)
        for source, tag, data in receive:
            address = (self._number, source, self._rank, tag)
            sent = self._hub.take(address, self._is_over.is_set, self._name)
            if len(sent) != data.nbytes:
                text = f"{len(sent)} bytes of rank {source} where {data.nbytes} are expected"
                raise RankFailed(f"{self._name!r}: {text}", rank=source, phase=self._name)
            data[:] = sent

    def abort(self) -> None:
        self._is_over.set()
        self._hub.notice()


def _copied(failure: RankFailed) -> RankFailed:
    return RankFailed(str(failure), rank=failure.rank, phase=failure.phase)
