"""Saves in the background with dedup: what they refer to is what the state was at the call.

Method: adapters beside frozen layers are trained in one process, with a buffer that every forward
changes; every step is saved while the next one runs, and each is loaded and compared with what the
model was at the call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.commit.locate import live_entries
from ckpt.commit.records import LiveEntry
from ckpt.commit.session import ReferenceRetired, Session
from ckpt.commit.writer import Commit
from ckpt.errors import SaveDropped
from ckpt.saving.dedup import kept_alive
from storage import open_store

WIDTH = 256


class Adapted(nn.Module):
    """Frozen layers with adapters, and a BatchNorm whose buffers change in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.frozen.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(8))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, adapter in zip(self.frozen, self.adapters, strict=True):
            x = self.norm(frozen(x)).tanh() + adapter(x).sum(-1, keepdim=True)
        return x


class Training:
    """One process: `step` trains, `state` is what is saved, `seen` what it was at each step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Adapted()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=0.1)
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        self.model(torch.randn(8, WIDTH)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen[number] = {k: v.clone() for k, v in self.model.state_dict().items()}

    def state(self, number: int) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": number}

    def save(self, root: str, number: int, **options: Any) -> ckpt.reports.PendingSave:
        return ckpt.async_save(self.state(number), root, step=number, dedup=True, **options)

    def check(self, root: str, number: int) -> None:
        loaded = Training()
        state = loaded.state(0)
        ckpt.load(state, root, step=number)
        assert state["step"] == number
        expected = self.seen[number]
        for name, tensor in loaded.model.state_dict().items():
            assert torch.equal(tensor, expected[name]), (number, name)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def test_every_save_under_training_is_the_state_at_its_call_and_writes_little(root: str) -> None:
    training = Training()
    pending = []
    for number in range(1, 7):
        training.step(number)
        pending.append(training.save(root, number))
    reports = [save.result() for save in pending]
    total = reports[0].nbytes
    # Headers, manifest and checksums of a state of 2 MiB count for a good part of what is written.
    few = [report for report in reports if report.step not in (1, 4)]
    assert all(report.nbytes < 0.12 * total for report in few)
    frozen = 8 * (WIDTH * WIDTH + WIDTH) * 4
    assert all(report.nbytes_referenced >= frozen for report in few)
    for number in range(1, 7):
        training.check(root, number)
    assert ckpt.verify(root).ok


def test_saves_in_the_foreground_and_in_the_background_refer_to_each_other(root: str) -> None:
    training = Training()
    for number in range(1, 7):
        training.step(number)
        if number % 2:
            training.save(root, number).result()
        else:
            ckpt.save(training.state(number), root, step=number, dedup=True)
    first, *then, base, after, last = live_entries(open_store(root))
    assert all(entry.references == (first.attempt,) for entry in then)
    assert base.references == () and after.references == last.references == (base.attempt,)
    for number in range(1, 7):
        training.check(root, number)


def test_a_retry_writes_what_was_staged_and_not_what_training_made_of_it(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is refused twice, as if what it refers to had been retired; meanwhile the
    parameters are trained on."""
    training = Training()
    training.step(1)
    training.save(root, 1).result()
    tried: list[int] = []
    commit = Session.commit

    def refuse(session: Session, wanted: Commit) -> LiveEntry:
        tried.append(len(wanted.references))
        if wanted.references:
            for parameter in training.model.parameters():
                parameter.data.add_(1)
            raise ReferenceRetired("of a test")
        return commit(session, wanted)

    monkeypatch.setattr(Session, "commit", refuse)
    training.step(2)
    training.save(root, 2).result()
    assert tried == [1, 1, 0]
    training.check(root, 2)


def test_a_save_that_was_replaced_harms_no_later_one(root: str) -> None:
    training = Training()
    saves = []
    for number in range(1, 6):
        training.step(number)
        saves.append(training.save(root, number, when_busy="replace"))
    made = []
    for number, save in enumerate(saves, 1):
        try:
            save.result()
            made.append(number)
        except SaveDropped:
            assert save.skipped
    assert 5 in made
    assert [entry.step for entry in live_entries(open_store(root))] == made
    for number in made:
        training.check(root, number)


def test_a_budget_that_cannot_hold_the_state_is_refused_before_anything_is_staged(
    root: str,
) -> None:
    training = Training()
    training.step(1)
    with pytest.raises(ValueError, match="dedup=True at least"):
        training.save(root, 1, host_bytes_max=1 << 20).result()
    training.save(root, 1).result()
    training.check(root, 1)


def test_a_checkpointer_keeps_the_latest_and_what_they_refer_to(root: str) -> None:
    """Fifteen saves of which two are kept. Number 14 wrote everything and 15 refers to it: so 13
    stays, which shares no file with them, and the fourth, which 13 refers to.
    """
    training = Training()
    state = training.state(0)
    with ckpt.Checkpointer(
        state, root, save=ckpt.EverySteps(1), keep=ckpt.KeepLatest(2), dedup=True
    ) as checkpointer:
        for number in range(1, 16):
            training.step(number)
            state["step"] = number
            checkpointer.step(number)
        checkpointer.wait()
    store = open_store(root)
    live = live_entries(store)
    assert [live[0].step, live[-2].step, live[-1].step] == [4, 14, 15] and len(live) < 6
    kept = [entry.attempt for entry in live if entry.step >= 13]
    assert {entry.attempt for entry in live} == kept_alive(kept, live)
    directories = {info.key.split("/")[1] for info in store.list("steps/")}
    assert directories == {entry.prefix.split("/")[1] for entry in live}
    for entry in live:
        training.check(root, entry.step)
    resumed = Training()
    with ckpt.Checkpointer(resumed.state(0), root, dedup=True) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, training.seen[15][name])
