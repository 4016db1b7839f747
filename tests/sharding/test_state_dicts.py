"""State dicts of our class, model and optimizer, equal torch's own in every form.

Method: the same training under both engines on 2 ranks, from equal values; dicts are compared key
by key and bit by bit. What torch's class gets wrong (see the specification) is compared with the
unsharded model instead.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs

from sharding import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)
from tests.ranks import run_ranks
from tests.sharding.models import build, full_copies, uneven, wrapped
from tests.sharding.test_runtime import Buffered
from tests.sharding.test_training import train

pytestmark = pytest.mark.ranks
Ours = FullyShardedDataParallel
FULL, LOCAL, SHARDED = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
)


def quiet(function: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's functions of this kind all warn that they are old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def plain(value: Any) -> Any:
    """Sharded tensors as the local chunks that they hold."""
    if hasattr(value, "local_shards"):
        return [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()]
    return value.to_local() if hasattr(value, "to_local") else value


def assert_same(a: Any, b: Any, where: str = "") -> None:
    a, b = plain(a), plain(b)
    if isinstance(a, dict):
        assert set(a) == set(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for one, other in zip(a, b, strict=True):
            assert_same(one, other, where)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where


def trained(name: str, kind: str = "uneven", **kwargs: Any) -> tuple[Any, Any]:
    model = wrapped(name, build(kind), **kwargs)
    train(model, steps=2)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model(torch.ones(2, 6)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


# D1, D2 ------------------------------------------------------------------------------------------


def settings() -> None:
    model = wrapped("ours", uneven())
    for bad in (StateDictConfig(), ShardedStateDictConfig()):
        with pytest.raises(RuntimeError, match="FullStateDictConfig"):
            quiet(Ours.set_state_dict_type, model, FULL, bad)
    with pytest.warns(FutureWarning):
        before = Ours.set_state_dict_type(model, SHARDED)
    assert before.state_dict_type is FULL and isinstance(
        before.optim_state_dict_config, FullOptimStateDictConfig
    )
    with pytest.raises(KeyError), Ours.state_dict_type(model, LOCAL):
        assert Ours.get_state_dict_type(model).state_dict_type is LOCAL
        raise KeyError
    assert Ours.get_state_dict_type(model).state_dict_type is SHARDED
    quiet(Ours.set_state_dict_type, model.module[1], FULL)
    with pytest.raises(AssertionError, match="different"):
        Ours.get_state_dict_type(model)
    with Ours.state_dict_type(nn.Linear(2, 2), FULL):
        pass
    assert Ours.get_state_dict_type(nn.Linear(2, 2)) is None


def test_forms_are_set_and_restored() -> None:
    run_ranks(2, settings)


# D3 to D16 ---------------------------------------------------------------------------------------


def models_in_every_form() -> None:
    for kind in ("uneven", "tied", "recomputed", "convolution"):
        for orig in (False, True):
            theirs, _ = trained("torch", kind, use_orig_params=orig)
            ours, _ = trained("ours", kind, use_orig_params=orig)
            for form in (FULL, SHARDED):
                if kind == "convolution" and form is SHARDED:
                    continue  # torch's refuses channels-last tensors there
                with Ours.state_dict_type(ours, form), quiet_form(theirs, form):
                    wanted, got = quiet(theirs.state_dict), ours.state_dict()
                assert list(got) == list(wanted)
                assert_same(got, wanted, f"{kind} {orig} {form}")
            edited = ours.state_dict()
            for value in edited.values():
                value.zero_()
            assert_same(ours.state_dict(), quiet(theirs.state_dict))


def quiet_form(model: Any, form: StateDictType) -> Any:
    return quiet(Theirs.state_dict_type, model, form)


def test_dicts_of_models_equal_torch() -> None:
    run_ranks(2, models_in_every_form)


class Around(nn.Module):
    """Foreign parts around a unit."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit
        self.own = nn.Linear(2, 2)


def loaded_back() -> None:
    for orig in (False, True):
        source, _ = trained("ours", use_orig_params=orig)
        for form in (FULL, SHARDED, LOCAL):
            with Ours.state_dict_type(source, form):
                saved = source.state_dict()
            target = wrapped("ours", build("uneven", seed=3), use_orig_params=orig)
            keys = target.load_state_dict(saved)
            assert keys.missing_keys == keys.unexpected_keys == []
            assert_same(full_copies(target), full_copies(source))
        saved = source.state_dict()
        dropped = saved.pop("1.0.weight")
        saved["extra"] = torch.ones(2)
        with pytest.raises(RuntimeError, match=r"1\.0\.weight"):
            target.load_state_dict(saved)
        keys = target.load_state_dict(saved, strict=False)
        assert keys.missing_keys == ["1.0.weight"] and keys.unexpected_keys == ["extra"]
        # Under a parent that is no wrapper.
        around = Around(target)
        state = around.state_dict()
        assert list(state)[:2] == ["unit.0.weight", "unit.0.bias"]
        state["unit.1.0.weight"] = torch.full_like(dropped, 2.0)
        around.load_state_dict(state)
        assert bool((full_copies(target)["1.0.weight"] == 2.0).all())
        del state["unit.2.bias"]
        assert around.load_state_dict(state, strict=False).missing_keys == ["unit.2.bias"]


