"""Small modules with the shapes that layouts stumble over."""

from __future__ import annotations

import torch
from torch import nn


class Awkward(nn.Module):
    """Uneven and tiny parameters, a channels-last convolution, BatchNorm, and a tied weight."""

    def __init__(self, *, channels_last: bool, batch_norm: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.conv = nn.Conv2d(3, 5, (2, 3), bias=True)
        self.norm = nn.BatchNorm2d(5) if batch_norm else nn.GroupNorm(1, 5)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6, bias=False))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        if channels_last:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        seen = self.norm(self.conv(image)).mean(dim=(2, 3))
        token = self.embed(torch.arange(image.shape[0]) % 7)
        logits: torch.Tensor = self.head(self.body(seen) + token) * self.scale
        return logits


def awkward(seed: int = 0, *, channels_last: bool = True, batch_norm: bool = True) -> Awkward:
    """The same on all ranks for one seed; its parameters hold distinct values."""
    torch.manual_seed(seed)
    module = Awkward(channels_last=channels_last, batch_norm=batch_norm)
    with torch.no_grad():
        module.scale.fill_(1.5 + seed)
        for param in (module.norm.weight, module.norm.bias):
            param.copy_(torch.randn_like(param))
    return module


def image(seed: int = 0) -> torch.Tensor:
    """A batch of two images."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 4, 5, generator=generator)
