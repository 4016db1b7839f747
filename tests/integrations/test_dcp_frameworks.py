"""Accelerate, Lightning and torchtitan save through DCP, and over our storage by one argument.

Method: their own functions run on two ranks. Where they name DCP's storage, they are given ours;
what they load into other weights is compared, and our tools read what they saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.integrations.dcp import DcpReader, DcpWriter
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

Training = tuple[nn.Module, torch.optim.Optimizer]


def training(seed: int) -> Training:
    """A sharded model after two steps of AdamW."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * seed)
    for step in range(2):
        net(torch.full((4, 5), float(seed + step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def live(of: Training) -> dict[str, torch.Tensor]:
    net, optimizer = of
    held = {name: parameter for name, parameter in net.named_parameters()}
    for name, parameter in net.named_parameters():
        held |= {f"{name}.{k}": optimizer.state[parameter][k] for k in ("exp_avg", "exp_avg_sq")}
    return {name: one.detach().full_tensor() for name, one in held.items()}  # type: ignore[attr-defined]


Way = Callable[[str, Training, Training], dict[str, str]]


def by_accelerate(url: str, saved: Training, loaded: Training) -> dict[str, str]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp_utils

    # It finds the group that is there, and looks for the names all the same.
    names = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_RANK": str(dist.get_rank())}
    with mock.patch.dict(os.environ, names):
        accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    with (
        mock.patch.object(dcp, "FileSystemWriter", partial(DcpWriter, step=1)),
        mock.patch.object(dcp, "FileSystemReader", DcpReader),
    ):
        fsdp_utils.save_fsdp_model(plugin, accelerator, saved[0], url)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, saved[1], saved[0], url)
        fsdp_utils.load_fsdp_model(plugin, accelerator, loaded[0], url)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, loaded[1], loaded[0], url)
    return {"model": f"{url}/pytorch_model_fsdp_0", "optimizer": f"{url}/optimizer_0"}


def save(state: dict[str, Any], *, checkpoint_id: Any, storage_writer: Any = None) -> None:
    DCP_SAVE(state, storage_writer=DcpWriter(str(checkpoint_id), step=1))


def load(state: dict[str, Any], *, checkpoint_id: Any) -> None:
    DCP_LOAD(state, storage_reader=DcpReader(str(checkpoint_id)))


DCP_SAVE, DCP_LOAD = dcp.save, dcp.load


def by_lightning(url: str, saved: Training, loaded: Training) -> dict[str, str]:
    from lightning.fabric.strategies import model_parallel as strategy

    states: list[dict[str, Any]] = [
        {"model": net, "optimizer": optimizer, "step": step}
        for (net, optimizer), step in ((saved, 3), (loaded, 0))
    ]
    path, rank = Path(url), dist.get_rank()
    with mock.patch.object(dcp, "save", save), mock.patch.object(dcp, "load", load):
        strategy._save_checkpoint(path, states[0], full_state_dict=False, rank=rank)
        dist.barrier()
        strategy._load_checkpoint(path, states[1])
    assert states[1]["step"] == 3
    return {"model": url, "optimizer": url}


def by_torchtitan(url: str, saved: Training, loaded: Training) -> dict[str, str]:
    titan: Any = pytest.importorskip("torchtitan.components.checkpointer.dcp", reason="torchtitan")
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torchtitan.components.checkpointer.base import ModelWrapper

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    managers, states = [], []
    for net, optimizer in (saved, loaded):
        wrapper = ModelWrapper(net)
        managers.append(SimpleNamespace(sd_adapter=None, states={titan.MODEL: wrapper}, pg=None))
        of_optimizer = get_optimizer_state_dict(net, optimizer, options=flat)
        states.append({**wrapper.state_dict(), "optimizer": of_optimizer})
    manager = next(
        one for one in vars(titan).values() if isinstance(one, type) and "dcp_save" in vars(one)
    )
    with mock.patch.object(titan, "dcp", SimpleNamespace(save=save, load=load)):
        manager.dcp_save(managers[0], states[0], url, titan.AsyncMode.DISABLED)
        manager.dcp_load(managers[1], states[1], url, False, False)
    set_optimizer_state_dict(*loaded, states[1]["optimizer"], options=flat)
    return {"": url, "optimizer": url}


def run(way: Way, url: str) -> dict[str, str]:
    saved, loaded = training(1), training(2)
    wanted = live(saved)
    assert not torch.equal(live(loaded)["0.weight"], wanted["0.weight"])
    places = way(url, saved, loaded)
    for one in (saved, loaded):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in live(one).items())
    whole = {name: tensor for name, tensor in wanted.items() if "exp_" not in name}
    entry, place = next(iter(places.items()))
    with ckpt.open(place) as checkpoint:
        for name, tensor in whole.items():
            assert torch.equal(checkpoint[f"{entry}.{name}" if entry else name], tensor)
    other = training(3)
    ckpt.load({entry: other[0]} if entry else other[0], place, strict="state")
    assert torch.equal(live(other)["0.weight"], wanted["0.weight"])
    return places


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [by_accelerate, by_lightning, by_torchtitan])
def test_a_framework_saves_and_loads_over_our_storage(way: Way, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    for place in set(run_ranks(2, run, way, url, timeout_seconds=180)[0].values()):
        assert ckpt.verify(place).ok
        assert [info.step for info in ckpt.list_steps(place)] == [1]
