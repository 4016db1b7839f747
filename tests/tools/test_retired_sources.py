"""A training retires the checkpoint that a tool reads meanwhile.

Retention by a rule leaves it, because the tool has a lease. Where it is retired all the same while
it is resharded in its root, the latest is another one then, and this begins again with it; what was
requested by its step is an error. Retirement comes before anything is read, or after all is
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import ckpt.tools.reshard as resharding
from ckpt.cli import main
from ckpt.cli.commandline import OK, PROBLEM
from ckpt.commit.maintenance import Maintenance
from ckpt.errors import CheckpointError
from storage import StorageError, open_store
from storage.wrap import WrappedStore


def _save(url: str, step: int) -> None:
    ckpt.save({"x": torch.full((300,), float(step)), "step": step}, url, step=step)


def _retire_all_but_the_latest(url: str) -> None:
    store = open_store(url)
    *old, _ = ckpt.list_steps(url)
    maintenance = Maintenance.open(store)
    for info in old:
        maintenance.retire(info.attempt)
        for key in [one.key for one in store.list(f"steps/{info.step:08d}-")]:
            store.delete(key)


@pytest.mark.parametrize("moment", ["before it is read", "after it is written"])
@pytest.mark.parametrize("step", [None, 1])
def test_another_checkpoint_is_the_latest_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, step: int | None
) -> None:
    url = str(tmp_path / "run")
    _save(url, 1)
    rewrite, steps = resharding.rewrite, [2, 3]

    def as_training_goes_on(*args: Any, **kwargs: Any) -> Any:
        made = rewrite(*args, **kwargs) if moment == "after it is written" else None
        if steps:
            _save(url, steps.pop(0))
            _retire_all_but_the_latest(url)
        return rewrite(*args, **kwargs) if made is None else made

    monkeypatch.setattr(resharding, "rewrite", as_training_goes_on)
    if step is not None:
        with pytest.raises((CheckpointError, StorageError)):
            ckpt.reshard(url, ranks=2, step=step)
        return
    report = ckpt.reshard(url, ranks=2)
    assert report.steps == (3,) and not steps
    state = {"x": torch.zeros(300), "step": 0}
    ckpt.load(state, url, attempt=report.attempt)
    assert torch.all(state["x"] == 3) and state["step"] == 3


def test_another_place_has_files_of_the_one_that_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "run")
    _save(url, 1)
    rewrite = resharding.rewrite

    def as_training_goes_on(*args: Any, **kwargs: Any) -> Any:
        _save(url, 2)
        _retire_all_but_the_latest(url)
        return rewrite(*args, **kwargs)

    monkeypatch.setattr(resharding, "rewrite", as_training_goes_on)
    with pytest.raises((CheckpointError, StorageError)):
        ckpt.reshard(url, str(tmp_path / "copy"), ranks=2)
    assert ckpt.list_steps(url)[-1].step == 2


@pytest.mark.parametrize("operation", ["cp", "cp --root", "reshard", "verify", "export"])
def test_retention_leaves_what_a_tool_reads(tmp_path: Path, operation: str) -> None:
    """A rule that keeps one checkpoint runs at every request of the tool to a data file."""
    url = str(tmp_path / "run")
    _save(url, 1)

    class Training(WrappedStore):
        saved = False

        def get_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
            if not self.saved:
                self.saved = True
                _save(url, 2)
            _keep_one(url)
            super().get_into(key, start, buffers)

    store, there = Training(open_store(url)), str(tmp_path / "there")
    if operation == "verify":
        report: Any = ckpt.verify(store)
        assert report.ok and report.step == 1
    elif operation == "export":
        ckpt.export(store, f"{there}.pt", optimizer=True)
        assert torch.load(f"{there}.pt")["step"] == 1
    elif operation == "reshard":
        assert ckpt.reshard(store, there, ranks=2).steps == (1,)
    else:
        report = ckpt.copy(store, there, root="--root" in operation)
        assert report.steps == (1,)
    assert store.saved
    _keep_one(url)
    assert [info.step for info in ckpt.list_steps(url)] == [2], "the lease has ended"


def _keep_one(url: str) -> None:
    arguments = ["prune", url, "--keep-last", "1", "--yes"]
    assert main(arguments) in (OK, PROBLEM)
