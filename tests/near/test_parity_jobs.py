"""Near checkpoints with parity: each host of a group is lost once, and its files are rebuilt.

Method: trainings whose ranks are threads and whose hosts are folders, with real servers on the
loopback; a host is lost when its folder is removed. What comes back is compared bit for bit; bytes
that travel and that lie on hosts are counted.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ckpt.near import peers as near_peers
from ckpt.near.value import Near
from ckpt.service.checkpointer import Checkpointer
from ckpt.service.events import NearFailed, NearSaved
from ckpt.service.policies import EverySteps
from ckpt.world.base import World
from storage import Store, TransientError
from storage.memory import MemoryStore
from storage.peers.store import PeerStore
from tests.near.test_near_training import flip_a_byte, folders, origins
from tests.near.test_replica_faults import during, train, with_older_memory
from tests.near.test_replicas import bounded, refusal
from tests.near.training import NEVER, Life, advance
from tests.thread_ranks import RanksFailed


@pytest.fixture(autouse=True, params=[True, False], ids=["memory", "disk"])
def in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: request.param)


def life(store: Store, hosts: list[Path], parity: int = 2, **how: Any) -> Life:
    """A job whose hosts keep parity."""

    def near(rank: int) -> Near:
        return Near(hosts[rank] / "near", every=EverySteps(2), parity=parity)

    return Life(len(hosts), store, hosts, near=near, **how)


def files(host: Path, step: int, *, parity: bool) -> list[Path]:
    """The parity files, or the others, of a step in a host's tier."""
    paths = host.glob(f"near/*/steps/{step:08d}-*/*.safetensors")
    return sorted(path for path in paths if ("parity" in path.name) == parity)


def nbytes(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("lost", range(3))
def test_each_host_is_lost_once(tmp_path: Path, lost: int) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0, 1, 2, 2)
    first = life(store, hosts)
    first.run(5)
    for events in first.events.values():
        assert [e.report.step for e in events if isinstance(e, NearSaved)] == [2, 4]
        assert not [e for e in events if isinstance(e, NearFailed)]
    shutil.rmtree(tmp_path / f"host{lost}")
    # On a new host in its place, with parity as before, which is there again after its first save.
    again = life(store, hosts)
    again.run(3)
    assert origins(again) == {("near", 4)}
    for report in again.reports.values():
        assert report is not None and not report.skipped
    shutil.rmtree(tmp_path / f"host{(lost + 1) % 3}")
    third = life(store, hosts)
    third.run(0)
    assert origins(third) == {("near", 6)}


@pytest.mark.parametrize("ranks", [(0, 2), (2, 0, 0, 2), (0, 1, 2, 3, 4), (4, 2, 0)])
def test_other_worlds_restore_what_parity_rebuilds(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 0, 1, 2)
    life(store, hosts).run(4)
    shutil.rmtree(tmp_path / "host1")
    with pytest.raises(RanksFailed, match="2 lack files"):  # both that are left are needed
        Life(1, store, folders(tmp_path, 0)).run(0)
    other = Life(len(ranks), store, folders(tmp_path, *ranks))
    other.run(2)
    assert origins(other) == {("near", 4)}


def test_one_host_of_each_group_is_lost(tmp_path: Path) -> None:
    """Hosts have random names, so groups are read from what they keep."""
    store, hosts = MemoryStore(), folders(tmp_path, *range(7))
    life(store, hosts).run(2)
    mates: dict[int, set[int]] = {}
    for host in range(7):
        (file,) = files(hosts[host], 2, parity=True)
        text = file.read_bytes().decode("latin-1")
        mates[host] = {rank for rank in range(7) if f"rank{rank:05d}-000" in text}
    groups = {tuple(sorted(one)) for one in mates.values()}
    assert sorted(map(len, groups)) == [3, 4]
    for group in groups:
        shutil.rmtree(hosts[group[1]])
    again = Life(7, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}
    # One more of any group is too many.
    (small,) = [group for group in groups if len(group) == 3]
    shutil.rmtree(hosts[small[0]])
    with pytest.raises(RanksFailed) as failed:
        Life(7, store, hosts).run(0)
    text = str(failed.value.errors[0])
    assert "of 7 ranks" in text and "parity rebuilds one host of a group of 3, and 2 lack" in text


def test_two_lost_hosts_leave_the_durable_checkpoint(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)
    life(store, hosts, save=EverySteps(3)).run(5)
    names = [next(host.glob("near/*/HOST")).read_text() for host in hosts]
    for host in hosts[1:]:
        shutil.rmtree(host)
    again = life(store, hosts)
    again.run(0)
    assert origins(again) == {("durable", 3)}
    report = again.reports[0]
    assert report is not None and [one.step for one in report.skipped] == [4]
    assert all(name in report.skipped[0].reason for name in names[1:])
    assert "no host has the near files of 2 of 3 ranks: 1, 2; parity" in report.skipped[0].reason


