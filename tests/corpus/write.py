"""Writes the corpus: small checkpoints by the real packages, each with what its writer had.

    make corpus        installs the packages into a folder of its own and runs this there

Each folder has `checkpoint`, as the package wrote it, `expected.safetensors`, what its writer had
(of DeepSpeed: what its own converters make of it), and `by.json`: the versions. The tests of
`tests/convert/test_corpus.py` read all of it without the packages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode

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


def deepspeed_engine(rank: int, stage: int, dtype: str) -> Any:
    """A training of DeepSpeed behind its last step."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

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
    return engine


def deepspeed_zero(folder: Path, rank: int, stage: int, dtype: str) -> None:
    engine = deepspeed_engine(rank, stage, dtype)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

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


def deepspeed_universal(folder: Path, rank: int, stage: int) -> None:
    """What `ds_to_universal` makes of a ZeRO checkpoint, against `zero_to_fp32` and torch's reader;
    of stage 3 against the live engine, which lets its state be gathered.
    """
    engine = deepspeed_engine(rank, stage, "fp32")
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    tensors = {}
    for name, parameter in engine.module.named_parameters() if stage == 3 else ():
        tensors[name] = safe_get_full_fp32_param(parameter)
        for key in MOMENTS:
            tensors[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key)
    engine.save_checkpoint(str(folder / "zero"))
    dist.barrier()
    if rank == 0:
        tagged = folder / "zero" / f"global_step{STEPS}"
        to_universal(tagged, folder / "checkpoint")
        if stage < 3:
            tensors = get_fp32_state_dict_from_zero_checkpoint(str(folder / "zero"))
            tensors |= _universal(tagged)
        shutil.rmtree(folder / "zero")
        (folder / "latest_universal").unlink(missing_ok=True)
        keep(folder, tensors, "deepspeed")
    dist.barrier()


def to_universal(tagged: Path, out: Path) -> None:
    """DeepSpeed's own converter."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder"]
    command += [str(tagged), "--output_folder", str(out), "--inject_missing_state"]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    alone = {key: value for key, value in os.environ.items() if key not in names}
    subprocess.run(command, check=True, env=alone, stdout=subprocess.DEVNULL)


def _universal(tagged: Path) -> dict[str, torch.Tensor]:
    """The moments, of DeepSpeed's converter to universal checkpoints."""
    with tempfile.TemporaryDirectory() as out:
        to_universal(tagged, Path(out))
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

    on_the_cpu()
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


class OnTheCpu(TorchFunctionMode):
    """Gives the CPU to what asks for a GPU, and its dtypes the names that a GPU's have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), int) or "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.device and "cuda" in str(args[0]):
            return torch.device("cpu")
        if func is torch.Tensor.cuda:
            return args[0]
        made = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(made, str):
            return made.replace("torch.", "torch.cuda.", 1)
        return made


class NoStream:
    """A stream or an event where there are none."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: NoStream()


