"""Continue a text with an exported model: torch and safetensors only, not the library.

python examples/demo/generate.py model.safetensors "def main("
"""

from __future__ import annotations

import sys

import torch
from model import CONTEXT, ByteLM
from safetensors.torch import load_file


def main() -> None:
    """Print the prompt and 300 bytes more."""
    file, prompt = sys.argv[1], sys.argv[2]
    model = ByteLM()
    model.load_state_dict(load_file(file), strict=True)
    model.eval()
    assert not {"ckpt", "storage"} & set(sys.modules), "this is to show that they are not needed"
    text = torch.tensor([list(prompt.encode())])
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(300):
            logits = model(text[:, -CONTEXT:])[0, -1] / 0.7
            following = torch.multinomial(logits.softmax(0), 1, generator=random)
            text = torch.cat([text, following[None]], dim=1)
    print(bytes(text[0].tolist()).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
