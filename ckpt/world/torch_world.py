"""Ranks that talk through torch.distributed: control rounds with deadlines, and transfers of bytes.

Every method of a World is collective: all ranks call the same methods with the same names in the
same order, on failure paths too. A rank that dies, hangs or leaves is named on all others.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ckpt.errors import CheckpointError, RankFailed
from ckpt.world.agreement import agreed_error, encode_error, ranks_text
from ckpt.world.attendance import Board
from ckpt.world.base import SoloWorld, World, check_all_to_all
from ckpt.world.liveness import Heartbeat, Watch

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

MiB = 1024 * 1024


def current_world(process_group: dist.ProcessGroup | None = None) -> World:
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
    return TorchWorld(process_group)


def world_of_members(members: tuple[int, ...]) -> World:
    """A new world of some of all ranks, ascending, this one among them: collective over those."""
    return SoloWorld(members[0]) if len(members) == 1 else TorchWorld(members=members)


def group_of_this_process() -> dist.ProcessGroup | None:
    """A new process group of this process alone, made without the others; None where none is
    needed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


GRACE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """When ranks give up on each other, in seconds.

    A process that is gone is noticed within a second by ranks on its own machine. One on another
    machine that is silent for `silence_seconds_max` counts as gone, by default never: it may be
    stopped, or hold the interpreter's lock. A process that is there but does nothing, at
    `round_seconds_max`, or at `storage_seconds_max` while any rank waits for its storage.
    """

    round_seconds_max: float = 600.0
    heartbeat_seconds: float = 0.5
    silence_seconds_max: float = math.inf
    storage_seconds_max: float = 1800.0


