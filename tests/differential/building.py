"""What models of a draw are built from: process groups, bare modules, values, arguments."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp import wrap as policies
from torch.distributed.tensor import DTensor

from tests.differential.draws import Draw, Part
from tests.differential.models import KINDS, Mlp

BF16 = torch.bfloat16


class Groups:
    """Process groups and meshes that draws use, made once for all draws of a process."""

    def __init__(self) -> None:
        world = dist.get_world_size()
        rank = dist.get_rank()
        self._meshes: dict[str, DeviceMesh] = {"mesh": init_device_mesh("cpu", (world,))}
        self._mine: dict[str, Any] = {}
        if world == 4:
            self._meshes["mesh2"] = init_device_mesh(
                "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
            )
            both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
            self._meshes["tensor"], self.tensor_axis = both["data"], both["tensor"]
            for name, pairs in {"rows": ((0, 1), (2, 3)), "columns": ((0, 2), (1, 3))}.items():
                groups = [dist.new_group(list(pair)) for pair in pairs]
                self._mine[name] = groups[0 if rank in pairs[0] else 1]

    def arguments(self, draw: Draw) -> dict[str, Any]:
        """Of the wrapper, for this draw."""
        if draw.group in self._meshes:
            return {"device_mesh": self._meshes[draw.group]}
        if draw.group == "pair":
            return {"process_group": (self._mine["rows"], self._mine["columns"])}
        if draw.group == "sub":
            return {"process_group": self._mine[("rows", "columns")[draw.seed % 2]]}
        return {}

    def reducing(self, draw: Draw) -> Any:
        """The group over which gradients of a draw without replicas are reduced."""
        if draw.group in self._meshes:
            return self._meshes[draw.group].get_group()
        return self.arguments(draw).get("process_group", dist.group.WORLD)


def built(draw: Draw) -> nn.Module:
    """The bare model, with equal values on all ranks."""
    torch.manual_seed(draw.seed)
    return _built(draw.tree).to(getattr(torch, draw.dtype))


def _built(tree: Any) -> nn.Module:
    if not isinstance(tree, Part):
        return nn.Sequential(*(_built(child) for child in tree))
    module = KINDS[tree.kind](tree.size)
    for index, param in enumerate(module.parameters()):
        if tree.frozen == "all" or (tree.frozen == "first" and index == 0):
            param.requires_grad_(False)
    return module


def clean(name: str) -> str:
    """A name without the wrappers on its way."""
    return (
        name.replace("_fsdp_wrapped_module.", "").removesuffix("_fsdp_wrapped_module").rstrip(".")
    )


def is_unit(module: nn.Module) -> bool:
    """Whether the module is a wrapper of either class."""
    return isinstance(module, torch_fsdp.FullyShardedDataParallel)


def states_of(model: nn.Module, path: str) -> set[int]:
    """Identities of the parameters and buffers of a module."""
    module = model.get_submodule(path)
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def filled(module: nn.Module) -> None:
    """Give what the module itself holds memory and values that follow from the shapes."""
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.copy_(values_for(tuple(tensor.shape)))


def values_for(shape: tuple[int, ...]) -> torch.Tensor:
    """Values in [0.25, 0.75], all different."""
    numel = math.prod(shape)
    return torch.linspace(0.25, 0.75, numel, dtype=torch.float64).sub(numel % 3 / 3).reshape(shape)


def whole(value: Any) -> Any:
    """All of a DTensor, from the ranks of its mesh; other values as they are."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def mean_hook(group: Any, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """A reduction of the user's own: three quarters of the mean.

    The mean where parameters are not sharded: torch reduces there what it has reduced before.
    """
    if output is None:
        dist.all_reduce(grad, group=group)
        grad.div_(dist.get_world_size(group))
    else:
        dist.reduce_scatter_single(output, grad, group=group)
        output.mul_(0.75 / dist.get_world_size(group))


def parent_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    above, _, name = path.rpartition(".")
    return model.get_submodule(above), name


# Arguments ---------------------------------------------------------------------------------------


def precision(name: str) -> MixedPrecision | None:
    return {
        "none": None,
        "bf16": MixedPrecision(param_dtype=BF16),
        "bf16/f32": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
        "reduce": MixedPrecision(reduce_dtype=BF16),
        "buffers": MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
        "keep": MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True),
    }[name]


def policy_of_precision(name: str) -> MixedPrecisionPolicy:
    return {
        "none": MixedPrecisionPolicy(),
        "bf16": MixedPrecisionPolicy(param_dtype=BF16),
        "bf16/f32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
        "reduce": MixedPrecisionPolicy(reduce_dtype=BF16),
        "buffers": MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32),
        "keep": MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False),
    }[name]


def policy(name: str) -> Any:
    if name == "size":
        return functools.partial(policies.size_based_auto_wrap_policy, min_num_params=30)
    if name == "always":
        return policies.always_wrap_policy
    if name == "custom":
        return policies.CustomPolicy(
            lambda module: {"forward_prefetch": True} if isinstance(module, Mlp) else False
        )
    classes = {"linear": nn.Linear, "sequential": nn.Sequential, "mlp": Mlp}
    return policies.ModuleWrapPolicy({classes[name]})
