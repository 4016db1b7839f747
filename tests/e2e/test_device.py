"""Tensors on a device: saved and loaded bit for bit, alone and under the device's own collectives.

Method: one process with one device; a default group of one rank (NCCL on CUDA). All of it runs on
the CPU too, which says that the tests are right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.ranks import run_ranks


def _training(seed: int, device: str) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 36, 1000),
    ).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 * (seed + 1))
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    net(images.to(device)).square().mean().backward()
    optimizer.step()
    return {"model": net, "optim": optimizer, "seed": seed}


def _same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["seed"] == b["seed"]
    for x, y in zip(a["model"].parameters(), b["model"].parameters(), strict=True):
        assert torch.equal(x.cpu(), y.cpu())
        for key, value in a["optim"].state[x].items():
            assert torch.equal(value.cpu(), b["optim"].state[y][key].cpu()), key
    for x, y in zip(a["model"].buffers(), b["model"].buffers(), strict=True):
        assert torch.equal(x.cpu(), y.cpu())


@pytest.mark.parametrize("way", ["out", "back", "stays"])
def test_a_state_moves_between_devices(tmp_path: Path, way: str, device: str) -> None:
    saved = "cpu" if way == "out" else device
    loaded = "cpu" if way == "back" else device
    state, other = _training(1, saved), _training(2, loaded)
    ckpt.save(state, str(tmp_path), step=1)
    ckpt.load(other, str(tmp_path))
    _same(state, other)
    assert {p.device.type for p in other["model"].parameters()} == {loaded}


def test_tensors_larger_than_any_staging_buffer(tmp_path: Path, device: str) -> None:
    """Pieces of many blocks, contiguous and not, written while the device continues to work."""
    torch.manual_seed(0)
    base = torch.randn(6000, 5003, device=device)  # 114 MiB, no multiple of a block
    state = {"whole": base, "turned": base.t(), "half": base.half()[:, 1:4000]}
    ckpt.save(state, str(tmp_path), step=1)
    other = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    ckpt.load(other, str(tmp_path))
    for key, tensor in state.items():
        assert torch.equal(other[key], tensor), key


def test_writes_see_what_the_device_had_queued(tmp_path: Path, device: str) -> None:
    """A save right after an asynchronous kernel stores its result; so for another stream."""
    module = torch.get_device_module(device)
    stream = module.Stream()
    tensor = torch.zeros(1 << 22, device=device)
    with module.stream(stream):
        for _ in range(200):
            tensor += 1
        ckpt.save({"t": tensor}, str(tmp_path), step=1)
    other = torch.zeros(1 << 22)
    ckpt.load({"t": other}, str(tmp_path))
    assert other.unique().tolist() == [200.0]


@pytest.mark.parametrize("host_bytes_max", [None, 32 << 20])
def test_a_save_in_the_background_stores_the_state_of_the_call(
    tmp_path: Path, host_bytes_max: int | None, device: str
) -> None:
    """Training continues at once; copies go over a side stream into pinned memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2000, 2000), nn.BatchNorm1d(2000), nn.Linear(2000, 2000))
    net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    state = {"model": net, "optim": optimizer}

    def train() -> None:
        net(torch.randn(64, 2000, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(4):
        train()
        expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        moments = [value.clone() for value in optimizer.state[net[0].weight].values()]
        pending = ckpt.async_save(state, str(tmp_path), step=step, host_bytes_max=host_bytes_max)
        train()
        pending.result()
        with ckpt.open(str(tmp_path), step) as checkpoint:
            for name, tensor in expected.items():
                assert torch.equal(checkpoint[f"model.{name}"], tensor.cpu()), (step, name)
            for key, value in zip(optimizer.state[net[0].weight], moments, strict=True):
                assert torch.equal(checkpoint[f"optim.state.0.weight.{key}"], value.cpu()), key


def _own_backend(base: str, device: str) -> None:
    torch.get_device_module(device).set_device(0)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{base}/meet", rank=0, world_size=1)
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(device)
        fully_shard(net, mesh=init_device_mesh(device, (1,)))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * seed)
        net(torch.randn(2, 7, device=device)).sum().backward()
        optimizer.step()
        states.append({"model": net, "optim": optimizer})
    ckpt.save(states[0], f"{base}/run", step=1)
    ckpt.load(states[1], f"{base}/run")
    first, second = (state["model"].parameters() for state in states)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x.full_tensor(), y.full_tensor())
        for key, value in states[0]["optim"].state[x].items():
            loaded = states[1]["optim"].state[y][key]
            if hasattr(value, "full_tensor"):
                value, loaded = value.full_tensor(), loaded.full_tensor()
            assert torch.equal(value, loaded), key
    dist.destroy_process_group()


@pytest.mark.ranks
def test_a_default_group_of_the_devices_own_backend(tmp_path: Path, device: str) -> None:
    run_ranks(1, _own_backend, str(tmp_path), device, group=False)
