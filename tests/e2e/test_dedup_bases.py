"""Damage to what saves with `dedup=True` refer to never ends all checkpoints of a root.

Method: a state of which only a little changes is saved many times; which saves refer to nothing is
read from the log. Then a bit of the newest base is flipped, and the training is restored.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.commit.appender import Sources
from ckpt.commit.session import open_session


def _state(step: int) -> dict[str, Any]:
    frozen = torch.arange(3000.0)
    return {"frozen": frozen, "adapter": torch.full((5,), float(step)), "step": step}


def _full(url: str) -> list[int]:
    """The steps whose checkpoints need no other."""
    return [info.step for info in ckpt.list_steps(url) if not info.references]


def _flip(url: str, step: int) -> None:
    """A bit in the middle of the data of one checkpoint's own file."""
    (file,) = Path(url).glob(f"steps/{step:08d}-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)


@pytest.mark.parametrize("is_new_process", [False, True])
@pytest.mark.parametrize(("options", "every"), [({}, 10), ({"full_every": 3}, 3)])
def test_every_tenth_save_writes_everything(
    tmp_path: Path, is_new_process: bool, options: dict[str, int], every: int
) -> None:
    """However many processes save, and with notes of the user's, which stay as they are."""
    url = str(tmp_path / "run")
    for step in range(1, 23):
        if is_new_process and step > 1:
            ckpt.forget(url)
            ckpt.load(_state(0), url)
        ckpt.save(_state(step), url, step=step, dedup=True, user={"note": f"{step}"}, **options)
    # The fourth as well: until then, all hang on the first.
    assert _full(url) == [1, *range(4, 23, every)]
    with ckpt.open(url) as checkpoint:
        assert checkpoint.user == {"note": "22"}


def test_of_one_every_save_writes_everything(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    for step in (1, 2, 3):
        ckpt.async_save(_state(step), url, step=step, dedup=True, full_every=1).result()
    assert _full(url) == [1, 2, 3]
    for save in (ckpt.save, ckpt.async_save):
        with pytest.raises(ValueError, match="full_every=0: expected an int of at least 1"):
            save(_state(4), url, step=4, dedup=True, full_every=0)


def _train(url: str, steps: int, keep: ckpt.KeepRule) -> list[bool]:
    """Train so many steps with a save at each; which of them wrote everything."""
    state, made = _state(0), []
    with ckpt.Checkpointer(state, url, save=ckpt.EverySteps(1), keep=keep, dedup=True) as saver:
        for step in range(1, steps + 1):
            state.update(_state(step))
            saver.step(step)
            saver.wait()
            made.append(not ckpt.list_steps(url)[-1].references)
    return made


def test_one_flipped_bit_of_a_base_does_not_end_a_training(tmp_path: Path) -> None:
    """Two checkpoints are kept. Of a later base, the newest one of the base before is left."""
    url = str(tmp_path / "run")
    _train(url, 25, ckpt.KeepLatest(2))
    assert [info.step for info in ckpt.list_steps(url)] == [14, 23, 24, 25]
    _flip(url, 24)
    state = _state(0)
    with ckpt.Checkpointer(state, url, dedup=True) as saver:
        restored = saver.restore()
    assert restored is not None and restored.step == 23
    assert torch.equal(state["adapter"], _state(23)["adapter"])
    assert torch.equal(state["frozen"], _state(23)["frozen"])


@pytest.mark.parametrize("steps", range(4, 12))
def test_the_first_base_is_the_only_one_for_three_saves(tmp_path: Path, steps: int) -> None:
    """From the fourth save on, a flip in any one file leaves a checkpoint to restore."""
    url = str(tmp_path / "run")
    _train(url, steps, ckpt.KeepLatest(2))
    live = ckpt.list_steps(url)
    for base in live:
        assert [info for info in live if base.attempt not in (info.attempt, *info.references)]


def test_keeping_one_checkpoint_costs_no_more_bases(tmp_path: Path) -> None:
    """A rule that keeps one has no independent one to wait for."""
    made = _train(str(tmp_path / "run"), 22, ckpt.KeepLatest(1))
    assert [step for step, is_full in enumerate(made, 1) if is_full] == [1, 11, 21]


def test_a_removed_base_is_made_up_for_by_the_next_save(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    for step in range(1, 8):
        ckpt.save(_state(step), url, step=step, dedup=True)
    assert _full(url) == [1, 4]
    for step in (3, 2, 1):
        assert main(["rm", url, "--step", str(step), "--yes"]) == 0
    for step in (8, 9):
        ckpt.save(_state(step), url, step=step, dedup=True)
    assert _full(url) == [4, 8]


def test_a_base_is_replaced_by_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save every six hours. What it refers to is never older than a day; nor of tomorrow."""
    url, now = str(tmp_path / "run"), [time.time()]
    monkeypatch.setattr("time.time", lambda: now[0])
    opened = partial(open_session, sources=Sources(clock=lambda: now[0]))
    monkeypatch.setattr("ckpt.process.open_session", opened)
    for step in range(1, 15):
        if step > 1:
            ckpt.forget(url)
            ckpt.load(_state(0), url)
        now[0] += 6 * 3600.0 if step < 14 else -7 * 86400.0
        ckpt.save(_state(step), url, step=step, dedup=True, full_every=timedelta(days=1))
    assert _full(url) == [1, 4, 8, 12, 14]
    for bad in (timedelta(0), timedelta(days=-1)):
        with pytest.raises(ValueError, match=r"full_every=.*at least 1, or a timedelta above"):
            ckpt.save(_state(15), url, step=15, dedup=True, full_every=bad)
