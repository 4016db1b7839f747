"""Damage to what saves with `dedup=True` refer to never ends all checkpoints of a root.

Method: a state of which only a little changes is saved many times; which saves refer to nothing is
read from the log. Then a bit of the newest base is flipped, and the training is restored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt


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
        if is_new_process:
            ckpt.forget(url)
        ckpt.save(_state(step), url, step=step, dedup=True, user={"note": f"{step}"}, **options)
    assert _full(url) == list(range(1, 23, every))
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


def test_one_flipped_bit_of_a_base_does_not_end_a_training(tmp_path: Path) -> None:
    """Two checkpoints are kept. Of a later base, the newest one of the base before is left."""
    url = str(tmp_path / "run")
    state = _state(0)
    with ckpt.Checkpointer(
        url, state, save=ckpt.EverySteps(1), keep=ckpt.KeepLatest(2), dedup=True
    ) as saver:
        for step in range(1, 26):
            state.update(_state(step))
            saver.step(step)
            saver.wait()
    live = [info.step for info in ckpt.list_steps(url)]
    assert live == [11, 20, 21, 24, 25]
    _flip(url, 21)
    with ckpt.Checkpointer(url, state, dedup=True) as saver:
        restored = saver.restore()
    assert restored is not None and restored.step == 20
    assert torch.equal(state["adapter"], _state(20)["adapter"])
    assert torch.equal(state["frozen"], _state(20)["frozen"])