def test_dicts_are_loaded_back_also_under_a_parent() -> None:
    run_ranks(2, loaded_back)


def only_the_first() -> list[str]:
    model, _ = trained("ours")
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with Ours.state_dict_type(model, FULL, config):
        return list(model.state_dict())


def test_rank0_only_gives_the_dict_to_the_first_rank() -> None:
    first, second = run_ranks(2, only_the_first)
    assert first == [name for name, _ in uneven().named_parameters()] and second == []


def meshes_and_buffers() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = wrapped("ours", build("uneven"), device_mesh=mesh)
    with Ours.state_dict_type(model, LOCAL), pytest.raises(RuntimeError, match="device_mesh"):
        model.state_dict()
    with Ours.state_dict_type(model, SHARDED):
        assert all(type(value).__name__ == "DTensor" for value in model.state_dict().values())
    bare = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), Buffered()))
    model = wrapped("ours", bare, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model(torch.ones(2, 6))
    live = dict(model.named_buffers())
    key = next(name for name in live if name.endswith("1.scale"))
    assert model.state_dict()["1.1.scale"].dtype == torch.float32
    assert live[key].dtype == torch.bfloat16
    # Unsharded: whole in every form.
    whole = wrapped("ours", build("uneven"), sharding_strategy=ShardingStrategy.NO_SHARD)
    with Ours.state_dict_type(whole, SHARDED):
        assert_same(whole.state_dict(), dict(build("uneven").state_dict()))


def test_meshes_give_dtensors_and_buffers_their_own_dtype() -> None:
    run_ranks(2, meshes_and_buffers)


# E -----------------------------------------------------------------------------------------------


def optimizers() -> None:
    for orig in (False, True):
        theirs, their_optimizer = trained("torch", use_orig_params=orig)
        ours, optimizer = trained("ours", use_orig_params=orig)
        for form in (FULL, SHARDED):
            with Ours.state_dict_type(ours, form), quiet_form(theirs, form):
                got = Ours.optim_state_dict(ours, optimizer)
                wanted = quiet(Theirs.optim_state_dict, theirs, their_optimizer)
            assert set(got["state"]) == set(wanted["state"])
            if not (orig and form is FULL):  # torch gives all states the same memory on CPU there
                assert_same(got["state"], wanted["state"], f"{orig} {form}")
            names = [name for group in wanted["param_groups"] for name in group["params"]]
            assert [n for g in got["param_groups"] for n in g["params"]] == names
        full = Ours.optim_state_dict(ours, optimizer)["state"]["0.weight"]
        assert full["exp_avg"].data_ptr() != full["exp_avg_sq"].data_ptr()
        assert not torch.equal(full["exp_avg"], full["exp_avg_sq"])


def test_dicts_of_optimizers_equal_torch() -> None:
    run_ranks(2, optimizers)


def assert_state(a: Any, b: Any) -> None:
    """Equal but for the order of names in groups, which is that of the optimizer."""
    assert_same(a["state"], b["state"])
    for one, other in zip(a["param_groups"], b["param_groups"], strict=True):
        assert sorted(one["params"]) == sorted(other["params"])
        assert_same({**one, "params": 0}, {**other, "params": 0})


def optimizers_back() -> None:
    for orig in (False, True):
        model, optimizer = trained("ours", use_orig_params=orig)
        other = wrapped("ours", build("uneven"), use_orig_params=not orig)
        target = torch.optim.Adam(other.parameters(), lr=0.5)
        other.load_state_dict(model.state_dict())
        full = Ours.optim_state_dict(model, optimizer)
        Ours.optim_state_dict_to_load(other, target, full, load_directly=True)
        assert_state(Ours.optim_state_dict(other, target), full)
        with pytest.warns(FutureWarning):
            full_on_coordinator = Ours.full_optim_state_dict(model, optimizer)
        assert bool(full_on_coordinator) is (dist.get_rank() == 0)
        for taken in (
            quiet(Ours.scatter_full_optim_state_dict, full_on_coordinator, other, optim=target),
            quiet(Ours.shard_full_optim_state_dict, full, other, optim=target),
            quiet(
                Ours.flatten_sharded_optim_state_dict,
                quiet(Ours.sharded_optim_state_dict, model, optimizer),
                other,
                target,
            ),
        ):
            fresh = torch.optim.Adam(other.parameters(), lr=0.5)
            fresh.load_state_dict(taken)
            assert_state(Ours.optim_state_dict(other, fresh), full)
        bare = build("uneven")
        adam = torch.optim.Adam(bare.parameters())
        ids = Ours.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, bare, optim=adam)
        adam.load_state_dict(ids)
        assert_same(adam.state[bare[0].weight], full["state"]["0.weight"])
        again = Ours.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_NAME, bare, optim=adam)
        assert again is full
        with pytest.raises(ValueError):
            mixed = {"state": {0: {}, "a": {}}, "param_groups": []}
            Ours.rekey_optim_state_dict(mixed, OptimStateKeyType.PARAM_ID, bare, optim=adam)


def test_dicts_of_optimizers_move_between_modes_and_by_old_names() -> None:
    run_ranks(2, optimizers_back)
