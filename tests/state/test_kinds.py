"""Tensors of every kind: stored and restored bit for bit, or refused by name.

Method: real checkpoints in a folder, each loaded into a state of the same make with other bits.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.errors import Corrupt, InvalidState
from ckpt.format.codec import decode_values, encode_values
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.plain import Ranks
from ckpt.state.bind import bind_state
from ckpt.state.flatten import flatten_state
from ckpt.state.types import Catalog, TensorEntry
from tests.convert.jobs import assert_same

State = dict[str, Any]

NAMED = (
    "float4_e2m1fn_x2",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("bits8", "bits1x8", "bits2x4", "bits4x2", "bits16"),
)
SUBBYTE = [name for name in NAMED if hasattr(torch, name)]  # torch 2.6 has no float4


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
        state[name] = {
            "whole": of_dtype(name, seed, 6, 8),
            "part": of_dtype(name, seed + 3, 6, 8)[1:5, 2:7],
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
    assert set(NAMED) <= set(DTYPES) and "uint4" in SUBBYTE
    ckpt.save(saved, str(tmp_path), step=1)
    before = bits(saved)
    ckpt.load(loaded, str(tmp_path))
    assert_same(bits(loaded), before)
    ckpt.async_save(loaded, str(tmp_path), step=2, dedup=True).result()
    again = odd_dtypes(90)
    ckpt.load(again, str(tmp_path))
    assert_same(bits(again), before)
    with ckpt.open(str(tmp_path)) as checkpoint:
        named: Any = vars(torch)
        assert checkpoint["uint4.part"].dtype is named["uint4"]
        assert_same(bits({"x": checkpoint["uint4.part"]}), {"x": before["uint4"]["part"]})


def test_their_exports_open_in_torch(tmp_path: Path) -> None:
    """torch.save does not write most of them, but torch.load reads all."""
    model = nn.Module()
    for name in SUBBYTE:
        model.register_buffer(name, of_dtype(name, 3, 4, 5))
    ckpt.save({"model": model}, str(tmp_path / "run"), step=1)
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "out.pt"), verify=True)
    try:
        loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    except pickle.UnpicklingError as refused:
        if "Unsupported global: GLOBAL torch.int1" not in str(refused):
            raise
        pytest.skip("this torch reads no dtypes of single bits")
    assert_same(bits(loaded), bits(dict(model.state_dict())))


# --- composites ----------------------------------------------------------------------------------

QUIET = [
    pytest.mark.filterwarnings("ignore:.*Sparse.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*quantize"),
]


def composites(seed: int) -> State:
    """One of each kind of torch's own, with contents of `seed`; sparse ones differ in size."""
    torch.manual_seed(seed)
    dense = torch.randn(4, 6) * (torch.rand(4, 6) < 0.5)
    table = torch.tensor([[0, 0, 3], [1, 1, 5]])
    channels = torch.rand(6).double() + 0.1, torch.randint(0, 5, (6,))
    per_channel = torch.quantize_per_channel(dense, *channels, 1, torch.quint8)
    packed = torch.quantize_per_channel(
        dense, channels[0].float(), torch.rand(6), 1, torch.quint4x2
    )
    return {
        "coo": dense.to_sparse(),
        "doubled": torch.sparse_coo_tensor(table, torch.randn(3), (4, 6), is_coalesced=False),
        "hybrid": torch.randn(4, 6).to_sparse(1),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 3)),
        "bsc": dense.to_sparse_bsc((2, 3)),
        "per_tensor": torch.quantize_per_tensor(dense, 0.1 * seed, seed, torch.qint8),
        "qint32": torch.quantize_per_tensor(dense, 0.2 * seed, 0, torch.qint32),
        "per_channel": per_channel,
        "packed": packed,
        "nested": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
        "jagged": torch.nested.nested_tensor(
            [torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged
        ),
    }


def parts_of(tensor: torch.Tensor) -> Any:
    """All that a composite is, by torch's own public calls."""
    if tensor.is_nested:
        return [type(tensor).__name__, *(part.clone() for part in tensor.unbind())]
    if tensor.is_quantized:
        said = [tensor.dtype, tensor.qscheme(), tensor.int_repr().clone(), tuple(tensor.shape)]
        if "channel" not in str(tensor.qscheme()):
            return [*said, tensor.q_scale(), tensor.q_zero_point()]
        tables = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return [*said, *(table.clone() for table in tables), tensor.q_per_channel_axis()]
    said = [tensor.layout, tuple(tensor.shape), tensor.dtype]
    if tensor.layout is torch.sparse_coo:
        pair = tensor._indices(), tensor._values()
        return [*said, tensor.is_coalesced(), *(part.clone() for part in pair)]
    first = "crow" if tensor.layout in (torch.sparse_csr, torch.sparse_bsr) else "ccol"
    second = "col" if first == "crow" else "row"
    inside = [getattr(tensor, f"{name}_indices")() for name in (first, second)]
    return [*said, *(part.clone() for part in (*inside, tensor.values()))]


def assert_alike(got: State, expected: dict[str, Any]) -> None:
    for name, tensor in got.items():
        for one, other in zip(parts_of(tensor), expected[name], strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one, other), name
            else:
                assert one == other, name


