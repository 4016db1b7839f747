"""Small checkpoints that the real packages have written load, bit for bit, without these packages.

Method: `tests/corpus` has for each what its writer had: the live weights and moments, or those of
DeepSpeed's own converters. `make corpus` writes all of it anew. No module of a writer is imported,
nor of anything else that a file names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.cli import main
from ckpt.errors import Mismatch
from tests.ranks import run_ranks, share_all
from tests.versions import cut_here

CORPUS = Path(__file__).parents[1] / "corpus"
ALL = sorted(path.name for path in CORPUS.iterdir() if (path / "by.json").exists())
HAS_TENSORSTORE = find_spec("tensorstore") is not None
readable = pytest.mark.skipif(not HAS_TENSORSTORE, reason="needs tensorstore")
OPENED = [pytest.param(c, marks=[readable] * c.startswith("orbax")) for c in ALL]
MOMENTS = ("exp_avg", "exp_avg_sq")


def wanted_of(case: str) -> dict[str, torch.Tensor]:
    """What the writer had."""
    return load_file(CORPUS / case / "expected.safetensors")


CASES = [case for case in ALL if "0.weight.exp_avg" in wanted_of(case)]
# The rest are of other models: tests/docs/test_migrations.py has Megatron's.
WEIGHTS = [one for one in OPENED if one.values[0] not in (*CASES, "megatron")]


def url_of(case: str) -> str:
    place = CORPUS / case / "checkpoint"
    return str(next((file for end in ("last.*", "training.pt") for file in place.glob(end)), place))


def fresh(*, sharded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    if sharded:
        fully_shard(net)
    # Those of DeepSpeed and of the Trainer are of two groups.
    decayed = [parameter for parameter in net.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in net.parameters() if parameter.ndim <= 1]
    return net, torch.optim.AdamW([{"params": decayed}, {"params": others}])


def loaded(case: str, *, sharded: bool = False) -> tuple[Any, Any, Any]:
    """A model, its optimizer where the checkpoint has one that names parameters, and the report."""
    optimizer: torch.optim.Optimizer | None
    net, optimizer = fresh(sharded=sharded)
    if not case.startswith(("deepspeed", "transformers")):
        optimizer = torch.optim.AdamW(net.parameters())
    state: dict[str, Any] = {"model": net}
    if case == "lightning":
        optimizer = None
    else:
        state["optimizer_0" if case == "lightning_folder" else "optimizer"] = optimizer
    return net, optimizer, ckpt.load(state, url_of(case), strict="state")


def expect(case: str, net: nn.Module, optimizer: Any) -> int:
    """Compare with what the writer had; returns the bytes of it."""
    wanted, nbytes = wanted_of(case), 0
    for name, parameter in net.named_parameters():
        held = {name: parameter}
        if optimizer is not None:
            held |= {f"{name}.{key}": optimizer.state[parameter][key] for key in MOMENTS}
        for key, one in held.items():
            full = one.full_tensor() if hasattr(one, "full_tensor") else one
            assert torch.equal(full, wanted[key]), key
            nbytes += full.nbytes
    return nbytes


@pytest.mark.parametrize("case", CASES)
def test_what_a_package_wrote_loads_bit_for_bit(case: str) -> None:
    net, optimizer, report = loaded(case)
    needed = expect(case, net, optimizer)
    # Blocks are read whole: at most the pad of each tensor more.
    assert report.nbytes_read <= 1.05 * needed + 64 * len(report.loaded.tensors)


def weights_of(case: str, *, sharded: bool = False) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of a checkpoint without a training, loaded, and the report."""
    state: dict[str, torch.Tensor] = {}
    for name, one in wanted_of(case).items():
        if not name.startswith("dense."):
            state[name] = torch.zeros_like(one)
            if sharded and one.ndim:
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                state[name] = cut_here(state[name], mesh, [Shard(one.ndim - 1)])
    return state, ckpt.load({"model": state}, url_of(case), strict="state")


