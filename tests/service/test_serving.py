"""Publications without a store between: hosts serve them, followers pass them on.

Method: a small training publishes into a directory that a server reads; followers have no other way
to it. Requests and bytes are counted at the sockets; hosts die, lag and damage what they pass on.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import Corrupt, InvalidArgument, LoadInterrupted
from ckpt.loading.load import LoadOptions
from ckpt.service.follower import Follower, FollowOptions, followed
from ckpt.service.publisher import Publications, _serving
from ckpt.service.serving import Serving, place_of
from ckpt.world.base import SoloWorld, World
from storage import InvalidUrlError, StorageError, open_store
from storage.peers.relay import RelayStore
from storage.peers.server import _PeerHandler
from storage.retry import RetryPolicy
from tests.protocol.test_world_places import _certificate
from tests.service.test_publication import Trainer, blank, has, published, shards, whole_model
from tests.thread_ranks import run_ranks

TOKEN = "0123456789abcdef"
LINE = "published"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPOINT_TOKEN", TOKEN)
    patient = partial(RetryPolicy, deadline_seconds=0.5)
    monkeypatch.setattr("storage.peers.relay.RetryPolicy", lambda **_: patient())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Requests by the port of the server."""
    counts: Counter[int] = Counter()
    answer = _PeerHandler._answer

    def counted(self: Any) -> None:
        counts[self.server.port] += 1
        answer(self)

    monkeypatch.setattr(_PeerHandler, "_answer", counted)
    return counts


