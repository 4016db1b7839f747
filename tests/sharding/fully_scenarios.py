"""Many small scenarios on one start of ranks: a start takes longer than most of them.

    test_on_two_ranks = claims(2, [this_holds, that_holds])

A scenario is a function at the top level of a test module; its name is the claim. All ranks run all
of them in one order. The first that fails ends the run, and its name is in the error.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sharding
from tests.ranks import run_ranks
from tests.sharding.models import WIDTH, batches, build

Scenario = Callable[[], None]


def claims(ranks: int, scenarios: Sequence[Scenario]) -> Callable[[str], None]:
    """A test for each scenario; the first one that is wanted runs all of them on so many ranks."""
    run = _Run(ranks, scenarios)

    @pytest.mark.ranks
    @pytest.mark.parametrize("claim", run.names)
    def test(claim: str) -> None:
        if claim in run.skipped():
            pytest.skip(f"{claim}: torch's own class does not run here")

    return test


class _Run:
    """At most one run of the scenarios; what it raised is raised again at every further call."""

    def __init__(self, ranks: int, scenarios: Sequence[Scenario]) -> None:
        self.names = [scenario.__name__ for scenario in scenarios]
        self._ranks = ranks
        self._module = scenarios[0].__module__
        self._skipped: list[str] | None = None
        self._error: BaseException | None = None

    def skipped(self) -> Sequence[str]:
        """The names of those that were skipped; all others passed."""
        if self._skipped is None:
            self._skipped = []
            try:
                run = run_ranks(
                    self._ranks, _run_here, self._module, self.names, timeout_seconds=300.0
                )
                self._skipped = run[0]
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._skipped


def _run_here(module: str, names: Sequence[str]) -> list[str]:
    scenarios, skipped = importlib.import_module(module), []
    for name in names:
        dist.barrier()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(scenarios, name)()
        except pytest.skip.Exception:
            skipped.append(name)
        except BaseException as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return skipped


# --- the two engines under one interface ---------------------------------------------------------

ENGINES: dict[str, Any] = {"torch": torch_fsdp, "ours": sharding}


def whole_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(engine: str, model: nn.Sequential, *, inner: str = "1", **kwargs: Any) -> Any:
    """The model with its child `inner` as a unit of its own, and a root around it."""
    fully_shard = ENGINES[engine].fully_shard
    kwargs.setdefault("mesh", whole_mesh())
    fully_shard(model.get_submodule(inner), **kwargs)
    return fully_shard(model, **kwargs)


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def sgd(model: Any, **kwargs: Any) -> torch.optim.Optimizer:
    # Not Adam, whose steps are the same when all gradients are off by one factor.
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=0.2, momentum=0.9, **kwargs)


def train(model: Any, *, steps: int = 4, optimizer: Any = None, clip: float = 0.0) -> list[float]:
    optimizer = sgd(model) if optimizer is None else optimizer
    losses = []
    for _, mine in batches(steps):
        loss = loss_of(model, mine)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full parameters by bare name, gathered by torch's DTensor."""
    by_name = {}
    for name, param in model.named_parameters():
        bare = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        whole: Any = param.detach()
        by_name[bare] = whole.full_tensor().clone() if hasattr(whole, "full_tensor") else whole
    return by_name


def reference(
    kind: str | nn.Module, *, steps: int = 4, clip: float = 0.0
) -> dict[str, torch.Tensor]:
    """What the unsharded model has after training on all ranks' data together."""
    model = build(kind) if isinstance(kind, str) else kind
    optimizer = sgd(model)
    for whole, _ in batches(steps):
        loss_of(model, whole).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    assert got.keys() == wanted.keys(), what
    for name, value in got.items():
        torch.testing.assert_close(
            value, wanted[name].to(value.dtype), msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    assert got.keys() == wanted.keys(), what
    for name, value in got.items():
        assert torch.equal(value, wanted[name]), f"{what} {name}"


def ones(rows: int = 2) -> torch.Tensor:
    return torch.ones(rows, WIDTH)
