"""What real trainings have besides plain float32 layers, through save and load on real ranks.

Method: gloo processes build two instances of one training from different seeds, save the first and
load into the second. Then parameters, optimizer state and outputs of both must be the same bits on
every rank. A plain model in the same job, and what torch gathers itself, are the references.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import InvalidState
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Counter(nn.Module):
    """State that is no tensor, through torch's own protocol."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.seen = {"count": count, "mean": torch.full((2,), float(count))}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


class Frozen(nn.Linear):
    """A layer that is not trained, in a unit of its own."""


class Language(nn.Module):
    """Tied embedding and head, a frozen layer, a buffer, extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.frozen = Frozen(6, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.0 + seed))
        self.counter = Counter(seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(self.embed(tokens)))
        logits: torch.Tensor = self.head(hidden) * self.scale
        return logits


TOKENS = torch.arange(12).reshape(3, 4)
Training = dict[str, Any]


def _fsdp2(net: Language) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net.frozen, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net


def _fsdp1(use_orig_params: bool) -> Callable[[Language], nn.Module]:
    def wrap(net: Language) -> nn.Module:
        return FullyShardedDataParallel(
            net,
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy([Frozen]),
            use_orig_params=use_orig_params,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        )

    return wrap


WRAPS: dict[str, Callable[[Language], nn.Module]] = {
    "fsdp2": _fsdp2,
    "fsdp1-flat": _fsdp1(False),
    "fsdp1-orig": _fsdp1(True),
    "ddp": lambda net: DistributedDataParallel(net),
    "plain": lambda net: net,
}


def _training(wrap: str, seed: int) -> Training:
    """Two parameter groups where the engine allows, and a scheduler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = WRAPS[wrap](Language(seed))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained[:1], "lr": 0.1 * (seed + 1)}]
    if trained[1:]:
        groups.append({"params": trained[1:], "lr": 0.01, "weight_decay": 0.5 / (seed + 1)})
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    return {"model": model, "optim": optimizer, "scheduler": scheduler}


