"""Hugging Face's Trainer with our callback."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ckpt
from ckpt.integrations.huggingface import TrainerCheckpoints


def main(url: str) -> None:
    """Train for some epochs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    tokens = torch.randint(0, 50, (24, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with (
        tempfile.TemporaryDirectory() as scratch,
        TrainerCheckpoints(url, save=ckpt.EverySteps(100) | ckpt.OnPreemption()) as saves,
    ):
        arguments = TrainingArguments(
            output_dir=scratch,
            save_strategy="no",
            per_device_train_batch_size=4,
            num_train_epochs=9,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[saves]
        )
        trainer.train(resume_from_checkpoint=saves.resume_from(trainer))


if __name__ == "__main__":
    main(sys.argv[1])
