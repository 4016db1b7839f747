"""Where ranks listen for each other, and stores by which they cannot find each other."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import ckpt
import ckpt.world.by_store
import ckpt.world.heart
import ckpt.world.liveness
import ckpt.world.missing
from ckpt.errors import CheckpointError
from ckpt.world.base import Message
from ckpt.world.heart import Heart
from ckpt.world.job import ThisProcess, place_of_environment, this_process
from ckpt.world.link import Link
from ckpt.world.liveness import Card
from ckpt.world.place import (
    CERTIFICATE_VARIABLE,
    PORTS_VARIABLE,
    Place,
    listening,
)
from ckpt.world.torch_world import current_world
from storage.http import client_tls, server_tls
from tests.protocol.test_world_counts import interrupted_at, sees_steps
from tests.ranks import run_ranks


def two_free_ports() -> range:
    """Two ports in a row that nobody listens at."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            port = first.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                return range(port, port + 2)


def _saves_from(interface: str, ports: str, root: str) -> tuple[tuple[str, int], list[int]]:
    os.environ.update({"GLOO_SOCKET_IFNAME": interface, PORTS_VARIABLE: ports})
    state = {"a": torch.arange(4)}
    ckpt.save(state, root, step=1)
    state["a"] = torch.zeros(4, dtype=torch.int64)
    ckpt.load(state, root)
    heart = this_process.in_job().heart
    return heart._listener.getsockname()[:2], state["a"].tolist()


@pytest.mark.ranks
def test_without_a_place_ranks_listen_on_all_addresses(tmp_path: Path) -> None:
    answers = run_ranks(2, _saves_from, "", "", str(tmp_path / "root"))
    assert {host for (host, _), _ in answers} <= {"::", "0.0.0.0"}
    assert [values for _, values in answers] == [[0, 1, 2, 3]] * 2


def _finds_no_port(port: int, root: str) -> str:
    ckpt.world.missing.LOOK_SECONDS = 0.5
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", PORTS_VARIABLE: str(port)})
    try:
        ckpt.save({"a": torch.ones(2)}, root, step=1)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.ranks
def test_a_rank_that_cannot_listen_is_named_by_the_others(tmp_path: Path) -> None:
    port = two_free_ports()[0]
    texts = sorted(run_ranks(2, _finds_no_port, port, str(tmp_path / "root")))
    assert texts[0].startswith(f"cannot listen for other ranks on 127.0.0.1, ports {port} to")
    assert re.match(r"rank [01] cannot join: cannot listen .*Each process of a host", texts[1])


@pytest.mark.ranks
def test_ranks_listen_on_one_interface_at_ports_of_a_range(tmp_path: Path) -> None:
    ports = two_free_ports()
    text = f"{ports[0]}-{ports[-1]}"
    answers = run_ranks(2, _saves_from, "lo", text, str(tmp_path / "root"))
    assert sorted(place for place, _ in answers) == [("127.0.0.1", port) for port in ports]
    assert [values for _, values in answers] == [[0, 1, 2, 3]] * 2


def _joins_again(ports: str, root: str) -> list[int]:
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", PORTS_VARIABLE: ports})
    rank, listened = dist.get_rank(), []
    for number in range(1, 4):
        ckpt.save({"a": torch.ones(4)}, root, step=number)
        listened.append(this_process.in_job().heart.card.port)
        dist.barrier()
        dist.destroy_process_group()
        url = f"file://{root}-{number}"
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    return listened


@pytest.mark.ranks
def test_a_process_that_joins_again_needs_no_other_port(tmp_path: Path) -> None:
    ports = two_free_ports()
    text = f"{ports[0]}-{ports[-1]}"
    listened = run_ranks(2, _joins_again, text, str(tmp_path / "root"))
    assert all(sorted(pair) == [*ports] for pair in zip(*listened, strict=True))


def test_a_range_without_a_free_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CheckpointError, match=rf"127\.0\.0\.1, ports {port} to {port}"):
            Heart(0, ("127.0.0.1",), Place("127.0.0.1", range(port, port + 1)))


@pytest.mark.parametrize("ports", ["no", "-29600", "0", "2-1", "65535-65536", "1-2-3"])
def test_ports_that_are_no_range_are_refused(ports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTS_VARIABLE, ports)
    with pytest.raises(CheckpointError, match=PORTS_VARIABLE):
        place_of_environment()


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(CheckpointError, match=r"'nowhere0' has no address; this host has .*lo"):
        place_of_environment()


def _saves_in_a_fake_group(root: str) -> str:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        ckpt.save({"a": torch.ones(2)}, root, step=1)
    except CheckpointError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "saved"


@pytest.mark.ranks
def test_a_fake_process_group_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (text,) = run_ranks(1, _saves_in_a_fake_group, str(tmp_path / "root"), group=False)
    assert "Fake process groups cannot" in text and "ASSERT" not in text


