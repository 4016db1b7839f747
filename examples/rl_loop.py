"""Reinforcement learning on one root: a trainer publishes, samplers of other layouts follow.

    python examples/rl_loop.py runs/rl

A tiny policy learns to repeat its prompt, by advantages within groups as in GRPO. The trainer has
two ranks (FSDP2, float32) and is killed in the middle and restarted; one sampler is a plain model,
one is sharded over two ranks, both in bfloat16. Every rollout names the version that made it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt

TOKENS, GROUP, STEPS, KILLED_AT = 16, 32, 8, 4


def policy(*, sharded: bool) -> nn.Module:
    """Logits of the next token by the prompt's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(TOKENS, 32), nn.Linear(32, TOKENS))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model


def train(folder: Path) -> None:
    """Learn from rollouts that are at most two versions old; save and publish every step."""
    dist.init_process_group("gloo")
    model = policy(sharded=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    state = {"model": model, "optimizer": optimizer}
    first = ckpt.load(state, folder / "root").step + 1 if ckpt.list_steps(folder / "root") else 0
    for step in range(first, STEPS):
        # Without anchors behind deltas, each version has one name.
        pending = ckpt.publish(model, folder / "root", step=step, anchor_larger=1e9)
        report = pending.result()
        if dist.get_rank() == 0:
            (folder / f"published-{report.attempt}").touch()
        if step == KILLED_AT and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        samples: list[object] = [rollouts_since(folder, step - 2) if dist.get_rank() == 0 else []]
        dist.broadcast_object_list(samples)
        batch = torch.tensor(samples[0])
        prompts, tokens, rewards = batch[:, 0].long(), batch[:, 1].long(), batch[:, 2]
        chosen = model(prompts).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        loss = -((rewards - rewards.mean()) / (rewards.std() + 1e-3) * chosen).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(state, folder / "root", step=step)
        if dist.get_rank() == 0:
            print(f"trainer: step {step}, mean reward {rewards.mean():.2f}", flush=True)
    dist.destroy_process_group()


def rollouts_since(folder: Path, oldest: int) -> list[list[float]]:
    """Samples of the newest rollout of each sampler, once both have one that is new enough."""
    while True:
        newest = [max(folder.glob(f"rollout-{name}-*.json"), default=None) for name in "ab"]
        if all(newest):
            made = [json.loads(path.read_text()) for path in newest if path]
            if all(one["step"] >= oldest for one in made):
                return [sample for one in made for sample in one["samples"]]
        time.sleep(0.05)


def sample(folder: Path, name: str, *, sharded: bool) -> None:
    """Generate with the newest version until the trainer's last one was used."""
    if sharded:
        dist.init_process_group("gloo")
    model = policy(sharded=False).to(torch.bfloat16)
    if sharded:
        fully_shard(model)
    number = 0
    with ckpt.follow(model, folder / "root", line="published") as follower:
        for update in follower.updates(poll_seconds=0.05):
            follower.swap()
            prompts = torch.randint(TOKENS, (GROUP,))
            with torch.no_grad():
                tokens = torch.multinomial(model(prompts).float().softmax(-1), 1)[:, 0]
            if not sharded or dist.get_rank() == 0:
                rewards = (tokens == prompts).float()
                samples = torch.stack([prompts, tokens, rewards], 1).tolist()
                rollout = {"version": follower.attempt, "step": update.step, "samples": samples}
                path = folder / f"rollout-{name}-{number:06d}.json"
                path.with_suffix(".new").write_text(json.dumps(rollout))
                path.with_suffix(".new").rename(path)
            number += 1
            if update.step == STEPS - 1:
                break
    if sharded:
        dist.destroy_process_group()


def main(folder: Path) -> None:
    """Run all of it; raises where a rollout names a version that was not published."""
    folder.mkdir(parents=True)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def start(*arguments: str, options: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, *options, __file__, str(folder), *arguments]
        return subprocess.Popen(command)

    samplers = [start("a", options=[]), start("b", options=ranks)]
    trainer = start("train", options=ranks)
    assert trainer.wait(timeout=200)
    print("the trainer was killed; it starts again", flush=True)
    trainer = start("train", options=ranks)
    assert [one.wait(timeout=200) for one in (trainer, *samplers)] == [0, 0, 0]
    published = {path.name.removeprefix("published-") for path in folder.glob("published-*")}
    versions = {json.loads(path.read_text())["version"] for path in folder.glob("rollout-*.json")}
    print(f"{len(published)} versions published, {len(versions)} of them used")
    assert {version[:7] for version in versions} == {"e000001", "e000002"}, "both jobs were used"
    # Of the rank that was killed, the note of its last version may be missing.
    assert len(versions - published) <= 1, versions - published


if __name__ == "__main__":
    place, *what = Path(sys.argv[1]), *sys.argv[2:]
    if not what:
        main(place)
    elif what[0] == "train":
        train(place)
    else:
        sample(place, what[0], sharded=what[0] == "b")
