"""How gradients are divided, hooks on them, and where collectives have their buffers.

Method: the same calls on torch's classes and on ours, on the same ranks, with gradients that leave
the range of float16 unless they are divided before they are summed. Memory that only other backends
than gloo have is a stand-in that records what is asked of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

import sharding
import sharding.sharded_group
from sharding.engine.torch_seam import group_memory
from tests.sharding.fully_scenarios import ENGINES, claims, whole_mesh

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
PAIRS = ((BF16, None), (BF16, FP32), (FP16, None), (FP16, FP32), (FP32, FP16), (None, FP16))


class Scaled(nn.Module):
    """Its gradients are the input itself: of any size that is wanted, exactly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


SIZES = (1e-7, 0.3, 9e3, 3e4, 4e4, 6e4)


def gradient_inputs() -> torch.Tensor:
    """One row for each size; the ranks' differ a little."""
    sizes = torch.tensor(SIZES) * (1 - 0.01 * dist.get_rank())
    return sizes.view(6, 1).expand(6, 2).contiguous()


def meshes() -> Iterator[DeviceMesh]:
    yield whole_mesh()
    yield init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("rep", "dp"))


def local(tensor: Any) -> torch.Tensor:
    here: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return here


def reduced(engine: str, prepare: Callable[[Any], None], **kwargs: Any) -> torch.Tensor:
    """This rank's gradient of one backward of `fully_shard`."""
    model: Any = ENGINES[engine].fully_shard(Scaled(), **kwargs)
    prepare(model)
    model(gradient_inputs()).backward()
    return local(model.weight.grad)


def nothing(model: Any) -> None:
    pass


