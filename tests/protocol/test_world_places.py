"""Where ranks listen for each other, and stores by which they cannot find each other."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CheckpointError
from ckpt.world.heart import Heart, Place
from ckpt.world.job import PORTS_VARIABLE, place_of_environment, this_process
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
