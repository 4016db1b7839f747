"""Tensor subclasses: taken apart and put together by their own protocol, found by name.

Method: models and optimizers of one process, saved and loaded into others of the same make.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal import two_tensor

import ckpt
from ckpt.errors import InvalidState, Mismatch

TwoTensor: Any = two_tensor.TwoTensor


class Scaled(torch.Tensor):
    """A subclass as users write it: data, a scale, and a setting that is no plain data."""

    data_: torch.Tensor
    scale: torch.Tensor
    setting: Any

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, setting: Any = None) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.data_, made.scale, made.setting = data, scale, setting
        return made

    def __tensor_flatten__(self) -> Any:
        return ["data_", "scale"], {"setting": self.setting, "kind": torch.bfloat16}

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        assert context["kind"] is torch.bfloat16
        return Scaled(inner["data_"], inner["scale"], context["setting"])

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].data_, args[0].scale, args[0].setting)
        raise NotImplementedError(str(func))


def scaled(seed: float, setting: Any = (1, "a")) -> Any:
    return Scaled(torch.full((3, 4), int(seed), dtype=torch.int8), torch.tensor([seed]), setting)


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.pair = nn.Parameter(TwoTensor(torch.randn(3, 4), torch.randn(3, 4)))
        inner = [TwoTensor(torch.randn(2), torch.randn(2)) for _ in range(2)]
        self.register_buffer("nested", TwoTensor(*inner))


def test_a_subclass_that_nobody_registered_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidState, match=r"w: is of class Scaled.*register_tensor_type"):
        ckpt.save({"w": scaled(1)}, str(tmp_path), step=1)


def test_registered_subclasses_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.layout import composites

    monkeypatch.setattr(composites, "_of_class", {})
    monkeypatch.setattr(composites, "_of_name", {})
    with pytest.raises(ValueError, match="__tensor_flatten__"):
        ckpt.register_tensor_type(nn.Parameter, "mine.Parameter")
    ckpt.register_tensor_type(Scaled, "mine.Scaled")
    ckpt.register_tensor_type(Scaled, "mine.Scaled")
    with pytest.raises(ValueError, match="another type"):
        ckpt.register_tensor_type(TwoTensor, "mine.Scaled")
    net, state = Net(1), {"list": [scaled(3)]}
    ckpt.save({"w": scaled(2), "net": net, "tree": state}, str(tmp_path), step=1)
    loaded, target = scaled(9), Net(2)
    tree = {"list": [scaled(8)]}
    ckpt.load({"w": loaded, "net": target, "tree": tree}, str(tmp_path))
    assert loaded.data_.eq(2).all() and loaded.scale.item() == 2.0
    assert tree["list"][0].scale.item() == 3.0
    inside: Any = [(getattr(target.nested, n), getattr(net.nested, n)) for n in "ab"]
    for ours, theirs in ((target.pair, net.pair), *inside):
        assert torch.equal(ours.a, theirs.a) and torch.equal(ours.b, theirs.b)
    # In place: an optimizer and others hold the parameter.
    assert isinstance(target.pair, nn.Parameter)
    with ckpt.open(str(tmp_path)) as checkpoint:
        assert "net.pair.a" in checkpoint and "w.scale" in checkpoint
    with pytest.raises(Mismatch, match=r"w: .*context differs.*'b'"):
        ckpt.load({"w": scaled(9, setting=(1, "b"))}, str(tmp_path), strict=False)
    with pytest.raises(Mismatch, match=r"w: is a mine.Scaled of float32 \(3, 4\) .*plain tensor"):
        ckpt.load({"w": torch.zeros(3, 4)}, str(tmp_path), strict=False)
    with pytest.raises(InvalidState, match=r"w: the mine.Scaled has a builtins.object in its"):
        ckpt.save({"w": scaled(1, setting=object())}, str(tmp_path), step=2)
    monkeypatch.setattr(composites, "_of_name", {})
    with pytest.raises(Mismatch, match=r"w: .*'mine.Scaled', which is not known here: install"):
        ckpt.load({"w": loaded}, str(tmp_path), strict=False)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_optimizers_of_torchao_come_back(tmp_path: Path, name: str) -> None:
    optim = pytest.importorskip("torchao.optim")

    def training(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(64, 128)
        return {"model": model, "optim": getattr(optim, name)(model.parameters(), lr=0.1)}

    def stepped(state: dict[str, Any]) -> None:
        # Their own step compiles; the state is what is looked at here.
        for group in state["optim"].param_groups:
            for param in group["params"]:
                made = state["optim"].state[param]
                made["step"] = torch.tensor(3.0)
                for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                    made[key] = state["optim"]._new_buffer(param, signed)
                    made[key].copy_(torch.rand(param.shape))

    saved, loaded = training(1), training(2)
    stepped(saved)
    assert "OptimState" in type(saved["optim"].state[saved["model"].weight]["exp_avg"]).__name__
    ckpt.save(saved, str(tmp_path), step=1)
    ckpt.load(loaded, str(tmp_path))
    for mine, theirs in zip(saved["model"].parameters(), loaded["model"].parameters(), strict=True):
        ours, other = saved["optim"].state[mine], loaded["optim"].state[theirs]
        for key in ("exp_avg", "exp_avg_sq"):
            assert type(ours[key]) is type(other[key])
            if hasattr(ours[key], "codes"):
                assert torch.equal(
                    ours[key].codes.view(torch.uint8), other[key].codes.view(torch.uint8)
                )
                assert torch.equal(ours[key].scale, other[key].scale)
            else:
                assert torch.equal(ours[key], other[key])


def test_quantized_weights_of_torchao_come_back(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def state(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        tensors: dict[str, Any] = {}
        for config in (
            quantization.Int8WeightOnlyConfig(),
            quantization.Int8DynamicActivationInt8WeightConfig(),
            quantization.Float8WeightOnlyConfig(),
            quantization.IntxWeightOnlyConfig(),
        ):
            model = nn.Sequential(nn.Linear(64, 32)).to(torch.bfloat16)
            quantization.quantize_(model, config)
            tensors[type(config).__name__] = model
        packed = torch.randint(0, 255, (8, 32), dtype=torch.uint8)
        scales = torch.rand(2, 8), torch.rand(2, 8)
        tensors["int4"] = quantization.Int4Tensor(packed, *scales, [1, 32], torch.Size((8, 64)))
        words = packed[:, ::4].int()
        plain = quantization.Int4PlainInt32Tensor
        own = [scale.clone() for scale in scales]  # tensors that share memory are refused
        tensors["plain"] = plain(words, *own, [1, 32], torch.Size((8, 64)))
        tiles, both = words.clone().view(8, 1, 2, 4), torch.stack(scales, -1)
        tiled = quantization.Int4TilePackedTo4dTensor
        tensors["tiled"] = tiled(tiles, both, [1, 32], torch.Size((8, 64)))
        nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        tensors["nf4"] = nf4.to_nf4(torch.randn(64, 64), 64, 4)
        return tensors

    saved, loaded = state(1), state(2)
    ckpt.save(saved, str(tmp_path), step=1)
    ckpt.load(loaded, str(tmp_path))
    for name in saved:
        pair: Any = [tree[name] for tree in (saved, loaded)]
        if isinstance(pair[0], nn.Module):
            pair = [model[0].weight for model in pair]
        ours, theirs = pair
        assert "Tensor" in type(ours).__name__ and type(ours) is type(theirs)
        for part in ours.__tensor_flatten__()[0]:
            both_parts = [getattr(tensor, part).reshape(-1) for tensor in (ours, theirs)]
            assert torch.equal(*[one.view(torch.uint8) for one in both_parts]), (name, part)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("nested", [True, False])
def test_4_bit_weights_of_bitsandbytes_come_back(tmp_path: Path, nested: bool) -> None:
    """Linear4bit was refused for its state-dict method; its weight alone lost its quant state."""
    library = pytest.importorskip("bitsandbytes")

    def layer(seed: int) -> Any:
        torch.manual_seed(seed)
        made = library.nn.Linear4bit(128, 64, quant_type="nf4", compress_statistics=nested)
        made.weight.data = torch.randn(64, 128)
        return made.to("cpu")

    saved, loaded, plain = layer(1), layer(2), {"tree": [layer(3).weight]}
    tree = {"tree": [saved.weight, 1]}
    ckpt.save({"model": saved, "object": Keeper(tree)}, str(tmp_path), step=1)
    kept = Keeper(plain)
    ckpt.load({"model": loaded, "object": kept}, str(tmp_path))
    x = torch.randn(2, 128)
    assert torch.equal(saved(x), loaded(x))
    made = kept.kept["tree"][0]
    assert type(made) is type(saved.weight) and torch.equal(made.data, saved.weight.data)
    saved.weight = made
    assert torch.equal(saved(x), loaded(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_8_bit_weights_of_bitsandbytes_come_back(tmp_path: Path) -> None:
    """They were refused: their scales move out of the weight in the first forward."""
    library = pytest.importorskip("bitsandbytes")

    def layer(seed: int) -> Any:
        torch.manual_seed(seed)
        made = library.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)
        made.weight.data = torch.randn(32, 64)
        return made.to("cpu").eval()

    x = torch.randn(2, 64).half()
    saved = layer(1)
    for step, has_run in enumerate((False, True)):
        if has_run:
            expected = saved(x)
            assert saved.weight.SCB is None
        ckpt.save({"model": saved}, str(tmp_path), step=step)
        for is_used in (False, True):
            loaded = layer(2)
            if is_used:
                assert not torch.equal(loaded(x), layer(1)(x))
            ckpt.load({"model": loaded}, str(tmp_path))
            assert torch.equal(loaded(x), layer(1)(x))
    assert torch.equal(expected, loaded(x))
    # Under the names that its own state dicts have.
    ckpt.export(str(tmp_path), str(tmp_path / "model.safetensors"))
    theirs = layer(3)
    theirs.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(theirs(x), expected)
    plain = library.nn.Linear8bitLt(64, 32, bias=False)
    ckpt.save({"model": plain}, str(tmp_path), step=2)
    with pytest.raises(Mismatch, match=r"weight: .*dtype torch.float32, state has torch.int8"):
        ckpt.load({"model": loaded}, str(tmp_path), strict=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix8bit", "Lion8bit"])
def test_8_bit_optimizers_of_bitsandbytes_go_on(tmp_path: Path, name: str) -> None:
    library = pytest.importorskip("bitsandbytes")

    def training(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(128, 64)
        kind = getattr(library.optim, name)
        return {"model": model, "optim": kind(model.parameters(), lr=0.01, min_8bit_size=16)}

    def step(state: dict[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        state["model"](torch.randn(4, 128)).square().sum().backward()
        state["optim"].step()
        state["optim"].zero_grad()

    saved, loaded = training(1), training(2)
    step(saved, 3)
    ckpt.save(saved, str(tmp_path), step=1)
    ckpt.load(loaded, str(tmp_path))
    for seed in (4, 5):
        step(saved, seed)
        step(loaded, seed)
    for ours, theirs in zip(saved["model"].parameters(), loaded["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        a, b = saved["optim"].state[ours], loaded["optim"].state[theirs]
        assert a.keys() == b.keys() and a["state1"].dtype is torch.uint8
        for key in a:
            assert torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])), key


class Keeper:
    """An object of the state that keeps a tree as it is."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self.kept = kept


def test_a_load_imports_no_library_that_it_does_not_need(tmp_path: Path) -> None:
    """The name of a type decides nothing but which entry of a table is looked up."""
    ckpt.save({"w": torch.eye(3).to_sparse()}, str(tmp_path), step=1)
    code = (
        "import sys, torch, ckpt; w = torch.zeros(3, 3).to_sparse()\n"
        f"ckpt.load({{'w': w}}, {str(tmp_path)!r})\n"
        "assert torch.equal(w.to_dense(), torch.eye(3))\n"
        "assert 'torchao' not in sys.modules and 'bitsandbytes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