def on_the_cpu() -> None:
    """Megatron asks for a GPU, also where there is none."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    torch.cuda.Stream = torch.cuda.Event = NoStream
    torch.cuda.current_stream = torch.cuda.default_stream = NoStream
    torch.cuda.stream = lambda *_: nullcontext()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.memory_reserved = torch.cuda.memory_allocated = lambda *_: 0


def megatron_optimizer(folder: Path, rank: int) -> None:
    """A GPT that was trained with the distributed optimizer, in the form that loads on any layout
    (`fully_reshardable`). The judge has the slices of the live optimizers, by Megatron's names.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig

    on_the_cpu()
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    with OnTheCpu():
        parallel_state.initialize_model_parallel()
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        spec = get_gpt_layer_local_spec()
        gpt = GPTModel(config, spec, vocab_size=16, max_sequence_length=8)
        sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
        trained = DistributedDataParallel(config, sharded, gpt)
        how = OptimizerConfig(
            optimizer="adam", lr=0.01, use_distributed_optimizer=True, clip_grad=0.0
        )
        optimizer = get_megatron_optimizer(how, [trained])
        places, mask = torch.arange(8).expand(2, 8), torch.ones(2, 1, 8, 8).triu(1).bool()
        for step in range(STEPS):
            trained.zero_grad_buffer()
            tokens = (torch.arange(16).view(2, 8) * (step + 2) + rank) % 16
            trained(tokens, places, mask, labels=tokens).mean().backward()
            trained.finish_grad_sync()
            optimizer.step()
        place = folder / "checkpoint"
        place.mkdir(exist_ok=True)
        weights = gpt.sharded_state_dict()
        form = {"distrib_optim_sharding_type": "fully_reshardable"}
        moments = optimizer.sharded_state_dict(weights, metadata=form)
        state = {"model": weights, "optimizer": moments, "iteration": STEPS}
        dist_checkpointing.save(state, str(place))
        (inner,) = optimizer.chained_optimizers
        own = {}
        for name, parameter in gpt.named_parameters():
            own[name] = {}
            if parameter in inner.model_param_group_index_map:
                start = inner._get_model_param_range_map(parameter)["param"].start
                slices = inner._get_main_param_and_optimizer_states(parameter)
                own[name] = {key: (start, slices[key].detach()) for key in ("param", *MOMENTS)}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if rank:
        return
    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, list[torch.Tensor]] = {}
    for name, parameter in gpt.named_parameters():
        for key in ("param", *MOMENTS):
            slices = sorted(
                (ranks[name][key] for ranks in every if ranks[name]), key=lambda s: s[0]
            )
            whole = torch.cat([part for _, part in slices]).view(parameter.shape)
            saved = f"optimizer.state.{key}.{megatron_name(name)}"
            layers.setdefault(saved, []).append(whole)
        layers.setdefault(megatron_name(name), []).append(parameter.detach())
    for saved, parts in layers.items():
        tensors[saved] = torch.stack(parts) if ".layers." in saved else parts[0]
    keep(folder, tensors, "megatron-core")


def megatron_name(name: str) -> str:
    """The name under which Megatron saves a parameter: layers are stacked, and a norm belongs to
    the linear layer behind it.
    """
    name = re.sub(r"layers\.\d+\.", "layers.", name)
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def megatron_fsdp(folder: Path, rank: int) -> None:
    """A training of Megatron-FSDP, whose DTensors are cut unevenly, by DCP (`fsdp_dtensor`)."""
    import torch.distributed.checkpoint as dcp
    from megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard import fully_shard
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    on_the_cpu()
    with OnTheCpu():
        net = model()
        net, optimizer = fully_shard(
            module=net,
            optimizer=torch.optim.AdamW(net.parameters(), lr=0.01),
            fsdp_unit_modules=[nn.Linear],
            device_mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")),
            dp_shard_dim="dp",
            tp_dim="tp",
            device=torch.device("cpu"),
            average_in_collective=True,
        )
        # It gives the state that the optimizer had when it was made: none.
        optimizer._optimizer_state_dict_post_hooks.clear()
        train(net, optimizer, rank)
        weights = net.state_dict()
        each = zip(optimizer.param_groups[0]["params"], weights.values(), strict=True)
        for parameter, held in each:
            # As Megatron's own optimizer does: a rank without elements has them all the same.
            if not optimizer.state[parameter]:
                placed = held.device_mesh, held.placements
                whole = {"shape": held.shape, "stride": held.stride()}
                optimizer.state[parameter] = {"step": torch.tensor(float(STEPS))} | {
                    key: DTensor.from_local(held.to_local().clone(), *placed, **whole)
                    for key in MOMENTS
                }
        state = {"model": weights, "optimizer": optimizer.state_dict()}
        # In one order on all ranks: there is a collective for each.
        state["optimizer"]["state"] = dict(sorted(state["optimizer"]["state"].items()))
        own = {name: one.to_local() for name, one in weights.items()}
        for number, name in enumerate(list(own)):
            moments = state["optimizer"]["state"][number]
            own |= {f"{name}.{key}": moments[key].to_local() for key in MOMENTS}
        preprocess_state_dict_for_uneven_dtensor(state["optimizer"])
        dcp.save(state, checkpoint_id=folder / "checkpoint")
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    tensors = {
        name.removeprefix("module."): torch.cat([ranks[name] for ranks in every]) for name in own
    }
    if rank == 0:
        keep(folder, tensors, "megatron-core")


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
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    net, optimizer = fsdp1(rank)
    # What "offloads" from a CPU gives one memory to all states.
    configs = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    full = StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(net, full, *configs):
        weights = net.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(net, optimizer)
    tensors = gathered(net, optimizer)
    if rank == 0:
        (folder / "checkpoint").mkdir()
        state = {"model": weights, "optimizer": moments, "step": STEPS}
        torch.save(state, folder / "checkpoint" / "training.pt")
        keep(folder, tensors)


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