class Net:
    """A trainer whose publications are served, and those who follow it by the network alone."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.stack = ExitStack()
        self.store = self.stack.enter_context(closing(open_store(str(root), **options)))
        self.trainer = Trainer(self.store, 2)
        self.origin = self.serve(self.store)

    def serve(self, store: Any) -> Serving:
        return self.stack.enter_context(closing(Serving(store, "127.0.0.1:0", LINE)))

    def store_at(self, *parents: Serving | int, **options: Any) -> Any:
        ports = [one if isinstance(one, int) else port_of(one) for one in parents]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        store = open_store(f"peer://{hosts}/lines/{LINE}", token=TOKEN, **options)
        return self.stack.enter_context(closing(store))

    def follower(self, store: Any, world: World | None = None) -> tuple[Follower, Any]:
        state = blank(whole_model) if world is None else None
        if world is not None:
            state = shards(published(0), world.rank, world.size)
            for part in state.values():
                part.local.zero_()
        options = FollowOptions(LoadOptions("state"))
        return Follower(followed(state), store, world or SoloWorld(), options), state


class closing:
    def __init__(self, one: Any) -> None:
        self.one = one

    def __enter__(self) -> Any:
        return self.one

    def __exit__(self, *_: object) -> None:
        self.one.close()


def port_of(serving: Serving) -> int:
    return int(serving.url.removeprefix("peer://").partition("/")[0].rpartition(":")[2])


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    net = Net(tmp_path / "run")
    with net.stack:
        yield net


def test_followers_in_a_tree_have_the_published_bits(net: Net, seen: Counter[int]) -> None:
    """Each asks its own parent at most three times for a version, whether it polls or waits."""
    middle = net.store_at(net.origin)
    inner = net.serve(middle)
    ends = [net.follower(one) for one in (middle, net.store_at(inner), net.store_at(inner))]
    for step in range(4):
        net.trainer.publish(step)
        seen.clear()
        for follower, state in ends:
            update = follower.poll()
            assert update is not None and update.step == step and not update.skipped
            assert follower.swap() and has(state, step)
        assert seen[port_of(net.origin)] <= 3, "those behind it cost nothing"
        assert seen[port_of(inner)] <= 2 * 3
        assert update.nbytes == 2 * 24 or step == 0 or update.nbytes < 150


@pytest.mark.parametrize(("small", "requests"), [(128 << 10, 2), (2000, 3)])
def test_a_waiting_follower_asks_thrice_for_a_version(
    net: Net, seen: Counter[int], monkeypatch: pytest.MonkeyPatch, small: int, requests: int
) -> None:
    """A look, a wait, and the files of both ranks at once, unless they come with the news."""
    monkeypatch.setattr("storage.peers.relay.SMALL_NBYTES", small)
    follower, state = net.follower(net.store_at(net.origin))
    net.trainer.publish(0)
    steps = []
    with ThreadPoolExecutor(1) as pool:
        for update in follower.updates(timeout=20.0, poll_seconds=1000.0):
            assert follower.swap() and has(state, update.step)
            steps.append(update.step)
            if steps[1:]:
                assert seen[port_of(net.origin)] == requests
            if update.step == 4:
                break
            seen.clear()
            pool.submit(publish_when_waited_for, net, seen, update.step + 1)
    assert steps == [0, 1, 2, 3, 4], "each was noticed in time"


def publish_when_waited_for(net: Net, seen: Counter[int], step: int) -> None:
    """Once a look has found nothing, and a request waits for news."""
    while seen[port_of(net.origin)] < 2:
        threading.Event().wait(0.005)
    net.trainer.publish(step)


class CountedPort:
    """Passes on to a port, and counts the bytes that come from there."""

    def __init__(self, port: int) -> None:
        self._to, self.nbytes, self._lock = port, 0, threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listening.getsockname()[1])
        self._pool = ThreadPoolExecutor(600)
        self._pool.submit(self._accept)
        self._sockets = [self._listening]

    def _accept(self) -> None:
        while True:
            ours, _ = self._listening.accept()
            theirs = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += [ours, theirs]
            self._pool.submit(self._pass_on, ours, theirs, False)
            self._pool.submit(self._pass_on, theirs, ours, True)

    def _pass_on(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        while data := source.recv(1 << 16):
            with self._lock:
                self.nbytes += is_counted * len(data)
            target.sendall(data)

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown()
        for one in self._sockets:
            one.close()


def test_64_followers_cost_the_trainer_twice_one(net: Net) -> None:
    """A tree in which each host passes on to two, so that the trainer's host has two children.

    All bytes that leave it are counted at its socket. One follower alone does the same before.
    """
    every = torch.arange(1_000_000).reshape(1000, 1000)
    new = torch.rand(every.shape, generator=torch.Generator().manual_seed(0)) < 0.05

    def publish(step: int) -> dict[str, torch.Tensor]:
        full = {name: every % 251 / 16 + step * new for name in NAMES}
        net.trainer.publish(step, full)
        return full

    def follow(store: Any) -> Follower:
        return Follower(followed(["*"]), store, SoloWorld(), FollowOptions(LoadOptions("state")))

    counted = net.stack.enter_context(closing(CountedPort(port_of(net.origin))))
    alone, many, ports = [follow(net.store_at(counted.port))], [], [counted.port]
    for nth in range(64):
        store = net.store_at(ports[nth // 2])
        ports.append(port_of(net.serve(store)))
        many.append(follow(store))

    def update(follower: Follower) -> None:
        update = next(follower.updates(timeout=60.0))
        assert update.step == step and follower.swap()

    for step in range(3):
        costs = []
        full = publish(step)
        for followers in (alone, many):
            before = counted.nbytes
            with ThreadPoolExecutor(64) as pool:
                list(pool.map(update, followers))
            costs.append(counted.nbytes - before)
        # What is more are questions without news: their number depends on when they are asked.
        assert costs[1] <= 2.05 * costs[0], costs
    for follower in many:
        for name, tensor in full.items():
            assert torch.equal(follower.tensors[f"{name}.tensor"], tensor.to(torch.bfloat16))


NAMES = ("rows", "columns", "frozen")


# --- hosts that fail -----------------------------------------------------------------------------


class Damaged(RelayStore):
    """A host whose memory has changed: it sends other bytes, with the checksum of these."""

    damages = False
    record = ""

    def _keep(self, parts: Any) -> Any:
        if not self.damages:
            return super()._keep(parts)
        damaged = []
        for part in parts:
            data = bytearray(part.data)
            if part.key.endswith(".safetensors"):
                data[4100] ^= 8  # behind the head of the file
            if part.key == self.record:
                data[40] ^= 8
            damaged.append(part._replace(data=bytes(data)))
        return super()._keep(damaged)


@pytest.mark.parametrize("others", [0, 1])
def test_damaged_bytes_of_a_host_never_reach_the_model(net: Net, others: int) -> None:
    """Digests are those of the publication. The next parent is asked, if there is one."""
    relay = Damaged([net.store_at(net.origin).inner._parents[0]._peer], "lines/published")
    middle = net.serve(relay)
    follower, state = net.follower(net.store_at(middle, *[net.origin] * others))
    net.trainer.publish(0)
    assert follower.poll() and follower.swap()
    relay.damages = True
    net.trainer.publish(1)
    update = follower.poll()
    assert has(state, 0)
    if others:
        assert update and not follower.skipped, "read from the other parent, in the same call"
        assert follower.swap() and has(state, 1)
        return
    # The delta is refused, and another way is taken: the anchor is large.
    assert follower.skipped[-1].reason.startswith("damaged")
    assert follower.swap() is None or has(state, 0)
    relay.damages = False
    relay.doubt()
    assert follower.poll(), "tried again where it was mended"
    assert follower.swap() and has(state, 1)


@pytest.mark.parametrize("others", [0, 1])
def test_a_load_reads_damaged_bytes_elsewhere(tmp_path: Path, others: int) -> None:
    model, other = nn.Linear(300, 300), nn.Linear(300, 300)
    ckpt.save({"model": model}, str(tmp_path), step=1)
    with ExitStack() as stack:
        origin = stack.enter_context(closing(Serving(open_store(str(tmp_path)), "127.0.0.1:0", "")))
        direct = stack.enter_context(closing(open_store(origin.url, token=TOKEN)))
        relay = Damaged([direct.inner._parents[0]._peer], "")
        relay.damages = True
        middle = stack.enter_context(closing(Serving(relay, "127.0.0.1:0", "")))
        url = middle.url + f",127.0.0.1:{port_of(origin)}" * others
        options = {"storage_options": {"token": TOKEN}}
        if not others:
            with pytest.raises(LoadInterrupted):
                ckpt.load({"model": other}, url, **options)
            relay.damages = False
            relay.doubt()
        ckpt.load({"model": other}, url, **options)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("others", [0, 1])
def test_a_damaged_record_of_a_host_is_read_elsewhere(net: Net, others: int) -> None:
    """A record that was read once is not kept for ever because it is damaged."""
    relay = Damaged([net.store_at(net.origin).inner._parents[0]._peer], "lines/published")
    middle = net.serve(relay)
    follower, state = net.follower(net.store_at(middle, *[net.origin] * others))
    net.trainer.publish(0)
    records = [one.key for one in net.store.list("log/")]
    relay.damages, relay.record = True, records[-1]
    if not others:
        with pytest.raises(Corrupt, match="checksum"):
            follower.poll()
        relay.damages = False
        relay.doubt()
    assert follower.poll() and follower.swap() and has(state, 0)


def test_a_dead_host_is_replaced_while_a_follower_waits(net: Net) -> None:
    middle = net.serve(net.store_at(net.origin))
    follower, state = net.follower(net.store_at(middle, net.origin))
    net.trainer.publish(0)
    assert follower.poll() and follower.swap()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, follower.updates(timeout=30.0))
        threading.Event().wait(0.3)
        middle.close()
        net.trainer.publish(1)
        assert waiting.result(20).step == 1
    assert follower.swap() and has(state, 1)
    net.origin.close()
    with pytest.raises(StorageError, match="what is new: none of 2 hosts answered"):
        follower.poll()
    assert has(state, 1)


def test_a_root_behind_the_hosts_is_read_without_them(net: Net, tmp_path: Path) -> None:
    (tmp_path / "job" / "lines").mkdir(parents=True)
    (tmp_path / "job" / "lines" / LINE).symlink_to(tmp_path / "run")
    follower, state = net.follower(net.store_at(net.origin, fallback=str(tmp_path / "job")))
    for step in range(4):
        net.trainer.publish(step)
        assert follower.poll() and follower.swap() and has(state, step)
        if step == 1:
            net.origin.close()


def test_a_follower_that_slept_takes_the_newest_anchor(net: Net, tmp_path: Path) -> None:
    """What it would need has been retired, and its parent has forgotten it."""
    follower, state = net.follower(net.store_at(net.origin))
    trainer = net.trainer
    trainer.due = ckpt.service.publisher.Due(3, 1e9)
    trainer.publish(0)
    assert follower.poll() and follower.swap()
    for step in range(1, 14):
        trainer.publish(step)
    assert len({one.key.split("/")[1] for one in net.store.list("steps/")}) < 13
    update = follower.poll()
    assert update is not None and update.step == 13 and follower.swap() and has(state, 13)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_another_layout_follow_by_the_network(net: Net, size: int) -> None:
    """Every rank reads by connections of its own; the coordinator alone asks for news."""

    def rank_main(world: World) -> None:
        follower, state = net.follower(net.store_at(net.origin), world)
        for step in range(3):
            if world.rank == 0:
                net.trainer.publish(step)
            world.gather("published", b"")
            assert follower.poll() and follower.swap()
            for name, part in shards(published(step), world.rank, world.size).items():
                assert torch.equal(state[name].local, part.local)
        assert follower.poll() is None

    run_ranks(size, rank_main)


def test_hosts_pass_an_encrypted_root_on_without_its_key(tmp_path: Path) -> None:
    net = Net(tmp_path / "run", encryption_key=bytes(range(32)))
    with net.stack:
        middle = net.serve(net.store_at(net.origin))
        follower, state = net.follower(net.store_at(middle, encryption_key=bytes(range(32))))
        for step in range(2):
            net.trainer.publish(step)
            assert follower.poll() and follower.swap() and has(state, step)
        with pytest.raises(ckpt.CheckpointError, match="encrypt"):
            net.follower(net.store_at(middle))[0].poll()


# --- for users -----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture
def no_servers() -> Iterator[None]:
    yield
    while _serving:
        _serving.popitem()[1].close()


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(40, 30), nn.Linear(40, 30).to(torch.bfloat16)


def same(model: nn.Module, served: nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), served.state_dict().values(), strict=True)
    return all(torch.equal(mine.to(torch.bfloat16), theirs) for mine, theirs in pairs)


@pytest.mark.usefixtures("no_servers")
def test_one_argument_on_each_side_joins_them(tmp_path: Path) -> None:
    model, served = models()
    ports = free_port(), free_port()
    place, url = f"127.0.0.1:{ports[0]}", str(tmp_path / "run")
    ckpt.publish(model, url, step=0, serve=place).result()
    with (
        ckpt.follow(
            served, f"peer://{place}", line=LINE, serve=f"127.0.0.1:{ports[1]}"
        ) as follower,
        ckpt.follow(["*"], f"peer://127.0.0.1:{ports[1]}", line=LINE) as end,
    ):
        for step in range(1, 4):
            assert follower.poll() and follower.swap() and same(model, served)
            assert end.poll() and end.swap()
            assert torch.equal(end.tensors["weight"], served.weight)
            with torch.no_grad():
                model.weight[step] += 1
            ckpt.publish(model, url, step=step, serve=place).result()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", ports[1]), timeout=1.0).close()


@pytest.mark.usefixtures("no_servers")
def test_a_checkpointer_serves_until_it_is_closed(tmp_path: Path) -> None:
    model, served = models()
    port = free_port()
    publish = {"every": ckpt.EverySteps(1), "serve": f"127.0.0.1:{port}"}
    with (
        ckpt.Checkpointer({"model": model}, tmp_path / "run", publish=publish) as checkpointer,
        ckpt.follow(served, f"peer://127.0.0.1:{port}", line=LINE) as follower,
    ):
        for step in range(1, 3):
            checkpointer.step(step)
        update = next(follower.updates(timeout=20.0))
        assert update.step in (1, 2) and follower.swap() and same(model, served)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()


@pytest.mark.usefixtures("no_servers")
def test_a_forked_child_leaves_the_servers_to_its_parent(tmp_path: Path) -> None:
    """Their threads are the parent's: who waits for them in a child waits for ever."""
    place = "127.0.0.1:1"
    key = (os.getpid() + 1, place, "x")
    with closing(open_store(str(tmp_path))) as store:
        serving = Serving(store, "127.0.0.1:0", "")
        _serving[key] = serving
        publications = object.__new__(Publications)
        publications._how, publications._context = {"serve": place}, None
        publications.close()
        assert _serving.pop(key) is serving
        serving.close()


