"""An engine in float8 follows a training, and quantizes only the blocks that have changed.

    python examples/requantize.py

The training publishes bfloat16. The engine keeps those bits in host memory, which deltas go from,
and serves float8 with one scale for each block of 128 x 128.
"""

import tempfile

import torch
from torch import nn

import ckpt

BLOCK, LARGEST = 128, torch.finfo(torch.float8_e4m3fn).max


def quantized(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks (n, 128, 128) in float8, and their n scales."""
    scales = blocks.float().abs().amax(dim=(1, 2)).clamp(min=1e-12) / LARGEST
    return (blocks.float() / scales[:, None, None]).to(torch.float8_e4m3fn), scales


def blocks_of(weight: torch.Tensor) -> torch.Tensor:
    """A view (rows, columns, 128, 128) of a weight whose sides are multiples of 128."""
    return weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)


class Engine:
    """Weights in float8 blocks, of the tensors of a model in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.served, self.made = model, {}, 0

    def update(self, changed: tuple[ckpt.reports.Changed, ...] | None) -> None:
        """Quantize the blocks that a swap has changed; all of them after a whole load."""
        if changed is None:
            for name, weight in self.model.state_dict().items():
                blocks = blocks_of(weight)
                self.served[name] = [one.clone() for one in quantized(blocks.flatten(0, 1))]
                self.made += blocks.shape[0] * blocks.shape[1]
            return
        for name, part, positions in changed:
            rows, columns = positions // part.shape[1], positions % part.shape[1]
            across = part.shape[1] // BLOCK
            numbers = torch.unique(rows // BLOCK * across + columns // BLOCK)
            values, scales = quantized(blocks_of(part)[numbers // across, numbers % across])
            self.served[name][0].view(torch.uint8)[numbers] = values.view(torch.uint8)
            self.served[name][1][numbers] = scales
            self.made += len(numbers)


def main() -> None:
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 256, bias=False))
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 256, bias=False))
    engine = Engine(model.to(torch.bfloat16).requires_grad_(False))
    with (
        tempfile.TemporaryDirectory() as root,
        ckpt.follow(model, root, line="published") as follower,
    ):
        for step in range(4):
            with torch.no_grad():  # a step that moves one corner
                trained[0].weight[: 100 * step, :90] += 0.01
            ckpt.publish(trained, root, step=step).result()
            if follower.poll() and (swapped := follower.swap()):
                engine.update(swapped.changed)
            print(f"version {follower.step}: {engine.made} blocks quantized in all")
            for name, weight in model.state_dict().items():
                values, scales = quantized(blocks_of(weight).flatten(0, 1))
                served = engine.served[name]
                assert torch.equal(values.view(torch.uint8), served[0].view(torch.uint8))
                assert torch.equal(scales, served[1])
    # 24 blocks at first, then those of the corner: 1, 2 and 3 rows of blocks.
    assert engine.made == 24 + 1 + 2 + 3, engine.made


if __name__ == "__main__":
    main()
