"""Copies of near files at other hosts: each host serves its tier, and ranks put their files there.

files of a rank -> parts, each with its checksum -> the tiers of the hosts that keep copies
                                                 -> length and seal read back from each

    chunks of the files of the other hosts of a group -> XOR -> a parity file in the own tier

Copies have connections of their own, never the training's group. A file in another host's tier has
the key that it has at home, and is a file of that tier like any other. Parity is fetched, not sent:
one writer makes each file of it, so repeating a request can do no harm.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

from ckpt.errors import Corrupt
from ckpt.near.parity import Parity, ParityGroup, files_in, read_chunk, read_parity, xor_into
from ckpt.near.placement import Hosts
from ckpt.near.records import NearFile
from ckpt.near.tier import Tier, has_file, refuse_fenced
from ckpt.near.value import Near
from ckpt.world.base import World, shared
from ckpt.world.job import place_of_environment
from ckpt.world.liveness import this_network
from storage import StorageError, Store, TransientError
from storage.http import client_tls, server_tls
from storage.peers.server import PeerServer
from storage.peers.store import PeerStore
from storage.retry import RetryPolicy
from storage.threads import in_order

logger = logging.getLogger(__name__)

T = TypeVar("T")
MIB = 1 << 20
PART_NBYTES = 4 * MIB
SEND_SECONDS_MAX = 300.0  # for one near save; less than ranks wait for each other in a round
PEER_SECONDS = 20.0  # that requests to one peer are repeated
PAUSES_SECONDS = (30.0, 600.0)  # before a peer that did not answer is tried again: first, longest

# How fast copies are sent: as fast as goes without slower steps, and fast enough for the period.
RATE_MAX = 64 * 1024 * MIB  # bytes per second: no bound
RATE_MIN = 8 * MIB
SLOWER = 1.05  # a step that takes this much longer than one without copies has suffered
DOWN, UP = 0.7, 1.1  # so the rate settles where about one step in five suffers
SHARE_MAX = 0.8  # of the time between two near saves that copies may take
SECONDS_MAX = 250.0  # of that time: slower ones would be given up
QUIET_STEPS = 20  # the newest, of which the median is compared with
QUIET_STEPS_MIN = 3


class TooSlowError(StorageError):
    """A host takes copies, but not in time."""


class _Peer:
    """The tier of another host. After a failure it is left alone for a while."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._pause_seconds = 0.0
        self._until = 0.0
        self._failure = ""

    def run(self, work: Callable[[Store], T]) -> T:
        """What `work` does with its store. Raises StorageError, also while it is left alone: else
        every near save would wait for it.
        """
        if (left := self._until - time.monotonic()) > 0:
            raise StorageError(
                f"{self.store.url} took no copy, and is tried again in {left:.0f} s: "
                f"{self._failure}"
            )
        try:
            result = work(self.store)
        # A host that is full, or refuses, costs no time: only slow or silent ones are left alone
        # for a while.
        except (TransientError, TooSlowError) as error:
            first, longest = PAUSES_SECONDS
            self._pause_seconds = min(longest, max(first, 2 * self._pause_seconds))
            self._until = time.monotonic() + self._pause_seconds
            self._failure = f"{error!s:.300}"
            raise
        self._pause_seconds = self._until = 0.0
        return result