def _step(training: Training, count: int = 1) -> None:
    for _ in range(count):
        training["optim"].zero_grad()
        training["model"](TOKENS).float().square().mean().backward()
        training["optim"].step()
        training["scheduler"].step()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _facts(training: Training) -> dict[str, Any]:
    """Everything that a load has to bring, as this rank holds it."""
    model, optimizer = training["model"], training["optim"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, Any] = {name: _local(p).clone() for name, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            values[f"{names[id(parameter)]}/{key}"] = _local(value).clone()
    groups = optimizer.param_groups
    values["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    values["scheduler"] = training["scheduler"].state_dict()
    values["buffers"] = {name: _local(b).clone() for name, b in model.named_buffers()}
    counters = [module.seen for module in model.modules() if isinstance(module, Counter)]
    return {**values, "extra": counters}


def _same(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), (where, a.keys() ^ b.keys())
        for key in a:
            _same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            _same(x, y, f"{where}.{index}")
    else:
        assert a == b, where


# --- engines --------------------------------------------------------------------------------------


def _engine(wrap: str, base: str) -> None:
    saved = _training(wrap, 1)
    _step(saved, 2)
    wanted = _facts(saved)
    ckpt.save(saved, f"{base}/stepped", step=2)
    fresh_root = f"{base}/fresh"
    never = _training(wrap, 3)
    wanted_never = _facts(never)
    ckpt.save(never, fresh_root, step=0)

    # Into a training that has stepped, and whose root shows whole parameters after an eval forward.
    other = _training(wrap, 7)
    _step(other, 3)
    other["model"].eval()
    with torch.no_grad():
        other["model"](TOKENS)
    ckpt.load(other, f"{base}/stepped")
    _same(_facts(other), wanted)
    saved["model"].eval()
    with torch.no_grad():
        _same(other["model"](TOKENS), saved["model"](TOKENS))
    for training in (saved, other):  # the tie survived: one more step keeps them equal
        training["model"].train()
        _step(training)
    _same(_facts(other), _facts(saved))

    # Into a training that has not stepped, and from one that had not.
    unstepped = _training(wrap, 8)
    ckpt.load(unstepped, f"{base}/stepped")
    _same(_facts(unstepped), wanted)
    ckpt.load(unstepped, fresh_root)
    _same(_facts(unstepped), wanted_never)

    # Every rank alone reads the same plain model, in float32.
    plain = Language(9)
    ckpt.load({"model": plain}, f"{base}/stepped")
    assert plain.head.weight is plain.embed.weight
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert plain.counter.seen["count"] == 1
    if wrap in ("ddp", "fsdp2"):
        saved_again = _training(wrap, 4)
        ckpt.load(saved_again, f"{base}/stepped")
        for name, parameter in saved_again["model"].named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            _same(plain.get_parameter(name.removeprefix("module.")).data, full.detach(), name)


@pytest.mark.parametrize("wrap", ["fsdp2", "fsdp1-flat", "fsdp1-orig", "ddp"])
def test_mixed_precision_ties_frozen_layers_groups_and_extra_state(
    tmp_path: Path, wrap: str
) -> None:
    run_ranks(2, _engine, wrap, str(tmp_path))


# --- tensors and values that are rare -------------------------------------------------------------


def _rare() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(dist.get_world_size())
    base = torch.randn(6, 4, 5, 3, generator=generator)
    return {
        "channels last": base.clone().contiguous(memory_format=torch.channels_last),
        "transposed": base[0, 0].clone().t(),
        "strided": base.clone()[::2, :, 1:4],
        "expanded once": base[:1].clone(),
        "complex128": torch.complex(base[0].double(), base[1].double()),
        "conj": torch.complex(base[0, 0], base[1, 0]).conj(),
        "bool": base > 0,
        "0-d": torch.tensor(3.5, dtype=torch.float64),
        "zero-size": torch.zeros(0, 4),
        "zero-size int": torch.zeros(3, 0, dtype=torch.int16),
        "half": base.half(),
        "bfloat16": base.bfloat16(),
        "int8": (base * 10).to(torch.int8),
        "uint8": (base * 10).abs().to(torch.uint8),
        "int64": (base * 1e6).long(),
        "nan and inf": torch.tensor([float("nan"), float("inf"), -0.0]),
        "float8": base.to(torch.float8_e4m3fn),
        "list": [base[0].clone(), {"deep": base[1].clone()}],
        "values": {"a": (1, 2.5, None, True, "x", b"y"), "big": 1 << 80},
    }


def _blank(item: Any) -> Any:
    """The same memory layout with other contents."""
    if isinstance(item, torch.Tensor):
        out = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype)
        return out.conj() if item.is_conj() else out
    if isinstance(item, dict):
        return {key: _blank(value) for key, value in item.items()}
    if isinstance(item, list):
        return [_blank(value) for value in item]
    return None


def _bits(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        plain = item.resolve_conj().contiguous().flatten()
        return (item.dtype, item.shape, plain.view(torch.uint8).tolist() if item.numel() else [])
    if isinstance(item, dict):
        return {key: _bits(value) for key, value in item.items()}
    return [_bits(value) for value in item] if isinstance(item, list) else item


def _rare_tensors(base: str) -> None:
    state = _rare()
    ckpt.save(state, base, step=1)
    other = _blank(state)
    tensors = {key: value for key, value in other.items() if isinstance(value, torch.Tensor)}
    other["values"] = {"a": None, "big": 0}
    ckpt.load(other, base)
    for key, value in state.items():
        assert _bits(other[key]) == _bits(value), key
    for key, tensor in tensors.items():
        assert other[key] is tensor, key  # in place
        assert tensor.stride() == state[key].stride(), key


def _fp32_momentum(base: str) -> None:
    """A bfloat16 model with float32 momentum, sharded: no cast on the way in."""
    trainings = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).bfloat16()
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for parameter in net.parameters():
            momentum = parameter.detach().float() + 1e-4 * seed
            optimizer.state[parameter] = {"momentum_buffer": momentum}
        trainings.append({"model": net, "optim": optimizer})
    ckpt.save(trainings[0], base, step=1)
    ckpt.load(trainings[1], base)
    pairs = zip(trainings[0]["model"].parameters(), trainings[1]["model"].parameters(), strict=True)
    for saved, loaded in pairs:
        assert _local(loaded).dtype == torch.bfloat16
        assert torch.equal(_local(saved), _local(loaded))
        wanted = trainings[0]["optim"].state[saved]["momentum_buffer"]
        loaded_momentum = trainings[1]["optim"].state[loaded]["momentum_buffer"]
        assert loaded_momentum.dtype == torch.float32
        assert isinstance(loaded_momentum, DTensor)
        assert torch.equal(_local(wanted), _local(loaded_momentum))


def _batch_norm(base: str) -> list[str]:
    """Statistics that each rank has gathered for itself."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    model = DistributedDataParallel(net, broadcast_buffers=False)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 2, 5, 5))
    report = ckpt.save({"model": model}, base, step=1)
    with pytest.raises(InvalidState, match=r"model\.1\.running_mean"):
        ckpt.save({"model": model}, base, step=2, replicas="strict")
    assert [info.step for info in ckpt.list_steps(base)] == [1]
    ckpt.load({"model": model}, base)
    means = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.all_gather(means, net[1].running_mean)
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert not ckpt.save({"model": model}, base, step=3, replicas="strict").warnings
    return list(report.warnings)


def _rare_all(base: str) -> list[str]:
    _rare_tensors(f"{base}/rare")
    _fp32_momentum(f"{base}/momentum")
    return _batch_norm(f"{base}/norm")


def test_rare_tensors_momentum_dtypes_and_batch_norm(tmp_path: Path) -> None:
    texts = run_ranks(3, _rare_all, str(tmp_path))
    assert texts[0] == texts[1] == texts[2]
    named = "\n".join(texts[0])
    for name in ("model.1.running_mean", "model.1.running_var"):
        assert name in named
    assert "weight" not in named
    assert all(str(rank) in named for rank in range(3))


def _groups(base: str) -> None:
    """Two of four ranks save; a group of one saves; all four load."""
    rank = dist.get_rank()
    pair, single = dist.new_group([1, 3]), dist.new_group([2])
    if rank in (1, 3):
        state = {"t": torch.arange(100.0), "mine": ckpt.PerRank({"rank": rank})}
        ckpt.save(state, f"{base}/pair", step=1, process_group=pair)
        state = {"t": torch.zeros(100), "mine": ckpt.PerRank({"rank": -1})}
        ckpt.load(state, f"{base}/pair", process_group=pair)
        assert state["mine"].value == {"rank": rank}
        assert torch.equal(state["t"], torch.arange(100.0))
    if rank == 2:
        ckpt.save({"t": torch.arange(9.0)}, f"{base}/single", step=1, process_group=single)
        state = {"t": torch.zeros(9)}
        ckpt.load(state, f"{base}/single", process_group=single)
        assert torch.equal(state["t"], torch.arange(9.0))
    if rank == 0:
        with pytest.raises(Exception, match="group"):
            ckpt.save({"t": torch.zeros(1)}, f"{base}/pair", step=2, process_group=pair)
    dist.barrier()
    state = {"t": torch.zeros(100)}
    ckpt.load(state, f"{base}/pair")
    assert torch.equal(state["t"], torch.arange(100.0))
    _sharded_in_a_group(base)


def _sharded_in_a_group(base: str) -> None:
    """FSDP2 over ranks {1, 3} and {0, 2}: each pair has a model and a checkpoint of its own."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inner", "pair"))
    mine = mesh["inner"]  # ranks {0, 2} and {1, 3}
    torch.manual_seed(rank % 2)
    net = nn.Linear(7, 5)
    full = net.weight.detach().clone()
    fully_shard(net, mesh=mine)
    group = mine.get_group()
    root = f"{base}/half{rank % 2}"
    ckpt.save({"model": net}, root, step=1, process_group=group)
    plain = nn.Linear(7, 5)
    ckpt.load({"model": plain}, root, process_group=group)
    assert torch.equal(plain.weight, full)


def test_process_groups_of_some_ranks(tmp_path: Path) -> None:
    run_ranks(4, _groups, str(tmp_path))


def _alone(base: str) -> int:
    """A default group of one rank, as torchrun with one process has it."""
    training = _training("fsdp2", 1)
    _step(training)
    ckpt.save(training, base, step=1)
    other = _training("fsdp2", 2)
    ckpt.load(other, base)
    _same(_facts(other), _facts(training))
    return dist.get_world_size()


def test_a_world_of_one_with_a_process_group(tmp_path: Path) -> None:
    assert run_ranks(1, _alone, str(tmp_path)) == [1]
    plain = Language(5)
    ckpt.load({"model": plain}, str(tmp_path))
    assert plain.counter.seen["count"] == 1