def fsdp1(rank: int, *, by_layer: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A training of FSDP1; of two units with flat parameters, or of one with the original ones."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    net, cpu = model(), torch.device("cpu")
    if by_layer:
        net[0] = FullyShardedDataParallel(net[0], device_id=cpu)
    net = FullyShardedDataParallel(net, device_id=cpu, use_orig_params=not by_layer)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, optimizer, rank)
    return net, optimizer


def gathered(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What `live` gives, of FSDP1: the flat shards of all ranks joined; collective.

    Not by torch's full `optim_state_dict`, which on the CPU gives one memory to all states.
    """
    tensors = {}
    shapes = {name: parameter.shape for name, parameter in model().named_parameters()}
    for name, parameter in net.named_parameters():
        name = name.removeprefix("_fsdp_wrapped_module.")
        own = {name: parameter.detach()}
        own |= {
            f"{name}.{key}": optimizer.state[parameter][key] for key in MOMENTS if len(parameter)
        }
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        for key in (name, *(f"{name}.{moment}" for moment in MOMENTS)):
            shards = [held[key] for held in every if key in held]
            tensors[key] = torch.cat(shards).view(shapes[name])
    return tensors


def flat_gathered(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What `gathered` gives, of flat parameters; collective."""
    tensors = {}
    for flat in net.parameters():
        for end, local in {"": flat.detach(), **optimizer.state[flat]}.items():
            if end != "step":
                every = [torch.empty_like(local) for _ in range(dist.get_world_size())]
                dist.all_gather(every, local)
                parts = torch.cat(every)[: sum(flat._numels)].split(flat._numels)
                for part, unit, shape in zip(parts, flat._param_infos, flat._shapes, strict=True):
                    name = f"{unit.module_name}.{unit.param_name}"
                    # The first layer is a unit of its own.
                    name = name if unit.module_name else f"0.{unit.param_name}"
                    tensors[f"{name}.{end}" if end else name] = part.view(shape)
    return tensors


def fsdp1_files(folder: Path, rank: int, kind: str, by_layer: bool) -> None:
    """The state dicts of FSDP1 that are not gathered, by torch.save on each rank."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    net, optimizer = fsdp1(rank, by_layer=by_layer)
    with FullyShardedDataParallel.state_dict_type(net, StateDictType[kind]):
        weights = net.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(net, optimizer)
    place = folder / "checkpoint"
    place.mkdir(exist_ok=True)
    if by_layer:
        state = {"model": weights, "optimizer": moments, "step": STEPS}
        torch.save(state, place / f"rank_{rank}.pt")
    else:
        torch.save(weights, place / f"model_rank{rank}.pt")
        torch.save(moments, place / f"optimizer_rank{rank}.pt")
    tensors = (flat_gathered if by_layer else gathered)(net, optimizer)
    if rank == 0:
        keep(folder, tensors)


def fsdp1_sharded(folder: Path, rank: int) -> None:
    """A training of FSDP1 in its sharded form, by DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net, optimizer = fsdp1(rank)
    weights, moments = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "checkpoint")
    tensors = gathered(net, optimizer)
    if rank == 0:
        keep(folder, tensors)