class CopyPace:
    """The rate of one rank's copies, in bytes per second: a rule on numbers, which knows neither
    clocks nor networks.

    It falls when steps take longer while copies are sent, and rises while they do not; never so far
    that the copies of one near save would take more than `SHARE_MAX` of the time until the next.
    """

    def __init__(self) -> None:
        self.rate = float(RATE_MAX)
        self._floor = float(RATE_MIN)
        self._quiet: deque[float] = deque(maxlen=QUIET_STEPS)
        self._free_seconds = 0.0
        self._sent = 0
        self._lock = threading.Lock()

    def saved(self, nbytes: int, seconds: float) -> None:
        """A near save has sent `nbytes`; the next one began `seconds` after it."""
        with self._lock:
            self._floor = max(RATE_MIN, nbytes / max(SHARE_MAX * min(seconds, SECONDS_MAX), 1e-3))
            self.rate = max(self.rate, self._floor)

    def stepped(self, seconds: float) -> None:
        """The training has done a step in `seconds`, saves that it waited for left out."""
        with self._lock:
            sent, self._sent = self._sent, 0
            if not sent:
                self._quiet.append(seconds)
                return
            if len(self._quiet) < QUIET_STEPS_MIN:
                return
            if seconds > SLOWER * median(self._quiet):
                # From what it really was: without a bound, a rate says nothing.
                self.rate = max(self._floor, DOWN * min(self.rate, sent / seconds))
            else:
                self.rate = min(float(RATE_MAX), UP * self.rate)

    def wait_seconds(self, nbytes: int, now: float) -> float:
        """How long to wait before `nbytes` are sent, at the time `now`; they count as sent then."""
        with self._lock:
            begin = max(self._free_seconds, now)
            self._free_seconds = begin + nbytes / self.rate
            self._sent += nbytes
            return begin - now


class Copies:
    """The copies of one rank's files at other hosts, and the server of its host's tier if this is
    the first rank there. Made by `open_copies`. `send` is for one thread at a time.
    """

    def __init__(
        self, world: World, tier: Tier, server: PeerServer | None, stores: Sequence[Store]
    ) -> None:
        self._world = world
        self._tier = tier
        self._server = server
        self._peers = [_Peer(store) for store in stores]
        self.pace = CopyPace()

    def send(self, prefix: str, files: Sequence[NearFile], *, epoch: int) -> int:
        """Put files of the own tier into the tiers of all hosts that keep copies of them. Returns
        the bytes that were sent.

        Raises StorageError when a host takes one not at all or too slowly, Fenced when one is used
        by a later epoch than `epoch`, Corrupt when one has other bytes than it was sent.
        """
        until = time.monotonic() + SEND_SECONDS_MAX

        def send_to(to: Store) -> int:
            refuse_fenced(to, epoch)
            for file in files:
                # As they are stored: an encrypted one stays so.
                stored = self._tier.store.info(prefix + file.name)
                self._put(to, stored.key, stored.nbytes, until)
                if not has_file(self._tier.files_in(to), prefix, file):
                    raise Corrupt(
                        f"{to.url}: the copy of {prefix}{file.name} differs from what was sent; "
                        "check that host's memory or disk"
                    )
            return sum(file.nbytes for file in files)

        threads, name = len(self._peers), "ckpt-copies"
        each = in_order(lambda peer: peer.run(send_to), self._peers, threads=threads, name=name)
        return sum(each)

    def _put(self, store: Store, key: str, nbytes: int, until: float) -> None:
        buffer = memoryview(bytearray(min(PART_NBYTES, nbytes)))
        with store.create(key, nbytes, part_nbytes=PART_NBYTES) as writer:
            for index, start in enumerate(range(0, nbytes, PART_NBYTES)):
                # Raises where a rank is gone: it may be this peer, which would be waited for.
                self._world.check_neighbour("near copies")
                if time.monotonic() > until:
                    raise TooSlowError(
                        f"{store.url} has taken {start / MIB:.0f} of {nbytes / MIB:.0f} MiB of "
                        f"{key} in {SEND_SECONDS_MAX:.0f} s: the near save is given up"
                    )
                part = buffer[: min(PART_NBYTES, nbytes - start)]
                time.sleep(self.pace.wait_seconds(part.nbytes, time.monotonic()))
                self._tier.store.get_into(key, start, [part])
                writer.write_part(index, [part])

    @property
    def stores(self) -> list[Store]:
        """The tiers of the other hosts."""
        return [peer.store for peer in self._peers]

    def close(self) -> None:
        """Serve no more, and end all connections."""
        for peer in self._peers:
            with suppress(StorageError):
                peer.store.close()
        if self._server is not None:
            self._server.close()


