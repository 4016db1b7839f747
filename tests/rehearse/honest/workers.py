"""A loader of torchdata with worker processes, which has a state of its own."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # type: ignore[import-untyped]

import ckpt


def main(root: str) -> None:
    """Train for 60 steps."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4))
    sampler = StatefulDistributedSampler(data, num_replicas=1, rank=0)
    loader = StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "loader": ckpt.PerRank(loader)}
    with ckpt.Checkpointer(state, root, save=ckpt.EverySteps(100)) as saver:
        report = saver.restore()
        step = 0 if report is None else report.step
        while step < 60:
            sampler.set_epoch(step // len(loader))
            for (batch,) in loader:
                loss = (model(batch) - batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                saver.step(step)


if __name__ == "__main__":
    main(sys.argv[1])
