"""A model that is cut into stages, for tests of ranks that hold different things.

Stages have the names of the whole model. Values follow from names alone, so that every rank can
make the unsharded reference by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

LAYERS = 4


class Layer(nn.Module):
    """Weights, a bias and buffers of a shape that no even cut fits."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9)
        self.down = nn.Linear(9, 6, bias=False)


class Model(nn.Module):
    """Layers `layers.0` to `layers.3`; a stage is one with some of them only."""

    def __init__(self, layers: Iterable[int] = range(LAYERS)) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer() for number in layers})


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, as trainings of transformers have them."""
    params = list(model.parameters())
    decayed = [param for param in params if param.ndim > 1]
    others = [param for param in params if param.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def fill(model: nn.Module, seed: int) -> None:
    """Give parameters, buffers and gradients values that follow from their names and `seed`."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            _set(tensor, made(name, tensor, seed))
        for name, param in model.named_parameters():
            gradient = made(f"grad {name}", param, seed)
            if isinstance(param, DTensor):
                gradient = DTensor.from_local(
                    _like(gradient, param),
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                )
            param.grad = gradient


def made(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """The whole tensor of that name."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
    if not like.is_floating_point():
        return torch.randint(100, tuple(like.shape), generator=generator)
    return torch.randn(tuple(like.shape), generator=generator)


def _like(whole: torch.Tensor, param: DTensor) -> torch.Tensor:
    """What this rank holds of `whole`, cut like the local tensor of `param`; without torch's own
    cuts, which take rounds.
    """
    local, mesh = whole, param.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Shard):
            size = -(-local.shape[placement.dim] // mesh.shape[axis])
            start = min(coordinate[axis] * size, local.shape[placement.dim])
            length = min(size, local.shape[placement.dim] - start)
            local = local.narrow(placement.dim, start, length)
    assert local.shape == param.to_local().shape
    return local.contiguous()


def _set(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(_like(whole, tensor))
    else:
        tensor.copy_(whole)


def trained(seed: int) -> tuple[Model, torch.optim.AdamW]:
    """The whole model after one step: the reference."""
    model = Model()
    optimizer = optimizer_of(model)
    fill(model, seed)
    optimizer.step()
    return model, optimizer


def differences(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, whole: Any = None
) -> list[str]:
    """What of a stage, or of all, is not what the reference has; DTensors are cut to compare."""
    reference, its_optimizer = whole or trained(seed)
    expected = reference.state_dict()
    odd = [
        name for name, tensor in model.state_dict().items() if not _is_equal(tensor, expected[name])
    ]
    params = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        theirs = its_optimizer.state[params[name]]
        ours = optimizer.state.get(param, {})
        if ours.keys() != theirs.keys():
            odd.append(f"state of {name}: {sorted(ours)}")
            continue
        odd += [f"{name}.{key}" for key, value in theirs.items() if not _is_equal(ours[key], value)]
    return odd


def _is_equal(ours: torch.Tensor, whole: torch.Tensor) -> bool:
    if isinstance(ours, DTensor):
        return torch.equal(ours.to_local(), _like(whole, ours))
    return torch.equal(ours, whole)
