"""A training saved under any engine continues under `fully_shard`, and the other way round.

Method: train two steps under one engine, save, go on for two more steps; load under the other
engine, built from another seed, and take the same two steps: losses must be equal. `ckpt` knows
nothing of this engine: it sees DTensors.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt
import sharding
from ckpt.layout.modules import describe_module
from ckpt.layout.plain import Ranks
from tests.e2e import engines
from tests.e2e.engines import Net, Training, full_model
from tests.ranks import run_ranks
from tests.sharding.fully_scenarios import (
    assert_close,
    assert_equal,
    claims,
    ones,
    sharded,
    train,
    values,
)
from tests.sharding.models import build as build_small
from tests.sharding.test_checkpoints import build as build_flat
from tests.sharding.test_fully_params import Halved

pytestmark = pytest.mark.ranks


def build(engine: str, seed: int = 0, optimizer: str = "adamw") -> Training:
    """The model under "fully", "fully-hsdp", "fully+tp", a flat engine of ours or one of torch."""
    if not engine.startswith("fully"):
        return build_flat(engine, optimizer, seed)
    torch.manual_seed(seed)
    net: Any = Net().to(memory_format=torch.contiguous_format)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    if engine == "fully-hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    if engine == "fully+tp":
        both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net.body, both["tp"], plan)
        mesh = both["dp"]
    sharding.fully_shard(net.body, mesh=mesh)
    sharding.fully_shard(net, mesh=mesh)
    made = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if optimizer == "adamw":
        made = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    return Training(net, made, 2 if engine == "fully+tp" else 1)


def shared_folder() -> Path:
    """A new folder, the same on all ranks; the first one's to remove."""
    folder = [tempfile.mkdtemp(prefix="fully-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return Path(str(folder[0]))


def continues(saver: str, loader: str, *, optimizer: str = "adamw") -> None:
    root = shared_folder()
    first = build(saver, optimizer=optimizer)
    for seed in range(2):
        first.step(seed)
    ckpt.save({**first.state, "steps": 2}, str(root), step=2)
    wanted = [first.step(seed) for seed in (2, 3)]
    second = build(loader, seed=7, optimizer=optimizer)
    if loader.startswith("fully"):
        second.step(99)  # somewhere in the middle of training
    ckpt.load({**second.state, "steps": 0}, str(root))
    losses = [second.step(seed) for seed in (2, 3)]
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=0.0, msg=f"{saver} {loader}"
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)


OTHERS = ("fsdp1-flat", "fsdp1-orig", "fsdp2", "ours-flat", "ours-orig", "ddp")


def checkpoints_of_other_engines_continue_here() -> None:
    for index, other in enumerate(OTHERS):
        continues(other, "fully", optimizer=("adamw", "sgd")[index % 2])


def our_checkpoints_continue_under_other_engines() -> None:
    for index, other in enumerate(OTHERS):
        continues("fully", other, optimizer=("sgd", "adamw")[index % 2])


def state_dicts_move_between_torchs_fully_shard_and_ours() -> None:
    ours, theirs = (
        sharded("ours", build_small("uneven", 1)),
        sharded("torch", build_small("uneven")),
    )
    ours.load_state_dict(theirs.state_dict())
    assert_equal(values(ours), values(theirs), "to ours")
    train(ours)
    theirs.load_state_dict(ours.state_dict())
    assert_equal(values(ours), values(theirs), "to theirs")


def full_dicts_come_and_go_by_our_functions_and_by_torchs() -> None:
    from ckpt.state_dict import api as state_dicts

    training, plain = build("fully"), engines.build("plain", "adamw")
    training.step(0)
    model_dict = state_dicts.model_state_dict(training.model)
    wanted = full_model(training)
    if dist.get_rank() == 0:
        assert_close(
            {k: v for k, v in model_dict.items() if v.is_floating_point()},
            {k: v for k, v in wanted.items() if v.is_floating_point()},
            "full",
        )
    state_dicts.load_model_state_dict(training.model, plain.model.state_dict())
    names = dict(Net().named_parameters())
    got = {name: value for name, value in full_model(training).items() if name in names}
    assert_equal(got, {name: plain.model.state_dict()[name] for name in names}, "loaded")


def saves_and_loads_see_shards_in_every_state() -> None:
    for frees in (None, False):
        model = sharded("ours", build_small("uneven"), reshard_after_forward=frees)
        wanted = values(model)
        ranks = Ranks(dist.get_rank(), (0, 1))
        out = None
        for moment in ("new", "eval", "between", "unsharded"):
            if moment == "eval":
                with torch.no_grad():
                    model(ones())
            elif moment == "between":
                out = model(ones())
            elif moment == "unsharded":
                model.unshard()
            layout = describe_module(model, ranks)
            assert not layout.problems and not layout.save_hooks and not layout.load_hooks
            pieces = {
                piece.fqn: (piece, owned.local)
                for owned in layout.params
                for view in owned.views
                for piece in view.pieces
            }
            assert pieces.keys() == wanted.keys(), moment
            for name, (piece, local) in pieces.items():
                rows = slice(piece.region.offset[0], piece.region.offset[0] + piece.region.shape[0])
                assert torch.equal(local, wanted[name][rows]), f"{moment} {name}"
            if out is not None:
                out.sum().backward()
                out = None
        layout.reshard()
        for owned in layout.params:
            owned.local.fill_(0.5)
        plain = build_small("uneven")
        for param in plain.parameters():
            param.data.fill_(0.5)
        torch.testing.assert_close(model(ones()), plain(ones()))


def tied_parameters_are_stored_once_under_their_first_name() -> None:
    model = sharded("ours", build_small("tied"))
    model.unshard()
    model[1].unshard()
    layout = describe_module(model, Ranks(dist.get_rank(), (0, 1)))
    assert dict(layout.aliases) == {"1.second.weight": "1.first.weight"}
    pair: Any = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    pair.b.weight = pair.a.weight
    sharding.fully_shard([pair.a, pair.b])
    layout = describe_module(pair, Ranks(dist.get_rank(), (0, 1)))
    assert not layout.problems and dict(layout.aliases) == {"b.weight": "a.weight"}


def shards_without_memory_are_refused_by_name() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].weight = nn.Parameter(Halved(model[1].weight.detach()))
    sharding.fully_shard(model)
    refused = r"net\.1\.weight: is of class Halved, .* __ckpt_pieces__"
    root = shared_folder()
    for _ in range(2):  # a second save would know the state of the first
        with pytest.raises(ckpt.errors.InvalidState, match=refused) as caught:
            ckpt.save({"net": model}, root, step=1)
        assert "1 problem" in str(caught.value)
    plain = sharding.fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    ckpt.save({"net": plain}, root, step=1)
    with pytest.raises(ckpt.errors.InvalidState, match=refused):
        ckpt.load({"net": model}, root)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)


