"""What torch 2.15 added to `fully_shard`, bit for bit like torch's own: dtypes of single parameters
and of gradients, the end of a backward by hand, kept memory, pipelines.

Method: both engines train the same model with the same inputs; losses, parameters, gradients and
their dtypes are compared after every step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import sharding
from sharding.torch_face import follows_grad_dtype
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
if not follows_grad_dtype():
    pytest.skip("torch before 2.15 has none of it", allow_module_level=True)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ENGINES: tuple[Any, ...] = (sharding, torch_fsdp)


class Scale(nn.Module):
    """Multiplies, in the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) * self.weight).to(x.dtype)


class Net(nn.Module):
    """A layer that is called twice, a norm, and two heads of which steps use one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 5, bias=False), Scale()
        self.second = nn.Linear(5, 6, bias=False)
        self.head, self.other = nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        x = self.norm(self.second(self.first(self.first(x).tanh())))
        return (self.other if other else self.head)(x)


def local(value: Any) -> torch.Tensor | None:
    return value.to_local() if isinstance(value, DTensor) else value


def state_of(model: nn.Module) -> list[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
    named = model.named_parameters()
    return [(name, local(param.detach()), local(param.grad)) for name, param in named]


def difference(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """What is not the same, bit for bit and in dtype."""
    seen = []
    for (name, *mine), (_, *others) in zip(state_of(ours), state_of(theirs), strict=True):
        for what, a, b in zip(("value", "gradient"), mine, others, strict=True):
            is_same = a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)
            if not is_same:
                seen.append(f"{name}: {what} {a} is not torch's {b}")
    return seen


def compare(
    options: dict[str, Any],
    *,
    change: Callable[[Any], None] = lambda model: None,
    prepare: Callable[[Any], None] = lambda model: None,
    step: Callable[[Any, torch.Tensor, int], None] | None = None,
    hybrid: bool = False,
    inner: bool = True,
) -> list[str]:
    """Train with both engines. `change`: before sharding; `prepare`: behind it."""
    models = []
    for engine in ENGINES:
        torch.manual_seed(3)
        model: Any = Net()
        change(model)
        world = dist.get_world_size()
        mesh = (
            init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
            if hybrid
            else init_device_mesh("cpu", (world,))
        )
        if inner:
            engine.fully_shard(model.second, mesh=mesh, **options)
        models.append(engine.fully_shard(model, mesh=mesh, **options))
        prepare(model)
    seen = []
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for number in range(3):
        for model in models:
            torch.manual_seed(17 * number + dist.get_rank())
            batch = torch.randn(4, 5, dtype=next(model.parameters()).dtype)
            if step is None:
                model(batch).float().square().sum().backward()
            else:
                step(model, batch, number)
        seen += [f"step {number}: {one}" for one in difference(*models)]
        for model, optimizer in zip(models, optimizers, strict=True):
            for param in model.parameters():
                if param.grad is not None and param.grad.dtype != param.dtype:
                    with torch.no_grad():
                        param.sub_(param.grad.to(param.dtype), alpha=0.1)
                    param.grad = None
            optimizer.step()
            optimizer.zero_grad()
    return seen


def accumulate(model: Any, batch: torch.Tensor, number: int) -> None:
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        model(batch * (1 + micro), other=micro == 1).float().square().sum().backward()


def two_backwards(model: Any, batch: torch.Tensor, number: int) -> None:
    for micro in range(2):
        model.set_requires_all_reduce(micro == 1)
        model(batch * (1 + micro)).float().square().sum().backward()


def freeze(model: Any) -> None:
    model.second.weight.requires_grad_(False)
    model.norm.weight.requires_grad_(False)


def frozen_members(hybrid: bool) -> list[str]:
    return [
        f"{name}: {one}"
        for name in ("bf16", "none")
        for one in compare(POLICIES[name], change=freeze, hybrid=hybrid)
    ]


def keep_norms(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.dim() == 1 else None


def set_dtypes(*dtypes: torch.dtype | None) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for param, dtype in zip(model.parameters(), itertools.cycle(dtypes), strict=False):
            param.grad_dtype = dtype

    return change


def policy(*dtypes: torch.dtype | None, **more: Any) -> dict[str, Any]:
    return {"mp_policy": torch_fsdp.MixedPrecisionPolicy(*dtypes, **more)}


POLICIES: dict[str, dict[str, Any]] = {
    "bf16": policy(BF16),
    "bf16 and fp32": policy(BF16, FP32),
    "reduced in bf16": policy(None, BF16),
    "fp16": policy(FP16),
    "norms apart": policy(BF16, param_dtype_override_fn=keep_norms),
    "norms apart, reduced in bf16": policy(BF16, BF16, param_dtype_override_fn=keep_norms),
    "none": policy(),
}
GRADS: dict[str, tuple[torch.dtype | None, ...]] = {
    "fp32": (FP32,),
    "bf16": (BF16,),
    "mixed": (BF16, FP32),
    "fp64": (FP64, FP32),
    "any": (None,),
}


def all_policies(hybrid: bool) -> list[str]:
    seen = []
    for name, options in POLICIES.items():
        for step in (None, accumulate, two_backwards) if hybrid else (None, accumulate):
            for inner in (True, False):
                result = compare(options, step=step, hybrid=hybrid, inner=inner)
                seen += [f"{name}, {step and step.__name__}: {one}" for one in result]
    return seen


def all_grad_dtypes(hybrid: bool) -> list[str]:
    seen = []
    for name, dtypes in GRADS.items():
        for policy_name in ("bf16", "none", "bf16 and fp32"):
            for when in ("change", "prepare"):
                for step in (None, accumulate):
                    how: Any = {when: set_dtypes(*dtypes)}
                    result = compare(POLICIES[policy_name], step=step, hybrid=hybrid, **how)
                    where = f"{name}, {policy_name}, {when}, {step and step.__name__}"
                    seen += [f"{where}: {one}" for one in result]
    return seen


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("draws", [frozen_members, all_policies, all_grad_dtypes])
def test_dtypes_equal_torch_bit_for_bit(draws: Any, hybrid: bool) -> None:
    for seen in run_ranks(4 if hybrid else 2, draws, hybrid):
        assert not seen, "\n".join(seen[:20])


# --- backwards that the user ends ----------------------------------------------------------------


def ends_by_hand(model: Any) -> None:
    model.set_manual_backward_finalization(True)


def one_backward(model: Any, batch: torch.Tensor, number: int) -> None:
    model(batch, other=number == 1).float().square().sum().backward()
    handle = model.finalize_backward(async_op=number > 0)
    assert (handle is None) is (number == 0)
    if handle is not None:
        handle.wait()
        handle.wait()


def several_backwards(model: Any, batch: torch.Tensor, number: int) -> None:
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for micro in range(3):
        model(batch * (1 + micro), other=micro == 1).float().square().sum().backward()
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model.finalize_backward(async_op=True).wait()


def unused_as_zeros(model: Any) -> None:
    ends_by_hand(model)
    model.set_reduce_scatter_unused_params(True)


def ended_by_hand(hybrid: bool) -> list[str]:
    seen = []
    for name in ("bf16", "none", "norms apart"):
        for step in (one_backward, several_backwards):
            for prepare in (ends_by_hand, unused_as_zeros):
                result = compare(POLICIES[name], step=step, prepare=prepare, hybrid=hybrid)
                seen += [f"{name}, {step.__name__}, {prepare.__name__}: {one}" for one in result]
    return seen


@pytest.mark.parametrize("hybrid", [False, True])
def test_backwards_ended_by_hand_equal_torch(hybrid: bool) -> None:
    for seen in run_ranks(4 if hybrid else 2, ended_by_hand, hybrid):
        assert not seen, "\n".join(seen[:20])


def misuse(engine: Any, hybrid: bool) -> list[str]:
    """What is refused, and that training goes on after it."""
    world = dist.get_world_size()
    shape, names = ((2, world // 2), ("r", "s")) if hybrid else ((world,), ("s",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model: Any = Net()
    inner: Any = engine.fully_shard(model.second, mesh=mesh)
    engine.fully_shard(model, mesh=mesh)
    batch = torch.ones(2, 5)
    model.finalize_backward()
    model.finalize_backward(async_op=True).wait()

    def refused(call: Callable[[], object], text: str) -> str:
        try:
            call()
        except RuntimeError as error:
            return "" if text in str(error) else f"{text!r} is not in {error}"
        return f"not refused: {text}"

    other: Any = engine.fully_shard(nn.Sequential(engine.fully_shard(nn.Linear(5, 5))))
    other[0].set_manual_backward_finalization(True)
    seen = [refused(lambda: other(batch), "must be called on the root")]
    model(batch).sum().backward()
    seen += [
        refused(model.finalize_backward, "requires manual backward finalization"),
        refused(inner.finalize_backward, "must be called on the root"),
        refused(lambda: inner.set_manual_backward_finalization(True), "called on the root"),
    ]
    model.set_manual_backward_finalization(True)
    loss = model(batch).sum()
    seen = []

    def in_backward(grad: torch.Tensor) -> None:
        if engine is sharding:  # torch's looks for what this hook comes before
            seen.append(refused(model.finalize_backward, "after backward completes"))
        call = functools.partial(model.set_manual_backward_finalization, False)
        seen.append(refused(call, "cannot change mode during backward"))

    loss.register_hook(in_backward)
    loss.backward()
    seen += seen
    call = functools.partial(model.set_manual_backward_finalization, False)
    seen.append(refused(call, "cannot change mode after backward starts"))
    handle = model.finalize_backward(async_op=True)
    seen += [
        refused(lambda: model(batch), "must be waited on before forward"),
        refused(model.finalize_backward, "must be waited on before"),
    ]
    model.reset_iter_state()
    seen.append(refused(handle.wait, "was invalidated"))
    if hybrid:
        model.set_requires_all_reduce(False)
        model(batch).sum().backward()
        seen.append(refused(model.finalize_backward, "partial gradient reductions"))
        model.reset_iter_state()
        model.set_requires_all_reduce(True)
    model(batch).sum().backward()
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    if any(param.grad is None for name, param in model.named_parameters() if "other" not in name):
        seen.append("no gradient")
    return [one for one in (*seen, *seen) if one]


def misused_by_both() -> list[str]:
    return [
        f"{engine.__name__}: {one}"
        for engine in ENGINES
        for hybrid in (False, True)
        for one in misuse(engine, hybrid)
    ]


def test_ends_by_hand_in_the_wrong_place_are_refused() -> None:
    for seen in run_ranks(4, misused_by_both):
        assert not seen, "\n".join(seen)


def kept_addresses() -> list[str]:
    seen = []
    for engine in ENGINES:
        model: Any = engine.fully_shard(Net())
        model.set_keep_unsharded_storage(True)
        addresses = []
        for _ in range(3):
            model.unshard()
            addresses.append([param.data_ptr() for param in model.parameters()])
            model(torch.ones(2, 5)).sum().backward()
            model.reshard()
        if addresses[1:] != addresses[:-1]:
            seen.append(f"{engine.__name__}: memory has moved")
        if engine is sharding and not model.fsdp_group.store.gathered_nbytes:
            seen.append("memory was released")
        model.set_keep_unsharded_storage(False)
        model.unshard()
        model.reshard()
        if engine is sharding and model.fsdp_group.store.gathered_nbytes:
            seen.append("memory is kept")
    return seen


def test_gathered_memory_is_kept_on_request() -> None:
    for seen in run_ranks(2, kept_addresses):
        assert not seen


# --- pipelines -----------------------------------------------------------------------------------


def pipelined(engine: Any, schedule: str) -> list[Any]:
    """Losses and gradients of two stages on a pipeline of two ranks, sharded over two."""
    from torch.distributed.pipelining import PipelineStage, schedules

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    kind = getattr(schedules, schedule)
    local_stages = 2 if issubclass(kind, schedules.PipelineScheduleMulti) else 1
    rank = mesh.get_local_rank("pp")
    stages, parts = [], []
    for number in range(local_stages):
        index = number * 2 + rank
        torch.manual_seed(index)
        part = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        engine.fully_shard(part[0], mesh=mesh["dp"], reshard_after_forward=False)
        engine.fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
        parts.append(part)
        stages.append(
            PipelineStage(
                part, index, local_stages * 2, torch.device("cpu"), group=mesh.get_group("pp")
            )
        )
    loss_fn = nn.MSELoss()
    pipe = kind(stages if local_stages == 2 else stages[0], n_microbatches=4, loss_fn=loss_fn)
    results: list[Any] = []
    for number in range(2):
        torch.manual_seed(100 + number + 10 * mesh.get_local_rank("dp"))
        x, target = torch.randn(8, 4), torch.randn(8, 4)
        losses: list[torch.Tensor] = []
        is_last = rank == 1
        pipe.step(*([x] if rank == 0 else []), target=target if is_last else None, losses=losses)
        results += [loss.detach() for loss in losses]
        for part in parts:
            results += [param.grad.to_local().clone() for param in part.parameters()]
            part.zero_grad()
    return results


def all_pipelines() -> list[str]:
    seen = []
    for schedule in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"):
        ours, theirs = (pipelined(engine, schedule) for engine in ENGINES)
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not torch.equal(a, b):
                seen.append(f"{schedule}: {number}: {a} is not torch's {b}")
    return seen


def test_pipelines_of_stages_equal_torchs() -> None:
    for seen in run_ranks(4, all_pipelines):
        assert not seen, "\n".join(seen[:10])
