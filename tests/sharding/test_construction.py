"""Construction: arguments, groups, ignored states, devices, deferred values, wrapping policies.

Method: one small model per rule on one or more ranks; what is wrapped, held or raised as the
specification lists it, for torch's engine too where that is right on CPU.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import unittest.mock
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh

import sharding
from sharding import (
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    enable_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from sharding.engine.groups import blocks_of
from sharding.engine.reduction import divide_factors
from sharding.fsdp import fsdp_units
from sharding.wrapping.init import choose_device
from tests.ranks import run_ranks
from tests.sharding.models import batches, block, build, engine, full_copies, uneven, wrapped

ranks = pytest.mark.ranks
Ours = FullyShardedDataParallel


# B1, B5 ------------------------------------------------------------------------------------------


def test_arguments_and_defaults_are_those_of_torch() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Theirs

    theirs = inspect.signature(Theirs.__init__).parameters
    ours = inspect.signature(Ours.__init__).parameters
    assert list(ours) == [*theirs, "shard_placement_fn"], "one more, behind torch's"
    assert {n: ours[n].default for n in theirs} == {n: p.default for n, p in theirs.items()}


def test_names_of_torchs_package_are_offered() -> None:
    import torch.distributed.fsdp as theirs

    for name in sharding.__all__:
        offered = getattr(sharding, name)
        is_torchs = str(getattr(offered, "__module__", "")).startswith("torch.")
        if is_torchs and hasattr(theirs, name) and name != "wrap":  # there, that is a module
            assert offered is getattr(theirs, name)
    # Named axes of meshes with more than data parallelism: for fully_shard, not offered.
    assert set(theirs.__all__) - set(sharding.__all__) <= {"DataParallelMeshDims"}


FACTORS = {1: (1, 1), 2: (2, 1), 3: (2, 1.5), 4: (2, 2), 6: (4, 1.5), 8: (4, 2), 16: (4, 4)}


@pytest.mark.parametrize(("size", "factors"), FACTORS.items())
def test_divide_factors(size: int, factors: tuple[float, float]) -> None:
    assert divide_factors(size) == factors


# B2, B3, B4 --------------------------------------------------------------------------------------


def group_rules() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    one = init_device_mesh("cpu", (4,))
    pair = (mesh.get_group(1), mesh.get_group(0))
    hybrid = ShardingStrategy.HYBRID_SHARD
    world = dist.group.WORLD
    for bad in (
        {"process_group": world, "device_mesh": one},
        {"device_mesh": mesh},
        {"sharding_strategy": hybrid},
        {"sharding_strategy": hybrid, "device_mesh": one},
        {"sharding_strategy": hybrid, "process_group": world},
        {"process_group": pair},
    ):
        with pytest.raises(ValueError, match=r"process_group|mesh|group"):
            Ours(nn.Linear(4, 4), **bad)
    unit = Ours(nn.Linear(4, 4), device_mesh=one)
    assert unit.fsdp_groups.shard.global_ranks == (0, 1, 2, 3)
    for how in ({"process_group": pair}, {"device_mesh": mesh}):
        unit = Ours(nn.Linear(4, 4), sharding_strategy=hybrid, **how)
        assert unit.fsdp_groups.shard.size == unit.fsdp_groups.replicate.size == 2
        assert unit.fsdp_unit.reduction.factors == (2, 2)
    # Without an accelerator a node counts as one device: every rank is a shard group of its own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Ours(
            nn.Sequential(nn.Linear(4, 4)),
            sharding_strategy=hybrid,
            auto_wrap_policy=ModuleWrapPolicy([nn.Linear]),
        )
    child = model.module[0]
    assert child.fsdp_groups.shard.group is model.fsdp_groups.shard.group
    assert child.fsdp_groups.replicate.group is model.fsdp_groups.replicate.group


@pytest.mark.ranks
@ranks
def test_group_rules() -> None:
    run_ranks(4, group_rules)


def test_groups_of_nodes() -> None:
    assert blocks_of(4, 2) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])


# B6 ----------------------------------------------------------------------------------------------


def clamped() -> None:
    with pytest.warns(UserWarning, match="shards nothing"):
        unit = Ours(nn.Linear(2, 2))
    assert unit.fsdp_unit.settings.strategy is ShardingStrategy.NO_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ours(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD)


def deprecated() -> None:
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        Ours(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD)


@pytest.mark.ranks
@ranks
def test_one_rank_shards_nothing_and_no_shard_is_deprecated() -> None:
    run_ranks(1, clamped)
    run_ranks(2, deprecated)


# B8, B9 ------------------------------------------------------------------------------------------


def ignored_states() -> None:
    for make in (engine("torch"), engine("ours")):
        model = uneven()
        first = model[0]
        unit = make(model, ignored_modules=[first])
        assert first.weight.shape == (7, 6)
        assert id(first.weight) in {id(p) for p in unit.parameters()}
        model = uneven()
        make(model, ignored_states=[model[0].weight])
        assert model[0].weight.shape == (7, 6) and "bias" not in model[0]._parameters
    model = uneven()
    Ours(model, ignored_modules=(m for m in [model[0]]))
    assert model[0].weight.shape == (7, 6)
    # Inherited from nested units, and given to auto-wrapped ones.
    model = uneven()
    kept = model[1][0].weight
    model[1] = Ours(model[1], ignored_states=[kept])
    root = Ours(model)
    assert kept.shape == (5, 7) and kept in root.fsdp_ignored.params
    model = uneven()
    kept = model[1][0].weight
    Ours(model, ignored_states=[kept], auto_wrap_policy=ModuleWrapPolicy([nn.Linear]))
    assert kept.shape == (5, 7)
    with pytest.warns(UserWarning, match="nothing of it is sharded"):
        model = uneven()
        Ours(model, ignored_modules=[model])
    # So are modules that torch's replicate serves.
    model = uneven()
    replicate(model[1][0])
    Ours(model)
    assert "weight" in model[1][0]._parameters and "weight" not in model[1][2]._parameters
    # Their gradients are not reduced.
    model = build("uneven")
    weight = model[0].weight
    unit = Ours(model, ignored_modules=[model[0]])
    unit(torch.full((2, 6), float(dist.get_rank() + 1))).sum().backward()
    other = weight.grad.clone()
    dist.broadcast(other, 0)
    assert dist.get_rank() == 0 or not torch.equal(other, weight.grad)


def ignored_errors() -> None:
    for make in (engine("torch"), engine("ours")):
        model = uneven()
        for bad in (
            {"ignored_modules": [], "ignored_states": []},
            {"ignored_states": [model[0], model[0].weight]},
            {"ignored_modules": [model[0].weight]},
        ):
            with pytest.raises(ValueError):
                make(model, **bad)
        model[1] = make(model[1])
        with pytest.raises(ValueError):
            make(model, ignored_modules=[model[1]])


@pytest.mark.ranks
@ranks
def test_ignored_states_are_left_alone() -> None:
    run_ranks(2, ignored_states)


@pytest.mark.ranks
@ranks
def test_wrong_ignored_states_are_refused() -> None:
    run_ranks(2, ignored_errors)


# B10, B11 ----------------------------------------------------------------------------------------


class StubParam:
    """A parameter of which only the device is known."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_device_choice() -> None:
    def chosen(devices: list[str], device_id: Any = None) -> torch.device:
        return choose_device([StubParam(d) for d in devices], device_id)  # type: ignore[misc]

    assert chosen(["cpu"], torch.device("cpu")) == torch.device("cpu")
    assert chosen(["cuda:1", "meta"]) == torch.device("cuda:1")
    with pytest.raises(RuntimeError, match="several kinds"):
        chosen(["cuda:0", "xpu:0"])
    with pytest.raises(RuntimeError, match="pass device_id"):
        chosen(["cpu", "cuda:0"])
    assert chosen(["cpu", "cuda:0"], torch.device("cuda:0")) == torch.device("cuda:0")
    with pytest.raises(ValueError, match="device_id is cuda:1"):
        chosen(["cuda:0"], torch.device("cuda:1"))
    if not torch.accelerator.is_available():
        assert chosen(["cpu"]) == chosen(["meta"]) == torch.device("cpu")
        with pytest.raises(ValueError, match="no accelerator"):
            chosen(["cpu"], 0)


