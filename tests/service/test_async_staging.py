"""`async_save` stores the state of the moment of its call, whatever training does afterwards.

Method: one step is trained, so that the optimizer is known to wait; all tensors are cloned; then
`async_save` is called and training continues, while the background is kept from copying until a
step is held back. The checkpoint must equal the clones. With the wait taken out it must not, which
shows that these tests would notice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckpt
from ckpt.saving.step_gate import Gate
from tests.service.staging import differing, late_copies, saved_tensors, tensors_now

URL = "memory://async-staging"


@dataclass
class Run:
    """A training: its state, and one step of it."""

    state: dict[str, Any]
    train: Callable[[], None]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Linear(40, 600), nn.Linear(600, 1)
    )


def run_with(model: nn.Module, optimizer: torch.optim.Optimizer, **others: Any) -> Run:
    def train() -> None:
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Run({"model": model, "optim": optimizer, **others}, train)


def adamw(**kwargs: Any) -> Run:
    model = net()
    return run_with(model, torch.optim.AdamW(model.parameters(), lr=0.05, **kwargs))


def sgd_momentum() -> Run:
    model = net()
    return run_with(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def tensor_learning_rate() -> Run:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = run_with(model, optimizer, scheduler=scheduler)
    step = run.train

    def train() -> None:
        # Before the step: in place, while nothing waits.
        scheduler.optimizer.param_groups[0]["lr"].mul_(0.5)
        step()
        scheduler.step()

    return Run(run.state, train)


def averaged_copy() -> Run:
    run = adamw()
    model = run.state["model"]
    copy = AveragedModel(model, avg_fn=lambda ours, new, count: ours.lerp(new, 0.1))
    plain = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    def train() -> None:
        for name, tensor in model.named_parameters():
            plain[name].lerp_(tensor.detach(), 0.3)
        copy.update_parameters(model)
        run.train()

    return Run({**run.state, "ema": copy, "plain": plain}, train)


def model_only() -> Run:
    run = adamw()
    return Run({"model": run.state["model"]}, run.train)


def optimizer_in_backward() -> Run:
    model = net()
    optimizers = {
        parameter: torch.optim.AdamW([parameter], lr=0.05) for parameter in model.parameters()
    }

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)

    def train() -> None:
        model(torch.randn(16, 8)).square().mean().backward()

    state = {f"optim{index}": one for index, one in enumerate(optimizers.values())}
    return Run({"model": model, **state}, train)


def grad_scaler() -> Run:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)

    def train() -> None:
        scaler.scale(model(torch.randn(16, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Run({"model": model, "optim": optimizer, "scaler": scaler}, train)


def compiled_step() -> Run:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    # The backend does not matter: what is compiled is what calls the hook or does not.
    step = torch.compile(optimizer.step, backend="eager")

    def train() -> None:
        model(torch.randn(16, 8)).square().mean().backward()
        step()
        optimizer.zero_grad()

    return Run({"model": model, "optim": optimizer}, train)


RUNS: dict[str, Callable[[], Run]] = {
    "foreach": lambda: adamw(foreach=True),
    "for-loop": lambda: adamw(foreach=False),
    "fused": lambda: adamw(fused=True),
    "momentum": sgd_momentum,
    "tensor-lr": tensor_learning_rate,
    "ema": averaged_copy,
    "model-only": model_only,
    "in-backward": optimizer_in_backward,
    "scaler": grad_scaler,
    "compiled": compiled_step,
}


# torch warns of its own use of torch.jit when it compiles, and takes seconds to import what it
# needs for that: too long for `make quick`.
COMPILED = (pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.ranks)
NAMES = [pytest.param(name, marks=COMPILED) if name == "compiled" else name for name in RUNS]


def save_late(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, **kwargs: Any) -> list[str]:
    """Names of tensors that were not stored as they were at the call."""
    ckpt.async_save(run.state, f"{URL}-{name}", step=0).result()
    run.train()
    with late_copies(monkeypatch):
        expected = tensors_now(run.state)
        pending = ckpt.async_save(run.state, f"{URL}-{name}", step=1, **kwargs)
        run.train()
        run.train()
    pending.result(30)
    return differing(saved_tensors(f"{URL}-{name}", 1), expected)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_the_state_at_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_late(RUNS[name](), monkeypatch, f"call-{name}") == []


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_wait_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: steps are not held back, and nobody looks whether tensors were changed. Parameters
    of every optimizer come out wrong.
    """
    monkeypatch.setattr(Gate, "wait_for", lambda self, optimizer: None)
    monkeypatch.setattr("ckpt.saving.staging.times_changed", lambda view: 0)
    with monkeypatch.context() as patch:
        patch.setattr(Gate, "is_behind", lambda self, optimizer: False)
        wrong = save_late(RUNS[name](), patch, f"planted-{name}")
    assert any(fqn.startswith("model.") for fqn in wrong)
    # What is copied in the call is right even then.
    assert not [fqn for fqn in wrong if "running" in fqn or "ema" in fqn or "plain" in fqn]


