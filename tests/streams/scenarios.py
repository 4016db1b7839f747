"""What trainings do: each function is a scenario, for the surfaces that its line in the table has.

run_one("plain", "ours", "fully") -> Report
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import sharding
from sharding import Blocks, Whole
from tests.streams.training import SURFACES, WIDTH, Block, Net, Run

__all__ = ["SCENARIOS", "Scenario"]

BF16, FP32 = torch.bfloat16, torch.float32
FULLY, FLAT = ("fully",), ("flat", "orig")


class Scenario(NamedTuple):
    """One scenario. `torchs`: on which surfaces torch's own class is run as a control.

    Of torch's wrapper these are a few: others it does not survive here, or has races in (it gathers
    by hand without waiting for the step of the optimizer).
    """

    name: str
    body: Callable[[Run], None]
    surfaces: tuple[str, ...]
    torchs: tuple[str, ...]
    world: int
    ranks_min: int
    """How many real ranks it takes at least; a world of one rank takes no other number."""
    captures: bool = False
    """Whether it records collectives as a part of a graph, which those of gloo cannot be."""


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    surfaces: tuple[str, ...] = SURFACES,
    *,
    torchs: tuple[str, ...] | None = None,
    world: int = 8,
    ranks_min: int = 1,
    captures: bool = False,
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Put a function into the table."""

    def add(body: Callable[[Run], None]) -> Callable[[Run], None]:
        name = body.__name__
        controls = tuple(one for one in FULLY if one in surfaces) if torchs is None else torchs
        SCENARIOS[name] = Scenario(name, body, surfaces, controls, world, ranks_min, captures)
        return body

    return add


# --- what is sharded, and how --------------------------------------------------------------------


@scenario(torchs=SURFACES)
def plain(run: Run) -> None:
    run.train(run.wrap(run.net(blocks=4)), steps=3)


@scenario(torchs=SURFACES)
def frozen_units(run: Run) -> None:
    model = run.net()
    model.blocks[1].requires_grad_(False)
    run.train(run.wrap(model))


@scenario(("fully", "orig"))
def frozen_members(run: Run) -> None:
    model = run.net()
    model.blocks[1].up.weight.requires_grad_(False)
    model.first.requires_grad_(False)
    run.train(run.wrap(model))


@scenario(torchs=SURFACES)
def shared_modules(run: Run) -> None:
    model = run.net()
    model.blocks.append(model.blocks[0])
    run.train(run.wrap(model, inner=["blocks.1"]))


@scenario(torchs=SURFACES)
def tied_parameters(run: Run) -> None:
    model = run.net()
    model.blocks[0].down.weight = nn.Parameter(model.blocks[0].up.weight.detach().t().contiguous())
    tied = model.blocks[0]
    tied.again = run.net(nn.Linear, WIDTH, 23)
    tied.again.weight = tied.up.weight
    run.train(run.wrap(model))


