"""Members that are not plain tensors: an extension sees them at the right places, and tensor
parallel members train and are saved as the model that is not parallel.

Method: an extension that records its calls; a model that is parallel over one axis of a 2 x 2 mesh
and sharded over the other, against the same model in one process.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt
from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, StateDictType
from sharding.engine.extensions import Extension
from tests.ranks import run_ranks
from tests.sharding.models import build, clean, full
from tests.sharding.test_state_dicts import assert_same

pytestmark = pytest.mark.ranks
Ours = FullyShardedDataParallel


class Recording(Extension):
    """Flattens weights turned, and remembers what it was asked."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.after: list[Any] = []

    def before_flatten(self, fqn: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.before.append(fqn)
        return (tensor.t(), f"token of {fqn}") if fqn.endswith("weight") else (tensor, None)

    def after_unflatten(self, tensor: torch.Tensor, token: Any) -> torch.Tensor:
        assert tensor.dim() == 2
        self.after.append(token)
        return tensor.t()


def recorded() -> None:
    names = [name for name, _ in build("uneven").named_parameters()]
    weights = [f"token of {name}" for name in names if name.endswith("weight")]
    plain = build("uneven")
    x = torch.ones(2, 6)
    for orig in (False, True):
        extension = Recording()

        class Extended(FullyShardedDataParallel):
            fsdp_extension = extension

        model = Extended(build("uneven"), use_orig_params=orig)
        assert extension.before == names and extension.after == []
        for _ in range(2):
            torch.testing.assert_close(model(x), plain(x))
        assert extension.after == weights  # what they gave is kept from step to step
        with Ours.summon_full_params(model):
            shown = dict(model.named_parameters())
            assert all(torch.equal(shown[n], value) for n, value in plain.named_parameters())
            with torch.no_grad():
                shown["0.weight"].copy_(torch.ones(7, 6))
        other = copy.deepcopy(plain)
        other[0].weight.data.fill_(1.0)
        torch.testing.assert_close(model(x), other(x))
        model(x).sum().backward()
        assert Ours(build("uneven")).fsdp_extension is None
        model = Extended(build("uneven"), auto_wrap_policy=ModuleWrapPolicy([nn.Linear]))
        assert all(unit.fsdp_extension is extension for unit in Ours.fsdp_modules(model))


def test_an_extension_is_asked_when_a_unit_is_built_and_when_it_is_shown() -> None:
    run_ranks(2, recorded)


class Parallel(nn.Module):
    """Two layers that are parallel, around a plain one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.tanh(self.up(x))))


def parallel(orig: bool, strategy: str, seed: int = 0) -> Any:
    if strategy == "HYBRID_SHARD":
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
        data = mesh["replicate", "shard"]
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        data = mesh["shard"]
    model = nn.Sequential(Parallel(), nn.Linear(5, 3))
    if seed:
        for param in model.parameters():
            param.data.fill_(float(seed))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model[0], mesh["tensor"], plan)
    return Ours(
        model,
        device_mesh=data,
        use_orig_params=orig,
        auto_wrap_policy=ModuleWrapPolicy([Parallel]),
        sharding_strategy=ShardingStrategy[strategy],
    )


def whole(params: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        clean(name): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in params.items()
    }


def data_of(step: int, part: int | None = None) -> torch.Tensor:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    return batch if part is None else batch.chunk(2)[part]


def step_all(model: Any, optimizer: torch.optim.Optimizer, part: int | None) -> None:
    for step in range(3):
        model(data_of(step, part)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def reference() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Parallel(), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    step_all(model, optimizer, None)
    return model, optimizer


def trained_in_parallel(root: str) -> None:
    wanted, _ = reference()
    values = {name: value.detach() for name, value in wanted.named_parameters()}
    for orig, strategy in itertools.product((False, True), ("FULL_SHARD", "SHARD_GRAD_OP")):
        model = parallel(orig, strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        step_all(model, optimizer, dist.get_rank() // 2)
        with full(model) as params:
            assert isinstance(params["0.up.weight"], DTensor)
            trained = whole(params)
        for name, value in values.items():
            torch.testing.assert_close(trained[name], value, msg=f"{orig} {strategy} {name}")
        # Full dicts have the tensors of the model that is not parallel.
        assert_same(dict(model.state_dict()), trained)
        for form in (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT):
            with Ours.state_dict_type(model, form):
                state = model.state_dict()
            other = parallel(not orig, strategy, seed=2)
            other.load_state_dict(state)
            with full(other) as params:
                assert_same(whole(params), trained)
        taken = Ours.optim_state_dict(model, optimizer)
        assert taken["state"]["0.up.weight"]["exp_avg"].shape == (8, 6)
        with pytest.raises(NotImplementedError, match="tensor parallel"):
            model.clip_grad_norm_(1.0)
        url = f"{root}/{orig}-{strategy}"
        ckpt.save({"model": model, "optimizer": optimizer}, url, step=1)
        other = parallel(not orig, strategy, seed=3)
        again = torch.optim.Adam(other.parameters(), lr=0.5)
        ckpt.load({"model": other, "optimizer": again}, url)
        with full(other) as params:
            assert_same(whole(params), trained)
        assert_same(Ours.optim_state_dict(other, again)["state"], taken["state"])


def loaded_alone(root: str) -> None:
    wanted, _ = reference()
    model = nn.Sequential(Parallel(), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    ckpt.load({"model": model, "optimizer": optimizer}, root)
    for name, value in wanted.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], value)


def test_tensor_parallel_members_train_and_are_saved(tmp_path: Path) -> None:
    run_ranks(4, trained_in_parallel, str(tmp_path), timeout_seconds=120)
    run_ranks(1, loaded_alone, f"{tmp_path}/True-FULL_SHARD")