@pytest.mark.parametrize("name", NAMES)
def test_only_what_optimizers_change_is_left_for_later(name: str) -> None:
    """From the second save on the call copies neither parameters nor what is shaped like them."""
    run = RUNS[name]()
    ckpt.async_save(run.state, f"{URL}-later-{name}", step=0).result()
    run.train()
    report = ckpt.async_save(run.state, f"{URL}-later-{name}", step=1).result()
    largest = 0 if name != "ema" else 2 * 4 * sum(p.numel() for p in net().parameters())
    assert report.counters["blocking_bytes"] <= largest + 2000


def test_weights_changed_in_place_before_they_are_copied_are_never_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as by a forward that normalizes its weights, or averages swapped in to evaluate."""
    run, url = adamw(), f"{URL}-in-place"
    ckpt.async_save(run.state, url, step=0).result()
    run.train()
    with late_copies(monkeypatch) as release:
        pending = ckpt.async_save(run.state, url, step=1)
        with torch.no_grad():
            run.state["model"][0].weight.mul_(2)
        release.set()
        with pytest.raises(ckpt.CheckpointError, match=r"model\.0\.weight.*wait_staged"):
            pending.result(30)
    expected = tensors_now(run.state)
    ckpt.async_save(run.state, url, step=2).result(30)
    assert [info.step for info in ckpt.list_steps(url)] == [0, 2]
    assert differing(saved_tensors(url, 2), expected) == []


def test_now_needs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    run = adamw()
    monkeypatch.setattr(Gate, "wait_for", lambda self, optimizer: None)
    assert save_late(run, monkeypatch, "now", snapshot="now") == []


def test_parameters_of_nobody_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loop of its own, without torch.optim: nothing would hold it back."""
    model = net()

    def train() -> None:
        model(torch.randn(16, 8)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None

    assert save_late(Run({"model": model}, train), monkeypatch, "nobody") == []


def test_large_tensors_that_block_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckpt.saving.staging.BLOCKING_NBYTES_MAX", 1 << 20)
    state = {"large": torch.zeros(1 << 20), "small": torch.zeros(8)}
    with caplog.at_level(logging.WARNING, "ckpt.saving.staging"):
        ckpt.async_save(state, f"{URL}-blocking", step=0).result()
    assert "large (4.0 MiB)" in caplog.text


def test_what_was_loaded_meanwhile_waits_for_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load into the state that is being saved starts when the save is over."""
    run = adamw()
    url = f"{URL}-load"
    ckpt.async_save(run.state, url, step=0).result()
    run.train()
    expected = tensors_now(run.state)
    ckpt.async_save(run.state, url, step=1)
    ckpt.load(run.state, url, step=0)
    assert differing(saved_tensors(url, 1), expected) == []
