"""Copies of near checkpoints when hosts are full, silent, slow, wrong, old or shared by jobs.

Method: trainings whose ranks are threads and whose hosts are folders, with real servers on the
loopback whose stores or handlers misbehave. Whatever happens, training goes on, says so, and what
comes back is compared bit for bit with that of its step.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import Corrupt, Fenced
from ckpt.format.checksum import seal_of
from ckpt.near import peers as near_peers
from ckpt.near.peers import Copies, open_copies
from ckpt.near.placement import Hosts, copies_of
from ckpt.near.records import NearFile
from ckpt.near.tier import Tier, tiers_in
from ckpt.near.value import Near
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.events import NearFailed, NearSaved
from ckpt.service.policies import EverySteps
from ckpt.world.base import SoloWorld, World
from ckpt.world.place import PORTS_VARIABLE
from storage import NoSpaceError, StorageError, Store, TransientError
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.peers.server import PeerServer
from storage.testing import FaultPlan, FaultyStore
from tests.near.test_near_training import folders, origins
from tests.near.test_records import record
from tests.near.test_replicas import life
from tests.near.training import Life, advance
from tests.protocol.test_world_places import two_free_ports
from tests.storage.test_peers import certificate_of
from tests.thread_ranks import RanksFailed, run_ranks

ROOT = "0123456789abcdef0123456789abcdef"


def train(service: Checkpointer, state: Any, world: World, first: int, last: int) -> None:
    for step in range(first, last + 1):
        advance(state, step, world.rank, world.size)
        service.step(step)
    service.wait()


def during(
    trouble: Callable[[World, Checkpointer], None], end: Callable[[], None] = lambda: None
) -> Callable[[Checkpointer, Any, World], list[int]]:
    """Steps 3 to 6 with trouble, steps 7 and 8 after it has ended: the failed near saves."""

    def then(service: Checkpointer, state: Any, world: World) -> list[int]:
        service.wait()
        world.gather("trouble begins", b"")
        trouble(world, service)
        world.gather("trouble", b"")
        train(service, state, world, 3, 6)
        world.gather("trouble ends", b"")
        end()
        train(service, state, world, 7, 8)
        return [failure.step for failure in service.near_failures]

    return then


class CopiesOfOthers(FaultyStore):
    """A tier that does what `wrong` says to the files that others put there."""

    wrong = ""

    def create(self, key: str, nbytes: int, **how: Any) -> Any:
        is_copy = ("/host1/" in self.url) == ("rank00000" in key)
        if is_copy and CopiesOfOthers.wrong == "full":
            raise NoSpaceError(f"create {key}: the tmpfs is full")
        return self.inner.create(key, nbytes, **how)

    def get(self, key: str, *how: Any) -> bytes:
        data: bytes = self.inner.get(key, *how)
        return data


@pytest.fixture
def of_others(monkeypatch: pytest.MonkeyPatch) -> type[CopiesOfOthers]:
    monkeypatch.setattr(
        "ckpt.near.tier.LocalStore", lambda root: CopiesOfOthers(LocalStore(root), FaultPlan(0))
    )
    monkeypatch.setattr(CopiesOfOthers, "wrong", "")
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: False)
    return CopiesOfOthers


def test_a_host_that_is_full_of_copies_stops_no_training(
    tmp_path: Path, of_others: type[CopiesOfOthers]
) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    job = life(store, hosts)
    then = during(
        lambda world, service: setattr(of_others, "wrong", "full"),
        lambda: setattr(of_others, "wrong", ""),
    )
    assert job.run(2, then=then) == [[4, 6], [4, 6]]
    for events in job.events.values():
        failed = [e.error for e in events if isinstance(e, NearFailed)]
        assert all("the tmpfs is full" in str(error) for error in failed), failed
        assert [e.report.step for e in events if isinstance(e, NearSaved)] == [2, 8]
    shutil.rmtree(hosts[0])
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 8)}


def test_while_a_host_is_full_the_state_before_stays_with_its_copies(
    tmp_path: Path, of_others: type[CopiesOfOthers]
) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)

    def then(service: Checkpointer, state: Any, world: World) -> None:
        service.wait()
        world.gather("trouble", b"")
        of_others.wrong = "full"
        train(service, state, world, 3, 8)
        assert [failure.step for failure in service.near_failures] == [4, 6, 8]

    life(store, hosts).run(2, then=then)
    of_others.wrong = ""
    shutil.rmtree(hosts[1])
    again = Life(1, store, hosts[:1])
    again.run(0)
    assert origins(again) == {("near", 2)}


def test_hosts_serve_copies_at_ports_of_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports, hosts, seen = two_free_ports(), folders(tmp_path, 0, 1), []
    monkeypatch.setenv(PORTS_VARIABLE, f"{ports[0]}-{ports[-1]}")
    begin = PeerServer.__init__

    def noted(self: PeerServer, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        seen.append(self.port)

    monkeypatch.setattr(PeerServer, "__init__", noted)
    life(MemoryStore(), hosts).run(2)
    assert sorted(seen) == [*ports]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StorageError, match=rf"127\.0\.0\.1, ports {port} to {port}"):
            PeerServer(LocalStore(str(tmp_path)), "token", "127.0.0.1", range(port, port + 1))


def test_a_host_that_does_not_answer_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of host 1 is gone, as behind a firewall, while its ranks train on."""
    monkeypatch.setattr(near_peers, "PEER_SECONDS", 2.0)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    calls: list[str] = []

    def silence(world: World, service: Checkpointer) -> None:
        assert service._near is not None
        (tier,) = service._near._tiers
        assert tier._saves is not None
        copies = tier._saves._copies
        assert copies is not None
        if world.rank == 1:
            assert copies._server is not None
            copies._server.close()
        else:
            (peer,) = copies._peers
            monkeypatch.setattr(
                peer.store, "_request", _counted(peer.store._request, calls), raising=True
            )

    def then(service: Checkpointer, state: Any, world: World) -> list[tuple[int, str]]:
        service.wait()
        world.gather("trouble begins", b"")
        silence(world, service)
        world.gather("trouble", b"")
        train(service, state, world, 3, 4)
        count = len(calls)
        train(service, state, world, 5, 8)
        assert count > 0 or world.rank == 1
        assert len(calls) == count  # the next near saves fail without a request
        return [(one.step, str(one.error)) for one in service.near_failures]

    for failures in life(store, hosts).run(2, then=then):
        assert [step for step, _ in failures] == [4, 6, 8]
        assert "refused" in failures[0][1]
        assert "took no copy, and is tried again in" in failures[2][1]
    shutil.rmtree(hosts[1])
    again = Life(1, store, hosts[:1])
    again.run(0)
    assert origins(again) == {("near", 2)}


