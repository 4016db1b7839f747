"""Writes the corpus: small checkpoints by the real packages, each with what its writer had.

    make corpus        installs the packages into a folder of its own and runs this there

Each folder has `checkpoint`, as the package wrote it, `expected.safetensors`, what its writer had
(of DeepSpeed: what its own converters make of it), and `by.json`: the versions. The tests of
`tests/convert/test_corpus.py` read all of it without the packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def grouped(net: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as trainings have them."""
    params = list(net.parameters())
    decayed = [p for p in params if p.ndim > 1]
    others = [p for p in params if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def keep(folder: Path, tensors: dict[str, torch.Tensor], *packages: str) -> None:
    tensors = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
    save_file(tensors, folder / "expected.safetensors")
    by = {name: version(name) for name in ("torch", *packages)}
    (folder / "by.json").write_text(json.dumps(by) + "\n")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def live(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The weights and moments of a training, by the names of its parameters."""
    tensors = {name: whole(one) for name, one in net.named_parameters()}
    for name, parameter in net.named_parameters():
        for key in MOMENTS:
            tensors[f"{name}.{key}"] = whole(optimizer.state[parameter][key])
    return tensors


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> None:
    for step in range(STEPS):
        net(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# --- DeepSpeed ------------------------------------------------------------------------------------


def deepspeed_zero(folder: Path, rank: int, stage: int, dtype: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    net = model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=grouped(net), config=config)
    for step in range(STEPS):
        data = batch(step, rank)
        loss = engine(data.bfloat16() if dtype == "bf16" else data).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder / "checkpoint"))
    dist.barrier()
    if rank == 0:
        for script in (folder / "checkpoint").glob("*.py"):
            script.unlink()
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder / "checkpoint"))
        keep(
            folder,
            {**weights, **_universal(folder / "checkpoint" / f"global_step{STEPS}")},
            "deepspeed",
        )
    dist.barrier()


def _universal(tagged: Path) -> dict[str, torch.Tensor]:
    """The moments, of DeepSpeed's converter to universal checkpoints."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(tagged), "--output_folder", out, "--inject_missing_state"]
        command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
        alone = {key: value for key, value in os.environ.items() if key not in names}
        subprocess.run(command, check=True, env=alone, stdout=subprocess.DEVNULL)
        tensors = {}
        for place in sorted((Path(out) / "zero").iterdir()):
            for key in MOMENTS if place.is_dir() else ():
                one = torch.load(place / f"{key}.pt", weights_only=False)
                tensors[f"{place.name}.{key}"] = one["param"] if isinstance(one, dict) else one
    shapes = {name: parameter.shape for name, parameter in model().named_parameters()}
    return {name: one.view(shapes[name.rpartition(".")[0]]) for name, one in tensors.items()}


# --- Megatron-Core --------------------------------------------------------------------------------


def megatron(folder: Path, rank: int) -> None:
    """A GPT's weights in Megatron's own form, and what is not sharded in `common.pt`."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")  # it asks, also where there is none
    torch.cuda.synchronize = lambda *_: None
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True
    )
    spec = get_gpt_layer_local_spec()
    gpt = GPTModel(config, spec, vocab_size=16, max_sequence_length=8)
    place = folder / "checkpoint"
    place.mkdir()
    state = {"model": gpt.sharded_state_dict(), "iteration": 5}
    dist_checkpointing.save(state, str(place))
    keep(folder, dict(gpt.named_parameters()), "megatron-core")


# --- torch, as trainers call it -------------------------------------------------------------------


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def rank_files(folder: Path, rank: int) -> None:
    """As the FSDP checkpoint managers of verl and SkyRL do."""
    net, optimizer = sharded()
    train(net, optimizer, rank)
    place, end = folder / "checkpoint", f"world_size_{dist.get_world_size()}_rank_{rank}.pt"
    place.mkdir(exist_ok=True)
    torch.save(net.state_dict(), place / f"model_{end}")
    torch.save(optimizer.state_dict(), place / f"optim_{end}")
    torch.save({"lr_scheduler": {"last_epoch": 3}}, place / f"extra_state_{end}")
    tensors = live(net, optimizer)
    if rank == 0:
        keep(folder, tensors)


def titan(folder: Path, rank: int) -> None:
    """As torchtitan: a flat dict of weights, and an optimizer flattened by names."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    net, optimizer = sharded()
    train(net, optimizer, rank)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer, options=flat),
        "train_state": {"step": torch.tensor(STEPS)},
    }
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    tensors = live(net, optimizer)
    if rank == 0:
        keep(folder, tensors)