def accelerate_fsdp1(folder: Path, rank: int, kind: str, use_dcp: bool = True) -> None:
    """What `Accelerator.save_state` calls for FSDP1, and its scheduler."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
    )

    # Accelerate asks for offloading, which frees the memory that is on the CPU already: a crash.
    for config in (FullStateDictConfig, FullOptimStateDictConfig):
        config.offload_to_cpu = property(lambda _: False, lambda *_: None)
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, state_dict_type=kind, cpu_ram_efficient_loading=False
    )
    net, optimizer = fsdp1(rank)
    plugin.set_state_dict_type(kind)
    FullyShardedDataParallel.set_state_dict_type(
        net, plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    place = folder / "checkpoint"
    save_fsdp_model(plugin, accelerator, net, str(place), use_dcp=use_dcp)
    save_fsdp_optimizer(plugin, accelerator, optimizer, net, str(place), use_dcp=use_dcp)
    tensors = gathered(net, optimizer)
    if rank == 0:
        torch.save(schedule.state_dict(), place / "scheduler.bin")
        keep(folder, tensors, "accelerate")


def lightning_folder(folder: Path, rank: int) -> None:
    """Lightning's ModelParallelStrategy: a DCP directory, and the rest next to it."""
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class OnTheCpu(ModelParallelStrategy):
        """Lightning refuses the CPU by the class's name."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, data: Any, _: int) -> torch.Tensor:
            return self.net(data).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

    os.environ.update(LOCAL_WORLD_SIZE="2", GROUP_RANK="0", TORCHELASTIC_RUN_ID="corpus")
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=OnTheCpu(data_parallel_size=2, tensor_parallel_size=1),
        plugins=[TorchElasticEnvironment()],
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    data = [batch(step, rank) for step in range(STEPS)]
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    trainer.save_checkpoint(folder / "checkpoint")
    tensors = live(module.net, trainer.optimizers[0])
    if rank == 0:
        keep(folder, tensors, "lightning")


def torch_checkpointing(folder: Path, rank: int) -> None:
    """A file of torch.save per item and rank, and a pickle that says how they lie."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    net, optimizer = sharded()
    train(net, optimizer, rank)
    weights, moments = get_state_dict(net, optimizer)
    plain = torch.tensor  # it gathers what the ranks have through a GPU, also where there is none
    torch.tensor = lambda *data, device=None, **more: plain(*data, **more)
    torch.Tensor.cuda = lambda tensor: tensor
    config = CheckpointManager.Config.with_sync_save()
    config.items = {key: ItemSpec(resharder=DefaultResharder()) for key in ("model", "optimizer")}
    # Its direct writes end at a length that ext4 refuses.
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()
    state = {"model": weights, "optimizer": moments, "step": STEPS}
    manager.save(str(folder / "checkpoint"), state)
    manager.close()
    tensors = live(net, optimizer)
    if rank == 0:
        keep(folder, tensors, "torch-checkpointing")


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


# --- weights alone --------------------------------------------------------------------------------


def peft_adapter(folder: Path, rank: int) -> None:
    """LoRA, trained for a step; `save_pretrained` writes the adapter alone."""
    from peft import LoraConfig, get_peft_model, load_peft_weights

    config = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    adapted = get_peft_model(model(), config)
    adapted.save_pretrained(folder / "checkpoint")
    (folder / "checkpoint" / "README.md").unlink()
    keep(folder, load_peft_weights(str(folder / "checkpoint"), device="cpu"), "peft")


