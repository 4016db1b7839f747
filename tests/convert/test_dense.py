"""Quantized and sparse tensors, exported as the numbers that they stand for.

Peers: what each library itself makes of the live tensor.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.errors import InvalidState
from tests.convert.jobs import assert_same

TwoTensor: Any = importlib.import_module("torch.testing._internal.two_tensor").TwoTensor


def model_of(**tensors: Any) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Module()
    model.layer = nn.Linear(4, 3)
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    model.tied = model.layer
    return model


def exported(model: nn.Module, folder: Path, *arguments: str) -> dict[str, torch.Tensor]:
    ckpt.save({"model": model}, str(folder / "run"), step=1)
    target = str(folder / "dense.safetensors")
    assert main(["export", str(folder / "run"), target, "--dequantize", *arguments]) == 0
    return load_file(target)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:.*quantize")
def test_torchs_own_become_dense(tmp_path: Path) -> None:
    torch.manual_seed(2)
    dense = (torch.randn(40, 30) * (torch.rand(40, 30) < 0.2)).to_sparse().to_dense()
    quantized = torch.quantize_per_channel(
        dense, torch.rand(40) + 0.1, torch.zeros(40, dtype=torch.long), 0, torch.qint8
    )
    model = model_of(coo=dense.to_sparse(), csr=dense.double().to_sparse_csr(), q=quantized)
    got = exported(model, tmp_path, "--verify", "--keep-tied")
    layer = {
        f"{name}.{key}": t
        for name in ("layer", "tied")
        for key, t in model.layer.state_dict().items()
    }
    numbers = {"coo": dense, "csr": dense.double(), "q": quantized.dequantize()}
    assert_same(got, {**layer, **numbers})
    # As it was without the option: components, under the names that they have here.
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "parts.safetensors"))
    assert {"coo.indices", "coo.values", "q.int_repr"} <= load_file(
        tmp_path / "parts.safetensors"
    ).keys()


def test_what_has_no_dense_form_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    model = model_of(pair=TwoTensor(torch.ones(2, 3), torch.ones(2, 3)))
    got = exported(model, tmp_path, "--exclude", "pair")
    assert got.keys() == {"layer.weight", "layer.bias"}
    with pytest.raises(InvalidState, match=r"model.pair: a torch.TwoTensor .*no dense.*exclude"):
        ckpt.export(str(tmp_path / "run"), str(tmp_path / "all.safetensors"), dequantize=True)
    assert not (tmp_path / "all.safetensors").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_those_of_libraries_become_dense(tmp_path: Path) -> None:
    quantization: Any = pytest.importorskip("torchao.quantization")
    library: Any = pytest.importorskip("bitsandbytes")
    nf4: Any = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    torch.manual_seed(3)
    tensors = {"nf4": nf4.to_nf4(torch.randn(64, 64), 64, 4)}
    for name in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig"):
        linear: Any = nn.Sequential(nn.Linear(64, 32, bias=False)).to(torch.bfloat16)
        quantization.quantize_(linear, getattr(quantization, name)())
        tensors[name] = linear[0].weight.detach()
    four = library.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.float32)
    four.weight.data = torch.randn(64, 128)
    four = four.to("cpu")
    model = model_of(**tensors)
    model.four = four
    got = exported(model, tmp_path)
    weight = four.weight
    expected = {
        "nf4": tensors["nf4"].get_original_weight(),
        "four.weight": library.functional.dequantize_4bit(weight.data, weight.quant_state),
        **{name: t.dequantize() for name, t in tensors.items() if name != "nf4"},
    }
    assert_same({name: got[name] for name in expected}, expected)
    assert got["four.weight"].shape == (64, 128)
    assert not [name for name in got if "qdata" in name or "absmax" in name]
