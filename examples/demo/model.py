"""A small transformer that predicts the next byte. Plain torch, nothing else."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

CONTEXT = 128
WIDTH = 128
HEADS = 4
LAYERS = 4


class Block(nn.Module):
    """Causal attention, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.feed_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.feed_out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is [batch, time, WIDTH]."""
        batch, time, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, time, 3, HEADS, -1).transpose(1, 3)
        query, key, value = heads.unbind(2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))


class ByteLM(nn.Module):
    """From bytes [batch, time] to logits of the next byte [batch, time, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """`data` is [batch, time] of integers below 256, time at most CONTEXT."""
        x = self.byte(data) + self.position(torch.arange(data.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
