"""Optimizers of torch and of other libraries, on a small model with tensors of all usual shapes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.wild.models import floats_of, tokens_of

LEARNING_RATE = 0.01


class Optimizer(NamedTuple):
    """A row of the table. `net` is what it trains; `make` is called with the model as wrapped."""

    name: str
    package: str
    make: Callable[[nn.Module], torch.optim.Optimizer]
    net: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    engines: tuple[str, ...] = ("plain", "ddp", "fsdp2", "our fully_shard", "our FSDP")


class Net(nn.Module):
    """Tokens to 8 numbers: matrices, vectors, a scale without dims, and a convolution."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.conv(self.embed(tokens).mT)).mT
        result: torch.Tensor = self.head(self.norm(hidden))
        return result


class Matrices(nn.Module):
    """Nothing but matrices, for optimizers that take nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32, bias=False)
        self.second = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return result


class Bag(nn.Module):
    """An embedding with sparse gradients, which is all that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 16, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.embed(tokens)
        return result


def of_tokens(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = (model(tokens_of(step)) - floats_of(step, 8, 8)).square().mean()
    return loss


def of_floats(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = (model(floats_of(step, 16)) - 1).square().mean()
    return loss


def of_bags(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = (model(tokens_of(step)) - 1).square().mean()
    return loss


def from_class(package: str, name: str, options: dict[str, Any], model: nn.Module) -> Any:
    return getattr(importlib.import_module(package), name)(model.parameters(), **options)


def wide_net() -> nn.Module:
    """Large enough for states of 8 and 4 bits: smaller ones are left in 32."""
    return Net(128)


def row(
    name: str,
    package: str = "torch.optim",
    net: Callable[[], nn.Module] = Net,
    loss: Callable[[nn.Module, int], torch.Tensor] = of_tokens,
    **options: Any,
) -> Optimizer:
    options.setdefault("lr", LEARNING_RATE)
    return Optimizer(name, package, partial(from_class, package, name, options), net, loss)


TORCH = (
    *(
        row(name)
        for name in (
            "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam",
            "RMSprop", "Rprop",
        )
    ),
    row("SGD", momentum=0.9, nesterov=True),
    row("Muon", net=Matrices, loss=of_floats),
    row("LBFGS", max_iter=3)._replace(engines=("plain", "ddp")),
    row("SparseAdam", net=Bag, loss=of_bags)._replace(engines=("plain",)),
)  # fmt: skip

SCHEDULE_FREE = tuple(
    row(name, "schedulefree")
    for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")
)


UNFLATTENED = ("plain", "ddp", "fsdp2", "our fully_shard")


def of_heavyball(name: str, model: nn.Module) -> Any:
    """One of heavyball's, without compiling its steps, which takes minutes each."""
    import heavyball
    import torch._dynamo

    torch._dynamo.config.disable = True
    heavyball.utils.compile_mode = None
    return getattr(heavyball, name)(model.parameters(), lr=LEARNING_RATE)


HEAVYBALL = tuple(
    Optimizer(name, "heavyball", partial(of_heavyball, name), Net, of_tokens, UNFLATTENED)
    for name in (
        "ADOPT", "AdamW", "LaProp", "Muon", "MuonAdamW", "NAdam", "PSGDKron", "SFAdamW", "SOAP",
        "Scion",
    )
)  # fmt: skip

# Those of torchao compile their steps, which takes minutes each: tests/state tries their state.
BITSANDBYTES = tuple(
    row(name, "bitsandbytes.optim", wide_net) for name in ("AdamW8bit", "Lion8bit", "AdamW")
)


# Of the library's more than a hundred, those that are asked for, and those whose state is unusual.
PYTORCH_OPTIMIZERS = (
    "adabelief", "adafactor", "adagc", "adan", "adashift", "ademamix", "adopt", "apollo", "came",
    "conda", "fira", "galore", "kron", "lamb", "lars", "lion", "mars", "muon", "prodigy", "racs",
    "ranger21", "scalableshampoo", "schedulefreeadamw", "scion", "shampoo", "soap", "sophiah",
    "spam", "stablespam", "tiger",
)  # fmt: skip


def of_pytorch_optimizer(name: str, model: nn.Module) -> Any:
    """One of the library's by its own lower-case name, with the options that it has by default."""
    kind = importlib.import_module("pytorch_optimizer").load_optimizer(name)
    if name == "muon":
        return kind(groups_of(model))
    if name == "ranger21":
        return kind(model.parameters(), num_iterations=10)
    return kind(model.parameters())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """As the Muon of that library wants its parameters: matrices, and the rest by AdamW."""
    params = list(model.parameters())
    return [
        {"params": [each for each in params if each.ndim >= 2], "use_muon": True},
        {"params": [each for each in params if each.ndim < 2], "use_muon": False},
    ]


OF_PYTORCH_OPTIMIZER = tuple(
    Optimizer(name, "pytorch_optimizer", partial(of_pytorch_optimizer, name), Net, of_tokens)
    for name in PYTORCH_OPTIMIZERS
)
