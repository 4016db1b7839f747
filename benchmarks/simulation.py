"""Ranks by the thousand in one process: the real code on a world, stores and a clock that count.

Each rank is a thread that runs what a rank of a training runs, one save or load after the other.
Its world passes payloads on through memory, and counts what the tree of `ckpt.world` would send.
Time is a number of each rank: its own CPU seconds, and what hops, requests and bytes would take.
Threads wait most of the time, and their CPU seconds are counted by the kernel, each for itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.world.agreement import encode_error, encode_failures, error_of_failures
from ckpt.world.base import Message, Transfers, World
from ckpt.world.tree import family
from storage.memory import BufferedWriter, MemoryBucket, MemoryStore
from storage.store import ByteRange, ObjectInfo

Numbers = npt.NDArray[np.float64]
STACK_NBYTES = 512 << 10
WAIT_SECONDS_MAX = 3600.0  # of the simulation itself, should it hang


@dataclass(frozen=True, slots=True)
class Clock:
    """What takes how long: a message from rank to rank, a request to the store, and their bytes.

    10 Gb/s per rank in each direction, which the ranks of a host would share in truth.
    """

    hop_seconds: float = 0.2e-3
    request_seconds: float = 50e-3
    network_bytes_per_second: float = 1.25e9
    store_bytes_per_second: float = 1.25e9


class Tree:
    """The tree of a world as columns, one item per rank; `end` is the end of the ranks below."""

    def __init__(self, size: int) -> None:
        self.depth = np.zeros(size, dtype=np.int64)
        self.children = np.zeros(size, dtype=np.int64)
        self.end = np.arange(1, size + 1)
        for rank in range(size):
            parent, blocks = family(rank, size)
            self.depth[rank] = 0 if parent is None else self.depth[parent] + 1
            self.children[rank] = len(blocks)
            self.end[rank] = blocks[-1].stop if blocks else rank + 1
        self.height = int(self.depth.max())


class Cost:
    """What one phase cost, one item per rank."""

    def __init__(self, size: int) -> None:
        self.cpu_seconds = np.zeros(size)
        self.messages = np.zeros(size)
        self.nbytes = np.zeros(size)  # received from other ranks
        self.requests = np.zeros(size)
        self.stored_nbytes = np.zeros(size)  # to the store and from it
        self.objects = np.zeros(size)  # data files
        self.ended = np.zeros(size)
        self.began = 0.0
        self.first_memory = 0.0  # by which the process grew while rank 0 had all parts

    @property
    def seconds(self) -> float:
        """From the first rank that begins to the last that ends, by the simulated clock."""
        return float(self.ended.max()) - self.began


class _Round:
    def __init__(self, size: int) -> None:
        self.payloads: list[Any] = [None] * size
        self.answer = b""
        self.came = 0
        self.latest = 0.0
        self.done = threading.Event()
        self.ends = 0.0


class _Letter:
    """A message between two ranks: sent, or waited for, whichever comes first."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.arrives = 0.0
        self.done = threading.Event()


class Simulation:
    """`size` ranks over one bucket. `run` calls a function on each of them."""

    def __init__(self, size: int, clock: Clock, bucket: MemoryBucket) -> None:
        self.size = size
        self.clock = clock
        self.bucket = bucket
        self.tree = Tree(size)
        self.costs: dict[str, Cost] = {}
        self.global_ranks = tuple(range(size))
        self.lock = threading.Lock()
        self._rounds: dict[int, _Round] = {}
        self._letters: dict[tuple[int, ...], _Letter] = {}

    def run(self, act: Callable[[SimulatedWorld], None]) -> None:
        """`act(world)` on every rank. Raises the first error of the lowest rank that had one."""
        errors: dict[int, BaseException] = {}

        def one(rank: int) -> None:
            try:
                act(SimulatedWorld(self, rank))
            except BaseException as error:
                errors[rank] = error
                self.fail()

        before = threading.stack_size(STACK_NBYTES)
        try:
            threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[min(errors)]

    def fail(self) -> None:
        """Let nobody wait for a rank that has failed."""
        with self.lock:
            for one in self._rounds.values():
                one.done.set()
            for letter in self._letters.values():
                letter.done.set()

    def cost(self, phase: str) -> Cost:
        """Where the cost of a phase is counted."""
        return self.costs.setdefault(phase, Cost(self.size))

    def round(self, number: int) -> _Round:
        """That round, made by whoever comes first."""
        return self._rounds.setdefault(number, _Round(self.size))

    def letter(self, address: tuple[int, ...]) -> _Letter:
        """The letter between two ranks under an address of theirs; the second who asks has it for
        good.
        """
        with self.lock:
            letter = self._letters.pop(address, None)
            if letter is None:
                letter = self._letters[address] = _Letter()
            return letter

    def forget(self, number: int) -> None:
        """Drop a round that is over for all."""
        self._rounds.pop(number, None)


