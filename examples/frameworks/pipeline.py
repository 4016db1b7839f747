"""Stages of torch.distributed.pipelining, one a rank; it resumes on another number of them.

torchrun --nproc-per-node 2 examples/frameworks/pipeline.py runs/pipeline 8
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import ckpt


class Layers(nn.Module):
    """Some layers of the model, under the names that they have in all of it."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(8, 8) for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through these layers."""
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def main(url: str, last: int) -> None:
    """Train up to step `last`."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    part = Layers(range(rank * 4 // size, (rank + 1) * 4 // size))
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    state = {"model": ckpt.Stages(stage), "optimizer": optimizer}
    with ckpt.Checkpointer(state, url, save=ckpt.EverySteps(4)) as checkpointer:
        for step in checkpointer.steps(last):
            batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            losses: list[torch.Tensor] = []
            first, final = rank == 0, rank == size - 1
            target = {"target": batch, "losses": losses} if final else {}
            schedule.step(*([batch] if first else []), **target)
            optimizer.step()
            optimizer.zero_grad()
            if final:
                print(f"step {step}: loss {torch.stack(losses).mean().item()!r}", flush=True)
    dist.barrier()  # a rank that leaves first would break what the others still send
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