class StubAccelerator:
    """As torch sees a machine with two devices, the second of them current."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_accelerator() -> torch.device:
        return torch.device("cuda")

    @staticmethod
    def current_device_index() -> int:
        return 1


def test_devices_without_an_index_mean_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", StubAccelerator)
    params: Any = [StubParam("cpu")]
    with pytest.warns(UserWarning, match="has no index: the current device 1 is used"):
        assert choose_device(params, torch.device("cuda")) == torch.device("cuda:1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_device(params, 0) == torch.device("cuda:0")
        assert choose_device(params, torch.device("cpu")) == torch.device("cpu")
        assert choose_device(params, None) == torch.device("cuda:1")


# B12, B13 ----------------------------------------------------------------------------------------


class NoReset(nn.Module):
    """Owns a parameter, and cannot give it a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


def deferred() -> None:
    with torch.device("meta"):
        model = uneven()
    torch.manual_seed(5)
    real = nn.Linear(1, 1)
    before = real.weight.detach().clone()
    unit = Ours(nn.Sequential(model, real))
    assert torch.equal(full_copies(unit)["1.weight"], before)  # it was real: left alone
    for _, mine in batches(1):
        unit(mine).sum().backward()
    with pytest.warns(UserWarning, match="NoReset"), pytest.raises(AttributeError):
        Ours(NoReset())
    order: list[str] = []

    def init(module: nn.Module) -> None:
        order.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)

    with torch.device("meta"):
        model = uneven()
        skipped = uneven()
    model.append(skipped)
    model[1] = Ours(model[1], param_init_fn=init)
    assert order == ["Sequential", "Linear", "Tanh", "Linear"]
    order.clear()
    skipped.to_empty(device="cpu")
    Ours(model, param_init_fn=init, ignored_modules=[skipped])
    assert order == ["Sequential", "Linear", "Linear"]
    with pytest.raises(ValueError, match="callable"):
        Ours(nn.Linear(2, 2), param_init_fn=3)  # type: ignore[arg-type]


