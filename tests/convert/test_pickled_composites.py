"""Sparse and quantized tensors in exported files of torch.save are what torch makes of its own.

Method: modules with one of each kind are saved, exported, opened with `torch.load(weights_only=
True)`, and compared part by part with the module's own `state_dict()`, into which it loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.state.test_kinds import QUIET, Holder, assert_alike, composites, parts_of

pytestmark = [
    pytest.mark.filterwarnings(*[mark.args[0] for mark in QUIET]),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

# torch.save writes memory that several elements share, and what `weights_only` does not make.
NONE = {"packed": ["int_repr", "scales", "zero_points"], "nested": ["values"]}
NONE |= {"jagged": ["values", "offsets"]}


def kinds() -> dict[str, torch.Tensor]:
    made = composites(1)
    dense = torch.randn(3, 4)
    table = torch.rand(4) + 0.5, torch.rand(4)
    made["by_floats"] = torch.quantize_per_channel(dense, *table, 1, torch.quint8)
    made["transposed"] = torch.quantize_per_tensor(dense, 0.5, 1, torch.quint8).t()
    made["empty"] = torch.zeros(3, 2).to_sparse()
    return made


class Net(nn.Module):
    """Composites beside what is trained, two of them under one name more."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.again = Holder(kinds()), nn.Module()
        self.again.register_buffer("w", self.kinds.coo)
        self.head = nn.Linear(2, 2)


def test_files_have_them_as_torch_itself_writes_them(tmp_path: Path) -> None:
    """They came as their components, under names that no module has."""
    model = Net()
    wanted = {name: tensor for name, tensor in model.state_dict().items() if "kinds" in name}
    ckpt.save({"model": model}, tmp_path / "run", step=1)
    ckpt.export(tmp_path / "run", str(tmp_path / "m.pt"), verify=True)
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    expected = {name: parts_of(tensor) for name, tensor in wanted.items()}
    for name, parts in NONE.items():
        expected.pop(f"kinds.{name}")
        assert all(f"kinds.{name}.{part}" in loaded for part in parts)
    assert_alike({name: loaded[name] for name in expected}, expected)
    assert not any(name.startswith("kinds.coo.") for name in loaded)
    assert_alike({"w": loaded["again.w"]}, {"w": expected["kinds.coo"]})
    torch.manual_seed(9)
    other = Net()
    left = other.load_state_dict(loaded, strict=False)
    assert set(left.missing_keys) == {f"kinds.{name}" for name in NONE}
    assert_alike({"w": other.kinds.coo}, {"w": expected["kinds.coo"]})
    assert torch.equal(other.head.weight, model.head.weight)


def test_whole_states_and_renamed_models_have_them_too(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    model.head(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.head.weight]["mask"] = model.kinds.csr
    ckpt.save({"model": model, "optim": optimizer}, tmp_path / "run", step=1)
    whole = dict(optimizer=True)
    ckpt.export(tmp_path / "run", str(tmp_path / "all.pt"), **whole)
    loaded: Any = torch.load(tmp_path / "all.pt", weights_only=True)
    wanted = {"csr": parts_of(model.kinds.csr)}
    assert_alike({"csr": loaded["model"]["kinds.csr"]}, wanted)
    assert_alike({"csr": loaded["optim"]["state"]["head.weight"]["mask"]}, wanted)
    for tied in ("kinds.coo", "again.w"):
        assert_alike({"w": loaded["model"][tied]}, {"w": parts_of(model.kinds.coo)})
    ckpt.export(tmp_path / "run", str(tmp_path / "dcp"), **whole, format="dcp")
    assert loaded["model"]["kinds.nested"]["$tensor_type"] == "torch.nested"
    selection = dict(rename=["kinds=renamed"], entry="model")
    ckpt.export(tmp_path / "run", str(tmp_path / "r.pt"), **selection)
    renamed = torch.load(tmp_path / "r.pt", weights_only=True)
    assert_alike({"csr": renamed["renamed.csr"]}, wanted)
