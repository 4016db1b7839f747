"""A recipe as torchtune's are: a class that sets up, trains, saves and cleans up.

torchrun --nproc-per-node 2 examples/frameworks/recipe.py runs/recipe 8
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import ckpt


class FullFinetuneRecipe:
    """Its `save_checkpoint` and `load_checkpoint` are the Checkpointer's."""

    def setup(self, url: str) -> None:
        """Model, optimizer, data, and where they are saved."""
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(
                layer, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        data = list(torch.randn(24, 8))
        self.sampler = DistributedSampler(data, dist.get_world_size(), dist.get_rank())
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler)
        state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.checkpointer = ckpt.Checkpointer(state, url, save=ckpt.EverySteps(4))

    def train(self, last: int) -> None:
        """Up to step `last`: the epoch and the place in it follow from the step."""
        for step in self.checkpointer.steps(last):
            self.sampler.set_epoch((step - 1) // len(self.loader))
            batch = list(self.loader)[(step - 1) % len(self.loader)]
            loss = (self.model(batch) - batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            dist.all_reduce(loss := loss.detach())
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item()!r}", flush=True)

    def cleanup(self) -> None:
        """The last save, and the end."""
        self.checkpointer.close()
        dist.destroy_process_group()


def main(url: str, last: int) -> None:
    """Run the recipe."""
    recipe = FullFinetuneRecipe()
    recipe.setup(url)
    recipe.train(last)
    recipe.cleanup()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