def expect_weights(case: str, state: dict[str, torch.Tensor]) -> int:
    """Compare with what the writer's reader gave; returns the bytes of it."""
    wanted, nbytes = wanted_of(case), 0
    for name, one in state.items():
        full = wanted[name]
        if isinstance(one, DTensor):
            full = cut_here(full, one.device_mesh, one.placements).to_local()
            one = one.to_local()
        ours, theirs = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, full))
        assert one.dtype == full.dtype and torch.equal(ours, theirs), name
        nbytes += one.nbytes
    return nbytes


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_load_as_the_writers_reader_has_them(case: str) -> None:
    state, report = weights_of(case)
    assert report.nbytes_read <= 1.05 * expect_weights(case, state) + 64 * len(state)


def _reshard_weights(case: str) -> int:
    share_all()
    state, report = weights_of(case, sharded=True)
    expect_weights(case, state)
    dist.barrier()
    return int(report.nbytes_read)


@pytest.mark.ranks
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_load_in_columns_on_three_ranks(case: str) -> None:
    read = run_ranks(3, _reshard_weights, case)
    state, _ = weights_of(case)
    assert sum(read) <= 1.05 * expect_weights(case, state) + 64 * len(state)


def _reshard(case: str) -> int:
    share_all()
    net, optimizer, report = loaded(case, sharded=True)
    expect(case, net, optimizer)
    dist.barrier()
    return int(report.nbytes_read)


@pytest.mark.ranks
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_what_a_package_wrote_loads_on_three_ranks(case: str) -> None:
    read = run_ranks(3, _reshard, case)
    net, optimizer, report = loaded(case)
    assert sum(read) <= 1.05 * expect(case, net, optimizer) + 64 * len(report.loaded.tensors)


@pytest.mark.parametrize("case", OPENED)
def test_commands_take_what_a_package_wrote(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = url_of(case)
    for command in ("ls", "show", "verify", "plan"):
        assert main([command, url]) == 0, command
    assert main(["diff", url, url]) == 0
    assert (".kernel" if case.startswith("orbax") else ".weight") in capsys.readouterr().out


def test_numbers_of_other_groups_are_no_parameters() -> None:
    """The Trainer's optimizer has two groups: its number 1 is not the second parameter of one."""
    net, _ = fresh()
    state = {"model": net, "optimizer": torch.optim.AdamW(net.parameters())}
    with pytest.raises(Mismatch, match=r"\[2, 3\] of them, and the state's groups have \[5\]"):
        ckpt.load(state, url_of("transformers_trainer"), strict="state")


def test_nothing_that_a_file_names_is_imported() -> None:
    """In a process of its own, with an audit hook."""
    script = """
import sys, torch, ckpt
seen = []
def note(event, args):
    if event == "import":
        seen.append(args[0].partition(".")[0])
    elif event == "pickle.find_class":
        seen.append(event)
sys.addaudithook(note)
writers = {"deepspeed", "accelerate", "lightning", "pytorch_lightning", "verl", "megatron"}
writers |= {"torch_checkpointing", "peft", "timm", "transformers", "jax", "orbax"}
writers |= {"compressed_tensors", "pickle.find_class"}
for url in sys.argv[1:]:
    seen.clear()
    with ckpt.open(url) as checkpoint:
        for name in checkpoint:
            checkpoint[name]
    print(url, sorted(writers & set(seen)))
"""
    urls = [url_of(case) for case in ALL if HAS_TENSORSTORE or not case.startswith("orbax")]
    run = subprocess.run(
        [sys.executable, "-c", script, *urls], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == [f"{url} []" for url in urls]


def test_each_case_says_who_wrote_it() -> None:
    by = {case: json.loads((CORPUS / case / "by.json").read_text()) for case in ALL}
    assert len(by) >= 24 and all("torch" in packages for packages in by.values())
    assert {"deepspeed", "accelerate", "lightning", "megatron-core", "torch-checkpointing"} <= {
        name for one in by.values() for name in one
    }
    assert {"2.6", "2.13", "2.15"} <= {one["torch"].rpartition(".")[0] for one in by.values()}