def _wait_until_it_listens_no_more() -> None:
    until = time.monotonic() + 30
    while any(thread.name == "ckpt-heart" for thread in threading.enumerate()):
        assert time.monotonic() < until, "it listens still"
        time.sleep(0.1)


def _leaves(url: str, root: str) -> tuple[int, int]:
    ckpt.world.heart.LOOK_SECONDS = 0.2
    state = {"a": torch.ones(4)}
    ckpt.save(state, root, step=1)
    while_joined = sum(thread.name == "ckpt-heart" for thread in threading.enumerate())
    dist.barrier()
    dist.destroy_process_group()
    _wait_until_it_listens_no_more()
    dist.init_process_group("gloo", init_method=url, rank=int(os.environ["RANK"]), world_size=2)
    ckpt.save(state, root, step=2)
    return while_joined, ckpt.load(state, root).step


@pytest.mark.ranks
def test_nothing_listens_after_destroy_process_group(tmp_path: Path) -> None:
    url, root = f"file://{tmp_path}/again", str(tmp_path / "root")
    assert run_ranks(2, _leaves, url, root) == [(1, 2)] * 2


def test_a_call_that_is_repeated_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store was away, say: the others look in the same part for this rank."""

    class Group:
        pass

    process, store, groups = ThisProcess(), cast(Any, dist).HashStore(), [Group(), Group()]
    numbers = []
    for group in (groups[0], groups[0], groups[1], groups[1]):
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
        numbers.append(process.number(store, 0))
    assert numbers == [1, 1, 2, 2]


def _leaves_and_joins(port: int, root: str) -> list[int]:
    ckpt.world.heart.LOOK_SECONDS = 0.2
    rank, state, torchs = int(os.environ["RANK"]), {"a": torch.ones(4)}, cast(Any, dist)
    store = torchs.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    # gloo itself would meet what it left there, now and then.
    torchs.distributed_c10d._get_default_store = lambda: store
    for step in (1, 2):
        own = torchs.PrefixStore(f"{step}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
        if rank == 0:
            time.sleep(1.0)  # what it left in the store is all that the other finds
        ckpt.save(state, root, step=step)
        dist.barrier()
        dist.destroy_process_group()
        _wait_until_it_listens_no_more()
        # Rank 0 serves the store: it ends last.
        while rank == 1 and store.add("left", 0) < 2 * step - 1:
            time.sleep(0.1)
        store.add("left", 1)
        while rank == 0 and store.add("left", 0) < 2 * step:
            time.sleep(0.1)
    return [one.step for one in ckpt.list_steps(root)]


@pytest.mark.ranks
def test_a_job_is_joined_again_with_the_same_store(tmp_path: Path) -> None:
    port, root = two_free_ports()[0], str(tmp_path / "root")
    answers = run_ranks(2, _leaves_and_joins, port, root, group=False, timeout_seconds=120)
    assert answers == [[1, 2]] * 2


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two files, each with a key and its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    return _certificate(folder, "job"), _certificate(folder, "other")


def _certificate(folder: Path, name: str) -> str:
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subprocess.run(
        [*command.split(), "-subj", "/CN=x", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    (folder / f"{name}.pem").write_bytes(key.read_bytes() + certificate.read_bytes())
    return str(folder / f"{name}.pem")


def _saves_encrypted(files: tuple[str, ...], root: str) -> tuple[str, list[int]]:
    ckpt.world.missing.LOOK_SECONDS = 0.5
    os.environ[CERTIFICATE_VARIABLE] = files[dist.get_rank() % len(files)]
    try:
        _, values = _saves_from("lo", "", root)
    except CheckpointError as error:
        return str(error), []
    heart = this_process.in_job().heart
    kinds = {type(link.sock) for link in heart._links.values()}
    return ", ".join(kind.__name__ for kind in kinds), values


@pytest.mark.ranks
def test_rounds_are_encrypted_on_request(certificates: tuple[str, str], tmp_path: Path) -> None:
    answers = run_ranks(3, _saves_encrypted, certificates[:1], str(tmp_path / "root"))
    assert answers == [("SSLSocket", [0, 1, 2, 3])] * 3


@pytest.mark.ranks
@pytest.mark.parametrize("lacks", [False, True])
def test_other_certificates_are_refused_by_name(
    lacks: bool, certificates: tuple[str, str], tmp_path: Path
) -> None:
    files = certificates[0], "" if lacks else certificates[1]
    answers = run_ranks(2, _saves_encrypted, files, str(tmp_path / "root"))
    assert all("must name the same file on all ranks" in text for text, _ in answers), answers


@sees_steps
def test_ctrl_c_sends_no_encrypted_message_twice(certificates: tuple[str, str]) -> None:
    """Wherever it comes: the message is whole, or the connection ends, to be made anew."""
    number, came, file = 0, True, certificates[0]
    with listening(Place()) as listener, ThreadPoolExecutor(1) as pool:
        while came:
            number += 1
            ours = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
            theirs, _ = listener.accept()
            met = pool.submit(server_tls(file).wrap_socket, theirs, server_side=True)
            with client_tls(file).wrap_socket(ours) as client, met.result() as server:
                link = Link(client, None, None)
                came = interrupted_at(number, partial(link.send, b"first "), "send")
                link.send(b"second")
                with contextlib.suppress(OSError):
                    link.end()
                received = b""
                while more := server.recv(100):
                    received += more
                whole = b"second" if received == b"second" else b"first second"  # not begun
                assert whole.startswith(received), number
                assert came or received == b"first second"
    assert number > 10


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("no key")
    for path in (tmp_path / "none.pem", tmp_path / "absent.pem"):
        with pytest.raises(CheckpointError, match=f"{CERTIFICATE_VARIABLE}='{path}'"):
            Heart(0, ("127.0.0.1",), Place("127.0.0.1", certificate=str(path)))


class _Refused(ConnectionRefusedError):
    pass


def _saves_behind_walls(port: int, certificate: str, root: str) -> tuple[list[int], int]:
    def refuse(*_: object) -> socket.socket:
        raise _Refused("a wall")

    if certificate:
        os.environ[CERTIFICATE_VARIABLE] = certificate
    Card.connect = refuse  # type: ignore[method-assign, assignment]
    ckpt.world.liveness.ProcessIdentity.runs = lambda self: None  # type: ignore[method-assign]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=5)
    state: dict[str, Any] = {"a": torch.arange(4)}
    ckpt.save(state, root, step=1)
    pending = ckpt.async_save(state, root, step=2)
    pending.result()
    state["a"] = torch.zeros(4, dtype=torch.int64)
    ckpt.load(state, root)
    world = current_world()
    # Of as many bytes as do not fit into one message of the store.
    parts = memoryview(bytearray(b"%d" % rank) * (3 << 20))
    room = [memoryview(bytearray(3 << 20)) for _ in range(5)]
    with world.transfers("all to all", [3 << 20] * 5, [3 << 20] * 5) as wires:
        wires.move(
            [Message(peer, 0, parts) for peer in range(5) if peer != rank],
            [Message(peer, 0, room[peer]) for peer in range(5) if peer != rank],
        )
    assert all(bytes(one) == b"%d" % n * (3 << 20) for n, one in enumerate(room) if n != rank)
    links = this_process.in_job().heart._links.values()
    dist.barrier()  # the store ends with rank 0
    return state["a"].tolist(), sum(not link.is_by_store for link in links)


@pytest.mark.ranks
@pytest.mark.parametrize("encrypted", [False, True])
def test_ranks_that_cannot_connect_talk_by_the_store(
    encrypted: bool, certificates: tuple[str, str], tmp_path: Path
) -> None:
    (port, _), certificate = two_free_ports(), certificates[0] if encrypted else ""
    answers = run_ranks(
        5,
        _saves_behind_walls,
        port,
        certificate,
        str(tmp_path / "root"),
        group=False,
        timeout_seconds=120,
    )
    assert answers == [([0, 1, 2, 3], 0)] * 5


def _dies_behind_walls(port: int, root: str) -> str:
    for name in ("BEAT_SECONDS", "SILENT_SECONDS"):
        setattr(ckpt.world.by_store, name, 1.0 if name.startswith("B") else 3.0)
    ckpt.world.heart.MEND_SECONDS = ckpt.world.by_store.CALL_SECONDS = 3.0
    Card.connect = _raise  # type: ignore[method-assign, assignment]
    ckpt.world.liveness.ProcessIdentity.runs = lambda self: None  # type: ignore[method-assign]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    ckpt.save({"a": torch.ones(2)}, root, step=1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    text = "saved"
    try:
        ckpt.save({"a": torch.ones(2)}, root, step=2)
    except ckpt.errors.RankFailed as error:
        text = str(error)
    # The store ends with rank 0: rank 1 would name that, if it came late.
    Path(f"{root}-{rank}").touch()
    deadline = time.monotonic() + 60
    while not Path(f"{root}-{1 - rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return text


def _raise(*_: object) -> socket.socket:
    raise TimeoutError("a wall")


@pytest.mark.ranks
def test_a_death_behind_walls_is_noticed(tmp_path: Path) -> None:
    port = two_free_ports()[0]
    texts = run_ranks(
        3,
        _dies_behind_walls,
        port,
        str(tmp_path / "root"),
        group=False,
        allow_dead=[2],
        timeout_seconds=120,
    )
    assert all("rank 2" in text for text in texts[:2]), texts
