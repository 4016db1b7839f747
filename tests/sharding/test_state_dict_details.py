"""State dicts of our class in the corners: local forms, other rank counts, meshes, partial state.

Method: small models on 2 or 4 ranks. What torch's class does right on CPU runs over both classes;
the rest is compared with values that are known, or with the unsharded model.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
from torch.distributed.tensor import Replicate, Shard

from sharding import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from tests.ranks import run_ranks
from tests.sharding.models import build, engine, full_copies, uneven, wrapped
from tests.sharding.test_runtime import Buffered
from tests.sharding.test_state_dicts import assert_same, quiet, trained

pytestmark = pytest.mark.ranks
Ours = FullyShardedDataParallel
FULL, LOCAL, SHARDED = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
)
ENGINES = ("torch", "ours")


def in_form(model: Any, form: StateDictType, *configs: Any) -> Any:
    owner = Ours if isinstance(model, Ours) else Theirs
    return quiet(owner.state_dict_type, model, form, *configs)


def five() -> nn.Module:
    layer = nn.Linear(5, 1, bias=False)
    layer.weight.data = torch.arange(1.0, 6.0).view(1, 5)
    return layer


# D4, D5 ------------------------------------------------------------------------------------------


class Around(nn.Module):
    """A parent that has state of its own."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit
        self.scale = nn.Parameter(torch.ones(2))