class ParityCopies(Copies):
    """Parity in place of copies. This rank makes its share of what its host keeps of the `others`
    of its group, whose tiers `stores` are.
    """

    def __init__(
        self,
        hosts: Hosts,
        server: PeerServer | None,
        stores: Sequence[PeerStore],
        others: Sequence[str],
    ) -> None:
        super().__init__(hosts.world, hosts.tier, server, stores)
        self._hosts = hosts
        self._others = dict(zip(others, self._peers, strict=True))

    def send(self, prefix: str, files: Sequence[NearFile], *, epoch: int) -> int:
        """Fetch and XOR what other hosts have below `prefix`. Returns the bytes that came: of all
        ranks, as many as they have saved.

        Raises like the one of copies.
        """
        if not self._others:
            return 0
        until = time.monotonic() + SEND_SECONDS_MAX
        store = self._tier.store
        parity = self._planned(prefix)
        header = parity.header()
        nbytes = len(header) + parity.stop - parity.start
        part = memoryview(bytearray(min(PART_NBYTES, nbytes)))
        with (
            store.create(parity.key, nbytes, part_nbytes=PART_NBYTES) as writer,
            closing(self._fetched(parity, len(header), nbytes, until)) as fetched,
        ):
            for index, start in enumerate(range(0, nbytes, PART_NBYTES)):
                part = part[: nbytes - start]
                ahead = header[start : start + len(part)]
                target = part[len(ahead) :]
                part[:] = ahead + bytes(len(target))
                for _ in self._others:
                    xor_into(target, next(fetched))
                writer.write_part(index, [part])
        if read_parity(store, parity.key) != parity:
            raise Corrupt(f"{store.url}/{parity.key} differs from what was written; check the disk")
        pieces, share = parity.group.pieces, (parity.keeper, parity.start, parity.stop)
        return sum(high - low for one in self._others for _, low, high in pieces(one, *share))

    def _planned(self, prefix: str) -> Parity:
        """The share of this rank: ranks of a host make parts of its parity of equal length."""
        hosts, own = self._hosts, self._hosts.own
        files = {
            host: peer.run(partial(files_in, prefix=prefix)) for host, peer in self._others.items()
        }
        files[own] = files_in(self._tier.store, prefix)
        group = ParityGroup(prefix, tuple(sorted(files)), tuple(files[h] for h in sorted(files)))
        for host in group.hosts:
            if group.ranks_of(host) != {*(ranks := hosts.ranks_of(host))}:
                raise Corrupt(f"near parity: the host of ranks {ranks} has files {files[host]}")
        ranks = hosts.ranks_of(own)
        number, total = ranks.index(hosts.world.rank), group.parity_nbytes(own)
        start, stop = (total * place // len(ranks) for place in (number, number + 1))
        return Parity(group, own, hosts.world.rank, start, stop)

    def _fetched(
        self, parity: Parity, ahead: int, nbytes: int, until: float
    ) -> Generator[memoryview, None, None]:
        """For each part of a file of `nbytes`, `ahead` of them its header, what each other host has
        for it.
        """
        # Of each host one part is under way, so the buffer of the one before is free.
        buffers = [memoryview(bytearray(min(PART_NBYTES, nbytes))) for _ in self._others]

        def wanted() -> Iterator[tuple[str, int, memoryview]]:
            for first in range(0, nbytes, PART_NBYTES):
                # Raises where a rank is gone: it may be one that would be waited for.
                self._world.check_neighbour("near copies")
                low, high = max(first, ahead), min(first + PART_NBYTES, nbytes)
                for host, buffer in zip(self._others, buffers, strict=True):
                    yield host, parity.start + low - ahead, buffer[: max(high - low, 0)]

        def fetch(one: tuple[str, int, memoryview]) -> memoryview:
            host, start, target = one
            time.sleep(self.pace.wait_seconds(target.nbytes, time.monotonic()))

            def read(store: Store) -> None:
                assert isinstance(store, PeerStore)
                read = store.get_checked_into
                read_chunk(read, parity.group, host, parity.keeper, start, target)
                if time.monotonic() > until:
                    done = (start - parity.start) / MIB
                    raise TooSlowError(
                        f"{store.url} has sent {done:.0f} of {nbytes / MIB:.0f} MiB for "
                        f"{parity.key} in {SEND_SECONDS_MAX:.0f} s: the near save is given up"
                    )

            self._others[host].run(read)
            return target

        return in_order(fetch, wanted(), threads=len(buffers), name="ckpt-parity")


def open_copies(
    world: World, hosts: Hosts, copies: Mapping[str, tuple[str, ...]], near: Near
) -> Copies:
    """Serve the tier of each host, by its first rank, and find those that keep copies of this
    rank's files, as `copies_of` says. Collective.

    Raises StorageError on all ranks when a host cannot serve its tier.
    """
    place, tier = place_of_environment(), hosts.tier
    certificate = os.fspath(near.certificate) or place.certificate
    mine = json.dumps([this_network(), near.address or _numeric(world.addresses)])
    networks = [json.loads(one) for one in world.gather("near networks", mine.encode())]
    opened: list[PeerServer] = []
    trusted: list[ssl.SSLContext] = []

    def serve() -> list[Any]:
        if certificate:
            trusted.append(client_tls(certificate))
        if not hosts.is_first:
            return []
        address = near.address or _address(networks, world.rank)
        # Only the ranks learn it, in messages of their world.
        token = secrets.token_hex(16)
        tls = server_tls(certificate) if certificate else None
        opened.append(PeerServer(tier.store, token, address, place.ports, tls=tls))
        return [address, opened[0].port, token]

    try:
        endpoints = shared(world, "near server", serve)
        tls = trusted[0] if trusted else None
        stores = []
        for host in copies[hosts.own]:
            endpoint = endpoints[hosts.names.index(host)]
            assert endpoint, "the first rank of a host serves"
            stores.append(PeerStore(*endpoint, tls=tls, policy=_policy(world)))
    except BaseException:
        for server in opened:
            server.close()
        raise
    own_server = opened[0] if opened else None
    if near.parity:
        return ParityCopies(hosts, own_server, stores, copies[hosts.own])
    return Copies(world, tier, own_server, stores)


def _policy(world: World) -> RetryPolicy:
    """How long a peer is waited for, while no rank is known to be gone: it may be that peer."""
    policy = RetryPolicy(deadline_seconds=PEER_SECONDS)

    def pause(seconds: float) -> None:
        world.check_neighbour("near copies")
        policy.patience.sleep(seconds)

    return replace(policy, sleep=pause)


def _address(networks: Sequence[Sequence[str]], rank: int) -> str:
    """The address by which others reach this host: on one machine, the loopback. Raises
    StorageError.
    """
    network, address = networks[rank]
    if network and len({one for one, _ in networks}) == 1:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return "127.0.0.1"
        return "::1"  # a host may have IPv6 alone
    if address:
        return address
    # Where the rendezvous is on this machine, it says nothing of the way to others: they do.
    for other, others in networks:
        if other != network and others:
            family = socket.AF_INET6 if ":" in others else socket.AF_INET
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((others, 9))  # sends nothing; the system chooses the way
                return str(probe.getsockname()[0])
    raise StorageError(
        "copies of near checkpoints: no address is known by which other hosts reach this one; "
        "pass Near(..., address=...) with this host's own address on every host"
    )


def _numeric(addresses: Sequence[str]) -> str:
    """The first of some addresses or names that others can reach, as a number; "" for none."""
    for address in addresses:
        # UnicodeError is what a label of a name raises that is empty or too long.
        with suppress(OSError, UnicodeError):
            number = str(socket.getaddrinfo(address, None)[0][4][0])
            if not number.startswith("127.") and number != "::1":
                return number
    return ""