def _counted(request: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def counted(method: str, target: str, **how: Any) -> Any:
        calls.append(target)
        return request(method, target, **how)

    return counted


def test_a_host_that_is_silent_for_a_while_takes_copies_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_peers, "PEER_SECONDS", 0.5)
    monkeypatch.setattr(near_peers, "PAUSES_SECONDS", (0.0, 0.0))
    is_silent = [False]
    known = PeerServer.is_known
    monkeypatch.setattr(
        PeerServer, "process_request", _unless(is_silent, PeerServer.process_request)
    )
    monkeypatch.setattr(
        PeerServer, "is_known", lambda server, given: not is_silent[0] and known(server, given)
    )
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    then = during(
        lambda world, service: is_silent.__setitem__(0, True),
        lambda: is_silent.__setitem__(0, False),
    )
    assert life(store, hosts).run(2, then=then) == [[4, 6], [4, 6]]
    shutil.rmtree(hosts[0])
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 8)}


def _unless(is_silent: list[bool], process: Callable[..., None]) -> Callable[..., None]:
    def perhaps(server: PeerServer, request: Any, address: Any) -> None:
        if is_silent[0]:
            server.shutdown_request(request)
        else:
            process(server, request, address)

    return perhaps


def test_a_host_that_is_too_slow_fails_the_near_save_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_peers, "PART_NBYTES", 512)
    answers = PeerServer.__init__.__globals__["_OF_DIRECTORIES"]
    take, is_slow = answers["PUT /part"], [False]

    def slow(self: Any, fields: Any) -> None:
        time.sleep(0.2 if is_slow[0] else 0.0)
        take(self, fields)

    monkeypatch.setitem(answers, "PUT /part", slow)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)

    def then(service: Checkpointer, state: Any, world: World) -> float:
        service.wait()
        world.gather("trouble", b"")
        is_slow[0] = True
        near_peers.SEND_SECONDS_MAX = 0.5
        begun = time.monotonic()
        train(service, state, world, 3, 4)
        (failure,) = service.near_failures
        assert "MiB of" in str(failure.error) and "is given up" in str(failure.error)
        return time.monotonic() - begun

    monkeypatch.setattr(near_peers, "SEND_SECONDS_MAX", 300.0)
    assert max(life(store, hosts).run(2, then=then)) < 20  # all parts would take longer
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}


