"""Training under `fully_shard` gives what an unsharded model, and what torch's own gives.

Method: some steps of small models, on 2 ranks bit for bit like torch's engine (every sum has two
terms there), on 4 ranks close to it and to the unsharded replica on the concatenated batch: every
layout, precision, way of accumulating, optimizer and helper of torch that users combine with it.
"""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import sharding
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
from tests.sharding.models import WIDTH, Reentrant, batches, build

pytestmark = pytest.mark.ranks

KINDS = ("even", "uneven", "tied", "frozen", "partly_frozen", "recomputed", "convolution")


# Two ranks: bit for bit ---------------------------------------------------------------------------


def same_as_torch(kind: str, *, steps: int = 3, clip: float = 0.0, **kwargs: Any) -> Any:
    """Train under both engines; returns our model."""
    results = {}
    model: Any = None
    for engine in ("torch", "ours"):
        model = sharded(engine, build_contiguous(kind), **kwargs)
        results[engine] = (train(model, steps=steps, clip=clip), values(model))
    assert results["ours"][0] == results["torch"][0], f"{kind} {kwargs}"
    assert_equal(results["ours"][1], results["torch"][1], f"{kind} {kwargs}")
    return model


def build_contiguous(kind: str) -> nn.Sequential:
    model = build(kind)
    return model.to(memory_format=torch.contiguous_format) if kind == "convolution" else model


def all_kinds_of_models() -> None:
    for kind in KINDS:
        same_as_torch(kind)


def freeing_or_keeping_after_the_forward() -> None:
    for frees in (True, False):
        same_as_torch("uneven", reshard_after_forward=frees)


def bfloat16_with_reductions_in_float32_or_not() -> None:
    for reduce_dtype in (torch.float32, None):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        model = same_as_torch("uneven", mp_policy=policy)
        assert all(p.dtype is torch.float32 for p in model.parameters())
        assert model(ones()).dtype is torch.bfloat16


def outputs_in_the_dtype_that_was_asked_for() -> None:
    model: Any = build("even")
    low = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    sharding.fully_shard(model[1], mp_policy=low)
    sharding.fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    seen: list[torch.dtype] = []
    model[1][0].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    model[2].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    assert model(ones()).dtype is torch.float64 and seen == [torch.bfloat16, torch.float32]


def float16_divides_before_and_after() -> None:
    same_as_torch("even", mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))


def clipping_by_torch() -> None:
    same_as_torch("uneven", clip=0.1)


def dim_1() -> None:
    def placing(param: nn.Parameter) -> Shard | None:
        return Shard(-1) if param.dim() == 2 and param.shape[1] % 2 == 0 else None

    model = same_as_torch("even", shard_placement_fn=placing)
    assert any(p.placements == (Shard(1),) for p in model.parameters())


def foreach_and_fused_optimizers() -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),  # torch has no fused SGD for DTensors
    ]
    for make, options in cases:
        results = []
        for engine in ("torch", "ours"):
            model = sharded(engine, build("even"))
            optimizer = make(model.parameters(), lr=0.1, **options)
            results.append((train(model, optimizer=optimizer), values(model)))
        assert results[0][0] == results[1][0], f"{options} {make}"
        assert_equal(results[1][1], results[0][1], f"{options} {make}")


def accumulated(engine: str, **kwargs: Any) -> dict[str, torch.Tensor]:
    """sync / no / no / sync / sync, stepping after the last two."""
    model = sharded(engine, build("uneven"), **kwargs)
    optimizer = sgd(model)
    for step, (_, mine) in enumerate(batches(5)):
        model.set_requires_gradient_sync(step not in (1, 2))
        loss_of(model, mine).backward()
        if step in (3, 4):
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def accumulating_with_and_without_reducing() -> None:
    for kwargs in (
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ):
        got = accumulated("ours", **kwargs)
        assert_equal(got, accumulated("torch", **kwargs), f"{kwargs}")
    plain = build("uneven")
    optimizer = sgd(plain)
    for step, (whole, _) in enumerate(batches(5)):
        loss_of(plain, whole).backward()
        if step in (3, 4):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(accumulated("ours"), values(plain), "against unsharded")


