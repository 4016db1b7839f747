"""torchtitan's trainer with our manager, on its debug model. Needs: pip install torchtitan datasets

torchrun --nproc-per-node 8 examples/frameworks/torchtitan_trainer.py runs/titan 8
"""

import dataclasses
import os
import sys

from datasets import Dataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from ckpt.integrations.torchtitan import TorchtitanCheckpoints


class Letters(BaseTokenizer):
    """A token for each letter: nothing has to be downloaded."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No options."""

    def __init__(self, config, **_) -> None:
        super().__init__()

    def encode(self, text: str, **_) -> list[int]:
        """Its letters."""
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int], **_) -> str:
        """The text of these letters."""
        return "".join(map(chr, tokens))

    def get_vocab_size(self) -> int:
        """Of ASCII and a few more."""
        return 256


def texts(path: str) -> Dataset:
    """Something to read."""
    return Dataset.from_list([{"text": f"{number} is a number. " * 9} for number in range(64)])


def main(url: str, last: int) -> None:
    """Train up to step `last`."""
    DATASETS["numbers"] = DatasetConfig(
        path="", loader=texts, sample_processor=lambda sample: sample["text"]
    )
    config = llama3_debugmodel()
    config.tokenizer = Letters.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="numbers")
    config.validator.enable = False
    config.training.steps, config.training.seq_len, config.training.local_batch_size = last, 32, 2
    config.training.global_batch_size = -1
    config.lr_scheduler.total_steps = 100
    config.debug.seed = 0
    config.optimizer.implementation = "for-loop"
    config.training.disable_cuda_graphs = True
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.checkpoint = TorchtitanCheckpoints.Config(
        enable=True, folder=os.path.abspath(url), interval=4
    )
    trainer = config.build()
    log = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda step, loss, *rest, **named: (
        print(f"step {step}: loss {loss!r}", flush=True),
        log(step, loss, *rest, **named),
    )
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
