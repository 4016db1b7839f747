"""TRL's SFTTrainer, cut and resumed. Needs: pip install trl (transformers, tokenizers, datasets)

python examples/frameworks/trl_sft.py runs/sft 8
"""

import sys
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import ckpt
from ckpt.integrations.huggingface import TrainerCheckpoints

WORDS = ["<pad>", "<eos>", "<unk>", "one", "two", "three", "four"]


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of a few words."""
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def main(url: str, last: int) -> None:
    """Train up to step `last`."""
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(WORDS), num_hidden_layers=2, **sizes)
    texts = [{"text": " ".join(WORDS[3 + (n + m) % 4] for m in range(6))} for n in range(24)]
    with (
        tempfile.TemporaryDirectory() as scratch,
        TrainerCheckpoints(url, save=ckpt.EverySteps(4)) as saves,
    ):
        arguments = SFTConfig(
            output_dir=scratch,
            save_strategy="no",  # the callback saves
            max_steps=last,
            lr_scheduler_type="constant",
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        trainer = SFTTrainer(
            LlamaForCausalLM(config),
            arguments,
            train_dataset=Dataset.from_list(texts),
            processing_class=small_tokenizer(),
            callbacks=[saves],
        )
        trainer.train(resume_from_checkpoint=saves.resume_from(trainer))
        for log in trainer.state.log_history:
            if "loss" in log:
                print(f"step {log['step']}: loss {log['loss']!r}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
