"""Any model under any engine, and what writes its checkpoints: this library, or torch's DCP."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import ckpt
import sharding

Engine = Literal["plain", "ddp", "fsdp2", "fsdp1", "our fully_shard", "our FSDP"]
Writer = Literal["ours", "DCP"]


class Link(NamedTuple):
    """A part of a training: under which engine, on how many ranks."""

    engine: Engine
    size: int

    def __str__(self) -> str:
        return f"{self.engine}@{self.size}"


# One training passes through all of them, a step in each. Sizes that are powers of two: the mean
# of as many equal gradients is exact.
LINKS: dict[Writer, tuple[Link, ...]] = {
    "ours": (
        Link("plain", 1),
        Link("fsdp2", 2),
        Link("our FSDP", 2),
        Link("ddp", 2),
        Link("our fully_shard", 2),
        Link("fsdp1", 2),
        Link("fsdp2", 4),
        Link("plain", 1),
    ),
    # Of the engines, torch's own.
    "DCP": (
        Link("plain", 1),
        Link("fsdp2", 2),
        Link("ddp", 2),
        Link("fsdp1", 2),
        Link("fsdp2", 4),
        Link("plain", 1),
    ),
}


class Training(NamedTuple):
    """A model under an engine, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, loss_of: Callable[[nn.Module, int], torch.Tensor], step: int) -> float:
        """One step on the batch of `step`; the same random numbers wherever it is taken."""
        torch.manual_seed(step)
        self.optimizer.zero_grad()
        loss = loss_of(self.model, step)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def training_of(
    engine: Engine,
    build: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    seed: int,
) -> Training:
    """Weights follow from `seed`; on all ranks of the default group."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrapped(engine, build())
    return Training(model, optimizer(model))


def wrapped(engine: Engine, model: nn.Module) -> nn.Module:
    """`model` under `engine`: a unit for each of its blocks, and one for the rest."""
    kinds = blocks_of(model)
    # No engine shards parameters without dims; all ranks have the same of those.
    scalars = [param for param in model.parameters() if param.ndim == 0]
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine in ("fsdp1", "our FSDP"):
        kind: Any = FullyShardedDataParallel if engine == "fsdp1" else sharding_fsdp()
        options = dict(auto_wrap_policy=ModuleWrapPolicy(kinds), use_orig_params=True)
        if scalars:
            options["ignored_states"] = scalars
        wrapper: nn.Module = kind(model, device_id=torch.device("cpu"), **options)
        return wrapper
    if engine in ("fsdp2", "our fully_shard"):
        shard: Any = fully_shard if engine == "fsdp2" else sharding.fully_shard
        for module in reversed([one for one in model.modules() if type(one) in kinds]):
            shard(module)  # inner ones first
        shard(model, **({"ignored_params": set(scalars)} if scalars else {}))
    return model


def sharding_fsdp() -> type[nn.Module]:
    return sharding.FullyShardedDataParallel


def blocks_of(model: nn.Module) -> set[type[nn.Module]]:
    """The classes that the model's library says to keep whole; none when it says nothing."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    # What is tied to something outside of its block belongs to the unit of the rest.
    tied = {
        id(param)
        for block in blocks
        for param in block.parameters()
        if len(names_of(param, model)) > len(names_of(param, block))
    }
    return {
        type(block) for block in blocks if not tied & {id(param) for param in block.parameters()}
    }


def names_of(param: nn.Parameter, module: nn.Module) -> list[str]:
    return [n for n, p in module.named_parameters(remove_duplicate=False) if p is param]


def save(writer: Writer, training: Training, root: str, step: int) -> None:
    """The checkpoint of `step`, collectively."""
    if writer == "ours":
        ckpt.save({"model": training.model, "optimizer": training.optimizer}, root, step=step)
        return
    dcp.save(dicts_of(training), checkpoint_id=os.path.join(root, str(step)))


def load(writer: Writer, training: Training, root: str, step: int) -> None:
    """The checkpoint of `step` into a training that has not stepped."""
    if writer == "ours":
        state = {"model": training.model, "optimizer": training.optimizer}
        ckpt.load(state, root, step=step)
        return
    dicts = dicts_of(training)
    dcp.load(dicts, checkpoint_id=os.path.join(root, str(step)))
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=dicts["model"],
        optim_state_dict=dicts["optimizer"],
    )


def dicts_of(training: Training) -> dict[str, Any]:
    """As torch's documents say to save a training with DCP.

    It steps an optimizer that has no state, for which schedule-free ones have to be in their mode.
    """
    set_mode = getattr(training.optimizer, "train", None)
    if callable(set_mode):
        set_mode()
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def compute_alike() -> None:
    """From here on, arithmetic of this process does not depend on where its operands lie.

    Kernels with vectors round the last few elements of a tensor in another way than the others, and
    which elements these are differs between a tensor and its shards. In a process that has not
    computed yet, torch takes kernels without, and so does MKL.
    """
    os.environ.update(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE")
    torch.backends.mkldnn.enabled = False
    kernels = torch.backends.cpu.get_cpu_capability()
    if kernels not in ("DEFAULT", "NO AVX"):
        raise RuntimeError(f"expected kernels without vectors, got {kernels}: too late to choose")


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


# What a save or a load of either writer may raise; DCP's own is no Exception.
ERRORS = (Exception, CheckpointException)


def in_a_line(error: BaseException) -> str:
    """An error as a cell of a table has it: of several ranks' errors, that of the first."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
