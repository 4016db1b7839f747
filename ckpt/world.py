"""Ranks talking to each other: control rounds with deadlines, and one exchange of tensor bytes.

Every method of a World is collective: all ranks call the same methods with the same names in the
same order, on failure paths too. A rank that dies, hangs or leaves is named on all others.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ckpt import errors
from ckpt.errors import CheckpointError, RankFailed

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_Result = TypeVar("_Result")

MiB = 1024 * 1024
_SHARED_CLASSES: dict[str, Callable[[Any], CheckpointError]] = {
    cls.__name__: cls
    for cls in (
        errors.InvalidState,
        errors.Mismatch,
        errors.NoCheckpoint,
        errors.Corrupt,
        errors.UnsupportedFormat,
        errors.StoreRefused,
        errors.Fenced,
        errors.OutcomeUnknown,
        errors.LoadInterrupted,
        errors.SaveDropped,
    )
}


class World(ABC):
    """The ranks that save or load together. Rank 0 is the lead.

    `global_ranks` are torch.distributed's own numbers of the ranks, in rank order.
    """

    rank: int
    size: int
    global_ranks: tuple[int, ...]

    @property
    def failure(self) -> RankFailed | None:
        """Why this world is at its end: a rank died, left or did not answer. None while it is
        usable; errors that ranks agreed on leave it so.
        """
        return None

    @abstractmethod
    def gather(self, name: str, payload: bytes) -> list[bytes]:
        """Every rank's payload on every rank, in rank order. For small payloads."""

    @abstractmethod
    def gather_to_lead(self, name: str, payload: bytes) -> list[bytes] | None:
        """Every rank's payload on the lead, in rank order; None elsewhere, without waiting."""

    @abstractmethod
    def share(self, name: str, payload: bytes | None) -> bytes:
        """The lead's payload on every rank; the others give None."""

    @abstractmethod
    def agree(self, phase: str, error: BaseException | None) -> None:
        """Return when no rank has an error; otherwise raise the same error on every rank.

        When the failing ranks have one class of `ckpt.errors` in common, that is raised, with every
        problem and its ranks; otherwise RankFailed with rank, phase, class and message of the
        first. A world of one raises the error itself.
        """

    @abstractmethod
    def exchange(self, name: str, send: Sequence[memoryview], recv: Sequence[memoryview]) -> None:
        """All-to-all of bytes: fill `recv[r]` with what rank r has in `send[this rank]`.

        Lengths are known to both sides and may all differ; those of this rank itself are 0. Buffers
        are flat memoryviews of format "B" and must not change meanwhile; after an error `recv` is
        undefined.
        """

    def exchange_parts(
        self,
        name: str,
        send: Sequence[Sequence[memoryview]],
        recv: Sequence[Sequence[memoryview]],
    ) -> None:
        """`exchange` with several buffers for each rank: as many, of the same lengths, on both
        sides.
        """
        joined = [memoryview(b"".join(parts)) for parts in send]
        received = [memoryview(bytearray(sum(p.nbytes for p in parts))) for parts in recv]
        self.exchange(name, joined, received)
        for parts, got in zip(recv, received, strict=True):
            for part in parts:
                part[:] = got[: part.nbytes]
                got = got[part.nbytes :]

    @abstractmethod
    def raise_flag(self, name: str) -> None:
        """Tell all ranks one bit: `flag_is_up(name)` is soon true on each of them, and stays so.

        Not a round: any rank may do it at any time, more than once.
        """

    @abstractmethod
    def flag_is_up(self, name: str) -> bool:
        """Whether any rank raised that flag. Not a round; one request, without waiting."""

    @abstractmethod
    def look(self, phase: str) -> None:
        """Raise RankFailed when a rank is known to be gone. Not a round, and without waiting.

        Each rank looks at one other only and tells all what it finds, so that looking often costs
        little in worlds of any size; a death is heard of when all ranks look.
        """

    @abstractmethod
    def twin(self) -> World:
        """Another world of the same ranks, for another thread. Collective, in the same order on all
        ranks when there are several.
        """

    def abandon(self) -> None:
        """Have a round that another thread of this process waits in end soon, with an error.

        By default it is left to the deadline of the round.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Leave. Not collective; other ranks that still wait for this one get an error that names
        it.
        """


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