class Holder(nn.Module):
    """The same as buffers of a module."""

    def __init__(self, tensors: State) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


@pytest.mark.filterwarnings(*[mark.args[0] for mark in QUIET])
def test_sparse_quantized_and_nested_tensors_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were refused by name: bare, in modules, and in the states of objects."""

    def state(seed: int) -> State:
        return {"bare": composites(seed), "module": Holder(composites(seed + 1))}

    saved, loaded = state(1), state(7)
    expected = [{n: parts_of(t) for n, t in composites(seed).items()} for seed in (1, 2)]
    ckpt.save(saved, str(tmp_path), step=1)
    ckpt.load(loaded, str(tmp_path))
    assert_alike(loaded["bare"], expected[0])
    assert_alike(dict(loaded["module"].named_buffers()), expected[1])
    # What is saved the second time is what is there then: scales change without another object.
    saved["bare"]["per_tensor"].copy_(composites(9)["per_tensor"])
    ckpt.async_save(saved, str(tmp_path), step=2).result()
    ckpt.load(loaded, str(tmp_path))
    expected[0]["per_tensor"] = parts_of(composites(9)["per_tensor"])
    assert_alike(loaded["bare"], expected[0])
    with ckpt.open(str(tmp_path)) as checkpoint:
        assert checkpoint["bare.coo.values"].dtype is torch.float32
        described = checkpoint.values["bare.coo"]
    assert described["$tensor_type"] == "torch.sparse_coo" and described["shape"] == (4, 6)
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "torch.sparse_coo of float32 (4, 6): indices, values" in shown
    assert "torch.jagged of float32 (2, ?, 3): values, offsets" in shown


def test_a_missing_component_is_an_error_by_name() -> None:
    flat = flatten_state({"w": torch.eye(3).to_sparse()}, Ranks.alone())
    pieces = [piece for holding in flat.holdings for piece in holding.pieces]
    entries = {p.fqn: TensorEntry(p.dtype, p.global_shape) for p in pieces}
    assert sorted(entries) == ["w.indices", "w.values"]
    del entries["w.values"]
    live = {"w": torch.zeros(3, 3).to_sparse()}
    binding = bind_state(live, Catalog(entries, flat.values), Ranks.alone(), strict=False)
    assert "w: its component w.values is not in the checkpoint" in binding.fatal[0]


def test_descriptions_have_a_version_that_older_readers_refuse() -> None:
    described = flatten_state({"w": torch.eye(3).to_sparse()}, Ranks.alone()).values
    data = encode_values(described)
    assert data[0] == 2 and decode_values(data) == described
    assert encode_values({"w": 1})[0] == 1
    with pytest.raises(Corrupt, match="nothing that needs it"):
        decode_values(b"\x02" + encode_values({"w": 1})[1:])


class Shampoo(torch.optim.Optimizer):
    """As distributed Shampoo's public source: blocks in dicts, and two forms of state dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for param in (param for group in self.param_groups for param in group["params"]):
            factors = (torch.eye(3), torch.eye(2))
            blocks = {"shampoo": {"factor_matrices": factors}, "momentum": torch.zeros_like(param)}
            self.state[param] = {"step": torch.tensor(0.0), "block_0": blocks}

    def state_dict(self) -> Any:
        raise NotImplementedError("does not support the standard state_dict()")

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["step"] += 1
            state["block_0"]["momentum"] += 0.5
            for factor in state["block_0"]["shampoo"]["factor_matrices"]:
                factor.mul_(2)

    def distributed_state_dict(self, key_to_param: Any) -> dict[str, Any]:
        flat = {}
        for name, param in key_to_param:
            own, blocks = self.state[param], self.state[param]["block_0"]
            keys = {'["block_0", "momentum"]': blocks["momentum"], '["step"]': own["step"]}
            for nth, factor in enumerate(blocks["shampoo"]["factor_matrices"]):
                keys[f'["block_0", "shampoo", "factor_matrices", {nth}]'] = factor
            flat[name] = keys
        return {"state": flat, "param_groups": {"bias/weight": {"lr": self.param_groups[0]["lr"]}}}


def test_shampoo_is_stored_by_its_own_state_dict(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer, other = Shampoo(model.parameters()), Shampoo(model.parameters())
    with pytest.raises(InvalidState, match=r"distributed_state_dict\(model\.named_parameters"):
        ckpt.save({"model": model, "optim": optimizer}, str(tmp_path), step=1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.3
    own = optimizer.distributed_state_dict(model.named_parameters())
    ckpt.save({"model": model, "optim": own}, str(tmp_path), step=1)
    into = other.distributed_state_dict(model.named_parameters())
    ckpt.load({"model": model, "optim": into}, str(tmp_path))
    assert into["param_groups"] == {"bias/weight": {"lr": 0.3}}
    for param, state in optimizer.state.items():
        back = other.state[param]
        assert back["step"] == state["step"] == 1
        assert torch.equal(back["block_0"]["momentum"], state["block_0"]["momentum"])
        pairs = [one["block_0"]["shampoo"]["factor_matrices"] for one in (back, state)]
        assert all(map(torch.equal, *pairs)) and float(pairs[0][0][0, 0]) == 2