def gradients_that_are_one_tensor_for_two_parameters_add_up_apart() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a + self.b) * x  # both get the same tensor as gradient

    model: Any = sharding.fully_shard(Sum())
    for step in range(4):
        model.set_requires_gradient_sync(step == 3)
        model(torch.ones(4)).sum().backward()
    for param in (model.a, model.b):
        assert param.grad.full_tensor().tolist() == [4.0] * 4


def keeping_parameters_over_the_backwards_of_a_step() -> None:
    results = []
    for engine in ("torch", "ours"):
        model = sharded(engine, build("uneven"))
        optimizer = sgd(model)
        for step, (_, mine) in enumerate(batches(4)):
            last = step % 2 == 1
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last)
            loss_of(model, mine).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        results.append(values(model))
    assert_equal(results[1], results[0], "kept")


def reductions_that_are_not_waited_for_add_up() -> None:
    model, plain = sharded("ours", build("uneven")), build("uneven")
    for step, (whole, mine) in enumerate(batches(3)):
        model.set_is_last_backward(step == 2)
        loss_of(model, mine).backward()
        loss_of(plain, whole).backward()
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, msg=name)


def two_forwards_and_one_backward_and_that_again() -> None:
    model, plain = sharded("ours", build("uneven")), build("uneven")
    (whole, mine), (whole_2, mine_2) = list(batches(2))
    loss = loss_of(model, mine) + loss_of(model, mine_2)
    wanted = loss_of(plain, whole) + loss_of(plain, whole_2)
    for _ in range(2):
        loss.backward(retain_graph=True)
        wanted.backward(retain_graph=True)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad, msg=name)


def reentrant_checkpointing_inside_and_outside_of_a_unit() -> None:
    for outside in (False, True):
        model = build("uneven")
        if outside:
            model[1] = Reentrant(sharding.fully_shard(model[1]))
        else:
            model[1] = sharding.fully_shard(Reentrant(model[1]))
        sharding.fully_shard(model)
        train(model)
        got = {name.replace("inner.", ""): value for name, value in values(model).items()}
        assert_close(got, reference("uneven"), f"outside={outside}")


def checkpointing_around_a_unit_without_reentrance() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = build("uneven")
    model[1] = Around(sharding.fully_shard(model[1]))
    sharding.fully_shard(model)
    train(model)
    got = {name.replace("inner.", ""): value for name, value in values(model).items()}
    assert_close(got, reference("uneven"), "around")


def several_forwards_and_then_their_backwards() -> None:
    for frees in (None, False):
        model = sharded("ours", build("uneven"), reshard_after_forward=frees)
        plain = build("uneven")
        ours, theirs = [], []
        for whole, mine in batches(3):
            ours.append(loss_of(model, mine))
            theirs.append(loss_of(plain, whole))
        for index in (0, 2, 1):
            ours[index].backward()
            theirs[index].backward()
        for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, msg=name)


def inference_first_and_between() -> None:
    model = sharded("ours", build("uneven"))
    optimizer = sgd(model)
    for _, mine in batches(4):
        with torch.inference_mode():
            before = loss_of(model, mine)
        loss = loss_of(model, mine)
        assert torch.equal(loss.detach(), before)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.eval()
        with torch.no_grad():
            loss_of(model, mine)
        model.train()
    assert_close(values(model), reference("uneven"), "inference between")


