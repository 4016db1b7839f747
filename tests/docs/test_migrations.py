"""The programs of the migration page bring over what the other library had, bit for bit.

Method: the page's blocks run, each next to a checkpoint that its library has written (`make
corpus`), with models that were made anew. What they load, and what they have saved below
`runs/moved`, is compared with what the writer had.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt
from ckpt.cli import main
from tests.convert.test_corpus import CORPUS, expect, fresh
from tests.docs.test_code_blocks import FENCE, ROOT

PAGE = (ROOT / "docs/howto/migrate.md").read_text(encoding="utf-8")
# A checkpoint's place on the page and in the corpus, and whether its optimizer has two groups.
PLACES = {
    "Accelerate": ("out/accelerate", "accelerate", False),
    "Lightning": ("last.ckpt", "lightning/checkpoint/last.ckpt", False),
    "torchtitan": ("outputs/step-3", "titan_dcp", False),
    "verl": ("out/actor", "verl_fsdp2", False),
    "DeepSpeed": ("out/deepspeed", "deepspeed_zero3_bf16", True),
    "Megatron": ("out/iter_0000005", "megatron", False),
    "Orbax": ("out/orbax", "orbax", False),
}


def sections() -> dict[str, str]:
    """The text of each library, by its name."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def programs(name: str, language: str = "python") -> list[str]:
    return [text for kind, text in FENCE.findall(sections()[name]) if kind == language]


def run(name: str, **names: Any) -> dict[str, Any]:
    """The program of a section, where the checkpoint is in the place that it names."""
    there, case, _ = PLACES[name]
    source = CORPUS / case if "/" in case else CORPUS / case / "checkpoint"
    Path(there).parent.mkdir(parents=True, exist_ok=True)
    (shutil.copy if source.is_file() else shutil.copytree)(source, there)
    (program,) = programs(name)
    exec(compile(program, f"migrate.md: {name}", "exec"), names)
    return names


def made(two_groups: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    net, optimizer = fresh()
    return net, optimizer if two_groups else torch.optim.AdamW(net.parameters())


class Held(nn.Module):
    """As the module of a Lightning training holds its network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def case_of(name: str) -> str:
    return PLACES[name][1].partition("/")[0]


@pytest.mark.parametrize("name", ["Accelerate", "Lightning", "torchtitan", "verl", "DeepSpeed"])
def test_program_moves_model_and_optimizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net, optimizer = made(PLACES[name][2])
    (program,) = programs(name)
    assert len([line for line in program.splitlines() if line]) - 1 <= 3  # next to the import
    run(name, model=net, module=Held(net), optimizer=optimizer)
    expect(case_of(name), net, optimizer)
    if name == "Accelerate":  # it saves when its first step is due
        return
    again, its_optimizer = made(PLACES[name][2])
    state = {"model": Held(again) if name == "Lightning" else again, "optimizer": its_optimizer}
    ckpt.load(state, "runs/moved")
    expect(case_of(name), again, its_optimizer)


def test_accelerates_folder_is_read_on_the_first_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = programs("Accelerate")
    steps = program + "    steps = list(checkpointer.steps(100))\n"
    net, optimizer = made(two_groups=False)
    first = run("Accelerate", model=net, optimizer=optimizer)
    exec(steps, first)
    shutil.rmtree("out/accelerate")
    nn.init.zeros_(net[0].weight)
    exec(steps, first)
    assert first["steps"] == []  # the root has all of them
    expect("accelerate", net, optimizer)


def test_megatrons_program_gives_each_layer_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = run("Megatron")["weights"]
    wanted = load_file(CORPUS / "megatron" / "expected.safetensors")
    # Megatron saves a norm under the linear layer behind it.
    fused = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    for name, tensor in wanted.items():
        saved = name
        for live, stored in fused.items():
            saved = saved.replace(live, stored)
        assert torch.equal(weights.pop(saved), tensor), name
    assert all("_extra_state" in name for name in weights)
    capsys.readouterr()
    assert main(["show", "out/iter_0000005/common.pt"]) == 0
    assert re.search(r"^iteration +5$", capsys.readouterr().out, re.M)


def test_orbaxs_program_gives_torch_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorstore")
    monkeypatch.chdir(tmp_path)
    run("Orbax")
    wanted = load_file(CORPUS / "orbax" / "expected.safetensors")
    with ckpt.open("runs/moved") as checkpoint:
        assert torch.equal(checkpoint["model.first.weight"], wanted["params.first.kernel"].T)
        assert torch.equal(checkpoint["model.first.bias"], wanted["params.first.bias"])


def test_every_library_of_the_page_has_a_table_and_a_program() -> None:
    assert PLACES.keys() == sections().keys()
    for name, text in sections().items():
        assert len(programs(name)) == 1, name
        assert re.search(r"^\| --- \| --- \|$", text, re.M), name
        assert 50 <= len(text.split()) <= 200, name
