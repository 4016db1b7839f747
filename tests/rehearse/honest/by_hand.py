"""A small language model that saves by hand, as nanoGPT does."""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import ckpt

BLOCK = 8


class Small(nn.Module):
    """Embedding, one layer of a transformer, head; the last two weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        logits = self.head(self.layer(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.view(-1, 32), targets.view(-1))


def learning_rate(step: int) -> float:
    """Warms up, then decays."""
    return 1e-3 * min(step / 4, 1.0) * (1 - step / 100)


def main(out: str) -> None:
    """Train for 50 steps."""
    torch.manual_seed(1)
    data = torch.randint(0, 32, (500,))
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = ckpt.watch_resume(
        {"model": model, "optimizer": optimizer, "rng": ckpt.rng_state()}, out
    )
    path = Path(watch.directory) / "ckpt.pt"
    step, best = 0, 1e9
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        step, best = saved["step"], saved["best"]
        watch.restored(step)
    while step < 50:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        starts = torch.randint(len(data) - BLOCK - 1, (4,))
        tokens = torch.stack([data[i : i + BLOCK] for i in starts])
        targets = torch.stack([data[i + 1 : i + 1 + BLOCK] for i in starts])
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        best = min(best, loss.item())
        if watch.step(step) or step % 20 == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saved |= {"rng": torch.get_rng_state(), "step": step, "best": best}
            torch.save(saved, f"{path}.new")
            os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main(sys.argv[1])
