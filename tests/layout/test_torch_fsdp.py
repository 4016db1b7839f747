"""FSDP1 and FSDP2 are read and written in their sharded memory, whatever the modules show.

Real ranks. Each test brings an engine into a state, puts the full tensors together from the pieces
of all ranks and compares bit for bit with what torch itself gathers; then it reshards, writes other
values into the local memory, and compares the next forward with that of a bare module with those
values.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

from ckpt.errors import InvalidState
from ckpt.layout.modules import describe_module
from ckpt.layout.tensor import local_tensor
from tests.layout.models import Awkward, awkward, image
from tests.layout.rebuilding import put, rebuilt, world
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

Wrap = Callable[[Awkward], nn.Module]

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # a forward changes them
STATES = ("fresh", "after_eval", "after_backward", "between", "after_no_grad", "no_sync")


def fsdp1_unit(module: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch advises against NO_SHARD
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def fsdp1(module: Awkward, **options: Any) -> nn.Module:
    """Two inner units (one with the channels-last convolution) and the root."""
    module.add_module("conv", fsdp1_unit(module.conv, **options))
    module.add_module("body", fsdp1_unit(module.body, **options))
    return fsdp1_unit(module, **options)


def fsdp2(module: Awkward, **options: Any) -> nn.Module:
    fully_shard(module.body, **options)
    fully_shard(module, **options)
    return module


ENGINES: dict[str, Wrap] = {
    "fsdp1_flat": partial(fsdp1, use_orig_params=False),
    "fsdp1_orig": partial(fsdp1, use_orig_params=True),
    "fsdp2": partial(fsdp2),
    "fsdp1_flat_grad_op": partial(
        fsdp1, use_orig_params=False, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
    "fsdp1_orig_grad_op": partial(
        fsdp1, use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
    "fsdp1_flat_no_shard": partial(
        fsdp1, use_orig_params=False, sharding_strategy=ShardingStrategy.NO_SHARD
    ),
    "fsdp1_orig_no_shard": partial(
        fsdp1, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD
    ),
    "fsdp1_flat_bf16": partial(
        fsdp1, use_orig_params=False, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    ),
    "fsdp1_orig_bf16": partial(
        fsdp1, use_orig_params=True, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    ),
    "fsdp2_keep": partial(fsdp2, reshard_after_forward=False),
    "fsdp2_bf16": partial(fsdp2, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp2_offload": partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


def _bring(module: nn.Module, state: str, stack: contextlib.ExitStack) -> None:
    """Run `module` until it is in `state`."""
    if state == "after_eval":
        module.eval()
        with torch.no_grad():
            module(image())
    elif state == "after_no_grad":
        with torch.no_grad():
            module(image())
    elif state == "after_backward":
        module(image()).sum().backward()
    elif state == "between":
        stack.callback(lambda kept: None, module(image()).sum())
    elif state == "no_sync":
        if isinstance(module, FullyShardedDataParallel):
            stack.enter_context(module.no_sync())
        else:
            module.set_requires_gradient_sync(False)  # type: ignore[operator]
        module(image()).sum().backward()


def _torch_full(module: nn.Module) -> dict[str, torch.Tensor]:
    """What torch gathers itself. Run in a module that is not used afterwards."""
    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            named = [*module.named_parameters(), *module.named_buffers()]
            return {_bare(name): tensor.detach().clone() for name, tensor in named}
    state = module.state_dict()
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
        for name, tensor in state.items()
    }


def _bare(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _bare_module(engine: str, seed: int) -> Awkward:
    # FSDP2 takes contiguous parameters only; torch's BatchNorm wants its buffers in the low
    # precision.
    first = engine.startswith("fsdp1")
    return awkward(seed, channels_last=first, batch_norm="bf16" not in engine)


def _check_state(engine: str, state: str) -> None:
    module = ENGINES[engine](_bare_module(engine, 1))
    with contextlib.ExitStack() as stack:
        _bring(module, state, stack)
        layout = describe_module(module, world())
        assert not layout.problems and not layout.save_hooks and not layout.load_hooks, layout
        assert layout.aliases == {"head.weight": "embed.weight"}
        read = rebuilt(layout)
        expected = {
            name: tensor.detach().clone()
            for name, tensor in _bare_module(engine, 1).state_dict().items()
            if name != "head.weight"
        }
        for name in expected.keys() - {"norm." + name for name in STATISTICS}:
            assert torch.equal(read[name], expected[name]), (engine, state, name)
        assert set(read) == set(expected)
        # A load: other values, in place.
        layout.reshard()
        layout = describe_module(module, world())
        wanted = _bare_module(engine, 2).state_dict()
        for owned in (*layout.params, *layout.buffers):
            put(owned, wanted)
        again = rebuilt(describe_module(module, world()))
        assert all(torch.equal(again[name], wanted[name]) for name in expected)
    _check_forward(engine, module)
    after = _torch_full(module)
    for name in expected:
        assert torch.equal(after[name], wanted[name]), (engine, state, name)


def _check_forward(engine: str, module: nn.Module) -> None:
    """The next forward uses what was written."""
    bare = _bare_module(engine, 2)
    module.eval()
    bare.eval()
    with torch.no_grad():
        ours, theirs = module(image(5)), bare(image(5))
    tolerance = 0.1 if "bf16" in engine else 1e-5
    assert torch.allclose(ours.float(), theirs, atol=tolerance, rtol=tolerance), (ours, theirs)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("engine", ["fsdp1_flat", "fsdp1_orig", "fsdp2"])
def test_sharded_memory_is_read_and_written_in_every_state(engine: str, state: str) -> None:
    """Every engine in every state, on four ranks: some shards are empty, most are uneven."""
    run_ranks(4, _check_state, engine, state)


@pytest.mark.parametrize(
    "engine", [name for name in ENGINES if name not in ("fsdp1_flat", "fsdp1_orig", "fsdp2")]
)
def test_every_way_of_sharding_is_read_and_written(engine: str) -> None:
    """Other strategies, precisions and offloading, on three ranks, in states that keep copies."""
    run_ranks(3, _check_states, engine, ("between", "after_eval"))


def _check_states(engine: str, states: tuple[str, ...]) -> None:
    for state in states:
        _check_state(engine, state)
        dist.barrier()


MESHES: dict[str, Wrap] = {
    "fsdp1_flat_hybrid": lambda module: fsdp1(
        module,
        use_orig_params=False,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    ),
    "fsdp1_orig_hybrid": lambda module: fsdp1(
        module,
        use_orig_params=True,
        sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
        device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    ),
    "fsdp2_hybrid": lambda module: fsdp2(
        module, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ),
    "fsdp2_smaller_after_forward": lambda module: fsdp2(module, reshard_after_forward=2),
    "fsdp2_permuted": lambda module: fsdp2(module, mesh=DeviceMesh("cpu", [2, 0, 3, 1])),
}
ENGINES.update(MESHES)


@pytest.mark.parametrize("engine", MESHES)
def test_meshes_and_replicas_are_read_and_written(engine: str) -> None:
    """2 x 2 ranks, a mesh in another order of ranks, and shards of another size after a forward."""
    run_ranks(4, _check_states, engine, ("between", "after_eval"))


def _check_offload(use_orig_params: bool) -> None:
    options = {"use_orig_params": use_orig_params, "cpu_offload": CPUOffload(offload_params=True)}
    module = fsdp1(awkward(1), **options)
    layout = describe_module(module, world())
    wanted = awkward(2).state_dict()
    for owned in (*layout.params, *layout.buffers):
        put(owned, wanted)
    read = rebuilt(describe_module(module, world()))
    assert all(torch.equal(read[name], wanted[name]) for name in read)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_offloaded_flat_parameters_are_read_and_written(use_orig_params: bool) -> None:
    """Before the first forward: torch's FSDP1 cannot run a forward with offloading on CPU alone."""
    run_ranks(2, _check_offload, use_orig_params)