class Twice(Net):
    """Calls its first block twice, at once: the second gather waits for nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks[1](self.blocks[0](self.blocks[0](self.first(x)))))


@scenario(torchs=SURFACES)
def a_module_called_twice(run: Run) -> None:
    run.train(run.wrap(run.net(Twice, blocks=2)))


@scenario(FLAT)
def every_strategy(run: Run) -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        run.train(run.wrap(run.net(), sharding_strategy=ShardingStrategy[strategy]))


@scenario(FLAT)
def no_shard_in_low_precision(run: Run) -> None:
    kind = ShardingStrategy.NO_SHARD
    run.train(run.wrap(run.net(), sharding_strategy=kind, low=(BF16, FP32, None)))


@scenario(torchs=SURFACES)
def repeated_over_an_axis(run: Run) -> None:
    run.train(run.wrap(run.net(), mesh=(2, 4)), steps=3)


@scenario(FLAT)
def hybrid_that_keeps_parameters(run: Run) -> None:
    kind = ShardingStrategy._HYBRID_SHARD_ZERO2
    run.train(run.wrap(run.net(), mesh=(2, 4), sharding_strategy=kind))


def _whole_or_in_blocks(param: Any) -> Any:
    if param.dim() == 2:
        return Whole() if param.shape[0] % 2 else Blocks((4, 8))
    return None


@scenario(("orig",), torchs=())
def whole_parameters_and_blocks(run: Run) -> None:
    run.train(run.wrap(run.net(blocks=4), shard_placement_fn=_whole_or_in_blocks), steps=3)


@scenario(("orig",), torchs=())
def whole_parameters_and_blocks_in_low_precision(run: Run) -> None:
    model = run.wrap(
        run.net(),
        mesh=(2, 4),
        low=(BF16, FP32, None),
        offload=True,
        shard_placement_fn=_whole_or_in_blocks,
    )
    optimizer = run.sgd(model)
    for _ in range(2):
        model(run.batch()).sum().backward()
        model(run.batch()).sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


@scenario(FULLY)
def kept_after_forward(run: Run) -> None:
    run.train(run.wrap(run.net(), reshard_after_forward=False))


@scenario(FULLY)
def freed_after_forward(run: Run) -> None:
    run.train(run.wrap(run.net(), reshard_after_forward=True))


@scenario(FULLY, ranks_min=4)
def smaller_shards_after_forward(run: Run) -> None:
    run.train(run.wrap(run.net(), reshard_after_forward=2), steps=3)


@scenario(FULLY, ranks_min=4)
def smaller_shards_of_a_module_called_twice(run: Run) -> None:
    run.train(run.wrap(run.net(Twice, blocks=2), reshard_after_forward=2))


@scenario(FULLY)
def cut_along_another_dim(run: Run) -> None:
    model = run.net()
    for block in model.blocks:
        block.up = run.net(nn.Linear, WIDTH, 24)
        block.down = run.net(nn.Linear, 24, WIDTH)
    run.train(
        run.wrap(
            model,
            shard_placement_fn=lambda p: Shard(1 if p.shape[-1] % 8 == 0 and p.dim() == 2 else 0),
        )
    )


@scenario(FULLY, ranks_min=4)
def a_mesh_for_each_parameter(run: Run) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    axis = run.mesh(2, 4)["shard"]
    # Before torch 2.12, only ours can do this.
    theirs = getattr(common, "ShardPlacementResult", None)
    fewer = theirs(None, common.FSDPMeshInfo(axis, shard_mesh_dim=0)) if theirs else None
    fewer = fewer or sharding.ShardPlacementResult(None, axis)

    def place(param: nn.Parameter) -> Any:
        return fewer if param.shape[0] == 23 else None

    model = run.wrap(run.net(), low=(BF16, FP32, None), shard_placement_fn=place)
    optimizer = run.sgd(model)
    run.train(model, steps=2, optimizer=optimizer)
    model.blocks[0].unshard(async_op=True)
    run.train(model, steps=1, optimizer=optimizer)


class Local(Net):
    """Has a parameter that is cut over other axes of the mesh."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local: Any = self.weight
        return super().forward(x) + local.to_local().sum()


AXES = ("dp", "ep", "tp")


def _cut_over_two_axes(run: Run) -> tuple[Any, Any]:
    """A model, and the axis of data of its mesh."""
    mesh = run.mesh(2, 2, 2, names=AXES)
    bare = run.net(Local)
    local = run.net(nn.Linear, 6, WIDTH).weight.detach()
    cut = DTensor.from_local(local, mesh["ep", "tp"], [Shard(0), Shard(0)], run_check=False)
    bare.weight = nn.Parameter(cut)
    return bare, mesh["dp"]


@scenario(FULLY, ranks_min=8)
def tensor_parallelism_over_two_axes(run: Run) -> None:
    model, data = _cut_over_two_axes(run)
    for unit in (*model.blocks, model):
        model = run.module.fully_shard(unit, mesh=data)
    run.models.append(model)
    run.train(model, steps=3)


@scenario(FLAT, torchs=(), ranks_min=8)
def tensor_parallelism_over_two_axes_in_the_wrapper(run: Run) -> None:
    bare, data = _cut_over_two_axes(run)
    orig = run.surface == "orig"
    model = run.module.FullyShardedDataParallel(
        bare, device_mesh=data, device_id=run.device, use_orig_params=orig
    )
    run.models.append(model)
    run.train(model, steps=3)


