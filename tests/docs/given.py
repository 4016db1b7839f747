"""What a reader of the documents has before the first line of a page: a small model and so on.

`GIVEN` are the names that blocks of code may use without making them.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def names() -> dict[str, Any]:
    """The names, and their values, made anew for every page."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)

    def train_one_step(*_: Any) -> float:
        data = torch.randn(4, 8)
        loss = (model(data) - data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return float(loss.detach())

    class Progress(SimpleNamespace):
        """A counter that is saved and loaded like a module."""

        step = 0

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "train_one_step": train_one_step,
        "progress": Progress(),
        "endpoint": os.environ.get("AWS_ENDPOINT_URL", ""),
    }