def test_memory_and_bytes_sent_are_a_share_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[str] = Counter()
    fetch, request = PeerStore.get_checked_into, PeerStore._request

    def noted(store: PeerStore, key: str, start: int, part: list[memoryview]) -> None:
        sent[store.url] += part[0].nbytes
        fetch(store, key, start, part)

    def counted(store: PeerStore, method: str, target: str, **how: Any) -> Any:
        sent[f"{method} {target.partition('?')[0]}"] += 1
        return request(store, method, target, **how)

    monkeypatch.setattr(PeerStore, "get_checked_into", noted)
    monkeypatch.setattr(PeerStore, "_request", counted)
    hosts = folders(tmp_path, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    job = life(MemoryStore(), hosts, 4)
    job.run(3)
    total = 0
    for host in hosts[::2]:
        own, parity = (nbytes(files(host, 2, parity=one)) for one in (False, True))
        heads = sum(
            8 + int.from_bytes(path.read_bytes()[:8], "little")
            for path in files(host, 2, parity=True)
        )
        others = [nbytes(files(one, 2, parity=False)) for one in hosts[::2] if one != host]
        assert parity - heads == -(-max(others) // 4)
        assert len(files(host, 2, parity=True)) == 2
        total += own
    # Each byte of each host is sent once.
    assert sum(count for name, count in sent.items() if name.startswith("peer:")) == total
    per_host = [count for name, count in sent.items() if name.startswith("peer:")]
    assert sorted(per_host) == sorted(nbytes(files(h, 2, parity=False)) for h in hosts[::2])
    (saved,) = [e.report for e in job.events[0] if isinstance(e, NearSaved)]
    assert 0 < saved.counters["near_bytes_copied"] <= total / 10 + 1
    # A list of each other host, and nothing is put there.
    names = {name for name in sent if not name.startswith(("peer:", "GET /o/"))}
    assert names == {"GET /list"} and sent["GET /list"] == 10 * 4


def test_only_as_much_is_in_memory_as_a_part_of_each_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_peers, "PART_NBYTES", 256)
    asked: list[int] = []
    fetch = PeerStore.get_checked_into

    def noted(store: PeerStore, key: str, start: int, part: list[memoryview]) -> None:
        asked.append(part[0].nbytes)
        fetch(store, key, start, part)

    monkeypatch.setattr(PeerStore, "get_checked_into", noted)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 1, 2)
    life(store, hosts).run(2)
    assert max(asked) <= 256 and len(asked) > 20
    shutil.rmtree(hosts[0])
    again = Life(4, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}


def test_the_room_check_counts_parity(tmp_path: Path) -> None:
    hosts = folders(tmp_path, 0, 1, 2)
    need = int(refusal(bounded(hosts, 100)).partition(" take ")[2].partition(" MiB")[0])
    text = refusal(bounded(hosts, (need * 3 // 2 << 20) - 1, parity=2))
    assert f"and of parity of {need // 4} MiB for other hosts, take {need * 3 // 2} MiB" in text
    bounded(hosts, need * 3 // 2 << 20, parity=2).run(1)


def test_old_parity_goes_and_a_job_without_any_drops_it(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)
    life(store, hosts).run(9)
    for host in hosts:
        kept = sorted(path.parent.name[:8] for path in host.glob("near/*/steps/*/*parity*"))
        assert kept == ["00000006", "00000008"]
    Life(3, store, hosts).run(5)
    for host in hosts:
        assert not list(host.glob("near/*/steps/*/*parity*"))


@pytest.mark.parametrize(("damaged", "step"), [((0,), 4), ((0, 1), 2)])
def test_a_damaged_file_is_rebuilt(tmp_path: Path, damaged: tuple[int, ...], step: int) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)
    life(store, hosts).run(4)
    for host in damaged:
        flip_a_byte(files(hosts[host], 4, parity=False)[0])
    again = Life(3, store, hosts)
    again.run(0)
    assert origins(again) == {("near", step)}


def test_a_lost_host_and_damage_in_another_group_are_rebuilt(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, *range(6))
    life(store, hosts).run(4)
    shutil.rmtree(hosts[0])
    flip_a_byte(files(hosts[1], 4, parity=False)[0])
    again = Life(6, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 4)}


@pytest.mark.parametrize("part", ["header", "bytes"])
def test_damaged_parity_is_seen_before_anything_is_delivered(tmp_path: Path, part: str) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)
    life(store, hosts).run(4)
    (file,) = files(hosts[1], 4, parity=True)
    data = bytearray(file.read_bytes())
    data[20 if part == "header" else -20] ^= 1
    file.unlink()
    file.write_bytes(data)
    shutil.rmtree(hosts[0])
    again = Life(3, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}


def test_a_host_with_older_memory_counts_as_lost(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)
    again = with_older_memory(lambda: life(store, hosts), hosts[1], tmp_path / "old")
    assert origins(again) == {("near", 8)}


def test_fewer_hosts_make_a_smaller_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)
    life(store, hosts).run(4)
    shutil.rmtree(hosts[2])
    two = life(store, folders(tmp_path, 0, 1, 1))
    two.run(2)
    assert origins(two) == {("near", 4)} and "of 2 hosts instead of 3" in caplog.text
    # Of two hosts, each has all bytes of the other.
    shutil.rmtree(hosts[0])
    one = life(store, folders(tmp_path, 1, 1))
    one.run(2)
    assert origins(one) == {("near", 6)}
    with pytest.raises(RanksFailed, match="a group for parity has 3 hosts, and this job has 2"):
        life(MemoryStore(), folders(tmp_path, 3, 4)).run(1)


