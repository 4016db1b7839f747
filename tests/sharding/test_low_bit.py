"""Gathers in 8 bits, and optimizers of torchao and bitsandbytes whose states have few bits.

Method: real ranks train under this engine and under torch's, bit for bit, and what is sent is
counted; optimizers of blocks also against the unsharded model. The libraries are not needed: where
one is not installed its tests are skipped. They are imported by the ranks alone, for that takes
seconds; the default run has a gather in 8 bits by an extension of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sharding import Blocks, FullyShardedDataParallel, Whole, fully_shard
from tests.conftest import Scale
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDTH = 256
FP8 = torch.float8_e4m3fn
Optimizers = Callable[[Any], torch.optim.Optimizer]


def needs(name: str, scale: Scale) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if not scale.soak:
        pytest.skip(f"importing {name} takes seconds on each rank: --soak")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    # Half of a weight in 8 bits is 64 KiB and more: it is sent by itself, not packed with others.
    return nn.Sequential(
        nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 64)
    )


def shard(which: str, model: nn.Sequential) -> nn.Sequential:
    if which == "ours":
        shards: Any = fully_shard
    else:
        from torch.distributed.fsdp import fully_shard as torchs

        shards = torchs
    for index in (0, 2):
        shards(model[index])
    shards(model)
    return model


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    after: Callable[[], None] = lambda: None,
    seed: int | None = None,
) -> list[float]:
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(16, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(float(loss.detach()))
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    wholes = {}
    for name, param in model.named_parameters():
        sharded: Any = param.detach()
        full: Any = sharded.full_tensor()
        wholes[name] = getattr(full, "_tensor", full)  # torchao's wrapper around the values
    return wholes


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@contextmanager
def bytes_sent() -> Iterator[list[int]]:
    """How many bytes this rank sends directly, as gathers on gloo do."""
    sent = [0]
    real = dist.isend

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += tensor.numel() * tensor.element_size()
        return real(tensor, *args, **kwargs)

    dist.isend = isend
    try:
        yield sent
    finally:
        dist.isend = real


def half_in_8_bits(model: nn.Module) -> int:
    """Bytes of this rank's half where weights have one byte for each element, biases four."""
    shapes = [tuple(param.shape) for param in model.parameters()]
    return sum(torch.Size(s).numel() * (1 if len(s) == 2 else 4) for s in shapes) // 2


# --- an extension of our own ----------------------------------------------------------------------


def extend(local: Any) -> None:
    """Have the values of a shard gathered in 8 bits."""

    def before(self: Any, mesh: Any) -> Any:
        return (self.detach().to(FP8),), None

    def after(
        self: Any, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (gathered,) = outputs
        if out is not None:
            out.copy_(gathered)
            return None
        values = gathered.to(dtype)
        return values, (values,)

    local.fsdp_pre_all_gather = types.MethodType(before, local)
    local.fsdp_post_all_gather = types.MethodType(after, local)


def gather_by_an_extension() -> tuple[int, int]:
    model: Any = shard("ours", net())
    for index in (0, 2, 4):
        extend(model[index].weight._local_tensor)
    batch = torch.ones(2, WIDTH)
    with torch.no_grad(), bytes_sent() as sent:
        got = model(batch)
    plain = net()
    with torch.no_grad():
        for index in (0, 2, 4):
            layer = plain[index]
            assert isinstance(layer, nn.Linear)
            layer.weight.copy_(layer.weight.to(FP8))
        assert torch.equal(got, plain(batch))
    return sent[0], half_in_8_bits(plain)


def test_large_parameters_are_gathered_in_8_bits_by_an_extension() -> None:
    for sent, expected in run_ranks(2, gather_by_an_extension):
        assert sent == expected


# --- torchao --------------------------------------------------------------------------------------


def in_float8(which: str, precomputes: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters and losses of steps on the same batches on all ranks."""
    float8: Any = importlib.import_module("torchao.float8")
    model = net()
    gathers = which != "plain"
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
    float8.convert_to_float8_training(model, config=config)
    if gathers:
        shard(which, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def after() -> None:
        if precomputes and gathers:
            float8.precompute_float8_dynamic_scale_for_fsdp(model)

    losses = train(model, optimizer, after, seed=0)
    if not gathers:
        return {name: param.detach() for name, param in model.named_parameters()}, losses
    params = whole(model)
    if which == "ours":
        with torch.no_grad(), bytes_sent() as sent:
            model(torch.ones(2, WIDTH))
        assert sent[0] == half_in_8_bits(model)
    return params, losses


def float8_as_unsharded() -> None:
    expected, expected_losses = in_float8("plain", False)
    for precomputes in (False, True):
        got, losses = in_float8("ours", precomputes)
        assert losses == expected_losses
        assert_same(got, expected)


def test_float8_weights_are_gathered_in_8_bits_and_train_as_unsharded(scale: Scale) -> None:
    needs("torchao", scale)
    run_ranks(2, float8_as_unsharded, timeout_seconds=300)


def torchaos() -> dict[str, Optimizers]:
    library: Any = importlib.import_module("torchao.optim")
    torch.compiler.set_stance("force_eager")  # steps are compiled otherwise, which takes minutes
    return {
        name: functools.partial(getattr(library, name), lr=0.01)
        for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")
    }


def bitsandbytess() -> dict[str, Optimizers]:
    library: Any = importlib.import_module("bitsandbytes.optim")
    return {
        name: functools.partial(getattr(library, name), lr=0.01, min_8bit_size=256)
        for name in ("AdamW8bit", "Lion8bit")
    }


def low_bit_as_torchs() -> None:
    for optimizer_of in torchaos().values():
        trained = {}
        for which in ("ours", "torch"):
            model: Any = shard(which, net())
            optimizer = optimizer_of(model.parameters())
            trained[which] = (train(model, optimizer), whole(model))
            state = optimizer.state[model[0].weight]["exp_avg"]
            assert "OptimState" in type(state.to_local()).__name__
        assert trained["ours"][0] == trained["torch"][0]
        assert_same(trained["ours"][1], trained["torch"][1])


def test_low_bit_optimizers_of_torchao_step_as_under_torchs(scale: Scale) -> None:
    needs("torchao", scale)
    run_ranks(2, low_bit_as_torchs, timeout_seconds=300)


def runs_of_256(param: nn.Parameter) -> Blocks | Whole:
    return Blocks(256) if param.numel() % 256 == 0 else Whole()


def low_bit_as_unsharded(optimizers_of: Callable[[], dict[str, Optimizers]]) -> None:
    for name, optimizer_of in optimizers_of().items():
        sharded = FullyShardedDataParallel(
            net(), use_orig_params=True, shard_placement_fn=runs_of_256
        )
        plain = net()
        pairs = [(one, optimizer_of(one.parameters())) for one in (sharded, plain)]
        generator = torch.Generator().manual_seed(0)  # the same batches: sums over ranks are exact
        for _ in range(3):
            batch = torch.randn(16, WIDTH, generator=generator)
            for model, optimizer in pairs:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(sharded, writeback=False):
            for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_low_bit_optimizers_see_the_blocks_of_the_unsharded_model(
    library: str, scale: Scale
) -> None:
    needs(library, scale)
    made = {"torchao": torchaos, "bitsandbytes": bitsandbytess}[library]
    run_ranks(2, low_bit_as_unsharded, made, timeout_seconds=300)