class TorchWorld(World):
    """The ranks of a torch process group, or some `members` of all ranks. All ranks of it must
    create it together, in the same order when there are several.

    Control rounds go through a prefix of torch.distributed's own store, never through the user's
    groups, so they may run in a background thread, one thread at a time. Large
    `broadcast`s and `all_to_all` go over a gloo group that is created at their first use; call
    those from the thread that runs the training.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        deadlines: Deadlines | None = None,
        members: tuple[int, ...] = (),
    ) -> None:
        group = process_group or dist.group.WORLD
        self._ranks = members or tuple(dist.get_process_group_ranks(group))
        self.rank = self._ranks.index(dist.get_rank())
        self.size = len(self._ranks)
        self._deadlines = deadlines or Deadlines()
        self.global_ranks = self._ranks
        self._store = _own_prefix(self._ranks, self.rank)
        self._heart = Heartbeat(self._store, self.rank, self._deadlines.heartbeat_seconds)
        self._watch = Watch(self._store, self._deadlines.silence_seconds_max)
        # The time that others have to find the rank to blame.
        self._grace = min(GRACE_SECONDS, self._deadlines.silence_seconds_max)
        self._round = 0
        self._spent: list[str] = []
        self._broken: RankFailed | None = None
        self._is_abandoned = False
        self._group: Any = None

    @property
    def failure(self) -> RankFailed | None:
        return None if self._broken is None else _copied(self._broken)

    def gather(self, name: str, payload: bytes) -> list[bytes]:
        with self._in_round(name) as key:
            if self.rank == 0:
                parts = self._collect(key, name, payload)
                self._publish(f"{key}/all", name, _pack(parts), spent=True)
                return parts
            self._publish(f"{key}/{self.rank}", name, payload)
            parts = _unpack(self._await(f"{key}/all", name))
            self._forget()
            return parts

    def gather_to_coordinator(self, name: str, payload: bytes) -> list[bytes] | None:
        with self._in_round(name) as key:
            if self.rank == 0:
                return self._collect(key, name, payload)
            self._publish(f"{key}/{self.rank}", name, payload)
            return None

    def broadcast(self, name: str, payload: bytes | None) -> bytes:
        with self._in_round(name) as key:
            if self.rank == 0:
                assert payload is not None, f"round {name!r}: the coordinator must pass a payload"
                large = len(payload) > MiB
                head = struct.pack("<?Q", large, len(payload))
                self._publish(f"{key}/all", name, head + (b"" if large else payload), spent=True)
                return self._broadcast(key, name, payload, len(payload)) if large else payload
            answer = self._await(f"{key}/all", name)
            large, nbytes = struct.unpack_from("<?Q", answer)
            return self._broadcast(key, name, None, nbytes) if large else answer[9:]

    def agree(self, phase: str, error: BaseException | None) -> None:
        agreed = agreed_error(phase, self.gather(f"agree on {phase}", encode_error(error)))
        if agreed is not None:
            raise agreed from error

    def all_to_all(self, name: str, send: Sequence[memoryview], recv: Sequence[memoryview]) -> None:
        check_all_to_all(self, name, send, recv)
        self.all_to_all_parts(name, [[view] for view in send], [[view] for view in recv])

    def all_to_all_parts(
        self,
        name: str,
        send: Sequence[Sequence[memoryview]],
        recv: Sequence[Sequence[memoryview]],
    ) -> None:
        with self._in_round(name) as key, self._transfer(key, name) as group:
            lengths = [sum(view.nbytes for view in parts) for parts in send]
            room = [sum(view.nbytes for view in parts) for parts in recv]
            self._check_lengths(key, name, group, lengths, room)
            works: list[dist.Work] = []
            for peer, parts in enumerate(recv):
                for tensor in itertools.chain(*map(_tensors, parts)):
                    works.append(group.recv([tensor], peer, 0))
            for step in range(1, self.size):
                peer = (self.rank + step) % self.size  # not everybody to the same rank at once
                for tensor in itertools.chain(*map(_tensors, send[peer])):
                    works.append(group.send([tensor], peer, 0))
            self._finish(key, name, works)

    def raise_flag(self, name: str) -> None:
        with self._requests(name):
            _set(self._store, f"flag/{name}", b"1")

    def flag_is_up(self, name: str) -> bool:
        with self._requests(name):
            return bool(self._store.check([f"flag/{name}"]))

    def board(self) -> Board:
        return _StoreBoard(self._store)

    def check_neighbour(self, phase: str) -> None:
        self.check_rank((self.rank + 1) % self.size, phase)

    def check_rank(self, rank: int, phase: str) -> None:
        if self._broken is not None:
            raise _copied(self._broken)
        with self._requests(phase):
            try:
                self._check_ranks(phase, [rank], waited=0.0)
            except RankFailed as failure:
                self._break(failure)
                raise

    def duplicate(self) -> World:
        return TorchWorld(deadlines=self._deadlines, members=self._ranks)

    def report_storage_wait(self, waits: bool) -> None:
        # The heartbeat notices a store that does not answer, and the next round raises that.
        with contextlib.suppress(RuntimeError, OSError):
            self._store.add("storage waits", 1 if waits else -1)

    def end(self, failure: RankFailed) -> None:
        self._break(self._broken or failure)

    def abandon(self) -> None:
        self._is_abandoned = True

    def close(self) -> None:
        self._heart.stop()
        self._group = None

    @contextlib.contextmanager
    def _requests(self, phase: str) -> Iterator[None]:
        """Around requests to the store: when it does not answer, its host is lost."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            lost = _store_lost(phase, error)
            self._broken = self._broken or lost
            raise lost from error

    # rounds

    @contextlib.contextmanager
    def _in_round(self, name: str) -> Iterator[str]:
        """The key prefix of the next round. Any failure inside ends this world: rounds would not
        match.
        """
        if self._broken is not None:
            raise _copied(self._broken)
        self._round += 1
        try:
            self._heart.check()
            yield str(self._round)
        except RankFailed as failure:
            self._break(failure)
            raise
        except (RuntimeError, OSError) as error:
            blamed = self._blame(name, error)
            self._break(blamed)
            raise blamed from error
        except BaseException as error:
            # Ctrl-C, too: the other ranks are in this round and would wait for us until its
            # deadline.
            text = f"rank {self.rank} left phase {name!r}: {type(error).__name__}: {error}"
            self._break(RankFailed(text, rank=self.rank, phase=name))
            raise

    def _collect(self, key: str, name: str, own: bytes) -> list[bytes]:
        others = range(1, self.size)
        self._wait({rank: f"{key}/{rank}" for rank in others}, name)
        parts = [own]
        parts += [self._fetch(f"{key}/{rank}", name, rank, remove=True) for rank in others]
        self._forget()
        return parts

    def _forget(self) -> None:
        """Remove what this rank published in earlier rounds: all ranks are past them now."""
        for spent in self._spent:
            _remove(self._store, spent)
        self._spent.clear()

    def _await(self, key: str, name: str) -> bytes:
        """What the coordinator publishes under `key`."""
        self._wait({0: key}, name)
        return self._fetch(key, name, 0, remove=False)

    def _publish(self, key: str, name: str, payload: bytes, *, spent: bool = False) -> None:
        """Write pieces of at most 4 MiB, the first one last, which has their number."""
        pieces = [payload[i : i + 4 * MiB] for i in range(0, len(payload), 4 * MiB)] or [b""]
        for index, piece in enumerate(pieces[1:], 1):
            _set(self._store, f"{key}+{index}", piece)
        encoded = name.encode()
        head = struct.pack("<IH", len(pieces), len(encoded)) + encoded
        _set(self._store, key, head + pieces[0])
        if spent:
            self._spent += [key, *(f"{key}+{index}" for index in range(1, len(pieces)))]

    def _fetch(self, key: str, name: str, rank: int, *, remove: bool) -> bytes:
        """What `rank` has published under `key`, which exists."""
        first = self._store.get(key)
        count, start = struct.unpack_from("<IH", first)
        theirs = first[6 : 6 + start].decode()
        if theirs != name:
            raise RankFailed(
                f"rank {rank} is in phase {theirs!r} while rank {self.rank} is in {name!r}: all "
                "ranks must make the same calls in the same order",
                rank=rank,
                phase=name,
            )
        rest = [f"{key}+{index}" for index in range(1, count)]
        payload = b"".join([first[6 + start :], *(self._store.get(piece) for piece in rest)])
        for spent in [key, *rest] if remove else ():
            _remove(self._store, spent)
        return payload

    def _wait(self, keys: dict[int, str], name: str) -> None:
        """Return when every rank's key exists; raise RankFailed naming the first that failed."""
        if not keys:
            return
        started = time.monotonic()
        check_next = started + 0.25
        names = list(keys.values())
        while not self._store.check(names):
            now = time.monotonic()
            # Every check is one request to the store for each missing rank: four times a second.
            if now >= check_next:
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                self._check_ranks(name, missing, waited=now - started)
                check_next = time.monotonic() + 0.25
            # A tenth of what was waited already: an answer is noticed 10 % late at most.
            time.sleep(min(max(0.0002, 0.1 * (now - started)), 0.02))

    def _check_ranks(self, name: str, missing: list[int], *, waited: float) -> None:
        """Raise when one of the ranks we wait for is known to be gone, or when time is up."""
        self._heart.check()
        if self._is_abandoned:
            text = f"rank {self.rank} gave up in phase {name!r}, because its process ends"
            raise RankFailed(text, rank=self.rank, phase=name)
        if self._store.check(["broken"]):
            raise _decode_failure(self._store.get("broken"))
        for rank in missing:
            gone = self._watch.gone(rank)
            if gone and not self._store.check(["broken"]):
                raise RankFailed(f"rank {rank} {gone} in phase {name!r}", rank=rank, phase=name)
        # The coordinator may wait for another rank itself: give it the time to name that one.
        grace = self._grace if missing == [0] else 0.0
        if missing and waited > self._deadlines.round_seconds_max + grace:
            # Any rank's wait counts: the missing rank may wait for one that waits for its storage.
            if waited <= self._deadlines.storage_seconds_max + grace and self._storage_waits():
                return
            raise RankFailed(
                f"rank {missing[0]} did not answer within {self._deadlines.round_seconds_max:g} "
                f"s in phase {name!r} ({ranks_text(missing)} missing); it hangs, or took another "
                "path",
                rank=missing[0],
                phase=name,
            )

    def _storage_waits(self) -> bool:
        return int(self._store.add("storage waits", 0)) > 0

    def _break(self, failure: RankFailed) -> None:
        """End this world with one text for all: the failure of the first rank
        that breaks it.
        """
        self._broken = failure
        with contextlib.suppress(Exception):  # the store may be what has failed
            if not self._store.check(["broken"]):
                _set(self._store, "broken", _encode_failure(failure))

    def _blame(self, name: str, error: Exception) -> RankFailed:
        """Who caused a failed transfer: a rank that is found dead within seconds, else this
        rank.
        """
        # gloo says that a connection broke and not who broke it; a rank that died shows by its
        # process.
        until = time.monotonic() + self._grace
        others = [rank for rank in range(self.size) if rank != self.rank]
        cause = f"{type(error).__name__}: {error}"
        while time.monotonic() < until:
            try:
                self._check_ranks(name, others, waited=0.0)
            except RankFailed as failure:
                return failure
            except Exception as lost:
                return _store_lost(name, lost)
            time.sleep(0.1)
        return RankFailed(
            f"rank {self.rank} failed in phase {name!r}: {cause}", rank=self.rank, phase=name
        )

    # tensor bytes

    @contextlib.contextmanager
    def _transfer(self, key: str, name: str) -> Iterator[Any]:
        """Our own group, after noting that this rank is here: an absent one can be named then."""
        here = f"{key}/here/{self.rank}"
        self._store.set(here, "1")
        if self._group is None:
            # torch cannot be stopped while it connects a group, so be sure that all ranks are here.
            self._wait({rank: f"{key}/here/{rank}" for rank in range(self.size)}, name)
            self._group = self._connected()
        yield self._group
        self._spent.append(here)

    def _connected(self) -> Any:
        """A gloo group of these ranks, outside of torch's list of groups.

        Not `new_group`: for some of the ranks it either needs all others too, or builds the group's
        name from the number of groups that a rank is in; where these differ it waits for ever.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=self._deadlines.round_seconds_max)
        store = PrefixStore("gloo", self._store)
        return dist.distributed_c10d.ProcessGroupGloo(store, self.rank, self.size, timeout)

    def _broadcast(self, key: str, name: str, payload: bytes | None, nbytes: int) -> bytes:
        whole = bytearray(nbytes) if payload is None else payload
        with self._transfer(key, name) as group:
            for tensor in _tensors(memoryview(whole), 16 * MiB):
                self._finish(key, name, [group.broadcast(tensor, 0)])
        return bytes(whole)

    def _check_lengths(
        self,
        key: str,
        name: str,
        group: Any,
        lengths: Sequence[int],
        room: Sequence[int],
    ) -> None:
        mine = torch.tensor(lengths, dtype=torch.int64)
        theirs = torch.zeros_like(mine)
        others = [peer for peer in range(self.size) if peer != self.rank]
        works = [group.recv([theirs[peer : peer + 1]], peer, 0) for peer in others]
        works += [group.send([mine[peer : peer + 1]], peer, 0) for peer in others]
        self._finish(key, name, works)
        for peer, (sent, expected) in enumerate(zip(theirs.tolist(), room, strict=True)):
            if sent != expected:
                raise RankFailed(
                    f"all-to-all {name!r}: rank {peer} sends {sent} bytes to rank "
                    f"{self.rank}, which expects {expected}",
                    rank=peer,
                    phase=name,
                )

    def _finish(self, key: str, name: str, works: list[dist.Work]) -> None:
        """Wait for transfers, watching the other ranks meanwhile."""
        started = time.monotonic()
        others = [rank for rank in range(self.size) if rank != self.rank]
        waiter = _Waiter(works)
        while not waiter.done.wait(0.5):
            self._check_ranks(name, others, waited=0.0)
            # The round's deadline is for ranks that never came; for those that did, gloo has its
            # own.
            absent = [rank for rank in others if not self._store.check([f"{key}/here/{rank}"])]
            self._check_ranks(name, absent, waited=time.monotonic() - started)
        if waiter.error is not None:
            raise waiter.error


def _store_lost(phase: str, error: Exception) -> RankFailed:
    return RankFailed(
        f"the rendezvous store of torch.distributed does not answer in phase {phase!r} "
        f"({type(error).__name__}: {error}): its host, usually rank 0, is gone",
        rank=0,
        phase=phase,
    )


class _StoreBoard:
    """A board in a store; posts of ranks that have not arrived yet are checked one by one."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen: set[str] = set()

    def post(self, key: str, value: bytes) -> None:
        self._store.set(f"board/{key}", value)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        names = [f"board/{key}" for key in keys]
        if not self._seen.issuperset(names):
            self._seen.update(name for name in names if self._store.check([name]))
        there = [name for name in names if name in self._seen]
        posts = dict(zip(there, self._store.multi_get(there), strict=True)) if there else {}
        return [posts.get(name) for name in names]