class OnOneMesh(nn.Module):
    """All of its parameters lie on one mesh for everything."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        for name, rows in (("first", 12), ("second", 7)):
            placements = [Replicate(), Replicate(), Shard(0)]
            whole = DTensor.from_local(torch.ones(rows, 5), mesh, placements, run_check=False)
            self.register_parameter(name, nn.Parameter(whole))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        params: list[Any] = list(self.parameters())
        return sum((one.to_local().square().sum() for one in params), x.sum())


@scenario(FULLY, ranks_min=8)
def parameters_on_a_mesh_for_everything(run: Run) -> None:
    from sharding import DataParallelMeshDims

    mesh = run.mesh(2, 2, 2, names=("dp", "cp", "tp"))
    for data in (
        DataParallelMeshDims(shard=("dp", "cp")),
        DataParallelMeshDims(shard="cp", replicate="dp"),
    ):
        model = run.net(OnOneMesh, mesh)
        model = run.module.fully_shard(model, mesh=mesh, dp_mesh_dims=data)
        run.models.append(model)
        run.train(model, steps=3)


@scenario(world=1)
def one_rank_alone(run: Run) -> None:
    run.train(run.wrap(run.net(), mesh=(1,), low=(BF16, FP32, None)), steps=3)


# --- precision, offload --------------------------------------------------------------------------


@scenario(torchs=SURFACES)
def low_precision_parameters(run: Run) -> None:
    run.train(run.wrap(run.net(), low=(BF16, FP32, None)), steps=3)


@scenario()
def low_precision_and_accumulation_over_an_axis(run: Run) -> None:
    model = run.wrap(run.net(), mesh=(2, 4), low=(BF16, BF16, None))
    optimizer = run.sgd(model)
    for _ in range(2):
        model(run.batch()).sum().backward()
        model(run.batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario()
def low_precision_everywhere(run: Run) -> None:
    run.train(run.wrap(run.net(), low=(BF16, BF16, BF16)))


@scenario()
def low_precision_reductions(run: Run) -> None:
    run.train(run.wrap(run.net(), low=(None, BF16, None)))


@scenario(FLAT)
def low_precision_gradients_kept(run: Run) -> None:
    from torch.distributed.fsdp import MixedPrecision

    run.dtypes.add(BF16)
    precision = MixedPrecision(BF16, BF16, keep_low_precision_grads=True)
    model = run.wrap(run.net(), mixed_precision=precision)
    for _ in range(2):
        model(run.batch()).sum().backward()
        model(run.batch()).sum().backward()
        model.zero_grad()


@scenario(torchs=SURFACES)
def shards_in_the_hosts_memory(run: Run) -> None:
    run.train(run.wrap(run.net(), offload=True), steps=3)


@scenario()
def offload_in_low_precision(run: Run) -> None:
    run.train(run.wrap(run.net(), offload=True, low=(BF16, FP32, None)), steps=3)


@scenario()
def offload_with_accumulation(run: Run) -> None:
    model = run.wrap(run.net(), offload=True)
    optimizer = run.sgd(model)
    for _ in range(2):
        model(run.batch()).sum().backward()
        model(run.batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(("fully", "orig"))
def offload_and_hooks_that_look_at_gradients(run: Run) -> None:
    model = run.wrap(run.net(), offload=True)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    run.train(model)


@scenario(("fully",))
def offload_over_an_axis_and_hooks(run: Run) -> None:
    model = run.wrap(run.net(), mesh=(2, 4), offload=True)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    run.train(model)


# Of torch's classes only the user may make the host wait for what the forward still copies.
@scenario(torchs=())
def offload_and_evaluation(run: Run) -> None:
    model = run.wrap(run.net(), offload=True)
    for _ in range(2):
        with torch.no_grad():
            model(run.batch())
            for param in model.parameters():
                param.mul_(0.5)  # by the host
        run.train(model, steps=1)


# --- gradients -----------------------------------------------------------------------------------


@scenario(torchs=SURFACES)
def accumulation(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    for _ in range(2):
        for _ in range(3):
            model(run.batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _without_reduction(run: Run, model: Any) -> Any:
    if run.is_flat:
        return model.no_sync()
    stack = contextlib.ExitStack()
    model.set_requires_gradient_sync(False)
    stack.callback(model.set_requires_gradient_sync, True)
    return stack


@scenario()
def accumulation_without_reduction(run: Run) -> None:
    model = run.wrap(run.net(), low=(BF16, FP32, None))
    optimizer = run.sgd(model)
    for _ in range(2):
        with _without_reduction(run, model):
            model(run.batch()).sum().backward()
            model(run.batch()).sum().backward()
        model(run.batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario()
def offload_and_accumulation_without_reduction(run: Run) -> None:
    model = run.wrap(run.net(), offload=True)
    optimizer = run.sgd(model)
    for _ in range(2):
        with _without_reduction(run, model):
            model(run.batch()).sum().backward()
            model(run.batch()).sum().backward()
        model(run.batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario()
def accumulation_before_a_backward_that_misses_units(run: Run) -> None:
    class Skipping(Net):
        skips = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                x = x if number == 1 and self.skips else block(x)
            return self.last(x)

    bare = run.net(Skipping)
    model = run.wrap(bare)
    optimizer = run.sgd(model)
    for _ in range(2):
        with _without_reduction(run, model):
            model(run.batch()).sum().backward()
        bare.skips = True
        model(run.batch()).sum().backward()
        bare.skips = False
        optimizer.step()
        optimizer.zero_grad()


@scenario(FULLY)
def sums_that_wait_for_the_replicas(run: Run) -> None:
    model = run.wrap(run.net(), mesh=(2, 4))
    optimizer = run.sgd(model)
    for _ in range(2):
        model.set_requires_all_reduce(False)
        model(run.batch()).sum().backward()
        model.set_requires_all_reduce(True)
        model(run.batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(FULLY)
def sums_reduced_by_a_backward_that_misses_the_unit(run: Run) -> None:
    class Skipping(Net):
        skips = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) if self.skips else self.blocks[0](self.first(x)))

    bare = run.net(Skipping)
    bare.first.requires_grad_(False)
    bare.last.requires_grad_(False)
    model = run.wrap(bare, mesh=(2, 4))
    for _ in range(2):
        model(run.batch()).sum().backward()
        model.set_requires_all_reduce(False)
        model(run.batch()).sum().backward()
        model.set_requires_all_reduce(True)
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
        bare.skips = True
        model(run.batch().requires_grad_()).sum().backward()  # nothing else is reduced
        bare.skips = False


@scenario(FULLY)
def values_assigned_by_a_load(run: Run) -> None:
    model = run.wrap(run.net())
    for _ in range(2):
        run.train(model, steps=1)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)


@scenario(FULLY)
def several_backwards_before_reductions_are_waited_for(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    for _ in range(2):
        model.set_is_last_backward(False)
        model(run.batch()).sum().backward()
        model.set_is_last_backward(True)
        model(run.batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(FULLY)
def unused_parameters_reduced_as_zeros(run: Run) -> None:
    class Unused(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.blocks[0](self.first(x)))

    model = run.wrap(run.net(Unused))
    model.set_reduce_scatter_unused_params(True)
    run.train(model)


@scenario()
def clipping(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    for _ in range(2):
        model(run.batch()).sum().backward()
        if run.is_flat:
            model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@scenario()
def clipping_with_offload(run: Run) -> None:
    model = run.wrap(run.net(), offload=True)
    optimizer = run.sgd(model)
    for _ in range(2):
        model(run.batch()).sum().backward()
        if run.is_flat:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


@scenario(FULLY)
def clipping_of_all_at_once(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    for _ in range(2):
        model(run.batch()).sum().backward()
        grads = [param.grad for param in model.parameters()]
        norm = nn.utils.get_total_norm(grads, foreach=True)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()


@scenario(torchs=SURFACES)
def fused_optimizers(run: Run) -> None:
    model = run.wrap(run.net())
    for make in (torch.optim.Adam, torch.optim.AdamW):
        run.train(model, optimizer=make(model.parameters(), lr=0.1, fused=True))


@scenario(("fully", "orig"))
def the_optimizer_in_the_backward(run: Run) -> None:
    model = run.wrap(run.net())
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(run.batch()).sum().backward()


@scenario(FLAT)
def comm_hooks(run: Run) -> None:
    from torch.distributed.algorithms._comm_hooks import default_hooks

    run.dtypes.add(BF16)
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = run.wrap(run.net(), sharding_strategy=ShardingStrategy[strategy])
        state = default_hooks.LowPrecisionState(torch.distributed.group.WORLD)
        model.register_comm_hook(state, default_hooks.bf16_compress_hook)
        run.train(model)


@scenario(("orig",), torchs=())
def comm_hooks_with_blocks(run: Run) -> None:
    from torch.distributed.algorithms._comm_hooks import default_hooks

    run.dtypes.add(BF16)
    model = run.wrap(run.net(), shard_placement_fn=_whole_or_in_blocks)
    state = default_hooks.LowPrecisionState(torch.distributed.group.WORLD)
    model.register_comm_hook(state, default_hooks.bf16_compress_hook)
    run.train(model, steps=3)


@scenario(FULLY)
def a_group_of_its_own_for_reductions(run: Run) -> None:
    model = run.wrap(run.net(blocks=4))
    model.set_separate_reduce_scatter_group()
    run.train(model)


@scenario(FULLY)
def a_hook_on_sums(run: Run) -> None:
    model = run.wrap(run.net(), mesh=(2, 4))
    for unit in run.units(model):
        unit.set_all_reduce_hook(lambda sums: sums.mul_(0.5))
    run.train(model)


@scenario(FULLY)
def a_hook_on_sums_of_one_axis(run: Run) -> None:
    model = run.wrap(run.net(), low=(BF16, FP32, None))
    for unit in run.units(model):
        unit.set_all_reduce_hook(lambda sums: sums.mul_(0.5))
    run.train(model)


def _hooked_on_streams(run: Run, **options: Any) -> Any:
    model = run.wrap(run.net(), low=(BF16, FP32, None), **options)
    side = run.side_stream()
    for unit in run.units(model):
        unit.set_all_reduce_hook(lambda sums: sums.mul_(0.5), stream=side)
    return model


@scenario(FULLY)
def a_hook_on_a_stream_of_the_user(run: Run) -> None:
    run.train(_hooked_on_streams(run), steps=3)


@scenario(FULLY, torchs=())
def a_hook_on_a_stream_of_the_user_with_offload(run: Run) -> None:
    model = _hooked_on_streams(run, offload=True)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    run.train(model)


class _Collective:
    """A user's own collective, with memory that comes and goes."""

    def __init__(self, collective: Callable[..., Any]) -> None:
        self._collective = collective

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, **kwargs: Any) -> Any:
        return self._collective(output_tensor, input_tensor, **kwargs)