# --- one rank's copies ------------------------------------------------------------------------


def one_file(tier: Tier) -> NearFile:
    """A file in a tier, with a seal that its end has."""
    data, table = bytes(range(256)) * 40, b"checksums"
    tier.store.put_if_absent("steps/a/rank00000-000.safetensors", data + table)
    return NearFile(0, 0, len(data) + len(table), seal_of(table))


def test_what_a_peer_has_is_read_back_before_it_counts(tmp_path: Path) -> None:
    class Forgetful(FaultyStore):
        def get(self, key: str, *how: Any) -> bytes:
            return b"other tab"

    tier, file = Tier(tmp_path / "a", ROOT), None
    file = one_file(tier)
    good, bad = LocalStore(str(tmp_path / "b")), LocalStore(str(tmp_path / "c"))
    assert Copies(SoloWorld(), tier, None, [good]).send("steps/a/", [file], epoch=1) == file.nbytes
    assert good.get("steps/a/" + file.name) == tier.store.get("steps/a/" + file.name)
    with pytest.raises(Corrupt, match="differs from what was sent"):
        Copies(SoloWorld(), tier, None, [Forgetful(bad, FaultPlan(0))]).send(
            "steps/a/", [file], epoch=1
        )


def test_a_peer_that_a_newer_session_uses_takes_no_copy(tmp_path: Path) -> None:
    tier, other = Tier(tmp_path / "a", ROOT), Tier(tmp_path / "b", ROOT)
    file, newer = one_file(tier), record()
    other.put(newer)
    assert newer.head.epoch == 3
    Copies(SoloWorld(), tier, None, [other.store]).send("steps/a/", [file], epoch=3)
    with pytest.raises(Fenced, match="newer session"):
        Copies(SoloWorld(), tier, None, [other.store]).send("steps/b/", [file], epoch=2)


def test_servers_are_closed_when_one_host_cannot_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[PeerServer] = []

    class Seen(PeerServer):
        def __init__(self, store: Any, *how: Any, **more: Any) -> None:
            if "/1/" in store.url:
                raise StorageError("cannot listen on 127.0.0.1: planted")
            super().__init__(store, *how, **more)

        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(near_peers, "PeerServer", Seen)

    def rank_main(world: World) -> None:
        tier = Tier(tmp_path / str(world.rank) / "near", ROOT)
        hosts = Hosts.of(world, lambda: tier)
        copies = copies_of(dict.fromkeys(hosts.names, ""), 1)
        open_copies(world, hosts, copies, Near(tmp_path, replicas=1))

    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, rank_main)
    assert all("planted" in str(error) for error in failed.value.errors.values())
    assert len(closed) == 2


