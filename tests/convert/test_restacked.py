"""An export by rules of several steps keeps two whole tensors at most, however many the steps.

Method: a checkpoint is opened with a chain of rules that each transpose it, and what the chain
keeps is counted behind every read; what is read is compared with the tensors that were saved.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.convert.sources.derived import DerivedSource, restacked
from ckpt.convert.sources.opening import open_source
from ckpt.convert.sources.source import ReadRequest
from ckpt.errors import CheckpointError
from ckpt.layout.region import Span


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_chain_of_rules_keeps_two_tensors(tmp_path: Path, steps: int) -> None:
    torch.manual_seed(0)
    saved = {f"layer.{n}": torch.randn(4, 6) for n in range(3)}
    ckpt.save({"model": saved}, str(tmp_path), step=1)
    prefix = "model.layer"
    changes = []
    for step in range(steps):
        names = {f"{prefix}.{n}": f"s{step}.{n}^T" for n in range(3)}
        changes.append(partial(restacked, stacks=names))
        prefix = f"s{step}"
    with closing(open_source(str(tmp_path), changes=changes)) as source:
        assert isinstance(source, DerivedSource)
        for n in range(3):
            name, parts = f"s{steps - 1}.{n}", []
            for start in range(0, 24, 7):  # as a file is written, part by part
                part = torch.empty(min(7, 24 - start))
                source.fill([ReadRequest(name, Span(start, start + len(part)), part)])
                parts.append(part)
                assert 1 <= len(source._kept) <= 2
            read, wanted = torch.cat(parts), saved[f"layer.{n}"]
            wanted = wanted.T if steps % 2 else wanted
            assert torch.equal(read, wanted.contiguous().view(-1))


def test_slices_with_different_steps_are_no_stack(tmp_path: Path) -> None:
    """Nothing is loaded here, so nothing is said of what a load could do."""
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in "ab")
    model = torch.nn.ModuleDict({"layers": layers})
    optimizer = torch.optim.AdamW(model.parameters())
    layers[1](layers[0](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    optimizer.state[layers[1].weight]["step"] += 1
    ckpt.save({"model": model, "optim": optimizer}, str(tmp_path), step=1)
    changes = [partial(restacked, stacks={"layers.{}.weight": "layers.weight"})]
    name = "optim.state.layers.weight.step"
    opened = closing(open_source(str(tmp_path), changes=changes))
    with opened as source, pytest.raises(CheckpointError) as refused:
        source.read(name)
    assert type(refused.value) is CheckpointError
    text = str(refused.value)
    assert text.startswith(f"{name}: its slices have different ones") and "skip=" not in text
    assert text.endswith("layers.1.weight.step 2.0, and a stack has one for all")


def test_an_optimizer_whose_name_ends_in_a_dot_is_stacked(tmp_path: Path) -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in "ab")
    model = torch.nn.ModuleDict({"layers": layers})
    optimizer = torch.optim.AdamW(model.parameters())
    layers[1](layers[0](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    ckpt.save({"model": model, "optim.": optimizer}, str(tmp_path), step=1)
    changes = [partial(restacked, stacks={"layers.{}.weight": "layers.weight"})]
    with closing(open_source(str(tmp_path), changes=changes)) as source:
        moment = source.read("optim..state.layers.weight.exp_avg")
    each = [optimizer.state[layer.weight]["exp_avg"] for layer in layers]
    assert torch.equal(moment, torch.stack(each))
