"""A generator and a critic, with an optimizer each, averages by hand, and numbers for a log."""

import sys
import time

import torch
from torch import nn

import ckpt


def main(root: str) -> None:
    """Train for 1000 steps."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    state = {
        "generator": generator,
        "critic": critic,
        "of_generator": of_generator,
        "of_critic": of_critic,
        "rng": ckpt.rng_state(),
    }
    began, losses, running = time.time(), [], torch.zeros(2)
    with ckpt.Checkpointer(state, root, save=ckpt.EverySteps(100)) as saver:
        for step in saver.steps(1000):
            real = torch.randn(8, 2) + 1
            made: torch.Tensor = generator(torch.randn(8, 4))
            loss: torch.Tensor = nn.functional.softplus(critic(made.detach()) - critic(real)).mean()
            of_critic.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            of_critic.step()
            other: torch.Tensor = nn.functional.softplus(-critic(made)).mean()
            of_generator.zero_grad()
            other.backward()  # type: ignore[no-untyped-call]
            of_generator.step()
            running += torch.stack([loss.detach(), other.detach()])
            losses.append(loss.item())
            if step % 10 == 0:
                print(step, running / len(losses), time.time() - began)


if __name__ == "__main__":
    main(sys.argv[1])
