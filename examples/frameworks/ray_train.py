"""Ray Train's TorchTrainer, in its local mode by default. Needs: pip install "ray[train]"

python examples/frameworks/ray_train.py runs/ray 8                 (a third argument: workers)
"""

import sys

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

import ckpt


def train(config: dict) -> None:
    """What each worker does: a restarted one continues from the newest checkpoint in `url`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    with ckpt.Checkpointer(state, config["url"], save=ckpt.EverySteps(4)) as checkpointer:
        for step in checkpointer.steps(config["last"]):
            batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ray.train.report({"step": step, "loss": loss.item()})
            print(f"step {step}: loss {loss.item()!r}", flush=True)


def main(url: str, last: int, workers: int = 0) -> None:
    """Train up to step `last`; 0 workers: in this process. All workers have to reach `url`."""
    TorchTrainer(
        train,
        train_loop_config={"url": url, "last": last},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