@scenario(FULLY, torchs=())
def collectives_of_the_user(run: Run) -> None:
    model = run.wrap(run.net(), low=(BF16, FP32, None))
    distributed: Any = torch.distributed
    for unit in run.units(model):
        unit.set_custom_all_gather(_Collective(distributed.all_gather_into_tensor))
        unit.set_custom_reduce_scatter(_Collective(distributed.reduce_scatter_tensor))
    run.train(model, steps=3)


@scenario(torchs=SURFACES)
def reductions_in_a_dtype_of_small_range(run: Run) -> None:
    run.train(run.wrap(run.net(), low=(None, torch.float16, None)))


# --- when parameters are gathered ----------------------------------------------------------------


@scenario(FLAT)
def prefetch_of_every_kind(run: Run) -> None:
    for backward in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        for forward in (False, True):
            options = {"backward_prefetch": backward, "forward_prefetch": forward}
            run.train(run.wrap(run.net(blocks=3), **options), steps=3)


@scenario(FULLY)
def explicit_prefetch(run: Run) -> None:
    model = run.wrap(run.net(blocks=3))
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    run.train(model, steps=3)


@scenario(FULLY)
def gathers_on_the_stream_of_compute(run: Run) -> None:
    model = run.wrap(run.net(blocks=3), low=(BF16, FP32, None))
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    optimizer = run.sgd(model, lr=0.01)
    for there in (True, False, True):
        model._set_unshard_async_op(there)
        run.train(model, steps=2, optimizer=optimizer)
        model.unshard(async_op=True)


