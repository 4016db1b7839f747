"""torchtitan's own trainer, with its own checkpoint manager (DCP) and with ours."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.wild.handing_on import Outcome, Stretch, Trainer, Writer, stretches

STEPS, SAMPLES, LENGTH = 5, 2, 16
# torchtitan's names of what a layout is; the rest of the ranks shard the data.
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fsdp": {},
    "hsdp": dict(data_parallel_replicate_degree=2),
    "pp": dict(
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
    ),
}


def stand_in_for_a_gpu() -> None:
    """Have torchtitan take the CPU for its device: it knows accelerators alone.

    What its trainer asks of a device beside computing is answered here: a name, memory, and that
    nothing is pending. To be called before anything of its distributed part is imported. Shorter
    deadlines of groups after the first step are left out, which need a torch newer than 2.13.
    """
    import torchtitan.tools.utils as theirs

    def nothing(*_: Any, **named: Any) -> None:
        return None

    theirs.device_type = "cpu"
    theirs.device_module = SimpleNamespace(
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
        reset_peak_memory_stats=nothing,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
        memory_stats=lambda device: {},
    )
    import torchtitan.distributed.utils

    torchtitan.distributed.utils.set_pg_timeouts = nothing


def trainer_of(stretch: Stretch, writer: Writer, folder: str, own_loader: bool) -> Any:
    """torchtitan's Trainer for its debug model of Llama 3, with half of the layers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size))
    stand_in_for_a_gpu()
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from ckpt.integrations.torchtitan import TorchtitanCheckpoints

    config = llama3_debugmodel()
    config.dump_folder = folder
    is_first = writer == "nothing" or stretch.last_step == 1
    config.debug.seed = 1 if is_first else 1 + stretch.last_step  # later weights are loaded
    config.validator.enable = False
    layers = config.model_spec.model.layers[:4]
    for layer in layers:
        # Their other kinds of attention are compiled. This one has no masks between documents.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.model.layers = layers
    config.tokenizer, config.dataloader = data_of(own_loader)

    for name, degree in LAYOUTS[stretch.layout].items():
        setattr(config.parallelism, name, degree)
    config.parallelism.spmd_backend = "partial_dtensor"
    is_pipeline = config.parallelism.pipeline_parallel_degree > 1
    replicas = 1 if is_pipeline else size
    training = config.training
    training.seq_len, training.steps = LENGTH, stretch.last_step
    training.local_batch_size = SAMPLES if is_pipeline else 1
    training.global_batch_size = SAMPLES * replicas
    training.disable_cuda_graphs = True  # refused beside pipelines, wherever it runs
    training.mixed_precision_param = "float32"
    training.max_norm = 1e9  # a norm is summed up in another order where gradients are cut
    config.lr_scheduler.total_steps = STEPS
    config.optimizer.implementation = "for-loop"
    manager = TorchtitanCheckpoints if writer == "ours" else CheckpointManager
    config.checkpoint = manager.Config(
        enable=writer != "nothing", interval=100, last_save_model_only=False
    )
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                # What torchtitan wants, no division, is another operation by default: not gloo's.
                module.set_force_sum_reduction_for_comms(True)
    if is_pipeline:
        trainer.pp_schedule = WholeBatches(trainer.pp_schedule)
    return trainer


class WholeBatches:
    """A schedule as torchtitan calls it, with microbatches: torch 2.13 takes a whole batch."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def step(
        self, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, return_outputs: bool, **named: Any
    ) -> None:
        arguments = [torch.cat(each) for each in zip(*arg_mbs or (), strict=True)]
        for key in kwarg_mbs[0]:
            named[key] = torch.cat([each[key] for each in kwarg_mbs])
        target = torch.cat(target_mbs) if target_mbs else None
        self.schedule.step(*arguments, target=target, return_outputs=return_outputs, **named)


def data_of(own_loader: bool) -> tuple[Any, Any]:
    """Configurations of a tokenizer and of a loader: torchtitan's, which keeps the position of each
    data-parallel rank, or one that gives all ranks the same, so that layouts can be compared.
    """
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    class Letters(BaseTokenizer):
        """A token for each letter."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, text: str, **_: Any) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join(map(chr, tokens))

        def get_vocab_size(self) -> int:
            return 256

    class Same(BaseDataLoader):
        """The same samples on all ranks."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, local_batch_size: int, **_: Any) -> None:
            self.batch_size, self.read = local_batch_size, 0

        def __iter__(self) -> Iterator[Any]:
            while True:
                chosen = torch.Generator().manual_seed(self.read)
                tokens = torch.randint(0, 256, (self.batch_size, LENGTH + 1), generator=chosen)
                self.read += 1
                positions = torch.arange(LENGTH).expand(self.batch_size, LENGTH)
                yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"read": self.read}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.read = state["read"]

    if not own_loader:
        return Letters.Config(), Same.Config()
    DATASETS["tried"] = DatasetConfig(
        path="made here", loader=texts, sample_processor=lambda sample: sample["text"]
    )
    return Letters.Config(), HuggingFaceTextDataLoader.Config(dataset="tried")


def texts(path: str) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"text": f"{number} is {path}. " * 9} for number in range(64)])


def run_titan(stretch: Stretch, writer: Writer, folder: str, own_loader: bool = False) -> Outcome:
    trainer = trainer_of(stretch, writer, folder, own_loader)
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def noted(step: int, loss: float, *rest: Any, **named: Any) -> None:
        losses.append(float(loss))
        log(step, loss, *rest, **named)

    trainer.metrics_processor.log = noted
    trainer.train()
    trainer.close()
    return Outcome(losses, tensors_of(trainer) if stretch.size == 1 else {})


def tensors_of(trainer: Any) -> dict[str, torch.Tensor]:
    """All tensors of a trainer on one rank, whose FSDP leaves all of each there."""
    tensors = {f"optimizer.{k}": v for k, v in trainer.optimizers.state_dict().items()}
    for part in trainer.model_parts:
        tensors.update(part.state_dict())
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor)
    }


REMARK = (
    "on the CPU with a stand-in for an accelerator, attention without masks, losses summed up by "
    "gloo; torch 2.13 lacks two functions that torchtitan 0.3 calls (microbatches in the step of a "
    "schedule, deadlines of groups), so the tests give it them"
)
TITAN = (
    Trainer(
        "torchtitan.trainer",
        "torchtitan",
        "debug model of Llama 3: plain@1, FSDP@2, interleaved pipeline@2, HSDP@4, plain@1",
        stretches(("plain", 1), ("fsdp", 2), ("pp", 2), ("hsdp", 4), ("plain", 1)),
        run_titan,
        REMARK,
    ),
    Trainer(
        "torchtitan.trainer, its own loader",
        "torchtitan",
        "plain@1, interleaved pipeline@2, plain@1, with the position in a data set of texts",
        stretches(("plain", 1), ("pp", 2), ("plain", 1)),
        functools.partial(run_titan, own_loader=True),
        REMARK,
    ),
)