def first_rank_only() -> tuple[list[str], list[str]]:
    mesh = init_device_mesh("cpu", (2, 2))
    model = wrapped(
        "ours", uneven(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with in_form(model, FULL, config):
        return list(model.state_dict()), list(Around(model).state_dict())


def test_rank0_only_is_the_first_of_all_ranks_and_leaves_parents_their_own() -> None:
    names = [name for name, _ in uneven().named_parameters()]
    keys = run_ranks(4, first_rank_only)
    assert keys[0] == (names, ["scale", *(f"unit.{name}" for name in names)])
    assert keys[1:] == [([], ["scale"])] * 3


def offloaded() -> None:
    for name in ENGINES:
        model = wrapped(name, nn.Sequential(nn.Linear(6, 6), nn.Sequential(Buffered())))
        live = dict(model.named_buffers())
        # torch frees the memory of what it has "moved" on CPU: only its sharded form is right.
        configs = (
            [FullStateDictConfig(offload_to_cpu=True), ShardedStateDictConfig(offload_to_cpu=True)]
            if name == "ours"
            else [ShardedStateDictConfig(offload_to_cpu=True)]
        )
        for config in configs:
            form = FULL if isinstance(config, FullStateDictConfig) else SHARDED
            with in_form(model, form, config):
                state = quiet(model.state_dict)
            assert state["1.0.scale"].device == torch.device("cpu")
            assert torch.equal(state["1.0.scale"], torch.ones(6)) and len(state) == 6
        assert all(
            torch.equal(buffer, dict(model.named_buffers())[k]) for k, buffer in live.items()
        )


def test_dicts_can_be_offloaded_on_cpu_too() -> None:
    run_ranks(2, offloaded)


# D7 to D10 ---------------------------------------------------------------------------------------


def local_dicts() -> list[Any]:
    dicts = []
    for orig in (False, True):
        model = Ours(five(), use_orig_params=orig)
        with in_form(model, LOCAL):
            state = model.state_dict()
        assert list(state) == ["weight"]
        sharded = state["weight"]
        assert isinstance(sharded, ShardedTensor) and sharded.metadata().size == (5,)
        parts = [(s.metadata.shard_offsets, s.tensor.tolist()) for s in sharded.local_shards()]
        dicts.append(parts)
        for shard in sharded.local_shards():  # an alias of live memory
            shard.tensor.add_(10.0)
        assert torch.equal(full_copies(model)["weight"], torch.arange(11.0, 16.0).view(1, 5))
        with in_form(model, LOCAL, LocalStateDictConfig(offload_to_cpu=True)):
            assert list(model.state_dict()) == ["weight"]
        target = Ours(nn.Linear(5, 1, bias=False), use_orig_params=not orig)
        target.load_state_dict(state)
        assert torch.equal(full_copies(target)["weight"], torch.arange(11.0, 16.0).view(1, 5))
        for wrong in ({"weight": [1.0]}, {}):
            with pytest.raises(RuntimeError, match="weight"):
                target.load_state_dict(wrong)
    return dicts


def test_local_dicts_alias_shards_without_padding_in_both_modes() -> None:
    ranks = [[([0], [1.0, 2.0])], [([2], [3.0, 4.0])], [([4], [5.0])], []]
    assert run_ranks(4, local_dicts) == [[parts, parts] for parts in ranks]


def taken_locally() -> dict[str, Any]:
    model, _ = trained("ours")
    with in_form(model, LOCAL):
        state = model.state_dict()
    parts = {
        name: [(s.metadata.shard_offsets[0], s.tensor.clone()) for s in value.local_shards()]
        for name, value in state.items()
    }
    return {"parts": parts, "full": full_copies(model)}


def loaded_locally(saved: list[dict[str, Any]]) -> None:
    """Each tensor is cut anew, by its offsets alone, into as many parts as there are ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    state = {}
    for name in saved[0]["parts"]:
        flat = torch.cat([part for one in saved for _, part in sorted_parts(one["parts"][name])])
        chunks = flat.chunk(world)
        local = []
        if rank < len(chunks):
            offset = sum(chunk.numel() for chunk in chunks[:rank])
            local = [LocalShard.from_tensor_and_offsets(chunks[rank].clone(), [offset], rank)]
        state[name] = quiet(ShardedTensor._init_from_local_shards, local, flat.numel())
    for orig in (False, True):
        model = wrapped("ours", build("uneven", seed=9), use_orig_params=orig)
        model.load_state_dict(state)
        assert_same(full_copies(model), saved[0]["full"])


def sorted_parts(parts: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    return sorted(parts, key=lambda part: part[0])


def test_local_dicts_of_two_ranks_can_be_cut_for_four() -> None:
    run_ranks(4, loaded_locally, run_ranks(2, taken_locally))


# D11 to D13 --------------------------------------------------------------------------------------


def chunks() -> list[list[Any]]:
    chunks = []
    for name in ENGINES:
        bare = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))
        model = engine(name)(bare)
        with in_form(model, SHARDED):
            state = quiet(model.state_dict)
        chunks.append(
            [
                [tuple(shard.tensor.shape) for shard in state[key].local_shards()]
                for key in ("0.weight", "1.weight")
            ]
        )
    return chunks


def test_sharded_dicts_have_the_chunks_of_dim_0() -> None:
    rows = [[[(2, 5)], [(1, 7)]]] * 3 + [[[(1, 5)], []]]
    assert run_ranks(4, chunks) == [[row, row] for row in rows]


def dropped_names() -> None:
    source, _ = trained("ours")
    for orig in (False, True):
        target = wrapped("ours", build("uneven", seed=4), use_orig_params=orig)
        before = full_copies(target)
        with in_form(source, SHARDED):
            state = source.state_dict()
        del state["1.0.weight"]
        with in_form(target, SHARDED):
            keys = target.load_state_dict(state, strict=False)
        assert keys.missing_keys == ["1.0.weight"]
        after, wanted = full_copies(target), full_copies(source)
        wanted["1.0.weight"] = before["1.0.weight"]
        assert_same(after, wanted)


def test_names_that_a_sharded_dict_lacks_keep_their_values() -> None:
    run_ranks(4, dropped_names)


def hybrid_dicts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for orig in (False, True):
        dicts = []
        for name in ENGINES:
            model = wrapped(
                name,
                build("uneven"),
                device_mesh=mesh,
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            )
            with in_form(model, SHARDED):
                state = quiet(model.state_dict)
            assert all(v.placements == (Replicate(), Shard(0)) for v in state.values())
            dicts.append(state)
            target = wrapped(
                name,
                build("uneven", seed=3),
                device_mesh=mesh,
                use_orig_params=not orig,
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            )
            with in_form(target, SHARDED):
                quiet(target.load_state_dict, state)
            assert_same(full_copies(target), dict(build("uneven").state_dict()))
        assert_same(*dicts)


def test_hybrid_dicts_have_the_placements_of_torch() -> None:
    run_ranks(4, hybrid_dicts)


# D14, D16 ----------------------------------------------------------------------------------------


def unsharded_units() -> list[str]:
    wanted = dict(build("uneven").state_dict())
    for name in ENGINES:
        model = wrapped(name, build("uneven"), sharding_strategy=ShardingStrategy.NO_SHARD)
        for form, config in (
            (SHARDED, None),
            (LOCAL, None),
            (FULL, FullStateDictConfig(rank0_only=True)),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with in_form(model, form, config):
                    state = model.state_dict()
            assert_same(dict(state), wanted, f"{name} {form}")
            if name == "ours":
                assert any("NO_SHARD" in str(one.message) for one in caught)
                assert all(type(value) is torch.Tensor for value in state.values())
        other = wrapped(name, build("uneven", 5), sharding_strategy=ShardingStrategy.NO_SHARD)
        with in_form(other, SHARDED):
            quiet(other.load_state_dict, wanted)
        assert_same(full_copies(other), wanted)
    return list(wanted)


def test_unsharded_models_have_full_dicts_whatever_is_asked() -> None:
    first, second = run_ranks(2, unsharded_units)
    assert first == second


def buffer_dtypes() -> None:
    for name in ENGINES:
        bare = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Buffered()))
        bare[1][0].register_buffer("scratch", torch.ones(2), persistent=False)
        model = wrapped(name, bare, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
        model(torch.ones(2, 6))
        for form, dtype in (
            (FULL, torch.float32),
            (SHARDED, torch.float32),
            (LOCAL, torch.bfloat16),
        ):
            with in_form(model, form):
                state = quiet(model.state_dict)
            assert state["1.0.scale"].dtype == dtype and state["1.0.count"].dtype == torch.long
            assert "1.0.scratch" not in state
            buffers = {key.rpartition(".")[2]: b.dtype for key, b in model.named_buffers()}
            assert buffers["scale"] == torch.bfloat16  # what lives stays low


def test_buffers_have_their_own_dtype_in_dicts_and_persistence_counts() -> None:
    run_ranks(2, buffer_dtypes)


class WithExtra(nn.Linear):
    """A layer that has a state besides its tensors."""

    version: Any = "new"

    def get_extra_state(self) -> Any:
        return {"version": self.version}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]


def extra_states() -> None:
    for orig in (False, True):
        model = wrapped(
            "ours", nn.Sequential(WithExtra(6, 3), WithExtra(3, 2)), use_orig_params=orig
        )
        model.module[1].module.version = 7
        for form in (FULL, SHARDED, LOCAL):
            with in_form(model, form):
                state = model.state_dict()
            assert state["1._extra_state"] == {"version": 7}
            other = wrapped(
                "ours", nn.Sequential(WithExtra(6, 3), WithExtra(3, 2)), use_orig_params=orig
            )
            other.load_state_dict(state)
            assert other.module[1].module.version == 7
            del state["1._extra_state"]
            keys = other.load_state_dict(state, strict=False)
            assert keys.missing_keys == ["1._extra_state"]


def test_extra_states_of_modules_travel_with_the_dict() -> None:
    run_ranks(2, extra_states)


# E5 to E9 ----------------------------------------------------------------------------------------


def broadcast_from_the_first() -> None:
    for orig in (False, True):
        model, optimizer = trained("ours", use_orig_params=orig)
        full = Ours.optim_state_dict(model, optimizer)
        given = full if dist.get_rank() == 0 else {"junk": 1}
        config = FullOptimStateDictConfig(rank0_only=True)
        with in_form(model, FULL, None, config):
            taken = Ours.optim_state_dict_to_load(model, optimizer, given)
        assert_same(taken, Ours.optim_state_dict_to_load(model, optimizer, full))


def test_the_first_ranks_optimizer_dict_can_serve_all() -> None:
    run_ranks(2, broadcast_from_the_first)


def partial_states() -> None:
    for orig in (False, True):
        model, optimizer = trained("ours", use_orig_params=orig)
        full = Ours.optim_state_dict(model, optimizer)
        names = ["1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"]
        for dropped in (names[0], names[-1]):
            part = copy.deepcopy(full)
            del part["state"][dropped]
            fresh = torch.optim.Adam(model.parameters(), lr=0.1)
            fresh.load_state_dict(Ours.optim_state_dict_to_load(model, fresh, part))
            now = Ours.optim_state_dict(model, fresh)["state"]
            assert_same({key: now[key] for key in part["state"]}, part["state"])
            if orig:
                assert dropped not in now
            else:
                assert not now[dropped]["exp_avg"].any() and not now[dropped]["exp_avg_sq"].any()
        if not orig:
            wrong = copy.deepcopy(full)
            wrong["state"]["1.2.bias"]["step"] += 1
            with pytest.raises(ValueError, match=r"1\.2\.bias\.step"):
                Ours.optim_state_dict_to_load(model, optimizer, wrong)
        wrong = copy.deepcopy(full)
        wrong["state"]["1.2.bias"]["exp_avg"] = torch.ones(1, 1, 1)
        with pytest.raises(ValueError, match=r"1\.2\.bias\.exp_avg"):
            Ours.optim_state_dict_to_load(model, optimizer, wrong)
        with pytest.raises(ValueError, match="state"):
            Ours.optim_state_dict_to_load(model, optimizer, {"param_groups": []})
        wrong = copy.deepcopy(full)
        wrong["param_groups"][0]["params"].append("not.there")
        with pytest.raises(ValueError, match=r"not\.there"):
            Ours.optim_state_dict_to_load(model, optimizer, wrong)


def test_missing_members_are_zeros_and_what_disagrees_is_refused() -> None:
    run_ranks(2, partial_states)


def frozen_and_partial() -> None:
    model = wrapped("ours", build("partly_frozen"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    taken = Ours.optim_state_dict(model, optimizer)
    assert "1.0.weight" not in taken["state"] and len(taken["state"]) == 7
    Ours.optim_state_dict_to_load(model, optimizer, taken, load_directly=True)
    # Over a part of a unit: its own parameters, where torch raises.
    some = list(model.parameters())[:2]
    partial = torch.optim.Adam(some, lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    partial.step()
    assert sorted(Ours.optim_state_dict(model, partial)["state"]) == ["0.bias", "0.weight"]
    # Another optimizer on every rank.
    params = list(model.parameters())
    own = torch.optim.SGD(params[:2] if dist.get_rank() == 0 else params[2:], lr=0.1)
    with pytest.raises(RuntimeError, match="param_groups"):
        Ours.optim_state_dict(model, own)


def test_frozen_members_have_no_state_and_other_optimizers_are_reported() -> None:
    run_ranks(2, frozen_and_partial)


# E11 to E14 --------------------------------------------------------------------------------------


def users_own(caplog_text: list[str]) -> None:
    model, optimizer = trained("ours")
    state = Ours.optim_state_dict(model, optimizer)
    state["state"]["my own"] = {"tokens": 12}
    del state["param_groups"]
    taken = Ours.optim_state_dict_to_load(model, optimizer, state)
    assert "param_groups" not in taken and taken["state"]["my own"] == {"tokens": 12}
    again = Ours.optim_state_dict(model, optimizer, optim_state_dict=taken)
    assert "param_groups" not in again
    assert again["state"]["my own"] == {"tokens": 12}


def test_state_of_the_users_own_is_handed_on_and_groups_may_lack() -> None:
    run_ranks(2, users_own, [])


def unmanaged() -> None:
    for name in ENGINES:
        model = build("uneven")
        ignored = model[0]
        model = engine(name)(model, ignored_modules=[ignored])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        owner = Ours if name == "ours" else Theirs
        state = quiet(owner.optim_state_dict, model, optimizer)["state"]
        assert torch.equal(state["0.weight"]["exp_avg"], optimizer.state[ignored.weight]["exp_avg"])
    kept = wrapped("ours", build("uneven"), sharding_strategy=ShardingStrategy.NO_SHARD)
    optimizer = torch.optim.Adam(kept.parameters(), lr=0.1)
    kept(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    full = Ours.optim_state_dict(kept, optimizer)
    sharded, other = trained("ours")
    Ours.optim_state_dict_to_load(sharded, other, full, load_directly=True)
    assert_same(Ours.optim_state_dict(sharded, other)["state"], full["state"])
    mixed = uneven()
    mixed[1] = Ours(mixed[1], use_orig_params=True)
    mixed = Ours(mixed)
    with pytest.raises(AssertionError, match="use_orig_params"):
        Ours.optim_state_dict(mixed, torch.optim.Adam(mixed.parameters()))


def test_ignored_and_unsharded_parameters_have_their_state_by_name() -> None:
    run_ranks(2, unmanaged)


class Named(torch.optim.SGD):
    """An optimizer whose state dict is keyed by names, as a keyed optimizer has it."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        params = list(model.parameters())
        super().__init__(params, lr=0.1, momentum=0.9)
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {
            "state": {self.names[key]: value for key, value in state["state"].items()},
            "param_groups": [
                {**group, "params": [self.names[key] for key in group["params"]]}
                for group in state["param_groups"]
            ],
        }


def named_optimizers() -> None:
    names = [name for name, _ in uneven().named_parameters()]
    model = wrapped("ours", build("uneven"), use_orig_params=True)
    optimizer = Named(model, names)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    full = Ours.optim_state_dict(model, optimizer, optim_state_dict=optimizer.state_dict())
    assert set(full["state"]) == set(names)
    assert full["state"]["0.weight"]["momentum_buffer"].shape == (7, 6)
    taken = Ours.optim_state_dict_to_load(model, optimizer, full, is_named_optimizer=True)
    own = optimizer.state_dict()
    assert taken["param_groups"][0]["params"] == own["param_groups"][0]["params"]
    for name, state in own["state"].items():
        assert_same(taken["state"][name], state)


def test_optimizers_keyed_by_names_go_out_and_in() -> None:
    run_ranks(2, named_optimizers)


def sharded_optimizers() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for orig in (False, True):
        model, optimizer = trained("ours", use_orig_params=orig)
        with in_form(model, SHARDED):
            state = Ours.optim_state_dict(model, optimizer)["state"]["0.weight"]
        assert isinstance(state["exp_avg"], ShardedTensor) and state["step"].dim() == 0
        model, optimizer = trained(
            "ours",
            use_orig_params=orig,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )
        with in_form(model, SHARDED):
            taken = Ours.optim_state_dict(model, optimizer)
            assert taken["state"]["0.weight"]["exp_avg"].placements == (Replicate(), Shard(0))
            full = quiet(Ours.full_optim_state_dict, model, optimizer, rank0_only=False)
            back = Ours.optim_state_dict_to_load(model, optimizer, taken)
            optimizer.load_state_dict(back)
            again = quiet(Ours.full_optim_state_dict, model, optimizer, rank0_only=False)
            assert_same(again["state"], full["state"])
        with in_form(model, LOCAL), pytest.raises(RuntimeError, match="device_mesh"):
            Ours.optim_state_dict(model, optimizer)


def test_sharded_states_have_the_kind_of_their_parameters() -> None:
    run_ranks(4, sharded_optimizers)