def group_of_this_process() -> dist.ProcessGroup | None:
    """A new process group of this process alone, made without the others; None where none is
    needed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


def collectively(world: World, phase: str, run: Callable[[], _Result]) -> _Result:
    """`run()` on every rank, then agreement: it returns on all ranks or raises the same on all."""
    try:
        result = run()
    except Exception as error:
        world.agree(phase, error)
        raise AssertionError("agree raises when a rank has an error") from error
    world.agree(phase, None)
    return result


class SoloWorld(World):
    """A world of one rank: nothing is sent, errors are raised as they are."""

    rank = 0
    size = 1

    def __init__(self, global_rank: int = 0) -> None:
        self.global_ranks = (global_rank,)
        self._flags: set[str] = set()

    def gather(self, name: str, payload: bytes) -> list[bytes]:
        return [payload]

    def gather_to_lead(self, name: str, payload: bytes) -> list[bytes] | None:
        return [payload]

    def share(self, name: str, payload: bytes | None) -> bytes:
        assert payload is not None, f"round {name!r}: the lead must give a payload"
        return payload

    def agree(self, phase: str, error: BaseException | None) -> None:
        if error is not None:
            raise error

    def exchange(self, name: str, send: Sequence[memoryview], recv: Sequence[memoryview]) -> None:
        check_exchange(self, name, send, recv)

    def raise_flag(self, name: str) -> None:
        self._flags.add(name)

    def flag_is_up(self, name: str) -> bool:
        return name in self._flags

    def look(self, phase: str) -> None:
        pass

    def twin(self) -> World:
        return SoloWorld(self.global_ranks[0])

    def close(self) -> None:
        pass


# --- agreement on errors, shared by all worlds ----------------------------------------------------


def encode_error(error: BaseException | None) -> bytes:
    """An error as other ranks need it; no bytes at all when there is none."""
    if error is None:
        return b""
    body: dict[str, Any] = {"class": type(error).__name__, "message": str(error)}
    if isinstance(error, errors.InvalidState | errors.Mismatch):
        body["problems"] = list(error.problems)
    if isinstance(error, RankFailed):
        body["failed"] = [error.rank, error.phase]
    # A subclass that only one module knows travels as the shared class it is a kind of.
    body["shared"] = next(
        (c.__name__ for c in type(error).__mro__ if c.__name__ in _SHARED_CLASSES), ""
    )
    return json.dumps(body).encode("utf-8", "backslashreplace")


def agreed_error(phase: str, answers: Sequence[bytes]) -> CheckpointError | None:
    """The one error that all ranks raise, from the answers of all: the same answers, the same
    error.
    """
    failed = {rank: json.loads(answer) for rank, answer in enumerate(answers) if answer}
    if not failed:
        return None
    shared = {body["shared"] for body in failed.values()}
    cls = _SHARED_CLASSES.get(shared.pop()) if len(shared) == 1 else None
    if cls is None:
        return _rank_failed(phase, failed)
    if "problems" in next(iter(failed.values())):
        told = [(problem, rank) for rank, body in failed.items() for problem in body["problems"]]
        return cls(_by_text(told, len(answers)))
    return cls("; ".join(_by_text([(b["message"], r) for r, b in failed.items()], len(answers))))


def _rank_failed(phase: str, failed: dict[int, Any], shown_max: int = 8) -> RankFailed:
    first_rank, first = next(iter(failed.items()))
    if "failed" in first and all(body.get("failed") == first["failed"] for body in failed.values()):
        return RankFailed(first["message"], rank=first["failed"][0], phase=first["failed"][1])
    told = [
        f"rank {rank} failed in phase {phase!r}: {body['class']}: {body['message']}"
        for rank, body in list(failed.items())[:shown_max]
    ]
    if len(failed) > shown_max:
        told.append(f"and {len(failed) - shown_max} more ranks")
    return RankFailed("; ".join(told), rank=first_rank, phase=phase)


def _by_text(told: Sequence[tuple[str, int]], size: int) -> list[str]:
    """Each text once, with the ranks that have it, in order of the first."""
    ranks: dict[str, list[int]] = {}
    for text, rank in told:
        if rank not in ranks.setdefault(text, []):
            ranks[text].append(rank)
    return [text if len(at) == size else f"{_named(at)}: {text}" for text, at in ranks.items()]


def _named(ranks: Sequence[int], shown_max: int = 8) -> str:
    text = ", ".join(str(rank) for rank in ranks[:shown_max])
    if len(ranks) > shown_max:
        text += f" and {len(ranks) - shown_max} more"
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def check_exchange(
    world: World, name: str, send: Sequence[memoryview], recv: Sequence[memoryview]
) -> None:
    """Raise ValueError when the buffers of an exchange do not fit the world."""
    if len(send) != world.size or len(recv) != world.size:
        raise ValueError(
            f"exchange {name!r}: {len(send)} send and {len(recv)} receive buffers, expected "
            f"{world.size} of each"
        )
    if send[world.rank].nbytes or recv[world.rank].nbytes:
        raise ValueError(f"exchange {name!r}: the buffers of this rank for itself must be empty")


# --- torch.distributed ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deadlines:
    """When ranks give up on each other, in seconds.

    A process that is gone is noticed within a second by ranks on its own machine, and within
    `silence_seconds_max` by the others; a process that is there but does nothing, at
    `round_seconds_max`.
    """

    round_seconds_max: float = 600.0
    heartbeat_seconds: float = 0.5
    silence_seconds_max: float = 4.0


class TorchWorld(World):
    """The ranks of a torch process group. All ranks of the group must create it together, in the
    same order when there are several.

    Control rounds go through a prefix of torch.distributed's own store, never through the user's
    groups, so they may run in a background thread, one thread at a time. Large `share`s and
    `exchange` go over a gloo group that is created at their first use; call those from the thread
    that runs the training.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self._deadlines = deadlines or Deadlines()
        self._process_group = process_group
        self._ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        self.global_ranks = self._ranks
        self._store = _own_prefix(self._ranks, self.rank)
        self._heart = _Heart(self._store, self.rank, self._deadlines.heartbeat_seconds)
        self._watch = _Watch(self._store, self._deadlines.silence_seconds_max)
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

    def gather_to_lead(self, name: str, payload: bytes) -> list[bytes] | None:
        with self._in_round(name) as key:
            if self.rank == 0:
                return self._collect(key, name, payload)
            self._publish(f"{key}/{self.rank}", name, payload)
            return None

    def share(self, name: str, payload: bytes | None) -> bytes:
        with self._in_round(name) as key:
            if self.rank == 0:
                assert payload is not None, f"round {name!r}: the lead must give a payload"
                large = len(payload) > MiB
                head = struct.pack("<?Q", large, len(payload))
                self._publish(f"{key}/all", name, head + (b"" if large else payload), spent=True)
                return self._broadcast(key, name, payload, len(payload)) if large else payload
            got = self._await(f"{key}/all", name)
            large, nbytes = struct.unpack_from("<?Q", got)
            return self._broadcast(key, name, None, nbytes) if large else got[9:]

    def agree(self, phase: str, error: BaseException | None) -> None:
        agreed = agreed_error(phase, self.gather(f"agree on {phase}", encode_error(error)))
        if agreed is not None:
            raise agreed from error

    def exchange(self, name: str, send: Sequence[memoryview], recv: Sequence[memoryview]) -> None:
        check_exchange(self, name, send, recv)
        self.exchange_parts(name, [[view] for view in send], [[view] for view in recv])

    def exchange_parts(
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
        with self._asking(name):
            _set(self._store, f"flag/{name}", b"1")

    def flag_is_up(self, name: str) -> bool:
        with self._asking(name):
            return bool(self._store.check([f"flag/{name}"]))

    def look(self, phase: str) -> None:
        if self._broken is not None:
            raise _copied(self._broken)
        with self._asking(phase):
            try:
                self._look(phase, [(self.rank + 1) % self.size], waited=0.0)
            except RankFailed as failure:
                self._break(failure)
                raise

    def twin(self) -> World:
        return TorchWorld(self._process_group, deadlines=self._deadlines)

    def abandon(self) -> None:
        self._is_abandoned = True

    def close(self) -> None:
        self._heart.stop()
        self._group = None

    @contextlib.contextmanager
    def _asking(self, phase: str) -> Iterator[None]:
        """A store that does not answer has lost its host."""
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
        """What the lead publishes under `key`."""
        self._wait({0: key}, name)
        return self._fetch(key, name, 0, remove=False)

    def _publish(self, key: str, name: str, payload: bytes, *, spent: bool = False) -> None:
        """Write pieces of at most 4 MiB, the first one last: it says how many there are."""
        pieces = [payload[at : at + 4 * MiB] for at in range(0, len(payload), 4 * MiB)] or [b""]
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
        look_next = started + 0.25
        wanted = list(keys.values())
        while not self._store.check(wanted):
            now = time.monotonic()
            if now >= look_next:
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                self._look(name, missing, waited=now - started)
                look_next = time.monotonic() + 0.25
            # A tenth of what was waited already: an answer is noticed 10 % late at most.
            time.sleep(min(max(0.0002, 0.1 * (now - started)), 0.02))

    def _look(self, name: str, missing: list[int], *, waited: float) -> None:
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
        # Who waits for the lead gives it time to name the rank that it waits for itself.
        grace = self._deadlines.silence_seconds_max if missing == [0] else 0.0
        if missing and waited > self._deadlines.round_seconds_max + grace:
            raise RankFailed(
                f"rank {missing[0]} did not answer within {self._deadlines.round_seconds_max:g} "
                "s in "
                f"phase {name!r} ({_named(missing)} missing); it hangs, or took another path",
                rank=missing[0],
                phase=name,
            )

    def _break(self, failure: RankFailed) -> None:
        """End this world with one text for all: the first rank that breaks it is heard by the
        others.
        """
        self._broken = failure
        with contextlib.suppress(Exception):  # the store may be what has failed
            if not self._store.check(["broken"]):
                _set(self._store, "broken", _encode_failure(failure))

    def _blame(self, name: str, error: Exception) -> RankFailed:
        """Who caused a failed transfer: a rank that is found dead within seconds, else this
        rank.
        """
        until = time.monotonic() + self._deadlines.silence_seconds_max
        others = [rank for rank in range(self.size) if rank != self.rank]
        cause = f"{type(error).__name__}: {error}"
        while time.monotonic() < until:
            try:
                self._look(name, others, waited=0.0)
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
        """Our own group, after saying that this rank is here: whoever is not can be named."""
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
                    f"exchange {name!r}: rank {peer} sends {sent} bytes to rank {self.rank}, which "
                    f"expects {expected}",
                    rank=peer,
                    phase=name,
                )

    def _finish(self, key: str, name: str, works: list[dist.Work]) -> None:
        """Wait for transfers, watching the other ranks meanwhile."""
        started = time.monotonic()
        others = [rank for rank in range(self.size) if rank != self.rank]
        waiter = _Waiter(works)
        while not waiter.done.wait(0.5):
            self._look(name, others, waited=0.0)
            absent = [rank for rank in others if not self._store.check([f"{key}/here/{rank}"])]
            self._look(name, absent, waited=time.monotonic() - started)
        if waiter.error is not None:
            raise waiter.error