test_on_two_ranks = claims(
    2,
    [
        checkpoints_of_other_engines_continue_here,
        our_checkpoints_continue_under_other_engines,
        state_dicts_move_between_torchs_fully_shard_and_ours,
        full_dicts_come_and_go_by_our_functions_and_by_torchs,
        saves_and_loads_see_shards_in_every_state,
        tied_parameters_are_stored_once_under_their_first_name,
        shards_without_memory_are_refused_by_name,
    ],
)


# Four ranks --------------------------------------------------------------------------------------


def hybrid_and_tensor_parallel_trainings_continue() -> None:
    for saver, loader in (
        ("fully-hsdp", "fsdp2"),
        ("hsdp", "fully"),
        ("fully+tp", "fsdp+tp"),
        ("fsdp+tp", "fully+tp"),
        ("fully", "ours-hybrid"),
    ):
        continues(saver, loader)


test_on_four_ranks = claims(
    4,
    [hybrid_and_tensor_parallel_trainings_continue],
)


# Other numbers of ranks --------------------------------------------------------------------------


def save(engine: str, root: str) -> dict[str, torch.Tensor]:
    training = build(engine)
    training.step(0)
    ckpt.save({**training.state, "steps": 1}, root, step=1)
    return full_model(training)


def load(engine: str, root: str) -> dict[str, torch.Tensor]:
    training = build(engine, seed=3)
    ckpt.load({**training.state, "steps": 0}, root)
    loaded = full_model(training)
    training.step(1)
    return loaded


def test_a_checkpoint_moves_to_other_numbers_of_ranks(tmp_path: Path) -> None:
    root = str(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = run_ranks(4, save, "fully+tp", root)[0]
        loaded = run_ranks(3, load, "fully", root)
    names = dict(Net().named_parameters())
    for model_dict in loaded:
        assert_equal({k: model_dict[k] for k in names}, {k: saved[k] for k in names}, "moved")
