"""Hugging Face's Trainer, stopped and continued. Needs: pip install transformers accelerate

python examples/huggingface_trainer.py runs/trainer
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ckpt
from ckpt.integrations.huggingface import TrainerCheckpoints


def make_trainer(saves: TrainerCheckpoints, scratch: str, epochs: int) -> Trainer:
    """A very small language model on random tokens."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    tokens = torch.randint(0, 50, (24, 8), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=scratch,
        save_strategy="no",  # the callback saves, and the trainer does not
        per_device_train_batch_size=4,
        num_train_epochs=epochs,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[saves])


def main(url: str) -> None:
    """Two epochs, and as if the job had ended there, two more by a new trainer."""
    for epochs in (2, 4):
        with (
            tempfile.TemporaryDirectory() as scratch,
            TrainerCheckpoints(
                url, save=ckpt.EverySteps(6) | ckpt.OnPreemption(), keep=ckpt.KeepLatest(2)
            ) as saves,
        ):
            trainer = make_trainer(saves, scratch, epochs)
            trainer.train(resume_from_checkpoint=saves.resume_from(trainer))
            print(f"trained to step {trainer.state.global_step}")
    print("checkpoints:", [info.step for info in ckpt.list_steps(url)])


if __name__ == "__main__":
    main(sys.argv[1])