def test_a_place_that_is_taken_is_tried_again(tmp_path: Path) -> None:
    model, _ = models()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StorageError, match="cannot listen on"):
            ckpt.publish(model, tmp_path, step=0, serve=place)
    ckpt.publish(model, tmp_path, step=0, serve=place).result()
    assert [key[1] for key in _serving] == [place]


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        ("29700", "expected HOST:PORT"),
        ("host:99999", "expected HOST:PORT"),
        ("host:20-30", "expected HOST:PORT"),
        ("::1:29700", "expected HOST:PORT"),
    ],
)
def test_places_that_are_none_are_refused(serve: str, said: str, tmp_path: Path) -> None:
    model, _ = models()
    for call in (
        lambda: ckpt.publish(model, tmp_path / "run", step=0, serve=serve),
        lambda: ckpt.follow(model, tmp_path / "run", serve=serve),
    ):
        with pytest.raises(InvalidArgument, match=said):
            call()
    assert not (tmp_path / "run").exists()


def test_places_are_hosts_and_ports() -> None:
    assert place_of("0.0.0.0:29700") == ("0.0.0.0", 29700)
    assert place_of("[::1]:1") == ("::1", 1)


def test_without_a_token_nothing_is_served_or_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDPOINT_TOKEN", "short")
    with pytest.raises(InvalidArgument, match="set SHARDPOINT_TOKEN"):
        ckpt.follow(["*"], tmp_path / "run", serve="127.0.0.1:0")
    monkeypatch.delenv("SHARDPOINT_TOKEN")
    with pytest.raises(InvalidUrlError, match="SHARDPOINT_TOKEN"):
        ckpt.follow(["*"], "peer://127.0.0.1:1", line=LINE)


