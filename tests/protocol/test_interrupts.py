"""Ctrl-C in a save: the next save of the same process removes what it left, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.saving.staging import stage
from storage.local import LocalStore


def _state(step: int) -> dict[str, Any]:
    return {"x": torch.ones(2000) * step}


def _directories(root: Path) -> list[int]:
    return sorted(int(path.name.split("-")[0]) for path in (root / "steps").iterdir())


@pytest.mark.parametrize("written_key", ["safetensors", "MANIFEST", "log/"])
@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupted_save_is_swept_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_key: str, is_done: bool
) -> None:
    root = tmp_path / "run"
    ckpt.save(_state(1), str(root), step=1)

    def interrupted(name: str) -> Any:
        real = getattr(LocalStore, name)

        def call(self: LocalStore, key: str, *args: Any, **kwargs: Any) -> Any:
            if written_key not in key:
                return real(self, key, *args, **kwargs)
            if is_done:
                made = real(self, key, *args, **kwargs)
                if made is not None:
                    with made as writer:
                        size = kwargs.get("nbytes", args[0])
                        writer.write_part(0, [memoryview(bytes(size))])
            raise KeyboardInterrupt

        return call

    with monkeypatch.context() as patch:
        for name in ("create", "put_if_absent"):
            patch.setattr(LocalStore, name, interrupted(name))
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(_state(2), str(root), step=2)
    ckpt.save(_state(3), str(root), step=3)
    # Sent or not, the outcome of the record was open, and the next save has settled it.
    landed = written_key == "log/"
    assert _directories(root) == ([1, 2, 3] if landed else [1, 3])
    assert [step.step for step in ckpt.list_steps(str(root))] == _directories(root)
    assert not list(root.rglob(".tmp-*"))
    for step in _directories(root):
        assert ckpt.verify(str(root), step).ok


@pytest.mark.parametrize("is_staged", [False, True])
def test_an_interrupted_background_save_leaves_nothing_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_staged: bool
) -> None:
    """Ctrl-C reaches the call while it copies, before or after the copy has been handed on."""
    root = tmp_path / "run"
    ckpt.save(_state(1), str(root), step=1)
    real = stage

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if is_staged:
            real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ckpt.api.stage", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.async_save(_state(2), str(root), step=2)
    ckpt.async_save(_state(3), str(root), step=3).result()
    assert _directories(root) == [1, 3]
    assert [step.step for step in ckpt.list_steps(str(root))] == [1, 3]
    assert not list(root.rglob(".tmp-*"))
    assert ckpt.verify(str(root), 3).ok


def test_an_interrupted_write_in_the_background_is_swept_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has written data files when it is interrupted: it cannot commit any more."""
    root = tmp_path / "run"
    ckpt.save(_state(1), str(root), step=1)
    real = LocalStore.create

    def interrupted(self: LocalStore, key: str, *args: Any, **kwargs: Any) -> Any:
        if "MANIFEST" in key:
            raise KeyboardInterrupt
        return real(self, key, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", interrupted)
        pending = ckpt.async_save(_state(2), str(root), step=2)
        with pytest.raises((KeyboardInterrupt, ckpt.CheckpointError)) as caught:
            pending.result()
        assert "KeyboardInterrupt" in f"{type(caught.value).__name__}: {caught.value}"
    ckpt.async_save(_state(3), str(root), step=3).result()
    assert _directories(root) == [1, 3]
    assert not list(root.rglob(".tmp-*"))
