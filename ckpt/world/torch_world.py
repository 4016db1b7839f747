"""Ranks that talk through torch.distributed: control rounds with deadlines, and transfers of bytes.

Every method of a World is collective: all ranks call the same methods with the same names in the
same order, on failure paths too. A rank that dies, hangs or leaves is named on all others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from ckpt.errors import CheckpointError, RankFailed
from ckpt.world.agreement import encode_error, encode_failures, error_of_failures
from ckpt.world.attendance import Board
from ckpt.world.base import Message, MiB, SoloWorld, Transfers, World, lengths_problem, unpack
from ckpt.world.board import WorldBoard
from ckpt.world.by_store import FLAG, StoreGroup
from ckpt.world.failures import copied
from ckpt.world.job import Process, own_prefix, part_of, this_process
from ckpt.world.link import Neighbour
from ckpt.world.missing import connect_to_parent
from ckpt.world.rounds import STORE_SECONDS, Deadlines, Rounds
from ckpt.world.tree import family


def current_world(
    process_group: dist.ProcessGroup | None = None, *, deadlines: Deadlines | None = None
) -> World:
    """A new world of the ranks of `process_group`, of all ranks, or of this process alone.

    With torch.distributed initialised it is collective over the group, like `TorchWorld`.
    """
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return SoloWorld()
    if dist.get_rank(process_group) < 0:
        raise CheckpointError(
            "this process is not in the process group that was given; call this on its ranks only"
        )
    if dist.get_world_size(process_group) == 1:
        return SoloWorld(dist.get_rank())
    return TorchWorld(process_group, deadlines=deadlines)


def group_of_this_process() -> dist.ProcessGroup | None:
    """A new process group of this process alone, made without the others; None where none is
    needed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