def test_a_peer_that_fails_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_down = [False]
    fetch = PeerStore.get_checked_into

    def failing(store: PeerStore, key: str, start: int, part: list[memoryview]) -> None:
        if is_down[0] and "rank00001" in key:
            raise TransientError(f"{key}: planted")
        fetch(store, key, start, part)

    monkeypatch.setattr(PeerStore, "get_checked_into", failing)
    monkeypatch.setattr(near_peers, "PAUSES_SECONDS", (0.0, 0.0))
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)
    job = life(store, hosts)
    then = during(
        lambda world, service: is_down.__setitem__(0, True),
        lambda: is_down.__setitem__(0, False),
    )
    assert job.run(2, then=then) == [[4, 6]] * 3
    for events in job.events.values():
        assert all("planted" in str(e.error) for e in events if isinstance(e, NearFailed))
    for host in hosts:  # what had failed left nothing
        steps = {path.parent.name[:8] for path in host.glob("near/*/steps/*/*")}
        assert steps == {"00000002", "00000008"}
    shutil.rmtree(hosts[1])
    again = Life(3, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 8)}


def test_bytes_that_change_on_their_way_are_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = near_peers.PeerServer.__init__.__globals__["_PeerHandler"]
    send, spoiled = handler._send, set[tuple[str, str]]()

    def spoil(self: Any, status: Any, data: bytes) -> None:
        # Each range once, and in different bits: the same one twice would be none.
        one = (self.path, self.headers.get("Range", ""))
        if "Checked" in self.headers and one not in spoiled:
            spoiled.add(one)
            rank = int(one[0].rpartition("/rank")[2][:5])
            data = bytes([data[0] ^ (1 << rank)]) + data[1:]
        send(self, status, data)

    monkeypatch.setattr(handler, "_send", spoil)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)
    life(store, hosts).run(2)
    assert len(spoiled) == 6
    shutil.rmtree(hosts[1])
    again = Life(3, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}


def test_a_peer_that_is_too_slow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_peers, "PART_NBYTES", 256)
    monkeypatch.setattr(near_peers, "SEND_SECONDS_MAX", 300.0)
    fetch, slow = PeerStore.get_checked_into, [0.0]

    def slowly(store: PeerStore, key: str, start: int, part: list[memoryview]) -> None:
        time.sleep(slow[0] if "rank00002" in key else 0.0)
        fetch(store, key, start, part)

    monkeypatch.setattr(PeerStore, "get_checked_into", slowly)
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)

    def then(service: Checkpointer, state: Any, world: World) -> str:
        service.wait()
        world.gather("trouble", b"")
        slow[0] = 0.2
        near_peers.SEND_SECONDS_MAX = 0.5
        train(service, state, world, 3, 4)
        (failure,) = service.near_failures
        return str(failure.error)

    for text in life(store, hosts).run(2, then=then):
        assert "has sent 0 of 0 MiB for steps/" in text and "is given up" in text
    shutil.rmtree(hosts[0])
    again = Life(3, store, hosts)
    again.run(0)
    assert origins(again) == {("near", 2)}


def test_parity_of_an_encrypted_root(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra 'encode' is not installed")
    from tests.near.test_near_encrypted import root_at

    store, hosts = root_at(tmp_path / "root"), folders(tmp_path, 0, 1, 2)
    life(store, hosts).run(5)
    for path in [path for host in hosts for path in files(host, 4, parity=True)]:
        assert b"replica" not in path.read_bytes()
    shutil.rmtree(hosts[2])
    again = life(store, hosts)
    again.run(2)
    assert origins(again) == {("near", 4)}


def test_a_durable_save_at_a_near_step_still_sends_its_copy(tmp_path: Path) -> None:
    store, hosts = MemoryStore(), folders(tmp_path, 0, 1, 2)

    def then(service: Checkpointer, state: Any, world: World) -> None:
        for step in (5, 6, 7, 8):
            advance(state, step, world.rank, world.size)
            service.step(step)
        service.wait()
        assert not service.near_failures and service.last_near.step == 8  # type: ignore[union-attr]

    life(store, hosts, save=EverySteps(4)).run(4, then=then)
    shutil.rmtree(hosts[0])
    again = life(store, hosts, save=NEVER)
    again.run(0)
    assert {step for _, step in origins(again)} == {8}
