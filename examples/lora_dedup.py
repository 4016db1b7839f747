"""Adapters are trained beside frozen weights: every save but the first writes the adapters only.

python examples/lora_dedup.py runs/lora
"""

import sys

import torch
from torch import nn

import ckpt


class Adapted(nn.Module):
    """A frozen linear layer and a trainable product of two thin matrices."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def main(url: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Adapted(width=1024, rank=4) for _ in range(4)])
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    for step in range(1, 4):
        data = torch.randn(8, 1024)
        (model(data) - data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        report = ckpt.save(state, url, step=step, dedup=True)
        print(f"step {step}: {report.nbytes} bytes written, {report.nbytes_referenced} referred to")
    assert report.nbytes < 0.05 * report.nbytes_referenced

    # It loads like any other through its root; a copy elsewhere has all of its bytes.
    ckpt.load(state, url)
    copy = ckpt.copy(url, f"{url}-release")
    print(f"copied, {copy.nbytes} bytes: {ckpt.diff(url, f'{url}-release').identical=}")


if __name__ == "__main__":
    main(sys.argv[1])