class TorchWorld(World):
    """The ranks of a torch process group, or some `members` of all ranks. All ranks of it must
    create it together, in the same order when there are several.

    Control rounds go over connections of their own, never through the user's groups, so they may
    run in a background thread, one thread at a time; see `ckpt.world.rounds`. The rendezvous store
    of torch.distributed only tells the ranks where their parents in the tree listen. Transfers go
    over a gloo group that is created at their first use.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        deadlines: Deadlines | None = None,
        members: tuple[int, ...] = (),
        process: Process | None = None,
    ) -> None:
        group = process_group or dist.group.WORLD
        self._process = process or this_process.in_job()
        self.global_ranks = members or tuple(dist.get_process_group_ranks(group))
        self.rank = self.global_ranks.index(self._process.rank)
        self.size = len(self.global_ranks)
        self._deadlines = deadlines or Deadlines()
        self._store, self._key = own_prefix(self._process, self.global_ranks, self.rank)
        heart = self._process.heart
        self._rounds = Rounds(
            heart, self._key, self.global_ranks, self.rank, self._store, self._deadlines
        )
        parent, blocks = family(self.rank, self.size)
        # First: a child that cannot connect calls, while this rank may wait for its own parent.
        self._process.missing.expect([self.global_ranks[block.start] for block in blocks])
        if parent is not None:
            connect_to_parent(
                heart,
                self._process.store,
                self.global_ranks[parent],
                self._deadlines.round_seconds_max,
            )
        heart.register(self._key, self._rounds, self)
        if parent is not None and Neighbour(True, self.global_ranks[parent]) in heart.by_store():
            self._rounds.raise_flag(FLAG)  # before its first payload: all hear it in time
        self._broken: RankFailed | None = None
        self._group: Any = None

    @property
    def failure(self) -> RankFailed | None:
        return None if self._broken is None else copied(self._broken)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._process.heart.card.hosts

    def begin_call(self, name: str) -> None:
        self._rounds.begin_call(name)

    def gather(self, name: str, payload: bytes) -> list[bytes]:
        with self._in_round(name) as number:
            return unpack(self._answered(number, name, payload))

    def gather_to_coordinator(self, name: str, payload: bytes) -> list[bytes] | None:
        with self._in_round(name) as number:
            self._rounds.contribute(number, name, payload)
            return unpack(self._rounds.collected(number, name)) if self.rank == 0 else None

    def merge_to_coordinator(
        self, name: str, merge: Callable[[list[bytes]], bytes]
    ) -> list[bytes] | None:
        with self._in_round(name) as number:
            below = self._rounds.from_below(number, name)
            if self.rank == 0:
                return below
            self._rounds.contribute(number, name, merge(below))
            return None

    def broadcast(self, name: str, payload: bytes | None) -> bytes:
        with self._in_round(name) as number:
            if self.rank == 0:
                assert payload is not None, f"round {name!r}: the coordinator must pass a payload"
                self._rounds.answer(number, name, payload)
                return payload
            return self._rounds.answered(number, name, needs_all=False)

    def agree(self, phase: str, error: BaseException | None) -> None:
        name = f"agree on {phase}"
        with self._in_round(name) as number:
            # Not all answers to all, which would be N^2 bytes of nothing.
            failures = self._answered(
                number, name, encode_error(error), lambda came: encode_failures(unpack(came))
            )
        agreed = error_of_failures(phase, failures, self.size)
        if agreed is not None:
            raise agreed from error

    @contextlib.contextmanager
    def transfers(
        self, name: str, sends: Sequence[int] = (), expects: Sequence[int] = ()
    ) -> Iterator[Transfers]:
        with self._in_round(name) as number:
            # gloo cannot be stopped while it connects, nor does it say who is missing: be sure that
            # all ranks are here.
            self._meet(number, name, sends, expects)
            if self._group is None:
                self._group = self._connected()
            wires = _GlooTransfers(self._group, self._rounds, name, self._finish)
            try:
                yield wires
            except _Aborted as aborted:
                # It ended because another thread's failed: that one says why.
                raise wires.cause or aborted from None
            except BaseException:
                wires.abort()
                raise
            if isinstance(self._group, StoreGroup):
                # What is still to be read lies with a process that may end after this.
                self._answered(self._rounds.begin(), f"end of {name}", b"")

    def raise_flag(self, name: str) -> None:
        self._rounds.raise_flag(name)

    def flag_is_up(self, name: str) -> bool:
        return self._rounds.flag_is_up(name)

    def board(self) -> Board:
        world = self._key.hex()
        return WorldBoard(self._process.board, world, self.global_ranks, self._rounds)

    def check_neighbour(self, phase: str) -> None:
        if self._broken is not None:
            raise copied(self._broken)
        try:
            self._rounds.check(phase)
        except RankFailed as failure:
            self._break(failure)
            raise copied(self._broken or failure) from failure

    def duplicate(self) -> World:
        return TorchWorld(
            deadlines=self._deadlines, members=self.global_ranks, process=self._process
        )

    def report_storage_wait(self, waits: bool) -> None:
        # Without the store, the ranks wait for `round_seconds_max` only.
        with contextlib.suppress(RuntimeError, OSError):
            self._store.add("storage waits", 1 if waits else -1)

    def end(self, failure: RankFailed) -> None:
        self._break(failure)

    def release(self) -> None:
        self._process.heart.forget(self._key)

    def abandon(self) -> None:
        self._rounds.abandon()

    def close(self) -> None:
        self._rounds.leave()
        self._group = None

    # rounds

    @contextlib.contextmanager
    def _in_round(self, name: str) -> Iterator[int]:
        """The number of the next round. Any failure inside ends this world: rounds would not
        match.
        """
        if self._broken is not None:
            raise copied(self._broken)
        number = self._rounds.begin()
        try:
            yield number
        except RankFailed as failure:
            raise self._break(failure) from failure
        except (RuntimeError, OSError) as error:
            raise self._break(self._blame(name, error)) from error
        except BaseException as error:
            # Ctrl-C, too: the other ranks are in this round and would wait for us until its
            # deadline.
            text = f"rank {self.rank} left phase {name!r}: {type(error).__name__}: {error}"
            self._break(RankFailed(text, rank=self.rank, phase=name))
            raise

    def _answered(
        self,
        number: int,
        name: str,
        payload: bytes,
        answer: Callable[[bytes], bytes] = lambda came: came,
    ) -> bytes:
        """What rank 0 answers to the payloads of all, packed; by default these themselves."""
        self._rounds.contribute(number, name, payload)
        if self.rank:
            return self._rounds.answered(number, name, needs_all=True)
        body = answer(self._rounds.collected(number, name))
        self._rounds.answer(number, name, body)
        return body

    def _break(self, failure: RankFailed) -> RankFailed:
        """End this world with one text for all; returns that."""
        self._broken = self._broken or self._rounds.end(failure)
        return copied(self._broken)

    def _blame(self, name: str, error: Exception) -> RankFailed:
        """Who caused a failed transfer: a rank that is found dead within seconds, else this
        rank.
        """
        # gloo says that a connection broke and not who broke it; a rank that died is reported.
        try:
            self._rounds.wait_for(lambda: False, name, self._deadlines.grace_seconds)
        except RankFailed as failure:
            return failure
        return RankFailed(
            f"rank {self.rank} failed in phase {name!r}: {type(error).__name__}: {error}",
            rank=self.rank,
            phase=name,
        )

    # tensor bytes

    def _connected(self) -> Any:
        """A gloo group of these ranks, outside of torch's list of groups, or what stands for one
        where some cannot connect. Two of them connect when the first bytes go between them.

        Not `new_group`: for some of the ranks it either needs all others too, or builds the group's
        name from the number of groups that a rank is in; where these differ it waits for ever.
        """
        limits, kind = self._deadlines, cast(Any, dist.distributed_c10d.ProcessGroupGloo)
        if self._rounds.flag_is_up(FLAG):
            limit = timedelta(seconds=limits.storage_seconds_max)
            return StoreGroup(part_of(self._store, "bytes"), self.rank, limit)
        # Ours come first: gloo does not say who is missing, nor does it know of slow storage.
        timeout = timedelta(seconds=limits.storage_seconds_max + limits.grace_seconds)
        store = part_of(self._store, "gloo")
        try:
            # Connect to those that are talked to, when they are: else every rank to every other.
            options = kind._Options()
            options._timeout = timeout
            options._devices = [
                kind.create_device(interface=name, lazy_init=True)
                if name
                else kind.create_default_device(lazy_init=True)
                for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
            ]
        except (AttributeError, TypeError):  # an older torch
            return kind(store, self.rank, self.size, timeout)
        return kind(store, self.rank, self.size, options)

    def _meet(self, number: int, name: str, lengths: Sequence[int], room: Sequence[int]) -> None:
        """Wait until all ranks are here. Raises RankFailed when one sends what another does not
        expect, which one sum over all ranks shows: no rank learns what others send to others.
        """

        def differing(came: bytes) -> bytes:
            total = sum(int.from_bytes(share, "little") for share in unpack(came))
            return b"differ" if total % _HASHES else b""

        # What this rank sends less what it expects, as hashes of who, whom and how much: the sum
        # over all ranks is 0 when both sides of every pair agree. Empty exchanges do not count.
        mine = sum(_hashed(self.rank, peer, n) for peer, n in enumerate(lengths) if n)
        mine -= sum(_hashed(peer, self.rank, n) for peer, n in enumerate(room) if n)
        if not self._answered(number, name, (mine % _HASHES).to_bytes(8, "little"), differing):
            return
        own = json.dumps([list(lengths), list(room)]).encode()
        number, again = self._rounds.begin(), f"lengths of {name}"
        tables = map(json.loads, unpack(self._answered(number, again, own)))
        if (problem := lengths_problem(name, list(tables))) is not None:
            raise problem

    def _finish(self, name: str, works: list[_Work], is_over: Callable[[], bool]) -> None:
        """Wait for transfers, until one fails, a rank is reported dead or the deadline is over, or
        until `is_over()`.
        """
        waiter, limits = _Waiter(works, self._rounds.notice), self._deadlines

        def has_ended() -> bool:
            return waiter.done.is_set() or is_over()

        spent = limits.round_seconds_max
        is_done = self._rounds.wait_for(has_ended, name, spent)
        # A rank that repeats requests to its storage holds up the others, and does not hang.
        if not is_done and self._process.heart.aside(self._rounds.storage_waits, STORE_SECONDS):
            spent = limits.storage_seconds_max
            is_done = self._rounds.wait_for(has_ended, name, spent - limits.round_seconds_max)
        if not is_done:
            raise RankFailed(
                f"rank {waiter.peer} did not answer within {spent:g} s in phase {name!r}; it "
                "hangs, or waits for another rank",
                rank=waiter.peer,
                phase=name,
            )
        if waiter.done.is_set():
            waiter.thread.join()  # in torch's code it would abort an interpreter that ends
        if waiter.error is not None:
            raise waiter.error
        if not waiter.done.is_set():
            raise _Aborted(f"rank {self.rank} left phase {name!r}", rank=self.rank, phase=name)


class _Aborted(RankFailed):
    """Transfers that were given up, by this rank itself."""


class _GlooTransfers(Transfers):
    """Messages over a gloo group, until the block ends or one of them fails."""

    def __init__(self, group: Any, rounds: Rounds, name: str, finish: Callable[..., None]) -> None:
        self._group = group
        self._rounds = rounds
        self._name = name
        self._finish = finish
        self._is_over = threading.Event()
        self.cause: Exception | None = None  # of the first `move` that failed by itself

    def move(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        # Receives first, so that what comes finds its buffer.
        works = [
            (peer, begin([tensor], peer, tag))
            for begin, messages in ((self._group.recv, receive), (self._group.send, send))
            for peer, tag, data in messages
            for tensor in _tensors(data)
        ]
        try:
            if works:
                self._finish(self._name, works, self._is_over.is_set)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, _Aborted):
                self.cause = self.cause or error
            self.abort()  # the other threads would wait until their deadline
            raise

    def abort(self) -> None:
        self._is_over.set()
        self._rounds.notice()


_Work = tuple[int, dist.Work]  # the rank that a transfer is from or to, and the transfer


class _Waiter:
    """Waits for transfers in a thread of its own, because gloo can only be waited for, not asked.

    `peer` is the rank it waits for. A daemon: when another rank hangs, it stays until gloo's
    timeout, and must not keep a process that gave up from ending.
    """

    def __init__(self, works: list[_Work], notice: Callable[[], None]) -> None:
        self.done = threading.Event()
        self._notice = notice
        self.error: Exception | None = None
        self.peer = works[0][0] if works else -1
        self._works = works
        self.thread = threading.Thread(target=self._wait, name="ckpt-all-to-all", daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        try:
            for peer, work in self._works:
                self.peer = peer
                work.wait()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()
            self._notice()


_HASHES = 1 << 64


def _hashed(sender: int, receiver: int, nbytes: int) -> int:
    data = b"%d %d %d" % (sender, receiver, nbytes)
    # Not `hash`, which gives bytes another number in each process.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _tensors(view: memoryview, nbytes_max: int = 64 * MiB) -> list[torch.Tensor]:
    """A buffer as uint8 tensors of bounded size, which share its memory unless it is read-only."""
    if not view.nbytes:
        return []
    whole = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    return [whole[i : i + nbytes_max] for i in range(0, view.nbytes, nbytes_max)]
