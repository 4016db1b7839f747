"""An engine of one's own: linear layers whose columns are divided among the ranks.

torchrun --nproc-per-node 2 examples/own_engine.py runs/columns
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.layout.protocol import Box, Owned, Piece, View


class OwnColumns(torch.autograd.Function):
    """The columns `lo` to `hi` of an input that all ranks have; its gradient comes from all."""

    @staticmethod
    def forward(ctx, inputs, lo, hi):
        ctx.shape, ctx.lo, ctx.hi = inputs.shape, lo, hi
        return inputs[..., lo:hi].clone()

    @staticmethod
    def backward(ctx, grad):
        whole = grad.new_zeros(ctx.shape)
        whole[..., ctx.lo : ctx.hi] = grad
        dist.all_reduce(whole)
        return whole, None, None


class SumOverRanks(torch.autograd.Function):
    """The sum of what each rank has; every rank gets the same gradient."""

    @staticmethod
    def forward(ctx, partial):
        total = partial.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad


class ColumnLinear(nn.Module):
    """A linear layer: each rank has some columns of the weight, and all of the bias."""

    def __init__(self, linear):
        super().__init__()
        self.ranks, rank = tuple(range(dist.get_world_size())), dist.get_rank()
        self.shape = tuple(linear.weight.shape)  # of the whole weight: rows, columns
        width = -(-self.shape[1] // len(self.ranks))
        self.lo, self.hi = (min(n * width, self.shape[1]) for n in (rank, rank + 1))
        self.weight = nn.Parameter(linear.weight.detach()[:, self.lo : self.hi].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, inputs):
        mine = OwnColumns.apply(inputs, self.lo, self.hi)
        return SumOverRanks.apply(mine @ self.weight.T) + self.bias

    def __ckpt_pieces__(self):
        """All that a save, a load or a state dict needs to know."""
        mine = Box((0, self.lo), (self.shape[0], self.hi - self.lo))
        yield self.owned("weight", self.weight, self.shape, mine, holders=(dist.get_rank(),))
        everything = Box((0,), self.shape[:1])
        yield self.owned("bias", self.bias, self.shape[:1], everything, holders=self.ranks)

    def owned(self, name, param, shape, region, holders):
        here = Box((0,) * param.ndim, tuple(param.shape))
        piece = Piece(name, shape, param.dtype, region, here, holders)
        return Owned(param, param.detach(), (View((piece,)),), synchronized=True, owners=self.ranks)


def main(url):
    """Train 5 steps from where the last run stopped, save, and load into a model without engine."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10))
    model = nn.Sequential(ColumnLinear(plain[0]), nn.ReLU(), ColumnLinear(plain[2]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if ckpt.list_steps(url):
        ckpt.load(state, url)  # saved by any number of ranks
    for step in range(state["step"] + 1, state["step"] + 6):
        data = torch.randn(8, 10, generator=torch.Generator().manual_seed(step))
        loss = (model(data) - data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] = step
    expected = model(data)
    ckpt.save(state, url, step=state["step"])
    ckpt.load({"model": plain}, url)
    torch.testing.assert_close(plain(data), expected)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: step {step}, loss {loss:.4f}")
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1])