def same(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """The same but for rounding: of more than two ranks gloo sums in another order."""
    assert ours.dtype == theirs.dtype and torch.equal(ours.isfinite(), theirs.isfinite()), (
        f"{what}: {ours}, torch {theirs}"
    )
    torch.testing.assert_close(
        ours, theirs, rtol=2e-2, atol=2e-7, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def divisions_are_torchs_in_every_pair_of_dtypes() -> None:
    left_the_range = 0
    for mesh in meshes():
        for param_dtype, reduce_dtype in PAIRS:
            policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
            got = {}
            for engine in ENGINES:
                model: Any = ENGINES[engine].fully_shard(Scaled(), mesh=mesh, mp_policy=policy)
                model(gradient_inputs()).float().backward()
                got[engine] = local(model.weight.grad)
            same(got["ours"], got["torch"], f"{mesh.ndim} axes, {param_dtype}, {reduce_dtype}")
            left_the_range += int((~got["ours"].isfinite()).sum())
    everyone = torch.tensor(left_the_range)
    dist.all_reduce(everyone)
    assert everyone > 0  # else the sizes prove nothing


def the_wrappers_divisions_are_torchs() -> None:
    kinds: Any = {"ours": sharding, "torch": torch_fsdp}
    for mesh in meshes():
        hybrid = mesh.ndim == 2
        strategy = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
        for use_orig_params in (False, True):
            for param_dtype, reduce_dtype in PAIRS[1:]:
                got = {}
                for engine, module in kinds.items():
                    model = module.FullyShardedDataParallel(
                        Scaled(),
                        device_mesh=mesh,
                        sharding_strategy=strategy,
                        mixed_precision=MixedPrecision(param_dtype, reduce_dtype),
                        device_id=torch.device("cpu"),
                        use_orig_params=use_orig_params,
                    )
                    model(gradient_inputs()).float().backward()
                    (param,) = model.parameters()
                    empty = torch.zeros(0)
                    got[engine] = empty if param.grad is None else param.grad
                what = f"{strategy.name}, {use_orig_params}, {param_dtype}, {reduce_dtype}"
                same(got["ours"], got["torch"], what)


def a_divide_factor_is_split_as_torchs_is() -> None:
    for mesh in meshes():
        for factor in (0.5, 2.5, 6.0, 16.0):
            for policy in (MixedPrecisionPolicy(None, FP16), MixedPrecisionPolicy()):

                def prepare(model: Any, factor: float = factor) -> None:
                    model.set_gradient_divide_factor(factor)
                    # gloo cannot multiply before it sums, which torch would ask of it.
                    model.set_force_sum_reduction_for_comms(True)

                ours, theirs = (
                    reduced(engine, prepare, mesh=mesh, mp_policy=policy)
                    for engine in ("ours", "torch")
                )
                same(ours, theirs, f"{mesh.ndim} axes, {factor}, {policy.reduce_dtype}")


def hooks_see_what_torchs_see() -> None:
    for mesh in meshes():
        for sums_only in (False, True):
            for reduce_dtype in (None, BF16, FP16):
                seen: dict[str, list[torch.Tensor]] = {"ours": [], "torch": []}
                got = {}
                for engine, of_one in seen.items():

                    def prepare(model: Any, of_one: list[torch.Tensor] = of_one) -> None:
                        model.set_force_sum_reduction_for_comms(sums_only)  # noqa: B023

                        def hook(out: torch.Tensor) -> None:
                            of_one.append(out.clone())
                            out.add_(1)  # no factor, so that order shows

                        model.set_all_reduce_hook(hook)

                    policy = MixedPrecisionPolicy(None, reduce_dtype)
                    got[engine] = reduced(engine, prepare, mesh=mesh, mp_policy=policy)
                what = f"{mesh.ndim} axes, {sums_only}, {reduce_dtype}"
                same(got["ours"], got["torch"], what)
                (ours,), (theirs,) = seen["ours"], seen["torch"]
                same(ours, theirs[: ours.numel()], f"{what}, in the hook")


def a_stream_for_hooks_is_taken_where_no_axis_has_one() -> None:
    calls = []
    for engine in ENGINES:
        one_axis, two_axes = meshes()
        model: Any = ENGINES[engine].fully_shard(Scaled(), mesh=one_axis)
        model.set_all_reduce_hook(lambda out: calls.append(out.sum()), stream=torch.cpu.Stream())
        model(gradient_inputs()).backward()
        model = ENGINES[engine].fully_shard(Scaled(), mesh=two_axes)
        with pytest.raises(ValueError, match="stream"):
            model.set_all_reduce_hook(lambda out: None, stream=torch.cpu.Stream())
        # There is no all-reduce to leave out: what says so changes nothing.
        model = ENGINES[engine].fully_shard(Scaled(), mesh=one_axis)
        model.set_all_reduce_hook(lambda out: calls.append(out.sum()))
        model.set_requires_all_reduce(False)
        model(gradient_inputs()).backward()
        assert model.weight.grad is not None
    assert len(calls) == 4


class Custom:
    """A user's own reduction, which records what it is asked for."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        is_factor = op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        self.operations.append("factor" if is_factor else str(op))
        if is_factor:
            op = dist.ReduceOp.SUM  # which gloo has
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)


def custom_reductions_are_asked_for_what_torch_asks() -> None:
    for mesh in meshes():
        size = dist.get_world_size() if mesh.ndim == 1 else mesh.size(1)
        for sums_only in (False, True):
            for factor in (None, float(size), 3.0):
                for reduce_dtype in (None, FP16):
                    customs = {"ours": Custom(), "torch": Custom()}
                    got = {}
                    for engine, custom in customs.items():

                        def prepare(model: Any, custom: Custom = custom) -> None:
                            model.set_custom_reduce_scatter(custom)
                            model.set_force_sum_reduction_for_comms(sums_only)  # noqa: B023
                            if factor is not None:  # noqa: B023
                                model.set_gradient_divide_factor(factor)  # noqa: B023

                        policy = MixedPrecisionPolicy(None, reduce_dtype)
                        got[engine] = reduced(engine, prepare, mesh=mesh, mp_policy=policy)
                    what = f"{mesh.ndim} axes, {sums_only}, {factor}, {reduce_dtype}"
                    assert customs["ours"].operations == customs["torch"].operations, (
                        f"{what}: {customs['ours'].operations}, torch {customs['torch'].operations}"
                    )
                    same(got["ours"], got["torch"], what)


def a_custom_reduction_stays_in_a_group_of_its_own() -> None:
    custom = Custom()
    model: Any = sharding.fully_shard(Scaled(), mesh=whole_mesh())
    model.set_custom_reduce_scatter(custom)
    model.set_separate_reduce_scatter_group()
    model(gradient_inputs()).backward()
    assert custom.operations


class Allocator:
    """A backend that allocates, as NCCL's does. Every buffer is remembered."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.registered: list[int] = []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.buffers.append(torch.full((numel,), 7, dtype=dtype, device=device))
        return self.buffers[-1]

    def register(self, buffer: torch.Tensor, group: Any) -> None:
        assert group.size() == dist.get_world_size()
        self.registered.append(buffer.data_ptr())


def trained(prepare: Callable[[Any], None]) -> torch.Tensor:
    model: Any = sharding.fully_shard(Scaled(), mesh=whole_mesh())
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(gradient_inputs()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return local(model.weight.detach())


def buffers_are_the_process_groups_where_it_has_an_allocator() -> None:
    assert group_memory(dist.group.WORLD, torch.device("cpu")) is None  # type: ignore[arg-type]
    wanted = trained(nothing)
    on = lambda model: model.set_allocate_memory_from_process_group_for_comm(True)  # noqa: E731
    assert torch.equal(trained(on), wanted)  # of gloo: as ever
    made = Allocator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding.sharded_group, "group_memory", lambda group, device: made)
        torch.testing.assert_close(trained(on), wanted)
        # In each step one for the gather of the forward, and two for the reduction.
        assert len(made.buffers) == 2 * 3

        def on_and_off(model: Any) -> None:
            on(model)
            model.set_allocate_memory_from_process_group_for_comm(False)

        assert torch.equal(trained(on_and_off), wanted) and len(made.buffers) == 2 * 3


def buffers_are_symmetric_memory_where_torch_has_it() -> None:
    wanted = trained(nothing)
    for sums_only in (False, True):
        made = Allocator()

        def prepare(model: Any, sums_only: bool = sums_only) -> None:
            model.set_force_sum_reduction_for_comms(sums_only)
            model.set_symm_mem_for_comm()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharding.sharded_group, "SymmetricMemory", lambda backend: made)  # noqa: B023
            torch.testing.assert_close(trained(prepare), wanted)
        count = 3 if sums_only else 1  # of each step; reductions only where they are sums
        assert len(made.buffers) == len(made.registered) == 2 * count
        assert set(made.registered) <= {buffer.data_ptr() for buffer in made.buffers}


def memory_is_refused_as_by_torchs() -> None:
    raised: dict[str, list[str]] = {}
    for engine in ENGINES:
        raised[engine] = []
        custom = Custom()
        for prepare in (
            lambda model: model.set_symm_mem_for_comm(),
            lambda model: (
                model.set_custom_reduce_scatter(custom),  # noqa: B023
                model.set_allocate_memory_from_process_group_for_comm(True),
            ),
            lambda model: (
                model.set_custom_all_gather(custom),  # noqa: B023
                model.set_allocate_memory_from_process_group_for_comm(True),
            ),
            lambda model: (
                model.set_allocate_memory_from_process_group_for_comm(True),
                model.set_symm_mem_for_comm(),
            ),
        ):
            model = ENGINES[engine].fully_shard(Scaled(), mesh=whole_mesh())
            try:
                prepare(model)
            except Exception as error:
                raised[engine].append(type(error).__name__)
    assert raised["ours"] == raised["torch"], raised
    assert raised["ours"] == ["RuntimeError", *["AssertionError"] * 3]


def what_is_said_before_the_first_forward_makes_no_root() -> None:
    for engine in ENGINES:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (model[0], model):
            ENGINES[engine].fully_shard(module, mesh=whole_mesh())
        model[0].set_is_last_backward(False)  # not the root's: of no effect
        model[0].set_post_optim_event(torch.Event("cpu"))
        model(torch.ones(2, 4)).sum().backward()
        assert model[0].weight.grad is not None and model[1].weight.grad is not None


def the_older_name_of_the_divide_factor_warns() -> None:
    model: Any = sharding.fully_shard(Scaled(), mesh=whole_mesh())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_reduce_scatter_divide_factor(3.0)
    assert [one.category for one in caught] == [DeprecationWarning]
    assert model.fsdp_group.divide_factor == 3.0


def factors_follow_a_conversion() -> None:
    model: Any = sharding.fully_shard(Scaled(), mesh=whole_mesh())
    for dtype, before in ((FP32, 1.0), (FP16, 2.0)):
        model.to(dtype)
        model(gradient_inputs().to(dtype)).backward()
        assert model.fsdp_group.unit.reduction.factors[0] == before
        model.zero_grad()


test_on_four_ranks = claims(
    4,
    [
        divisions_are_torchs_in_every_pair_of_dtypes,
        the_wrappers_divisions_are_torchs,
        a_divide_factor_is_split_as_torchs_is,
        hooks_see_what_torchs_see,
        a_stream_for_hooks_is_taken_where_no_axis_has_one,
        custom_reductions_are_asked_for_what_torch_asks,
        a_custom_reduction_stays_in_a_group_of_its_own,
        buffers_are_the_process_groups_where_it_has_an_allocator,
        buffers_are_symmetric_memory_where_torch_has_it,
        memory_is_refused_as_by_torchs,
        what_is_said_before_the_first_forward_makes_no_root,
        the_older_name_of_the_divide_factor_warns,
        factors_follow_a_conversion,
    ],
)
