"""The methods of modules that `fully_shard` was called on, and what else torch's has.

Method: names and signatures compared with torch's; each method by what it changes, counted in
gathers and reductions, or against a training without it.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import sharding
from sharding import FSDPModule
from sharding.engine.collectives import _Native
from sharding.engine.store import State
from sharding.sharded_group import CustomComm
from tests.sharding.fully_scenarios import (
    assert_close,
    assert_equal,
    claims,
    loss_of,
    ones,
    reference,
    sgd,
    sharded,
    train,
    values,
)
from tests.sharding.models import WIDTH, batches, block, build

# Names and signatures ----------------------------------------------------------------------------


def public_methods(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_every_public_method_of_torch_is_there() -> None:
    assert public_methods(torch_fsdp.FSDPModule) <= public_methods(FSDPModule)


@pytest.mark.parametrize("name", sorted(public_methods(torch_fsdp.FSDPModule)))
def test_methods_take_what_torchs_take(name: str) -> None:
    def shape(kind: type) -> list[tuple[str, Any, Any]]:
        params = inspect.signature(getattr(kind, name)).parameters.values()
        return [(one.name, one.kind, one.default) for one in params]

    assert shape(FSDPModule) == shape(torch_fsdp.FSDPModule)


def test_the_functions_take_what_torchs_take() -> None:
    theirs = inspect.signature(torch_fsdp.fully_shard).parameters
    ours = inspect.signature(sharding.fully_shard).parameters
    later = {"dp_mesh_dims", "ignored_params"}  # of newer torch
    assert set(theirs) <= set(ours) <= set(theirs) | later
    for name in (set(ours) & set(theirs)) - {"module"}:
        assert ours[name].kind is theirs[name].kind
        if (name, theirs[name].default) == ("reshard_after_forward", True):
            continue  # torch 2.6; None, which but a root takes for it, is newer
        # Policies are compared by their fields.
        assert (
            repr(ours[name].default).split(" at ")[0] == repr(theirs[name].default).split(" at ")[0]
        )
    functions = ("register_fsdp_forward_method", "share_comm_ctx")
    for function in (one for one in functions if hasattr(torch_fsdp, one)):
        assert list(inspect.signature(getattr(sharding, function)).parameters) == list(
            inspect.signature(getattr(torch_fsdp, function)).parameters
        )


# On ranks ----------------------------------------------------------------------------------------


def store_of(module: Any) -> Any:
    return module.fsdp_group.store


def three_blocks(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(block(6, 5, 4), block(4, 5, 4), block(4, 3, 2))
    for inner in model:
        sharding.fully_shard(inner, **kwargs)
    return sharding.fully_shard(model, **kwargs)


def logged(model: Any) -> list[str]:
    """Gathers (g0, ...) and computations (f1, b1) as they come, by block; filled while it runs."""
    log: list[str] = []
    for number, unit in enumerate(model):
        store = store_of(unit)
        start = store.start_gather

        def recorded(n: int = number, start: Any = start) -> Any:
            log.append(f"g{n}")
            return start()

        store.start_gather = recorded
        unit[0].register_forward_pre_hook(lambda m, a, n=number: log.append(f"f{n}"))
        unit[0].register_full_backward_hook(lambda m, g, o, n=number: log.append(f"b{n}"))
    return log


def step(model: Any) -> None:
    model(ones().requires_grad_()).sum().backward()


def the_module_is_the_same_object_of_a_class_that_is_both() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    linear = model[0]
    returned = sharding.fully_shard(linear)
    assert returned is linear is model[0]
    assert isinstance(linear, nn.Linear) and isinstance(linear, FSDPModule)
    assert type(linear).__name__ == "FSDPLinear"
    whole: Any = sharding.fully_shard(model)
    assert type(whole[:1]) is nn.Sequential and whole[:1][0] is linear


def gathers_come_when_they_are_asked_for() -> None:
    model = three_blocks()
    log = logged(model)
    step(model)
    assert " ".join(log) == "g0 f0 g1 f1 g2 f2 g2 g1 b2 g0 b1 b0"
    log.clear()
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    step(model)
    assert " ".join(log) == "g0 g1 g2 f0 f1 f2 g2 g1 g0 b2 b1 b0"
    log.clear()
    model.set_reshard_after_forward(False)
    step(model)
    assert " ".join(log) == "g0 g1 g2 f0 f1 f2 b2 b1 b0"
    log.clear()
    model.set_reshard_after_backward(False)
    step(model)
    step(model)
    assert " ".join(log) == "g0 g1 g2 f0 f1 f2 b2 b1 b0 f0 f1 f2 b2 b1 b0"
    with pytest.raises(ValueError, match="got Linear"):
        model[0].set_modules_to_forward_prefetch([nn.Linear(2, 2)])


def evaluation_gathers_once_where_parameters_are_kept() -> None:
    model = three_blocks()
    model.set_reshard_after_forward(False)
    log = logged(model)
    weight = model[1][0].weight
    with torch.no_grad():
        first = model(ones())
        assert torch.equal(model(ones()), first)
        assert " ".join(log) == "g0 f0 g1 f1 g2 f2 f0 f1 f2"
        weight.mul_(2)  # as an optimizer or an average of weights would
        second = model(ones())
        weight.to_local().mul_(2)
        third = model(ones())
    # What is written in place is seen.
    assert not torch.equal(first, second) and not torch.equal(second, third)
    step(model)
    assert log.count("g0") == 2  # a training step gathers anew


def early_gathers_serve_the_forward() -> None:
    model = three_blocks()
    log = logged(model)
    handle = model[1].unshard(async_op=True)
    handle.wait()
    handle.wait()
    assert model[0].unshard() is None
    with torch.no_grad():
        model(ones())
    assert " ".join(log) == "g1 g0 f0 f1 g2 f2"
    handle = model[2].unshard(async_op=True)
    model[2].reshard()
    handle.wait()  # there is nothing to wait for, and nothing is gathered anew
    assert store_of(model[2]).state is State.SHARDED


def a_backward_that_needs_no_parameters_does_not_gather() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.out = nn.Linear(4, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(tokens))

    model: Any = Head()
    sharding.fully_shard(model.embed)
    model.embed.set_unshard_in_backward(False)
    sharding.fully_shard(model)
    gathers = []
    start = store_of(model.embed).start_gather
    store_of(model.embed).start_gather = lambda: gathers.append(1) or start()
    model(torch.tensor([1, 2])).sum().backward()
    assert len(gathers) == 1
    assert model.embed.weight.grad.full_tensor()[1].abs().sum() > 0


def groups_of_modules_are_one_unit() -> None:
    for call_head_alone in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.Linear(4, 3))
        wanted = {n: p.detach().clone() for n, p in model.named_parameters()}
        norm, head = model[1], model[2]
        assert sharding.fully_shard([norm, head])[1] is head
        trunk: Any = nn.Sequential(model[0], norm) if call_head_alone else model
        sharding.fully_shard(trunk)
        assert store_of(norm) is store_of(head) and len(store_of(norm).params) == 4
        if call_head_alone:
            # The forward runs a part of the group; the rest is called later, in pieces.
            features = trunk(ones(4))
            assert store_of(norm).state is State.SHARDED
            loss = sum(head(chunk).sum() for chunk in features.chunk(2))
        else:
            loss = model(ones(4)).sum()
        loss.backward()
        assert store_of(norm).state is State.SHARDED
        plain = nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.Linear(4, 3))
        plain.load_state_dict(wanted)
        plain(ones(4)).sum().backward()
        for name, param in plain.named_parameters():
            got = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(got, param.grad, msg=name)


def gradients_are_divided_as_the_user_says() -> None:
    model, plain = sharded("ours", build("even")), build("even")
    for unit in (model, model[1]):
        unit.set_gradient_divide_factor(1.0)
    (whole, mine) = next(batches(1))
    loss_of(model, mine).backward()
    loss_of(plain, whole).backward()
    size = dist.get_world_size()
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad * size)


def hooks_see_what_was_reduced() -> None:
    model = sharded("ours", build("even"))
    seen: list[int] = []

    def hook(reduced: torch.Tensor) -> None:
        seen.append(reduced.numel())
        reduced.zero_()

    model[1].set_all_reduce_hook(hook)
    step(model)
    assert seen == [sum(p.to_local().numel() for p in model[1].parameters())]
    assert float(model[1][0].weight.grad.full_tensor().abs().sum()) == 0.0
    assert float(model[0].weight.grad.full_tensor().abs().sum()) > 0.0


def reductions_over_a_group_of_their_own_give_the_same() -> None:
    model = sharded("ours", build("uneven"))
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_force_sum_reduction_for_comms(True)
    gathers, reduces = store_of(model).data.shard, model.fsdp_group.unit.reduction.shard
    assert reduces.group is not gathers.group
    assert reduces is model[1].fsdp_group.unit.reduction.shard
    train(model)
    assert_close(values(model), reference("uneven"), "apart")
    model.set_separate_reduce_scatter_group(False)
    assert model.fsdp_group.unit.reduction.shard is gathers
    with pytest.raises(ValueError, match="at least 1"):
        model.set_reduce_scatter_max_input_buffers(0)
    with pytest.raises(TypeError, match="an int"):
        model.set_reduce_scatter_max_input_buffers(True)


class Recording:
    """A user's own collective, by torch's."""

    def __init__(self, collective: Any) -> None:
        self.calls: list[int] = []
        self._collective = collective

    def allocate(self, shape: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, **kwargs: Any) -> Any:
        self.calls.append(input_tensor.numel())
        return self._collective(output_tensor, input_tensor, **kwargs)


def collectives_may_be_the_users_own() -> None:
    model = sharded("ours", build("uneven"))
    gather = Recording(dist.all_gather_into_tensor)
    reduce = Recording(dist.reduce_scatter_tensor)
    for unit in (model, model[1]):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    train(model)
    assert_close(values(model), reference("uneven"), "custom")
    assert len(gather.calls) == 4 * 3 and len(reduce.calls) == 4 * 2
    assert isinstance(store_of(model).data.shard, CustomComm)


def the_backends_own_primitives_give_the_same() -> None:
    """What other backends than gloo are served by, here with gloo."""
    for kind in ("even", "uneven", "tied"):
        models = [sharded("ours", build(kind)) for _ in range(2)]
        for unit in (models[1], models[1][1]):
            comm = _Native(store_of(unit).data.shard.group)
            store = store_of(unit)
            store.data = type(store.data)(store.data.mesh, comm, None)
            reduction = unit.fsdp_group.unit.reduction
            unit.fsdp_group.unit.reduction = type(reduction)(
                comm, None, reduction.dtype, reduction.factors
            )
        for model in models:
            train(model)
        if dist.get_world_size() == 2:
            assert_equal(values(models[0]), values(models[1]), kind)
        else:
            assert_close(values(models[0]), values(models[1]), kind)


def an_iteration_that_raised_can_be_left_behind() -> None:
    class Raises(nn.Module):
        when = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if Raises.when == "forward":
                raise KeyError("planned")
            if Raises.when == "backward":
                x = x * 1
                x.register_hook(self.fail)
            return x

        def fail(self, grad: torch.Tensor) -> None:
            raise KeyError("planned")

    model: Any = build("uneven")
    model.insert(2, Raises())
    sharded("ours", model)
    model.reset_iter_state()  # nothing has run yet
    wanted = reference("uneven")
    for when, resets in (("forward", False), ("forward", True), ("backward", True)):
        Raises.when = when
        with pytest.raises(KeyError, match="planned"):
            loss_of(model, ones()).backward()
        if resets:
            model.reset_iter_state()
        Raises.when = ""
        loss_of(model, ones()).backward()  # works
        model.zero_grad()
    with pytest.raises(RuntimeError, match="root only"):
        model[1].reset_iter_state()
    train(model)
    got = {name.replace("3.", "2."): value for name, value in values(model).items()}
    assert_close(got, wanted, "after failures")


def other_methods_gather_as_the_forward_does() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

        def encode(self, x: torch.Tensor, *, times: float = 1.0) -> torch.Tensor:
            """Doc."""
            return self.layer(x) * times

    torch.manual_seed(0)
    plain = Two()
    sharding.register_fsdp_forward_method(plain, "encode")  # nothing happens
    wanted = plain.encode(ones(), times=2.0)
    model: Any = sharding.fully_shard(plain)
    with pytest.raises(ValueError, match="no method 'decode'"):
        sharding.register_fsdp_forward_method(model, "decode")
    sharding.register_fsdp_forward_method(model, "encode")
    out = model.encode(ones(), times=2.0)
    torch.testing.assert_close(out, wanted)
    assert model.encode.__doc__ == "Doc."
    out.sum().backward()
    assert model.layer.weight.grad is not None
    assert store_of(model).state is State.SHARDED


def several_roots_share_streams() -> None:
    first, second = (sharded("ours", build("even")) for _ in range(2))
    step(first)
    sharding.share_comm_ctx([first, second])
    assert first.fsdp_group.streams is second[1].fsdp_group.streams is store_of(second).streams
    step(first)
    step(second)
    assert second.fsdp_group.unit.runtime.streams is first.fsdp_group.unit.runtime.streams
    with pytest.raises(ValueError, match="got Linear"):
        sharding.share_comm_ctx([nn.Linear(1, 1)])


def inner_modules_that_ran_as_roots_are_reported() -> None:
    model = sharded("ours", build("even"))
    model[1](torch.ones(2, 8))
    with pytest.raises(RuntimeError, match=r"FSDPSequential was used as a root"):
        model(ones())


def events_and_flags_are_taken() -> None:
    model = sharded("ours", build("even"))
    optimizer = sgd(model)
    for _ in range(2):
        step(model)
        optimizer.step()
        model.set_post_optim_event(torch.Event("cpu") if hasattr(torch, "Event") else None)
        model.set_is_last_backward(True)
    for wrong in (2, None, 1):
        with pytest.raises(ValueError, match="True or False"):
            model.set_reshard_after_forward(wrong)


def ignored_parameters_are_left_alone() -> None:
    model: Any = build("even")
    ignored = {model[1][0].weight, model[0].bias}
    sharding.fully_shard(model[1], ignored_params=ignored)
    sharding.fully_shard(model, ignored_params=ignored)
    assert type(model[1][0].weight) is nn.Parameter and model[0].bias in ignored
    step(model)
    assert model[1][0].weight.grad.shape == model[1][0].weight.shape


def models_can_be_explained() -> None:
    model = sharded("ours", build("uneven"))
    explanation = sharding.explain(model)
    root, inner = explanation.units
    assert root.name == "" and inner.name == "1" and not explanation.recorded
    assert "along dim 0" in str(explanation) and "fully_shard over 2 ranks" in str(explanation)
    assert inner.gathered_nbytes == sum(p.numel() for p in model[1].parameters()) * 4
    whats = [f"{event.what}{event.unit}" for event in explanation.step]
    assert whats[:5] == ["gather0", "forward0", "gather1", "forward1", "free1"]
    step(model)
    recorded = [f"{noted.what}{noted.unit}" for noted in sharding.explain(model).recorded]
    assert recorded.count("gather1") == 2 and recorded.count("reduce1") == 1
    assert "doctype html" in sharding.explain(model).html()


test_on_two_ranks = claims(
    2,
    [
        models_can_be_explained,
        the_module_is_the_same_object_of_a_class_that_is_both,
        gathers_come_when_they_are_asked_for,
        evaluation_gathers_once_where_parameters_are_kept,
        early_gathers_serve_the_forward,
        a_backward_that_needs_no_parameters_does_not_gather,
        groups_of_modules_are_one_unit,
        gradients_are_divided_as_the_user_says,
        hooks_see_what_was_reduced,
        reductions_over_a_group_of_their_own_give_the_same,
        collectives_may_be_the_users_own,
        the_backends_own_primitives_give_the_same,
        an_iteration_that_raised_can_be_left_behind,
        other_methods_gather_as_the_forward_does,
        several_roots_share_streams,
        inner_modules_that_ran_as_roots_are_reported,
        events_and_flags_are_taken,
        ignored_parameters_are_left_alone,
    ],
)
