"""Training loops of other libraries, stopped and resumed: they must end as if they had not been.

Method: a loop runs to its end, and saves on the way. A new one, from other weights, resumes there
and runs to the same end; losses and all tensors must be equal, bit for bit.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ckpt
from tests.wild.engines import ERRORS, Writer, compute_alike, in_a_line
from tests.wild.models import GROUPED, floats_of, made_of, tokens_of
from tests.wild.resuming import difference, leaves

STEPS, SAVED = 5, 2


class Framework(NamedTuple):
    """A row of the table. `run` raises on any rank when its check fails."""

    name: str
    package: str
    what: str
    size: int
    run: Callable[[Writer, str], None]


class Parts(NamedTuple):
    """What a loop trains, and what else belongs to its state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    others: dict[str, Any]


def save(writer: Writer, parts: Parts, root: str) -> None:
    if writer == "ours":
        state = {"model": parts.model, "optimizer": parts.optimizer, **parts.others}
        ckpt.save(state, root, step=SAVED)
        return
    model, optimizer = get_state_dict(parts.model, parts.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, **parts.others}, checkpoint_id=root)


def load(writer: Writer, parts: Parts, root: str) -> None:
    if writer == "ours":
        ckpt.load({"model": parts.model, "optimizer": parts.optimizer, **parts.others}, root)
        return
    model, optimizer = get_state_dict(parts.model, parts.optimizer)
    dcp.load({"model": model, "optimizer": optimizer, **parts.others}, checkpoint_id=root)
    set_state_dict(parts.model, parts.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def check_loop(
    make: Callable[[int], Parts],
    train: Callable[[Parts, range], Iterator[float]],
    writer: Writer,
    root: str,
) -> None:
    """`train` yields the loss of each step; `make` gets a seed for the weights."""
    first, losses = make(1), []
    for step, loss in enumerate(train(first, range(1, STEPS + 1)), 1):
        losses.append(loss)
        if step == SAVED:
            save(writer, first, root)
    second = make(2)
    load(writer, second, root)
    resumed = list(train(second, range(SAVED + 1, STEPS + 1)))
    if resumed != losses[SAVED:]:
        raise AssertionError(f"losses {resumed} after the load, {losses[SAVED:]} without a stop")
    if why := difference(tensors_of(second), tensors_of(first)):
        raise AssertionError(why)


def tensors_of(parts: Parts) -> dict[str, Any]:
    outcomes = dict(leaves("model", parts.model.state_dict()))
    for name, param in parts.model.named_parameters():
        outcomes.update(leaves(f"optimizer.{name}", dict(parts.optimizer.state.get(param, {}))))
    for key, other in parts.others.items():
        if isinstance(other, nn.Module):
            outcomes.update(leaves(key, other.state_dict()))
    return outcomes


# --- Accelerate ----------------------------------------------------------------------------------


def accelerate_loop(writer: Writer, root: str) -> None:
    """`prepare` wraps the model, the optimizer, the scheduler and a loader that is in an epoch."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")  # read, and not used: there is a group already
    configuration = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=3
    )
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    samples = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))

    def make(seed: int) -> Parts:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 6))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        data: Any = ckpt.PerRank(loader) if writer == "ours" else loader
        return Parts(model, optimizer, {"scheduler": scheduler, "data": data})

    def train(parts: Parts, steps: range) -> Iterator[float]:
        loader = parts.others["data"]
        batches = iter(loader.value if writer == "ours" else loader)
        for step in steps:
            batch = next(batches)
            torch.manual_seed(step)
            parts.optimizer.zero_grad()
            loss = (parts.model(batch) - batch).square().mean()
            accelerator.backward(loss)
            parts.optimizer.step()
            parts.others["scheduler"].step()
            yield float(loss.detach())

    check_loop(make, train, writer, root)


# --- transformers with tensor parallelism --------------------------------------------------------


def tensor_parallel_loop(writer: Writer, root: str) -> None:
    """A model that `from_pretrained` cuts over the ranks by its own plan."""
    import transformers
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def make(seed: int) -> Parts:
        folder = f"{root}-pretrained-{seed}"
        if dist.get_rank() == 0:
            torch.manual_seed(seed)
            made: Any = made_of("LlamaForCausalLM", "LlamaConfig", GROUPED)
            made.save_pretrained(folder)
        dist.barrier()
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder, tp_plan="auto", device_mesh=mesh
        )
        if not any(hasattr(param, "placements") for param in model.parameters()):
            raise AssertionError("nothing was cut")
        # The ones with many tensors at once take no mix of plain ones and DTensors.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        return Parts(model.train(), optimizer, {})

    def train(parts: Parts, steps: range) -> Iterator[float]:
        for step in steps:
            tokens = tokens_of(step)
            parts.optimizer.zero_grad()
            loss = parts.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            parts.optimizer.step()
            yield float(loss.detach())

    check_loop(make, train, writer, root)


# --- averages, channels last ---------------------------------------------------------------------


def average_loop(writer: Writer, root: str) -> None:
    """AveragedModel beside a convolutional network in channels-last memory."""

    def make(seed: int) -> Parts:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
        ).to(memory_format=torch.channels_last)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        if dist.is_initialized():
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return Parts(model, optimizer, {"average": average})

    def train(parts: Parts, steps: range) -> Iterator[float]:
        for step in steps:
            images = floats_of(step, 3, 8, 8).to(memory_format=torch.channels_last)
            parts.optimizer.zero_grad()
            loss = parts.model(images).square().mean()
            loss.backward()
            parts.optimizer.step()
            inner = parts.model.module if dist.is_initialized() else parts.model
            parts.others["average"].update_parameters(inner)
            yield float(loss.detach())

    check_loop(make, train, writer, root)


# --- loaders of data -----------------------------------------------------------------------------


def stateful_loader(writer: Writer, root: str) -> None:
    """torchdata's loader in the middle of a shuffled epoch; each rank has its own share."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def make(seed: int) -> Parts:
        samples = list(range(48))
        sampler = StatefulDistributedSampler(
            samples, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=True, seed=5
        )
        loader = StatefulDataLoader(samples, batch_size=2, sampler=sampler)
        torch.manual_seed(seed)
        model = DistributedDataParallel(nn.Linear(1, 1))
        data: Any = ckpt.PerRank(loader) if writer == "ours" else loader
        return Parts(model, torch.optim.SGD(model.parameters(), lr=1e-4), {"data": data})

    def train(parts: Parts, steps: range) -> Iterator[float]:
        loader = parts.others["data"]
        batches = iter(loader.value if writer == "ours" else loader)
        for _ in steps:
            batch = next(batches).float().unsqueeze(1)
            parts.optimizer.zero_grad()
            loss = (parts.model(batch) - batch).square().mean()
            loss.backward()
            parts.optimizer.step()
            yield float(loss.detach())

    check_loop(make, train, writer, root)


# --- Lightning -----------------------------------------------------------------------------------


def lightning_loop(writer: Writer, root: str) -> None:
    """Lightning's Trainer with FSDP2, and a callback of a dozen lines that saves and loads."""
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
                mesh = self.device_mesh["data_parallel"]
                fully_shard(self.net[0], mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return (self.net(batch) - batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Saves(lightning.Callback):
        def __init__(self, resumes: bool) -> None:
            self.resumes, self.losses = resumes, []

        def on_train_start(self, trainer: Any, module: Any) -> None:
            if self.resumes:
                load(writer, Parts(module, trainer.optimizers[0], {}), root)

        def on_train_batch_end(self, trainer: Any, module: Any, output: Any, *_: Any) -> None:
            self.losses.append(float(output["loss"]))
            if not self.resumes and trainer.global_step == SAVED:
                save(writer, Parts(module, trainer.optimizers[0], {}), root)

    def run(seed: int, steps: range) -> tuple[Saves, dict[str, Any]]:
        torch.manual_seed(seed)
        saves, module = Saves(resumes=steps.start > 1), Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=ModelParallelStrategy(
                data_parallel_size=dist.get_world_size(), tensor_parallel_size=1
            ),
            plugins=[TorchElasticEnvironment()],
            callbacks=[saves],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        batches = [floats_of(step, 6) for step in steps]
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        return saves, tensors_of(Parts(module, trainer.optimizers[0], {}))

    size = str(dist.get_world_size())
    os.environ.update(
        LOCAL_WORLD_SIZE=size, GROUP_RANK="0", TORCHELASTIC_RUN_ID="wild",
        MASTER_ADDR="localhost", MASTER_PORT="29500",
    )  # fmt: skip
    whole, wanted = run(1, range(1, STEPS + 1))
    resumed, got = run(2, range(SAVED + 1, STEPS + 1))
    if resumed.losses != whole.losses[SAVED:]:
        raise AssertionError(f"losses {resumed.losses}, {whole.losses[SAVED:]} without a stop")
    if why := difference(got, wanted):
        raise AssertionError(why)


FRAMEWORKS = (
    Framework("AveragedModel", "torch", "EMA, channels-last, BatchNorm, plain", 1, average_loop),
    Framework("AveragedModel, DDP", "torch", "the same under DDP", 2, average_loop),
    Framework(
        "Accelerate", "accelerate", "own loop, scheduler, stateful loader", 1, accelerate_loop
    ),
    Framework("Accelerate, DDP", "accelerate", "the same on 2 ranks", 2, accelerate_loop),
    Framework(
        'tp_plan="auto"', "transformers", "Llama, cut by the library", 2, tensor_parallel_loop
    ),
    Framework(
        "Trainer with ModelParallelStrategy", "lightning", "FSDP2, own callback", 2, lightning_loop
    ),
    Framework("StatefulDataLoader", "torchdata", "own position per rank", 2, stateful_loader),
)


def try_framework(row: Framework, writer: Writer) -> str:
    """What failed on any rank; empty when nothing did."""
    from tests.ranks import RanksFailed, run_ranks

    with tempfile.TemporaryDirectory() as folder:
        try:
            answers: Sequence[str] = run_ranks(
                row.size,
                run_framework,
                row,
                writer,
                str(Path(folder) / "root"),
                group=row.size > 1,
                timeout_seconds=600,
            )
        except RanksFailed as error:
            return in_a_line(error)
    return next((answer for answer in answers if answer), "")


def run_framework(row: Framework, writer: Writer, root: str) -> str:
    compute_alike()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            row.run(writer, root)
        except ERRORS as error:
            return in_a_line(error)
    return ""
