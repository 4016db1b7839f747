"""Tensors of every kind: stored and restored bit for bit, or refused by name.

Method: real checkpoints in a folder, each loaded into a state of the same make with other bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpt
from ckpt.layout.dtypes import DTYPES
from tests.convert.jobs import assert_same

State = dict[str, Any]

SUBBYTE = [
    "float4_e2m1fn_x2",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("bits8", "bits1x8", "bits2x4", "bits4x2", "bits16"),
]


def of_dtype(name: str, seed: int, *shape: int) -> torch.Tensor:
    """Random bits, as `name`."""
    dtype = getattr(torch, name)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def odd_dtypes(seed: int) -> State:
    """Each dtype whole, as a view with holes, transposed, empty, and without dims."""
    state = {}
    for name in SUBBYTE:
        whole = of_dtype(name, seed, 6, 8)
        state[name] = {
            "whole": whole,
            "part": whole[1:5, 2:7],
            "turned": of_dtype(name, seed + 1, 4, 3).t(),
            "empty": of_dtype(name, seed, 0, 3),
            "one": of_dtype(name, seed + 2, 1)[0],
        }
    return state


def bits(tree: Any) -> Any:
    """`tree` with integers for what torch cannot compare, in row-major order."""
    if isinstance(tree, dict):
        return {key: bits(item) for key, item in tree.items()}
    as_int = torch.int16 if tree.dtype.itemsize == 2 else torch.uint8
    return tree.view(as_int).clone(memory_format=torch.contiguous_format)


def test_every_dtype_of_bits_and_parts_of_bytes_comes_back(tmp_path: Path) -> None:
    """They were refused, though torch keeps whole bytes for each element."""
    saved, loaded = odd_dtypes(1), odd_dtypes(50)
    assert set(SUBBYTE) <= set(DTYPES)
    ckpt.save(saved, str(tmp_path), step=1)
    before = bits(saved)
    ckpt.load(loaded, str(tmp_path))
    assert_same(bits(loaded), before)
    ckpt.async_save(loaded, str(tmp_path), step=2, dedup=True).result()
    again = odd_dtypes(90)
    ckpt.load(again, str(tmp_path))
    assert_same(bits(again), before)
    with ckpt.open(str(tmp_path)) as checkpoint:
        assert checkpoint["uint4.part"].dtype is torch.uint4
        assert_same(bits({"x": checkpoint["uint4.part"]}), {"x": before["uint4"]["part"]})


def test_their_exports_open_in_torch(tmp_path: Path) -> None:
    """torch.save does not write most of them, but torch.load reads all."""
    model = nn.Module()
    for name in SUBBYTE:
        model.register_buffer(name, of_dtype(name, 3, 4, 5))
    ckpt.save({"model": model}, str(tmp_path / "run"), step=1)
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "out.pt"), verify=True)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(bits(loaded), bits(dict(model.state_dict())))
