"""The loss of an exported model on the batch of a step: torch and safetensors, not the library.

python examples/demo/evaluate.py model.safetensors 121
"""

from __future__ import annotations

import sys

import torch
from data import batch_of, read_corpus
from model import CONTEXT, ByteLM
from safetensors.torch import load_file
from torch.nn import functional

SEQUENCES = 16


def main() -> None:
    """Print the loss."""
    file, step = sys.argv[1], int(sys.argv[2])
    model = ByteLM()
    model.load_state_dict(load_file(file), strict=True)
    assert not {"ckpt", "storage"} & set(sys.modules), "this is to show that they are not needed"
    data = batch_of(read_corpus(), step, sequences=SEQUENCES, length=CONTEXT + 1)
    with torch.no_grad():
        logits = model(data[:, :-1])
    print(functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()).item())


if __name__ == "__main__":
    main()
