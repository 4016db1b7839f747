"""Accelerate: what it has prepared is the state."""

import sys

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt


def main(root: str) -> None:
    """Train for 20 epochs."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
    loader = DataLoader(
        TensorDataset(torch.randn(16, 4)), batch_size=4, generator=torch.Generator()
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = {"epoch": 0, "batch": 0}
    state = {
        "model": model,
        "optimizer": optimizer.optimizer,
        "scheduler": scheduler,
        "progress": progress,
        "rng": ckpt.rng_state(),
    }
    with ckpt.Checkpointer(state, root, save=ckpt.EverySteps(100)) as saver:
        report = saver.restore()
        step = 0 if report is None else report.step
        for epoch in range(progress["epoch"], 20):
            rest = accelerator.skip_first_batches(loader, progress["batch"])
            for (batch,) in rest:
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                progress |= {"epoch": epoch, "batch": progress["batch"] + 1}
                saver.step(step)
            progress["batch"] = 0


if __name__ == "__main__":
    main(sys.argv[1])