@scenario(FLAT)
def no_limit_to_gathers(run: Run) -> None:
    run.train(run.wrap(run.net(), limit_all_gathers=False), steps=3)


def _unshard(run: Run, unit: Any) -> Any:
    return unit._unshard(async_op=True) if run.is_flat else unit.unshard(async_op=True)


@scenario()
def unshard_early(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    run.train(model, steps=1, optimizer=optimizer)
    for waits in (True, False):
        handles = [_unshard(run, unit) for unit in run.units(model)[1:]]
        if waits:
            for handle in handles:
                handle.wait()
        run.train(model, steps=1, optimizer=optimizer)


@scenario()
def one_rank_on_an_axis(run: Run) -> None:
    model = run.wrap(run.net(), mesh=(8, 1), low=(BF16, FP32, None))
    optimizer = run.sgd(model)
    run.train(model, steps=1, optimizer=optimizer)
    for _ in range(2):
        for unit in run.units(model):
            _unshard(run, unit)
        run.train(model, steps=1, optimizer=optimizer)


@scenario(("fully",))
def offload_over_an_axis(run: Run) -> None:
    run.train(run.wrap(run.net(), mesh=(2, 4), offload=True), steps=3)


@scenario(world=1)
def unshard_early_on_one_rank(run: Run) -> None:
    model = run.wrap(run.net(), mesh=(1,), low=(BF16, FP32, None))
    optimizer = run.sgd(model)
    for waits in (True, False, True):
        handles = [_unshard(run, unit) for unit in run.units(model)]
        if waits:
            for handle in handles:
                handle.wait()
        run.train(model, steps=1, optimizer=optimizer)


def _unshard_all(run: Run, model: Any) -> None:
    for unit in run.units(model):
        _unshard(run, unit)


def _free(run: Run, model: Any) -> None:
    for unit in run.units(model):
        unit.fsdp_unit.store.reshard() if run.is_flat else unit.reshard()


def _summon(run: Run, model: Any) -> None:
    if run.is_flat:
        with run.module.FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)


