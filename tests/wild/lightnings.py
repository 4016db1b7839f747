"""Lightning's Trainer under its strategies, with its own checkpoints and with ours."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from tests.wild.handing_on import Outcome, Stretch, Trainer, Writer, stretches
from tests.wild.models import floats_of


def strategy_of(layout: str, writer: Writer, folder: str) -> Any:
    from lightning.pytorch import strategies

    from ckpt.integrations import lightning as ours

    arguments: dict[str, Any] = {}
    name = {"ddp": "DDPStrategy", "fsdp": "FSDPStrategy"}.get(layout, "ModelParallelStrategy")
    if layout == "fully_shard":
        arguments = dict(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    if layout == "fsdp":
        arguments = dict(state_dict_type="sharded")
    if writer == "ours":
        return getattr(ours, f"Saving{name}")(folder, **arguments)

    class OnTheCpu(getattr(strategies, name)):  # type: ignore[misc]
        """Lightning refuses its own FSDPStrategy there, and no class that is made from it."""

    return OnTheCpu(**arguments)


def run_lightning(stretch: Stretch, writer: Writer, folder: str) -> Outcome:
    """Fit from the newest checkpoint to the end of the stretch, and let Lightning save there."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size = str(dist.get_world_size())
    os.environ.update(
        LOCAL_RANK=str(dist.get_rank()), RANK=str(dist.get_rank()), WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size, GROUP_RANK="0", TORCHELASTIC_RUN_ID="wild",
        MASTER_ADDR="localhost", MASTER_PORT="29500",
    )  # fmt: skip

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1 if writer == "nothing" else stretch.last_step)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if stretch.layout == "fully_shard":
                mesh = self.device_mesh["data_parallel"]
                fully_shard(self.net[0], mesh=mesh)
                fully_shard(self.net, mesh=mesh)
            if stretch.layout == "fsdp":
                # As the strategy would, but that it names no device on the CPU, which FSDP wants.
                self.net = FullyShardedDataParallel(
                    self.net, device_id=torch.device("cpu"), use_orig_params=True
                )

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            # Lightning begins an epoch's data anew, unless its loader keeps a position.
            batch = floats_of(self.global_step, 6)
            loss = (self.net(batch) - batch).square().mean()
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    strategy = strategy_of(stretch.layout, writer, folder)
    saves = ModelCheckpoint(dirpath=f"{folder}-files", every_n_train_steps=1, filename="{step}")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        callbacks=[] if writer == "nothing" else [saves],
        max_steps=stretch.last_step,
        logger=False,
        enable_checkpointing=writer != "nothing",
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    newest = strategy.latest() if writer == "ours" else newest_of(f"{folder}-files")
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(range(8), batch_size=None), ckpt_path=newest)
    return Outcome(module.losses, tensors_of(trainer) if stretch.size == 1 else {})


def newest_of(folder: str) -> str | None:
    files = sorted(Path(folder).glob("step=*"), key=lambda path: path.stat().st_mtime)
    return str(files[-1]) if files else None


def tensors_of(trainer: Any) -> dict[str, torch.Tensor]:
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    tensors = dict(module.state_dict())
    for name, param in module.named_parameters():
        tensors.update({f"{name}.{key}": each for key, each in optimizer.state[param].items()})
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.clone()
        for name, each in tensors.items()
    }


LIGHTNING = (
    Trainer(
        "lightning.Trainer",
        "lightning",
        "DDP@1, ModelParallelStrategy (FSDP2)@2, FSDPStrategy@2, DDP@2, ModelParallelStrategy@4, "
        "DDP@1",
        stretches(
            ("ddp", 1), ("fully_shard", 2), ("fsdp", 2), ("ddp", 2), ("fully_shard", 4), ("ddp", 1)
        ),
        run_lightning,
        "FSDP wraps in `configure_model`: on the CPU the strategy names no device, which it wants",
    ),
)
