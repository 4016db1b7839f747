"""Lightning with models that its strategies shard. Needs: pip install lightning

torchrun --nproc-per-node 2 examples/frameworks/lightning_sharded.py runs/sharded 8 fsdp2
(or fsdp1)
"""

import sys
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from ckpt.integrations.lightning import SavingFSDPStrategy, SavingModelParallelStrategy


class Small(lightning.LightningModule):
    """Learns to give back what it gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def configure_model(self) -> None:
        """Sharded once; what FSDP wraps on a GPU is the strategy's own work."""
        strategy = self.trainer.strategy
        if isinstance(strategy, SavingModelParallelStrategy):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        elif strategy.root_device.type == "cpu" and isinstance(self.net, nn.Sequential):
            device = {"device_id": torch.device("cpu"), "use_orig_params": True}
            self.net = FullyShardedDataParallel(self.net, **device)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """The data follow from the step."""
        step = self.global_step + 1
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        loss = (self.net(batch) - batch).square().mean()
        if self.trainer.is_global_zero:
            print(f"step {step}: loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(url: str, last: int, layout: str) -> None:
    """Train up to step `last`."""
    strategy = SavingFSDPStrategy(url) if layout == "fsdp1" else SavingModelParallelStrategy(url)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = lightning.Trainer(
            strategy=strategy,
            callbacks=[ModelCheckpoint(dirpath=scratch, every_n_train_steps=4)],
            accelerator="auto" if torch.cuda.is_available() else "cpu",
            devices=int(TorchElasticEnvironment().world_size()),
            plugins=[TorchElasticEnvironment()],
            max_steps=last,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.DataLoader(range(100), batch_size=None)
        trainer.fit(Small(), data, ckpt_path=strategy.latest())  # None the first time


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
