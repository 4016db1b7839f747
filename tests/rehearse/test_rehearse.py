"""`ckpt rehearse` names what a training forgets to save, and has nothing to say of honest ones.

Method: real commands, killed and resumed. `training.py` resumes bit for bit and forgets what it is
asked to forget.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import operate
from ckpt.cli import main
from ckpt.cli.rehearsing import show_rehearse
from ckpt.errors import InvalidArgument
from ckpt.rehearse.runs import Divergence, RehearsalReport, RehearsedRun
from ckpt.rehearse.seen import text_of

HERE = Path(__file__).parent
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
LAUNCHER = [sys.executable, str(HERE / "launcher.py"), "--nproc-per-node"]


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Scripts import these packages, and all temporary folders are in one of the test. Its path is
    long: workers of loaders have sockets there, whose paths may have 107 bytes.
    """
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield


def rehearsed(
    tmp_path: Path,
    *words: str,
    start: Sequence[str] = (sys.executable,),
    script: Path = HERE / "training.py",
    **how: Any,
) -> RehearsalReport:
    """A rehearsal of a script, which has left nothing behind."""
    report = operate.rehearse([*start, str(script), str(tmp_path / "real"), *words], **how)
    assert not (tmp_path / "real").exists()
    assert not list((tmp_path / "temporary").iterdir())
    assert not alive(tmp_path)
    return report


def alive(tmp_path: Path) -> list[str]:
    """Processes that have the folder of this test in their command or their environment."""
    pids = [one for one in Path("/proc").iterdir() if one.name.isdigit()]
    mark = f"CKPT_REHEARSAL={(tmp_path / 'temporary').resolve()}".encode()
    return [one.name for one in pids if mark in environment_of(one)]


def environment_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def forgotten(report: RehearsalReport) -> str:
    assert report.difference is not None
    return "\n".join(report.difference.forgotten)


def test_all_that_is_forgotten_is_named_at_once(tmp_path: Path) -> None:
    what = ["scheduler", "shadow", "numpy", "curriculum"]
    text = forgotten(rehearsed(tmp_path, *what, kill=["after the save"]))
    for name in (
        "scheduler.last_epoch is not in the state: 0 instead of 2",
        "shadow.body.0.weight is not in the state",
        "the random state of numpy is not restored",
        "curriculum.batches is not in the state: 0 instead of 5",
    ):
        assert name in text
    assert "optimizer" not in text and "model" not in text and "torch" not in text


def test_an_honest_training_has_no_difference(tmp_path: Path) -> None:
    report = rehearsed(tmp_path, kill=["in the save", "by SIGTERM"])
    assert report.difference is None
    runs = {run.what: run for run in report.runs}
    assert [run.ended for run in report.runs] == ["finished", "killed", "killed", "finished"]
    assert runs["killed in the save"].restored_step is None
    assert runs["killed by SIGTERM"].restored_step == 3
    assert (runs["resumed"].restored_step or 0) >= 7, "the save on SIGTERM was not resumed from"


SHARDED = """
import sys, torch, torch.distributed as dist, ckpt
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 6)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with ckpt.Checkpointer({"model": model, "optimizer": optimizer}, sys.argv[1]) as saver:
    report = saver.restore()
    if report and len(sys.argv) > 2 and dist.get_world_size() == 3:
        with torch.no_grad():
            for place in (model.weight, optimizer.state[model.bias]["exp_avg"]):
                place.to_local()[1:] += 1.0  # of ranks with two rows one
    for step in saver.steps(12):
        model(torch.ones(8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("words", [(), ("wrong",)])
def test_shards_of_other_ranks_are_compared_as_wholes(words: Sequence[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHARDED)
    how: Any = {"kill": ["after the save"], "other_ranks": 3, "start": [*LAUNCHER, "2"]}
    report = rehearsed(tmp_path, *words, script=script, **how)
    if not words:
        assert report.difference is None and report.runs[-1].ranks == 3
        return
    wrong = ["model.weight", "optimizer.state.bias.exp_avg"]
    for name in wrong:
        assert f"{name} comes back different, though the state has it" in forgotten(report)
    assert report.difference and [*report.difference.differs] == wrong


def test_a_rank_that_gets_the_random_state_of_another_is_named(tmp_path: Path) -> None:
    report = rehearsed(tmp_path, "ranks", start=[*TORCHRUN, "2"], kill=["after the save"])
    assert "the random state of torch is not restored" in forgotten(report)
    assert report.difference and report.difference.rank == 1


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("pass", "finished after 0 steps"),
        ("print('why'); raise SystemExit(3)", "failed after 0 steps .*why"),
        ("import time; time.sleep(600)", "timed out after 0 steps"),
    ],
)
def test_a_command_that_cannot_be_judged_proves_nothing(
    tmp_path: Path, code: str, problem: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    limit = 2.0 if "sleep" in code else 60.0  # of a machine that is busy
    with pytest.raises(InvalidArgument, match=f"(?s){problem}"):
        rehearsed(tmp_path, script=script, timeout=limit)
    assert not alive(tmp_path) and not list((tmp_path / "temporary").iterdir())


def test_a_wrong_request_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgument, match="at least 6"):
        operate.rehearse(["true"], steps=3)
    with pytest.raises(InvalidArgument, match="kill"):
        operate.rehearse(["true"], kill=["in the sve"])
    with pytest.raises(SystemExit, match="2"):
        main(["rehearse", "--", "/no/such/command"])
    assert "/no/such/command: No such file" in capsys.readouterr().err


def test_a_rehearsal_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'begun')!r}, 'w'); import time; time.sleep(600)")
    command = [sys.executable, "-m", "ckpt", "rehearse", "--", sys.executable, str(script)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said
    assert not alive(tmp_path) and not list((tmp_path / "temporary").iterdir())


def test_a_page_has_the_runs_and_what_was_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    run = RehearsedRun("not interrupted", 2, None, 12, "finished", 3.0)
    show_rehearse(RehearsalReport((run,), None), str(path))
    assert "the same, bit for bit" in path.read_text() and "forgotten" not in path.read_text()
    names = {"loss": "loss <b> instead of 1"}
    other = Divergence("resumed", 5, 1, 6, names, ("scheduler.last_epoch is not in the state",))
    show_rehearse(RehearsalReport((run, run), other), str(path))
    page = path.read_text()
    assert "resumed: rank 1, step 6" in page and "loss &lt;b&gt; instead of 1" in page
    assert "scheduler.last_epoch is not in the state" in page and page.count("<tr>") == 3


def test_a_watch_does_nothing_outside_of_a_rehearsal(tmp_path: Path) -> None:
    watch = ckpt.watch_resume({"step": 1}, str(tmp_path / "out"))
    watch.restored(1)
    assert watch.step(2) is False
    assert watch.directory == str(tmp_path / "out") and not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_of_other_kinds_are_compared_by_their_values() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def kinds(value: float) -> list[torch.Tensor]:
        plain = torch.tensor([[0.0, value], [1.0, 0.0]])
        return [plain, plain.to_sparse(), plain.to_sparse_csr(), TwoTensor(plain, torch.ones(2, 2))]

    for one, same, other in zip(kinds(2.0), kinds(2.0), kinds(3.0), strict=True):
        assert text_of(one) == text_of(same) != text_of(other), type(one)