@pytest.mark.ranks
@ranks
def test_values_for_what_is_on_meta() -> None:
    run_ranks(2, deferred)


# B14 ---------------------------------------------------------------------------------------------


def fakes() -> None:
    """A stub in the place of torchdistX: its fake tensors are tensors that it knows."""
    known: list[torch.Tensor] = []
    asked: list[str] = []

    def materialize_module(module: nn.Module, *, check_fn: Any) -> None:
        if not check_fn(module):
            return
        asked.append(type(module).__name__)
        for child in module.children():
            materialize_module(child, check_fn=check_fn)
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.full_like(param, 2.0)))

    stub, fake, deferred = (types.ModuleType(f"torchdistx{s}") for s in ("", ".fake", ".deferred"))
    fake.is_fake = lambda tensor: any(tensor is one for one in known)  # type: ignore[attr-defined]
    deferred.materialize_module = materialize_module  # type: ignore[attr-defined]
    names = {
        "torchdistx": stub,
        "torchdistx.fake": fake,
        "torchdistx.deferred_init": deferred,
    }
    with unittest.mock.patch.dict(sys.modules, names):
        model = uneven()
        model[1] = Ours(model[1])
        known.append(model[0].weight)
        before = model[2].weight.detach().clone()
        unit = Ours(model, ignored_modules=[model[2]])
        params = full_copies(unit)
        assert bool((params["0.weight"] == 2.0).all()) and torch.equal(params["2.weight"], before)
        assert asked == ["Sequential", "Linear"]
        assert not bool((params["1.0.weight"] == 2.0).all())
        asked.clear()
        Ours(uneven())
        assert asked == []


@pytest.mark.ranks
@ranks
def test_fake_tensors_of_torchdistx_are_materialized() -> None:
    run_ranks(2, fakes)


# B15, B16 ----------------------------------------------------------------------------------------


