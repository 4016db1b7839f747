"""Every omission is named, and no honest training differs: `make judges`.

Method: as in `test_rehearse.py`, for each thing that `training.py` can forget, and for trainings of
other kinds, with all boundaries.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ckpt import operate
from ckpt.errors import InvalidArgument
from tests.rehearse.test_rehearse import TORCHRUN, forgotten, paths, rehearsed

HERE = Path(__file__).parent
pytestmark = [pytest.mark.judges, pytest.mark.timeout(900)]

__all__ = ["paths"]  # the fixture

NAMED = {
    "averaged": "averaged.n_averaged is not in the state",
    "buffers": "net.body.1.running_mean is not in the state",
    "curriculum": "curriculum.batches is not in the state: 0 instead of 5",
    "epoch": "sampler.epoch is not in the state: 0 instead of 1",
    "gradients": "is accumulated where the save is made, and not in the state",
    "loader": "iter(loader) draws from the random state of torch after the restore",
    "noise": "noise.generator is not in the state",
    "numpy": "the random state of numpy is not restored",
    "optimizer": "optimizer.param_groups.0.lr is not in the state",
    "position": "the position in the data: it reads what step 5 has read",
    "python": "the random state of python is not restored",
    "queue": "model.queue is not in the state",
    "scaler": "scaler.scale is not in the state: 8.0 instead of 16.0",
    "scheduler": "scheduler.last_epoch is not in the state: 0 instead of 2",
    "shadow": "shadow.body.0.weight is not in the state",
    "torch": "the random state of torch is not restored",
}


@pytest.mark.parametrize("what", NAMED)
def test_an_omission_is_named(what: str, tmp_path: Path) -> None:
    text = forgotten(rehearsed(tmp_path, what, kill=["after the save"]))
    assert NAMED[what] in text
    # And nothing that is saved: one cause has a few lines at most.
    assert len(text.splitlines()) <= 3, text


def test_a_torn_file_of_a_save_by_hand_is_an_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    honest = (HERE / "honest" / "by_hand.py").read_text(encoding="utf-8")
    script.write_text(honest.replace("f'{path}.new'", "path").replace('f"{path}.new"', "path"))
    report = rehearsed(tmp_path, script=script, kill=["in the save"])
    assert report.difference is not None and "it failed" in report.difference.differs["end"]


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("accelerated", "accelerate"),
        ("adversaries", "torch"),
        ("by_hand", "torch"),
        ("hf_trainer", "transformers"),
        ("with_lightning", "lightning"),
        ("workers", "torchdata"),
    ],
)
def test_an_honest_training_of_another_kind_is_the_same(
    name: str, library: str, tmp_path: Path
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    report = rehearsed(tmp_path, script=HERE / "honest" / f"{name}.py")
    assert report.difference is None, report.difference


@pytest.mark.parametrize("name", ["tests/rehearse/training.py", "examples/train_service.py"])
def test_an_honest_training_of_several_ranks_is_the_same(name: str, tmp_path: Path) -> None:
    script = HERE.parents[1] / name
    report = rehearsed(tmp_path, start=[*TORCHRUN, "2"], script=script)
    assert report.difference is None, report.difference
    assert report.runs[-1].ranks == 1 and report.runs[-1].what == "resumed on 1 ranks"


def test_two_runs_that_differ_prove_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (HERE / "honest" / "adversaries.py").read_text(encoding="utf-8")
    script.write_text(text.replace("torch.manual_seed(0)", "torch.seed()"))
    with pytest.raises(InvalidArgument, match="differ in step 1"):
        operate.rehearse([sys.executable, str(script), str(tmp_path / "real")])