@pytest.mark.usefixtures("no_servers")
def test_a_certificate_encrypts_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, served = models()
    place, files = f"127.0.0.1:{free_port()}", [_certificate(tmp_path, name) for name in "ab"]
    monkeypatch.setenv("SHARDPOINT_CERTIFICATE", files[0])
    ckpt.publish(model, tmp_path / "run", step=0, serve=place).result()
    with ckpt.follow(served, f"peer://{place}", line=LINE) as follower:
        assert follower.poll() and follower.swap() and same(model, served)
    for certificate in ("", files[1]):
        monkeypatch.setenv("SHARDPOINT_CERTIFICATE", certificate)
        other = ckpt.follow(["*"], f"peer://{place}", line=LINE)
        with other, pytest.raises(StorageError, match="peer://"):
            other.poll()


@pytest.mark.ranks
def test_commands_serve_a_root_and_follow_it(tmp_path: Path) -> None:
    """A host that only passes on, in a process of its own, and a shell behind it."""
    model, _ = models()
    ckpt.publish(model, tmp_path / "run", step=7).result()
    command = [sys.executable, "-m", "ckpt", "follow"]
    environment = {**os.environ, "SHARDPOINT_TOKEN": TOKEN}
    call = [*command, str(tmp_path / "run"), "--line", LINE, "--serve", "127.0.0.1:0"]
    with subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            url = serving.stdout.readline().split()[-1]
            call = [*command, url, "--once", "--json", "--into", str(tmp_path / "w.safetensors")]
            said = subprocess.run(call, env=environment, capture_output=True, text=True, check=True)
            assert json.loads(said.stdout)["step"] == 7
        finally:
            serving.terminate()
    assert (tmp_path / "w.safetensors").stat().st_size > 2 * 40 * 30