class WithBuffer(nn.Module):
    """A linear layer, a buffer and an ignored parameter that differ on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.layer = nn.Sequential(nn.Linear(3, 3))
        self.register_buffer("scale", torch.rand(2))
        self.layer.register_buffer("steps", torch.tensor(dist.get_rank()))
        self.own = nn.Parameter(torch.rand(2))


def synced(hybrid: bool) -> tuple[list[list[float]], list[float]]:
    kwargs: dict[str, Any] = {}
    if hybrid:
        kwargs["device_mesh"] = init_device_mesh("cpu", (2, 2))
        kwargs["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    model = WithBuffer()
    unit = Ours(
        model,
        auto_wrap_policy=ModuleWrapPolicy([nn.Sequential]),
        sync_module_states=True,
        ignored_states=[model.own],
        **kwargs,
    )
    params = full_copies(unit)
    own = params.pop("own").tolist()
    values = [value.flatten().tolist() for value in params.values()]
    return [*values, *(b.flatten().tolist() for b in model.buffers())], own


@pytest.mark.ranks
@ranks
@pytest.mark.parametrize("hybrid", [False, True])
def test_states_of_the_first_rank_reach_all(hybrid: bool) -> None:
    results = run_ranks(4, synced, hybrid)
    assert all(values == results[0][0] for values, _ in results)
    assert len({tuple(own) for _, own in results}) == 4


# B17 to B21 --------------------------------------------------------------------------------------


def wrapped_names(model: nn.Module) -> list[str]:
    return [
        name.replace("_fsdp_wrapped_module.", "")
        for name, module in model.named_modules()
        if module is not model and isinstance(module, Ours)
    ]


def policies() -> None:
    model = Ours(uneven(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert wrapped_names(model) == ["0", "1.0", "1.2", "2"]
    model = Ours(uneven(), auto_wrap_policy=always_wrap_policy)
    assert wrapped_names(model) == ["0", "1", "1.0", "1.1", "1.2", "2"]
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=45)
    assert wrapped_names(Ours(uneven(), auto_wrap_policy=by_size)) == ["0", "1"]
    layered = nn.ModuleDict(
        {"list": nn.ModuleList([block(6, 7, 6)]), "attention": nn.MultiheadAttention(8, 2)}
    )
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=40)
    with pytest.warns(UserWarning, match="no forward"):
        assert wrapped_names(Ours(layered, auto_wrap_policy=by_size)) == wrapped_by_torch()
    by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Tanh})
    assert wrapped_names(Ours(uneven(), auto_wrap_policy=by_class)) == ["1.1"]

    def choose(module: nn.Module) -> Any:
        if isinstance(module, nn.Linear) and module.in_features == 7:
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, nn.Linear) and module.in_features == 5

    model = Ours(uneven(), auto_wrap_policy=CustomPolicy(choose))
    assert wrapped_names(model) == ["1.0", "1.2"]
    assert [u.fsdp_unit.settings.strategy.name for u in fsdp_units(model)] == [
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "FULL_SHARD",
    ]
    with pytest.raises(ValueError):
        Ours(uneven(), auto_wrap_policy=CustomPolicy(lambda module: 3))  # type: ignore[arg-type]
    with enable_wrap(wrapper_cls=Ours, use_orig_params=True):
        inside = wrap(nn.Linear(3, 3))
    assert isinstance(inside, Ours) and inside.fsdp_unit.settings.use_orig_params
    assert not isinstance(wrap(nn.Linear(3, 3)), Ours)


def wrapped_by_torch() -> list[str]:
    """What torch's engine wraps of the same tree by the same policy."""
    layered = nn.ModuleDict(
        {"list": nn.ModuleList([block(6, 7, 6)]), "attention": nn.MultiheadAttention(8, 2)}
    )
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = engine("torch")(layered, auto_wrap_policy=by_size)
    return [
        n.replace("_fsdp_wrapped_module.", "")
        for n, m in model.named_modules()
        if m is not model and hasattr(m, "_handle")
    ]


def refused_trees() -> None:
    model = uneven()
    model[1] = Ours(model[1])
    with pytest.raises(ValueError, match="wrapped already"):
        Ours(model, auto_wrap_policy=always_wrap_policy)
    policy = ModuleWrapPolicy([nn.Sequential])
    with pytest.raises(ValueError, match="frozen"):
        Ours(build("partly_frozen"), auto_wrap_policy=policy)
    with pytest.warns(UserWarning, match="frozen"):
        Ours(build("partly_frozen"), auto_wrap_policy=policy, use_orig_params=True)
    with pytest.warns(UserWarning, match="no forward"):
        Ours(nn.ModuleList([nn.Linear(2, 2)]))


def batch_norms() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    seen: list[torch.dtype] = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with pytest.warns(UserWarning, match="BatchNorm1d") as caught:
        unit = Ours(
            model,
            auto_wrap_policy=ModuleWrapPolicy([nn.Linear]),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        )
    assert len(caught) == 1
    assert wrapped_names(unit) == ["0", "1", "2"]
    assert model[1].fsdp_unit.settings.precision.param_dtype is None
    out = unit(torch.ones(3, 6))
    assert seen == [torch.bfloat16, torch.bfloat16] and out.dtype == torch.bfloat16
    assert model[1].module.running_mean.dtype == torch.float32
    out.float().sum().backward()


@pytest.mark.ranks
@ranks
def test_policies_choose_units() -> None:
    run_ranks(2, policies)


@pytest.mark.ranks
@ranks
def test_trees_that_cannot_be_wrapped() -> None:
    run_ranks(2, refused_trees)


@pytest.mark.ranks
@ranks
def test_batch_norm_stays_in_full_precision() -> None:
    run_ranks(2, batch_norms)


def left_over() -> None:
    model: Any = wrapped("ours", uneven())
    model.module[0].register_parameter("late", nn.Parameter(torch.ones(2)))
    with pytest.raises(RuntimeError, match=r"0\.late"):
        model.check_nothing_left()


@pytest.mark.ranks
@ranks
def test_parameters_that_were_missed_are_named() -> None:
    run_ranks(2, left_over)
