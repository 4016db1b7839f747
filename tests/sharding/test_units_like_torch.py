"""The corners of a unit's life, held against torch's classes on the same ranks.

Method: the same calls on both classes over gloo, values and refusals compared; where torch's class
cannot run on CPU, against what it promises.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import sharding
from sharding.wrapping.init import warn_of_slow_wrapping
from tests.sharding.fully_scenarios import claims, whole_mesh
from tests.sharding.models import build, engine, full_copies, wrapped

BOTH = ("torch", "ours")
Ours = sharding.FullyShardedDataParallel


def outcome(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "fine"


# --- construction --------------------------------------------------------------------------------


def buffers_of_inner_units_that_were_not_synced_are() -> None:
    torch.manual_seed(dist.get_rank())
    model = build("batch_norm", seed=dist.get_rank())
    buffer = model[1][1].running_mean
    buffer.fill_(float(dist.get_rank() + 1))
    model[1] = Ours(model[1])
    outer = Ours(model, sync_module_states=True)
    assert torch.equal(outer.module[1].module[1].running_mean, torch.ones(5))
    again = build("batch_norm", seed=dist.get_rank())
    again[1] = Ours(again[1], sync_module_states=True)
    again[1].module[1].running_mean.fill_(float(dist.get_rank()))
    Ours(again, sync_module_states=True)  # each buffer once
    assert torch.equal(again[1].module[1].running_mean, torch.full((5,), float(dist.get_rank())))


def inner_units_that_have_run_are_refused_as_torch_does() -> None:
    uses = {
        "forward": lambda inner: inner(torch.ones(2, 7)),
        "backward": lambda inner: inner(torch.ones(2, 7)).sum().backward(),
        "apply": lambda inner: inner.apply(lambda module: None),
        "root": lambda inner: inner.check_is_root(),
        "nothing": lambda inner: None,
    }
    for orig in (False, True):
        for what, use in uses.items():
            outcomes = []
            for name in BOTH:
                model = build("uneven")
                model[1] = engine(name)(model[1], use_orig_params=orig)
                use(model[1])
                root: Any = engine(name)(model, use_orig_params=orig)
                outcomes.append(outcome(lambda root=root: root(torch.ones(2, 6)).sum().backward()))
            assert outcomes[0] == outcomes[1], (what, orig, outcomes)
    # The outer unit was not taken for the root of what it cannot have.
    for name in BOTH:
        bare: Any = build("uneven")
        kit: Any = {"torch": torch_fsdp, "ours": sharding}[name]
        kit.fully_shard(bare[1], mesh=whole_mesh())
        bare[1](torch.ones(2, 7)).sum().backward()
        kit.fully_shard(bare, mesh=whole_mesh())
        assert outcome(lambda bare=bare: bare(torch.ones(2, 6))) == "RuntimeError", name


class Grouplike:
    """Acts as a process group."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def rank(self) -> int:
        return int(self.group.rank())

    def size(self) -> int:
        return int(self.group.size())


