"""Examples of other frameworks resume with the losses of a training that was not interrupted.

Method: each is run up to a step, which is no step of a save, and again up to a later one; and once
in whole. Losses are printed with all digits. Frameworks that shard models on accelerators alone get
a stand-in for one, `as_accelerator`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.judges, pytest.mark.timeout(900)]
STAND_IN = ("-m", "tests.judges.as_accelerator")


def losses(name: str, url: Path, ranks: int, last: int, *more: str) -> Mapping[int, str]:
    """What a run of an example says of its steps."""
    start = [sys.executable]
    if ranks:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    start += STAND_IN if name in ("trainer_sharded", "torchtitan_trainer") else ()
    path = ROOT / "examples" / "frameworks" / f"{name}.py"
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [*start, str(path), str(url), str(last), *more],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | own,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        int(step): loss for step, loss in re.findall(r"^step (\d+): loss (.+)$", done.stdout, re.M)
    }


@pytest.mark.parametrize(
    ("name", "library", "ranks", "more"),
    [
        ("accelerate_loop", "accelerate", 2, ()),
        ("lightning_sharded", "lightning", 2, ("fsdp1",)),
        ("lightning_sharded", "lightning", 2, ("fsdp2",)),
        ("pipeline", "torch", 2, ()),
        ("ray_train", "ray", 0, ()),
        ("recipe", "torch", 2, ()),
        ("torchtitan_trainer", "torchtitan", 1, ()),
        ("trainer_sharded", "transformers", 2, ("fsdp1",)),
        ("trainer_sharded", "transformers", 2, ("fsdp2",)),
        ("trl_sft", "trl", 0, ()),
    ],
)
def test_an_example_resumes_with_the_same_losses(
    name: str, library: str, ranks: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    whole = losses(name, tmp_path / "whole", ranks, 11, *more)
    assert [*whole] == [*range(1, 12)] and len({*whole.values()}) > 8
    begun = losses(name, tmp_path / "cut", ranks, 6, *more)
    assert [*begun] == [*range(1, 7)]
    resumed = losses(name, tmp_path / "cut", ranks, 11, *more)
    assert resumed == {step: whole[step] for step in resumed}
    # Lightning has saved step 4 last; these two print a history with the steps before the restart.
    first = {"lightning_sharded": 5, "trainer_sharded": 1, "trl_sft": 1}.get(name, 7)
    assert [*resumed] == [*range(first, 12)]


def test_a_pipeline_resumes_on_another_number_of_stages(tmp_path: Path) -> None:
    whole = losses("pipeline", tmp_path / "whole", 2, 11)
    losses("pipeline", tmp_path / "cut", 2, 6)
    resumed = losses("pipeline", tmp_path / "cut", 1, 11)
    assert resumed == {step: whole[step] for step in range(7, 12)}
