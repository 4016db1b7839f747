"""The parts that random models are made of. All take and return (batch, WIDTH)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

WIDTH = 4


class Mlp(nn.Module):
    """Two layers with `size` features between them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, size)
        self.down = nn.Linear(size, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Scaled(nn.Module):
    """A parameter of its own (of one element for `size` 1) and buffers of every kind."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH if size > 1 else 1) + 0.5)
        self.register_buffer("shift", torch.rand(WIDTH))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("cache", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale + self.shift).to(x.dtype)


class HalfUsed(nn.Module):
    """One of its layers takes no part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Convolution(nn.Module):
    """A weight of three dims."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, size, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.unsqueeze(1)).mean(dim=1)


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda size: nn.Linear(WIDTH, WIDTH, bias=size > 2),
    "mlp": Mlp,
    "tied": lambda size: Tied(),
    "scaled": Scaled,
    "norm": lambda size: nn.LayerNorm(WIDTH),
    "batch": lambda size: nn.BatchNorm1d(WIDTH),
    "half": lambda size: HalfUsed(),
    "conv": Convolution,
    "tanh": lambda size: nn.Tanh(),
}