def fsdp1_full(folder: Path, rank: int) -> None:
    """A training of FSDP1, gathered and written by torch.save: each tensor has an attribute."""
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, optimizer, rank)
    full = StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(net, full, FullStateDictConfig()):
        weights = net.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(net, optimizer)
    if rank == 0:
        (folder / "checkpoint").mkdir()
        state = {"model": weights, "optimizer": moments, "step": STEPS}
        torch.save(state, folder / "checkpoint" / "training.pt")
        named = {f"{n}.{key}": one[key] for n, one in moments["state"].items() for key in MOMENTS}
        keep(folder, {**weights, **named})


def dcp_async(folder: Path, rank: int) -> None:
    """Nested dicts of FSDP2, by DCP in the background."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net, optimizer = sharded()
    train(net, optimizer, rank)
    weights, moments = get_state_dict(net, optimizer)
    tensors = live(net, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.async_save(state, checkpoint_id=folder / "checkpoint").result()
    if rank == 0:
        keep(folder, tensors)


def accelerate_fsdp2(folder: Path, rank: int, kind: str) -> None:
    """What `Accelerator.save_state` calls for FSDP2, which it does not choose on a CPU."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False
    )
    net, optimizer = sharded()
    train(net, optimizer, rank)
    place = str(folder / "checkpoint")
    save_fsdp_model(plugin, accelerator, net, place)
    save_fsdp_optimizer(plugin, accelerator, optimizer, net, place)
    tensors = live(net, optimizer)
    if rank == 0:
        keep(folder, tensors, "accelerate")


# --- trainers of one process ----------------------------------------------------------------------


def accelerate_plain(folder: Path, rank: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    for step in range(STEPS):
        accelerator.backward(net(batch(step)).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / "checkpoint"))
    keep(folder, live(accelerator.unwrap_model(net), optimizer.optimizer), "accelerate")


def transformers_trainer(folder: Path, rank: int) -> None:
    from transformers import Trainer, TrainingArguments

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(data).square().mean()}

    module = Module()
    arguments = TrainingArguments(
        str(folder / "out"),
        max_steps=STEPS,
        save_steps=STEPS,
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=2,
        disable_tqdm=True,
    )
    data = [{"data": row} for step in range(STEPS) for row in batch(step)]
    trainer = Trainer(module, arguments, train_dataset=data)
    trainer.train()
    shutil.move(folder / "out" / f"checkpoint-{STEPS}", folder / "checkpoint")
    shutil.rmtree(folder / "out")
    optimizer = trainer.optimizer
    keep(folder, live(module.net, getattr(optimizer, "optimizer", optimizer)), "transformers")


def lightning_file(folder: Path, rank: int) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, data: Any, _: int) -> torch.Tensor:
            return self.net(data).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    data = torch.utils.data.DataLoader([batch(step) for step in range(STEPS)], batch_size=None)
    trainer.fit(module, data)
    (folder / "checkpoint").mkdir(exist_ok=True)
    trainer.save_checkpoint(folder / "checkpoint" / "last.ckpt")
    keep(folder, live(module.net, trainer.optimizers[0]), "lightning")


WRITERS: dict[str, tuple[int, Callable[..., None], tuple[Any, ...]]] = {
    **{
        f"deepspeed_zero{stage}_{dtype}": (2, deepspeed_zero, (stage, dtype))
        for stage in (1, 2, 3)
        for dtype in ("fp32", "bf16")
    },
    "verl_fsdp2": (2, rank_files, ()),
    "titan_dcp": (2, titan, ()),
    "fsdp1_full": (2, fsdp1_full, ()),
    "dcp_async": (2, dcp_async, ()),
    "accelerate_fsdp2_sharded": (2, accelerate_fsdp2, ("SHARDED_STATE_DICT",)),
    "accelerate_fsdp2_full": (2, accelerate_fsdp2, ("FULL_STATE_DICT",)),
    "accelerate": (1, accelerate_plain, ()),
    "transformers_trainer": (1, transformers_trainer, ()),
    "lightning": (1, lightning_file, ()),
    "megatron": (1, megatron, ()),
}


def _rank_main(rank: int, name: str, port: int) -> None:
    size, write, more = WRITERS[name]
    environment = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    if size > 1 or name == "megatron":
        os.environ.update(
            {"MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in environment.items()}}
        )
        dist.init_process_group("gloo")
    write(HERE / name, rank, *more)


def main(names: list[str]) -> None:
    for number, name in enumerate(names or WRITERS):
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        port = 29_500 + os.getpid() % 400 + number
        mp.start_processes(_rank_main, (name, port), nprocs=WRITERS[name][0], start_method="spawn")
        print(f"{name}: written", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
