"""The protocol of engines is what the code looks for, and our own engine keeps it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ckpt.layout import protocol
from ckpt.state.optimizer_kinds import declared
from sharding import FullyShardedDataParallel, fully_shard
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PROTOCOLS = {
    "__ckpt_pieces__": protocol.OffersPieces,
    "__ckpt_reshard__": protocol.DropsGathered,
    "__ckpt_aliases__": protocol.NamesAliases,
    "__ckpt_sharding__": protocol.TellsSharding,
    "__ckpt_wraps__": protocol.WrapsChild,
    "__ckpt_neutral__": protocol.NeutralHook,
}
# Of optimizers, not of engines: `ckpt.state_dict.declare_optimizer_state`.
ELSEWHERE = {"__ckpt_state__"}


def test_every_name_that_is_looked_for_has_its_protocol() -> None:
    used = {
        name
        for folder in ("ckpt/layout", "ckpt/state", "ckpt/state_dict", "sharding")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"__ckpt_\w+__", path.read_text(encoding="utf-8"))
    }
    assert used == set(PROTOCOLS) | ELSEWHERE
    for name, one in PROTOCOLS.items():
        assert name in {*vars(one), *one.__annotations__} and one.__doc__
    assert declared(object()) == {}


def test_the_page_and_the_reference_name_them_all() -> None:
    page = (ROOT / "docs/howto/own_engine.md").read_text(encoding="utf-8")
    reference = (ROOT / "docs/api/protocol.md").read_text(encoding="utf-8")
    for name, one in PROTOCOLS.items():
        assert name in page
        assert f"::: ckpt.layout.protocol.{one.__name__}\n" in reference


def kept_by_ours() -> None:
    flat = FullyShardedDataParallel(nn.Linear(4, 4))
    assert isinstance(flat, protocol.OffersPieces)
    assert isinstance(flat, protocol.DropsGathered)
    assert isinstance(flat, protocol.NamesAliases)
    assert isinstance(flat, protocol.TellsSharding)
    assert isinstance(flat, protocol.WrapsChild)
    unit = nn.Linear(4, 4)
    fully_shard(unit, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    assert isinstance(unit, protocol.OffersPieces)
    assert isinstance(unit, protocol.DropsGathered)
    assert isinstance(unit, protocol.NamesAliases)
    assert not isinstance(nn.Linear(4, 4), protocol.OffersPieces)


@pytest.mark.ranks
def test_our_own_engine_keeps_them() -> None:
    run_ranks(1, kept_by_ours)
