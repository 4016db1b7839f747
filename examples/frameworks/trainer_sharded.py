"""Hugging Face's Trainer with a model that it shards. Needs: pip install transformers accelerate

torchrun --nproc-per-node 2 examples/frameworks/trainer_sharded.py runs/sharded 8 fsdp2
(or fsdp1)
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ckpt
from ckpt.integrations.huggingface import TrainerCheckpoints


def main(url: str, last: int, layout: str) -> None:
    """Train up to step `last`."""
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes)
    tokens = torch.randint(0, 50, (48, 8), generator=torch.Generator().manual_seed(0))
    sharding = {
        "fsdp_version": int(layout[-1]),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "use_orig_params": True,
        "cpu_ram_efficient_loading": False,
        "sync_module_states": False,
    }
    with (
        tempfile.TemporaryDirectory() as scratch,
        TrainerCheckpoints(url, save=ckpt.EverySteps(4)) as saves,
    ):
        arguments = TrainingArguments(
            output_dir=scratch,
            save_strategy="no",  # the callback saves
            fsdp=True,
            fsdp_config=sharding,
            max_steps=last,
            lr_scheduler_type="constant",
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
        )
        trainer = Trainer(
            LlamaForCausalLM(config),
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[saves],
        )
        trainer.train(resume_from_checkpoint=saves.resume_from(trainer))
        for log in trainer.state.log_history if trainer.is_world_process_zero() else ():
            if "loss" in log:
                print(f"step {log['step']}: loss {log['loss']!r}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
