"""Lightning's Trainer with its checkpoints in a root of ours. Needs: pip install lightning

python examples/lightning_trainer.py runs/lightning
"""

import sys
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.integrations.lightning import LightningCheckpoints


class Small(lightning.LightningModule):
    """Learns to give back what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch[0]) - batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(url: str) -> None:
    """Two epochs, and as if the job had ended there, two more by a new trainer."""
    data = DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=4)
    for epochs in (2, 4):
        checkpoints = LightningCheckpoints(url)
        with tempfile.TemporaryDirectory() as scratch:
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=1,
                max_epochs=epochs,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[ModelCheckpoint(every_n_train_steps=6, save_top_k=1)],
                plugins=[checkpoints],
                default_root_dir=scratch,
            )
            trainer.fit(Small(), data, ckpt_path=checkpoints.latest())
        print(f"trained to step {trainer.global_step}")
    print("checkpoints:", [info.step for info in ckpt.list_steps(url)])


if __name__ == "__main__":
    main(sys.argv[1])
