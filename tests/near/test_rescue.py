"""`ckpt rescue` and `ckpt ls --near`: the directories of hosts without any process of the job.

Method: trainings whose hosts are folders end; the commands run on the folders, and what they made
durable is restored from the root alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.cli import main
from ckpt.service.policies import EverySteps
from storage.local import LocalStore
from tests.e2e.job import Job, state_at
from tests.near.test_near_training import data_files, flip_a_byte, folders, origins
from tests.near.training import Life


def trained(tmp_path: Path, steps: int, **how: Any) -> tuple[str, list[Path], list[str]]:
    """A root, the hosts of a job that trained there and is dead, and their near directories."""
    root, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 1)
    Life(2, LocalStore(root), hosts, **how).run(steps)
    return root, hosts, [str(host / "near") for host in hosts]


def test_a_near_state_becomes_durable_without_its_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, hosts, near = trained(tmp_path, 8, save=EverySteps(3))
    assert main(["rescue", *near, root, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["files"], report["passed_over"]) == (8, 2, [])
    assert [info.step for info in ckpt.list_steps(root)] == [3, 6, 8]
    assert ckpt.verify(root).ok
    for host in hosts:
        shutil.rmtree(host)
    life = Life(3, LocalStore(root), folders(tmp_path, 2, 2, 2))
    life.run(4)
    assert origins(life) == {("durable", 8)}
    # It is of the training's line: the next durable save continues it.
    assert main(["ls", root, "--json"]) == 0
    lines = {entry["line"] for entry in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert lines == {0}


def test_rescue_passes_over_damage_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, hosts, near = trained(tmp_path, 8)
    flip_a_byte(data_files(hosts[1])[-1])
    assert main(["rescue", *near, root]) == 0
    out = capsys.readouterr().out
    assert "skipped: step 8" in out and "step 6 (" in out
    assert [info.step for info in ckpt.list_steps(root)] == [6]
    assert main(["rescue", *near, root]) == 1
    assert "whole and newer" in capsys.readouterr().err


def test_rescue_uses_copies_of_lost_hosts_and_of_damaged_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 1, 2)

    def near(rank: int) -> ckpt.Near:
        return ckpt.Near(hosts[rank] / "near", every=EverySteps(2), replicas=2)

    Life(3, LocalStore(root), hosts, near=near).run(4)
    shutil.rmtree(hosts[0])
    newest = {path.name[:9]: path for path in data_files(hosts[1])}
    flip_a_byte(newest["rank00001"])
    # A header that cannot be read is as bad.
    newest["rank00000"].write_bytes(bytes(100) + newest["rank00000"].read_bytes()[100:])
    directories = [str(host / "near") for host in hosts[1:]]
    assert main(["ls", "--near", directories[0], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["ranks_here"]) for row in rows] == [(2, 3), (4, 3)]
    assert main(["rescue", *directories, root, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["passed_over"]) == (4, [])
    assert ckpt.verify(root).ok
    # Without a second copy, the damaged one ends it.
    assert main(["rescue", directories[0], str(root)]) == 1


def test_rescue_rebuilds_lost_and_damaged_files_from_parity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = folders(tmp_path, 0, 1, 1, 2)

    def near(rank: int) -> ckpt.Near:
        return ckpt.Near(hosts[rank] / "near", every=EverySteps(2), parity=2)

    for case in ("lost", "damaged"):
        root = str(tmp_path / case)
        Life(4, LocalStore(root), hosts, near=near).run(1)
        shutil.copytree(tmp_path / "host0", tmp_path / f"old {case}")
        Life(4, LocalStore(root), hosts, near=near).run(4)
        if case == "lost":
            shutil.rmtree(hosts[1])
        else:
            (tier,) = [path for path in hosts[1].glob("near/*") if path.is_dir()]
            flip_a_byte(sorted(tier.glob("steps/00000004*/rank00002-000*"))[0])
        left = [
            str(tmp_path / f"host{n}" / "near")
            for n in (0, 1, 2)
            if (tmp_path / f"host{n}").exists()
        ]
        # Of two that are lost, the error names both.
        if case == "lost":
            assert main(["rescue", left[0], root]) == 1
            assert "parity rebuilds one host of a group of 3, and 2" in capsys.readouterr().err
        # A directory twice, and an older copy of it, change nothing.
        left = [*left, left[-1], str(tmp_path / f"old {case}" / "near")]
        assert main(["rescue", *left, root, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["step"], report["files"], report["passed_over"]) == (4, 4, [])
        assert ckpt.verify(root).ok
        for number in range(3):
            shutil.rmtree(tmp_path / f"host{number}", ignore_errors=True)
        life = Life(2, LocalStore(root), folders(tmp_path, 7, 7))
        life.run(0)
        assert origins(life) == {("durable", 4)}
        shutil.rmtree(tmp_path / "host7", ignore_errors=True)


def test_rescue_refuses_what_is_older_fenced_or_not_all_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, hosts, near = trained(tmp_path, 5, save=EverySteps(5))
    assert main(["rescue", *near, root]) == 1
    assert "newer than what" in capsys.readouterr().err
    Life(2, LocalStore(root), hosts).run(3)
    assert main(["rescue", near[0], root]) == 1
    assert "no directory has the files of 1 of 2 ranks: 1" in capsys.readouterr().err
    assert main(["rescue", *near, str(tmp_path / "elsewhere")]) == 1
    Job(2, lambda rank: LocalStore(root)).save(lambda rank: state_at(1, rank, 2), 1)
    assert main(["rescue", *near, root]) == 1
    assert [info.step for info in ckpt.list_steps(root)] == [5, 1]


def test_ls_near_shows_what_a_host_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, near = trained(tmp_path, 4)
    assert main(["ls", "--near", near[0], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["ranks"], row["ranks_here"]) for row in rows] == [
        (2, 2, 1),
        (4, 2, 1),
    ]
    assert main(["ls", "--near", near[0]]) == 0
    assert "1 of 2" in capsys.readouterr().out
    assert main(["ls", "--near", near[0] + "/nowhere"]) == 1
    for path in Path(near[0]).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert main(["ls", "--near", near[0]]) == 1
    assert "root " in capsys.readouterr().out