def steps_inside_the_backward() -> None:
    model = sharded("ours", build("uneven"))
    optimizers = {p: torch.optim.SGD([p], lr=0.2, momentum=0.9) for p in model.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for _, mine in batches(4):
        loss_of(model, mine).backward()
        assert all(p.grad is None for p in model.parameters())
    assert_close(values(model), reference("uneven"), "inside the backward")


def gradient_scaling() -> None:
    results = []
    for engine in ("torch", "ours"):
        model = sharded(engine, build("even"))
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        losses = []
        for step, (_, mine) in enumerate(batches(4)):
            loss = loss_of(model, mine)
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert scaler.get_scale() == 2.0**9  # one step was skipped
        results.append((losses, values(model)))
    assert results[0][0] == results[1][0]
    assert_equal(results[1][1], results[0][1], "scaled")


class Block(nn.Module):
    """What users compile: a forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def of_blocks() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))


def compiled_blocks() -> None:
    wanted = reference(of_blocks())
    torch._inductor.config.compile_threads = 1  # no processes of its own
    cases = list(itertools.product(("eager", "aot_eager"), ("before", "after", "in place")))
    if shutil.which("g++"):
        cases.append(("inductor", "after"))
    for backend, where in cases:
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend(backend)
        model = of_blocks()
        for index in (0, 1):
            if where == "before":
                model[index] = sharding.fully_shard(torch.compile(model[index], backend=graphs))
            else:
                sharding.fully_shard(model[index])
                if where == "after":
                    model[index] = torch.compile(model[index], backend=graphs)
                else:
                    model[index].compile(backend=graphs)
        sharding.fully_shard(model)
        train(model)
        assert_close(values(model), wanted, f"{backend} {where}")
        assert 1 <= graphs.frame_count <= 4, f"{backend} {where}: {graphs.frame_count}"


def double_backward_is_refused() -> None:
    model = sharded("ours", build("even"))
    with pytest.raises(RuntimeError, match="create_graph"):
        loss_of(model, ones()).backward(create_graph=True)
    model.reset_iter_state()
    train(model)


def offloading_to_the_host() -> None:
    model = same_as_torch("uneven", offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert all(p.device.type == "cpu" for p in model.parameters())
    got = sharded("ours", build("uneven"), offload_policy=CPUOffloadPolicy())
    train(got)
    assert_close(values(got), reference("uneven"), "pinned where there is a GPU")


def ranks_that_use_different_parameters() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(WIDTH, 4, bias=False) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[dist.get_rank() % 2](x)

    for apart in (False, True):
        torch.manual_seed(0)
        model: Any = Either()
        for part in model.parts if apart else ():
            # Gathers must come in one order on all ranks, so parts are gathered before, and kept.
            sharding.fully_shard(part, reshard_after_forward=False)
        sharding.fully_shard(model)
        model.set_reduce_scatter_unused_params(True)
        for part in model.parts if apart else ():
            part.unshard()
        model(ones()).sum().backward()
        for part in model.parts:
            wanted = torch.full((4, WIDTH), 1.0)  # 2 on one rank, nothing on the other
            torch.testing.assert_close(part.weight.grad.full_tensor(), wanted)


class Twice(nn.Module):
    """Calls a layer on what it gave."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.layer(torch.tanh(self.layer(x))))
        return output


def a_unit_called_twice_reduces_earlier_sums_once() -> None:
    """docs/engine_differences.md has this: torch reduces them in the middle of the backward."""
    grads, reductions = [], []
    for engine in ("torch", "ours"):
        model = sharded(engine, Twice(), inner="layer")  # type: ignore[arg-type]
        (_, first), (_, second) = batches(2)
        model.set_requires_gradient_sync(False)
        loss_of(model, first).backward()
        model.set_requires_gradient_sync(True)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            loss_of(model, second).backward()
        names = [event.name for event in profiled.events()]
        reductions.append(names.count("c10d::_reduce_scatter_base_"))
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    assert reductions == [3, 2]
    for ours, torchs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, torchs)


test_on_two_ranks = claims(
    2,
    [
        a_unit_called_twice_reduces_earlier_sums_once,
        all_kinds_of_models,
        freeing_or_keeping_after_the_forward,
        bfloat16_with_reductions_in_float32_or_not,
        outputs_in_the_dtype_that_was_asked_for,
        float16_divides_before_and_after,
        clipping_by_torch,
        dim_1,
        foreach_and_fused_optimizers,
        accumulating_with_and_without_reducing,
        gradients_that_are_one_tensor_for_two_parameters_add_up_apart,
        keeping_parameters_over_the_backwards_of_a_step,
        reductions_that_are_not_waited_for_add_up,
        two_forwards_and_one_backward_and_that_again,
        reentrant_checkpointing_inside_and_outside_of_a_unit,
        checkpointing_around_a_unit_without_reentrance,
        several_forwards_and_then_their_backwards,
        inference_first_and_between,
        steps_inside_the_backward,
        gradient_scaling,
        compiled_blocks,
        double_backward_is_refused,
        offloading_to_the_host,
        ranks_that_use_different_parameters,
    ],
)


# Four ranks --------------------------------------------------------------------------------------


def four_ranks_equal_the_unsharded_model_and_torch() -> None:
    for kind, frees in itertools.product(
        ("even", "uneven", "tied", "partly_frozen"), (None, False)
    ):
        results = {}
        for engine in ("torch", "ours"):
            model = sharded(engine, build(kind), reshard_after_forward=frees)
            train(model)
            results[engine] = values(model)
        assert_close(results["ours"], reference(kind), f"{kind} {frees}")
        assert_close(results["ours"], results["torch"], f"{kind} {frees}")