def transformers_index(folder: Path, rank: int) -> None:
    """A model in several files with an index, tied weights among them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder / "checkpoint", max_shard_size="4KB")
    read = GPT2LMHeadModel.from_pretrained(folder / "checkpoint")
    keep(folder, dict(read.named_parameters()), "transformers")


def timm_saver(folder: Path, rank: int) -> None:
    """What timm's training script keeps with `CheckpointSaver`."""
    from types import SimpleNamespace

    import timm
    from timm.models import load_state_dict
    from timm.utils import CheckpointSaver

    torch.manual_seed(0)
    net = timm.create_model(
        "test_vit", img_size=16, patch_size=8, num_classes=3, depth=1, embed_dim=16, num_heads=2
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(torch.randn(2, 3, 16, 16)).square().mean().backward()
    optimizer.step()
    arguments = SimpleNamespace(model="test_vit", opt="adamw")
    saver = CheckpointSaver(net, optimizer, args=arguments, checkpoint_dir=str(folder))
    saver.save_checkpoint(epoch=0, metric=0.5)
    place = folder / "checkpoint"
    place.mkdir()
    shutil.move(folder / "last.pth.tar", place / "last.pth.tar")
    for other in (*folder.glob("*.pth.tar"), *folder.glob("*.csv")):
        other.unlink()
    keep(folder, load_state_dict(str(place / "last.pth.tar"), weights_only=False), "timm")


def orbax(folder: Path, rank: int, ocdbt: bool) -> None:
    """A training of JAX: a nested dict of parameters and moments, and a count of steps."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    random = np.random.default_rng(0)
    shapes = {"first": {"kernel": (5, 7), "bias": (7,)}, "second": {"kernel": (7, 3)}}

    def filled(tree: Any, dtype: Any) -> Any:
        if isinstance(tree, dict):
            return {key: filled(item, dtype) for key, item in tree.items()}
        return jax.numpy.asarray(random.standard_normal(tree), dtype=dtype)

    state = {
        "params": filled(shapes, jax.numpy.float32),
        "half": filled(shapes, jax.numpy.bfloat16),
        "step": jax.numpy.asarray(STEPS, dtype=jax.numpy.int32),
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=False)
    place = (folder / "checkpoint").absolute()
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(place, args=ocp.args.PyTreeSave(state))
        read = checkpointer.restore(place)
    leaves = jax.tree_util.tree_leaves_with_path(read)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): one for path, one in leaves}
    tensors = {
        name: torch.from_numpy(np.array(one).view(np.int16)).view(torch.bfloat16)
        if one.dtype == jax.numpy.bfloat16
        else torch.from_numpy(np.array(one))
        for name, one in named.items()
    }
    keep(folder, tensors, "orbax-checkpoint", "jax", "tensorstore")


def compressed(folder: Path, rank: int, preset: str, sizes: tuple[int, int]) -> None:
    """Quantized weights of compressed-tensors; "dense." is what it makes of them again."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from safetensors.torch import load_file

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(*sizes), nn.Linear(sizes[1], 32, bias=False)).bfloat16()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(net, QuantizationConfig(config_groups={"all": scheme}))
    how = scheme.weights
    for layer in net:  # as an observer does: the extent of what shares a scale
        weight = layer.weight.detach()
        rows, columns = (-(-n // m) for n, m in zip(weight.shape, layer.weight_scale.shape))  # noqa: B905
        rows, columns = how.block_structure or (rows, columns)
        bands = [band.split(columns, 1) for band in weight.split(rows)]
        low, high = (
            torch.stack([torch.stack([getattr(part, end)() for part in band]) for band in bands])
            for end in ("min", "max")
        )
        whole = getattr(layer, "weight_global_scale", None)
        if whole is not None:
            whole.data.copy_(generate_gparam(weight.min(), weight.max()))
        scale, _ = calculate_qparams(low, high, how, global_scale=whole)
        layer.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(net)
    compressor.compress_model(net)
    place = folder / "checkpoint"
    place.mkdir()
    (place / "config.json").write_text("{}")
    save_file({n: t.contiguous() for n, t in net.state_dict().items()}, place / "model.safetensors")
    compressor.update_config(str(place))
    compressor.decompress_model(net)
    dense = {
        f"dense.{name}": one for name, one in net.named_parameters() if name.endswith("weight")
    }
    keep(folder, {**load_file(place / "model.safetensors"), **dense}, "compressed-tensors")


WRITERS: dict[str, tuple[int, Callable[..., None], tuple[Any, ...]]] = {
    **{
        f"deepspeed_zero{stage}_{dtype}": (2, deepspeed_zero, (stage, dtype))
        for stage in (1, 2, 3)
        for dtype in ("fp32", "bf16")
    },
    "deepspeed_universal": (2, deepspeed_universal, (2,)),
    "deepspeed_universal_zero3": (2, deepspeed_universal, (3,)),
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
    "megatron_optimizer": (2, megatron_optimizer, ()),
    "megatron_fsdp": (2, megatron_fsdp, ()),
    "fsdp1_sharded": (2, fsdp1_sharded, ()),
    "dcp_torch_2_6": (2, fsdp1_sharded, ()),
    "dcp_torch_2_15": (2, dcp_async, ()),
    "fsdp1_sharded_files": (2, fsdp1_files, ("SHARDED_STATE_DICT", False)),
    "fsdp1_local": (2, fsdp1_files, ("LOCAL_STATE_DICT", True)),
    "fsdp1_local_original": (2, fsdp1_files, ("LOCAL_STATE_DICT", False)),
    "accelerate_fsdp1_sharded": (2, accelerate_fsdp1, ("SHARDED_STATE_DICT",)),
    "accelerate_fsdp1_files": (2, accelerate_fsdp1, ("SHARDED_STATE_DICT", False)),
    "accelerate_fsdp1_local": (2, accelerate_fsdp1, ("LOCAL_STATE_DICT",)),
    "accelerate_fsdp1_full": (2, accelerate_fsdp1, ("FULL_STATE_DICT",)),
    "lightning_folder": (2, lightning_folder, ()),
    "torch_checkpointing": (2, torch_checkpointing, ()),
    "peft": (1, peft_adapter, ()),
    "transformers_index": (1, transformers_index, ()),
    "timm": (1, timm_saver, ()),
    "compressed_float8": (1, compressed, ("FP8_BLOCK", (144, 136))),
    "compressed_mxfp4": (1, compressed, ("MXFP4A16", (64, 32))),
    "compressed_nvfp4": (1, compressed, ("NVFP4A16", (64, 32))),
    "orbax": (1, orbax, (True,)),
    "orbax_zarr": (1, orbax, (False,)),
}


def _rank_main(rank: int, name: str, port: int, folder: str) -> None:
    size, write, more = WRITERS[name]
    environment = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    if size > 1 or name == "megatron":
        os.environ.update(
            {"MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in environment.items()}}
        )
        dist.init_process_group("gloo")
    write(Path(folder), rank, *more)


# What is written by another torch than the rest, by its version.
OTHERS = {"2.6.0": ["dcp_torch_2_6"], "2.15.0": ["dcp_torch_2_15", "timm"]}


def main(names: list[str]) -> None:
    elsewhere = [name for listed in OTHERS.values() for name in listed]
    cases = [case for name in names for case in OTHERS.get(name, [name])]
    for number, name in enumerate(cases or [one for one in WRITERS if one not in elsewhere]):
        # Packages write the path into their files: one that says nothing of this machine.
        folder = Path(tempfile.gettempdir(), "corpus", name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        port = 29_500 + os.getpid() % 400 + number
        how = (name, port, str(folder))
        mp.start_processes(_rank_main, how, nprocs=WRITERS[name][0], start_method="spawn")
        shutil.rmtree(HERE / name, ignore_errors=True)
        shutil.move(folder, HERE / name)
        print(f"{name}: written", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