def _store_lost(phase: str, error: Exception) -> RankFailed:
    return RankFailed(
        f"the rendezvous store of torch.distributed does not answer in phase {phase!r} "
        f"({type(error).__name__}: {error}): its host, usually rank 0, is gone",
        rank=0,
        phase=phase,
    )


class _Waiter:
    """Waits for transfers in a thread of its own, because gloo can only be waited for, not asked.

    A daemon: when another rank hangs, it stays until gloo's timeout, and must not keep a process
    that gave up from ending.
    """

    def __init__(self, works: list[dist.Work]) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self._works = works
        threading.Thread(target=self._wait, name="ckpt-exchange", daemon=True).start()

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
    return [whole[at : at + nbytes_max] for at in range(0, view.nbytes, nbytes_max)]


def _pack(parts: Sequence[bytes]) -> bytes:
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    return b"".join([lengths, *parts])


def _unpack(data: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<I", data)
    at, parts = 4 + 8 * count, []
    for nbytes in struct.unpack_from(f"<{count}Q", data, 4):
        parts.append(data[at : at + nbytes])
        at += nbytes
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


@dataclass(frozen=True, slots=True)
class _Process:
    """Enough to tell whether a process of this machine still runs, even when its pid was given
    anew.
    """

    machine: str
    pid: int
    started: str

    @staticmethod
    def this() -> _Process:
        pid = os.getpid()
        return _Process(_machine(), pid, _start_of(pid) or "")

    def runs(self) -> bool | None:
        """None when it is on another machine, or this one cannot tell."""
        if self.machine != _machine() or not self.started:
            return None
        return _start_of(self.pid) == self.started


def _machine() -> str:
    """Machine and process namespace: pids of another container mean nothing here."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """The start time of a process in the kernel's ticks; None when there is none, or only its
    zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in (b"Z", b"X") else after_name[19].decode()


class _Heart:
    """Tells the others that this process lives, from a daemon thread. A failure to do so is kept
    and raised at the next round."""

    def __init__(self, store: Store, rank: int, seconds: float) -> None:
        process = _Process.this()
        self._key = f"beat/{rank}"
        self._store = store
        self._seconds = seconds
        self._error: Exception | None = None
        self._stopped = threading.Event()
        store.set(f"process/{rank}", json.dumps([process.machine, process.pid, process.started]))
        store.set(self._key, "0")
        # A daemon: a process that ends without closing its world must not wait for it.
        self._thread = threading.Thread(target=self._beat, name="ckpt-heartbeat", daemon=True)
        self._thread.start()
        # A daemon thread that comes back from the store while the interpreter is taken down aborts
        # the whole process (std::terminate in C++), so it is ended before that.
        atexit.register(self._end)

    def check(self) -> None:
        """Raise RankFailed when the store has stopped answering."""
        error = self._error
        if error is not None:
            raise RankFailed(
                "the rendezvous store of torch.distributed does not answer "
                f"({type(error).__name__}: {error}): its host, usually rank 0, is gone",
                rank=0,
                phase="heartbeat",
            ) from error

    def stop(self) -> None:
        """Say goodbye, so that nobody waits for this rank."""
        if not self._stopped.is_set():
            self._end()
            atexit.unregister(self._end)
            with contextlib.suppress(Exception):  # the store's host may have left before us
                self._store.set(self._key, "left")

    def _end(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def _beat(self) -> None:
        count = 0
        while not self._stopped.wait(self._seconds):
            count += 1
            try:
                self._store.set(self._key, str(count))
                self._error = None
            except Exception as error:
                self._error = error


class _Watch:
    """What one rank knows about the life of the others."""

    def __init__(self, store: Store, silence_seconds_max: float) -> None:
        self._store = store
        self._silence_seconds_max = silence_seconds_max
        self._processes: dict[int, _Process] = {}
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._looked = 0.0

    def gone(self, rank: int) -> str:
        """Why `rank` will never answer ("has died"), or "" when it may."""
        if not self._store.check([f"beat/{rank}"]):
            return ""  # has not arrived yet: the round's deadline counts
        beat = self._store.get(f"beat/{rank}")
        if beat == b"left":
            return "has left"
        runs = self._process(rank).runs()
        if runs is not None:
            return "" if runs else "has died"
        return self._silent(rank, beat)

    def _silent(self, rank: int, beat: bytes) -> str:
        now = time.monotonic()
        if now - self._looked > self._silence_seconds_max / 2:
            self._heard.clear()  # we ourselves were away or not looking: start counting anew
        self._looked = now
        known = self._heard.get(rank)
        if known is None or known[0] != beat:
            self._heard[rank] = (beat, now)
            return ""
        silence = now - known[1]
        if silence <= self._silence_seconds_max:
            return ""
        return f"has died (no heartbeat for {silence:.1f} s)"

    def _process(self, rank: int) -> _Process:
        if rank not in self._processes:
            machine, pid, started = json.loads(self._store.get(f"process/{rank}"))
            self._processes[rank] = _Process(machine, pid, started)
        return self._processes[rank]