def hybrid_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def hybrid_sharding_2x2() -> None:
    mesh = hybrid_mesh()
    for kind in ("uneven", "tied"):
        model = sharded("ours", build(kind), mesh=mesh)
        assert all(p.placements == (Replicate(), Shard(0)) for p in model.parameters())
        train(model)
        assert_close(values(model), reference(kind), kind)
        theirs = sharded("torch", build(kind), mesh=mesh)
        train(theirs)
        assert_close(values(model), values(theirs), kind)


def hybrid_accumulation_that_postpones_the_all_reduce() -> None:
    model, plain = sharded("ours", build("uneven"), mesh=hybrid_mesh()), build("uneven")
    for step, (whole, mine) in enumerate(batches(3)):
        model.set_requires_all_reduce(step == 2)
        loss_of(model, mine).backward()
        loss_of(plain, whole).backward()
        if step < 2:
            assert all(p.grad is None for p in model.parameters())
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, msg=name)


def tensor_parallel_model(mesh: DeviceMesh, hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 8),
        nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 8)),
        nn.Linear(8, 3),
    )
    plan = {"1.0": ColwiseParallel(), "1.2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def with_tensor_parallelism_2x2() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for hidden in (8, 12):
        results = {}
        for engine in ("torch", "ours"):
            model = tensor_parallel_model(mesh["tp"], hidden)
            sharded(engine, model, mesh=mesh["dp"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
            for step in range(4):
                # Data differs over dp and is the same over tp.
                generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
                loss_of(model, torch.randn(4, WIDTH, generator=generator)).backward()
                optimizer.step()
                optimizer.zero_grad()
            results[engine] = values(model)
            for name, param in model.named_parameters():
                wanted = results["torch"][name]
                if name == "1.0.weight":
                    assert isinstance(param, DTensor) and param.device_mesh.ndim == 2
                    assert "StridedShard" in str(param.placements)
                torch.testing.assert_close(param.full_tensor(), wanted)
        assert_equal(results["ours"], results["torch"], f"hidden {hidden}")
        torch.manual_seed(0)
        plain = nn.Sequential(
            nn.Linear(WIDTH, 8),
            nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 8)),
            nn.Linear(8, 3),
        )
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
        for step in range(4):
            whole = [
                torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dp))
                for dp in range(2)
            ]
            loss_of(plain, torch.cat(whole)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(results["ours"], values(plain), f"hidden {hidden}")


def hybrid_sharding_with_tensor_parallelism() -> None:
    names = ("replicate", "shard", "tp")
    for shape in ((2, 1, 2), (1, 2, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        results = {}
        for engine in ("torch", "ours"):
            model = tensor_parallel_model(mesh["tp"], 8)
            sharded(engine, model, mesh=mesh["replicate", "shard"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
            for seed in range(3):
                generator = torch.Generator().manual_seed(10 * seed + dist.get_rank() // 2)
                loss_of(model, torch.randn(4, WIDTH, generator=generator)).backward()
                optimizer.step()
                optimizer.zero_grad()
            results[engine] = values(model)
            placements = [str(p.placements) for p in model.parameters()]
            results[engine + " placements"] = placements  # type: ignore[assignment]
        assert results["ours placements"] == results["torch placements"]
        assert_equal(results["ours"], results["torch"], f"{shape}")


def resharding_over_fewer_ranks_after_the_forward() -> None:
    for kind, precision in (
        ("uneven", MixedPrecisionPolicy()),
        ("even", MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    ):
        results = []
        for frees in (2, True):
            model = sharded("ours", build(kind), reshard_after_forward=frees, mp_policy=precision)
            losses = train(model)
            results.append((losses, values(model)))
        assert results[0][0] == results[1][0]
        assert_equal(results[0][1], results[1][1], kind)


test_on_four_ranks = claims(
    4,
    [
        four_ranks_equal_the_unsharded_model_and_torch,
        hybrid_sharding_2x2,
        hybrid_accumulation_that_postpones_the_all_reduce,
        with_tensor_parallelism_2x2,
        hybrid_sharding_with_tensor_parallelism,
        resharding_over_fewer_ranks_after_the_forward,
    ],
)
