"""Lightning with our plug-in, followed by a callback."""

import sys
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.integrations.lightning import LightningCheckpoints
from ckpt.rehearse.watch import ResumeWatch


class Small(lightning.LightningModule):
    """Learns to give back what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = (self.net(batch[0]) - batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        """With a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Follow(lightning.Callback):
    """Saves where the rehearsal wants it, and says what was loaded."""

    def __init__(self, watch: ResumeWatch) -> None:
        self._watch = watch

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """What was loaded."""
        if trainer.global_step:
            self._watch.restored(trainer.global_step)

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule
    ) -> None:
        """An epoch is done, which is a step here: Lightning resumes at the begin of an epoch."""
        if self._watch.step(trainer.global_step):
            trainer.save_checkpoint(f"step-{trainer.global_step}")


def main(url: str) -> None:
    """Train for 60 epochs."""
    torch.manual_seed(0)
    module = Small()
    watch = ckpt.watch_resume({"model": module}, url)
    checkpoints = LightningCheckpoints(watch.directory)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=60,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[Follow(watch)],
        plugins=[checkpoints],
    )
    data = DataLoader(TensorDataset(torch.randn(4, 8)), batch_size=4)
    trainer.fit(module, data, ckpt_path=checkpoints.latest())


if __name__ == "__main__":
    main(sys.argv[1])