def test_copies_are_made_on_a_host_with_ipv6_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutIPv4(socket.socket):
        """The system has no 127.0.0.1."""

        def bind(self, address: Any) -> None:
            if address[0] == "127.0.0.1":
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    monkeypatch.setattr(socket, "socket", WithoutIPv4)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    life(store, hosts).run(2)
    shutil.rmtree(hosts[0])
    again = life(store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}


def test_with_a_certificate_copies_are_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certificate_of(tmp_path)
    both = tmp_path / "job.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    seen: list[bool] = []

    class Seen(PeerServer):
        def __init__(self, *how: Any, tls: Any = None) -> None:
            super().__init__(*how, tls=tls)
            seen.append(tls is not None)

    monkeypatch.setattr(near_peers, "PeerServer", Seen)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)

    def near(rank: int) -> Near:
        return Near(hosts[rank] / "near", every=EverySteps(2), replicas=1, certificate=both)

    Life(2, store, hosts, near=near).run(2)
    assert seen == [True, True]
    shutil.rmtree(hosts[0])
    again = Life(2, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}


# --- jobs -----------------------------------------------------------------------------------------


def with_older_memory(life: Callable[[], Life], host: Path, old: Path) -> Life:
    """The third of three jobs, for which `host` has what it had after the first."""
    life().run(4)
    shutil.copytree(host, old)
    life().run(4)
    shutil.rmtree(host)
    shutil.copytree(old, host)
    again = life()
    again.run(2)
    return again


def test_stale_files_that_come_back_are_not_used(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)
    again = with_older_memory(lambda: life(store, hosts), hosts[1], tmp_path / "old")
    assert origins(again) == {("near", 8)}
    # And what is there now is what the newest job has put there.
    (tier,) = tiers_in(hosts[1] / "near")
    assert {one.head.epoch for one in tier.records()} == {3}


def test_a_zombie_is_fenced_and_harms_no_copy(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1)

    def zombie(service: Checkpointer, state: Any, world: World) -> None:
        service.wait()
        world.gather("recorded", b"")
        if world.rank == 0:
            successor = life(store, hosts)
            successor.run(2)
            assert origins(successor) == {("near", 4)}
        world.gather("successor", b"")
        train(service, state, world, 5, 8)

    with pytest.raises(RanksFailed) as failed:
        life(store, hosts).run(4, then=zombie)
    assert {type(error) for error in failed.value.errors.values()} == {Fenced}
    shutil.rmtree(hosts[0])
    third = Life(2, store, hosts)
    third.run(0)
    assert origins(third) == {("near", 6)}


def test_two_jobs_on_the_same_hosts_keep_their_copies_apart(tmp_path: Path) -> None:
    stores, hosts = [MemoryStore(), MemoryStore()], folders(tmp_path, 0, 1)

    def second(service: Checkpointer, state: Any, world: World) -> None:
        service.wait()
        world.gather("first", b"")
        if world.rank == 0:
            life(stores[1], hosts).run(8)
        world.gather("second", b"")
        train(service, state, world, 3, 4)

    life(stores[0], hosts).run(2, then=second)
    shutil.rmtree(hosts[1])
    for store, step in zip(stores, (4, 8), strict=True):
        again = Life(2, store, hosts)
        again.run(0)
        assert origins(again) == {("near", step)}


def test_a_peer_that_answers_again_is_paused_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(near_peers.time, "monotonic", lambda: now[0])
    peer, pauses = near_peers._Peer(MemoryStore()), []

    def silent(store: Store) -> None:
        raise TransientError("no answer")

    for work in (silent, silent, lambda store: None, silent):
        now[0] += 10_000.0  # whatever the pause was, it is over
        with contextlib.suppress(TransientError):
            peer.run(work)
        pauses.append(peer._until - now[0])
    first = near_peers.PAUSES_SECONDS[0]
    assert [pauses[0], pauses[1], pauses[3]] == [first, 2 * first, first]
    with pytest.raises(StorageError, match="took no copy, and is tried again in 30 s: no answer"):
        peer.run(silent)