def _clip(run: Run, model: Any) -> None:
    if run.is_flat:
        model.clip_grad_norm_(1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _prefetch(run: Run, model: Any) -> None:
    if not run.is_flat:
        model.set_modules_to_forward_prefetch(list(model.blocks))
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
        model.blocks[0].unshard(async_op=True)


def _state_dict(run: Run, model: Any) -> None:
    model.state_dict()  # of the wrapper a full one, for which ranks would have to be there


BY_HAND: tuple[Callable[[Run, Any], object], ...] = (
    _unshard_all,
    _free,
    _summon,
    _clip,
    _prefetch,
    _state_dict,
)


def _by_hand_first(run: Run, mesh: tuple[int, ...]) -> None:
    """What can be called before the root is known, each by itself and behind a gather."""
    calls = [call for call in BY_HAND if call is not _state_dict or mesh == (1,) or not run.is_flat]
    for low in (None, (BF16, FP32, None)):
        for is_gathering in (False, True):
            for call in calls:
                model = run.wrap(run.net(), mesh=mesh, low=low)
                if is_gathering:
                    _unshard_all(run, model)
                call(run, model)
                run.train(model, steps=2)


@scenario(torchs=(), world=1)
def by_hand_before_the_first_forward_of_one_rank(run: Run) -> None:
    _by_hand_first(run, (1,))


@scenario(torchs=())
def by_hand_before_the_first_forward_on_an_axis_of_one(run: Run) -> None:
    _by_hand_first(run, (8, 1))


@scenario(torchs=())
def by_hand_before_the_first_forward(run: Run) -> None:
    _by_hand_first(run, (8,))


@scenario(FLAT, torchs=())
def wrapped_again_after_training(run: Run) -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        options: dict[str, Any] = {"sharding_strategy": strategy}
        names = ("first", "last", "blocks.0", "blocks.1")
        model = run.wrap(run.net(), inner=names, **options)
        for _ in range(2):
            run.train(model, steps=2, optimizer=run.sgd(model, lr=0.03))
            model(run.batch())
            model = run.wrap(model.module, inner=(), **options)
        run.train(model, steps=2)


@scenario()
def unshard_before_values_are_written(run: Run) -> None:
    model = run.wrap(run.net())
    run.train(model, steps=1)
    for _ in range(2):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        _unshard(run, run.units(model)[1])
        run.train(model, steps=1)


@scenario(FULLY)
def unshard_late(run: Run) -> None:
    class Late(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            handles = [block.unshard(async_op=True) for block in self.blocks]
            for block, handle in zip(self.blocks, handles, strict=True):
                handle.wait()
                x = block(x)
            return self.last(x)

    run.train(run.wrap(run.net(Late)), steps=3)


@scenario(FULLY, torchs=())
def unshard_and_reshard_without_use(run: Run) -> None:
    model = run.wrap(run.net())
    for _ in range(2):
        for block in model.blocks:
            block.unshard(async_op=True)
            block.reshard()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)  # what the gathers were reading
        run.train(model, steps=1)


@scenario(torchs=())
def a_unit_alone(run: Run) -> None:
    model = run.wrap(run.net())
    for _ in range(2):
        run.train(model, steps=1)
        with torch.no_grad():
            model.blocks[0](run.batch(4, WIDTH))


@scenario(torchs=())
def values_written_between_forward_and_backward(run: Run) -> None:
    model = run.wrap(run.net())
    for _ in range(2):
        loss = model(run.batch()).sum()
        with torch.no_grad():
            for param in model.blocks.parameters():  # the root's are still gathered
                param.mul_(0.5)
        loss.backward()


def _extended(run: Run, *, releases: bool = False, alone: bool = False) -> Any:
    """A model with an extension that makes a tensor of its own; `releases` what was gathered.
    `alone`: it is all of its unit, so that nothing is packed.
    """
    run.dtypes.add(BF16)

    def before(mesh: Any) -> Any:
        return (local.to(BF16),), None

    def after(gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        if out is None:
            made = gathered[0].to(dtype)
            return made, (made,)
        out.data.copy_(gathered[0])  # no change that autograd should know of
        return None

    model = run.net()
    if alone:
        model.blocks[0] = run.net(functools.partial(nn.Linear, bias=False), WIDTH, WIDTH)
    else:
        model.blocks[0].up = run.net(nn.Linear, WIDTH, 24)
        model.blocks[0].down = run.net(nn.Linear, 24, WIDTH)
    model = run.wrap(model)
    local: Any = (model.blocks[0] if alone else model.blocks[0].up).weight._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after
    local.fsdp_should_release_all_gather_outputs_after_post_all_gather = lambda: releases
    return model


@scenario(FULLY, torchs=())
def what_an_extension_makes(run: Run) -> None:
    for releases, alone in ((False, False), (True, False), (True, True)):
        run.train(_extended(run, releases=releases, alone=alone), steps=3)


class Wide(Net):
    """Blocks of 13 MiB, more of them than may be gathered ahead."""

    def __init__(self) -> None:
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(Block(WIDTH, 100_000) for _ in range(8))


@scenario()
def more_units_than_may_be_gathered_ahead(run: Run) -> None:
    run.train(run.wrap(run.net(Wide)), steps=1)


@scenario(FULLY)
def kept_after_backward(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    for _ in range(2):
        model.set_reshard_after_backward(False)
        model(run.batch()).sum().backward()
        model.set_reshard_after_backward(True)
        run.train(model, steps=1, optimizer=optimizer)


@scenario(FULLY, torchs=())
def gathered_memory_kept(run: Run) -> None:
    for mesh in ((8,), (8, 1)):
        model = run.wrap(run.net(Twice), mesh=mesh, low=(BF16, FP32, None))
        optimizer = run.sgd(model, lr=0.01)
        model.set_keep_unsharded_storage(True)
        run.train(model, steps=3, optimizer=optimizer)
        model.set_keep_unsharded_storage(False)
        run.train(model, optimizer=optimizer)


@scenario(FULLY, torchs=())
def backwards_ended_by_hand(run: Run) -> None:
    for mesh, offload in (((8,), False), ((8,), True), ((2, 4), False)):
        model = run.wrap(run.net(), mesh=mesh, low=(BF16, FP32, None), offload=offload)
        optimizer = run.sgd(model)
        model.set_manual_backward_finalization(True)
        for is_async in (False, True):
            model.set_requires_gradient_sync(False)
            model(run.batch()).sum().backward()
            model.set_requires_gradient_sync(True)
            model(run.batch()).sum().backward()
            handle = model.finalize_backward(async_op=is_async)
            if is_async:
                handle.wait()
            optimizer.step()
            optimizer.zero_grad()


@scenario(FLAT)
def full_parameters_summoned(run: Run) -> None:
    kind = run.module.FullyShardedDataParallel
    model = run.wrap(run.net())
    optimizer = run.sgd(model, lr=0.03)
    for writeback in (True, False):
        model(run.batch()).sum().backward()
        optimizer.step()
        with kind.summon_full_params(model, writeback=writeback), torch.no_grad():
            for param in model.parameters():
                param.add_(0.1)
        optimizer.zero_grad()
        run.train(model, steps=1, optimizer=optimizer)


@scenario(("orig",))
def full_gradients_summoned(run: Run) -> None:
    kind = run.module.FullyShardedDataParallel
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    for _ in range(2):
        model(run.batch()).sum().backward()
        with kind.summon_full_params(model, with_grads=True), torch.no_grad():
            for param in model.parameters():
                param.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()


# --- recomputing, order, streams of the user -----------------------------------------------------


@scenario()
def activation_checkpointing(run: Run) -> None:
    model = run.net()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(
            block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=False
        )
    run.train(run.wrap(model))


@scenario(torchs=SURFACES)
def activations_in_the_hosts_memory(run: Run) -> None:
    model = run.wrap(run.net(), low=(BF16, FP32, None))
    optimizer = run.sgd(model)
    kind = run.device.type
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu(pin_memory=kind != "cpu", device_type=kind):
            loss = model(run.batch()).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(torchs=SURFACES)
def activations_of_blocks_in_the_hosts_memory(run: Run) -> None:
    model = run.net(blocks=3)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = offload_wrapper(block)
    run.train(run.wrap(model))


class Reentrant(Block):
    """Runs reentrant checkpoints inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = super().forward
        return checkpoint(inner, x, use_reentrant=True, preserve_rng_state=False)


@scenario()
def reentrant_checkpointing(run: Run) -> None:
    model = run.net()
    for number in range(len(model.blocks)):
        model.blocks[number] = run.net(Reentrant)
    run.train(run.wrap(model))


@scenario()
def two_roots(run: Run) -> None:
    models = [run.wrap(run.net()), run.wrap(run.net())]
    optimizers = [run.sgd(model) for model in models]
    for _ in range(2):
        for model in models:
            model(run.batch()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@scenario()
def everything_on_a_stream_of_the_user(run: Run) -> None:
    model = run.wrap(run.net())
    side = run.side_stream()
    side.wait_stream(run.current_stream())
    with run.on(side):
        run.train(model, steps=3)


@scenario()
def a_step_on_a_side_stream(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    side = run.side_stream()
    for _ in range(3):
        model(run.batch()).sum().backward()
        side.wait_stream(run.current_stream())
        with run.on(side):
            optimizer.step()
        run.current_stream().wait_stream(side)
        optimizer.zero_grad()


def _replayed(run: Run, step: Callable[[], None]) -> None:
    """Steps as they are, then as a graph: recorded on another stream, as torch does it."""
    side = run.side_stream()
    side.wait_stream(run.current_stream())
    with run.on(side):
        for _ in range(2):
            step()
    run.current_stream().wait_stream(side)
    replay = run.as_graph(step)
    for _ in range(3):
        replay()


@scenario(torchs=(), captures=True)
def a_step_as_a_graph(run: Run) -> None:
    model = run.wrap(run.net(), low=(BF16, FP32, None))
    optimizer = run.sgd(model, lr=0.01, foreach=True)
    batch = run.batch()

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model(batch).sum().backward()  # on the stream that other steps of the training are on
    _replayed(run, step)


@scenario(torchs=(), captures=True)
def a_step_over_an_axis_as_a_graph(run: Run) -> None:
    model = run.wrap(run.net(), mesh=(2, 4))
    optimizer = run.sgd(model, foreach=True)
    batch = run.batch()

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    _replayed(run, step)


@scenario(torchs=("fully",))
def the_optimizer_as_a_graph(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model, foreach=True)
    batch = run.batch()
    model(batch).sum().backward()
    _replayed(run, optimizer.step)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)  # the graph has the memory that they lie in
        model(batch).sum().backward()


@scenario()
def a_forward_on_a_side_stream(run: Run) -> None:
    """Autograd runs the backward on the side stream too; what comes after it does not."""
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    main, side = run.current_stream(), run.side_stream()
    for _ in range(3):
        side.wait_stream(main)
        with run.on(side):
            loss = model(run.batch()).sum()
        main.wait_stream(side)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(torchs=())
def gathered_on_one_stream_and_used_on_another(run: Run) -> None:
    model = run.wrap(run.net()) if run.is_flat else _extended(run)
    main, side = run.current_stream(), run.side_stream()
    optimizer = run.sgd(model)
    for _ in range(3):
        handles = [_unshard(run, unit) for unit in run.units(model)]
        for handle in handles:
            handle.wait()
        side.wait_stream(main)
        with run.on(side):
            loss = model(run.batch()).sum()
        run.batch(1000)  # memory of the stream that they were gathered on
        main.wait_stream(side)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(FULLY)
def gathers_wait_for_the_step_alone(run: Run) -> None:
    for zeroes in (False, True):
        model = run.wrap(run.net())
        optimizer = run.sgd(model)
        side = run.side_stream()
        for _ in range(3):
            model(run.batch()).sum().backward()
            side.wait_stream(run.current_stream())
            with run.on(side):
                optimizer.step()
            model.set_post_optim_event(side.record_event())
            if zeroes:
                optimizer.zero_grad()


@scenario()
def evaluation_then_training(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    for _ in range(2):
        with torch.no_grad():
            model(run.batch())
            model(run.batch())
        run.train(model, steps=1, optimizer=optimizer)


@scenario()
def a_forward_that_raises(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    block = model.blocks[1]
    for _ in range(2):
        handle = block.register_forward_pre_hook(_fail)
        with contextlib.suppress(ValueError):
            model(run.batch()).sum().backward()
        handle.remove()
        run.train(model, steps=1, optimizer=optimizer)


class ByTheHost(Net):
    """Passes through the host's memory, where the backward raises at will.

    In an operation of the device torch ends the process instead: between a hook that raises and the
    caller is its guard of streams, which for a device of Python's does not survive that.
    """

    raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        home = x.device
        x = self.blocks[0](self.first(x)).to("cpu")
        if self.raises:
            x.register_hook(_fail)  # type: ignore[no-untyped-call]
        return self.last(self.blocks[1](x.to(home)))


def _fail(*args: Any) -> None:
    raise ValueError("planted")


@scenario(torchs=())
def a_backward_that_raises(run: Run) -> None:
    bare = run.net(ByTheHost)
    model = run.wrap(bare)
    optimizer = run.sgd(model)
    for _ in range(2):
        bare.raises = True
        with contextlib.suppress(ValueError):
            model(run.batch()).sum().backward()
        bare.raises = False
        if not run.is_flat:
            model.reset_iter_state()
        optimizer.zero_grad()
        run.train(model, steps=1, optimizer=optimizer)


@scenario()
def values_loaded_between_steps(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    for _ in range(2):
        run.train(model, steps=1, optimizer=optimizer)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.zeros_like(param))


@scenario(("orig",))
def values_put_in_place_of_parameters(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    for _ in range(2):
        for param in model.parameters():
            param.data = param.data * 0.5
        run.train(model, steps=1, optimizer=optimizer)


@scenario()
def losses_looked_at(run: Run) -> None:
    model = run.wrap(run.net())
    optimizer = run.sgd(model)
    for _ in range(2):
        loss = model(run.batch()).sum()
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad()


@scenario(FULLY)
def roots_that_share_streams(run: Run) -> None:
    from torch.distributed import fsdp

    models = [run.wrap(run.net()), run.wrap(run.net())]
    share = run.module.share_comm_ctx if run.who == "ours" else fsdp.share_comm_ctx
    share([*run.units(models[0]), *run.units(models[1])])
    optimizers = [run.sgd(model) for model in models]
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            run.train(model, steps=1, optimizer=optimizer)


def _share_while_there_is_work(run: Run, mesh: tuple[int, ...]) -> None:
    first, second, third = models = [run.wrap(run.net(), mesh=mesh) for _ in range(3)]
    for model in models:
        _unshard_all(run, model)
    run.module.share_comm_ctx([second, first])
    for model in reversed(models):
        model.set_is_last_backward(False)
        for _ in range(2):
            model(run.batch()).sum().backward()
    run.module.share_comm_ctx([third, first, second])
    for model in models:
        model.set_is_last_backward(True)
        run.train(model)


@scenario(FULLY, torchs=())
def streams_shared_while_they_have_work(run: Run) -> None:
    for mesh in ((8, 1), (8,)):
        _share_while_there_is_work(run, mesh)


@scenario(FULLY, torchs=(), world=1)
def streams_shared_while_they_have_work_of_one_rank(run: Run) -> None:
    _share_while_there_is_work(run, (1,))
