"""Published block-quantized weights: imported as they are, or as the numbers they stand for.

Method: files written by safetensors, and the numbers worked out element by element, or by torch
over whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.cli import main
from ckpt.convert.sources import derived
from ckpt.convert.sources.source import FileSource, ReadRequest
from ckpt.errors import InvalidState
from tests.convert.jobs import assert_same

BLOCK = (4, 3)


def published(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    state = {
        "a.weight": torch.randn(10, 7).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.rand(3, 3) + 0.5,
        "experts": torch.randn(2, 5, 6).to(torch.float8_e5m2),
        "experts_scale_inv": torch.rand(2, 2, 2) + 0.5,
        "mlp_blocks": torch.randint(0, 256, (3, 2, 5, 16), dtype=torch.uint8),
        "mlp_scales": torch.randint(100, 140, (3, 2, 5), dtype=torch.uint8),
        "norm": torch.randn(5),
    }
    state["mlp_scales"][1, 1, 2] = 255
    save_file(state, folder / "model.safetensors")
    return state


def numbers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By loops over indexes, in no other way than the formats are described."""
    result = {"norm": state["norm"]}
    a, factors = state["a.weight"].float(), state["a.weight_scale_inv"]
    for row in range(10):
        for column in range(7):
            a[row, column] *= factors[row // 4, column // 3]
    experts = state["experts"].float()
    for matrix in range(2):
        for row in range(5):
            for column in range(6):
                factor = state["experts_scale_inv"][matrix, row // 4, column // 3]
                experts[matrix, row, column] *= factor
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    flat = []
    scales = state["mlp_scales"].view(-1).tolist()
    for group, packed in enumerate(state["mlp_blocks"].view(-1, 16).tolist()):
        power = 2.0 ** (scales[group] - 127) if scales[group] != 255 else float("nan")
        for byte in packed:
            for nibble in (byte & 15, byte >> 4):
                flat.append((-1.0 if nibble & 8 else 1.0) * sizes[nibble & 7] * power)
    mlp = torch.tensor(flat, dtype=torch.float64).float().view(3, 2, 160)
    return result | {"a.weight": a, "experts": experts, "mlp": mlp}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_as_the_numbers_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """In bands that begin and end anywhere; nothing larger is ever asked of the file."""
    monkeypatch.setattr(derived, "BAND_NUMEL", 13)
    asked: list[int] = []
    fill = FileSource.fill

    def counted(self: FileSource, wanted: Sequence[ReadRequest]) -> None:
        asked.extend(request.span.numel for request in wanted if request.fqn != "norm")
        fill(self, wanted)

    monkeypatch.setattr(FileSource, "fill", counted)
    state = published(tmp_path)
    ckpt.import_checkpoint(
        str(tmp_path / "model.safetensors"),
        str(tmp_path / "run"),
        dequantize=dtype,
        dequantize_block=BLOCK,
        verify=True,
    )
    assert asked and max(asked) <= 13
    with ckpt.open(str(tmp_path / "run")) as checkpoint:
        got = {name: checkpoint[name] for name in checkpoint}
    expected = numbers(state)
    into: Any = getattr(torch, dtype)
    quantized = {name: t if name == "norm" else t.to(into) for name, t in expected.items()}
    assert torch.equal(got["mlp"].isnan(), quantized["mlp"].isnan())
    for tree in (got, quantized):
        tree["mlp"] = tree["mlp"].nan_to_num(nan=1.0)
    # A zero keeps its sign.
    assert_same(got, quantized)


CORPUS = Path(__file__).parents[1] / "corpus"


@pytest.mark.parametrize("case", ["compressed_float8", "compressed_nvfp4", "compressed_mxfp4"])
def test_compressed_weights_come_under_their_own_names(case: str, tmp_path: Path) -> None:
    """The numbers are those of compressed-tensors itself; what they consist of is gone."""
    expected = load_file(CORPUS / case / "expected.safetensors")
    wanted = {n.removeprefix("dense."): t for n, t in expected.items() if n.startswith("dense.")}
    wanted["0.bias"] = expected["0.bias"]
    source = str(CORPUS / case / "checkpoint")
    ckpt.import_checkpoint(source, str(tmp_path), dequantize="bfloat16", verify=True)
    with ckpt.open(str(tmp_path)) as checkpoint:
        assert_same({name: checkpoint[name] for name in checkpoint}, wanted)


def test_a_scale_may_be_of_a_row_or_of_the_tensor(tmp_path: Path) -> None:
    state = {
        "rows.weight": torch.randn(4, 6).to(torch.float8_e4m3fn),
        "rows.weight_scale": torch.rand(4, 1) + 0.5,
        "one.weight": torch.randint(-127, 127, (4, 6), dtype=torch.int8),
        "one.weight_scale": torch.rand(1) + 0.5,
        "own_scale": torch.rand(3),
        "one.input_scale": torch.rand(1),
    }
    save_file(state, tmp_path / "model.safetensors")
    ckpt.import_checkpoint(
        str(tmp_path / "model.safetensors"), str(tmp_path / "run"), dequantize="float32"
    )
    dense = {f"{n}.weight": state[f"{n}.weight"].float() for n in ("rows", "one")}
    for name, tensor in dense.items():
        tensor *= state[f"{name}_scale"]
    kept = {name: state[name] for name in ("own_scale", "one.input_scale")}
    with ckpt.open(str(tmp_path / "run")) as checkpoint:
        assert_same({name: checkpoint[name] for name in checkpoint}, dense | kept)


BYTES = torch.zeros(4, 16, dtype=torch.uint8)
NOT_KNOWN = {
    "neither NVFP4 nor MXFP4": {"w_packed": BYTES.int(), "w_scale": BYTES[:, :1].clone()},
    r"w_packed: uint8\[4, 16\] with scales uint8\[4, 2\]": {
        "w_packed": BYTES, "w_scale": BYTES[:, :2].clone()
    },
    "w: has a zero point": {
        "w": BYTES.to(torch.int8), "w_scale": torch.ones(4, 1), "w_zero_point": torch.ones(4, 1)
    },
    "w: has shape .4, 16.*block_structure": {
        "w": BYTES.to(torch.float8_e4m3fn), "w_scale": torch.ones(2, 3)
    },
}  # fmt: skip


@pytest.mark.parametrize("said", NOT_KNOWN)
def test_other_compressed_weights_are_refused_by_name(said: str, tmp_path: Path) -> None:
    save_file(NOT_KNOWN[said], tmp_path / "odd.safetensors")
    with pytest.raises(InvalidState, match=said):
        ckpt.import_checkpoint(
            str(tmp_path / "odd.safetensors"), str(tmp_path / "run"), dequantize="float32"
        )
    assert not (tmp_path / "run").exists()


def test_they_come_as_they_are_without_it(tmp_path: Path) -> None:
    state = published(tmp_path)
    source = str(tmp_path / "model.safetensors")
    ckpt.import_checkpoint(source, str(tmp_path / "run"), verify=True)
    with ckpt.open(str(tmp_path / "run")) as checkpoint:
        assert_same({name: checkpoint[name] for name in checkpoint}, state)


def test_the_command_line_says_the_dtype_and_the_block(tmp_path: Path) -> None:
    state = published(tmp_path)
    arguments = ["import", str(tmp_path / "model.safetensors"), str(tmp_path / "run")]
    assert main([*arguments, "--dequantize", "float32", "--dequantize-block", "4x3"]) == 0
    with ckpt.open(str(tmp_path / "run")) as checkpoint:
        assert torch.equal(checkpoint["a.weight"], numbers(state)["a.weight"])
    assert main([*arguments[:2], str(tmp_path / "odd"), "--dequantize"]) == 1  # blocks of 128
    with pytest.raises(SystemExit):
        main([*arguments, "--dequantize", "--dequantize-block", "4"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a.weight": None}, r"a\.weight_scale_inv: there is no float8 tensor a\.weight"),
        ({"a.weight_scale_inv": torch.ones(3, 2)}, r"a\.weight: .*weight_block_size"),
        ({"mlp_blocks": None}, "mlp_scales: there is no uint8 tensor mlp_blocks"),
        ({"mlp_scales": torch.ones(3, 2, 4, dtype=torch.uint8)}, "mlp_blocks: .*no groups of 16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], said: str
) -> None:
    state: dict[str, Any] = {**published(tmp_path), **change}
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, tmp_path / "odd.safetensors")
    with pytest.raises(InvalidState, match=said):
        ckpt.import_checkpoint(
            str(tmp_path / "odd.safetensors"),
            str(tmp_path / "run"),
            dequantize="float32",
            dequantize_block=BLOCK,
        )
    assert not (tmp_path / "run").exists()