def trained_twice(name: str, strategy: ShardingStrategy, orig: bool, keeps: bool) -> list[Any]:
    """What a model computes whose units get another root after training; `keeps`: while a unit
    still shows what it gathered.
    """
    torch.manual_seed(0)
    options = {"use_orig_params": orig, "sharding_strategy": strategy}
    inner = nn.Sequential(*(engine(name)(nn.Linear(6, 6), **options) for _ in range(2)))
    x = torch.randn(4, 6) + dist.get_rank()
    seen: list[Any] = []
    for _ in range(2):
        root: Any = engine(name)(inner, **options)
        optimizer = torch.optim.SGD(root.parameters(), lr=0.1)
        for _ in range(2):
            root(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(root(x).detach())
        if not keeps:
            root(x).sum().backward()
            optimizer.zero_grad()
    seen.append(root(x).detach())
    return seen


def units_get_another_root_after_training() -> None:
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    for strategy, orig in itertools.product(strategies, (False, True)):
        torchs = trained_twice("torch", strategy, orig, keeps=False)  # it fails with some kept
        for keeps in (False, True):
            ours = trained_twice("ours", strategy, orig, keeps)
            assert all(map(torch.equal, torchs, ours)), (strategy, orig, keeps)


def a_root_after_a_failed_backward_of_another_computes() -> None:
    class Failing(nn.Linear):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            output.register_hook(lambda grad: 1 // 0 if self.fails else grad)  # type: ignore
            return output

    first, x = Failing(6, 6), torch.ones(2, 6)
    inner = nn.Sequential(Ours(first), Ours(nn.Linear(6, 6)))
    root: Any = Ours(inner)
    with pytest.raises(ZeroDivisionError):
        root(x).sum().backward()
    Failing.fails = False
    other: Any = Ours(inner)
    other(x).sum().backward()
    grads = [param.grad.clone() for param in other.parameters()]
    other.zero_grad()
    other(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(other.parameters(), grads, strict=True))


def what_acts_as_a_process_group_is_one() -> None:
    whole = dist.group.WORLD
    shapes = []
    for name in BOTH:
        model: Any = engine(name)(nn.Linear(6, 5), process_group=Grouplike(whole))
        shapes.append([tuple(param.shape) for param in model.parameters()])
    assert shapes[0] == shapes[1]
    pair = (Grouplike(whole), Grouplike(whole))
    hybrid: Any = engine("ours")(
        nn.Linear(6, 5), process_group=pair, sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )
    assert [tuple(param.shape) for param in hybrid.parameters()] == shapes[0]
    with pytest.raises(ValueError, match="process group"):
        Ours(nn.Linear(6, 5), process_group="world")


def wrapping_on_the_host_for_a_device_warns() -> None:
    params = list(nn.Linear(2, 2).parameters())
    cuda = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="pass device_id='cuda:0'"):
        warn_of_slow_wrapping(params, None, cuda)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slow_wrapping(params, 0, cuda)
        warn_of_slow_wrapping(params, None, torch.device("cpu"))
        warn_of_slow_wrapping([nn.Parameter(torch.ones(1, device="meta"))], None, cuda)
        Ours(nn.Linear(6, 5))


# --- gradients -----------------------------------------------------------------------------------


def gradients_after(name: str, write: Any, *, first: bool, clips: bool) -> list[Any]:
    model = wrapped(name, build("uneven"), use_orig_params=True)
    batch = torch.ones(2, 6)
    if first:
        model(batch).sum().backward()
    mine = [param for param in model.parameters() if param.numel()]
    with torch.no_grad():
        write(mine)
    if clips:
        model.clip_grad_norm_(1.0)
    else:
        model(batch).sum().backward()
    grads = [None if param.grad is None else param.grad.clone() for param in mine]
    with type(model).summon_full_params(model, with_grads=True):
        whole = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return grads + whole


def replace_all(params: list[Any]) -> None:
    for param in params:
        param.grad = torch.full_like(param, 2.0)


def replace_data(params: list[Any]) -> None:
    for param in params:
        param.grad.data = torch.full_like(param, 2.0)


def fill(params: list[Any]) -> None:
    for param in params:
        param.grad.fill_(2.0)


def drop_one(params: list[Any]) -> None:
    params[0].grad = None


def give_one(params: list[Any]) -> None:
    params[-1].grad = torch.full_like(params[-1], 2.0)


def gradients_that_users_write_reach_the_shards() -> None:
    for first, writes in (
        (True, (replace_all, replace_data, fill, drop_one)),
        (False, (replace_all, give_one)),
    ):
        for write in writes:
            for clips in (False, True):
                if clips and write is drop_one:
                    continue  # torch's class clips what it shows, not what it will add to
                torchs = gradients_after("torch", write, first=first, clips=clips)
                ours = gradients_after("ours", write, first=first, clips=clips)
                for one, other in zip(ours, torchs, strict=True):
                    where = (write.__name__, first, clips)
                    assert (one is None) == (other is None), (where, one, other)
                    if one is not None:
                        torch.testing.assert_close(one, other, msg=str(where))


def gradients_of_another_size_are_refused_by_name() -> None:
    for first in (False, True):
        for name in BOTH:
            model = wrapped(name, build("uneven"), use_orig_params=True)
            if first:
                model(torch.ones(2, 6)).sum().backward()
            for param in model.parameters():
                if param.numel():
                    param.grad = torch.ones_like(param)
                    param.grad.data = torch.ones(param.numel() + 1)
            call = lambda model=model: model(torch.ones(2, 6))  # noqa: E731
            assert outcome(call) == "RuntimeError", (name, first)
            if name == "ours":
                with pytest.raises(RuntimeError, match=r"(weight|bias): its gradient"):
                    call()


def gradient_writes_of_unsharded_units_persist() -> None:
    results = []
    for name in BOTH:
        kept = []
        for writeback in (True, False):
            model = wrapped(
                name,
                build("uneven"),
                use_orig_params=True,
                sharding_strategy=ShardingStrategy.NO_SHARD,
            )
            model(torch.ones(2, 6)).sum().backward()
            with type(model).summon_full_params(model, writeback=writeback, with_grads=True):
                for param in model.parameters():
                    param.grad.fill_(5.0)
                    param.data.fill_(3.0)
            kept += [(param.detach().clone(), param.grad.clone()) for param in model.parameters()]
        results.append(kept)
    for ours, torchs in zip(results[1], results[0], strict=True):
        assert torch.equal(ours[0], torchs[0]) and torch.equal(ours[1], torchs[1])


# --- order ---------------------------------------------------------------------------------------


class Skipping(nn.Module):
    """May leave out its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.skips = nn.Linear(6, 6), nn.Linear(6, 6), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x if self.skips else self.second(x)


def a_rank_with_fewer_forwards_fails_on_all_ranks_at_once() -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        bare = Skipping()
        bare.skips = dist.get_rank() == 1
        model = Ours(bare, auto_wrap_policy=sharding.ModuleWrapPolicy([nn.Linear]))
        with pytest.raises(RuntimeError, match=r"different units.*the backward"):
            model(torch.ones(2, 6)).sum().backward()
        dist.barrier()
        equal: Any = Ours(Skipping(), auto_wrap_policy=sharding.ModuleWrapPolicy([nn.Linear]))
        for _ in range(2):
            equal(torch.ones(2, 6)).sum().backward()
    finally:
        dist.set_debug_level(before)


# --- state dict settings -------------------------------------------------------------------------


def settings_of_the_root_hold_for_inner_units() -> None:
    settings = []
    for name in BOTH:
        kit = type(wrapped(name, build("uneven")))
        model = wrapped(name, build("uneven"))
        kit.set_state_dict_type(
            model.module[1], StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
        )
        answers = [outcome(functools.partial(kit.get_state_dict_type, model))]
        before = kit.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        answers += [before, kit.get_state_dict_type(model), len(model.state_dict())]
        kit.set_state_dict_type(model.module[1], StateDictType.SHARDED_STATE_DICT)
        form = StateDictType.FULL_STATE_DICT
        answers.append(outcome(functools.partial(kit.set_state_dict_type, model, form)))
        settings.append(answers)
    assert settings[0] == settings[1], settings


def unsharded_units_warn_that_they_give_full_dicts() -> None:
    for form in StateDictType:
        for strategies in (("NO_SHARD", "NO_SHARD"), ("NO_SHARD", "FULL_SHARD")):
            for name in BOTH:
                model = build("uneven")
                wrap = engine(name)
                model[1] = wrap(model[1], sharding_strategy=ShardingStrategy[strategies[0]])
                root: Any = wrap(model, sharding_strategy=ShardingStrategy[strategies[1]])
                type(root).set_state_dict_type(root, form)
                with pytest.warns(UserWarning, match="NO_SHARD"):
                    taken = root.state_dict()
                with pytest.warns(UserWarning, match="NO_SHARD"):
                    root.load_state_dict(taken)


def entries_are_logged_and_absent_ones_too() -> None:
    model = wrapped("ours", build("batch_norm"))
    type(model).set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    records: list[logging.LogRecord] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger = logging.getLogger("sharding.state_dict_methods")
    handler, level = Keeping(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        taken = model.state_dict()
        text = "\n".join(record.getMessage() for record in records)
        for key in taken:
            assert f"{key}: " in text, key
        assert re.search(r"0\.weight: ShardedTensor of \(7, 6\), here \[\(\d, 6\)\], torch.f", text)
        records.clear()
        before = full_copies(model)["0.weight"]
        del taken["0.weight"]
        result = model.load_state_dict(taken, strict=False)
        assert result.missing_keys == ["0.weight"]
        assert torch.equal(full_copies(model)["0.weight"], before)
        (warned,) = [one for one in records if one.levelno == logging.WARNING]
        assert "0.weight" in warned.getMessage()
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            model.load_state_dict(taken)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# --- extensions ----------------------------------------------------------------------------------


OFFSETS: list[int] = []


def note_offsets(param: Any) -> None:
    """Put an extension on a sharded parameter that notes where what it is given starts."""
    local = param._local_tensor

    def pre(self: Any, mesh: Any) -> Any:
        return (self * 1, self.half()), None

    def post(self: Any, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        OFFSETS.extend(one.storage_offset() for one in outputs)
        return None if out is not None else (outputs[0], outputs)

    local.fsdp_pre_all_gather = types.MethodType(pre, local)
    local.fsdp_post_all_gather = types.MethodType(post, local)


def gathered_tensors_of_extensions_start_their_storages() -> None:
    size = dist.get_world_size()
    OFFSETS.clear()
    model: Any = nn.Sequential(nn.Linear(6, 2 * size), nn.Linear(2 * size, 2 * size))
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    sharding.fully_shard(model)
    for param in model.parameters():
        note_offsets(param)
    for _ in range(2):
        model.unshard()
        for name, param in model.named_parameters():
            assert torch.equal(param.detach(), wanted[name]), name
        model.reshard()
    assert len(OFFSETS) == 16 and not any(OFFSETS), OFFSETS


def synced_states_of_tensor_parallel_members() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = mesh.get_coordinate() or (0, 0)
    for orig in (False, True):
        torch.manual_seed(0)
        bare: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        parallelize_module(bare, mesh["tp"], {"0": ColwiseParallel()})
        with torch.no_grad():
            for param in bare.parameters():
                local = param.to_local() if hasattr(param, "to_local") else param
                local.fill_(float(10 * row + column))
        bare.register_buffer("scale", torch.full((3,), float(row)))
        part = torch.full((2,), float(10 * row + column))
        bare.register_buffer("spread", DTensor.from_local(part, mesh["tp"], [Shard(0)]))
        model = Ours(bare, device_mesh=mesh["dp"], sync_module_states=True, use_orig_params=orig)
        assert torch.equal(bare.scale, torch.zeros(3))
        assert torch.equal(bare.spread.to_local(), torch.full((2,), float(column)))
        with Ours.summon_full_params(model, writeback=False):
            for name, param in bare.named_parameters():
                shown: Any = param
                local = shown.to_local() if hasattr(shown, "to_local") else shown
                assert torch.equal(local, torch.full_like(local, float(column))), (name, local)


def flat_gradients(name: str, parallel: bool, orig: bool) -> list[Any]:
    """`params[0].grad` after each thing that changes gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    if parallel:
        parallelize_module(bare, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model: Any = engine(name)(bare, device_mesh=mesh["dp"], use_orig_params=orig)
    (flat,) = model.params
    x, grads = torch.ones(4, 6) * (1 + mesh["dp"].get_local_rank()), [flat.grad]
    for none in (False, True):
        model(x).sum().backward()
        grads.append(flat.grad.clone())
        model.zero_grad(set_to_none=none)
        grads.append(None if flat.grad is None else flat.grad.clone())
        if not parallel:  # torch's members then have gradients in freed memory
            with model.no_sync():
                model(x).sum().backward()
            grads.append(flat.grad.clone())
    return grads


def flat_parameters_have_gradients_as_torchs_do() -> None:
    for parallel, orig in itertools.product((False, True), repeat=2):
        torchs, ours = (flat_gradients(name, parallel, orig) for name in BOTH)
        for step, (one, other) in enumerate(zip(torchs, ours, strict=True)):
            if step == 3 and not parallel:
                continue  # a reduced gradient stays shown here: docs/engine_differences.md
            same = one is other if one is None else torch.equal(one, other)
            assert same, (parallel, orig, step, one, other)


test_on_two_ranks = claims(
    2,
    [
        buffers_of_inner_units_that_were_not_synced_are,
        inner_units_that_have_run_are_refused_as_torch_does,
        units_get_another_root_after_training,
        a_root_after_a_failed_backward_of_another_computes,
        what_acts_as_a_process_group_is_one,
        wrapping_on_the_host_for_a_device_warns,
        gradients_that_users_write_reach_the_shards,
        gradients_of_another_size_are_refused_by_name,
        gradient_writes_of_unsharded_units_persist,
        a_rank_with_fewer_forwards_fails_on_all_ranks_at_once,
        settings_of_the_root_hold_for_inner_units,
        unsharded_units_warn_that_they_give_full_dicts,
        entries_are_logged_and_absent_ones_too,
        gathered_tensors_of_extensions_start_their_storages,
    ],
)
test_on_four_ranks = claims(
    4, [synced_states_of_tensor_parallel_members, flat_parameters_have_gradients_as_torchs_do]
)