@dataclass
class SimulatedWorld(World):
    """One rank. `phase` is where its costs are counted; see `enter`."""

    simulation: Simulation
    rank: int
    now: float = 0.0
    phase: str = "start"
    _calls: int = 0
    _cpu_began: float = field(default_factory=time.thread_time)
    _flags: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.size = self.simulation.size
        self.global_ranks = self.simulation.global_ranks

    # phases and time

    def enter(self, phase: str) -> None:
        """Count from here on under another name. All ranks begin it together, at no cost."""
        self.spend()
        ended = self._round("enter", b"", lambda one: one.latest)
        self.now = ended.latest
        self.phase = phase
        with self.simulation.lock:
            self.cost.began = self.now
        self._cpu_began = time.thread_time()

    @property
    def cost(self) -> Cost:
        """Of the phase that this rank is in."""
        return self.simulation.cost(self.phase)

    def spend(self) -> None:
        """Pass the CPU seconds since the last call on to the clock."""
        cpu = time.thread_time()
        spent, self._cpu_began = cpu - self._cpu_began, cpu
        cost = self.cost
        cost.cpu_seconds[self.rank] += spent
        self.now += spent
        cost.ended[self.rank] = self.now

    def request(self, nbytes: int, requests: int = 1) -> None:
        """Requests to the store, one after the other."""
        self.spend()
        clock, cost = self.simulation.clock, self.cost
        self.now += requests * clock.request_seconds + nbytes / clock.store_bytes_per_second
        cost.requests[self.rank] += requests
        cost.stored_nbytes[self.rank] += nbytes
        cost.ended[self.rank] = self.now

    # rounds

    def gather(self, name: str, payload: bytes) -> list[bytes]:
        def ends(one: _Round) -> float:
            return self._down(self._up(one), sum(8 + len(p) for p in one.payloads))

        return list(self._round(name, payload, ends).payloads)

    def gather_to_coordinator(self, name: str, payload: bytes) -> list[bytes] | None:
        one = self._round(name, payload, self._up, waits=self.rank == 0)
        return list(one.payloads) if self.rank == 0 else None

    def merge_to_coordinator(
        self, name: str, merge: Callable[[list[bytes]], bytes]
    ) -> list[bytes] | None:
        self.spend()
        number, (parent, blocks) = self._next(), family(self.rank, self.size)
        clock, cost = self.simulation.clock, self.cost
        below, ends = [], self.now
        for block in blocks:
            letter = self.simulation.letter((number, block.start, self.rank))
            if not letter.done.wait(WAIT_SECONDS_MAX) or letter.data is None:
                raise RuntimeError(f"rank {block.start} has failed before {name!r}")
            below.append(letter.data)
            # They come over one link, this rank's.
            ends = max(ends, letter.arrives) + len(letter.data) / clock.network_bytes_per_second
            cost.nbytes[self.rank] += len(letter.data)
        self._until(ends)
        if parent is None:
            self._begin_memory()
            return below
        data = merge(below)
        self.spend()
        letter = self.simulation.letter((number, self.rank, parent))
        letter.data, letter.arrives = data, self.now + clock.hop_seconds
        letter.done.set()
        cost.messages[self.rank] += 1
        return None

    def broadcast(self, name: str, payload: bytes | None) -> bytes:
        self.spend()
        number = self._next()
        with self.simulation.lock:
            one = self.simulation.round(number)
            one.came += 1
            if payload is not None:
                one.payloads[0] = payload
                one.ends = self._down(self.now, len(payload))
                one.done.set()
            if one.came == self.size:
                self.simulation.forget(number)
        self._wait(one, name)
        if self.rank:
            self._until(one.ends)
        shared = one.payloads[0]
        assert isinstance(shared, bytes), f"round {name!r}: rank 0 has failed"
        return shared

    def agree(self, phase: str, error: BaseException | None) -> None:
        def ends(one: _Round) -> float:
            one.answer = encode_failures(one.payloads)
            return self._down(self._up(one), len(one.answer))

        one = self._round(f"agree on {phase}", encode_error(error), ends)
        agreed = error_of_failures(phase, one.answer, self.size)
        if agreed is not None:
            raise agreed from error

    @contextmanager
    def transfers(
        self, name: str, sends: Sequence[int] = (), expects: Sequence[int] = ()
    ) -> Iterator[Transfers]:
        self._round(name, b"", lambda one: self._down(self._up(one), 0))
        yield _SimulatedTransfers(self, self._calls)

    def raise_flag(self, name: str) -> None:
        self._flags.add(name)

    def flag_is_up(self, name: str) -> bool:
        return name in self._flags

    def check_neighbour(self, phase: str) -> None:
        """Nobody dies here."""

    def moved(self, number: int, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """Letters of the block that began with call `number`. What a rank sends, it sends one after
        another.
        """
        self.spend()
        clock, cost = self.simulation.clock, self.cost
        leaves = self.now
        for to, tag, data in send:
            leaves += data.nbytes / clock.network_bytes_per_second
            letter = self.simulation.letter((number, self.rank, to, tag))
            letter.data, letter.arrives = bytes(data), leaves + clock.hop_seconds
            letter.done.set()
            cost.messages[self.rank] += 1
        ends = leaves
        for source, tag, data in receive:
            letter = self.simulation.letter((number, source, self.rank, tag))
            if not letter.done.wait(WAIT_SECONDS_MAX) or letter.data is None:
                raise RuntimeError(f"rank {source} has failed, or sends nothing to {self.rank}")
            data[:] = letter.data
            ends = max(ends, letter.arrives)
            cost.nbytes[self.rank] += data.nbytes
        self._until(ends)

    def duplicate(self) -> World:
        raise NotImplementedError("the simulation has one world")

    def close(self) -> None:
        self.spend()

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    def _round(
        self, name: str, payload: Any, ends: Callable[[_Round], float], *, waits: bool = True
    ) -> _Round:
        """A round to which all ranks contribute; it `ends` then and then."""
        self.spend()
        number = self._next()
        with self.simulation.lock:
            one = self.simulation.round(number)
            one.payloads[self.rank] = payload
            one.came += 1
            one.latest = max(one.latest, self.now)
            if one.came == self.size:
                one.ends = ends(one)
                one.done.set()
                self.simulation.forget(number)
        if waits:
            self._wait(one, name)
            self._until(one.ends)
        return one

    def _wait(self, one: _Round, name: str) -> None:
        if self.rank == 0:
            memory = resident("VmHWM")
        if not one.done.wait(WAIT_SECONDS_MAX):
            raise TimeoutError(f"rank {self.rank} waits in {name!r}")
        if self.rank == 0:
            self._note_memory(name, memory)
        if one.ends == 0.0 and one.came < self.size and one.payloads[0] is None:
            raise RuntimeError(f"another rank has failed before {name!r}")

    def _note_memory(self, name: str, before: int) -> None:
        """Rank 0 works between the round of parts and the next: what does the process grow by?"""
        if name == "parts":
            self._begin_memory()
        elif hasattr(self, "_memory_began"):
            self.cost.first_memory = before - self._memory_began
            del self._memory_began

    def _begin_memory(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._memory_began = resident("VmRSS")

    def _until(self, ends: float) -> None:
        self._cpu_began = time.thread_time()
        self.now = max(self.now, ends)
        self.cost.ended[self.rank] = self.now

    def _up(self, one: _Round) -> float:
        """Payloads go up the tree. When the last arrives at rank 0, whose link they share."""
        tree, clock, cost = self.simulation.tree, self.simulation.clock, self.cost
        sizes = np.array([8 + len(payload) for payload in one.payloads])
        before = np.concatenate([[0], np.cumsum(sizes)])
        below = before[tree.end] - before[:-1]  # of each rank and those below it
        cost.messages[1:] += 1
        cost.nbytes += below - sizes
        arrives = tree.height * clock.hop_seconds + below[0] / clock.network_bytes_per_second
        return one.latest + float(arrives)

    def _down(self, began: float, nbytes: int) -> float:
        """An answer goes down the tree: each rank sends it to its children, one after another."""
        tree, clock, cost = self.simulation.tree, self.simulation.clock, self.cost
        cost.messages += tree.children
        cost.nbytes[1:] += nbytes
        busy = int(tree.children.max()) * nbytes / clock.network_bytes_per_second
        return began + tree.height * (clock.hop_seconds + busy)


class _SimulatedTransfers(Transfers):
    """Letters of one rank; `number` is the call that began the block."""

    def __init__(self, world: SimulatedWorld, number: int) -> None:
        self._world = world
        self._number = number

    def move(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        self._world.moved(self._number, send, receive)

    def abort(self) -> None:
        self._world.simulation.fail()


class SimulatedStore(MemoryStore):
    """The store as one rank sees it: every request is counted."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__(world.simulation.bucket, name="scale")
        self._world = world

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        data = super().get(key, byte_range)
        self._world.request(len(data))
        return data

    def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._world.request(sum(view.nbytes for view in buffers))
        super().get_into(key, start, buffers)

    def create(self, key: str, nbytes: int, *, part_nbytes: int, **hints: bool) -> BufferedWriter:
        # A PUT, or the begin, the parts and the end of an upload in parts.
        parts = -(-nbytes // max(part_nbytes, 1))
        self._world.request(nbytes, 1 if parts <= 1 else parts + 2)
        if key.endswith(".safetensors"):
            self._world.cost.objects[self._world.rank] += 1
        return super().create(key, nbytes, part_nbytes=part_nbytes, **hints)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._world.request(len(data))
        super().put_if_absent(key, data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        listed = [*super().list(prefix, after=after)]
        self._world.request(0, 1 + len(listed) // 1000)  # keys in one answer of S3
        return iter(listed)

    def info(self, key: str) -> ObjectInfo:
        self._world.request(0)
        return super().info(key)

    def delete(self, key: str) -> None:
        self._world.request(0)
        super().delete(key)

    def sync(self, keys: Iterable[str]) -> None:
        """Durable at once."""


def resident(field_name: str) -> int:
    """Bytes of this process in memory, `VmRSS`, or the most there were, `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field_name))
