"""Checkpoints to look at: one of a plain model, one that three FSDP2 ranks stored in slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import ckpt
from tests.ranks import run_ranks

BIG = 1_500_000  # elements: several blocks, and not a multiple of anything


class Net(nn.Module):
    """Tied weights, buffers of other dtypes, a scalar, something uneven, something of no size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 6))
        self.big = nn.Parameter(torch.randn(3, BIG // 3))
        self.low = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("scalar", torch.tensor(3.25, dtype=torch.float64))
        self.register_buffer("nothing", torch.empty(0, 4))


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


@pytest.fixture(scope="session")
def plain_root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two steps of {"model", "optim", "ema", "epoch"}, saved by this process."""
    root = str(tmp_path_factory.mktemp("plain") / "run")
    for step in (5, 10):
        net = make_net(step)
        optim = torch.optim.AdamW(net.parameters())
        net.big.sum().backward()
        optim.step()
        ema = {name: tensor * 0.5 for name, tensor in net.state_dict().items() if tensor.ndim == 2}
        ckpt.save({"model": net, "optim": optim, "ema": ema, "epoch": step}, root, step=step)
    return root


def stepped(step: int) -> Net:
    """The model as it was saved in `plain_root` at `step`."""
    net = make_net(step)
    optim = torch.optim.AdamW(net.parameters())
    net.big.sum().backward()
    optim.step()
    return net


def sliced_net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(40, 50), nn.Linear(48, 33, bias=False), nn.Linear(1002, 700).to(torch.bfloat16)
    )


def save_sliced(root: str) -> None:
    net = sliced_net()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(net[0], mesh=mesh)
    for layer in net[1:]:
        # Slices of columns are boxes that are no run of the row-major order.
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    ckpt.save({"model": net}, root, step=1)


@pytest.fixture(scope="session")
def sliced_root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`sliced_net` as three ranks stored it: rows of one layer, columns of the others."""
    root = str(tmp_path_factory.mktemp("sliced") / "run")
    run_ranks(3, save_sliced, root)
    return root


def data_files(root: str) -> list[Path]:
    return sorted(Path(root).glob("steps/*/*.safetensors"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ranks save what `sliced_root` is: its tests are no quick ones."""
    for item in items:
        if "sliced_root" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