class _Waiter:
    """Waits for transfers in a thread of its own, because gloo can only be waited for, not asked.

    A daemon: when another rank hangs, it stays until gloo's timeout, and must not keep a process
    that gave up from ending.
    """

    def __init__(self, works: list[dist.Work]) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self._works = works
        threading.Thread(target=self._wait, name="ckpt-all-to-all", daemon=True).start()

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


def _tensors(view: memoryview, nbytes_max: int = 64 * MiB) -> list[torch.Tensor]:
    """A buffer as uint8 tensors of bounded size that share its memory; a read-only one is
    copied.
    """
    if not view.nbytes:
        return []
    whole = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    return [whole[i : i + nbytes_max] for i in range(0, view.nbytes, nbytes_max)]


def _pack(parts: Sequence[bytes]) -> bytes:
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    return b"".join([lengths, *parts])


def _unpack(data: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<I", data)
    offset, parts = 4 + 8 * count, []
    for nbytes in struct.unpack_from(f"<{count}Q", data, 4):
        parts.append(data[offset : offset + nbytes])
        offset += nbytes
    return parts


def _encode_failure(failure: RankFailed) -> bytes:
    return json.dumps([str(failure), failure.rank, failure.phase]).encode()


def _decode_failure(data: bytes) -> RankFailed:
    message, rank, phase = json.loads(data)
    return RankFailed(message, rank=rank, phase=phase)


def _copied(failure: RankFailed) -> RankFailed:
    return RankFailed(str(failure), rank=failure.rank, phase=failure.phase)


def _set(store: Any, key: str, value: bytes) -> None:
    store.set(key, value)  # torch's annotation says str, its stores take bytes


def _remove(store: Store, key: str) -> None:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can
        store.delete_key(key)


def _own_prefix(ranks: tuple[int, ...], rank: int) -> Store:
    """A part of the default store that no other world uses.

    Each rank counts the worlds it made over these ranks, in the store itself; the counts agree
    because all ranks make them in the same order.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in every torch

    # There is no public way to the store that all ranks share already.
    base: Any = dist.distributed_c10d._get_default_store()
    # Own connection: the heartbeat never waits behind the user's requests. Where it cannot be had
    # (older torch) the store is shared; our own requests never block.
    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
        base = base.clone()
    group = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    home = PrefixStore(f"shardpoint/{group}", base)
    number = home.add(f"worlds/{rank}", 1)
    return PrefixStore(f"{number}", home)
