"""A loop of Accelerate, resumed within an epoch. Needs: pip install accelerate

torchrun --nproc-per-node 2 examples/frameworks/accelerate_loop.py runs/accelerate 8
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn

import ckpt


def main(url: str, last: int) -> None:
    """Train up to step `last`."""
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=order)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    # With a generator of its own, a new iterator draws nothing from the random state that dropout
    # draws from.
    own = {"shuffle": True, "generator": torch.Generator()}
    loader = torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=4, **own)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state["random"] = ckpt.rng_state()
    with ckpt.Checkpointer(state, url, save=ckpt.EverySteps(4)) as checkpointer:
        resumed = checkpointer.restore()
        step = resumed.step if resumed else 0
        while step < last:
            epoch, seen = divmod(step, len(loader))
            loader.set_epoch(epoch)
            for batch in accelerator.skip_first_batches(loader, seen):
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                checkpointer.step(step)
                accelerator.print(f"step {step}: loss {loss.item()!r}")
                if step == last:
                    break
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
