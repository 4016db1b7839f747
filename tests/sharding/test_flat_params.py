"""Flat parameters: what is flattened, what each rank holds, what modules and optimizers see.

Method: small models on 2 or 4 real ranks; shapes, identities and storage sizes as predicted by
hand. The bodies of rows where torch's engine is right on CPU run over both engines.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sharding import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from tests.ranks import run_ranks
from tests.sharding.models import batches, build, engine, full, full_copies, uneven, wrapped

pytestmark = pytest.mark.ranks


def each_engine() -> list[Any]:
    return [engine("torch"), engine("ours")]


def flat_of(unit: Any) -> nn.Parameter:
    inner = unit._fsdp_wrapped_module
    return inner._parameters["_flat_param"]


# A1 ----------------------------------------------------------------------------------------------


def units_hold_their_own() -> None:
    for wrap in each_engine():
        model = wrapped_by(wrap, uneven())
        own = {"outer": 6 * 7 + 7 + 3 + 1, "inner": 7 * 5 + 5 + 5 * 3 + 3}
        assert [flat_of(unit).numel() for unit in (model, model.module[1])] == [
            -(-own["outer"] // 2),
            -(-own["inner"] // 2),
        ]
        names = [name.rsplit(".", 1)[1] for name, _ in model.named_parameters()]
        assert names == ["_flat_param", "_flat_param"]


def wrapped_by(wrap: Any, model: nn.Sequential, **kwargs: Any) -> Any:
    model[1] = wrap(model[1], **kwargs)
    return wrap(model, **kwargs)


def test_a_unit_holds_what_inner_units_do_not() -> None:
    run_ranks(2, units_hold_their_own)


def empty_root() -> None:
    for wrap in each_engine():
        torch.manual_seed(0)
        inner = wrap(nn.Linear(6, 3))
        model = wrap(nn.Sequential(inner, nn.Tanh()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = full_copies(model)["0.weight"]
        for _, mine in batches(2):
            model(mine).square().mean().backward()
            optimizer.step()
        assert not torch.equal(full_copies(model)["0.weight"], before)


def test_a_root_without_parameters_of_its_own_trains() -> None:
    run_ranks(2, empty_root)


# A2 ----------------------------------------------------------------------------------------------


def bad_members() -> None:
    def with_param(param: nn.Parameter) -> nn.Module:
        model = nn.Linear(3, 3)
        model.extra = param
        return model

    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    for wrap in each_engine():
        for bad in (
            with_param(nn.Parameter(torch.ones(3, dtype=torch.long), requires_grad=False)),
            with_param(nn.Parameter(torch.ones(3, dtype=torch.float64))),
            with_param(nn.Parameter(torch.tensor(1.0))),
            with_param(frozen),
        ):
            with pytest.raises(ValueError, match=r"extra|uniform|dtype|Must"):
                wrap(bad)
        mixed = with_param(nn.Parameter(torch.ones(2), requires_grad=False))
        unit = wrap(mixed, use_orig_params=True)
        assert [p.requires_grad for p in unit.parameters()].count(False) == 1


def tensor_parallel_members() -> None:
    mesh = init_device_mesh("cpu", (2,))
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="weight: is a DTensor"):
        FullyShardedDataParallel(layer)


def test_tensor_parallel_members_are_refused_by_name() -> None:
    run_ranks(2, tensor_parallel_members)


def test_what_cannot_be_flattened_is_refused() -> None:
    run_ranks(2, bad_members)


# A3, A4, A6 --------------------------------------------------------------------------------------


def round_trips() -> None:
    for wrap in each_engine():
        for kind in ("convolution", "tied", "uneven"):
            for orig in (False, True):
                plain = build(kind)
                model = wrapped_by(wrap, build(kind), use_orig_params=orig)
                with full(model) as params:
                    for name, wanted in plain.named_parameters():
                        assert torch.equal(params[name], wanted)
                        assert params[name].stride() == wanted.stride()


def test_members_come_back_bit_for_bit_with_their_strides() -> None:
    run_ranks(2, round_trips)


def five_on_four() -> tuple[Any, ...]:
    flats = []
    for wrap in each_engine():
        model = nn.Linear(5, 1, bias=False)
        model.weight.data = torch.arange(1.0, 6.0).view(1, 5)
        flats.append(flat_of(wrap(model)).detach().tolist())
    return tuple(flats)


def test_five_elements_on_four_ranks_are_padded_with_zeros() -> None:
    shards = [[1.0, 2.0], [3.0, 4.0], [5.0, 0.0], [0.0, 0.0]]
    assert run_ranks(4, five_on_four) == [(shard, shard) for shard in shards]


def gradients_and_gaps() -> None:
    for orig in (False, True):
        unit = FullyShardedDataParallel(Four(), use_orig_params=orig)
        store = unit.fsdp_unit.store
        out = torch.full((store.layout.padded_numel,), math.nan)
        sizes = [member.numel for member in store.layout.members]
        grads = [torch.ones(sizes[0]), None, *map(torch.ones, sizes[2:])]
        store.write_gradients(grads, out, scale=0.5)
        assert store.layout.gaps if orig else True
        assert out.sum() == 0.5 * (sum(sizes) - sizes[1])  # neither filler nor padding is left over


def test_gradient_buffers_have_zeros_in_filler_and_padding() -> None:
    run_ranks(4, gradients_and_gaps)


def tied_once() -> None:
    for wrap in each_engine():
        for orig in (False, True):
            model = wrapped_by(wrap, build("tied"), use_orig_params=orig)
            elements = torch.tensor(sum(p.numel() for p in model.module[1].parameters()))
            dist.all_reduce(elements)
            assert elements == 6 * 6 + 6
            with full(model):
                tied: Any = model.module[1].module
                assert tied.first.weight is tied.second.weight


def test_tied_parameters_are_held_once_and_stay_tied() -> None:
    run_ranks(2, tied_once)


# A5, A7, A8 --------------------------------------------------------------------------------------


class Four(nn.Module):
    """Parameters of 35, 7, 21 and 3 elements."""

    def __init__(self) -> None:
        super().__init__()
        for name, numel in (("a", 35), ("b", 7), ("c", 21), ("d", 3)):
            self.register_parameter(name, nn.Parameter(torch.randn(numel)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * sum(p.sum() for p in (self.a, self.b, self.c, self.d))


def aligned() -> list[list[int]]:
    numels = []
    for wrap in each_engine():
        model = wrap(Four(), use_orig_params=True)
        numels.append([param.numel() for param in model.parameters()])
    return numels


def test_members_start_at_sixteen_bytes() -> None:
    # Offsets 0, 36, 44, 68 of 72: each rank holds 36.
    first, second = [35, 0, 0, 0], [0, 7, 21, 3]
    assert run_ranks(2, aligned) == [[first, first], [second, second]]


def identities() -> None:
    for wrap in each_engine():
        plain = uneven()
        objects = list(plain.parameters())
        model = wrapped_by(wrap, plain, use_orig_params=True)
        assert {id(p) for p in model.parameters()} == {id(p) for p in objects}
        assert all(p.dim() == 1 for p in objects)
        shapes = [tuple(p.shape) for p in objects]
        groups = [{"params": objects[:3], "lr": 0.0}, {"params": objects[3:], "lr": 0.5}]
        optimizer = torch.optim.SGD(groups)
        before = full_copies(model)
        for _, mine in batches(2):
            model(mine).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = full_copies(model)
        names = [name for name, _ in uneven().named_parameters()]
        still = {name for name in names if torch.equal(before[name], after[name])}
        assert still == set(names[:3])
        assert {id(p) for p in model.parameters()} == {id(p) for p in objects}
        assert [tuple(p.shape) for p in objects] == shapes


def test_original_parameters_stay_the_same_objects_and_can_be_grouped() -> None:
    run_ranks(2, identities)


# A9, A10 -----------------------------------------------------------------------------------------


def gradient_slices() -> None:
    for wrap in each_engine():
        model = wrapped_by(wrap, build("partly_frozen"), use_orig_params=True)
        (_, mine), (_, again) = list(batches(2))
        model(mine).square().mean().backward()
        for param in model.parameters():
            if param.numel() and param.requires_grad:
                assert param.grad is not None and param.grad.shape == param.shape
            else:
                assert param.grad is None
        once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in model.parameters())
        model(mine).square().mean().backward()
        twice = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
        # What is set to zero instead is added to.
        model.zero_grad(set_to_none=False)
        model(again).square().mean().backward()


def test_gradients_are_slices_for_holders_and_none_for_others() -> None:
    run_ranks(2, gradient_slices)


def gradients_inside_no_sync() -> None:
    model = wrapped("ours", uneven(), use_orig_params=True)
    reference = build("uneven")
    for param, wanted in zip(full_copies(model).values(), reference.parameters(), strict=True):
        wanted.data.copy_(param)
    _, mine = next(batches(1))
    with model.no_sync():
        model(mine).square().mean().backward()
    reference(mine).square().mean().backward()
    for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, wanted.grad)
    model.zero_grad()  # what was kept is gone with it
    model(mine).square().mean().backward()
    total = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    both = torch.tensor([total])
    dist.all_reduce(both)
    means = [p.grad.clone() for p in reference.parameters()]
    for mean in means:
        dist.all_reduce(mean)
    wanted_total = sum(float((mean / 2).square().sum()) for mean in means)
    assert abs(float(both) - wanted_total) < 1e-5


def test_no_sync_shows_unsharded_gradients_and_zero_grad_drops_them() -> None:
    run_ranks(2, gradients_inside_no_sync)


def write_back() -> None:
    for wrap in each_engine():
        model = wrapped_by(wrap, uneven(), use_orig_params=True)
        _, mine = next(batches(1))
        inner: Any = model.module[1].module[0]
        inner.weight.data = torch.full_like(inner.weight, 2.0)
        inner.bias = nn.Parameter(torch.full_like(inner.bias, 3.0))
        with torch.no_grad():
            model(mine)
        params = full_copies(model)
        assert torch.equal(params["1.0.weight"], torch.full((5, 7), 2.0))
        assert torch.equal(params["1.0.bias"], torch.full((5,), 3.0))
        if inner.weight.numel():
            inner.weight.data = torch.zeros(inner.weight.numel() + 1)
            with pytest.raises((RuntimeError, AssertionError)):
                model.module[1].fsdp_unit.store.adopt_values() if wrap is engine(
                    "ours"
                ) else torch_write_back(model)


def torch_write_back(model: Any) -> None:
    model.module[1]._handle._writeback_orig_params()


def test_replaced_values_are_taken_over_and_wrong_shapes_refused() -> None:
    run_ranks(2, write_back)


def replaced_between() -> None:
    """Between a forward and its backward, where parameters are kept."""
    for how in ("object", "memory"):
        for wrap in each_engine():
            model = wrapped_by(
                wrap,
                build("uneven"),
                use_orig_params=True,
                sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            )
            out = model(torch.ones(2, 6)).sum()
            layer = model.module[1].module[0]
            with torch.no_grad():
                if how == "object":
                    layer.weight = nn.Parameter(torch.ones_like(layer.weight))
                else:
                    layer.weight.data = torch.ones_like(layer.weight)
            with pytest.raises(AssertionError):
                out.backward()
    model = wrapped_by(
        each_engine()[1],
        build("uneven"),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )
    model(torch.ones(2, 6))
    model.module[1].module[0].weight.data = torch.ones(5, 7)
    with pytest.raises(AssertionError, match=r"0\.weight: was replaced while it was gathered"):
        model(torch.ones(2, 6))


def test_parameters_replaced_between_forward_and_backward_are_refused() -> None:
    run_ranks(2, replaced_between)


def shared_otherwise() -> None:
    for wrap in each_engine():
        model = wrap(build("tied"), use_orig_params=True)
        model.module[1].second.weight = nn.Parameter(model.module[1].first.weight.detach())
        with pytest.raises(NotImplementedError):
            model(torch.ones(2, 6))
    model = FullyShardedDataParallel(build("even"), use_orig_params=True)
    first, last = model.module[1][0], model.module[1][2]
    first.weight = last.weight
    with pytest.raises(NotImplementedError, match="share a parameter has changed"):
        model(torch.ones(2, 6))


def test_modules_that_share_otherwise_than_before_are_refused() -> None:
    run_ranks(2, shared_otherwise)


# A11, A12 ----------------------------------------------------------------------------------------


def released() -> None:
    for orig in (False, True):
        for strategy, kept in (("FULL_SHARD", False), ("SHARD_GRAD_OP", True)):
            model = wrapped(
                "ours",
                uneven(),
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
            )
            root, inner = model.fsdp_unit.store, model.module[1].fsdp_unit.store
            _, mine = next(batches(1))
            with torch.no_grad():
                model(mine)
            assert held(root) == held(inner) == 0
            out = model(mine)
            assert held(root) > 0 and (held(inner) > 0) is kept
            out.sum().backward()
            assert held(root) == held(inner) == 0
            with model.no_sync():
                model(mine).sum().backward()
            assert held(root) == 0 if strategy == "FULL_SHARD" else held(root) > 0


def held(store: Any) -> int:
    return store.gathered_nbytes


def test_gathered_memory_is_released_outside_of_computing() -> None:
    run_ranks(2, released)


def shapes_between() -> list[Any]:
    shapes = []
    for wrap in each_engine():
        torch.manual_seed(0)
        model = wrap(
            nn.Linear(4, 4), use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
        )
        out = model(torch.ones(2, 4))
        between = [tuple(p.shape) for p in model.parameters()]
        out.sum().backward()
        shapes.append((between, [tuple(p.shape) for p in model.parameters()]))
    return shapes


def test_kept_parameters_have_full_shapes_between_forward_and_backward() -> None:
    first, second = run_ranks(2, shapes_between)
    assert first == [([(4, 4), (4,)], [(10,), (0,)])] * 2
    assert second == [([(4, 4), (4,)], [(6,), (4,)])] * 2


def converted() -> None:
    for wrap in each_engine():
        for orig in (False, True):
            model = wrapped_by(wrap, uneven(), use_orig_params=orig)
            objects = [id(p) for p in model.parameters()]
            model.double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _, mine in batches(2):
                model(mine.double()).square().mean().backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                assert grads and all(grad.dtype == torch.float64 for grad in grads)
                optimizer.step()
                optimizer.zero_grad()
            if orig:
                assert [id(p) for p in model.parameters()] == objects


def converted_by_all_ways() -> None:
    """After a step, where torch's class gathers into buffers of the former dtype."""
    for way, dtype in (
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.to(torch.float64), torch.float64),
        (lambda m: m.to("cpu"), torch.float32),
        (lambda m: m.double().float(), torch.float32),
    ):
        for orig in (False, True):
            model = wrapped("ours", build("uneven"), use_orig_params=orig)
            objects = [id(p) for p in model.parameters()]
            x = torch.ones(2, 6)
            model(x).sum().backward()
            way(model)
            if orig:
                assert [id(p) for p in model.parameters()] == objects
            assert {p.dtype for p in model.parameters()} == {dtype}
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert grads and all(g.dtype == dtype for g in grads)
            for name, value in full_copies(model).items():
                wanted = dict(build("uneven").named_parameters())[name].to(dtype)
                assert torch.equal(value, wanted)
            model.zero_grad()
            out = model(x.to(dtype))
            assert out.dtype == dtype
            out.sum().backward()


def test_conversions_of_every_kind_take_gradients_along() -> None:
    run_ranks(2, converted_by_all_ways)


def test_converting_after_wrapping_keeps_objects_and_trains() -> None:
    run_ranks(2, converted)


def no_recursion() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unit = FullyShardedDataParallel(nn.Linear(2, 2), mixed_precision=MixedPrecision())
    with pytest.raises(AttributeError, match="not_there"):
        _ = unit.not_there
    assert unit.in_features == 2


def test_unknown_attributes_are_looked_up_in_the_wrapped_module() -> None:
    run_ranks(2, no_recursion)