def _check_optimizer_knows(engine: str) -> int:
    module = ENGINES[engine](_bare_module(engine, 1))
    optimizer = torch.optim.AdamW(module.parameters())
    module(image()).sum().backward()
    optimizer.step()
    with torch.no_grad():
        module.eval()(image())  # FSDP2 now shows whole parameters, optimizers know the sharded ones
    layout = describe_module(module, world())
    checked = 0
    for param, state in optimizer.state.items():
        owned = layout.owned_by_param[id(param)]
        assert owned.param is param
        assert local_tensor(state["exp_avg"]).shape == owned.local.shape
        checked += 1
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert known <= set(layout.owned_by_param)
    return checked


@pytest.mark.parametrize(
    "engine", ["fsdp1_flat", "fsdp1_orig", "fsdp2", "fsdp1_orig_no_shard", "fsdp1_orig_grad_op"]
)
def test_optimizer_state_is_shaped_as_the_local_memory(engine: str) -> None:
    """A step of AdamW, then every state tensor must fit the views of its parameter."""
    assert max(run_ranks(3, _check_optimizer_knows, engine)) >= 3


def _check_busy() -> str:
    module = fsdp1(awkward(1), use_orig_params=True)
    module(image()).sum().backward()
    layout = describe_module(module, world())
    with FullyShardedDataParallel.summon_full_params(module), pytest.raises(InvalidState) as caught:
        layout.reshard()
    return str(caught.value)


def test_resharding_inside_summon_full_params_is_refused() -> None:
    """Leaving that context would write the gathered values back over what was loaded."""
    assert all("summon_full_params" in text for text in run_ranks(2, _check_busy))


def _check_inner(engine: str) -> tuple[str, ...]:
    module = ENGINES[engine](_bare_module(engine, 1))
    with torch.no_grad():
        module.eval()(image())
    inner = module.get_submodule("_fsdp_wrapped_module" if engine == "fsdp1_orig" else "embed")
    return describe_module(inner, world()).problems


@pytest.mark.parametrize("engine", ["fsdp1_orig", "fsdp2"])
def test_a_part_of_a_unit_is_refused(engine: str) -> None:
    """The module inside a wrapper does not say where its shards are; they may be whole."""
    (problem, *_) = run_ranks(2, _check_inner, engine)[0]
    assert "pass the whole wrapped model" in problem


def _check_bad_strides(orig: bool) -> tuple[str, ...]:
    module: Any = nn.Linear(4, 3, bias=False)
    module.weight = nn.Parameter(torch.arange(24.0).view(4, 6)[:3, ::2][:, :3])
    # The layer after it makes room for what torch reads and shows beyond the parameter's end.
    wrapped = fsdp1_unit(nn.Sequential(module, nn.Linear(8, 8)), use_orig_params=orig)
    return describe_module(wrapped, world()).problems


@pytest.mark.parametrize("orig", [False, True])
def test_flattening_of_strides_with_gaps_is_refused(orig: bool) -> None:
    """torch flattens such memory wrongly; what is in it is not the parameter."""
    assert "contiguous()" in run_ranks(2, _check_bad_strides, orig)[0][0]
